"""The page as WSGI and ASGI application: mounts, paths, headers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.routing import Mount
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations import dashboard
from sqlalchemy_locks.integrations.dashboard.http import LONGEST_BODY
from tests.integrations.dashboard.conftest import MakeDoor

Databases = Callable[[str], tuple[str, str]]


def test_security_headers(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door)
    for path in ("/", "/live", "/nothing"):
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
    for name, kind in {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}.items():
        answer = page.get(f"/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "max-age" in answer.headers["cache-control"]
        assert f'"{name}?v=' in text
    # nothing comes from elsewhere
    assert "http://" not in text
    assert "https://" not in text


def test_unknown_paths_are_404(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door)
    assert page.get("/nothing").status_code == 404
    assert page.get("/../page.css").status_code in (200, 404)
    assert page.get("/static/page.css").status_code == 404
    for action in ("release", "requeue", "pause", "resume", "resize"):
        assert page.get(f"/{action}").status_code == 404
        assert page.post(action, external_id="x").status_code == 404
    answer = page.ask("POST", "/")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_sends_no_body(door: str, door_to: MakeDoor) -> None:
    answer = door_to(door=door).ask("HEAD", "/")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 1000


def test_long_body_is_refused(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door, authorize=lambda request: True, secret="s")
    answer = page.ask("POST", "/release", content=b"x" * (LONGEST_BODY + 1))
    assert answer.status_code == 413


@pytest.mark.parametrize("number", ["-5", "many", ""])
def test_invalid_content_length(number: str, databases: Databases) -> None:
    app = dashboard.wsgi(sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool)))
    said: list[str] = []
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET", "PATH_INFO": "/nothing", "CONTENT_LENGTH": number}
    list(app({**environ, "wsgi.input": io.BytesIO()}, lambda status, headers: said.append(status)))
    assert said == ["404 Not Found"]


def test_mounted_in_flask(databases: Databases) -> None:
    app = flask.Flask("shop")
    locks = sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool))
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/ops/locks": dashboard.wsgi(lambda: locks)})  # type: ignore[method-assign]
    client = Client(app)
    answer = client.get("/ops/locks")
    assert (answer.status_code, answer.headers["location"]) == (308, "/ops/locks/")
    answer = client.get("/ops/locks/")
    assert answer.status_code == 200
    assert 'href="page.css' in answer.text
    assert client.get("/ops/locks/page.css").status_code == 200
    assert client.get("/").status_code == 404


def test_mount_that_strips_the_whole_path(databases: Databases) -> None:
    """Two slashes would be the address of another server."""
    app = dashboard.wsgi(sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool)))
    told: list[Any] = []
    environ: dict[str, Any] = {"REQUEST_METHOD": "GET", "PATH_INFO": "", "wsgi.input": io.BytesIO()}
    list(app(environ, lambda status, headers: told.append(dict(headers)["Location"])))
    list(app({**environ, "SCRIPT_NAME": "//evil"}, lambda status, headers: told.append(dict(headers)["Location"])))
    assert told == ["/", "/evil/"]


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
        engine = create_async_engine(databases("sqlite")[1], poolclass=NullPool)
        try:
            for way, (app, at, cut) in asgi_apps(sl.AsyncLocks(engine)).items():
                transport = httpx.ASGITransport(app=app, root_path=cut)
                async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                    answer = await client.get(f"{at}/")
                    assert answer.status_code == 200, way
                    assert "Semaphores" in answer.text
                    assert (await client.get(f"{at}/page.js")).status_code == 200, way
                    if at:
                        answer = await client.get(at)
                        assert answer.status_code in (307, 308), way
                        assert answer.headers["location"].endswith(f"{at}/")
        finally:
            await engine.dispose()

    asyncio.run(ask())


def test_asgi_lifespan_and_websocket(databases: Databases) -> None:
    """A server sends these to its only application."""
    app = dashboard.asgi(sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool)))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def ask(scope: dict[str, Any], *messages: str) -> None:
        waiting = iter(messages)

        async def receive() -> Any:
            return {"type": next(waiting)}

        await app(scope, receive, send)

    asyncio.run(ask({"type": "lifespan"}, "lifespan.startup", "lifespan.shutdown"))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    asyncio.run(ask({"type": "websocket"}, "websocket.connect"))
    assert sent[2:] == ["websocket.close"]


def test_options_are_checked(databases: Databases) -> None:
    locks = sl.Locks(create_engine(databases("sqlite")[0], poolclass=NullPool))
    with pytest.raises(ValueError, match="needs secret="):
        dashboard.wsgi(locks, authorize=lambda request: True)
    with pytest.raises(TypeError, match="refresh="):
        dashboard.asgi(locks, refresh="5")  # type: ignore[arg-type]
    for refresh in (-1, 0.01, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="refresh="):
            dashboard.wsgi(locks, refresh=refresh)

    async def ask() -> None:
        engine = create_async_engine(databases("sqlite")[1], poolclass=NullPool)
        other: Any = sl.AsyncLocks(engine)
        with pytest.raises(TypeError, match=r"need dashboard\.asgi"):
            dashboard.wsgi(other)
        with pytest.raises(TypeError, match=r"need dashboard\.asgi"):
            Client(dashboard.wsgi(lambda: other)).get("/")
        for neither in (engine, engine.sync_engine, None):
            with pytest.raises(TypeError, match=r"dashboard\.wsgi takes Locks, not "):
                dashboard.wsgi(neither)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match=r"dashboard\.asgi takes AsyncLocks or Locks, not "):
                dashboard.asgi(neither)  # type: ignore[arg-type]
        await engine.dispose()

    asyncio.run(ask())


def test_callback_exceptions_reach_the_app(door: str, door_to: MakeDoor) -> None:
    def ask(request: Request) -> bool:
        raise PermissionError(request.path)

    with pytest.raises(PermissionError, match="/live"):
        door_to(door=door, view=ask).get("/live")
    page = door_to(door=door, authorize=ask, secret="secret")
    for method, path in (("GET", "/"), ("POST", "/resize")):
        with pytest.raises(PermissionError, match=path):
            page.ask(method, path)


def test_title_and_refresh_options(door_to: MakeDoor) -> None:
    text = door_to(title="Locks of <shop>", refresh=2.5).text()
    assert "<h1>Locks of &lt;shop&gt;</h1>" in text
    assert 'data-refresh="2.5"' in text


def test_other_hosts_are_refused(door: str, door_to: MakeDoor) -> None:
    page = door_to(door=door, hosts=["app.example.org", "[::1]:8000"])
    for host in ("app.example.org", "APP.example.org:8443", "[::1]:8000"):
        assert page.get(headers={"Host": host}).status_code == 200
    for host in ("evil.example.org", "app.example.org.evil.org", "app.example.org:x", "[::1]", "[::1]:8001", ""):
        for path in ("/", "/live", "/page.css"):
            answer = page.get(path, headers={"Host": host})
            assert answer.status_code == 403
            assert "under this host name" in answer.text
    assert door_to(door=door).get(headers={"Host": "any.example.org"}).status_code == 200


def test_hosts_are_a_list() -> None:
    with pytest.raises(TypeError, match="list of host names"):
        dashboard.wsgi(lambda: sl.Locks, hosts="app.example.org")  # type: ignore[arg-type, return-value]
