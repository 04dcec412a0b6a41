"""Export all orders as CSV. It is slow, so a semaphore with one permit allows one at a time in all processes.

A worker that dies doesn't release its permit: another gets it after ``EXPORT_TTL`` seconds without a renewal. If the
first one was only paused and continues, the row refuses its write, because it has stored a newer fence.
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
    # no waiting: FlaskLocks answers a full semaphore 429, with Retry-After
    ttl = current_app.config["EXPORT_TTL"]
    with locks.semaphore("exports", ttl=ttl, timeout=0, external_id=ident) as grant:
        body = orders_as_csv()
        db.session.rollback()  # no open transaction while waiting for the receiver
        send(body)
        # fenced needs a capacity of 1; with more, use sl.guarded(..., grant)
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
    """Escape text that a spreadsheet would interpret as a formula."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@")) else name


def send(body: str) -> None:
    """Send it to the configured URL, which may be slow."""
    if current_app.config["EXPORT_URL"] is not None:
        asked = urllib.request.Request(current_app.config["EXPORT_URL"], body.encode(), method="PUT")
        with urllib.request.urlopen(asked):
            pass
