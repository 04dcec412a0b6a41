"""Tools for the tests of an app that uses this library; the pytest plugin has them as fixtures (extra ``testing``).

Nothing here imports pytest, except ``plugin``.
"""

from sqlalchemy_locks.testing.clock import Clock
from sqlalchemy_locks.testing.drain import Drained, run_until_empty

__all__ = ["Clock", "Drained", "run_until_empty"]
