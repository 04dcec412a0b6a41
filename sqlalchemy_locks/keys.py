"""Names to 64-bit keys, the same in every process, on every engine, and in ``lock.key()`` from psql."""

from __future__ import annotations

import hashlib

LOWEST = -(2**63)
HIGHEST = 2**63 - 1


def key(*parts: str | int) -> int:
    """The stable signed 64-bit key of a name.

    :param parts: one or more non-empty strings or integers. ``key("a", "b")`` is another key than
        ``key("a:b")``; an integer counts as its decimal digits.
    :return: the first 8 bytes of SHA-256 over the parts joined by a NUL, as a signed integer.
    :raises TypeError: for a part that is neither ``str`` nor ``int``.
    :raises ValueError: for no part at all, an empty one, or one that holds a NUL.

    The SQL function ``lock.key(text, ...)`` gives the same on PostgreSQL and YugabyteDB.

    >>> sl.lock.key("invoice", 42)
    5708009868116847961
    """
    if not parts:
        raise ValueError("a key needs at least one part")
    digest = hashlib.sha256("\0".join(map(_part, parts)).encode("utf-8"))
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


def as_key(value: str | int) -> int:
    """The key that a caller means: an ``int`` is the key itself, a ``str`` is hashed to one.

    :raises TypeError: for anything else, ``bool`` included.
    :raises ValueError: for an empty name, or an integer that doesn't fit into signed 64 bits.
    """
    if isinstance(value, str):
        return key(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a lock's key is a str or an int, not {type(value).__name__}")
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(f"the key {value} does not fit into signed 64 bits; give a name, or key(...) of it")
    return int(value)  # drivers know an enumeration's member by its class


def _part(part: str | int) -> str:
    if isinstance(part, bool) or not isinstance(part, (str, int)):
        raise TypeError(f"a key's parts are str or int, not {type(part).__name__}")
    text = str.__str__(part) if isinstance(part, str) else str(int(part))
    if not text:
        raise ValueError("a lock's name must not be empty")
    if "\0" in text:
        raise ValueError("a lock's name must not hold a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("a lock's name must be valid Unicode text") from None
    return text
