"""What the benchmarks share: durable servers, and ratios printed beside their targets."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import servers

#: the tests' servers lose in a crash what they have confirmed, so a commit costs them nothing
DURABLE = {"fsync": "on", "full_page_writes": "on"}


@contextlib.contextmanager
def durable(name: str, *, pinned: bool = True) -> Iterator[servers.SQLServer]:
    """Start a server that flushes each commit, as an app's does.

    :param pinned: on the same processor as this process: on two, the speed of the same operation varies.
    """
    if pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # inherited by the server
    made = servers.make(name)
    assert isinstance(made, servers.SQLServer)
    if isinstance(made, servers.PostgreSQL):
        made.settings = {**made.settings, **DURABLE}
    elif isinstance(made, (servers.MySQL, servers.MariaDB)):
        made.flush = 1
    with made.start() as server:
        yield server


def judge(
    what: str,
    found: float | Sequence[float],
    must: float | None = None,
    aim: float | None = None,
    *,
    least: bool = False,
) -> None:
    """Print a figure, and whether it meets its targets; append it to the file that ``BENCHMARK_RECORD`` names.

    :param found: the figure, or that of each round: then their median is printed, with their quartiles.
    :param must: the largest allowed figure, and ``aim`` the desired one.
    :param least: the targets are the smallest ones.
    """
    rounds = [found] if isinstance(found, (int, float)) else list(found)
    figure = statistics.median(rounds)
    low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (figure, figure, figure)
    met, judged = None, ""
    if must is not None and aim is not None:
        sign = -1 if least else 1
        met = "aim met" if sign * figure <= sign * aim else "must met" if sign * figure <= sign * must else "MISSED"
        judged = f"   must {'>=' if least else '<='} {must:g}, aim {aim:g}: {met}"
    spread = f"{low:.2f}-{high:.2f}" if len(rounds) > 1 else ""
    print(f"  {what:66} {figure:7.2f} {spread:>11}{judged}", flush=True)
    if path := os.environ.get("BENCHMARK_RECORD"):
        record = {"what": what, "found": figure, "low": low, "high": high, "must": must, "aim": aim}
        with Path(path).open("a") as file:
            file.write(json.dumps({**record, "least": least, "met": met}) + "\n")
