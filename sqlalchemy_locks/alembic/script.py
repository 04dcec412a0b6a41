"""How a step writes SQL: names quoted for the engine, one command a statement, the same online and offline.

Steps are frozen once released, and what is here is part of what they write: a test compares every
step's offline script with the one that was released.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any, Literal

from alembic.operations import Operations
from sqlalchemy import DDL
from sqlalchemy.engine import Dialect

from sqlalchemy_locks.alembic.options import Options, Refused

Family = Literal["postgresql", "mysql", "sqlite"]

_FAMILIES: dict[str, Family] = {
    "postgresql": "postgresql",
    "yugabytedb": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_QUALIFIER = re.compile(r"\block\.(?=[a-z_])")


def family(dialect: Dialect) -> Family:
    """The engines that get one and the same script; the server itself tells YugabyteDB from PostgreSQL.

    :raises Refused: for an engine that this library doesn't know.
    """
    try:
        return _FAMILIES[dialect.name]
    except KeyError:
        known = ", ".join(_FAMILIES)
        raise Refused(f"no locks can be installed on {dialect.name}: the engines are {known}") from None


def shipped(path: str) -> str:
    """A file of ``alembic_templates/sql``: one command, its schema written ``lock``."""
    folder = files("sqlalchemy_locks.alembic_templates") / "sql"
    return (folder / path).read_text("utf-8").strip().removesuffix(";")


class InstallPlace:
    """Where the objects of one installation are, as SQL writes it.

    The names can stand in SQL as they are: the options allow no character in them that could end a
    string or an identifier.
    """

    def __init__(self, dialect: Dialect, options: Options) -> None:
        self.options = options
        self.family: Family = family(dialect)
        preparer = dialect.identifier_preparer
        self._quotes = preparer.initial_quote, preparer.final_quote
        # as the files have it for psql: quoted, the same function would have another text
        self.schema = "lock" if options.schema == "lock" else self._quote(options.schema)

    def _quote(self, name: str) -> str:
        # not by the preparer itself, which doubles the percent sign of a host for some drivers
        return name.join(self._quotes)

    def body(self, path: str) -> str:
        """A shipped file, in our schema."""
        return _QUALIFIER.sub(lambda _: f"{self.schema}.", shipped(path))

    def table(self, name: str) -> str:
        """A table's quoted name, in our schema or behind our prefix."""
        if self.family == "postgresql":
            return f"{self.schema}.{name}"
        return self._quote(self.options.prefix + name)

    def located(self, name: str) -> tuple[str | None, str]:
        """A table's schema and name, unquoted, as SQLAlchemy's inspector takes them."""
        if self.family == "postgresql":
            return self.options.schema, name
        return None, self.options.prefix + name

    def grantee(self, name: str) -> str:
        """A role's quoted name; on MySQL and MariaDB a host may be part of it."""
        if self.family == "postgresql":
            return self._quote(name)
        return "@".join(self._quote(part) for part in name.split("@"))


class InstallScript(InstallPlace):
    """Writes the SQL of one step, one command a statement."""

    def __init__(self, op: Operations, options: Options) -> None:
        super().__init__(op.get_context().dialect, options)
        self._op = op

    def run(self, command: str) -> None:
        """Execute one command, or write it to the offline script."""
        # DDL(), because text() would take a colon for a parameter; it is untyped in some releases
        ddl: Any = DDL
        self._op.execute(ddl(command.replace("%", "%%")))

    def block(self, *lines: str, declare: str = "") -> None:
        """Run an anonymous block of plpgsql: decisions that only the server can take."""
        head = f"DECLARE\n  {declare}\n" if declare else ""
        body = "\n".join(lines)
        self.run(f"DO $sqlalchemy_locks$\n{head}BEGIN\n{body}\nEND\n$sqlalchemy_locks$")
