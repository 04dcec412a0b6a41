"""Who holds keys, and who waits for them: what the server's own tables tell at this moment.

For people and dashboards, never for decisions: what is told may be over when it arrives. Relies on nothing that the
locks leave behind: PostgreSQL's ``pg_locks``, MySQL's ``performance_schema``, MariaDB's ``information_schema``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from sqlalchemy import literal, select
from sqlalchemy.engine import Connection, IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl, RowsOperation, shaped_rows
from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.errors import Unsupported
from sqlalchemy_locks.keys import as_key
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.values import KeyHolder, KeyWaiter


class _Holders(OperationImpl):
    name = "lock.holders"
    writes = False

    def __init__(self, some: bool) -> None:
        super().__init__()
        self.some = some

    def build(self, context: BuildContext) -> Executable | None:
        asking = context.backend.held_keys
        return None if asking is None else asking(context.tables.locked_keys, self.some)

    def several(self, context: BuildContext) -> str:
        return _not_told(context, context.backend.untold)

    def run(self, execution: Execution) -> Any:
        statement = self.statement(execution.context)
        if statement is None:
            raise Unsupported(self.several(execution.context))
        try:
            rows = execution.execute(statement).all()
        except DBAPIError as error:
            why = execution.backend.blind(error)
            if why is None:
                raise
            raise Unsupported(_not_told(execution.context, why)) from error
        names: Mapping[int, Any] = execution.values.get("names", {})
        return IteratorResult(SimpleResultMetaData(["holder"]), iter([(one,) for one in _told(rows, names)]))


def _not_told(context: BuildContext, why: str) -> str:
    return f"who holds a key is not told on {context.backend.name}, {why}"


def _told(rows: Iterable[Any], names: Mapping[int, Any]) -> list[KeyHolder]:
    """The holders, each with those who wait for its key; a session that has a key twice is told once."""
    held: dict[Any, Any] = {}
    waiting: dict[int, list[KeyWaiter]] = {}
    for row in rows:
        if row.granted:
            # a prepared transaction has no session
            one = (row.key, row.session if row.session is not None else object())
            if one not in held or row.mode == "exclusive":
                held[one] = row
        else:
            waiting.setdefault(row.key, []).append(
                KeyWaiter(row.mode, row.session, row.owner, row.user, row.host, utc(row.since), _numbers(row.waits_for))
            )
    return [
        KeyHolder(
            name=names.get(row.key, row.key),
            owner=row.owner,
            since=utc(row.since),
            key=row.key,
            mode=row.mode,
            session=row.session,
            user=row.user,
            host=row.host,
            state=row.state,
            waiting=tuple(waiting.get(row.key, ())),
        )
        for row in held.values()
    ]


def holders_now(connection: Connection, names: Iterable[str | int]) -> tuple[KeyHolder, ...]:
    """Who holds these, for the sentence of an error: what can be told within a second, and nothing instead of failing.

    In a transaction of the connection's own, which the caller ends.
    """
    engine = backend_for(connection.dialect)
    if engine.held_keys is not None:
        with contextlib.suppress(Exception), engine.brief(connection):
            return tuple(connection.execute(holders(*names)).scalars())
    return ()


def _numbers(listed: Any) -> tuple[int, ...]:
    # an array, or on MySQL and MariaDB a text
    numbers = listed.split(",") if isinstance(listed, str) else listed or ()
    return tuple(sorted({int(number) for number in numbers}))


_ALL, _SOME = _Holders(some=False), _Holders(some=True)


@shaped_rows(select(literal(cast("KeyHolder", None))))
def holders(*names: str | int) -> RowsOperation[Any]:
    """Who holds keys at this moment, since when, and who waits for them.

    :param names: as in :func:`sqlalchemy_locks.lock.exclusive`; without any, every key that is held.
    :return: a :class:`~sqlalchemy_locks.KeyHolder` for each holder of a key, with those who wait. Only who was asked
        about has a name there: a name is stored nowhere, its key is.
    :raises Unsupported: on SQLite and YugabyteDB, and where PostgreSQL has the table bodies; on MySQL for a user who
        has no SELECT on ``performance_schema``, on MariaDB without the privilege ``PROCESS``.

    PostgreSQL tells every holder; of other users' sessions no more than their number, unless the role is a member of
    ``pg_read_all_stats``. MySQL doesn't tell of a brand-new key before somebody waits for it, MariaDB of no key before.

    >>> for holder in locks.run(sl.lock.holders("invoice:42")):
    ...     print(holder, holder.mode, len(holder.waiting))
    """
    if not names:
        return RowsOperation(_ALL, {})
    asked = {as_key(name): name for name in names}
    return RowsOperation(_SOME, {"keys": list(asked), "names": asked})
