"""Autogenerate doesn't change this library's tables, nor `alembic revision` its branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import alembic
import pytest
import sqlalchemy as sa
import sqlalchemy_locks.alembic_templates
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import URL
from sqlalchemy.orm import DeclarativeBase, Session

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic import check, include_name
from sqlalchemy_locks.alembic.steps import STEPS
from tests.alembic.project import Fresh, Project, by_schema, connected, edit, run, tables

OURS = set(tables("postgresql"))
HEAD = f"sqlalchemy_locks_{STEPS[-1]}"
#: what is replaced in env.py by an app without tables
NO_TABLES = ("target_metadata = None", "import sqlalchemy\ntarget_metadata = sqlalchemy.MetaData()")


def proposed(url: URL, include: Any) -> set[str]:
    """What an autogenerate without any model would drop."""
    options: dict[str, Any] = {"include_schemas": by_schema(url)}
    if include is not None:
        options["include_name"] = include
    with connected(url) as connection:
        context = MigrationContext.configure(connection, opts=options)
        found: list[Any] = compare_metadata(context, sa.MetaData())
    assert {operation for operation, _ in found} <= {"remove_table", "remove_index"}
    return {thing.name for operation, thing in found if operation == "remove_table"} - {"alembic_version"}


@pytest.fixture
def table_mode(engine: tuple[str, str]) -> dict[str, str]:
    return {"locking": "table"} if engine[0].startswith("postgresql") else {}


def test_shipped_tables_are_not_dropped(url: URL, table_mode: dict[str, str], tmp_path: Path) -> None:
    """Other tables are still compared."""
    Project(tmp_path, url, "directives", **table_mode).upgrade()
    assert {name.removeprefix("lock_") for name in proposed(url, None)} == OURS
    assert proposed(url, include_name) == set()
    run(url, "CREATE TABLE lock_mine (id INT PRIMARY KEY)", "CREATE TABLE installed (id INT PRIMARY KEY)")
    expected = {"lock_mine", "installed"}
    if by_schema(url):
        run(url, "CREATE TABLE lock.orders (id INT PRIMARY KEY)")
        expected.add("orders")
    assert proposed(url, include_name) == expected


def revise(config: Config, **arguments: Any) -> Any:
    return command.revision(config, message="mine", **arguments)


def test_autogenerate_in_a_project(url: URL, tmp_path: Path) -> None:
    """With schema and prefix from the configuration, as in env.py; PostgreSQL's may be the default one."""
    schema = "public" if url.get_driver_name() == "psycopg2" else "elsewhere"
    project = Project(tmp_path, url, "revisions", schema=schema, prefix="my_")
    env, head = tmp_path / "env.py", "options: dict[str, Any] = {"
    edit(env, *NO_TABLES)
    edit(env, head, f"{head}'include_schemas': {by_schema(url)},")
    project.upgrade()
    script = revise(project.config, autogenerate=True)
    text = Path(script.path).read_text()
    assert "drop_table" not in text
    edit(env, '"include_name": include_name,', "")
    project.upgrade()
    assert "drop_table" in Path(revise(project.config, autogenerate=True).path).read_text()


@pytest.fixture
def sqlite(fresh: Fresh, tmp_path: Path) -> Project:
    """A project whose env.py every `alembic revision` runs."""
    project = Project(tmp_path, fresh("sqlite", "pysqlite"), "revisions")
    project.config.set_main_option("revision_environment", "true")
    return project


@pytest.mark.parametrize("autogenerate", [False, True])
def test_a_new_revision_goes_to_the_apps_branch_and_folder(sqlite: Project, tmp_path: Path, autogenerate: bool) -> None:
    if autogenerate:
        edit(tmp_path / "env.py", *NO_TABLES)
        sqlite.upgrade()
    first = revise(sqlite.config, autogenerate=autogenerate)
    sqlite.upgrade()
    second = revise(sqlite.config, autogenerate=autogenerate)
    sqlite.upgrade()
    assert first.down_revision is None
    assert second.down_revision == first.revision
    for script in (first, second):
        assert Path(script.path).parent == tmp_path / "versions"
    heads = ScriptDirectory.from_config(sqlite.config).get_heads()
    assert set(heads) == {second.revision, HEAD}


