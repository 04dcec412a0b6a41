"""Reading each part, on each kind of server; every part is on the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.admin import overview
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.integrations.dashboard import queries
from sqlalchemy_locks.queue import activity
from sqlalchemy_locks.semaphore.monitoring import oldest_holders
from sqlalchemy_locks.sql.clock import SecondsAgo
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


def test_semaphores_with_holders(engine: Engine) -> None:
    look = queries.read_all(sl.Locks(engine))
    rows = {row["name"]: row for row in look.semaphores.rows}
    # the full first, then the nearly full, then those in use
    assert list(rows) == ["gpu", "backup-slots", "api-calls", "pdf-renderer", "warehouse-sync"]
    assert look.semaphores.counts == {"semaphores": 5, "full": 1, "leases": 0, "leases_held": 0, "permits": 39}
    assert {name: (row["used"], row["capacity"]) for name, row in rows.items()} == {
        "api-calls": (30, 40),
        "backup-slots": (5, 6),
        "gpu": (4, 4),
        "pdf-renderer": (0, 8),
        "warehouse-sync": (0, 1),
    }
    assert [name for name, row in rows.items() if row["expired"]] == ["pdf-renderer"]
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


def test_holders_by_age_are_counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found = queries.read_all(sl.Locks(engine)).ages.rows
    assert found["total"] == 12
    assert found["expired"] >= 1
    counts = {label: count for label, count, _ in found["bars"]}
    assert list(counts) == ["under 1 min", "1 min – 10 min", "10 min – 1 h", "1 h – 6 h", "6 h – 24 h", "24 h and more"]
    assert counts["1 h – 6 h"] == 3
    assert counts["10 min – 1 h"] == 3
    assert counts["24 h and more"] == 0
    monkeypatch.setattr(overview, "COUNT_LIMIT", 2)
    oldest = overview.ages(sl.Locks(engine))
    assert (oldest.counts, oldest.at_least) == ({"holders": 2}, ["holders"])
    assert int(oldest.rows[0]["age_3"]) == 2  # type: ignore[index]


def test_queues_with_job_counts(engine: Engine) -> None:
    look = queries.read_all(sl.Locks(engine))
    rows = {row["queue_id"]: row for row in look.queues.rows}
    # those with dead or stalled jobs come first
    assert list(rows) == ["mail", "invoices", "reports"]
    counts = {"queues": 3, "waiting": 146, "scheduled": 47, "running": 12, "stalled": 1, "dead": 3}
    assert (look.queues.counts, look.queues.at_least) == (counts, frozenset())
    mail = rows["mail"]
    assert [int(mail[state]) for state in ("waiting", "scheduled", "running", "stalled", "dead")] == [132, 40, 8, 1, 3]
    assert mail["late"] >= 140
    assert rows["reports"]["late"] is None
    lately = look.lately.rows
    # a minute of them may have left the hour meanwhile, or more on a machine that stands still
    assert 0 < sum(row["completed"] for row in rows.values()) == lately["total"] <= 864
    assert (len(lately["minutes"]), lately["capped"]) == (60, False)
    assert 1 < lately["peak"] < 60


def test_dead_jobs_and_workers(engine: Engine) -> None:
    look = queries.read_all(sl.Locks(engine))
    jobs = [(row["queue_id"], row["attempts"], row["max_attempts"], row["line"]) for row in look.dead.rows]
    assert jobs == [("mail", 1, 5, "550 no such user")] * 3
    assert sl.Locks(engine).run(activity.dead(5, "invoices")) == []
    assert [(row["host"], row["running"], row["alive"]) for row in look.workers.rows] == [("worker-1", 11, True)]
    assert look.workers.counts == {"workers": 1, "silent": 0}


def test_completed_jobs_are_counted_newest_first(engine: Engine) -> None:
    locks = sl.Locks(engine)
    every = locks.run(activity.completed(3600, 100_000))
    some = locks.run(activity.completed(3600, 10))
    assert sum(int(row.completed) for row in some) == 10
    newest = min(int(row.minute) for row in every)
    assert all(int(row.minute) - newest <= 2 for row in some)
    assert locks.run(activity.completed(0.001, 10)) == []


def test_mutexes_timeouts_maintenance_changes(engine: Engine) -> None:
    look = queries.read_all(sl.Locks(engine))
    assert [(row["id"], row["queue"], row["owner"]) for row in look.mutexes.rows] == [
        ("nightly-import", "default", "worker-3"),
        ("search-index", "shop", "worker-1"),
    ]
    assert [row["id"] for row in look.periods.rows] == ["daily-report", "exchange-rates", "heartbeat"]
    names = [row["name"] for row in look.maintenance.rows]
    assert names == ["tasks", "orphans", "requests", "leases", "history", "keys"]
    assert all(row["due"] is not None for row in look.maintenance.rows)
    changes = [(row["name"], row["old_capacity"], row["new_capacity"], row["changed_by"]) for row in look.changes.rows]
    assert changes[:2] == [("api-calls", 50, 40, "bob@example.org"), ("api-calls", 40, 50, "alice@example.org")]
    assert len(changes) == 7
    facts = queries.facts(sl.Locks(engine))
    assert facts.error is None
    assert {each.subject for each in facts.rows} >= {"version", "writable", "installed", "drift"}


def test_one_semaphore_with_many_holders(engine: Engine) -> None:
    look = queries.read_all(sl.Locks(engine), "api-calls")
    assert [(row["name"], len(row["people"]), row["more"]) for row in look.semaphores.rows] == [("api-calls", 5, 0)]
    assert queries.read_all(sl.Locks(engine), "no such").semaphores.rows == []
    few = sl.Locks(engine).run(oldest_holders(2, [row["id"] for row in look.semaphores.rows]))
    assert [row.external_id for row in few] == ["api-calls/worker-0", "api-calls/worker-1"]


def test_keys_with_holders_and_waiters(engine: Engine) -> None:
    locks = sl.Locks(engine)
    if engine.dialect.name == "sqlite":
        assert "SQLite" in str(queries.read_all(locks).locks.error)
        return
    with contended(engine, locks):
        rows = queries.read_all(locks).locks.rows
    (row,) = (row for row in rows if row["key"] == sl.lock.key("invoice:42"))
    assert (row["mode"], row["waiters"]) == ("exclusive", 2)
    assert sorted(each["mode"] for each in row["waiting"]) == ["exclusive", "shared"]
    assert all(row["session"] in each["waits_for"] for each in row["waiting"] if each["mode"] == "exclusive")
    assert rows[0] is row


def test_queue_with_only_completed_jobs(engine: Engine) -> None:
    """A queue with only completed jobs appears with their count only."""
    job = build_context(engine.dialect, {}).tables.job
    with connected(engine.url) as other, other.begin() as connection:
        connection.execute(sl.Queue().put({}, queue="once"))
        connection.execute(
            update(job).where(job.c.queue_id == "once").values(started_at=SecondsAgo(1.0), completed_at=SecondsAgo(1.0))
        )
    try:
        (row,) = (row for row in queries.read_all(sl.Locks(engine)).queues.rows if row["queue_id"] == "once")
        assert (row["completed"], row["waiting"], row["running"]) == (1, 0, 0)
    finally:
        with connected(engine.url) as other, other.begin() as connection:
            connection.execute(job.delete().where(job.c.queue_id == "once"))


@pytest.mark.parametrize(
    ("kind", "door"), [*((kind, "thread") for kind in ENGINES), ("sqlite", "asgi"), ("sqlite", "wsgi")]
)
def test_every_part_is_on_the_page(kind: str, door: str, door_to: MakeDoor, semaphore: Callable[..., str]) -> None:
    name = semaphore(kind, capacity=7, held=2, owner="web-1.example.org")
    page = door_to(kind, door)
    text = page.text()
    assert re.search(r'role="meter"[^>]*aria-valuemax="7"[^>]*aria-valuenow="2"', text)
    assert name in text
    for heading in ("Semaphores", "Holders by age", "Sweeps and clean-ups", "Recent actions", "Engine and schema"):
        assert f">{heading}</h2>" in text
    # what there is none of is in one line
    for heading, one in (("Dead jobs", "dead jobs"), ("Leases held", "leases held"), ("Mutexes held", "mutexes held")):
        (line,) = re.findall("None: [^<]*", text)
        assert (f">{heading}</h2>" in text) is (one not in line)
    assert "could not be read" not in text
    live = page.text("/live")
    assert name in live
    assert "<html" not in live
    alone = page.text(f"/?of={name}")
    assert "web-1.example.org" in alone
    assert "All semaphores" in alone
