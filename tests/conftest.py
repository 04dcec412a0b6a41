"""The servers of a test run: real ones, each started once, when the first test needs it.

Tests of an engine that can't be started here are skipped with the reason; under ``CI=true`` they fail.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pymysql
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import NullPool, create_engine, make_url

from sqlalchemy_locks.alembic import ops  # noqa: F401  (registers op.upgrade_locks)
from sqlalchemy_locks.alembic.steps import STEPS
from tests import servers as real
from tests.fixtures import lent
from tests.servers import place
from tests.servers.yugabytedb import ADVISORY

SQLITE_DRIVERS = {"pysqlite": "sqlite", "aiosqlite": "sqlite+aiosqlite"}
#: a synchronous driver of each engine, for what the tests themselves do there
PLAIN = {
    "postgresql15": "psycopg",
    "postgresql18": "psycopg",
    "yugabytedb": "psycopg2",
    "mysql": "pymysql",
    "mariadb": "mariadb+pymysql",
    "sqlite": "pysqlite",
}
#: the same of each node of a cluster
PLAIN_OF_CLUSTERS = {"galera": "mariadb+pymysql", "group_replication": "pymysql", "single_primary": "pymysql"}
#: what ``make test-clusters`` runs, and ``make test`` doesn't
CLUSTERS = {name: pytest.param(name, marks=pytest.mark.cluster) for name in real.CLUSTERS}


class Servers:
    """The servers that the run has started, and databases on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, real.SQLServer | real.Unavailable] = {}
        self._clusters: dict[str, Sequence[real.Node] | real.Unavailable] = {}
        self._numbers = itertools.count()
        self._installed: dict[tuple[str, str], str] = {}
        self._fresh: list[tuple[real.PostgreSQL, str]] = []

    def server(self, name: str) -> real.SQLServer:
        """The server of that name, as ``tests.servers`` calls it; of a cluster the first node."""
        if name in real.CLUSTERS:
            return self.nodes(name)[0]
        return self._had(name, lambda: self._behind(name) or real.start(name))

    def nodes(self, name: str) -> Sequence[real.Node]:
        """The three nodes of a cluster."""
        if name not in self._clusters:
            try:
                self._clusters[name] = real.cluster(name)
            except real.Unavailable as why:
                self._clusters[name] = why
        nodes = self._clusters[name]
        if isinstance(nodes, real.Unavailable):
            not_here(nodes)
        return nodes

    def pair(self) -> tuple[real.PostgreSQL, real.PostgreSQL]:
        """A PostgreSQL and its hot standby, not shared with other tests: a standby begins as a copy of everything."""
        primary = self._had("primary", lambda: real.start("postgresql15"))
        assert isinstance(primary, real.PostgreSQL)
        standby = self._had("standby", primary.standby)
        assert isinstance(standby, real.PostgreSQL)
        return primary, standby

    def _had(self, name: str, start: Callable[[], real.Server]) -> real.SQLServer:
        if name not in self._started:
            try:
                server = start()
                assert isinstance(server, real.SQLServer)
                self._started[name] = server
            except real.Unavailable as why:
                self._started[name] = why
        server_ = self._started[name]
        if isinstance(server_, real.Unavailable):
            not_here(server_)
        return server_

    def _behind(self, name: str) -> real.SQLServer | None:
        """A pooler in front of the server whose name is behind the hyphen: ``pgbouncer-postgresql15``."""
        pooler, _, behind = name.partition("-")
        if pooler != "pgbouncer":
            return None
        server = self.server(behind)
        assert isinstance(server, real.PostgreSQL)
        return real.PgBouncer(server).start()

    def pooled(self, driver: str) -> str:
        """The URL through PgBouncer, in transaction mode, of the database that ``installed("postgresql15")`` gives."""
        database = make_url(self.installed("postgresql15", driver)).database
        return self.server("pgbouncer-postgresql15").url(driver, database)

    def url(self, engine_name: str, driver: str, database: str) -> str:
        """A SQLAlchemy URL of a database that ``database()`` has made."""
        if engine_name == "sqlite":
            # its writers don't queue: on a busy machine one of them may be passed over for the 5 seconds of the default
            return f"{SQLITE_DRIVERS[driver]}:///{self._folder / database}.db?timeout=120"
        return self.server(engine_name).url(driver, database)

    def database(self, engine_name: str) -> str:
        """The name of a new, empty database."""
        name = f"t{os.getpid()}_{next(self._numbers)}"
        if engine_name != "sqlite":
            self.server(engine_name).create_database(name)
        return name

    def fresh(self, engine_name: str, driver: str) -> str:
        """The URL of a new, empty database; it is that of the module's tests, not of later ones."""
        name = self.database(engine_name)
        if engine_name != "sqlite" and isinstance(server := self.server(engine_name), real.PostgreSQL):
            self._fresh.append((server, name))
        return self.url(engine_name, driver, name)

    def drop_fresh(self) -> None:
        """Drop what ``fresh()`` has made on PostgreSQL, where each database takes 8 MB."""
        for server in {server for server, _ in self._fresh}:
            server.drop_database(*(name for each, name in self._fresh if each is server))
        self._fresh.clear()

    def installed(self, engine_name: str, driver: str, locking: str = "native") -> str:
        """The URL of a database with the locks in it; one for the whole run."""
        key = engine_name, locking
        if key not in self._installed:
            name = self.database(engine_name)
            if engine_name == "yugabytedb" and locking == "advisory":
                # the step chooses by what the server answers
                locking = "native"
                server = self.server(engine_name)
                assert isinstance(server, real.YugabyteDB)
                server.configure(name, **ADVISORY)
            install(self.url(engine_name, (PLAIN | PLAIN_OF_CLUSTERS)[engine_name], name), locking=locking)
            self._installed[key] = name
            for node in self.nodes(engine_name) if engine_name in real.CLUSTERS else ():
                node.catch_up()
        return self.url(engine_name, driver, self._installed[key])

    def urls(self, cluster: str, driver: str) -> list[str]:
        """The URLs at each node of the database of a cluster that ``installed()`` gives."""
        database = make_url(self.installed(cluster, driver)).database
        return [node.url(driver, database) for node in self.nodes(cluster)]


