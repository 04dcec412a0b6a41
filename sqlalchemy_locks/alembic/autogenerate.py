"""What keeps ``alembic revision`` off our things: autogenerate off our tables, new revisions off our branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from alembic import context
from alembic.operations import MigrationScript
from alembic.runtime.migration import MigrationContext
from alembic.util import coerce_resource_to_filename

from sqlalchemy_locks.alembic.options import Options
from sqlalchemy_locks.alembic.steps import STEPS, load

LABEL = "sqlalchemy_locks"

IncludeName = Callable[[Any, Any, Any], bool]


def include_name(name: str | None, type_: str, parent_names: Mapping[Any, str | None]) -> bool:
    """For ``context.configure(include_name=...)``: leaves our tables alone and nothing else.

    The schema and the prefix are those of ``alembic.ini`` (``sqlalchemy_locks_schema``,
    ``sqlalchemy_locks_prefix``). Where a directive names others, or you have a filter already, take
    :func:`include_name_for`.
    """
    # without an environment, as in a programmatic comparison, there is no configuration to ask
    config = context.config if hasattr(context, "config") else None
    options = Options.configured(config)
    return not _ours(name, type_, parent_names, options.schema, options.prefix)


def include_name_for(
    *, schema: str | None = "lock", prefix: str = "lock_", also: IncludeName | None = None
) -> Callable[[str | None, str, MutableMapping[Any, str | None]], bool]:
    """The same filter for another schema or prefix, or together with one of your own.

    :param schema: where our tables are on PostgreSQL and YugabyteDB; ``None`` for the connection's
        default schema.
    :param prefix: what precedes our tables' names elsewhere.
    :param also: your own filter, asked for every name that is not ours.
    """

    def included(name: str | None, type_: str, parent_names: MutableMapping[Any, str | None]) -> bool:
        if _ours(name, type_, parent_names, schema, prefix):
            return False
        return also is None or also(name, type_, parent_names)

    return included


def own_branch(
    context: MigrationContext, revision: str | Iterable[str | None], directives: list[MigrationScript]
) -> None:
    """For ``context.configure(process_revision_directives=...)``: keeps new revisions out of our branch.

    With the shipped revisions in ``version_locations`` and none of your own yet, ``alembic revision``
    would put yours on top of ours, into the folder where this library is installed; later it would ask
    which head is meant. With this, a revision for which no ``--head`` was given goes to your own branch
    and folder. ``revision_environment = true`` has it asked without ``--autogenerate`` too.
    """
    scripts = context.script
    if scripts is None:
        return
    heads = [scripts.get_revision(head) for head in scripts.get_heads()]
    own = [head.revision for head in heads if head is not None and LABEL not in head.branch_labels]
    folders = [folder for folder in scripts.version_locations if not folder.startswith("sqlalchemy_locks.")]
    for directive in directives:
        if directive.head not in (None, "head"):
            continue
        if len(own) <= 1:
            directive.head = own[0] if own else "base"
        if not own and directive.version_path is None and folders:
            directive.version_path = str(coerce_resource_to_filename(folders[0]).absolute())


def _ours(name: str | None, type_: str, parents: Mapping[Any, str | None], schema: str | None, prefix: str) -> bool:
    if type_ != "table" or name is None:
        return False
    if parents.get("schema_name") is None and name in {prefix + table for table in _names()}:
        return True
    return parents.get("schema_name") == schema and name in _names()


def _names() -> set[str]:
    return {name for step in STEPS for tables in load(step).TABLES.values() for name in tables}
