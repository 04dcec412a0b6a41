"""Python 3.14, which Debian has in its unstable release only: `python -m tests.servers.python` prints where it is."""

import shlex
import sys
from pathlib import Path

from tests.servers import cache
from tests.servers.debian import loaded, unpack
from tests.servers.process import Unavailable, own

NAME = "python3.14"


def interpreter() -> Path:
    """Return a script in the place of the program, which it runs by the libraries that came with it.

    Virtual environments link to it: the program must see the link's name, and not that of the dynamic loader.
    """

    def fill(folder: Path) -> None:
        own(folder)
        unpack(NAME, "unstable", folder)
        script = folder / "usr/bin" / NAME
        loader, *options = map(shlex.quote, map(str, loaded(folder, f"usr/bin/{NAME}.bin")))
        script.rename(f"{script}.bin")
        line = " ".join(["exec", loader, "--argv0", '"$0"', *options, '"$@"'])
        # the folder has another name until it is complete
        script.write_text(f"#!/bin/sh\n{line}\n".replace(str(folder), str(cache.folder() / NAME)))
        script.chmod(0o755)

    return cache.prepared(NAME, fill) / "usr/bin" / NAME


if __name__ == "__main__":
    try:
        print(interpreter())
    except Unavailable as error:
        sys.exit(str(error))
