"""Release, requeue, resize: authorization, forged requests, and the log."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import pytest
from sqlalchemy import event, update
from starlette.requests import Request

import sqlalchemy_locks as sl
from sqlalchemy_locks.core.operation import build_context
from sqlalchemy_locks.integrations.dashboard import auth, queries
from sqlalchemy_locks.sql.clock import SecondsAgo
from tests.fixtures.parties import unused
from tests.integrations.dashboard.conftest import ENGINES, ORIGIN, Door, MakeDoor

Make = Callable[..., str]
QUEUE = sl.Queue()


def alice(request: Request) -> str:
    return "alice"


@pytest.fixture
def page(door_to: MakeDoor) -> Door:
    """On which alice may do things."""
    return door_to(door="asgi", authorize=alice, secret="secret")


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO, logger="sqlalchemy_locks"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "sqlalchemy_locks.audit"]


def state(page: Door, external_id: str) -> str:
    return str(page.locks.release(external_id))


def said(page: Door, answer: Any) -> str:
    """Return the page after the redirection."""
    assert answer.status_code == 303, answer.text
    where = answer.headers["location"]
    assert where.startswith("./?")
    return page.text(f"/{where[2:]}")


@pytest.mark.parametrize("engine", ["sqlite", "postgresql15"])
def test_release_frees_permits_and_logs(
    engine: str, door_to: MakeDoor, semaphore: Make, audit: Callable[[], list[str]]
) -> None:
    name = semaphore(engine)
    page = door_to(engine, authorize=alice, secret="secret")
    token = page.token()
    assert f"Released &#39;{name}&#39;" in said(page, page.post("release", token=token, external_id=name))
    assert f"page: release by 'alice': Released '{name}'" in audit()
    assert f"&#39;{name}&#39; was released before" in said(page, page.post("release", token=token, external_id=name))
    assert state(page, name) == "ALREADY_RELEASED"
    assert "There is no request" in said(page, page.post("release", token=token, external_id=unused()))


def test_release_needs_the_shown_request(page: Door, semaphore: Make) -> None:
    """A request that has since reclaimed the external id is not released."""
    name = semaphore()
    (seen,) = re.findall(r'name="request" value="(\w+)"', page.text(f"/?of={name}"))
    token = page.token()
    for nonce, told in (("0" * 32, "There is no request"), (seen, "Released")):
        assert told in said(page, page.post("release", token=token, external_id=name, request=nonce))
    assert page.post("release", token=token, external_id=name, request="1-x").status_code == 400


def test_resize_changes_capacity_and_history(page: Door, semaphore: Make) -> None:
    name = semaphore()
    told = said(page, page.post("resize", token=page.token(), name=name, capacity="12", of=name))
    assert f"&#39;{name}&#39; has a capacity of 12 now; it was 3" in told
    assert "All semaphores" in told
    change: Any = page.locks.run(sl.semaphore.history(name))[0]
    assert (change.old_capacity, change.new_capacity, change.changed_by) == (3, 12, "alice")


@pytest.mark.parametrize("engine", ENGINES)
def test_dead_jobs_are_revived_and_stalled_ones_requeued(engine: str, door_to: MakeDoor) -> None:
    page = door_to(engine, authorize=alice, secret="secret")
    name, job = unused("queue"), build_context(page.locks._engine.dialect, {}).tables.job
    with page.locks._engine.begin() as connection:
        connection.execute(QUEUE.put(1, 2, 3, queue=name))
        jobs = list(connection.execute(QUEUE.capture(3, queue=name, host="h")))
        connection.execute(QUEUE.fail(jobs[:2], error="no", retry=False))
        old = job.c.internal_id == jobs[2].internal_id
        connection.execute(update(job).where(old).values(started_at=SecondsAgo(1000)))
    token = page.token()
    one = str(UUID(str(jobs[0].external_id)))
    assert f'name="job" value="{one}"' in page.text("/live")
    for told in (f"Revived the job {one}", f"The job {one} is not dead any more"):
        assert told in said(page, page.post("revive", token=token, job=one))
    assert "Revived 1 dead job of" in said(page, page.post("revive", token=token, queue=name))
    assert "Requeued 1 stalled job of" in said(page, page.post("requeue", token=token, queue=name))
    rows: list[Any] = page.locks.run(QUEUE.stats())
    (row,) = (row for row in rows if row.queue_id == name)
    assert (int(row.waiting) + int(row.scheduled), int(row.running), int(row.dead)) == (3, 0, 0)
    assert page.post("revive", token=token, job="x").status_code == 400


def test_pause_and_resume_a_queue(page: Door) -> None:
    name = unused("queue")
    page.locks.run(QUEUE.put(1, queue=name))
    token = page.token()
    told = said(page, page.post("pause", token=token, queue=name))
    assert f"&#39;{name}&#39; is paused now" in told
    assert '<span class="badge warning">paused</span>' in told
    assert page.locks.run(QUEUE.capture(1, queue=name)) == []
    assert "was paused before" in said(page, page.post("pause", token=token, queue=name))
    assert "is resumed" in said(page, page.post("resume", token=token, queue=name))
    assert "was not paused" in said(page, page.post("resume", token=token, queue=name))
    assert len(page.locks.run(QUEUE.capture(1, queue=name))) == 1
    assert page.post("pause", token=token, queue="").status_code == 400


def test_action_without_token_is_refused(page: Door, semaphore: Make, audit: Callable[[], list[str]]) -> None:
    name = semaphore()
    token = page.token()
    for wrong in ("", "x", token[:-1], token[::-1], "ü"):
        answer = page.post("release", token=wrong, external_id=name)
        assert answer.status_code == 403
        assert "Nothing was done" in answer.text
    assert page.post("release", external_id=name).status_code == 403
    page.forget()
    assert page.post("release", token=token, external_id=name).status_code == 403
    assert "release by 'alice' refused: the page's cookie is missing" in "".join(audit())
    assert state(page, name) == "RELEASED"  # only now


def test_token_of_another_visitor_is_refused(page: Door, door_to: MakeDoor, semaphore: Make) -> None:
    name = semaphore()
    other = door_to(authorize=alice, secret="secret")
    theirs = other.token()
    page.token()
    assert page.post("release", token=theirs, external_id=name).status_code == 403
    # another process that has the same secret takes what the first one gave
    cookie = f"{auth.COOKIE}={other._client.cookies[auth.COOKIE]}"
    again = door_to(authorize=alice, secret="secret")
    headers = {"Origin": ORIGIN, "Cookie": cookie}
    assert again.post("release", headers=headers, token=theirs, external_id=name).status_code == 303
    # and one that has another doesn't
    stranger = door_to(authorize=alice, secret="other")
    assert stranger.post("release", headers=headers, token=theirs, external_id=name).status_code == 403
    # nor for somebody else
    bob = door_to(authorize=lambda request: "bob", secret="secret")
    assert bob.post("release", headers=headers, token=theirs, external_id=name).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example.org"},
        {"Origin": "http://app.example.org.evil.org"},
        {"Origin": "http://app.example.org:8000"},
        {"Origin": "http://["},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "same-site"},
        {"Origin": ORIGIN, "Sec-Fetch-Site": "none"},
    ],
)
def test_cross_site_action_is_refused(headers: dict[str, str], page: Door, semaphore: Make) -> None:
    name = semaphore()
    answer = page.post("release", headers=headers, token=page.token(), external_id=name)
    assert answer.status_code == 403
    assert "not sent by the page itself" in answer.text.replace("&#39;", "'")
    assert state(page, name) == "RELEASED"


def test_sec_fetch_site_works_behind_a_proxy(page: Door, semaphore: Make) -> None:
    """Which has changed the host: the browser's own verdict counts."""
    name = semaphore()
    headers = {"Origin": "https://public.example.org", "Sec-Fetch-Site": "same-origin"}
    assert page.post("release", headers=headers, token=page.token(), external_id=name).status_code == 303


