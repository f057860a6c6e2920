"""The socket transport alone, two of them in this process: frames, strangers, peers that do not read, lent memory."""

import collections
import contextlib
import errno
import itertools
import logging
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, free_bytes, wait_until
from junk import Says, plain

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.build import Build
from torch_ecrec.protocol.encoding import WIRE, Vocabulary
from torch_ecrec.runtime import shared
from torch_ecrec.transport import door, frames, sockets
from torch_ecrec.transport.door import HELLO, STRANGERS_MOST
from torch_ecrec.transport.frames import (
    BUFFER_BYTES,
    BUFFERS_MOST,
    DTYPES,
    HEADER,
    MAGIC,
    Frame,
    FrameReader,
    OtherBuild,
)
from torch_ecrec.transport.lending import FILES_MOST, Lending
from torch_ecrec.transport.sockets import NO_NAME, Address, SocketTransport

WAIT_S = 300.0  # for anything at all: only a hang reaches it
PROMPTLY_S = 20.0  # by itself, on whatever machine
SHARED_BYTES = 256 << 20


class _Any:
    """Equal to everything, and contains it."""

    def __eq__(self, other: object) -> bool:
        return True

    def __contains__(self, item: object) -> bool:
        return True

    def __iter__(self) -> Iterator[torch.dtype]:
        return iter(())


AnyTensor: Any = wire.TensorOf("AnyTensor", _Any(), _Any())  # type: ignore[arg-type]


class Parcels(wire.Answer):
    parts: list[AnyTensor]


class Parcel(wire.Request[Parcels | wire.VersionsAre]):
    """A message of these tests: it carries tensors of any kind."""

    parts: list[AnyTensor]


PARCELS = Vocabulary([*WIRE.requests.values(), Parcel])


class Pair:
    """Transports a and b in one generation. b handles with `self.handle`, which a test may replace."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.generations = itertools.count(1)
        self.handle: Callable[[Any, Any], None] = lambda request, reply: reply(wire.VersionsAre({0: 1}))
        self.a = SocketTransport("a", lambda request, reply: reply(wire.VersionsAre({0: 0})), vocabulary=PARCELS)
        self.b = SocketTransport("b", lambda request, reply: self.handle(request, reply), vocabulary=PARCELS)
        self.generation = 0
        self.form()

    def form(self) -> None:
        self.generation = next(self.generations)
        with ThreadPoolExecutor(2) as threads:
            joins = [
                threads.submit(one.join, self.generation, ["a", "b"], ("127.0.0.1", self.store.port), WAIT_S)
                for one in (self.a, self.b)
            ]
            for join in joins:
                join.result(WAIT_S)

    def start(self, request: wire.Request, timeout_s: float = WAIT_S) -> Callable[[], wire.Outcome]:
        """Has a call b; what is returned waits for the outcome."""
        ended = threading.Event()
        outcomes: list[wire.Outcome] = []

        def done(outcome: wire.Outcome) -> None:
            outcomes.append(outcome)
            ended.set()

        self.a.call("b", request, timeout_s, done)

        def outcome() -> wire.Outcome:
            assert ended.wait(timeout_s + WAIT_S), "`done` was not called"
            (found,) = outcomes
            return found

        return outcome

    def call(self, request: wire.Request, timeout_s: float = WAIT_S) -> wire.Outcome:
        return self.start(request, timeout_s)()

    def connect(
        self, key: bytes | None = None, generation: int | None = None, build: bytes | None = None
    ) -> socket.socket:
        """A connection of a stranger to b."""
        address = self.b._address
        sock = socket.create_connection(address.place, WAIT_S)
        sock.sendall(HELLO.pack(MAGIC, key or address.key, build or self.b.build.digest, generation or self.generation))
        return sock


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Over TCP, or over a Unix socket and with shared memory: tests with `both` have it both ways."""
    shared.enable(SHARED_BYTES if getattr(request, "param", "tcp") == "shared" else 0)
    pair = Pair()
    try:
        yield pair
    finally:
        pair.a.close()
        pair.b.close()
        shared.enable(0)


both = pytest.mark.parametrize("pair", ["tcp", "shared"], indirect=True)
lends = pytest.mark.parametrize("pair", ["shared"], indirect=True)


def parcel(parts: list[torch.Tensor], slot: int = 0) -> Parcel:
    """A request that carries tensors."""
    return Parcel(slot, 0, parts)


def tensors(many: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(many + size)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for _ in range(many)]


