"""Run the jobs of a queue in the calling thread, so that a test can look at their effects."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.queue import Queue
from sqlalchemy_locks.queue.fetch import decoders
from sqlalchemy_locks.workers.results import failure_of
from sqlalchemy_locks.workers.running_job import RunningJob
from sqlalchemy_locks.workers.threaded import Worker, refuse_unfinished


@dataclass(frozen=True)
class Drained:
    """The result of :func:`run_until_empty`.

    >>> run_until_empty(queue, lambda job: None, bind=engine, name="mail")
    Drained(completed=1, failed=0)
    """

    #: jobs whose handler returned
    completed: int
    #: attempts whose handler raised
    failed: int


def run_until_empty(
    queue: Queue[Any],
    handler: Callable[[Any], Any],
    *,
    bind: Engine,
    name: str = DEFAULT_QUEUE,
    retry: bool = False,
    limit: int = 1000,
) -> Drained:
    """Run the jobs of a queue that are due, and the jobs that their handlers put, until none is due.

    The jobs run one after another in the calling thread, in the order in which a worker would capture them. No worker
    may run at the same time.

    :param handler: the handler of a :class:`~sqlalchemy_locks.Worker`, or of an
        :class:`~sqlalchemy_locks.AsyncWorker`: its coroutine is awaited in an event loop of its own.
    :param bind: the engine.
    :param name: the queue's name.
    :param retry: when a handler has raised, run its job again immediately, until it is completed or dead; not if its
        :class:`~sqlalchemy_locks.Retry` has a pause. By default the error is raised here, and the job has failed.
    :param limit: how many attempts may be made.
    :return: how many jobs were completed, and how many attempts failed.
    :raises AssertionError: when a job is still due after that many attempts.

    A job with a ``run_at`` in the future is not due: move the :class:`Clock`.

    >>> run_until_empty(queue, handler, bind=engine, name="mail")
    Drained(completed=1, failed=0)
    """
    locks, host, completed, failed = Locks(bind), "run_until_empty", 0, 0
    config = Worker(queue, print, bind=bind, name=name, retry_in=0).config
    for _ in range(limit):
        # rows, as a worker fetches them, also where the queue has a mapped class
        rows: Any = locks._run(queue._fetch(1, queue=name, host=host))
        if not rows:
            return Drained(completed, failed)
        job = RunningJob(queue._jobs, rows[0], queue._jobs.captured(name, host), lambda: False)
        locks._run(queue._begin([job._pair]))
        job._count()
        try:
            job._decode(decoders(queue._jobs, bind.dialect))
            value = handler(job)
            refuse_unfinished(value, (Generator, AsyncGenerator))
            if inspect.isawaitable(value):
                asyncio.run(_result(value))
        except Exception as error:
            failed += 1
            failure = failure_of(config, job, error)
            locks.run(failure.operation(queue, job))
            if not retry:
                raise
        else:
            # a handler may have completed it in a transaction of its own
            locks.run(queue.complete(job._pair))
            completed += 1
    raise AssertionError(f"the queue {name!r} is not empty after {limit} attempts: do its handlers put jobs forever?")


async def _result(value: Awaitable[Any]) -> Any:
    return await value
