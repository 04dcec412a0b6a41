"""Where episodes take place: an engine's database, the faults that befall it, and the verdict on the history."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, select, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.dialects import backend_for
from tests.faults import checkers
from tests.faults.checkers import Entry, Job, Violation
from tests.faults.clients import DRIVERS, ROOMS, Client, Face
from tests.faults.history import History, Recorder
from tests.faults.proxy import Proxy
from tests.faults.space import Episode, Fault

ROOT = Path(__file__).parents[2]
#: seconds after which a client hangs
DEADLINE = 240
_TABLES = (
    "CREATE TABLE IF NOT EXISTS fault_value (name VARCHAR(190) PRIMARY KEY, number INT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS fault_ledger"
    " (name VARCHAR(190) NOT NULL, number INT NOT NULL, call_number VARCHAR(190) NOT NULL)",
)
_INNODB = " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"
_runs = itertools.count(1)


@dataclass
class Outcome:
    """What an episode came to."""

    episode: Episode
    history: History
    violations: list[Violation]
    faults: Counter[str] = field(default_factory=Counter)


class Arena:
    """A database with the locks in it.

    :param url: gives the URL for a driver. :param plain: a synchronous driver, for what the harness itself does.
    :param server: a server of the run's own, which may be stopped.
    """

    def __init__(self, engine: str, url: Callable[[str], str], plain: str, server: Any = None) -> None:
        self.engine_name, self.url, self.server = engine, url, server
        self.admin = create_engine(url(plain), poolclass=NullPool)
        self.backend = backend_for(self.admin.dialect)
        self._pool = create_engine(url(plain), pool_size=1, max_overflow=2)
        self.locks = sl.Locks(self._pool)
        self.tables = build_context(self.admin.dialect, {}).tables
        with self.admin.begin() as connection:
            for table in _TABLES:
                connection.execute(text(table + (_INNODB if self.innodb else "")))

    @property
    def innodb(self) -> bool:
        return self.engine_name in ("mysql", "mariadb")

    def close(self) -> None:
        self.admin.dispose()
        self._pool.dispose()

    def run(self, episode: Episode) -> Outcome:
        """Run an episode, and judge it."""
        prefix = f"e{os.getpid()}.{next(_runs)} "
        history = History()
        recorder = Recorder(history.apply, prefix)
        self._prepare(prefix)
        violations: list[Violation] = []
        with self._reached(episode) as (url, proxy), _moved(episode.config.skew):
            play = self._in_processes if episode.config.processes else self._in_threads
            violations += play(episode, prefix, url, proxy, recorder)
        if any((call.error or "").startswith(DRIVERS) for call in history.calls.values() if call.details.get("own")):
            # SQLAlchemy's own leak: a session whose connection dies as its isolation level is set doesn't return it
            violations = [violation for violation in violations if violation.checker != "leak"]
        self._healed()
        violations += self._judge(prefix, history, recorder)
        return Outcome(episode, history, violations, Counter(what for what, _, _ in history.faults))

    def _prepare(self, prefix: str) -> None:
        rooms = [sl.semaphore.create(f"{prefix}room{number}", capacity) for number, capacity in ROOMS.items()]
        with self.admin.begin() as connection:
            values = [{"name": f"{prefix}key{number}"} for number in range(3)]
            connection.execute(text("INSERT INTO fault_value VALUES (:name, 0)"), values)
            connection.execute(sl.Mutex().create(*(f"{prefix}mutex{number}" for number in range(3))))
            connection.execute(sl.StateTransition().create(*"abcde", queue=f"{prefix}tasks0"))
            for room in rooms:
                connection.execute(room)

    @contextlib.contextmanager
    def _reached(self, episode: Episode) -> Iterator[tuple[str, Proxy | None]]:
        url = self.url(episode.config.driver)
        if episode.config.proxy is None:
            yield url, None
            return
        with Proxy(url, opaque=episode.config.proxy == "opaque") as proxy:
            yield proxy.url, proxy

    def _in_threads(
        self, episode: Episode, prefix: str, url: str, proxy: Proxy | None, recorder: Recorder
    ) -> list[Violation]:
        face, crashed = Face(episode.config, url), []
        start = threading.Barrier(len(episode.clients) + 1)

        def run(index: int) -> None:
            start.wait()
            try:
                Client(f"client {index}", prefix, face, recorder).run(episode.clients[index])
            except BaseException:
                crashed.append(Violation("named_errors", f"client {index} ended with {traceback.format_exc()[-4000:]}"))

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(episode.clients))]
        for thread in threads:
            thread.start()
        start.wait()
        over = threading.Event()
        injecting = threading.Thread(target=self._inject, args=(episode, proxy, recorder, [], over), daemon=True)
        injecting.start()
        deadline = time.monotonic() + DEADLINE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = [thread for thread in threads if thread.is_alive()]
        over.set()
        injecting.join()
        if hung:
            return [*crashed, Violation("hang", f"{len(hung)} clients have not ended after {DEADLINE} s")]
        pool: Any = face.engine.pool
        if hasattr(pool, "checkedout") and pool.checkedout():
            crashed.append(Violation("leak", f"{pool.checkedout()} connections were not given back: {pool.status()}"))
        face.close()
        return crashed

    def _in_processes(
        self, episode: Episode, prefix: str, url: str, proxy: Proxy | None, recorder: Recorder
    ) -> list[Violation]:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.faults.clients"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in episode.clients
        ]
        ready = threading.Barrier(len(processes) + 1)

        def read(process: subprocess.Popen[str]) -> None:
            assert process.stdout is not None
            process.stdout.readline()
            ready.wait(DEADLINE)
            for line in process.stdout:
                with contextlib.suppress(json.JSONDecodeError):  # a killed process may leave half a line
                    recorder.emit(json.loads(line))

        readers = [threading.Thread(target=read, args=(process,), daemon=True) for process in processes]
        found: list[Violation] = []
        try:
            for index, (process, reader) in enumerate(zip(processes, readers, strict=True)):
                request = {"episode": episode.to_json(), "url": url, "prefix": prefix, "index": index}
                assert process.stdin is not None
                process.stdin.write(json.dumps({**request, "name": f"client {index}"}) + "\n")
                process.stdin.flush()
                reader.start()
            ready.wait(DEADLINE)
            for process in processes:
                assert process.stdin is not None
                with contextlib.suppress(OSError):
                    process.stdin.write("\n")
                    process.stdin.flush()
            over = threading.Event()
            self._inject(episode, proxy, recorder, processes, over)
            for index, process in enumerate(processes):
                _, errors = _ended(process, DEADLINE)
                if process.returncode not in (0, -signal.SIGKILL):
                    found.append(Violation("named_errors", f"client {index} ended with {errors[-1000:]}"))
            for reader in readers:
                reader.join()
        finally:
            for process in processes:
                process.kill()
                for stream in (process.stdin, process.stdout, process.stderr):
                    assert stream is not None
                    with contextlib.suppress(OSError):
                        stream.close()
                process.wait()
        return found

    # faults

    def _inject(
        self,
        episode: Episode,
        proxy: Proxy | None,
        recorder: Recorder,
        processes: list[subprocess.Popen[str]],
        over: threading.Event,
    ) -> None:
        chance, began = random.Random(episode.seed), time.monotonic()
        for fault in sorted(episode.faults, key=lambda fault: fault.after):
            if over.wait(max(0.0, began + fault.after - time.monotonic())):
                return
            with recorder.fault(fault.what), contextlib.suppress(Exception):
                # a fault may find nothing to break; what it does to clients is in the history
                self._injected(fault, proxy, processes, chance, over)

    def _injected(
        self,
        fault: Fault,
        proxy: Proxy | None,
        processes: list[subprocess.Popen[str]],
        chance: random.Random,
        over: threading.Event,
    ) -> None:
        what = fault.what
        if what == "terminate":
            self._terminate(chance)
        elif what == "block_table":
            self._block_table(chance, over)
        elif what == "restart":
            self.server.restart()
        elif what == "crash":
            self.server.kill()
            self.server.start()
        elif what == "pause":
            self.server.pause()
            over.wait(0.3)
            self.server.resume()
        elif what == "sigkill":
            chance.choice(processes).kill()
        elif what == "sigstop":
            process = chance.choice(processes)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5)  # longer than the shortest leases
            process.send_signal(signal.SIGCONT)
        elif proxy is None:
            return
        elif what == "cut":
            proxy.cut()
        elif what in ("cut_before", "cut_after"):
            proxy.die_at(fault.number, executed=what == "cut_after")
        elif what == "lost_commit":
            proxy.lose_answer(b"COMMIT")
        elif what == "delay":
            proxy.delay = 0.01
            over.wait(0.3)
            proxy.delay = 0.0
        elif what == "refuse":
            proxy.refusing = 1
            proxy.cut()
        elif what == "half_close":
            proxy.half_close()

    def _terminate(self, chance: random.Random) -> None:
        """End a connection at the server, as an administrator does."""
        with self.admin.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if self.innodb:
                sessions = (
                    "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()"
                )
            else:
                sessions = (
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            found = sorted(connection.scalars(text(sessions)))
            if found:
                end = "KILL {}" if self.innodb else "SELECT pg_terminate_backend({})"
                connection.exec_driver_sql(end.format(chance.choice(found)))

    def _block_table(self, chance: random.Random, over: threading.Event) -> None:
        """Lock a table as an ALTER does."""
        table = chance.choice([self.tables.task_state, self.tables.permit, self.tables.job, self.tables.permit_request])
        with self.admin.connect() as connection:
            if self.backend.single_writer:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                over.wait(0.2)
                return
            name = self.admin.dialect.identifier_preparer.format_table(table)
            if self.innodb:
                connection.exec_driver_sql(f"LOCK TABLES {name} WRITE")
                over.wait(0.2)
                connection.exec_driver_sql("UNLOCK TABLES")
            else:
                connection.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
                connection.exec_driver_sql(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
                over.wait(0.2)

    def _healed(self) -> None:
        """Wait until the server answers again."""
        if self.server is not None:
            self.server.resume()
            if not self.server.running:
                self.server.start()

    # the verdict

    def _judge(self, prefix: str, history: History, recorder: Recorder) -> list[Violation]:
        faulty = bool(history.faults)
        self._work_off(prefix, recorder)
        with self.admin.connect() as connection:
            rows = connection.execute(
                text("SELECT name, number, call_number FROM fault_ledger WHERE name LIKE :names"),
                {"names": f"{prefix}%"},
            )
            ledger = [Entry(*row) for row in rows]
            job = self.tables.job
            found = connection.execute(select(job).where(job.c.queue_id == f"{prefix}queue0")).all()
            table = [Job(str(row.external_id), _state(row)) for row in found]
            state = self.tables.task_state
            acquired = dict(
                connection.execute(select(state.c.id, state.c.acquired).where(state.c.id.like(f"{prefix}mutex%"))).all()
            )
            used = {
                row.name: row.used for row in connection.execute(sl.semaphore.usage()) if row.name.startswith(prefix)
            }
        capacities = {f"{prefix}room{number}": capacity for number, capacity in ROOMS.items()}
        violations = [
            *checkers.exclusion(history),
            *checkers.capacity(history, capacities),
            *checkers.fences(history),
            *checkers.single_grants(history),
            *checkers.bounded_tries(history),
            *checkers.named_errors(history),
            *checkers.serial(history, ledger),
            *checkers.jobs(history, table),
            *checkers.captures(history),
            *checkers.periods(history),
            *checkers.survivors(history, acquired),
        ]
        if not self.backend.single_writer:
            violations += checkers.independence(history)
        if not faulty:
            for name, count in used.items():
                if count:
                    violations.append(Violation("leak", f"{name!r}: {count} permits are held at the end"))
        return violations

    def _work_off(self, prefix: str, recorder: Recorder) -> None:
        """Complete every job that is left, as if hours had passed."""
        queue, job, jobs = f"{prefix}queue0", self.tables.job, sl.Queue()
        unfinished = (job.c.queue_id == queue) & job.c.completed_at.is_(None) & job.c.failed_at.is_(None)
        for _ in range(100):
            with self.admin.begin() as connection:
                past = select(job.c.created_at).where(unfinished).limit(1)
                if connection.scalar(past) is None:
                    return
                long_ago = _long_ago()
                running = job.c.heartbeat_at.is_not(None)
                connection.execute(update(job).where(unfinished & running).values(heartbeat_at=long_ago))
                connection.execute(update(job).where(unfinished).values(run_at=long_ago))
            self.locks.run(jobs.requeue_stalled(3600, queue=queue))
            with self.admin.begin() as connection:
                connection.execute(update(job).where(unfinished).values(run_at=_long_ago()))
            with self.admin.begin() as connection:
                captured = list(connection.execute(jobs.capture(100, queue=queue, host="the end")).all())
            for each in captured:
                with recorder.call("the end", "complete", str(each.external_id)) as answer:
                    answer.value = self.locks.run(jobs.complete(each))


def shrink(
    arena: Arena, outcome: Outcome, *, seconds: float = 60, attempts: int = 5, candidates: int | None = None
) -> Episode:
    """Return the smallest episode found that still violates what the given one did.

    :param seconds: how long to look. :param candidates: how many smaller ones to try; all of them by default.
    :param attempts: how often a smaller one is run before it counts as innocent.
    """
    wanted = {violation.checker for violation in outcome.violations}
    deadline = time.monotonic() + seconds

    def guilty(episode: Episode) -> bool:
        for _ in range(attempts):
            if time.monotonic() > deadline:
                return False
            if wanted & {violation.checker for violation in arena.run(episode).violations}:
                return True
        return False

    smallest, smaller = outcome.episode, True
    budget = itertools.count() if candidates is None else iter(range(candidates))
    while smaller and time.monotonic() < deadline:
        smaller = False
        for candidate in _smaller(smallest):
            if next(budget, None) is None:
                return smallest
            if guilty(candidate):
                smallest, smaller = candidate, True
                break
    return smallest


def _smaller(episode: Episode) -> Iterator[Episode]:
    """Episodes with less in them, the largest cuts first."""
    for index in range(len(episode.clients)):
        if len(episode.clients) > 1:
            yield dataclasses.replace(episode, clients=_without(episode.clients, index))
    for index in range(len(episode.faults)):
        yield dataclasses.replace(episode, faults=_without(episode.faults, index))
    for index, steps in enumerate(episode.clients):
        for size in (len(steps) // 2, len(steps) // 4, 1):
            for at in range(0, len(steps), size) if size else ():
                rest = steps[:at] + steps[at + size :]
                if rest:
                    yield dataclasses.replace(
                        episode, clients=(*episode.clients[:index], rest, *episode.clients[index + 1 :])
                    )


def _without(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return values[:index] + values[index + 1 :]


def _ended(process: subprocess.Popen[str], seconds: float) -> tuple[int | None, str]:
    """Wait for the end of a process; kill it when it hangs."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None, "it hung"
    assert process.stderr is not None
    return process.returncode, process.stderr.read()


def _state(row: Any) -> str:
    if row.completed_at is not None:
        return "completed"
    return "dead" if row.failed_at is not None else "running" if row.heartbeat_at is not None else "ready"


def _long_ago() -> Any:
    from datetime import datetime, timezone

    return datetime(2020, 1, 1, tzinfo=timezone.utc)


@contextlib.contextmanager
def _moved(seconds: float) -> Iterator[None]:
    """Move the time of day of this process."""
    real = time.time
    if seconds:
        time.time = lambda: real() + seconds  # type: ignore[method-assign]
    try:
        yield
    finally:
        time.time = real  # type: ignore[method-assign]
