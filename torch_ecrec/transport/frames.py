"""Encodes messages as frames, the form in which they travel on a connection.

    frame   24 bytes (magic, bytes of the notes, of the table and of the message, ticket), notes, the table (dtype and
            shape of each tensor), the message without its tensors (`encoding.py`), then the tensors' bytes one behind
            the other, from the sender's tensors and into the receiver's, with no copy of ours between; and, unless the
            connection is within a host, a checksum of all of it (xxh3, 8 bytes)

Between hosts large tensors of bytes (deltas) and integers (ids) are packed where that saves enough (codec/packing.py):
their entry in the table says so, with how many bytes they are then.

A frame whose checksum is another is not handed on: its connection ends, with that reason, and what was asked on it is
asked again. TCP's own sum is of 16 bits, and does not see what happens in switches, cards and their drivers.

Within a host large tensors are left out: their reader finds them in the sender's memory, and notes go with the message
(lending.py). A frame without a message is there for its notes alone. A frame can be read whatever its message says:
`encoding.py` finds out whether it says anything, and what does not is refused without the connection's end.
"""

from __future__ import annotations

import itertools
import math
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from torch_ecrec.codec.packing import SLACK_BYTES, least_packed_bytes, pack, unpack
from torch_ecrec.protocol.encoding import Encoded
from torch_ecrec.runtime.shared import LEAST_BYTES, Segment
from torch_ecrec.runtime.tensors import as_array, as_tensor
from torch_ecrec.transport.calls import first_line
from torch_ecrec.transport.lending import FILES_MOST, Lending, Places, byte_view

MAGIC = b"ECR7"  # another one for every change to what is said here
OTHER_BUILD = b"ECR?"  # in its place: the message is the build of who listens, and nothing else comes (acceptor.py)
HEADER = struct.Struct("<4sIIIQ")  # magic, bytes of the notes, of the table and of the message, ticket
CHECKSUM_BYTES = 8
MESSAGE_MOST_BYTES = 64 << 20  # without tensors, and as much for notes and for the table
RANK_MOST = 32
BUFFER_BYTES = 1 << 16  # a fold, whose positions are too few to be lent, comes at one wake-up
JOINED_MOST_BYTES = 1 << 14  # of a frame that is sent as one piece: a copy costs less than the pieces
KEPT_BYTES = 1 << 20  # a buffer that a large message has made larger is let go of
SMALL_MOST_BYTES = (
    LEAST_BYTES  # of a tensor that comes: larger ones are fast to read where they begin with a cache line
)
AWAIT_LEAST_BYTES, AWAIT_MOST_BYTES = 1 << 17, 1 << 19  # of a message over TCP: see `FrameReader._fill_much`
PACKED_LEAST_BYTES = 1 << 15  # of a tensor: for fewer the calls cost what is saved
PACKED = 1 << 8  # with the code of a dtype
BUFFERS_MOST = 512  # in one system call; Linux takes 1024
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
_Entry = tuple[int, ...]  # of the table: a tensor's
_NUMBER_BYTES = 8  # of the table, which has nothing else
PACKED_DTYPES = frozenset({torch.uint8, torch.int64, torch.int32})  # floats have no leading zeros
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_NUMPY = [as_array(torch.empty(0, dtype=dtype, device="cpu")).dtype for dtype in DTYPES]
# as integers: members of an enum are slow to combine
_NO_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # Linux, where alone files are sent
_FILE = struct.Struct("i")  # a file descriptor, in a control message
_CONTROL_BYTES = socket.CMSG_SPACE(FILES_MOST * _FILE.size)


class TooLarge(ValueError):
    """The message is larger than any reader accepts."""


class Spoilt(ValueError):
    """The bytes that arrived are not those that were sent: their checksum differs."""


class OtherBuild(ValueError):
    """The listener runs another build, with other messages. `told`: what it says of its build, for `Build.heard`."""

    def __init__(self, told: bytes) -> None:
        super().__init__("another build of torch_ecrec listens there")
        self.told = told


