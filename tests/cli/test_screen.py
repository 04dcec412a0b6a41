"""The output for users: with and without a terminal, with hostile names."""

from __future__ import annotations

import re

import pytest

from sqlalchemy_locks._validation import format_duration
from tests.cli.conftest import Cli, run
from tests.cli.terminal import terminal

COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*3[0-9]m")
#: names, each with the text that is shown: what would move the cursor or set a colour is escaped
NAMES = {
    "[red]x[/red]": "[red]x[/red]",
    'it\'s "quoted"; DROP TABLE lock_semaphore': 'it\'s "quoted"; DROP TABLE lock_semaphore',
    "🔒 emoji :lock: percent %s %(name)s {0}": "🔒 emoji :lock: percent %s %(name)s {0}",
    "red \x1b[31m": r"red \x1b[31m",
    "tab\tnew\nline": r"tab\tnew\nline",
    "backwards \u202eabc": r"backwards \u202eabc",
}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_hostile_names_on_the_terminal(sqlite: Cli, name: str) -> None:
    assert sqlite.json("semaphore", "create", "--", name, "2")["name"] == name
    grant = sqlite.locks.acquire({name: 1}, external_id=name, owner=name, ttl=3600)
    told = sqlite.json("semaphore", "list", "--", name)
    assert [row["name"] for row in told["semaphores"]] == [row["owner"] for row in told["holders"]] == [name]
    for shown in (sqlite("semaphore", "list", "--", name).stdout, sqlite("status").stdout):
        assert NAMES[name] in shown
        assert "\x1b" not in shown
    assert sqlite.json("semaphore", "release", "--", name)["released"] == "RELEASED"
    assert grant.acquired
    sqlite("semaphore", "delete", "--yes", "--", name)


def test_surrogate_is_refused(sqlite: Cli) -> None:
    """A surrogate, which stands for a byte that isn't UTF-8 in a shell's argument."""
    done = sqlite("semaphore", "create", "\udcff", "1", code=2)
    assert "half a surrogate pair" in done.stderr


def test_lines_are_not_wrapped_without_terminal(sqlite: Cli) -> None:
    done = sqlite("semaphore", "create", "x" * 255, "1")
    assert len(done.stdout.splitlines()) == 1
    assert "\x1b" not in done.output
    sqlite("semaphore", "delete", "x" * 255, "--yes")


def test_output_in_a_terminal(sqlite: Cli) -> None:
    sqlite("semaphore", "create", "full", "1")
    sqlite.locks.acquire({"full": 1}, external_id="for good")
    with terminal("status", "--url", sqlite.url) as coloured:
        assert coloured.ended() == 0
    assert COLOUR.search(coloured.raw)
    assert max(len(line) for line in coloured.text.splitlines()) <= 80
    with terminal("status", "--url", sqlite.url, NO_COLOR="1", columns=200) as plain_:
        assert plain_.ended() == 0
    assert not COLOUR.search(plain_.raw)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_delete_asks_for_confirmation(sqlite: Cli, answer: str, code: int) -> None:
    sqlite("semaphore", "create", "doomed", "3")
    with terminal("semaphore", "delete", "doomed", "--url", sqlite.url) as asked:
        asked.until("Delete this semaphore? [y/N]")
        asked.type(answer)
        assert asked.ended() == code
    names = [row["name"] for row in sqlite.json("semaphore", "list")["semaphores"]]
    assert ("doomed" in names) == bool(code)


def test_durations() -> None:
    told = {None: "–", 0: "0 s", 90: "90 s", 120: "2 min", 7200: "2 h", 86400 * 3: "3 d", -150: "-2 min"}
    assert {seconds: format_duration(seconds) for seconds in told} == told


def test_no_arguments_prints_usage() -> None:
    assert "Usage: sqlalchemy-locks" in run().output
