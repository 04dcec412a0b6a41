"""docs/sql.md shows the statements that are executed."""

from __future__ import annotations

import pytest

from tests.conftest import PLAIN, Servers
from tests.docs import sql_page
from tests.docs.pages import ROOT


@pytest.mark.parametrize("name", sql_page.ENGINES)
def test_sql_page_shows_executed_statements(name: str, servers: Servers) -> None:
    engine = sql_page.prepare(servers.fresh(name, PLAIN[name]))
    try:
        now = sql_page.executed(engine)
    finally:
        engine.dispose()
    text = sql_page.PAGE.read_text()
    shown = sql_page.of_page(text, name)
    assert shown.keys() == now.keys()
    stale = [each for each in now if sql_page.plain(shown[each]) != sql_page.plain(now[each])]
    assert stale == [], "run python -m tests.docs.sql_page"


@pytest.mark.parametrize("file", sql_page.FUNCTIONS.values())
def test_sql_page_shows_shipped_functions(file: str) -> None:
    assert (ROOT / "alembic_templates" / "sql" / file).read_text() in sql_page.PAGE.read_text()
