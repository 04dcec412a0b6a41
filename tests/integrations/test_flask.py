"""Locks in Flask apps: of the current app, on its own database, with its answers."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask, Response, stream_with_context
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.query import Query
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.flask import KEY, FlaskLocks
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import PATIENCE, connected, later, until, unused

ENGINES = ["sqlite", "postgresql15"]


class Maker:
    """Makes apps, each with a Flask-SQLAlchemy of its own, and disposes of their engines."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._ends = contextlib.ExitStack()

    def url(self, engine: str, fresh: bool = False) -> str:
        if not fresh:
            return self._servers.installed(engine, PLAIN[engine])
        url = self._servers.fresh(engine, PLAIN[engine])
        install(url)
        return url

    def __call__(
        self, url: str, locks: FlaskLocks | None = None, db: Any = None, **config: Any
    ) -> tuple[Flask, Any, FlaskLocks]:
        app, db, locks = Flask("app"), db or SQLAlchemy(), locks or FlaskLocks()
        app.config.update(SQLALCHEMY_DATABASE_URI=url, TESTING=True, **config)
        db.init_app(app)
        locks.init_app(app)
        self.disposing(app, db)
        return app, db, locks

    def disposing(self, app: Flask, db: Any) -> None:
        def dispose() -> None:
            with app.app_context():
                for engine in db.engines.values():
                    engine.dispose()

        self._ends.callback(dispose)

    def forget(self) -> None:
        """Do nothing: the test closes it."""
        self._ends.pop_all()

    def close(self) -> None:
        self._ends.close()


@pytest.fixture
def make(servers: Servers) -> Iterator[Maker]:
    maker = Maker(servers)
    yield maker
    maker.close()


@pytest.fixture(params=ENGINES)
def url(request: pytest.FixtureRequest, make: Maker) -> str:
    return make.url(request.param)


def free(app: Flask, locks: Any, name: str) -> bool:
    """Return whether another thread can acquire it now."""

    def have() -> bool:
        with app.app_context():
            try:
                with locks.exclusive(name, timeout=0):
                    return True
            except sl.LockTimeout:
                return False

    return later(have).result(PATIENCE)


def test_locks_use_the_current_app(make: Maker, url: str) -> None:
    app, db, locks = make(url)
    name = unused()
    with app.app_context():
        assert app.extensions[KEY].locks is locks.current
        with locks.exclusive(name, timeout=PATIENCE) as held:
            assert not free(app, locks, name)
            assert held.session.connection().engine is db.engine
        assert free(app, locks, name)
        assert locks.mutex.acquire(name)
        assert locks.mutex.release(name)
        assert locks.run(sl.semaphore.create(name, 1))
        grant = locks.acquire({name: 1}, ttl=3600, timeout=0)
        assert locks.release(grant) is sl.Released.RELEASED
        assert locks.once_per(name, every=3600)
        assert not locks.once_per(name, every=3600)
        assert locks.owner == locks.current.owner


def test_without_an_app_context_use_raises(make: Maker) -> None:
    app, _, locks = make(make.url("sqlite"))
    for call in (lambda: locks.exclusive("a"), lambda: locks.run(sl.lock.vacuum())):
        with pytest.raises(RuntimeError, match="outside of application context"):
            call()
    with pytest.raises(RuntimeError, match="has locks already"):
        locks.init_app(app)
    other = Flask("other")
    with other.app_context(), pytest.raises(RuntimeError, match=r"'other' has no locks.*init_app"):
        locks.exclusive("x")
    with pytest.raises(AttributeError):
        locks._nothing  # noqa: B018


def test_apps_have_locks_of_their_own(make: Maker) -> None:
    locks, name = FlaskLocks(), unused()
    one, _, _ = make(make.url("sqlite", fresh=True), locks)
    two, _, _ = make(make.url("sqlite", fresh=True), locks)
    with one.app_context(), locks.exclusive(name):
        assert (free(one, locks, name), free(two, locks, name)) == (False, True)


