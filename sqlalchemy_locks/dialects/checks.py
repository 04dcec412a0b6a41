"""Findings: what a server's version and settings mean to locks, for administrators. Each backend yields its own.

Only SELECTs are executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: the oldest version that has every feature used here, and the oldest version that is supported
_OLDEST: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "PostgreSQL": ((12,), (15,)),
    "YugabyteDB": ((), ()),
    "MySQL": ((8, 0, 13), (8, 0, 13)),
    "MariaDB": ((10, 6), (10, 6)),
    "SQLite": ((3, 35), (3, 35)),
}
Level = Literal["ok", "warning", "problem"]
#: isolation levels at which a statement reads what was committed before it began
COMMITTED = ("READ COMMITTED", "READ UNCOMMITTED")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    #: what was checked: ``version``, ``isolation``, ``drift``, ...
    subject: str
    #: ``problem``: locks don't work, or not as promised; ``warning``: something to know
    level: Level
    #: the state as a sentence, with what to do about it
    says: str


def version_finding(name: str, version: str) -> Finding:
    """Compare a server's version with the oldest one that is supported.

    :param version: as the server spells it.
    """
    usable, supported = _OLDEST[name]
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    what = f"{name} {version}"
    if numbers < usable:
        dotted = ".".join(map(str, usable))
        return Finding("version", "problem", f"{what} lacks what is needed: {dotted} is the oldest that has it")
    if numbers < supported:
        dotted = ".".join(map(str, supported))
        return Finding("version", "warning", f"{what} is older than the oldest supported version, {dotted}")
    return Finding("version", "ok", what)
