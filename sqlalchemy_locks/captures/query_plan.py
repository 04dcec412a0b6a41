"""explain: whether an index serves a capture, or the database sorts or scans all candidates.

It asks the server for the plan, and executes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, Connection
from sqlalchemy.sql import visitors

from sqlalchemy_locks.captures.operation import CaptureImpl
from sqlalchemy_locks.captures.statements import SEARCH, CaptureSpec, bind_values, select_candidates
from sqlalchemy_locks.core.operation import BuildContext, Operation, build_context

if TYPE_CHECKING:
    from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Explanation:
    """The plan of a capture and its problems, from :func:`explain`; ``str()`` formats it.

    >>> with engine.connect() as connection:
    ...     explanation = sl.explain(sl.Queue().capture(10, queue="mail"), connection)
    >>> log.info("%s", explanation)
    """

    #: the statement that searches the rows, with its values
    statement: str
    #: the server's plan, one line for each step
    plan: tuple[str, ...]
    #: what makes it slow: a sort of all candidates, a scan of the whole table; empty if an index serves it
    problems: tuple[str, ...]
    #: the index that would serve it, if there is a problem and no such index
    missing: str | None

    def __str__(self) -> str:
        parts = [self.statement, *(f"  {line}" for line in self.plan)]
        parts += [f"problem: {problem}" for problem in self.problems] or ["an index serves it"]
        return "\n".join([*parts, *([f"missing: {self.missing}"] if self.missing else [])])


def explain(operation: Operation[Any], connection: Connection | Session) -> Explanation:
    """Ask the server how it would find the rows of a capture.

    :param operation: a capture: ``sl.capture``, ``Queue.capture``, ``StateTransition.capture`` and their sweeps.
    :param connection: a connection or session; the plan depends on the rows and statistics of its database.
    :return: the plan, its problems, and an index that would solve them.
    :raises TypeError: for anything else than a capture, and than a connection or session.

    >>> with engine.connect() as connection:
    ...     print(sl.explain(queue.capture(10, queue="mail"), connection))
    """
    impl = getattr(operation, "_impl", None)
    if not isinstance(impl, CaptureImpl):
        raise TypeError(f"explain takes a capture, and {operation!r} is none")
    target: Any = connection
    if not isinstance(connection, Connection):
        if not hasattr(connection, "connection"):
            raise TypeError(f"explain takes a Connection or a Session, not {connection!r}")
        target = connection.connection()
    context = build_context(target.dialect, {**target.get_execution_options(), **operation.get_execution_options()})
    spec = impl.build_spec(context)
    statement = _as_text(search_statement(impl, spec, context), operation, target)
    plan, problems = _plan_of(statement, target, spec, context)
    if not problems:
        return Explanation(statement, tuple(plan), (), None)
    with context.backend.prefer_indexes(target) as by_index:
        if by_index and not _plan_of(statement, target, spec, context)[1]:
            problem = (
                f"{problems[0]}, though there is an index that serves: the planner expects a small table; ANALYZE it"
            )
            return Explanation(statement, tuple(plan), (problem,), None)
    return Explanation(statement, tuple(plan), tuple(problems), _missing(spec, context))


def search_statement(impl: CaptureImpl, spec: CaptureSpec, context: BuildContext) -> Any:
    """Return the statement whose plan shows how the rows are found."""
    if context.backend.writable_ctes:
        return impl.single_statement(spec)
    return select_candidates(spec, locks=False, merges=not context.backend.partial_indexes)


def _as_text(statement: Any, operation: Operation[Any], connection: Connection) -> str:
    kw = {"schema_translate_map": connection.get_execution_options().get("schema_translate_map")}
    bind_values(statement, connection.dialect, operation._values)
    compiled = statement.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}, **kw)
    return str(compiled)


def _plan_of(
    statement: str, connection: Connection, spec: CaptureSpec, context: BuildContext
) -> tuple[list[str], list[str]]:
    rows = connection.exec_driver_sql(f"{context.backend.explain_prefix} {statement}").mappings().all()
    return context.backend.read_plan(rows, spec.table, SEARCH, bool(spec.order_by))


def _missing(spec: CaptureSpec, context: BuildContext) -> str:
    """Return an index that begins with the conditions, followed by the order."""
    order = _columns(spec.order_by, spec)
    conditions = [column for column in _columns(spec.where, spec) if column not in order]
    if spec.one_of is not None and spec.one_of[0].name not in conditions:
        conditions.append(spec.one_of[0].name)
    if context.backend.partial_indexes and order and conditions:
        return f"an index on {spec.table} ({', '.join(order)}) WHERE the conditions on {', '.join(conditions)}"
    return f"an index on {spec.table} ({', '.join([*conditions, *order])})"


def _columns(expressions: Any, spec: CaptureSpec) -> list[str]:
    found: dict[str, None] = {}
    for expression in expressions:
        clause = expression.__clause_element__() if hasattr(expression, "__clause_element__") else expression
        for element in visitors.iterate(clause):
            base = getattr(element, "base_columns", ())
            found |= {c.name: None for c in base if isinstance(c, Column) and c.table is spec.table}
    return list(found)
