"""Three nodes, each of which accepts writes, and the locks in a database of theirs."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests import servers as real
from tests.conftest import CLUSTERS, PLAIN_OF_CLUSTERS, Servers
from tests.fixtures.parties import PATIENCE, connected

_numbers = itertools.count(1)


class Cluster:
    """A cluster, and engines to its nodes."""

    def __init__(self, servers: Servers, name: str, opened: ExitStack) -> None:
        self.name, self._opened = name, opened
        self.nodes: Sequence[real.Node] = servers.nodes(name)
        self._urls = servers.urls(name, PLAIN_OF_CLUSTERS[name])

    def engine(self, number: int, **options: Any) -> Engine:
        """Make an engine for a node."""
        return self._opened.enter_context(connected(self._urls[number], **options))

    def counter(self) -> int:
        """Insert a row with the number 0, and return its key; all nodes have it."""
        key = next(_numbers)
        with self.engine(0).begin() as connection:
            connection.exec_driver_sql(
                "CREATE TABLE IF NOT EXISTS counter (id INT PRIMARY KEY, number INT NOT NULL) ENGINE=InnoDB"
            )
            connection.exec_driver_sql(f"INSERT INTO counter VALUES ({key}, 0)")
        self.catch_up()
        return key

    def number(self, counter: int) -> int:
        """Return the number of a row, once a node has applied all changes of it."""
        self.catch_up()
        with self.engine(1).connect() as connection:
            return int(connection.scalar(text("SELECT number FROM counter WHERE id = :id"), {"id": counter}))

    def catch_up(self) -> None:
        """Wait until all nodes have what any of them has committed."""
        for node in self.nodes:
            node.catch_up()


def add(session: Any, counter: int) -> None:
    """Read, add one, write: what another transaction has written meanwhile would be lost."""
    number = session.scalar(text("SELECT number FROM counter WHERE id = :id"), {"id": counter})
    time.sleep(0.002)
    session.execute(text("UPDATE counter SET number = :number WHERE id = :id"), {"id": counter, "number": number + 1})


def crowd(run: Callable[[int], object], each: int, clients: int = 4) -> tuple[int, Counter[type[BaseException]]]:
    """Call ``run(client)`` in a thread for each client; return how many calls were true, and the errors."""
    errors: Counter[type[BaseException]] = Counter()
    done, guard, start = [0], threading.Lock(), threading.Barrier(clients)

    def work(client: int) -> None:
        start.wait(PATIENCE)
        for _ in range(each):
            try:
                true = run(client)
            except Exception as error:
                with guard:
                    errors[type(error)] += 1
            else:
                with guard:
                    done[0] += bool(true)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return done[0], errors


@pytest.fixture(params=[CLUSTERS["galera"], CLUSTERS["group_replication"]])
def cluster(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Cluster]:
    with ExitStack() as opened:
        yield Cluster(servers, request.param, opened)
