"""Rendering: hostile names, long names, many rows, and parts that can't be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from html.parser import HTMLParser
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.integrations.dashboard import queries
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import connected
from tests.integrations.dashboard.conftest import ENGINES, Door, MakeDoor

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' OR 1=1; DROP TABLE lock_job --",
    "{{ 7 * 7 }}{% raw %}",
    "</title><style>*{display:none}</style>",
    "javascript:alert(1)",
    "%(name)s %s :name ?",
    "a\nb\tc",
    "gnp.\u202eexe",
    "héllo wörld 🔒👩‍👩‍👧",
    "&amp;&lt;",
    "x" * 255,
    "🔒" * 255,
]


class Tags(HTMLParser):
    """Parse a page like a browser."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.scripts = 0
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.scripts += tag == "script"
        self.attributes |= {name for name, _ in attrs}
        self.values += [value for _, value in attrs if value]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    return tags


@pytest.mark.parametrize("engine", ["sqlite", "mysql"])
def test_hostile_names_are_escaped(engine: str, servers: Servers) -> None:
    url = servers.fresh(engine, PLAIN[engine])
    install(url)
    with closing(Door("thread", url, "", authorize=lambda request: HOSTILE[0], secret="s", title=HOSTILE[0])) as page:
        plain = parsed(page.text())
        for name in HOSTILE:
            page.locks.run(sl.semaphore.create(name, 2, by=name))
            assert page.locks.acquire({name: 1}, external_id=name, owner=name)
            assert page.locks.mutex.acquire(name, queue=name, owner=name)
            assert page.locks.once_per(name, every=60, queue=name)
            with page.locks._engine.begin() as connection:
                connection.execute(sl.Queue().put(1, queue=name))
        tags = parsed(page.text())
        assert tags.names.isdisjoint({"img", "style"})
        assert tags.scripts == plain.scripts == 1
        assert tags.attributes.isdisjoint({"onerror", "style"})
        told = " ".join(tags.words)
        assert HOSTILE[0] in told
        assert "{{ 7 * 7 }}" in told
        assert "gnp.\\u202eexe" in told
        assert "a\\nb\\tc" in told
        assert "x" * 47 + "…" in told
        assert "x" * 60 not in told
        assert "x" * 255 in tags.values
        # and forms give names back as they are, whatever is seen of them
        assert page.post("release", token=page.token(), external_id=HOSTILE[1]).status_code == 303
        for name in HOSTILE if engine == "sqlite" else HOSTILE[:2]:
            alone = parsed(page.ask("GET", "/", params={"of": name}).text)
            assert name in alone.values, name
            answer = page.post("resize", token=page.token(), name=name, capacity="5", of=name)
            assert answer.status_code == 303, answer.text
            followed = parsed(page.text(f"/{answer.headers['location'][2:]}"))
            assert any("has a capacity of 5 now" in word for word in followed.words)
            assert followed.names.isdisjoint({"img", "style"})


@pytest.mark.parametrize("engine", ENGINES)
def test_page_without_installation(engine: str, servers: Servers) -> None:
    with closing(Door("thread", servers.fresh(engine, PLAIN[engine]), "")) as page:
        text = page.text()
        assert text.count("install the tables and functions") >= 5
        assert "nothing is installed here" in text
        assert ">Queues</h2>" in text


def test_part_without_privilege(servers: Servers, door_to: MakeDoor, semaphore: Callable[..., str]) -> None:
    """A role that may read some of it sees that."""
    name = semaphore("postgresql15")
    admin = door_to("postgresql15").locks._engine
    role = f"looks_{os.getpid()}"
    with admin.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'looks'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA lock TO {role}"))
        for table in ("semaphore", "permit", "permit_request", "semaphore_history", "installed"):
            connection.execute(text(f"GRANT SELECT ON lock.{table} TO {role}"))
    url = admin.url.set(username=role, password="looks").render_as_string(hide_password=False)
    page = Door("thread", url, "")
    try:
        answer = page.text()
        assert name in answer
        assert "permission denied for table job" in answer
        assert "permission denied for table task_state" in answer
        assert "looks:looks" not in answer
        assert "Holders by age" in answer
    finally:
        page.close()
        with admin.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_password_is_never_shown(door_to: MakeDoor) -> None:
    page = door_to("postgresql15")
    password = str(page.locks._engine.url.password)
    url = page.locks._engine.url.set(password="s3cr3t-of-the-page", query={"options": "-c search_path=sss"})
    assert password
    with closing(Door("thread", url.render_as_string(hide_password=False), "")) as refused:
        answer = refused.get()
    assert "s3cr3t-of-the-page" not in answer.text
    assert "search_path" not in answer.text


def test_page_in_another_schema_or_prefix(servers: Servers) -> None:
    """Locks under another schema, or another prefix."""
    for engine, options in (
        ("sqlite", {"locks_prefix": "others_"}),
        ("postgresql15", {"schema_translate_map": {"lock": "others"}}),
    ):
        url = servers.fresh(engine, PLAIN[engine])
        install(url, schema="others", prefix="others_")
        placed = sl.Locks(create_engine(url, poolclass=NullPool, execution_options=options))
        placed.run(sl.semaphore.create("placed", 1))
        look = queries.read_all(placed)
        assert [row["name"] for row in look.semaphores.rows] == ["placed"]
        assert look.lately.error is None
        assert {each.level for each in queries.facts(placed).rows} <= {"ok", "warning"}


@pytest.mark.parametrize("name", ["none", "x" * 300, "a\0b", "a ", "\u202e", "<b>"])
def test_unknown_semaphore_is_not_shown(name: str, door_to: MakeDoor) -> None:
    """Whatever an address asks for, be it no name at all."""
    for path in ("/", "/live"):
        answer = door_to().ask("GET", path, params={"of": name})
        assert answer.status_code == 200
        assert "There is no such semaphore" in answer.text
        assert "<b>" not in answer.text


def test_closed_and_overfull_semaphore(door_to: MakeDoor, semaphore: Callable[..., str]) -> None:
    page = door_to()
    closed, over = semaphore(capacity=0, held=0), semaphore(capacity=3, held=3)
    page.locks.run(sl.semaphore.resize(over, 1))
    assert ">closed</span>" in page.text(f"/?of={closed}")
    told = page.text(f"/?of={over}")
    assert ">over</span>" in told
    assert 'aria-valuemax="1" aria-valuenow="1" aria-valuetext="3 of 1"' in told


def test_overdue_maintenance_is_shown(servers: Servers) -> None:
    url = servers.fresh("sqlite", "pysqlite")
    install(url)
    with connected(url) as engine:
        locks = sl.Locks(engine)
        assert all(row["due"] is None for row in queries.read_all(locks).maintenance.rows)
        locks.maintain()
        table: Any = build_context(engine.dialect, {}).tables.task_timeout
        assert not any(row["late"] for row in queries.read_all(locks).maintenance.rows)
        with engine.begin() as connection:
            connection.execute(table.update().values(ts=0))
        with closing(Door("thread", url, "")) as page:
            assert "Nothing runs these tasks" in page.text()
