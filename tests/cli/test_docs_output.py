"""The console output in docs/cli.md is the commands' output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "cli.md"


def sessions() -> Iterator[tuple[str, str]]:
    """Yield each command with the output that the page shows; ``[1]`` at its end is an exit code."""
    for block in blocks(PAGE):
        if block.language == "console":
            for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                command, _, answer = part.partition("\n")
                yield command, answer


def test_docs_console_output_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment: dict[str, str] = {}
    shown = list(sessions())
    assert len(shown) > 10
    for command, answer in shown:
        words = shlex.split(command)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            environment[name] = value
            continue
        assert words[0] == "sqlalchemy-locks"
        done = run(*words[1:], **environment)
        code = re.search(r"^\[(\d+)\]\n\Z", answer, re.M)
        assert done.exit_code == (int(code[1]) if code else 0), done.output
        expected = answer[: code.start()] if code else answer
        pattern = "".join(".*" if part == "…" else re.escape(part) for part in re.split("(…)", expected))
        stdout = re.sub(" +$", "", done.stdout, flags=re.M)
        assert re.fullmatch(pattern, stdout), f"{command}\n{stdout}"
