"""Where a worker's next fetch searches from: the head of the queue, or the position where its last one ended.

A PostgreSQL index keeps entries of jobs that no longer wait until no snapshot needs them: while another session holds
an old snapshot, each search from the head reads the entries of all jobs that were captured since. So after a slow
search from the head, the next ones start at the position where it ended, for ten times as long as it took, up to a
second. A job that sorts before that position meanwhile (of a higher priority, or released) waits until then; no job is
lost.
"""

from __future__ import annotations

import time
from typing import Any

#: how many times the duration of a search from the head the following ones start where it ended
_FACTOR = 10


class FetchCursor:
    """The position that the next fetch starts from.

    :param enabled: the engine's indexes keep such entries.
    :param longest: the longest time without a search from the head, in seconds.
    """

    def __init__(self, enabled: bool, longest: float) -> None:
        self._enabled, self._longest = enabled, longest
        self._position: tuple[Any, ...] | None = None
        self._expires = -float("inf")

    def after(self) -> tuple[Any, ...] | None:
        """Return the position to start from; ``None``: from the head."""
        return self._position if time.monotonic() < self._expires else None

    def advance(self, after: tuple[Any, ...] | None, last: tuple[Any, ...] | None, duration: float) -> None:
        """Note a search.

        :param after: the position that it started from.
        :param last: the position of the last job that it found; ``None`` if there were fewer than asked for.
        :param duration: how long it took, in seconds.
        """
        self._position = last if self._enabled else None
        if after is None:
            self._expires = time.monotonic() + min(_FACTOR * duration, self._longest)
