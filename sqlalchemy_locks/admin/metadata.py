"""The tables as a ``MetaData``: for ``create_all`` without an Alembic history, and for autogenerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, MetaData

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA, Tables


def metadata(*, schema: str | None = DEFAULT_SCHEMA, prefix: str = DEFAULT_PREFIX, locking: str = "native") -> MetaData:
    """Return a new ``MetaData`` of this library's tables.

    :param schema: their schema on PostgreSQL and YugabyteDB. ``None`` for autogenerate on the other engines, whose
        tables carry ``prefix`` instead; ``create_all`` selects the right one by itself.
    :param prefix: the prefix of the tables' names on MySQL, MariaDB and SQLite.
    :param locking: on PostgreSQL and YugabyteDB, ``"table"`` locks rows of a table, ``"advisory"`` advisory keys.
    :return: its ``create_all`` and ``drop_all`` do the same as the revisions, including functions and the view.
    :raises TypeError: :raises ValueError: for names that aren't strings or are empty, and for another ``locking``.

    >>> sl.metadata().create_all(engine)
    """
    if locking not in ("native", "advisory", "table"):
        raise ValueError(f"locking is 'native', 'advisory' or 'table', not {locking!r}")
    return _Metadata(
        None if schema is None else valid_name(schema, "a schema"), valid_name(prefix, "a prefix"), locking
    )


class _Metadata(MetaData):
    def __init__(self, schema: str | None, prefix: str, locking: str) -> None:
        super().__init__(schema=schema)
        self._options = {"schema": schema or DEFAULT_SCHEMA, "prefix": prefix, "locking": locking}
        tables = Tables(self, "" if schema else prefix)
        if schema and locking != "table":
            # a view over the server's own locks (on YugabyteDB a table, which autogenerate doesn't need)
            self.remove(tables.locked_keys)

    def create_all(self, bind: Any, tables: Any = None, checkfirst: Any = True) -> None:
        """Install everything, as the revisions do; existing objects stay."""
        _refuse_selection(tables, checkfirst)
        with _in_transaction(bind) as connection:
            _operations(connection).upgrade_locks(from_="base", to=_last_step(), **self._options)

    def drop_all(self, bind: Any, tables: Any = None, checkfirst: Any = True) -> None:
        """Remove everything, as the revisions' downgrade does, unless an Alembic history has installed it, too."""
        _refuse_selection(tables, checkfirst)
        with _in_transaction(bind) as connection:
            _operations(connection).downgrade_locks(from_=_last_step(), to="base", **self._options)


def _refuse_selection(tables: Any, checkfirst: Any) -> None:
    if tables is not None or not checkfirst:
        raise TypeError("sl.metadata() installs and removes all of its tables: leave out tables= and checkfirst=")


@contextmanager
def _in_transaction(bind: Engine | Connection) -> Iterator[Connection]:
    if isinstance(bind, Connection):
        yield bind
    else:
        with bind.begin() as connection:
            yield connection


def _operations(connection: Connection) -> Any:
    # imported here, since only an installation needs Alembic
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
    from sqlalchemy_locks.alembic.steps import NO_HISTORY

    return Operations(MigrationContext.configure(connection, opts=dict(NO_HISTORY)))


def _last_step() -> str:
    from sqlalchemy_locks.alembic.steps import STEPS

    return STEPS[-1]
