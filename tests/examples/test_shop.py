"""The example is what it says: its README's commands run it, and its own tests pass.

It is copied first, as a user would, and it runs in processes of its own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.examples.served import Server, commands, copied, done, running
from tests.fixtures.parties import PATIENCE

NAMES = ["O'Hara", '"; DROP TABLE customers; --', "<img src=x onerror=alert(1)>", "Zoë 🎉", "y" * 255]


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
