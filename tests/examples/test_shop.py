"""The example is what it says: its README's commands run it, its own tests pass, and a worker that dies loses nothing.

It is copied first, as a user would, and it runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import BigInteger, String, Text, create_engine, select, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from tests.conftest import PLAIN, Servers
from tests.examples.served import EXAMPLES, Server, commands, copied, done, running
from tests.fixtures.parties import PATIENCE, later, until
from tests.fixtures.semaphores import expire_in

EXAMPLE = EXAMPLES / "shop"
NAMES = ["O'Hara", '"; DROP TABLE customers; --', "<img src=x onerror=alert(1)>", "Zoë 🎉", "y" * 255]


class Base(DeclarativeBase):
    pass


class Export(Base):
    """The shop's configuration."""

    __tablename__ = "exports"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    body: Mapped[str] = mapped_column(Text)
    by: Mapped[str] = mapped_column(String(255))
    fence: Mapped[int] = mapped_column(BigInteger)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied("shop", tmp_path)


def set_up_and_serve(folder: Path) -> tuple[str, str]:
    """Return the README's two commands: set-up, without pip, and server."""
    first, second = commands(folder)
    install, make = first.split(" && ")
    # of the checkout, and not of whatever an index has
    assert install == "pip install -e '../..[flask,dashboard]' -r requirements.txt"
    return make, second


def test_imports_match_requirements() -> None:
    wanted = (EXAMPLE / "requirements.txt").read_text()
    for module in ("flask_migrate", "flask_sqlalchemy", "gunicorn", "psycopg", "sqlalchemy_locks"):
        assert module.replace("_", "-") in wanted


def test_own_tests_pass(folder: Path) -> None:
    assert " passed" in done("python -m pytest -q -W error", folder)


def test_readme_commands_run(folder: Path) -> None:
    make, serve = set_up_and_serve(folder)
    done(make, folder)
    assert (folder / "instance" / "shop.db").is_file()
    with running(f"{serve} --port 0", folder) as server, opened(server) as client:
        customers(client)
        for name in NAMES:
            ordered = client.post("/orders", data={"customer": "1", "item": name, "price": "19.90"})
            assert ordered.status_code == 303, ordered.text
        paid_at_once(client)
        assert "order 1: SHOP-00000001" in done("flask ship", folder)
        assert "SHOP-00000001" in client.get("/").text
        assert done("flask report", folder).startswith("1 orders, 19.9")
        assert client.get("/reports").text.count("19.9") == 1
        assert client.post("/exports/").status_code == 303
        exported = client.get("/exports/orders.csv").text
        assert exported.count("shipped") == 1
        for name in NAMES:
            assert name.replace('"', '""') in exported
        shown = client.get("/").text + client.get("/customers").text
        assert "<img" not in shown
        assert "&lt;img src=x onerror=alert(1)&gt;" in shown
        assert "Zoë 🎉" in shown
        assert client.get("/invoices/77").status_code == 404
        assert ">exports<" in client.get("/locks/").text


def opened(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.address(), timeout=PATIENCE)


def customers(client: httpx.Client) -> None:
    for number, name in enumerate(NAMES):
        answer = client.post("/customers", data={"name": name, "email": f"{number}{name[:200]}@example.org"})
        assert answer.status_code == 303, answer.text
    for name in ("", "z" * 256, "a\0b"):
        assert client.post("/customers", data={"name": name, "email": "z@example.org"}).status_code == 400
        assert client.post("/customers", data={"name": "z", "email": name}).status_code == 400


def paid_at_once(client: httpx.Client) -> None:
    """Repeat requests that were answered 423 or 429, until all are answered."""
    together = threading.Barrier(4)

    def pay() -> int:
        together.wait(PATIENCE)
        while (answer := client.post("/invoices/1/pay")).status_code == 423:
            assert int(answer.headers["Retry-After"]) >= 1
        return answer.status_code

    with ThreadPoolExecutor(4) as pool:
        assert [each.result(PATIENCE) for each in [pool.submit(pay) for _ in range(4)]] == [303] * 4
    # its head, and the one payment
    assert client.get("/invoices/1").text.count("<tr>") == 2


class Storage(http.server.ThreadingHTTPServer):
    """A receiver of exports that never answers the first one, and accepts later ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Takes)
        self.asked, self.over = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/orders.csv"

    def __enter__(self) -> Storage:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class _Takes(http.server.BaseHTTPRequestHandler):
    server: Storage

    def do_PUT(self) -> None:
        first = not self.server.asked.is_set()
        self.server.asked.set()
        if first:
            self.server.over.wait(PATIENCE)
            return
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_permit_of_a_killed_worker_is_released(servers: Servers, folder: Path) -> None:
    url = servers.fresh("postgresql15", PLAIN["postgresql15"])
    done(set_up_and_serve(folder)[0], folder, DATABASE_URL=url)
    engine = create_engine(url, poolclass=NullPool)
    locks = sl.Locks(engine)
    serve = "gunicorn --preload --workers 2 --threads 2 --timeout 3600 --bind 127.0.0.1:0 --no-control-socket wsgi:app"
    with contextlib.ExitStack() as stack:
        storage = stack.enter_context(Storage())
        changes = {"DATABASE_URL": url, "SHOP_EXPORT_URL": storage.url, "SHOP_EXPORT_TTL": "3600"}
        server = stack.enter_context(running(serve, folder, **changes))
        client = stack.enter_context(opened(server))
        with opened(server) as doomed:
            asked = later(doomed.post, "/exports/", headers={"Idempotency-Key": "the dead one's"})
            until(storage.asked.is_set, unless=asked)  # it holds the permit, and is in the middle
            (dead,) = locks.run(sl.semaphore.holders("exports"))
            os.kill(int(dead.owner.split(":")[1]), signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                asked.result(PATIENCE)
        refused = client.post("/exports/")
        assert (refused.status_code, refused.headers["Content-Type"]) == (429, "application/problem+json")
        assert int(refused.headers["Retry-After"]) >= 1
        expire_in(engine, dead)  # its hour has ended
        assert client.post("/exports/").status_code == 303
        assert late_writes(engine, dead) == ["StaleToken", "LockLost"]
        with Session(engine) as session:
            (export,) = session.scalars(select(Export))
            assert export.body.startswith("order,customer")
            assert export.fence > dead.fence
            assert export.by != dead.owner


def late_writes(engine: Any, dead: Any) -> list[str]:
    """Execute the writes that the killed worker would have made."""
    write = update(Export).values(body="too late")
    refused = []
    for late in (
        sl.fenced(write, Export.fence, dead.fence),
        sl.guarded(write, dead.external_id),
    ):
        with Session(engine) as session:
            try:
                session.scalar(late)
            except sl.LockError as error:
                refused.append(type(error).__name__)
            session.rollback()
    return refused
