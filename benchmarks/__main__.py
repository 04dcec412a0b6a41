"""All benchmarks that have targets, one after the other, and all their targets in one table at the end.

    make bench                           # all: an hour, and it means something on a quiet machine only
    make bench ONLY='lock redis'         # these
    make bench ONLY='waiting:sqlite'     # with an argument; several are separated by commas

The figures are written to build/benchmarks.json, and a picture of each benchmark's targets beside it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BENCHMARKS = ("lock", "mutex", "semaphore", "waiting", "queue", "crowds", "redis", "network", "growth")
#: run when asked for
OTHERS = ("page",)
PACKAGES = ("sqlalchemy", "psycopg", "asyncpg", "pymysql", "redis", "sqlalchemy-dlock", "pgqueuer", "procrastinate")
BUILD = Path("build")

Record = dict[str, Any]


def run(asked: list[str], console: Console) -> dict[str, list[Record]]:
    """Run benchmarks, and return the figures of each."""
    found: dict[str, list[Record]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(asked))
        for each in asked:
            name, _, arguments = each.partition(":")
            progress.update(task, description=each)
            progress.console.print(f"\n== {each}")
            records = BUILD / "benchmark.jsonl"
            records.unlink(missing_ok=True)
            command = [sys.executable, "-m", f"benchmarks.{name}", *filter(None, arguments.split(","))]
            environment = {**os.environ, "BENCHMARK_RECORD": str(records)}
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    progress.console.print(line, end="", markup=False, highlight=False, soft_wrap=True)
            if process.returncode:
                sys.exit(f"benchmarks.{name} ended with {process.returncode}")
            if records.exists():
                found[each] = [json.loads(line) for line in records.read_text().splitlines()]
            progress.advance(task)
    return found


def picture(name: str, records: list[Record], path: Path) -> None:
    """Draw the figures that have targets, relative to them: a bar that reaches the line has just met its must."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"  # texts, a tenth of the size of outlines
    held_to = [record for record in records if record["met"]]
    figure = Figure(figsize=(9, 0.6 + 0.38 * len(held_to)), layout="constrained")
    axes = figure.subplots()
    for row, record in enumerate(reversed(held_to)):
        found, must, aim = ((record[key] or 1e-9) for key in ("found", "must", "aim"))
        of = (lambda x, must=must: must / x) if record["least"] else (lambda x, must=must: x / must)
        color = {"MISSED": "#c0392b", "must met": "#2e86c1", "aim met": "#1e8449"}[record["met"]]
        axes.barh(row, of(found), color=color, height=0.6)
        axes.plot([of(aim)] * 2, [row - 0.4, row + 0.4], color="black", linewidth=1)
        axes.text(of(found) + 0.01, row, f"{record['found']:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="#c0392b", linewidth=1)
    axes.set_yticks(range(len(held_to)), [record["what"] for record in reversed(held_to)], fontsize=8)
    axes.set_title(f"{name}: shorter is better; red line: must, black: aim", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("only", nargs="*", metavar="NAME[:ARGUMENT,...]", help=", ".join((*BENCHMARKS, *OTHERS)))
    asked: list[str] = parser.parse_args().only
    for each in asked:
        if each.partition(":")[0] not in (*BENCHMARKS, *OTHERS):
            parser.error(f"there is no benchmark {each!r}")
    BUILD.mkdir(exist_ok=True)
    console = Console()
    found = run(asked or list(BENCHMARKS), console)
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    document = {"machine": f"{os.cpu_count()} processors, {platform.machine()}", "versions": versions, "found": found}
    (BUILD / "benchmarks.json").write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"\n== all targets\n{', '.join(f'{name} {version}' for name, version in versions.items())}")
    for name, records in found.items():
        console.print(f"\n{name}")
        for record in records:
            if record["met"]:
                sign = ">=" if record["least"] else "<="
                judged = f"must {sign} {record['must']:g}, aim {record['aim']:g}: {record['met']}"
                console.print(
                    f"  {record['what']:66} {record['found']:7.2f}   {judged}", highlight=False, soft_wrap=True
                )
        if any(record["met"] for record in records):
            picture(name, records, BUILD / f"benchmark-{name.replace(':', '-')}.svg")
    every = [record for records in found.values() for record in records if record["met"]]
    missed = sum(record["met"] == "MISSED" for record in every)
    console.print(f"\n{len(every)} targets, {missed} missed; {BUILD}/benchmarks.json has all figures")


if __name__ == "__main__":
    main()
