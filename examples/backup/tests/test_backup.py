"""The guarantees of the service."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from backup import page
from backup.app import SLOTS, Session, app, locks, write
from backup.models import Backup
from backup.settings import Settings
from fastapi import FastAPI
from sqlalchemy import select

import sqlalchemy_locks as sl

_numbers = itertools.count(1)
PROBLEM = "application/problem+json"


def served(test: Callable[[httpx.AsyncClient], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a client of the app."""

    async def main() -> None:
        async with app.router.lifespan_context(app), client() as asking:
            await test(asking)

    def run() -> None:
        asyncio.run(main())

    return run


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://backup") as asking:
        yield asking


async def made(asking: httpx.AsyncClient, **documents: str) -> int:
    """A new target."""
    response = await asking.post("/targets", json={"name": f"target {next(_numbers)}"})
    target = int(response.json()["id"])
    for name, body in documents.items():
        assert (await put(asking, target, name, body)).status_code == 204
    return target


async def put(asking: httpx.AsyncClient, target: int, name: str, body: str) -> httpx.Response:
    return await patiently(lambda: asking.put(f"/targets/{target}/documents/{name}", json={"body": body}))


async def order(asking: httpx.AsyncClient, target: int, key: str) -> httpx.Response:
    return await asking.post(f"/targets/{target}/backups", headers={"Idempotency-Key": key})


