"""explain: whether an index serves a capture, or the database goes through everything that could be taken.

It asks the server for the plan, and executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, Connection
from sqlalchemy.sql import visitors

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import CaptureSpec, counting, give, ordered, select_candidates
from sqlalchemy_locks.core.operation import BuildContext, Operation, build_context

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` has found; ``str()`` of it is for people.

    >>> with engine.connect() as connection:
    ...     explanation = sl.explain(sl.Queue().capture(10, queue="mail"), connection)
    >>> log.info("%s", explanation)
    """

    #: the statement that chooses the rows, its values in it
    statement: str
    #: what the server says of its plan, a line for each step
    plan: tuple[str, ...]
    #: what makes it slow: a sort over all candidates, a walk through the whole table; none when an index serves it
    problems: tuple[str, ...]
    #: the index that would serve it, where there is a problem and no such index
    missing: str | None

    def __str__(self) -> str:
        parts = [self.statement, *(f"  {line}" for line in self.plan)]
        parts += [f"problem: {problem}" for problem in self.problems] or ["an index serves it"]
        return "\n".join([*parts, *([f"missing: {self.missing}"] if self.missing else [])])


def explain(operation: Operation[Any], connection: Connection | Session) -> Explanation:
    """Ask the server how it would find the rows of a capture.

    :param operation: a capture: ``sl.capture``, ``Queue.capture``, ``StateTransition.capture`` and their sweeps.
    :param connection: where to ask; the plan is that of its database as it is now, of its rows and statistics.
    :raises TypeError: for an operation that captures nothing.

    >>> with engine.connect() as connection:
    ...     print(sl.explain(queue.capture(10, queue="mail"), connection))
    """
    body = operation._body
    if not isinstance(body, CaptureImpl):
        raise TypeError(f"explain tells about captures, and {operation!r} is none")
    asked: Any = connection if isinstance(connection, Connection) else connection.connection()
    context = build_context(asked.dialect, {**asked.get_execution_options(), **operation.get_execution_options()})
    taking = body.taken(context)
    statement = _spelt(_chooses(body, taking, context), operation, asked)
    plan, problems = _asked(statement, asked, taking, context)
    if not problems:
        return Explanation(statement, tuple(plan), (), None)
    with context.backend.by_index(asked) as urged:
        if urged and not _asked(statement, asked, taking, context)[1]:
            told = "though there is an index that serves: the planner takes the table for small; ANALYZE it"
            return Explanation(statement, tuple(plan), (f"{problems[0]}, {told}",), None)
    return Explanation(statement, tuple(plan), tuple(problems), _missing(taking, context))


def _asked(
    statement: str, connection: Connection, taking: CaptureSpec, context: BuildContext
) -> tuple[list[str], list[str]]:
    rows = connection.exec_driver_sql(f"{context.backend.explain} {statement}").mappings().all()
    plan, problems = _READ[context.backend.locking](rows, taking)
    return plan, problems


def _chooses(body: CaptureImpl, taking: CaptureSpec, context: BuildContext) -> Any:
    if context.backend.locking == "functions":
        return counting(taking) if body.counts else ordered(taking)
    return select_candidates(taking, context.backend.locking, locks=False)


def _spelt(statement: Any, operation: Operation[Any], connection: Connection) -> str:
    kw = {"schema_translate_map": connection.get_execution_options().get("schema_translate_map")}
    give(statement, connection.dialect, operation._values)
    compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}, **kw)
    return str(compiled)


def _postgresql(rows: Any, taking: CaptureSpec) -> tuple[list[str], list[str]]:
    (told,) = rows[0].values()
    document = json.loads(told) if isinstance(told, str) else told
    plan, problems = [], []
    for depth, node, searching in _nodes(document[0]["Plan"]):
        name = node["Node Type"]
        on = " ".join(f"{node[key]}" for key in ("Index Name", "Relation Name") if key in node)
        plan.append(f"{'  ' * depth}{name}{f' on {on}' if on else ''}")
        if not searching:
            continue  # how the rows that were found are changed: by their key, or all of a small table at once
        if name == "Seq Scan" and node["Relation Name"] == taking.table.name:
            problems.append(f"the whole of {taking.table} is gone through")
        if name in ("Sort", "Incremental Sort"):
            problems.append("all candidates are sorted before the first is taken")
    return plan, problems


def _nodes(node: Any, depth: int = 0, searching: bool = False) -> Iterator[tuple[int, Any, bool]]:
    """Each step with its depth, and whether it is part of the search."""
    searching = searching or node.get("Subplan Name") == "CTE locks_chosen"
    yield depth, node, searching
    for below in node.get("Plans", ()):
        yield from _nodes(below, depth + 1, searching)


def _innodb(rows: Any, taking: CaptureSpec) -> tuple[list[str], list[str]]:
    plan, problems = [], []
    for row in rows:
        extra = row["Extra"] or ""
        plan.append(f"{row['table']}: {row['type']}, key {row['key']}, {row['rows']} rows; {extra}")
        if row["table"] != taking.table.name:
            continue  # the candidates that were found already
        if row["type"] == "ALL" or (row["type"] == "index" and taking.order_by and "filesort" in extra):
            problems.append(f"the whole of {taking.table} is gone through, and locked on the way")
        if "filesort" in extra:
            problems.append("all candidates are sorted, and locked, before the first is taken")
    return plan, problems


def _sqlite(rows: Any, taking: CaptureSpec) -> tuple[list[str], list[str]]:
    plan = [str(row["detail"]) for row in rows]
    problems = []
    for line in plan:
        # in the order of a key it is gone through all the same
        walks = "USING" not in line or "sqlite_autoindex" in line
        if line.startswith(f"SCAN {taking.table.name}") and walks:
            problems.append(f"the whole of {taking.table} is gone through")
        if "TEMP B-TREE FOR" in line:
            problems.append("all candidates are sorted before the first is taken")
    return plan, problems


_READ = {"functions": _postgresql, "rows": _innodb, "file": _sqlite}


def _missing(taking: CaptureSpec, context: BuildContext) -> str:
    """An index that has the conditions at its head, and then the order."""
    order = _columns(taking.order_by, taking)
    conditions = [column for column in _columns(taking.where, taking) if column not in order]
    if taking.one_of is not None and taking.one_of[0].name not in conditions:
        conditions.append(taking.one_of[0].name)
    if context.backend.schemas and order and conditions:
        return f"an index on {taking.table} ({', '.join(order)}) WHERE the conditions on {', '.join(conditions)}"
    return f"an index on {taking.table} ({', '.join([*conditions, *order])})"


def _columns(expressions: Any, taking: CaptureSpec) -> list[str]:
    found: dict[str, None] = {}
    for expression in expressions:
        clause = expression.__clause_element__() if hasattr(expression, "__clause_element__") else expression
        for element in visitors.iterate(clause):
            base = getattr(element, "base_columns", ())
            found |= {c.name: None for c in base if isinstance(c, Column) and c.table is taking.table}
    return list(found)
