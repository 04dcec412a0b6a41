"""The test matrix, for developers: `nox` runs all of it, `nox -s "tests-3.12(2.0)"` one cell.

CI runs `make test`, on one Python, which also installs the servers (tests/servers/packages.txt).
"""

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = True

PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


@nox.session(python=PYTHONS)
@nox.parametrize("sqlalchemy", ["2.0", "2.1"], ids=["2.0", "2.1"])
def tests(session: nox.Session, sqlalchemy: str) -> None:
    """Run all tests."""
    if sqlalchemy == "2.1" and session.python == "3.10":
        session.skip("SQLAlchemy 2.1 is for Python 3.11 and newer")
    session.install(f"sqlalchemy=={sqlalchemy}.*", "-e", ".", "-r", "docs/requirements.txt")
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test"))
    session.install("--no-deps", "sqlalchemy-yugabytedb")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python="3.13")
def check(session: nox.Session) -> None:
    """Check style, types and layers."""
    session.install(
        "-e",
        ".[redis,cli,otel,prometheus,fastapi,flask,testing]",
        *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "check"),
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("pyright")
    session.run("lint-imports")


@nox.session(python="3.13")
def docs(session: nox.Session) -> None:
    """Serve the documentation at http://127.0.0.1:8000."""
    session.install("-e", ".", "-r", "docs/requirements.txt")
    session.run("mkdocs", "serve")
