"""The answers of locks in an app's OpenAPI schema.

A dependency can't add responses to its route, so this wraps ``app.openapi``, FastAPI's own way to extend the schema.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import FastAPI, routing

from sqlalchemy_locks.integrations.lock_names import all_dependants
from sqlalchemy_locks.integrations.problem import MEDIA_TYPE, TYPES, Kind

SCHEMA = "LockProblem"
_DOCUMENTED = "_sqlalchemy_locks_documented"
_REF = {"$ref": f"#/components/schemas/{SCHEMA}"}
_RETRY = {
    "description": "Seconds to wait before sending the request again.",
    "schema": {"type": "integer", "minimum": 0},
}
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
    """Yield the routes of an app and of its routers that have dependencies."""
    contexts: Callable[..., Iterable[Any]] | None = getattr(routing, "iter_route_contexts", None)
    for route in app.routes if contexts is None else contexts(app.routes):
        if getattr(route, "dependant", None) is not None:
            yield route


def document(app: FastAPI, kinds_of: Callable[[Any], Iterable[Kind]]) -> None:
    """Add the answers of dependencies to an app's schema; calling it again changes nothing.

    :param kinds_of: returns the kinds of problems that a dependency answers.
    """
    original = app.openapi
    if getattr(original, _DOCUMENTED, False):
        return

    def openapi() -> dict[str, Any]:
        schema = original()
        for route in routes_of(app):
            kinds = [kind for one in all_dependants(route.dependant) for kind in kinds_of(one.call)]
            operations = schema.get("paths", {}).get(route.path_format, {})
            for method in (route.methods or ()) if kinds and hasattr(route, "methods") else ():
                if method.lower() in operations:
                    _describe(operations[method.lower()], kinds)
                    schema.setdefault("components", {}).setdefault("schemas", {})[SCHEMA] = copy.deepcopy(_PROBLEM)
        return schema

    setattr(openapi, _DOCUMENTED, True)
    app.openapi = openapi  # type: ignore[method-assign]


def _describe(operation: dict[str, Any], kinds: list[Kind]) -> None:
    """Add what the app hasn't described itself."""
    for status in sorted({kind.status for kind in kinds}):
        same_status = list(dict.fromkeys(kind for kind in kinds if kind.status == status))
        response = operation["responses"].setdefault(str(status), {})
        response.setdefault("description", " ".join(kind.detail for kind in same_status))
        response.setdefault("content", {}).setdefault(MEDIA_TYPE, {"schema": dict(_REF)})
        if any(kind.retry is not None for kind in same_status):
            response.setdefault("headers", {}).setdefault("Retry-After", copy.deepcopy(_RETRY))