def test_bind_selects_the_database(make: Maker) -> None:
    main, other = make.url("sqlite", fresh=True), make.url("postgresql15")
    app, db, locks = make(main, SQLALCHEMY_BINDS={"locks": other}, SQLALCHEMY_LOCKS_BIND="locks")
    with app.app_context():
        assert locks.engine_name == "PostgreSQL"
        with locks.exclusive(unused()) as held:
            # of the class of db.session, which would select its engine by the mapped class
            assert held.session.connection().engine is db.engines["locks"]


def test_unknown_bind_raises(make: Maker) -> None:
    app, _, locks = make(make.url("sqlite"), SQLALCHEMY_LOCKS_BIND="nowhere")
    with app.app_context(), pytest.raises(RuntimeError, match="'nowhere', and there is no such key"):
        locks.run(sl.lock.vacuum())


def test_engine_without_flask_sqlalchemy(make: Maker, url: str) -> None:
    with connected(url) as engine:
        for given in (engine, sessionmaker(engine)):
            app, locks = Flask("plain"), FlaskLocks()
            locks.init_app(app, given)
            with app.app_context():
                with locks.exclusive(unused()) as held:
                    assert type(held.session).__mro__[1] is Session
                    assert held.session.connection().engine is engine


def test_missing_engine_raises() -> None:
    app = Flask("bare")
    locks = FlaskLocks(app)
    with app.app_context(), pytest.raises(RuntimeError, match="has no Flask-SQLAlchemy"):
        locks.mutex.acquire("a")


def test_extensions_initialise_in_any_order(make: Maker) -> None:
    app, db, locks = Flask("app"), SQLAlchemy(), FlaskLocks()
    app.config["SQLALCHEMY_DATABASE_URI"] = make.url("sqlite")
    locks.init_app(app)
    db.init_app(app)
    make.disposing(app, db)
    with app.app_context(), locks.exclusive(unused()):
        pass


def test_flask_sqlalchemy_lite(make: Maker) -> None:
    from flask_sqlalchemy_lite import SQLAlchemy as Lite

    engines = {"default": make.url("sqlite"), "other": make.url("postgresql15")}
    app, db, locks = make("", db=Lite(), SQLALCHEMY_ENGINES=engines)
    with app.app_context(), locks.exclusive(unused()) as held:
        assert held.session.connection().engine is db.engine


def test_held_session_has_the_class_of_db_session(make: Maker) -> None:
    class Own(Query[Any]):
        pass

    own = SQLAlchemy(query_class=Own, session_options={"autoflush": False})
    app, db, locks = make(make.url("sqlite"), db=own)
    heard: list[object] = []
    event.listen(db.session, "before_commit", heard.append)
    with app.app_context(), locks.exclusive(unused()) as held:
        assert isinstance(held.session, type(db.session()).__mro__[1])
        assert held.session.autoflush is False
        assert held.session._query_cls is Own
        held.session.commit()
        assert heard == [held.session]


def test_events_are_sent_by_the_apps_locks(make: Maker) -> None:
    app, _, locks = make(make.url("sqlite"))
    heard: list[sl.LockEvent] = []
    with pytest.raises(RuntimeError, match=r"locks\.current"):
        event.listen(locks, "acquired", heard.append)
    with app.app_context():
        event.listen(locks.current, "acquired", heard.append)
        with locks.exclusive("heard"):
            pass
    assert [told.names for told in heard] == [("heard",)]


# the end of a request


def test_blocks_end_with_closed_streams(make: Maker, url: str) -> None:
    app, _, locks = make(url)
    name = unused()

    @app.get("/stream")
    def stream() -> Response:
        def rows() -> Iterator[str]:
            with locks.exclusive(name):
                yield "a"
                yield "b"

        return Response(stream_with_context(rows()))

    with app.test_client().get("/stream", buffered=False) as answered:
        assert next(answered.iter_encoded()) == b"a"
        assert not free(app, locks, name)
    assert free(app, locks, name)


# answers


