"""A job whose capturing transaction stays open while its handler runs (``hold=True``)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy_locks.core.operation import Operation, fresh_nonce
from sqlalchemy_locks.dialects.connections import abort
from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import (
    UNSTORABLE,
    format_error,
    is_about_no_job,
    is_about_values,
    is_temporary,
    log,
)
from sqlalchemy_locks.workers.events import JobReports
from sqlalchemy_locks.workers.results import failure_operation
from sqlalchemy_locks.workers.running_job import RunningJob
from sqlalchemy_locks.workers.state import failure_of


class HeldJob:
    """Captures one job and completes or fails it, in one transaction. ``AsyncWorker`` calls it in a greenlet."""

    def __init__(self, config: WorkerConfig, reports: JobReports) -> None:
        self.config, self.reports = config, reports
        self._transaction = ShortTransaction(config.engine)
        #: it has captured a job
        self.captured = False
        #: it has captured a job that can't be read, and failed it
        self.buried = False

    def capture(self, stopped: Callable[[], bool]) -> RunningJob | None:
        """Open the transaction and capture a job.

        :param stopped: whether no job may be started any more; asked after the capture.
        :return: the job; ``None`` where there is none to run, and the transaction has ended.
        """
        try:
            return self._capture(self.config.queue.capture(1, queue=self.config.name, host=self.config.host), stopped)
        except Exception as error:
            if is_about_no_job(error):
                raise
            log(logging.WARNING, "A capture failed, and its job is read by itself: %s", error)
        self._transaction = ShortTransaction(self.config.engine)
        return self._capture(None, stopped)

    def _capture(self, operation: Operation[Any] | None, stopped: Callable[[], bool]) -> RunningJob | None:
        """Capture a job by an operation, or without reading it."""
        short = self._transaction
        short.open()
        try:
            jobs: list[Any] = self._unread() if operation is None else list(short.connection.execute(operation))
            if jobs and not stopped():
                short.use()
                self.captured = True
                return RunningJob(jobs[0], lambda: short.loss() is not None, held=True)
            if jobs:
                short.abandon()  # as it was, with its unique key
                return None
        except BaseException as error:
            short.abandon(error)
            raise
        short.commit()
        return None

    def _unread(self) -> list[Any]:
        """Capture a job and read it; mark it as dead where it can't be decoded."""
        connection, queue, name = self._transaction.connection, self.config.queue, self.config.name
        # which no other capture has: jobs that others have captured with the configured host may be committed
        host = f"{self.config.host}:{fresh_nonce()[:8]}"
        if not connection.scalar(queue._capture_unread(1, queue=name, host=host)):
            return []
        pairs = [tuple(pair) for pair in connection.execute(queue._running_on(host, queue=name))]
        try:
            with connection.begin_nested():  # an error of the server's leaves the transaction as it was
                return list(connection.execute(queue._read(pairs)))
        except Exception as error:
            if is_about_no_job(error):
                raise
            temporary = is_temporary(error)
            state = "an attempt has failed" if temporary else "it is dead"
            log(logging.ERROR, "A job can't be read, and %s: internal_id %s", state, pairs[0][0], exc_info=error)
            connection.execute(queue.fail(pairs, error=format_error(error), retry=temporary))
            if not temporary:
                self.reports.emit_unread(error)
            self.buried = True
            return []

    def finish(self, job: RunningJob, error: BaseException | None) -> None:
        """Complete the job, or fail it with the error of its handler, and commit."""
        connection, queue = self._transaction.connection, self.config.queue
        took = self.reports.run_time(job)
        dead = False
        try:
            if error is None:
                connection.execute(queue.complete(job._row))
            else:
                failure = failure_of(self.config, job._row, error)
                dead = failure.is_last(queue, job._row)
                try:
                    with connection.begin_nested():
                        connection.execute(failure_operation(queue, job._row, failure.text, failure.pause))
                except Exception as unstorable:
                    if not is_about_values(unstorable):
                        raise
                    log(logging.WARNING, "An error could not be stored: %s", unstorable)
                    connection.execute(failure_operation(queue, job._row, UNSTORABLE, failure.pause))
        except BaseException as raised:
            self._transaction.abandon(raised)
            raise
        self._transaction.commit()
        if self.reports.has_listeners:
            self.reports.emit_job("completed" if error is None else "failed", job._row, took=took, error=error)
            if dead:
                self.reports.emit_job("dead", job._row, error=error)

    def abort(self) -> None:
        """Let a statement that is under way fail."""
        with contextlib.suppress(AttributeError):  # there is no connection yet
            abort(self._transaction.connection)

    def abandon(self) -> None:
        """Roll back: the job returns to the queue, untried."""
        if hasattr(self._transaction, "connection"):  # otherwise there is no connection yet
            self._transaction.abandon()


class IdleSlots:
    """The slots whose last look found no job, since any slot found or finished one.

    :param number: of all slots. :param ends: the worker ends when all are idle.
    """

    def __init__(self, number: int, ends: bool) -> None:
        self._number, self._ends = number, ends
        self._idle: set[object] = set()

    @property
    def all(self) -> bool:
        return self._ends and len(self._idle) >= self._number

    def add(self, slot: object) -> None:
        self._idle.add(slot)

    def clear(self) -> None:
        if not self.all:
            self._idle.clear()
