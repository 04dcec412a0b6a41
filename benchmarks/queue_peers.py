"""pgqueuer and procrastinate, processing as many jobs of their own in the same database.

    pip install -r benchmarks/requirements.txt

Each is used as documented: pgqueuer over asyncpg until its queue is drained, procrastinate over psycopg
with ten jobs at once until nothing is left. Handlers do nothing, as ours do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import asyncpg
import procrastinate
from pgqueuer.adapters.drivers.asyncpg import AsyncpgDriver
from pgqueuer.core.qm import QueueManager
from pgqueuer.domain.types import QueueExecutionMode
from pgqueuer.queries import Queries
from sqlalchemy import URL

#: puts n jobs; processes them in batches of a size
Fill = Callable[[int], None]
Work = Callable[[int], None]


@contextlib.contextmanager
def pgqueuer(url: URL, commit: str) -> Iterator[tuple[Fill, Work]]:
    """pgqueuer's ``QueueManager``."""
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)

    async def connected() -> asyncpg.Connection:
        return await asyncpg.connect(plain, server_settings={"synchronous_commit": commit})

    async def installed() -> None:
        connection = await connected()
        queries = Queries(AsyncpgDriver(connection))
        with contextlib.suppress(Exception):
            await queries.uninstall()
        await queries.install()
        await connection.close()

    async def filled(number: int) -> None:
        connection = await connected()
        await connection.execute("TRUNCATE pgqueuer, pgqueuer_log")
        queries = Queries(AsyncpgDriver(connection))
        await queries.enqueue(["job"] * number, [b"{}"] * number, [0] * number)
        await connection.execute("VACUUM ANALYZE pgqueuer")
        await connection.close()

    async def worked(batch: int) -> None:
        connection = await connected()
        manager = QueueManager(Queries(AsyncpgDriver(connection)))

        @manager.entrypoint("job")
        async def handler(_: object) -> None:
            pass

        await manager.run(batch_size=batch, mode=QueueExecutionMode.drain)

    asyncio.run(installed())
    yield lambda number: asyncio.run(filled(number)), lambda batch: asyncio.run(worked(batch))


@contextlib.contextmanager
def procrastinates(url: URL, commit: str) -> Iterator[tuple[Fill, Work]]:
    """procrastinate's worker."""
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)

    def app() -> procrastinate.App:
        made = procrastinate.App(
            connector=procrastinate.PsycopgConnector(
                conninfo=plain, kwargs={"options": f"-c synchronous_commit={commit}"}
            )
        )

        @made.task(name="job")
        async def handler() -> None:
            pass

        return made

    async def installed() -> None:
        async with app().open_async() as opened:
            if not await opened.check_connection_async():
                await opened.schema_manager.apply_schema_async()

    async def filled(number: int) -> None:
        async with app().open_async() as opened:
            await opened.connector.execute_query_async("TRUNCATE procrastinate_jobs CASCADE")
            await opened.tasks["job"].batch_defer_async(*({} for _ in range(number)))

    async def worked(_: int) -> None:
        async with app().open_async() as opened:
            await opened.run_worker_async(wait=False, concurrency=10, install_signal_handlers=False)

    asyncio.run(installed())
    yield lambda number: asyncio.run(filled(number)), lambda batch: asyncio.run(worked(batch))
