"""docs/reference.md lists every public name; the names that it takes docstrings from exist."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

import sqlalchemy_locks as sl
from tests.docs.pages import ROOT

TEXT = (ROOT / "docs" / "reference.md").read_text()
SHOWN = re.findall(r"^::: (\S+)$", TEXT, flags=re.M)
LISTED = {name.rpartition(".")[2] for name in SHOWN} | set(re.findall(r"^        - (\w+)$", TEXT, flags=re.M))


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(path)


@pytest.mark.parametrize("path", SHOWN)
def test_shown_name_exists(path: str) -> None:
    assert found(path).__doc__


def test_every_public_name_is_shown() -> None:
    modules = [importlib.import_module(f"sqlalchemy_locks.{name}") for name in ("errors", "values")]
    public = {*sl.__all__, *sl.lock.__all__, *sl.semaphore.__all__} - {"sqlite"}
    assert public - LISTED - {name for module in modules for name in vars(module)} == set()
