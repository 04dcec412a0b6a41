"""Backoff: how often to poll for what nothing announces."""

from __future__ import annotations

import time


class Backoff:
    """Pauses between polls: a fixed part of the time waited so far, so that polling adds no more than that to a wait.

    :param part: the divisor: 10 pauses for a tenth of the time waited so far.
    """

    SHORTEST, LONGEST = 0.001, 0.25

    def __init__(self, part: int = 10) -> None:
        self._began, self._part = time.monotonic(), part

    def pause(self) -> float:
        """Return the seconds until the next poll."""
        return min(self.LONGEST, max(self.SHORTEST, (time.monotonic() - self._began) / self._part))
