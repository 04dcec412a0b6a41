"""What an app's OpenAPI schema tells about its locks: the answers of each route that has some.

FastAPI's own way to extend the schema (``app.openapi``) is used, since a dependency can't add responses to its route.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, routing

from sqlalchemy_locks.integrations.lock_names import every
from sqlalchemy_locks.integrations.problem import MEDIA_TYPE, TYPES, Kind

SCHEMA = "LockProblem"
_DOCUMENTED = "_sqlalchemy_locks_documented"
_REF = {"$ref": f"#/components/schemas/{SCHEMA}"}
_RETRY = {"description": "Come again in so many seconds.", "schema": {"type": "integer", "minimum": 0}}
_PROBLEM = {
    "title": SCHEMA,
    "description": "RFC 9457 problem details.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri", "examples": [f"{TYPES}locked"]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}


def routes_of(app: FastAPI) -> Iterator[Any]:
    """The routes of an app, those of its routers among them: whatever has a ``dependant``, and a path."""
    contexts: Callable[..., Iterable[Any]] | None = getattr(routing, "iter_route_contexts", None)
    for route in app.routes if contexts is None else contexts(app.routes):
        if getattr(route, "dependant", None) is not None:
            yield route


def document(app: FastAPI, kinds_of: Callable[[Any], Iterable[Kind]]) -> None:
    """Have an app's schema tell what its dependencies answer; once is enough.

    :param kinds_of: tells it of a dependency.
    """
    told = app.openapi
    if getattr(told, _DOCUMENTED, False):
        return

    def openapi() -> dict[str, Any]:
        schema = told()
        for route in routes_of(app):
            kinds = [kind for one in every(route.dependant) for kind in kinds_of(one.call)]
            operations = schema.get("paths", {}).get(route.path_format, {})
            for method in (route.methods or ()) if kinds and hasattr(route, "methods") else ():
                if method.lower() in operations:
                    _describe(operations[method.lower()], kinds)
                    schema.setdefault("components", {}).setdefault("schemas", {})[SCHEMA] = copy.deepcopy(_PROBLEM)
        return schema

    setattr(openapi, _DOCUMENTED, True)
    app.openapi = openapi  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], kinds: list[Kind]) -> None:
    """Add what is not there: an app's own words stay."""
    for status in sorted({kind.status for kind in kinds}):
        mine = list(dict.fromkeys(kind for kind in kinds if kind.status == status))
        response = operation["responses"].setdefault(str(status), {})
        response.setdefault("description", " ".join(kind.detail for kind in mine))
        response.setdefault("content", {}).setdefault(MEDIA_TYPE, {"schema": dict(_REF)})
        if any(kind.retry is not None for kind in mine):
            response.setdefault("headers", {}).setdefault("Retry-After", copy.deepcopy(_RETRY))
