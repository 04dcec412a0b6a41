"""``op.add_lock_columns``: adds the columns of locks to a table of the app that has rows."""

from __future__ import annotations

from typing import Any

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Boolean, Column, MetaData, NullPool, String, Table, create_engine, inspect, select
from sqlalchemy.orm import Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import ops as _registers  # noqa: F401
from tests.conftest import PLAIN, Servers
from tests.docs.pages import ROOT, blocks

EVERYTHING = {"retries": True, "queue": True, "fence": True, "token": True, "claim": True}


@pytest.mark.parametrize("engine_name", [*PLAIN])
def test_a_table_of_the_app_gets_columns(servers: Servers, engine_name: str) -> None:
    engine = create_engine(servers.fresh(engine_name, PLAIN[engine_name]), poolclass=NullPool)
    order = Table(
        "order", MetaData(), Column("id", String(40), primary_key=True), Column("locked", Boolean, nullable=False)
    )
    order.create(engine)
    with engine.begin() as connection:
        connection.execute(order.insert().values(id="a", locked=False))
        operations = Operations(MigrationContext.configure(connection))
        operations.add_lock_columns("order", **EVERYTHING)  # type: ignore[attr-defined]
    table = Table("order", MetaData(), autoload_with=engine)
    c = table.c
    mutex = sl.Mutex(
        table, id=c.id, acquired=c.locked, queue=c.queue_id, retries=c.retries_left, fence=c.fence, token=c.token
    )
    with Session(engine) as session:
        assert session.scalar(mutex.acquire_token("a", queue="default")) == 1
        assert session.scalar(mutex.acquire_token("a", queue="default")) is None
        assert session.scalar(mutex.set_retries("a", 0, queue="default")) is True
        session.commit()
    with engine.begin() as connection:
        # two names are two, whatever the collation of the table ignores
        names = connection.execute(select(c.id).where(c.queue_id.in_(["DEFAULT", "défault"])))
        assert names.all() == []
        operations = Operations(MigrationContext.configure(connection))
        operations.drop_lock_columns("order", **EVERYTHING)  # type: ignore[attr-defined]
    assert [column["name"] for column in inspect(engine).get_columns("order")] == ["id", "locked"]


def test_the_revision_of_the_docs_page_runs() -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "alembic.md") if block.mark == "columns")
    revision: dict[str, Any] = {}
    exec(block.text, revision)
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        connection.exec_driver_sql('CREATE TABLE "order" (id TEXT PRIMARY KEY)')
        with Operations.context(MigrationContext.configure(connection)):
            revision["upgrade"]()
            added = [column["name"] for column in inspect(connection).get_columns("order")]
            assert added == ["id", "retries_left", "queue_id", "fence"]
            revision["downgrade"]()
        assert [column["name"] for column in inspect(connection).get_columns("order")] == ["id"]
    engine.dispose()


@pytest.mark.parametrize("roles", [{}, {"retries": False}, {"fence": True, "fences": True}])
def test_a_call_without_known_columns_is_refused(roles: dict[str, bool]) -> None:
    operations: Any = Operations(MigrationContext.configure(dialect_name="sqlite", opts={"as_sql": True}))
    with pytest.raises(ValueError, match="name at least one column"):
        operations.add_lock_columns("order", **roles)
