"""The control channel between the members and the coordinator: TCP, one JSON object per line, both ways.

It carries membership, placements and status: small messages, some per second. What matters is that the end of a
process is noticed at once: the kernel of a killed process closes its connections, so the other side sees the end
within milliseconds. A host that vanishes is noticed by the coordinator's connection in about 15 s, by a member's in 4:
a member loses nothing by connecting again, and all of them must be with the next coordinator soon after it is there. A
process that hangs is not noticed here: that takes a lease.

    server = ControlServer("127.0.0.1", 0, on_message, on_closed)     # in the coordinator
    server.turn_away()                      # while it stands by for another: nothing that is said to it waits
    client = ControlClient(*server.address, on_message, on_closed, timeout_s=10)
    client.send({"type": "hello"})          # the server calls on_message(connection, {"type": "hello"})
    request(*server.address, {"type": "status"}, timeout_s=5)       # a question and its answer

Invariants.
- Everything of a server runs on the thread in `serve_forever`: its callbacks need no lock. What a callback raises ends
  `serve_forever` with that error: a coordinator with half a change in its state must not go on.
- A line that is not a JSON object, or is too long, closes its connection, and changes nothing else.
- Nothing blocks for long: a peer that does not read is cut off.
- What a peer has said before it ended is heard, also by a server that notices the end as it writes to it.
- Where there is a secret (`secret.py`), nothing of a connection is heard before it has proved that it knows it, and
  until then it may say a short line, and has `PROVE_S`. A client with a secret says nothing else to who does not.
- A *stranger*, a connection that was not `admit`ted, has little to spend: lines of `STRANGER_LINE_BYTES`, all of them
  together `STRANGERS_BYTES` of lines that have not ended, `STRANGER_IDLE_S` of silence. Of more than `STRANGERS_MOST`
  the one goes that was silent longest, so that there is always room for the next.
- Without descriptors for another connection, the present ones go on; it waits, and is accepted when there are some.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.bounds import NO_SECRET
from torch_ecrec.runtime.addresses import family_of, text_of
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import own_secret
from torch_ecrec.transport.liveness import NO_WAY, Address, probe
from torch_ecrec.transport.secret import (
    CALLER,
    LISTENER,
    NONCE_BYTES,
    NotProved,
    draw,
    is_proof,
    proof,
    secret_at,
)

Message = dict[str, Any]

log = logging.getLogger(__name__)

LINE_MOST_BYTES = 64 << 20
BACKLOG_MOST_BYTES = 64 << 20  # what may wait for a peer that does not read
STRANGER_LINE_BYTES = 4 << 20  # a `join` carries the job: 10,000 tables are 1.5 MB, names of 100 letters 2.5 MB
STRANGERS_BYTES = 64 << 20
STRANGER_BACKLOG_BYTES = 8 << 20
STRANGER_IDLE_S = 60.0
STRANGERS_MOST = 512
UNPROVED_LINE_BYTES = 1 << 10
PROVE_S = 10.0
TOLD_S = 1.0  # bad lines are logged once in so long at most
DESCRIPTORS = 1 << 16  # a coordinator has a connection with every member, and a server, too
SEND_TIMEOUT_S = 5.0  # how long a member's `send` may block on a coordinator that does not read
CHUNK_BYTES = 1 << 18
UNANSWERED_S = 15.0
UNANSWERED_BY_COORDINATOR_S = 4.0
ATTEMPT_S = 1.0  # for a connection; then it is asked for anew: left alone, the kernel asks after 1, 3, 7, 15, 31 s
ROUNDS_OF_AN_END = 3  # of the loop, in which those that have just come are closed, too
RETRY_LEAST_S, RETRY_MOST_S = 0.02, 0.5


SECRET_SET = "TORCH_ECREC_SECRET or TORCH_ECREC_SECRET_FILE"
WANTS_SECRET = f"is of a cluster with a secret, which this process does not know: set {SECRET_SET}"


class NoAnswer(ClusterUnavailable):
    """The coordinator's address did not answer. Perhaps it is this process that is cut off from the network."""


