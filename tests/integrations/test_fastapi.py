"""FastAPI's dependencies: locks while an endpoint works, and answers to contention."""

# no ``from __future__ import annotations``: FastAPI looks names up in the module, not in a test's function

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import (
    AsyncHeld,
    AsyncLease,
    LockProblem,
    StarletteLocks,
    answer,
    exclusive,
    lease,
    required_key,
    semaphore,
)
from tests.fixtures.parties import ASYNC, PATIENCE, installed, unused
from tests.fixtures.semaphores import expire_in
from tests.fixtures.web import ENGINES, Door, checked_out, client_of, code, meanwhile, used

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("which", ENGINES)
async def test_exclusive_admits_one_request(app: FastAPI, client: httpx.AsyncClient, which: str) -> None:
    """Equal numbers are one lock in any notation; different ones are different locks, if the engine has several."""
    door, what = Door(), unused("invoice")

    @app.post("/charge/{invoice_id}")
    async def charge(
        invoice_id: int, held: Annotated[AsyncHeld, exclusive(f"{what}:{{invoice_id}}", timeout=0)]
    ) -> Any:
        await door.pass_()
        return (await held.session.execute(text("SELECT 42"))).scalar()

    async with meanwhile(client.post("/charge/42"), door) as first:
        for spelt in ("42", "042", "+42", "%2042"):
            refused = await client.post(f"/charge/{spelt}")
            assert code(refused) == (423, "locked")
            assert refused.headers["Retry-After"] == "1"
            assert refused.headers["Cache-Control"] == "no-store"
            assert what not in refused.text
        # a request that FastAPI refuses anyway needs no lock, and gets FastAPI's own answer
        wrong = await client.post("/charge/x")
        assert wrong.json()["detail"][0]["loc"] == ["path", "invoice_id"]
        if not which.startswith("sqlite"):
            door.opened.set()
            assert (await client.post("/charge/43")).json() == 42
    assert (await first).json() == 42
    assert (await client.post("/charge/42")).json() == 42


@pytest.mark.parametrize("which", ENGINES)
async def test_session_works_in_the_locks_transaction(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, elsewhere: StarletteLocks
) -> None:
    """Committed when the client is answered; rolled back when the endpoint raises."""
    what = unused("task")

    @app.post("/tasks/{task}")
    async def make(task: str, held: Annotated[AsyncHeld, exclusive(what)], fail: bool = False) -> None:
        assert await held.session.scalar(sl.Mutex().create(task)) == 1
        if fail:
            raise HTTPException(400, "no")

    kept, dropped = unused("task"), unused("task")
    assert (await client.post(f"/tasks/{dropped}", params={"fail": True})).status_code == 400
    assert (await client.post(f"/tasks/{kept}")).status_code == 200
    assert await elsewhere.run(sl.Mutex().create(kept)) == 0
    assert await elsewhere.run(sl.Mutex().create(dropped)) == 1
    assert checked_out(locks._engine) == 0


@pytest.mark.parametrize("which", ["postgresql15/asyncpg"])
async def test_failed_commit_is_not_answered_200(
    app: FastAPI, client: httpx.AsyncClient, elsewhere: StarletteLocks
) -> None:
    """The connection dies inside the endpoint: the answer is 503, not the endpoint's 200."""

    @app.post("/work")
    async def work(held: Annotated[AsyncHeld, exclusive(unused())]) -> str:
        mine = (await held.session.execute(text("SELECT pg_backend_pid()"))).scalar()
        async with elsewhere._engine.connect() as connection:
            await connection.execute(text("SELECT pg_terminate_backend(:mine)"), {"mine": mine})
            gone = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :mine")
            while (await connection.execute(gone, {"mine": mine})).scalar():
                await connection.rollback()
                await asyncio.sleep(0.01)
        return "done"

    lost = await client.post("/work")
    # a driver may notice only at COMMIT, and then not know its outcome
    assert code(lost) in {(503, "lost"), (503, "outcome-unknown")}
    assert lost.headers.get("Retry-After") == ("1" if code(lost)[1] == "lost" else None)


