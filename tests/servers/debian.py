"""Programs of a Debian release newer than the machine's, without installing them."""

import shutil
import time
from pathlib import Path

from tests.servers import cache
from tests.servers.process import Unavailable, own, run

#: The machine's own settings, such as a proxy, apply except for those named here.
CONFIGURATION = """\
#clear APT::Update;
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
Dir::State "{folder}/state";
Dir::State::Lists "{folder}/state/lists";
Dir::State::Status "{folder}/state/status";
Dir::Cache "{folder}/cache";
Dir::Cache::Archives "{folder}/cache/archives";
Dir::Log "{folder}";
APT::Default-Release "";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "20";
Acquire::https::Timeout "20";
Debug::NoLocking "true";
"""

#: How often each archive is asked: a release that changes every few hours may do so between its index and a package.
TRIES = 3
#: And the pause in between, in seconds.
PAUSE = 10.0


def mirrors() -> list[str]:
    """The Debian archives in this machine's sources, the most likely one first."""
    command = ("apt-get", "indextargets", "--no-release-info", "--format")
    try:
        listing = run(*command, "$(SITE) $(COMPONENT)", directory=Path("/"))
    except (OSError, RuntimeError):
        return []
    lines = [line.split() for line in listing.splitlines()]
    sites = [line[0].rstrip("/") for line in lines if line[1:] == ["main"]]
    archives = [site for site in sites if not site.endswith("-security")]
    return sorted(dict.fromkeys(archives), key=lambda site: not site.endswith("/debian"))


def unpacked(package: str, release: str) -> Path:
    """The folder with a package and all that it depends on, unpacked once."""

    def fill(folder: Path) -> None:
        own(folder)
        unpack(package, release, folder)

    return cache.prepared(f"{package}-{release}", fill)


def loaded(root: Path, program: str) -> list[str | Path]:
    """How to run a program of such a folder: by the dynamic loader and the libraries it came with."""
    loader = next(root.glob("usr/lib/*/ld-linux*.so.*"))
    return [loader, "--library-path", loader.parent, root / program]


def unpack(package: str, release: str, folder: Path) -> None:
    """Unpack a package and all that it depends on into a folder.

    For apt nothing is installed, so it fetches every library down to the C
    library: what is unpacked needs none of the machine's, and none can be too old.
    """
    reason = "this machine's apt sources name no Debian archive"
    sites = mirrors()
    for number, site in enumerate(sites * TRIES):
        if number and number % len(sites) == 0:
            time.sleep(PAUSE)
        try:
            _fetch(site, package, release, folder / "apt")
        except (OSError, RuntimeError) as error:
            shutil.rmtree(folder / "apt", ignore_errors=True)
            lines = str(error).splitlines()
            reason = next((line for line in lines if line.startswith("E: ")), lines[-1])
            continue
        for archive in sorted((folder / "apt/cache/archives").glob("*.deb")):
            run("dpkg-deb", "--extract", archive, folder, directory=folder)
        shutil.rmtree(folder / "apt")
        return
    raise Unavailable(
        f"The package {package} cannot be fetched from Debian {release}, which takes a "
        f"network and a Debian archive among apt's sources: {reason.rstrip('.')}."
    )


def _fetch(site: str, package: str, release: str, scratch: Path) -> None:
    """Download a package and all that it depends on by an apt of its own."""
    for part in ("state/lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True, exist_ok=True)
    (scratch / "state/status").touch()
    (scratch / "sources.list").write_text(f"deb {site} {release} main\n")
    configuration = scratch / "apt.conf"
    configuration.write_text(CONFIGURATION.format(folder=scratch))
    apt = ("apt-get", "-q", "-y", "-c", configuration)
    for path in (scratch, *scratch.rglob("*")):
        own(path)
    run(*apt, "update", directory=scratch)
    run(*apt, "--download-only", "install", package, directory=scratch)
