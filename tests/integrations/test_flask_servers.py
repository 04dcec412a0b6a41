"""An app under a server without threads: gevent's worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.examples.served import Server, running
from tests.fixtures.parties import PATIENCE, later, until

_APP = """
import os, threading
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy_locks.integrations.flask import FlaskLocks

db, locks = SQLAlchemy(), FlaskLocks()
app = Flask("app")
app.config.update(SQLALCHEMY_DATABASE_URI=os.environ["URL"], SQLALCHEMY_LOCKS_MAINTENANCE=True)
db.init_app(app)
locks.init_app(app)
inside, most, may = [], [], threading.Event()

@app.get("/told")
def told():
    threads = [each.name for each in threading.enumerate()]
    maintained = threads.count("sqlalchemy_locks.maintenance")
    return {"inside": len(inside), "most": max(most, default=0), "maintained": maintained}

@app.get("/hold")
def hold():
    with locks.exclusive("held", timeout=PATIENCE):
        inside.append(1)
        most.append(len(inside))
        assert may.wait(PATIENCE)
        inside.pop()
    return "held"

@app.get("/go")
def go():
    may.set()
    return "gone"
""".replace("PATIENCE", str(PATIENCE))


@pytest.fixture
def url(servers: Servers) -> str:
    """The URL of a database without other connections."""
    made = servers.fresh("postgresql15", PLAIN["postgresql15"])
    install(made)
    return made


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(_APP)
    return tmp_path


PATCHES = "from gevent import monkey; monkey.patch_all()\n"


@pytest.mark.parametrize("options", ["", "--preload --config patching.py"], ids=["alone", "preloaded"])
def test_gevent_worker_waits_and_maintains(options: str, url: str, app: Path) -> None:
    (app / "patching.py").write_text(PATCHES)
    command = f"gunicorn -k gevent --workers 1 {options} --timeout 3600 --bind 127.0.0.1:0 --no-control-socket app:app"
    with running(command, app, URL=url) as server:
        ask = asking(server)
        first = later(ask, "/hold")
        until(lambda: ask("/told")["inside"] == 1, unless=first)
        second = later(ask, "/hold")
        locks = sl.Locks(create_engine(url, poolclass=NullPool))
        until(lambda: any(holder.waiting for holder in locks.run(sl.lock.holders("held"))), unless=second)
        told = ask("/told")  # a waiting request doesn't block others
        assert (told["inside"], told["most"], told["maintained"]) == (1, 1, 1)
        assert ask("/go") == "gone"
        assert (first.result(PATIENCE), second.result(PATIENCE)) == ("held", "held")
        assert ask("/told")["most"] == 1
        server.end()
        assert server.process.returncode == 0
        assert "Traceback" not in server.said


def asking(server: Server) -> Callable[[str], Any]:
    address = server.address()

    def ask(path: str) -> Any:
        answer = httpx.get(f"{address}{path}", timeout=PATIENCE)
        assert answer.status_code == 200, server.said
        return answer.json() if path == "/told" else answer.text

    return ask
