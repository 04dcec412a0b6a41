"""The columns of a queue as a mixin for a user's own mapped class; imported on demand, since it needs the ORM."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import JSON, BigInteger, DateTime, Integer, Text, text
from sqlalchemy.dialects.mysql import DATETIME
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from sqlalchemy_locks.sql.clock import Now
from sqlalchemy_locks.sql.tables import ExternalId, exact_name


class _JSONB(JSONB):
    """JSONB whose repr a revision can contain: on other engines Alembic copies JSONB's ``Text()`` without an import."""

    __module__ = JSONB.__module__

    def __repr__(self) -> str:
        return "JSONB()"


# SQLAlchemy's own types, since Alembic's autogenerate writes them into the app's revisions
_Instant = DateTime(timezone=True).with_variant(DATETIME(fsp=6), "mysql", "mariadb")
_Payload = JSON().with_variant(_JSONB(), "postgresql", "yugabytedb")
_Name = exact_name(255)


class JobColumns:
    """The columns of a job, for a class of your own: ``class Mail(sl.JobColumns, Base)``.

    Create its indexes as well: ``sl.Queue(Mail).indexes("postgresql")``. On MySQL and MariaDB the table must use
    InnoDB. A job of such a class can also be put by ``session.add()``, with values for your other columns.

    >>> class Mail(sl.JobColumns, Base):
    ...     __tablename__ = "mail"
    >>> mails = sl.Queue(Mail)
    """

    internal_id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True, sort_order=-1
    )
    external_id: Mapped[UUID] = mapped_column(ExternalId(), default=uuid4, unique=True)
    queue_id: Mapped[str] = mapped_column(_Name, default="default", server_default="default")
    payload: Mapped[Any] = mapped_column(_Payload, nullable=False)
    priority: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    run_at: Mapped[datetime] = mapped_column(_Instant, server_default=Now())
    claim: Mapped[int] = mapped_column(BigInteger(), default=0, server_default=text("0"))
    attempts: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(default=5, server_default=text("5"))
    processing_host: Mapped[str | None] = mapped_column(_Name)
    created_at: Mapped[datetime] = mapped_column(_Instant, server_default=Now())
    started_at: Mapped[datetime | None] = mapped_column(_Instant)
    completed_at: Mapped[datetime | None] = mapped_column(_Instant)
    failed_at: Mapped[datetime | None] = mapped_column(_Instant)
    error: Mapped[str | None] = mapped_column(Text())
    unique_key: Mapped[str | None] = mapped_column(_Name)


class WorkerColumns:
    """The columns of a table of workers beside one of jobs of your own, in its database and schema.

    >>> class Mail(sl.JobColumns, Base):
    ...     __tablename__ = "mail"
    >>> class MailWorker(sl.WorkerColumns, Base):
    ...     __tablename__ = "mail_worker"
    >>> mails = sl.Queue(Mail, workers=MailWorker)
    """

    host: Mapped[str] = mapped_column(_Name, primary_key=True)
    heartbeat_at: Mapped[datetime] = mapped_column(_Instant, server_default=Now())
    started_at: Mapped[datetime] = mapped_column(_Instant, server_default=Now())
