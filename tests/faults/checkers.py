"""What must be true of every history: each checker returns the violations that it finds.

They rely on no clock of a server. A hold is counted from the answer of its acquire to the beginning of its release, or to
the last time at which the client believed to have it: whatever overlaps then was held twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.faults.history import Call, History, Hold

#: how long a try may take, in nanoseconds: far more than a busy machine needs, and less than a holder holds
PATIENT = 20 * 10**9


@dataclass(frozen=True)
class Violation:
    """A broken promise."""

    checker: str
    what: str

    def __str__(self) -> str:
        return f"{self.checker}: {self.what}"


def exclusion(history: History, but: str | None = None) -> list[Violation]:
    """Nobody believes to hold what another client holds exclusively.

    :param but: keys that begin with this are passed over: in a cluster each node grants a lock of a transaction, and of
        several holders one commits, which ``serial`` checks.

    After a fault, an answer alone doesn't prove a hold that ends with its connection: the connection may have died before
    the client read the answer. A commit proves it, or a sample.
    """
    found = []
    for key, every in _by_key(history).items():
        if but is not None and key.startswith(but):
            continue
        holds = [hold for hold in every if _proven(history, hold)]
        # the holds that end last decide: an earlier one may enclose many later ones
        for index, hold in enumerate(holds):
            for other in holds[index + 1 :]:
                if other.began >= hold.end:
                    break
                if other.client != hold.client and not (hold.shared and other.shared):
                    found.append(Violation("exclusion", f"{key!r}: {hold} while {other}"))
    return found


def capacity(history: History, capacities: Mapping[str, int]) -> list[Violation]:
    """At no instant more permits are held than there are."""
    found = []
    for key, holds in _by_key(history).items():
        if key not in capacities:
            continue
        # at the same instant, ends come first
        changes = sorted(
            [(hold.end, 0, -hold.permits, hold) for hold in holds]
            + [(hold.began, 1, hold.permits, hold) for hold in holds],
            key=lambda change: change[:2],
        )
        held = 0
        for _, _, permits, hold in changes:
            held += permits
            if permits > 0 and held > capacities[key]:
                found.append(Violation("capacity", f"{key!r}: {held} of {capacities[key]} are held when {hold}"))
    return found


def fences(history: History) -> list[Violation]:
    """Whoever is granted later has a larger token, and no two holders have the same."""
    found = []
    for key, holds in _by_key(history).items():
        fenced = [hold for hold in holds if hold.fence is not None]
        highest: tuple[int, Hold] | None = None
        # an acquire that began after another one had returned was granted later
        events = sorted(
            [(hold.began, 0, hold) for hold in fenced]
            + [(history.calls[hold.call].began, 1, hold) for hold in fenced if hold.call is not None],
            key=lambda event: event[:2],
        )
        before: dict[str, tuple[int, Hold] | None] = {}
        for _, kind, hold in events:
            assert hold.fence is not None
            if kind == 1:
                before[hold.number] = highest
            elif highest is None or hold.fence > highest[0]:
                highest = hold.fence, hold
        for hold in fenced:
            earlier = before.get(hold.number)
            assert hold.fence is not None
            if earlier is not None and earlier[0] >= hold.fence:
                found.append(Violation("fences", f"{key!r}: {hold} after {earlier[1]}"))
        for fence, count in Counter(hold.fence for hold in fenced).items():
            if count > 1:
                found.append(Violation("fences", f"{key!r}: the token {fence} was given {count} times"))
    return found


def single_grants(history: History) -> list[Violation]:
    """An id is granted once: every answer to it names the same grant, and none comes after its release."""
    found = []
    answers: dict[str, list[Call]] = defaultdict(list)
    for call in history.calls.values():
        if "external_id" in call.details and call.ended is not None and call.error is None and call.answer is not None:
            answers[call.details["external_id"]].append(call)
    for ident, calls in answers.items():
        tokens = {call.answer for call in calls if call.what == "acquire"}
        if len(tokens) > 1:
            found.append(Violation("single_grants", f"{ident!r} was granted as {sorted(map(str, tokens))}"))
        releases = [call for call in calls if call.what == "release" and call.answer == "RELEASED"]
        if len(releases) > 1:
            found.append(Violation("single_grants", f"{ident!r} was released {len(releases)} times"))
        for release in releases:
            late = [call for call in calls if call.what == "acquire" and call.began >= (release.ended or 0)]
            found += [Violation("single_grants", f"{call} after its release") for call in late]
    return found


def bounded_tries(history: History, patience: int = PATIENT) -> list[Violation]:
    """A try doesn't wait for a holder.

    :param patience: how long it may take, in nanoseconds.
    """
    found = []
    for call in history.calls.values():
        took = 0 if call.ended is None else call.ended - call.began
        if call.details.get("try") and took > patience and not history.disturbed(call):
            found.append(Violation("bounded_tries", f"{call} took {took / 1e9:.1f} s"))
    return found


def independence(history: History) -> list[Violation]:
    """Nobody is refused a key that no other client holds or asks for.

    Calls are named by what they acquire (``details["acquires"]``); after a fault a dead client may hold on. A vacuum
    locks every key that it deletes.
    """
    found = []
    vacuums = [call for call in history.calls.values() if call.what == "vacuum"]
    asking = [call for call in history.calls.values() if call.details.get("acquires")]
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in asking:
        for key in call.on:
            by_key[key].append(call)
    for call in asking:
        denied = call.error == "sqlalchemy_locks.errors.LockTimeout" or call.answer is False
        if not denied or call.ended is None or history.disturbed(call) or "external_id" in call.details:
            continue
        rivals = [
            other
            for key in call.on
            for other in by_key[key]
            # a call that was granted keeps what it has got until its client's ``over``
            if other.client != call.client and other.began < call.ended and _over(history, other) > call.began
        ]
        rivals += [other for other in vacuums if not _before(other, call) and other.began < call.ended]
        if not rivals:
            found.append(Violation("independence", f"{call}, and no other client had it or asked for it"))
    return found


#: what the docs name, and Python's own for wrong input
NAMED = ("sqlalchemy_locks.errors.",)
#: the server is down meanwhile: a new connection fails with the driver's error
OUTAGES = ("restart", "crash", "promote")
RAW = ("sqlalchemy.exc.", "builtins.Connection", "asyncpg.")
#: raised on purpose by a workload, or by a session of its own
OWN = ("tests.faults.",)


def named_errors(history: History) -> list[Violation]:
    """``Locks`` raises no error but those that the docs name; a driver's while the server is down.

    Not judged are calls in a session of the workload's own (``details["own"]``).
    """
    outages = [at for what, at, _ in history.faults if what in OUTAGES]
    return [
        Violation("named_errors", f"{call}: {call.message}")
        for call in history.calls.values()
        if call.error is not None
        and not call.error.startswith(NAMED + OWN)
        and not call.details.get("own")
        and not (call.error.startswith(RAW) and any(at < (call.ended or at) for at in outages))
    ]


@dataclass(frozen=True)
class Entry:
    """A row of the ledger: what was written under a lock, without any other guard."""

    key: str
    number: int
    call: str


def serial(history: History, ledger: Iterable[Entry]) -> list[Violation]:
    """Work that is done under a lock is done one after another, and what was acknowledged is there."""
    found = []
    entries = list(ledger)
    for (key, number), count in Counter((entry.key, entry.number) for entry in entries).items():
        if count > 1:
            who = [entry.call for entry in entries if (entry.key, entry.number) == (key, number)]
            found.append(Violation("serial", f"{key!r}: the number {number} was written {count} times, by {who}"))
    for key in {entry.key for entry in entries}:
        numbers = sorted(entry.number for entry in entries if entry.key == key)
        if numbers != list(range(1, len(numbers) + 1)) and len(set(numbers)) == len(numbers):
            found.append(Violation("serial", f"{key!r}: the numbers {numbers} have gaps: a write is lost"))
    there = Counter(entry.call for entry in entries)
    for call in history.calls.values():
        if "writes" not in call.details or call.ended is None:
            continue
        expected = call.details["writes"]
        if call.answer == "committed" and there[call.number] != expected:
            found.append(
                Violation("serial", f"{call} is acknowledged, and {there[call.number]} of {expected} are there")
            )
        if call.answer == "rolled back" and there[call.number]:
            found.append(Violation("serial", f"{call}, and {there[call.number]} of its writes are there"))
    return found


@dataclass(frozen=True)
class Job:
    """What the table knows of a job at the end."""

    job: str
    state: str


def jobs(history: History, table: Iterable[Job]) -> list[Violation]:
    """Every job that was put runs, one attempt at a time, and is completed once; none runs that was not put."""
    found = [
        Violation("jobs", f"{job!r} is run beside itself: {first} while {second}")
        for job, first, second in _beside(history, "job")
    ]
    states = {job.job: job.state for job in table}
    completed: Counter[str] = Counter()
    handled: Counter[str] = Counter()
    unsure: set[str] = set()
    for call in history.calls.values():
        for job in call.on:
            if call.what == "complete":
                sure = call.ended is not None and (call.error is None or call.answer is not None)
                if call.answer == len(call.on):
                    completed[job] += 1
                elif not sure:
                    unsure.add(job)
            if call.what == "handle" and call.ended is not None and call.error is None:
                unsure.add(job)
                handled[job] += call.details["once"] and call.answer == "done"
            if call.what == "put" and call.ended is not None:
                if call.answer == "committed" and job not in states:
                    found.append(Violation("jobs", f"{job!r} was put, and is lost"))
                if call.answer == "rolled back" and job in states:
                    found.append(Violation("jobs", f"{job!r} was rolled back, and is there: {states[job]}"))
    for job, count in handled.items():
        if count > 1:
            found.append(Violation("jobs", f"{job!r} was done {count} times by workers that live"))
    for job, count in completed.items():
        if count > 1:
            found.append(Violation("jobs", f"{job!r} was completed {count} times"))
        if states.get(job) != "completed":
            found.append(Violation("jobs", f"{job!r} is acknowledged as completed, and is {states.get(job)}"))
    for job, state in states.items():
        if state == "completed" and not completed[job] and job not in unsure:
            found.append(Violation("jobs", f"{job!r} is completed, and nobody did it"))
        if state not in ("completed", "dead"):
            found.append(Violation("jobs", f"{job!r} is {state} after all queues were worked off"))
    return found


def captures(history: History) -> list[Violation]:
    """A capture returns at most as many rows as it was asked for, and none that another one has."""
    found = []
    for call in history.calls.values():
        if call.what == "capture" and call.answer is not None and len(call.answer) > call.details["limit"]:
            limit = call.details["limit"]
            found.append(
                Violation("captures", f"{call.client} captured {len(call.answer)} rows with a limit of {limit}")
            )
    return found + [
        Violation("captures", f"{row!r} is captured twice: {first} while {second}")
        for row, first, second in _beside(history, "row")
    ]


def periods(history: History) -> list[Violation]:
    """One caller gets a period."""
    won = Counter(
        key for call in history.calls.values() if call.what == "once_per" and call.answer is True for key in call.on
    )
    return [Violation("periods", f"{key!r} was granted {count} times") for key, count in won.items() if count > 1]


def survivors(history: History, flags: Mapping[str, bool]) -> list[Violation]:
    """What was acknowledged last is in the table: a mutex that was acquired is held, one that was released is free.

    A statement that was cancelled after it was sent may be executed after everything else.

    :param flags: which mutexes the table says are held.
    """
    found = []
    for key, held in flags.items():
        calls = [call for call in history.calls.values() if key in call.on]
        cancelled = any(call.what == "cancelled" and call.answer != "done" for call in calls)
        changes = [
            call
            for call in calls
            if call.what in ("acquire", "release") and (call.ended is None or call.error is not None or call.answer)
        ]
        if any(call.ended is None or call.error is not None for call in changes) or not changes:
            continue  # one of them may have taken effect after all others
        last = max(changes, key=lambda call: call.began)
        if held and cancelled and last.what == "release":
            continue
        if all(call is last or (call.ended or 0) <= last.began for call in changes) and held != (
            last.what == "acquire"
        ):
            found.append(
                Violation("survivors", f"{key!r}: {last} was the last, and it is {'held' if held else 'free'}")
            )
    return found


def fenced_writes(history: History, documents: Mapping[str, int]) -> list[Violation]:
    """A write with an older token than the last accepted one is refused, and no other is.

    :param documents: the token in each row at the end.
    """
    found = []
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in history.calls.values():
        if call.what == "fenced":
            by_key[call.on[0]].append(call)
    for key, calls in by_key.items():
        accepted = [call for call in calls if call.answer is True and call.error is None]
        for call in accepted:
            newer = [other for other in accepted if _before(other, call) and _fence(other) > _fence(call)]
            found += [Violation("fenced_writes", f"{key!r}: {call} was accepted after {other}") for other in newer[:1]]
        for call in calls:
            refused = _failed(call, "StaleToken")
            if refused and not any(_fence(other) > _fence(call) and other.began < (call.ended or 0) for other in calls):
                found.append(Violation("fenced_writes", f"{key!r}: {call} was refused, and there is no newer one"))
        known = {_fence(call) for call in calls if not _failed(call, "StaleToken")}
        last = max(map(_fence, accepted), default=0)
        if documents.get(key, 0) < last or documents.get(key, 0) not in known | {0}:
            found.append(
                Violation("fenced_writes", f"{key!r}: the row has {documents.get(key)}, and {last} was written")
            )
    return found


def _failed(call: Call, error: str) -> bool:
    return call.error == f"sqlalchemy_locks.errors.{error}"


def _fence(call: Call) -> int:
    return int(call.details["fence"])


def _before(call: Call, other: Call) -> bool:
    return call.ended is not None and call.ended <= other.began


def guarded_writes(history: History) -> list[Violation]:
    """A write under permits is made while they are held, and refused once they were released."""
    found = []
    releases: dict[str, list[Call]] = defaultdict(list)
    for call in history.calls.values():
        if call.what == "release":
            releases[call.details.get("external_id", call.details.get("ends"))].append(call)
    for call in history.calls.values():
        if call.what != "guarded":
            continue
        ends = releases[call.details["under"]]
        over = [end for end in ends if end.answer == "RELEASED" and _before(end, call)]
        if call.answer is True and over:
            found.append(Violation("guarded_writes", f"{call} was made after {over[0]}"))
        if _failed(call, "LockLost") and not any(end.began < (call.ended or 0) for end in ends):
            found.append(Violation("guarded_writes", f"{call} was refused, and nobody had released them"))
    return found


def _proven(history: History, hold: Hold) -> bool:
    call = history.calls.get(hold.call or "")
    of_connection = call is not None and call.what in ("block", "session")
    only_answered = not hold.released and hold.until == hold.began
    return not (of_connection and only_answered and any(at <= hold.began for _, at, _ in history.faults))


def _by_key(history: History) -> dict[str, list[Hold]]:
    found: dict[str, list[Hold]] = defaultdict(list)
    for hold in sorted(history.holds.values(), key=lambda hold: hold.began):
        found[hold.key].append(hold)
    return found


def _over(history: History, call: Call) -> float:
    """When a call, and what it has acquired, were over; never where that isn't known."""
    if call.ended is None or "external_id" in call.details or call.error == "sqlalchemy_locks.errors.OutcomeUnknown":
        return float("inf")
    if call.error is not None or call.answer is False:
        return call.ended
    if call.details.get("passes"):
        return call.ended
    ends = [
        # a release that failed may have released nothing; a block is left whatever its work raises
        None if other.error is not None and other.what != "work" else other.ended
        for other in history.calls.values()
        if other.details.get("ends") == call.number
    ]
    known = [end for end in ends if end is not None]
    return max(known, default=float("inf"))


def _beside(history: History, kind: str) -> list[tuple[str, Hold, Hold]]:
    found = []
    for key, every in _by_key(history).items():
        holds = [hold for hold in every if hold.kind == kind]
        for index, hold in enumerate(holds):
            found += [(key, hold, other) for other in holds[index + 1 :] if other.began < hold.end]
    return found
