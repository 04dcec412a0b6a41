"""mypy and pyright agree on a file of user code, and would not if a type in it were another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def checked(checker: str, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """What a checker says of the code, in a folder where it sees the library as a user's project does."""
    (folder / "user_code.py").write_text(code)
    (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}"], "typeCheckingMode": "strict"}}')
    commands = {
        "mypy": ["-m", "mypy", "--strict", "--cache-dir", str(folder / "cache"), "user_code.py"],
        "pyright": ["-m", "pyright", "--pythonpath", sys.executable],
    }
    return subprocess.run(
        [sys.executable, *commands[checker]],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_every_result_has_its_exact_type(checker: str, tmp_path: Path) -> None:
    said = checked(checker, tmp_path, (HERE / "user_code.py").read_text())
    assert said.returncode == 0, said.stdout + said.stderr


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('sl.lock.try_exclusive("a")), bool | None)', 'sl.lock.try_exclusive("a")), int | None)'),
        ("sl.lock.row(Customer, 42)), Customer | None)", "sl.lock.row(Customer, 42)), Base | None)"),
        ("locks.run(sl.lock.vacuum()), int | None)", "locks.run(sl.lock.vacuum()), str | None)"),
        ("held.session, AsyncSession)", "held.session, Session)"),
        ('mutex.acquire_token("a"), int | None)', 'mutex.acquire_token("a"), int)'),
        ('await Mutex(client).acquire("a"), bool)', 'Mutex(client).acquire("a"), bool)'),
        ("scalars(paid).all(), Sequence[Customer])", "scalars(paid).all(), Sequence[Base])"),
        ("tasks.capture(3)[0].claim, int)", "tasks.capture(3)[0].claim, str)"),
    ],
)
def test_another_type_would_be_told(checker: str, right: str, wrong: str, tmp_path: Path) -> None:
    code = (HERE / "user_code.py").read_text()
    assert right in code
    said = checked(checker, tmp_path, code.replace(right, wrong, 1))
    assert said.returncode == 1, said.stdout + said.stderr
    assert "assert_type" in said.stdout or "Expression is of type" in said.stdout
