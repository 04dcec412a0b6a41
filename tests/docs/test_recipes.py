"""The recipes of docs/recipes, as they stand: two processes at the same time, and one after another that was killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections import Counter as Counts
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from sqlalchemy import Select, select, text

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers, install
from tests.docs import recipes
from tests.docs.pages import RECIPES, Block, blocks
from tests.docs.recipes import Base, Counter, Invoice, Party, Stream
from tests.fixtures.forks import FORKS, main
from tests.fixtures.parties import PATIENCE, connected, until

#: the URLs of the pages, with their engines
URLS = {
    "postgresql+asyncpg://app:secret@localhost/app": ("postgresql15", "asyncpg"),
    "mysql+pymysql://app:secret@localhost/app": ("mysql", "pymysql"),
    "sqlite+aiosqlite:///app.db": ("sqlite", "aiosqlite"),
    "sqlite:///app.db": ("sqlite", "pysqlite"),
}
#: what the tests shorten
SHORTER = {"ttl=30": "ttl=1", "ttl=60": "ttl=1", "capacity=10": "capacity=1"}


@dataclass(frozen=True)
class Recipe:
    """What two processes call, and what was done in the end."""

    call: str
    #: the app's own functions, and how often a process calls each at most
    stubs: dict[str, int] = field(default_factory=dict)
    #: how often they were finished by two processes at the same time
    done: dict[str, int] = field(default_factory=dict)
    #: where the first of two processes is killed, and how often they were finished then
    killed_in: str = "commit"
    done_then: dict[str, int] = field(default_factory=dict)
    #: what a third process calls at the end
    then: str = ""
    #: a value of the database, by two processes at the same time, and by one after another that was killed
    value: Select[Any] | None = None
    values: tuple[int, int] = (2, 1)


WORKS = "worker.run(until_empty=True)"
CASES = {
    "cache-rebuild": Recipe("front_page()", {"render": 1}, {"render": 1}, "work"),
    "charge-once": Recipe("charge(42)", {"ask_provider": 1}, {"ask_provider": 1}, "commit", {"ask_provider": 2}),
    "cron-once": Recipe("tick()", {"make_report": 1}, {"make_report": 1}, "commit", {"make_report": 1}, WORKS),
    "hold-a-transaction": Recipe("work()", {"encode": 1}, {"encode": 1}, "work", {"encode": 1}),
    "leader-election": Recipe(
        "lead()",
        *({"read_stream": 4}, {"read_stream": 8}, "work", {"read_stream": 4}),
        value=select(Stream.position),
        values=(8, 4),
    ),
    "once-at-start-up": Recipe("start_up()", {"load_prices": 1}, {"load_prices": 1}, "work", {"load_prices": 1}),
    "outbox": Recipe("place({number})", {"send_mail": 2}, {"send_mail": 2}, "commit", {"send_mail": 1}, WORKS),
    "rate-limit": Recipe("call(7)", {"ask_partner": 1}, {"ask_partner": 2}, "work", {"ask_partner": 1}),
    "several-processes-one-sqlite-file": Recipe("count()", value=select(Counter.value)),
    "webhook-exactly-once": Recipe('webhook("e-1", 42)', value=select(Invoice.payments), values=(1, 1)),
}
TABS = [
    pytest.param(block, CASES[page.stem], id=f"{page.stem}-{block.tab}")
    for page in RECIPES
    if page.stem in CASES
    for block in blocks(page)
]


class Stage:
    """The database of an engine, and the diary of the processes of a recipe."""

    def __init__(self, servers: Servers, name: str) -> None:
        self.servers, self.name = servers, name
        self.database = servers.database(name)
        self.url = servers.url(name, PLAIN[name], self.database)
        install(self.url)
        with connected(self.url) as engine, engine.begin() as connection:
            Base.metadata.create_all(connection)

    def set(self, block: Block, recipe: Recipe, folder: Path) -> None:
        """Begin with the same rows each time."""
        self.block, self.recipe, self.diary = block, recipe, folder / "diary"
        for file in (self.diary, self.diary.with_suffix(".cache")):
            file.unlink(missing_ok=True)
        self.diary.touch()
        separator = "." if self.name.startswith("postgresql") else "_"
        with connected(self.url) as engine, engine.begin() as connection:
            for table in (*Base.metadata.tables, f"lock{separator}job", f"lock{separator}task_timeout"):
                connection.execute(text(f"DELETE FROM {table}"))
            for made in (Invoice(id=42), Stream(id=1), Counter(id=1)):
                connection.execute(type(made).__table__.insert().values(id=made.id))
            connection.execute(sl.Queue().put({"video": 1}, queue="video"))

    def start(self, number: int, call: str = "", fate: str = "", meeting: Any = None) -> Any:
        urls = {url: self.servers.url(engine, driver, self.database) for url, (engine, driver) in self.here().items()}
        party = Party((call or self.recipe.call).format(number=number), urls, self.diary, fate)
        process = FORKS.Process(target=recipes.play, args=(self.block, party, self.recipe.stubs, meeting))
        process.start()
        return process

    def here(self) -> dict[str, tuple[str, str]]:
        return {url: (engine, driver) for url, (engine, driver) in URLS.items() if engine == self.name}

    def end(self, *processes: Any, code: int = 0) -> None:
        for process in processes:
            process.join(PATIENCE)
            assert process.exitcode == code

    def done(self) -> dict[str, int]:
        """How often each function was finished; no two processes were in one at the same time, but maybe two threads."""
        inside, found = set[str](), Counts[str]()
        for entry in self.diary.read_text().splitlines():
            what, pid = entry.split()
            if what.startswith("+"):
                assert not inside - {pid}, self.diary.read_text()
                inside.add(pid)
            else:
                inside.discard(pid)
                found[what[1:]] += 1
        return dict(found)

    def value(self) -> Any:
        if self.recipe.value is None:
            return None
        with connected(self.url) as engine, engine.connect() as connection:
            return connection.scalar(self.recipe.value)


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return {}


@pytest.fixture
def stage(block: Block, servers: Servers, stages: dict[str, Stage]) -> Stage:
    """The database of the URL in a block."""
    (name,) = {engine for url, (engine, _) in URLS.items() if f'"{url}"' in block.text}
    if name not in stages:
        stages[name] = Stage(servers, name)
    return stages[name]


def shorter(block: Block) -> Block:
    return replace(block, text=re.sub("|".join(SHORTER), lambda match: SHORTER[match[0]], block.text))


@pytest.mark.parametrize(("block", "recipe"), TABS)
def test_recipe(block: Block, recipe: Recipe, stage: Stage, tmp_path: Path) -> None:
    stage.set(shorter(block), recipe, tmp_path)
    meeting = FORKS.Barrier(2)
    stage.end(*(stage.start(number, meeting=meeting) for number in (1, 2)))
    if recipe.then:
        stage.end(stage.start(3, recipe.then))
    assert stage.done() == recipe.done
    assert stage.value() in (None, recipe.values[0])
    if "MySQL" in block.tab:
        return  # the same code, and the same functions of the library

    stage.set(shorter(block), recipe, tmp_path)
    stage.end(stage.start(1, fate=f"killed in {recipe.killed_in}"), code=-signal.SIGKILL)
    stage.end(stage.start(2))
    if recipe.then:
        stage.end(stage.start(3, recipe.then))
    assert stage.done() == {**recipe.done_then, "killed": 1}
    assert stage.value() in (None, recipe.values[1])


@pytest.mark.parametrize(("block", "recipe"), [tab for tab in TABS if tab.id == "leader-election-PostgreSQL, async"])
def test_leader_that_is_stopped_is_replaced(block: Block, recipe: Recipe, stage: Stage, tmp_path: Path) -> None:
    stage.set(shorter(block), recipe, tmp_path)
    first = stage.start(1, fate="stopped in work")
    until(lambda: "stopped" in stage.diary.read_text())
    stage.end(stage.start(2))
    os.kill(first.pid, signal.SIGCONT)
    stage.end(first)
    assert stage.diary.read_text().endswith(f"lost {first.pid}\n")
    assert stage.value() == 4  # all of the second one's


@pytest.mark.parametrize("tab", blocks(RECIPES[0]), ids=lambda tab: tab.tab)
def test_alembic_upgrade_in_two_processes(tab: Block, servers: Servers, tmp_path: Path) -> None:
    """The lines are put into ``env.py`` as Alembic makes it."""
    awaited = "async" in tab.tab.split(", ")
    engine, driver = ("postgresql15", "asyncpg") if awaited else ("mysql", "pymysql")
    project = tmp_path / "1"
    project.mkdir()
    status, *output = main("alembic.config", project, "init", *(["-t", "async"] if awaited else []), "migrations")
    assert status == 0, output
    ini, env = project / "alembic.ini", project / "migrations" / "env.py"
    url = servers.fresh(engine, driver).replace("%", "%%")
    ini.write_text(ini.read_text().replace("driver://user:pass@localhost/dbname", url))
    import_, _, lines = tab.text.partition("\n\n")
    own = env.read_text()
    begins = "def do_run_migrations(" if awaited else "    with connectable.connect()"
    begin, end = own.index(begins), own.index("async def run_async" if awaited else "if context.is_offline_mode()")
    env.write_text(f"{import_}\n{own[:begin]}{indent(lines, '' if awaited else '    ')}\n\n{own[end:]}")
    (project / "migrations" / "versions" / "first.py").write_text(
        "import time\nfrom alembic import op\nrevision, down_revision = 'first', None\n\n\ndef upgrade():\n"
        "    op.execute('CREATE TABLE made (id INTEGER)')\n    time.sleep(0.2)\n"
    )
    folders = [project, Path(shutil.copytree(project, tmp_path / "2"))]
    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(lambda folder: main("alembic.config", folder, "upgrade", "head"), folders))
    assert [status for status, *_ in ended] == [0, 0], ended
    assert "".join(log for *_, log in ended).count("Running upgrade") == 1
