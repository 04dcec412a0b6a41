"""Whether locks will hold here: the server, its settings, and what is installed, each told as a sentence.

It only reads. What it finds wrong at set-up would else be found by the first lock that is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import select
from sqlalchemy.engine import Connection

from sqlalchemy_locks.dialects import backend_for
from sqlalchemy_locks.dialects.checks import Finding
from sqlalchemy_locks.sql.clock import Now, utc

__all__ = ["Finding", "examine"]

#: so much is an ordinary difference of two clocks, in seconds
SKEW = 1.0


def examine(connection: Connection, *, schema: str = "lock", prefix: str = "lock_") -> list[Finding]:
    """Look at a database, for people and for readiness probes.

    :param connection: where to look. On an async connection: ``await connection.run_sync(examine)``.
    :param schema: where the locks were installed, on PostgreSQL and YugabyteDB.
    :param prefix: what their tables were installed under elsewhere.
    :return: a :class:`Finding` for each thing looked at, ``level="problem"`` where locks
        don't work or not as promised.
    :raises Unsupported: for an engine that this library has never been tried on.

    >>> with engine.connect() as connection:
    ...     problems = [each.says for each in examine(connection) if each.level == "problem"]
    """
    found = list(backend_for(connection.dialect).findings(connection))
    found.append(_clock(connection))
    found += _installed(connection, schema, prefix)
    return found


def _clock(connection: Connection) -> Finding:
    before = time.time()
    server = utc(connection.scalar(select(Now())))
    after = time.time()
    assert server is not None
    # between the two the server was asked: what lies outside is a difference for certain
    skew = max(0.0, before - server.timestamp(), server.timestamp() - after)
    if skew > SKEW:
        says = (
            f"this machine's clock and the server's differ by {skew:.1f} s. Locks don't mind: "
            "they go by the server's clock alone; people who compare logs do"
        )
        return Finding("clock", "warning", says)
    return Finding("clock", "ok", "this machine's clock and the server's agree (locks go by the server's alone)")


def _installed(connection: Connection, schema: str, prefix: str) -> Iterator[Finding]:
    # Alembic is loaded by who looks at what it has installed, never by who locks
    from sqlalchemy_locks.alembic.drift import check
    from sqlalchemy_locks.alembic.grants import missing
    from sqlalchemy_locks.alembic.options import Options
    from sqlalchemy_locks.alembic.steps import STEPS, recorded

    options = Options(schema=schema, prefix=prefix)
    denied = missing(connection, options)
    unread = {name for each in denied for name in each.unread}
    # MySQL and MariaDB don't even tell whether there is a table that a user may not read
    compared = not unread or (backend_for(connection.dialect).schemas and "installed" not in unread)
    steps = recorded(connection, options) if compared else {}
    if steps is None:
        says = "nothing is installed here: `sqlalchemy-locks install`, or `alembic upgrade sqlalchemy_locks@head`"
        yield Finding("installed", "problem", says)
        return
    for each in denied:
        yield Finding("privileges", "problem" if each.needed else "warning", each.says)
    if not denied and backend_for(connection.dialect).locking != "file":
        yield Finding("privileges", "ok", "the user of this connection may do all that locks do")
    if not compared:
        says = "what is installed can't be compared with what was: it takes the SELECT that is lacking"
        yield Finding("installed", "warning", says)
        return
    doors = sorted(set(steps.values()))
    absent = [step for step in STEPS if step not in steps]
    if absent:
        says = f"of the steps {', '.join(STEPS)}, {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing"
        yield Finding("installed", "warning" if steps else "problem", f"{says}: what they bring can't be used")
    else:
        yield Finding("installed", "ok", f"the steps up to {STEPS[-1]}, by {' and '.join(doors)}")
    drifts: list[Any] = check(connection, schema=schema, prefix=prefix)
    for sentence in drifts:
        yield Finding("index" if "has lost its index" in sentence else "drift", "problem", sentence)
    if not drifts:
        yield Finding("drift", "ok", "tables, indexes and functions are as they were installed")
