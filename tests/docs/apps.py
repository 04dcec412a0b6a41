"""The context of the integrations' examples: an app of their framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import date
from typing import Annotated, Any

import flask
import flask_sqlalchemy
from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy import event
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from sqlalchemy_locks.integrations import dashboard, fastapi, problem, starlette
from sqlalchemy_locks.integrations import flask as flask_locks

Names = dict[str, Any]
Around = Callable[[Names], AbstractContextManager[None]]


class Price(BaseModel):
    name: str


def exported(module: Any) -> Names:
    return {name: getattr(module, name) for name in module.__all__}


def nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def of_flask(around: Names) -> Iterator[None]:
    """An app without locks, while another app with locks is current."""
    current = flask.Flask("current")
    locks = flask_locks.FlaskLocks(current, around["engine"])
    around |= exported(flask_locks) | {"Flask": flask.Flask, "SQLAlchemy": flask_sqlalchemy.SQLAlchemy}
    around |= {
        "locks": locks,
        "event": event,
        "app": flask.Flask("app"),
        **dict.fromkeys(("charge", "wants_json", "page"), nothing),
    }
    with current.app_context():
        yield


@contextlib.contextmanager
def of_fastapi(around: Names) -> Iterator[None]:
    """An app, whose locks have names that its routes can make."""
    used = (Depends, FastAPI, Starlette, Request, Response, FileResponse, StreamingResponse, Price, date)
    around |= {each.__name__: each for each in used}
    around |= {"Annotated": Annotated, "asynccontextmanager": asynccontextmanager}
    around |= exported(starlette) | exported(fastapi)
    around |= {"app": FastAPI(), "locks": fastapi.StarletteLocks(around["async_engine"])}
    around |= {"routes": [], "in_our_way": fastapi.answer}
    yield


@contextlib.contextmanager
def of_the_page(around: Names) -> Iterator[None]:
    around |= {"dashboard": dashboard, "app": FastAPI()}
    yield


@contextlib.contextmanager
def of_the_page_in_flask(around: Names) -> Iterator[None]:
    around |= {"dashboard": dashboard, "app": flask.Flask("app")}
    yield


@contextlib.contextmanager
def of_any(around: Names) -> Iterator[None]:
    around |= exported(problem)
    yield


@contextlib.contextmanager
def of_none(around: Names) -> Iterator[None]:
    yield


#: by what a name begins with; the first that fits
_APPS: dict[str, Around] = {
    "flask.": of_flask,
    "fastapi.": of_fastapi,
    "starlette.": of_fastapi,
    "problem.": of_any,
    "dashboard.app.wsgi": of_the_page_in_flask,
    "dashboard.": of_the_page,
}


def around(name: str) -> Around:
    """Return the names that an example uses."""
    return next((found for prefix, found in _APPS.items() if name.startswith(prefix)), of_none)
