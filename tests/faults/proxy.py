"""A TCP proxy in front of a server, which understands requests and answers, and whose connections can be cut anywhere.

It takes part in TLS: the client speaks TLS with the proxy, and the proxy with the server, so that what is asked can be
read in clear whatever the driver does by default.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sqlalchemy import make_url

from tests.fixtures.descriptors import readable
from tests.servers.tls import certificate

#: codes in the place of a protocol version, before a PostgreSQL connection begins
_SSL, _GSS = 80877103, 80877104
#: bits of a MySQL client: it goes on with TLS; the columns of a result have no end of their own
_CLIENT_SSL, _DEPRECATE_EOF = 0x800, 1 << 24


class Proxy:
    """Forwards requests and replies until ``cut`` is called; new connections are forwarded again."""

    def __init__(self, url: str, *, opaque: bool = False) -> None:
        """Listen.

        :param opaque: pass everything through unread, TLS between client and server included.
        """
        self._url = make_url(url)
        assert self._url.host is not None
        self._server = (self._url.host, self._url.port)
        protocol = MySQL if self._url.get_backend_name() in ("mysql", "mariadb") else PostgreSQL
        self._protocol: type[PostgreSQL | MySQL | Opaque] = Opaque if opaque else protocol
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._guard = threading.Lock()
        self._links: list[Link] = []
        self.accepted = 0
        #: connections that speak TLS
        self.encrypted = 0
        #: the answers that were kept back
        self.losses = 0
        #: what was asked for since the death of a connection was last announced
        self.asked: list[bytes] = []
        #: the request that a connection died of
        self.fatal: bytes | None = None
        self._lost: tuple[bytes, Callable[[], object], bool] | None = None
        self._death: tuple[int, bool] | None = None
        #: so many new connections are closed before the server answers
        self.refusing = 0
        #: how long each request is kept back, in seconds
        self.delay = 0.0
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL that leads through it."""
        return self._url.set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    def cut(self) -> None:
        """Close everything that is open, as a machine between the two does that is switched off."""
        with self._guard:
            links = list(self._links)
        for link in links:
            link.cut()
        for link in links:
            link.join()

    def half_close(self) -> None:
        """Close what clients send on, as a firewall may: the server hears the end, and its answers still arrive."""
        with self._guard:
            links = list(self._links)
        for link in links:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link.server, socket.SHUT_WR)

    def lose_answer(self, to: bytes, meanwhile: Callable[[], object] = lambda: None, *, always: bool = False) -> None:
        """Keep the answer back to the next request that executes ``to``, do something ``meanwhile``, and cut.

        The server has then done what it was asked for, and the client can't know.
        """
        self._lost = to, meanwhile, always

    def answer_all(self) -> None:
        self._lost = None

    def forget(self) -> None:
        """Injure no later connection by what was announced for earlier ones."""
        self.answer_all()
        self.refusing, self.delay = 0, 0.0
        with self._guard:
            self.asked, self.fatal, self._death = [], None, None

    def lead_to(self, url: str) -> None:
        """Forward new connections to another server."""
        found = make_url(url)
        assert found.host is not None
        self._server = (found.host, found.port)

    def die_at(self, number: int, *, executed: bool) -> None:
        """Cut the connection that carries the request of that number, counted from now over all connections.

        :param executed: after the server has executed it, its answer kept back; else before the server gets it.
        """
        with self._guard:
            self.asked, self.fatal, self._death = [], None, (number, executed)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if threading.current_thread() is not self._acceptor:
            self._acceptor.join()  # what it has accepted last is cut, too
        self.cut()

    def fate_of(self, request: Request) -> Callable[[], object] | bool:
        """What becomes of a request: ``True`` for an answer, ``False`` for death before it is sent.

        Else the answer is kept back, what is returned is called, and the connection dies.
        """
        with self._guard:
            self.asked.append(request.text)
            if self._death is not None and len(self.asked) == self._death[0]:
                self.fatal = request.text
                executed, self._death = self._death[1], None
                return (lambda: None) if executed else False
            if self._lost is not None and request.executes and self._lost[0] in request.text:
                _, meanwhile, always = self._lost
                if not always:
                    self._lost = None
                return meanwhile
        return True

    def over(self, link: Link) -> None:
        with self._guard, contextlib.suppress(ValueError):
            self._links.remove(link)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing > 0:
                self.refusing -= 1
                client.close()
                continue
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._guard:
                self.accepted += 1
                self._links.append(Link(self, self._protocol(), client, server))

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class Request:
    """What a client sends before it waits for a reply."""

    data: bytes = b""
    #: what can be searched for: with a statement's text where only the name is sent that it was prepared under
    text: bytes = b""
    executes: bool = True
    #: PostgreSQL: so many answers are to come, and no other sign that they are all
    parts: int | None = None


