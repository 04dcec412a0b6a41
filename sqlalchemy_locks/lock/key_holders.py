"""``lock.holders``: the holders of keys and their waiters, from the server's own tables.

For people and dashboards, never for decisions: the answer may be outdated when it arrives. It is read from PostgreSQL's
``pg_locks``, MySQL's ``performance_schema`` and MariaDB's ``information_schema``, not from anything that locks store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from sqlalchemy import literal, select, table, text
from sqlalchemy.engine import Connection, IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from sqlalchemy_locks.core.operation import BuildContext, Execution, OperationImpl, RowsOperation, installation
from sqlalchemy_locks.core.typing import shaped_rows
from sqlalchemy_locks.dialects.base import Meaning
from sqlalchemy_locks.errors import NotInstalled, Unsupported
from sqlalchemy_locks.keys import as_key, queue_beginning, queue_keys
from sqlalchemy_locks.sql.clock import utc
from sqlalchemy_locks.sql.elements import HOLDERS_UNAVAILABLE, HeldKeys
from sqlalchemy_locks.values import KeyHolder, KeyWaiter

#: the number of semaphores, the newest ones, whose queues of waiters are told from locks
_SEMAPHORES = 10_000
_REASONS: dict[Meaning | None, str] = {
    "denied": "to this user, which needs SELECT on performance_schema (MariaDB: the privilege PROCESS)",
    # a table of keys takes the place of the view
    "no column": "where the table bodies are installed, as on YugabyteDB: no table of the server lists row locks",
}


class _Holders(OperationImpl):
    name = "lock.holders"
    writes = False

    def __init__(self, of_keys: bool) -> None:
        super().__init__()
        self.of_keys = of_keys

    def build(self, context: BuildContext) -> Executable | None:
        return HeldKeys(context.tables.locked_keys, self.of_keys)

    def run(self, execution: Execution) -> Any:
        if not execution.server.lists_holders:
            raise Unsupported(
                f"{HOLDERS_UNAVAILABLE} on {execution.backend.name}, where no table of the server lists them"
            )
        try:
            statement = self.statement(execution.context)
            assert statement is not None
            database = {"database": execution.schema_map.get(None)}
            keys = execution.batches(execution.values["keys"]) if self.of_keys else ((),)
            rows = [row for batch in keys for row in execution.execute(statement, {"keys": batch, **database})]
        except DBAPIError as error:
            meaning = execution.backend.meaning(error)
            why = _REASONS.get(meaning)
            # on engines with schemas, access to the schema is denied, and the error says how to grant it
            if why is None or (meaning == "denied" and execution.backend.schemas):
                raise
            raise Unsupported(f"{HOLDERS_UNAVAILABLE} {why}") from error
        names = {key: (name, "lock") for key, name in execution.values.get("names", {}).items()}
        queues, engine = execution.backend.server_queues, execution.connection.engine
        if queues is not None and queues.sessions is not None and not self.of_keys:
            semaphores = table(execution.context.tables.semaphore.name, schema=execution.schema_map.get(None))
            table_name = engine.dialect.identifier_preparer.format_table(semaphores).replace(":", "\\:")
            listing = text(queues.sessions.format(semaphores=table_name, limit=_SEMAPHORES))
            beginning = {"queue_beginning": queue_beginning(installation(engine))}
            try:
                sessions = execution.execute(listing, beginning).all()
            except (DBAPIError, NotInstalled) as error:
                # a user who may read the keys may have no SELECT on the semaphores
                if isinstance(error, DBAPIError) and execution.backend.meaning(error) != "denied":
                    raise
            else:
                names = {row.key: (row.name, row.kind) for row in sessions}
                rows += sessions
        elif rows and not self.of_keys:
            # here the key of a queue is listed like that of a lock
            sem = execution.context.tables.semaphore.c
            newest = select(sem.name, sem.on_demand).where(sem.capacity.is_not(None))
            named: Any = execution.execute(newest.order_by(sem.id.desc()).limit(_SEMAPHORES), {}).all()
            of_queues = queue_keys(installation(engine), (name for name, _ in named))
            kinds = ((name, "lease" if on_demand else "semaphore") for name, on_demand in named)
            names = dict(zip(of_queues, kinds, strict=True))
        holders = _with_waiters(rows, names)
        return IteratorResult(SimpleResultMetaData(["holder"]), iter([(holder,) for holder in holders]))


def _with_waiters(rows: Iterable[Any], names: Mapping[int, tuple[Any, str]]) -> list[KeyHolder]:
    """Return the holders, each with the waiters of its key; a session that holds a key twice is listed once.

    :param names: name and kind of keys.
    """
    holder_rows: dict[Any, Any] = {}
    waiting: dict[int, list[KeyWaiter]] = {}
    for row in rows:
        if row.granted:
            # a prepared transaction has no session
            holder = (row.key, row.session if row.session is not None else object())
            if holder not in holder_rows or row.mode == "exclusive":
                holder_rows[holder] = row
        else:
            waiter = (row.mode, row.session, row.owner, row.user, row.host)
            waits_for = tuple(sorted({int(number) for number in row.waits_for.split(",")})) if row.waits_for else ()
            waiting.setdefault(row.key, []).append(KeyWaiter(*waiter, utc(row.since), waits_for))
    holders = []
    for row in holder_rows.values():
        name, kind = names.get(row.key, (row.key, "lock"))
        since, waiters = utc(row.since), tuple(waiting.get(row.key, ()))
        session = (row.key, row.mode, row.session, row.user, row.host, row.state)
        holders.append(KeyHolder(name, row.owner, since, *session, waiters, cast("Any", kind)))
    return holders


def holders_now(connection: Connection, names: Iterable[str | int]) -> tuple[KeyHolder, ...]:
    """Return the holders of these keys for an error message; nothing if that fails.

    Begins a transaction on the connection, which the caller ends.
    """
    with contextlib.suppress(Exception):
        return tuple(connection.execute(holders(*names)).scalars())
    return ()


_OF_ALL_KEYS, _OF_KEYS = _Holders(of_keys=False), _Holders(of_keys=True)


@shaped_rows(select(literal(cast("KeyHolder", None))))
def holders(*names: str | int) -> RowsOperation[Any]:
    """Return the current holders of keys, since when each holds, and the waiters.

    :param names: as in :func:`sqlalchemy_locks.lock.exclusive`; without any, every key that is held.
    :return: a :class:`~sqlalchemy_locks.KeyHolder` for each holder of a key, with its waiters. Its ``name`` is the name
        given here, or else the key: names are not stored. Without names, the queues of waiters for permits are listed
        as well, by the name of the semaphore or lease; their ``kind`` says so.
    :raises Unsupported: on SQLite and YugabyteDB, and where PostgreSQL has the table bodies; on MySQL for a user
        without SELECT on ``performance_schema``, on MariaDB without the privilege ``PROCESS``.

    PostgreSQL lists every holder; of other users' sessions only their number, unless the role is a member of
    ``pg_read_all_stats``. MySQL lists every holder, MariaDB those that others wait for. In a queue for permits MariaDB
    doesn't tell since when the first waiter waits. It lists another waiter only if its driver sends the values in the
    text of the statement.
    Without SELECT on the table of semaphores, MySQL and MariaDB list no queues.

    >>> for holder in locks.run(sl.lock.holders("invoice:42")):
    ...     print(holder, holder.mode, len(holder.waiting))
    """
    if not names:
        return RowsOperation(_OF_ALL_KEYS, {})
    by_key = {as_key(name): name for name in names}
    return RowsOperation(_OF_KEYS, {"keys": list(by_key), "names": by_key})
