"""Findings for administrators: effects of a server's version and settings on locks. Each backend yields its own.

Only SELECTs are executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: the oldest version that is supported
_OLDEST = {"PostgreSQL": (15,), "YugabyteDB": (), "MySQL": (8, 0, 13), "MariaDB": (10, 6), "SQLite": (3, 35)}
Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    #: what was checked: ``version``, ``isolation``, ``drift``, ...
    subject: str
    #: ``problem``: locks don't work, or not as promised; ``warning``: something to know
    level: Level
    #: the state as a sentence, with what to do about it
    says: str


def idle_finding(period: str, setting: str) -> Finding:
    """Warn of transactions that nothing ends while their process is stopped, unless ``setting`` is set."""
    says = (
        f"a process that is stopped inside a transaction keeps its locks {period}: limit that by {setting}, for the "
        "role or the connections of the app"
    )
    return Finding("idle transactions", "warning", says)


def version_finding(name: str, version: str) -> Finding:
    """Compare a server's version with the oldest one that is supported.

    :param version: as the server spells it.
    """
    oldest = _OLDEST[name]
    what = f"{name} {version}"
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < oldest:
        dotted = ".".join(map(str, oldest))
        return Finding("version", "problem", f"{what} is older than the oldest supported version, {dotted}")
    return Finding("version", "ok", what)
