"""A migrated database: ``DATABASE_URL``, which must be an empty one, or a file of SQLite."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
_folder = tempfile.TemporaryDirectory()
os.environ.setdefault("DATABASE_URL", f"sqlite+aiosqlite:///{_folder.name}/backup.db?timeout=120")
os.environ["WAIT_SECONDS"] = "0"  # refuse without waiting
os.environ["SLOT_TTL"] = "3600"
os.environ.pop("LOCKS_ADMIN", None)
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session", autouse=True)
def migrated() -> Iterator[None]:
    from alembic import command
    from alembic.config import Config

    command.upgrade(Config(str(HERE / "alembic.ini")), "heads")
    yield
    _folder.cleanup()
