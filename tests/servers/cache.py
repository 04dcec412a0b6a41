"""A folder that keeps the results of slow set-up work from one run to the next."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.servers.process import Unavailable, reachable


def folder() -> Path:
    """The cache folder, created if necessary.

    Root's is below /var/cache, since the servers, which then run as the user `nobody`, usually
    can't enter root's home folder.
    """
    if chosen := os.environ.get("SQLALCHEMY_LOCKS_CACHE"):
        base = Path(chosen).absolute()
    elif os.geteuid() == 0:
        base = Path("/var/cache/sqlalchemy-locks")
    else:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        base = Path(home) / "sqlalchemy-locks"
    path = base / "servers"
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        for made in (base, path):
            made.chmod(0o755)  # Whatever the umask.
    if not reachable(path):
        raise Unavailable(
            f"The servers run as the user nobody, who cannot enter the cache folder "
            f"{path}; name another one in SQLALCHEMY_LOCKS_CACHE."
        )
    return path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock against all other processes and threads (a lock for each open)."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepared(key: str, make: Callable[[Path], None]) -> Path:
    """The folder `key` of the cache, filled by `make` unless it is there already.

    It is filled under another name and renamed when complete, so that no process sees it
    incomplete; afterwards it is only read.
    """
    root = folder()
    target = root / key
    if not target.is_dir():
        with _locked(root / f"{key}.lock"):
            if not target.is_dir():
                for abandoned in root.glob(f".{key}-*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
                work = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
                try:
                    work.chmod(0o755)
                    make(work)
                    work.rename(target)
                except BaseException:
                    shutil.rmtree(work, ignore_errors=True)
                    raise
    return target
