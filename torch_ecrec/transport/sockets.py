"""The data plane over sockets: for each pair of members that talk, one connection from caller to callee.

    caller                                   callee
    hello, challenge, proof: each knows the cluster's secret, and the callee's key (acceptor.py)
    frame: ticket, request          ------>  a reading thread runs `handle`
    a reading thread runs `done`    <------  frame: ticket, answer       (in any order)

frames.py says what a frame is. A connection is made at the first call to a member, and ends when one of the two is not
in the other's roster any more. Whoever sends writes to the socket itself as far as that goes without waiting; one
thread, the sender's, writes what is left.

Between hosts it is TCP. Within a host, if both processes have shared memory (shared.py), it is a Unix socket of the
abstract namespace, which leaves no file behind; large tensors then are read where their sender has them (lending.py).

No thread outlives the interpreter: one that is inside torch when it ends aborts the process.

Each process listens at the address from which it reaches the coordinator (loopback, if that is there). Its *key*, drawn
at random and told through the coordinator, is what both sides must know, with the cluster's secret (acceptor.py): an
address may belong to somebody else meanwhile. A connection on which something arrives that is no frame is closed: that
costs the calls under way on it, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.status import Connections
from torch_ecrec.protocol.wire import Failed, Unknown
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.addresses import family_of
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.transport.acceptor import CHALLENGE, HELLO, KEY_BYTES, Acceptor
from torch_ecrec.transport.calls import Back, Call, Handler, Transport, first_line
from torch_ecrec.transport.control import tune
from torch_ecrec.transport.frames import MAGIC, Frame, FrameReader, OtherBuild, is_between_hosts
from torch_ecrec.transport.lending import Lending
from torch_ecrec.transport.secret import CALLER, LISTENER, data_key, draw, is_proof, proof, secret_at

log = logging.getLogger(__name__)

NO_NAME = "-"
BACKLOG = 1024
CONNECT_S = 5.0
END_S = 5.0  # for all threads, each of which may be in a `handle` or a `done`
LACKS_S = 30.0  # a process without threads or descriptors for a connection is of no use after that
SWEEP_S = 0.1  # how often calls are looked at whose time may be up

# connections ----------------------------------------------------------------------------------------


class Sender:
    """A thread that writes what connections could not take at once, and calls `sweep` at regular times.

    Args:
        sweep: called every `SWEEP_S`.
        on_error: gets what goes wrong; the thread goes on.
    """

    def __init__(self, sweep: Callable[[], None], on_error: Callable[[BaseException], None]) -> None:
        self._sweep, self._on_error = sweep, on_error
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._ends = False
        belongs_here(self)

    def on_forked(self) -> None:
        """Closes its sockets in a forked child. The watched connections are the parent's, as is the selector."""
        self._ends = True
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def watch(self, connection: FrameConnection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_WRITE, connection)

    def unwatch(self, connection: FrameConnection) -> None:
        self._selector.unregister(connection.sock)

    def close(self) -> None:
        """Ends `run`. May be called again."""
        if not self._ends:
            with contextlib.suppress(OSError):  # another thread has ended it meanwhile
                self._wake.send(b"x")  # first: `run` closes it as soon as it sees that it ends
            self._ends = True

    def run(self) -> None:
        """Writes and sweeps until `close`. Runs on a thread of its own."""
        next_s = 0.0
        while not self._ends:
            try:
                for key, _ in self._selector.select(SWEEP_S):
                    if key.data is not None:
                        key.data.flush()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + SWEEP_S
                    self._sweep()
            except Exception as error:  # the seam: what is left to send must not wait for ever
                self._on_error(error)
        self._selector.close()
        self._wake.close()
        self._woken.close()


