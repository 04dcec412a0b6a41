"""The page: answer a request. The same synchronous code serves WSGI and ASGI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote, urlencode

from sqlalchemy.exc import SQLAlchemyError

from sqlalchemy_locks.admin.overview import OwnTable
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard import actions, filters, queries
from sqlalchemy_locks.integrations.dashboard.auth import Await, PageGuard, cookie, visitor_of
from sqlalchemy_locks.integrations.dashboard.http import Request, Response

#: the page pauses this many times as long as a refresh took, so that watching it never keeps a server busy
REST = 10

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_SAFE = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # the page's own forms have to send their origin
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)
_HTML = ("Content-Type", "text/html; charset=utf-8")
_NO_STORE = ("Cache-Control", "no-store")
_IMMUTABLE = ("Cache-Control", "private, max-age=31536000, immutable")


class Page:
    """The page of one application.

    :param locks: returns the ``Locks`` to show, called at each request.
    :param own: tables of the app's own, by name.
    """

    def __init__(
        self, locks: Callable[[], Locks], guard: PageGuard, refresh: float, title: str, own: Mapping[str, OwnTable]
    ) -> None:
        self._locks = locks
        self._own = own
        self._guard = guard
        self._refresh = refresh
        self._title = title

    def answer(self, request: Request, wait: Await) -> Response:
        """Answer a request.

        :param wait: returns a callback's result, and awaits it if necessary.
        """
        if not self._guard.knows_host(request):
            return self._message(403, "This page isn't served under this host name.", back=False)
        if not self._guard.may_view(request, wait):
            return self._message(403, "You may not see this page.", back=False)
        name = request.path.strip("/")
        if name in actions.ACTIONS:
            return self._act(request, wait, name)
        if request.method not in ("GET", "HEAD"):
            return self._message(405, "The page is read-only at this address.", ("Allow", "GET, HEAD"))
        if request.path == "":
            # links are relative, so that they also work behind a proxy that changes the path
            root = quote(request.root.strip("/"))
            return Response(status=308, headers=(("Location", f"/{root}/" if root else "/"), _NO_STORE))
        if name in filters.STATIC:
            content, kind = filters.STATIC[name]
            return Response(content, 200, (("Content-Type", kind), _IMMUTABLE, *_SAFE))
        if name in ("", "live"):
            return self._show(request, wait, whole=name == "")
        return self._message(404, "There is no such page.")

    def _show(self, request: Request, wait: Await, *, whole: bool) -> Response:
        who = self._guard.who(request, wait)
        visitor, new = visitor_of(request)
        of = request.query.get("of") or None
        locks = self._locks()
        try:
            snapshot = queries.read_all(locks, of, self._own)
        except (SQLAlchemyError, OSError, LockError) as error:
            return self._message(503, f"The database can't be reached: {queries.cause(error)}", back=False)
        body = filters.render(
            "page.html" if whole else "live.html",
            snapshot=snapshot,
            unfolded=queries.UNFOLDED,
            facts=queries.facts(locks) if whole else None,
            who=who,
            token="" if who is None else self._guard.token(visitor, who),
            message=self._guard.unseal(request.query["said"]) if "said" in request.query else None,
            title=self._title,
            refresh=self._refresh,
            rest=REST,
        )
        kept = (("Set-Cookie", cookie(request, visitor)),) if who is not None and new else ()
        return Response(body, 200, (_HTML, _NO_STORE, *_SAFE, *kept))

    def _act(self, request: Request, wait: Await, name: str) -> Response:
        if not self._guard.acts:
            return self._message(404, "The page is read-only.")
        if request.method != "POST":
            return self._message(405, "Actions are sent by the forms of the page.", ("Allow", "POST"))
        who = self._guard.who(request, wait)
        if who is None:
            actions.log_refused(name, None, "not authorized", request.form)
            return self._message(403, "You may see this page, but not change anything.")
        why = self._guard.refusal(request, who)
        if why is not None:
            actions.log_refused(name, who, why, request.form)
            return self._message(403, f"Nothing was done: {why}.")
        try:
            message = actions.ACTIONS[name](self._locks(), request.form, who, self._own)
        except (LockError, ValueError, TypeError) as error:
            actions.log_refused(name, who, str(error), request.form)
            return self._message(400, f"Nothing was done: {error}.")
        except (SQLAlchemyError, OSError) as error:
            actions.log_refused(name, who, str(error), request.form)
            return self._message(503, f"It is unknown whether this was done: {queries.cause(error)}")
        actions.log_done(name, who, message)
        self._locks()._emit("acted", f"dashboard.{name}", [actions.subject(request.form)], owner=who)
        back = {"said": self._guard.seal(message)}
        if request.form.get("of"):
            back["of"] = request.form["of"]
        return Response(status=303, headers=(("Location", f"./?{urlencode(back)}"), _NO_STORE))

    def _message(self, status: int, sentence: str, *headers: tuple[str, str], back: bool = True) -> Response:
        body = filters.render("message.html", sentence=sentence, title=self._title, back=back)
        return Response(body, status, (_HTML, _NO_STORE, *_SAFE, *headers))
