"""A migrated database: a file, or ``DATABASE_URL``, which must be empty."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

import flask_migrate
import pytest
from flask import Flask
from shop import create_app
from shop.extensions import db
from shop.models import Customer, Invoice, Order
from sqlalchemy import inspect

MIGRATIONS = str(Path(__file__).parents[1] / "migrations")
#: what ends a test that hangs, in seconds
PATIENCE = 240
_numbers = itertools.count(1)


def noon() -> str:
    """Return a zone in which it is about noon, so that no test runs across midnight."""
    return f"Etc/GMT{datetime.now(timezone.utc).hour - 12:+d}"


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    file = tmp_path_factory.mktemp("database") / "shop.db"
    app = create_app(
        {
            "TESTING": True,
            # SQLite's writers don't queue: on a busy machine one may wait long
            "SQLALCHEMY_DATABASE_URI": os.environ.get("DATABASE_URL") or f"sqlite:///{file}?timeout=120",
            "SQLALCHEMY_LOCKS_MAINTENANCE": False,
            "PAY_TIMEOUT": PATIENCE,
            "EXPORT_TTL": 3600,
            "TIMEZONE": noon(),
        }
    )
    with app.app_context():
        if set(inspect(db.engine).get_table_names()) - {"alembic_version"}:
            pytest.exit("DATABASE_URL has to lead to an empty database: the tests install everything, and remove it")
        flask_migrate.upgrade(MIGRATIONS)
    yield app
    with app.app_context():
        flask_migrate.downgrade(MIGRATIONS, revision="base")
        db.engine.dispose()


@pytest.fixture
def invoice(app: Flask) -> int:
    """Return the number of an unpaid invoice."""
    with app.app_context():
        customer = Customer(name="Ada", email=f"ada{next(_numbers)}@example.org")
        invoice = Invoice(amount=Decimal("19.90"))
        db.session.add(Order(customer=customer, item="tea", invoice=invoice))
        db.session.commit()
        return invoice.id
