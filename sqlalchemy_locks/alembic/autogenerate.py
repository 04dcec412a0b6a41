"""Filters for ``env.py``: autogenerate ignores this library's tables, and new revisions stay off its branch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alembic import context
from alembic.autogenerate import comparators
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrationScript
from alembic.runtime.migration import MigrationContext
from alembic.util import coerce_resource_to_filename

from sqlalchemy_locks.alembic import steps
from sqlalchemy_locks.alembic.drift import check
from sqlalchemy_locks.alembic.options import Options, Refused

#: a child of Alembic's logger: the ``fileConfig()`` of an ``env.py`` disables all other existing loggers
_logger = logging.getLogger("alembic.sqlalchemy_locks")


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:
    """Exclude this library's tables from autogenerate: for ``context.configure(include_name=...)``.

    The schema and the prefix are read from ``alembic.ini`` (``sqlalchemy_locks_schema``,
    ``sqlalchemy_locks_prefix``): set them there, too, if a directive names others. If you have a filter of your own,
    let it call this one. A table of the ``target_metadata`` is compared nevertheless, for instance with
    ``sl.metadata()`` among them.
    """
    if type_ != "table" or name is None:
        return True
    schema, default = parent_names.get("schema_name"), "public"
    # without an environment, as in a programmatic comparison, there is no configuration
    configured = hasattr(context, "config")
    if configured:
        targets = context.get_context().opts.get("target_metadata") or ()
        targets = targets if isinstance(targets, Sequence) else (targets,)
        if any(target.tables.get(name if schema is None else f"{schema}.{name}") is not None for target in targets):
            return True
        default = str(context.get_bind().dialect.default_schema_name)
    options = Options.from_config(context.config if configured else None)
    tables = {table for step in steps.STEPS for names in steps.load(step).TABLES.values() for table in names}
    # MySQL and MariaDB may have folded the prefix to lower case
    if schema is None and name.lower() in {(options.prefix + table).lower() for table in tables}:
        return False
    # autogenerate calls PostgreSQL's default schema None
    schemas = (options.schema, None) if options.schema == default else (options.schema,)
    return schema not in schemas or name not in tables


def own_branch(
    context: MigrationContext, revision: str | Iterable[str | None], directives: list[MigrationScript]
) -> None:
    """Put new revisions into the app's branch: for ``context.configure(process_revision_directives=...)``.

    With the shipped revisions in ``version_locations`` and none of the app's own yet, ``alembic revision`` would put
    the new one on top of the shipped ones, into the folder where this library is installed; later it would ask which
    head is meant. With this function, a revision without ``--head`` goes to the app's own branch and folder. Set
    ``revision_environment = true`` so that it is called without ``--autogenerate`` too.
    """
    scripts = context.script
    if scripts is None:
        return
    # by the folder, not by the label: a revision that descends from a shipped one has its label, too
    shipped = coerce_resource_to_filename("sqlalchemy_locks.alembic_templates:versions").absolute()
    heads = [scripts.get_revision(head) for head in scripts.get_heads()]
    app_heads = [head.revision for head in heads if head is not None and Path(head.path).parent != shipped]
    folders = [folder for folder in scripts.version_locations if not folder.startswith("sqlalchemy_locks.")]
    for directive in directives:
        if directive.head not in (None, "head"):
            continue
        if len(app_heads) <= 1:
            directive.head = app_heads[0] if app_heads else "base"
        if not app_heads and directive.version_path is None and folders:
            directive.version_path = str(coerce_resource_to_filename(folders[0]).absolute())


@comparators.dispatch_for("schema")
def warn_of_drift(autogenerate: AutogenContext, _upgrade: Any, _schemas: Any) -> None:
    """Log what :func:`check` finds, during ``alembic check`` and autogenerate, which don't compare functions."""
    connection, options = autogenerate.connection, Options.from_config(autogenerate.migration_context.config)
    with suppress(Refused):  # an engine without locks
        if connection is not None and steps.recorded(connection, options):
            for sentence in check(connection, schema=options.schema, prefix=options.prefix):
                _logger.warning("Drift: %s", sentence)
