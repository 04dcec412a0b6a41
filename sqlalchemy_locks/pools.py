"""How many connections a pool gives."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy.pool import QueuePool


def most(pool: Any) -> float:
    """The most connections that a pool has out at once; endless where it sets no limit."""
    if not isinstance(pool, QueuePool) or pool._max_overflow < 0:
        return math.inf
    return pool.size() + pool._max_overflow
