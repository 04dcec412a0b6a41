"""Queue: jobs that are put in a transaction, captured by one worker each, and lost by nobody.

The pattern: "Let's talk about the locking clause FOR UPDATE SKIP LOCKED", with its failure cases. Promised: what is
put is there if and only if its transaction commits; a job is given to one worker at a time; whoever lost a job (its
worker was thought dead, and the job is another's) can't complete or fail it; a job whose worker died comes back.

A job may run twice, since a worker can die after the work and before it says so: make the work repeatable, or do it
in the transaction that completes the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import Engine, Index, literal, select

from sqlalchemy_locks._validation import bounded_seconds, positive_int, valid_name
from sqlalchemy_locks.captures.statements import LIMIT
from sqlalchemy_locks.core.operation import Operation, RowsOperation, shaped
from sqlalchemy_locks.core.roles import DEFAULT_QUEUE
from sqlalchemy_locks.core.typing import MYPY, E, Given
from sqlalchemy_locks.dialects import dialect_name
from sqlalchemy_locks.queue.acknowledge import Complete, Fail, Heartbeat, Ours, ReleaseJobs, storable
from sqlalchemy_locks.queue.enqueue import Enqueue, as_uuid, batch, due_at
from sqlalchemy_locks.queue.fetch import Fetch, FetchJobs, HeldJobs, position
from sqlalchemy_locks.queue.jobs import Jobs
from sqlalchemy_locks.queue.maintenance import DeleteJobs, Requeue, Stats
from sqlalchemy_locks.reviving import Revive
from sqlalchemy_locks.sql.tables import job_indexes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Table
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sqlalchemy_locks.core.typing import R, Selects, T, Vague, class_in, of_shape

    if MYPY:
        from mypy_extensions import DefaultArg, DefaultNamedArg

        _Typed = Callable[
            ["Queue[T]", DefaultArg(int, "limit"), DefaultNamedArg(str, "queue"), DefaultNamedArg(str | None, "host")],
            RowsOperation[R],
        ]

        def _of_class(selects: Selects[T, R]) -> Callable[[Vague], _Typed[T, R]]: ...


_SOME_ID = UUID(int=0)


class Queue(Given[E]):
    """A queue, or many under different names, in the table ``lock.job`` or a table of your own.

    :param entity: a mapped class or ``Table`` of your own (``sqlalchemy_locks.JobColumns`` is a mixin with what it
        needs); without it, the shipped table.
    :param bind: the engine that its workers use where they are given none; an ``AsyncEngine`` for ``AsyncWorker``.
        Operations don't need it: whoever executes them has a connection.
    :param notify: on PostgreSQL, wake the workers that listen when jobs are put. NOTIFY makes transactions that have
        put something commit one after another: turn it off where hundreds of them a second do.
    :param columns: for each column of your own that has another name than in ``lock.job``: ``queue_id=Mail.channel``.
    :raises ValueError: for a class without one of the columns.

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
        **columns: Any,
    ) -> None:
        jobs = self._jobs = Jobs(entity, columns)
        self.bind = bind
        self.notify = bool(notify)
        self._put = {
            (when, known): Enqueue(jobs, when, known=known, notify=notify)
            for when in ("now", "at", "in")
            for known in (False, True)
        }
        self._take = FetchJobs(jobs)
        self._complete = Complete(jobs, "Queue.complete")
        self._exchanges = {on: Fetch(jobs, self._complete.skip_locked, goes_on=on) for on in (False, True)}
        self._held = HeldJobs(jobs, "Queue.capture")
        self._ours = Ours(jobs, "Queue.heartbeat")
        self._heartbeat = Heartbeat(jobs, "Queue.heartbeat")
        self._release = ReleaseJobs(jobs, "Queue.release")
        self._fail = {pause: Fail(jobs, pause) for pause in ("given", "doubling", "never")}
        self._requeue = {one: Requeue(jobs, one=one) for one in (False, True)}
        self._revive = {by: Revive(jobs, by) for by in (None, "queue_id", "external_id")}
        self._delete = {
            (dead, one): DeleteJobs(jobs, "failed_at" if dead else "completed_at", one=one)
            for dead in (False, True)
            for one in (False, True)
        }
        self._stats = Stats(jobs, "Queue.stats")

    @shaped(select(literal(_SOME_ID)))
    def put(
        self,
        *payloads: Any,
        queue: str = DEFAULT_QUEUE,
        external_id: UUID | str | Sequence[UUID | str] | None = None,
        run_at: datetime | None = None,
        run_in: float | timedelta | None = None,
        priority: int = 0,
        max_attempts: int = 5,
    ) -> Operation[Any]:
        """Put jobs, in the caller's transaction: they are there when, and if, it commits.

        :param payloads: what the jobs are about, one job each: anything that JSON can say.
        :param queue: the queue's name, 255 characters at most.
        :param external_id: a UUID that can be shown to others, or one for each payload; random if not given. It is
            the idempotency key: where a job has it already, whatever became of it, nothing is put.
        :param run_at: not before this instant; a ``datetime`` with a time zone.
        :param run_in: not before so many seconds from now, by the server's clock.
        :param priority: smaller is sooner.
        :param max_attempts: how often it is tried before it is dead.
        :return: the jobs' ``external_id``, in the order of the payloads, those that were there already included.
        :raises ValueError: for a ``datetime`` without a time zone, another number of ids than of payloads, or the same
            id twice.

        Executed again, it puts other jobs, unless their ids are given; what ``Locks`` tries again after a lost answer
        puts the same ones.

        One statement for the whole batch, in the order of the ids where they are given, so that two who put the same
        ones can't deadlock; on MySQL and MariaDB a look for known ids before it, where any are given.

        >>> queue = sl.Queue()
        >>> job_id = session.scalar(queue.put({"to": "a@example.org"}, queue="mail", max_attempts=5))
        """
        values = batch(payloads, queue, external_id, priority, max_attempts)
        when, due = due_at(run_at, run_in)
        return Operation(self._put[when, external_id is not None], values | due)

    def _captures(self, limit: int = 1, *, queue: str = DEFAULT_QUEUE, host: str | None = None) -> RowsOperation[Any]:
        """Take jobs that are due and that nobody else has.

        :param limit: how many at most.
        :param host: who takes them, for people to read (``processing_host``).
        :return: rows of ``lock.job``, or entities of your own class in a session: by ``priority``, then ``run_at``.

        Commit before you work on them: until then other sessions pass them over, and a crash gives them back, but
        nobody can see that they are being worked on.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> job.payload
        {'to': 'b@example.org'}
        """
        values = {
            LIMIT: positive_int(limit, "limit"),
            "locks_queue": valid_name(queue, "a queue"),
            "locks_host": None if host is None else valid_name(host, "a host"),
        }
        operation: RowsOperation[Any] = RowsOperation(self._take, values)
        if self._jobs.target is not None and self._jobs.target.mapper is not None:
            operation._entity_is(self._jobs.target.entity)
        return operation

    if TYPE_CHECKING:
        if MYPY:

            @_of_class(select)  # pyright: ignore[reportPossiblyUnboundVariable]
            def capture(self, limit: int = 1) -> RowsOperation[Any]: ...  # pyright: ignore[reportRedeclaration]

        else:

            def capture(self, limit: int = 1, *, queue: str = DEFAULT_QUEUE, host: str | None = None):
                return of_shape(select(class_in(self)))
    else:
        capture = _captures
        capture.__name__, capture.__qualname__ = "capture", "Queue.capture"

    @shaped(select(literal(1)))
    def complete(self, jobs: Any) -> Operation[Any]:
        """Say that jobs are done.

        :param jobs: one captured job or several: what ``capture`` gave, or pairs ``(internal_id, claim)``. A captured
            entity remembers its claim: after a commit its attribute is read anew, and may be somebody else's.
        :return: how many were still yours. The others were given to somebody else meanwhile, and are unchanged.
        :raises ValueError: for an entity that was not captured, but loaded.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.complete(job))
        1
        """
        return Operation(self._complete, self._jobs.owned(jobs))

    @shaped(select(literal(1)))
    def fail(
        self, jobs: Any, *, error: str, retry_in: float | timedelta | None = None, retry: bool = True
    ) -> Operation[Any]:
        """Say that jobs have failed: back to the queue for another attempt, or dead after ``max_attempts``.

        :param jobs: as in :meth:`complete`.
        :param error: why; its last 16,000 characters are kept.
        :param retry_in: the pause before the next attempt, in seconds; without it 5 s, doubled with each attempt, an
            hour at most.
        :param retry: ``False`` makes them dead at once.
        :return: how many were still yours.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.fail(job, error="no route to host", retry_in=30))
        1
        """
        if not isinstance(error, str):
            raise TypeError(f"error is a str, not {error!r}")
        values = {**self._jobs.owned(jobs), "locks_error": storable(error)}
        if not retry:
            return Operation(self._fail["never"], values)
        if retry_in is None:
            return Operation(self._fail["doubling"], values)
        return Operation(self._fail["given"], {**values, "locks_pause": bounded_seconds(retry_in, "retry_in")})

    @shaped(select(literal(1)))
    def release(self, jobs: Any) -> Operation[Any]:
        """Give jobs back untried: the attempt doesn't count. How many were still yours.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.release(job))
        1
        """
        return Operation(self._release, self._jobs.owned(jobs))

    @shaped(select(literal(1)))
    def heartbeat(self, jobs: Any) -> Operation[Any]:
        """Say that jobs are being worked on still, so that they are not thought stalled.

        :return: how many are still yours. It waits for nobody: a job that somebody holds at this moment, say because
            its handler completes it in a transaction of its own, is passed over, and still yours until that commits.

        >>> queue = sl.Queue()
        >>> [job] = session.execute(queue.capture(1, queue="mail", host="web-1")).all()
        >>> session.scalar(queue.heartbeat(job))
        1
        """
        return Operation(self._heartbeat, self._jobs.owned(jobs))

    @shaped(select(literal(1)))
    def requeue_stalled(
        self, older_than: float | timedelta = 300, *, queue: str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Give back the jobs whose worker has died: the attempt counts, and the last one is a death.

        :param older_than: how long nothing was heard of their worker, in seconds: several times its heartbeat.
        :param queue: only those of this queue; ``None``: of all, whose workers must then all be heard of sooner.
        :param limit: how many at most, so that no transaction is long; call it again when as many were found.
        :return: how many.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.requeue_stalled(300))
        0
        """
        values: dict[str, Any] = {
            "locks_older": bounded_seconds(older_than, "older_than"),
            LIMIT: positive_int(limit, "limit"),
        }
        if queue is not None:
            values["locks_queue"] = valid_name(queue, "a queue")
        return Operation(self._requeue[queue is not None], values)

    @shaped(select(literal(1)))
    def revive(
        self, *, queue: str | None = None, external_id: UUID | str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Give dead jobs back, to be tried as often as a new job is: for when what they died of is mended.

        :param queue: only those of this queue. :param external_id: only this one.
        :param limit: how many at most; call it again when as many were found.
        :return: how many.

        >>> session.scalar(queue.revive(queue="mail"))
        """
        if queue is not None and external_id is not None:
            raise ValueError("Queue.revive: give queue or external_id, not both")
        values: dict[str, Any] = {LIMIT: positive_int(limit, "limit")}
        if external_id is not None:
            return Operation(self._revive["external_id"], {**values, "locks_chosen": as_uuid(external_id)})
        if queue is not None:
            return Operation(self._revive["queue_id"], {**values, "locks_chosen": valid_name(queue, "a queue")})
        return Operation(self._revive[None], values)

    @shaped(select(literal(1)))
    def delete_finished(
        self, older_than: float | timedelta, *, dead: bool = False, queue: str | None = None, limit: int = 1000
    ) -> Operation[Any]:
        """Delete jobs that were completed long ago; their ``external_id`` is forgotten with them.

        :param older_than: how long ago, in seconds.
        :param dead: delete those that have died instead.
        :param queue: only those of this queue, past those of others that ended before them; ``None``: of all.
        :param limit: how many at most; call it again when as many were found.
        :return: how many.

        >>> queue = sl.Queue()
        >>> session.scalar(queue.delete_finished(7 * 86400))
        0
        """
        values: dict[str, Any] = {
            "locks_older": bounded_seconds(older_than, "older_than"),
            LIMIT: positive_int(limit, "limit"),
        }
        if queue is not None:
            values["locks_queue"] = valid_name(queue, "a queue")
        return Operation(self._delete[bool(dead), queue is not None], values)

    def stats(self) -> RowsOperation[Any]:
        """What each queue has: rows of ``queue_id, waiting, scheduled, running, dead, oldest``.

        ``scheduled`` is what waits for its ``run_at``, ``oldest`` the ``run_at`` of what is overdue longest. Queues
        with completed jobs only don't appear.

        >>> queue = sl.Queue()
        >>> stats = session.execute(queue.stats()).all()
        """
        return RowsOperation(self._stats, {})

    def _exchange(
        self, done: Sequence[Any], limit: int, *, queue: str, host: str, after: tuple[Any, ...] | None
    ) -> Operation[Any]:
        """Complete jobs and capture others, as one act; what workers do. Gives an ``Exchanged``."""
        values = {**self._jobs.finished(done), LIMIT: limit, "locks_queue": queue, "locks_host": host}
        return Operation(self._exchanges[after is not None], values | ({} if after is None else position(after)))

    def _running(self, *, queue: str, host: str) -> Operation[Any]:
        """The running jobs that one worker has captured."""
        return RowsOperation(self._held, {"locks_queue": queue, "locks_host": host})

    def _still_ours(self, owned: dict[str, Any]) -> Operation[Any]:
        """Those that are still their worker's, as pairs ``(internal_id, claim)``."""
        return RowsOperation(self._ours, owned)

    def topic(self, queue: str) -> str:
        """What those who listen are told when jobs are put into a queue (PostgreSQL).

        >>> sl.Queue().topic("mail")
        '...mail'
        """
        return self._jobs.topic(queue)

    def indexes(self, dialect: str | None = None) -> list[Index]:
        """Make the indexes that a table of your own needs; they become part of it.

        :param dialect: the dialect's name, e.g. ``"postgresql"``. Without it both forms of the one that differs are
            made, each for its engines: ``create_all`` knows which, Alembic's autogenerate doesn't.
        :raises ValueError: for the shipped table, which has its indexes.

        >>> class Mail(sl.JobColumns, Base):
        ...     __tablename__ = "mail"
        >>> [index.name for index in sl.Queue(Mail).indexes("postgresql")]
        [...]
        """
        at = self._jobs.own
        if at is None:
            raise ValueError("Queue.indexes() is for a table of your own: the shipped one has its indexes")
        partial = None if dialect is None else dialect_name(dialect).schemas
        return job_indexes(at.roles, at.table.name, partial=partial)
