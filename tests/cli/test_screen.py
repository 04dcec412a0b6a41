"""The output for users: with and without a terminal, wide and narrow, with hostile names."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from sqlalchemy_locks._validation import escape_unprintable, format_duration
from sqlalchemy_locks.cli.render import bar
from tests.cli.conftest import Cli, run
from tests.cli.terminal import terminal

COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*3[0-9]m")
NAMES = [
    "[red]x[/red]",
    "[/]",
    'it\'s "quoted"; DROP TABLE lock_semaphore',
    "<b>bold</b> & <script>",
    "🔒 emoji 👩‍👩‍👧 :lock:",
    "n" * 255,
    "percent %s %(name)s {0}",
    "back\\slash \\n",
]
#: names that would move the cursor or set a colour, each with its escaped form
HIDDEN = {
    "red \x1b[31m": r"red \x1b[31m",
    "tab\tnew\nline": r"tab\tnew\nline",
    "bell \x07": r"bell \x07",
    "backwards \u202eabc": r"backwards \u202eabc",
}


@pytest.mark.parametrize("name", [*NAMES, *HIDDEN], ids=lambda name: ascii(name)[:20])
@pytest.mark.parametrize("engine", ["sqlite", "mysql"])
def test_hostile_names_on_the_terminal(made: Callable[[str], str], engine: str, name: str) -> None:
    cli = Cli(made(engine))
    assert cli.json("semaphore", "create", "--", name, "2")["name"] == name
    locks = cli.locks
    grant = locks.acquire({name: 1}, external_id=name, owner=name, ttl=3600)
    told = cli.json("semaphore", "list", "--", name)
    assert [row["name"] for row in told["semaphores"]] == [name]
    assert [row["owner"] for row in told["holders"]] == [name]
    shown = cli("semaphore", "list", "--", name, COLUMNS="1000").stdout
    expected = HIDDEN.get(name, name).replace("\u200d", r"\u200d")
    assert expected[:70] in shown
    assert "\x1b" not in shown
    narrow = "".join(cli("status", COLUMNS="80").stdout.split())
    assert "".join(expected.split())[:10] in narrow
    assert cli.json("semaphore", "release", "--", name)["released"] == "RELEASED"
    assert grant.acquired
    cli("semaphore", "delete", "--yes", "--", name)


def test_surrogate_is_refused(sqlite: Cli) -> None:
    """A surrogate, which stands for a byte that isn't UTF-8 in a shell's argument."""
    done = sqlite("semaphore", "create", "\udcff", "1", code=2)
    assert "half a surrogate pair" in done.stderr


def test_lines_are_not_wrapped_without_terminal(sqlite: Cli) -> None:
    for line in sqlite("check").stdout.splitlines():
        assert line == line.rstrip()
    done = sqlite("semaphore", "create", "x" * 255, "1")
    assert len(done.stdout.splitlines()) == 1
    assert "\x1b" not in done.output
    sqlite("semaphore", "delete", "x" * 255, "--yes")


def test_no_progress_without_terminal(sqlite: Cli) -> None:
    for command in (["install"], ["sweep"], ["vacuum"], ["queue", "requeue"]):
        assert sqlite(*command).stderr == ""


def test_output_in_a_terminal(sqlite: Cli) -> None:
    sqlite("semaphore", "create", "full", "1")
    sqlite.locks.acquire({"full": 1}, external_id="for good")
    with terminal("status", "--url", sqlite.url) as coloured:
        assert coloured.ended() == 0
    assert COLOUR.search(coloured.raw)
    assert "██████████" in coloured.text
    assert max(len(line) for line in coloured.text.splitlines()) <= 80
    with terminal("status", "--url", sqlite.url, NO_COLOR="1", columns=200) as plain_:
        assert plain_.ended() == 0
    assert not COLOUR.search(plain_.raw)
    assert "██████████" in plain_.text


def test_top_ends_with_ctrl_c(sqlite: Cli) -> None:
    sqlite("semaphore", "create", "watched", "3")
    with terminal("top", "--interval", "0.2", "--url", sqlite.url) as top:
        top.until("watched")
        top.until("Ctrl-C ends it")
        sqlite("semaphore", "create", "seen later", "3")
        top.until("seen later")
        top.type("\x03")
        assert top.ended() == 0
    assert "Traceback" not in top.text
    assert top.raw.rstrip().endswith("\x1b[?1049l")  # the screen is restored
    assert "\x1b[?25h" in top.raw  # so is the cursor


def test_top_ends_with_an_async_driver(sqlite: Cli) -> None:
    with terminal("top", "--interval", "0.2", "--url", sqlite.url.replace("sqlite:", "sqlite+aiosqlite:")) as top:
        top.until("Ctrl-C ends it")
        top.type("\x03")
        assert top.ended() == 0
    assert "Traceback" not in top.text


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_delete_asks_for_confirmation(sqlite: Cli, answer: str, code: int) -> None:
    sqlite("semaphore", "create", "doomed [b]", "3")
    with terminal("semaphore", "delete", "doomed [b]", "--url", sqlite.url) as asked:
        asked.until("[y/N]")
        assert "Delete the semaphore 'doomed [b]'" in asked.text.replace("\r\n", "")
        asked.type(answer)
        assert asked.ended() == code
    names = [row["name"] for row in sqlite.json("semaphore", "list")["semaphores"]]
    assert ("doomed [b]" in names) == bool(code)


def test_top_as_json_lines(sqlite: Cli) -> None:
    with terminal("top", "--json", "--interval", "0.1", "--url", sqlite.url, columns=500) as top:
        top.until("}\r\n{")
        top.type("\x03")
        assert top.ended() == 0
    first = top.text.splitlines()[0]
    assert json.loads(first)["semaphores"] is not None


def test_bar_without_unicode() -> None:
    ascii_ = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=100)
    assert bar(1, 2, ascii_).plain == "##########.........."


@pytest.mark.parametrize(
    ("used", "capacity", "cells"), [(0, 10, 0), (1, 1000, 1), (5, 10, 10), (999, 1000, 19), (10, 10, 20), (12, 10, 20)]
)
def test_only_full_bars_look_full(used: int, capacity: int, cells: int) -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=100)
    assert bar(used, capacity, console).plain.count("█") == cells


def test_zero_capacity_looks_full() -> None:
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), width=100)
    assert bar(0, 0, console).plain.count("█") == 20


def test_durations() -> None:
    told = {None: "–", 0: "0 s", 90: "90 s", 120: "2 min", 7200: "2 h", 86400 * 3: "3 d", -150: "-2 min"}
    assert {seconds: format_duration(seconds) for seconds in told} == told


def test_control_characters_are_escaped() -> None:
    assert escape_unprintable("a\x00b\u200b\U0001f512") == "a\\x00b\\u200b\U0001f512"


def test_no_arguments_prints_usage() -> None:
    assert "Usage: sqlalchemy-locks" in run().output
