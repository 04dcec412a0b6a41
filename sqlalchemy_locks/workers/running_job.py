"""A job as its handler gets it: the captured row, and whether the job was lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class RunningJob:
    """What a worker's handler gets: a captured row, whose columns are attributes, and :attr:`lost`.

    >>> def handler(job: sl.RunningJob) -> None:
    ...     send(job.payload["to"], attempt=job.attempts)
    """

    # no name that a column may have: those are the row's
    __slots__ = ("_began_at", "_ends_with_transaction", "_gone", "_may_be_lost", "_row", "_taken")

    def __init__(self, row: Any, may_be_lost: Callable[[], bool], *, held: bool = False) -> None:
        """Wrap a row.

        :param may_be_lost: whether the job may have another owner by now, as far as the worker can tell without asking.
        :param held: the transaction that has captured it is open (``hold=True``), and only that one can end it.
        """
        self._row, self._ends_with_transaction = row, held
        self._may_be_lost = may_be_lost
        #: the database has said that it no longer runs: another owner has it (``_taken``), or its handler has ended it
        self._gone = self._taken = False
        #: when its handler was called, by ``time.monotonic()``
        self._began_at = 0.0

    @property
    def lost(self) -> bool:
        """Whether the job has another owner by now, or may have one; without a round trip.

        It may have one once no heartbeat has been sent for ``stalled_after`` seconds; with ``hold=True``, once the
        server is known to have closed the connection. A handler that sees it should stop: another run may have begun.
        """
        return self._taken or self._may_be_lost()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._row, name)

    def __getitem__(self, index: Any) -> Any:
        return self._row[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)

    def __reduce__(self) -> Any:
        return _same, (self._row,)  # another process gets the row

    def __repr__(self) -> str:
        return repr(self._row)


def _same(row: Any) -> Any:
    return row
