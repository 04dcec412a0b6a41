"""Where to install, and for whom: one frozen value, validated before any SQL is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from alembic.config import Config
from alembic.util import CommandError

Locking = Literal["native", "advisory", "table"]

# 44: MySQL allows 64 characters, and up to 20 of a table's or an index's name follow the prefix
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,43}")
_GRANTEE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_$.\-]*(@[A-Za-z0-9_$.\-/:%]+)?")


class Refused(CommandError, ValueError):
    """The request can't be installed; nothing was executed.

    Also a ``CommandError``, so that the ``alembic`` command prints the sentence instead of a traceback.
    """


@dataclass(frozen=True)
class Options:
    """Where the objects are, and which roles may use them.

    :param schema: the schema, on PostgreSQL and YugabyteDB.
    :param prefix: the prefix of the tables' names on MySQL, MariaDB and SQLite, which have no schemas.
    :param grant_to: the role that the app runs as, or several; each is granted what the locks need and no more.
        MySQL and MariaDB also accept ``"user@host"``.
    :param locking: ``"native"``: advisory locks on PostgreSQL, and on YugabyteDB where it has them
        (``yb_enable_advisory_locks``), rows of a table elsewhere. On PostgreSQL and YugabyteDB, ``"advisory"`` and
        ``"table"`` choose one of the two.
    :raises Refused: for a name that would need escaping, or an unknown ``locking``. A ``ValueError``.
    """

    schema: str = "lock"
    prefix: str = "lock_"
    grant_to: str | Sequence[str] | None = None
    locking: Locking = "native"

    @property
    def grantees(self) -> tuple[str, ...]:
        """The roles of ``grant_to``."""
        return (self.grant_to,) if isinstance(self.grant_to, str) else tuple(self.grant_to or ())

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.schema):
            raise Refused(
                f"the schema {self.schema!r} is refused: a letter or underscore, then up to 62 letters, "
                "digits, underscores or dollar signs"
            )
        if not _PREFIX.fullmatch(self.prefix):
            raise Refused(
                f"the prefix {self.prefix!r} is refused: a letter or underscore, then up to 43 letters, "
                "digits, underscores or dollar signs"
            )
        for grantee in self.grantees:
            if not _GRANTEE.fullmatch(grantee):
                raise Refused(
                    f"the role {grantee!r} is refused: letters, digits and _ $ . - are allowed in a role's name, "
                    "and on MySQL and MariaDB an @ and a host may follow"
                )
        if self.locking not in get_args(Locking):
            raise Refused(f"locking is 'native', 'advisory' or 'table', not {self.locking!r}")

    @classmethod
    def from_config(cls, config: Config | None) -> Options:
        """Read the options of the shipped revisions: ``sqlalchemy_locks_*`` in ``alembic.ini`` or ``pyproject.toml``.

        ``sqlalchemy_locks_grant_to`` may name several roles, separated by commas or as a TOML list.
        """
        if config is None:
            return cls()

        def option(name: str, default: Any) -> Any:
            return config.get_alembic_option(f"sqlalchemy_locks_{name}", default)

        # a list in TOML, though Alembic's annotation is str
        grantees = option("grant_to", "")
        if isinstance(grantees, str):
            grantees = [name.strip() for name in grantees.split(",") if name.strip()]
        return cls(option("schema", cls.schema), option("prefix", cls.prefix), grantees, option("locking", cls.locking))