class FrameConnection:
    """The sending side of a connection. A thread of the owner reads from `sock`, and closes it at its end.

    Frames that are sent before `start` wait for it.
    """

    def __init__(self, sock: socket.socket, sender: Sender) -> None:
        self.sock = sock
        self._between_hosts = is_between_hosts(sock)
        pool = shared.pool()
        self.lending = Lending(pool) if not self._between_hosts and pool is not None else None
        self._sender = sender
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[Frame] = deque()
        self._started = self._watched = self._ended = False
        self._quiet = False  # nothing was sent since the last `remind`
        self.bytes_packed = self.bytes_saved = 0  # see `Frame`
        self.bytes_sent: Counter[str] = Counter()  # of tensors, before they are packed, by class of message
        belongs_here(self)

    def on_forked(self) -> None:
        """Closes the socket in a forked child, so that the peer sees the end of the parent."""
        self._lock, self._ended = threading.Lock(), True
        self.sock.close()

    def start(self) -> None:
        """Begins to send: the socket is connected. Raises ConnectionError if the connection was ended before."""
        with self._lock:
            if self._ended:
                raise ConnectionError("the connection ended")
            self._started = True
            self._push()

    def send(self, frame: Frame, kind: str, size: int) -> None:
        """Sends a frame; returns at once. Raises ConnectionError, and sends nothing, if the connection has ended.

        Args:
            kind: the message's class, by name. `size`: bytes of its tensors, before they are packed.
        """
        with self._lock:
            if self._ended:
                raise ConnectionError("the connection ended")
            self.bytes_sent[kind] += size
            self._waiting.append(frame)
            if self._started and not self._watched:
                self._push()

    def sizes(self) -> Counter[str]:
        """Returns a copy of `bytes_sent`."""
        with self._lock:
            return Counter(self.bytes_sent)

    def flush(self) -> None:
        """Sends waiting frames, as far as the socket takes them."""
        with self._lock:
            if self._watched and not self._ended:
                self._push()

    def remind(self) -> None:
        """Sends notes that no frame has taken along for a while, so that borrowed segments go back without calls."""
        if self.lending is None:
            return
        with self._lock:
            if self._quiet and self._started and not self._ended and not self._waiting and self.lending.owes:
                self._waiting.append(Frame(0, None))
                self._push()
            self._quiet = True

    def drop(self, frame: Frame) -> None:
        """Cancels a frame, so that its memory may change. If a part of it was sent, the connection ends."""
        with self._lock:
            waits = frame in self._waiting
            if waits and not frame.begun:
                self._waiting.remove(frame)
        if waits and frame.begun:
            self.end()

    def end(self) -> None:
        """Stops sending; the thread that reads from it finds its end. May be called again."""
        with self._lock:
            self._end()
        if self.lending is not None:
            self.lending.end()

    def close(self) -> None:
        """Closes the socket. Called after `end`, once nobody reads from it any more."""
        if self.lending is not None:
            self.lending.let_go()
        self.sock.close()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._waiting.clear()
        if self._watched:
            self._sender.unwatch(self)
        with contextlib.suppress(OSError):  # not connected, or not any more
            self.sock.shutdown(socket.SHUT_RDWR)

    def _push(self) -> None:
        self._quiet = False
        try:
            while self._waiting and self._waiting[0].send_to(self.sock, self.lending, self._between_hosts):
                sent = self._waiting.popleft()
                self.bytes_packed += sent.bytes_packed
                self.bytes_saved += sent.bytes_saved
            if self._waiting and not self._watched:
                self._sender.watch(self)  # which the kernel may have no memory for
                self._watched = True
        except OSError:  # the rest of a frame is missing; its reader tells why
            self._end()
            return
        except BaseException:  # how far it has come is not known, and whoever tries again would go on from there
            self._end()
            raise
        if self._watched and not self._waiting:
            self._sender.unwatch(self)
            self._watched = False


