"""Locks in Flask apps: of the current app, on its own database, with its commands and its answers."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response, current_app
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.query import Query
from sqlalchemy import Engine, create_engine, event
from sqlalchemy import inspect as inspected
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

import sqlalchemy_locks as sl
from sqlalchemy_locks.cli import adopt
from sqlalchemy_locks.integrations.flask import KEY, FlaskLocks, current_locks
from tests.conftest import PLAIN, Servers, install
from tests.fixtures.parties import PATIENCE, later, until, unused

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
        self, url: str, locks: FlaskLocks | None = None, **config: Any
    ) -> tuple[Flask, SQLAlchemy, FlaskLocks]:
        app, db, locks = Flask("app"), SQLAlchemy(), locks or FlaskLocks()
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
        assert locks.current is current_locks.current
        with locks.exclusive(name, timeout=PATIENCE) as held:
            assert not free(app, current_locks, name)
            assert held.session.connection().engine is db.engine
        assert free(app, current_locks, name)
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
    block = locks.exclusive("made where there is no app")
    with pytest.raises(RuntimeError, match="outside of application context"):
        block.__enter__()
    with pytest.raises(RuntimeError, match="outside of application context"):
        locks.run(sl.lock.vacuum())
    with app.app_context(), block:
        pass
    with pytest.raises(TypeError, match="an Engine or a sessionmaker, not a str") as refused:
        FlaskLocks(Flask("another"), "postgresql://user:secret@host/app")  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)
    with pytest.raises(RuntimeError, match="has locks already"):
        locks.init_app(app)
    other = Flask("other")
    with other.app_context(), pytest.raises(RuntimeError, match=r"'other' has no locks.*init_app"):
        locks.exclusive("x").__enter__()
    with pytest.raises(AttributeError):
        locks._nothing  # noqa: B018


def test_arguments_are_checked_before_entering() -> None:
    locks = FlaskLocks()
    with pytest.raises(ValueError, match="at least one name"):
        locks.exclusive()
    with pytest.raises(TypeError):
        locks.shared(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from 1 to"):
        locks.semaphore("a", count=0)
    with pytest.raises(ValueError, match="empty"):
        locks.lease("")
    with pytest.raises(ValueError, match="255"):
        locks.lease("x" * 256)
    with pytest.raises(ValueError, match="windowed=True"):
        locks.scheduled("a", every=1, tz="Europe/Paris")
    with pytest.raises(TypeError, match="async"):

        @locks.exclusive("a")
        async def view() -> None: ...


@pytest.mark.parametrize("name", ["exclusive", "shared", "semaphore", "lease", "scheduled"])
def test_signatures_match_locks(name: str) -> None:
    assert inspect.signature(getattr(FlaskLocks, name)) == inspect.signature(getattr(sl.Locks, name))


def test_decorator_uses_the_app_of_the_call(make: Maker) -> None:
    locks, name, seen = FlaskLocks(), unused(), []
    one, _, _ = make(make.url("sqlite", fresh=True), locks)
    two, _, _ = make(make.url("sqlite", fresh=True), locks)
    with one.app_context():  # as in a module that an app factory imports

        @locks.exclusive(name)
        def work() -> None:
            seen.append((free(one, locks, name), free(two, locks, name)))

        @locks.lease(name)
        def import_() -> None:
            holders = {app: held(app) for app in (one, two)}
            seen.append((not holders[one], not holders[two]))

        @locks.scheduled(name, every=3600)
        def report() -> bool:
            return True

    def held(app: Flask) -> list[Any]:
        with app.app_context():
            return locks.run(sl.semaphore.holders(name))

    for function in (work, import_):
        for app in (one, two):
            with app.app_context():
                function()
    assert seen == [(False, True), (True, False)] * 2
    for app in (one, two):
        with app.app_context():
            assert report() is True
            assert report() is None


def test_block_ends_in_the_app_that_entered_it(make: Maker) -> None:
    locks, name = FlaskLocks(), unused()
    one, _, _ = make(make.url("sqlite", fresh=True), locks)
    two, _, _ = make(make.url("sqlite", fresh=True), locks)
    for block in (locks.exclusive(name), locks.lease(name)):
        with pytest.raises(sl.ReentryError, match="not entered"):
            block.__exit__(None, None, None)
        with one.app_context(), two.app_context():
            with one.app_context():
                block.__enter__()
            with pytest.raises(sl.ReentryError, match="entered already"):
                block.__enter__()
            block.__exit__(None, None, None)  # in the other app's context: it held a lock of the first app
            with block:
                pass
    assert free(one, locks, name)
    assert free(two, locks, name)
    with one.app_context():
        assert locks.run(sl.semaphore.holders(name)) == []


def test_bind_selects_the_database(make: Maker) -> None:
    main, other = make.url("sqlite", fresh=True), make.url("postgresql15")
    app, db, locks = make(main, SQLALCHEMY_BINDS={"locks": other}, SQLALCHEMY_LOCKS_BIND="locks")
    with app.app_context():
        assert app.extensions[KEY].engine is db.engines["locks"]
        assert locks.engine_name == "PostgreSQL"
        with locks.exclusive(unused()) as held:
            # of the class of db.session, which would select its engine by the mapped class
            assert held.session.connection().engine is db.engines["locks"]


def test_unknown_bind_raises(make: Maker) -> None:
    app, _, locks = make(make.url("sqlite"), SQLALCHEMY_LOCKS_BIND="nowhere")
    with app.app_context(), pytest.raises(RuntimeError, match="'nowhere', and there is no such key"):
        locks.run(sl.lock.vacuum())


def test_engine_without_flask_sqlalchemy(make: Maker, url: str) -> None:
    engine = create_engine(url)
    try:
        for given in (engine, sessionmaker(engine)):
            app, locks = Flask("plain"), FlaskLocks()
            locks.init_app(app, given)
            with app.app_context():
                assert app.extensions[KEY].engine is engine
                with locks.exclusive(unused()) as held:
                    assert type(held.session).__mro__[1] is Session
        app = Flask("plain")
        locks = FlaskLocks(app, engine)
        with app.app_context():
            assert locks.current is current_locks.current
    finally:
        engine.dispose()


def test_missing_engine_raises() -> None:
    app = Flask("bare")
    FlaskLocks(app)
    with app.app_context(), pytest.raises(RuntimeError, match="has no Flask-SQLAlchemy"):
        current_locks.mutex.acquire("a")


def test_in_memory_database_is_refused() -> None:
    app, db = Flask("memory"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    db.init_app(app)
    locks = FlaskLocks(app)
    with app.app_context():
        with pytest.raises(sl.Unsupported, match="a file instead of :memory:"):
            locks.run(sl.lock.vacuum())
        db.engine.dispose()


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

    app, db, locks = Flask("app"), Lite(), FlaskLocks()
    app.config["SQLALCHEMY_ENGINES"] = {"default": make.url("sqlite"), "other": make.url("postgresql15")}
    db.init_app(app)
    locks.init_app(app)
    make.disposing(app, db)
    with app.app_context(), locks.exclusive(unused()) as held:
        assert held.session.connection().engine is db.engine
        app.config["SQLALCHEMY_LOCKS_BIND"] = "other"
        assert app.extensions[KEY].engine is db.engines["other"]


def test_held_session_has_the_class_of_db_session(make: Maker) -> None:
    class Own(Query[Any]):
        pass

    app, db, locks = Flask("app"), SQLAlchemy(query_class=Own, session_options={"autoflush": False}), FlaskLocks()
    app.config["SQLALCHEMY_DATABASE_URI"] = make.url("sqlite")
    db.init_app(app)
    locks.init_app(app)
    make.disposing(app, db)
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


def test_session_locks_end_with_the_request(make: Maker, url: str) -> None:
    app, db, locks = make(url)
    name = unused()

    @app.get("/left")
    def left() -> str:
        db.session.execute(sl.lock.exclusive(name))
        return str(not free(app, locks, name))

    @app.get("/raised")
    def raised() -> str:
        db.session.execute(sl.lock.exclusive(name))
        raise LookupError(name)

    client = app.test_client()
    assert client.get("/left").text == "True"
    assert free(app, locks, name)
    with pytest.raises(LookupError):
        client.get("/raised")
    assert free(app, locks, name)


def test_blocks_end_with_raising_views_and_closed_streams(make: Maker, url: str) -> None:
    app, _, locks = make(url)
    name = unused()

    @app.get("/raised")
    @locks.exclusive(name)
    def raised() -> str:
        raise LookupError(name)

    @app.get("/stream")
    def stream() -> Response:
        from flask import stream_with_context

        def rows() -> Iterator[str]:
            with locks.exclusive(name):
                yield "a"
                yield "b"

        return Response(stream_with_context(rows()))

    client = app.test_client()
    with pytest.raises(LookupError):
        client.get("/raised")
    assert free(app, locks, name)
    with client.get("/stream", buffered=False) as answered:
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
    @locks.exclusive(name, timeout=0)
    def locked() -> str:
        return "done"

    @app.post("/lease")
    def lease() -> str:
        with locks.lease(f"lease of {name}", timeout=0):
            return "done"

    @app.post("/room")
    @locks.semaphore(name, timeout=0)
    def room() -> str:
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


def test_answers_can_be_turned_off() -> None:
    app = Flask("app")
    app.config.update(SQLALCHEMY_LOCKS_ERRORS=False, TESTING=True)
    FlaskLocks(app)
    raising(app, sl.LockTimeout("x"))
    with pytest.raises(sl.LockTimeout):
        app.test_client().get("/")


def test_operator_errors_stay_500(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("app")
    FlaskLocks(app)
    raising(app, sl.NotInstalled("no tables"))
    answered = app.test_client().get("/")
    assert (answered.status_code, answered.mimetype) == (500, "text/html")
    assert "no tables" in caplog.text
    app.testing = True
    with pytest.raises(sl.NotInstalled):
        app.test_client().get("/")


def test_lost_lock_is_answered_503_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("app")
    FlaskLocks(app)
    raising(app, sl.LockLost("its connection died"))
    answered = app.test_client().get("/")
    assert (answered.status_code, answered.mimetype) == (503, "application/problem+json")
    assert "its connection died" in caplog.text
    assert "its connection died" not in answered.text


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
        assert app.test_cli_runner().invoke(args=["locks", "status"]).exit_code == 0
    assert threads() == before
    asked = [later(app.test_client().get, "/") for _ in range(8)]
    assert {each.result(PATIENCE).status_code for each in asked} == {200}
    (thread,) = [each for each in threads() if each not in before]
    with app.app_context():
        until(lambda: current_locks.run(sl.Timeout().listed(100)))  # it has begun its first round
        engine = app.extensions[KEY].engine
    make.forget()
    del app, asked
    until(lambda: gc.collect() is not None and not thread.is_alive())
    engine.dispose()


def test_maintenance_is_off_by_default(make: Maker) -> None:
    before = threads()
    app, _, _ = make(make.url("sqlite"))
    serving(app)
    assert app.test_client().get("/").status_code == 200
    assert threads() == before


def test_failing_maintenance_doesnt_fail_requests(caplog: pytest.LogCaptureFixture) -> None:
    app = Flask("app")
    app.config["SQLALCHEMY_LOCKS_MAINTENANCE"] = True
    FlaskLocks(app)
    serving(app)
    assert app.test_client().get("/").status_code == 200
    assert "could not be started" in caplog.text
    assert "has no Flask-SQLAlchemy" in caplog.text


# commands


class Commands:
    """``flask locks`` of an app."""

    def __init__(self, app: Flask) -> None:
        self.app = app

    def __call__(self, *arguments: str, code: int = 0) -> Any:
        done = self.app.test_cli_runner().invoke(args=["locks", *arguments])
        assert done.exit_code == code, f"{done.exit_code}: {done.output}"
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)


JOBS = """
import sqlalchemy_locks as sl
from flask import current_app

