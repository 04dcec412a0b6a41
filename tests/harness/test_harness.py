"""The test harness: a test that leaves something open fails, and a test that hangs fails alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.fixtures.parties import PATIENCE

ROOT = Path(__file__).parents[2]
LEAVING = """
    import asyncio, gc, socket, sqlite3, threading, pytest
    import tests.conftest
    tests.conftest.ENDS_WITHIN = 0.1

    def test_a_thread():
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def test_a_thread_that_ends():
        threading.Thread(target=threading.Event().wait, args=(0.01,)).start()

    def test_a_thread_that_fails():
        ended = threading.Event()
        threading.Thread(target=lambda: ended.wait(0.01) or 1 / 0).start()

    def test_a_socket():
        around = [socket.socket()]
        around.append(around)

    def test_a_loop():
        around = [asyncio.new_event_loop()]
        around.append(around)

    def test_nothing():
        gc.collect()

    @pytest.mark.timeout(1)
    def test_a_hang():
        threading.Event().wait()

    @pytest.mark.timeout(1)
    def test_a_loop_that_hangs():
        asyncio.run(asyncio.Event().wait())

    def test_the_last_one():
        gc.collect()
"""


def test_each_test_answers_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "test_leaving.py"
    file.write_text("\n".join(line[4:] for line in LEAVING.splitlines()))
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "-rA", "--tb=no", str(file)]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    outcomes: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) .*?::(test_\w+)", run.stdout, re.MULTILINE):
        outcomes.setdefault(name, set()).add(outcome)
    assert outcomes == {
        "test_a_thread": {"PASSED", "ERROR"},
        "test_a_thread_that_ends": {"PASSED"},
        "test_a_thread_that_fails": {"PASSED", "ERROR"},
        "test_a_socket": {"PASSED", "ERROR"},
        "test_a_loop": {"PASSED", "ERROR"},
        "test_nothing": {"PASSED"},
        "test_a_hang": {"FAILED"},
        "test_a_loop_that_hangs": {"FAILED"},
        "test_the_last_one": {"PASSED"},
    }, run.stdout
