"""How a holder knows that its lease is lost: without the database, which ``tests/facade/test_lease_renewal.py`` has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.asyncio_waits import wait_for_event
from sqlalchemy_locks.facade.async_lease import AsyncLostEvent
from sqlalchemy_locks.runtime.renewal import LostEvent, RenewableLease, RenewalSchedule, clock
from tests.fixtures.parties import PATIENCE


class Answers:
    """Renewals with scripted answers: an error, or what was renewed."""

    def __init__(self, *batches: Any, alone: Callable[[], bool] = lambda: True) -> None:
        self._batches, self._alone = list(batches), alone
        self.asked, self.asked_at = 0, 0.0

    def renew_batch(self, grants: list[sl.Grant]) -> Collection[str]:
        self.asked, self.asked_at = self.asked + 1, clock()
        answer = self._batches.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [str(grant.token) for grant in grants] if answer is True else []

    def renew_alone(self, grant: sl.Grant, ttl: float) -> bool:
        self.asked, self.asked_at = self.asked + 1, clock()
        return self._alone()

    def take_pool(self) -> None: ...


def lease(ttl: float = 3600) -> RenewableLease:
    grant = sl.Grant(external_id="one", acquired=True, state="ACQUIRED", permits={"room": 1}, token="1")
    return RenewableLease(grant, LostEvent(ttl, clock()), clock())


def renewed(held: RenewableLease, answers: Answers) -> RenewalSchedule:
    schedule = RenewalSchedule(answers)
    schedule.add(held)
    held.due = 0
    schedule.renew_due()
    return schedule


def test_failure_is_retried_before_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    held, before = lease(), clock()
    with caplog.at_level(logging.INFO, "sqlalchemy_locks"):
        answers = Answers(RuntimeError("a restart"), RuntimeError("still"), True)
        schedule = renewed(held, answers)
        assert before < held.due < held.lost.deadline
        held.due = 0
        schedule.renew_due()
        assert not held.lost
        held.due = 0
        asked = clock()
        schedule.renew_due()
    # its time counts from before the request
    assert asked + 3600 * 0.95 <= held.lost.deadline <= answers.asked_at + 3600 * 0.95
    assert held.due <= clock() + 3600 / 3
    assert "1 lease(s), the first of them 'one', could not be renewed: a restart" in caplog.text


@pytest.mark.parametrize("alone", ["held", "not held", "locked"])
def test_what_a_batch_passes_over_is_asked_for_alone(alone: str) -> None:
    def answer() -> bool:
        if alone == "locked":
            raise sl.LockTimeout("its row stayed locked")
        return alone == "held"

    held = lease()
    held.lost.deadline = before = clock() + 1000
    answers = Answers(False, alone=answer)
    schedule = renewed(held, answers)
    assert (schedule.has_skipped(), held.lost.deadline, bool(held.lost)) == (True, before, False)
    schedule.renew_skipped()
    assert (bool(held.lost), held.lost.deadline > before) == (alone == "not held", alone == "held")
    assert held.lost.deadline <= answers.asked_at + 3600 * 0.95
    assert list(schedule.leases) == ([] if alone == "not held" else [held])
    assert not schedule.has_skipped()


def test_rows_that_stay_locked_keep_no_other_lease_waiting() -> None:
    """Each is tried alone once, before one of them is tried again."""
    leases, tried = [lease() for _ in range(20)], list[sl.Grant]()

    class Locked(Answers):
        def renew_alone(self, grant: sl.Grant, ttl: float) -> bool:
            tried.append(grant)
            raise sl.LockTimeout("its row stays locked")

    schedule = RenewalSchedule(Locked())
    for held in leases:
        schedule.add(held)
        held.due = clock()
    for _ in leases:
        for held in leases:
            held.skipped = True  # by the next batch
        schedule.renew_skipped()
    assert len(set(map(id, tried))) == len(leases)


@pytest.mark.parametrize("gone", ["its block has ended", "its time has run out"])
def test_lease_that_is_over_is_not_renewed(gone: str) -> None:
    """The engine may have been disposed of already, and a connection opened now would never be closed."""
    held, answers = lease(), Answers()
    if gone == "its block has ended":
        held.closed = True
    else:
        held.lost.deadline = clock() - 1
    schedule = renewed(held, answers)
    assert (answers.asked, list(schedule.leases)) == (0, [])
    assert held.closed or held.lost.why == "it could not be renewed in time"


def test_late_reply_does_not_extend_a_lease() -> None:
    """A lost lease isn't held again: its holder has stopped."""
    held = lease()

    class Late(Answers):
        def renew_batch(self, grants: list[sl.Grant]) -> Collection[str]:
            held.lost.deadline = clock() - 1  # the reply took this long
            return super().renew_batch(grants)

    schedule = renewed(held, Late(True))
    assert held.lost
    assert not schedule.leases


def test_loss_is_permanent() -> None:
    lost = LostEvent(3600, clock() - 3600)
    assert lost
    lost.confirm(clock())
    assert lost.is_set()
    assert repr(lost) == "<lost: it could not be renewed in time>"
    assert lost.wait()
    assert LostEvent(3600, clock()).wait(0.001) is False


def test_lease_is_lost_in_a_fork() -> None:
    lost = LostEvent(3600, clock())
    assert not lost
    lost.process += 1
    assert lost
    assert "forked" in lost.why


def test_task_waits_for_a_loss_of_another_thread() -> None:
    async def main() -> None:
        lost = LostEvent(3600, clock())
        seen = AsyncLostEvent(lost)
        waiting = asyncio.create_task(seen.wait(PATIENCE))
        await asyncio.sleep(0)
        await asyncio.to_thread(lost.set, "another client swept it")
        assert await waiting
        assert await seen.wait(0)

    asyncio.run(main())


def test_cancellation_together_with_a_loss_is_raised() -> None:
    async def main() -> None:
        lost = LostEvent(3600, clock())
        waiting = asyncio.create_task(AsyncLostEvent(lost).wait(PATIENCE))
        await asyncio.sleep(0)
        lost.set("another client swept it")
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


def test_wait_for_an_event_loses_no_cancellation() -> None:
    async def main() -> None:
        for turns in range(4):  # of the loop, between the event and the cancellation
            event = asyncio.Event()
            task = asyncio.create_task(wait_for_event(event, PATIENCE))
            await asyncio.sleep(0.01)
            event.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            cancelled = task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() == cancelled

    asyncio.run(main())
