"""The job queue: jobs are put in a transaction and captured by workers.

:class:`Queue` has the public operations. ``sqlalchemy_locks.JobColumns`` is in ``mixin``, which needs the ORM and is
therefore imported on demand.
"""

from sqlalchemy_locks.queue.queue import Queue

__all__ = ["Queue"]
