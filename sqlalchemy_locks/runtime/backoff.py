"""Backoff: how often to poll for what nothing announces."""

from __future__ import annotations

import time


class Backoff:
    """Pauses between polls: a tenth of the time waited so far, so that polling adds no more than that to a wait."""

    SHORTEST, LONGEST = 0.001, 0.25

    def __init__(self) -> None:
        self._began = time.monotonic()

    def pause(self) -> float:
        """Return the seconds until the next poll."""
        return min(self.LONGEST, max(self.SHORTEST, (time.monotonic() - self._began) / 10))
