"""Run every snippet of README.md and docs/: each page's in order, as one program."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask import Flask
from sqlalchemy import Engine, text

from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import PAGES, blocks, engines, run

#: Their snippets are run by tests/alembic (revisions and environments), by tests of their own, and by tests/redis.
COMPILED_ONLY = {"alembic.md", "flask-migrate.md", "redis.md"}
CASES = [(page, engine) for page in PAGES if page.name not in COMPILED_ONLY for engine in engines(page)]


@pytest.mark.parametrize(("page", "engine"), CASES, ids=[f"{page.name}-{engine}" for page, engine in CASES])
def test_snippets_run(
    page: Path, engine: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    urls = {}
    if engine == "pgbouncer":
        drivers = ("psycopg", "psycopg2", "asyncpg")
        urls = {f"postgresql+{driver}://app@pgbouncer:6432/app": servers.pooled(driver) for driver in drivers}
    elif engine != "sqlite":
        url = servers.fresh(engine, PLAIN[engine])
        install(url)
        urls = {"sqlite:///app.db": url, "sqlite+aiosqlite:///app.db": url}
    elif not run_commands(page):
        install("sqlite:///app.db")
    module = run(page, urls)
    try:
        if page.name == "index.md":
            apps_answer(module)
    finally:
        for value in vars(module).values():
            if isinstance(value, Engine):
                value.dispose()
            elif isinstance(value, Flask) and "sqlalchemy" in value.extensions:
                with value.app_context():
                    for engine in value.extensions["sqlalchemy"].engines.values():
                        engine.dispose()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            block.compiled()


def run_commands(page: Path) -> bool:
    """Run a page's shell commands, except pip and make; return whether there were any."""
    commands = [
        line
        for block in blocks(page)
        if block.language == "sh"
        for line in block.text.splitlines()
        if not line.startswith(("pip ", "make "))
    ]
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    if commands:
        done = subprocess.run(
            ["sh", "-ec", "\n".join(commands)], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return bool(commands)


def apps_answer(module: Any) -> None:
    """Send a request to each web app of the quick start."""
    before = charged(module)

    async def ask_fastapi() -> httpx.Response:
        transport = httpx.ASGITransport(app=module.app)
        async with module.app.router.lifespan_context(module.app):
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                # maintenance, which starts with the app, sometimes holds the file's write lock
                while (response := await client.post("/invoices/42/charge")).status_code == 423:
                    await asyncio.sleep(0.1)
        await module.app_engine.dispose()
        return response

    assert asyncio.run(ask_fastapi()).json() == before + 1
    assert module.flask_app.test_client().post("/invoices/42/charge").text == str(before + 2)
    assert charged(module) == before + 2
    with module.flask_app.app_context():
        module.db.engine.dispose()


def charged(module: Any) -> int:
    with module.engine.connect() as connection:
        return int(connection.scalar(text("SELECT charged FROM invoice")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.is_file(), f"{target} leads nowhere"
        anchors = {
            re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", linked.read_text(errors="replace"), re.M)
        }
        assert not anchor or anchor in anchors, f"{target} has no such heading"
