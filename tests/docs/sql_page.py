"""docs/sql.md: the statements of every operation on every engine, made by executing each on a real server.

``python -m tests.docs.sql_page`` writes the page. A test compares it with what is executed.
"""

from __future__ import annotations

import inspect
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, Engine, String, Text, create_engine, event, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl
from tests import servers as real
from tests.conftest import PLAIN, Servers, install
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "sql.md"
ENGINES = {
    "postgresql15": "PostgreSQL",
    "yugabytedb": "YugabyteDB",
    "mysql": "MySQL",
    "mariadb": "MariaDB",
    "sqlite": "SQLite",
}
HEAD = """\
# The SQL of every operation

<!-- written by: python -m tests.docs.sql_page -->

This page is made from the code: each operation was executed in a transaction on each engine, and these are its
statements, in order. `:name` is a parameter. Engines with the same statements share a block. The statements that verify
the server's settings, once per engine of the app, are left out, and so is the first use of a new key.

What they are for: [locks](how-locks-work.md), [semaphores](how-semaphores-work.md), [mutexes, periods, captures,
jobs](how-rows-work.md).
"""
#: bodies of functions, by their files in alembic_templates/sql
FUNCTIONS = {
    "PostgreSQL": "advisory/exclusive.sql",
    "YugabyteDB": "yugabytedb/exclusive.sql",
    "PostgreSQL, locking=table": "table/exclusive.sql",
    "PostgreSQL and YugabyteDB: an acquire": "semaphore/semaphore_acquire.sql",
    "PostgreSQL and YugabyteDB: a release": "semaphore/semaphore_release.sql",
}


class Base(DeclarativeBase):
    pass


class Import(Base):
    __tablename__ = "imports"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    locked: Mapped[bool]
    version: Mapped[int] = mapped_column()
    __mapper_args__ = {"version_id_col": version}


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20))


class Document(Base):
    __tablename__ = "document"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    body: Mapped[str] = mapped_column(Text)
    fence: Mapped[int] = mapped_column(BigInteger)


_mutex, _timeout, _queue, _tasks = sl.Mutex(), sl.Timeout(), sl.Queue(), sl.StateTransition()
_hourly = sl.Timeout(every=3600, windowed=True)
_daily = sl.Timeout(every=86400, windowed=True, tz="Europe/Paris")
_order, _document, _import = Order, Document.__table__, Import
_own = sl.Mutex(_import, id=_import.name, acquired=_import.locked)
_write = update(_document).where(_document.c.id == 1).values(body="text")

