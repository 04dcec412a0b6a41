"""What a captured task tells of itself: its id and queue, and the claim that proves who has captured it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from sqlalchemy_locks.core.roles import RoleMapping
from sqlalchemy_locks.proof import captured
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

#: what a captured entity remembers, as far as there are columns for it
_TOLD = ("id", "queue", "claim")


def told_by(rows: RoleMapping) -> tuple[str, ...]:
    """The roles of what a captured task tells."""
    return tuple(role for role in _TOLD if rows.has(role))


def told(rows: RoleMapping, given: Any) -> dict[str, Any] | None:
    """The same by role, of an entity or a row that ``capture()`` gave; ``None`` for an id.

    :raises ValueError: for an entity that was not captured, but loaded.
    :raises TypeError: for a row that isn't one of such a task.
    """
    if isinstance(given, Row):
        if len(given) > 1:
            return _of_row(rows, given)
        (given,) = given  # an entity, as Session.execute() gives it
    proof = captured(given)
    if proof is None:
        return None
    roles = told_by(rows)
    if rows.target is None or not isinstance(given, rows.target.entity) or len(proof) != len(roles):
        raise ValueError(f"{rows.pattern}: {given!r} was not captured in its session: it proves nothing")
    return dict(zip(roles, proof, strict=True))


def _of_row(rows: RoleMapping, row: Row[Any]) -> dict[str, Any]:
    at = rows.columns_in(tables(DEFAULT_SCHEMA, ""))
    named = row._mapping
    roles = told_by(rows)
    found = {role: named[name] for role in roles for name in {at[role].key, at[role].name} if name in named}
    if len(found) < len(roles):
        raise TypeError(f"{rows.pattern}: {row!r} is no row of a captured task")
    return found


def proof_of(rows: RoleMapping, claim: Any) -> int:
    """The number that a claim is, or that a captured task has."""
    rows.require("claim", "claim=")
    known = told(rows, claim)
    number = claim if known is None else known["claim"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"claim is an int or a captured entity, not {claim!r}")
    return number
