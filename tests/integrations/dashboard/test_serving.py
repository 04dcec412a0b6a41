"""``sqlalchemy-locks page``: the local server."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import httpx
import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.dashboard.serving import served
from tests.cli.conftest import run
from tests.cli.terminal import terminal
from tests.fixtures.parties import PATIENCE, connected

Databases = Callable[[str], tuple[str, str]]


@pytest.mark.parametrize("driver", [0, 1], ids=["psycopg", "asyncpg"])
def test_page_command_as_json(databases: Databases, semaphore: Callable[..., str], driver: int) -> None:
    name, url = semaphore("postgresql15"), databases("postgresql15")[driver]
    command = [sys.executable, "-m", "sqlalchemy_locks", "page", "--url", url, "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = json.loads("".join(process.stdout.readline() for _ in range(4)))
        assert "***" in told["database"]
        for path in ("live", ""):
            answer = httpx.get(told["address"] + path, timeout=PATIENCE)
            assert answer.status_code == 200
            assert name in answer.text
        assert "read-only" in answer.text
        assert httpx.post(f"{told['address']}release", data={"external_id": name}, timeout=PATIENCE).status_code == 404
        process.send_signal(signal.SIGINT)
        said, complained = process.communicate(timeout=PATIENCE)
        assert (process.returncode, said, complained) == (0, "", "")
    finally:
        process.kill()
        process.communicate()


def test_page_command_as_text(databases: Databases) -> None:
    with terminal("page", "--port", "0", "--url", databases("sqlite")[0], columns=200) as page:
        page.until("Ctrl-C ends it")
        assert "is shown at http://127.0.0.1:" in page.text
        page.type("\x03")
        assert page.ended() == 0
    assert "Traceback" not in page.text


def test_page_command_errors(databases: Databases) -> None:
    url, _ = databases("sqlite")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("page", "--url", url, "--port", str(taken.getsockname()[1]))
        assert (done.exit_code, "--port 0 chooses a free one" in done.stderr) == (2, True)


def test_other_host_names_are_refused(databases: Databases) -> None:
    """A site may give this address a name of its own, whose pages could then read it."""
    with connected(databases("sqlite")[0]) as engine, served(sl.Locks(engine)) as address:
        port = address.rstrip("/").rpartition(":")[2]
        assert httpx.get(address, timeout=PATIENCE).status_code == 200
        assert httpx.get(f"http://localhost:{port}/", timeout=PATIENCE).status_code == 200
        for host in ("evil.example.org", f"evil.example.org:{port}", f"127.0.0.1.evil.org:{port}", ""):
            assert httpx.get(address, headers={"Host": host}, timeout=PATIENCE).status_code == 400