#: operations as a caller writes them; functions are called with the names above
OPERATIONS: dict[str, dict[str, Any]] = {
    "Locks": {
        'lock.exclusive("a")': lambda: sl.lock.exclusive("a"),
        'lock.shared("a")': lambda: sl.lock.shared("a"),
        'lock.try_exclusive("a")': lambda: sl.lock.try_exclusive("a"),
        'lock.try_shared("a")': lambda: sl.lock.try_shared("a"),
        "lock.row(Order, 42)": lambda: sl.lock.row(_order, 42),
        'lock.unlock("a")': lambda: sl.lock.unlock("a"),
        "lock.vacuum()": lambda: sl.lock.vacuum(),
        'lock.create("a", "b")': lambda: sl.lock.create("a", "b"),
        'lock.holders("a")': lambda: sl.lock.holders("a"),
        'lock.session_exclusive("a")': lambda: sl.lock.session_exclusive("a"),
        'lock.session_unlock("a")': lambda: sl.lock.session_unlock("a"),
    },
    "Mutex": {
        'mutex.create("task_a")': lambda: _mutex.create("task_a"),
        'mutex.acquire("task_a")': lambda: _mutex.acquire("task_a"),
        'mutex.acquire("task_a", nowait=True)': lambda: _mutex.acquire("task_a", nowait=True),
        'mutex.acquire_token("task_a")': lambda: _mutex.acquire_token("task_a"),
        'mutex.release("task_a")': lambda: _mutex.release("task_a"),
        'mutex.release("task_a", owner="web-1")': lambda: _mutex.release("task_a", owner="web-1"),
        "mutex.capture(2)": lambda: _mutex.capture(2),
        "mutex.held()": lambda: _mutex.held(),
        'Mutex(Import, id=Import.name, acquired=Import.locked).acquire("task_a")': lambda: _own.acquire("task_a"),
    },
    "Timeout": {
        'Timeout(every=3600).create("task_a")': lambda: sl.Timeout(every=3600).create("task_a"),
        'timeout.acquire("task_a")': lambda: _timeout.acquire("task_a"),
        'Timeout(every=3600, windowed=True).acquire("task_a")': lambda: _hourly.acquire("task_a"),
        'Timeout(every=86400, windowed=True, tz="Europe/Paris").acquire("task_a")': lambda: _daily.acquire("task_a"),
    },
    "Semaphore": {
        'semaphore.create("slots", 10)': lambda: sl.semaphore.create("slots", 10),
        'semaphore.resize("slots", 12)': lambda: sl.semaphore.resize("slots", 12),
        # with a ttl, how many statements they are depends on the time that they take
        'semaphore.acquire({"slots": 1}, external_id="job-2")': lambda: sl.semaphore.acquire(
            {"slots": 1}, external_id="job-2"
        ),
        'semaphore.renew("job-1")': lambda: sl.semaphore.renew("job-1"),
        'semaphore.release("job-1")': lambda: sl.semaphore.release("job-1"),
        "semaphore.usage()": lambda: sl.semaphore.usage(),
        'semaphore.holders("slots")': lambda: sl.semaphore.holders("slots"),
        "semaphore.sweep()": lambda: sl.semaphore.sweep(),
        "semaphore.clean(older_than=86400)": lambda: sl.semaphore.clean(older_than=86400),
        'guarded(update(document)..., "job-1")': lambda: sl.guarded(_write, "job-1"),
    },
    "Fencing": {"fenced(update(document)..., document.c.fence, 7)": lambda: sl.fenced(_write, _document.c.fence, 7)},
    "Captures and state transitions": {
        'capture(Order, where=Order.status == "paid", values={"status": "shipping"}, order_by=Order.id, limit=10)': (
            lambda: sl.capture(
                _order, where=_order.status == "paid", values={"status": "shipping"}, order_by=_order.id, limit=10
            )
        ),
        "tasks.capture(3)": lambda: _tasks.capture(3),
        'tasks.set_status("task_a", "done", claim=1)': lambda: _tasks.set_status("task_a", "done", claim=1),
        "tasks.expire()": lambda: _tasks.expire(),
    },
    "Queue": {
        'queue.put({"to": "a@example.org"}, queue="mail")': lambda: _queue.put({"to": "a@example.org"}, queue="mail"),
        'queue.put({"product": 7}, queue="index", unique="product:7")': lambda: _queue.put(
            {"product": 7}, queue="index", unique="product:7"
        ),
        'queue.cancel("...")': lambda: _queue.cancel(UUID(int=1)),
        'queue.capture(10, queue="mail", host="web-1")': lambda: _queue.capture(10, queue="mail", host="web-1"),
        "queue.complete(jobs)": lambda: _queue.complete((1, 1)),
        'queue.fail(job, error="no route to host")': lambda: _queue.fail((1, 1), error="no route to host"),
        "queue.stats()": lambda: _queue.stats(),
    },
}


def prepare(url: str) -> Engine:
    """Return an engine for a database with the rows that the operations use."""
    install(url)
    style = {"paramstyle": "named"} if url.startswith("sqlite") else {}
    level = {} if url.startswith("sqlite") else {"isolation_level": "READ COMMITTED"}
    engine = create_engine(url, **style, **level)
    Base.metadata.create_all(engine)
    locks = sl.Locks(engine)
    for made in (
        _mutex.create("task_a", "task_b"),
        sl.Timeout(every=3600).create("task_a", "task_b"),
        _tasks.create("task_a"),
        sl.semaphore.create("slots", 10),
        sl.lock.create("a", "b"),
    ):
        locks.run(made)
    locks.acquire({"slots": 1}, external_id="job-1")
    with engine.begin() as connection:
        connection.execute(_order.__table__.insert().values(id=42, status="paid"))
        connection.execute(_document.insert().values(id=1, body="", fence=0))
        connection.execute(_import.__table__.insert().values(name="task_a", locked=False, version=1))
    return engine


