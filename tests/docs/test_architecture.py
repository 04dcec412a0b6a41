"""ARCHITECTURE.md names files that exist, and the floors that import-linter checks."""

from __future__ import annotations

import re
import sys

import pytest

from tests.docs.pages import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py|\.toml))`", TEXT)))


def test_every_file_and_folder_exists() -> None:
    assert [
        name for name in NAMED if not any((root / name).exists() for root in (ROOT, ROOT / "sqlalchemy_locks"))
    ] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in the standard library from Python 3.11 on")
def test_the_floors_are_those_that_are_checked() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [{name.removeprefix("sqlalchemy_locks.") for name in re.split(r"\s*[|:]\s*", layer)} for layer in layers]
    rows = re.findall(r"^\| (\d) \| ([^|]*) \|", TEXT, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(layers), 0, -1))
    shown = [{name.removesuffix(".py") for name in re.findall(r"`(.*?)`", packages)} for _, packages in rows]
    assert shown == checked
