"""Where episodes take place: an engine's database, the faults that befall it, and the verdict on the history."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from multiprocessing import get_context
from typing import Any

from sqlalchemy import Connection, create_engine, insert, make_url, select, text, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.dialects import backend_for
from tests.faults import checkers, tables
from tests.faults.checkers import Entry, Job, Violation
from tests.faults.clients import QUEUES, ROOMS, Client, Face, moved_clock, run_in_process
from tests.faults.history import History, Recorder
from tests.faults.proxy import Proxy
from tests.faults.space import Config, Episode, Fault

#: seconds after which a client hangs
DEADLINE = 240
#: clients are forked from a process that has imported everything
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.faults.clients"])
_runs = itertools.count(1)
LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)


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
    :param server: a server of the run's own, which may be stopped; ``url`` is then called with it, too.
    :param nodes: all nodes of a cluster, of which it is the first one.
    """

    def __init__(
        self, engine: str, url: Callable[..., str], plain: str, server: Any = None, nodes: Sequence[Any] = ()
    ) -> None:
        self.engine_name, self.plain, self.server, self.nodes = engine, plain, server, nodes
        self._url = url
        self._standby: Any = None
        #: one for each node
        self._faces: tuple[Config, list[Face], Proxy | None] | None = None
        self._connect()
        tables.metadata.create_all(self.admin)

    def url(self, driver: str) -> str:
        return self._url(driver) if self.server is None else self._url(driver, self.server)

    def _client_url(self, config: Config) -> str:
        url = self.url(config.driver)
        if config.session is None:
            return url
        return make_url(url).update_query_dict({"options": config.session}).render_as_string(hide_password=False)

    def _connect(self) -> None:
        # a connection of the harness may be among those that a fault ends
        self.admin = create_engine(self.url(self.plain), pool_size=1, max_overflow=2, pool_pre_ping=True)
        self.backend = backend_for(self.admin.dialect)
        self.locks = sl.Locks(self.admin)
        self.tables = build_context(self.admin.dialect, {}).tables

    @property
    def innodb(self) -> bool:
        return self.backend.key_rows

    def close(self) -> None:
        self._forget_face()
        self.admin.dispose()

    def run(self, episode: Episode) -> Outcome:
        """Run an episode, and judge it."""
        prefix = f"e{os.getpid()}.{next(_runs)} "
        history = History()
        recorder = Recorder(history.apply, prefix)
        promoting = any(fault.what == "promote" for fault in episode.faults)
        if promoting:
            self._forget_face()
            self._standby = self.server.standby()
            self.server.replicate_to(self._standby)
        self._prepare(prefix)
        with moved_clock(episode.config.skew):
            violations = (self._in_processes if episode.config.processes else self._in_threads)(
                episode, prefix, recorder, history
            )
        self._healed(promoting=promoting)
        violations += self._judge(prefix, history, recorder)
        return Outcome(episode, history, violations, Counter(what for what, _, _ in history.faults))

    def _prepare(self, prefix: str) -> None:
        rooms, mutexes = ([f"{prefix}{what}{number}" for number in range(3)] for what in ("room", "mutex"))
        with self.admin.begin() as connection:
            connection.execute(insert(tables.values), [{"name": f"{prefix}key{n}", "number": 0} for n in range(3)])
            connection.execute(
                insert(tables.Document), [{"name": name, "body": "", "fence": 0} for name in (*rooms, *mutexes)]
            )
            tasks = [(queue, id) for queue in ("mapped0", "mapped1") for id in "abcde"]
            values = [{"id": f"{prefix}{queue}{id}", "queue": f"{prefix}{queue}"} for queue, id in tasks]
            connection.execute(insert(tables.Task), [{**each, "status": "ready", "claim": 0} for each in values])
            connection.execute(sl.Mutex().create(*mutexes))
            connection.execute(sl.StateTransition().create(*"abcde", queue=f"{prefix}tasks0"))
            for name, capacity in zip(rooms, ROOMS.values(), strict=True):
                connection.execute(sl.semaphore.create(name, capacity))
        for node in self.nodes:
            node.catch_up()

    def _reached(self, config: Config) -> tuple[list[Face], Proxy | None]:
        """The faces of a config, which the episodes of a series use one after another, each with an empty pool."""
        if self._faces is None or self._faces[0] != config:
            self._forget_face()
            url = self._client_url(config)
            proxy = None if config.proxy is None else Proxy(url, opaque=config.proxy == "opaque")
            if proxy is None and self._standby is not None:
                url = self._either(config.driver)
            urls = [self._url(config.driver, node) for node in self.nodes] or [url if proxy is None else proxy.url]
            self._faces = config, [Face(config, each) for each in urls], proxy
        _, faces, proxy = self._faces
        if proxy is not None:
            proxy.forget()
        return faces, proxy

    def _forget_face(self) -> None:
        if self._faces is not None:
            _, faces, proxy = self._faces
            self._faces = None
            for face in faces:
                face.close()
            if proxy is not None:
                proxy.close()

    def _in_threads(self, episode: Episode, prefix: str, recorder: Recorder, history: History) -> list[Violation]:
        crashed: list[Violation] = []
        faces, proxy = self._reached(episode.config)
        start = threading.Barrier(len(episode.clients) + 1)

        def run(index: int) -> None:
            start.wait()
            try:
                Client(f"client {index}", prefix, faces[index % len(faces)], recorder).run(episode.clients[index])
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
            self._faces = None  # they have them
            return [*crashed, Violation("hang", f"{len(hung)} clients have not ended after {DEADLINE} s")]
        for face in faces:
            pool: Any = face.engine.pool
            leaked = pool.checkedout() if hasattr(pool, "checkedout") else 0
            if leaked > 0:
                crashed.append(Violation("leak", f"{leaked} connections were not given back: {pool.status()}"))
            face.empty()
        return crashed

    def _in_processes(self, episode: Episode, prefix: str, recorder: Recorder, history: History) -> list[Violation]:
        found: list[Violation] = []
        clients: list[Any] = []
        pipes: list[Any] = []
        finished: set[int] = set()
        ready, begun = threading.Barrier(len(episode.clients) + 1), threading.Event()

        def read(index: int) -> None:
            with contextlib.suppress(EOFError, OSError):  # it has ended, or was killed in the middle of an event
                while True:
                    event = pipes[index].recv()
                    if event["event"] == "ready":
                        ready.wait(DEADLINE)
                    elif event["event"] == "crashed":
                        found.append(Violation("named_errors", f"client {index} ended with {event['why']}"))
                    elif event["event"] == "finished":
                        finished.add(index)
                    else:
                        recorder.emit(event)
                        begun.set()

        readers = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(len(episode.clients))]
        try:
            for index, reader in enumerate(readers):
                here, there = PROCESSES.Pipe()
                arguments = (there, episode, index, prefix, self._client_url(episode.config))
                client = PROCESSES.Process(target=run_in_process, args=arguments, daemon=True)
                client.start()
                there.close()
                clients.append(client)
                pipes.append(here)
                reader.start()
            ready.wait(DEADLINE)
            for pipe in pipes:
                pipe.send("begin")
            begun.wait(DEADLINE)
            self._inject(episode, None, recorder, clients, threading.Event())
            for index, (client, reader) in enumerate(zip(clients, readers, strict=True)):
                client.join(DEADLINE)
                if client.exitcode is None:
                    found.append(Violation("hang", f"client {index} has not ended after {DEADLINE} s"))
                    client.kill()
                    client.join()
                reader.join()
                if client.exitcode not in (0, -signal.SIGKILL):
                    found.append(Violation("named_errors", f"client {index} ended with {client.exitcode}"))
                elif index not in finished and not history.faults and not found:
                    found.append(Violation("named_errors", f"client {index} did not finish"))
        finally:
            for client, pipe in zip(clients, pipes, strict=True):
                client.kill()
                client.join()
                pipe.close()
        return found

    # faults

    def _inject(
        self, episode: Episode, proxy: Proxy | None, recorder: Recorder, processes: list[Any], over: threading.Event
    ) -> None:
        chance, began = random.Random(episode.seed), time.monotonic()
        for fault in sorted(episode.faults, key=lambda fault: fault.after):
            if over.wait(max(0.0, began + fault.after - time.monotonic())):
                return
            with recorder.fault(fault.what), contextlib.suppress(Exception):
                # a fault may find nothing to break; what it does to clients is in the history
                self._injected(fault, proxy, processes, chance, over)

    def _injected(
        self, fault: Fault, proxy: Proxy | None, processes: list[Any], chance: random.Random, over: threading.Event
    ) -> None:
        what, server = fault.what, chance.choice(self.nodes) if self.nodes else self.server
        if what == "terminate":
            self._terminate(chance)
        elif what == "block_table":
            self._block_table(chance, over)
        elif what == "restart":
            server.restart()
        elif what == "crash":
            server.kill()
            server.start()
        elif what == "pause":
            server.pause()
            # for so long that the others of a cluster give it up, or not
            over.wait(chance.choice([0.3, 4.0]) if self.nodes else 0.3)
            server.resume()
        elif what == "sigkill":
            chance.choice(processes).kill()
        elif what == "sigstop":
            process = chance.choice(processes)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(1.5)  # longer than the shortest leases, and than the workers' heartbeats may be apart
            os.kill(process.pid, signal.SIGCONT)
        elif what == "promote":
            self._promote(proxy)
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

    def _either(self, driver: str) -> str:
        """A URL of both servers, at which the one is found that takes writes."""
        hosts = [f"{server.host}:{server.port}" for server in (self.server, self._standby)]
        url = make_url(self.url(driver)).set(host=None, port=None)
        both = url.update_query_dict({"host": hosts, "target_session_attrs": "read-write"})
        return both.render_as_string(hide_password=False)

    def _promote(self, proxy: Proxy | None) -> None:
        """Kill the server, and let its standby take over."""
        self.server.kill()
        self._standby.promote()
        self.server.close()
        self.server, self._standby = self._standby, None
        self.admin.dispose()
        self._connect()
        if proxy is not None:
            proxy.lead_to(self.url(self.plain))

    def _healed(self, *, promoting: bool) -> None:
        """Wait until the server answers again, and leave one server."""
        if self.server is None:
            return
        for node in self.nodes:
            node.heal()
        self.server.resume()
        if not self.server.running:
            self.server.start()
        if promoting:
            self._forget_face()
        if self._standby is not None:  # all clients had ended before
            self.server.replicate_to(None)
            self._standby.close()
            self._standby = None

    # the verdict

    def _judge(self, prefix: str, history: History, recorder: Recorder) -> list[Violation]:
        faulty = bool(history.faults)
        self._work_off(prefix, recorder)
        with self.admin.connect() as connection:
            ledger = [Entry(*row) for row in self._rows(connection, tables.ledger, prefix)]
            documents = {row.name: row.fence for row in self._rows(connection, tables.Document.__table__, prefix)}
            job = self.tables.job
            queues = [prefix + queue for queue in QUEUES]
            found = connection.execute(select(job).where(job.c.queue_id.in_(queues))).all()
            table = [Job(str(row.external_id), _state(row)) for row in found]
            state = self.tables.task_state
            acquired = dict(
                connection.execute(select(state.c.id, state.c.acquired).where(state.c.id.like(f"{prefix}mutex%"))).all()
            )
            usage = [row for row in connection.execute(sl.semaphore.usage()) if row.name.startswith(prefix)]
            used = {row.name: row.used + row.expired for row in usage}
        with self.admin.begin() as connection:
            # the clients of later episodes list all semaphores
            for name in (name for name, count in used.items() if not count):
                connection.execute(sl.semaphore.delete(name))
        capacities = {f"{prefix}room{number}": capacity for number, capacity in ROOMS.items()}
        violations = [
            *checkers.exclusion(history, f"{prefix}key" if self.nodes else None),
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
            *checkers.fenced_writes(history, documents),
            *checkers.guarded_writes(history),
        ]
        if not self.backend.single_writer and not self.nodes:
            violations += checkers.independence(history)
        if not faulty:
            for name, count in used.items():
                if count:
                    violations.append(Violation("leak", f"{name!r}: {count} permits are held at the end"))
        return violations

    def _rows(self, connection: Connection, table: Any, prefix: str) -> Any:
        return connection.execute(select(table).where(table.c.name.like(f"{prefix}%"))).all()

    def _work_off(self, prefix: str, recorder: Recorder) -> None:
        """Complete every job that is left, as if hours had passed."""
        job, jobs = self.tables.job, sl.Queue()
        for queue in (prefix + queue for queue in QUEUES):
            unfinished = (job.c.queue_id == queue) & job.c.completed_at.is_(None) & job.c.failed_at.is_(None)
            for _ in range(100):
                with self.admin.begin() as connection:
                    if connection.scalar(select(job.c.created_at).where(unfinished).limit(1)) is None:
                        break
                    running = job.c.started_at.is_not(None)
                    connection.execute(update(job).where(unfinished & running).values(started_at=LONG_AGO))
                    connection.execute(update(self.tables.worker).values(heartbeat_at=LONG_AGO))
                self.locks.run(jobs.requeue_stalled(3600, queue=queue))
                with self.admin.begin() as connection:
                    connection.execute(update(job).where(unfinished).values(run_at=LONG_AGO))
                captured = self.locks.run(jobs.capture(1000, queue=queue, host="the end"))
                names = [str(each.external_id) for each in captured]
                if captured:
                    with recorder.call("the end", "complete", *names) as answer:
                        answer.value = self.locks.run(jobs.complete(captured))


def _state(row: Any) -> str:
    if row.completed_at is not None:
        return "completed"
    return "dead" if row.failed_at is not None else "running" if row.started_at is not None else "ready"
