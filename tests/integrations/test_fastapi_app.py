"""The start of an app: names of locks, the OpenAPI schema, lifespans."""

# no ``from __future__ import annotations``: FastAPI looks names up in the module, not in a test's function

import asyncio
import enum
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

import pytest
from fastapi import APIRouter, Cookie, Depends, FastAPI, Header, Query, WebSocket, responses
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import (
    AsyncHeld,
    AsyncLease,
    FastAPILocks,
    answer,
    document,
    exclusive,
    lease,
    locks_of,
    required_key,
    semaphore,
    shared,
)
from sqlalchemy_locks.integrations.starlette import StarletteLocks
from tests.conftest import install
from tests.fixtures.parties import PATIENCE, async_connected, installed, unused
from tests.fixtures.web import PROBLEM, Door, client, client_of, code, meanwhile, run, served

SQLITE = "sqlite/aiosqlite"


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
        (str, "'\"; DROP TABLE lock_semaphore; --", "'\"; DROP TABLE lock_semaphore; --"),
        (str, "<script>alert(1)<b>", "<script>alert(1)<b>"),
        (str, "\N{PILE OF POO}\u0301%s%(x)s{y}", "\N{PILE OF POO}\u0301%s%(x)s{y}"),
    ],
)
def test_name_uses_the_parsed_parameter(servers: Any, annotation: Any, spelt: str, name: str) -> None:
    async def main() -> None:
        async with served(servers, SQLITE) as (app, _):
            what = unused()

            @app.post("/{value}")
            async def work(value: annotation, grant: Annotated[AsyncLease, lease(f"{what} {{value}}")]) -> list[str]:
                return list(grant.permits)

            async with client_of(app) as client:
                assert (await client.post(f"/{quote(spelt, safe='')}")).json() == [f"{what} {name}"]

    run(main)


@pytest.mark.parametrize("wrong", ["n" * 256, "nul \0", "ends with a space "])
@pytest.mark.parametrize("guard", [exclusive("{name}"), shared("{name}"), lease("{name}"), semaphore("{name}")])
def test_invalid_name_is_answered_422(servers: Any, guard: Any, wrong: str) -> None:
    async def main() -> None:
        async with served(servers, SQLITE) as (app, _):

            @app.post("/{name}", dependencies=[guard])
            async def work(name: str) -> None:
                raise AssertionError("it was had")

            async with client_of(app) as client:
                assert code(await client.post(f"/{quote(wrong, safe='')}")) == (422, "bad-name")

    run(main)


def test_names_from_any_part_of_a_request(servers: Any) -> None:
    async def main() -> None:
        async with served(servers, SQLITE) as (app, _):
            what = unused()

            def the_tenant(tenant: Annotated[str, Header()]) -> str:
                return tenant.lower()

            async def of_the_body(body: dict[str, int], tenant: Annotated[str, Depends(the_tenant)]) -> str:
                return f"{what} {tenant} {body['order']}"

            @app.post("/{one}")
            async def work(
                one: int,
                tenant: Annotated[str, Depends(the_tenant)],
                two: Annotated[str, Cookie()],
                body: dict[str, int],
                template: Annotated[AsyncLease, lease(f"{what} {{one}} {{two}} {{three}}")],
                function: Annotated[AsyncLease, lease(of_the_body)],
                three: int | None = None,
            ) -> list[str]:
                return [*template.permits, *function.permits]

            async with client_of(app) as client:
                asked = {"json": {"order": 5}, "headers": {"Tenant": "ACME", "Cookie": "two=2"}}
                made = await client.post("/01", params={"three": "3"}, **asked)
                assert made.json() == [f"{what} 1 2 3", f"{what} acme 5"]
                # not a lock that all requests without the parameter share
                assert code(await client.post("/01", **asked)) == (422, "bad-name")
                assert (await client.post("/01", params={"three": "x"}, **asked)).json()["detail"][0]["loc"][
                    1
                ] == "three"

    run(main)


def starting(app: FastAPI, engine: Any = None) -> None:
    async def main() -> None:
        async with async_connected("sqlite+aiosqlite:///unused.db") as engine:
            async with FastAPILocks(engine, maintain_every=None).lifespan(app):
                pass

    run(main)


def test_template_with_unknown_parameter_is_refused() -> None:
    app, router = FastAPI(), APIRouter()

    @router.post("/invoices/{invoice_id}", dependencies=[exclusive("invoice:{invoice}")])
    async def work(invoice_id: int, limit: int = 0) -> None: ...

    app.include_router(router, prefix="/v1")
    with pytest.raises(ValueError, match=r"/v1/invoices/\{invoice_id\} has no parameter 'invoice'.*invoice_id, limit"):
        starting(app)


def test_undeclared_parameter_is_refused() -> None:
    """It would be the raw text, in which 042 and 42 differ."""
    app = FastAPI()

    @app.post("/invoices/{invoice_id}", dependencies=[exclusive("invoice:{invoice_id}")])
    async def work() -> None: ...

    with pytest.raises(ValueError, match="Declare it"):
        starting(app)


