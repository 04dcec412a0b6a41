"""What every module shares. None of it belongs to an app before ``create_app`` says so."""

from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from sqlalchemy_locks.integrations.flask import FlaskLocks


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
locks = FlaskLocks()
