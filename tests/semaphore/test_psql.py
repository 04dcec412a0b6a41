"""The functions, called from psql: they refuse what the Python API refuses, with the same messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import sqlalchemy_locks as sl
from tests.fixtures.engines import MakeEngine
from tests.fixtures.semaphores import made, unused

LONG = "x" * 256
ACQUIRE = "SELECT * FROM lock.semaphore_acquire(:names, :counts, :id, :owner, :ttl)"
ARRAYS = "SELECT * FROM lock.semaphore_acquire(CAST(:names AS text[]), CAST(:counts AS integer[]), :id, :owner, :ttl)"
GIVEN: dict[str, Any] = {"names": ["s"], "counts": [1], "id": "job", "owner": None, "ttl": None}
CREATE, RESIZE = (
    "SELECT lock.semaphore_create(:name, :capacity, :by)",
    "SELECT lock.semaphore_resize(:name, :capacity, :by)",
)
DELETE = "SELECT lock.semaphore_delete(:name, :by)"
NAMED: dict[str, Any] = {"name": "s", "capacity": 1, "by": None}
RELEASE, RENEW = "SELECT lock.semaphore_release(:id)", "SELECT lock.semaphore_renew(:id)"

#: the same mistake in SQL and in Python
MISTAKES: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
    *[
        mistake
        for wrong in ("", "a ", LONG)
        for mistake in (
            (ACQUIRE, {**GIVEN, "names": [wrong]}, lambda wrong=wrong: sl.semaphore.acquire({wrong: 1})),
            (
                ACQUIRE,
                {**GIVEN, "names": ["s", wrong], "counts": [1, 1]},
                lambda wrong=wrong: sl.semaphore.acquire({"s": 1, wrong: 1}),
            ),
            (ACQUIRE, {**GIVEN, "id": wrong}, lambda wrong=wrong: sl.semaphore.acquire({"s": 1}, external_id=wrong)),
            (ACQUIRE, {**GIVEN, "owner": wrong}, lambda wrong=wrong: sl.semaphore.acquire({"s": 1}, owner=wrong)),
            (CREATE, {**NAMED, "name": wrong}, lambda wrong=wrong: sl.semaphore.create(wrong, 1)),
            (CREATE, {**NAMED, "by": wrong}, lambda wrong=wrong: sl.semaphore.create("s", 1, by=wrong)),
            (RESIZE, {**NAMED, "name": wrong}, lambda wrong=wrong: sl.semaphore.resize(wrong, 1)),
            (RESIZE, {**NAMED, "by": wrong}, lambda wrong=wrong: sl.semaphore.resize("s", 1, by=wrong)),
            (DELETE, {"name": wrong, "by": None}, lambda wrong=wrong: sl.semaphore.delete(wrong)),
            (DELETE, {"name": "s", "by": wrong}, lambda wrong=wrong: sl.semaphore.delete("s", by=wrong)),
            (RELEASE, {"id": wrong}, lambda wrong=wrong: sl.semaphore.release(wrong)),
            (RENEW, {"id": wrong}, lambda wrong=wrong: sl.semaphore.renew(wrong)),
        )
    ],
    *[
        (ACQUIRE, {**GIVEN, "ttl": ttl}, lambda ttl=ttl: sl.semaphore.acquire({"s": 1}, ttl=ttl))
        for ttl in (0, -5, 0.0001, 10**11)
    ],
    *[
        (ACQUIRE, {**GIVEN, "counts": [count]}, lambda count=count: sl.semaphore.acquire({"s": count}))
        for count in (0, -1)
    ],
    (CREATE, {**NAMED, "capacity": -1}, lambda: sl.semaphore.create("s", -1)),
    (RESIZE, {**NAMED, "capacity": -1}, lambda: sl.semaphore.resize("s", -1)),
]
#: mistakes that only SQL can make
NULLS = [
    (ACQUIRE, {**GIVEN, "names": None}, "needs at least one semaphore, and one count for each name"),
    (ACQUIRE, {**GIVEN, "names": [], "counts": []}, "needs at least one semaphore, and one count for each name"),
    (ACQUIRE, {**GIVEN, "counts": [1, 1]}, "needs at least one semaphore, and one count for each name"),
    (ACQUIRE, {**GIVEN, "counts": None}, "needs at least one semaphore, and one count for each name"),
    (ARRAYS, {**GIVEN, "names": "[2:3]={a,b}", "counts": "{1,1}"}, "one-dimensional arrays whose indexes begin at 1"),
    (ARRAYS, {**GIVEN, "names": "{a,b}", "counts": "[0:1]={1,1}"}, "one-dimensional arrays whose indexes begin at 1"),
    (ARRAYS, {**GIVEN, "names": "{{a,b},{c,d}}", "counts": "{1,1,1,1}"}, "one-dimensional arrays whose indexes begin at 1"),
    (ARRAYS, {**GIVEN, "names": "{a,a}", "counts": "{2147483647,1}"}, "the counts of 'a' add up to 2147483648"),
    *[
        (ARRAYS.replace(":ttl)", f":ttl, queue_keys => '{keys}')"), {**GIVEN, "names": "{a,b}", "counts": "{1,1}"},
         "queue_keys is NULL, or has one key for each name")
        for keys in ("{1}", "{}", "{1,NULL}", "[0:1]={1,2}")
    ],
    (RESIZE, {**NAMED, "name": "never made"}, "there is no semaphore 'never made': make it with semaphore.create"),
    (ACQUIRE, {**GIVEN, "names": [None]}, "a semaphore's name must not be NULL"),
    (ACQUIRE, {**GIVEN, "counts": [None]}, "a count of permits is from 1 to 2147483647, not NULL"),
    (ACQUIRE, {**GIVEN, "id": None}, "the external_id of a request must not be NULL"),
    (ACQUIRE, {**GIVEN, "ttl": float("inf")}, "ttl must be at most a hundred years, 3155760000 seconds, not Infinity"),
    (ACQUIRE, {**GIVEN, "ttl": float("nan")}, "ttl must be at most a hundred years, 3155760000 seconds, not NaN"),
    (CREATE, {**NAMED, "name": None}, "a semaphore's name must not be NULL"),
    (CREATE, {**NAMED, "capacity": None}, "a capacity is from 0 to 2147483647, not NULL"),
    (RESIZE, {**NAMED, "name": None}, "a semaphore's name must not be NULL"),
    (RESIZE, {**NAMED, "capacity": None}, "a capacity is from 0 to 2147483647, not NULL"),
    (DELETE, {"name": None, "by": None}, "a semaphore's name must not be NULL"),
    (RELEASE, {"id": None}, "the external_id of a request must not be NULL"),
    (RENEW, {"id": None}, "the external_id of a request must not be NULL"),
]  # fmt: skip


@pytest.fixture(params=["postgresql15", "yugabytedb"])
def refused(request: pytest.FixtureRequest, engine_to: MakeEngine) -> Callable[[str, dict[str, Any]], str]:
    engine = engine_to(request.param)

    def sentence(call: str, values: dict[str, Any]) -> str:
        """The server's error for a call that it refuses."""
        with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
            connection.execute(text(call), values)
        origin: Any = raised.value.orig
        assert origin.diag.sqlstate == "22023"
        return str(origin.diag.message_primary)

    return sentence


