"""All benchmarks that have targets, one after the other, and all their targets in one table at the end.

    make bench NAME=everything

It takes half an hour, and means something on a quiet machine only.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
import sys

BENCHMARKS = ("lock", "mutex", "semaphore", "waiting", "queue", "redis")
PACKAGES = ("sqlalchemy", "psycopg", "asyncpg", "pymysql", "redis", "sqlalchemy-dlock", "pgqueuer", "procrastinate")
JUDGED = re.compile(r" must [<>]= .*: (aim met|must met|MISSED)$")


def main() -> None:
    """Run the benchmarks."""
    judged: dict[str, list[str]] = {}
    for name in BENCHMARKS:
        print(f"\n== {name}", flush=True)
        with subprocess.Popen([sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                print(line, end="", flush=True)
                if JUDGED.search(line):
                    judged.setdefault(name, []).append(line.rstrip())
        if run.returncode:
            sys.exit(f"benchmarks.{name} ended with {run.returncode}")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    print(f"\n== all targets\nPython {platform.python_version()}, {versions}")
    for name, lines in judged.items():
        print(f"\n{name}", *lines, sep="\n")
    every = [line for lines in judged.values() for line in lines]
    missed = [line for line in every if line.endswith("MISSED")]
    print(f"\n{len(every)} targets, {len(missed)} missed")


if __name__ == "__main__":
    main()
