"""The HTTP server of a coordinator, on a thread of its own with a loop of its own.

    web = WebServer(Place("127.0.0.1", 0))      # listens from here on
    web.start()
    web.lead(cluster)                           # whom it asks from now on; None: this coordinator stands by
    web.happened({"event": "left", ...})        # for the pages; from any thread
    web.close()

    GET  /              the live page
    GET  /metrics       Prometheus' text, or OpenMetrics
    GET  /status.json   the status, as `torch-ecrec status --json`
    GET  /events        server-sent events: `status` once a second and when something has happened; `happened`, with an
                        id; `history` and `hello` first
    GET  /healthz       200: this coordinator leads, and answers, and the cluster has not stopped; else 503, and why
    POST /drain         {"member": NAME, "undo": false}
    POST /checkpoint    {}: one is written now
    POST /kill          {"member": NAME}, where that is allowed
    POST /login         the secret -> a cookie (`guard.py`)

aiohttp serves it: it is in Python's own event loop, parses in C what strangers send, and s3fs has it anyway.

Invariants.
- The coordinator's thread is asked for one status at a time, and twice a second at most, however many ask here; it only
  makes it and encodes it. Nothing here is awaited there.
- Each connection has `IDLE_S` for its request and `ANSWER_S` for the answer to be taken. There are `CONNECTIONS_MOST`:
  of more, the one goes that asked longest ago. `STREAMS_MOST` of them may be of `/events`; one that does not take what
  it is sent within `WRITE_S` ends, and what is not taken is kept once for all (`feed.py`), not for each.
- Whatever comes in, only its own connection ends by it. What fails here is logged, and training does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader

from torch_ecrec.observe.verdict import JOIN, json_of
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime.addresses import family_of
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import own_secret
from torch_ecrec.web.feed import Feed
from torch_ecrec.web.guard import SECRET_MOST, SESSION_S, Guard, Objection
from torch_ecrec.web.metrics import Totals, metrics_of, not_leading, text_of
from torch_ecrec.web.page import page, policy
from torch_ecrec.web.place import Place, why_open

log = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTIONS_MOST = 128
STREAMS_MOST = 64
BODY_MOST_BYTES = SECRET_MOST + 256
LINE_MOST_BYTES = 4096  # of a request, and of each of its headers: those of proxies are long
HEADERS_MOST = 64
IDLE_S = 10.0
ANSWER_S = 30.0
WRITE_S = 10.0
STATUS_S = 3.0  # for the coordinator's thread to say one
FRESH_S = 0.5  # as long as it is younger nobody asks for another
TICK_S = 1.0
WRONG_S = 0.5  # before the answer to a wrong secret
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
NO_KILL = "nobody may kill from here: the cluster was started without --allow-kill"
STANDS_BY = "this coordinator stands by: another one leads"
TOLD_S = 5.0  # refusals and errors are logged once in so long at most
BIND_AGAIN_S = 1.0
END_S = 2.0
ROUNDS = 8  # of the loop, in which one that has just been accepted comes, is ended, and is closed


@dataclass(frozen=True)
class Cluster:
    """A coordinator that leads, as it is asked here. All return at once, from any thread; answers come on another.

    Attributes:
        status: `status(done)`: `done` gets the status as JSON, or is never called, where it leads no more.
        drain: `drain(what, undo, done)`: `done` gets why not, or "".
        checkpoint: `checkpoint(done)`: one is to be written now; `done` likewise.
        kill: `kill(member, done)`: it is to end at once; `done` likewise. None: nobody may.
        join: its address, for what is to be done about a finding.
        again: it takes the place of another.
    """

    status: Callable[[Callable[[bytes], None]], None]
    drain: Callable[[str, bool, Callable[[str], None]], None]
    checkpoint: Callable[[Callable[[str], None]], None]
    kill: Callable[[str, Callable[[str], None]], None] | None = None
    join: str = JOIN
    again: bool = False


class _Unavailable(Exception):
    """There is no status: says why."""


class _NotAsked(Exception):
    """Raised for a request that is not well formed; the text says why."""


@dataclass(frozen=True)
class _Seen:
    """A status.

    Attributes:
        said: with its verdict, as JSON; `sent`: the same as an event, for all pages.
        asked_s: when it was asked for, on this loop's clock.
    """

    status: Status
    said: bytes
    sent: bytes
    asked_s: float


class WebServer:
    """Serves one coordinator.

    Args:
        place: where it listens.
        insists: it must listen there from the beginning. Otherwise, where the port is in use, it tries again and again:
            the cluster of a coordinator that takes the place of another is more than its page.

    Attributes:
        address: where it listens.

    Raises:
        OSError: nobody can listen there, and it insists.
        ValueError: other hosts get there, and there is no secret.
    """

    def __init__(self, place: Place, insists: bool = True) -> None:
        self._secret = own_secret()
        if not place.loopback and not self._secret:
            raise ValueError(why_open(place))
        self._place, self._listener = place, _listen(place, insists)
        port = place.port if self._listener is None else int(self._listener.getsockname()[1])
        self.address: tuple[str, int] = place.host, port
        self._guard = Guard(self._secret, place.loopback, self.address[1])
        self._loop = asyncio.new_event_loop()
        self._thread = Worker(self._run, "http", log_error)
        self._stop = asyncio.Event()
        # all that follows is of the loop's thread
        self._life = secrets.token_hex(4)
        self._cluster: Cluster | None = None
        self._feed, self._totals = Feed(self._life), Totals()
        self._seen: _Seen | None = None
        self._asking: asyncio.Task[_Seen] | None = None
        self._asked_s = self._changed_s = -math.inf  # when a status was asked for last, and when something happened
        self._metrics: dict[str, tuple[_Seen, bytes, str]] = {}  # the last, by what is accepted
        self._news = asyncio.Event()  # there is something to send; a new one each time
        self._doors: _Doors
        self._streams = self._unproved = 0
        self._told_s = -math.inf

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return Place(*self.address).url

    def start(self) -> None:
        """Begins to serve pages and metrics at its address."""
        self._thread.start()
        log.info("serves metrics, status and a page at %s%s", self.url, " (asks for the secret)" * bool(self._secret))

    def lead(self, cluster: Cluster | None) -> None:
        """This coordinator leads from now on, and is asked so; None: it stands by. From any thread."""
        self._do(lambda: self._lead(cluster))

    def happened(self, event: Mapping[str, Any]) -> None:
        """Tells all pages. From any thread."""
        time_s, kept = time.time(), dict(event)
        self._do(lambda: self._happened(kept, time_s))

    def close(self) -> None:
        """Ends it, and frees the port. From any thread but its own."""
        self._do(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join(END_S)
        else:
            self._loop.close()
            if self._listener is not None:
                self._listener.close()

    def _do(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(action)

    def _lead(self, cluster: Cluster | None) -> None:
        self._cluster, self._seen, self._asking, self._asked_s = cluster, None, None, -math.inf
        self._totals = Totals(cluster is not None and cluster.again)

    def _happened(self, event: dict[str, Any], time_s: float) -> None:
        self._feed.happened(event, time_s)
        if event.get("event") == "regathering":  # members of a coordinator before come, though nobody has said so
            self._totals = Totals(again=True)
        self._changed_s = self._loop.time()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # the loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=END_S / 2))
            self._loop.close()

    async def _serve(self) -> None:
        while self._listener is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), BIND_AGAIN_S)
                return
            with contextlib.suppress(OSError):
                self._listener = _listen(self._place, True)
                log.info("serves %s again", self.url)
        self._doors = _Doors(self._answer)
        server = await self._loop.create_server(self._doors, sock=self._listener, backlog=256)
        ticking = asyncio.create_task(self._tick())
        try:
            await self._stop.wait()
        finally:
            ticking.cancel()
            self._loop.remove_reader(self._listener)  # nobody comes any more; who has just come must find it open
            self._doors.end()
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            server.close()

    async def _tick(self) -> None:
        """Follows the status, also while nobody looks: who is gone is not shown for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self._doors.look(self._loop.time())
            with contextlib.suppress(_Unavailable):
                await self._status()
            self._wake()

    async def _status(self) -> _Seen:
        """Returns a status of the last `FRESH_S`, and of after the last event. Raises _Unavailable: there is none."""
        if self._cluster is None:
            raise _Unavailable(STANDS_BY)
        seen = self._seen
        if seen is not None and seen.asked_s >= max(self._changed_s, self._loop.time() - FRESH_S):
            return seen
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(self._cluster))
            self._asking.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # nobody may wait any more
        return await asyncio.shield(self._asking)

    async def _ask(self, cluster: Cluster) -> _Seen:
        await asyncio.sleep(self._asked_s + FRESH_S - self._loop.time())
        self._asked_s = asked_s = self._loop.time()
        status = msgspec.json.decode(await self._await(cluster.status), type=Status)
        said = msgspec.json.encode(json_of(status, cluster.join))
        seen = _Seen(status, said, _sse("status", said), asked_s)
        if cluster is self._cluster:
            self._seen = seen
            self._totals.follow(seen.status)
            self._feed.reached(seen.status.time_s, seen.status.step)
        return seen

    async def _await(self, ask: Callable[[Callable[[T], None]], None]) -> T:
        """Returns what another thread answers. Raises _Unavailable: nothing, within `STATUS_S`."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def answered(said: T) -> None:
            if not answer.done():
                answer.set_result(said)

        ask(lambda said: self._do(lambda: answered(said)))
        try:
            return await asyncio.wait_for(answer, STATUS_S)
        except TimeoutError:
            raise _Unavailable(f"the coordinator does not answer within {STATUS_S:g} s") from None

    # requests -----------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request. What it raises ends the connection."""
        self._doors.asks(request.transport, self._loop.time())
        method = hdrs.METH_GET if request.method == hdrs.METH_HEAD else request.method
        objection = self._guard.objection(request.method, request.path, request.headers, request.cookies, time.time())
        if objection is not None:
            return await self._refuse(request, objection)
        routes = self._routes()
        answer = routes.get((method, request.path))
        if answer is None:
            known = any(path == request.path for _, path in routes)
            return _text(
                HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND, "there is no such thing here"
            )
        try:
            if answer == self._events:
                return await answer(request)
            async with asyncio.timeout(ANSWER_S / 2):
                return await answer(request)
        except _Unavailable as error:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except _NotAsked as error:
            return _text(HTTPStatus.BAD_REQUEST, str(error))
        except TimeoutError:
            return _text(HTTPStatus.REQUEST_TIMEOUT, "it took too long")

    def _routes(self) -> dict[tuple[str, str], Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]:
        get, post = hdrs.METH_GET, hdrs.METH_POST
        return {
            (get, "/"): self._page,
            (get, "/metrics"): self._show_metrics,
            (get, "/status.json"): self._show_status,
            (get, "/events"): self._events,
            (get, "/healthz"): self._health,
            (post, "/drain"): self._drain,
            (post, "/checkpoint"): self._checkpoint,
            (post, "/kill"): self._kill,
            (post, "/login"): self._login,
        }

    async def _refuse(self, request: web.BaseRequest, objection: Objection) -> web.StreamResponse:
        if objection.status == HTTPStatus.UNAUTHORIZED and "Authorization" in request.headers:
            await self._count_wrong(request)
        found = _text(objection.status, objection.why)
        if objection.status == HTTPStatus.UNAUTHORIZED:
            found.headers["WWW-Authenticate"] = 'Bearer realm="torch_ecrec"'
        return found

    async def _count_wrong(self, request: web.BaseRequest) -> None:
        """Counts a request with a wrong secret: logs it from time to time, and delays the answer."""
        self._unproved += 1
        if self._loop.time() > self._told_s + TOLD_S:
            log.warning("http: %s, as %d in all of late, does not know the secret", request.remote, self._unproved)
            self._told_s, self._unproved = self._loop.time(), 0
        await asyncio.sleep(WRONG_S)

    async def _page(self, request: web.BaseRequest) -> web.StreamResponse:
        return _data(page(), "text/html; charset=utf-8", {"Content-Security-Policy": policy()})

    async def _show_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        accept = OPEN_METRICS if OPEN_METRICS.partition(";")[0] in request.headers.get("Accept", "") else ""
        if self._cluster is None:
            return _data(*text_of(not_leading(), accept))
        seen = await self._status()
        if accept not in self._metrics or self._metrics[accept][0] is not seen:
            self._metrics[accept] = (seen, *text_of(metrics_of(seen.status, self._totals), accept))
        return _data(*self._metrics[accept][1:])

    async def _show_status(self, request: web.BaseRequest) -> web.StreamResponse:
        return _data((await self._status()).said, "application/json")

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        fatal = (await self._status()).status.fatal
        if fatal is not None:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, f"the cluster has stopped: {fatal}")
        return _text(HTTPStatus.OK, "leads")

    async def _drain(self, request: web.BaseRequest) -> web.StreamResponse:
        said, cluster = await _said(request, _Drain), self._leading()
        log.info("http: %s asks: drain %r, undo %s", request.remote, said.member, said.undo)
        why: str = await self._await(lambda done: cluster.drain(said.member, said.undo, done))
        return self._done(why, f"{said.member} is {'not drained any more' if said.undo else 'being drained'}")

    async def _checkpoint(self, request: web.BaseRequest) -> web.StreamResponse:
        await _said(request, _Checkpoint)
        cluster = self._leading()
        log.info("http: %s asks: a checkpoint now", request.remote)
        why = await self._await(cluster.checkpoint)
        return self._done(why, "a checkpoint is being written")

    async def _kill(self, request: web.BaseRequest) -> web.StreamResponse:
        said, cluster = await _said(request, _Kill), self._leading()
        if (kill := cluster.kill) is None:
            return _text(HTTPStatus.FORBIDDEN, NO_KILL)
        log.warning("http: %s asks: kill %r", request.remote, said.member)
        why: str = await self._await(lambda done: kill(said.member, done))
        return self._done(why, f"{said.member} was killed")

    def _leading(self) -> Cluster:
        """Returns the cluster. Raises _Unavailable: another coordinator leads it."""
        if self._cluster is None:
            raise _Unavailable(STANDS_BY)
        return self._cluster

    def _done(self, why: str, says: str) -> web.Response:
        """Answers to what a person wants. `why` not, or "": then it `says` so."""
        if why:
            return _text(HTTPStatus.CONFLICT, why)
        self._changed_s = self._loop.time()
        return _text(HTTPStatus.OK, says)

    async def _login(self, request: web.BaseRequest) -> web.StreamResponse:
        said = (await request.read()).decode(errors="replace")
        if not self._guard.asks_proof:
            return _text(HTTPStatus.OK, "no secret is asked for here")
        if not self._guard.knows(said.strip()):
            await self._count_wrong(request)
            return _text(HTTPStatus.UNAUTHORIZED, "this is not the cluster's secret")
        found = _text(HTTPStatus.OK, "known")
        value = self._guard.session(time.time())
        found.set_cookie(self._guard.cookie, value, max_age=SESSION_S, path="/", httponly=True, samesite="Strict")
        return found

    async def _events(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == hdrs.METH_HEAD:  # its answer has no body, and this one's would not end
            return _data(b"", "text/event-stream")
        if self._streams >= STREAMS_MOST:
            return _text(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS_MOST} pages are open, which is as many as there may be"
            )
        found = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        self._streams += 1
        self._doors.streams(request.transport)
        try:
            async with asyncio.timeout(WRITE_S):
                await found.prepare(request)
            await self._feed_page(request, found)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return found

    async def _feed_page(self, request: web.BaseRequest, found: web.StreamResponse) -> None:
        """Sends until the page is gone. All that waits for it is its own place among the events."""
        last = self._feed.number_of(request.headers.get("Last-Event-ID", ""))
        shown: _Seen | None = None
        missed, may_kill = last > 0, self._may_kill
        parts = [b"retry: 1000\n", self._hello(missed), _sse("history", self._feed.history())]
        while not self._stop.is_set() and request.transport is not None and not request.transport.is_closing():
            news = self._news
            if self._may_kill != may_kill:  # it leads since then, perhaps
                may_kill = self._may_kill
                parts.append(self._hello(missed))
            for one in self._feed.since(last):
                parts.append(_sse("happened", one.said, self._feed.id_of(one.number)))
                last = one.number
            await _write(found, parts)
            try:
                seen = await self._status()
                parts = [] if seen is shown else [seen.sent]
                shown = seen
            except _Unavailable as error:
                parts = [_sse("silent", json.dumps({"why": str(error)}).encode())]
            await _write(found, parts)
            parts = []
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 2 * TICK_S)

    @property
    def _may_kill(self) -> bool:
        return self._cluster is not None and self._cluster.kill is not None

    def _hello(self, missed: bool) -> bytes:
        """Returns the first message to a page: who answers, whether it has missed events, and what may be done here."""
        about = {"life": self._life, "missed": missed, "kill": self._may_kill}
        return _sse("hello", json.dumps(about).encode())