def test_cookie_attributes(page: Door, door_to: MakeDoor) -> None:
    cookie = page.get().headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie
    # kept, and given once
    assert "set-cookie" not in page.get().headers
    assert "set-cookie" not in door_to(authorize=lambda request: False, secret="s").get().headers


def test_unauthorized_visitor_cannot_act(door_to: MakeDoor, semaphore: Make, audit: Callable[[], list[str]]) -> None:
    name = semaphore()
    unnamed = door_to(authorize=lambda request: True, secret=b"bytes")
    assert "acting as <bdi>a visitor without a name" in unnamed.text()
    for answer in (False, None, "", "  "):
        page = door_to(authorize=lambda request, answer=answer: answer, secret="s")
        text = page.text()
        assert name in text
        assert "<form" not in text
        assert "read-only" in text
        assert page.post("release", external_id=name).status_code == 403
    assert "release by None refused: not authorized" in "".join(audit())


def test_invalid_callback_results_raise(door_to: MakeDoor) -> None:
    page = door_to(authorize=lambda request: ["alice"], secret="s")
    with pytest.raises(TypeError, match=r"authorize\(\) returns True, False, or a name"):
        page.get()


def test_long_visitor_name_is_cut(door_to: MakeDoor, semaphore: Make) -> None:
    name = semaphore()
    page = door_to(authorize=lambda request: "é" * 300 + "\0", secret="s")
    said(page, page.post("resize", token=page.token(), name=name, capacity="4"))
    change: Any = page.locks.run(sl.semaphore.history(name))[0]
    assert change.changed_by == "é" * 255


