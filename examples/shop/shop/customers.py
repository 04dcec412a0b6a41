"""Customers. The address is locked, so concurrent registrations with it make one customer."""

from flask import Blueprint, Response, redirect, render_template, url_for
from sqlalchemy import select

import sqlalchemy_locks as sl

from .extensions import db
from .forms import text
from .models import Customer

pages = Blueprint("customers", __name__)


@pages.get("/customers")
def index() -> str:
    return render_template("customers.html", customers=db.session.scalars(select(Customer).order_by(Customer.id)))


@pages.post("/customers")
def create() -> Response:
    name, email = text("name"), text("email").lower()
    # in db.session's own transaction: lock before reading. It ends with commit(), or with the request
    db.session.execute(sl.lock.exclusive(sl.lock.key("customer", email)))
    if db.session.scalar(select(Customer.id).where(Customer.email == email)) is None:
        db.session.add(Customer(name=name, email=email))
    db.session.commit()
    return redirect(url_for(".index"), 303)
