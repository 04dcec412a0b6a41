"""Locks in a Flask app (extra ``flask``): on the engine of its Flask-SQLAlchemy, or on one that it is given.

What is promised: whichever app is current, it is that one's database that is locked, however many apps a process has; a
block that decorates a view is of the app that the call is in, and not of the one that was there when it was imported.
The maintenance runs once in each process that serves, never in one that only forks others. A fork begins with a pool
of its own, so that no two processes talk on one connection, and in one transaction.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from flask import Flask, Response, current_app, request_started
from flask.cli import with_appcontext
from sqlalchemy import Engine
from sqlalchemy.pool import QueuePool

from sqlalchemy_locks._validation import valid_name
from sqlalchemy_locks.cli.adopt import Adopted
from sqlalchemy_locks.cli.connect import App
from sqlalchemy_locks.conditional.timeout import Timeout
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.exclusive import ExclusiveBlock, Name
from sqlalchemy_locks.facade.lease import LeaseContext
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.facade.maintenance import Maintenance
from sqlalchemy_locks.integrations.flask_lazy import LaterHold, LaterLeasing
from sqlalchemy_locks.integrations.problem import problem_of
from sqlalchemy_locks.runtime.decorators import when_due

if TYPE_CHECKING:
    from sqlalchemy.orm import sessionmaker

    # it is one for those who use it; what isn't here is the app's own
    _Forwarding = Locks
else:
    _Forwarding = object

__all__ = ["AppLocks", "FlaskLocks", "answer", "current_locks"]

T = TypeVar("T")
P = ParamSpec("P")

KEY = "sqlalchemy_locks"
#: how long an app that ends waits for a round of maintenance, in seconds
_PATIENCE = 10.0
_log = logging.getLogger("sqlalchemy_locks")
#: those that a fork has to tell that they are in another process
_apps: weakref.WeakSet[AppState] = weakref.WeakSet()


class AppLocks(_Forwarding):
    """The ``Locks`` of the app that is current, with all that they have.

    Blocks and ``scheduled`` functions may be made where there is no app yet: they look for it when they are entered or
    called.
    Everything else is ``RuntimeError`` outside of an app context.

    >>> from sqlalchemy_locks.integrations.flask import current_locks
    >>> @current_locks.lease("import-prices", ttl=60)
    ... def import_prices() -> None: ...
    """

    def __init__(self) -> None:
        """Of whichever app is current."""

    @property
    def current(self) -> Locks:
        """The ``Locks`` of the current app themselves: what leaves the app context, or is listened to, is these.

        >>> event.listen(locks.current, "lost", alarm)
        """
        state = current_app.extensions.get(KEY)
        if not isinstance(state, AppState):
            raise RuntimeError(
                f"the app {current_app.name!r} has no locks: call init_app(app) of FlaskLocks in its set-up"
            )
        return state.locks

    def _now(self) -> Locks:
        return self.current

    def __getattr__(self, name: str) -> Any:
        if name == "dispatch":
            raise RuntimeError("events are the app's: listen to locks.current in its context, or to the class sl.Locks")
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.current, name)

    def exclusive(self, *names: Name, timeout: float | timedelta | None = None) -> ExclusiveBlock:
        """See :meth:`Locks.exclusive`; of the app that is current when the block is entered."""
        return LaterHold(self._now, names, False, timeout)

    def shared(self, *names: Name, timeout: float | timedelta | None = None) -> ExclusiveBlock:
        """See :meth:`Locks.shared`; of the app that is current when the block is entered."""
        return LaterHold(self._now, names, True, timeout)

    def semaphore(
        self,
        permits: str | Mapping[str, int],
        *,
        count: int | None = None,
        ttl: float | timedelta = 60,
        timeout: float | timedelta | None = None,
        external_id: str | None = None,
        owner: str | None = None,
        resume: bool = True,
        reclaim: bool = False,
    ) -> LeaseContext:
        """See :meth:`Locks.semaphore`; of the app that is current when the block is entered."""
        again = {"resume": resume, "reclaim": reclaim}
        return LaterLeasing(self._now, permits, count, ttl, timeout, external_id, owner, **again)

    def lease(
        self, name: str, *, ttl: float | timedelta = 60, timeout: float | timedelta | None = None
    ) -> LeaseContext:
        """See :meth:`Locks.lease`; of the app that is current when the block is entered."""
        return LaterLeasing(self._now, valid_name(name, "a lease's name"), None, ttl, timeout, None, None, single=True)

    def once_per(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> bool:
        """See :meth:`Locks.once_per`; of the current app."""
        return self.current.once_per(name, every=every, windowed=windowed, tz=tz, queue=queue)

    def scheduled(
        self,
        name: str,
        *,
        every: float | timedelta,
        windowed: bool = False,
        tz: str | None = None,
        queue: str | None = None,
    ) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
        """See :meth:`Locks.scheduled`; of the app that is current at each call."""
        Timeout(every=every, windowed=windowed, tz=tz).acquire(name, queue=queue)  # refuses bad input before any call

        def due() -> bool:
            return self.once_per(name, every=every, windowed=windowed, tz=tz, queue=queue)

        return when_due(due, f"scheduled({name!r})")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of the current app>"


class FlaskLocks(AppLocks):
    """The extension: ``Locks`` for each app that it is initialised with.

    :param app: the app, where it is there already; else call :meth:`init_app`.
    :param engine: as for :meth:`init_app`, for every app that isn't given another.

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
        self._engine_of_all = engine
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, engine: Engine | sessionmaker[Any] | None = None) -> None:
        """Give an app its locks, before or after Flask-SQLAlchemy is initialised, and after the configuration is read.

        :param engine: where Flask-SQLAlchemy isn't used: an ``Engine``, or a ``sessionmaker`` bound to one.
        :raises RuntimeError: when the app has locks already.

        It adds ``flask locks ...``, the commands of ``sqlalchemy-locks`` on the app's engine, and reads:

        - ``SQLALCHEMY_LOCKS_BIND``: the key in ``SQLALCHEMY_BINDS`` of the database that has the locks; by default the
          app's main one.
        - ``SQLALCHEMY_LOCKS_ERRORS``: answer a ``LockError`` that no view has caught by :func:`answer`; by default
          ``True``. Where the app has a handler for it, or for one of its kinds, that is the one that is asked.
        - ``SQLALCHEMY_LOCKS_MAINTENANCE``: have ``locks.maintenance()`` run in each process that serves, from its
          first request on; by default ``False``.

        >>> locks = FlaskLocks()
        >>> locks.init_app(app, engine)
        """
        if KEY in app.extensions:
            raise RuntimeError(f"the app {app.name!r} has locks already")
        app.config.setdefault("SQLALCHEMY_LOCKS_BIND", None)
        app.config.setdefault("SQLALCHEMY_LOCKS_ERRORS", True)
        app.config.setdefault("SQLALCHEMY_LOCKS_MAINTENANCE", False)
        state = app.extensions[KEY] = AppState(app, self._engine_of_all if engine is None else engine)
        app.cli.add_command(Adopted("locks", App("flask locks", _engine_of_current), with_appcontext(lambda: None)))
        if app.config["SQLALCHEMY_LOCKS_ERRORS"] and LockError not in app.error_handler_spec[None][None]:
            app.register_error_handler(LockError, answer)
        if app.config["SQLALCHEMY_LOCKS_MAINTENANCE"]:
            # by the signal, which no other before_request can answer first
            request_started.connect(state.serving, app)