class Channel:
    """A connection to a callee, and the calls under way on it."""

    def __init__(self, transport: SocketTransport, peer: str, address: Address) -> None:
        self.peer = peer
        self._transport, self._address = transport, address
        self.sock = address.dial_within_host() or socket.socket(address.family, socket.SOCK_STREAM)
        self.connection = FrameConnection(self.sock, transport.sender)
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, tuple[float, Frame, Call]] = {}  # ticket -> when its time is up, what is sent, the call
        self._next = 0  # ticket
        self._ended = ""  # why, once it has

    def call(self, call: Call, encoded: Encoded, size: int, timeout_s: float) -> None:
        """Sends a call. Raises ConnectionError if the connection has ended.

        Raises TypeError or ValueError if the request cannot be sent.
        """
        with self._lock:
            if self._ended:
                raise ConnectionError(self._ended)
            ticket, self._next = self._next, self._next + 1
            frame = Frame(ticket, encoded)
            self._calls[ticket] = (time.monotonic() + timeout_s, frame, call)
        try:
            self.connection.send(frame, call.kind.__name__, size)
        except (ConnectionError, ValueError, TypeError):
            with self._lock:
                if self._calls.pop(ticket, None) is None:
                    return  # it was settled meanwhile
            raise

    def sweep(self, now_s: float) -> None:
        """Ends the calls whose time is up, and reminds the connection."""
        with self._lock:
            late = [ticket for ticket, (until_s, _, _) in self._calls.items() if until_s <= now_s]
            over = [self._calls.pop(ticket) for ticket in late]
        for _, frame, call in over:
            self.connection.drop(frame)
            self._transport._finish(call.done, Unknown(f"no answer from {self.peer} in time"))
        self.connection.remind()

    def end(self) -> None:
        """Ends the connection: calls under way on it soon end as `Unknown`."""
        self.connection.end()

    def run(self) -> None:
        """Connects, and reads answers until the connection ends. Runs on a thread of its own."""
        transport = self._transport
        connected = False
        reason = "the connection ended"
        try:
            if is_between_hosts(self.sock):
                self.sock.settimeout(CONNECT_S)
                self.sock.connect(self._address.place)
                tune(self.sock)
            self.sock.settimeout(None)
            self._prove()
            connected = True
            self.connection.start()
            reader = FrameReader(self.sock, self.connection.lending)
            while (answer := reader.read()) is not None:
                self._on_answer(*answer)
                del answer
        except OSError as error:
            reason = first_line(error)
        except OtherBuild as error:
            connected = False  # nothing of what was sent has been read
            reason = f"another build of torch_ecrec: {transport.build.difference_told(error.told)}"
            transport.complaints.add(f"a connection to {self.peer} is closed", reason)
        except ValueError as error:
            reason = first_line(error)
            transport.complaints.add(f"a connection to {self.peer} is closed", reason)
        except Exception as error:  # the seam: calls must not wait for a connection that nobody reads
            reason = first_line(error)
            transport._report(error)
        self.fail((Unknown if connected else Failed)(f"{self.peer}: {reason}"))

    def _prove(self) -> None:
        """Proves to the callee that this is a member, and checks its proof. Raises OSError if it fails, or is gone."""
        shared = data_key(self._transport.secret, self._address.key)
        mine = draw()
        hello = HELLO.pack(MAGIC, mine, self._transport.build.digest, self._transport.name.encode())
        self.sock.sendall(hello)
        said = self.sock.recv(CHALLENGE.size, socket.MSG_WAITALL)
        if len(said) < CHALLENGE.size:
            raise ConnectionError("who listens there has closed the connection")
        magic, theirs, shown = CHALLENGE.unpack(said)
        if magic != MAGIC or not is_proof(shown, shared, LISTENER, mine, theirs):
            raise ConnectionError("who listens there is no member of this cluster, or has another secret")
        self.sock.sendall(proof(shared, CALLER, mine, theirs, hello))

    def fail(self, outcome: Unknown | Failed) -> None:
        """Closes the connection, from which nobody reads any more, and ends the calls under way with `outcome`."""
        with self._lock:
            self._ended = outcome.reason
            calls, self._calls = self._calls, {}
        self.connection.end()
        self.connection.close()
        self._transport.forget(self.connection)
        for _, _, call in calls.values():
            self._transport._finish(call.done, outcome)

    def _on_answer(self, ticket: int, encoded: Encoded) -> None:
        with self._lock:
            known = self._calls.pop(ticket, None)
        if known is not None:
            self._transport._answered(known[2], encoded)

    @property
    def ended(self) -> bool:
        """Whether the connection has ended, so that nothing is sent on it."""
        return bool(self._ended)


class Address:
    """The address at which a member listens, and its key. As text: `HOST PORT KEY NAME`.

    Args:
        name: of its Unix socket in the abstract namespace; "-" if it has none.
    """

    def __init__(self, host: str, port: int, key: bytes, name: str) -> None:
        self.place, self.key, self.name = (host, port), key, name
        self.family = family_of(host)

    def __str__(self) -> str:
        return f"{self.place[0]} {self.place[1]} {self.key.hex()} {self.name}"

    @staticmethod
    def parse(text: str) -> Address:
        """Parses an address. Raises ValueError if it is malformed."""
        parts = text.split(" ")
        try:
            host, port, key, name = parts[0], int(parts[1]), bytes.fromhex(parts[2]), parts[3]
            ipaddress.ip_address(host)  # nothing is looked up by name: that could block
        except (ValueError, IndexError):
            port, key = 0, b""
        if len(parts) != 4 or not 0 < port < 65536 or len(key) != KEY_BYTES:
            raise ValueError(f"no endpoint, which is HOST PORT KEY NAME: {text[:80]!r}")
        return Address(host, port, key, name)

    def dial_within_host(self) -> socket.socket | None:
        """Connects to its Unix socket; None if it is on another host, or one of the two shares no memory."""
        if self.name == NO_NAME or shared.pool() is None:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)  # connects at once or not at all
        try:
            sock.connect(f"\0{self.name}")
        except OSError:
            sock.close()
            return None
        return sock


