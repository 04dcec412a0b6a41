"""The pages of the documentation, parsed into fenced blocks and the comment before each."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)(?: (?P<info>[^\n]*))?\n(?P<text>.*?)^```$", re.M | re.S
)
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

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"

    def compiled(self, text: str | None = None) -> types.CodeType:
        """The block's code; a traceback names the page and the line."""
        return compile("\n" * self.line + (text or self.text), self.page, "exec")


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page."""
    content = page.read_text()
    return [
        Block(
            page,
            content.count("\n", 0, match.start("text")),
            match["language"],
            match["info"] or "",
            match["mark"] or "",
            match["text"],
        )
        for match in _FENCE.finditer(content)
    ]


def engines(page: Path) -> list[str]:
    """Return the engines that a page's snippets are run on: SQLite, unless it names others."""
    found = _ENGINES.search(page.read_text())
    return found[1].split(", ") if found else ["sqlite"]


def run(page: Path, urls: dict[str, str]) -> types.ModuleType:
    """Run a page's snippets in order, as one module, with its database URLs replaced."""
    module = types.ModuleType(f"snippets_of_{page.stem.lower()}")
    # declarative models look for their module there
    sys.modules[module.__name__] = module
    for block in blocks(page):
        if block.language == "python" and block.info != "noexec":
            text = block.text
            for url, real in urls.items():
                text = text.replace(f'"{url}"', repr(real))
            exec(block.compiled(text), module.__dict__)
    return module