def not_here(why: real.Unavailable) -> NoReturn:
    """Skip the test for a server that can't be started here; fail it under ``CI=true``."""
    if os.environ.get("CI") == "true":
        pytest.fail(str(why))
    pytest.skip(str(why))


def install(url: str, **options: str) -> None:
    """Install the locks in a database, as a revision of an app would."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        operations = Operations(MigrationContext.configure(connection))
        operations.upgrade_locks(from_="base", to=STEPS[-1], **options)
    engine.dispose()


def in_memory(needed: int = 2**30) -> str | None:
    """A folder in which databases don't wait for a disk, if there is one with so many bytes free."""
    folder = Path("/dev/shm")
    roomy = os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > needed
    return str(folder) if roomy else None


#: these take longest, and mostly wait
LONGEST = (
    "tests/faults/test_worker_storm.py",
    "tests/docs/test_demo.py",
    "tests/packaging/",
    "tests/facade/test_lease_renewal.py",
    "tests/typing/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread what takes longest over the run, each process of which begins with a part of it; none is the last one."""
    order = [item for item in items if not item.nodeid.startswith(LONGEST)]
    for number, name in reversed([*enumerate(LONGEST)]):
        first = number * len(order) // len(LONGEST)
        order[first:first] = [item for item in items if item.nodeid.startswith(name)]
    items[:] = order


#: seconds within which the threads of a test must end after it
ENDS_WITHIN = 30
_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Close what a failed test has left open.

    Its error keeps the frames of the test, and in them the connections, until the next test is called, which would
    then fail for their ResourceWarnings.
    """
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    if call.when == "teardown" and item.stash.get(_FAILED, False):
        error = getattr(sys, "last_value", None)
        for name in ("last_value", "last_traceback", "last_exc"):
            with contextlib.suppress(AttributeError):
                delattr(sys, name)
        collect_what_is_left_of(error)
        lent.close_all()
    return report


def collect_what_is_left_of(error: BaseException | None) -> None:
    """Collect everything that an error refers to, without warnings."""
    found: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, found.append
    try:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        for _ in range(10):
            found.clear()
            gc.collect()
            if not found:
                break
            time.sleep(0.05)  # aiosqlite's threads release the rest
    finally:
        found.clear()
        gc.collect()
        sys.unraisablehook = hook


@pytest.fixture(scope="module", autouse=True)
def nothing_of_a_module_is_left_open() -> Iterator[None]:
    """Wait for the threads of what the tests of a module share."""
    gc.collect()
    threads = set(threading.enumerate())
    yield
    expect_the_end_of(threads)


@pytest.fixture(autouse=True)
def nothing_is_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves something open, not a later one: threads that don't end, connections without an owner.

    Where it shares something with the other tests of its module, as an engine whose pool has a thread for each
    connection, the threads are those of the module. A connection that nothing refers to any more is a ResourceWarning as
    soon as it is collected. The collector examines only the objects that the test has created.
    """
    gc.freeze()
    threads = set(threading.enumerate())
    yield
    if request.node.stash.get(_FAILED, False):
        return  # its error keeps what it left, until it has been reported
    known = request.node._fixtureinfo.name2fixturedefs
    if all(
        made[-1].scope in ("function", "session") for name, made in known.items() if not name.startswith("nothing_")
    ):
        expect_the_end_of(threads)
    gc.collect()


#: threads that have failed a test already
_told_of: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def expect_the_end_of(threads_before: set[threading.Thread]) -> None:
    """Wait for the threads that were started since; fail when one of them doesn't end."""
    until = time.monotonic() + ENDS_WITHIN
    left = [thread for thread in threading.enumerate() if thread not in threads_before and thread not in _told_of]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    alive = [thread for thread in left if thread.is_alive()]
    _told_of.update(alive)
    assert not alive, f"threads of this test are still at work: {alive}"


@pytest.fixture(scope="session", autouse=True)
def servers_in_memory() -> None:
    """Start the servers in memory: half of the time for a new database is that for its 300 files on a disk."""
    if folder := in_memory(8 * 2**30):
        place.root = Path(folder)


@pytest.fixture(scope="session", autouse=True)
def unfrozen() -> Iterator[None]:
    """Let pytest itself examine all objects at the very end."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def no_tls() -> Iterator[None]:
    """Connect without TLS, but in tests/faults: a handshake takes longer than most statements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGSSLMODE", "disable")
        patch.setattr(pymysql.connections, "SSL_ENABLED", False)
        yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_on_the_servers(servers: Servers) -> Iterator[None]:
    yield
    lent.close_all()
    servers.drop_fresh()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    folder = Path(tempfile.mkdtemp(prefix="sqlalchemy-locks-tests-", dir=in_memory()))
    try:
        yield Servers(folder)
    finally:
        real.stop_all()
        shutil.rmtree(folder, ignore_errors=True)
