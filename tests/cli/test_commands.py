"""The effect, output and exit code of each command, on each kind of server."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.alembic.steps import STEPS
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.sql.clock import SecondsAgo
from tests.cli.conftest import ENGINES, Cli, run
from tests.conftest import PLAIN, Servers
from tests.fixtures import second_step
from tests.fixtures.parties import PATIENCE, connected, later, until

QUEUE = sl.Queue()


def captured(cli: Cli, name: str, number: int) -> list[Any]:
    engine = create_engine(cli.url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(QUEUE.put(*range(number), queue=name))
    with engine.begin() as connection:
        return list(connection.execute(QUEUE.capture(number, queue=name, host="h")))


@pytest.mark.parametrize("engine", ENGINES)
def test_install_and_check(engine: str, servers: Servers) -> None:
    cli = Cli(servers.fresh(engine, PLAIN[engine]))
    if engine == "sqlite":
        assert "there is no such file" in cli("check", code=2).stderr
    else:
        done = cli.json("check", code=1)
        assert (done["ok"], done["problems"]) == (False, 1)
    told = cli.json("install")
    assert (told["installed"], told["steps"], told["newer"]) == (list(STEPS), list(STEPS), [])
    assert cli.json("install")["installed"] == []
    assert cli.json("install", "--again")["installed"] == list(STEPS)
    told = cli.json("check")
    assert (told["ok"], told["problems"]) == (True, 0)
    assert {each["subject"] for each in told["findings"]} >= {"connection", "version", "clock", "installed", "drift"}
    assert all(set(each) == {"subject", "level", "says"} for each in told["findings"])


@pytest.mark.parametrize("engine", ENGINES)
def test_commands_in_another_schema(engine: str, servers: Servers) -> None:
    cli, place = Cli(servers.fresh(engine, PLAIN[engine])), ("--schema", "others", "--prefix", "others_")
    cli("install", *place)
    cli("check", code=1)
    cli("check", *place)
    empty = cli.json("status", code=1)
    assert {
        part: empty[part] for part in ("semaphores", "leases", "queues", "workers", "mutexes", "periods")
    } == dict.fromkeys(("semaphores", "leases", "queues", "workers", "mutexes", "periods"))
    assert cli("status", code=1).stdout.count("not installed; `sqlalchemy-locks check` shows what is") >= 5
    cli("semaphore", "create", "placed", "3", *place)
    assert [row["name"] for row in cli.json("status", *place)["semaphores"]] == ["placed"]
    cli("sweep", *place)


def test_semaphore_create_resize_delete(cli: Cli) -> None:
    assert cli.json("semaphore", "create", "slots", "3") == {"name": "slots", "capacity": 3, "created": True}
    assert cli.json("semaphore", "create", "slots", "3")["created"] is False
    told = cli.json("semaphore", "create", "slots", "4", code=1)
    assert told == {"name": "slots", "capacity": 3, "created": False}
    told = cli.json("semaphore", "resize", "slots", "7", "--by", "alice")
    assert told == {"name": "slots", "old_capacity": 3, "new_capacity": 7, "by": "alice"}
    changes = cli.json("semaphore", "list", "slots", "--history")["history"]
    assert [(each["old_capacity"], each["new_capacity"]) for each in changes] == [(3, 7), (None, 3)]
    assert changes[0]["changed_by"] == "alice"
    assert changes[1]["changed_by"]  # the user who runs the tests
    assert "Aborted" in cli("semaphore", "delete", "slots", code=1).stderr  # nobody answers its question
    assert cli.json("semaphore", "delete", "slots", "--yes") == {"name": "slots", "deleted": True}
    for command in (["resize", "slots", "2"], ["delete", "slots", "--yes"]):
        assert "there is no semaphore 'slots'\n" in cli("semaphore", *command, code=1).stderr
    assert "There is no semaphore 'slots'" in cli("semaphore", "list", "slots", code=1).stdout


def test_semaphore_list_holders(cli: Cli) -> None:
    locks = cli.locks
    cli("semaphore", "create", "held", "2")
    locks.acquire({"held": 2}, external_id="job-1", owner="web-1", ttl=3600)
    (holder,) = cli.json("semaphore", "list", "held")["holders"]
    assert (holder["external_id"], holder["owner"], holder["permits"]) == ("job-1", "web-1", 2)
    assert holder["expired"] in (False, 0)
    assert holder["expires_at"].endswith("+00:00")
    assert "job-1" in cli("semaphore", "list", "held").stdout
    assert "held" in cli("semaphore", "delete", "held", "--yes", code=1).stderr
    assert cli.json("semaphore", "release", "job-1")["released"] == "RELEASED"
    assert cli.json("semaphore", "release", "job-1")["released"] == "ALREADY_RELEASED"
    assert cli.json("semaphore", "release", "never", code=1)["released"] == "UNKNOWN"
    assert cli.json("semaphore", "list", "held")["holders"] == []


def queue_row(cli: Cli, name: str) -> Any:
    return next(row for row in cli.json("status")["queues"] if row["queue_id"] == name)


def test_queue_commands(cli: Cli) -> None:
    jobs = captured(cli, "mail", 4)
    assert [queue_row(cli, "mail")[state] for state in ("waiting", "scheduled", "running", "dead")] == [0, 0, 4, 0]
    locks = cli.locks
    assert locks.run(QUEUE.complete(jobs[:1])) == 1
    assert locks.run(QUEUE.fail(jobs[1:3], error="x", retry=False)) == 2
    assert cli.json("queue", "requeue", "mail")["requeued"] == 0  # its worker has just sent a heartbeat
    assert cli.json("queue", "requeue", "mail", "--stalled-for", "0") == {"requeued": 1}
    assert [row["running"] for row in cli.json("queue", "list", "mail")["queues"]] == [0]
    dead = cli.json("queue", "list", "mail", "--dead")["dead"]
    assert {(row["error"], row["attempts"]) for row in dead} == {("x", 1)}
    one = dead[0]["external_id"]
    assert one in cli("queue", "list", "--dead").stdout
    assert cli.json("queue", "revive", "--job", one) == {"revived": 1}
    assert f"Not dead: '{one}'" in cli("queue", "revive", "--job", one, code=1).stdout
    assert "There is no job" in cli("queue", "revive", "--job", str(UUID(int=7)), code=1).stdout
    assert cli.json("queue", "revive", "mail") == {"revived": 1}
    assert cli.json("queue", "list", "--dead") == {"dead": []}
    row = queue_row(cli, "mail")
    assert (row["waiting"], row["dead"]) == (3, 0)
    assert row["oldest"].endswith("+00:00")
    assert "Aborted" in cli("queue", "purge", "--older-than", "0", code=1).stderr
    assert cli.json("queue", "purge", "--older-than", "7d", "--yes") == {"deleted": 0, "which": "completed"}
    assert cli.json("queue", "purge", "--older-than", "0", "--queue", "letters", "--yes")["deleted"] == 0
    assert cli.json("queue", "purge", "--older-than", "0", "--queue", "mail", "--yes")["deleted"] == 1
    locks.run(QUEUE.fail(captured(cli, "mail", 1), error="x", retry=False))
    assert cli.json("queue", "purge", "--older-than", "0", "--dead", "--yes") == {"deleted": 1, "which": "dead"}


def test_jobs_by_id(cli: Cli) -> None:
    id = str(UUID(str(cli.locks.run(QUEUE.put({"a": 1}, queue="single", run_in=3600)))))
    assert cli.json("queue", "show", id)["payload"] == {"a": 1}
    assert cli.json("queue", "cancel", id) == {"job": id, "cancelled": True}
    assert cli.json("queue", "cancel", id, code=1) == {"job": id, "cancelled": False}
    assert cli.json("queue", "show", str(UUID(int=7)), code=1)["found"] is False


def test_queues_are_paused(cli: Cli) -> None:
    captured(cli, "one", 1)
    assert cli("queue", "pause", "one", "two").stdout.rstrip() == "Paused: 2 queues"
    assert cli.json("queue", "pause", "one") == {"paused": 0}
    assert queue_row(cli, "one")["paused"] is True
    assert "one (paused)" in cli("status").stdout
    assert cli.json("queue", "resume", "one", "two") == {"resumed": 2}


def test_sweep(cli: Cli) -> None:
    cli("semaphore", "create", "swept", "5")
    locks = cli.locks
    locks.acquire({"swept": 1}, external_id="short", ttl=0.001)
    locks.acquire({"swept": 1}, external_id="long", ttl=3600)
    assert cli.json("sweep")["released"] == 1
    locks.release("long")
    done = cli.json("sweep", "--due")["done"]
    assert set(done) == {"tasks", "orphans", "requests", "leases", "history", "keys"}
    assert cli.json("sweep", "--due")["done"] == {}
    assert "Nothing was due" in cli("sweep", "--due").stdout


def test_status_shows_every_part(cli: Cli) -> None:
    locks = cli.locks
    cli("semaphore", "create", "shown", "5")
    grant = locks.acquire({"shown": 2}, owner="web-1", ttl=3600)
    locks.mutex.acquire("import", owner="web-1")
    assert locks.once_per("report", every=3600)
    captured(cli, "shown", 2)
    told = cli.json("status")
    parts = {"semaphores", "leases", "waiters", "queues", "workers", "mutexes", "periods", "locks"}
    assert set(told) == parts | {"database", "locks_error", "counts", "at_least"}
    (semaphore,) = (row for row in told["semaphores"] if row["name"] == "shown")
    assert (semaphore["used"], semaphore["capacity"], semaphore["holders"]) == (2, 5, 1)
    assert semaphore["oldest_owner"] == "web-1"
    assert {row["queue_id"]: row["running"] for row in told["queues"]}["shown"] == 2
    assert ("import", "web-1") in [(row["id"], row["owner"]) for row in told["mutexes"]]
    assert "report" in [row["id"] for row in told["periods"]]
    shown = cli("status").stdout
    for part in ("Semaphores", "Queues", "Mutexes", "Periods", "shown", "import", "report", "None: leases"):
        assert part in shown
    locks.release(grant)


def test_mutex_held_lists_taken_mutexes(cli: Cli) -> None:
    locks = cli.locks
    for id in ("held-1", "held-2", "freed"):
        assert locks.mutex.acquire(id, queue="seen", owner="web-1")
    locks.mutex.release("freed", queue="seen")
    rows: list[Any] = [row for row in locks.run(sl.Mutex().held()) if row.queue == "seen"]
    assert [(row.id, row.owner) for row in rows] == [("held-1", "web-1"), ("held-2", "web-1")]
    for row in rows:
        assert row.acquired_at.tzinfo is not None
        assert abs(datetime.now(timezone.utc) - row.acquired_at) < timedelta(hours=1)
    assert len(locks.run(sl.Mutex().held(1))) == 1


def test_timeout_listed_shows_free_in(cli: Cli) -> None:
    locks = cli.locks
    assert locks.once_per("taken", every=86400, queue="seen")
    locks.run(sl.Timeout(every=60).create("never-taken", queue="seen", retries=3))
    rows: list[Any] = locks.run(sl.Timeout().listed())
    told = {row.id: row for row in rows if row.queue == "seen"}
    assert (told["taken"].every, told["taken"].retries) == (86400, None)
    assert 80000 < told["taken"].free_in <= 86400
    assert (told["never-taken"].every, told["never-taken"].retries) == (60, 3)
    assert told["never-taken"].free_in < 0


def test_limit_below_one_is_refused() -> None:
    for listing in (sl.Mutex().held, sl.Timeout().listed):
        with pytest.raises(ValueError, match="limit is from 1 to 2147483647, not"):
            listing(0)


def test_status_limits_rows_and_counts_the_others(fresh: Cli) -> None:
    locks = fresh.locks
    for number in range(5):
        locks.run(sl.semaphore.create(f"s{number}", 2))
    assert locks.acquire({"s3": 2}, owner="web-1")
    assert locks.acquire({"s4": 1})
    locks.mutex.acquire("a")
    told = fresh.json("status", "--limit", "2")
    assert [row["name"] for row in told["semaphores"]] == ["s3", "s4"]
    counts = {"semaphores": 5, "full": 1, "leases": 0, "leases_held": 0, "permits": 3, "mutexes": 1}
    assert {name: told["counts"][name] for name in counts} == counts
    assert told["at_least"] == []
    shown = fresh("status", "--limit", "2").stdout
    assert shown.count("... and 3 more") == 1
    assert "more" not in fresh("status").stdout


def test_status_shows_keys_and_waiters(postgresql: Cli) -> None:
    key = sl.lock.key("waited for")
    with postgresql.locks.exclusive("waited for"):
        (row,) = (row for row in postgresql.json("status")["locks"] if row["key"] == key)
        assert (row["mode"], row["waiting"]) == ("exclusive", [])
        assert str(key) in postgresql("status").stdout
    assert key not in [row["key"] for row in postgresql.json("status")["locks"]]


@pytest.mark.parametrize("name", ["postgresql15", "mysql", "mariadb"])
def test_status_names_the_queues_of_waiters(made: Callable[[str], str], name: str) -> None:
    """By the semaphore or lease that they wait for, and who holds it, not by the key of the queue."""
    cli = Cli(made(name))
    locks = cli.locks

    def turn(process: Engine) -> None:
        one = sl.Locks(process)
        one.release(one.acquire({"leader": 1}, ttl=60, timeout=PATIENCE))

    with connected(cli.url) as first, connected(cli.url) as second:  # processes wait there, one of each
        with locks.lease("leader", ttl=60):
            turns = [later(turn, process) for process in (first, second)]
            until(lambda: "2 waiters" in cli("status").stdout)
            assert re.search(r"2 waiters of lease leader \(held by \S+, \d+ s\)", cli("status").stdout)
            told = cli.json("status")
            assert (told["counts"]["permit_waiters"], told["counts"]["lock_waiters"]) == (2, 0)
            (holder,) = (holder for holder in locks.run(sl.lock.holders()) if holder.kind != "lock")
            assert (holder.kind, holder.name, len(holder.waiting)) == ("lease", "leader", 1)
            assert holder.waiting[0].waits_for == (holder.session,)
            assert str(holder).startswith("first waiter of lease leader: session ")
        for each in turns:
            each.result(PATIENCE)


def test_workers_are_listed(cli: Cli) -> None:
    with cli.locks._engine.begin() as connection:
        worker = build_context(connection.dialect, {}).tables.worker
        for host, ago in (("web-1", 3.0), ("web-2", 900.0)):
            connection.execute(
                worker.insert().values(host=host, heartbeat_at=SecondsAgo(ago), started_at=SecondsAgo(ago))
            )
    told = cli.json("queue", "workers")["workers"]
    assert [(row["host"], row["alive"], row["running"]) for row in told] == [("web-2", False, 0), ("web-1", True, 0)]
    assert "15 min ago" in cli("queue", "workers").stdout


def test_expired_permits_are_not_used(cli: Cli) -> None:
    cli("semaphore", "create", "expiring", "2")
    grants = [cli.locks.acquire({"expiring": 1}, ttl=ttl) for ttl in (0.001, 3600)]
    for told in (cli.json("semaphore", "list", "expiring"), cli.json("status", "--limit", "1000")):
        (row,) = (row for row in told["semaphores"] if row["name"] == "expiring")
        assert (row["used"], row["expired"], row["holders"]) == (1, 1, 2)
    assert ", expired" in cli("semaphore", "list", "expiring").stdout
    for grant in grants:
        cli.locks.release(grant)


def test_status_without_key_list(sqlite: Cli) -> None:
    told = sqlite.json("status")
    assert told["locks"] is told["waiters"] is None
    assert "SQLite" in told["locks_error"]
    assert told["locks_error"] in sqlite("status").stdout


def test_a_missing_step_is_reported_and_installed(fresh: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    second_step.add(monkeypatch)
    assert "0002 is missing" in fresh("check").stdout
    assert fresh.json("install")["installed"] == ["0002"]
    assert fresh.json("check")["ok"] is True


def test_a_missing_table_is_reported_by_its_part_alone(fresh: Cli) -> None:
    engine = create_engine(fresh.url, poolclass=NullPool)
    with engine.begin() as connection:
        for table in ("semaphore", "permit", "permit_request", "semaphore_history"):
            connection.exec_driver_sql(f"DROP TABLE lock_{table}")
    told = fresh.json("status")
    assert told["semaphores"] is None
    assert told["queues"] == []
    assert "not installed" in fresh("status").stdout
    assert fresh.json("install", "--again")["installed"] == ["0001"]
    assert fresh.json("status")["semaphores"] == []


def test_install_after_revisions_is_refused(fresh: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine(fresh.url, poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE lock_installed SET installed_by = 'revisions'")
    with monkeypatch.context() as patched:
        second_step.add(patched)
        done = fresh("install", code=2)
    assert "was installed here by the shipped revisions" in done.stderr
    assert "Traceback" not in done.stderr
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO lock_installed VALUES ('9999', 'revisions', '')")
    assert fresh.json("install", code=1)["newer"] == ["9999"]


def test_help_without_database() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "Exit codes: 0 done" in done.stdout
    for command in ("install", "check", "status", "page", "semaphore", "queue", "worker", "sweep"):
        assert f"\n  {command} " in done.stdout
        assert run(command, "--help").exit_code == 0
    assert run("--version").stdout.startswith("sqlalchemy-locks 0.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("semaphore", "create", "--", "x", "-1"), "-1 is not in the range"),
        (("semaphore", "create", "", "1"), "must not be empty"),
        (("semaphore", "create", "x" * 256, "1"), "256 characters"),
        (("semaphore", "create", "x ", "1"), "ends with a space"),
        (("semaphore", "create", "x", str(2**31)), "a capacity is from 0"),
        (("semaphore", "resize", "x", "1", "--by", "b" * 300), "300 characters"),
        (("queue", "requeue", "--stalled-for", "soon"), "'soon' is no duration"),
        (("queue", "requeue", "--stalled-for", "99999999d"), "a hundred years"),
        (("queue", "revive", "--job", "x"), "an external_id is a UUID"),
        (("queue", "revive", "mail", "--job", "x"), "leave QUEUE out"),
        (("queue", "purge"), "--older-than"),
        (("queue", "purge", "--older-than", "7", "--yes"), "'7' is no duration: 90s, 5m, 2h and 7d are"),
        (("queue", "cancel", "x"), "an external_id is a UUID"),
        (("queue", "pause"), "QUEUE..."),
        (("sweep", "--stale-after", "0"), "more than 0 seconds"),
        (("check", "--schema", "a;b", "--prefix", "c"), "is refused"),
        (("install", "--schema", "others"), "SQLite's tables are in no schema of their own: give their --prefix"),
        (("install", "--url", "postgresql+psycopg://a@b/c", "--prefix", "others_"), "give its --schema"),
        (("install", "--prefix", "a b"), "is refused"),
        (("install", "--locking", "rows"), "is not one of"),
        (("install", "--grant-to", "app"), "no roles"),
        (("nonsense",), "No such command"),
    ],
)
def test_invalid_options_are_refused(sqlite: Cli, arguments: tuple[str, ...], said: str) -> None:
    done = sqlite(*arguments, code=2)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_install_refuses_other_locking(servers: Servers) -> None:
    cli = Cli(servers.fresh("postgresql15", "psycopg"))
    cli("install")
    done = cli("install", "--locking", "table", code=2)
    assert "Advisory locks are installed" in done.stderr
    other = Cli(servers.fresh("postgresql15", "psycopg"))
    other("install", "--locking", "table")
    other("install", "--locking", "table")
    other("install")
