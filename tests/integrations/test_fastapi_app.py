"""The start of an app: names of locks, the OpenAPI schema, lifespans."""

# no ``from __future__ import annotations``: FastAPI looks names up in the module, not in a test's function

import asyncio
import enum
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Header
from sqlalchemy import text
from sse_starlette import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import (
    AsyncHeld,
    AsyncLease,
    StarletteLocks,
    answer,
    exclusive,
    lease,
    locks_of,
    semaphore,
)
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, unused
from tests.fixtures.web import Door, client, client_of, code, meanwhile

pytestmark = pytest.mark.anyio


class Colour(str, enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "spelt", "name"),
    [
        (str, "a b", "a b"),
        (int, "007", "7"),
        (int, "-1", "-1"),
        (UUID, "A987FBC9-4BED-3078-CF07-9141BA07C9F3", "a987fbc9-4bed-3078-cf07-9141ba07c9f3"),
        (UUID, "a987fbc94bed3078cf079141ba07c9f3", "a987fbc9-4bed-3078-cf07-9141ba07c9f3"),
        (Colour, "red", "red"),
        (date, "2026-02-03", "2026-02-03"),
        (bool, "yes", "True"),
        (str, "\N{PILE OF POO}\u0301%s%(x)s{y}", "\N{PILE OF POO}\u0301%s%(x)s{y}"),
    ],
)
async def test_name_uses_the_parsed_parameter(
    app: FastAPI, client: httpx.AsyncClient, annotation: Any, spelt: str, name: str
) -> None:
    what = unused()

    @app.post("/{value}")
    async def work(value: annotation, grant: Annotated[AsyncLease, lease(f"{what} {{value}}")]) -> list[str]:
        return list(grant.permits)

    assert (await client.post(f"/{quote(spelt, safe='')}")).json() == [f"{what} {name}"]


@pytest.mark.parametrize("wrong", ["n" * 256, "nul \0", "ends with a space "])
async def test_invalid_name_is_answered_422(app: FastAPI, client: httpx.AsyncClient, wrong: str) -> None:

    @app.post("/{name}", dependencies=[exclusive("{name}")])
    async def work(name: str) -> None:
        raise AssertionError("it was had")

    assert code(await client.post(f"/{quote(wrong, safe='')}")) == (422, "bad-name")


async def test_name_made_by_a_function(app: FastAPI, client: httpx.AsyncClient) -> None:
    what = unused()

    async def of_the_body(body: dict[str, int], tenant: Annotated[str, Header()]) -> str:
        return f"{what} {tenant} {body['order']}"

    @app.post("/")
    async def work(body: dict[str, int], grant: Annotated[AsyncLease, lease(of_the_body)]) -> list[str]:
        return list(grant.permits)

    made = await client.post("/", json={"order": 5}, headers={"Tenant": "acme"})
    assert made.json() == [f"{what} acme 5"]


async def float_(value: float) -> None: ...


async def decimal(value: Decimal) -> None: ...


async def instant(value: datetime) -> None: ...


async def raw() -> None: ...


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (float_, "'value' is a float, which can be written in several ways"),
        (decimal, "'value' is a Decimal"),
        (instant, "'value' is a datetime"),
        (raw, "no path parameter 'value'"),  # its raw text, in which 042 and 42 differ
    ],
)
async def test_parameter_that_could_give_two_names_is_refused(
    app: FastAPI, client: httpx.AsyncClient, endpoint: Any, why: str
) -> None:
    app.post("/{value}", dependencies=[exclusive("of {value}")])(endpoint)
    with pytest.raises(TypeError, match=why):
        await client.post("/2026")


async def parts() -> AsyncIterator[str]:
    raise AssertionError
    yield ""


