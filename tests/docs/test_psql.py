"""The examples of docs/how-semaphores-work.md for psql run."""

from __future__ import annotations

import sqlalchemy_locks as sl
from tests.conftest import Servers, install
from tests.docs.pages import ROOT, blocks
from tests.fixtures.parties import connected


def test_psql_examples_run(servers: Servers) -> None:
    url = servers.fresh("postgresql15", "psycopg")
    install(url)
    (block,) = (each for each in blocks(ROOT / "docs" / "how-semaphores-work.md") if each.language == "sql")
    acquire, renew, release = (line for line in block.text.splitlines() if line)
    with connected(url, isolation_level="AUTOCOMMIT") as engine, engine.connect() as connection:
        for name in ("backup-slots", "network"):
            connection.execute(sl.semaphore.create(name, 2))
        granted = connection.exec_driver_sql(acquire).mappings().one()
        assert (granted["acquired"], granted["semaphores"]) == (True, ["backup-slots", "network"])
        # the same names in another order are the same request, and an empty request is refused
        again = connection.exec_driver_sql(
            acquire.replace("backup-slots,network", "network,backup-slots").replace("1,2", "2,1")
        )
        assert again.mappings().one()["replayed"] is True
        other = connection.exec_driver_sql(acquire.replace("job-9", "job-10")).mappings().one()
        assert (other["acquired"], other["state"], other["exhausted"]) == (False, "DENIED", ["network"])
        unknown = connection.exec_driver_sql(acquire.replace("network", "nothing").replace("job-9", "job-11"))
        assert unknown.mappings().one()["state"] == "UNKNOWN"
        conflict = connection.exec_driver_sql(acquire.replace("1,2", "1,1")).mappings().one()
        assert (conflict["acquired"], conflict["state"]) == (False, "CONFLICT")
        assert connection.exec_driver_sql(renew).scalar() is True
        assert connection.exec_driver_sql(release).scalar() == "RELEASED"
