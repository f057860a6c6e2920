"""The data plane over connections of its own: for each pair of members that talk, one from caller to callee.

    caller                                   callee
    hello: magic, the callee's key, digest of the caller's build, generation
    frame: ticket, request          ------>  a reading thread runs `handle`
    a reading thread runs `done`    <------  frame: ticket, answer       (in any order)

frames.py says what a frame is. A connection is made at the first call to a member of a generation, and ends with the
generation. Whoever sends writes to the socket itself as far as that goes without waiting; one thread, the sender's,
writes what is left.

Between hosts it is TCP. Within a host, if both processes have shared memory (shared.py), it is a Unix socket of the
abstract namespace, which leaves no file behind; large tensors then are read where their sender has them (lending.py).

No thread outlives the interpreter: one that is inside torch when it ends aborts the process.

Each process listens at the address from which it reaches the coordinator (loopback, if that is there). Its *key*, drawn
at random and told through the store, is asked of who connects (door.py): an address may belong to somebody else
meanwhile. It keeps out mistakes; it is no protection against who reads the network. A connection on which something
arrives that is no frame is closed: that costs the calls under way on it, and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.status import Connections
from torch_ecrec.protocol.wire import Failed, Ok, Unknown
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.addresses import family_of, own_host
from torch_ecrec.runtime.lifetime import belongs_here
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.transport.control import tune
from torch_ecrec.transport.door import HELLO, KEY_BYTES, Door
from torch_ecrec.transport.frames import MAGIC, Frame, FrameReader, OtherBuild, is_between_hosts
from torch_ecrec.transport.generations import Handler, Transport
from torch_ecrec.transport.lending import Lending
from torch_ecrec.transport.rendezvous import World, first_line

log = logging.getLogger(__name__)

NO_NAME = "-"
BACKLOG = 1024
CONNECT_S = 5.0
END_S = 5.0  # for all threads, each of which may be in a `handle` or a `done`
SWEEP_S = 0.1  # how often calls are looked at whose time may be up

# connections ----------------------------------------------------------------------------------------


class Sender:
    """One thread that writes to connections what they could not take at once, and looks at the time.

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
        """In a forked child. What is watched is the parent's affair, with which this selector is shared."""
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
            self._wake.send(b"x")  # first: `run` closes it as soon as it sees that it ends
            self._ends = True

    def run(self) -> None:
        """What its thread does, until `close`."""
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
    """The way out of one connection. A thread of its owner's reads from `sock`, and closes it at its end.

    Frames that come before `start` wait for it.
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
        belongs_here(self)

    def on_forked(self) -> None:
        """In a forked child: who reads at the other end must see the end of its parent."""
        self._lock, self._ended = threading.Lock(), True
        self.sock.close()

    def start(self) -> None:
        """It is connected. Raises ConnectionError if it was ended before it was."""
        with self._lock:
            if self._ended:
                raise ConnectionError("the connection ended")
            self._started = True
            self._push()

    def send(self, frame: Frame) -> None:
        """Returns at once. Raises ConnectionError, and sends nothing, if the connection has ended."""
        with self._lock:
            if self._ended:
                raise ConnectionError("the connection ended")
            self._waiting.append(frame)
            if self._started and not self._watched:
                self._push()

    def flush(self) -> None:
        """Sends what waits, as the socket takes more."""
        with self._lock:
            if self._watched and not self._ended:
                self._push()

    def remind(self) -> None:
        """Sends notes that have waited for a frame to go with: segments are given back, also when nobody calls."""
        if self.lending is None:
            return
        with self._lock:
            if self._quiet and self._started and not self._ended and not self._waiting and self.lending.owes:
                self._waiting.append(Frame(0, None))
                self._push()
            self._quiet = True

    def drop(self, frame: Frame) -> None:
        """It is not to be sent: what it holds may change from now on. If a part has been, the connection ends."""
        with self._lock:
            waits = frame in self._waiting
            if waits and not frame.begun:
                self._waiting.remove(frame)
        if waits and frame.begun:
            self.end()

    def end(self) -> None:
        """Nothing is sent from now on; who reads from it finds its end. May be called again."""
        with self._lock:
            self._end()
        if self.lending is not None:
            self.lending.end()

    def close(self) -> None:
        """After `end`, once nobody reads from it any more."""
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
        except OSError:  # the rest of a frame is missing; its reader tells why
            self._end()
            return
        except BaseException:  # how far it has come is not known, and whoever tries again would go on from there
            self._end()
            raise
        left = bool(self._waiting)
        if left and not self._watched:
            self._sender.watch(self)
        elif self._watched and not left:
            self._sender.unwatch(self)
        self._watched = left


class Channel:
    """A connection to a callee, with the calls under way on it."""

    def __init__(self, transport: SocketTransport, peer: str, address: Address, generation: int) -> None:
        self.peer = peer
        self._transport, self._address, self._generation = transport, address, generation
        self.sock = address.dial_within_host() or socket.socket(address.family, socket.SOCK_STREAM)
        self.connection = FrameConnection(self.sock, transport.sender)
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, tuple[float, Frame]] = {}  # ticket -> when its time is up, what is sent
        self._ended = ""  # why, once it has

    def call(self, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        """Raises ConnectionError, and sends nothing, if it has ended. TypeError, ValueError: it cannot be sent."""
        frame = Frame(ticket, encoded)
        with self._lock:
            if self._ended:
                raise ConnectionError(self._ended)
            self._calls[ticket] = (time.monotonic() + timeout_s, frame)
        self.connection.send(frame)

    def sweep(self, now_s: float) -> None:
        """Ends the calls whose time is up, and reminds the connection."""
        with self._lock:
            late = [(ticket, frame) for ticket, (until_s, frame) in self._calls.items() if until_s <= now_s]
            for ticket, _ in late:
                del self._calls[ticket]
        for ticket, frame in late:
            self.connection.drop(frame)
            self._transport._settle(ticket, lambda _: Unknown(f"no answer from {self.peer} in time"))
        self.connection.remind()

    def end(self) -> None:
        self.connection.end()

    def run(self) -> None:
        """What its thread does: connects, and reads answers until the end."""
        connected = False
        reason = "the connection ended"
        try:
            if is_between_hosts(self.sock):
                self.sock.settimeout(CONNECT_S)
                self.sock.connect(self._address.place)
                tune(self.sock)
            self.sock.settimeout(None)
            self.sock.sendall(HELLO.pack(MAGIC, self._address.key, self._transport.build.digest, self._generation))
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
            reason = f"another build of torch_ecrec: {self._transport.build.difference_told(error.told)}"
            self._transport.complaints.add(f"a connection to {self.peer} is closed", reason)
        except ValueError as error:
            reason = first_line(error)
            self._transport.complaints.add(f"a connection to {self.peer} is closed", reason)
        except Exception as error:  # the seam: calls must not wait for a connection that nobody reads
            reason = first_line(error)
            self._transport._report(error)
        with self._lock:
            self._ended = f"{self.peer}: {reason}"
            calls, self._calls = self._calls, {}
        self.connection.end()
        self.connection.close()
        failure = (Unknown if connected else Failed)(self._ended)
        for ticket in calls:
            self._transport._settle(ticket, lambda _: failure)

    def _on_answer(self, ticket: int, encoded: Encoded) -> None:
        with self._lock:
            known = self._calls.pop(ticket, None)
        if known is not None:
            decode = self._transport.vocabulary.decode_answer
            self._transport._settle(ticket, lambda kind: Ok(decode(encoded, kind)))

    @property
    def ended(self) -> bool:
        return bool(self._ended)


class Address:
    """Where a member listens, and its key. As text: `HOST PORT KEY NAME`.

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
        """Returns the address that a text means. Raises ValueError: none."""
        host, port, key, name = text.split(" ")
        return Address(host, int(port), bytes.fromhex(key), name)

    def dial_within_host(self) -> socket.socket | None:
        """A connection to its Unix socket; None if it is not on this host, or one of the two shares no memory."""
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
    """See `Transport`."""

    def __init__(
        self,
        name: str,
        handle: Handler,
        on_error: Callable[[BaseException], None] | None = None,
        vocabulary: Vocabulary = WIRE,
    ) -> None:
        super().__init__(name, handle, on_error, vocabulary)
        self._threads: set[threading.Thread] = set()  # guarded by _gate
        self.sender = Sender(self._sweep, self._report)
        self._door: Door | None = None  # from the first generation on
        self._address = Address("", 0, b"", NO_NAME)
        self._addresses: dict[str, Address] = {}  # of the members
        self._channels: dict[str, Channel] = {}  # by callee; with the inbound ones guarded by _gate
        self._inbound: set[FrameConnection] = set()
        atexit.register(self.close)
        belongs_here(self)
        self._start(self.sender.run, "sender")  # last: it looks at all of this

    def _start(self, action: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                action()
            finally:
                with self._gate:
                    self._threads.discard(threading.current_thread())

        thread = Worker(run, name, self._report)
        with self._gate:  # who joins them must not find one that has not started
            thread.start()
            self._threads.add(thread)

    # to others --------------------------------------------------------------------------------------

    def _send(self, world: World, peer: str, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        with self._gate:
            if self._serving != world.generation:
                raise ConnectionError(f"generation {world.generation} ended")
            channel = self._channels.get(peer)
            if channel is None or channel.ended:
                try:
                    channel = Channel(self, peer, self._addresses[peer], world.generation)
                except OSError as error:  # no more descriptors
                    raise ConnectionError(f"no connection to {peer}: {error}") from error
                self._start(channel.run, f"to {peer}")
                self._channels[peer] = channel
        channel.call(ticket, encoded, timeout_s)

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
            there = [*(channel.connection for channel in self._channels.values()), *self._inbound]
        in_memory = sum(one.lending is not None for one in there)
        return Connections(
            memory=in_memory,
            tcp=len(there) - in_memory,
            bytes_packed=sum(one.bytes_packed for one in there),
            bytes_saved=sum(one.bytes_saved for one in there),
        )

    # from others ------------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, generation: int) -> None:
        """A member has connected, perhaps of a generation that is not any more."""
        if generation != self._serving:
            sock.close()
            return
        try:
            self._start(functools.partial(self._read, sock, generation), "from a caller")
        except RuntimeError as error:  # no more threads
            self.complaints.add("a caller's connection is closed", error)
            sock.close()

    def _read(self, sock: socket.socket, generation: int) -> None:
        """Serves one caller as long as its connection lasts."""
        connection = FrameConnection(sock, self.sender)
        try:
            with self._gate:
                if generation != self._serving:
                    return
                self._inbound.add(connection)
            connection.start()
            reader = FrameReader(sock, connection.lending)
            while (request := reader.read()) is not None:
                self._serve(generation, request[1], _way_back(connection, request[0]))
                del request  # its tensors may be free before the next comes
        except ConnectionError as error:  # it died, or has left the generation
            log.debug("%s: a caller is gone: %s", self.name, error)
        except (OSError, ValueError) as error:
            self.complaints.add("a caller's connection is closed", error)
        except Exception as error:  # the seam: it would vanish with this thread
            self._report(error)
        finally:
            connection.end()
            connection.close()
            with self._gate:
                self._inbound.discard(connection)

    # generations ------------------------------------------------------------------------------------

    def _claim(self, store: tuple[str, int]) -> str:
        if self._door is None:
            name = NO_NAME if shared.pool() is None else f"torch_ecrec-{secrets.token_hex(KEY_BYTES)}"
            listeners: list[socket.socket] = []
            try:
                host = own_host(store)
                listeners.append(socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG))
                if name != NO_NAME:
                    within_host = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                    listeners.append(within_host)
                    within_host.bind(f"\0{name}")
                    within_host.listen(BACKLOG)
            except OSError as error:
                for listener in listeners:
                    listener.close()
                raise ClusterUnavailable(f"cannot listen for other members: {error}") from error
            port = listeners[0].getsockname()[1]
            self._address = Address(host, port, secrets.token_bytes(KEY_BYTES), name)
            self._door = Door(
                listeners,
                self._address.key,
                self.build,
                self._admit,
                self._tries.visited,
                self.complaints,
                self._report,
            )
            self._start(self._door.run, "door")
        return str(self._address)

    def _open(self, world: World, shared: Store, said: Sequence[str], deadline_s: float) -> None:
        try:
            self._addresses = {name: Address.parse(text) for name, text in zip(world.members, said, strict=True)}
        except ValueError as error:
            raise ClusterUnavailable(f"generation {world.generation}: a member told no address: {error}") from error
        self._tries.follow({name: address.place for name, address in self._addresses.items()}, self._address.place[0])

    def _shut(self) -> None:
        with self._gate:
            channels, self._channels = list(self._channels.values()), {}
            inbound, self._inbound = list(self._inbound), set()
        for channel in channels:
            channel.end()
        for connection in inbound:
            connection.end()

    def on_forked(self) -> None:
        super().on_forked()
        atexit.unregister(self.close)
        self._door, self._channels, self._inbound, self._threads = None, {}, set(), set()

    def _end(self) -> None:
        self.sender.close()
        if self._door is not None:
            self._door.close()
        until_s = time.monotonic() + END_S
        with self._gate:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0))
        atexit.unregister(self.close)


def _way_back(connection: FrameConnection, ticket: int) -> Callable[[Encoded], None]:
    def send(encoded: Encoded) -> None:
        with contextlib.suppress(ConnectionError):  # the caller is gone: nobody waits for it
            connection.send(Frame(ticket, encoded))

    return send
