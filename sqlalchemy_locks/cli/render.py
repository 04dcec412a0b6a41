"""The output of commands: one document, as tables on a terminal or as JSON.

Text from a database is never interpreted as markup, and its control characters are escaped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from sqlalchemy_locks._validation import escape_unprintable

#: the width of output that isn't a terminal, so that no line is wrapped
_UNWRAPPED = 10_000


class Screen:
    """The output of one command.

    :param as_json: print one JSON document on standard output, and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def show(self, document: Mapping[str, Any], *renderables: RenderableType) -> None:
        """Print the document where JSON was asked for, and the rest otherwise."""
        if self.as_json:
            print(json.dumps(document, indent=2, default=_jsonable), flush=True)
            return
        width = None if sys.stdout is not None and sys.stdout.isatty() else _UNWRAPPED
        console = Console(width=width, markup=False, emoji=False, highlight=False)
        console.print(*renderables, sep="\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns ``right`` are right-aligned, and they and ``whole`` are never wrapped."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold",
            no_wrap=column in right or column in whole,
        )
    return grid


def plain(value: Any, style: str = "") -> Text:
    """Return a value that may contain anything as text, with control characters escaped."""
    return Text("–" if value is None else escape_unprintable(str(value)), style=style)


def number(value: Any) -> Text:
    """Return a number with commas."""
    return Text("–" if value is None else f"{value:,}")


def counted_up_to(row: Mapping[str, Any], name: str) -> Text:
    """Return a count of a row, with a + where counting stopped."""
    return number(row[name]).append("+" if name in row.get("at_least", ()) else "")


def second(instant: datetime | None) -> Text:
    """Return an instant in UTC, to the second."""
    return plain(None if instant is None else f"{instant:%Y-%m-%d %H:%M:%S}")


def counted(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
