"""Run episodes for as long as asked, on engines of one's choice: ``make torture MINUTES=30 ENGINE=mysql``.

Several processes share an engine's run, each with a server of its own. Seeds are printed; ``--seed`` with ``--minutes 0``
runs one again. The end of a run is a report, as JSON, too. A violation ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from tests import servers
from tests.conftest import PLAIN, PLAIN_OF_CLUSTERS, SQLITE_DRIVERS, in_memory, install
from tests.faults.arena import PROCESSES, Arena, Outcome
from tests.faults.space import CLUSTERS, DRIVERS, SERIES, draw

ENGINES = [*DRIVERS, *CLUSTERS]
#: what the clients' processes are forked with
PRELOADED = ["tests.faults.arena", "rich.console", "psycopg", "psycopg2", "asyncpg", "pymysql"]
ROOT = Path(__file__).parents[2]
COUNTERS = ("faults", "calls", "drivers", "errors")
REPORT = Path(".venv/torture.json")
#: how many steps each client takes, about
STEPS = 60
#: an engine's run ends after so many violations
GIVE_UP = 5


def arena_of(engine: str, folder: str) -> Arena:
    """Start a server of the run's own, with the locks in it."""
    if engine == "sqlite":

        def path(driver: str) -> str:
            return f"{SQLITE_DRIVERS[driver]}:///{folder}/torture.db?timeout=60"

        install(path(PLAIN[engine]))
        return Arena(engine, path, PLAIN[engine])

    def url(driver: str, server: Any) -> str:
        return str(server.url(driver, "torture"))

    nodes: Any = servers.cluster(engine) if engine in CLUSTERS else ()
    server: Any = nodes[0] if nodes else servers.start(engine)
    plain = (PLAIN | PLAIN_OF_CLUSTERS)[engine]
    server.create_database("torture")
    install(url(plain, server))
    return Arena(engine, url, plain, server, nodes)


class Report:
    """The figures of one engine."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.episodes = self.operations = 0
        self.seconds = 0.0
        self.counters: dict[str, Counter[str]] = {name: Counter() for name in COUNTERS}
        self.violations: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        self.episodes += 1
        self.operations += line["operations"]
        for name in COUNTERS:
            self.counters[name].update(line[name])
        if line["violation"]:
            self.violations.append(line["violation"])

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in ("engine", "episodes", "operations", "violations")}
        counters = {name: dict(counter.most_common()) for name, counter in self.counters.items()}
        return {**plain, "seconds": round(self.seconds, 1), **counters}


def told(outcome: Outcome) -> dict[str, Any]:
    """The figures of an episode."""
    calls, config, seed = outcome.history.calls.values(), outcome.episode.config, outcome.episode.seed
    violations = [str(violation) for violation in outcome.violations]
    return {
        "seed": seed,
        "operations": outcome.history.operations,
        "faults": outcome.faults,
        "calls": Counter(call.what for call in calls),
        "drivers": {f"{config.driver} {config.face}": 1},
        "errors": Counter(call.error.split(".")[-1] for call in calls if call.error),
        "violation": {"seed": seed, "violations": violations, "calls": list(map(str, calls))} if violations else None,
    }


def run_share(engine: str, seconds: float, seed: int, share: int, shares: int) -> None:
    """Run every ``shares``-th series of seeds until the time is up, and write the figures of each episode as a line."""
    with tempfile.TemporaryDirectory(prefix="sqlalchemy-locks-torture-", dir=in_memory()) as folder:
        arena = arena_of(engine, folder)
        began = time.monotonic()
        seed += share * SERIES
        while True:
            outcome = arena.run(draw(seed, engine, own_server=True, processes=True, steps=STEPS))
            print(json.dumps(told(outcome)), flush=True)
            if time.monotonic() - began > seconds:
                break
            seed += 1
            if seed % SERIES == 0:
                seed += (shares - 1) * SERIES
        arena.close()
        for server in arena.nodes or [arena.server]:
            if server is not None:
                server.close()


def torture(engine: str, seconds: float, seed: int, console: Console, shares: int) -> Report:
    """Run episodes on an engine until the time is up, or several have violated something.

    :raises Unavailable: :raises RuntimeError: with what a process has written that failed.
    """
    report = Report(engine)
    command = [sys.executable, "-m", "tests.faults.torture", "--engine", engine]
    command += ["--minutes", str(seconds / 60), "--seed", str(seed), "--share"]
    processes = [
        subprocess.Popen([*command, f"{share}/{shares}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for share in range(shares)
    ]
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(json.loads(line))
        lines.put(None)

    for process in processes:
        threading.Thread(target=read, args=(process,), daemon=True).start()
    began, running = time.monotonic(), shares
    try:
        with console.status(engine) as status:
            while running and len(report.violations) < GIVE_UP:
                line = lines.get()
                if line is None:
                    running -= 1
                    continue
                if "unavailable" in line:
                    raise servers.Unavailable(line["unavailable"])
                report.add(line)
                if line["violation"]:
                    found = line["violation"]["violations"][0]
                    console.print(f"seed {line['seed']} on {engine}: {found}", markup=False, highlight=False)
                passed = f"{time.monotonic() - began:.0f} of {seconds:.0f} s"
                status.update(f"{engine}: {passed}, {report.operations} operations, seed {line['seed']}")
        report.seconds = time.monotonic() - began
        if not running and any(process.wait() for process in processes):
            raise RuntimeError(f"{engine}: a process of the run has failed")
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    return report


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for each engine")
    parser.add_argument(
        "--engine", action="append", choices=ENGINES, help="these only; all but the clusters by default"
    )
    parser.add_argument("--seed", type=int, help="begin with this one")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="processes that share a run")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console()
    for noisy in ("asyncmy", "asyncio", "sqlalchemy.pool", "sqlalchemy_locks"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)
    reports = []
    first = int(time.time()) % 10**6 * 1000 if options.seed is None else options.seed
    PROCESSES.set_forkserver_preload(PRELOADED)
    if options.share is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its folder is removed
        share, shares = map(int, options.share.split("/"))
        try:
            run_share(options.engine[0], options.minutes * 60, first, share, shares)
        except servers.Unavailable as why:
            print(json.dumps({"unavailable": str(why)}), flush=True)
        return 0
    console.print(f"first seed: {first}", highlight=False)
    for engine in options.engine or DRIVERS:
        try:
            shares = 1 if engine in CLUSTERS else options.jobs
            report = torture(engine, options.minutes * 60, first, console, shares)
        except servers.Unavailable as why:
            console.print(f"{engine}: {why}", markup=False)
            continue
        reports.append(report.to_json())
        faults = report.counters["faults"]
        console.print(
            f"{engine}: {report.operations} operations in {report.episodes} episodes, {report.seconds:.0f} s;"
            f" {sum(faults.values())} faults {dict(faults.most_common())};"
            f" {len(report.violations)} violations",
            markup=False,
            highlight=False,
        )
        REPORT.write_text(json.dumps(reports, indent=1))
    console.print(f"report: {REPORT}", highlight=False)
    return int(any(report["violations"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
