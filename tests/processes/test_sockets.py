"""The socket transport alone, two of them in this process: calls, rosters, who may connect, peers that fail."""

import errno
import itertools
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import ROOT, wait_until
from greeting import answer_hello
from junk import plain
from socket_pair import (
    WAIT_S,
    Pair,
    Parcel,
    Parcels,
    as_bytes,
    both,
    pair_of,
    parcel,
    read_end,
    tensors,
)

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.build import Build
from torch_ecrec.spec.settings import trusted_network
from torch_ecrec.transport import acceptor, sockets
from torch_ecrec.transport.frames import (
    BUFFERS_MOST,
    DTYPES,
    HEADER,
    MAGIC,
    Frame,
    FrameReader,
    OtherBuild,
)
from torch_ecrec.transport.lending import Lending
from torch_ecrec.transport.sockets import NO_NAME, Address, SocketTransport

PROMPTLY_S = 20.0  # by itself, on whatever machine


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request) as pair:
        yield pair


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
    shapes = [
        (),
        (0,),
        (3,),
        (2, 0, 4),
        (5, 3),
        (300, 90),
        *[(n + more,) for n in (512, 4096, 1 << 14) for more in (0, 1)],
    ]
    for dtype, shape in itertools.product(DTYPES, map(torch.Size, shapes)):
        sent = (torch.arange(shape.numel()).reshape(shape) % 2).to(dtype)
        outcome = pair.call(parcel([sent]))
        assert isinstance(outcome, wire.Ok), outcome
        (got,) = outcome.answer.parts
        assert got.dtype == dtype and got.shape == shape and torch.equal(got, sent)
        assert got.stride() == sent.stride()


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
    assert not any(channel._calls for channel in pair.a._channels.values())


def test_one_listens_where_it_is_told_to(pair: Pair) -> None:
    assert pair.a._address.place[0] == "127.0.0.1"
    assert Address.parse(str(pair.a._address)).place == pair.a._address.place
    with trusted_network(), pytest.raises(ClusterUnavailable, match="cannot listen"):
        SocketTransport("c", lambda request, reply: None, "192.0.2.1")


@pytest.mark.parametrize("handled", [False, True], ids=["strangers", "a member"])
def test_who_has_not_got_the_key_or_is_no_member_any_more_is_not_heard(pair: Pair, handled: bool) -> None:
    requests: list[Any] = []

    def handle(request: Any, reply: Any) -> None:
        requests.append(request)
        reply(wire.VersionsAre({0: 1}))

    pair.handle = handle
    pair.b.follow(next(pair.versions), {"b": pair.b.endpoint, "gone": pair.a.endpoint})
    pair.form()
    request = as_bytes(Frame(7, plain(["Versions", 0, 0, 0])), summed=True)
    hellos: list[dict[str, Any]] = [{}] if handled else [{"key": bytes(16)}, {"caller": b"gone"}]
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
    assert f"another build of torch_ecrec: the same version {mine.version}, but not the same: Pull, Push" in (
        outcome.reason
    )
    assert pair.a.complaints.counts["a connection to b is closed"] == 1
    wait_until(lambda: pair.b.complaints.counts["a stranger's connection is closed"] == 1, WAIT_S, "b has complained")
    pair.a.build = Build("9.9.9", {**mine.messages, "Push": "another"})
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and f"version {mine.version}, here 9.9.9" in outcome.reason
    pair.handle = lambda request, reply: reply(wire.VersionsAre({}))
    pair.a.build = Build("9.9.9", mine.messages)  # the same but for the release: both may serve one cluster
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    pair.a.build = mine
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_a_stranger_is_not_told_which_build_is_here(pair: Pair) -> None:
    with pair.connect(key=bytes(16), build=bytes(16)) as sock:
        assert read_end(sock) == b""
    with pair.connect(build=bytes(16)) as sock, pytest.raises(OtherBuild) as told:
        FrameReader(sock).read()
    assert pair.a.build.difference_told(told.value.told) == ""
    assert pair.a.build.difference_told(b"{}") == "it does not say which"


def test_a_hello_that_does_not_come_holds_nothing_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "HELLO_S", 0.2)
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


@pytest.mark.parametrize("kind", ["sender", "acceptor"])
def test_two_threads_close_at_once(pair: Pair, kind: str) -> None:
    """The end of a process, and that of its membership: one of them comes when all is closed."""
    one = pair.a.sender if kind == "sender" else pair.a._acceptor
    wake = one._wake
    thread = next(thread for thread in pair.a._threads if thread.name == kind)

    class Overtaken:
        close = wake.close

        def send(self, data: bytes) -> int:
            one._wake = wake
            one.close()
            thread.join(WAIT_S)
            return wake.send(data)

    one._wake = Overtaken()  # type: ignore[assignment]
    one.close()
    assert not thread.is_alive()


