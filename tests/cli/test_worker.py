"""``worker``: an app's own worker, by its name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import connected
from tests.fixtures.queues import put
from tests.fixtures.worker_states import counts

APP = """
import sqlalchemy_locks as sl
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

engine = create_engine({url!r})
worker = sl.Worker(sl.Queue(), lambda job: None, bind=engine)
nothing = 1
stopped = sl.Worker(sl.Queue(), lambda job: stopped.stop(), bind=engine)

async def awaited(job):
    pass

def make():
    return sl.AsyncWorker(sl.Queue(), awaited, bind=create_async_engine({url!r}.replace("sqlite", "sqlite+aiosqlite")))
"""


def test_a_worker_runs_by_its_name(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = servers.fresh("sqlite", PLAIN["sqlite"])
    install(url)
    (tmp_path / "own_app.py").write_text(APP.format(url=url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_app", raising=False)
    with connected(url) as engine:
        put(engine, 1, 2, queue="mail")
        put(engine, 3)
        done = run("worker", "own_app:worker", "--queue", "mail", "--concurrency", "2", "--until-empty")
        assert done.exit_code == 0, done.output
        assert counts(engine)["completed"] == 2
        assert done.output == ""
        done = run("worker", "own_app:make", "--until-empty")
        assert done.exit_code == 0, done.output
        assert counts(engine)["completed"] == 3
        put(engine, 4)
        done = run("worker", "own_app:stopped")
        assert done.exit_code == 0
        assert done.output == f"Working on the queue 'default' of {url.partition('?')[0]}; Ctrl-C stops it.\n"
    for wrong, message in {
        "own_app": "is not MODULE:WORKER",
        "no_app:worker": "No module named 'no_app'",
        "own_app:nothing": "no Worker",
        "own_app:absent": "has no attribute 'absent'",
    }.items():
        done = run("worker", wrong)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
