"""Locks in a Flask app (extra ``flask``): on the engine of its Flask-SQLAlchemy, or on a given engine.

- Locks are taken in the database of the current app, also in a process with several apps.
- A timeout, and other errors of this library, are answered as problem+json (``problem.py`` chooses the status).
- Maintenance runs once in each process that serves, never in one that only forks others.
- A fork begins with a pool of its own, so that no two processes share a connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from sqlalchemy_locks.integrations import missing

try:
    from flask import Flask, Response, current_app, request_started
except ModuleNotFoundError as error:
    raise missing("flask", error) from error

from sqlalchemy_locks._forks import in_forked_child, replace_pool
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import Maintenance
from sqlalchemy_locks.integrations.problem import problem_of

if TYPE_CHECKING:
    from sqlalchemy.orm import sessionmaker

    # for type checkers it has all methods of Locks; at run time __getattr__ forwards them
    _Forwarding = Locks
else:
    _Forwarding = object

__all__ = ["FlaskLocks", "answer"]

KEY = "sqlalchemy_locks"
#: how long an app that ends waits for running maintenance, in seconds
_END_TIMEOUT = 10.0
_log = logging.getLogger("sqlalchemy_locks")
#: the apps whose pools a fork has to replace
_states: weakref.WeakSet[AppState] = weakref.WeakSet()


class FlaskLocks(_Forwarding):
    """The extension: ``Locks`` for each app that it is initialised with.

    In an app context it has all methods of the current app's ``Locks``; outside of one they raise ``RuntimeError``.

    :param app: the app, if it exists already; otherwise call :meth:`init_app`.
    :param engine: as for :meth:`init_app`; the default for every app.

    >>> db, locks = SQLAlchemy(), FlaskLocks()
    >>> def create_app() -> Flask:
    ...     app = Flask(__name__)
    ...     db.init_app(app)
    ...     locks.init_app(app)
    ...     return app
    >>> @app.post("/invoices/<int:number>/pay")
    ... def pay(number: int) -> str:
    ...     with locks.exclusive(f"invoice:{number}", timeout=2) as held:
    ...         return charge(held.session, number)
    """

    def __init__(self, app: Flask | None = None, engine: Engine | sessionmaker[Any] | None = None) -> None:
        self._default_engine = engine
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, engine: Engine | sessionmaker[Any] | None = None) -> None:
        """Add locks to an app, before or after Flask-SQLAlchemy is initialised, but after the configuration is set.

        :param engine: without Flask-SQLAlchemy, an ``Engine``, or a ``sessionmaker`` bound to one.
        :raises RuntimeError: when the app has locks already.

        It reads:

        - ``SQLALCHEMY_LOCKS_BIND``: the key in ``SQLALCHEMY_BINDS`` of the database that has the locks; by default the
          app's main database.
        - ``SQLALCHEMY_LOCKS_ERRORS``: answer a ``LockError`` that no view has caught with :func:`answer`; by default
          ``True``. A handler of the app for it, or for one of its subclasses, takes precedence.
        - ``SQLALCHEMY_LOCKS_MAINTENANCE``: run ``locks.maintenance()`` in each process that serves, from its first
          request on; by default ``False``.

        >>> locks = FlaskLocks()
        >>> locks.init_app(app, engine)
        """
        if KEY in app.extensions:
            raise RuntimeError(f"the app {app.name!r} has locks already")
        app.config.setdefault("SQLALCHEMY_LOCKS_BIND", None)
        app.config.setdefault("SQLALCHEMY_LOCKS_ERRORS", True)
        app.config.setdefault("SQLALCHEMY_LOCKS_MAINTENANCE", False)
        state = app.extensions[KEY] = AppState(app, self._default_engine if engine is None else engine)
        if app.config["SQLALCHEMY_LOCKS_ERRORS"] and LockError not in app.error_handler_spec[None][None]:
            app.register_error_handler(LockError, answer)
        if app.config["SQLALCHEMY_LOCKS_MAINTENANCE"]:
            # a signal: another before_request function could answer first
            request_started.connect(state.on_request, app)

    @property
    def current(self) -> Locks:
        """The ``Locks`` of the current app: use these outside of the app context, and to listen to events.

        >>> event.listen(locks.current, "lost", alarm)
        """
        state = current_app.extensions.get(KEY)
        if not isinstance(state, AppState):
            raise RuntimeError(
                f"the app {current_app.name!r} has no locks: call init_app(app) of FlaskLocks in its set-up"
            )
        return state.locks

    def __getattr__(self, name: str) -> Any:
        if name == "dispatch":
            raise RuntimeError("events are the app's: listen to locks.current in its context, or to the class sl.Locks")
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.current, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of the current app>"


class AppState:
    """The state of an app, in ``app.extensions["sqlalchemy_locks"]``."""

    def __init__(self, app: Flask, engine: Engine | sessionmaker[Any] | None) -> None:
        self._app = weakref.ref(app)
        self._bind = engine
        self._locks: dict[str, Locks] = {}
        #: by process, the marker of the request that has started its maintenance
        self._maintained: dict[int, object] = {}
        _states.add(self)

    @property
    def locks(self) -> Locks:
        """The app's ``Locks``, made on first use."""
        # setdefault instead of a mutex, which another thread could hold when this process forks
        return self._locks.get("locks") or self._locks.setdefault("locks", self._make())

    def _make(self) -> Locks:
        if self._bind is not None:
            return Locks(self._bind)
        app = self._app()
        assert app is not None
        db = app.extensions.get("sqlalchemy")
        if db is None:
            raise RuntimeError(
                f"the app {app.name!r} has no Flask-SQLAlchemy: initialise it, or give an engine, init_app(app, engine)"
            )
        # Flask-SQLAlchemy finds its engines by the current app
        is_current = current_app and current_app._get_current_object() is app  # type: ignore[attr-defined]
        with contextlib.nullcontext() if is_current else app.app_context():
            bind = app.config["SQLALCHEMY_LOCKS_BIND"]
            engine: Engine | None = db.engine if bind is None else db.engines.get(bind)
            if engine is None:
                raise RuntimeError(f"SQLALCHEMY_LOCKS_BIND is {bind!r}, and there is no such key in SQLALCHEMY_BINDS")
            return Locks(_session_maker(db, engine))

    def on_request(self, sender: Flask, **_: Any) -> None:
        """Start maintenance at the first request of a process: this is a process that serves."""
        marker = object()
        if self._maintained.setdefault(os.getpid(), marker) is not marker:
            return
        try:
            maintenance = self.locks.maintenance()
            maintenance.__enter__()
        except Exception:
            _log.exception("the maintenance of the app %r could not be started", sender.name)
            return
        # when the process or the app ends; the finalizer must not reference the app
        weakref.finalize(sender, _end_maintenance, maintenance, os.getpid())