def test_actions_go_to_standard_error_by_default(
    door_to: MakeDoor, semaphore: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An app that configures no logging has them, too."""
    name, page = semaphore(), door_to(authorize=alice, secret="secret")
    token = page.token()
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    page.post("release", token=token, external_id=name)
    page.post("resize", token="forged", name=name, capacity="7")
    done, refused = capsys.readouterr().err.splitlines()
    assert done == f"page: release by 'alice': Released '{name}'"
    assert "resize by 'alice' refused: the form is out of date" in refused


def test_actions_are_events(page: Door, semaphore: Make) -> None:
    name = semaphore()
    token = page.token()
    occurred: list[sl.LockEvent] = []

    def hear(one: sl.LockEvent) -> None:
        occurred.append(one)

    event.listen(sl.Locks, "acted", hear)
    try:
        page.post("resize", token=token, name=name, capacity="7")
        page.post("resize", token=token, name=name, capacity="-7")
    finally:
        event.remove(sl.Locks, "acted", hear)
    assert [(each.kind, each.names, each.owner) for each in occurred] == [("dashboard.resize", (name,), "alice")]
    (row,) = queries.read_all(page.locks, name).changes.rows[:1]
    assert [row[column] for column in ("name", "old_capacity", "new_capacity", "changed_by")] == [name, 3, 7, "alice"]
    assert "resized, 3 to 7" in page.text()


async def later_yes(request: Request) -> str:
    return "alice"


async def later_no(request: Request) -> bool:
    return False


def test_coroutine_callbacks_are_awaited(door: str, door_to: MakeDoor, semaphore: Make) -> None:
    name = semaphore()
    page = door_to(door=door, authorize=later_yes, secret="s")
    assert page.post("release", token=page.token(), external_id=name).status_code == 303
    # a coroutine object would be true
    for view in (later_no, lambda request: later_no(request)):
        assert door_to(door=door, view=view).get().status_code == 403


def test_view_denies_the_page(door: str, door_to: MakeDoor, semaphore: Make) -> None:
    name = semaphore()

    def view(request: Request) -> bool:
        assert ("wsgi_environ" in request.scope) == (door == "wsgi")
        return request.headers.get("x-staff") == "yes" and request.cookies.get("session") == "s3"

    page = door_to(door=door, view=view, authorize=alice, secret="s")
    for path in ("/", "/live", "/static/page.css", "/nothing"):
        answer = page.get(path)
        assert answer.status_code == 403
        assert name not in answer.text
    assert page.post("release", external_id=name).status_code == 403
    staff = {"X-Staff": "yes", "Cookie": "other=1; session=s3"}
    assert page.get(headers=staff).status_code == 200
    assert page.get(headers={**staff, "Cookie": "="}).status_code == 403


def test_invalid_values_are_refused(page: Door, semaphore: Make, audit: Callable[[], list[str]]) -> None:
    name, token = semaphore(), page.token()
    for capacity in ("", "-1", "1.5", "ten", "٣", "2147483648"):
        answer = page.post("resize", token=token, name=name, capacity=capacity)
        assert answer.status_code == 400
        assert "a capacity is" in answer.text
    assert "resize by 'alice' refused" in "".join(audit())
    assert "there is no semaphore" in page.post("resize", token=token, name="none", capacity="1").text
    for form in ({}, {"external_id": ""}, {"external_id": "x" * 256}, {"external_id": "a\0b"}):
        assert page.post("release", token=token, **form).status_code == 400


def test_messages_are_signed_and_expire(page: Door, semaphore: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages after an action can't be forged, and expire."""
    name = semaphore()
    where = page.post("release", token=page.token(), external_id=name).headers["location"]
    (sealed,) = parse_qs(urlsplit(where).query)["said"]
    assert f"Released &#39;{name}&#39;" in page.text(f"/?said={sealed}")
    for forged in ("hello", sealed[:-1], f"x{sealed}", "", ".", "ü.ü"):
        assert 'class="message"' not in page.text(f"/?said={forged}")
    monkeypatch.setattr(auth, "_MESSAGE_AGE", -1)
    assert 'class="message"' not in page.text(f"/?said={sealed}")


def test_log_entries_have_one_line(door_to: MakeDoor, semaphore: Make, audit: Callable[[], list[str]]) -> None:
    semaphore()  # whose form has the token
    page = door_to(authorize=lambda request: "eve\npage: forged", secret="s")
    page.post("release", token=page.token(), external_id="a\nb")
    page.post("release", external_id="c\nd")
    assert {"\n" in line for line in audit()} == {False}


def test_lost_database_is_answered_503(door_to: MakeDoor, semaphore: Make, audit: Callable[[], list[str]]) -> None:
    """The visitor gets a message instead of a 500; the log has one line."""
    semaphore()  # whose form has the token
    page = door_to(authorize=alice, secret="s")
    token = page.token()

    def refuse(*_: Any) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    event.listen(page.locks._engine, "do_connect", refuse)
    page.locks._engine.dispose()
    answer = page.post("release", token=token, external_id="x")
    assert answer.status_code == 503
    assert "unknown whether this was done: OperationalError: " in answer.text
    assert {"\n" in line for line in audit()} == {False}
    for path in ("/", "/live"):
        answer = page.get(path)
        assert answer.status_code == 503
        assert "unable to open database file" in answer.text
