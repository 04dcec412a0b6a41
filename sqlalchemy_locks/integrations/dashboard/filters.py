"""How it is shown: the templates, and the files that they need. Everything out of a database is escaped."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sqlalchemy_locks._validation import escape_unprintable, format_duration

#: so many characters of a name are seen; the whole is in its title
SHORT = 48

_TYPES = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}


def short(value: Any) -> str:
    """As much of a name as has room, with what can't be seen spelt out."""
    text = escape_unprintable(str(value))
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"


def number(value: Any) -> str:
    """1,234."""
    return f"{int(value):,}"


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader(__package__ or ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        short=short, number=number, duration=format_duration, plain=lambda value: escape_unprintable(str(value))
    )
    return made


def _static() -> dict[str, tuple[bytes, str]]:
    folder = files(__package__ or "") / "static"
    return {name: ((folder / name).read_bytes(), kind) for name, kind in _TYPES.items()}


ENVIRONMENT = _environment()
#: the files, with their types
STATIC = _static()
#: changes with them, so that browsers may keep them for ever
VERSION = hashlib.sha256(b"".join(content for content, _ in STATIC.values())).hexdigest()[:12]


def render(template: str, **values: Any) -> bytes:
    """A template, filled in."""
    return ENVIRONMENT.get_template(template).render(version=VERSION, **values).encode("utf-8", "replace")