def statements(engine: Engine, make: Any) -> str:
    """Return the statements of an operation, or the sentence that refuses it."""
    seen: list[str] = []

    def saw(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    for _ in range(2):  # the second time, without the statements that are executed once per engine
        seen.clear()
        with engine.connect() as connection:
            event.listen(engine, "before_cursor_execute", saw)
            try:
                connection.execute(make())
            except (sl.LockError, SQLAlchemyError) as refused:
                if not isinstance(refused, sl.LockError):
                    raise
                return f"-- {type(refused).__name__}: {str(refused).splitlines()[0]}"
            finally:
                event.remove(engine, "before_cursor_execute", saw)
                connection.rollback()
    # a second connection works in the database of the first, which it names
    return ";\n\n".join(legible(statement).replace(f"{engine.url.database}.", "") for statement in seen) + ";"


def legible(statement: str) -> str:
    """Return a statement with uniform parameters, without the casts that a driver needs."""
    statement = re.sub(r"%\((\w+)\)s", r":\1", statement)
    statement = re.sub(r"(:\w+)::[A-Z]+\b", r"\1", statement).replace("%%", "%")
    return re.sub(r"[ \t]+$", "", inspect.cleandoc(statement), flags=re.M)


def page(of: dict[str, dict[str, str]]) -> str:
    """Return the page, from each engine's statements by operation."""
    parts = [HEAD]
    for group, operations in OPERATIONS.items():
        parts.append(f"\n## {group}\n")
        for operation in operations:
            parts.append(f"\n### `{operation}`\n")
            alike: dict[str, list[str]] = {}
            for engine, name in ENGINES.items():
                alike.setdefault(of[engine][operation], []).append(name)
            for text, names in alike.items():
                parts.append(f'\n```sql title="{", ".join(names)}"\n{text}\n```\n')
    parts.append("\n## Functions\n")
    for title, file in FUNCTIONS.items():
        body = (ROOT / "alembic_templates" / "sql" / file).read_text()
        parts.append(f'\n```sql title="{title}, {file}"\n{body}```\n')
    return "".join(parts)


def plain(statement: str) -> str:
    """Return a statement without line breaks, as both versions of SQLAlchemy render it."""
    # SQLAlchemy 2.1 compares a boolean with 1, where 2.0 uses it as the condition
    statement = re.sub(r"('READ-UNCOMMITTED'\)|read_only = 0) = 1\b", r"\1", statement)
    return re.sub(r"\s+", " ", statement).strip()


def of_page(text: str, engine: str) -> dict[str, str]:
    """Return the statements of one engine, by operation, as a page shows them."""
    found: dict[str, str] = {}
    for section in text.partition("\n## Functions\n")[0].split("\n### `")[1:]:
        operation = section.partition("`\n")[0]
        for names, shown_ in re.findall(r'```sql title="(.*?)"\n(.*?)\n```', section, flags=re.S):
            if ENGINES[engine] in names.split(", "):
                found[operation] = shown_
    return found


def executed(engine: Engine) -> dict[str, str]:
    every = [pair for operations in OPERATIONS.values() for pair in operations.items()]
    return {operation: statements(engine, make) for operation, make in every}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="sqlalchemy-locks-sql-"))
    servers = Servers(folder)
    try:
        found = {}
        for name in ENGINES:
            engine = prepare(servers.fresh(name, PLAIN[name]))
            found[name] = executed(engine)
            engine.dispose()
        PAGE.write_text(page(found))
    finally:
        real.stop_all()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
