"""What the tests of leases share."""

from __future__ import annotations

import threading


def renewers() -> list[threading.Thread]:
    """The threads that renew, of whichever ``Locks``."""
    return [thread for thread in threading.enumerate() if thread.name == "sqlalchemy_locks.renewal"]
