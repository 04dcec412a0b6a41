"""What people see, and what programs read: one document, shown as tables or printed as JSON.

Nothing that comes out of a database is taken for markup, and what would move a terminal's cursor is spelt out.
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
#: where nobody looks at it, a line is a line
_WIDE = 10_000


class Screen:
    """Where a command's answer goes.

    :param as_json: as one JSON document on standard output, and nothing else there.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(sys.stdout)

    def show(self, document: Document, *shown: RenderableType) -> None:
        """Give the answer: the document to a program, the rest to people."""
        if self.as_json:
            print(json.dumps(document, indent=2, default=_jsonable))
            return
        if self.console.is_terminal:
            self.console.print(*shown, sep="\n")
            return
        with self.console.capture() as captured:
            for each in shown:
                self.console.print(each, soft_wrap=isinstance(each, Text))
        for line in captured.get().splitlines():
            print(line.rstrip())  # without what fills a table up

    def line(self, document: Document) -> None:
        """One document of a stream of them."""
        print(json.dumps(document, default=_jsonable), flush=True)

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """A bar on standard error while something takes its time; what it gives is told how much has been done."""
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
        file.reconfigure(errors="backslashreplace")  # what it has no letter for is spelt out
    terminal = file.isatty()
    width = None if terminal or os.environ.get("COLUMNS") else _WIDE
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
    """A table. Its numbers, in the columns ``right``, are flush right; they and what is ``whole`` are never folded."""
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
    """A name out of a database, or out of anybody's hands."""
    return Text("–" if value is None else escape_unprintable(str(value)), style=style)


def number(value: Any) -> Text:
    return Text("–" if value is None else f"{value:,}")


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def note(text: str) -> Text:
    return Text(escape_unprintable(text), style="dim")


def sentence(text: str, style: str = "") -> Text:
    return Text(escape_unprintable(text), style=style)


def bar(used: int, capacity: int, console: Console) -> Text:
    """So much of so much."""
    width = 20 if console.width >= 100 else 10
    full, free = ("█", "░") if (console.encoding or "").lower().startswith("utf") else ("#", ".")
    share = 1.0 if used >= capacity else used / capacity
    cells = min(width, max(round(share * width), 1 if used else 0))
    if used < capacity:
        cells = min(cells, width - 1)  # it looks full when it is
    colour = "green" if share < 0.8 else "yellow" if share < 1 else "red"
    return Text.assemble((full * cells, colour), (free * (width - cells), "dim"))


def counted(count: int, what: str) -> str:
    """So many of something."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def second(instant: datetime | None) -> Text:
    """An instant, in UTC as all of them are."""
    return name(None if instant is None else f"{instant:%Y-%m-%d %H:%M:%S}")


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)
