"""Alembic's environment: an async engine, this app's models, and the locks beside them."""

import asyncio
from logging.config import fileConfig

from alembic import context
from backup.models import Base
from backup.settings import settings
from sqlalchemy import Connection, pool
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_locks.alembic import include_name, own_branch

if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)


def migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_name=include_name,
        process_revision_directives=own_branch,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def connect() -> None:
    engine = create_async_engine(settings.database_url, poolclass=pool.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


asyncio.run(connect())
