"""The commands as an app's own: ``flask locks check`` is ``sqlalchemy-locks check`` on the engine that the app has.

They are the very same commands, without the options that name a database, and loaded when one of them is asked for: an
app that serves needs neither them nor Rich.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import click

from sqlalchemy_locks.cli import MISSING
from sqlalchemy_locks.cli.connect import App

_NAMED = re.compile(r" --url \S+")


class Adopted(click.Group):
    """A group with the commands of ``sqlalchemy-locks``.

    :param app: whose they are.
    :param callback: what is to be done before any of them.
    """

    def __init__(self, name: str, app: App, callback: Callable[..., Any] | None = None) -> None:
        super().__init__(
            name,
            callback=callback,
            short_help="Look at locks, semaphores and queues; mend them.",
            help="Locks, semaphores and queues in the app's database.",
            context_settings={"obj": app},
        )
        self._program = app.program

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._adopted())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._adopted().get(cmd_name)

    def _adopted(self) -> dict[str, click.Command]:
        if find_spec("rich") is None:
            raise click.ClickException(MISSING)
        from sqlalchemy_locks.cli.group import commands

        return {name: _twin(each, self._program) for name, each in commands.commands.items()}


def _twin(command: click.Command, program: str) -> click.Command:
    from sqlalchemy_locks.cli.base import NAMING, PROGRAM

    twin = copy.copy(command)
    twin.params = [one for one in command.params if one.name not in NAMING]
    twin.help = _NAMED.sub("", command.help or "").replace(f"{PROGRAM} ", f"{program} ")
    if isinstance(command, click.Group) and isinstance(twin, click.Group):
        twin.commands = {name: _twin(each, program) for name, each in command.commands.items()}
    return twin