@pytest.mark.parametrize("which", ENGINES)
async def test_semaphore_admits_its_capacity(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, elsewhere: StarletteLocks
) -> None:
    room, line, door = unused("exports"), unused("network"), Door()
    await locks.run(sl.semaphore.create(room, 1))
    await locks.run(sl.semaphore.create(line, 2))

    @app.post("/exports")
    async def export(
        grant: Annotated[AsyncLease, semaphore({room: 1, line: 2}, ttl=3600, timeout=PATIENCE)],
    ) -> dict[str, int]:
        await door.pass_()
        await grant.check()
        return dict(grant.fence)

    @app.post("/tried", dependencies=[semaphore(room, ttl=3600, timeout=0, retry_after=17)])
    async def tried() -> int:
        return 1

    async with meanwhile(client.post("/exports"), door) as first:
        refused = await client.post("/tried")
        assert code(refused) == (429, "no-room")
        assert refused.headers["Retry-After"] == "17"
        assert room not in refused.text
        assert await used(elsewhere, line) == 2
    assert (await first).json() == {room: 1, line: 1}
    assert await used(elsewhere, line) == 0
    assert (await client.post("/tried")).json() == 1


@pytest.mark.parametrize("which", ENGINES)
async def test_idempotency_key_is_processed_once(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, elsewhere: StarletteLocks, servers: Any, which: str
) -> None:
    """Again after its endpoint raised, and after its process died; a caller elsewhere counts as one inside."""
    room, door, key, ran = unused("exports"), Door(), unused("key"), list[str]()
    await locks.run(sl.semaphore.create(room, 2))

    @app.post("/exports", dependencies=[semaphore(room, ttl=3600, timeout=PATIENCE, key=required_key)])
    async def export(fail: bool = False) -> int:
        ran.append("failed" if fail else "done")
        if fail:
            raise HTTPException(500, "it failed")
        await door.pass_()
        return 1

    @app.post("/two", dependencies=[semaphore(room, count=2, ttl=3600, timeout=0)])
    async def two() -> int:
        return 2

    async def asked(path: str = "/exports", key: str = key) -> httpx.Response:
        return await client.post(path, headers={"Idempotency-Key": key})

    assert (await client.post("/exports")).json()["detail"][0]["loc"] == ["header", "Idempotency-Key"]
    assert (await asked(key="k" * 256)).status_code == 422
    # held elsewhere by a process that then dies
    dead = await elsewhere.acquire({room: 1}, external_id=key, ttl=3600)
    assert code(await asked()) == (409, "in-progress")
    assert await used(elsewhere, room) == 1
    engine = create_engine(installed(servers, ASYNC[which][0]), poolclass=NullPool)
    await asyncio.to_thread(expire_in, engine, dead)
    assert (await asked("/exports?fail=1")).status_code == 500
    async with meanwhile(asked(), door):
        again = await asked()
        assert code(again) == (409, "in-progress")
        assert int(again.headers["Retry-After"]) > 0
        assert await used(elsewhere, room) == 1
        denied = unused("key")
        assert code(await asked("/two", denied)) == (429, "no-room")
    spent = await asked()
    assert code(spent) == (409, "key-spent")
    assert "Retry-After" not in spent.headers
    assert code(await asked("/two")) == (409, "another-request")
    # a denied client may repeat its request with its key
    assert (await asked("/two", denied)).json() == 2
    # without a key, where none is required, each request is a new one
    assert [(await client.post("/two")).json() for _ in range(2)] == [2, 2]
    assert ran == ["failed", "done"]


