"""The output of commands: one document, as tables on a terminal or as JSON.

Text from a database is never interpreted as markup, and its control characters are escaped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sqlalchemy_locks._validation import escape_unprintable

Document = Mapping[str, Any]
#: the width of what is not a terminal, whose lines are never wrapped
_UNWRAPPED = 10_000


class Screen:
    """The output of one command.

    :param as_json: print one JSON document on standard output, and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(sys.stdout)

    def show(self, document: Document, *renderables: RenderableType) -> None:
        """Print the document where JSON was asked for, and the rest otherwise."""
        if self.as_json:
            print(json.dumps(document, indent=2, default=_jsonable))
            return
        if self.console.is_terminal:
            self.console.print(*renderables, sep="\n")
            return
        with self.console.capture() as captured:
            for each in renderables:
                self.console.print(each, soft_wrap=isinstance(each, Text))
        for line in captured.get().splitlines():
            print(line.rstrip())  # without a table's padding

    def line(self, document: Document) -> None:
        """Print one document of a stream, on one line."""
        print(json.dumps(document, default=_jsonable), flush=True)

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Show progress on standard error; call what it yields with the number of rows or steps done since."""
        console = _console(sys.stderr)
        columns = [SpinnerColumn("line"), TextColumn("{task.description}", markup=False)]
        columns += [TextColumn("{task.completed:,.0f}")] if total is None else [BarColumn(bar_width=30)]
        disable = self.as_json or not console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=disable) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.advance(task, done)


def _console(file: Any) -> Console:
    if file is None:  # a process may be started with a stream closed
        return Console(file=io.StringIO())
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="backslashreplace")  # escapes what the encoding can't represent
    terminal = file.isatty()
    width = None if terminal or os.environ.get("COLUMNS") else _UNWRAPPED
    return Console(
        file=file,
        force_terminal=terminal,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """Return an empty table; the columns ``right`` are right-aligned, and they and ``whole`` are never wrapped."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for each in columns:
        fixed = each in right or each in whole
        made.add_column(
            each,
            justify="right" if each in right else "left",
            overflow="fold",
            no_wrap=fixed,
        )
    return made


def name(value: Any, style: str = "") -> Text:
    """Return a value that may contain anything as text, with control characters escaped."""
    return Text("–" if value is None else escape_unprintable(str(value)), style=style)


def number(value: Any, *, at_least: bool = False) -> Text:
    """Return a number. :param at_least: it may be greater."""
    return Text("–" if value is None else f"{value:,}{'+' if at_least else ''}")


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def note(text: str) -> Text:
    return Text(escape_unprintable(text), style="dim")


def sentence(text: str, style: str = "") -> Text:
    return Text(escape_unprintable(text), style=style)


def bar(used: int, capacity: int, console: Console) -> Text:
    """Return a bar of the share that is used."""
    width = 20 if console.width >= 100 else 10
    full, free = ("█", "░") if (console.encoding or "").lower().startswith("utf") else ("#", ".")
    share = 1.0 if used >= capacity else used / capacity
    cells = min(width, max(round(share * width), 1 if used else 0))
    if used < capacity:
        cells = min(cells, width - 1)  # only a full one looks full
    colour = "green" if share < 0.8 else "yellow" if share < 1 else "red"
    return Text.assemble((full * cells, colour), (free * (width - cells), "dim"))


def counted(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def second(instant: datetime | None) -> Text:
    """Return an instant in UTC, to the second."""
    return name(None if instant is None else f"{instant:%Y-%m-%d %H:%M:%S}")


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
