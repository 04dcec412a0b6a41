"""Queue: jobs that are put in a transaction, captured by one worker at a time, and not lost when a worker dies.

Guarantees: a job exists if and only if the transaction that put it commits; it has one owner at a time; a worker that
has lost a job (it was thought dead, and the job has another owner) can't complete or fail it; the job of a worker that
died is requeued.

A job may run twice, since a worker can die after the work and before it reports it: make the work idempotent, or do it
in the transaction that completes the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Engine, Index, literal, select

from sqlalchemy_locks._validation import bounded_seconds, valid_int, valid_name
from sqlalchemy_locks.captures.capture import capture_operation
from sqlalchemy_locks.captures.statements import LIMIT
from sqlalchemy_locks.core import row_admin
from sqlalchemy_locks.core.operation import Operation, RowsOperation
from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.core.typing import BOOL_ROW, INT_ROW, MYPY, E, EntityPattern, shaped
from sqlalchemy_locks.dialects import backend_named
from sqlalchemy_locks.queue.acknowledge import BeginJobs, ClaimedJobs, Complete, Fail, ReleaseJobs, storable
from sqlalchemy_locks.queue.activity import Stats
from sqlalchemy_locks.queue.control import CancelJob, GetJob, RescheduleJob, ResumeQueues
from sqlalchemy_locks.queue.enqueue import KEYS, Enqueue, as_uuid, external_ids, unique_keys, utc_instant
from sqlalchemy_locks.queue.fetch import AFTER, AHEAD, CaptureJobs, CompleteAndFetch, FetchJobs, JobsOfHost
from sqlalchemy_locks.queue.jobs import HOST, IDS, QUEUE_NAME, Jobs
from sqlalchemy_locks.queue.liveness import (
    FORGET_AFTER,
    STALLED_AFTER,
    AddWorker,
    ReadHeartbeat,
    RemoveWorker,
    Requeue,
    SendHeartbeat,
    WorkerRow,
)
from sqlalchemy_locks.queue.maintenance import DeleteJobs, JobSweep, Revive
from sqlalchemy_locks.sql.tables import job_indexes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Table
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlalchemy_locks.core.typing import AnyRowsOperation, R, SelectOf, T, class_in, of_shape

    if MYPY:
        from mypy_extensions import DefaultArg, DefaultNamedArg

        _Typed = Callable[
            ["Queue[T]", DefaultArg(int, "limit"), DefaultNamedArg(str, "queue"), DefaultNamedArg(str | None, "host")],
            RowsOperation[R],
        ]

        def _of_class(selects: SelectOf[T, R]) -> Callable[[AnyRowsOperation], _Typed[T, R]]: ...

        # in the class, mypy's cache would mix up its type variables
        @_of_class(select)
        def _capture(queue: Any, limit: int = 1) -> RowsOperation[Any]: ...


_SOME_ID = UUID(int=0)
_WORKER_OPERATIONS = (AddWorker, SendHeartbeat, ReadHeartbeat, RemoveWorker)


class Queue(EntityPattern[E]):
    """A job queue, or several under different names, in the table ``lock.job`` or a table of your own.

    :param entity: a mapped class or ``Table`` of your own (``sqlalchemy_locks.JobColumns`` is a mixin with the columns
        that it needs); without it, the shipped table.
    :param bind: the engine of workers that are created without one; an ``AsyncEngine`` for ``AsyncWorker``.
        Operations don't use it: they run on the connection that executes them.
    :param notify: on PostgreSQL, wake listening workers when jobs are put. NOTIFY serializes the commits of
        transactions that have put jobs: turn it off where there are hundreds of them a second.
    :param workers: a mapped class or ``Table`` of your own for workers, if you have one for jobs, in its database and
        schema (``sqlalchemy_locks.WorkerColumns`` is a mixin with its columns); without it :class:`Worker` refuses to
        run. The shipped table of jobs has ``lock.worker``.
    :raises ValueError: if the class lacks one of the columns of ``lock.job``, except ``unique_key``, without which
        ``put`` takes no ``unique=``; or has it under another name.

    >>> queue = sl.Queue()
    >>> session.execute(queue.put({"to": "a@example.org"}, queue="mail"))
    >>> jobs = session.execute(queue.capture(10, queue="mail", host="web-1")).all()
    >>> session.scalar(queue.complete(jobs))
    """

    def __init__(
        self,
        entity: type[E] | Table | None = None,
        *,
        bind: Engine | AsyncEngine | None = None,
        notify: bool = True,
        workers: Any = None,
    ) -> None:
        if bind is not None and not hasattr(bind, "dialect"):
            # not its repr: a URL has a password
            raise TypeError(f"bind is an Engine or an AsyncEngine, not a {type(bind).__name__}")
        jobs = self._jobs = Jobs(entity, workers)
        self.bind = bind
        self.notify = bool(notify)
        self._put = {
            (when, by): Enqueue(jobs, when, known=by == "external_id", unique=by == "unique", notify=notify)
            for when in ("now", "at", "in")
            for by in (None, "external_id", "unique")
        }
        self._capture = CaptureJobs(jobs, "Queue.capture")
        self._fetch_jobs = FetchJobs(jobs, "Queue.fetch")
        self._complete = Complete(jobs, "Queue.complete")
        #: by the limit, ``None`` for a bound one, and whether there is a position to search from
        self._complete_and_fetch_jobs = lru_cache(maxsize=8)(
            lambda limit, after: CompleteAndFetch(jobs, "Queue.fetch", self._complete, limit, after=after)
        )
        self._jobs_of_host = JobsOfHost(jobs, "Worker")
        self._claimed_jobs = ClaimedJobs(jobs, "Worker")
        self._begin_jobs = {ahead: BeginJobs(jobs, "Queue.begin", ahead=ahead) for ahead in (False, True)}
        self._release = ReleaseJobs(jobs, "Queue.release")
        self._fail = Fail(jobs, "Queue.fail")
        self._requeue = Requeue(jobs)
        self._requeue_since = Requeue(jobs, since=True)
        if jobs.workers is not None:
            self._worker: dict[type[WorkerRow], WorkerRow] = {
                kind: kind(jobs.workers, "Worker") for kind in _WORKER_OPERATIONS
            }
        self._revive = Revive(jobs, "Queue.revive")
        self._delete = {dead: DeleteJobs(jobs, "failed_at" if dead else "completed_at") for dead in (False, True)}
        self._stats = Stats(jobs, "Queue.stats")
        self._get = GetJob(jobs, "Queue.get")
        self._cancel = CancelJob(jobs, "Queue.cancel")
        self._reschedule = RescheduleJob(jobs, "Queue.reschedule")
        if jobs.paused is not None:
            self._pause = row_admin.CreateRows(jobs.paused, "Queue.pause", lambda at: {}, retries=False)
            self._resume = ResumeQueues(jobs.paused)

    @shaped(select(literal(_SOME_ID)))
    def put(
        self,
        *payloads: Any,
        queue: str = DEFAULT_QUEUE,
        external_id: UUID | str | Sequence[UUID | str] | None = None,
        unique: str | Sequence[str] | None = None,
        run_at: datetime | None = None,
        run_in: float | timedelta | None = None,
        priority: int = 0,
        max_attempts: int = 5,
    ) -> Operation[Any]:
        """Put jobs in the caller's transaction: they exist once it commits.

        :param payloads: the content of the jobs, one job each: any JSON value that every engine keeps. SQLite turns
            a payload that is a bare ``1.0`` into 1.
        :param queue: the queue's name, up to 255 characters.
        :param external_id: a UUID that can be shown to users, or one for each payload; random if not given. It is
            the idempotency key: if a job with it exists, whatever its state, none is put.
        :param unique: a key, up to 255 characters, or one for each payload: if a job with it waits in this queue, none
            is put. A capture frees the key, so that a change that is made while the job runs puts another job. The
            waiting job is locked until your transaction ends: it begins after your commit, and sees what you wrote.
            The call waits for a capture that isn't committed.
        :param run_at: the earliest time to run it; a ``datetime`` with a time zone.
        :param run_in: the same as seconds from now, by the server's clock.
        :param priority: smaller values are captured first.
        :param max_attempts: how often it is tried before it is dead.
        :return: the jobs' ``external_id``, in the order of the payloads, those of existing jobs included.
        :raises ValueError: for a ``datetime`` without a time zone, a number of ids or keys other than that of the
            payloads, the same one twice, both ids and keys, or keys in a table without a column or a unique index for
            them. When it is executed, for a payload with NaN, an infinity, NUL, half of a surrogate pair, a number of
            more than 64 bits (send a string), a key of more than 65,535 bytes, or more than 31 levels.
        :raises TypeError: when it is executed, for a payload that is no JSON value.
        :raises Unsupported: with ``unique``, or several payloads, in autocommit on MySQL, MariaDB and SQLite, or any in
            a table of your own on PostgreSQL; and on MySQL and MariaDB for such a table with another unique constraint.

        A second execution of the operation puts other jobs, unless their ids are given. A retry by ``Locks`` after a
        lost reply puts the same jobs.

        The whole batch is one statement. Jobs with given ids or keys are put in the order of these, so that two
        transactions with the same ids or keys can't deadlock. On MySQL and MariaDB a statement before it looks up given
        ids, a statement after it looks up jobs with keys, and drivers send more than a megabyte in several statements.

        >>> queue = sl.Queue()
        >>> job_id = session.scalar(queue.put({"to": "a@example.org"}, queue="mail", max_attempts=5))
        """
        if not payloads:
            raise ValueError("Queue.put needs at least one payload")
        values: dict[str, Any] = {
            "locks_payloads": payloads,
            # without ids they are drawn at each execution
            IDS: None if external_id is None else external_ids(external_id, len(payloads)),
            QUEUE_NAME: valid_name(queue, "a queue"),
            "locks_priority": valid_int(priority, "priority", -(2**31)),
            "locks_max_attempts": valid_int(max_attempts, "max_attempts"),
        }
        when = "now"
        if run_at is not None:
            if run_in is not None:
                raise ValueError("Queue.put: give run_at or run_in, not both")
            when, values["locks_run_at"] = "at", utc_instant(run_at)
        elif run_in is not None:
            when, values["locks_run_in"] = "in", bounded_seconds(run_in, "run_in")
        if unique is None:
            return Operation(self._put[when, None if external_id is None else "external_id"], values)
        if external_id is not None:
            raise ValueError("Queue.put: give external_id or unique, not both")
        self._jobs.require_unique()
        return Operation(self._put[when, "unique"], {**values, KEYS: unique_keys(unique, len(payloads))})

    def _capture_jobs(
        self, limit: int = 1, *, queue: str = DEFAULT_QUEUE, host: str | None = None
    ) -> RowsOperation[Any]:
        """Capture jobs that are due and that no other session has captured.

        :param limit: the most jobs to capture.
        :param host: the name of the worker, stored as ``processing_host`` for operators.
        :return: rows of ``lock.job``, or entities of your own class in a session, ordered by ``priority``, ``run_at``.

        Commit before you work on them: until then other sessions skip them, and a crash releases them, but no other
        session sees that they are running.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> job.payload
        {'to': 'b@example.org'}
        """
        values = {
            LIMIT: valid_int(limit, "limit"),
            QUEUE_NAME: valid_name(queue, "a queue"),
            HOST: None if host is None else valid_name(host, "a host"),
        }
        return capture_operation(self._capture, self._jobs.target, values)

    if TYPE_CHECKING:
        if MYPY:
            capture = _capture  # pyright: ignore

        else:

            def capture(self, limit: int = 1, *, queue: str = DEFAULT_QUEUE, host: str | None = None):
                return of_shape(select(class_in(self)))
    else:
        capture = _capture_jobs
        capture.__name__, capture.__qualname__ = "capture", "Queue.capture"

    @shaped(INT_ROW)
    def complete(self, jobs: Any) -> Operation[Any]:
        """Mark jobs as completed.

        :param jobs: one captured job or several: what ``capture`` returned, or pairs ``(internal_id, claim)``. A
            captured entity keeps its claim apart from its attributes, which a commit expires and which may then show
            the claim of another owner.
        :return: how many were still yours. Jobs that have another owner by now are unchanged.
        :raises ValueError: for an entity that was loaded rather than captured.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.complete(job))
        1
        """
        return Operation(self._complete, self._jobs.owned(jobs))

    @shaped(INT_ROW)
    def fail(
        self, jobs: Any, *, error: str, retry_in: float | timedelta | None = None, retry: bool = True
    ) -> Operation[Any]:
        """Mark an attempt as failed: the job returns to the queue, or is dead after ``max_attempts``.

        :param jobs: as in :meth:`complete`.
        :param error: the reason; its last 16,000 characters are stored.
        :param retry_in: the pause before the next attempt, in seconds; by default 5 s, doubled with each attempt, up to
            an hour.
        :param retry: ``False`` makes them dead immediately.
        :return: how many were still yours.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.fail(job, error="no route to host", retry_in=30))
        1
        """
        if not isinstance(error, str):
            raise TypeError(f"error is a str, not {error!r}")
        pause = None if retry_in is None else bounded_seconds(retry_in, "retry_in")
        values = {"locks_error": storable(error), "locks_pause": pause, "locks_retry": int(retry)}
        return Operation(self._fail, {**self._jobs.owned(jobs), **values})

    @shaped(INT_ROW)
    def release(self, jobs: Any) -> Operation[Any]:
        """Return jobs to the queue untried: the attempt doesn't count.

        :param jobs: as in :meth:`complete`.
        :return: how many were still yours.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.release(job))
        1
        """
        return Operation(self._release, self._jobs.owned(jobs))

    @shaped(INT_ROW)
    def requeue_stalled(
        self, older_than: float | timedelta = STALLED_AFTER, *, queue: str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Return the jobs of dead workers to the queue: an attempt that had begun counts, and after the last one the
        job is dead.

        :param older_than: how long ago a worker must have sent its last heartbeat, in seconds: several times the
            workers' ``heartbeat``. A job without a worker must have been captured as long ago. A queue on a table of
            your own that is made without ``workers=`` knows of no worker: it requeues all jobs that run for so long.
        :param queue: only those of this queue; ``None``: of all queues.
        :param limit: the most jobs of one call, so that no transaction is long; call it again when it returns as many.
            The jobs of one worker are returned together, even if they are more.
        :return: how many.
        :raises Unsupported: in autocommit, since a silent worker is deleted in the transaction that takes its jobs.

        Commit soon: until then the heartbeats of such a worker wait. On MySQL and MariaDB execute the operation in a
        new transaction, or with ``Locks``: a snapshot that is older than ``older_than`` doesn't show the workers that
        have started since.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.requeue_stalled(300))
        0
        """
        silent = bounded_seconds(older_than, "older_than")
        values = {"locks_silent": silent, "locks_forgotten": max(silent, FORGET_AFTER)}
        return self._sweep(self._requeue, limit, queue, **values)

    @shaped(INT_ROW)
    def revive(
        self, *, queue: str | None = None, external_id: UUID | str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Return dead jobs to the queue with all their attempts, once the cause of their failure is fixed.

        :param queue: only those of this queue. :param external_id: only the one with this id.
        :param limit: the most jobs of one call; call it again when it returns as many.
        :return: how many.

        >>> session.scalar(queue.revive(queue="mail"))
        """
        id = None if external_id is None else as_uuid(external_id)
        return self._sweep(self._revive, limit, queue, locks_chosen=id)

    @shaped(INT_ROW)
    def delete_finished(
        self, older_than: float | timedelta, *, dead: bool = False, queue: str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Delete jobs that were completed long ago; their ``external_id`` can then be put again.

        :param older_than: how long ago, in seconds.
        :param dead: delete dead jobs instead.
        :param queue: only those of this queue; the search passes jobs of other queues that ended earlier. ``None``: of
            all queues.
        :param limit: the most jobs of one call; call it again when it returns as many.
        :return: how many.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.delete_finished(7 * 86400))
        0
        """
        older = bounded_seconds(older_than, "older_than")
        return self._sweep(self._delete[bool(dead)], limit, queue, locks_older=older)

    def _sweep(self, impl: JobSweep, limit: int, queue: str | None, **values: Any) -> Operation[Any]:
        name = None if queue is None else valid_name(queue, "a queue")
        return Operation(impl, {**values, LIMIT: valid_int(limit, "limit"), QUEUE_NAME: name})

    def get(self, id: UUID | str) -> Operation[Any]:
        """Read one job, whatever its state.

        :param id: its ``external_id``.
        :return: the row, or an entity of your own class in a session; ``None`` if there is no such job. Its timestamps
            tell its state: ``failed_at``: dead; ``completed_at``: completed, or cancelled if it has an ``error``;
            only ``started_at``: running; none of them: waiting.

        >>> queue = sl.Queue()
        >>> job_id = session.scalar(queue.put({"to": "a@example.org"}))
        >>> session.scalar(queue.get(job_id)).payload
        {'to': 'a@example.org'}
        """
        return Operation(self._get, {"locks_chosen": as_uuid(id)})

    @shaped(BOOL_ROW)
    def cancel(self, id: UUID | str) -> Operation[Any]:
        """End a waiting job without running it.

        :param id: its ``external_id``, which stays known: putting it again puts no job.
        :return: whether it was cancelled: ``False`` if it is running, has ended, or doesn't exist. The call waits for a
            transaction that is capturing it.

        A cancelled job is completed and has the error ``"cancelled"``: ``revive`` doesn't return it to the queue, and
        ``delete_finished`` deletes it in time.

        >>> queue = sl.Queue()
        >>> job_id = session.scalar(queue.put({"to": "a@example.org"}, run_in=3600))
        >>> session.scalar(queue.cancel(job_id))
        True
        """
        return Operation(self._cancel, {"locks_chosen": as_uuid(id)})

    @shaped(BOOL_ROW)
    def reschedule(
        self, id: UUID | str, *, run_at: datetime | None = None, run_in: float | timedelta | None = None
    ) -> Operation[Any]:
        """Change the earliest time to run a waiting job.

        :param id: its ``external_id``.
        :param run_at: a ``datetime`` with a time zone. :param run_in: the same as seconds from now, by the server's
            clock; ``0`` runs it now.
        :return: whether it was waiting: ``False`` as for :meth:`cancel`.
        :raises ValueError: unless one of both is given.

        >>> queue = sl.Queue()
        >>> job_id = session.scalar(queue.put({"to": "a@example.org"}, run_in=3600))
        >>> session.scalar(queue.reschedule(job_id, run_in=0))
        True
        """
        values: dict[str, Any] = {"locks_chosen": as_uuid(id)}
        if (run_at is None) == (run_in is None):
            raise ValueError("Queue.reschedule: give run_at or run_in, and not both")
        values["locks_run_in"] = None if run_in is None else bounded_seconds(run_in, "run_in")
        values["locks_run_at"] = None if run_at is None else utc_instant(run_at)
        return Operation(self._reschedule, values)

    @shaped(INT_ROW)
    def pause(self, *queues: str) -> Operation[Any]:
        """Stop the captures of these queues, from the commit on: running jobs continue, and new jobs wait.

        :return: how many weren't paused already.
        :raises ValueError: for jobs in a table of your own.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.pause("mail"))
        1
        """
        names = self._names("Queue.pause", queues)
        return Operation(self._pause, {"locks_ids": names})

    @shaped(INT_ROW)
    def resume(self, *queues: str) -> Operation[Any]:
        """Allow captures of paused queues again; idle workers find the jobs within their ``poll`` seconds.

        :return: how many were paused.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.pause("sms"))
        1
        >>> session.scalar(queue.resume("sms"))
        1
        """
        names = self._names("Queue.resume", queues)
        return Operation(self._resume, {"locks_ids": names})

    def _names(self, name: str, queues: Sequence[str]) -> list[str]:
        """Return the names of queues to pause or resume, in order, so that two callers can't deadlock."""
        self._jobs.require_paused()
        if not queues:
            raise ValueError(f"{name} needs at least one queue")
        return sorted({valid_name(queue, "a queue") for queue in queues})

    def stats(self, *, stalled_after: float | timedelta = STALLED_AFTER) -> RowsOperation[Any]:
        """Count the jobs of each queue: rows of ``queue_id, waiting, scheduled, running, dead, stalled, oldest,
        paused``.

        ``scheduled`` jobs have a ``run_at`` in the future. ``stalled`` jobs are running jobs whose worker is silent.
        ``oldest`` is the earliest ``run_at`` of the waiting jobs. A queue that has only completed jobs, and isn't
        paused, has no row.

        :param stalled_after: after how many seconds without a heartbeat a worker is silent.

        >>> queue = sl.Queue()
        >>> stats = session.execute(queue.stats()).all()
        """
        return RowsOperation(self._stats, {"locks_older": bounded_seconds(stalled_after, "stalled_after")})

    def _fetch(self, limit: int, *, queue: str, host: str) -> Operation[Any]:
        """Capture jobs for a worker, as undecoded rows; no attempt counts."""
        return RowsOperation(self._fetch_jobs, {LIMIT: limit, QUEUE_NAME: queue, HOST: host})

    def _complete_and_fetch(
        self,
        jobs: Sequence[Any],
        limit: int,
        *,
        batch: int,
        queue: str,
        host: str,
        ahead: bool,
        after: tuple[Any, ...] | None,
    ) -> Operation[Any]:
        """Complete jobs, given as pairs, and capture others: the undecoded rows, and how many were completed.

        :param batch: the usual limit, for which there is a statement of its own.
        :param ahead: count attempts that are about to begin.
        :param after: the position in the order to search from; ``None``: from the head.
        """
        values = {LIMIT: limit, QUEUE_NAME: queue, HOST: host, AHEAD: int(ahead)}
        values |= {} if after is None else dict(zip(AFTER, after, strict=True))
        operation = self._complete_and_fetch_jobs(limit if limit == batch else None, after is not None)
        return Operation(operation, {**values, **self._jobs.owned_pairs(jobs)})

    def _begin(self, jobs: Sequence[Any], *, ahead: bool = False) -> Operation[Any]:
        """Count the attempts of captured jobs, given as pairs: how many were still owned, and not locked.

        :param ahead: their handlers begin later.
        """
        return Operation(self._begin_jobs[ahead], self._jobs.owned_pairs(jobs))

    def _running_on(self, host: str, *, queue: str) -> Operation[Any]:
        """Read the running jobs that one worker has captured, as pairs ``(internal_id, claim)``."""
        return RowsOperation(self._jobs_of_host, {QUEUE_NAME: queue, HOST: host})

    def _claimed(self, jobs: Sequence[Any]) -> Operation[Any]:
        """Read which of these pairs run, or ended, under their claims: ``(internal_id, claim, state)``."""
        return RowsOperation(self._claimed_jobs, self._jobs.owned_pairs(jobs))

    def _requeue_silent(self, stalled_after: float, by: datetime, *, queue: str, limit: int) -> Operation[Any]:
        """Requeue the jobs of workers whose last heartbeat was some seconds before now, and before ``by`` as well."""
        since, forgotten = by - timedelta(seconds=stalled_after), by - timedelta(seconds=stalled_after + FORGET_AFTER)
        silent = {"locks_silent": stalled_after, "locks_since": since, "locks_forgotten": forgotten}
        return Operation(self._requeue_since, {LIMIT: limit, QUEUE_NAME: queue, **silent})

    def _of_worker(self, kind: type[WorkerRow], host: str) -> Operation[Any]:
        """Return an operation on the row of one worker."""
        return Operation(self._worker[kind], {HOST: host})

    def indexes(self, dialect: str | None = None) -> list[Index]:
        """Create the ``Index`` objects that a table of your own needs, and attach them to it.

        :param dialect: the dialect's name, e.g. ``"postgresql"``. Without it both forms of the index that differs
            between engines are created, each for its engines: ``create_all`` selects one, Alembic's autogenerate
            doesn't.
        :raises ValueError: for the shipped table, which has its indexes.

        >>> class Mail(sl.JobColumns, Base):
        ...     __tablename__ = "mail"
        >>> [index.name for index in sl.Queue(Mail).indexes("postgresql")]
        [...]
        """
        at = self._jobs.own
        if at is None:
            raise ValueError("Queue.indexes() is for a table of your own: the shipped one has its indexes")
        partial = None if dialect is None else backend_named(dialect).partial_ready_index
        return job_indexes(at.roles, at.table.name, partial=partial)