#: the ``Locks`` of the current app, for code that doesn't know which module has its extension
current_locks = AppLocks()


class AppState:
    """What an app has, as ``app.extensions["sqlalchemy_locks"]``."""

    def __init__(self, app: Flask, given: Engine | sessionmaker[Any] | None) -> None:
        self._app = weakref.ref(app)
        self._given = given
        self._made: dict[str, Locks] = {}
        self._maintained: dict[int, object] = {}
        _apps.add(self)

    @property
    def locks(self) -> Locks:
        """The app's ``Locks``, made on first use."""
        # two threads may both make them, and one is kept; a gate could be held by another thread when this forks
        return self._made.get("locks") or self._made.setdefault("locks", Locks(self._bind()))

    @property
    def engine(self) -> Engine:
        """The engine that they are on."""
        bind = self._bind()
        found = bind if isinstance(bind, Engine) else bind.kw.get("bind")
        if not isinstance(found, Engine):
            raise TypeError(f"FlaskLocks takes an Engine, or a sessionmaker bound to one, not {bind!r}")
        return found

    def _bind(self) -> Engine | sessionmaker[Any]:
        if self._given is not None:
            return self._given
        app = self._app()
        assert app is not None
        db = app.extensions.get("sqlalchemy")
        if db is None:
            raise RuntimeError(
                f"the app {app.name!r} has no Flask-SQLAlchemy: initialise it, or give an engine, init_app(app, engine)"
            )
        # it finds its engines by the app that is current
        own = current_app and current_app._get_current_object() is app  # type: ignore[attr-defined]
        with contextlib.nullcontext() if own else app.app_context():
            return _session_maker(db, _engine(db, app.config["SQLALCHEMY_LOCKS_BIND"]))

    def serving(self, sender: Flask, **_: Any) -> None:
        """A request has come: here is a process that serves. Maintain, once."""
        process, mine = os.getpid(), object()
        if self._maintained.setdefault(process, mine) is not mine:
            return
        try:
            maintenance = self.locks.maintenance()
            maintenance.__enter__()
        except Exception:
            _log.exception("the maintenance of the app %r could not be started", sender.name)
            return
        # as the process ends, or the app; what it holds on to must not be the app
        weakref.finalize(sender, _end, maintenance, process)

    def forked(self) -> None:
        """This is another process: the connections of the pool are its parent's."""
        app = self._app()
        if app is None:
            return
        with contextlib.suppress(Exception):  # an app whose engine can't be had is told so when it wants it
            engine = self.engine
            if isinstance(engine.pool, QueuePool):
                engine.dispose(close=False)


