"""The data plane over TCP connections of its own: for each pair of members that talk, one from caller to callee.

    caller                                   callee
    hello: magic, the callee's key, generation
    frame: ticket, request          ------>  a reading thread runs `handle`
    a reading thread runs `done`    <------  frame: ticket, answer       (in any order)

    frame   16 bytes (magic, bytes of the message, ticket), the message pickled without its tensors, then the tensors'
            bytes one behind the other, from the sender's tensors and into the receiver's, with no copy of ours between

A connection is made at the first call to a member of a generation, and ends with the generation. Whoever sends writes
to the socket itself as far as that goes without waiting; one thread, the sender's, writes what is left.

No thread outlives the interpreter: one that is inside torch when it ends aborts the process.

Each process listens at the address from which it reaches the coordinator (loopback, if that is there). Its *key*, drawn
at random and told through the store, is asked of who connects: an address may belong to somebody else meanwhile. It
keeps out mistakes; it is no protection against who reads the network. Of what arrives only plain values and tensors are
built: no class, no function.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import io
import logging
import pickle
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.transport.control import tune
from torch_ecrec.transport.encoding import Encoded
from torch_ecrec.transport.generations import Handler, Transport, World, answered, first_line
from torch_ecrec.transport.wire import Failed, Unknown

log = logging.getLogger(__name__)

MAGIC = b"ECR1"
KEY_BYTES = 16
HELLO = struct.Struct(f"<4s{KEY_BYTES}sQ")  # magic, key, generation
HEADER = struct.Struct("<4sIQ")  # magic, bytes of the message, ticket
MESSAGE_MOST_BYTES = 64 << 20  # without tensors
BUFFER_BYTES = 1 << 14
BUFFERS_MOST = 512  # in one system call; Linux takes 1024
CONNECT_S = 5.0
HELLO_S = 10.0
END_S = 5.0  # for all threads, each of which may be in a `handle` or a `done`
SWEEP_S = 0.1  # how often calls are looked at whose time may be up
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.float64,
    torch.int16,
    torch.int8,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

# frames ---------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and keeps them."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[int, tuple[int, ...]] | None:
        if type(value) is not Tensor:
            return None
        self.tensors.append(value)
        return _CODES[value.dtype], tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Puts tensors without values in their places, and keeps them."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data)
        self.tensors: list[Tensor] = []

    def persistent_load(self, pid: tuple[int, tuple[int, ...]]) -> Tensor:
        code, shape = pid
        tensor = torch.empty(shape, dtype=DTYPES[code])
        self.tensors.append(tensor)
        return tensor

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"plain values only, got {module}.{name}")


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class Frame:
    """A message on its way out, and how far it has come.

    Args:
        ticket: the call that it makes or answers.
        message: as `encode` gives it. Its tensors must not be changed until it is sent.
    """

    def __init__(self, ticket: int, message: Encoded) -> None:
        out = io.BytesIO()
        out.write(bytes(HEADER.size))
        pickler = _Pickler(out)
        pickler.dump(message)
        head = out.getbuffer()
        HEADER.pack_into(head, 0, MAGIC, len(head) - HEADER.size, ticket)
        self.parts = deque([head])
        self.parts.extend(_memory(tensor) for tensor in pickler.tensors if tensor.numel())
        self.begun = False

    def send_to(self, sock: socket.socket) -> bool:
        """Sends as much as goes without waiting. True: all of it. Raises OSError."""
        while self.parts:
            try:
                sent = sock.sendmsg(_at_once(self.parts), (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            self.begun = True
            _advance(self.parts, sent)
        return True


class FrameReader:
    """Reads frames, one after the other, from a connection.

    What comes first of a frame is read together, with some bytes of its tensors perhaps: every system call may have to
    wait for the interpreter's lock.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # what of the buffer has come and is not used

    def read(self) -> tuple[int, Encoded] | None:
        """The next ticket and message; waits for it. None when the connection has ended between two frames.

        Raises:
            OSError: it ended within one.
            ValueError: what arrives is not a frame.
        """
        if not self._have(HEADER.size):
            return None
        magic, size, ticket = HEADER.unpack(self._take(HEADER.size))
        if magic != MAGIC or size > MESSAGE_MOST_BYTES:
            raise ValueError("not a frame")
        if not self._have(size):
            raise ConnectionError("the connection ended")
        unpickler = _Unpickler(io.BytesIO(self._take(size)))
        try:
            message: Encoded = unpickler.load()
        except (pickle.UnpicklingError, EOFError, IndexError, TypeError, RuntimeError) as error:
            raise ValueError(f"not a message: {first_line(error)}") from error
        self._fill([_memory(tensor) for tensor in unpickler.tensors if tensor.numel()])
        return ticket, message

    def _have(self, size: int) -> bool:
        """Waits until so many bytes are in the buffer. False if the connection ended before the first of them."""
        if self._begin + size > len(self._buffer):
            rest = bytes(self._buffer[self._begin : self._end])
            if size > len(self._buffer):
                self._buffer = memoryview(bytearray(size))
            self._buffer[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        while self._end - self._begin < size:
            got = self._sock.recv_into(self._buffer[self._end :])
            if got == 0:
                if self._begin == self._end:
                    return False
                raise ConnectionError("the connection ended")
            self._end += got
        return True

    def _take(self, size: int) -> memoryview:
        taken = self._buffer[self._begin : self._begin + size]
        self._begin += size
        if self._begin == self._end:
            self._begin = self._end = 0
        return taken

    def _fill(self, memories: list[memoryview]) -> None:
        """Fills all of them: from the buffer, then from the socket."""
        rest = deque(memories)
        while rest and self._begin < self._end:
            taken = self._take(min(len(rest[0]), self._end - self._begin))
            rest[0][: len(taken)] = taken
            _advance(rest, len(taken))
        while rest:
            got = self._sock.recvmsg_into(_at_once(rest), 0, socket.MSG_WAITALL)[0]
            if got == 0:
                raise ConnectionError("the connection ended")
            _advance(rest, got)


def _at_once(memories: deque[memoryview]) -> Sequence[memoryview]:
    """As many of the first ones as a system call takes."""
    return memories if len(memories) <= BUFFERS_MOST else [memories[i] for i in range(BUFFERS_MOST)]


def _advance(memories: deque[memoryview], size: int) -> None:
    """Takes the first bytes away."""
    while size and size >= len(memories[0]):
        size -= len(memories.popleft())
    if size:
        memories[0] = memories[0][size:]


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

    def watch(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_WRITE, connection)

    def unwatch(self, connection: Connection) -> None:
        self._selector.unregister(connection.sock)

    def close(self) -> None:
        """Ends `run`. May be called again."""
        if not self._ends:
            self._ends = True
            self._wake.send(b"x")

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


class Connection:
    """The way out of one connection. A thread of its owner's reads from `sock`, and closes it at its end.

    Frames that come before `start` wait for it.
    """

    def __init__(self, sock: socket.socket, sender: Sender) -> None:
        self.sock = sock
        self._sender = sender
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[Frame] = deque()
        self._started = self._watched = self._ended = False

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
        """The socket takes more."""
        with self._lock:
            if self._watched and not self._ended:
                self._push()

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
        try:
            while self._waiting and self._waiting[0].send_to(self.sock):
                self._waiting.popleft()
        except OSError:  # the rest of a frame is missing; its reader tells why
            self._end()
            return
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
        self._sock = socket.socket(address.family, socket.SOCK_STREAM)
        self._connection = Connection(self._sock, transport.sender)
        self._lock = threading.Lock()  # guards all below
        self._calls: dict[int, tuple[float, Frame]] = {}  # ticket -> when its time is up, what is sent
        self._ended = ""  # why, once it has

    def call(self, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        """Raises ConnectionError, and sends nothing, if it has ended."""
        frame = Frame(ticket, encoded)
        with self._lock:
            if self._ended:
                raise ConnectionError(self._ended)
            self._calls[ticket] = (time.monotonic() + timeout_s, frame)
        self._connection.send(frame)

    def sweep(self, now_s: float) -> None:
        """Ends the calls whose time is up."""
        with self._lock:
            late = [(ticket, frame) for ticket, (until_s, frame) in self._calls.items() if until_s <= now_s]
            for ticket, _ in late:
                del self._calls[ticket]
        for ticket, frame in late:
            self._connection.drop(frame)
            self._transport._settle(ticket, lambda: Unknown(f"no answer from {self.peer} in time"))

    def end(self) -> None:
        self._connection.end()

    def run(self) -> None:
        """What its thread does: connects, and reads answers until the end."""
        connected = False
        reason = "the connection ended"
        try:
            self._sock.settimeout(CONNECT_S)
            self._sock.connect(self._address.place)
            self._sock.settimeout(None)
            tune(self._sock)
            self._sock.sendall(HELLO.pack(MAGIC, self._address.key, self._generation))
            connected = True
            self._connection.start()
            reader = FrameReader(self._sock)
            while (answer := reader.read()) is not None:
                self._on_answer(*answer)
        except (OSError, ValueError) as error:
            reason = first_line(error)
        with self._lock:
            self._ended = f"{self.peer}: {reason}"
            calls, self._calls = self._calls, {}
        self._connection.end()
        self._sock.close()
        failure = (Unknown if connected else Failed)(self._ended)
        for ticket in calls:
            self._transport._settle(ticket, lambda: failure)

    def _on_answer(self, ticket: int, encoded: Encoded) -> None:
        with self._lock:
            known = self._calls.pop(ticket, None)
        if known is not None:
            self._transport._settle(ticket, lambda: answered(encoded))

    @property
    def ended(self) -> bool:
        return bool(self._ended)


class Address:
    """Where a member listens, and its key. As text: `HOST PORT KEY`."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.place, self.key = (host, port), key
        self.family = _family(host)

    def __str__(self) -> str:
        return f"{self.place[0]} {self.place[1]} {self.key.hex()}"

    @staticmethod
    def parse(text: str) -> Address:
        """Raises ValueError."""
        host, port, key = text.split(" ")
        return Address(host, int(port), bytes.fromhex(key))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _own_host(store: tuple[str, int]) -> str:
    """The address from which this host reaches the store. Nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        host: str = probe.getsockname()[0]
    return host


class SocketTransport(Transport):
    """See `Transport`."""

    def __init__(self, name: str, handle: Handler, on_error: Callable[[BaseException], None] | None = None) -> None:
        super().__init__(name, handle, on_error)
        self._threads: set[threading.Thread] = set()  # guarded by _gate
        self.sender = Sender(self._sweep, self._report)
        self._listener: socket.socket | None = None
        self._address = Address("", 0, b"")
        self._addresses: dict[str, Address] = {}  # of the members
        self._channels: dict[str, Channel] = {}  # by callee; with the inbound ones guarded by _gate
        self._inbound: set[Connection] = set()
        atexit.register(self.close)
        self._start(self.sender.run, "sender")  # last: it looks at all of this

    def _start(self, action: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                action()
            finally:
                with self._gate:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._gate:
            self._threads.add(thread)
        thread.start()

    # to others --------------------------------------------------------------------------------------

    def _send(self, world: World, peer: str, ticket: int, encoded: Encoded, timeout_s: float) -> None:
        with self._gate:
            if self._serving != world.generation:
                raise ConnectionError(f"generation {world.generation} ended")
            channel = self._channels.get(peer)
            if channel is None or channel.ended:
                channel = self._channels[peer] = Channel(self, peer, self._addresses[peer], world.generation)
                self._start(channel.run, f"to {peer}")
        channel.call(ticket, encoded, timeout_s)

    def _sweep(self) -> None:
        with self._gate:
            channels = list(self._channels.values())
        now_s = time.monotonic()
        for channel in channels:
            channel.sweep(now_s)

    # from others ------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed
            self._start(functools.partial(self._read, sock), "from a caller")

    def _read(self, sock: socket.socket) -> None:
        """Serves one caller as long as its connection lasts."""
        connection = Connection(sock, self.sender)
        try:
            generation = self._greet(sock)
            with self._gate:
                if generation != self._serving:
                    return
                self._inbound.add(connection)
            connection.start()
            reader = FrameReader(sock)
            while (request := reader.read()) is not None:
                self._serve(generation, request[1], _way_back(connection, request[0]))
        except ConnectionError as error:  # it died, or has left the generation
            log.debug("%s: a caller is gone: %s", self.name, error)
        except (OSError, ValueError) as error:
            log.warning("%s: a caller's connection is closed: %s", self.name, error)
        finally:
            connection.end()
            sock.close()
            with self._gate:
                self._inbound.discard(connection)

    def _greet(self, sock: socket.socket) -> int:
        """Reads the hello of who has connected: the generation. Raises OSError or ValueError."""
        tune(sock)
        sock.settimeout(HELLO_S)
        hello = sock.recv(HELLO.size, socket.MSG_WAITALL)
        if len(hello) < HELLO.size:
            raise ConnectionError("the connection ended")
        magic, key, generation = HELLO.unpack(hello)
        if magic != MAGIC or not hmac.compare_digest(key, self._address.key):
            raise ValueError("not a member of this cluster")
        sock.settimeout(None)
        return int(generation)

    # generations ------------------------------------------------------------------------------------

    def _claim(self, store: tuple[str, int]) -> str:
        if self._listener is None:
            try:
                host = _own_host(store)
                self._listener = socket.create_server((host, 0), family=_family(host), backlog=128)
            except OSError as error:
                raise ClusterUnavailable(f"cannot listen for other members: {error}") from error
            self._address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(KEY_BYTES))
            self._start(functools.partial(self._accept, self._listener), "accept")
        return str(self._address)

    def _open(self, world: World, shared: Store, said: Sequence[str], deadline_s: float) -> None:
        try:
            self._addresses = {name: Address.parse(text) for name, text in zip(world.members, said, strict=True)}
        except ValueError as error:
            raise ClusterUnavailable(f"generation {world.generation}: a member told no address: {error}") from error

    def _shut(self) -> None:
        with self._gate:
            channels, self._channels = list(self._channels.values()), {}
            inbound, self._inbound = list(self._inbound), set()
        for channel in channels:
            channel.end()
        for connection in inbound:
            connection.end()

    def _end(self) -> None:
        self.sender.close()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        until_s = time.monotonic() + END_S
        with self._gate:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(until_s - time.monotonic(), 0))
        atexit.unregister(self.close)


def _way_back(connection: Connection, ticket: int) -> Callable[[Encoded], None]:
    def send(encoded: Encoded) -> None:
        with contextlib.suppress(ConnectionError):  # the caller is gone: nobody waits for it
            connection.send(Frame(ticket, encoded))

    return send
