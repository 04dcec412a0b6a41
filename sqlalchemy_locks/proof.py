"""What a captured entity remembers: the claim that it was captured with, whatever its attributes show later."""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect
from sqlalchemy.engine import Result

from sqlalchemy_locks.captures.ordering import unframed
from sqlalchemy_locks.captures.statements import CaptureSpec

_PROOF = "sqlalchemy_locks_captured"


def proven(result: Result[Any], taking: CaptureSpec) -> Result[Any]:
    """The same entities, each of which remembers what it was captured with: a commit makes its attributes be read anew.

    What they then show may be the next one's who has captured the row.
    """
    target = taking.target
    assert target is not None
    names = [name for column in taking.proof if (name := target.key_of(column)) is not None]
    if len(names) < len(taking.proof):
        return result  # its class doesn't show them
    frozen = result.freeze()
    for (entity,) in unframed(frozen):
        state: Any = inspect(entity)
        state.info[_PROOF] = tuple(getattr(entity, name) for name in names)
    return frozen()


def captured(entity: Any) -> tuple[Any, ...] | None:
    """What an entity was captured with; nothing, if it wasn't; ``None`` for what is no entity."""
    state: Any = inspect(entity, raiseerr=False)
    if not getattr(state, "is_instance", False):
        return None
    proof: tuple[Any, ...] = state.info.get(_PROOF, ())
    return proof
