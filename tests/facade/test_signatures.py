"""Both façades have the same methods, with the same parameters; and every public name has a docstring."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import sqlalchemy_locks as sl
from sqlalchemy_locks.facade.async_lease import AsyncLease, AsyncLostEvent
from sqlalchemy_locks.facade.async_locks import AsyncMutexes
from sqlalchemy_locks.facade.exclusive import Held
from sqlalchemy_locks.facade.lease import Lease
from sqlalchemy_locks.facade.mutexes import Mutexes

TWINS = [(sl.Locks, sl.AsyncLocks), (Mutexes, AsyncMutexes), (Lease, AsyncLease)]


def attributes(cls: type[Any]) -> set[str]:
    return {name for each in cls.__mro__ for name in vars(each).get("__annotations__", ())}


def public(cls: type[Any]) -> set[str]:
    return {name for name in attributes(cls).union(dir(cls)) if not name.startswith("_")}


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS)
def test_the_same_names(sync: type[Any], asynchronous: type[Any]) -> None:
    assert public(sync) == public(asynchronous)


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS)
def test_the_same_parameters(sync: type[Any], asynchronous: type[Any]) -> None:
    for name in sorted(public(sync) & public(asynchronous)):
        one, other = (inspect.getattr_static(cls, name, None) for cls in (sync, asynchronous))
        if isinstance(other, property) or not callable(other):
            assert not callable(one) or name == "dispatch"
            continue
        mine, theirs = (inspect.signature(method).parameters.values() for method in (one, other))
        assert [(it.name, it.kind, it.default) for it in mine] == [(it.name, it.kind, it.default) for it in theirs]
        for ours, its in zip(mine, theirs, strict=True):
            # they may differ only in accepting awaitables
            assert str(its.annotation).replace("Alive | AsyncAlive", "Alive") == str(ours.annotation), name


@pytest.mark.parametrize(
    "cls", [sl.Locks, sl.AsyncLocks, Mutexes, AsyncMutexes, Held, Lease, AsyncLease, AsyncLostEvent]
)
def test_every_method_is_documented(cls: type[Any]) -> None:
    for name in public(cls) - {"dispatch"} - attributes(cls):
        assert inspect.getdoc(inspect.getattr_static(cls, name)), f"{cls.__name__}.{name}"


def test_every_public_name_is_documented() -> None:
    assert [name for name in sl.__all__ if not inspect.getdoc(getattr(sl, name))] == []
