"""Tables of the app's own are shown with the shipped ones, and their jobs can be requeued."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime

import pytest
from sqlalchemy import Engine, String, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard
from sqlalchemy_locks.integrations.dashboard import queries
from sqlalchemy_locks.sql.clock import Instant, SecondsAgo
from tests.fixtures.parties import connected
from tests.integrations.dashboard.conftest import ENGINES, Door, MakeDoor
from tests.integrations.dashboard.test_actions import alice, said


class Base(DeclarativeBase):
    pass


class Mail(sl.JobColumns, Base):
    __tablename__ = "own_mail"


class Import(Base):
    __tablename__ = "own_import"
    name: Mapped[str] = mapped_column(String(50), primary_key=True)
    locked: Mapped[bool] = mapped_column(default=False)
    by: Mapped[str | None] = mapped_column(String(50))
    since: Mapped[datetime | None] = mapped_column(Instant())


class Report(Base):
    __tablename__ = "own_report"
    name: Mapped[str] = mapped_column(String(50), primary_key=True)
    last: Mapped[int] = mapped_column(default=0)


class Nowhere(sl.JobColumns, Base):
    __tablename__ = "own_nowhere"


MAIL = sl.Queue(Mail)
IMPORTS = sl.Mutex(Import, id=Import.name, acquired=Import.locked, owner=Import.by, acquired_at=Import.since)
REPORTS = sl.Timeout(Report, id=Report.name, ts=Report.last, every=3600)
OWN = {"post": MAIL, "imports": IMPORTS, "reports": REPORTS}


@pytest.fixture
def own(databases: Callable[[str], tuple[str, str]]) -> Iterator[Callable[[str], Engine]]:
    """The tables, with something in each: in the shipped queue there is one of the same name."""
    tables = [Mail.__table__, Import.__table__, Report.__table__]

    def make(name: str) -> Engine:
        engine = opened.enter_context(connected(databases(name)[0]))
        opened.callback(Base.metadata.drop_all, engine, tables)
        Base.metadata.create_all(engine, tables)
        locks = sl.Locks(engine)
        locks.run(MAIL.put("to die", queue="letters", max_attempts=1, priority=-1))
        locks.run(MAIL.put("to stall", "to wait", queue="letters"))
        dead, _ = locks.run(MAIL.capture(2, queue="letters", host="web-1"))
        locks.run(MAIL.fail(dead, error="it was"))
        with engine.begin() as connection:
            connection.execute(
                update(Mail)
                .where(Mail.failed_at.is_(None), Mail.started_at.is_not(None))
                .values(started_at=SecondsAgo(3600))
            )
        locks.run(IMPORTS.create("nightly"))
        assert locks.run(IMPORTS.acquire("nightly", owner="worker-3"))
        locks.run(REPORTS.create("weekly"))
        assert locks.run(REPORTS.acquire("weekly"))
        return engine

    with ExitStack() as opened:
        yield make


@pytest.mark.parametrize("engine", ENGINES)
def test_own_tables_are_shown_with_shipped_ones(engine: str, own: Callable[[str], Engine]) -> None:
    locks = sl.Locks(own(engine))
    look = queries.read_all(locks, own=OWN)
    (mail,) = [row for row in look.queues.rows if row["own"]]
    assert [mail[name] for name in ("own", "queue_id", "completed")] == ["post", "letters", None]
    assert [int(mail[name]) for name in ("waiting", "running", "stalled", "dead")] == [1, 1, 1, 1]
    assert [(row["queue_id"], row["line"]) for row in look.dead.rows if row["own"]] == [("letters", "it was")]
    (mutex,) = [row for row in look.mutexes.rows if row["own"]]
    assert [mutex[name] for name in ("own", "id", "owner")] == ["imports", "nightly", "worker-3"]
    assert mutex["age"] >= 0
    (timeout,) = [row for row in look.periods.rows if row["own"]]
    assert [timeout[name] for name in ("own", "id", "every", "free_in")] == ["reports", "weekly", None, None]
    assert [row for row in queries.read_all(locks).queues.rows if row["own"]] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_of_own_queues_are_requeued(engine: str, own: Callable[[str], Engine], door_to: MakeDoor) -> None:
    own(engine)
    page: Door = door_to(engine, "asgi", authorize=alice, secret="secret", own=OWN)
    token = page.token()
    for action, done in (("revive", "Revived 1 dead"), ("requeue", "Requeued 1 stalled")):
        answer = page.post(action, token=token, queue="letters", own="post")
        assert f"{done} job of &#39;letters&#39;" in said(page, answer)
    (stats,) = page.locks.run(MAIL.stats())
    assert (stats.waiting, stats.running, stats.dead) == (3, 0, 0)
    assert page.post("pause", token=token, queue="letters", own="post").status_code == 400
    assert not re.search(r'action="pause">((?!</form>).)*name="own" value="post"', page.text("/"), re.DOTALL)
    for name in ("imports", "another"):
        refused = page.post("requeue", token=token, queue="letters", own=name)
        assert refused.status_code == 400
        assert f"named &#39;{name}&#39;" in refused.text


def test_missing_own_table_hides_no_other(own: Callable[[str], Engine], door_to: MakeDoor, door: str) -> None:
    own("sqlite")
    text = door_to(door=door, own={**OWN, "n<o>where": sl.Queue(Nowhere)}).text()
    assert "n&lt;o&gt;where" in text
    assert "own_nowhere" in text
    for shown in ("post", "letters", "imports", "nightly", "reports", "weekly"):
        assert f">{shown}<" in text


@pytest.mark.parametrize("own", [{"": MAIL}, {"a": Mail}, {"a": sl.StateTransition()}])
def test_invalid_own_tables_are_refused(own: object) -> None:
    with pytest.raises(TypeError, match="own= maps names to a Queue, Mutex or Timeout"):
        dashboard.wsgi(lambda: sl.Locks, own=own)  # type: ignore[arg-type, return-value]
