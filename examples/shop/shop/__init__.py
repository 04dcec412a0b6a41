"""A shop: customers order, pay once, and are sent what they paid for."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flask import Flask
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from sqlalchemy_locks.alembic import include_name
from sqlalchemy_locks.integrations import dashboard

from . import customers, exports, orders, reports, shipping
from .extensions import db, locks, migrate


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """An app of its own; ``DATABASE_URL`` names its database, which is a file in ``instance/`` without one."""
    app = Flask(__name__, instance_path=str(Path(__file__).parents[1] / "instance"))
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ.get("DATABASE_URL", "sqlite:///shop.db"),
        # sweeps and clean-ups, in the processes that serve; a fleet does each once
        SQLALCHEMY_LOCKS_MAINTENANCE=True,
        # so many seconds a payment waits for another of the same invoice
        PAY_TIMEOUT=5,
        # where finished exports are sent, by PUT; kept in the database only, without it
        EXPORT_URL=None,
        # so many seconds after a worker was last heard of, another may have its export
        EXPORT_TTL=30,
        # whose days the report is about
        TIMEZONE="Europe/Paris",
    )
    app.config.from_prefixed_env("SHOP")
    app.config.update(config or {})
    db.init_app(app)
    # include_name: `flask db migrate` is not to drop what belongs to the locks
    migrate.init_app(app, db, include_name=include_name, transaction_per_migration=True)
    locks.init_app(app)
    for module in (customers, orders, exports, reports):
        app.register_blueprint(module.pages)
    app.cli.add_command(shipping.ship)
    app.cli.add_command(reports.report)
    # what is held now, to look at and not to change; no view guards it, since it is beside the app's own routes
    page = dashboard.wsgi(lambda: app.extensions["sqlalchemy_locks"].locks)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/locks": page})  # type: ignore[method-assign]
    return app
