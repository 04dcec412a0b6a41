"""Tools for the tests of an app that uses this library; the pytest plugin has them as fixtures (extra ``testing``).

Nothing here imports pytest, except ``plugin`` and ``conformance``.
"""

from sqlalchemy_locks.testing.clock import Clock
from sqlalchemy_locks.testing.drain import Drained, run_until_empty
from sqlalchemy_locks.testing.serialised import Inside, assert_serialised

__all__ = ["Clock", "Drained", "Inside", "assert_serialised", "run_until_empty"]
