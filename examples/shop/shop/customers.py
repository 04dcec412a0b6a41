"""Customers. Two that register with one address at once become one: the address is locked."""

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
    # in db.session's own transaction: first the lock, then the look. commit() ends it, and so does whatever else ends
    # the request
    db.session.execute(sl.lock.exclusive(sl.lock.key("customer", email)))
    if db.session.scalar(select(Customer.id).where(Customer.email == email)) is None:
        db.session.add(Customer(name=name, email=email))
    db.session.commit()
    return redirect(url_for(".index"), 303)