def test_contention_is_answered_423_or_429(make: Maker, url: str) -> None:
    app, _, locks = make(url)
    name = unused()
    with app.app_context():
        locks.run(sl.semaphore.create(name, 1))

    @app.post("/locked")
    def locked() -> str:
        with locks.exclusive(name, timeout=0):
            return "done"

    @app.post("/lease")
    def lease() -> str:
        with locks.lease(f"lease of {name}", timeout=0):
            return "done"

    @app.post("/room")
    def room() -> str:
        with locks.semaphore(name, timeout=0):
            return "done"

    def asked(path: str) -> Any:
        answered = later(app.test_client().post, path).result(PATIENCE)
        return answered.status_code, answered.mimetype, answered.headers.get("Retry-After", ""), answered

    for path in ("/locked", "/lease", "/room"):
        assert asked(path)[0] == 200
    with app.app_context():
        with locks.exclusive(name):
            status, kind, retry, answered = asked("/locked")
        assert (status, kind) == (423, "application/problem+json")
        assert int(retry) >= 1
        assert answered.json["status"] == 423
        assert name not in answered.text  # the answer doesn't name the holder
        with locks.lease(f"lease of {name}"):
            assert asked("/lease")[:2] == (423, "application/problem+json")
        with locks.semaphore(name):
            status, kind, retry, answered = asked("/room")
        assert (status, kind) == (429, "application/problem+json")
        assert int(retry) >= 1
    for path in ("/locked", "/lease", "/room"):
        assert asked(path)[0] == 200


def raising(app: Flask, error: Exception) -> None:
    @app.get("/")
    def view() -> str:
        raise error


def own(error: Exception) -> ResponseReturnValue:
    return "mine", 409


@pytest.mark.parametrize("kind", [sl.LockTimeout, sl.LockError])
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_handler_of_the_app_takes_precedence(kind: type[Exception], first: bool) -> None:
    app = Flask("app")
    if first:
        app.register_error_handler(kind, own)
    FlaskLocks(app)
    if not first:
        app.register_error_handler(kind, own)
    raising(app, sl.LockTimeout("x"))
    assert app.test_client().get("/").text == "mine"


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (sl.NotInstalled("the reason"), (500, "text/html")),
        (sl.LockLost("the reason"), (503, "application/problem+json")),
    ],
)
def test_error_of_the_operator_or_a_lost_lock_is_logged(
    error: sl.LockError, answer: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    app = Flask("app")
    FlaskLocks(app)
    raising(app, error)
    answered = app.test_client().get("/")
    assert (answered.status_code, answered.mimetype) == answer
    assert "the reason" in caplog.text
    assert "the reason" not in answered.text


# maintenance


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sqlalchemy_locks.maintenance"]


def serving(app: Flask) -> None:
    app.add_url_rule("/", view_func=lambda: "served", endpoint="served")


def test_maintenance_runs_from_first_request_to_app_end(make: Maker) -> None:
    before = threads()
    app, _, locks = make(make.url("sqlite", fresh=True), SQLALCHEMY_LOCKS_MAINTENANCE=True)
    serving(app)
    app.before_request(lambda: None)
    with app.app_context():
        locks.run(sl.lock.vacuum())
    assert threads() == before
    asked = [later(app.test_client().get, "/") for _ in range(8)]
    assert {each.result(PATIENCE).status_code for each in asked} == {200}
    (thread,) = [each for each in threads() if each not in before]
    with app.app_context():
        until(lambda: locks.run(sl.Timeout().listed(100)))  # it has begun its first round
        engine = locks.current._engine
    make.forget()
    del app, asked
    until(lambda: gc.collect() is not None and not thread.is_alive())
    engine.dispose()


def test_failing_maintenance_doesnt_fail_requests(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("app")
    app.config["SQLALCHEMY_LOCKS_MAINTENANCE"] = True
    FlaskLocks(app)
    serving(app)
    assert app.test_client().get("/").status_code == 200
    assert "could not be started" in caplog.text
    assert "has no Flask-SQLAlchemy" in caplog.text