@both
@pytest.mark.parametrize(
    ("many", "size"), [(1, 40_000_000), (3, 3_000_000), (2 * BUFFERS_MOST + 7, 1000), (BUFFERS_MOST - 1, 1), (5, 0)]
)
def test_tensors_arrive_as_they_are(pair: Pair, many: int, size: int) -> None:
    """More than a socket takes at once, more than one system call takes, and nothing at all."""
    sent = tensors(many, size)
    got: list[torch.Tensor] = []

    def handle(request: Parcel, reply: Any) -> None:
        got.extend(request.parts)
        reply(Parcels(request.parts))

    pair.handle = handle
    request = parcel(sent)
    outcome = pair.call(request)
    assert isinstance(outcome, wire.Ok), outcome
    assert all(map(torch.equal, got, sent)) and len(got) == many
    assert all(map(torch.equal, outcome.answer.parts, sent)) and len(outcome.answer.parts) == many


@both
def test_types_and_shapes(pair: Pair) -> None:
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    shapes = [(), (0,), (3,), (2, 0, 4), (5, 3), (300, 90)]
    for dtype, shape in itertools.product(DTYPES, map(torch.Size, shapes)):
        sent = (torch.arange(shape.numel()).reshape(shape) % 2).to(dtype)
        outcome = pair.call(parcel([sent]))
        assert isinstance(outcome, wire.Ok), outcome
        (got,) = outcome.answer.parts
        assert got.dtype == dtype and got.shape == shape and torch.equal(got, sent)


@both
def test_calls_of_many_threads_keep_apart(pair: Pair) -> None:
    """Large and small ones on one connection, both ways."""
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    parts = [tensors(1 + i % 3, (10, 1000, 3_000_000)[i % 3]) for i in range(24)]

    def one(i: int) -> bool:
        outcome = pair.call(parcel(parts[i]))
        assert isinstance(outcome, wire.Ok), outcome
        return all(map(torch.equal, outcome.answer.parts, parts[i]))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(24)))
    assert not pair.a._calls


def test_one_listens_where_the_coordinator_is_reached(pair: Pair) -> None:
    assert pair.a._address.place[0] == "127.0.0.1"
    assert Address.parse(str(pair.a._address)).place == pair.a._address.place
    with pytest.raises(ClusterUnavailable, match="cannot listen"):
        SocketTransport("c", lambda request, reply: None).join(1, ["c"], ("nowhere.invalid", 1), 1)


def read_end(sock: socket.socket) -> bytes:
    """What a stranger gets before its connection is closed."""
    got = b""
    try:
        while part := sock.recv(1000):
            got += part
    except ConnectionResetError:
        pass
    return got


@pytest.mark.parametrize("piece", [1, 7, 1000, 100_000_000])
def test_frames_in_pieces_and_several_at_once(piece: int) -> None:
    """However the bytes are cut on their way. Messages that are larger than the buffer, too."""
    sizes = [[], [3], [0, 5], [BUFFER_BYTES + 1, 1], [2, BUFFER_BYTES - 40, 0, 9], [1] * 700] * 2
    messages = [(b"rows", [*tensors(1, 4) * i, *(torch.arange(n) for n in each)]) for i, each in enumerate(sizes)]
    messages.append((b"x" * 3 * BUFFER_BYTES, []))
    sent = b"".join(as_bytes(Frame(i, message)) for i, message in enumerate(messages))
    if piece == 1:
        sent = sent[:20_000]
    here, there = socket.socketpair()
    with here, there:

        def send() -> None:
            for i in range(0, len(sent), piece):
                here.sendall(sent[i : i + piece])
            here.shutdown(socket.SHUT_WR)

        threading.Thread(target=send).start()
        reader = FrameReader(there)
        for i, (body, values) in enumerate(messages):
            if piece == 1 and i == 3:
                with pytest.raises(ConnectionError):
                    reader.read()
                return
            frame = reader.read()
            assert frame is not None
            ticket, (got_body, got) = frame
            assert (ticket, got_body, len(got)) == (i, body, len(values)) and all(map(torch.equal, got, values))
        assert reader.read() is None


def as_bytes(frame: Frame) -> bytes:
    frame._begin(None)
    return b"".join(frame._parts)


def table(*numbers: int) -> bytes:
    """A frame with a table of tensors."""
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return HEADER.pack(MAGIC, 0, len(packed), 1, 7) + packed + b"x"


