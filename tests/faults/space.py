"""The space that episodes are drawn from: engine, driver, TLS, isolation, pool, what clients do, which faults come.

An episode is a value: its seed and engine make the same one again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

#: drivers by engine, as ``(driver, face)``
DRIVERS: dict[str, list[tuple[str, str]]] = {
    "postgresql15": [("psycopg", "Locks"), ("psycopg2", "Locks"), ("psycopg", "AsyncLocks"), ("asyncpg", "AsyncLocks")],
    "postgresql18": [("psycopg", "Locks"), ("asyncpg", "AsyncLocks")],
    "yugabytedb": [("psycopg2", "Locks"), ("yugabytedb", "Locks")],
    "mysql": [("pymysql", "Locks"), ("aiomysql", "AsyncLocks"), ("asyncmy", "AsyncLocks")],
    "mariadb": [("pymysql", "Locks"), ("mariadb+pymysql", "Locks"), ("mariadb+aiomysql", "AsyncLocks")],
    "sqlite": [("pysqlite", "Locks"), ("aiosqlite", "AsyncLocks")],
}
#: the same of clusters, whose clients are spread over the nodes
CLUSTERS: dict[str, list[tuple[str, str]]] = {
    "galera": [("mariadb+pymysql", "Locks"), ("mariadb+aiomysql", "AsyncLocks")],
    "group_replication": [("pymysql", "Locks"), ("aiomysql", "AsyncLocks")],
}
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
#: what befalls a run; ``server`` ones need a server of their own, ``process`` ones a client in a process of its own
PROXY = ["cut", "cut_before", "cut_after", "lost_commit", "delay", "half_close", "refuse"]
ENGINE = ["terminate", "block_table"]
SERVER = ["restart", "crash", "pause"]
PROCESS = ["sigkill", "sigstop"]
#: of statements and COMMITs, one in two hundred fails
FAILING = "-c stand_in.failures=0.005 -c stand_in.seed={}"
#: engines of which a standby can be promoted
REPLICATED = ["postgresql15", "postgresql18"]
#: so many seeds after one another have the same config, whose engines are used again
SERIES = 8

Step = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """How the clients of an episode connect."""

    engine: str
    driver: str
    face: str
    #: by the engine's option, or by a ``connect`` event of the app
    isolation: str | None = None
    isolation_by: str = "option"
    pool: int = 4
    proxy: str | None = None
    tls: bool = False
    #: how far the clock of the clients is off, in seconds
    skew: float = 0.0
    #: the clients are processes
    processes: bool = False
    #: ``stalled_after`` of all workers, in seconds
    stalled: float = 60.0
    #: options of the clients' sessions: by which the stand-in of YugabyteDB lets statements and COMMITs fail
    session: str | None = None


@dataclass(frozen=True)
class Fault:
    """What befalls the run, and when, in seconds after its beginning."""

    what: str
    after: float
    number: int = 1


@dataclass(frozen=True)
class Episode:
    """Some clients, each with its steps."""

    seed: int
    config: Config
    clients: tuple[tuple[Step, ...], ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def steps(self) -> int:
        return sum(map(len, self.clients))


def draw(seed: int, engine: str, *, own_server: bool = False, processes: bool = False, steps: int = 12) -> Episode:
    """Draw an episode.

    :param own_server: the server may be stopped. :param processes: clients may be processes.
    :param steps: how many each client takes, about.
    """
    config = _config(random.Random(f"{engine} series {seed // SERIES}"), engine, processes)
    chance = random.Random(f"{engine} {seed}")
    kinds = ["block_table"] if engine == "sqlite" else [*ENGINE, *(PROXY if config.proxy else [])]
    if own_server and engine != "sqlite":
        kinds += SERVER
    if config.processes:
        kinds = PROCESS
    faults = tuple(
        Fault(chance.choice(kinds), round(chance.uniform(0.02, 0.6), 3), chance.randint(1, 60))
        for _ in range(chance.randint(1, 3) if chance.random() < 0.6 else 0)
    )
    if own_server and engine in REPLICATED and not config.processes and chance.random() < 0.04:
        faults = (Fault("promote", round(chance.uniform(0.05, 0.6), 3)),)
    clients = tuple(
        tuple(_step(chance, config) for _ in range(chance.randint(max(1, steps // 2), steps * 3 // 2)))
        for _ in range(chance.randint(2, 5))
    )
    return Episode(seed, config, clients, faults)


def _config(chance: random.Random, engine: str, processes: bool) -> Config:
    driver, face = chance.choice((DRIVERS | CLUSTERS)[engine])
    cluster = engine in CLUSTERS
    sqlite, in_processes = engine == "sqlite", chance.random() < 0.1 and processes and not cluster
    # Group Replication refuses SERIALIZABLE at COMMIT
    levels = [*(LEVELS[:2] if cluster else LEVELS), "AUTOCOMMIT"]
    return Config(
        engine,
        driver,
        face,
        isolation=None if sqlite or chance.random() < 0.5 else chance.choice(levels),
        isolation_by=chance.choice(["option", "event"]),
        pool=chance.choice([1, 2, 4, 8]),
        proxy=None
        if sqlite or cluster or in_processes or chance.random() < 0.6
        else chance.choice(["reads", "reads", "opaque"]),
        tls=engine in ("postgresql15", "mysql") and chance.random() < 0.4,
        skew=chance.choice([0.0, 0.0, 0.0, 7200.0, -7200.0]),
        processes=in_processes,
        stalled=chance.choice([1.0, 60.0]),
        session=chance.choice([None, FAILING.format(chance.randrange(2**31))]) if engine == "yugabytedb" else None,
    )


def _step(chance: random.Random, config: Config) -> Step:
    kinds = ["block"] * 4 + ["session"] * 3 + ["mutex"] * 3 + ["permits"] * 3 + ["lease"] * 2 + ["put"] * 2
    kinds += ["work"] * 3 + ["task"] * 2 + ["mapped"] * 2 + ["worker", "period"] + ["upkeep"] * 3
    if config.face == "AsyncLocks":
        kinds += ["cancelled"] * 2
    what = chance.choice(kinds)
    key = chance.randrange(3)
    step: Step = {"what": what, "key": key}
    if what in ("block", "session"):
        step["keys"] = sorted(chance.sample(range(3), chance.choice([1, 1, 1, 2])))
        step["shared"] = chance.random() < 0.25 and config.engine not in CLUSTERS
        step["timeout"] = chance.choice([0, 0.05, 5, 5, 5])
        step["body"] = [
            chance.choice(
                ["write", "write", "sample", "nested", "nested_back", "error", "error_nested", "check", "pause"]
            )
            for _ in range(chance.randint(1, 4))
        ]
        step["end"] = chance.choice(["commit", "commit", "commit", "rollback"])
    if what == "session":
        levels = [] if config.engine == "sqlite" else LEVELS[:2] if config.engine in CLUSTERS else LEVELS
        step["isolation"] = chance.choice([None, None, *levels]) if levels else None
        step["unlock"] = chance.random() < 0.2
        # on SQLite it may be the outermost one, where locks are refused
        step["savepoint"] = chance.random() < 0.2 and config.engine != "sqlite"
    elif what == "mutex":
        step["token"], step["in_session"] = chance.random() < 0.5, chance.random() < 0.3
        step["late"] = chance.random() < 0.5
        step["end"] = chance.choice(["commit", "commit", "rollback"])
    elif what == "permits":
        step["count"], step["timeout"] = chance.choice([1, 1, 2]), chance.choice([0, 0.05, 3])
        step["request"] = chance.choice([None, None, chance.randrange(4)])
        step["both"], step["in_session"] = chance.random() < 0.3, chance.random() < 0.3
        step["guarded"], step["late"] = chance.random() < 0.5, chance.random() < 0.3
    elif what == "lease":
        step["timeout"], step["samples"] = chance.choice([0, 0.1, 3]), chance.randint(1, 5)
        step["ttl"] = chance.choice([1, 60])
    elif what in ("put", "work", "task", "mapped"):
        step["count"], step["end"] = chance.randint(1, 3), chance.choice(["commit", "commit", "commit", "rollback"])
        step["then"] = chance.choice(["complete", "complete", "fail", "release"])
        #: the workers' queue, or that of clients that capture
        step["queue"] = chance.choice([0, 1])
        step["payload"] = chance.choice(["return", "return", "pause", "raise", "retry", "discard"])
    elif what == "worker":
        step["concurrency"], step["stop_after"] = chance.randint(1, 3), chance.choice([None, None, 1, 3])
        step["batch"], step["prefetch"] = chance.choice([1, 10]), chance.choice([0, 0, 5])
    elif what == "upkeep":
        step["task"] = chance.choice(["vacuum", "sweep", "maintain", "usage", "held", "holders"])
    elif what == "cancelled":
        step["ticks"] = chance.choice([1, 2, 3, 5, 8, 13, 30, 100])
        step["of"] = chance.choice(["block", "lease", "mutex"])
    return step
