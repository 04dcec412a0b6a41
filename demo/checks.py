"""The guarantees. Each check uses the witness's records or the invoices, never the locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .witness import Stay, Witness, overlaps
from .worker import VICTIM, WRITER


@dataclass(frozen=True)
class Check:
    """A statement, and whether it is true; ``None`` where this engine doesn't guarantee it."""

    true: bool | None
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    engine: str
    witness: Witness
    stays: list[Stay]
    #: the positions of each invoice in the database
    positions: Mapping[str, int]
    #: the workers that ended too early, or didn't stop
    failed: list[int]


def checks(outcome: Outcome) -> Iterator[Check]:
    """Yield all checks, in the order in which they are printed."""
    yield _all_lived(outcome)
    yield _counters(outcome)
    yield _history(outcome)
    yield _no_lost_update(outcome)
    yield _sharing(outcome)
    yield _no_starvation(outcome)
    yield _writer_among_readers(outcome)
    yield _killed(outcome)


def _all_lived(outcome: Outcome) -> Check:
    failed = ", ".join(str(number + 1) for number in outcome.failed)
    return Check(
        not failed, f"Failed: worker {failed}" if failed else "No worker failed except the one that was killed"
    )


def _counters(outcome: Outcome) -> Check:
    count = outcome.witness.overlaps
    return Check(
        count == 0,
        f"No exclusive holder of a key overlapped with any other holder: {len(outcome.stays)} turns, {count} overlaps",
    )


def _history(outcome: Outcome) -> Check:
    count = len(overlaps(outcome.stays))
    return Check(count == 0, f"The recorded history confirms it: {count} overlaps")


def _no_lost_update(outcome: Outcome) -> Check:
    committed = Counter(key for stay in outcome.stays if stay.committed for key in stay.keys)
    added = {invoice: committed[invoice] for invoice in outcome.positions}
    return Check(
        added == outcome.positions,
        f"{sum(added.values())} positions were added to the invoices (read, think, write),"
        f" and {sum(outcome.positions.values())} are there",
    )


def _sharing(outcome: Outcome) -> Check:
    most = outcome.witness.most_sharers
    if outcome.engine == "SQLite":
        return Check(None, "On SQLite sharers exclude each other: every key is the database's one write lock")
    return Check(most > 1, f"Sharers share: up to {most} held one key at the same time")


def _no_starvation(outcome: Outcome) -> Check:
    turns = Counter(stay.worker for stay in outcome.stays)
    least = min(turns[worker] for worker in range(outcome.witness.workers))
    waited = max((stay.waited for stay in outcome.stays), default=0.0)
    return Check(
        least > 0,
        f"Every worker had turns: at least {least}, at most {max(turns.values(), default=0)};"
        f" the longest wait was {waited:.1f} s",
    )


def _writer_among_readers(outcome: Outcome) -> Check:
    waits = [stay.waited for stay in outcome.stays if stay.worker == WRITER]
    if not waits:
        return Check(False, "Worker 1 never got the stock exclusively")
    sentence = f"Worker 1 got the stock exclusively {len(waits)} times among its sharers, within {max(waits):.2f} s"
    if outcome.engine == "PostgreSQL":
        return Check(True, f"{sentence}: PostgreSQL's queue is fair")
    return Check(None, f"{sentence} (only PostgreSQL's queue is guaranteed to be fair)")


def _killed(outcome: Outcome) -> Check:
    victims = [stay for stay in outcome.stays if stay.worker == VICTIM and not stay.committed]
    if not victims:
        return Check(False, f"Worker {VICTIM + 1}, which was to be killed, never held its lock")
    victim = victims[-1]
    held = victim.left - victim.entered
    after = [stay for stay in outcome.stays if victim.keys[0] in stay.keys and stay.entered > victim.left]
    if not after:
        return Check(False, f"Worker {VICTIM + 1} was killed, and {victim.keys[0]} was never acquired again")
    gap = after[0].entered - victim.left
    return Check(
        True,
        f"Worker {VICTIM + 1} was killed {held:.1f} s after it got {victim.keys[0]};"
        f" another worker acquired it {gap * 1000:.0f} ms later",
    )
