"""Templates, their filters, and static files. Everything from a database is escaped."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

from sqlalchemy_locks.integrations import missing

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ModuleNotFoundError as error:
    raise missing("dashboard", error) from error

from sqlalchemy_locks._validation import escape_unprintable, format_duration

#: how many characters of a name are shown; its title has all of them
SHORT = 48

_TYPES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def short(value: Any) -> str:
    """Return a name cut to ``SHORT`` characters, with control characters escaped."""
    text = escape_unprintable(str(value))
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def number(value: Any) -> str:
    """Format a number with commas."""
    return f"{int(value):,}"


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        short=short, number=number, duration=format_duration, plain=lambda value: escape_unprintable(str(value))
    )
    return environment


def _static() -> dict[str, tuple[bytes, str]]:
    folder = files(__package__ or "") / "static"
    return {name: ((folder / name).read_bytes(), kind) for name, kind in _TYPES.items()}


ENVIRONMENT = _environment()
#: the static files with their types
STATIC = _static()
#: changes when a file does, so that browsers may cache files indefinitely
VERSION = hashlib.sha256(b"".join(content for content, _ in STATIC.values())).hexdigest()[:12]


def render(template: str, **values: Any) -> bytes:
    """Render a template."""
    return ENVIRONMENT.get_template(template).render(version=VERSION, **values).encode("utf-8", "replace")
