"""Run every snippet of README.md and docs/: each page's in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, select

from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import PAGES, RECIPES, ROOT, blocks, engines, event_loop, run
from tests.docs.recipes import Invoice
from tests.examples.served import done
from tests.fixtures.parties import connected

#: the URLs of the pages
ASYNC_URL = "postgresql+asyncpg://app:secret@localhost/app"
PLAIN_URL = "postgresql+psycopg://app:secret@localhost/app"
ASYNC_DRIVERS = {"postgresql15": "postgresql+asyncpg", "mysql": "mysql+aiomysql", "mariadb": "mariadb+aiomysql"}
#: Their snippets are run by tests/alembic (revisions and environments), by tests of their own, and by tests/redis.
COMPILED_ONLY = {"alembic.md", "flask-migrate.md", "redis.md"}
CASES = [(page, engine) for page in PAGES if page.name not in COMPILED_ONLY for engine in engines(page)]


@pytest.mark.parametrize(("page", "engine"), CASES, ids=[f"{page.name}-{engine}" for page, engine in CASES])
def test_snippets_run(
    page: Path, engine: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if engine == "pgbouncer":
        drivers = ("psycopg", "psycopg2", "asyncpg")
        urls = {f"postgresql+{driver}://app@pgbouncer:6432/app": servers.pooled(driver) for driver in drivers}
    elif engine == "sqlite":
        urls = {ASYNC_URL: "sqlite+aiosqlite:///app.db", PLAIN_URL: "sqlite:///app.db"}
        if not run_commands(page):
            install("sqlite:///app.db")
    else:
        url = servers.fresh(engine, PLAIN[engine])
        install(url)
        awaited = make_url(url).set(drivername=ASYNC_DRIVERS[engine]).render_as_string(hide_password=False)
        urls = {ASYNC_URL: awaited, PLAIN_URL: url, "sqlite:///app.db": url, "sqlite+aiosqlite:///app.db": url}
    with run(page, urls):
        pass


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
    if commands:
        done("\n".join(commands), Path.cwd())
    return bool(commands)


@pytest.mark.parametrize("page", PAGES + RECIPES, ids=lambda page: page.name)
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


SITE = re.search(r"^site_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.M)


@pytest.mark.parametrize("name", ["README.md", "docs/llms.txt", "pyproject.toml"])
def test_links_to_the_site_resolve(name: str) -> None:
    assert SITE
    paths = re.findall(rf"{re.escape(SITE[1])}([\w/-]*)", (ROOT / name).read_text())
    assert paths
    for path in paths:
        assert (ROOT / "docs" / f"{path.rstrip('/') or 'index'}.md").is_file(), path
    if name.endswith(".txt"):
        pages = {str(page.relative_to(ROOT / "docs")) for page in (*PAGES[1:], *RECIPES)}
        assert {f"{path.rstrip('/') or 'index'}.md" for path in paths} == pages


def test_the_first_block_of_the_readme(servers: Servers) -> None:
    (block,) = (block for block in blocks(PAGES[0]) if block.mark == "postgresql")
    url = servers.fresh("postgresql15", PLAIN["postgresql15"])
    with connected(url) as engine, engine.begin() as connection:
        Invoice.metadata.create_all(connection)
        connection.execute(Invoice.__table__.insert().values(id=42))
    names: dict[str, Any] = {"Invoice": Invoice}
    with event_loop() as loop:
        block.execute(names, {ASYNC_URL: servers.url("postgresql15", "asyncpg", str(make_url(url).database))}, loop)
        loop.run_until_complete(names["engine"].dispose())
    with connected(url) as engine, engine.connect() as connection:
        assert connection.scalar(select(Invoice.charged)) is True


def test_tables_are_whole() -> None:
    """An empty line ends a table, and the rows after it are shown as text."""
    for page in (*PAGES, *RECIPES):
        rows = re.findall(r"(?<=\|\n\n)\|.*\n(?!\|[-:| ]+\n)", page.read_text())
        assert rows == [], page.name


def test_pages_are_short() -> None:
    words = {page: len(page.read_text().split()) for page in (*PAGES[1:], *RECIPES)}
    assert [page.name for page in RECIPES if words[page] > 300] == []
    patterns = ("lock", "mutex", "semaphore", "lease", "queue")
    assert [name for name in patterns if words[ROOT / "docs" / f"{name}.md"] > 1500] == []
    assert sum(number for page, number in words.items() if page.name not in ("sql.md", "reference.md")) <= 32000
