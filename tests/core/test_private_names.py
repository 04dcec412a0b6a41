"""The private names of SQLAlchemy by which an operation is a value: all in one file, and each still has its meaning."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from sqlalchemy import Select, select, text
from sqlalchemy.orm import Session
from sqlalchemy.sql.base import CompileState

import sqlalchemy_locks

PACKAGE = pathlib.Path(sqlalchemy_locks.__file__).parent
NAMES = [
    "_execute_on_connection",
    "_get_plugin_class_for_plugin",
    "_effective_plugin_target",
    "_autoflush",
    "_prepare_impl",
    "_compiler",
    "statement._values",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_used_in_one_module(name: str) -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(rf"\b{name}\b", path.read_text())
    }
    assert users == {"core/operation.py"}


def test_statements_have_the_hooks_of_an_operation() -> None:
    assert callable(Select._execute_on_connection)
    assert callable(Session._autoflush)
    plugin: Any = CompileState._get_plugin_class_for_plugin(select(text("1")), "orm")
    assert callable(plugin.orm_pre_session_exec)
    assert callable(plugin.orm_execute_statement)