class SocketTransport(Transport):
    """The `Transport` over sockets. It listens from construction on."""

    def __init__(
        self,
        name: str,
        handle: Handler,
        host: str,
        on_error: Callable[[BaseException], None] | None = None,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        super().__init__(name, handle, host, on_error, vocabulary)
        self.secret = secret_at(host)
        listeners, self._address = _listen(host)
        self.endpoint = str(self._address)
        self._gate = threading.Lock()  # guards all below
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._version = 0  # of the roster
        self._addresses: dict[str, Address] = {}  # of its members
        self._left: set[str] = set()  # who was in a roster before, and is not in this one
        self._channels: dict[str, Channel] = {}  # by callee; read without the gate
        self._outbound: set[FrameConnection] = set()  # of the channels, also those that end
        self._inbound: dict[FrameConnection, str] = {}  # with the caller's name
        self._lacking: dict[str, tuple[float, float, str]] = {}  # no such thread: since when, when last, words
        self._sent: Counter[str] = Counter()  # on connections that are over
        self.sender = Sender(self._sweep, self._report)
        self._acceptor = Acceptor(
            listeners,
            data_key(self.secret, self._address.key),
            self.build,
            self._admit,
            self._tries.visited,
            self.complaints,
            self._report,
        )
        atexit.register(self._close)
        belongs_here(self)
        self._start(self.sender.run, "sender")  # last: these look at all of this
        self._start(self._acceptor.run, "acceptor")

    def _start(self, action: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                action()
            finally:
                with self._gate:
                    self._threads.discard(threading.current_thread())

        thread = Worker(run, name, self._report)
        with self._gate:  # who joins them must not find one that has not started
            if self._closed:
                raise RuntimeError("the transport was closed")
            thread.start()
            self._threads.add(thread)
            self._lacking.pop(name, None)

    # the roster -------------------------------------------------------------------------------------

    def follow(self, version: int, endpoints: Mapping[str, str]) -> None:
        addresses = {name: Address.parse(text) for name, text in endpoints.items()}
        with self._gate:
            if version <= self._version or self._closed:
                return
            self._version, before, self._addresses = version, self._addresses, addresses
            self._left = (self._left | before.keys()) - addresses.keys()
            moved = {name for name, one in addresses.items() if name in before and str(one) != str(before[name])}
            over = [name for name in self._channels if name not in addresses or name in moved]
            channels = [self._channels.pop(name) for name in over]
            inbound = [one for one, caller in self._inbound.items() if caller in self._left]
        self._tries.follow({name: one.place for name, one in addresses.items()}, self._address.place[0])
        for channel in channels:
            channel.end()
        for connection in inbound:
            connection.end()

    # to others --------------------------------------------------------------------------------------

    def _send(self, peer: str, call: Call, encoded: Encoded, size: int, timeout_s: float) -> None:
        channel = self._channels.get(peer)
        if channel is None or channel.ended:
            channel = self._channel(peer)
        channel.call(call, encoded, size, timeout_s)

    def _channel(self, peer: str) -> Channel:
        """Returns the connection to a member; makes it if there is none."""
        with self._gate:
            channel = self._channels.get(peer)
            if channel is not None and not channel.ended:
                return channel
            if self._closed:
                raise ConnectionError("the transport was closed")
            if (address := self._addresses.get(peer)) is None:
                raise ConnectionError(f"{peer} is not in roster {self._version}")
            try:
                channel = Channel(self, peer, address)
            except OSError as error:  # no more descriptors
                self._note_lack("a member cannot be connected to", f"to {peer}", error)
                raise ConnectionError(f"no connection to {peer}: {error}") from error
            self._channels[peer] = channel
            self._outbound.add(channel.connection)
        try:
            self._start(channel.run, f"to {peer}")
        except RuntimeError as error:  # no more threads
            self._note_lack("a member cannot be connected to", f"to {peer}", error)
            channel.fail(Failed(f"no connection to {peer}: {error}"))
        return channel

    def _note_lack(self, what: str, thread: str, error: Exception) -> None:
        """Notes that this process had no thread or descriptor for a connection."""
        self.complaints.add(what, error)
        now_s = time.monotonic()
        since_s, last_s, _ = self._lacking.get(thread, (now_s, now_s, ""))
        since_s = since_s if now_s - last_s < LACKS_S else now_s
        advice = "`torch-ecrec doctor --only open-files,processes` says what a process takes"
        self._lacking[thread] = since_s, now_s, f"{what}, for {LACKS_S:g} s now: {error}; {advice}"

    def lacks(self) -> str:
        now_s, lacking = time.monotonic(), list(self._lacking.values())
        lasting = (told for since_s, last_s, told in lacking if last_s - since_s >= LACKS_S > now_s - last_s)
        return next(lasting, "")

    def forget(self, connection: FrameConnection) -> None:
        """Removes a connection that has ended. The bytes sent on it still count."""
        with self._gate:
            self._sent.update(connection.sizes())
            self._inbound.pop(connection, None)
            self._outbound.discard(connection)

    def _sweep(self) -> None:
        with self._gate:
            channels, inbound = list(self._channels.values()), list(self._inbound)
        for connection in inbound:
            connection.remind()
        now_s = time.monotonic()
        for channel in channels:
            channel.sweep(now_s)
        self._tries.look([*(channel.sock for channel in channels), *(one.sock for one in inbound)], now_s)

    def connections(self) -> Connections:
        with self._gate:
            there = [*self._outbound, *self._inbound]
        in_memory = sum(one.lending is not None for one in there)
        return Connections(
            memory=in_memory,
            tcp=len(there) - in_memory,
            bytes_packed=sum(one.bytes_packed for one in there),
            bytes_saved=sum(one.bytes_saved for one in there),
        )

    @property
    def bytes_sent(self) -> dict[str, int]:
        with self._gate:
            total = Counter(self._sent)
            for connection in (*self._outbound, *self._inbound):
                total.update(connection.sizes())
        return dict(total)

    # from others ------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, caller: str) -> None:
        """Serves a member that has connected, unless it has left the cluster meanwhile."""
        if caller in self._left:
            sock.close()
            return
        try:
            self._start(functools.partial(self._read, sock, caller), f"from {caller}")
        except RuntimeError as error:  # no more threads
            self._note_lack("a caller's connection is closed", f"from {caller}", error)
            sock.close()

    def _read(self, sock: socket.socket, caller: str) -> None:
        """Serves one caller until its connection ends."""
        connection = FrameConnection(sock, self.sender)
        try:
            with self._gate:
                if self._closed or caller in self._left:
                    return
                self._inbound[connection] = caller
            connection.start()
            reader = FrameReader(sock, connection.lending)
            while (request := reader.read()) is not None:
                self._serve(request[1], _way_back(connection, request[0]))
                del request  # its tensors may be free before the next comes
        except ConnectionError as error:  # it died, or left
            log.debug("%s: %s, a caller, is gone: %s", self.name, caller, error)
        except (OSError, ValueError) as error:
            self.complaints.add("a caller's connection is closed", error)
        except Exception as error:  # the seam: it would vanish with this thread
            self._report(error)
        finally:
            connection.end()
            connection.close()
            self.forget(connection)

    # the end ----------------------------------------------------------------------------------------

    def on_forked(self) -> None:
        """Marks the transport as closed in a forked child, which is no member."""
        self._gate, self._closed = threading.Lock(), True
        atexit.unregister(self._close)
        self._channels, self._inbound, self._threads = {}, {}, set()
        self._tries.close()

    def _close(self) -> None:
        with self._gate:
            self._closed = True
            channels, self._channels = list(self._channels.values()), {}
            inbound = list(self._inbound)
        for channel in channels:
            channel.end()
        for connection in inbound:
            connection.end()
        self.sender.close()
        self._acceptor.close()
        until_s = time.monotonic() + END_S
        with self._gate:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0))
        self._tries.close()
        atexit.unregister(self._close)


def _listen(host: str) -> tuple[list[socket.socket], Address]:
    """Listens at a free port of `host`, and within the host, if this process has shared memory.

    Raises:
        ClusterUnavailable: this process cannot listen there.
    """
    name = NO_NAME if shared.pool() is None else f"torch_ecrec-{secrets.token_hex(KEY_BYTES)}"
    listeners: list[socket.socket] = []
    try:
        listeners.append(socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG))
        if name != NO_NAME:
            within_host = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listeners.append(within_host)
            within_host.bind(f"\0{name}")
            within_host.listen(BACKLOG)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ClusterUnavailable(f"cannot listen for other members at {host}: {error}") from error
    return listeners, Address(host, listeners[0].getsockname()[1], secrets.token_bytes(KEY_BYTES), name)


def _way_back(connection: FrameConnection, ticket: int) -> Back:
    def send(encoded: Encoded, kind: str, size: int) -> None:
        with contextlib.suppress(ConnectionError):  # the caller is gone: nobody waits for it
            connection.send(Frame(ticket, encoded), kind, size)

    return send
