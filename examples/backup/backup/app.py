"""The service: targets, documents, backups, slots."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Path, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.fastapi import (
    AsyncHeld,
    AsyncLease,
    StarletteLocks,
    answer,
    exclusive,
    required_key,
    semaphore,
)

from . import page
from .models import Backup, Document, Target
from .settings import settings

SLOTS = "backup-slots"

engine = create_async_engine(settings.database_url)
Session = async_sessionmaker(engine, expire_on_commit=False)
locks = StarletteLocks(engine)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with locks.lifespan(app):
        await locks.run(sl.semaphore.create(SLOTS, capacity=settings.slots))  # keeps an existing one
        yield
    await engine.dispose()


app = FastAPI(title="Backups", lifespan=lifespan, exception_handlers={sl.LockError: answer})
app.mount("/locks", page.of(locks))

_NO_NUL = r"^[^\x00]*$"  # PostgreSQL can't store a NUL
Name = Annotated[str, Path(min_length=1, max_length=255, pattern=_NO_NUL)]
TargetId = Annotated[int, Path(ge=1, lt=2**63)]
Key = Annotated[str, Depends(required_key)]


class NewTarget(BaseModel):
    name: str = Field(min_length=1, max_length=255, pattern=_NO_NUL)


class NewDocument(BaseModel):
    body: str = Field(pattern=_NO_NUL)


class Slots(BaseModel):
    capacity: int = Field(ge=0, le=1000)
    by: str = Field(min_length=1, max_length=255, pattern=_NO_NUL)


class Told(BaseModel):
    model_config = ConfigDict(from_attributes=True)


class TargetTold(Told):
    id: int
    name: str
    latest_id: int | None


class BackupTold(Told):
    id: int
    target_id: int
    state: str
    documents: dict[str, Any]


class SlotsTold(BaseModel):
    capacity: int
    used: int


@app.post("/targets", status_code=201)
async def make_target(new: NewTarget) -> TargetTold:
    try:
        async with Session.begin() as session:
            target = Target(name=new.name, fence=0)
            session.add(target)
            await session.flush()
            # in one transaction: both the target and its semaphore exist, or neither
            await session.execute(sl.semaphore.create(target.permit, capacity=1))
    except IntegrityError:
        raise HTTPException(409, "there is a target of that name") from None
    return TargetTold.model_validate(target)


@app.get("/targets/{target_id}")
async def get_target(target_id: TargetId) -> TargetTold:
    async with Session() as session:
        target = await session.get(Target, target_id)
    if target is None:
        raise HTTPException(404, "there is no such target")
    return TargetTold.model_validate(target)


@app.put("/targets/{target_id}/documents/{name}", status_code=204)
async def write_document(
    target_id: TargetId,
    name: Name,
    new: NewDocument,
    held: Annotated[AsyncHeld, exclusive("target:{target_id}", timeout=settings.wait_seconds)],
) -> None:
    """Write a document, one writer of a target at a time: committed before the response is sent."""
    if await held.session.get(Target, target_id) is None:
        raise HTTPException(404, "there is no such target")
    await held.session.merge(Document(target_id=target_id, name=name, body=new.body))


async def finished(target_id: TargetId, key: Key) -> Backup | None:
    """Return the backup that this key has already made, if any."""
    async with Session() as session:
        backup = await session.scalar(select(Backup).where(Backup.key == key))
    if backup is not None and backup.target_id != target_id:
        raise HTTPException(409, "this key was used for another target")
    return backup if backup is not None and backup.state == "done" else None


@app.post("/targets/{target_id}/backups", status_code=201)
async def back_up(
    target_id: TargetId,
    key: Key,
    response: Response,
    known: Annotated[Backup | None, Depends(finished)],
    permits: Annotated[
        AsyncLease | None,
        semaphore(
            {SLOTS: 1, "target:{target_id}": 1},
            ttl=settings.slot_ttl,
            timeout=settings.wait_seconds,
            key=required_key,
            unless=finished,
        ),
    ],
) -> BackupTold:
    """Back up a target, once for each key, while holding a slot and the target."""
    if known is not None:
        response.status_code = 200
        return BackupTold.model_validate(known)
    assert permits is not None
    token = permits.fence[f"target:{target_id}"]
    async with Session.begin() as session:
        # no other request holds this target, so an unfinished backup's worker is dead
        dead = update(Backup).where(Backup.target_id == target_id, Backup.state == "running")
        await session.execute(dead.values(state="failed"))
        # an attempt with this key whose worker died, or which failed, is made again
        backup = await session.scalar(select(Backup).where(Backup.key == key))
        if backup is None:
            backup = Backup(key=key, target_id=target_id, documents={})
            session.add(backup)
        backup.state, backup.token = "running", token
        documents = (await session.scalars(select(Document).where(Document.target_id == target_id))).all()
    copies = await copied(documents, permits)
    async with Session.begin() as session:
        await write(session, backup, copies, permits)
    backup.state, backup.documents = "done", copies
    return BackupTold.model_validate(backup)


async def copied(documents: Sequence[Document], permits: AsyncLease) -> dict[str, str]:
    """Copy the documents, slowly if configured."""
    copies = {}
    for document in documents:
        await asyncio.sleep(settings.copy_seconds)
        if permits.lost:  # the result would be refused
            await permits.check()
        copies[document.name] = document.body
    return copies


async def write(session: Any, backup: Backup, copies: dict[str, str], grant: sl.Grant) -> None:
    """Store the result; refused if the permits are no longer held, or a newer holder has written."""
    done = update(Backup).where(Backup.id == backup.id).values(state="done", documents=copies)
    await session.scalar(sl.guarded(done, grant))
    latest = update(Target).where(Target.id == backup.target_id).values(latest_id=backup.id)
    await session.scalar(sl.fenced(latest, Target.fence, backup.token))


@app.get("/targets/{target_id}/backups")
async def list_backups(target_id: TargetId) -> list[BackupTold]:
    async with Session() as session:
        found = await session.scalars(select(Backup).where(Backup.target_id == target_id).order_by(Backup.id))
    return [BackupTold.model_validate(backup) for backup in found]


@app.get("/slots")
async def get_slots() -> SlotsTold:
    (slots,) = [row for row in await locks.run(sl.semaphore.usage()) if row.name == SLOTS]
    return SlotsTold(capacity=slots.capacity, used=slots.used)


@app.put("/slots")
async def set_slots(new: Slots) -> SlotsTold:
    """Change the number of slots; slots in use stay in use."""
    await locks.run(sl.semaphore.resize(SLOTS, new.capacity, by=new.by))
    return await get_slots()
