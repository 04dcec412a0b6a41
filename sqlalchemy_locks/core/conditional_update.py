"""One row, one conditional UPDATE: what mutexes and timeouts are made of.

Whoever's UPDATE finds the condition true has it: the database changes a row for one at a time, and the next one
finds the condition false. That holds at every isolation level, since an UPDATE reads the row as it is.

Rows are those of a shipped table, or of a user's own: ``Rows`` knows which column plays which role.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Literal

from sqlalchemy import Select, Update, and_, func, or_, select, true, update
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import Body, Operation, Place, Run
from sqlalchemy_locks.core.roles import ONE, At, Rows, bound, named, nonce_of, one, raised, retries_left
from sqlalchemy_locks.errors import LockTimeout, OutcomeUnknown, UnknownTask, Unsupported
from sqlalchemy_locks.sql.elements import ReadCommitted

Answer = Literal["whether", "token"]
_AS_IT_IS = contextlib.nullcontext()


class Conditional(Body):
    """One conditional UPDATE of one row; whether it changed anything is the answer."""

    #: ask a row again that was replaced while it was waited for: its condition can't be met by another's acquisition
    insists = True

    def __init__(self, rows: Rows, name: str) -> None:
        super().__init__()
        self.rows, self.name = rows, name
        self.needs_installation = rows.target is None
        self._ones: dict[Place, Executable] = {}
        self._probes: dict[Place, Select[Any]] = {}

    def condition(self, at: At) -> list[Any]:
        """What must be true of the row, besides being that row."""
        raise NotImplementedError

    def changes(self, at: At) -> dict[Any, Any]:
        """What the UPDATE sets."""
        raise NotImplementedError

    def build(self, place: Place) -> Executable | None:
        return self.one(place) if self.rows.unique else None

    def one(self, place: Place) -> Executable:
        """The UPDATE, made once for each place."""
        if place not in self._ones:
            self._ones[place] = self.made(place)
        return self._ones[place]

    def made(self, place: Place) -> Executable:
        """The UPDATE, with what it gives back."""
        return self.chosen(place, self.rows.at(place))

    def because(self, place: Place) -> str:
        return "where no unique constraint says that one id is one row, and that is looked at afterwards"

    def check_connection(self, run: Run) -> None:
        if not self.rows.unique and run.engine.autocommit(run.connection):
            raise run.engine.refuse_autocommit(self.name)

    def chosen(self, place: Place, at: At) -> Update:
        """The UPDATE of the row."""
        conditions = [*one(self.rows, at), *self.condition(at)]
        return update(at.table).where(and_(*conditions)).values(self.changes(at) | self.rows.bumped())

    def route(self) -> dict[str, Any]:
        return self.rows.route()

    def run(self, run: Run) -> Any:
        row: Any = None
        for _ in run.tries():
            answer = self.update(run)
            if not self.rows.unique:
                self._refuse_several(run)
            if answer:
                self.refresh(run)
                return answer
            row = self.probe(run)
            if not (self.insists and run.engine.misses_replaced and row.meant):
                break
        return self.otherwise(run, row)

    def update(self, run: Run) -> Any:
        """Run the UPDATE; what it tells of itself, falsy when no row was changed."""
        with self.waiting(run):
            return self.sent(run, self.one(run.place)) > 0

    def waiting(self, run: Run) -> contextlib.AbstractContextManager[None]:
        """Around the UPDATE: its wait is bounded, and what ends it is told apart, where that has to be asked for."""
        return _AS_IT_IS if run.wait is None and run.engine.locking != "file" else self._watched(run)

    @contextlib.contextmanager
    def _watched(self, run: Run) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            if run.wait is not None:
                around.enter_context(run.engine.bounded(run.connection, run.wait))
            if run.engine.locking == "file":
                around.enter_context(run.engine.judging(run.connection))
            yield

    def sent(self, run: Run, statement: Executable) -> int:
        changed: int = run.by_cursor(statement, run.values, attrgetter("rowcount"), plain=self.rows.target is None)
        return changed

    def refresh(self, run: Run) -> None:
        target = self.rows.target
        if target is not None and run.session is not None:
            at = self.rows.at(run.place)
            meant = {at[role]: run.values[named(role)] for role in ("queue", "id") if role in at}
            target.refresh(run.session, self.changes(at), meant)

    def probe(self, run: Run) -> Any:
        """The row that was not changed: its nonce and its flag, where there are such.

        :raises UnknownTask: when there is no such row.
        """
        at = self.rows.at(run.place)
        row = run.execute(self._probe(run.place), {named("nonce"): None, **run.values}).first()
        if row is None and not (run.engine.locking == "rows" and self._hidden(run, at)):
            raise UnknownTask(self.unknown(run))
        return row

    def _probe(self, place: Place) -> Select[Any]:
        if place not in self._probes:
            at = self.rows.at(place)
            told: Any = [at[role].label(role) for role in ("id", "fence", "acquired") if role in at]
            if "token" in at:
                # compared where the type is the column's own
                told.append((at["token"] == bound(at["token"], "nonce")).label("mine"))
            if self.insists and place.engine.misses_replaced:
                told.append(and_(true(), *self.condition(at)).label("meant"))
            probe: Any = select(*told).where(*one(self.rows, at))
            self._probes[place] = probe
        return self._probes[place]

    def _hidden(self, run: Run, at: At) -> bool:
        """Whether the row is there, though an old snapshot doesn't show it (InnoDB above READ COMMITTED)."""
        if run.read_committed or run.execute(select(ReadCommitted()), {}).scalar():
            return False
        probe = self._probe(run.place)
        values = {named("nonce"): None, **run.values}
        if run.execute(probe.with_for_update(read=True, skip_locked=True), values).first() is not None:
            return True
        try:
            return run.execute(probe.with_for_update(read=True, nowait=True), values).first() is not None
        except LockTimeout:
            return True  # somebody holds it, so it is there

    def otherwise(self, run: Run, row: Any) -> Any:
        """The answer when the condition was false."""
        return False

    def unknown(self, run: Run) -> str:
        where = f" in the queue {run.values[named('queue')]!r}" if named("queue") in run.values else ""
        return f"{self.name}: there is no {run.values[named('id')]!r}{where}; make it by create() first"

    def _refuse_several(self, run: Run) -> None:
        """Two rows of one id would be two locks of one name: where the model doesn't rule that out, look."""
        at = self.rows.at(run.place)
        found = run.execute(select(at["id"]).where(*one(self.rows, at)).limit(2)).all()
        if len(found) > 1:
            raise Unsupported(
                f"{self.name}: several rows of {at.table} have the id {run.values[named('id')]!r}, and each would be a "
                "lock of its own: give the column a unique constraint"
            )


