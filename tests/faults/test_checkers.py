"""Each checker finds what a broken version would leave in a history; ``test_torture`` runs them over this library's."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.faults import checkers
from tests.faults.checkers import Entry, Job
from tests.faults.history import History, Recorder


@pytest.fixture
def history() -> History:
    return History()


@pytest.fixture
def recorder(history: History) -> Recorder:
    return Recorder(history.apply)


def called(recorder: Recorder, answer: Any, client: str, what: str, *on: str, **details: Any) -> str:
    """A call that has returned this: its number."""
    with recorder.call(client, what, *on, **details) as call:
        call.value = answer
    return call.call


@pytest.mark.parametrize("shared", [False, True])
def test_two_holders_of_a_key(history: History, recorder: Recorder, shared: bool) -> None:
    hold = recorder.hold("b", "key")
    recorder.hold("c", "key", shared=shared).leave()
    hold.leave()
    recorder.hold("c", "key").leave()
    for client in "bc":
        recorder.hold(client, "shared key", shared=True, lasting=True)
    assert len(checkers.exclusion(history)) == 1
    assert checkers.exclusion(history, "k") == []


@pytest.mark.parametrize("known", [False, True], ids=["fault unknown", "fault known"])
def test_answer_that_is_read_after_its_connection_died(history: History, recorder: Recorder, known: bool) -> None:
    """As if the client had been slow to read the answer."""
    entered = called(recorder, None, "a", "block", "key")
    if known:
        with recorder.fault("terminate"):
            pass
    second = recorder.hold("b", "key")
    recorder.hold("a", "key", call=entered)
    second.leave()
    assert bool(checkers.exclusion(history)) is not known


def test_try_that_waits(history: History, recorder: Recorder) -> None:
    called(recorder, True, "b", "try", "key", **{"try": True})
    assert checkers.bounded_tries(history, patience=0)
    assert checkers.bounded_tries(history) == []


def test_keys_that_share_a_bucket(history: History, recorder: Recorder) -> None:
    called(recorder, True, "a", "try", "key 1", acquires=True)
    called(recorder, False, "b", "try", "key 2", acquires=True)
    called(recorder, False, "b", "try", "key 1", acquires=True)  # which is held
    assert len(checkers.independence(history)) == 1


def test_work_without_a_lock_is_lost(history: History, recorder: Recorder) -> None:
    calls = [called(recorder, "committed", client, "work", "key", writes=1) for client in "ab"]
    assert checkers.serial(history, [Entry("key", number, call) for number, call in enumerate(calls, 1)]) == []
    assert checkers.serial(history, [Entry("key", 1, call) for call in calls])
    assert checkers.serial(history, [Entry("key", 1, calls[0])])


def test_more_permits_than_there_are(history: History, recorder: Recorder) -> None:
    recorder.hold("a", "room", lasting=True).leave()
    recorder.hold("b", "room", lasting=True)
    assert checkers.capacity(history, {"room": 1}) == []
    recorder.hold("c", "room", lasting=True)
    assert len(checkers.capacity(history, {"room": 1})) == 1
    assert checkers.capacity(history, {"room": 2}) == []


@pytest.mark.parametrize(("tokens", "broken"), [((1, 101, 2), True), ((1, 1), True), ((1, 2, 101), False)], ids=str)
def test_tokens_rise(history: History, recorder: Recorder, tokens: tuple[int, ...], broken: bool) -> None:
    for fence in tokens:
        recorder.hold("a", "room", fence=fence, call=called(recorder, None, "a", "acquire", "room")).leave()
    assert bool(checkers.fences(history)) is broken


def test_request_that_is_used_again(history: History, recorder: Recorder) -> None:
    for _ in range(2):
        called(recorder, "its row", "a", "acquire", "room", external_id="1")
        called(recorder, "RELEASED", "a", "release", "room", external_id="1")
    assert len(checkers.single_grants(history)) == 2
    called(recorder, "another row", "a", "acquire", "room", external_id="1")
    assert "was granted as" in str(checkers.single_grants(history)[0])


def test_uncommitted_acquisition(history: History, recorder: Recorder) -> None:
    called(recorder, True, "a", "acquire", "mutex")
    assert checkers.survivors(history, {"mutex": False})
    assert checkers.survivors(history, {"mutex": True}) == []
    called(recorder, True, "a", "release", "mutex")
    assert checkers.survivors(history, {"mutex": True})


def test_period_that_two_get_and_rows_beyond_the_limit_or_captured_twice(history: History, recorder: Recorder) -> None:
    called(recorder, True, "a", "once_per", "hourly")
    called(recorder, [1, 2, 3], "a", "capture", limit=3)
    assert checkers.periods(history) + checkers.captures(history) == []
    called(recorder, True, "b", "once_per", "hourly")
    assert checkers.periods(history)
    called(recorder, [1, 2, 3, 4], "a", "capture", limit=3)
    for client in "ab":
        recorder.hold(client, "row", kind="row", lasting=True)
    assert len(checkers.captures(history)) == 2


def test_token_that_is_checked_before_the_write(history: History, recorder: Recorder) -> None:
    for client, token in (("b", 2), ("a", 1)):
        called(recorder, True, client, "fenced", "key", fence=token)
    assert len(checkers.fenced_writes(history, {"key": 1})) == 2
    assert len(checkers.fenced_writes(history, {"key": 2})) == 1


def test_permits_that_are_checked_before_the_write(history: History, recorder: Recorder) -> None:
    called(recorder, True, "a", "guarded", "room", under="1")
    called(recorder, "RELEASED", "a", "release", "room", external_id="1")
    assert checkers.guarded_writes(history) == []
    called(recorder, True, "a", "guarded", "room", under="1")
    assert checkers.guarded_writes(history)


def test_write_that_is_refused_for_nothing(history: History, recorder: Recorder) -> None:
    with suppress(sl.StaleToken), recorder.call("a", "fenced", "1", fence=1):
        raise sl.StaleToken("no", 0)
    with suppress(sl.LockLost), recorder.call("a", "guarded", "1", under="1"):
        raise sl.LockLost("no")
    assert len(checkers.fenced_writes(history, {})) == 1
    assert len(checkers.guarded_writes(history)) == 1


def test_job_that_runs_beside_itself_or_was_done_by_two(history: History, recorder: Recorder) -> None:
    first = recorder.hold("a", "1", kind="job")
    second = recorder.hold("b", "1", kind="job")
    assert first.sample(lambda: True)
    assert checkers.jobs(history, []) == []  # it knows that it is lost
    assert not first.sample(lambda: False)
    second.leave()
    assert len(checkers.jobs(history, [])) == 1
    for client in "ab":
        called(recorder, "done", client, "handle", "1", once=True)
    assert len(checkers.jobs(history, [Job("1", "completed")])) == 2


def test_job_that_is_removed_before_it_runs(history: History, recorder: Recorder) -> None:
    called(recorder, "committed", "a", "put", "1")
    called(recorder, 1, "b", "complete", "2")
    states = [Job("2", "running"), Job("3", "completed")]
    assert sorted(violation.what for violation in checkers.jobs(history, states)) == [
        "'1' was put, and is lost",
        "'2' is acknowledged as completed, and is running",
        "'2' is running after all queues were worked off",
        "'3' is completed, and nobody did it",
    ]


def test_raw_driver_error_is_not_named(history: History, recorder: Recorder) -> None:
    with pytest.raises(sl.UnknownSemaphore), recorder.call("a", "acquire"):
        raise sl.UnknownSemaphore("nothing")
    assert checkers.named_errors(history) == []
    with pytest.raises(ConnectionError), recorder.call("a", "acquire"):
        raise ConnectionError("the driver's")
    assert len(checkers.named_errors(history)) == 1
