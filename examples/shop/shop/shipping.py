"""``flask ship``: paid orders are taken, packed and sent, by as many shippers as you like, each order by one."""

import time

import click
from flask.cli import with_appcontext

import sqlalchemy_locks as sl

from .extensions import db
from .models import Order

#: a shipper that dies leaves orders behind in `shipping`; when their time has passed, they are `late`, and taken again
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
    """Send what was paid for."""
    while True:
        shipped = ship_some()
        if not forever and not shipped:
            return
        if not shipped:
            time.sleep(1)


def ship_some(at_most: int = 10) -> int:
    """Take some orders that nobody else is taking, and send them; how many were taken."""
    db.session.scalar(packing.expire())
    taken = [(order.id, order.claim) for order in db.session.scalars(packing.capture(at_most))]
    db.session.commit()  # from here on everybody sees that they are taken, and nobody waits for us
    for number, claim in taken:
        order = db.session.get_one(Order, number)
        label = label_for(order)
        db.session.rollback()
        # False when it took us so long that somebody else has it now: he sends it
        if db.session.scalar(packing.set_status(number, "shipped", claim=claim)):
            db.session.get_one(Order, number).label = label
            click.echo(f"order {number}: {label}")
        db.session.commit()
    return len(taken)


def label_for(order: Order) -> str:
    """What the carrier would be asked for: the same order gets the same label, however often it is asked."""
    return f"SHOP-{order.id:08d}"