def _memory(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor that is not empty."""
    return as_array(tensor).data.cast("B")


def _room(sizes: tuple[int, ...], code: int) -> tuple[Tensor, memoryview | None]:
    """Allocates a tensor, and returns it with its memory, if it has any.

    Small ones are NumPy's, which takes half of torch's time. Torch aligns memory to cache lines.
    """
    kind = _NUMPY[code]
    size = math.prod(sizes) * kind.itemsize
    if 0 < size <= SMALL_MOST_BYTES:
        array = np.empty(sizes, kind)
        return as_tensor(array), array.data.cast("B")
    tensor = torch.empty(sizes, dtype=DTYPES[code], device="cpu")  # also of no bytes: NumPy's would have no strides
    return tensor, _memory(tensor) if size else None


class Frame:
    """A message being sent, and how much of it is sent already.

    Args:
        ticket: the call that it makes or answers.
        message: as `Vocabulary.encode` gives it; None to send notes alone. Its tensors must not be changed until it is
            sent.

    Raises:
        TooLarge: more than `MESSAGE_MOST_BYTES` beside its tensors.
        TypeError: a tensor is of a dtype that does not travel.
    """

    def __init__(self, ticket: int, message: Encoded | None) -> None:
        self._ticket = ticket
        self._body, self._tensors = (b"", []) if message is None else message
        self._entries = [_entry(tensor) for tensor in self._tensors]
        size = max(len(self._body), sum(map(len, self._entries)) * _NUMBER_BYTES)
        if size > MESSAGE_MOST_BYTES:
            raise TooLarge(f"{size} bytes beside its tensors; a message may have {MESSAGE_MOST_BYTES}")
        self._parts: deque[memoryview] = deque()
        self._shows: list[Segment] = []  # their files go with the first byte
        self.begun = False
        self.bytes_packed = self.bytes_saved = 0  # of tensors that were packed, and by that

    def _begin(self, lending: Lending | None, between_hosts: bool = False) -> None:
        sent, entries, notes = self._tensors, self._entries, b""
        if between_hosts:
            sent, entries = self._pack()
        if lending is not None:
            sent, notes, self._shows = lending.lend(sent)
        numbers = list(itertools.chain.from_iterable(entries))
        table = struct.pack(f"<{len(numbers)}Q", *numbers)
        head = HEADER.pack(MAGIC, len(notes), len(table), len(self._body), self._ticket) + notes + table
        parts: list[bytes | memoryview] = [head, self._body]
        if len(head) + len(self._body) + sum([tensor.nbytes for tensor in sent]) <= JOINED_MOST_BYTES:
            parts = [b"".join([*parts, *[as_array(tensor).data for tensor in sent]])]
        else:
            parts += [_memory(tensor) for tensor in sent if tensor.numel()]
        if between_hosts:
            checksum = xxhash.xxh3_64()
            for part in parts:
                checksum.update(part)
            parts.append(checksum.digest())
        self._parts.extend([memoryview(part) for part in parts if part])
        self._tensors, self._body = [], b""  # what is lent, the notes keep
        self.begun = True

    def _pack(self) -> tuple[list[Tensor], list[_Entry]]:
        """Returns what is sent of each tensor, packed where that is smaller, and its entry in the table."""
        sent, entries = list(self._tensors), list(self._entries)
        for which, tensor in enumerate(self._tensors):
            smaller = _packed(tensor)
            if smaller is not None:
                code, *sizes = entries[which]
                sent[which], entries[which] = as_tensor(smaller), (code | PACKED, *sizes, len(smaller))
                self.bytes_packed += tensor.nbytes
                self.bytes_saved += tensor.nbytes - len(smaller)
        return sent, entries

    def send_to(self, sock: socket.socket, lending: Lending | None, between_hosts: bool) -> bool:
        """Sends as much as possible without blocking; returns whether all is sent. Raises OSError."""
        if not self.begun:
            self._begin(lending, between_hosts)
        while self._parts:
            control = []
            if self._shows:
                files = b"".join(_FILE.pack(segment.fd) for segment in self._shows)
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            try:
                sent = sock.sendmsg(_at_once(self._parts), control, _NO_WAIT)
            except BlockingIOError:
                return False
            self._shows = []
            _advance(self._parts, sent)
        return True


class FrameReader:
    """Reads frames from a connection, one after the other.

    The beginning of a frame is read at once, perhaps with bytes of its tensors: after every system call the thread may
    wait for the interpreter's lock. Bytes in the buffer enter the checksum before they are overwritten.
    """

    def __init__(self, sock: socket.socket, lending: Lending | None = None) -> None:
        self._sock, self._lending = sock, lending
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0  # what of the buffer has come and is not used
        self._summed = is_between_hosts(sock)
        self._checksum = xxhash.xxh3_64()  # of the frame so far, but for what is used of the buffer from here on
        self._unsummed = 0
        self._packed: list[tuple[NDArray[np.uint8], int, Tensor]] = []  # what came, how much of it, and what is to be

    def read(self) -> tuple[int, Encoded] | None:
        """Waits for the next frame; returns its ticket and message. None if the connection has ended before it.

        Raises:
            OSError: it ended within one.
            OtherBuild: the listener runs another build.
            Spoilt: its checksum is another.
            ValueError: what arrives is not a frame.
        """
        while self._have(HEADER.size):
            self._checksum.reset()
            self._unsummed = self._begin
            magic, of_notes, of_table, of_body, ticket = HEADER.unpack(self._take(HEADER.size))
            too_large = max(of_notes, of_table, of_body) > MESSAGE_MOST_BYTES
            if magic not in (MAGIC, OTHER_BUILD) or too_large or of_table % _NUMBER_BYTES:
                raise ValueError("not a frame")
            if not self._have(of_notes + of_table + of_body):
                raise ConnectionError("the connection ended")
            if magic == OTHER_BUILD:
                raise OtherBuild(bytes(self._take(of_body)))
            places: Places = {}
            if of_notes:
                if self._lending is None:
                    raise ValueError("notes, but nothing is lent on this connection")
                places = self._lending.take_notes(bytes(self._take(of_notes)))
            table = struct.unpack(f"<{of_table // _NUMBER_BYTES}Q", self._take(of_table)) if of_table else ()
            body = bytes(self._take(of_body))
            tensors = self._tensors(table, places) if table else []
            if self._summed:
                self._compare()
            self._unpack()
            if of_body:
                return ticket, (body, tensors)
        return None

    def _compare(self) -> None:
        self._sum()
        if not self._have(CHECKSUM_BYTES):
            raise ConnectionError("the connection ended")
        if self._take(CHECKSUM_BYTES) != self._checksum.digest():
            raise Spoilt("a message was spoilt on its way: its checksum is another")

    def _sum(self) -> None:
        """Adds what was consumed of the buffer since the last call to the checksum."""
        if self._summed and self._unsummed < self._begin:
            self._checksum.update(self._buffer[self._unsummed : self._begin])
        self._unsummed = self._begin

    def _unpack(self) -> None:
        packed, self._packed = self._packed, []
        for data, size, tensor in packed:
            try:
                unpack(data, size, byte_view(tensor))
            except ValueError as error:
                raise ValueError(f"not a tensor: {error}") from error

    def _tensors(self, table: tuple[int, ...], places: Places) -> list[Tensor]:
        """Returns the tensors in order. Those that came packed get their values later."""
        tensors: list[Tensor] = []
        memories: list[memoryview] = []  # for what is sent
        borrowed: dict[int, NDArray[np.uint8]] = {}
        begin = 0
        try:
            while begin < len(table):
                code, rank = table[begin], table[begin + 1]
                begin += 2 + rank
                sizes = table[begin - rank : begin]
                is_packed, code = code & PACKED, code & ~PACKED
                begin += bool(is_packed)
                if code >= len(DTYPES) or len(sizes) != rank or rank > RANK_MOST:
                    raise ValueError("not a tensor")
                place = places.get(len(tensors)) if places else None
                if is_packed:
                    tensor = torch.empty(sizes, dtype=DTYPES[code], device="cpu")
                    memories.append(self._place_packed(table[begin - 1], tensor))
                elif place is None:
                    tensor, memory = _room(sizes, code)
                    if memory is not None:
                        memories.append(memory)
                else:
                    tensor = self._within(*place, sizes, _NUMPY[code], borrowed)
                tensors.append(tensor)
            if memories:
                self._fill(memories)
        except (IndexError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
            raise ValueError(f"not a tensor: {first_line(error)}") from error
        return tensors

    def _place_packed(self, size: int, tensor: Tensor) -> memoryview:
        if not self._summed or not least_packed_bytes(tensor.nbytes) <= size < tensor.nbytes:
            raise ValueError("not a packed tensor")
        data = np.empty(size + SLACK_BYTES, np.uint8)
        self._packed.append((data, size, tensor))
        return memoryview(data[:size])  # type: ignore[arg-type]

    def _within(
        self,
        segment: int,
        offset: int,
        sizes: tuple[int, ...],
        kind: np.dtype[Any],
        borrowed: dict[int, NDArray[np.uint8]],
    ) -> Tensor:
        assert self._lending is not None, "only notes name places"
        if segment not in borrowed:
            borrowed[segment] = self._lending.borrow(segment)
        whole = borrowed[segment]
        if not 0 <= offset <= len(whole) - math.prod(sizes) * kind.itemsize:
            raise ValueError("beyond the end of a segment")
        return as_tensor(np.ndarray(sizes, kind, whole, offset))

    def _have(self, size: int) -> bool:
        """Waits for `size` bytes in the buffer. Returns False if the connection ended before the first of them."""
        while self._end - self._begin < size:
            self._sum()
            if self._begin == self._end:
                self._begin = self._end = self._unsummed = 0
                if len(self._buffer) > KEPT_BYTES:
                    self._buffer = memoryview(bytearray(BUFFER_BYTES))
            if self._begin + size > len(self._buffer) and (self._begin or self._end == len(self._buffer)):
                self._make_room(size)
            got = self._receive([self._buffer[self._end :]])
            if got == 0:
                if self._begin == self._end:
                    return False
                raise ConnectionError("the connection ended")
            self._end += got
        return True

    def _make_room(self, size: int) -> None:
        """Moves what has come to the buffer's beginning.

        A full buffer grows as bytes come, not at once to the size that a header claims.
        """
        rest = bytes(self._buffer[self._begin : self._end])
        if len(rest) == len(self._buffer):
            self._buffer = memoryview(bytearray(min(size, 2 * len(rest))))
        self._buffer[: len(rest)] = rest
        self._begin, self._end, self._unsummed = 0, len(rest), 0

    def _take(self, size: int) -> memoryview:
        """Consumes `size` bytes of the buffer. They are valid until the next wait."""
        taken = self._buffer[self._begin : self._begin + size]
        self._begin += size
        return taken

    def _fill(self, memories: list[memoryview]) -> None:
        """Fills these memories from the buffer, then from the socket."""
        whole = 0  # of these memories: all that is theirs has come already
        for memory in memories:
            if len(memory) > self._end - self._begin:
                break
            memory[:] = self._take(len(memory))
            whole += 1
        if whole == len(memories):
            return
        rest = deque(memories[whole:])
        if self._begin < self._end:
            taken = self._take(self._end - self._begin)
            rest[0][: len(taken)] = taken
            _advance(rest, len(taken))
        from_socket = list(rest)
        if self._summed:
            self._fill_much(rest)
        while rest:
            got = self._receive(_at_once(rest), _WAIT_ALL)
            if got == 0:
                raise ConnectionError("the connection ended")
            _advance(rest, got)
        if self._summed:
            self._sum()
            for memory in from_socket:
                self._checksum.update(memory)

    def _fill_much(self, rest: deque[memoryview]) -> None:
        """Over TCP, wakes this thread once for much data: each packet, of 64 KiB at most, would wake it otherwise.

        `recvmsg` itself must not wait here: bytes that it has taken no longer count towards the number at which the
        thread is woken.
        """
        left = sum(map(len, rest))
        if left < AWAIT_LEAST_BYTES:
            return
        arrived = select.poll()
        arrived.register(self._sock, select.POLLIN)
        while left:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(left, AWAIT_MOST_BYTES))
            arrived.poll()
            try:
                got = self._receive(_at_once(rest), _NO_WAIT)
            except BlockingIOError:  # the kernel may wake for nothing
                continue
            if got == 0:
                raise ConnectionError("the connection ended")
            _advance(rest, got)
            left -= got
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _receive(self, memories: Sequence[memoryview], flags: int = 0) -> int:
        """Receives at least one byte, or none at the end. Keeps the files that come with them."""
        if self._lending is None:
            return self._sock.recvmsg_into(memories, 0, flags)[0]
        got, control, _, _ = self._sock.recvmsg_into(memories, _CONTROL_BYTES, flags | _CLOSE_ON_EXEC)
        for level, kind, data in control:  # one, whatever was sent
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % _FILE.size
                self._lending.take_files(fd for (fd,) in _FILE.iter_unpack(data[:whole]))
        return got


def is_between_hosts(sock: socket.socket) -> bool:
    """Returns whether frames on a connection have checksums and packed tensors: not within a host."""
    return sock.family != socket.AF_UNIX


def _entry(tensor: Tensor) -> _Entry:
    """Parses the table entry of a tensor that is not packed: code, rank and sizes. Raises TypeError."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"a tensor of {tensor.dtype}")
    shape = tensor.shape
    return code, len(shape), *shape


def _packed(tensor: Tensor) -> NDArray[np.uint8] | None:
    """Returns the packed form of a tensor; None if it is sent as it is."""
    if tensor.nbytes < PACKED_LEAST_BYTES or tensor.dtype not in PACKED_DTYPES:
        return None
    try:
        return pack(byte_view(tensor))
    except MemoryError:  # to send it as it is takes none
        return None


def _at_once(memories: deque[memoryview]) -> Sequence[memoryview]:
    """Returns the first of these memories, as many as one system call takes."""
    return memories if len(memories) <= BUFFERS_MOST else [memories[i] for i in range(BUFFERS_MOST)]


def _advance(memories: deque[memoryview], size: int) -> None:
    """Removes the first `size` bytes from these memories."""
    while size and size >= len(memories[0]):
        size -= len(memories.popleft())
    if size:
        memories[0] = memories[0][size:]