def test_parameter_with_two_types_is_refused() -> None:
    app = FastAPI()

    def raw(invoice_id: str) -> str:
        return invoice_id

    @app.post("/invoices/{invoice_id}", dependencies=[exclusive("invoice:{invoice_id}")])
    async def work(invoice_id: int, same: Annotated[str, Depends(raw)]) -> None: ...

    with pytest.raises(ValueError, match="more than once, as different types"):
        starting(app)


@pytest.mark.parametrize(
    "annotation",
    [float, Decimal, datetime, timedelta, list[str], float | None, int | float, Annotated[Decimal | None, Field(ge=0)]],
)
def test_ambiguous_parameter_types_are_refused(annotation: Any) -> None:
    app = FastAPI()

    @app.post("/prices", dependencies=[exclusive("price:{price}")])
    async def work(price: Annotated[annotation, Header()]) -> None: ...

    with pytest.raises(ValueError, match="can be written in several ways"):
        starting(app)


def test_model_parameter_is_refused() -> None:
    app = FastAPI()

    class Filter(BaseModel):
        size: int = 1

    @app.get("/prices", dependencies=[exclusive("prices:{of}")])
    async def work(of: Annotated[Filter, Query()]) -> None: ...

    with pytest.raises(ValueError, match="is several parameters"):
        starting(app)


@pytest.mark.parametrize("wrong", ["{}", "{0}", "{a.b}", "{a!r}", "{a:>9}", "{a", "", "n" * 256, "{a b}"])
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
        lambda: semaphore("a", count=0),
        lambda: semaphore({"a": 0}),
        lambda: semaphore("a", ttl=0.5),
        lambda: lease("a", ttl=0.5),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
    for odd in (
        lambda: exclusive(7),  # type: ignore[arg-type]
        lambda: exclusive("a", timeout="5s"),  # type: ignore[arg-type]
        lambda: semaphore({"a": 1}, count=2),
        lambda: lease("a", ttl=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"."):
            odd()


async def says_so() -> StreamingResponse:
    raise AssertionError


async def makes_one():  # type: ignore[no-untyped-def]
    return StreamingResponse(iter(()))


def makes_one_of_a_module():  # type: ignore[no-untyped-def]
    return responses.StreamingResponse(iter(()))


async def yields():  # type: ignore[no-untyped-def]
    yield b""


@pytest.mark.parametrize("stream", [says_so, makes_one, makes_one_of_a_module, yields])
def test_stream_requires_request_scope(stream: Callable[..., Any]) -> None:
    def refused(guard: Any, **options: Any) -> bool:
        app = FastAPI()
        app.get("/stream", dependencies=[guard], **options)(stream)
        try:
            starting(app)
        except ValueError as error:
            return 'scope="request"' in str(error)
        return False

    assert refused(exclusive("a"))
    assert refused(semaphore("a", scope="function"))
    assert not refused(exclusive("a", scope="request"))
    assert refused(lease("a"))
    assert not refused(lease("a", scope="request"))


def test_openapi_documents_lock_answers(servers: Any) -> None:
    app, router = FastAPI(), APIRouter(prefix="/v1")

    @app.post("/invoices/{invoice_id}", dependencies=[exclusive("invoice:{invoice_id}")])
    async def charge(invoice_id: int) -> None: ...

    @router.post("/exports", responses={429: {"description": "Mine"}}, dependencies=[semaphore("a", key=required_key)])
    async def export() -> None: ...

    @router.get("/{tenant}", dependencies=[semaphore("{tenant}", key=None)])
    @router.put("/{tenant}", dependencies=[lease("{tenant}")])
    async def of_the_tenant(tenant: str) -> None: ...

    @router.get("/")
    async def free() -> None: ...

    app.include_router(router, dependencies=[shared("service")])
    document(app)
    document(app)
    schema = json.loads(json.dumps(app.openapi()))
    assert schema == app.openapi()

    def told(method: str, path: str) -> dict[str, Any]:
        return schema["paths"][path][method]["responses"]

    locked = told("post", "/invoices/{invoice_id}")
    assert set(locked) == {"200", "422", "423", "503"}
    assert locked["423"]["content"] == {PROBLEM: {"schema": {"$ref": "#/components/schemas/LockProblem"}}}
    assert locked["423"]["headers"]["Retry-After"]["schema"]["type"] == "integer"
    assert set(locked["422"]["content"]) == {"application/json", PROBLEM}
    # also when it is included by a router
    assert set(told("get", "/v1/")) == {"200", "423", "503"}
    limited = told("post", "/v1/exports")
    assert set(limited) == {"200", "409", "422", "423", "429", "503"}
    assert (limited["429"]["description"], "Retry-After" in limited["429"]["headers"]) == ("Mine", True)
    header = schema["paths"]["/v1/exports"]["post"]["parameters"]
    assert [(one["name"], one["in"], one["required"]) for one in header] == [("Idempotency-Key", "header", True)]
    assert set(told("get", "/v1/{tenant}")) == {"200", "404", "422", "423", "429", "503"}
    assert set(told("put", "/v1/{tenant}")) == {"200", "422", "423", "503"}
    assert schema["components"]["schemas"]["LockProblem"]["properties"]["status"] == {"type": "integer"}


def test_openapi_without_locks_is_unchanged() -> None:
    app = FastAPI()

    @app.get("/")
    async def free() -> None: ...

    before = json.dumps(app.openapi())
    document(app)
    assert json.dumps(app.openapi()) == before


def test_answers_match_the_schema(servers: Any) -> None:
    async def main() -> None:
        async with served(servers, SQLITE) as (app, locks):

            @app.post("/work", dependencies=[exclusive("schema", timeout=0)])
            async def work() -> None: ...

            async with client_of(app) as client, locks.exclusive("schema"):
                refused = await asyncio.create_task(client.post("/work"))
                schema = (await client.get("/openapi.json")).json()
                assert str(refused.status_code) in schema["paths"]["/work"]["post"]["responses"]
                problem = schema["components"]["schemas"]["LockProblem"]
                assert set(refused.json()) == set(problem["required"]) == set(problem["properties"])

    run(main)


def test_lifespan_inside_the_apps_lifespan(servers: Any) -> None:
    """The app disposes of its own engine."""

    async def main() -> None:
        told: list[str] = []
        async with async_connected(installed(servers, "sqlite", "aiosqlite")) as engine:
            locks = FastAPILocks(engine, maintain_every=None)

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
                async with locks.lifespan(app):
                    assert locks_of(Request({"type": "http", "app": app})) is locks
                    yield {"mine": "state"}
                async with engine.connect() as connection:
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

    run(main)


def test_lifespan_runs_maintenance(servers: Any) -> None:
    async def main() -> None:
        url = servers.fresh("sqlite", "aiosqlite")
        install(url.replace("+aiosqlite", ""))
        async with async_connected(url) as engine:
            locks = FastAPILocks(engine, maintain_every=3600)
            await locks.run(sl.semaphore.create("exports", 1))
            await locks.acquire({"exports": 1}, external_id="dead", ttl=0.001)
            app = FastAPI(lifespan=locks.lifespan)
            async with client_of(app):
                while await locks.run(sl.semaphore.holders("exports")):
                    await asyncio.sleep(0.05)
            with pytest.raises(ValueError, match="maintain_every"):
                FastAPILocks(engine, maintain_every=0)

    run(main)


def test_locks_of_without_lifespan_raises() -> None:
    """Without a lifespan, locks_of raises, and can be overridden like any dependency."""

    async def main() -> None:
        app, guard = FastAPI(), exclusive("override", timeout=PATIENCE)

        @app.post("/work", dependencies=[guard])
        async def work() -> int:
            return 1

        async with client(app) as asking:
            with pytest.raises(RuntimeError, match="this app has no locks"):
                await asking.post("/work")
            app.dependency_overrides[guard.dependency] = lambda: None
            assert (await asking.post("/work")).json() == 1

    run(main)


def test_dependency_with_other_locks(servers: Any) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, "sqlite", "aiosqlite")) as engine:
            locks = sl.AsyncLocks(engine)
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

    run(main)


