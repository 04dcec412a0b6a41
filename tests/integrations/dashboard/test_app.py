"""The page as ASGI and WSGI application: mounts, paths, headers, options."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI, HTTPException
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard
from sqlalchemy_locks.integrations.dashboard.views import LONGEST_BODY
from tests.examples.served import running
from tests.fixtures.parties import PATIENCE, async_connected
from tests.integrations.dashboard.conftest import ORIGIN, MakeDoor, bridges_that_end

Databases = Callable[[str], tuple[str, str]]


def test_security_headers(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door)
    for path in ("/", "/live", "/nothing", "/static/nothing"):
        answer = page.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "set-cookie" not in answer.headers
    text = page.text()
    assert "style=" not in text
    assert "onclick" not in text


def test_static_files_are_served(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door)
    text = page.text()
    for name, kind in {"page.css": "text/css", "page.js": "javascript", "icon.svg": "image/svg+xml"}.items():
        answer = page.get(f"/static/{name}")
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        assert answer.headers["cache-control"] == "no-cache"
        unchanged = {"If-None-Match": answer.headers["etag"]}
        assert page.get(f"/static/{name}", headers=unchanged).status_code == 304
        assert f'"static/{name}"' in text
    # nothing comes from elsewhere
    assert "http://" not in text
    assert "https://" not in text


def test_unknown_paths_and_methods_are_refused(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door)
    for path in ("/nothing", "/page.css", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        assert page.get(path).status_code == 404, path
    for action in ("release", "requeue", "revive", "pause", "resume", "resize"):
        assert page.get(f"/{action}").status_code == 404
        assert page.post(action, external_id="x").status_code == 404
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert page.ask(method, "/").status_code == 405
    assert page.ask("HEAD", "/").content == b""
    acting = door_to(door=door, authorize=lambda request: True, secret="s")
    answer = acting.get("/release")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_long_body_is_refused(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door, authorize=lambda request: True, secret="s")
    headers = {"Origin": ORIGIN, "Content-Type": "application/x-www-form-urlencoded"}
    content = b"a=" + b"x" * LONGEST_BODY
    assert page.ask("POST", "/release", content=content, headers=headers).status_code == 413


def test_mounted_in_flask(databases: Databases) -> None:
    app = flask.Flask("shop")
    app.secret_key = "shop"
    locks = sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool))

    def staff(request: Request) -> bool:
        with app.request_context(request.scope["wsgi_environ"]):
            return bool(flask.session.get("user") == "alice")

    @app.get("/login")
    def login() -> str:
        flask.session["user"] = "alice"
        return "ok"

    with bridges_that_end():
        page = dashboard.wsgi(lambda: locks, view=staff)
        app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/ops/locks": page})  # type: ignore[method-assign]
        client = Client(app)
        assert client.get("/ops/locks/").status_code == 403
        client.get("/login")
        answer = client.get("/ops/locks")
        assert (answer.status_code, answer.headers["location"]) == (307, "http://localhost/ops/locks/")
        answer = client.get("/ops/locks/")
        assert answer.status_code == 200
        assert 'href="static/page.css' in answer.text
        assert client.get("/ops/locks/static/page.css").status_code == 200
        assert client.get("/").status_code == 404


PRELOADED = """
import sys
sys.modules["greenlet"] = None  # an app without an async driver has none
import sqlalchemy_locks as sl
from flask import Flask
from sqlalchemy import NullPool, create_engine
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client
from sqlalchemy_locks.integrations import dashboard

app = Flask("shop")
page = dashboard.wsgi(sl.Locks(create_engine({url!r}, poolclass=NullPool)), view=lambda request: True)
app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {{"/locks": page}})
# the parent has used it, too
assert Client(app).get("/locks/").status_code == 200
"""


def test_answers_after_a_fork(databases: Databases, tmp_path: Path) -> None:
    """A thread that the parent has started doesn't exist in its workers."""
    (tmp_path / "preloaded.py").write_text(PRELOADED.format(url=databases("sqlite")[0]))
    options = "--preload --workers 2 --timeout 3600 --bind 127.0.0.1:0 --no-control-socket"
    with running(f"gunicorn {options} preloaded:app", tmp_path) as server:
        address = server.address()
        for _ in range(6):
            assert "Engine and schema" in httpx.get(f"{address}/locks/", timeout=PATIENCE).text


