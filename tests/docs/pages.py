"""The pages of the documentation, parsed into fenced blocks, the comment before each, and the tab that it is in."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

ROOT = Path(__file__).parents[2]
RECIPES = tuple(sorted((ROOT / "docs" / "recipes").glob("*.md")))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[^\n]*?) -->\n *)?```(?P<language>\w*)(?: (?P<info>[^\n]*))?\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
_TAB = re.compile(r'^=== "(.*)"$', re.M)
_ENGINES = re.compile(r"^<!-- runs on: (.*?) -->$", re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    info: str
    mark: str
    text: str
    tab: str

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"

    def compiled(self, text: str | None = None) -> types.CodeType:
        """The block's code, with ``await`` outside of functions; a traceback names the page and the line."""
        code: types.CodeType = compile(
            "\n" * self.line + (text or self.text), self.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        return code

    def execute(self, names: dict[str, Any], urls: dict[str, str], loop: asyncio.AbstractEventLoop) -> None:
        """Execute the block with its database URLs replaced."""
        text = self.text
        for url, real in urls.items():
            text = text.replace(f'"{url}"', repr(real))
        awaited = eval(self.compiled(text), names)
        if inspect.iscoroutine(awaited):
            loop.run_until_complete(awaited)


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    content = page.read_text()
    tabs = [(match.start(), match[1]) for match in _TAB.finditer(content)]
    return [
        Block(
            page,
            content.count("\n", 0, match.start("text")),
            match["language"],
            match["info"] or "",
            match["mark"] or "",
            textwrap.dedent(match["text"]),
            next((tab for start, tab in reversed(tabs) if match["indent"] and start < match.start()), ""),
        )
        for match in _FENCE.finditer(content)
    ]


def engines(page: Path) -> list[str]:
    """Return the engines that a page's snippets are run on: SQLite, unless it names others."""
    found = _ENGINES.search(page.read_text())
    return found[1].split(", ") if found else ["sqlite"]


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop for what several blocks await."""
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@contextmanager
def run(page: Path, urls: dict[str, str]) -> Iterator[types.ModuleType]:
    """Run a page's snippets in order, as one module, with its database URLs replaced; dispose of its engines then."""
    module = types.ModuleType(f"snippets_of_{page.stem.lower()}")
    # declarative models look for their module there
    sys.modules[module.__name__] = module
    with event_loop() as loop:
        try:
            for block in blocks(page):
                if block.language == "python" and block.info != "noexec" and block.mark != "postgresql":
                    block.execute(module.__dict__, urls, loop)
            yield module
        finally:
            for value in vars(module).values():
                if isinstance(value, Engine):
                    value.dispose()
                elif isinstance(value, AsyncEngine):
                    loop.run_until_complete(value.dispose())
                elif type(value).__name__ == "Flask" and "sqlalchemy" in value.extensions:
                    with value.app_context():
                        for engine in value.extensions["sqlalchemy"].engines.values():
                            engine.dispose()
