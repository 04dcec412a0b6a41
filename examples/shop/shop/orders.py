"""Orders and their invoices. An invoice is paid under its lock, so concurrent requests pay it once."""

from flask import Blueprint, Response, abort, current_app, redirect, render_template, url_for
from sqlalchemy import select

from .extensions import db, locks
from .forms import GREATEST, money, number, text
from .models import Customer, Invoice, Order, Payment

pages = Blueprint("orders", __name__)
ONE = f"/invoices/<int(max={GREATEST}):number>"


@pages.get("/")
def index() -> str:
    orders = db.session.scalars(select(Order).order_by(Order.id.desc()).limit(100)).all()
    customers = db.session.scalars(select(Customer).order_by(Customer.name)).all()
    return render_template("orders.html", orders=orders, customers=customers)


@pages.post("/orders")
def create() -> Response:
    item, price = text("item"), money("price")
    customer = db.get_or_404(Customer, number("customer"))
    order = Order(customer=customer, item=item, invoice=Invoice(amount=price))
    db.session.add(order)
    db.session.commit()
    return redirect(url_for(".show", number=order.invoice.id), 303)


@pages.get(ONE)
def show(number: int) -> str:
    return render_template("invoice.html", invoice=db.get_or_404(Invoice, number))


@pages.post(f"{ONE}/pay")
def pay(number: int) -> Response:
    # FlaskLocks answers a timeout 423, with Retry-After
    with locks.exclusive(f"invoice:{number}", timeout=current_app.config["PAY_TIMEOUT"]) as held:
        # in the transaction that holds the lock, which sees all earlier payments
        session = held.session
        invoice = session.get(Invoice, number) or abort(404)
        due = invoice.amount - invoice.paid
        if due > 0:
            session.add(Payment(invoice_id=number, amount=due))
            invoice.order.status = "paid"
    return redirect(url_for(".show", number=number), 303)