class Link:
    """One connection, with a thread of its own: neither end of TLS takes two at a time."""

    def __init__(
        self, proxy: Proxy, protocol: PostgreSQL | MySQL | Opaque, client: socket.socket, server: socket.socket
    ) -> None:
        self._proxy, self._protocol = proxy, protocol
        self.client, self.server = client, server
        self._loses: Callable[[], object] | None = None
        self._guard, self._cut = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        with self._guard:
            self._cut = True
            for end in (self.client, self.server):
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(end, socket.SHUT_RDWR)  # no good-bye of TLS; its thread closes them

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def encrypt(self) -> None:
        """Go on in TLS, on both sides; nothing is verified."""
        as_server, as_client = _contexts()
        # While a socket is wrapped, cut() would find none to shut down; and wrapping one that is shut down leaks it.
        with self._guard:
            if self._cut:
                raise EOFError
            self.server = server = as_client.wrap_socket(self.server, do_handshake_on_connect=False)
            self.client = client = as_server.wrap_socket(self.client, server_side=True, do_handshake_on_connect=False)
        server.do_handshake()
        client.do_handshake()
        self._proxy.encrypted += 1

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                self._protocol.begin(self)
                while self._forward():
                    pass
        finally:
            self.cut()
            self.client.close()
            self.server.close()
            self._proxy.over(self)

    def _forward(self) -> bool:
        ready = [end for end in (self.client, self.server) if isinstance(end, ssl.SSLSocket) and end.pending()]
        ready = ready or readable(self.client, self.server)
        for end in ready:
            data = _received(end)
            if data == b"":
                return False
            if data and not (self._asked(data) if end is self.client else self._answered(data)):
                return False
        return True

    def _asked(self, data: bytes) -> bool:
        for request in self._protocol.requests(data):
            if isinstance(request, Request):
                if self._proxy.delay:
                    time.sleep(self._proxy.delay)
                fate = self._proxy.fate_of(request)
                if fate is False:
                    return False
                if fate is not True:
                    self._loses = fate
                self._protocol.expect(request)
                self.server.sendall(request.data)
            else:
                self.server.sendall(request)
        return True

    def _answered(self, data: bytes) -> bool:
        complete = self._protocol.answered(data)
        if self._loses is None:
            self.client.sendall(data)
            return True
        if not complete:
            return True
        self._proxy.losses += 1
        self._loses()  # whatever goes wrong in it, the connection dies
        return False


class Opaque:
    """Bytes: what is between two answers is a request."""

    def begin(self, link: Link) -> None:
        """There is nothing to agree on."""

    def requests(self, data: bytes) -> Iterator[Request | bytes]:
        yield Request(data, data)

    def expect(self, request: Request) -> None:
        """Whatever comes is the answer."""

    def answered(self, data: bytes) -> bool:
        return True


