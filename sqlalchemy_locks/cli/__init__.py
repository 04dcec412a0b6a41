"""The command line: ``sqlalchemy-locks``, or ``python -m sqlalchemy_locks``.

It executes operations only, and shows their results. It needs Click and Rich, the extra ``cli``, which an app that
only locks doesn't install.

Exit codes: 0, done and all is well; 1, done, and the answer is negative (``check`` found a problem, there is no such
semaphore); 2, not done (a wrong option, an unreachable server).
"""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from typing import NoReturn

MISSING = "The command line needs Click and Rich, which aren't installed: pip install 'sqlalchemy-locks[cli]'"


def main() -> NoReturn:
    """Run the command line with the arguments of the process."""
    if find_spec("click") is None or find_spec("rich") is None:
        print(MISSING, file=sys.stderr)
        sys.exit(2)
    from sqlalchemy_locks.cli.group import commands

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes what the encoding can't represent
    commands.main(prog_name="sqlalchemy-locks")
    raise AssertionError("a command ends its process")
