"""Running the servers' programs: the user, the environment, the supervisor."""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

SUPERVISOR = Path(__file__).with_name("supervisor.py")

#: Nothing of the developer's own settings (PGHOST, MYSQL_HOME, ...) reaches a server;
#: only apt needs the proxy settings.
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


class Unavailable(Exception):
    """A server can't be started here; the message says what is missing."""


class Account(TypedDict, total=False):
    """The arguments of `subprocess.Popen` for the user that a program runs as."""

    user: int
    group: int
    extra_groups: list[int]


def account() -> Account:
    """The user that servers run as: `nobody` for root, since PostgreSQL and MySQL refuse root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def own(path: Path) -> None:
    """Make the servers' account the owner of a file or folder."""
    if who := account():
        os.chown(path, who["user"], who["group"])


def reachable(path: Path) -> bool:
    """Whether the servers' account can enter all folders that lead to this one."""
    folders = [path.resolve(), *path.resolve().parents]
    return not account() or all(folder.stat().st_mode & 0o001 for folder in folders)


def program(name: str, folder: str, missing: str) -> str:
    """The path of a program; raise `Unavailable` with the message `missing` without one."""
    path = shutil.which(name, path=folder)
    if path is None:
        raise Unavailable(missing)
    return path


def environment(directory: Path) -> dict[str, str]:
    """The environment of a program that works in the folder given."""
    proxies = {name: os.environ[name] for name in PROXIES if name in os.environ}
    return {**proxies, **ENVIRONMENT, "HOME": str(directory), "TMPDIR": str(directory)}


def run(*command: str | Path, directory: Path) -> str:
    """Run a program to its end as the servers' account and return what it wrote."""
    done = subprocess.run(
        command,
        check=False,
        cwd=directory,
        env=environment(directory),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        **account(),
    )
    if done.returncode != 0:
        name = Path(command[0]).name
        raise RuntimeError(f"{name} failed ({done.returncode}):\n{done.stdout[-4000:]}")
    return done.stdout


class Process:
    """A running server: all of its processes, under a supervisor."""

    def __init__(self, command: Sequence[str | Path], directory: Path, log: Path, stop_signal: signal.Signals) -> None:
        request = {
            "command": [str(word) for word in command],
            "directory": str(directory),
            "log": str(log),
            "environment": environment(directory),
            "account": account(),
            "stop_signal": stop_signal,
            "parent": os.getpid(),
        }
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", SUPERVISOR, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # The terminal's Ctrl-C must reach the tests only.
        )
        self._lock = threading.Lock()
        answer = self._read()
        if not answer.isdigit():
            self.wait(60)
            raise RuntimeError(f"{command[0]} cannot be run: {answer or 'no answer'}")
        self.pid = int(answer)

    def _read(self) -> str:
        assert self._supervisor.stdout is not None
        return self._supervisor.stdout.readline().decode().strip()

    @property
    def running(self) -> bool:
        """Whether any of the server's processes is still there."""
        return self._supervisor.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Make the supervisor send a signal, which therefore never goes to a reused process id."""
        assert self._supervisor.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._supervisor.stdin.write(bytes([number]))
            self._read()

    def wait(self, seconds: float) -> bool:
        """Wait until all of the server's processes have ended; return whether they have."""
        try:
            self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            assert pipe is not None
            pipe.close()
        return True
