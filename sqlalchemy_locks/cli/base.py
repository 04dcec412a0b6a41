"""What every command has in common: its options, its answers, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import click
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks._validation import escape_unprintable
from sqlalchemy_locks.cli.connect import App, AppTarget, Database, DatabaseUrl, target
from sqlalchemy_locks.cli.render import Screen
from sqlalchemy_locks.errors import LockError

#: what a command ends with
FINE, BAD, FAILED, INTERRUPTED = 0, 1, 2, 130
PROGRAM = "sqlalchemy-locks"

_URL_HELP = (
    "The database, e.g. postgresql+psycopg://user:password@host/database. Others see it in the list of processes."
)
#: the options that name a database
NAMING = ("url", "config", "schema", "prefix")
_OPTIONS = (
    click.option("--url", metavar="URL", help=f"{_URL_HELP} [env: SQLALCHEMY_LOCKS_URL, DATABASE_URL]"),
    click.option(
        "-c", "--config", type=click.Path(exists=True, dir_okay=False), help="An alembic.ini, with its sqlalchemy.url."
    ),
    click.option("--schema", metavar="NAME", help="Where it was installed (PostgreSQL, YugabyteDB). [default: lock]"),
    click.option("--prefix", metavar="NAME", help="What its tables were installed under elsewhere. [default: lock_]"),
    click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document."),
)
_EPILOG = "Exit codes: 0 done, and all is well; 1 done, and the answer is bad; 2 couldn't be done."

Work = Callable[..., "int | None"]
F = TypeVar("F", bound=Callable[..., Any])


def on_database(*, make: bool = False) -> Callable[[Work], Callable[..., None]]:
    """Have a function ``(screen, database, **options)`` as a command on a database; it gives the exit code.

    :param make: it may make the database (SQLite's file).
    """

    def declare(work: Work) -> Callable[..., None]:
        @functools.wraps(work)
        def run(
            as_json: bool,
            url: str | None = None,
            config: str | None = None,
            schema: str | None = None,
            prefix: str | None = None,
            **options: Any,
        ) -> None:
            screen = Screen(as_json)
            with _documented(screen):
                app = _app()
                found = target(url, config, schema, prefix) if app is None else AppTarget.of(app.engine())
                if not make and not found.exists():
                    _end(screen, FAILED, "Unreachable", f"there is no file {found.url.database}")

                def reached(database: Database) -> int | None:
                    return work(screen, replace(database, connected_in=reach(database)), **options)

                sys.exit(_ended(screen, found, reached))

        decorated: Any = run
        for option in reversed(_OPTIONS):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return declare


@contextlib.contextmanager
def _documented(screen: Screen) -> Iterator[None]:
    """What Click will say of a wrong use, it says to people: a program is told before."""
    try:
        yield
    except click.UsageError as error:
        if screen.as_json:
            print(json.dumps({"error": "UsageError", "message": error.format_message()}, indent=2))
        raise


def _app() -> App | None:
    return click.get_current_context().find_object(App)


def program() -> str:
    """What is typed before a command's name."""
    app = _app()
    return PROGRAM if app is None else app.program


class Unreachable(Exception):
    """No connection is to be had."""


def reach(database: Database) -> float:
    """Connect once: whatever a driver raises then, it is about the URL, or the server. The pool keeps the connection.

    :return: how long that took, in seconds.
    :raises Unreachable: with what the driver said.
    """
    began = time.perf_counter()
    try:
        with database.engine.connect():
            pass
    except Exception as error:
        raise Unreachable(getattr(error, "orig", None) or error) from error
    return time.perf_counter() - began


def _ended(screen: Screen, found: DatabaseUrl, work: Callable[[Database], int | None]) -> int:
    try:
        return found.run(work) or FINE
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise  # Click's own, and that nobody reads on, which it ends quietly
    except KeyboardInterrupt:
        return INTERRUPTED
    except LockError as error:
        _end(screen, BAD, type(error).__name__, found.scrubbed(str(error)))
    except (ValueError, TypeError) as error:
        # what an operation refuses before any SQL; elsewhere it is ours, and its traceback is what helps
        if not _refused(error):
            _unforeseen(screen, found)
        _end(screen, FAILED, type(error).__name__, found.scrubbed(str(error)))
    except (DBAPIError, Unreachable, OSError) as error:
        # a disk that is full, or a server that has gone, as asyncpg tells of it
        cause: Any = error
        if not isinstance(error, OSError):
            cause = error.orig if isinstance(error, DBAPIError) else error.args[0]
        said = " ".join(str(cause).split()) or "no answer"
        _end(screen, FAILED, type(cause).__name__, f"{found.shown}: {found.scrubbed(said)}")
    except Exception:
        _unforeseen(screen, found)
    raise AssertionError("an error ends the process")


def _refused(error: BaseException) -> bool:
    """Whether it was raised by a sentence of ours, and not by something that went wrong on the way."""
    trace = error.__traceback__
    last = ""
    while trace is not None:
        last, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return last.startswith("sqlalchemy_locks.") and not last.startswith("sqlalchemy_locks.cli.")


def _unforeseen(screen: Screen, found: DatabaseUrl) -> None:
    click.echo(found.scrubbed(traceback.format_exc()), err=True)
    _end(screen, FAILED, "Unforeseen", "this should not have happened: please report it, with what is above")


def _end(screen: Screen, code: int, kind: str, said: str) -> None:
    if screen.as_json:
        with contextlib.suppress(OSError):  # perhaps that is what it has to say
            print(json.dumps({"error": kind, "message": said}, indent=2), flush=True)
    click.echo(f"{program()}: {escape_unprintable(said)}", err=True)
    sys.exit(code)


def confirmed(question: str, yes: bool, screen: Screen) -> None:
    """Ask before what can't be undone.

    :raises click.UsageError: where there is nobody to ask.
    """
    if yes:
        return
    if screen.as_json or not sys.stdin.isatty():
        raise click.UsageError(f"{escape_unprintable(question)} Nobody is there to be asked: say --yes.")
    click.confirm(escape_unprintable(question), abort=True, err=True)


def operator() -> str:
    """Who does it, for the records: the user of this machine."""
    try:
        return getpass.getuser()[:255] or "unknown"
    except (OSError, KeyError):  # a container's user may have no name
        return "unknown"


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SPELT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|)")


def seconds(value: Any) -> float:
    """The type of an option that is a duration: seconds, or a number with one of s, m, h, d."""
    match = _SPELT.fullmatch(str(value).strip())
    if match is None:
        raise click.BadParameter(f"{escape_unprintable(str(value))!r} is no duration: 90, 90s, 5m, 2h and 7d are.")
    return float(match[1]) * _UNITS[match[2]]


def lasting(*names: str, **given: Any) -> Callable[[F], F]:
    """An option that is a duration."""
    return click.option(*names, type=seconds, metavar="DURATION", **given)


@contextlib.contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: it ends the watch between two looks, and not a statement. A second one ends all."""
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, tell)
    try:
        yield lambda: told
    finally:
        signal.signal(signal.SIGINT, before)


class Group(click.Group):
    """Every command's help ends with what its exit codes mean."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not isinstance(cmd, click.Group):
            cmd.epilog = _EPILOG
        super().add_command(cmd, name)
