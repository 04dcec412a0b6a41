"""What every command shares: the options that name a database, error handling and exit codes."""

from __future__ import annotations

import functools
import getpass
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import click
from sqlalchemy.exc import DBAPIError

from sqlalchemy_locks._validation import escape_unprintable
from sqlalchemy_locks.cli.connect import Database, find_database
from sqlalchemy_locks.cli.render import Screen
from sqlalchemy_locks.errors import LockError, NotInstalled
from sqlalchemy_locks.sql.tables import DEFAULT_PREFIX, DEFAULT_SCHEMA

EXIT_OK, EXIT_NEGATIVE, EXIT_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

_URL_HELP = (
    "The database, e.g. postgresql+psycopg://user:password@host/database. Other users see it in the process list."
)
_OPTIONS = (
    click.option("--url", metavar="URL", help=f"{_URL_HELP} [env: SQLALCHEMY_LOCKS_URL, DATABASE_URL]"),
    click.option(
        "-c", "--config", type=click.Path(exists=True, dir_okay=False), help="An alembic.ini, with its sqlalchemy.url."
    ),
    click.option("--schema", metavar="NAME", help="Where it was installed (PostgreSQL, YugabyteDB). [default: lock]"),
    click.option("--prefix", metavar="NAME", help="The prefix of its tables elsewhere. [default: lock_]"),
    click.option("--json", "as_json", is_flag=True, help="Answer with one JSON document."),
)

Work = Callable[..., "int | None"]


def database_command(*, create: bool = False) -> Callable[[Work], Callable[..., None]]:
    """Make a command of a function ``(screen, database, **options)`` that returns an exit code, or ``None`` for 0.

    :param create: the command may create the database (SQLite's file).
    """

    def declare(work: Work) -> Callable[..., None]:
        @functools.wraps(work)
        def run(
            as_json: bool, url: str | None, config: str | None, schema: str | None, prefix: str | None, **options: Any
        ) -> None:
            database = find_database(url, config, schema, prefix)
            if database.is_absent and not create:
                _fail(EXIT_ERROR, f"{database.display}: there is no such file")
            location: dict[str, Any] = {}
            if database.schema != DEFAULT_SCHEMA:
                location["schema_translate_map"] = {DEFAULT_SCHEMA: database.schema}
            if database.prefix != DEFAULT_PREFIX:
                location["locks_prefix"] = database.prefix
            located = replace(database, engine=database.engine.execution_options(**location))
            sys.exit(_run(database, lambda: work(Screen(as_json), located, **options)))

        decorated: Any = run
        for option in reversed(_OPTIONS):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return declare


class _Unreachable(Exception):
    """No connection could be made; its cause is the driver's error."""


def _run(database: Database, work: Callable[[], int | None]) -> int:
    def connect_and_work() -> int | None:
        try:
            with database.engine.connect():
                pass
        except Exception as error:  # a driver may raise any error here, and each is about the URL or the server
            raise _Unreachable from error
        return work()

    try:
        return database.run(connect_and_work) or EXIT_OK
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise  # Click handles these
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LockError as error:
        message = str(error).removesuffix(": make it with semaphore.create")  # for Python's users
        _fail(EXIT_ERROR if isinstance(error, NotInstalled) else EXIT_NEGATIVE, database.redact(message))
    except ValueError as error:
        _fail(EXIT_ERROR, database.redact(str(error)))
    except (DBAPIError, _Unreachable, OSError) as error:
        # OSError: a full disk, or a lost server as asyncpg reports it
        cause: Any = error.__cause__ if isinstance(error, _Unreachable) else error
        message = " ".join(str(getattr(cause, "orig", cause)).split()) or "no answer"
        _fail(EXIT_ERROR, f"{database.display}: {database.redact(message)}")
    except Exception:
        click.echo(database.redact(traceback.format_exc()), err=True)
        _fail(EXIT_ERROR, "this should not have happened: please report it, with the above")


def _fail(code: int, message: str) -> NoReturn:
    click.echo(f"sqlalchemy-locks: {escape_unprintable(message)}", err=True)
    sys.exit(code)


def operator() -> str:
    """Return the user of this machine, who is recorded with a change."""
    try:
        return getpass.getuser()[:255] or "unknown"
    except (OSError, KeyError):  # a container's user may have no name
        return "unknown"


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(value: Any) -> float:
    """Parse an option's duration, a number with one of the units s, m, h, d, and return its seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", "0s" if value == "0" else str(value))
    if match is None:
        raise click.BadParameter(f"{escape_unprintable(str(value))!r} is no duration: 90s, 5m, 2h and 7d are.")
    return float(match[1]) * _UNITS[match[2]]
