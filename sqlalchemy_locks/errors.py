"""The errors of this library: one tree, so that ``except LockError`` catches everything it raises on purpose.

A driver's error for another reason (a syntax error, a full disk, a serialization failure in your own session) stays
SQLAlchemy's exception.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy_locks._validation import bounded_seconds
from sqlalchemy_locks.values import Holder

#: how many holders a message lists
_MAX_LISTED = 3


class LockError(Exception):
    """The root of every error that this library raises on purpose.

    >>> try:
    ...     with locks.exclusive("report", timeout=0):
    ...         send_report()
    ... except sl.LockError as error:
    ...     log.warning("no report: %s", error)
    """


class LockTimeout(LockError):
    """The lock could not be acquired within the timeout.

    In a session, the database's own limit ended the wait (``lock_timeout``, ``innodb_lock_wait_timeout``,
    SQLite's busy timeout). On PostgreSQL and YugabyteDB the transaction can then only be rolled back.

    ``holders`` are the holders at the end of the wait, where ``Locks`` waited and the engine lists them.
    ``kind`` is ``semaphore`` or ``lease`` where ``Locks`` waited for one, else ``lock``.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.LockTimeout as error:
    ...     log.info("another process makes it: %s", error.holders)
    """

    def __init__(self, message: str = "", holders: tuple[Holder, ...] = (), kind: str = "lock") -> None:
        listed = "; ".join(map(str, holders[:_MAX_LISTED]))
        more = f"; and {len(holders) - _MAX_LISTED} more" if len(holders) > _MAX_LISTED else ""
        super().__init__(f"{message}: held by {listed}{more}" if holders else message)
        self.holders = holders
        self.kind = kind


class PoolTimeout(LockTimeout):
    """No connection of the engine's pool was free within the pool's own ``pool_timeout``.

    ``timeout=`` doesn't shorten this wait. Whether the lock is free is unknown. ``__cause__`` is SQLAlchemy's
    ``TimeoutError``.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.PoolTimeout:
    ...     log.error("the pool is too small for the threads of this process")
    """


class LockLost(LockError):
    """The lock is no longer held: its connection died, its lease ran out, or its transaction was ended early.

    In a cluster, it also means that another node was the first to commit. The transaction's changes aren't committed.

    >>> try:
    ...     with locks.lease("report", ttl=60) as grant:
    ...         grant.check()
    ... except sl.LockLost:
    ...     log.warning("another process may have made it meanwhile")
    """


class OutcomeUnknown(LockLost):
    """The connection died after a statement was sent and before its reply arrived: it was executed, or it was not.

    Or a node of a cluster has lost its majority during COMMIT: the other nodes have the changes, or they don't.

    Check before you repeat the work. ``except LockLost`` catches this error, too: where it matters whether something
    was written, catch ``OutcomeUnknown`` first.

    >>> try:
    ...     locks.mutex.acquire("task_a")
    ... except sl.OutcomeUnknown:
    ...     locks.mutex.release("task_a")  # releases what that call acquired, if it did; nothing else
    True
    """


class RequestOver(LockLost):
    """The grant of this ``external_id`` has ended, and it is not granted again: use another one.

    Only a block can be granted the same id again: when the block before it raised, or when its time ran out before its
    release. For such an id, pass the grant to ``release``, ``renew`` and ``guarded``, never the id.

    ``state`` is how it ended: ``RELEASED``, or ``EXPIRED``.

    >>> grant = locks.acquire({"network": 1}, external_id="job-1")
    >>> released = locks.release("job-1")
    >>> try:
    ...     locks.acquire({"network": 1}, external_id="job-1")
    ... except sl.RequestOver as over:
    ...     print(over.state)
    RELEASED
    """

    def __init__(self, message: str, state: str = "RELEASED") -> None:
        super().__init__(message)
        self.state = state


class RequestHeld(LockError):
    """This ``external_id`` is held by another caller: only one caller with the same id can be in a block at a time.

    >>> with locks.semaphore("backup-slots", external_id="job-1"):
    ...     try:
    ...         with locks.semaphore("backup-slots", external_id="job-1"):
    ...             send_report()
    ...     except sl.RequestHeld:
    ...         log.info("it is being worked on")
    """


class ReentryError(LockError):
    """The thread or task holds this key already: acquiring it again would deadlock.

    >>> with locks.exclusive("report"):
    ...     try:
    ...         with locks.exclusive("report", timeout=5):
    ...             send_report()
    ...     except sl.ReentryError:
    ...         send_report()  # it is held already
    """


class MustRollback(LockError):
    """This transaction can't go on, or has been rolled back by the server: roll it back, and run it again.

    On SQLite the transaction has read, and can't become a writer any more:
    ``sqlalchemy_locks.sqlite.begin_immediate(engine)`` makes every transaction a writer from its start.

    On MySQL and MariaDB the server has rolled the transaction back, and released every lock that it held. The cause is
    a deadlock, a full lock table, or a conflict with another node of a cluster. On MariaDB with
    ``innodb_snapshot_isolation=ON``, above READ COMMITTED, the cause may also be a row that is newer than the snapshot:
    lock before you read. Until you roll back, every further operation in the transaction raises this error.

    >>> try:
    ...     session.execute(sl.lock.exclusive("report"))
    ... except sl.MustRollback:
    ...     session.rollback()
    """


class UnknownRow(LockError):
    """The row that ``lock.row`` names doesn't exist: nothing was locked.

    >>> try:
    ...     session.scalar(sl.lock.row(Customer, 404))
    ... except sl.UnknownRow:
    ...     log.warning("no such customer")
    """


class UnknownSemaphore(LockError):
    """No such semaphore: it was never created, or it is deleted.

    >>> try:
    ...     locks.acquire({"never made": 1})
    ... except sl.UnknownSemaphore:
    ...     grant = None
    """


class SemaphoreHeld(LockError):
    """The semaphore can't be deleted: some of its permits are held.

    >>> grant = locks.acquire({"network": 1})
    >>> try:
    ...     locks.run(sl.semaphore.delete("network"))
    ... except sl.SemaphoreHeld:
    ...     log.info("later")
    """


class IdempotencyConflict(LockError):
    """This id was used before for other semaphores or other counts: an id identifies one request.

    >>> grant = locks.acquire({"network": 1}, external_id="job-1")
    >>> try:
    ...     locks.acquire({"network": 2}, external_id="job-1")
    ... except sl.IdempotencyConflict:
    ...     log.error("job-1 is another request's id")
    """


class UnknownTask(LockError):
    """No such task, mutex or timeout: it was never created, or it is in another queue.

    >>> try:
    ...     session.scalar(sl.Mutex().acquire("task_z"))
    ... except sl.UnknownTask:
    ...     session.scalar(sl.Mutex().create("task_z"))
    """


class StaleToken(LockError):
    """A newer holder has written the row: this write came too late, and changed nothing.

    ``token`` is the fencing token in the row.

    >>> write = update(Document).where(Document.id == 1).values(body=text)
    >>> session.scalar(sl.fenced(write, Document.fence, 8))
    True
    >>> try:
    ...     session.scalar(sl.fenced(write, Document.fence, 7))
    ... except sl.StaleToken:
    ...     log.warning("a newer holder has written already")
    """

    def __init__(self, message: str, token: int = 0) -> None:
        super().__init__(message)
        self.token = token


class Unsupported(LockError):
    """The engine doesn't support the operation, or not this way of executing it; the message names another way.

    >>> try:
    ...     locks.run(sl.lock.exclusive("report"))
    ... except sl.Unsupported as refusal:
    ...     print(refusal)
    lock.exclusive ends with its transaction, so run() would release the lock when it returns: use ...
    """


class NotWritable(Unsupported):
    """The connection can't write (a standby, a replica, a read-only transaction): a lock there would have no effect.

    >>> try:
    ...     locks.mutex.acquire("task_a")
    ... except sl.NotWritable:
    ...     log.error("the URL leads to a standby")
    True
    """


class StaleSnapshot(Unsupported):
    """The transaction's snapshot is older than the lock, so the holder could read stale data.

    >>> with engine.connect() as connection:
    ...     try:
    ...         connection.execute(sl.lock.exclusive("report"))
    ...     except sl.StaleSnapshot:
    ...         connection.execute(sl.lock.exclusive("report", allow_stale=True))  # nothing is read that it guards
    <...>
    """


class NotInstalled(LockError):
    """The tables or functions of this library are not in the database (or its schema has another name).

    >>> try:
    ...     locks.mutex.acquire("task_a")
    ... except sl.NotInstalled as error:
    ...     raise SystemExit(f"run the migrations first: {error}")
    True
    """


class Retry(Exception):
    """Raised by a handler of a worker: the attempt has failed, without a traceback in the log, and is repeated later.

    The attempt counts: after ``max_attempts`` the job is dead.

    :param reason: what is stored as the job's error.
    :param in_: the pause before the next attempt, in seconds; by default the worker's ``retry_in``.

    >>> def handler(job):
    ...     raise sl.Retry("the recipient is busy", in_=30)
    """

    def __init__(self, reason: str = "the handler asked for a retry", *, in_: float | timedelta | None = None) -> None:
        super().__init__(reason)
        #: the pause in seconds; ``None``: the worker's
        self.pause = None if in_ is None else bounded_seconds(in_, "in_")


class Discard(Exception):
    """Raised by a handler of a worker: the job is dead immediately, even if it has attempts left.

    :param reason: what is stored as the job's error.

    >>> def handler(job):
    ...     raise sl.Discard("the recipient has left")
    """

    def __init__(self, reason: str = "the handler discarded the job") -> None:
        super().__init__(reason)
