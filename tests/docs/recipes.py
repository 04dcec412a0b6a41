"""A process that runs a recipe of docs/recipes as it stands, and what the recipes call that is the app's own."""

from __future__ import annotations

import inspect
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, String, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from tests.docs.pages import Block, event_loop


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoice"
    id: Mapped[int] = mapped_column(primary_key=True)
    charged: Mapped[bool] = mapped_column(default=False)
    payments: Mapped[int] = mapped_column(default=0)


class Delivery(Base):
    __tablename__ = "delivery"
    id: Mapped[str] = mapped_column(String(50), primary_key=True)


class Stream(Base):
    __tablename__ = "stream"
    id: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(default=0)


class Counter(Base):
    __tablename__ = "counter"
    id: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Enough(Exception):
    """Ends a loop without an end."""


@dataclass(frozen=True)
class Party:
    """One process: what it calls, and what befalls it in the app's function or where it would commit."""

    call: str
    urls: dict[str, str]
    diary: Path
    fate: str = ""

    def note(self, what: str) -> None:
        with self.diary.open("a") as file:
            file.write(f"{what} {os.getpid()}\n")

    def befall(self, where: str) -> None:
        if self.fate == f"killed in {where}":
            self.note("-killed")
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fate == f"stopped in {where}":
            self.note("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)

    def stub(self, name: str, awaited: bool, calls: int) -> Any:
        """A function of the app: it takes a moment, and is called so often at most."""
        left = iter(range(calls))

        def work(*_: Any, **__: Any) -> int:
            if next(left, None) is None:
                raise Enough
            self.note(f"+{name}")
            self.befall("work")
            time.sleep(0.02)
            self.note(f"-{name}")
            return 1

        async def awaited_work(*arguments: Any, **named: Any) -> int:
            return work(*arguments, **named)

        return awaited_work if awaited else work


class Cache:
    """A cache of the app that all processes share, in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def get(self, key: str) -> tuple[str, bool]:
        return ("new", True) if self.file.exists() else ("old", False)

    def set(self, key: str, value: Any) -> None:
        self.file.write_text(str(value))


class AsyncCache(Cache):
    async def get(self, key: str) -> tuple[str, bool]:  # type: ignore[override]
        return super().get(key)

    async def set(self, key: str, value: Any) -> None:  # type: ignore[override]
        super().set(key, value)


def play(block: Block, party: Party, stubs: dict[str, int], meeting: Any) -> None:
    """Execute the recipe, meet the other process, and make the call."""
    awaited = "async" in block.tab.split(", ")
    cache = party.diary.with_suffix(".cache")
    names: dict[str, Any] = {each.__name__: each for each in (Invoice, Delivery, Stream, Counter)}
    names |= {name: party.stub(name, awaited, calls) for name, calls in stubs.items()}
    names |= {"cache": (AsyncCache if awaited else Cache)(cache), "__name__": "recipe"}
    with event_loop() as loop:
        block.execute(names, party.urls, loop)
        engine: Engine | AsyncEngine = names["engine"]
        if party.fate:
            event.listen(getattr(engine, "sync_engine", engine), "commit", lambda _: party.befall("commit"))
        if meeting is not None:
            meeting.wait()
        try:
            result = eval(party.call, names)
            if inspect.isawaitable(result):
                loop.run_until_complete(result)
        except Enough:
            pass
        except sl.LockLost:
            party.note("lost")
        disposed = engine.dispose()
        if inspect.isawaitable(disposed):
            loop.run_until_complete(disposed)