def test_websocket_contention_is_refused(servers: Any) -> None:
    """Refused before it is accepted, with the same answer."""

    async def main() -> None:
        async with served(servers, SQLITE) as (app, _):
            door, what = Door(), unused()

            @app.websocket("/{room}", dependencies=[lease(f"{what} {{room}}", ttl=3600, timeout=0)])
            async def talk(room: str, socket: WebSocket) -> None:
                await socket.accept()
                await door.pass_()
                await socket.close()

            async def connect() -> list[Any]:
                sent: list[Any] = []

                async def receive() -> Any:
                    return {"type": "websocket.connect"}

                async def send(message: Any) -> None:
                    sent.append(message)

                scope = {"type": "websocket", "path": "/room", "headers": [], "query_string": b"", "subprotocols": []}
                await app({**scope, "extensions": {"websocket.http.response": {}}}, receive, send)
                return sent

            async with client_of(app):
                async with meanwhile(connect(), door) as first:
                    refused = await connect()
                    assert (refused[0]["type"], refused[0]["status"]) == ("websocket.http.response.start", 423)
                    assert (b"content-type", PROBLEM.encode()) in refused[0]["headers"]
                assert [one["type"] for one in await first] == ["websocket.accept", "websocket.close"]

    run(main)


def test_starlette_lifespan_and_answer(servers: Any) -> None:
    async def main() -> None:
        async with async_connected(installed(servers, "sqlite", "aiosqlite")) as engine:
            locks, door, what = StarletteLocks(engine, maintain_every=None), Door(), unused()

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

    run(main)
