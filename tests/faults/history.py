"""The history of a run: what each client asked for and when, what came back, and when it believed that it held.

It is made of events, so that a client in another process can send its own: ``time.monotonic_ns`` is one clock for all
processes of a machine.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Emit = Callable[[dict[str, Any]], object]


@dataclass
class Call:
    """One call of a client."""

    number: str
    client: str
    what: str
    on: tuple[str, ...]
    began: int
    details: dict[str, Any]
    #: ``None`` where the client died in it
    ended: int | None = None
    answer: Any = None
    #: the class of the error that it raised, its module included, and its text
    error: str | None = None
    message: str = ""

    def __str__(self) -> str:
        outcome = "no answer" if self.ended is None else self.error or repr(self.answer)
        return f"{self.client}: {self.what}{self.on} {self.details or ''} -> {outcome}"


@dataclass
class Hold:
    """What a client believed to hold, from the answer of an acquire until it began to release."""

    number: str
    client: str
    key: str
    began: int
    shared: bool
    permits: int
    fence: int | None
    #: the last time at which it believed it, or began to release
    until: int
    #: it ended by a release; otherwise by a loss that the client was told of, or with the client
    released: bool = False
    #: it is held until somebody releases it, even if its client dies
    lasting: bool = False
    #: the call that acquired it
    call: str | None = None
    #: ``lock``, ``job`` or ``row``
    kind: str = "lock"

    @property
    def end(self) -> float:
        return float("inf") if self.lasting and not self.released else self.until

    def __str__(self) -> str:
        mode = "shares" if self.shared else "holds"
        return f"{self.client} {mode} {self.key!r} (permits {self.permits}, fence {self.fence})"


@dataclass
class History:
    """All events, as calls and holds."""

    calls: dict[str, Call] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    #: ``(what, from, until)`` of each injected fault
    faults: list[tuple[str, int, int]] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def apply(self, event: dict[str, Any]) -> None:
        with self._guard:
            getattr(self, f"_{event['event']}")(**{name: value for name, value in event.items() if name != "event"})

    def _began(self, call: str, client: str, what: str, on: list[str], at: int, details: dict[str, Any]) -> None:
        self.calls[call] = Call(call, client, what, tuple(on), at, details)

    def _ended(self, call: str, at: int, answer: Any, error: str | None, message: str) -> None:
        known = self.calls[call]
        known.ended, known.answer, known.error, known.message = at, answer, error, message

    def _held(self, hold: str, at: int, **values: Any) -> None:
        self.holds[hold] = Hold(hold, began=at, until=at, **values)

    def _believed(self, hold: str, at: int) -> None:
        self.holds[hold].until = max(self.holds[hold].until, at)

    def _left(self, hold: str, at: int) -> None:
        self.holds[hold].until, self.holds[hold].released = at, True

    def _fault(self, what: str, at: int, until: int) -> None:
        self.faults.append((what, at, until))

    @property
    def operations(self) -> int:
        return len(self.calls)

    def disturbed(self, call: Call) -> bool:
        """Whether a fault was injected before the end of a call."""
        return any(call.ended is None or at <= call.ended for _, at, _ in self.faults)


class Holding:
    """A hold, for the client that has it."""

    def __init__(self, recorder: Recorder, number: str) -> None:
        self._recorder, self._number = recorder, number

    def sample(self, lost: Callable[[], bool]) -> bool:
        """Ask whether it is lost, and record that it was believed to be held if not."""
        asked = time.monotonic_ns()
        gone = lost()
        if not gone:
            self._recorder.emit({"event": "believed", "hold": self._number, "at": asked})
        return gone

    def leave(self, at: int | None = None) -> None:
        """Record the beginning of the release: now, or earlier where only its success tells that it was held until then."""
        self._recorder.emit({"event": "left", "hold": self._number, "at": at or time.monotonic_ns()})


class Answer:
    """What a call returned."""

    value: Any = None

    def __init__(self, call: str) -> None:
        self.call = call


class Recorder:
    """Writes the events of clients."""

    def __init__(self, emit: Emit, prefix: str = "") -> None:
        self.emit = emit
        self._numbers = itertools.count(1)
        self._prefix = prefix

    @contextlib.contextmanager
    def call(self, client: str, what: str, *on: str, **details: Any) -> Iterator[Answer]:
        """Record a call, with the error that it raises."""
        answer = Answer(f"{self._prefix}{client}.{next(self._numbers)}")
        began = {"event": "began", "call": answer.call, "client": client, "what": what, "on": on, "details": details}
        self.emit({**began, "at": time.monotonic_ns()})
        name = message = None
        try:
            yield answer
        except BaseException as error:
            name, message = f"{type(error).__module__}.{type(error).__qualname__}", str(error)[:2000]
            raise
        finally:
            ended = {"event": "ended", "call": answer.call, "answer": answer.value, "error": name}
            self.emit({**ended, "message": message or "", "at": time.monotonic_ns()})

    def hold(
        self,
        client: str,
        key: str,
        *,
        shared: bool = False,
        permits: int = 1,
        fence: int | None = None,
        lasting: bool = False,
        call: str | None = None,
        kind: str = "lock",
    ) -> Holding:
        """Record that a client holds from now on: to be called as soon as the acquire has returned.

        :param call: the number of the call that has acquired it.
        """
        number = f"{self._prefix}{client}.{next(self._numbers)}"
        values = {"client": client, "key": key, "shared": shared, "permits": permits, "fence": fence}
        values |= {"lasting": lasting, "call": call, "kind": kind}
        self.emit({"event": "held", "hold": number, "at": time.monotonic_ns(), **values})
        return Holding(self, number)

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """Record an injected fault."""
        at = time.monotonic_ns()
        try:
            yield
        finally:
            self.emit({"event": "fault", "what": what, "at": at, "until": time.monotonic_ns()})
