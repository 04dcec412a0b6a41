"""``sl.metadata()`` and the revisions describe the same schema: compared here, on real servers."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import NullPool, create_engine, inspect, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import check
from tests.conftest import PLAIN, Servers, install

PLACES = [
    ("postgresql15", "native"),
    ("postgresql15", "table"),
    ("postgresql18", "native"),
    ("yugabytedb", "native"),
    ("mysql", "native"),
    ("mariadb", "native"),
    ("sqlite", "native"),
]


def _only_ours(name: str | None, kind: str, parents: Any) -> bool:
    return kind != "schema" or name in ("lock", None)


@pytest.mark.parametrize(("engine_name", "locking"), PLACES)
def test_metadata_equals_the_migrated_schema(servers: Servers, engine_name: str, locking: str) -> None:
    url = servers.fresh(engine_name, PLAIN[engine_name])
    install(url, locking=locking)
    engine = create_engine(url, poolclass=NullPool)
    by_schema = engine_name in ("postgresql15", "postgresql18", "yugabytedb")
    rows = "table" if engine_name == "yugabytedb" else locking
    described = sl.metadata(schema="lock" if by_schema else None, locking=rows)
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_schemas": True, "include_name": _only_ours, "compare_type": True}
        )
        assert compare_metadata(context, described) == []
        # Alembic doesn't compare these: primary keys, in their order, and defaults
        for table in described.tables.values():
            key = inspect(connection).get_pk_constraint(table.name, table.schema)["constrained_columns"]
            assert key == [column.name for column in table.primary_key]
            found = {column["name"]: column for column in inspect(connection).get_columns(table.name, table.schema)}
            for column in table.columns:
                if column is not table.autoincrement_column:
                    assert (found[column.name]["default"] is None) is (column.server_default is None)


@pytest.mark.parametrize("engine_name", [*PLAIN])
def test_create_all_installs_everything_and_drop_all_removes_it(servers: Servers, engine_name: str) -> None:
    engine = create_engine(servers.fresh(engine_name, PLAIN[engine_name]), poolclass=NullPool)
    metadata = sl.metadata()
    metadata.create_all(engine)
    metadata.create_all(engine)
    with engine.connect() as connection:
        assert check(connection) == []
    with sl.Locks(engine).exclusive("a") as held:
        assert held.session.scalar(sl.lock.try_exclusive("b")) is True
    metadata.drop_all(engine)
    assert inspect(engine).get_table_names() == []
    if engine_name.startswith(("postgresql", "yugabytedb")):
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT to_regnamespace('lock')::text")) is None


def test_create_all_joins_the_transaction_it_is_given(servers: Servers) -> None:
    engine = create_engine(servers.fresh("postgresql15", "psycopg"), poolclass=NullPool)
    with engine.connect() as connection:
        sl.metadata(schema="app_locks").create_all(connection)
        assert "installed" in inspect(connection).get_table_names("app_locks")
        connection.rollback()
    assert inspect(engine).get_schema_names() == ["information_schema", "public"]


def test_what_it_would_ignore_is_refused() -> None:
    with pytest.raises(ValueError, match="locking"):
        sl.metadata(locking="rows")
    metadata, engine = sl.metadata(), create_engine("sqlite://")
    for given in ({"tables": []}, {"checkfirst": False}):
        for method in (metadata.create_all, metadata.drop_all):
            with pytest.raises(TypeError, match="leave out"):
                method(engine, **given)
