"""The errors of this library: one tree, so that ``except LockError`` catches everything it raises on purpose.

What a driver raises for another reason (a syntax error, a full disk, a deadlock in your own session)
stays the exception that SQLAlchemy gives it.
"""

from __future__ import annotations

from sqlalchemy_locks.values import Holder

#: holders that a sentence tells of
_SO_MANY = 3


class LockError(Exception):
    """The root of every error that this library raises on purpose.

    >>> try:
    ...     with locks.exclusive("report", timeout=0):
    ...         send_report()
    ... except sl.LockError as error:
    ...     log.warning("no report: %s", error)
    """


class LockTimeout(LockError):
    """The lock was not to be had in the time that was given.

    In a session, the database's own limit ended the wait (``lock_timeout``, ``innodb_lock_wait_timeout``,
    SQLite's busy timeout). On PostgreSQL and YugabyteDB the transaction can then only be rolled back.

    ``holders`` are those who had it when the wait was given up, where ``Locks`` waited and the engine tells it.
    ``kind`` is what there was no room in: ``semaphore`` or ``lease`` where ``Locks`` waited for one; else ``lock``.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.LockTimeout as error:
    ...     log.info("somebody else makes it: %s", error.holders)
    """

    def __init__(self, message: str = "", holders: tuple[Holder, ...] = (), kind: str = "lock") -> None:
        told = "; ".join(map(str, holders[:_SO_MANY]))
        more = f"; and {len(holders) - _SO_MANY} more" if len(holders) > _SO_MANY else ""
        super().__init__(f"{message}: held by {told}{more}" if holders else message)
        self.holders = holders
        self.kind = kind


class PoolTimeout(LockTimeout):
    """No connection was free in the pool of the engine: within the ``timeout`` of the call, or the pool's own.

    Whether the lock is free isn't known. SQLAlchemy's ``TimeoutError`` is its cause.

    >>> try:
    ...     with locks.exclusive("report", timeout=5):
    ...         send_report()
    ... except sl.PoolTimeout:
    ...     log.error("the pool is too small for what this process does at once")
    """


class LockLost(LockError):
    """The lock was held and is so no longer: its connection died, or its transaction was ended early.

    >>> try:
    ...     with locks.lease("report", ttl=60) as grant:
    ...         grant.check()
    ... except sl.LockLost:
    ...     log.warning("somebody else may have made it meanwhile")
    """


class OutcomeUnknown(LockLost):
    """The connection died after the work was sent and before its answer came: it may have been done, or not.

    Look before you do it again.

    >>> try:
    ...     locks.mutex.acquire("task_a")
    ... except sl.OutcomeUnknown:
    ...     locks.mutex.release("task_a")  # of that very call's, if it was done, and else of nobody's
    True
    """


class RequestOver(LockLost):
    """This ``external_id`` was granted before and is over: it is never granted again, so ask with another.

    A block with ``reclaim=True`` is granted one whose time ran out before it was released: where ids are reclaimed,
    give ``release``, ``renew`` and ``guarded`` the grant, never the id.

    ``state`` is what became of it: ``RELEASED``, or ``EXPIRED``.

    >>> grant = locks.acquire({"network": 1}, external_id="job-1")
    >>> released = locks.release("job-1")
    >>> try:
    ...     locks.acquire({"network": 1}, external_id="job-1")
    ... except sl.RequestOver as over:
    ...     print(over.state)
    RELEASED
    """

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class RequestHeld(LockError):
    """This ``external_id`` is held by who asked with it first, and was not to be held by two.

    >>> with locks.semaphore("backup-slots", external_id="job-1", resume=False):
    ...     try:
    ...         with locks.semaphore("backup-slots", external_id="job-1", resume=False):
    ...             send_report()
    ...     except sl.RequestHeld:
    ...         log.info("it is being worked on")
    """


class ReentryError(LockError):
    """The same thread or task asked ``Locks`` for a key that it holds already: it would wait for itself.

    >>> with locks.exclusive("report"):
    ...     try:
    ...         with locks.exclusive("report", timeout=5):
    ...             send_report()
    ...     except sl.ReentryError:
    ...         send_report()  # it is held already
    """


class MustRollback(LockError):
    """SQLite: this transaction has read an old snapshot and can't become a writer. Roll back and begin again.

    ``sqlalchemy_locks.sqlite.begin_immediate(engine)`` makes every transaction a writer from its start.

    >>> try:
    ...     session.execute(sl.lock.exclusive("report"))
    ... except sl.MustRollback:
    ...     session.rollback()
    """


class UnknownRow(LockError):
    """``lock.row`` was asked for a row that isn't there: nothing was locked.

    >>> try:
    ...     session.scalar(sl.lock.row(Customer, 404))
    ... except sl.UnknownRow:
    ...     log.warning("no such customer")
    """


class UnknownSemaphore(LockError):
    """No such semaphore: it was never created, or is deleted.

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
    """This id was used before, for other semaphores or other counts: one id stands for one request.

    >>> grant = locks.acquire({"network": 1}, external_id="job-1")
    >>> try:
    ...     locks.acquire({"network": 2}, external_id="job-1")
    ... except sl.IdempotencyConflict:
    ...     log.error("job-1 is another request's id")
    """


class UnknownTask(LockError):
    """No such task, mutex or timeout: it was never created, or in another queue.

    >>> try:
    ...     session.scalar(sl.Mutex().acquire("task_z"))
    ... except sl.UnknownTask:
    ...     session.scalar(sl.Mutex().create("task_z"))
    """


class StaleToken(LockError):
    """A newer holder has written already: this write came too late, and changed nothing.

    ``token`` is the fencing token that the row carries.

    >>> write = update(Document).where(Document.id == 1).values(body=text)
    >>> session.scalar(sl.fenced(write, Document.fence, 8))
    True
    >>> try:
    ...     session.scalar(sl.fenced(write, Document.fence, 7))
    ... except sl.StaleToken:
    ...     log.warning("a newer holder has written already")
    """

    def __init__(self, message: str, token: int) -> None:
        super().__init__(message)
        self.token = token


class Unsupported(LockError):
    """This engine, or this way of running the operation, can't give what was asked; the message says what can.

    >>> try:
    ...     locks.run(sl.lock.exclusive("report"))
    ... except sl.Unsupported as refusal:
    ...     print(refusal)
    lock.exclusive ends with its transaction, so run() would give the lock back at once: use ...
    """


class NotWritable(Unsupported):
    """A standby, a replica, or a read-only transaction: its locks would bind nobody else.

    >>> try:
    ...     locks.mutex.acquire("task_a")
    ... except sl.NotWritable:
    ...     log.error("the URL leads to a standby")
    True
    """


class StaleSnapshot(Unsupported):
    """The transaction's snapshot is older than the lock, so what the holder then reads may be stale.

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