@pytest.mark.parametrize("which", ["postgresql15/asyncpg"])
async def test_unless_skips_the_permit(app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks) -> None:
    """A key whose answer isn't stored yet is to be sent again."""
    room, key, stored = unused("exports"), {"Idempotency-Key": unused("key")}, list[str]()
    await locks.run(sl.semaphore.create(room, 1))

    def before(key: Annotated[str, Depends(required_key)]) -> str | None:
        return stored[0] if stored else None

    @app.post("/exports")
    async def export(
        before: Annotated[str | None, Depends(before)],
        grant: Annotated[AsyncLease | None, semaphore(room, unless=before, timeout=0, scope="function")],
    ) -> str:
        return "new" if grant is not None else f"stored: {before}"

    assert (await client.post("/exports", headers=key)).json() == "new"
    soon = await client.post("/exports", headers=key)
    assert (code(soon), soon.headers["Retry-After"]) == ((409, "key-spent"), "1")
    stored.append("the answer")
    assert (await client.post("/exports", headers=key)).json() == "stored: the answer"


@pytest.mark.parametrize("which", ["postgresql15/asyncpg"])
async def test_permits_that_are_lost_after_the_response_are_logged(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler for the error could answer nothing any more, and the server would log that it was called."""
    room = unused("exports")
    await locks.run(sl.semaphore.create(room, 2))
    app.add_exception_handler(sl.LockError, answer)

    @app.post("/exports")
    async def export(grant: Annotated[AsyncLease, semaphore(room)]) -> str:
        await locks.release(grant.external_id)  # as a sweep does
        return "done"

    assert (await client.post("/exports")).json() == "done"
    assert f"POST /exports was answered, but did not hold its permits to the end: the permits of '{room}'" in (
        caplog.text
    )


async def test_lease_ends_before_the_response_is_sent(
    app: FastAPI, client: httpx.AsyncClient, elsewhere: StarletteLocks
) -> None:
    """The client's next request acquires it."""
    what, seen = unused("report"), list[Any]()

    class Watching:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def watched(message: Any) -> None:
                if message["type"] == "http.response.start":
                    seen.append(await used(elsewhere, what))
                await send(message)

            await self.app(scope, receive, watched)

    @app.post("/report", dependencies=[lease(what, ttl=3600, timeout=0)])
    async def report() -> None:
        seen.append(await used(elsewhere, what))

    app.add_middleware(Watching)
    for _ in range(2):
        assert (await client.post("/report")).status_code == 200
    assert seen == [1, 0, 1, 0]


async def test_unknown_semaphore_is_404_or_500(app: FastAPI, client: httpx.AsyncClient) -> None:
    """A name from the client leads to 404; a name of the service to 500, and an entry in its log."""

    @app.post("/exports/{tenant}", dependencies=[semaphore("exports:{tenant}", timeout=0)])
    async def export(tenant: str) -> None: ...

    @app.post("/fixed", dependencies=[semaphore(unused("nowhere"), timeout=0)])
    async def fixed() -> None: ...

    assert code(await client.post(f"/exports/{unused('tenant')}")) == (404, "not-found")
    with pytest.raises(sl.UnknownSemaphore):
        await client.post("/fixed")


@pytest.mark.parametrize("which", ENGINES)
async def test_permit_is_held_until_response_is_sent(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, elsewhere: StarletteLocks
) -> None:
    """A stream and a background task run inside the lock; a transaction ends before its answer is sent."""
    room, short, what, seen = unused("exports"), unused("short"), unused(), list[Any]()
    await locks.run(sl.semaphore.create(room, 1))
    await locks.run(sl.semaphore.create(short, 1))

    async def look(*names: str) -> None:
        seen.extend([await used(elsewhere, name) for name in names])

    @app.get("/stream", dependencies=[semaphore(room, ttl=3600, timeout=PATIENCE)], response_model=None)
    async def stream(events: bool = False) -> Response:
        async def parts() -> AsyncIterator[str]:
            await look(room)
            yield "part"
            await look(room)

        return EventSourceResponse(parts()) if events else StreamingResponse(parts())

    @app.get(
        "/background",
        dependencies=[
            semaphore(room, ttl=3600, timeout=PATIENCE),
            semaphore(short, ttl=3600, timeout=PATIENCE, scope="function"),
        ],
    )
    async def background(tasks: BackgroundTasks) -> None:
        tasks.add_task(look, room, short)

    async def take() -> None:
        async with elsewhere.exclusive(what, timeout=PATIENCE):
            seen.append("had")

    @app.get("/commits", dependencies=[exclusive(what, timeout=PATIENCE)])
    async def commits(tasks: BackgroundTasks) -> None:
        tasks.add_task(take)

    assert (await client.get("/stream")).text == "part"
    assert "part" in (await client.get("/stream", params={"events": True})).text
    assert seen == [1, 1, 1, 1]
    await client.get("/background")
    assert seen[4:] == [1, 0]
    await client.get("/commits")
    assert seen[6:] == ["had"]
    assert await used(elsewhere, room) == 0


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=5)


