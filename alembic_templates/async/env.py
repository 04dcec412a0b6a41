import asyncio
from logging.config import fileConfig
from typing import Any

from alembic import context
from sqlalchemy import pool
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import async_engine_from_config

# Imported before context.configure(): this also registers Alembic's support for yugabytedb:// URLs.
from sqlalchemy_locks.alembic import include_name, migration_lock, own_branch

config = context.config

if config.config_file_name is not None:
    fileConfig(config.config_file_name)

# For autogenerate, the MetaData of your models:
# from myapp.models import Base
# target_metadata = Base.metadata
target_metadata = None

options: dict[str, Any] = {
    "target_metadata": target_metadata,
    # Keeps autogenerate from dropping the tables of the locks. A filter of your own calls it.
    "include_name": include_name,
    # Puts new revisions into your branch and folder, not into the library's.
    "process_revision_directives": own_branch,
    # Where DDL commits by itself (YugabyteDB behind a postgresql:// URL), a failure must not roll back
    # the version rows of earlier revisions.
    "transaction_per_migration": True,
}


def run_migrations_offline() -> None:
    """Write SQL to the standard output; no database is needed."""
    context.configure(
        url=config.get_main_option("sqlalchemy.url"),
        literal_binds=True,
        dialect_opts={"paramstyle": "named"},
        **options,
    )

    with context.begin_transaction():
        context.run_migrations()


def do_run_migrations(connection: Connection) -> None:
    # One process migrates at a time, others wait; required=False: where there is no such lock, a warning.
    with migration_lock(connection, timeout=600, required=False):
        context.configure(connection=connection, **options)

        with context.begin_transaction():
            context.run_migrations()


async def run_async_migrations() -> None:
    connectable = async_engine_from_config(
        config.get_section(config.config_ini_section, {}), prefix="sqlalchemy.", poolclass=pool.NullPool
    )

    async with connectable.connect() as connection:
        await connection.run_sync(do_run_migrations)

    await connectable.dispose()


def run_migrations_online() -> None:
    """Run the migrations on the database."""
    asyncio.run(run_async_migrations())


if context.is_offline_mode():
    run_migrations_offline()
else:
    run_migrations_online()
