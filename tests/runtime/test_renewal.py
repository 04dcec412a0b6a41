"""The renewal threads, without a database: leases that are due, renewals that fail or hang, and the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from sqlalchemy_locks.runtime.renewal import MAX_THREADS, LostEvent, RenewableLease, RenewalThread, clock
from tests.fixtures.parties import (
    PATIENCE,
    until,
)
from tests.fixtures.renewal_threads import renewers


@pytest.fixture
def renewals() -> Iterator[RenewalThread]:
    until(lambda: not renewers())  # of the tests before
    made = RenewalThread()
    yield made
    for lease in list(made._leases):
        made.remove(lease)
    until(lambda: not renewers())


def lease(renew: Callable[[], bool], ttl: float = 3600, due: float = 0) -> RenewableLease:
    made = RenewableLease("a lease", LostEvent(ttl, clock()), clock(), renew)
    made.due = clock() + due
    return made


def test_renewal_counts_from_before_request(renewals: RenewalThread) -> None:
    asked: list[float] = []

    def renew() -> bool:
        asked.append(clock())
        return True

    kept = lease(renew)
    first = kept.lost.deadline
    renewals.add(kept)
    until(lambda: kept.lost.deadline > first)
    assert kept.lost.deadline <= asked[0] + 3600 * 0.95
    assert kept.due <= asked[0] + 3600 / 3
    assert len(renewers()) == 1
    renewals.remove(kept)
    until(lambda: not renewers())
    assert len(asked) == 1


def test_hanging_renewal_delays_no_other(renewals: RenewalThread) -> None:
    go_on, renewed = threading.Event(), threading.Event()

    def hang() -> bool:
        go_on.wait(PATIENCE)
        return True

    def renew() -> bool:
        renewed.set()
        return True

    hanging, other, later = lease(hang), lease(renew, due=0.01), lease(renew, due=0.02)
    try:
        renewals.add(hanging)
        renewals.add(other)
        assert renewed.wait(PATIENCE)
        renewed.clear()
        renewals.add(later)
        assert renewed.wait(PATIENCE)
    finally:
        go_on.set()
    until(lambda: len(renewers()) == 1)


def test_failure_is_retried_and_refusal_is_loss(renewals: RenewalThread, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[bool | Exception] = [RuntimeError("a restart"), RuntimeError("still"), True, False]

    def renew() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kept = lease(renew)
    with caplog.at_level(logging.INFO, "sqlalchemy_locks"):
        kept.renew()
        kept.renew()
        assert not kept.lost
        assert kept.due < kept.lost.deadline
        assert kept.renew() is True
        assert kept.renew() is False
    assert kept.lost
    assert "a lease could not be renewed: a restart" in caplog.text


def test_lease_past_deadline_is_not_renewed() -> None:
    asked: list[int] = []
    kept = lease(lambda: not asked.append(1), ttl=3600)
    kept.lost.deadline = clock() - 1
    assert kept.renew() is False
    assert not asked
    assert kept.lost.why == "it could not be renewed in time"


def test_late_reply_does_not_extend_lease() -> None:
    """A lost lease isn't held again: its holder has stopped."""

    def renew() -> bool:
        kept.lost.deadline = clock() - 1  # the reply took this long
        return True

    kept = lease(renew)
    assert kept.renew() is False
    assert kept.lost


def test_loss_is_permanent() -> None:
    kept = LostEvent(3600, clock() - 3600)
    assert kept
    kept.confirm(clock())
    assert kept.is_set()
    assert repr(kept) == "<lost: it could not be renewed in time>"
    assert kept.wait()
    assert LostEvent(3600, clock()).wait(0.001) is False


def test_lease_is_lost_in_fork() -> None:
    kept = LostEvent(3600, clock())
    assert not kept
    kept.process += 1
    assert kept
    assert "forked" in kept.why


def test_idle_thread_learns_of_new_due_time() -> None:
    """One thread waits for a lease that is due in an hour, while another renews one that is due before."""
    renewals, times = RenewalThread(), []

    class Often(RenewableLease):
        def renew(self) -> bool:
            if len(times) < 2:
                until(lambda: renewals._idle)
                self.due = clock()
            times.append(1)
            return len(times) < 3

    often = Often("often", LostEvent(3600, clock()), clock(), lambda: True)
    often.due = clock()
    seldom = RenewableLease("seldom", LostEvent(3600, clock()), clock(), lambda: True)
    renewals._leases.add(seldom)
    renewals.add(often)
    try:
        until(lambda: len(times) == 3)
    finally:
        renewals.remove(often)
        renewals.remove(seldom)
    until(lambda: not renewers())


def test_number_of_renewal_threads_is_limited() -> None:
    until(lambda: not renewers())  # of the tests before
    renewals, go_on, guard = RenewalThread(), threading.Event(), threading.Lock()
    inside = most = done = 0

    def renew() -> bool:
        nonlocal inside, most, done
        with guard:
            inside += 1
            most = max(most, inside)
        go_on.wait(PATIENCE)
        with guard:
            inside -= 1
            done += 1
        return True

    leases = [RenewableLease(f"no. {number}", LostEvent(3600, clock()), clock(), renew) for number in range(50)]
    for lease in leases:
        lease.due = clock()
    renewals._leases.update(leases)
    try:
        renewals.add(leases[0])
        until(lambda: inside >= MAX_THREADS)
        assert len(renewers()) <= MAX_THREADS
        go_on.set()
        until(lambda: done == len(leases))
        assert most == MAX_THREADS
    finally:
        go_on.set()
        for lease in leases:
            renewals.remove(lease)
    until(lambda: not renewers())
