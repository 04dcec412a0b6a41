"""mypy and pyright accept a file of user code, and reject it if one of its types is changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CODE = (HERE / "user_code.py").read_text()
#: a type in the code, and a wrong one to replace it
WRONG = [
    ('sl.lock.try_exclusive("a")), bool | None)', 'sl.lock.try_exclusive("a")), int | None)'),
    ("sl.lock.row(Customer, 42)), Customer | None)", "sl.lock.row(Customer, 42)), Base | None)"),
    ("locks.run(sl.lock.vacuum()), int | None)", "locks.run(sl.lock.vacuum()), str | None)"),
    ('values={"locked": False})), list[Any])', 'values={"locked": False})), Any)'),
    ("held.session, AsyncSession)", "held.session, Session)"),
    ('mutex.acquire_token("a"), int | None)', 'mutex.acquire_token("a"), int)'),
    ('await Mutex(client).acquire("a"), bool)', 'Mutex(client).acquire("a"), bool)'),
    ("scalars(paid).all(), Sequence[Customer])", "scalars(paid).all(), Sequence[Base])"),
    ("tasks.capture(3)[0].claim, int)", "tasks.capture(3)[0].claim, str)"),
]
#: the errors of a checker: file, line, text
Errors = list[tuple[str, int, str]]


def code_with(*wrong: tuple[str, str]) -> str:
    code = CODE
    for right, other in wrong:
        assert right in code
        code = code.replace(right, other, 1)
    return code


def line_of(right: str) -> int:
    return CODE[: CODE.index(right)].count("\n") + 1


def said(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    # 1: it found errors, as expected
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def mypy(folder: Path) -> Errors:
    # what it has stored of the library and SQLAlchemy, in the step of tools/test before, is read again
    command = [
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(Path(sys.prefix) / "mypy_cache"),
    ]
    said([*command, "wrong.py"], folder)
    (folder / "wrong.py").write_text((folder / "wrong.py").read_text() + "\n")
    out = said([*command, "right.py", "wrong.py"], folder)
    found = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", out, re.MULTILINE)
    assert len(found) == out.count(" error: "), out
    return [(file, int(line), text) for file, line, text in found]


def pyright(folder: Path) -> Errors:
    # not the library's own files, which mypy checks
    config = {"extraPaths": [str(ROOT)], "include": ["."], "strict": ["*.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    out = json.loads(said(["pyright", "--pythonpath", sys.executable, "--outputjson"], folder))
    assert out["summary"]["filesAnalyzed"] == 2
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["message"])
        for one in out["generalDiagnostics"]
        if one["severity"] != "information"
    ]


@pytest.mark.parametrize("check", [mypy, pyright])
def test_every_result_has_its_exact_type(check: Callable[[Path], Errors], tmp_path: Path) -> None:
    """One run of a checker, which is slow: over the code, and over the code with other types, each of which it reports.

    It sees the library as a user's project does.
    """
    (tmp_path / "right.py").write_text(CODE)
    (tmp_path / "wrong.py").write_text(code_with(*WRONG))
    errors = check(tmp_path)
    assert [error for error in errors if error[0] != "wrong.py"] == []
    assert {line for _, line, _ in errors} == {line_of(right) for right, _ in WRONG}
    for right, _ in WRONG:
        reported = [text for _, line, text in errors if line == line_of(right)]
        assert any("assert_type" in text or "Expression is of type" in text for text in reported), errors
