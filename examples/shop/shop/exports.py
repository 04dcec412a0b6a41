"""All orders as CSV. It takes long, and one is made at a time in the whole fleet: a semaphore has one permit.

A worker that dies gives nothing back: its permit is another's when it wasn't renewed for ``EXPORT_TTL`` seconds. One
that was only stopped goes on some day; what it would write then is refused by the row, which has seen a newer fence.
"""

import csv
import io
import urllib.request

from flask import Blueprint, Response, abort, current_app, redirect, render_template, request, url_for
from sqlalchemy import select, update

import sqlalchemy_locks as sl

from .extensions import db, locks
from .models import Export, Order

pages = Blueprint("exports", __name__, url_prefix="/exports")
NAME = "orders"


@pages.get("/")
def index() -> str:
    return render_template("exports.html", export=db.session.get(Export, NAME))


@pages.get("/orders.csv")
def download() -> Response:
    export = db.get_or_404(Export, NAME)
    return Response(export.body, mimetype="text/csv")


@pages.post("/")
def create() -> Response:
    ident = request.headers.get("Idempotency-Key")
    if ident is not None and not 0 < len(ident) <= 200:
        abort(400, "Idempotency-Key: 1 to 200 characters, please.")
    # nobody waits here: who finds no room is told so, by FlaskLocks: 429, with Retry-After
    ttl = current_app.config["EXPORT_TTL"]
    with locks.semaphore("exports", ttl=ttl, timeout=0, external_id=ident) as grant:
        body = orders_as_csv()
        db.session.rollback()  # no transaction is open while somebody else is waited for
        send(body)
        # a capacity of 1: with more of them it would be sl.guarded(..., grant)
        write = update(Export).where(Export.name == NAME).values(body=body, by=locks.owner)
        db.session.scalar(sl.fenced(write, Export.fence, grant.fence["exports"]))
        db.session.commit()
    return redirect(url_for(".index"), 303)


def orders_as_csv() -> str:
    written = io.StringIO()
    lines = csv.writer(written)
    lines.writerow(["order", "customer", "item", "status", "amount"])
    for order in db.session.scalars(select(Order).order_by(Order.id)):
        lines.writerow([order.id, cell(order.customer.name), cell(order.item), order.status, order.invoice.amount])
    return written.getvalue()


def cell(name: str) -> str:
    """What begins like a formula would be one in a spreadsheet."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def send(body: str) -> None:
    """To where the config says, which may take its time."""
    if current_app.config["EXPORT_URL"] is not None:
        asked = urllib.request.Request(current_app.config["EXPORT_URL"], body.encode(), method="PUT")
        with urllib.request.urlopen(asked):
            pass
