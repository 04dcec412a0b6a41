"""What two runners on two nodes of a cluster promise each other: the cases for which neither waits for the other.

A session reads what other nodes have committed (wsrep_sync_wait, group_replication_consistency), as these cases expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conformance import test_mutex, test_semaphore
from tests.conformance.clients import ASYNC, SYNC, Client, Places
from tests.conformance.conftest import AL, Combination, L, S, World
from tests.conftest import Servers

#: what makes a session read what the other nodes have committed
CAUSAL = {
    "galera": "SET SESSION wsrep_sync_wait = 15",
    "group_replication": "SET SESSION group_replication_consistency = 'BEFORE'",
}
DRIVERS = {
    "galera": {"mariadb+pymysql": (S, L), "mariadb+aiomysql": (AL,)},
    "group_replication": {"pymysql": (S, L), "aiomysql": (AL,)},
}
CASES = [
    test_mutex.test_by_its_owner_only_where_one_is_asked_for,
    test_mutex.test_one_has_it_until_it_is_released,
    test_mutex.test_queues_hold_the_same_id_independently,
    test_mutex.test_the_first_acquire_of_each_window_succeeds,
    test_mutex.test_tokens_rise_and_retries_run_out,
    test_semaphore.test_a_request_gets_all_permits_or_none,
    test_semaphore.test_an_acquire_releases_expired_permits,
    test_semaphore.test_an_id_is_granted_once,
    test_semaphore.test_fences_continue_after_a_deletion,
    test_semaphore.test_less_capacity_evicts_and_grants_no_permits,
    test_semaphore.test_permits_are_granted_up_to_the_capacity,
    test_semaphore.test_renew_extends_a_held_request,
    test_semaphore.test_sweep_releases_and_clean_deletes,
]
COMBINATIONS = [
    pytest.param(Combination(cluster, driver, runner), marks=pytest.mark.cluster)
    for cluster, drivers in DRIVERS.items()
    for driver, runners in drivers.items()
    for runner in runners
]


class TwoNodes(World):
    """The first runner is on the first node, the second one on the second."""

    def client(self) -> Client:
        urls = self.servers.urls(self.engine_name, self.combination.driver)
        options = {"connect_args": {"init_command": CAUSAL[self.engine_name]}}
        client = (SYNC | ASYNC)[self.combination.runner](self._places, urls[len(self.clients) % 2], options)
        self.clients.append(client)
        return client


@pytest.fixture(params=COMBINATIONS, ids=str)
def world(request: pytest.FixtureRequest, servers: Servers, places: Places) -> Iterator[World]:
    world = TwoNodes(servers, request.param, places)
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_nodes(world: World, case: Callable[[World], None]) -> None:
    case(world)
