"""A job as its handler gets it: the captured row, and whether the job was lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.engine import IteratorResult
from sqlalchemy.engine.result import SimpleResultMetaData

from sqlalchemy_locks.queue.acknowledge import STALLED
from sqlalchemy_locks.queue.jobs import BEGUN, Jobs


class RunningJob:
    """What a worker's handler gets: a captured row, whose columns are attributes, and :attr:`lost`.

    >>> def handler(job: sl.RunningJob) -> None:
    ...     send(job.payload["to"], attempt=job.attempts)
    """

    # names that no column has: a column's name is an attribute of the row
    __slots__ = ("_began_at", "_disowned", "_ended_at", "_jobs", "_locked_until", "_may_be_lost", "_pair", "_values")

    def __init__(
        self, jobs: Jobs, row: Sequence[Any], captured: tuple[Any, ...], may_be_lost: Callable[[], bool]
    ) -> None:
        """Wrap a row.

        :param row: the fetched columns; further values are ignored.
        :param captured: the other columns, as ``Jobs.captured`` has them.
        :param may_be_lost: whether the job may have another owner by now, as far as the worker can tell without asking.
        """
        self._jobs, keys = jobs, jobs.keys
        self._values = [*row]
        self._values[len(jobs.fetched) :] = captured
        #: its id and claim
        self._pair = row[keys["internal_id"]], row[keys["claim"]]
        self._may_be_lost = may_be_lost
        #: the job isn't this worker's any more: it has another owner, the worker's row is gone, or it is being released
        self._disowned = False
        #: when its handler was called, by ``time.monotonic()``
        self._began_at = 0.0
        #: when its handler had returned or raised
        self._ended_at = 0.0
        #: its row was locked: until this instant, by ``time.monotonic()``, the job is neither counted nor reported,
        #: unless the worker stops
        self._locked_until = -float("inf")

    @property
    def lost(self) -> bool:
        """Whether the job has another owner by now, or may have one; without a round trip.

        The job may have another owner once the worker has sent no heartbeat for ``stalled_after`` seconds. A handler
        should then stop: another run of the job may have begun.
        """
        return self._disowned or self._may_be_lost()

    @property
    def _is_suspect(self) -> bool:
        """Whether its worker died during the last attempt; the job itself may have killed the worker."""
        return bool(self._value("error") == STALLED)

    @property
    def _row(self) -> Any:
        return _row(*self.__reduce__()[1])

    def _value(self, role: str) -> Any:
        """Return the row's value in the column of a role."""
        return self._values[self._jobs.keys[role]]

    def _count(self, bits: int = BEGUN) -> None:
        """Note that the attempt was counted: these bits of the claim are set."""
        self._pair = self._pair[0], self._pair[1] | bits
        self._values[self._jobs.keys["claim"]] = self._pair[1]
        self._values[self._jobs.keys["attempts"]] += 1

    def _decode(self, decoders: Sequence[tuple[int, Callable[[Any], Any]]]) -> None:
        """Decode the columns that were read undecoded."""
        values = self._values
        for index, decode in decoders:
            values[index] = decode(values[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (index := self._jobs.keys.get(name)) is not None:
            return self._values[index]
        return getattr(self._row, name)  # what SQLAlchemy's rows have, such as _mapping

    def __reduce__(self) -> Any:
        keys = tuple(map(str, self._jobs.columns.table.c.keys()))
        return _row, (keys, tuple(map(self._value, keys)))  # another process gets the row

    def __repr__(self) -> str:
        return repr(self._row)


def _row(keys: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return IteratorResult(SimpleResultMetaData(keys), iter([values])).one()