async def patiently(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """Retry as the answer says: on SQLite all writers exclude each other, maintenance included."""
    limit = time.monotonic() + 240
    while (answer := await ask()).status_code in (423, 429) and time.monotonic() < limit:
        await asyncio.sleep(0.05)
    return answer


async def ordered(asking: httpx.AsyncClient, target: int, key: str) -> httpx.Response:
    return await patiently(lambda: order(asking, target, key))


def key() -> str:
    return f"key {next(_numbers)}"


@served
async def test_a_backup(asking: httpx.AsyncClient) -> None:
    target = await made(asking, inbox="hello", sent="there")
    done = (await ordered(asking, target, key())).json()
    assert (done["state"], done["documents"]) == ("done", {"inbox": "hello", "sent": "there"})
    assert (await asking.get(f"/targets/{target}")).json()["latest_id"] == done["id"]


@served
async def test_the_same_order_twice_is_one_backup(asking: httpx.AsyncClient) -> None:
    target, same = await made(asking, inbox="hello"), key()
    first, again = await ordered(asking, target, same), await ordered(asking, target, same)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert len((await asking.get(f"/targets/{target}/backups")).json()) == 1
    assert (await ordered(asking, await made(asking), same)).status_code == 409


@served
async def test_the_same_order_at_once_is_one_backup(asking: httpx.AsyncClient) -> None:
    target, same = await made(asking, inbox="hello"), key()
    answers = await asyncio.gather(*(ordered(asking, target, same) for _ in range(5)))
    assert {answer.status_code for answer in answers} <= {200, 201, 409, 429}
    assert [answer.status_code for answer in answers].count(201) == 1
    assert len((await asking.get(f"/targets/{target}/backups")).json()) == 1


@served
async def test_an_order_needs_a_key(asking: httpx.AsyncClient) -> None:
    assert (await asking.post(f"/targets/{await made(asking)}/backups")).status_code == 422


@served
async def test_one_of_a_target_at_a_time(asking: httpx.AsyncClient) -> None:
    target, other = await made(asking), await made(asking)
    async with locks.semaphore(f"target:{target}", ttl=3600):  # like another worker's backup
        refused = await order(asking, target, key())
        assert (refused.status_code, refused.headers["Content-Type"]) == (429, PROBLEM)
        assert int(refused.headers["Retry-After"]) > 0
        assert (await ordered(asking, other, key())).status_code == 201
    assert (await ordered(asking, target, key())).status_code == 201


@served
async def test_the_same_order_while_another_worker_is_at_it(asking: httpx.AsyncClient) -> None:
    target, same = await made(asking), key()
    async with locks.semaphore({SLOTS: 1, f"target:{target}": 1}, ttl=3600, external_id=same):
        refused = await ordered(asking, target, same)
        assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (409, "in-progress")
    refused = await ordered(asking, target, same)
    assert (refused.status_code, refused.json()["type"].rpartition(":")[2]) == (409, "key-spent")


@served
async def test_so_many_slots(asking: httpx.AsyncClient) -> None:
    target = await made(asking)
    before = (await asking.get("/slots")).json()["capacity"]
    assert (await asking.put("/slots", json={"capacity": 0, "by": "tests"})).json() == {"capacity": 0, "used": 0}
    assert (await order(asking, target, key())).status_code == 429
    assert (await asking.put("/slots", json={"capacity": before, "by": "tests"})).status_code == 200
    assert (await ordered(asking, target, key())).status_code == 201


@served
async def test_who_comes_too_late_writes_nothing(asking: httpx.AsyncClient) -> None:
    target = await made(asking, inbox="hello")
    mine = {SLOTS: 1, f"target:{target}": 1}
    late = await locks.acquire(mine, external_id=key(), ttl=3600, timeout=0)
    async with Session.begin() as session:
        fields: dict[str, Any] = {"state": "running", "documents": {}, "token": late.fence[f"target:{target}"]}
        backup = Backup(key=late.external_id, target_id=target, **fields)
        session.add(backup)
    await locks.release(late)  # as a sweep of a dead process
    done = (await ordered(asking, target, key())).json()
    with pytest.raises(sl.LockLost):
        async with Session.begin() as session:
            await write(session, backup, {"inbox": "old"}, late)
    # the target's own fence refuses it, too, where its permits are held (by another key)
    held = await locks.acquire(mine, external_id=key(), ttl=3600, timeout=0)
    with pytest.raises(sl.StaleToken):
        async with Session.begin() as session:
            await write(session, backup, {"inbox": "old"}, held)
    await locks.release(held)
    assert (await asking.get(f"/targets/{target}")).json()["latest_id"] == done["id"]
    async with Session() as session:
        assert await session.scalar(select(Backup.state).where(Backup.id == backup.id)) == "failed"


@served
async def test_one_writer_of_a_target_at_a_time(asking: httpx.AsyncClient) -> None:
    target = await made(asking)
    async with locks.exclusive(f"target:{target}"):
        for spelt in (f"{target}", f"0{target}"):
            # in another task: this one would deadlock
            asked = asyncio.create_task(asking.put(f"/targets/{spelt}/documents/inbox", json={"body": "x"}))
            refused = await asked
            assert (refused.status_code, refused.headers["Content-Type"]) == (423, PROBLEM)
    assert (await put(asking, target, "inbox", "x")).status_code == 204


@served
async def test_names(asking: httpx.AsyncClient) -> None:
    target = await made(asking)
    names = ["'", '"; DROP TABLE target; --', "<script>alert(1)</script>", "\N{PILE OF POO}", "%s %(x)s :y", "n" * 255]
    for name in names:
        answer = await put(asking, target, quote(name, safe=""), name)
        # a slash in the name makes another path
        assert answer.status_code == (404 if "/" in name else 204), name
    kept = [name for name in names if "/" not in name]
    done = (await ordered(asking, target, f"{key()} '\"<b>")).json()
    assert done["documents"] == {name: name for name in kept}
    for body in ({"name": "n" * 256}, {"name": ""}, {"name": "nul \0"}):
        assert (await asking.post("/targets", json=body)).status_code == 422
    assert (await ordered(asking, target, "k" * 256)).status_code == 422
    assert (await ordered(asking, 2**63, key())).status_code == 422
    assert (await ordered(asking, 2**63 - 1, key())).status_code == 404


@served
async def test_the_page_is_to_be_looked_at(asking: httpx.AsyncClient) -> None:
    shown = await asking.get("/locks/")
    assert shown.status_code == 200
    assert f">{SLOTS}<" in shown.text
    assert (await asking.post("/locks/resize", data={"name": SLOTS, "capacity": "9"})).status_code == 404


@served
async def test_who_knows_the_password_acts(asking: httpx.AsyncClient) -> None:
    before = (await asking.get("/slots")).json()["capacity"]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(page, "settings", Settings(locks_admin="ops:se:cret"))
        with_it = FastAPI()
        with_it.mount("/locks", page.of(locks))
        transport = httpx.ASGITransport(with_it)
        async with httpx.AsyncClient(transport=transport, base_url="http://backup/locks/") as visitor:
            for given in (None, ("ops", "secret"), ("", ""), ("ops", "\N{PILE OF POO}")):
                refused = await visitor.get("", auth=given)
                assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Basic")
            visitor.auth = httpx.BasicAuth("ops", "se:cret")
            token = re.search(r'name="token" value="([^"]*)"', (await visitor.get("")).text)
            assert token is not None
            form = {"token": token[1], "name": SLOTS, "capacity": "9"}
            assert (await visitor.post("resize", data=form)).status_code == 403  # a cross-site request
            done = await visitor.post("resize", data=form, headers={"Origin": "http://backup"})
            assert done.status_code == 303
    assert (await asking.get("/slots")).json()["capacity"] == 9
    change = (await locks.run(sl.semaphore.history(SLOTS)))[0]
    assert (change.new_capacity, change.changed_by) == (9, "ops")
    await asking.put("/slots", json={"capacity": before, "by": "tests"})
