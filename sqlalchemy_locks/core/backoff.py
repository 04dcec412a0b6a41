"""Backoff: the pauses between polls for an event that nothing announces."""

from __future__ import annotations

import random
import time


class Backoff:
    """Random pauses between polls, as a share of the time waited so far: polling adds no more than that to a wait.

    :param shortest: the pause of the first polls, in seconds.
    :param share: the part of the time waited.
    """

    LONGEST = 0.25

    def __init__(self, shortest: float = 0.001, share: float = 0.1) -> None:
        self._shortest, self._share = shortest, share
        self._began = time.monotonic()

    def pause(self) -> float:
        """Return the seconds until the next poll."""
        pause = min(self.LONGEST, max(self._shortest, (time.monotonic() - self._began) * self._share))
        return random.uniform(0.5, 1) * pause
