"""The process between the tests and one server; run as a script, never imported.

A server must not outlive the tests, however they end, SIGKILL included. The kernel's
PR_SET_PDEATHSIG alone is not enough: it fires when the *thread* that forked ends, and
tests may start a server from a worker thread. So each server is a child of this
single-threaded script, which watches the process that asked for the server. It also
adopts the processes that the server leaves behind (PR_SET_CHILD_SUBREAPER), so it knows when
all of the server's processes are gone: PostgreSQL's each have a session of their own,
out of reach of a signal to one process group.

Requests arrive on its standard input, one byte each: a signal's number.
SIGKILL, SIGSTOP and SIGCONT go to all of the server's processes, any other signal to
the main one. Every request is answered by one line once the signals are sent. It ends
when the server's last process has, so to wait for this script is to wait for them all.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE = 5.0  # seconds for a clean stop once the tests have gone
FOR_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)


def descendants() -> set[int]:
    """The ids of all processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may itself contain spaces and parentheses.
                fields = (entry / "stat").read_text("latin-1").rpartition(")")[2]
                parent = int(fields.split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending.extend(below)
    return found


def send(pid: int, number: int) -> None:
    """Send a signal, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def send_all(number: int) -> None:
    """Send a signal to every process of the server, also to those forked meanwhile."""
    done: set[int] = set()
    while new := descendants() - done:
        for pid in sorted(new):
            send(pid, number)
        done |= new


def answer(text: bytes) -> None:
    """Write one line to the tests, if they are still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, text + b"\n")


class Supervisor:
    """The server's main process, and the loop that supervises it."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.alive = True
        self.orphaned_at: float | None = None
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with open(request["log"], "ab") as log:
            process = subprocess.Popen(
                request["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=request["directory"],
                env=request["environment"],
                start_new_session=True,
                # Run after the change of user, which would undo it. No other threads.
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
                **request["account"],
            )
        self.pid = process.pid

    def reap(self) -> bool:
        """Reap ended processes; return whether any process of the server is left."""
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self.alive = self.alive and pid != self.pid
            return True
        return False

    def orphan(self) -> None:
        """The tests have ended: stop the server cleanly, so that it frees its resources."""
        if self.orphaned_at is None:
            self.orphaned_at = time.monotonic()
            send_all(signal.SIGCONT)
            send(self.pid, self.request["stop_signal"])

    def run(self, wake: int) -> None:
        """Serve requests until the server's last process has ended."""
        watched = [0, wake]
        while self.reap():
            if not self.alive:
                send_all(signal.SIGKILL)
            ready = select.select(watched, [], [], 0.5)[0]
            if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
                self.orphan()
            if 0 in ready:
                if request := os.read(0, 1):
                    number = request[0]
                    if number in FOR_ALL:
                        send_all(number)
                    elif self.alive:
                        send(self.pid, number)
                    answer(b"")
                else:
                    watched.remove(0)
                    self.orphan()
            if os.getppid() != self.request["parent"]:
                self.orphan()
            if self.orphaned_at and time.monotonic() - self.orphaned_at > GRACE:
                send_all(signal.SIGKILL)
        if self.orphaned_at:
            shutil.rmtree(self.request["directory"], ignore_errors=True)


def main() -> None:
    """Start the server that the first argument describes, and run until it ends."""
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # A handler rather than SIG_IGN, which the server would inherit.
        signal.signal(number, lambda *_: None)
    try:
        supervisor = Supervisor(json.loads(sys.argv[1]))
    except OSError as error:
        answer(str(error).encode())
        return
    answer(b"%d" % supervisor.pid)
    supervisor.run(wake)


if __name__ == "__main__":
    main()
