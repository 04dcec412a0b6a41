"""Locks in a Flask app (extra ``flask``): on the engine of its Flask-SQLAlchemy, or on a given engine.

- Locks are taken in the database of the current app, also in a process with several apps. A block that decorates a
  view uses the app of the call, not the one that was current when the view was imported.
- Maintenance runs once in each process that serves, never in one that only forks others.
- A fork begins with a pool of its own, so that no two processes share a connection.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine

from sqlalchemy_locks.integrations import missing

try:
    import click
    from flask import Flask, Response, current_app, request_started
    from flask.cli import with_appcontext
except ModuleNotFoundError as error:
    raise missing("flask", error) from error

from sqlalchemy_locks.cli.adopt import AppCommands
from sqlalchemy_locks.cli.connect import HostApp
from sqlalchemy_locks.dialects.forks import in_forked_child, replace_pool
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.flask_deferred import deferred
from sqlalchemy_locks.integrations.problem import problem_of

if TYPE_CHECKING:
    from sqlalchemy.orm import sessionmaker

    # for type checkers it has all methods of Locks; at run time __getattr__ forwards them
    _Forwarding = Locks
else:
    _Forwarding = object

__all__ = ["AppLocks", "FlaskLocks", "answer", "current_locks"]

KEY = "sqlalchemy_locks"
#: how long an app that ends waits for running maintenance, in seconds
_END_TIMEOUT = 10.0
_log = logging.getLogger("sqlalchemy_locks")
#: the apps whose pools a fork has to replace
_apps: weakref.WeakSet[AppState] = weakref.WeakSet()


class AppLocks(_Forwarding):
    """The ``Locks`` of the current app, with all their methods.

    Blocks and ``scheduled`` functions may be made outside of an app: they use the app that is current when they are
    entered or called. Everything else raises ``RuntimeError`` outside of an app context.

    >>> from sqlalchemy_locks.integrations.flask import current_locks
    >>> @current_locks.lease("import-prices", ttl=60)
    ... def import_prices() -> None: ...
    """

    def __init__(self) -> None:
        """Make one for any app: the current one is looked up at each use."""

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

    if not TYPE_CHECKING:
        exclusive = deferred(Locks.exclusive)
        shared = deferred(Locks.shared)
        semaphore = deferred(Locks.semaphore)
        lease = deferred(Locks.lease)
        # calls self.once_per at each call of the function, and nothing else of self
        scheduled = Locks.scheduled

    def __getattr__(self, name: str) -> Any:
        if name == "dispatch":
            raise RuntimeError("events are the app's: listen to locks.current in its context, or to the class sl.Locks")
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.current, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of the current app>"


class FlaskLocks(AppLocks):
    """The extension: ``Locks`` for each app that it is initialised with.

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
        super().__init__()
        self._default_engine = engine
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, engine: Engine | sessionmaker[Any] | None = None) -> None:
        """Add locks to an app, before or after Flask-SQLAlchemy is initialised, but after the configuration is set.

        :param engine: without Flask-SQLAlchemy, an ``Engine``, or a ``sessionmaker`` bound to one.
        :raises RuntimeError: when the app has locks already.

        It adds ``flask locks ...``, the commands of ``sqlalchemy-locks`` on the app's engine, and reads:

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
        host = HostApp("flask locks", _current_engine, app.app_context)
        app.cli.add_command(AppCommands("locks", host, with_appcontext(lambda: None)))
        if app.config["SQLALCHEMY_LOCKS_ERRORS"] and LockError not in app.error_handler_spec[None][None]:
            app.register_error_handler(LockError, answer)
        if app.config["SQLALCHEMY_LOCKS_MAINTENANCE"]:
            # a signal: another before_request function could answer first
            request_started.connect(state.on_request, app)


#: the ``Locks`` of the current app, for code that can't import its extension
current_locks = AppLocks()


class AppState:
    """The state of an app, in ``app.extensions["sqlalchemy_locks"]``."""

    def __init__(self, app: Flask, engine: Engine | sessionmaker[Any] | None) -> None:
        if engine is not None and not isinstance(engine, Engine):
            from sqlalchemy.orm import sessionmaker  # not loaded before it is needed

            if not isinstance(engine, sessionmaker):
                # not its repr: a URL has a password
                raise TypeError(f"FlaskLocks takes an Engine or a sessionmaker, not a {type(engine).__name__}")
        self._app = weakref.ref(app)
        self._given_engine = engine
        self._locks: dict[str, Locks] = {}
        #: a marker of the request that has started this process's maintenance
        self._maintained: dict[str, object] = {}
        self._end_maintenance: weakref.finalize[Any, Any] | None = None
        _apps.add(self)

    @property
    def locks(self) -> Locks:
        """The app's ``Locks``, made on first use."""
        # setdefault instead of a mutex, which another thread could hold when this process forks
        return self._locks.get("locks") or self._locks.setdefault("locks", Locks(self._bind()))

    @property
    def engine(self) -> Engine:
        """The engine of the app's ``Locks``."""
        bind = self._bind()
        engine = bind if isinstance(bind, Engine) else bind.kw.get("bind")
        if not isinstance(engine, Engine):
            raise TypeError(f"FlaskLocks takes an Engine, or a sessionmaker bound to one, not {type(bind).__name__}")
        return engine

    def _bind(self) -> Engine | sessionmaker[Any]:
        if self._given_engine is not None:
            return self._given_engine
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
            return _session_maker(db, engine)

    def on_request(self, sender: Flask, **_: Any) -> None:
        """Start maintenance at the first request of a process: this is a process that serves."""
        marker = object()
        if self._maintained.setdefault("maintenance", marker) is not marker:
            return
        try:
            maintenance = self.locks.maintenance()
            maintenance.__enter__()
        except Exception:
            _log.exception("the maintenance of the app %r could not be started", sender.name)
            return
        # when the process or the app ends; the finalizer must not reference the app
        self._end_maintenance = weakref.finalize(sender, maintenance.end, _END_TIMEOUT)

    def on_fork(self) -> None:
        """Replace the pool in a new process, also where the parent has used its engine without locks."""
        self._maintained.clear()
        if self._end_maintenance is not None:
            self._end_maintenance.detach()
        if self._app() is None:
            return
        with contextlib.suppress(Exception):  # an app without an engine gets that error when it uses its locks
            replace_pool(self.engine)


def _session_maker(db: Any, engine: Engine) -> Engine | sessionmaker[Any]:
    """Return a maker of sessions like ``db.session``: of its class, with its options."""
    from sqlalchemy.orm import scoped_session, sessionmaker

    factory = db.session.session_factory if isinstance(db.session, scoped_session) else None
    if not isinstance(factory, sessionmaker):
        return engine
    options = {name: value for name, value in factory.kw.items() if name not in ("bind", "binds")}
    return sessionmaker(engine, class_=factory.class_, **options)


@in_forked_child
def _after_fork() -> None:
    for state in list(_apps):
        state.on_fork()


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


def _current_engine() -> Engine:
    state = current_app.extensions[KEY]
    assert isinstance(state, AppState)
    try:
        return state.engine
    except (RuntimeError, TypeError) as error:
        raise click.ClickException(str(error)) from error
