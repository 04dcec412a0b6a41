"""The tables of the workloads: what clients write under locks, and rows of an app's own that they capture."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sqlalchemy_locks as sl

_INNODB: dict[str, Any] = {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4", "mysql_collate": "utf8mb4_bin"}
_OPTIONS = {**_INNODB, **{name.replace("mysql", "mariadb"): value for name, value in _INNODB.items()}}
metadata = MetaData()

#: a number for each key: each writer reads it and adds one
values = Table(
    "fault_value",
    metadata,
    Column("name", String(190), primary_key=True),
    Column("number", Integer, nullable=False),
    **_OPTIONS,
)
#: what was written, by which call
ledger = Table(
    "fault_ledger",
    metadata,
    Column("name", String(190), nullable=False, index=True),
    Column("number", Integer, nullable=False),
    Column("call_number", String(190), nullable=False),
    **_OPTIONS,
)


class Base(DeclarativeBase):
    """The mapped classes of an app."""

    metadata = metadata


class Document(Base):
    """What holders of mutexes and permits write."""

    __tablename__ = "fault_document"
    __table_args__ = _OPTIONS
    name: Mapped[str] = mapped_column(String(190), primary_key=True)
    body: Mapped[str] = mapped_column(String(190), default="")
    fence: Mapped[int] = sl.Fence()


class Task(Base):
    """Rows that are captured."""

    __tablename__ = "fault_task"
    __table_args__ = _OPTIONS
    id: Mapped[str] = mapped_column(String(190), primary_key=True)
    queue: Mapped[str] = mapped_column(String(190), index=True)
    status: Mapped[str] = mapped_column(String(20), default="ready")
    claim: Mapped[int] = mapped_column(BigInteger, default=0)