@pytest.mark.parametrize(
    ("sends", "says"),
    [
        (b"x" * 100, "not a frame"),
        (HEADER.pack(b"GET ", 0, 0, 10, 1), "not a frame"),
        (HEADER.pack(MAGIC, 0, 0, 1 << 30, 1), "not a frame"),
        (HEADER.pack(MAGIC, 1 << 30, 0, 0, 1), "not a frame"),
        (HEADER.pack(MAGIC, 0, 1 << 30, 0, 1), "not a frame"),
        (HEADER.pack(MAGIC, 0, 7, 0, 1), "not a frame"),
        (HEADER.pack(MAGIC, 12, 0, 0, 1) + bytes(12), "nothing is lent on this connection"),
        (table(99, 0), "not a tensor"),
        (table(0), "not a tensor"),
        (table(0, 2, 5), "not a tensor"),
        (table(0, 33, *range(33)), "not a tensor"),
        (table(0, 2, 1 << 40, 1 << 40), "not a tensor"),
        (table(0, 1, 1 << 63), "not a tensor"),
    ],
)
def test_what_is_no_frame_ends_its_connection_only(
    pair: Pair, sends: bytes, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pair.connect() as sock:
        sock.sendall(sends)
        assert read_end(sock) == b""
        wait_until(lambda: says in caplog.text, PROMPTLY_S, says)
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


@pytest.mark.parametrize("handled", [False, True], ids=["strangers", "a member"])
def test_who_has_not_got_the_key_or_the_generation_is_not_heard(pair: Pair, handled: bool) -> None:
    requests: list[Any] = []

    def handle(request: Any, reply: Any) -> None:
        requests.append(request)
        reply(wire.VersionsAre({0: 1}))

    pair.handle = handle
    request = as_bytes(Frame(7, plain(["Versions", 0, 0, 0])))
    hellos: list[dict[str, Any]] = [{}] if handled else [{"key": bytes(16)}, {"generation": pair.generation + 1}]
    for hello in hellos:
        with pair.connect(**hello) as sock:
            sock.sendall(request)
            if handled:
                assert sock.recv(HEADER.size)[:4] == MAGIC
            else:
                assert read_end(sock) == b""
    assert len(requests) == handled


@both
def test_a_connection_of_another_build_is_told_which_messages_differ(pair: Pair) -> None:
    handled: list[Any] = []
    pair.handle = lambda request, reply: handled.append(request)
    mine = pair.a.build
    pair.a.build = Build(mine.version, {**mine.messages, "Push": "another", "Pull": "a new one"})
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and not handled
    assert f"another build of torch_ecrec: the same version {mine.version}, but other messages: Pull, Push" in (
        outcome.reason
    )
    assert pair.a.complaints.counts["a connection to b is closed"] == 1
    wait_until(lambda: pair.b.complaints.counts["a stranger's connection is closed"] == 1, WAIT_S, "b has complained")
    pair.a.build = Build("9.9.9", mine.messages)
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and f"version {mine.version}, here 9.9.9" in outcome.reason
    pair.a.build, pair.handle = mine, lambda request, reply: reply(wire.VersionsAre({}))
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_a_stranger_is_not_told_which_build_is_here(pair: Pair) -> None:
    with pair.connect(key=bytes(16), build=bytes(16)) as sock:
        assert read_end(sock) == b""
    with pair.connect(build=bytes(16)) as sock, pytest.raises(OtherBuild) as told:
        FrameReader(sock).read()
    assert pair.a.build.difference_told(told.value.told) == ""
    assert pair.a.build.difference_told(b"{}") == "it does not say which"


def test_a_hello_that_does_not_come_holds_nothing_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HELLO_S", 0.2)
    with socket.create_connection(pair.b._address.place, WAIT_S) as sock:
        assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
        assert read_end(sock) == b""


def test_a_sender_that_looks_up_as_it_is_closed() -> None:
    """It may see that it ends, and close what wakes it, before it was woken."""
    errors: list[BaseException] = []
    sender = sockets.Sender(lambda: None, errors.append)
    thread = threading.Thread(target=sender.run)
    thread.start()
    wake = sender._wake

    class Late:
        close = wake.close

        def send(self, data: bytes) -> int:
            if sender._ends:
                thread.join(WAIT_S)
            return wake.send(data)

    sender._wake = Late()  # type: ignore[assignment]
    sender.close()
    thread.join(WAIT_S)
    sender.close()
    assert not thread.is_alive() and not errors


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """It takes connections, and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_peer_that_does_not_read(pair: Pair, deaf: socket.socket) -> None:
    """Calls end in time, nothing is kept for it, and what was sent in part is not gone on with."""
    real = pair.a._addresses["b"]
    pair.a._addresses["b"] = Address("127.0.0.1", deaf.getsockname()[1], real.key, NO_NAME)
    payload = torch.zeros(40_000_000, dtype=torch.uint8)
    started_s = time.monotonic()
    outcomes = [pair.start(parcel([payload]), 3.0) for _ in range(3)]
    assert time.monotonic() - started_s < 3.0, "`call` returns at once"
    assert {type(outcome()) for outcome in outcomes} == {wire.Unknown}
    assert time.monotonic() - started_s < 3.0 + PROMPTLY_S
    (channel,) = pair.a._channels.values()
    wait_until(lambda: channel.ended, PROMPTLY_S, "a frame was sent in part: its connection ends")
    assert not channel._connection._waiting

    pair.a._addresses["b"] = real
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok), "the next call makes a new connection"


def test_a_call_that_was_not_begun_is_not_sent_when_its_time_is_up(pair: Pair) -> None:
    """b reads again before the connection ends: the first call arrives, the one behind it does not."""
    go, got = threading.Event(), []

    def handle(request: Any, reply: Any) -> None:
        got.append(request.slot)
        go.wait(WAIT_S)
        reply(wire.VersionsAre({0: 1}))

    pair.handle = handle
    first = pair.start(wire.Versions(0, 0))
    wait_until(lambda: bool(got), PROMPTLY_S, "b is busy, and does not read")
    second = pair.start(parcel([torch.zeros(40_000_000, dtype=torch.uint8)], slot=1))
    third = pair.start(wire.Versions(2, 0), 0.3)
    assert isinstance(third(), wire.Unknown)
    go.set()
    assert isinstance(first(), wire.Ok) and isinstance(second(), wire.Ok)
    assert isinstance(pair.call(wire.Versions(3, 0)), wire.Ok)
    assert got == [0, 1, 3]


def test_a_socket_that_fails_in_the_middle_of_a_frame_takes_no_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came behind half a frame would be read as the rest of it."""
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    sends: list[int] = []

    class Failing(Frame):
        def send_to(self, sock: socket.socket, lending: Lending | None = None) -> bool:
            self._begin(lending)
            sends.append(sock.send(self._parts[0][:10]))
            raise OSError("no memory")

    monkeypatch.setattr(sockets, "Frame", Failing)
    failed = pair.start(wire.Versions(0, 0))
    assert isinstance(failed(), wire.Unknown) and sends == [10]
    monkeypatch.undo()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_nobody_there_is_a_failed_call(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pair.a._addresses["b"] = Address("127.0.0.1", port, bytes(16), NO_NAME)
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and "refused" in outcome.reason


def test_a_connection_that_comes_too_late_is_not_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation ends while it is made."""
    go, made = threading.Event(), []

    class Slow(socket.socket):
        def connect(self, place: Any) -> None:
            made.append(self)
            assert go.wait(WAIT_S)
            super().connect(place)

    monkeypatch.setattr(sockets.socket, "socket", Slow)
    waiting = pair.start(wire.Versions(0, 0))
    wait_until(lambda: bool(made), PROMPTLY_S, "it is being made")
    monkeypatch.undo()
    pair.form()
    assert isinstance(waiting(), wire.Unknown)
    go.set()
    wait_until(lambda: made[0].fileno() == -1, PROMPTLY_S, "it is closed")
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_a_generation_ends_the_connections_of_the_one_before(pair: Pair) -> None:
    kept: list[Any] = []
    pair.handle = lambda request, reply: kept.append(reply)
    waiting = pair.start(wire.Versions(0, 0))
    wait_until(lambda: bool(kept), PROMPTLY_S, "b has the request")
    (before,) = pair.b._inbound
    pair.form()
    outcome = waiting()
    assert isinstance(outcome, wire.Unknown) and "generation 1 ended" in outcome.reason
    kept[0](wire.VersionsAre({0: 1}))  # nobody hears it
    pair.handle = lambda request, reply: reply(wire.VersionsAre({0: 2}))
    assert pair.call(wire.Versions(0, 0)) == wire.Ok(wire.VersionsAre({0: 2}))
    wait_until(lambda: before.sock.fileno() == -1, PROMPTLY_S, "the connection before is closed")


def test_nothing_is_left_behind() -> None:
    before = {thread.name for thread in threading.enumerate()}
    pair = Pair()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    for _ in range(5):
        pair.form()
        assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    for one in (pair.a, pair.b):
        one.close()
        one.close()
    wait_until(lambda: {t.name for t in threading.enumerate()} <= before, PROMPTLY_S, "its threads end")


EXITS = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
from torch_ecrec.protocol import wire
from torch_ecrec.transport.sockets import SocketTransport

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
a = SocketTransport("a", lambda request, reply: None)
b = SocketTransport("b", lambda request, reply: reply(wire.Rows([part[:, None].float() for part in request.positions])))
with ThreadPoolExecutor(2) as threads:
    list(threads.map(lambda one: one.join(1, ["a", "b"], ("127.0.0.1", store.port), 30), (a, b)))
answers = 0

def again(outcome=None):
    global answers
    answers += outcome is not None
    if outcome is None or isinstance(outcome, wire.Ok):
        a.call("b", wire.Lookup(0, 0, 1, [torch.arange(20_000) for _ in range(20)]), 10, again)

for _ in range(6):
    again()
while answers < 100:
    time.sleep(0.01)
"""


def test_a_process_ends_in_the_middle_of_calls() -> None:
    """Without `close`. A thread that is inside torch when the interpreter ends would abort it."""
    run = subprocess.run([sys.executable, "-c", EXITS], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert (run.returncode, run.stderr) == (0, "")


# lent memory ----------------------------------------------------------------------------------------


def the_pool() -> shared.Pool:
    pool = shared.pool()
    assert pool is not None
    return pool


def lent_tensor(rows: int, value: int) -> torch.Tensor:
    """Of the pool, large enough to be lent."""
    tensor = torch.from_numpy(shared.empty((rows, shared.LEAST_BYTES), np.uint8))
    return tensor.fill_(value)


def keep_all(pair: Pair) -> list[torch.Tensor]:
    """b keeps the tensors of all that it is asked, in the list that is returned."""
    kept: list[torch.Tensor] = []

    def handle(request: Parcel, reply: Any) -> None:
        kept.extend(request.parts)
        reply(wire.VersionsAre({0: 1}))

    pair.handle = handle
    return kept


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@lends
def test_what_is_lent_is_read_in_place(pair: Pair) -> None:
    """The bytes are those of the sender's memory, the socket carries none of them, and slices share a loan."""
    got = keep_all(pair)
    sent = lent_tensor(6, 1)
    pair.call(parcel([sent[:2], sent[2:], torch.arange(3)]))
    sent[:] = 9  # against the rules, to see that it is the same memory
    assert torch.equal(got[0], sent[:2]) and torch.equal(got[1], sent[2:]) and got[2].tolist() == [0, 1, 2]
    (segment,) = {found[0] for t in (sent[:2], sent[2:]) if (found := the_pool().find(t.data_ptr()))}
    assert segment.lent == 1


@lends
def test_a_segment_is_handed_out_again_only_when_its_reader_gives_it_back(pair: Pair) -> None:
    kept = keep_all(pair)
    for value in range(30):
        assert isinstance(pair.call(parcel([lent_tensor(4, value)])), wire.Ok)
    assert [int(tensor[0, 0]) for tensor in kept] == list(range(30))
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(kept))
    assert free_bytes(the_pool()) == 0 and the_pool().bytes >= sum(tensor.nbytes for tensor in kept)
    kept.clear()
    wait_until(
        lambda: free_bytes(the_pool()) == the_pool().bytes, PROMPTLY_S, "all are given back, though nobody calls"
    )


@lends
def test_memory_and_files_do_not_grow(pair: Pair) -> None:
    pair.handle = lambda request, reply: reply(Parcels([lent_tensor(5, 1), *request.parts]))
    for i in range(300):
        outcome = pair.call(parcel([lent_tensor(4 + i % 3, i % 256), torch.full((40_000,), i)]))
        assert isinstance(outcome, wire.Ok)
        assert bool((outcome.answer.parts[1] == i % 256).all()) and bool((outcome.answer.parts[2] == i).all())
        if i == 20:
            bytes_then, files_then = the_pool().bytes, files_open()
    assert the_pool().bytes <= bytes_then + 1_000_000
    assert files_open() <= files_then + 4


@lends
def test_what_is_lent_outlives_its_generation(pair: Pair) -> None:
    """Its owner never uses that memory again: it cannot know whether the reader still looks."""
    kept = keep_all(pair)
    pair.call(parcel([lent_tensor(4, 77)]))
    pair.form()
    for _ in range(20):
        pair.call(parcel([lent_tensor(4, 5)]))
    assert bool((kept[0] == 77).all()) and all(bool((tensor == 5).all()) for tensor in kept[1:])
    kept.clear()
    pair.form()
    wait_until(lambda: free_bytes(the_pool()) == the_pool().bytes, PROMPTLY_S, "what is left is free")


@lends
def test_a_tensor_that_is_lent_in_one_generation_may_be_lent_in_the_next(pair: Pair) -> None:
    """A push that was not acknowledged is sent again."""
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    sent = lent_tensor(4, 3)
    for _ in range(3):
        outcome = pair.call(parcel([sent]))
        assert isinstance(outcome, wire.Ok) and torch.equal(outcome.answer.parts[0], sent)
        pair.form()


@lends
def test_without_room_it_goes_through_the_socket(pair: Pair) -> None:
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    shared.enable(1 << 20)
    pair.form()
    sent = tensors(3, 3_000_000)
    outcome = pair.call(parcel(sent))
    assert isinstance(outcome, wire.Ok) and all(map(torch.equal, outcome.answer.parts, sent))
    assert the_pool().bytes <= 1 << 20


@lends
def test_more_segments_than_files_go_with_a_message(pair: Pair) -> None:
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    sent = tensors(FILES_MOST + 20, shared.LEAST_BYTES)
    outcome = pair.call(parcel(sent))
    assert isinstance(outcome, wire.Ok) and all(map(torch.equal, outcome.answer.parts, sent))


def test_one_without_shared_memory_gets_it_by_tcp(pair: Pair) -> None:
    """Of the two, a has a pool now, b has told no name."""
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    shared.enable(SHARED_BYTES)
    sent = lent_tensor(4, 8)
    outcome = pair.call(parcel([sent]))
    assert isinstance(outcome, wire.Ok) and torch.equal(outcome.answer.parts[0], sent)
    assert {channel._sock.family for channel in pair.a._channels.values()} == {socket.AF_INET}


def notes(*numbers: int) -> bytes:
    """Four counts, then what they count."""
    return struct.pack("<4I", *numbers[:4]) + struct.pack(f"<{len(numbers) - 4}Q", *numbers[4:])


@pytest.mark.parametrize(
    ("sends", "says"),
    [
        (notes(1, 0, 0, 0, 5, 4096), "a file is missing"),
        (b"12345678", "not notes"),
        (notes(0, 9, 0, 0), "not notes"),
        (notes(0, 0, 0, 1, 2, 3), "not notes"),
    ],
)
def test_what_are_no_notes(sends: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Lending(shared.Pool(1 << 20)).take_notes(sends)


def test_loans_are_checked() -> None:
    pool = shared.Pool(8 << 20)
    lending = Lending(pool)
    memory = pool.take(100_000)
    assert memory is not None
    loan = lending.lend()
    assert loan.place(3, torch.from_numpy(memory)[10:50_010]) and len(loan.shown) == 1
    number, offset = loan.places[3]
    assert (number, offset) == (1, 10)
    lending.take_notes(notes(0, 1, 0, 0, number))
    with pytest.raises(ValueError, match="more was returned than was lent"):
        lending.take_notes(notes(0, 1, 0, 0, number))
    with pytest.raises(ValueError, match="not shown"):
        lending.borrow(number)
    assert not lending.lend().place(0, torch.zeros(3)), "small ones are sent"
    lending.end()
    assert not lending.lend().place(0, torch.from_numpy(memory)), "nobody reads any more"


# strangers at the door ------------------------------------------------------------------------------


def stranger(pair: Pair, within_host: bool = False) -> socket.socket:
    """Connected to b, and says nothing."""
    address = pair.b._address
    if within_host:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address.name}")
        return sock
    return socket.create_connection(address.place, WAIT_S)


def reader_threads() -> int:
    return sum(thread.name == "from a caller" for thread in threading.enumerate())


def refuse_accepts(monkeypatch: pytest.MonkeyPatch, times: int, number: int) -> list[int]:
    """The next calls of `accept` fail; returns the numbers of the errors that were raised."""
    raised: list[int] = []
    accept = socket.socket.accept

    def refusing(self: socket.socket) -> Any:
        if len(raised) < times:
            raised.append(number)
            raise OSError(number, os.strerror(number))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refusing)
    return raised


@both
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
def test_accepting_goes_on_after_an_error(pair: Pair, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = refuse_accepts(monkeypatch, 3, number)
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    assert raised == [number] * 3
    pair.form()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_members_connect_again_when_there_were_no_more_descriptors(pair: Pair) -> None:
    """Strangers, in another process, have used all of them up."""
    code = "import socket, sys; held = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(60)]; "
    code += "print('held', flush=True); sys.stdin.read()"
    host, port = pair.b._address.place
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = subprocess.Popen(
        [sys.executable, "-c", code, host, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_open() + 20, before[1]))
        assert strangers.stdout is not None and strangers.stdin is not None
        assert strangers.stdout.readline() == b"held\n"
        short = "cannot accept a connection"
        wait_until(lambda: pair.b.complaints.counts.get(short, 0) > 0, WAIT_S, "b had no more descriptors")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        strangers.communicate(b"", WAIT_S)
    pair.form()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


@both
def test_members_connect_while_a_thousand_strangers_come_and_go(pair: Pair) -> None:
    """They cost no threads, and no more descriptors than there is room for strangers."""
    within_host = pair.b._address.name != NO_NAME
    stop = threading.Event()
    come: list[int] = []

    def be_strange(which: int) -> None:
        held: collections.deque[socket.socket] = collections.deque()
        while not (stop.is_set() and len(come) >= 1000):
            sock = stranger(pair, within_host and len(come) % 2 == 0)
            come.append(which)
            with contextlib.suppress(OSError):  # b has made room already
                sock.send(
                    [b"", b"x", b"GET / HTTP/1.0\r\n\r\n", HELLO.pack(MAGIC, bytes(16), bytes(16), 1)][len(come) % 4]
                )
            held.append(sock)
            if len(held) > 100:
                held.popleft().close()
        for sock in held:
            sock.close()

    threads_before = reader_threads()
    with ThreadPoolExecutor(3) as threads:
        strange = [threads.submit(be_strange, i) for i in range(3)]
        wait_until(lambda: len(come) > 400, WAIT_S, "strangers come")
        for _ in range(5):
            pair.form()
            assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
            assert reader_threads() <= threads_before + 2, "a member's, and that of the generation before"
            door = pair.b._door
            assert door is not None and len(door._strangers) <= STRANGERS_MOST
        stop.set()
        for one in strange:
            one.result(WAIT_S)
    assert pair.b.complaints.counts["a stranger's connection is closed"] > 500
    wait_until(lambda: not door._strangers, WAIT_S, "nobody is left at the door")
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_the_stranger_that_has_kept_silent_longest_makes_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "STRANGERS_MOST", 3)
    assert pair.b._door is not None
    held = []
    for count in range(1, 6):
        held.append(stranger(pair))
        wait_until(lambda: len(pair.b._door._strangers) == min(count, 3), PROMPTLY_S, "it is seen")  # noqa: B023
    assert read_end(held[0]) == b"" and read_end(held[1]) == b""
    held[2].setblocking(False)
    with pytest.raises(BlockingIOError):
        held[2].recv(1)
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    for sock in held:
        sock.close()


def test_a_log_is_not_filled_by_strangers(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            with stranger(pair) as sock:
                sock.sendall(HELLO.pack(MAGIC, bytes(16), bytes(16), 1))
                read_end(sock)
        counts = pair.b.complaints.counts
    assert counts["a stranger's connection is closed"] == 200
    assert sum("a stranger's connection" in record.message for record in caplog.records) <= 2


# messages that nobody could read --------------------------------------------------------------------


def test_a_request_that_is_too_large_fails_at_its_sender(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_MOST_BYTES", 10_000)
    errors: list[BaseException] = []
    pair.a._on_error = errors.append
    outcome = pair.call(wire.Snapshot(0, 0, 1, 0, torch.zeros(3, dtype=torch.uint8), "x" * 10_000))
    assert isinstance(outcome, wire.Failed)
    assert re.fullmatch(
        r"a Snapshot cannot be sent: 100\d\d bytes beside its tensors; a message may have 10000", outcome.reason
    )
    assert [str(error) for error in errors] == [outcome.reason]
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok), "the connection is as it was"


def test_an_answer_that_is_too_large_is_refused_and_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MESSAGE_MOST_BYTES", 10_000)
    errors: list[BaseException] = []
    pair.b._on_error = errors.append
    pair.handle = lambda request, reply: reply(wire.Snapshots([1], [0], ["x" * 10_000], []))
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Ok) and isinstance(outcome.answer, wire.Refused)
    assert (
        "a Snapshots cannot be sent: 100" in outcome.answer.reason
        and "a message may have 10000" in outcome.answer.reason
    )
    assert len(errors) == 1 and str(errors[0]) in outcome.answer.reason


@pytest.mark.parametrize("value", [1 << 70, torch.zeros(1, dtype=torch.complex64)])
def test_what_cannot_travel_fails_at_its_sender(pair: Pair, value: Any) -> None:
    errors: list[BaseException] = []
    pair.a._on_error = errors.append
    outcome = pair.call(parcel([value]))
    assert isinstance(outcome, wire.Failed) and "cannot be sent" in outcome.reason
    assert len(errors) == 1


def test_threads_are_listed_once_they_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` joins those that are listed; one that was not started yet cannot be joined."""
    start, early = threading.Thread.start, []

    def listed(thread: threading.Thread) -> None:
        early.append(thread in pair.a._threads | pair.b._threads)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", listed)
    assert isinstance(pair.call(parcel([1])), wire.Ok)
    assert early and not any(early)


# what is well formed and is no message --------------------------------------------------------------

ONES = torch.ones(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (["Lookup", 0, 0, 1, 5, False, 0], "not a Lookup: Expected `array`, got `int` - at `positions`"),
        (["Lookup", 0, 0, 1, [torch.zeros(3)], False, 0], "1-D int64, got 1-D float32 - at `positions[0]`"),
        (["Lookup", 0, 0, 1, [torch.zeros((3, 1), dtype=torch.int64)], False, 0], "1-D int64, got 2-D int64"),
        (["Lookup", 0, 0, 1, [0], False, 0], "must be tensor 0 of 0 - at `positions[0]`"),
        (["Lookup", 0, 0, 1, ["a"], False, 0], "must be tensor 0 of 0"),
        (["Lookup", 0, 0, 1, [ONES, 0], False, 0], "must be tensor 1 of 1"),
        (["Versions", 0, 0, ONES], "1 tensors came, and it has 0"),
        (["Lookup", "0", 0, 1, [], False, 0], "Expected `int`, got `str` - at `slot`"),
        (["Lookup", 0, 0, 1 << 60, [], False, 0], "Expected `int` <= 281474976710656 - at `step`"),
        (["Lookup", -2, 0, 1, [], False, 0], "Expected `int` >= -1"),
        (["Lookup", 0, 0, True, [], False, 0], "Expected `int`, got `bool`"),
        (["Lookup", 0, 0, 1], "Expected `array` of at least length 5"),
        (["Lookup", 0, 0, 1, [], False, 0, 1], "at most length 6"),
        (["Fetch", 0, 0, 0, False, ONES, {"a": 1}, 0], "Expected `int`, got `str`"),
        (["Acknowledged", 1], "unknown message 'Acknowledged'"),
        ({"a": 1}, "Expected `array`, got `object`"),
        ([["Versions"] * 3, []], "Expected `str`, got `array`"),
        ([], "Expected `array` of at least length 1"),
        (msgspec.Raw(b"\xc1"), "not a message"),
    ],
)
def test_a_request_of_other_values_than_declared_is_refused(pair: Pair, message: Any, says: str) -> None:
    """Nothing is built of it, nobody ends, the connection stays."""
    errors: list[BaseException] = []
    handled: list[Any] = []
    pair.b._on_error, pair.handle = errors.append, lambda request, reply: handled.append(request)
    with pair.connect() as sock:
        reader = FrameReader(sock)
        for ticket in (7, 8):
            assert Frame(ticket, plain(message)).send_to(sock)
            frame = reader.read()
            assert frame is not None
            got, encoded = frame
            answer = WIRE.decode_answer(encoded, wire.Lookup)
            assert got == ticket and isinstance(answer, wire.Malformed) and says in answer.reason, answer
    assert not handled and not errors
    assert pair.b.complaints.counts["a request is none"] == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (["VersionsAre", 3], "not a VersionsAre: Expected `object`, got `int` - at `folded`"),
        (["Rows", []], "Rows is no answer to a Versions: VersionsAre is"),
        (["Forgotten", "gone"], "Forgotten is no answer to a Versions"),
        (["Versions", 0, 0, 0], "unknown message 'Versions'"),
        (["Nonsense"], "unknown message 'Nonsense'"),
    ],
)
def test_an_answer_of_other_values_than_declared_makes_the_call_unknown(
    pair: Pair, answer: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException] = []
    pair.a._on_error = errors.append
    monkeypatch.setattr(pair.b, "vocabulary", Says(answer))
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Unknown) and says in outcome.reason and not errors
    assert pair.a.complaints.counts["an answer is none"] == 1


def test_a_reader_that_fails_ends_its_channel(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails with: the calls on it must not wait for a connection that nobody reads."""
    errors: list[BaseException] = []
    pair.a._on_error = errors.append

    def fail(self: FrameReader) -> None:
        if threading.current_thread().name == "to b":
            raise KeyError("a mistake")
        return read(self)

    read = FrameReader.read
    monkeypatch.setattr(FrameReader, "read", fail)
    assert isinstance(pair.call(wire.Versions(0, 0)), (wire.Failed, wire.Unknown))
    wait_until(lambda: [type(error) for error in errors] == [KeyError], WAIT_S, "it is reported")
    monkeypatch.undo()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_a_call_without_a_descriptor_for_it_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def __init__(self, *args: Any, **more: Any) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sockets.socket, "socket", Refusing)
    outcome = pair.call(wire.Versions(0, 0))
    monkeypatch.undo()
    assert isinstance(outcome, wire.Failed) and "Too many open files" in outcome.reason
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
