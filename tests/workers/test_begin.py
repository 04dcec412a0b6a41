"""A worker works in the schema that the app chooses when its transactions begin."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

import sqlalchemy_locks as sl


class Base(DeclarativeBase):
    pass


class Mail(sl.JobColumns, Base):
    __tablename__ = "mail"


class MailWorker(sl.WorkerColumns, Base):
    __tablename__ = "mail_worker"


mails = sl.Queue(Mail, workers=MailWorker, notify=False)


@pytest.fixture
def url(servers: Any) -> Any:
    """The driver's URL of a database with a job in a tenant's schema, and another one in the default schema."""
    url = servers.fresh("postgresql15", "psycopg")
    engine = create_engine(url)
    for schema in ("acme", "public"):
        tenant = engine.execution_options(schema_translate_map={None: schema})
        with tenant.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {schema}"))
            Base.metadata.create_all(connection)
            connection.execute(mails.put(schema, queue="tenant"))
    engine.dispose()
    return url


@pytest.mark.parametrize("kind", ["engine", "session", "async"])
def test_a_tenants_jobs_are_run(url: str, kind: str) -> None:
    done: list[Any] = []

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("SET LOCAL search_path TO acme")

    def after_begin(session: Any, transaction: Any, connection: Any) -> None:
        begin(connection)

    async def handler(job: Any) -> None:
        done.append(job.payload)

    async def main() -> None:
        bind = create_async_engine(url)
        event.listen(bind.sync_engine, "begin", begin)
        await sl.AsyncWorker(mails, handler, bind=bind, name="tenant").run(until_empty=True)
        await bind.dispose()

    if kind == "async":
        asyncio.run(main())
    else:
        engine: Engine = create_engine(url)
        target: Any = engine if kind == "engine" else Session
        listener: Any = begin if kind == "engine" else after_begin
        event.listen(target, "begin" if kind == "engine" else "after_begin", listener)
        try:
            sl.Worker(mails, lambda job: done.append(job.payload), bind=engine, name="tenant").run(until_empty=True)
        finally:
            event.remove(target, "begin" if kind == "engine" else "after_begin", listener)
            engine.dispose()
    assert done == ["acme"]
