"""Keys: names hashed to 64 bits, the same in every process, on every engine, and in SQL by ``lock.key()``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

LOWEST = -(2**63)
HIGHEST = 2**63 - 1


def key(*parts: str | int) -> int:
    """Return the stable signed 64-bit key of a name.

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
    texts = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (str, int)):
            raise TypeError(f"a key's parts are str or int, not {type(part).__name__}")
        text = str.__str__(part) if isinstance(part, str) else str(int(part))
        if not text:
            raise ValueError("a lock's name must not be empty")
        if "\0" in text:
            raise ValueError("a lock's name must not hold a NUL character")
        texts.append(text)
    try:
        name = "\0".join(texts).encode()
    except UnicodeEncodeError:
        raise ValueError("a lock's name must be valid Unicode text") from None
    return _number(hashlib.sha256(name).digest())


def queue_keys(installation: str, semaphores: Iterable[str]) -> Iterator[int]:
    """Yield the keys of the queues in which processes wait for semaphores' permits, where the server keeps them.

    Each is ``key("sqlalchemy_locks.semaphore", installation, name)``, computed four times as fast.

    :param installation: a text that distinguishes the semaphores of one schema from those of another.
    """
    beginning = hashlib.sha256(queue_beginning(installation).encode())
    for name in semaphores:
        digest = beginning.copy()
        digest.update(name.encode())
        yield _number(digest.digest())


def queue_beginning(installation: str) -> str:
    """Return the text that is hashed before a semaphore's name."""
    return f"sqlalchemy_locks.semaphore\0{installation}\0"


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def as_key(value: str | int) -> int:
    """Return the key for an argument: an ``int`` is the key itself, a ``str`` is hashed.

    :raises TypeError: for anything else, ``bool`` included.
    :raises ValueError: for an empty name, or an integer that doesn't fit into signed 64 bits.
    """
    if isinstance(value, str):
        return key(value)
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "; a decorator takes it, as in @locks.exclusive('report')" if callable(value) else ""
        raise TypeError(f"a lock's key is a str or an int, not {type(value).__name__}{hint}")
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(f"the key {value} does not fit into signed 64 bits; give a name, or key(...) of it")
    return int(value)  # drivers adapt a value by its class, and don't know an IntEnum
