"""Two steps, the second as in a later release: run together, one by one, and interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import URL

from sqlalchemy_locks.alembic import Refused, include_name, steps
from sqlalchemy_locks.health import examine
from tests.alembic.project import Project, by_schema, catalog, connected, drifts, installed, run, statements, table
from tests.fixtures import second_step

FIRST, SECOND = "0001", second_step.STEP


@pytest.fixture(autouse=True)
def _two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    second_step.add(monkeypatch)


def test_steps_one_by_one(url: URL, engine: tuple[str, str], tmp_path: Path) -> None:
    by = "directives" if engine[0] in ("yugabytedb", "mariadb") else "revisions"  # each door in each family
    project = Project(tmp_path, url, by, stepwise=True)
    project.upgrade(FIRST)
    first = catalog(url)
    assert installed(url) == [(FIRST, by)]
    assert drifts(url) == []
    project.upgrade(SECOND)
    second = catalog(url)
    assert second != first
    assert installed(url) == [(FIRST, by), (SECOND, by)]
    assert drifts(url) == []
    project.downgrade(FIRST)
    assert catalog(url) == first
    assert installed(url) == [(FIRST, by)]
    assert drifts(url) == []
    project.downgrade()
    assert catalog(url) == {}
    # run together, they do the same
    Project(tmp_path / "together", url, "directives").upgrade() if by == "directives" else project.upgrade()
    assert catalog(url) == second
    project.downgrade()
    assert catalog(url) == {}


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_a_range_has_the_steps_between_its_ends(dialect: str) -> None:
    both = statements(dialect, "upgrade")
    first, second = (statements(dialect, "upgrade", (step,)) for step in (FIRST, SECOND))
    assert both == first + second
    assert steps.between(FIRST, SECOND) == (SECOND,)
    assert steps.between("base", SECOND) == (FIRST, SECOND)
    with pytest.raises(Refused, match="not upwards"):
        steps.between(SECOND, FIRST)


def test_a_step_that_is_not_installed_is_no_drift_but_a_warning(url: URL, tmp_path: Path) -> None:
    Project(tmp_path, url, "directives", stepwise=True).upgrade(FIRST)
    assert drifts(url) == []
    with connected(url) as connection:
        (finding,) = (each for each in examine(connection) if each.subject == "installed")
    assert finding.level == "warning"
    assert "0002 is missing" in finding.says


def test_drift_is_judged_by_the_last_step_that_declares_it(url: URL, tmp_path: Path) -> None:
    Project(tmp_path, url, "directives").upgrade()
    note = table(url, "note")
    if by_schema(url):
        old = second_step.shipped("semaphore/semaphore_checked.sql")
        run(
            url,
            old,
            "ALTER TABLE lock.task_timeout DROP COLUMN note, DROP COLUMN token",
            "DROP FUNCTION lock.noted(text)",
        )
        assert drifts(url) == [
            "lock.task_timeout has lost its column token",
            "lock.task_timeout has lost its column note",
            "the body of lock.semaphore_checked(text, text) is not the one that was installed",
            "lock.noted(text) is missing",
        ]
        run(url, "ALTER TABLE lock.note DROP CONSTRAINT note_by_text")
        assert "lock.note has lost its index note_by_text" in drifts(url)
    else:
        run(url, f"DROP TABLE {note}")
        (sentence,) = drifts(url)
        assert sentence.endswith(f"{note}{sentence[0]} is missing")


def test_autogenerate_ignores_tables_of_every_step() -> None:
    for name in ("note", "task", "lock_note", "lock_task"):
        parents: dict[Any, str | None] = {"schema_name": None if name.startswith("lock_") else "lock"}
        assert not include_name(name, "table", parents)
    assert include_name("lock_notes", "table", {"schema_name": None})
