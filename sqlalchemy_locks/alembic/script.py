"""How a step writes SQL: names quoted for the engine, one command per statement, the same online and offline.

A released step never changes, and its SQL depends on this module: a test compares every step's offline script with the
released one.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from alembic.operations import Operations
from sqlalchemy import DDL
from sqlalchemy.engine import Dialect

from sqlalchemy_locks.alembic.options import Options, Refused
from sqlalchemy_locks.dialects import Backend, backend_named
from sqlalchemy_locks.dialects.base import Family
from sqlalchemy_locks.errors import Unsupported

# the steps import everything that they need from here and from options
__all__ = ["Family", "InstallPlace", "InstallScript", "shipped"]

_QUALIFIER = re.compile(r"\block\.(?=[a-z_])")


def shipped(path: str) -> str:
    """Read a file of ``alembic_templates/sql``: one command, its schema written ``lock``."""
    folder = files("sqlalchemy_locks.alembic_templates") / "sql"
    return (folder / path).read_text("utf-8").strip().removesuffix(";")


class InstallPlace:
    """The names of one installation's objects, as SQL writes them.

    The names need no escaping: the options allow no character that could end a string or an identifier.

    :raises Refused: for an unsupported engine.
    """

    def __init__(self, dialect: Dialect, options: Options) -> None:
        self.options = options
        try:
            self.backend: Backend = backend_named(dialect.name)
        except Unsupported as error:
            raise Refused(str(error)) from None
        self.family: Family = self.backend.family
        preparer = dialect.identifier_preparer
        self._quotes = preparer.initial_quote, preparer.final_quote
        # unquoted, as in the files: quoted, the same function would have another text
        self.schema = "lock" if options.schema == "lock" else self._quote(options.schema)

    def _quote(self, name: str) -> str:
        # not by the preparer, which doubles the percent sign of a host for some drivers
        return name.join(self._quotes)

    def body(self, path: str) -> str:
        """Read a shipped file, with the schema of this installation."""
        return _QUALIFIER.sub(lambda _: f"{self.schema}.", shipped(path))

    def table(self, name: str) -> str:
        """Return a table's quoted name, with the schema or the prefix."""
        if self.backend.schemas:
            return f"{self.schema}.{name}"
        return self._quote(self.options.prefix + name)

    def schema_and_name(self, name: str) -> tuple[str | None, str]:
        """Return a table's schema and name, unquoted, as SQLAlchemy's inspector takes them."""
        if self.backend.schemas:
            return self.options.schema, name
        return None, self.options.prefix + name

    def grantee(self, name: str) -> str:
        """Return a role's quoted name; on MySQL and MariaDB a host may be part of it."""
        if self.backend.schemas:
            return self._quote(name)
        return "@".join(self._quote(part) for part in name.split("@"))


class InstallScript(InstallPlace):
    """Writes the SQL of one step, one command per statement."""

    def __init__(self, op: Operations, options: Options) -> None:
        super().__init__(op.get_context().dialect, options)
        self._op = op

    def run(self, command: str) -> None:
        """Execute one command, or write it to the offline script."""
        # DDL(), because text() would parse a colon as a parameter; DDL is untyped in some releases
        ddl: Any = DDL
        self._op.execute(ddl(command.replace("%", "%%")))

    def block(self, *lines: str, declare: str = "") -> None:
        """Run an anonymous block of plpgsql: decisions that only the server can make."""
        head = f"DECLARE\n  {declare}\n" if declare else ""
        body = "\n".join(lines)
        self.run(f"DO $sqlalchemy_locks$\n{head}BEGIN\n{body}\nEND\n$sqlalchemy_locks$")
