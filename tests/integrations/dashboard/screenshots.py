"""python -m tests.integrations.dashboard.screenshots: makes the pictures of docs/img, which are committed."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import create_engine

from sqlalchemy_locks.integrations.dashboard.serving import served
from tests import servers
from tests.conftest import install
from tests.integrations.dashboard.chromium import chromium
from tests.integrations.dashboard.scene import contended, play

IMG = Path(__file__).parents[3] / "docs" / "img"
PICTURES = {
    "dashboard-light.png": (1200, 1180, "light"),
    "dashboard-dark.png": (1200, 1180, "dark"),
    "dashboard-phone.png": (390, 844, "light"),
}


def pictures(url: str, folder: Path) -> None:
    """Take them."""
    install(url)
    engine = create_engine(url, connect_args={"application_name": "web-1"})
    try:
        locks = play(engine)
        with contended(engine, locks), served(locks) as address, chromium() as browser:
            for name, (width, height, scheme) in PICTURES.items():
                with browser.tab(width=width, height=height, scheme=scheme) as tab:
                    tab.ask("Emulation.setScrollbarsHidden", hidden=True)
                    tab.open(address)
                    (folder / name).write_bytes(tab.picture())
    finally:
        engine.dispose()


if __name__ == "__main__":
    with servers.start("postgresql15") as server:
        assert isinstance(server, servers.SQLServer)
        server.create_database("pictures")
        pictures(server.url("psycopg", "pictures"), IMG)
