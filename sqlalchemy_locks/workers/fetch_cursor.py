"""Where a worker's next look for jobs begins: at the head of the queue, or where its last one ended.

An index of PostgreSQL keeps entries of jobs that wait no more until nobody's snapshot needs them: while another
session's is old, each look from the head goes through all that were taken since. So after one that took a while the
looks go on from there, for ten times that while, and a second at most. What has come before that place meanwhile (of a
higher priority, or given back) waits for so long; what is passed over by others is not lost.
"""

from __future__ import annotations

import time
from typing import Any

#: for how many times as long as a look from the head has taken the looks after it go on from where it ended
_WORTH = 10


class FetchCursor:
    """Where the next look begins."""

    def __init__(self, worthwhile: bool, longest: float) -> None:
        self._worthwhile, self._longest = worthwhile, longest
        self._after: tuple[Any, ...] | None = None
        self._until = -float("inf")

    def after(self) -> tuple[Any, ...] | None:
        """The place to go on from; ``None``: from the head."""
        return self._after if time.monotonic() < self._until else None

    def looked(self, after: tuple[Any, ...] | None, last: tuple[Any, ...] | None, spent: float) -> None:
        """A look has begun there, has found jobs up to ``last``, if as many as were asked for, and took so long."""
        self._after = last if self._worthwhile else None
        if after is None:
            self._until = time.monotonic() + min(_WORTH * spent, self._longest)