ran = []

def handler(job):
    ran.append((job.payload, current_app.name))
    current_app.extensions["sqlalchemy"].session.get_bind()

def make():
    return sl.Worker(sl.Queue(), handler, bind=current_app.extensions["sqlalchemy"].engine)
"""


def test_handlers_of_a_worker_run_in_an_app_context(
    servers: Servers, make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, db, _ = make(servers.installed("sqlite", PLAIN["sqlite"]))
    (tmp_path / "jobs_of_flask.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with app.app_context():
        db.session.execute(sl.Queue().put("a", queue="of_flask"))
        db.session.commit()
    Commands(app)("worker", "jobs_of_flask:make", "--queue", "of_flask", "--until-empty")
    assert sys.modules.pop("jobs_of_flask").ran == [("a", app.name)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_command_runs_on_the_apps_engine(engine: str, servers: Servers, make: Maker) -> None:
    app, db, locks = make(servers.fresh(engine, PLAIN[engine]))
    flask = Commands(app)
    assert "flask locks: " in flask("check", code=2 if engine == "sqlite" else 1).output or engine != "sqlite"
    assert flask.json("install")["installed"]
    assert "flask locks check` to verify" in flask("install").output
    assert flask.json("check")["ok"] is True
    assert flask.json("semaphore", "create", "slots", "3")["created"] is True
    assert flask.json("semaphore", "resize", "slots", "4", "--by", "ops")["old_capacity"] == 3
    with app.app_context():
        grant = locks.acquire({"slots": 1}, owner="web-1", ttl=3600)
        jobs = sl.Queue()
        db.session.execute(jobs.put(1, 2, queue="mail"))
        db.session.commit()
    (row,) = flask.json("semaphore", "list", "slots")["holders"]
    assert row["owner"] == "web-1"
    assert "web-1" in flask("status").output
    assert flask.json("top", "--once")["semaphores"][0]["used"] == 1
    assert flask.json("semaphore", "release", grant.external_id)["released"] == "RELEASED"
    assert flask.json("semaphore", "delete", "slots", "--yes")["deleted"] is True
    assert flask.json("semaphore", "resize", "slots", "4", code=1)["error"] == "UnknownSemaphore"
    assert flask.json("queue", "stats")["queues"][0]["waiting"] == 2
    assert flask.json("queue", "requeue", "--dead")["requeued"] == 0
    assert flask.json("queue", "purge", "--older-than", "0", "--yes")["deleted"] == 0
    assert flask.json("sweep") == {"released": 0}
    assert "orphans" in flask.json("sweep", "--due")["done"]
    assert flask.json("vacuum") == {"removed": 0}


def test_database_options_are_removed(make: Maker) -> None:
    app, _, _ = make(make.url("sqlite"))
    flask = Commands(app)
    for option in ("--url", "--config", "--schema", "--prefix"):
        assert "No such option" in flask("status", option, "x", code=2).output
    assert "    flask locks install --grant-to app" in flask("install", "--help").output
    for command in (["install"], ["check"], ["status"], ["semaphore"], ["semaphore", "create"], ["queue"], ["sweep"]):
        shown = flask(*command, "--help").output
        assert "sqlalchemy-locks" not in shown
        assert "--url" not in shown


def test_commands_find_locks_in_another_schema(servers: Servers, make: Maker) -> None:
    options = {"schema_translate_map": {"lock": "others"}, "locks_prefix": "others_"}
    for engine in ENGINES:
        url = servers.fresh(engine, PLAIN[engine])
        app, _, _ = make(url, SQLALCHEMY_ENGINE_OPTIONS={"execution_options": options})
        flask = Commands(app)
        created = create_engine(url, poolclass=NullPool)
        created.connect().close()  # the file
        flask("install")
        assert flask.json("check")["ok"] is True
        flask("semaphore", "create", "placed", "1")
        with app.app_context():
            assert [row.name for row in current_locks.run(sl.semaphore.usage())] == ["placed"]
        schema = None if engine == "sqlite" else "others"
        assert ("others_" if engine == "sqlite" else "") + "semaphore" in inspected(created).get_table_names(schema)


def test_commands_report_a_missing_engine() -> None:
    app = Flask("bare")
    FlaskLocks(app)
    assert "has no Flask-SQLAlchemy" in Commands(app)("status", code=1).output


def test_commands_print_no_password() -> None:
    app, db = Flask("app"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://app:s3cret-word@127.0.0.1:1/db"
    db.init_app(app)
    FlaskLocks(app)
    told = Commands(app)("status", code=2).output
    assert "flask locks: postgresql+psycopg://app:***@127.0.0.1:1/db" in told
    assert "s3cret-word" not in told


def test_commands_keep_the_pool_open(make: Maker, url: str) -> None:
    app, db, _ = make(url)
    with app.app_context():
        engine: Engine = db.engine
        engine.connect().close()
        disposed: list[Engine] = []
        event.listen(engine, "engine_disposed", disposed.append)
        Commands(app)("status")
        assert current_app.name == "app"
        assert disposed == []
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_commands_report_missing_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr(adopt, "find_spec", missing)
    app = Flask("app")
    FlaskLocks(app)
    assert "sqlalchemy-locks[cli]" in Commands(app)("status", code=1).output
