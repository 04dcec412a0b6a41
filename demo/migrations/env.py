"""How Alembic reaches the demo's database: our template's ``env.py``, online only."""

from logging.config import fileConfig

from alembic import context
from sqlalchemy import NullPool, create_engine

from demo.database import Base
from sqlalchemy_locks.alembic import include_name, own_branch

config = context.config
assert config.config_file_name is not None
fileConfig(config.config_file_name, disable_existing_loggers=False)

url = config.get_main_option("sqlalchemy.url")
assert url is not None
with create_engine(url, poolclass=NullPool).connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_name=include_name,
        process_revision_directives=own_branch,
        transaction_per_migration=True,
    )
    with context.begin_transaction():
        context.run_migrations()
