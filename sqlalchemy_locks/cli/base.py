"""What every command shares: the options that name a database, the answer, error handling and exit codes."""

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
from sqlalchemy_locks.cli.connect import AppDatabaseUrl, Database, DatabaseUrl, HostApp, find_database
from sqlalchemy_locks.cli.render import Screen
from sqlalchemy_locks.errors import LockError, NotInstalled

EXIT_OK, EXIT_NEGATIVE, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130
PROGRAM = "sqlalchemy-locks"
#: how long Ctrl-C may take to be noticed, in seconds
INTERRUPT_INTERVAL = 0.1

_URL_HELP = (
    "The database, e.g. postgresql+psycopg://user:password@host/database. Other users see it in the process list."
)
#: the parameters of the options that name a database
DATABASE_OPTIONS = ("url", "config", "schema", "prefix")
_OPTIONS = (
    click.option("--url", metavar="URL", help=f"{_URL_HELP} [env: SQLALCHEMY_LOCKS_URL, DATABASE_URL]"),
    click.option(
        "-c", "--config", type=click.Path(exists=True, dir_okay=False), help="An alembic.ini, with its sqlalchemy.url."
    ),
    click.option("--schema", metavar="NAME", help="Where it was installed (PostgreSQL, YugabyteDB). [default: lock]"),
    click.option("--prefix", metavar="NAME", help="The prefix of its tables elsewhere. [default: lock_]"),
    click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document."),
)
_EPILOG = "Exit codes: 0 done, and all is well; 1 done, and the answer is negative; 2 not done."

Work = Callable[..., "int | None"]
F = TypeVar("F", bound=Callable[..., Any])


def database_command(*, create: bool = False) -> Callable[[Work], Callable[..., None]]:
    """Make a command of a function ``(screen, database, **options)`` that returns an exit code, or ``None`` for 0.

    :param create: the command may create the database (SQLite's file).
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
            with _usage_errors_as_json(screen):
                app = _host_app()
                if app is None:
                    location = find_database(url, config, schema, prefix)
                else:
                    location = AppDatabaseUrl.of(app.engine())
                if not create and not location.exists():
                    _fail(screen, EXIT_ERROR, "Unreachable", f"there is no file {location.url.database}")

                def connected(database: Database) -> int | None:
                    return work(screen, replace(database, connected_in=_connect_once(database)), **options)

                sys.exit(_run(screen, location, connected))

        decorated: Any = run
        for option in reversed(_OPTIONS):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return declare


@contextlib.contextmanager
def _usage_errors_as_json(screen: Screen) -> Iterator[None]:
    """Print a usage error as JSON, too, where that was asked for: Click prints it as text only."""
    try:
        yield
    except click.UsageError as error:
        if screen.as_json:
            print(json.dumps({"error": "UsageError", "message": error.format_message()}, indent=2))
        raise


def _host_app() -> HostApp | None:
    return click.get_current_context().find_object(HostApp)


def program() -> str:
    """Return what is typed before a command's name."""
    app = _host_app()
    return PROGRAM if app is None else app.program


class Unreachable(Exception):
    """No connection could be made; the argument is the driver's error."""


def _connect_once(database: Database) -> float:
    """Connect, and return how many seconds that took. The pool keeps the connection.

    :raises Unreachable: for any error: whatever a driver raises here is about the URL or the server.
    """
    began = time.perf_counter()
    try:
        with database.engine.connect():
            pass
    except Exception as error:
        raise Unreachable(getattr(error, "orig", None) or error) from error
    return time.perf_counter() - began