async def _write(found: web.StreamResponse, parts: list[bytes]) -> None:
    """Sends, and waits until there is room for more. Raises TimeoutError: what was sent is not taken."""
    if parts:
        async with asyncio.timeout(WRITE_S):
            await found.write(b"".join(parts))


class _Drain(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST of /drain."""

    member: str
    undo: bool = False


class _Checkpoint(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST of /checkpoint, which is empty."""


class _Kill(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST of /kill."""

    member: str


async def _said(request: web.BaseRequest, kind: type[T]) -> T:
    """Returns what a POST says. Raises _NotAsked: it is not that."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the latter: a string that is not UTF-8
        wanted = ", ".join(f'"{name}": ...' for name in kind.__struct_fields__)  # type: ignore[attr-defined]
        raise _NotAsked(f"wanted {{{wanted}}}: {error}") from None


@dataclass
class _Peer:
    """A connection. `asked_s`: when its last request began, or it came. `streams`: for as long as it likes."""

    asked_s: float
    streams: bool = False


class _Doors(web.Server):
    """The connections of a server, each with its limits."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            answer,
            request_factory=self._request,
            keepalive_timeout=IDLE_S,
            lingering_time=1.0,
            max_line_size=LINE_MOST_BYTES,
            max_field_size=LINE_MOST_BYTES,
            max_headers=HEADERS_MOST,
            auto_decompress=False,
            access_log=None,
            logger=_quiet(),
        )
        self._peers: dict[asyncio.Transport, _Peer] = {}
        self._over = False

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=BODY_MOST_BYTES)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Takes a connection that has come; another may have to go."""
        super().connection_made(handler, transport)
        transport.set_write_buffer_limits(high=1 << 16)
        self._peers[transport] = _Peer(asyncio.get_running_loop().time())
        idle = [one for one, peer in self._peers.items() if not peer.streams]
        if self._over:
            self._drop_soon(transport)
        elif len(self._peers) > CONNECTIONS_MOST and idle:
            self._drop_soon(min(idle, key=lambda one: self._peers[one].asked_s))

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Takes a connection that has ended out of the count."""
        super().connection_lost(handler, exc)
        self._peers = {one: peer for one, peer in self._peers.items() if not one.is_closing()}

    def asks(self, transport: asyncio.BaseTransport | None, now_s: float) -> None:
        """Notes that a request has come on a connection."""
        if (peer := self._peers.get(transport)) is not None:  # type: ignore[call-overload]
            peer.asked_s, peer.streams = now_s, False

    def streams(self, transport: asyncio.BaseTransport | None) -> None:
        """Notes that the answer on this connection is a stream, which does not end."""
        if (peer := self._peers.get(transport)) is not None:  # type: ignore[call-overload]
            peer.streams = True

    def look(self, now_s: float) -> None:
        """Ends those that do not take their answer."""
        for transport, peer in list(self._peers.items()):
            if not peer.streams and now_s > peer.asked_s + ANSWER_S:
                self._drop(transport)

    def end(self) -> None:
        """Ends all, and whoever still comes."""
        self._over = True
        for transport in list(self._peers):
            self._drop_soon(transport)

    def _drop_soon(self, transport: asyncio.Transport) -> None:
        """As `_drop`, once aiohttp's own task for it has begun, which may have come a moment ago: it counts on that."""
        self._peers.pop(transport, None)
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, transport.abort)

    def _drop(self, transport: asyncio.Transport) -> None:
        self._peers.pop(transport, None)
        transport.abort()


def _listen(place: Place, insists: bool) -> socket.socket | None:
    """Returns a listening socket. None: the port is in use, and it does not insist."""
    try:
        found = socket.create_server((place.host, place.port), family=family_of(place.host), backlog=256)
    except OSError as error:
        if not insists and place.port:
            log.warning("http: cannot listen on %s port %d: %s; tries again", place.host, place.port, error.strerror)
            return None
        if error.errno == errno.EADDRINUSE:
            raise OSError(error.errno, f"--http: port {place.port} on {place.host} is in use") from error
        where = f"--http: cannot listen on {place.host} port {place.port}"
        raise OSError(error.errno, f"{where}: {error.strerror or error}") from error
    if place.loopback and not ipaddress.ip_address(found.getsockname()[0].partition("%")[0]).is_loopback:
        found.close()  # a name that has another address now
        raise OSError(errno.EADDRNOTAVAIL, f"--http: {place.host} is not loopback any more")
    return found


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Server": "torch-ecrec",
}


def _data(body: bytes, kind: str, more: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, headers={**_HEADERS, "Content-Type": kind, **(more or {})})


def _text(status: int, words: str) -> web.Response:
    headers = {**_HEADERS, "Content-Type": "text/plain; charset=utf-8"}
    return web.Response(status=status, body=f"{words}\n".encode(errors="replace"), headers=headers)


def _sse(kind: str, data: bytes, number: str = "") -> bytes:
    """Returns a server-sent event. JSON has no line ends in it."""
    return b"event: %s\n%sdata: %s\n\n" % (kind.encode(), f"id: {number}\n".encode() if number else b"", data)


def _quiet() -> logging.Logger:
    """Returns the logger of what goes wrong with connections: strangers cannot fill the log."""
    found = logging.getLogger(f"{__name__}.connections")
    if not found.filters:
        told = [-math.inf]

        def seldom(record: logging.LogRecord) -> bool:
            now_s = time.monotonic()
            if now_s < told[0] + TOLD_S:
                return False
            told[0] = now_s
            return True

        found.addFilter(seldom)
    return found