def test_functions_refuse_the_same_input_as_python(refused: Callable[[str, dict[str, Any]], str]) -> None:
    for call, values, in_python in MISTAKES:
        with pytest.raises(ValueError, match=".") as raised:
            in_python()
        assert refused(call, values) == str(raised.value)


def test_functions_refuse_invalid_sql_values(refused: Callable[[str, dict[str, Any]], str]) -> None:
    for call, values, expected in NULLS:
        assert expected in refused(call, values)


def test_longest_names_are_accepted(engine_to: MakeEngine) -> None:
    """255 characters, not bytes, and a time of a hundred years."""
    engine = engine_to("postgresql15")
    name = f"{unused()} {'🐘' * 255}"[:255]
    with engine.begin() as connection:
        assert connection.scalar(text(CREATE), {"name": name, "capacity": 1, "by": name})
        asked = {"names": [name], "counts": [1], "id": name, "owner": name, "ttl": 3155760000}
        assert connection.execute(text(ACQUIRE), asked).one().acquired
        assert connection.scalar(text(RELEASE), {"id": name}) == "RELEASED"


def test_duplicate_name_is_one_semaphore(engine_to: MakeEngine) -> None:
    engine = engine_to("postgresql15")
    name = made(engine, 3)
    with engine.begin() as connection:
        asked = {**GIVEN, "names": [name, name], "counts": [1, 2], "id": unused("job")}
        assert connection.execute(text(ACQUIRE), asked).one().semaphores == [name]
        assert not connection.execute(text(ACQUIRE), {**asked, "id": unused("job"), "counts": [1, 1]}).one().acquired


@pytest.mark.parametrize("name", ["postgresql15", "yugabytedb"])
def test_unknown_semaphore_is_no_server_error(name: str, engine_to: MakeEngine) -> None:
    """Which would end the caller's transaction."""
    with engine_to(name).begin() as connection:
        with pytest.raises(sl.UnknownSemaphore):
            connection.scalar(sl.semaphore.resize(unused(), 2))
        assert connection.scalar(sl.semaphore.create(unused(), 1)) is True
