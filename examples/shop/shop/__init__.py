"""A shop: customers order, pay once, and receive their order."""

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
    """Make an app on ``DATABASE_URL``, by default a file in ``instance/``."""
    app = Flask(__name__, instance_path=str(Path(__file__).parents[1] / "instance"))
    app.config.update(
        SQLALCHEMY_DATABASE_URI=os.environ.get("DATABASE_URL", "sqlite:///shop.db"),
        # sweeps and clean-ups, in the processes that serve
        SQLALCHEMY_LOCKS_MAINTENANCE=True,
        # seconds that a payment waits for another of the same invoice
        PAY_TIMEOUT=5,
        # where finished exports are sent, by PUT; by default they are only stored
        EXPORT_URL=None,
        # seconds after which another process may replace a dead worker's export
        EXPORT_TTL=30,
        # the time zone of the report's days
        TIMEZONE="Europe/Paris",
    )
    app.config.from_prefixed_env("SHOP")
    app.config.update(config or {})
    db.init_app(app)
    # include_name: `flask db migrate` must not drop the tables of the locks
    migrate.init_app(app, db, include_name=include_name, transaction_per_migration=True)
    locks.init_app(app)
    for module in (customers, orders, exports, reports):
        app.register_blueprint(module.pages)
    app.cli.add_command(shipping.ship)
    app.cli.add_command(reports.report)
    # read-only, and open to everyone; decorators of views don't protect it, because it is mounted beside the app
    page = dashboard.wsgi(lambda: app.extensions["sqlalchemy_locks"].locks, view=lambda request: True)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/locks": page})  # type: ignore[method-assign]
    return app
