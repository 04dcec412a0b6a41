"""Servers that fork: maintenance in the serving processes, and a pool for each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import PLAIN, Servers
from tests.examples.served import done

_APP = """
import json, os, sys, threading
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.flask import FlaskLocks

db, locks = SQLAlchemy(), FlaskLocks()
app = Flask("app")
app.config.update(SQLALCHEMY_DATABASE_URI=os.environ["URL"], SQLALCHEMY_LOCKS_MAINTENANCE=True)
db.init_app(app)
locks.init_app(app)

def told():
    threads = [each.name for each in threading.enumerate()]
    with app.app_context():
        with locks.exclusive("who", timeout=60) as held:
            backend = held.session.scalar(text("SELECT pg_backend_pid()"))
        backends = {backend, db.session.scalar(text("SELECT pg_backend_pid()"))}
    return {"maintained": threads.count("sqlalchemy_locks.maintenance"), "backends": sorted(backends)}

@app.get("/")
def served():
    return told()
"""

_FORKING = """
with app.app_context():  # without locks
    before = db.session.scalar(text("SELECT pg_backend_pid()"))
children = []
for _ in range(2):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        first, second = app.test_client().get("/"), app.test_client().get("/")
        os.write(write, json.dumps([first.json, second.json]).encode())
        sys.exit(0)
    os.close(write)
    children.append((child, read))
answers = []
for child, read in children:
    answers.append(json.loads(os.read(read, 10_000)))
    assert os.waitpid(child, 0)[1] == 0
print(json.dumps({"before": before, "children": answers, "after": told()}))
"""


def ran(script: str, url: str, folder: Path) -> Any:
    (folder / "forking.py").write_text(script)
    return json.loads(done("python forking.py", folder, URL=url))


def test_fork_serves_on_its_own_connections(servers: Servers, tmp_path: Path) -> None:
    told = ran(_APP + _FORKING, servers.installed("postgresql15", PLAIN["postgresql15"]), tmp_path)
    assert told["after"]["maintained"] == 0  # it has served no request
    assert told["before"] in told["after"]["backends"]
    seen = {told["before"]}
    for first, second in told["children"]:
        assert (first["maintained"], second["maintained"]) == (1, 1)
        assert not seen & {*first["backends"], *second["backends"]}
        seen |= {*first["backends"], *second["backends"]}


def test_app_loads_no_optional_modules(tmp_path: Path) -> None:
    script = """
import json, sys
import sqlalchemy_locks
assert "flask" not in sys.modules
from flask import Flask
from sqlalchemy_locks.integrations.flask import FlaskLocks
FlaskLocks(Flask("app"))
print(json.dumps(sorted({"alembic", "rich", "sqlalchemy.orm", "flask_sqlalchemy"} & set(sys.modules))))
"""
    assert ran(script, "", tmp_path) == []
