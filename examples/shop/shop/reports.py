"""The report of a day, made once, although cron runs it on every machine."""

from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import click
from flask import Blueprint, current_app, render_template
from flask.cli import with_appcontext
from sqlalchemy import func, select

import sqlalchemy_locks as sl

from .extensions import db
from .models import Payment, Report

pages = Blueprint("reports", __name__)


@cache
def nightly(zone: str) -> sl.Timeout:
    """Return a timeout of one calendar day in the shop's time zone."""
    return sl.Timeout(every=timedelta(days=1), windowed=True, tz=zone)


@click.command()
@with_appcontext
def report() -> None:
    """Make today's report, unless it exists: for cron, every hour, on every machine."""
    made = make_report()
    click.echo("it was made before" if made is None else f"{made.orders} orders, {made.revenue}")


def make_report() -> Report | None:
    """Return the report, or ``None`` if it was made before.

    The timeout is acquired in the transaction that stores the report: if that fails, both are rolled back.
    """
    turn = nightly(current_app.config["TIMEZONE"])
    db.session.scalar(turn.create("nightly-report"))
    if not db.session.scalar(turn.acquire("nightly-report")):
        db.session.rollback()
        return None
    orders, revenue = db.session.execute(
        select(func.count(Payment.invoice_id.distinct()), func.coalesce(func.sum(Payment.amount), 0))
    ).one()
    today = datetime.now(ZoneInfo(current_app.config["TIMEZONE"])).date()
    made = Report(day=today, orders=orders, revenue=revenue)
    db.session.add(made)
    db.session.commit()
    return made


@pages.get("/reports")
def index() -> str:
    return render_template("reports.html", reports=db.session.scalars(select(Report).order_by(Report.id.desc())))