def _run(screen: Screen, location: DatabaseUrl, work: Callable[[Database], int | None]) -> int:
    try:
        return location.run(work) or EXIT_OK
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise  # Click handles these, a closed pipe without a message
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LockError as error:
        code = EXIT_ERROR if isinstance(error, NotInstalled) else EXIT_NEGATIVE
        message = str(error).removesuffix(": make it with semaphore.create")  # for Python's users
        _fail(screen, code, type(error).__name__, location.redact(message))
    except (ValueError, TypeError) as error:
        # an operation's refusal is a message for the user; anything else is a defect, which needs its traceback
        if not _raised_by_library(error):
            _fail_unexpectedly(screen, location)
        _fail(screen, EXIT_ERROR, type(error).__name__, location.redact(str(error)))
    except (DBAPIError, Unreachable, OSError) as error:
        # OSError: a full disk, or a lost server as asyncpg reports it
        cause: Any = error
        if not isinstance(error, OSError):
            cause = error.orig if isinstance(error, DBAPIError) else error.args[0]
        message = " ".join(str(cause).split()) or "no answer"
        _fail(screen, EXIT_ERROR, type(cause).__name__, f"{location.display}: {location.redact(message)}")
    except Exception:
        _fail_unexpectedly(screen, location)
    raise AssertionError("an error ends the process")


def _raised_by_library(error: BaseException) -> bool:
    """Return whether an operation's own code raised the error, and not something that it called, or the commands."""
    trace = error.__traceback__
    last = ""
    while trace is not None:
        last, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return last.startswith("sqlalchemy_locks.") and not last.startswith("sqlalchemy_locks.cli.")


def _fail_unexpectedly(screen: Screen, location: DatabaseUrl) -> None:
    click.echo(location.redact(traceback.format_exc()), err=True)
    _fail(screen, EXIT_ERROR, "Unforeseen", "this should not have happened: please report it, with the above")


def _fail(screen: Screen, code: int, kind: str, message: str) -> None:
    if screen.as_json:
        with contextlib.suppress(OSError):  # writing to standard output may be what failed
            print(json.dumps({"error": kind, "message": message}, indent=2), flush=True)
    click.echo(f"{program()}: {escape_unprintable(message)}", err=True)
    sys.exit(code)


def confirm(question: str, yes: bool, screen: Screen) -> None:
    """Ask before something that can't be undone, unless ``--yes`` was given.

    :raises click.UsageError: without a terminal to ask on.
    """
    if yes:
        return
    if screen.as_json or not sys.stdin.isatty():
        raise click.UsageError(f"{escape_unprintable(question)} There is no terminal to ask on: give --yes.")
    click.confirm(escape_unprintable(question), abort=True, err=True)


def operator() -> str:
    """Return the user of this machine, who is recorded with a change."""
    try:
        return getpass.getuser()[:255] or "unknown"
    except (OSError, KeyError):  # a container's user may have no name
        return "unknown"


_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|)")


def seconds(value: Any) -> float:
    """Parse an option's duration: seconds, or a number with one of the units s, m, h, d."""
    match = _DURATION.fullmatch(str(value).strip())
    if match is None:
        raise click.BadParameter(f"{escape_unprintable(str(value))!r} is no duration: 90, 90s, 5m, 2h and 7d are.")
    return float(match[1]) * _UNITS[match[2]]


def seconds_of_unit(value: Any) -> float:
    """As :func:`seconds`; a number other than 0 needs its unit."""
    duration = seconds(value)
    if duration and str(value).strip()[-1].isdigit():
        raise click.BadParameter(f"{value} of what? {value}s, {value}m, {value}h or {value}d.")
    return duration


def duration_option(*names: str, needs_unit: bool = False, **settings: Any) -> Callable[[F], F]:
    """Return an option whose value is a duration, in seconds."""
    return click.option(*names, type=seconds_of_unit if needs_unit else seconds, metavar="DURATION", **settings)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, which so interrupts no statement.

    A second Ctrl-C interrupts as usual.
    """
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class Group(click.Group):
    """A group whose commands' help explains the exit codes."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not isinstance(cmd, click.Group):
            cmd.epilog = _EPILOG
        super().add_command(cmd, name)
