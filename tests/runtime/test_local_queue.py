"""Queues in memory: positions, and cancellations."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.util import greenlet_spawn

from sqlalchemy_locks.runtime.local_queue import LocalQueues


def test_cancellation_together_with_wake_up_is_raised() -> None:
    async def main() -> None:
        lines = LocalQueues(True)
        entered: list[int] = []
        first = lines.ticket("x")
        assert first.wait(0)

        def stand() -> None:
            turn = lines.ticket("x")
            try:
                if turn.wait(600):
                    entered.append(1)
            finally:
                turn.leave()

        waiting = asyncio.create_task(greenlet_spawn(stand))
        while first.behind is None:
            await asyncio.sleep(0)
        first.leave()
        await asyncio.sleep(0)  # its wake-up has been scheduled
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not entered
        assert not lines.front

    asyncio.run(main())
