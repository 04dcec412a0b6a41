"""What is read, on each kind of server, and that every part of it is on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, insert, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.integrations.dashboard import queries
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.semaphore.queries import oldest_holders
from sqlalchemy_locks.sql.clock import Ago
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import connected
from tests.integrations.dashboard.conftest import ENGINES, MakeDoor
from tests.integrations.dashboard.scene import contended, play


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Engine]:
    """In which the scene is played."""
    url = servers.fresh(request.param, PLAIN[request.param])
    install(url)
    made = create_engine(url)
    play(made)
    yield made
    made.dispose()


def test_semaphores_and_their_holders(engine: Engine) -> None:
    look = queries.look(sl.Locks(engine))
    rows = {row["name"]: row for row in look.semaphores.rows}
    assert list(rows) == ["api-calls", "backup-slots", "gpu", "pdf-renderer", "warehouse-sync"]
    assert {name: (row["used"], row["capacity"]) for name, row in rows.items()} == {
        "api-calls": (30, 40),
        "backup-slots": (5, 6),
        "gpu": (4, 4),
        "pdf-renderer": (1, 8),
        "warehouse-sync": (0, 1),
    }
    people = rows["backup-slots"]["people"]
    assert [one["owner"] for one in people][:2] == ["db-3.example.org", "db-1.example.org"]
    assert [one["permits"] for one in people] == [1, 1, 2, 1]
    assert 8_100 <= people[0]["age"] < 8_100 + 900
    assert 14_400 - 8_100 - 900 < people[0]["left"] <= 14_400 - 8_100
    assert rows["gpu"]["people"][0]["left"] is None
    (late,) = rows["pdf-renderer"]["people"]
    assert late["expired"]
    assert late["left"] <= -599
    assert not any(one["expired"] for one in people)


def test_permits_by_age(engine: Engine) -> None:
    found = queries.look(sl.Locks(engine)).ages.rows
    assert found["total"] == 40
    assert found["expired"] >= 1
    counts = {label: count for label, count, _ in found["bars"]}
    assert list(counts) == ["under 1 min", "1 min – 10 min", "10 min – 1 h", "1 h – 6 h", "6 h – 24 h", "24 h and more"]
    assert counts["1 h – 6 h"] == 5
    assert counts["10 min – 1 h"] == 4
    assert counts["24 h and more"] == 0


def test_queues(engine: Engine) -> None:
    look = queries.look(sl.Locks(engine))
    rows = {row["queue_id"]: row for row in look.queues.rows}
    assert list(rows) == ["invoices", "mail", "reports"]
    mail = rows["mail"]
    assert [int(mail[state]) for state in ("waiting", "scheduled", "running", "stalled", "dead")] == [132, 40, 8, 1, 3]
    assert mail["well"] == 7
    assert mail["late"] >= 140
    assert rows["reports"]["late"] is None
    lately = look.lately.rows
    # a minute of them may have left the hour meanwhile, or more on a machine that stands still
    assert 0 < sum(row["done"] for row in rows.values()) == lately["total"] <= 864
    assert (len(lately["minutes"]), lately["capped"]) == (60, False)
    assert 1 < lately["peak"] < 60


def test_completed_jobs_are_counted_from_the_newest(engine: Engine) -> None:
    locks = sl.Locks(engine)
    every = locks.run(activity.completed(3600, 100_000))
    some = locks.run(activity.completed(3600, 10))
    assert sum(int(row.completed) for row in some) == 10
    newest = min(int(row.minute) for row in every)
    assert all(int(row.minute) - newest <= 2 for row in some)
    assert locks.run(activity.completed(0.001, 10)) == []


def test_a_busy_hour_says_how_far_it_was_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "COUNTED", 20)
    lately = queries.look(sl.Locks(engine)).lately.rows
    assert (lately["total"], lately["capped"]) == (20, True)
    assert lately["since"] < 60


def test_the_others(engine: Engine) -> None:
    look = queries.look(sl.Locks(engine))
    assert [(row["id"], row["queue"], row["owner"]) for row in look.mutexes.rows] == [
        ("nightly-import", "default", "worker-3"),
        ("search-index", "shop", "worker-1"),
    ]
    assert [row["id"] for row in look.timeouts.rows] == ["daily-report", "exchange-rates", "heartbeat"]
    assert [row["name"] for row in look.maintenance.rows] == [
        "tasks",
        "orphans",
        "requests",
        "leases",
        "history",
        "keys",
    ]
    assert all(row["due"] is not None for row in look.maintenance.rows)
    changes = [(row["name"], row["old_capacity"], row["new_capacity"], row["changed_by"]) for row in look.changes.rows]
    assert changes[:2] == [("api-calls", 50, 40, "bob@example.org"), ("api-calls", 40, 50, "alice@example.org")]
    assert len(changes) == 7
    facts = queries.facts(sl.Locks(engine))
    assert facts.says is None
    assert {each.subject for each in facts.rows} >= {"version", "writable", "installed", "drift"}


def test_one_semaphore(engine: Engine) -> None:
    look = queries.look(sl.Locks(engine), "api-calls")
    assert [(row["name"], len(row["people"]), row["more"]) for row in look.semaphores.rows] == [("api-calls", 5, 0)]
    assert queries.look(sl.Locks(engine), "no such").semaphores.rows == []
    few = sl.Locks(engine).run(oldest_holders(2))
    assert [row.name for row in few].count("api-calls") == 2


def test_keys(engine: Engine) -> None:
    locks = sl.Locks(engine)
    if engine.dialect.name == "sqlite":
        assert "SQLite" in str(queries.look(locks).keys.says)
        return
    with contended(engine, locks):
        rows = queries.look(locks).keys.rows
    (row,) = (row for row in rows if row["key"] == sl.lock.key("invoice:42"))
    assert (row["mode"], row["waiters"]) == ("exclusive", 2)
    assert sorted(each["mode"] for each in row["waiting"]) == ["exclusive", "shared"]
    assert all(row["session"] in each["waits_for"] for each in row["waiting"] if each["mode"] == "exclusive")
    assert rows[0] is row


def test_jobs_that_are_done_make_no_queue_wait(engine: Engine) -> None:
    """Queues that have completed jobs only are told by what they have done, and not else."""
    job = build_context(engine.dialect, {}).tables.job
    with connected(engine.url) as other, other.begin() as connection:
        connection.execute(sl.Queue().put({}, queue="once"))
        connection.execute(
            update(job).where(job.c.queue_id == "once").values(started_at=Ago(1.0), completed_at=Ago(1.0))
        )
    try:
        assert "once" not in [row["queue_id"] for row in overview.queues(sl.Locks(engine))]
        (row,) = (row for row in queries.look(sl.Locks(engine)).queues.rows if row["queue_id"] == "once")
        assert (row["done"], row["waiting"], row["running"]) == (1, 0, 0)
    finally:
        with connected(engine.url) as other, other.begin() as connection:
            connection.execute(job.delete().where(job.c.queue_id == "once"))


@pytest.mark.parametrize("kind", ENGINES)
def test_it_is_on_the_page(kind: str, door: str, door_to: MakeDoor, semaphore: Callable[..., str]) -> None:
    name = semaphore(kind, capacity=7, held=2, owner="web-1.example.org")
    page = door_to(kind, door)
    text = page.text()
    assert re.search(r'role="meter"[^>]*aria-valuemax="7"[^>]*aria-valuenow="2"', text)
    assert name in text
    for heading in (
        "Semaphores",
        "Permits by age",
        "Queues",
        "Completed per minute",
        "Locks held now",
        "Mutexes taken",
    ):
        assert f">{heading}</h2>" in text
    for heading in ("Timeouts", "Sweeps and clean-ups", "Changes of capacity", "Engine and schema"):
        assert f">{heading}</h2>" in text
    assert "could not be read" not in text
    live = page.text("/live")
    assert name in live
    assert "<html" not in live
    alone = page.text(f"/?of={name}")
    assert "web-1.example.org" in alone
    assert "All semaphores" in alone


def test_every_semaphore_of_many(servers: Servers) -> None:
    """The fullest are shown where there are too many, and what isn't is counted."""
    url = servers.fresh("sqlite", "pysqlite")
    install(url)
    with connected(url) as engine:
        locks = sl.Locks(engine)
        table = build_context(engine.dialect, {}).tables.semaphore
        with engine.begin() as connection:
            connection.execute(insert(table), [{"name": f"s{number:03}", "capacity": 1} for number in range(120)])
        assert locks.acquire({"s117": 1})
        section = queries.look(locks).semaphores
        assert (len(section.rows), section.more) == (queries.SEMAPHORES, 70)
        assert [row["used"] for row in section.rows if row["name"] == "s117"] == [1]
