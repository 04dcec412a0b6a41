"""``flask ship``: capture, pack and send paid orders, each by one of any number of shippers."""

import time

import click
from flask.cli import with_appcontext

import sqlalchemy_locks as sl

from .extensions import db
from .models import Order

#: orders of a dead shipper stay in `shipping`; after the timeout they are `late`, and are captured again
packing = sl.StateTransition(
    Order,
    id=Order.id,
    status=Order.status,
    ready=("paid", "late"),
    captured="shipping",
    timed_out="late",
    order_by=Order.id,
    claim=Order.claim,
    updated_at=Order.updated_at,
    timeout=Order.timeout,
)


@click.command()
@click.option("--forever", is_flag=True, help="Go on, and look for new ones every second.")
@with_appcontext
def ship(forever: bool) -> None:
    """Send paid orders."""
    while True:
        shipped = ship_some()
        if not forever and not shipped:
            return
        if not shipped:
            time.sleep(1)


def ship_some(at_most: int = 10) -> int:
    """Capture some orders and send them; return how many."""
    db.session.scalar(packing.expire())
    taken = [(order.id, order.claim) for order in db.session.scalars(packing.capture(at_most))]
    db.session.commit()  # other shippers now see the claims, and don't wait for this transaction
    for number, claim in taken:
        order = db.session.get_one(Order, number)
        label = label_for(order)
        db.session.rollback()
        # False after the timeout, when another shipper has captured it
        if db.session.scalar(packing.set_status(number, "shipped", claim=claim)):
            db.session.get_one(Order, number).label = label
            click.echo(f"order {number}: {label}")
        db.session.commit()
    return len(taken)


def label_for(order: Order) -> str:
    """Request a label from the carrier: repeated requests for an order get the same one."""
    return f"SHOP-{order.id:08d}"
