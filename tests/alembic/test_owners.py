"""Histories that share one installation, as each tenant's may: the last one that downgrades removes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import URL

import sqlalchemy_locks as sl
from tests.alembic.project import Fresh, Project, catalog, edit, execute, installed, run

_VERSION_TABLE = "'version_table': config.get_main_option('version_table'), "
_SEARCH_PATH = """
        connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS {0}")
        connection.exec_driver_sql("SET search_path TO {0}")
        connection.commit()
"""


def tenants(path: Path, url: URL, installed_by: str = "revisions") -> list[Project]:
    """Projects with a version table each."""
    projects = []
    for name in ("acme", "globex"):
        project = Project(path / name, url, installed_by)
        edit(path / name / "env.py", '"target_metadata":', f'{_VERSION_TABLE}"target_metadata":')
        project.config.set_main_option("version_table", f"alembic_{name}'s")
        projects.append(project)
    return projects


def put(url: URL) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    assert sl.Locks(engine).run(sl.Queue().put(1))


def test_a_downgrade_leaves_the_tables_of_another_history(url: URL, tmp_path: Path) -> None:
    acme, globex = tenants(tmp_path, url)
    acme.upgrade()
    globex.upgrade()
    both = catalog(url)
    put(url)
    with pytest.raises(Exception, match=r"(?i)duplicate|unique"):  # the driver's own
        execute(url, acme.script("downgrade"))
    acme.downgrade()
    put(url)
    assert catalog(url) == both
    assert len(installed(url)) == 1
    acme.upgrade()
    globex.downgrade()
    put(url)
    acme.downgrade()
    assert catalog(url) == {}


def test_directives_have_owners_too(fresh: Fresh, tmp_path: Path) -> None:
    acme, globex = tenants(tmp_path, url := fresh("sqlite", "pysqlite"), "directives")
    acme.upgrade()
    globex.upgrade()
    acme.downgrade()
    put(url)
    execute(url, globex.script("downgrade"))
    assert catalog(url) == {}


def test_schemas_of_tenants_by_search_path(postgresql: URL, tmp_path: Path) -> None:
    """Offline, too: the script finds the version table where the search_path leads."""
    projects = []
    for name in ("acme", "globex"):
        project = Project(tmp_path / name, postgresql, "directives")
        begin = "        context.configure(connection=connection"
        edit(tmp_path / name / "env.py", begin, _SEARCH_PATH.format(name) + begin)
        projects.append(project)
    acme, globex = projects
    acme.upgrade()
    run(postgresql, "CREATE SCHEMA globex")
    execute(postgresql, "SET search_path TO globex;" + globex.script())
    assert {owner for (owner,) in run(postgresql, "SELECT owner FROM lock.installed")} == {
        "acme.alembic_version",
        "globex.alembic_version",
    }
    acme.downgrade()
    put(postgresql)
    globex.downgrade()
    assert catalog(postgresql) == {}


def test_what_alembic_has_installed_stays_when_metadata_drops_its_own(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh("sqlite", "pysqlite")
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    sl.metadata().create_all(engine)
    project = Project(tmp_path, url, "directives")
    project.upgrade()
    sl.metadata().drop_all(engine)
    put(url)
    project.downgrade()
    assert catalog(url) == {}
