"""Names that are stored: what no engine would keep, or compare, as it was given is refused before any SQL."""

from __future__ import annotations

#: what fits into a key of InnoDB together with a queue's name
LONGEST = 255


def checked(value: object, what: str) -> str:
    """A name as it will be stored.

    :param what: what sentences call it.
    :raises TypeError: unless it is a ``str``.
    :raises ValueError: when it is empty, ends with a space (which MySQL and MariaDB don't compare everywhere), is
        longer than 255 characters, or has a NUL or half a surrogate pair in it.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} is a str, not {value!r}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    if len(value) > LONGEST:
        raise ValueError(f"{what} has {len(value)} characters: {LONGEST} are the most that every engine can keep")
    if value.endswith(" "):
        raise ValueError(f"{what} ends with a space, which some collations don't compare: {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} has half a surrogate pair in it, which no database stores: {value!r}") from None
    if "\0" in value:
        raise ValueError(f"{what} has a NUL in it, which not every database stores: {value!r}")
    return value


def plain(value: str) -> str:
    """The same with what can't be seen, or would move the cursor, spelt out."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in value
    )
