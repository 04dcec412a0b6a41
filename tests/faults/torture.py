"""Run episodes for as long as asked, on engines of one's choice: ``make torture MINUTES=30 ENGINE=mysql``.

Seeds are printed; ``--seed`` runs one again, ``--replay`` an episode from a report. The end of a run is a report, as JSON,
too. A violation is shrunk to the fewest steps that still show it, and ends with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tests import servers
from tests.conftest import PLAIN, SQLITE_DRIVERS, in_memory, install
from tests.faults.arena import Arena, Outcome, shrink
from tests.faults.space import DRIVERS, Episode, draw

ENGINES = [*DRIVERS]


def arena_of(engine: str, folder: str) -> Arena:
    """Start a server of the run's own, with the locks in it."""
    if engine == "sqlite":

        def url(driver: str) -> str:
            return f"{SQLITE_DRIVERS[driver]}:///{folder}/torture.db?timeout=60"

        install(url(PLAIN[engine]))
        return Arena(engine, url, PLAIN[engine])
    server: Any = servers.start(engine)
    server.create_database("torture")
    install(server.url(PLAIN[engine], "torture"))
    return Arena(engine, lambda driver: server.url(driver, "torture"), PLAIN[engine], server)


class Report:
    """The figures of one engine."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.episodes = self.operations = 0
        self.seconds = 0.0
        self.faults: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.drivers: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[dict[str, Any]] = []

    def count(self, outcome: Outcome) -> None:
        self.episodes += 1
        self.operations += outcome.history.operations
        self.faults += outcome.faults
        self.drivers[f"{outcome.episode.config.driver} {outcome.episode.config.face}"] += 1
        self.calls.update(call.what for call in outcome.history.calls.values())
        self.errors.update(call.error.split(".")[-1] for call in outcome.history.calls.values() if call.error)

    def blame(self, outcome: Outcome, smallest: Episode) -> None:
        self.violations.append(
            {
                "seed": outcome.episode.seed,
                "violations": [str(violation) for violation in outcome.violations],
                "calls": [str(call) for call in outcome.history.calls.values()],
                "steps": outcome.episode.steps,
                "shrunk_to": smallest.steps,
                "episode": json.loads(smallest.to_json()),
            }
        )

    def to_json(self) -> dict[str, Any]:
        counters = {name: dict(getattr(self, name).most_common()) for name in ("faults", "calls", "drivers", "errors")}
        plain = {name: getattr(self, name) for name in ("engine", "episodes", "operations", "violations")}
        return {**plain, "seconds": round(self.seconds, 1), **counters}


def torture(engine: str, seconds: float, seed: int, console: Console, *, steps: int, give_up: int) -> Report:
    """Run episodes on an engine until the time is up, or so many have violated something."""
    report = Report(engine)
    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with tempfile.TemporaryDirectory(prefix="sqlalchemy-locks-torture-", dir=in_memory()) as folder:
        arena = arena_of(engine, folder)
        began = time.monotonic()
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(engine, total=seconds, told="")
            while (passed := time.monotonic() - began) < seconds and len(report.violations) < give_up:
                outcome = arena.run(draw(seed, engine, own_server=True, processes=True, steps=steps))
                report.count(outcome)
                if outcome.violations:
                    console.print(f"seed {seed} on {engine}: {outcome.violations[0]}", markup=False, highlight=False)
                    report.blame(outcome, shrink(arena, outcome))
                faults = sum(report.faults.values())
                told = f"{report.operations} operations, {faults} faults, {len(report.violations)} violations"
                progress.update(task, completed=passed, told=f"seed {seed}: {told}")
                seed += 1
            report.seconds = time.monotonic() - began
        arena.close()
        if arena.server is not None:
            arena.server.close()
    return report


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="make torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="for each engine")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="these only; all by default")
    parser.add_argument("--seed", type=int, help="run this one only, or with --minutes from it on")
    parser.add_argument("--episodes", type=int, help="run so many episodes, whatever the time")
    parser.add_argument("--steps", type=int, default=60, help="how many steps each client takes, about")
    parser.add_argument("--give-up", type=int, default=5, help="end an engine's run after so many violations")
    parser.add_argument("--replay", type=Path, help="run the episodes of the violations in a report")
    parser.add_argument("--report", type=Path, default=Path(".venv/torture.json"), help="where the report is written")
    options = parser.parse_args()
    console = Console()
    for noisy in ("asyncmy", "asyncio", "sqlalchemy.pool", "sqlalchemy_locks"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL + 1)
    reports = []
    if options.replay is not None:
        return replay(options.replay, console)
    first = int(time.time()) % 10**6 * 1000 if options.seed is None else options.seed
    console.print(f"first seed: {first}", highlight=False)
    for engine in options.engine or ENGINES:
        try:
            report = torture(engine, options.minutes * 60, first, console, steps=options.steps, give_up=options.give_up)
        except servers.Unavailable as why:
            console.print(f"{engine}: {why}", markup=False)
            continue
        reports.append(report.to_json())
        console.print(
            f"{engine}: {report.operations} operations in {report.episodes} episodes, {report.seconds:.0f} s;"
            f" {sum(report.faults.values())} faults {dict(report.faults.most_common())};"
            f" {len(report.violations)} violations",
            markup=False,
            highlight=False,
        )
        options.report.write_text(json.dumps(reports, indent=1))
    console.print(f"report: {options.report}", highlight=False)
    return int(any(report["violations"] for report in reports))


def replay(path: Path, console: Console) -> int:
    """Run the episodes of a report's violations again, up to ten times each."""
    guilty = 0
    for report in json.loads(path.read_text()):
        if not report["violations"]:
            continue
        with tempfile.TemporaryDirectory(dir=in_memory()) as folder:
            arena = arena_of(report["engine"], folder)
            for violation in report["violations"]:
                episode = Episode.from_json(json.dumps(violation["episode"]))
                found = next((outcome for _ in range(10) if (outcome := arena.run(episode)).violations), None)
                guilty += found is not None
                if found is None:
                    console.print(f"seed {episode.seed}: ten times without a violation", highlight=False)
                    continue
                for call in found.history.calls.values():
                    console.print(str(call), markup=False, highlight=False)
                for each in found.violations:
                    console.print(str(each), markup=False, style="red")
            arena.close()
            if arena.server is not None:
                arena.server.close()
    return int(guilty > 0)


if __name__ == "__main__":
    sys.exit(main())
