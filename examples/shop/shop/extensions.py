"""Extensions, shared by all modules and initialised by ``create_app``."""

from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from sqlalchemy_locks.integrations.flask import FlaskLocks


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
locks = FlaskLocks()
