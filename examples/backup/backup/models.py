"""The tables of this app."""

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Integer, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl

Identity = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    pass


class Target(Base):
    """A target of backups."""

    __tablename__ = "target"

    id: Mapped[int] = mapped_column(Identity, primary_key=True)
    name: Mapped[str] = mapped_column(String(255), unique=True)
    latest_id: Mapped[int | None] = mapped_column(BigInteger)
    #: the fencing token of the last write of latest_id: writes with a smaller one are refused
    fence: Mapped[int] = sl.Fence()

    @property
    def permit(self) -> str:
        """The name of the semaphore with one permit, held while this target is backed up."""
        return f"target:{self.id}"


class Document(Base):
    """A document of a target."""

    __tablename__ = "document"

    target_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("target.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    body: Mapped[str] = mapped_column(Text)


class Backup(Base):
    """A backup: ``running``, ``done``, or ``failed`` if its worker died."""

    __tablename__ = "backup"

    id: Mapped[int] = mapped_column(Identity, primary_key=True)
    #: the Idempotency-Key of its order
    key: Mapped[str] = mapped_column(String(255), unique=True)
    target_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("target.id"), index=True)
    state: Mapped[str] = mapped_column(String(10))
    token: Mapped[int] = mapped_column(BigInteger)
    documents: Mapped[dict[str, Any]] = mapped_column(JSON)