@pytest.mark.parametrize("which", ENGINES)
async def test_cancelled_request_leaves_nothing(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, elsewhere: StarletteLocks, which: str
) -> None:
    """In the endpoint, and while it waits."""
    what, room, door = unused(), unused("room"), Door()
    await locks.run(sl.semaphore.create(room, 1))

    @app.post("/work", dependencies=[exclusive(what, timeout=PATIENCE), semaphore(room, ttl=3600, timeout=None)])
    async def work() -> None:
        await door.pass_()

    @app.post("/room", dependencies=[semaphore(room, ttl=3600, timeout=PATIENCE)])
    async def in_room() -> None:
        await door.pass_()

    path = "/room" if which.startswith("sqlite") else "/work"  # where the lock holds the whole file
    async with meanwhile(client.post(path), door) as first:
        waiting = [asyncio.create_task(client.post(path)) for _ in range(3)]
        for task in waiting:
            for _ in range(20):
                await asyncio.sleep(0)
            await cancelled(task)
        await cancelled(first)
    assert checked_out(locks._engine) == 0
    async with elsewhere.exclusive(what, timeout=PATIENCE):
        pass
    assert await used(elsewhere, room) == 0


async def test_endpoint_exceptions_are_passed_on(app: FastAPI, client: httpx.AsyncClient) -> None:
    """An app's handlers get the errors of its endpoints; ``answer`` may be one of these handlers."""
    handled: list[Exception] = []

    async def mine(request: Any, error: Exception) -> httpx.Response:
        handled.append(error)
        return await answer(request, error)  # type: ignore[return-value]

    app.add_exception_handler(sl.StaleToken, mine)
    app.add_exception_handler(sl.LockError, answer)

    @app.post("/{what}", dependencies=[exclusive("endpoint")])
    async def raises(what: str) -> None:
        raise {"stale": sl.StaleToken("too late", 7), "lost": sl.LockLost("gone")}.get(what) or sl.NotInstalled()

    assert code(await client.post("/stale")) == (409, "superseded")
    assert [type(error) for error in handled] == [sl.StaleToken]
    assert code(await client.post("/lost")) == (503, "lost")
    with pytest.raises(sl.NotInstalled):
        await client.post("/tables")


def test_url_cannot_inject_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    scope = {"type": "http", "method": "POST", "path": "/a\n\x1b[31m\u2028b", "headers": [], "server": ("app", 80)}
    assert asyncio.run(answer(Request(scope), sl.LockLost("gone"))).status_code == 503
    (line,) = caplog.messages
    assert line.startswith("POST /a")
    assert line.isprintable()


async def test_app_can_answer_lock_problems_itself(app: FastAPI, locks: StarletteLocks) -> None:

    @app.exception_handler(LockProblem)
    async def mine(request: Any, error: LockProblem) -> JSONResponse:
        assert isinstance(error.__cause__, sl.LockTimeout)
        return JSONResponse({"error": error.problem.code}, error.problem.status, error.problem.headers)

    @app.post("/work", dependencies=[exclusive("mine", timeout=0)])
    async def work() -> None: ...

    async with client_of(app) as client, locks.exclusive("mine"):
        refused = await asyncio.create_task(client.post("/work"))
        assert (refused.status_code, refused.json()) == (423, {"error": "locked"})