class BadLine(ValueError):
    """The bytes that arrived are not a line of this protocol."""


def encode_line(message: Message) -> bytes:
    """Encodes a message as a line. Raises TypeError or ValueError if it is not a JSON object."""
    if not isinstance(message, dict):
        raise TypeError(f"`message` must be a dict, got {type(message).__name__}")
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class Lines:
    """Cuts a stream of bytes into messages.

    Attributes:
        most_bytes: how long a line may be.
        waiting_bytes: of the line that has not ended yet.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = LINE_MOST_BYTES if most_bytes is None else most_bytes
        self._rest = bytearray()

    @property
    def waiting_bytes(self) -> int:
        return len(self._rest)

    def feed(self, data: bytes) -> Iterable[Message]:
        """Yields the messages that `data` completes. Raises BadLine at a bad one, after those before it."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._add(end)
            line, self._rest = self._rest, bytearray()
            yield _parse(line)
        self._add(rest)

    def _add(self, part: bytes) -> None:
        if len(self._rest) + len(part) > self.most_bytes:
            self._rest.clear()
            raise BadLine(f"a line of more than {self.most_bytes} bytes")
        self._rest += part


def _parse(line: bytes | bytearray) -> Message:
    try:
        message = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {bytes(line[:80])!r}") from error
    if not isinstance(message, dict):
        raise BadLine(f"not a JSON object: {bytes(line[:80])!r}")
    return message


def tune(sock: socket.socket, unanswered_s: float = UNANSWERED_S) -> None:
    """Sets socket options. A connection ends when sent data is not acknowledged for `unanswered_s`."""
    unanswered_ms = round(1000 * unanswered_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", unanswered_ms),
    ):
        if hasattr(socket, option):  # not all systems have all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# the coordinator's side -----------------------------------------------------------------------------


class LineConnection(asyncio.Protocol):
    """The server's side of a connection with one peer."""

    def __init__(self, server: ControlServer) -> None:
        self.peer = "?"  # host:port
        self.proved = not server.secret
        self._nonces: tuple[bytes, bytes] | None = None  # its own and ours, once it has said its own
        self.came_s = self.heard_s = 0.0  # when it connected; when its last whole line came; on the loop's clock
        self.stranger = True
        self._server = server
        self._lines = Lines(STRANGER_LINE_BYTES if self.proved else UNPROVED_LINE_BYTES)
        self._transport: asyncio.Transport | None = None  # None before the connection and after its end

    def send(self, message: Message) -> None:
        """Sends a message; does nothing if the connection has ended. On the server's thread; never blocks."""
        line = encode_line(message)
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(line)
        if self._transport.get_write_buffer_size() > (STRANGER_BACKLOG_BYTES if self.stranger else BACKLOG_MOST_BYTES):
            log.warning("control channel: %s does not read; its connection is closed", self.peer)
            self._transport.abort()

    @property
    def ended(self) -> bool:
        return self._transport is None

    def admit(self) -> None:
        """Marks the peer as a member: limits for strangers no longer apply. On the server's thread."""
        self.stranger = False
        self._lines.most_bytes = LINE_MOST_BYTES
        self._server._strangers.pop(self, None)

    def close(self) -> None:
        """Ends the connection once what was sent is written; `on_closed` follows. On the server's thread."""
        if self._transport is not None:
            self._transport.close()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if self._server._closed:  # it came as the server ended: else it would be open for as long as this process lives
            transport.abort()
            return
        self._transport = transport
        self.peer = text_of(transport.get_extra_info("peername")[:2])
        tune(transport.get_extra_info("socket"))
        self._server._connections.add(self)
        self._server._take_in(self)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                self._server._heard(self)
                self._hear(message)
                if self._transport is None or self._transport.is_closing():
                    return
        except BadLine as error:
            if self.proved:
                self._server._on_bad_line(self, str(error))
                self.close()
            else:
                self._turn_away()
        if self.stranger and self._lines.waiting_bytes > CHUNK_BYTES:
            self._server._weigh()

    def _hear(self, message: Message) -> None:
        if self.proved:
            self._server._guard(self._server._on_message, self, message)
        else:
            self._prove(message)

    def _prove(self, message: Message) -> None:
        """Handles the messages by which the peer proves that it knows the secret: its nonce, then its proof."""
        said = _bytes_of(message.get("nonce" if self._nonces is None else "proof"))
        if self._nonces is None and message.get("type") == "hello" and len(said) == NONCE_BYTES:
            self._nonces = said, draw()
            shown = proof(self._server.secret, LISTENER, *self._nonces)
            self.send({"type": "proof", "nonce": self._nonces[1].hex(), "proof": shown.hex()})
        elif self._nonces is not None and is_proof(said, self._server.secret, CALLER, *self._nonces):
            self.proved, self._lines.most_bytes = True, STRANGER_LINE_BYTES
        else:
            self._turn_away()

    def _turn_away(self) -> None:
        self.send({"type": "refused", "kind": NO_SECRET, "reason": WANTS_SECRET})
        self._server.count_unproved(self)
        self.close()

    def abort(self, why: str) -> None:
        """Ends the connection at once; `on_closed` follows."""
        log.info("control channel: %s %s; its connection is closed", self.peer, why)
        self._server._strangers.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        last = _unread(self._transport) if error is not None and self._transport is not None else b""
        self._transport = None
        self._hear_last(last)
        self._server._connections.discard(self)
        self._server._strangers.pop(self, None)
        self._server._guard(self._server._on_closed, self)

    def _hear_last(self, data: bytes) -> None:
        """Handles data that came on a connection that has ended since. Nothing is answered."""
        with contextlib.suppress(BadLine):  # cut off, or nonsense: nobody is left to be told
            for message in self._lines.feed(data):
                if self.proved:
                    self._hear(message)


