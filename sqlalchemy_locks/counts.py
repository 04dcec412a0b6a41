"""Numbers that a caller gave, and that a column or a thread pool must have room for."""

from __future__ import annotations


def integer(value: object, what: str) -> int:
    """A number of 32 bits.

    :raises TypeError: unless it is an ``int``. :raises ValueError: when it has more bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{what} has 32 bits, and {value} has more")
    return value


def counted(value: object, what: str) -> int:
    """A number of rows, threads, attempts.

    :raises TypeError: unless it is an ``int``. :raises ValueError: unless it is at least 1 and fits into 32 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is an int, not {value!r}")
    if not 1 <= value < 2**31:
        raise ValueError(f"{what} must be at least 1 and fit into 32 bits, not {value}")
    return value
