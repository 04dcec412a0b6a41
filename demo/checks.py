"""What must have been true. Each check looks at what the witness wrote down, or at the invoices; none at a lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .witness import Stay, Witness, overlaps
from .worker import VICTIM, WRITER


@dataclass(frozen=True)
class Check:
    """One sentence, and whether it is true; ``None`` for what this engine doesn't promise."""

    true: bool | None
    sentence: str


@dataclass(frozen=True)
class Outcome:
    """All that is left when they have fought."""

    engine: str
    witness: Witness
    stays: list[Stay]
    #: how many positions the database says that each invoice has
    positions: Mapping[str, int]
    #: the workers that ended before they were told to, or not when they were
    failed: list[int]


def checks(outcome: Outcome) -> Iterator[Check]:
    """Every check, in the order in which they are printed."""
    yield _all_lived(outcome)
    yield _counters(outcome)
    yield _history(outcome)
    yield _no_lost_update(outcome)
    yield _sharing(outcome)
    yield _nobody_starved(outcome)
    yield _writer_among_readers(outcome)
    yield _killed(outcome)


def _all_lived(outcome: Outcome) -> Check:
    failed = ", ".join(str(number + 1) for number in outcome.failed)
    return Check(not failed, f"Failed: worker {failed}" if failed else "No worker failed but the one that was killed")


def _counters(outcome: Outcome) -> Check:
    count = outcome.witness.overlaps
    return Check(
        count == 0,
        "Nobody was let into a key that another held alone, nor alone into one that others shared:"
        f" {len(outcome.stays)} turns, {count} overlaps",
    )


def _history(outcome: Outcome) -> Check:
    count = len(overlaps(outcome.stays))
    return Check(count == 0, f"The written history, gone through afterwards, says the same: {count} overlaps")


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
        return Check(
            None, "Sharers don't share on SQLite: there, every key is the one write lock that the database has"
        )
    return Check(most > 1, f"Sharers share: up to {most} were inside one key together")


def _nobody_starved(outcome: Outcome) -> Check:
    turns = Counter(stay.worker for stay in outcome.stays)
    least = min(turns[worker] for worker in range(outcome.witness.workers))
    waited = max((stay.waited for stay in outcome.stays), default=0.0)
    return Check(
        least > 0,
        f"Everybody got in, the least lucky {least} times, the luckiest {max(turns.values(), default=0)};"
        f" nobody waited longer than {waited:.1f} s",
    )


def _writer_among_readers(outcome: Outcome) -> Check:
    waits = [stay.waited for stay in outcome.stays if stay.worker == WRITER]
    if not waits:
        return Check(False, "Worker 1, who wanted the stock alone, never got it")
    sentence = (
        f"Worker 1 got the stock alone {len(waits)} times among all who share it, after {max(waits):.2f} s at most"
    )
    if outcome.engine in ("PostgreSQL", "SQLite"):
        return Check(True, f"{sentence}: {outcome.engine}'s queue is fair")
    return Check(None, f"{sentence} (only PostgreSQL's and SQLite's queues are promised to be fair)")


def _killed(outcome: Outcome) -> Check:
    victims = [stay for stay in outcome.stays if stay.worker == VICTIM and not stay.committed]
    if not victims:
        return Check(False, f"Worker {VICTIM + 1}, who was to be killed, never held its lock")
    victim = victims[-1]
    held = victim.left - victim.entered
    after = [stay for stay in outcome.stays if victim.keys[0] in stay.keys and stay.entered > victim.left]
    if not after:
        return Check(False, f"Worker {VICTIM + 1} was killed, and nobody ever got {victim.keys[0]} again")
    gap = after[0].entered - victim.left
    return Check(
        True,
        f"Worker {VICTIM + 1} was killed {held:.1f} s after it got {victim.keys[0]};"
        f" somebody else had it {gap * 1000:.0f} ms later",
    )
