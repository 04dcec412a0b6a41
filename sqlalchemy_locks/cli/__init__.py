"""The command line: ``sqlalchemy-locks``, or ``python -m sqlalchemy_locks``.

It shows what operations give, and runs nothing but operations. Click and Rich, which it is made with, are the extra
``cli``: an app that only locks doesn't carry them.

Every command ends with 0 when it was done and all is well, with 1 when it was done and the answer is bad (``check``
found a problem; there is no such semaphore), and with 2 when it couldn't be done (a wrong option, an unreachable
server).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import NoReturn

MISSING = "The command line needs Click and Rich, which aren't installed: pip install 'sqlalchemy-locks[cli]'"


def main() -> NoReturn:
    """Run the command line, with the arguments of the process."""
    if find_spec("click") is None or find_spec("rich") is None:
        print(MISSING, file=sys.stderr)
        sys.exit(2)
    from sqlalchemy_locks.cli.group import commands

    commands.main(prog_name="sqlalchemy-locks")
    raise AssertionError("a command ends its process")