class WritesItself(Response):
    """Sends by itself, and is no ``StreamingResponse``."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError


async def annotated() -> EventSourceResponse:
    raise AssertionError


async def yields():  # type: ignore[no-untyped-def]
    raise AssertionError
    yield b""


def yields_below_a_decorator() -> Any:
    return functools.wraps(yields)(lambda: yields())


def feed() -> Any:
    return EventSourceResponse(parts())


async def returns() -> Any:
    return feed()


def returns_in_a_thread() -> Any:
    return StreamingResponse(parts())


async def returns_another() -> Any:
    return WritesItself()


async def plain() -> PlainTextResponse:
    return PlainTextResponse("ok")


@pytest.mark.parametrize(
    "stream", [annotated, yields, yields_below_a_decorator(), returns, returns_in_a_thread, returns_another]
)
async def test_stream_requires_request_scope(
    app: FastAPI, client: httpx.AsyncClient, locks: StarletteLocks, stream: Any
) -> None:
    """Before the endpoint is called, where it declares that it streams; otherwise before anything is sent."""
    app.get("/exclusive", dependencies=[exclusive("a")], response_model=None)(stream)
    app.get("/semaphore", dependencies=[semaphore("a", scope="function")], response_model=None)(stream)
    router = APIRouter(dependencies=[lease("b")])
    router.get("/lease", response_model=None)(stream)
    app.include_router(router, prefix="/router")
    await locks.run(sl.semaphore.create("a", 1))
    for path in ("exclusive", "semaphore", "router/lease"):
        with pytest.raises(ValueError, match='/.* streams its response.*scope="request"'):
            await client.get(f"/{path}")


async def test_response_class_that_streams_requires_request_scope(app: FastAPI, client: httpx.AsyncClient) -> None:
    app.router.default_response_class = EventSourceResponse
    app.get("/class", dependencies=[lease("a")], response_class=WritesItself)(plain)
    app.get("/value", dependencies=[lease("a")], response_model=None)(parts)
    router = APIRouter(default_response_class=WritesItself)
    router.get("/router", dependencies=[lease("a")])(lambda: 1)
    app.include_router(router)
    app.get("/plain", dependencies=[exclusive("a", timeout=PATIENCE)], response_class=Response)(plain)
    for path in ("class", "value", "router"):
        with pytest.raises(ValueError, match='streams its response.*scope="request"'):
            await client.get(f"/{path}")
    assert (await client.get("/plain")).text == "ok"


async def test_a_generator_that_an_endpoint_returns_is_read_while_the_lock_is_held(
    app: FastAPI, client: httpx.AsyncClient
) -> None:

    @app.get("/values")
    async def values(grant: Annotated[AsyncLease, lease("a", timeout=PATIENCE)]) -> Any:
        return (grant.lost.is_set() for _ in range(2))

    assert (await client.get("/values")).json() == [False, False]


@pytest.mark.parametrize("wrong", ["{}", "{a.b}", "{a!r}", "{a", "", "n" * 256])
def test_invalid_templates_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        exclusive(wrong)


def test_wrong_arguments() -> None:
    for wrong in (
        lambda: exclusive(),
        lambda: exclusive("a", timeout=-1),
        lambda: exclusive("a", retry_after=-1),
        lambda: exclusive("a", scope="session"),  # type: ignore[arg-type]
        lambda: semaphore({}),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
    with pytest.raises(TypeError, match="a mapping has its counts"):
        semaphore({"a": 1}, count=2)


async def test_lifespan_inside_the_apps_lifespan(locks: StarletteLocks) -> None:
    """The app disposes of its own engine."""
    told: list[str] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        async with locks.lifespan(app):
            assert locks_of(Request({"type": "http", "app": app})) is locks
            yield {"mine": "state"}
        async with locks._engine.connect() as connection:
            told.append(str((await connection.execute(text("SELECT 1"))).scalar()))

    app = FastAPI(lifespan=lifespan)

    @app.post("/work")
    async def work(held: Annotated[AsyncHeld, exclusive("lifespan", timeout=PATIENCE)]) -> int:
        return (await held.session.execute(text("SELECT 2"))).scalar_one()

    async with client_of(app) as client:
        assert (await client.post("/work")).json() == 2
    assert told == ["1"]
    with pytest.raises(RuntimeError, match="lifespan=locks.lifespan"):
        locks_of(Request({"type": "http", "app": app}))
    async with client_of(app) as client:  # and again
        assert (await client.post("/work")).json() == 2


async def test_lifespan_runs_maintenance(servers: Any) -> None:
    url = servers.fresh("sqlite", "aiosqlite")
    install(url.replace("+aiosqlite", ""))
    async with async_connected(url) as engine:
        locks = StarletteLocks(engine, maintain_every=3600)
        await locks.run(sl.semaphore.create("exports", 1))
        await locks.acquire({"exports": 1}, external_id="dead", ttl=0.001)
        app = FastAPI(lifespan=locks.lifespan)
        async with client_of(app):
            while await locks.run(sl.semaphore.holders("exports")):
                await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="maintain_every"):
            StarletteLocks(engine, maintain_every=0)


async def test_locks_of_without_lifespan_raises() -> None:
    """Without a lifespan, locks_of raises, and can be overridden like any dependency."""
    app, guard = FastAPI(), exclusive("override", timeout=PATIENCE)

    @app.post("/work", dependencies=[guard])
    async def work() -> int:
        return 1

    async with client(app) as asking:
        with pytest.raises(RuntimeError, match="this app has no locks"):
            await asking.post("/work")
        app.dependency_overrides[guard.dependency] = lambda: None
        assert (await asking.post("/work")).json() == 1


async def test_dependency_with_other_locks(locks: StarletteLocks) -> None:
    app, mounted, what = FastAPI(), FastAPI(), unused()

    @mounted.post("/given")
    async def given(held: Annotated[AsyncHeld, exclusive(what, locks=locks, timeout=PATIENCE)]) -> int:
        return (await held.session.execute(text("SELECT 1"))).scalar_one()

    @mounted.post("/asked")
    async def asked(held: Annotated[AsyncHeld, exclusive(what, locks=lambda: locks, timeout=PATIENCE)]) -> int:
        return (await held.session.execute(text("SELECT 2"))).scalar_one()

    app.mount("/mounted", mounted)
    async with client_of(app) as client:
        assert (await client.post("/mounted/given")).json() == 1
        assert (await client.post("/mounted/asked")).json() == 2


async def test_starlette_lifespan_and_answer(locks: StarletteLocks) -> None:
    door, what = Door(), unused()

    async def work(request: Request) -> PlainTextResponse:
        assert locks_of(request) is locks
        async with locks.exclusive(what, timeout=0):
            await door.pass_()
            return PlainTextResponse("done")

    handlers: Any = {sl.LockError: answer}
    app = Starlette(routes=[Route("/work", work)], lifespan=locks.lifespan, exception_handlers=handlers)
    async with client_of(app) as client:
        async with meanwhile(client.get("/work"), door) as first:
            assert code(await client.get("/work")) == (423, "locked")
        assert (await first).text == "done"
