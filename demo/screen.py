"""The display while they compete: a live table on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from .witness import KEYS, State, Witness


class Screen:
    """The state of every key, as the witness records it."""

    def __init__(self, console: Console, witness: Witness) -> None:
        self._console = console
        self._witness = witness
        self._began = time.monotonic()
        self._printed_at = -3.0
        self._message = ""
        self._live = Live(console=console, refresh_per_second=10) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def log(self, message: str) -> None:
        """Show a message."""
        self._message = message
        if self._live is None:
            self._console.print(f"{self._seconds:5.1f} s  {message}")

    def show(self) -> None:
        """Show the current state."""
        if self._live:
            self._live.update(Group(self._table(), Text(f"{self._seconds:5.1f} s  {self._message}")))
        elif self._seconds - self._printed_at >= 3:
            self._printed_at = self._seconds
            keys = "   ".join(f"{key}: {self._held(key)} ({self._waiting(key)} wait)" for key in KEYS)
            self._console.print(f"{self._seconds:5.1f} s  {keys}")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _table(self) -> Table:
        # fixed widths: a table that changes its layout is hard to read
        table = Table(Column("Key", width=10), Column("Held by", width=36), Column("Waiting", width=8))
        for key in KEYS:
            table.add_row(key, self._held(key), "●" * self._waiting(key))
        return table

    def _held(self, key: str) -> Text:
        states = self._witness.states(key)
        alone = [str(number) for number, state in enumerate(states, 1) if state is State.ALONE]
        sharers = [str(number) for number, state in enumerate(states, 1) if state is State.SHARES]
        if alone:
            return Text(f"worker {' and '.join(alone)}, alone", style="bold red")
        if sharers:
            return Text(f"worker{'s' * (len(sharers) > 1)} {', '.join(sharers)}, shared", style="green")
        return Text("–", style="dim")

    def _waiting(self, key: str) -> int:
        states = self._witness.states(key)
        return states.count(State.WAITS_ALONE) + states.count(State.WAITS_TO_SHARE)
