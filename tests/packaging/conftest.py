"""The sdist and the wheel, built once for all packaging tests."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packaging.environment import Environment, checkout


@dataclass(frozen=True)
class Built:
    """The files that a build creates, and its output."""

    sdist: Path
    wheel: Path
    output: str


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "packaging: builds the package and installs it into fresh environments")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel that is built from the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    builder = Environment(folder / "builder")
    builder.install("setuptools>=77")
    # warnings go to standard error
    call = "import os, sys; from setuptools import build_meta; os.dup2(1, 2); build_meta.build_{}(sys.argv[1])"
    output = builder("-W", "default", "-c", call.format("sdist"), folder, cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    unpacked = folder / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-xzf", sdist, "-C", unpacked], check=True)
    (tree,) = unpacked.iterdir()
    output += builder("-W", "default", "-c", call.format("wheel"), folder, cwd=tree)
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel, output)
