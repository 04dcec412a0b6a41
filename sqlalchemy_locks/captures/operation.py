"""Capture: rows that nobody else holds are chosen, changed and handed over, and never to two at once.

The pattern: ``SELECT ... FOR UPDATE SKIP LOCKED`` and the UPDATE of what was found, as one act. Promised: never more
rows than ``limit``, never one that another session holds, and no waiting for one (SQLite apart, where whoever
writes waits for whoever writes); rows come in ``order_by`` order.

- *PostgreSQL, YugabyteDB*: one statement. What was locked is a CTE that carries the limit, because a subquery may be
  executed again for each row, and then captures more than it was told.
- *MySQL, MariaDB*: the locking SELECT, then an UPDATE by primary key alone, then a look at what is there now.
- *SQLite*: one UPDATE, under the database's write lock; with an order that the UPDATE itself changes, or that Python
  can't repeat, the same steps as on MySQL.

Any pattern that captures makes a :class:`Taking` of what it wants; the rest is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sqlalchemy import select, update
from sqlalchemy.engine import Dialect, IteratorResult, Result
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.sql import Executable

from sqlalchemy_locks.captures.ordering import directions, in_order, rearranged
from sqlalchemy_locks.captures.statements import (
    LIMIT,
    Taking,
    among,
    by_key,
    choosing,
    counting,
    criteria,
    give,
    keys_of,
    loading,
    ordered,
    spelt_out,
    still_there,
    updating,
)
from sqlalchemy_locks.core.operation import Body, Place, Run, execute_in_session
from sqlalchemy_locks.errors import LockLost, Unsupported
from sqlalchemy_locks.proof import proven
from sqlalchemy_locks.sql.elements import DeleteByKey, PlainReads, ReadCommitted


class Capture(Body):
    """Captures rows; made once for each pattern, or once for each :func:`capture`."""

    #: how many there were is all that is asked
    counts: ClassVar[bool] = False
    #: fewer than there are will do, where others are after the same rows
    fewer: ClassVar[bool] = False

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._taken: dict[Place, Taking] = {}
        self._loading: dict[Place, Any] = {}
        self._steps: dict[Place, tuple[Any, Any, Any]] = {}

    def taken(self, place: Place) -> Taking:
        """What is to be captured there."""
        raise NotImplementedError

    def taking(self, place: Place) -> Taking:
        if place not in self._taken:
            self._taken[place] = self.taken(place)
        return self._taken[place]

    def build(self, place: Place) -> Executable | None:
        return self._statement(place, self.taking(place))

    def shown(self, place: Place, dialect: Dialect, values: Mapping[str, Any]) -> Executable | None:
        # made anew, and its parameters given their values: a CTE is not looked into where an UPDATE refers to it
        statement: Any = self._statement(place, self.taken(place))
        if statement is not None:
            give(statement, dialect, values)
        return statement  # type: ignore[no-any-return]

    def _statement(self, place: Place, taking: Taking) -> Executable | None:
        match place.engine.locking:
            case "functions":
                return counting(taking) if self.counts else ordered(taking)
            case "file":
                if self.counts:
                    return None if taking.deletes else updating(taking, returning=False)
                return None if directions(taking) is None else updating(taking)
            case "rows":
                return None

    def because(self, place: Place) -> str:
        if place.engine.locking == "file":
            return "where rows in an order that the update changes are looked for first"
        return "which can't give back the rows that it updates"

    def check_connection(self, run: Run) -> None:
        super().check_connection(run)
        if run.engine.locking == "rows" and run.engine.autocommit(run.connection):
            raise run.engine.refuse_autocommit(self.name)

    def run(self, run: Run) -> Any:
        captured = self._file(run) if run.engine.locking == "file" else self._captured(run)
        taking = self.taking(run.place)
        if self.counts or not taking.proof or taking.mapper is None or run.session is None:
            return captured
        return proven(captured, taking)

    def _file(self, run: Run) -> Any:
        """Under the write lock, which a statement that begins with WITH doesn't take by itself."""
        with run.waiting(), run.engine.judging(run.connection):
            if not run.engine.began(run.connection):
                run.take_file(self.taking(run.place).table)
                if self.statement(run.place) is None and not run.engine.began(run.connection):
                    raise run.engine.refuse_autocommit(self.name)
            return self._captured(run)

    def _captured(self, run: Run) -> Any:
        taking = self.taking(run.place)
        statement: Any = self.statement(run.place)
        if self.counts:
            if statement is None:
                return len(self._in_steps(run, taking))
            found = run.execute(statement).scalars().all()
            return len(found) if run.engine.locking == "file" else found[0]
        if statement is None:
            return self._read(run, taking, self._in_steps(run, taking))
        if taking.joined and run.session is not None:
            positions = taking.positions
            rows = [tuple(row[n] for n in positions) for row in run.execute(statement)]
            return self._read(run, taking, rows)
        if taking.mapper is None or run.session is None:
            result: Result[Any] = run.execute(statement)
        else:
            if run.place not in self._loading:
                shape: Any = select(taking.entity).from_statement(statement)
                self._loading[run.place] = shape.execution_options(populate_existing=True)
            prepared = self._loading[run.place].options(*run.operation._with_options)
            result = execute_in_session(run, prepared, run.values)
        return in_order(result, taking, run) if run.engine.locking == "file" else result

    def _in_steps(self, run: Run, taking: Taking) -> list[tuple[Any, ...]]:
        """Lock, then update: the locks of the first make the second theirs alone. The keys, in order."""
        locking, changing, _ = self._made(run, taking)
        options = criteria(run.operation._with_options)
        if run.engine.locking == "rows" and not self._can_search_with_locks(run, taking):
            keys = self._search_then_lock(run, taking, options)
        else:
            if options:
                locking = choosing(taking, run.engine.locking, options)
            keys = [tuple(row)[: len(taking.keys)] for row in run.execute(locking)]
        if keys:
            if len(taking.table.primary_key) > 1:
                changing = spelt_out(_changing(taking), taking.table, keys)
            changed = run.execute(changing, {**run.values, **keys_of(taking.table, keys)})
            if changed.rowcount != len(keys):
                raise LockLost(f"{self.name} has locked {len(keys)} rows and changed {changed.rowcount}: roll back")
        return keys

    def _can_search_with_locks(self, run: Run, taking: Taking) -> bool:
        """InnoDB: whether the search locks what it takes, and nothing else."""
        level = run.read_committed or _read_committed(run, self.name)
        return level and run.engine.frees_passed and (taking.one_of is None or len(taking.one_of[1]) == 1)

    def _search_then_lock(self, run: Run, taking: Taking, options: Sequence[Any]) -> list[tuple[Any, ...]]:
        """InnoDB, where to search with locks would lock more than is taken.

        That is so above READ COMMITTED, where the gaps are locked, too, and others wait for them; where several
        indexed searches are merged; and on MariaDB, which keeps what it has passed by. So the search is without locks,
        and what it finds is locked by primary key, as far as it can still be taken.
        """
        limit: int = run.values[LIMIT]
        looking = choosing(taking, run.engine.locking, options, locks=False)
        keys: list[tuple[Any, ...]] = []
        tried: set[tuple[Any, ...]] = set()
        asked = 2 * limit
        while True:
            found = [tuple(row)[: len(taking.keys)] for row in run.execute(looking, {**run.values, LIMIT: asked})]
            # by what they are, not by their number: what comes before them may have changed since the last look
            new = [key for key in found if key not in tried]
            while new and len(keys) < limit and not (keys and self.fewer and asked > 2 * limit):
                these, new = new[: limit - len(keys)], new[limit - len(keys) :]
                tried.update(these)
                mine = {tuple(row) for row in run.execute(still_there(taking, these, options))}
                keys += [key for key in these if key in mine]
            if len(keys) >= limit or len(found) < asked or (keys and self.fewer):
                place = {key: number for number, key in enumerate(found)}
                return sorted(keys, key=lambda key: place.get(key, -1))
            asked *= 4

    def _made(self, run: Run, taking: Taking) -> tuple[Any, Any, Any]:
        """The steps: what locks, what changes, what reads; made once for each place."""
        if run.place not in self._steps:
            mine = among(taking.table)
            reading: Any = select(taking.entity).where(mine).execution_options(populate_existing=True)
            self._steps[run.place] = (
                choosing(taking, run.engine.locking),
                _changing(taking).where(mine),
                reading,
            )
        return self._steps[run.place]

    def _read(self, run: Run, taking: Taking, keys: Sequence[tuple[Any, ...]]) -> Any:
        """What the rows are now, in the order of the keys."""
        entities = taking.mapper is not None and run.session is not None
        if not keys:
            names = [taking.entity.__name__] if entities else [str(column.key) for column in taking.table.c]
            return IteratorResult(SimpleResultMetaData(names), iter(()))
        place = {key: number for number, key in enumerate(keys)}
        reading = self._made(run, taking)[2]
        values = {**run.values, **keys_of(taking.table, keys)}
        if not entities:
            positions = taking.positions
            found = run.execute(reading, values).freeze()
            return rearranged(found, lambda row: place[tuple(row[n] for n in positions)])
        target = taking.target
        assert target is not None
        result = execute_in_session(run, reading.options(*loading(run.operation._with_options, taking)), values)
        attributes = [str(target.key_of(column)) for column in taking.table.primary_key]
        found = result.unique().freeze()
        if len(found.data) != len(keys):
            raise LockLost(f"{self.name} has taken {len(keys)} rows and can read {len(found.data)}: roll back")
        return rearranged(found, lambda row: place[tuple(getattr(row[0], name) for name in attributes)])

    def route(self) -> dict[str, Any]:
        raise NotImplementedError


def _read_committed(run: Run, name: str) -> bool:
    level: Any = run.execute(select(ReadCommitted(), PlainReads()), {}).one()
    committed, plain = level
    if not plain:
        raise Unsupported(
            f"{name} is refused under SERIALIZABLE on {run.engine.name}, where whatever it reads is locked, and others "
            "wait for it: use READ COMMITTED, or Locks, which sees to that"
        )
    return bool(committed)


def _changing(taking: Taking) -> Any:
    if taking.deletes:
        return DeleteByKey(taking.table)
    return by_key(update(taking.table).values(taking.changed))