def _bytes_of(text: object) -> bytes:
    """Decodes hexadecimal digits; returns b"" for anything else."""
    try:
        return bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _unread(transport: asyncio.Transport) -> bytes:
    """Returns data that arrived on a connection whose writing side failed. Asyncio would leave it unread."""
    data = bytearray()
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as end:
        end.setblocking(False)
        while len(data) < BACKLOG_MOST_BYTES and (part := end.recv(CHUNK_BYTES)):
            data += part
    return bytes(data)


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 takes a free one. Raises OSError: says why it cannot."""
    try:
        return socket.create_server((host, port), family=family_of(host), backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"port {port} on {host} is in use: end the process that has it, or take another port"
            raise OSError(error.errno, taken) from error
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror or error}") from error


class ControlServer:
    """The coordinator's server. It listens from construction on, and serves in `serve_forever`.

    Args:
        host, port: where to listen; port 0 takes any that is free.
        on_message: `on_message(connection, message)`.
        on_closed: `on_closed(connection)`, once for every connection that ended before the server's own close.
        on_bad_line: `on_bad_line(connection, reason)`, before the connection is closed; None: a word in the log.

    Attributes:
        secret: what who connects must know; b"": nothing.

    Raises:
        OSError: nobody can listen there; the message says where.
        ClusterUnavailable: other hosts get there, and there is no secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_message: Callable[[LineConnection, Message], None],
        on_closed: Callable[[LineConnection], None],
        on_bad_line: Callable[[LineConnection, str], None] | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._bad_line = on_bad_line
        self._told_s = -math.inf  # of a bad line, or of who does not know the secret, to the log
        self._unproved = 0  # that the log was not told of
        self._connections: set[LineConnection] = set()
        self._strangers: dict[LineConnection, None] = {}  # who was silent longest comes first
        self._probing: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None  # what a callback raised
        self.secret = secret_at(host)
        self._listener = listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._lock = threading.Lock()  # guards the two below
        self._closed = False
        self._serving = False

    def call_soon(self, action: Callable[[], None]) -> None:
        """Runs `action` on the server's thread. From any thread; does nothing after the server's end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._guard, action)

    def call_later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` on the server's thread in `delay_s`. From any thread; does nothing after the server's end."""
        due_s = self._loop.time() + delay_s
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_at, due_s, self._guard, action)

    def serve_forever(self) -> None:
        """Serves on this thread until `close`. Raises what a callback raised. May be called once only."""
        with self._lock:
            if self._serving:
                raise RuntimeError("`serve_forever` was called twice")
            self._serving = True
            if self._closed:
                return
        task = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(task)
        except BaseException:  # Ctrl-C: end in order, then let it pass
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
            raise
        finally:
            self._loop.close()
        if self._error is not None:
            raise self._error

    def turn_away(self) -> int:
        """Closes all connections that have come so far, unread; returns how many. Call it before `serve_forever`."""
        self._listener.setblocking(False)
        ended = 0
        while True:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:  # nobody else waits
                return ended
            except OSError as error:  # of one who is gone, or no descriptor is left: the next call goes on
                log.warning("control channel: cannot turn away who has come: %s", error.strerror or error)
                return ended
            ended += 1

    def close(self) -> None:
        """Stops serving soon, and frees the port. From any thread, callbacks included. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._serving:
                self._listener.close()
                self._loop.close()
                return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    def probe(self, address: Address, done: Callable[[str], None]) -> None:
        """Asks whether a process listens there. `done` gets the result of `liveness.probe`, on the server's thread."""

        async def ask() -> None:
            found = await probe(address)
            self._guard(done, found)

        task = self._loop.create_task(ask())
        self._probing.add(task)  # the loop keeps none itself
        task.add_done_callback(self._probing.discard)

    # strangers

    def _take_in(self, connection: LineConnection) -> None:
        self._heard(connection)
        connection.came_s = connection.heard_s
        if len(self._strangers) > STRANGERS_MOST:
            next(iter(self._strangers)).abort("was silent longest of too many")

    def _heard(self, connection: LineConnection) -> None:
        connection.heard_s = self._loop.time()
        if connection.stranger:
            self._strangers.pop(connection, None)
            self._strangers[connection] = None

    def _weigh(self) -> None:
        """Limits the bytes of unfinished lines of all strangers together: closes the connection with most."""
        waiting = {connection: connection._lines.waiting_bytes for connection in self._strangers}
        if sum(waiting.values()) > STRANGERS_BYTES:
            max(waiting, key=lambda connection: waiting[connection]).abort("sends a line without end")

    def _drop_idle(self) -> None:
        now_s = self._loop.time()
        for connection in list(self._strangers):
            limit_s = STRANGER_IDLE_S if connection.proved else PROVE_S
            if now_s - (connection.heard_s if connection.proved else connection.came_s) >= limit_s:
                connection.abort(f"said nothing for {limit_s:g} s")
        self._loop.call_later(PROVE_S / 4, self._drop_idle)

    def count_unproved(self, connection: LineConnection) -> None:
        """Counts a peer that does not know the secret. The log tells of such peers from time to time."""
        self._unproved += 1
        if self._loop.time() - self._told_s > TOLD_S:
            self._told_s, count, self._unproved = self._loop.time(), self._unproved, 0
            log.warning("control channel: %s, as %d in all of late, does not know the secret", connection.peer, count)

    def _on_bad_line(self, connection: LineConnection, reason: str) -> None:
        if self._bad_line is not None:
            self._guard(self._bad_line, connection, reason)
        elif self._loop.time() - self._told_s > TOLD_S:
            self._told_s = self._loop.time()
            log.warning("control channel: %s: %s; its connection is closed", connection.peer, reason)

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: LineConnection(self), sock=self._listener)
        self._drop_idle()
        try:
            await self._stop.wait()
        finally:
            server.close()
            for task in list(self._probing):
                task.cancel()
            with self._lock:
                self._closed = True
            for connection in list(self._connections):
                connection.close()
            await asyncio.sleep(0)  # one round, in which connections that owe nothing are closed
            for connection in list(self._connections):
                if connection._transport is not None:
                    connection._transport.abort()
            for _ in range(ROUNDS_OF_AN_END):
                await asyncio.sleep(0)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        if self._closed:
            return
        try:
            action(*args)
        except BaseException as error:
            self._error = error
            self._stop.set()


