"""The guarantees of the shop, with concurrent requests."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from flask import Flask
from shop.extensions import db, locks
from shop.models import Customer, Export, Invoice, Order, Payment, Report
from shop.reports import make_report
from shop.shipping import packing, ship_some
from sqlalchemy import func, select, update

import sqlalchemy_locks as sl
from sqlalchemy_locks.health import examine

from .conftest import MIGRATIONS, PATIENCE

NAMES = [
    "O'Hara",
    '"; DROP TABLE customers; --',
    "<script>alert(1)</script>",
    "Zoë 🎉",
    "{{ 7 * 7 }}",
    "%s %(x)s :y",
    "x" * 255,
]


def at_once(number: int, app: Flask, call: Callable[[], Any]) -> list[Any]:
    """Call it in several threads, which start together."""
    begin = threading.Barrier(number)

    def called() -> Any:
        begin.wait(PATIENCE)
        with app.app_context():
            return call()

    with ThreadPoolExecutor(number) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(called) for _ in range(number)]]


def test_an_invoice_is_paid_once(app: Flask, invoice: int) -> None:
    def pay() -> int:
        return app.test_client().post(f"/invoices/{invoice}/pay").status_code

    assert at_once(6, app, pay) == [303] * 6
    with app.app_context():
        (payment,) = db.session.scalars(select(Payment).where(Payment.invoice_id == invoice))
        assert payment.amount == db.session.get_one(Invoice, invoice).amount
        assert db.session.get_one(Invoice, invoice).order.status == "paid"


def test_who_waits_too_long_is_told_to_come_again(app: Flask, invoice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(app.config, "PAY_TIMEOUT", 0)
    with app.app_context(), locks.exclusive(f"invoice:{invoice}"):
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(app.test_client().post, f"/invoices/{invoice}/pay").result(PATIENCE)
    assert (answer.status_code, answer.mimetype) == (423, "application/problem+json")
    assert int(answer.headers["Retry-After"]) >= 1
    assert app.test_client().post(f"/invoices/{invoice}/pay").status_code == 303


def test_what_is_not_there_cannot_be_paid(app: Flask) -> None:
    for number in (999999, 2**31, 10**30):
        assert app.test_client().get(f"/invoices/{number}").status_code == 404
        assert app.test_client().post(f"/invoices/{number}/pay").status_code == 404


def test_two_that_register_at_once_become_one(app: Flask) -> None:
    form = {"name": "Grace", "email": "Grace@example.org"}
    assert at_once(4, app, lambda: app.test_client().post("/customers", data=form).status_code) == [303] * 4
    with app.app_context():
        assert db.session.scalar(select(func.count()).where(Customer.email == "grace@example.org")) == 1


def paid(app: Flask, number: int) -> None:
    with app.app_context():
        db.session.execute(update(Order).where(Order.invoice.has(id=number)).values(status="paid"))
        db.session.commit()


def test_each_paid_order_is_sent_by_one(app: Flask, invoice: int) -> None:
    paid(app, invoice)
    app.test_cli_runner().invoke(args=["ship"])  # orders of other tests
    with app.app_context():
        customer = db.session.scalars(select(Customer)).first()
        db.session.add_all(
            [Order(customer=customer, item=f"cup {n}", status="paid", invoice=Invoice(amount=1)) for n in range(9)]
        )
        db.session.commit()
    assert sum(at_once(3, app, lambda: ship_some(3))) == 9
    with app.app_context():
        sent = db.session.scalars(select(Order).where(Order.item.like("cup %"))).all()
        assert {order.status for order in sent} == {"shipped"}
        assert len({order.label for order in sent}) == 9


def test_an_order_of_a_shipper_that_died_is_sent_by_another(app: Flask, invoice: int) -> None:
    paid(app, invoice)
    with app.app_context():
        taken = db.session.scalars(packing.capture(1000)).all()
        dead = {order.id: order.claim for order in taken}
        db.session.commit()
        assert app.test_cli_runner().invoke(args=["ship"]).output == ""  # captured by the other one
        long_ago = timedelta(hours=1)
        for order in db.session.scalars(select(Order).where(Order.id.in_(dead))):
            order.updated_at -= long_ago
        db.session.commit()
        assert f"order {min(dead)}: SHOP-{min(dead):08d}" in app.test_cli_runner().invoke(args=["ship"]).output
        # the first one, if it was only slow, can't change the order
        assert not db.session.scalar(packing.set_status(min(dead), "paid", claim=dead[min(dead)]))
        db.session.rollback()


def test_the_report_of_a_day_is_made_once(app: Flask) -> None:
    made = at_once(4, app, lambda: make_report() is not None)
    assert sorted(made) == [False, False, False, True]
    assert app.test_cli_runner().invoke(args=["report"]).output == "it was made before\n"
    with app.app_context():
        assert db.session.scalar(select(func.count(Report.id))) == 1
    assert "None yet" not in app.test_client().get("/reports").text


def test_one_export_at_a_time(app: Flask, invoice: int) -> None:
    client = app.test_client()
    with app.app_context(), locks.semaphore("exports", ttl=3600):
        answer = client.post("/exports/")
        assert (answer.status_code, answer.mimetype) == (429, "application/problem+json")
        assert int(answer.headers["Retry-After"]) >= 1
    assert client.post("/exports/").status_code == 303
    with app.app_context():
        fence = db.session.get_one(Export, "orders").fence
        late = update(Export).values(body="of one that was stopped for too long")
        with pytest.raises(sl.StaleToken):
            db.session.scalar(sl.fenced(late, Export.fence, fence - 1))
        db.session.rollback()
    lines = list(csv.reader(io.StringIO(client.get("/exports/orders.csv").text)))
    assert [line for line in lines if line[0] != "order" and line[2] == "tea"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(app: Flask, name: str) -> None:
    client = app.test_client()
    address = f"{name[:200]}@example.org".lower()
    assert client.post("/customers", data={"name": name, "email": address}).status_code == 303
    with app.app_context():
        number = db.session.scalar(select(Customer.id).where(Customer.email == address))
        assert db.session.get_one(Customer, number).name == name
    answer = client.post("/orders", data={"customer": number, "item": name, "price": "1.00"}, follow_redirects=True)
    assert answer.status_code == 200
    for page in ("/customers", "/", answer.request.path):
        shown = client.get(page).text
        assert "<script>alert" not in shown
        assert "49" not in shown or "{{" not in name
    assert client.post("/exports/").status_code == 303
    assert name in [line[2] for line in csv.reader(io.StringIO(client.get("/exports/orders.csv").text, newline=""))]


@pytest.mark.parametrize("name", ["", "   ", "x" * 256, "two\nlines", "a\0b"])
def test_names_that_are_refused(app: Flask, name: str) -> None:
    client = app.test_client()
    assert client.post("/customers", data={"name": name, "email": "a@example.org"}).status_code == 400
    assert client.post("/customers", data={"name": "a", "email": name}).status_code == 400
    assert client.post("/orders", data={"customer": "1", "item": name, "price": "1"}).status_code == 400


@pytest.mark.parametrize("price", ["", "x", "0", "-1", "1.234", "NaN", "Infinity", "1e9"])
def test_prices_that_are_refused(app: Flask, price: str) -> None:
    assert app.test_client().post("/orders", data={"customer": "1", "item": "tea", "price": price}).status_code == 400


def test_the_history_and_the_models_agree(app: Flask) -> None:
    done = app.test_cli_runner().invoke(args=["db", "check", "-d", MIGRATIONS])
    assert done.exit_code == 0, done.output
    with app.app_context(), db.engine.connect() as connection:
        assert [finding for finding in examine(connection) if finding.level == "problem"] == []


def test_the_page_shows_what_is_held_and_changes_nothing(app: Flask) -> None:
    with app.app_context(), locks.semaphore("exports", ttl=3600) as grant:
        shown = app.test_client().get("/locks/")
        assert shown.status_code == 200
        assert ">exports<" in shown.text
        assert grant.external_id in shown.text
        released = app.test_client().post("/locks/release", data={"external_id": grant.external_id})
        assert released.status_code == 404
        grant.check()


@pytest.mark.parametrize("customer", ["", "a", "-1", "1.5", str(2**31), "9" * 30])
def test_what_is_no_customer(app: Flask, customer: str) -> None:
    answer = app.test_client().post("/orders", data={"customer": customer, "item": "tea", "price": "1"})
    assert answer.status_code == 400
