"""A job whose capturing transaction stays open while its handler runs (``hold=True``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy_locks.runtime.transaction import ShortTransaction
from sqlalchemy_locks.workers.config import WorkerConfig
from sqlalchemy_locks.workers.database import UNSTORABLE, format_error, is_about_values, log


class HeldJob:
    """Captures one job and completes or fails it, in one transaction. ``AsyncWorker`` calls it in a greenlet."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self._transaction = ShortTransaction(config.engine)

    def capture(self, stopped: Callable[[], bool]) -> Any:
        """Open the transaction and capture a job.

        :param stopped: whether no job may be started any more; asked after the capture.
        :return: the job; ``None`` where there is none to run, and the transaction is over.
        """
        short, queue = self._transaction, self.config.queue
        short.open()
        try:
            jobs: list[Any] = list(
                short.connection.execute(queue.capture(1, queue=self.config.name, host=self.config.host))
            )
            if jobs and not stopped():
                short.use()
                return jobs[0]
            if jobs:
                short.connection.execute(queue.release(jobs))
        except BaseException:
            short.abandon()
            raise
        short.commit()
        return None

    def finish(self, job: Any, error: BaseException | None) -> None:
        """Complete the job, or fail it with the error of its handler, and commit."""
        connection, queue = self._transaction.connection, self.config.queue
        try:
            if error is None:
                connection.execute(queue.complete(job))
            else:
                log(logging.WARNING, "A job of the queue %r failed", self.config.name, exc_info=error)
                try:
                    with connection.begin_nested():
                        connection.execute(queue.fail(job, error=format_error(error)))
                except Exception as unstorable:
                    if not is_about_values(unstorable):
                        raise
                    log(logging.WARNING, "An error could not be stored: %s", unstorable)
                    connection.execute(queue.fail(job, error=UNSTORABLE))
        except BaseException:
            self.abandon()
            raise
        self._transaction.commit()

    def abandon(self) -> None:
        """Roll back: the job returns to the queue, untried."""
        self._transaction.abandon()