def raise_descriptors() -> None:
    """Raises this process's limit of open files as far as the system allows, up to `DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# the members' side ----------------------------------------------------------------------------------


def _what_to_do(error: OSError, host: str, port: int) -> str:
    """Returns advice for somebody who could not connect there."""
    if isinstance(error, socket.gaierror):
        return f"is {host} spelt right, and known to this host (`getent hosts {host}`)?"
    if isinstance(error, ConnectionRefusedError):
        started = f"torch-ecrec up --host {host} --port {port}, or torch-ecrec coordinator"
        return f"nothing listens there. Is that its port? It is started by: {started}"
    return f"is that host on, and does a firewall let connections to port {port} through?"


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connects, and retries until `timeout_s` is over, since the coordinator may be starting."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = RETRY_LEAST_S
    while True:
        try:
            sock = socket.create_connection(
                (host, port), timeout=max(min(deadline_s - time.monotonic(), ATTEMPT_S), 0.001)
            )
            tune(sock, UNANSWERED_BY_COORDINATOR_S)
            return sock
        except OSError as error:
            if time.monotonic() + pause_s > deadline_s:
                reason = error.strerror or str(error)
                kind = NoAnswer if isinstance(error, TimeoutError) or error.errno in NO_WAY else ClusterUnavailable
                where = f"no coordinator at {text_of((host, port))} within {timeout_s:g} s: {reason}"
                raise kind(f"{where}; {_what_to_do(error, host, port)}") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_MOST_S)


def _own_secrets(known: bytes) -> list[bytes]:
    """Returns the secrets that the coordinator may know: the one that is set now, and `known`; none if there is none.

    Raises ValueError if what is set cannot be had, and none is known.
    """
    try:
        found = [own_secret()]
    except ValueError:  # its file is being written, or its disk is away: no reason for a member to leave
        if not known:
            raise
        found = []
    return [secret for secret in dict.fromkeys([*found, known]) if secret]


def _prove(sock: socket.socket, where: str, timeout_s: float, known: bytes = b"") -> None:
    """Proves to the coordinator that this process knows the secret, and checks its proof, if there is a secret.

    Raises:
        NoAnswer: nothing came in time, though somebody listens.
        NotProved: the other one does not know it.
        ClusterUnavailable: the connection has ended.
    """
    secrets = _own_secrets(known)
    if not secrets:
        return  # who wants one says so
    mine = draw()
    try:
        sock.settimeout(timeout_s)
        sock.sendall(encode_line({"type": "hello", "nonce": mine.hex()}))
        said = _read_line(sock, time.monotonic() + timeout_s)
        theirs = _bytes_of(said.get("nonce"))
        shown = _bytes_of(said.get("proof"))
        both = [secret for secret in secrets if is_proof(shown, secret, LISTENER, mine, theirs)]
        if len(theirs) != NONCE_BYTES or not both:
            has_one = said.get("type") in ("proof", "refused") and theirs
            other = "has another secret" if has_one else "has none"
            kept = "; a running cluster keeps the secret that it began with: to change it, stop all of it first"
            raise NotProved(
                f"the coordinator at {where} does not know the secret of this process ({SECRET_SET}): it {other}, or"
                f" is none of this cluster{kept if has_one else ''}"
            )
        sock.sendall(encode_line({"type": "proof", "proof": proof(both[0], CALLER, mine, theirs).hex()}))
    except TimeoutError as error:
        raise NoAnswer(f"the coordinator at {where} has not answered within {timeout_s:g} s") from error
    except (OSError, BadLine) as error:
        raise ClusterUnavailable(f"the coordinator at {where} ended the connection: {error}") from error


def _read_line(sock: socket.socket, until_s: float) -> Message:
    """Reads exactly one message. Raises OSError, TimeoutError after `until_s`, or BadLine."""
    line = bytearray()
    while not line.endswith(b"\n"):
        sock.settimeout(max(until_s - time.monotonic(), 0.001))
        part = sock.recv(1)
        if not part or len(line) > UNPROVED_LINE_BYTES:
            raise BadLine("it has closed it" if not part else "what it said is no proof")
        line += part
    return _parse(line)


class ControlClient:
    """A member's connection to the coordinator. The constructor connects.

    Args:
        host, port: the coordinator's.
        on_message: `on_message(message)`, on the client's own thread.
        on_closed: `on_closed(reason)`, on the same thread, once and last, unless `close` ended the connection.
        on_bad_line: `on_bad_line(reason)`, on the same thread, before `on_closed`: what came is no line of JSON.
        timeout_s: how long to try to connect.
        secret: that this process knew before. It will do, too, where what is set now cannot be read, or is another one.

    Raises:
        ClusterUnavailable: nobody answered within `timeout_s`. `NotProved`: who did does not know our secret, or wants
            one.
        ValueError: there is no secret where one is set.
    """

    def __init__(
        self,
        host: str,
        port: int,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        timeout_s: float,
        on_bad_line: Callable[[str], None] = lambda reason: None,
        secret: bytes = b"",
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_bad_line = on_bad_line
        self._sock = _connect(host, port, timeout_s)
        belongs_here(self)
        try:
            _prove(self._sock, text_of((host, port)), timeout_s, secret)
        except (ClusterUnavailable, ValueError):
            self._sock.close()
            raise
        self.local_host: str = self._sock.getsockname()[0]
        self._sock.settimeout(None)
        seconds, rest = divmod(SEND_TIMEOUT_S, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        self._sending = threading.Lock()  # keeps lines whole
        self._closed = False  # by `close`; only grows
        self._reason = "the coordinator closed the connection"  # told when the connection ends
        self._reader = Worker(self._read, "control-client", log_error)
        self._reader.start()

    def send(self, message: Message) -> None:
        """Sends a message. If the connection has ended, only `on_closed` tells. From any thread."""
        line = encode_line(message)
        with self._sending:
            try:
                self._sock.sendall(line)
            except OSError as error:  # a part of the line may be out: nothing can follow it
                if not self._closed:
                    self._reason = f"cannot send to the coordinator: {error.strerror or error}"
                self._shut()

    def close(self) -> None:
        """Ends the connection, and does not call `on_closed`. From any thread. May be called again."""
        self._closed = True
        self._shut()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def on_forked(self) -> None:
        """Closes the socket in a forked child, so that the connection ends with the parent."""
        self._closed, self._sending = True, threading.Lock()
        self._sock.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        reason = None
        lines = Lines()
        try:
            while data := self._sock.recv(CHUNK_BYTES):
                for message in lines.feed(data):
                    if self._closed:
                        break
                    self._on_message(message)
        except BadLine as error:
            reason = f"the coordinator sent {error}"
            log.warning("control channel: %s", reason)
            if not self._closed:
                self._on_bad_line(reason)
        except OSError as error:
            reason = f"the connection to the coordinator broke: {error.strerror or error}"
        except Exception as error:  # the seam: it would vanish with this thread
            reason = f"error in a message handler: {error!r}"
            log.exception("control channel: %s", reason)
        self._shut()
        with self._sending:
            self._sock.close()
        if not self._closed:
            self._on_closed(reason or self._reason)


def request(host: str, port: int, message: Message, timeout_s: float) -> Message:
    """Asks one question on a new connection, and returns the answer.

    Raises:
        ClusterUnavailable: no answer within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    where = f"the coordinator at {text_of((host, port))}"
    lines = Lines()
    with _connect(host, port, timeout_s) as sock:
        _prove(sock, text_of((host, port)), max(deadline_s - time.monotonic(), 0.001))
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            sock.sendall(encode_line(message))
            while True:
                sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
                data = sock.recv(CHUNK_BYTES)
                if not data:
                    raise ClusterUnavailable(f"{where} closed the connection without an answer")
                for answer in lines.feed(data):
                    if answer.get("kind") == NO_SECRET:
                        raise NotProved(f"{where} {answer.get('reason')}")
                    return answer
        except TimeoutError as error:
            raise ClusterUnavailable(f"{where} did not answer within {timeout_s:g} s") from error
        except (OSError, BadLine) as error:
            raise ClusterUnavailable(f"{where}: {error}") from error