def _engine(db: Any, bind: str | None) -> Engine:
    engine = db.engine if bind is None else db.engines.get(bind)
    if engine is None:
        raise RuntimeError(f"SQLALCHEMY_LOCKS_BIND is {bind!r}, and there is no such key in SQLALCHEMY_BINDS")
    found: Engine = engine
    return found


def _session_maker(db: Any, engine: Engine) -> Engine | sessionmaker[Any]:
    """So that ``held.session`` is a session like ``db.session``: of its class, with its options."""
    from sqlalchemy.orm import scoped_session, sessionmaker

    factory = db.session.session_factory if isinstance(db.session, scoped_session) else None
    if not isinstance(factory, sessionmaker):
        return engine
    options = {name: value for name, value in factory.kw.items() if name not in ("bind", "binds")}
    return sessionmaker(engine, class_=factory.class_, **options)


def _end(maintenance: Maintenance, process: int) -> None:
    if os.getpid() == process:
        maintenance.end(_PATIENCE)


def _in_child() -> None:
    for state in list(_apps):
        state.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def answer(error: LockError) -> Response:
    """The answer to a request that met with an error of this library: ``problem+json``, and ``Retry-After``.

    ``423`` for what is locked, ``429`` where there is no room, what :mod:`~sqlalchemy_locks.integrations.problem` says
    for the others. What only who runs the app can mend is raised on, to be the app's own 500; what else is not the
    client's is logged, as Flask logs those.

    >>> app.register_error_handler(sl.LockTimeout, lambda error: answer(error) if wants_json() else page(error))
    """
    problem = problem_of(error)
    if problem.status == 500:
        raise error
    if problem.status > 500:
        current_app.log_exception(sys.exc_info())
    return Response(problem.content, problem.status, dict(problem.headers))


def _engine_of_current() -> Engine:
    state = current_app.extensions[KEY]
    assert isinstance(state, AppState)
    try:
        return state.engine
    except (RuntimeError, TypeError) as error:
        raise click.ClickException(str(error)) from error
