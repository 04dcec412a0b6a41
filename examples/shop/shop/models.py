"""Customers, orders, invoices and payments."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

from sqlalchemy import BigInteger, DateTime, ForeignKey, Index, Numeric, String, Text, func
from sqlalchemy.orm import Mapped, mapped_column, relationship

import sqlalchemy_locks as sl

from .extensions import db

Money = Numeric(10, 2)
#: a timestamp that doesn't depend on the session's time zone
Instant = DateTime(timezone=True)


class Customer(db.Model):
    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(String(255))
    name: Mapped[str] = mapped_column(String(255))


class Order(db.Model):
    """``new``, ``paid``, ``shipping`` while a shipper packs it, ``shipped``."""

    __tablename__ = "orders"
    __table_args__ = (Index("orders_by_status", "status", "id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey(Customer.id))
    item: Mapped[str] = mapped_column(String(255))
    status: Mapped[str] = mapped_column(String(20), default="new")
    #: increases at each capture: identifies the shipper that holds the order
    claim: Mapped[int] = mapped_column(BigInteger, default=0)
    #: when a shipper last set the status, and the seconds after which another may capture it
    updated_at: Mapped[datetime | None] = mapped_column(Instant)
    timeout: Mapped[int] = mapped_column(default=600)
    label: Mapped[str | None] = mapped_column(String(40))
    customer: Mapped[Customer] = relationship()
    invoice: Mapped[Invoice] = relationship(back_populates="order")


class Invoice(db.Model):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), unique=True)
    amount: Mapped[Decimal] = mapped_column(Money)
    order: Mapped[Order] = relationship(back_populates="invoice")
    payments: Mapped[list[Payment]] = relationship(order_by="Payment.id")

    @property
    def paid(self) -> Decimal:
        return sum((payment.amount for payment in self.payments), Decimal(0))


class Payment(db.Model):
    """A payment. An invoice may have several, so the invoice's lock, not a constraint, prevents a second one."""

    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice_id: Mapped[int] = mapped_column(ForeignKey(Invoice.id))
    amount: Mapped[Decimal] = mapped_column(Money)
    at: Mapped[datetime] = mapped_column(Instant, server_default=func.now())


class Report(db.Model):
    __tablename__ = "reports"
    id: Mapped[int] = mapped_column(primary_key=True)
    day: Mapped[date]
    orders: Mapped[int]
    revenue: Mapped[Decimal] = mapped_column(Money)


class Export(db.Model):
    """The newest export, with the fencing token of the grant that wrote it."""

    __tablename__ = "exports"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    body: Mapped[str] = mapped_column(Text, default="")
    by: Mapped[str] = mapped_column(String(255), default="")
    fence: Mapped[int] = sl.Fence()