class PostgreSQL:
    """Its messages, from the client's first to the answer that a request waits for."""

    def __init__(self) -> None:
        self._asking, self._answering = b"", b""
        self._next = Request(executes=False, parts=0)
        self._prepared: dict[bytes, bytes] = {}
        self._answered, self._parts = True, None

    def begin(self, link: Link) -> None:
        while True:
            head = _exactly(link.client, 8)
            length, code = struct.unpack("!II", head)
            link.server.sendall(head + _exactly(link.client, length - 8))
            if code not in (_SSL, _GSS):
                return
            answer = _exactly(link.server, 1)
            link.client.sendall(answer)
            if answer == b"S":
                link.encrypt()

    def requests(self, data: bytes) -> Iterator[Request | bytes]:
        """What is whole now: a request, or what the server needs and doesn't answer."""
        messages, self._asking = self._messages(self._asking + data)
        for kind, message in messages:
            if kind not in b"PBDECSHQ":
                yield message
                continue
            request = self._next
            request.data += message
            request.text += message
            if kind == ord("P"):
                name, text, *_ = message[5:].split(b"\0")
                self._prepared[name] = text
            elif kind == ord("B"):
                request.text += self._prepared.get(message[5:].split(b"\0")[1], b"")
            request.executes |= kind in b"EQ"
            if kind in b"PBDEC":
                assert request.parts is not None
                request.parts += 1
                continue
            if kind != ord("H"):
                request.parts = None  # the server says when it is ready
            self._next = Request(executes=False, parts=0)
            yield request

    def expect(self, request: Request) -> None:
        self._answered, self._parts = False, request.parts

    def answered(self, data: bytes) -> bool:
        """Whether everything that was asked for is answered."""
        messages, self._answering = self._messages(self._answering + data)
        for kind, _ in messages:
            if self._parts is None:
                self._answered |= kind == ord("Z")
            else:
                self._parts -= kind in b"12TnCIs3"
                self._answered |= self._parts == 0 or kind == ord("E")
        return self._answered

    def _messages(self, data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
        """The whole messages in it, each with its kind, and the rest."""
        found = []
        while len(data) >= 5 and len(data) > (length := int.from_bytes(data[1:5], "big")):
            found.append((data[0], data[: length + 1]))
            data = data[length + 1 :]
        return found, data


class MySQL:
    """Its packets, and MariaDB's."""

    def __init__(self) -> None:
        self._asking, self._answering = b"", b""
        self._first, self._answered, self._ends, self._all = True, True, 0, 2

    def begin(self, link: Link) -> None:
        link.client.sendall(self._packet(link.server))
        packet = self._packet(link.client)
        link.server.sendall(packet)
        bits = int.from_bytes(packet[4:8], "little")
        self._all = 1 if bits & _DEPRECATE_EOF else 2
        if len(packet) == 4 + 32 and bits & _CLIENT_SSL:
            link.encrypt()

    def requests(self, data: bytes) -> Iterator[Request | bytes]:
        packets, self._asking = self._packets(self._asking + data)
        for packet in packets:
            # a command begins a new sequence; all but the last one is answered
            yield packet if packet[3] or packet[4:] == b"\x01" else Request(packet, packet)

    def expect(self, request: Request) -> None:
        self._first, self._answered, self._ends = True, False, 0

    def answered(self, data: bytes) -> bool:
        packets, self._answering = self._packets(self._answering + data)
        for packet in packets:
            if self._first:  # of a result, this is the number of its columns; and then come columns, an end, rows
                self._first, self._answered = False, packet[4] in (0x00, 0xFF)
            elif packet[4] == 0xFF:
                self._answered = True
            elif packet[4] == 0xFE:  # else the length of a column that has 16 MB
                self._ends += 1
                self._answered |= self._ends == self._all
        return self._answered

    def _packets(self, data: bytes) -> tuple[list[bytes], bytes]:
        found = []
        while len(data) >= 4 and len(data) >= (length := 4 + int.from_bytes(data[:3], "little")):
            found.append(data[:length])
            data = data[length:]
        return found, data

    def _packet(self, source: socket.socket) -> bytes:
        head = _exactly(source, 4)
        return head + _exactly(source, int.from_bytes(head[:3], "little"))


def encryption(driver: str, *, tls: bool) -> dict[str, Any]:
    """The arguments of a driver, with TLS or without; the server's certificate is self-signed."""
    driver = driver.rpartition("+")[2]
    if driver in ("aiomysql", "asyncmy"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return {"ssl": context} if tls else {}
    if driver == "pymysql":
        return {"ssl": {"check_hostname": False}} if tls else {"ssl_disabled": True}
    if driver == "asyncpg":
        return {"ssl": "require" if tls else "disable"}
    return {"sslmode": "require" if tls else "disable"}


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _received(end: socket.socket) -> bytes | None:
    """What has arrived; ``None`` where that is nothing of the application's, which TLS keeps for itself."""
    end.setblocking(False)
    try:
        return end.recv(65536)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    finally:
        end.setblocking(True)


@functools.cache
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the two roles in TLS: a server with the test servers' certificate, and a client that verifies none."""
    as_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    as_server.load_cert_chain(certificate() / "server.crt", certificate() / "server.key")
    as_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    as_client.check_hostname = False
    as_client.verify_mode = ssl.CERT_NONE
    return as_server, as_client