@pytest.mark.parametrize("joined", ["merged", "on top"])
def test_a_new_revision_continues_one_that_descends_from_the_shipped_ones(
    sqlite: Project, tmp_path: Path, joined: str
) -> None:
    if joined == "merged":
        revise(sqlite.config)
        head: Any = command.merge(sqlite.config, "heads")
    else:
        head = revise(sqlite.config, head=HEAD, version_path=str(tmp_path / "versions"))
    assert revise(sqlite.config).down_revision == head.revision
    sqlite.upgrade()


def test_two_branches_of_the_app_are_ambiguous(sqlite: Project, tmp_path: Path) -> None:
    for _ in range(2):
        revise(sqlite.config, head="base", version_path=str(tmp_path / "versions"))
    with pytest.raises(command.util.CommandError, match="Multiple heads"):
        revise(sqlite.config)


class Base(DeclarativeBase):
    pass


class Mail(sl.JobColumns, Base):
    __tablename__ = "mail"


class MailWorker(sl.WorkerColumns, Base):
    __tablename__ = "mail_worker"


OWN = """
import sqlalchemy_locks as sl
from sqlalchemy.orm import DeclarativeBase
class Base(DeclarativeBase): pass
class Mail(sl.JobColumns, Base):
    __tablename__ = "mail"
class MailWorker(sl.WorkerColumns, Base):
    __tablename__ = "mail_worker"
sl.Queue(Mail, workers=MailWorker).indexes({dialect!r})
target_metadata = [Base.metadata, sl.metadata(schema={schema!r})]
"""


def test_the_librarys_own_metadata_among_the_targets(url: URL, tmp_path: Path) -> None:
    """Compared with their defaults: after the first revision there is no difference, and a class's queue works."""
    # before 1.20 it compares MariaDB's `utc_timestamp(6)` with the parentheses that MySQL needs
    defaults = not url.drivername.startswith("mariadb") or tuple(map(int, alembic.__version__.split(".")[:2])) >= (
        1,
        20,
    )
    project = Project(tmp_path, url, "directives")
    schema = "lock" if by_schema(url) else None
    env = tmp_path / "env.py"
    options = (
        f"'include_schemas': {bool(schema)}, 'compare_server_default': {defaults}, 'version_table': 'alembic_version', "
    )
    edit(env, "target_metadata = None", OWN.format(dialect=url.get_backend_name(), schema=schema))
    edit(env, '"target_metadata":', options + '"target_metadata":')
    project.upgrade()
    made = Path(revise(project.config, autogenerate=True).path).read_text()
    assert "create_table('mail'" in made
    assert made.count("create_table(") == 2
    assert "drop_table" not in made.partition("def downgrade")[0]
    assert "sqlalchemy_locks.sql" not in made, "a revision imports SQLAlchemy's own types"
    project.upgrade()
    command.check(project.config)
    queue, engine = sl.Queue(Mail, workers=MailWorker), sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(queue.put({"a": 1}, 2))
        assert [job.payload for job in connection.execute(queue.capture(5))] == [{"a": 1}, 2]


def test_names_that_the_server_folds(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh("mariadb_lower", "mariadb+pymysql")
    project = Project(tmp_path, url, "revisions", prefix="Shop_")
    edit(tmp_path / "env.py", *NO_TABLES)
    project.upgrade()
    assert "drop_table" not in Path(revise(project.config, autogenerate=True).path).read_text()
    engine = sa.create_engine(url, poolclass=sa.NullPool, execution_options={"locks_prefix": "Shop_"})
    with engine.connect() as connection:
        assert "shop_installed" in sa.inspect(connection).get_table_names()
        assert check(connection, prefix="Shop_") == []
    locks = sl.Locks(engine)
    with locks.exclusive("a"), Session(engine) as session:
        assert session.scalar(sl.lock.try_exclusive("a")) is False
    assert locks.mutex.acquire("a")
    project.downgrade()