@pytest.fixture
def deaf() -> Iterator[socket.socket]:
    """It takes connections, and reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_a_peer_that_does_not_read(pair: Pair, deaf: socket.socket) -> None:
    """Calls end in time, nothing is kept for it, and what was sent in part is not gone on with."""
    real = pair.a._addresses["b"]
    pair.a._addresses["b"] = Address("127.0.0.1", deaf.getsockname()[1], real.key, NO_NAME)
    let_in = threading.Thread(target=lambda: answer_hello(deaf.accept()[0], pair.b))
    let_in.start()
    payload = torch.zeros(40_000_000, dtype=torch.uint8)
    started_s = time.monotonic()
    outcomes = [pair.start(parcel([payload]), 3.0) for _ in range(3)]
    assert time.monotonic() - started_s < 3.0, "`call` returns at once"
    assert {type(outcome()) for outcome in outcomes} == {wire.Unknown}
    assert time.monotonic() - started_s < 3.0 + PROMPTLY_S
    (channel,) = pair.a._channels.values()
    wait_until(lambda: channel.ended, PROMPTLY_S, "a frame was sent in part: its connection ends")
    assert not channel.connection._waiting
    let_in.join(WAIT_S)

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
        def send_to(self, sock: socket.socket, lending: Lending | None, between_hosts: bool) -> bool:
            self._begin(lending, between_hosts)
            sends.append(sock.send(self._parts[0][:10]))
            raise OSError("no memory")

    monkeypatch.setattr(sockets, "Frame", Failing)
    failed = pair.start(wire.Versions(0, 0))
    assert isinstance(failed(), wire.Unknown) and sends == [10]
    monkeypatch.undo()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_a_mistake_in_sending_is_told_once_and_ends_the_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the sender's thread. Before, it tried again thousands of times a second, and told each of them."""
    errors: list[BaseException] = []
    pair.a._on_error = errors.append
    begins = threading.Event()

    class Failing(Frame):
        def send_to(self, sock: socket.socket, lending: Lending | None, between_hosts: bool) -> bool:
            if threading.current_thread().name != "sender":
                begins.set()
                return False  # so that the sender goes on with it
            raise KeyError("a mistake")

    monkeypatch.setattr(sockets, "Frame", Failing)
    failed = pair.start(wire.Versions(0, 0))
    assert isinstance(failed(), wire.Unknown) and begins.is_set()
    monkeypatch.undo()
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    assert [type(error) for error in errors] == [KeyError]


@both
def test_a_connection_that_the_kernel_cannot_watch_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given no memory for it. What is under way there is asked again, and nothing else happens."""
    errors: list[BaseException] = []
    pair.a._on_error = pair.b._on_error = errors.append

    def full(connection: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    large = parcel(tensors(600, 100_000))
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)
    with monkeypatch.context() as patch:
        patch.setattr(pair.a.sender, "watch", full)
        assert isinstance(pair.call(large), wire.Unknown) and not errors
    assert isinstance(pair.call(large), wire.Ok) and not errors


def test_nobody_there_is_a_failed_call(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pair.a._addresses["b"] = Address("127.0.0.1", port, bytes(16), NO_NAME)
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and "refused" in outcome.reason


def test_a_connection_that_comes_too_late_is_not_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its member goes while it is made."""
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
    go.set()
    assert isinstance(waiting(), (wire.Failed, wire.Unknown))
    wait_until(lambda: made[0].fileno() == -1, PROMPTLY_S, "it is closed")
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok)


def test_who_is_no_member_any_more_has_no_connections(pair: Pair) -> None:
    kept: list[Any] = []
    pair.handle = lambda request, reply: kept.append(reply)
    waiting = pair.start(wire.Versions(0, 0))
    wait_until(lambda: bool(kept), PROMPTLY_S, "b has the request")
    (before,) = pair.b._inbound
    pair.form()
    outcome = waiting()
    assert outcome == wire.Unknown("b: the connection ended")
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
import torch
from torch_ecrec.protocol import wire
from torch_ecrec.transport.sockets import SocketTransport

def handle(request, reply):
    reply(wire.Rows([part[:, None].float() for part in request.positions]))

a, b = SocketTransport("a", handle, "127.0.0.1"), SocketTransport("b", handle, "127.0.0.1")
for one in (a, b):
    one.follow(1, {"a": a.endpoint, "b": b.endpoint})
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


def test_threads_are_listed_once_they_run(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` joins those that are listed; one that was not started yet cannot be joined."""
    start, early = threading.Thread.start, []

    def listed(thread: threading.Thread) -> None:
        early.append(thread in pair.a._threads | pair.b._threads)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", listed)
    assert isinstance(pair.call(parcel([1])), wire.Ok)
    assert early and not any(early)


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


@pytest.mark.parametrize("lacks", ["Too many open files", "can't start new thread"])
def test_a_call_for_which_there_is_no_room_fails_and_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    """Calls are made again and again: a log says why training stands still, and where that lasts, the coordinator."""
    monkeypatch.setattr(sockets, "LACKS_S", 0.2)

    class Refusing(socket.socket):
        def __init__(self, *args: Any, **more: Any) -> None:
            raise OSError(errno.EMFILE, lacks)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError(lacks)

    if lacks == "Too many open files":
        monkeypatch.setattr(sockets.socket, "socket", Refusing)
    else:
        monkeypatch.setattr(sockets.Worker, "start", start)
    outcome = pair.call(wire.Versions(0, 0))
    assert isinstance(outcome, wire.Failed) and lacks in outcome.reason and not pair.a.lacks()

    def told() -> str:
        pair.call(wire.Versions(0, 0))
        return pair.a.lacks()

    wait_until(lambda: bool(told()), WAIT_S, "it has lasted")
    assert lacks in told() and "doctor" in told()
    monkeypatch.undo()
    assert f"a member cannot be connected to: {'[Errno 24] ' * (lacks[0] == 'T')}{lacks}" in caplog.text
    assert isinstance(pair.call(wire.Versions(0, 0)), wire.Ok) and not pair.a.lacks()