def _end_maintenance(maintenance: Maintenance, process: int) -> None:
    if os.getpid() == process:  # not in a fork, which has no such thread
        maintenance.end(_END_TIMEOUT)


def _session_maker(db: Any, engine: Engine) -> Engine | sessionmaker[Any]:
    """Return a maker of sessions like ``db.session``: of its class, with its options."""
    from sqlalchemy.orm import scoped_session, sessionmaker

    factory = db.session.session_factory if isinstance(db.session, scoped_session) else None
    if not isinstance(factory, sessionmaker):
        return engine
    options = {name: value for name, value in factory.kw.items() if name not in ("bind", "binds")}
    return sessionmaker(engine, class_=factory.class_, **options)


@in_forked_child
def _replace_pools() -> None:
    """Replace the pools in a new process, also if the parent has used an engine only without its locks."""
    for state in list(_states):
        with contextlib.suppress(Exception):  # an app without an engine gets that error when it uses its locks
            replace_pool(state.locks._engine)


def answer(error: LockError) -> Response:
    """Answer a request that failed with an error of this library: ``problem+json``, and ``Retry-After``.

    The status is ``423`` for a lock, ``429`` for a full semaphore, and for other errors that of
    :mod:`~sqlalchemy_locks.integrations.problem`. An error that only the app's operator can fix is raised again, for
    the app's own 500. A status of 503 is logged as Flask logs exceptions.

    >>> app.register_error_handler(sl.LockTimeout, lambda error: answer(error) if wants_json() else page(error))
    """
    problem = problem_of(error)
    if problem.status == 500:
        raise error
    if problem.status > 500:
        current_app.log_exception(sys.exc_info())
    return Response(problem.content, problem.status, dict(problem.headers))
