"""The commands inside an app's own command line: ``flask locks check`` is ``check`` on the app's engine.

They are the same commands without the options that name a database. They are imported when one of them is used, so
that a process that only serves requests doesn't load Rich.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click

from sqlalchemy_locks.cli import MISSING
from sqlalchemy_locks.cli.connect import HostApp

_URL_OPTION = re.compile(r" --url \S+")


class AppCommands(click.Group):
    """A group with the commands of ``sqlalchemy-locks``.

    :param app: the app whose engine they use.
    :param callback: called before each of them.
    """

    def __init__(self, name: str, app: HostApp, callback: Callable[..., Any] | None = None) -> None:
        super().__init__(
            name,
            callback=callback,
            short_help="Inspect and maintain locks, semaphores and queues.",
            help="Locks, semaphores and queues in the app's database.",
            context_settings={"obj": app},
        )
        self._program = app.program

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._load())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._load().get(cmd_name)

    def _load(self) -> dict[str, click.Command]:
        if find_spec("rich") is None:
            raise click.ClickException(MISSING)
        from sqlalchemy_locks.cli.group import commands

        return {name: _for_app(command, self._program) for name, command in commands.commands.items()}


def _for_app(command: click.Command, program: str) -> click.Command:
    """Return a copy without the options that name a database, whose help names the app's program."""
    from sqlalchemy_locks.cli.base import DATABASE_OPTIONS, PROGRAM

    adopted = copy.copy(command)
    adopted.params = [parameter for parameter in command.params if parameter.name not in DATABASE_OPTIONS]
    adopted.help = _URL_OPTION.sub("", command.help or "").replace(f"{PROGRAM} ", f"{program} ")
    if isinstance(command, click.Group) and isinstance(adopted, click.Group):
        adopted.commands = {name: _for_app(each, program) for name, each in command.commands.items()}
    return adopted