class Acquire(Conditional):
    """An acquisition: it may cost a retry, leaves its nonce, and raises the fence."""

    def __init__(self, rows: Rows, name: str, answer: Answer, *, patient: Acquire | None = None) -> None:
        super().__init__(rows, name)
        self.answer = answer
        #: the same, waiting, for one that doesn't
        self.patient = patient
        self.impatient = patient is not None
        # whoever doesn't wait is refused by what a look still shows as free
        self.insists = patient is None
        self.refused = False if answer == "whether" else None

    def repeatable(self, operation: Operation[Any]) -> bool:
        return self.rows.has("token")

    def free(self, at: At) -> list[Any]:
        """What makes the row free to be acquired."""
        raise NotImplementedError

    def condition(self, at: At) -> list[Any]:
        return [*self.free(at), *self.allowed(at)]

    def allowed(self, at: At) -> list[Any]:
        """What every acquisition needs besides a free row."""
        conditions = retries_left(at)
        if "token" in at:
            # a first try whose connection died must not come into effect after the second has
            conditions.append(or_(at["token"].is_(None), at["token"] != bound(at["token"], "nonce")))
        return conditions

    def spent(self, at: At) -> dict[Any, Any]:
        """What every acquisition sets."""
        changes: dict[Any, Any] = {}
        if "retries" in at:
            changes[at["retries"]] = at["retries"] - ONE
        if "token" in at:
            changes[at["token"]] = bound(at["token"], "nonce")
        if "fence" in at:
            changes[at["fence"]] = raised(at["fence"])
        return changes

    def build(self, place: Place) -> Executable | None:
        if self.patient is not None and place.engine.locking != "functions":
            return None
        return super().build(place)

    def made(self, place: Place) -> Executable:
        at = self.rows.at(place)
        statement = self.chosen(place, at)
        if self.answer == "whether":
            return statement
        if place.engine.update_returning:
            return statement.returning(at["fence"])
        return statement.values({at["fence"]: func.last_insert_id(raised(at["fence"]))})

    def chosen(self, place: Place, at: At) -> Update:
        """The UPDATE of the row; where that can be said in it, of a row that nobody else is changing."""
        statement = super().chosen(place, at)
        if self.patient is None:
            return statement
        free = self._skipping(at).cte("locks_free")
        return statement.where(*(column == free.c[column.key] for column in at.table.primary_key))

    def given(self, run: Run) -> dict[str, Any]:
        """The values that each run brings anew."""
        return {named("nonce"): nonce_of(self.rows, run.nonce)} if self.rows.has("token") else {}

    def because(self, place: Place) -> str:
        if not self.rows.unique:
            return super().because(place)
        if place.engine.locking == "file":
            return "where the busy timeout is none while it runs"
        return "where the row is locked first, unless somebody else has it"

    def _skipping(self, at: At) -> Select[Any]:
        # not FOR UPDATE: a row that others refer to by a foreign key isn't taken
        found = select(*at.table.primary_key).where(*one(self.rows, at))
        return found.with_for_update(skip_locked=True, key_share=True)

    def update(self, run: Run) -> Any:
        run.values = {**run.values, **self.given(run)}
        # an earlier try, whose answer was lost, may be about to commit: its end is waited for
        if self.patient is not None and not run.again:
            return self._now(run, self.patient)
        with self.waiting(run):
            return self._answer(run, (self.patient or self).one(run.place))

    def _now(self, run: Run, patient: Acquire) -> Any:
        match run.engine.locking:
            case "functions":
                return self._answer(run, self.one(run.place))
            case "rows":
                if run.execute(self._skipping(self.rows.at(run.place))).first() is None:
                    return False
                return self._answer(run, patient.one(run.place))
            case "file":
                try:
                    with run.engine.bounded(run.connection, 0):
                        return self._answer(run, patient.one(run.place))
                except LockTimeout:
                    return False

    def _answer(self, run: Run, statement: Executable) -> Any:
        if self.answer == "whether":
            return self.sent(run, statement) > 0
        plain = self.rows.target is None
        if run.engine.update_returning:
            row = run.by_cursor(statement, run.values, _first, plain=plain)
            return None if row is None else row[0]
        changed, token = run.by_cursor(statement, run.values, attrgetter("rowcount", "lastrowid"), plain=plain)
        return token if changed else None

    def otherwise(self, run: Run, row: Any) -> Any:
        if row is not None and "mine" in row._fields and row.mine:
            if "acquired" in row._fields and not row.acquired:
                raise OutcomeUnknown(f"{self.name}: it was acquired, its answer was lost, and somebody has released it")
            return True if self.answer == "whether" else row.fence
        return self.refused


def _first(cursor: Any) -> Any:
    return cursor.fetchone()
