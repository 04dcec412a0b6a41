"""The claim of a captured row: the proof that a captured entity or row belongs to this capture.

An entity stores its claim apart from its attributes. A commit expires the attributes, and a later read may show the
claim of the next owner.

A claim is a random number, drawn when a capture is executed. A counter in the row would repeat a number after a
rollback: the session whose capture was rolled back could then release a row that another session has captured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, Row, SmallInteger, bindparam, inspect
from sqlalchemy.engine import FrozenResult

from sqlalchemy_locks.captures.statements import CaptureSpec
from sqlalchemy_locks.core.roles import RoleMapping
from sqlalchemy_locks.sql.tables import DEFAULT_SCHEMA, tables

_INFO_KEY = "sqlalchemy_locks_captured"
#: the roles that identify a captured task; a table may lack columns for some of them
_IDENTITY = ("id", "queue", "claim")


def drawn_claim(column: Column[Any]) -> Any:
    """Return the bound value of a claim: another one at each execution."""
    return bindparam("locks_drawn", type_=column.type, callable_=lambda: draw_claim(column))


def draw_claim(column: Column[Any]) -> int:
    """Draw a claim, never 0: 63 random bits for a column that has room for them, else 31."""
    type_: Any = column.type
    wide = isinstance(getattr(type_, "impl", type_), BigInteger)
    # not from the module random, whose state a forked process shares
    return (int.from_bytes(os.urandom(8 if wide else 4), "big") >> 1) or 1


def require_claim(rows: RoleMapping) -> None:
    """:raises TypeError: if the column for claims can't store random numbers that don't repeat."""
    rows.require_type("claim", (Integer,), "a claim")
    column = rows.columns_in(tables(DEFAULT_SCHEMA, ""))["claim"] if rows.has("claim") else None
    if column is not None and isinstance(column.type, SmallInteger):
        raise TypeError(
            f"{rows.pattern}: claim={column} must be BigInteger or Integer: each capture draws a random number"
        )


def store_proof(entities: Iterable[Any], spec: CaptureSpec) -> None:
    """Store the values of ``spec.proof`` in the instance state of each entity."""
    target = spec.target
    assert target is not None
    names = [name for column in spec.proof if (name := target.key_of(column)) is not None]
    if names and len(names) == len(spec.proof):  # the class maps these columns
        for entity in entities:
            state: Any = inspect(entity)
            state.info[_INFO_KEY] = tuple(getattr(entity, name) for name in names)


def frozen_rows(frozen: FrozenResult[Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a frozen result, which can be read again."""
    return [tuple(row) for row in frozen()]


def stored_proof(entity: Any) -> tuple[Any, ...] | None:
    """Return the values that :func:`store_proof` stored; ``()`` if it stored none, ``None`` if it isn't an entity."""
    state: Any = inspect(entity, raiseerr=False)
    if not getattr(state, "is_instance", False):
        return None
    proof: tuple[Any, ...] = state.info.get(_INFO_KEY, ())
    return proof


def identity_roles(rows: RoleMapping) -> tuple[str, ...]:
    """Return the roles that identify a captured task and that have a column."""
    return tuple(role for role in _IDENTITY if rows.has(role))


def claim_of(rows: RoleMapping, task: Any) -> dict[str, Any] | None:
    """Return id, queue and claim of a captured entity or row, by role; ``None`` if ``task`` is an id.

    :raises ValueError: if an entity was loaded rather than captured.
    :raises TypeError: if a row lacks one of these columns.
    """
    roles = identity_roles(rows)
    if isinstance(task, Row):
        if len(task) > 1:
            at, mapping = rows.columns_in(tables(DEFAULT_SCHEMA, "")), task._mapping
            identity = {
                role: mapping[name] for role in roles for name in {at[role].key, at[role].name} if name in mapping
            }
            if len(identity) < len(roles):
                raise TypeError(f"{rows.pattern}: {task!r} is no row of a captured task")
            return identity
        (task,) = task  # an entity, as Session.execute() returns it
    proof = stored_proof(task)
    if proof is None:
        return None
    if rows.target is None or not isinstance(task, rows.target.entity) or len(proof) != len(roles):
        raise ValueError(f"{rows.pattern}: {task!r} was not captured by this session: it proves no capture")
    return dict(zip(roles, proof, strict=True))


def claim_number(rows: RoleMapping, claim: Any) -> int:
    """Return the number of a claim, given as that number or as a captured entity or row."""
    rows.require("claim", "claim=")
    identity = claim_of(rows, claim)
    number = claim if identity is None else identity["claim"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"claim is an int or a captured entity, not {claim!r}")
    return number
