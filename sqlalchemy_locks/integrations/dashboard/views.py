"""The page: a request comes in, an answer goes out. One synchronous body, whichever door it is reached by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import quote, urlencode

from sqlalchemy.exc import SQLAlchemyError

from sqlalchemy_locks.admin.overview import Own
from sqlalchemy_locks.errors import LockError
from sqlalchemy_locks.facade.locks import Locks
from sqlalchemy_locks.integrations.dashboard import actions, filters, queries
from sqlalchemy_locks.integrations.dashboard.auth import PageGuard, Settle, cookie, visitor_of
from sqlalchemy_locks.integrations.dashboard.http import Request, Response

#: the page rests so many times as long as a look took, so that watching it never keeps a server busy
REST = 10

_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_SAFE = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # the page's own forms are to say where they come from
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)
_HTML = ("Content-Type", "text/html; charset=utf-8")
_NOWHERE = ("Cache-Control", "no-store")
_FOR_EVER = ("Cache-Control", "private, max-age=31536000, immutable")


class Page:
    """Answers requests.

    :param locks: what gives the ``Locks`` to show, at each request.
    :param own: what the app has in tables of its own.
    """

    def __init__(
        self, locks: Callable[[], Locks], guard: PageGuard, refresh: float, title: str, own: Mapping[str, Own]
    ) -> None:
        self._locks = locks
        self._own = own
        self._guard = guard
        self._refresh = refresh
        self._title = title

    def answer(self, request: Request, settle: Settle) -> Response:
        """What a request is answered with.

        :param settle: has what a callback gave, be it a coroutine.
        """
        if not self._guard.may_view(request, settle):
            return self._said(403, "You may not see this page.", back=False)
        name = request.path.strip("/")
        if name in actions.ACTIONS:
            return self._act(request, settle, name)
        if request.method not in ("GET", "HEAD"):
            return self._said(405, "This is only to be looked at.", ("Allow", "GET, HEAD"))
        if request.path == "":
            # links are relative, so that no proxy has to know where the page is
            root = quote(request.root.strip("/"))
            return Response(status=308, headers=(("Location", f"/{root}/" if root else "/"), _NOWHERE))
        if name in filters.STATIC:
            content, kind = filters.STATIC[name]
            return Response(content, 200, (("Content-Type", kind), _FOR_EVER, *_SAFE))
        if name in ("", "live"):
            return self._look(request, settle, whole=name == "")
        return self._said(404, "There is nothing here.")

    def _look(self, request: Request, settle: Settle, *, whole: bool) -> Response:
        who = self._guard.who(request, settle)
        visitor, new = visitor_of(request)
        of = request.query.get("of") or None
        locks = self._locks()
        try:
            look = queries.look(locks, of, self._own)
        except (SQLAlchemyError, OSError, LockError) as error:
            return self._said(503, f"The database can't be reached: {queries.cause(error)}", back=False)
        body = filters.render(
            "page.html" if whole else "live.html",
            look=look,
            facts=queries.facts(locks) if whole else None,
            who=who,
            token="" if who is None else self._guard.token(visitor, who),
            said=self._guard.unseal(request.query["said"]) if "said" in request.query else None,
            title=self._title,
            refresh=self._refresh,
            rest=REST,
        )
        kept = (("Set-Cookie", cookie(request, visitor)),) if who is not None and new else ()
        return Response(body, 200, (_HTML, _NOWHERE, *_SAFE, *kept))

    def _act(self, request: Request, settle: Settle, name: str) -> Response:
        if not self._guard.acts:
            return self._said(404, "There is nothing to be done here: the page is read-only.")
        if request.method != "POST":
            return self._said(405, "This is done by a button of the page.", ("Allow", "POST"))
        who = self._guard.who(request, settle)
        if who is None:
            actions.refused(name, None, "not authorized", request.form)
            return self._said(403, "You may look, but change nothing.")
        why = self._guard.refusal(request, who)
        if why is not None:
            actions.refused(name, who, why, request.form)
            return self._said(403, f"Nothing was done: {why}.")
        try:
            said = actions.ACTIONS[name](self._locks(), request.form, who, self._own)
        except (LockError, ValueError, TypeError) as error:
            actions.refused(name, who, str(error), request.form)
            return self._said(400, f"Nothing was done: {error}.")
        except (SQLAlchemyError, OSError) as error:
            actions.refused(name, who, str(error), request.form)
            return self._said(503, f"It is not known whether it was done: {queries.cause(error)}")
        actions.done(name, who, said)
        back = {"said": self._guard.seal(said)}
        if request.form.get("of"):
            back["of"] = request.form["of"]
        return Response(status=303, headers=(("Location", f"./?{urlencode(back)}"), _NOWHERE))

    def _said(self, status: int, sentence: str, *headers: tuple[str, str], back: bool = True) -> Response:
        body = filters.render("said.html", sentence=sentence, title=self._title, back=back)
        return Response(body, status, (_HTML, _NOWHERE, *_SAFE, *headers))