def asgi_apps(locks: Any) -> dict[str, tuple[Any, str, str]]:
    """Mounts: the application, the address, and the prefix that a proxy strips."""
    fastapi = FastAPI()
    fastapi.mount("/locks", dashboard.asgi(locks))
    starlette = Starlette(routes=[Mount("/ops", routes=[Mount("/locks", app=dashboard.asgi(locks))])])
    return {
        "fastapi": (fastapi, "/locks", ""),
        "a proxy that cuts its prefix off": (fastapi, "/locks", "/api"),
        "mounted twice": (starlette, "/ops/locks", ""),
        "alone": (dashboard.asgi(locks), "", ""),
    }


def test_mounted_in_asgi_apps(databases: Databases) -> None:
    async def ask() -> None:
        async with async_connected(databases("sqlite")[1]) as engine:
            for way, (app, at, cut) in asgi_apps(sl.AsyncLocks(engine)).items():
                transport = httpx.ASGITransport(app=app, root_path=cut)
                async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                    answer = await client.get(f"{at}/")
                    assert answer.status_code == 200, way
                    assert "Engine and schema" in answer.text
                    assert (await client.get(f"{at}/static/page.js")).status_code == 200, way
                    if at:
                        answer = await client.get(at)
                        assert answer.status_code in (307, 308), way
                        assert answer.headers["location"].endswith(f"{at}/")

    asyncio.run(ask())


def test_options_are_checked(databases: Databases) -> None:
    locks = sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool))
    with pytest.raises(ValueError, match="needs secret="):
        dashboard.wsgi(locks, authorize=lambda request: True)
    with pytest.raises(ValueError, match="refresh"):
        dashboard.wsgi(locks, refresh=-1)
    with pytest.raises(TypeError, match="list of host names"):
        dashboard.wsgi(locks, hosts="app.example.org")
    other: Any = sl.AsyncLocks(create_async_engine(databases("sqlite")[1], poolclass=NullPool))
    with pytest.raises(TypeError, match=r"FlaskLocks\.current.*need dashboard\.asgi"):
        dashboard.wsgi(other)
    with pytest.raises(TypeError, match=r"dashboard\.asgi takes AsyncLocks or Locks, not "):
        dashboard.asgi(None)  # type: ignore[arg-type]


def test_open_page_is_logged_once(databases: Databases, caplog: pytest.LogCaptureFixture) -> None:
    locks = sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool))
    with caplog.at_level(logging.WARNING, logger="sqlalchemy_locks"):
        dashboard.asgi(locks, view=lambda request: False)
        assert caplog.records == []
        dashboard.asgi(locks)
    (record,) = caplog.records
    assert "open to everyone" in record.getMessage()


def test_callback_exceptions_are_answered(door_to: MakeDoor, caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request) -> bool:
        raise PermissionError(request.url.path)

    async def login(request: Request) -> bool:
        raise HTTPException(401, "log <in>", {"WWW-Authenticate": "Basic"})

    with pytest.raises(PermissionError, match="/live"):
        door_to(view=fail).get("/live")
    assert door_to(door="wsgi", view=fail).get("/live").status_code == 500
    assert "PermissionError: /live" in caplog.text
    for options in ({"view": login}, {"authorize": login, "secret": "s"}):
        answer = door_to(**options).get()
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Basic")
        assert "log &lt;in&gt;" in answer.text
        assert "content-security-policy" in answer.headers


def test_other_hosts_are_refused(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door, hosts=["app.example.org"])
    for host in ("app.example.org", "APP.example.org:8443"):
        assert page.get(headers={"Host": host}).status_code == 200
    for host in ("evil.example.org", "app.example.org.evil.org", "www.app.example.org", "[::1]:8001", ""):
        for path in ("/", "/live", "/static/page.css"):
            answer = page.get(path, headers={"Host": host})
            assert answer.status_code == 400
            assert "Engine and schema" not in answer.text
    assert door_to(door=door).get(headers={"Host": "any.example.org"}).status_code == 200
