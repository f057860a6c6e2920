"""Checksums of frames: a bit that flips between hosts ends the connection, with that reason, and does nothing else."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from conftest import wait_until
from socket_pair import WAIT_S, Pair, Parcels, as_bytes, both, pair_of, parcel, tensors

from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.protocol.status import Connections
from torch_ecrec.transport import frames
from torch_ecrec.transport.frames import CHECKSUM_BYTES, Frame, FrameReader, Spoilt


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request) as pair:
        yield pair


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), WAIT_S)
        there, _ = server.accept()
    there.settimeout(WAIT_S)
    return here, there


def message() -> wire.Records:
    return wire.Records(torch.arange(240, dtype=torch.uint8).reshape(6, 40))


@pytest.mark.parametrize("packs", [False, True])
def test_no_flipped_bit_gets_through(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the header, the table, the message, the tensors, packed or not, or the checksum itself."""
    if packs:
        monkeypatch.setattr(frames, "PACKED_LEAST_BYTES", 1)
        monkeypatch.setattr("torch_ecrec.codec.packing.PAYS_BELOW", 1.0)
    records = deltas(8) if packs else message()
    sent, rng = as_bytes(Frame(7, WIRE.encode(records)[0]), summed=True), random.Random(0)
    assert (len(sent) < records.records.nbytes) == packs
    bits = range(8 * len(sent)) if len(sent) < 100 else sorted(rng.sample(range(8 * len(sent)), 400))
    reasons = set()
    for bit in bits:
        spoilt = bytearray(sent)
        spoilt[bit // 8] ^= 1 << (bit % 8)
        here, there = tcp_pair()
        with here, there:
            here.sendall(spoilt)
            here.shutdown(socket.SHUT_WR)
            with pytest.raises((ValueError, ConnectionError)) as raised:
                FrameReader(there).read()
            reasons.add(type(raised.value))
    assert Spoilt in reasons


def test_the_checksum_is_no_part_of_what_is_read() -> None:
    here, there = tcp_pair()
    with here, there:
        plain, summed = (as_bytes(Frame(7, WIRE.encode(message())[0]), summed) for summed in (False, True))
        assert summed[: len(plain)] == plain and len(summed) == len(plain) + CHECKSUM_BYTES
        reader = FrameReader(there)
        for _ in range(3):
            here.sendall(summed)
            got = reader.read()
            assert got is not None and got[0] == 7
            answer = WIRE.decode_answer(got[1], wire.Fetch)
            assert isinstance(answer, wire.Records) and torch.equal(answer.records, message().records)


def deltas(rows: int) -> wire.Records:
    torch.manual_seed(rows)
    words = torch.randint(0, 1 << 31, (rows, 16), dtype=torch.int32) >> torch.randint(8, 31, (rows, 16))
    return wire.Records(words.to(torch.int32).view(torch.uint8))


@pytest.mark.parametrize("within_host", [False, True])
def test_deltas_are_packed_between_hosts_only(within_host: bool) -> None:
    sent = [deltas(rows) for rows in (10, 4000, 1000)]
    here, there = socket.socketpair() if within_host else tcp_pair()
    with here, there:
        there.settimeout(None)
        reader = FrameReader(there)
        for ticket, records in enumerate(sent):
            frame = Frame(ticket, WIRE.encode(records)[0])
            sender = threading.Thread(target=_send_whole, args=(frame, here), daemon=True)
            sender.start()
            got = reader.read()
            sender.join(WAIT_S)
            assert got is not None and got[0] == ticket
            answer = WIRE.decode_answer(got[1], wire.Fetch)
            assert isinstance(answer, wire.Records) and torch.equal(answer.records, records.records)
            packs = not within_host and records.records.nbytes >= frames.PACKED_LEAST_BYTES
            assert frame.bytes_packed == packs * records.records.nbytes
            assert (frame.bytes_saved > 0.3 * frame.bytes_packed) == packs


@pytest.mark.parametrize("lacks", ["a good sample", "memory"])
def test_what_cannot_be_packed_is_sent_as_it_is(pair: Pair, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a message that packing made larger ended its connection, each time that it was sent again."""
    if lacks == "memory":

        def fails(values: object) -> None:
            raise MemoryError

        monkeypatch.setattr(frames, "pack", fails)
    else:
        monkeypatch.setattr("torch_ecrec.codec.packing._sample", lambda *_: 0)
    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    sent = [torch.randint(0, 256, (1 << 16,), dtype=torch.uint8), torch.randn(1 << 18)]
    for _ in range(2):
        outcome = pair.call(parcel(sent))
        assert isinstance(outcome, wire.Ok) and isinstance(outcome.answer, Parcels)
        assert all(map(torch.equal, sent, outcome.answer.parts))
    assert pair.a.connections().bytes_packed == 0 and not pair.b.complaints.counts


def test_a_frame_leaves_the_message_as_it_was() -> None:
    """It may be sent once more, on another connection; and a tensor may be in it twice."""
    records = deltas(4000).records
    message = (b"x", [records, records[:10], records])
    once, again = as_bytes(Frame(7, message), summed=True), as_bytes(Frame(7, message), summed=True)
    assert once == again and message[1][0] is records
    here, there = tcp_pair()
    with here, there:
        threading.Thread(target=here.sendall, args=(once,), daemon=True).start()
        got = FrameReader(there).read()
        assert got is not None and all(map(torch.equal, got[1][1], message[1]))


@both
def test_a_transport_says_what_carries_its_bytes(pair: Pair) -> None:
    """For `status`: of both ends, each what it has sent itself."""
    assert pair.a.connections() == Connections()
    records = deltas(4000).records
    pair.handle = lambda request, reply: reply(Parcels([torch.zeros(0)]))
    assert isinstance(pair.call(parcel([records])), wire.Ok)
    way = "memory" if pair.a._channels["b"].sock.family == socket.AF_UNIX else "tcp"
    wait_until(lambda: pair.a.connections().bytes_packed or way == "memory", WAIT_S, "it is counted")
    here, there = pair.a.connections(), pair.b.connections()
    assert getattr(here, way) == getattr(there, way) == 1 == here.memory + here.tcp
    assert here.bytes_packed == (records.nbytes if way == "tcp" else 0) and there.bytes_packed == 0
    assert (here.bytes_saved > 0.3 * records.nbytes) == (way == "tcp")


def _send_whole(frame: Frame, sock: socket.socket) -> None:
    while not frame.send_to(sock, None, frames.is_between_hosts(sock)):
        select.select([], [sock], [], WAIT_S)


@pytest.mark.parametrize("values, size", [(0, 0), *((64, size) for size in (0, 1, 19, 63, 64, 1 << 40, (1 << 64) - 1))])
@pytest.mark.parametrize("within_host", [False, True])
def test_a_packed_tensor_of_a_size_that_cannot_be_is_no_frame(values: int, size: int, within_host: bool) -> None:
    """Nor is any within a host, where nobody packs. No memory is taken for it."""
    table = struct.pack("<4Q", frames.PACKED | frames.DTYPES.index(torch.uint8), 1, values, size)
    head = frames.HEADER.pack(frames.MAGIC, 0, len(table), 1, 7) + table + b"x"
    here, there = socket.socketpair() if within_host else tcp_pair()
    with here, there:
        here.sendall(head + b"\0" * 100)
        here.shutdown(socket.SHUT_WR)
        with pytest.raises((ValueError, ConnectionError)) as raised:
            FrameReader(there).read()
        if within_host or not 20 <= size < 64:
            assert "not a packed tensor" in str(raised.value)


def large(size: int) -> bytes:
    torch.manual_seed(size)
    records = torch.randint(0, 256, (size // 64, 64), dtype=torch.uint8)
    return as_bytes(Frame(size, WIRE.encode(wire.Records(records))[0]), summed=True)


@pytest.mark.parametrize("at_once", [1 << 12, frames.AWAIT_MOST_BYTES])
@pytest.mark.parametrize("piece", [1447, 64 << 10, 4 << 20])
def test_large_messages_come_whole_however_they_are_cut(
    piece: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones behind them are not waited for longer: the socket wakes for any byte again."""
    monkeypatch.setattr(frames, "AWAIT_MOST_BYTES", at_once)
    sizes = [64, frames.AWAIT_LEAST_BYTES, 64, 3 << 20, 256, (1 << 20) + 64, 64]
    here, there = tcp_pair()
    sent = b"".join(map(large, sizes))

    def send() -> None:
        for begin in range(0, len(sent), piece):
            here.sendall(sent[begin : begin + piece])

    with here, there:
        there.settimeout(None)
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        reader = FrameReader(there)
        for size in sizes:
            got = reader.read()
            assert got is not None and got[0] == size
            assert as_bytes(Frame(size, got[1]), summed=True) == large(size)
            assert there.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        sender.join(WAIT_S)


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_that_ends_within_a_large_message_is_noticed(resets: bool) -> None:
    here, there = tcp_pair()
    sent = large(2 << 20)
    with here, there:
        there.settimeout(None)
        read: list[object] = []

        def reads() -> None:
            try:
                read.append(FrameReader(there).read())
            except OSError as error:
                read.append(error)

        reader = threading.Thread(target=reads, daemon=True)
        reader.start()
        here.sendall(sent[: len(sent) // 2])
        if resets:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        here.close()
        reader.join(WAIT_S)
        assert len(read) == 1 and isinstance(read[0], ConnectionError)


def test_within_a_host_there_is_none() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert not frames.is_between_hosts(here)
        assert Frame(7, WIRE.encode(message())[0]).send_to(here, None, False)
        assert len(there.recv(10_000)) == len(as_bytes(Frame(7, WIRE.encode(message())[0])))


@pytest.mark.parametrize("spoils", ["the request", "the answer"])
def test_who_asked_asks_again(pair: Pair, spoils: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bit of a tensor flips once, after its checksum was made."""
    begin, turn, flips = Frame._begin, [0], []

    def spoil(self: Frame, lending: object, between_hosts: bool = False) -> None:
        begin(self, lending, between_hosts)  # type: ignore[arg-type]
        if not between_hosts:
            return
        turn[0] += 1
        if turn[0] == (1 if spoils == "the request" else 2):
            part = self._parts[-2]  # the last is the checksum
            changed = bytearray(part)
            changed[-100] ^= 4
            self._parts[-2] = memoryview(changed)
            flips.append(turn[0])

    pair.handle = lambda request, reply: reply(Parcels(request.parts))
    monkeypatch.setattr(Frame, "_begin", spoil)
    sent = tensors(1, 1000)
    outcome = pair.call(parcel(sent))
    assert isinstance(outcome, wire.Unknown) and flips, "it may have been handled: whoever asked asks again"
    complaints = (pair.b if spoils == "the request" else pair.a).complaints
    what = "a caller's connection is closed" if spoils == "the request" else "a connection to b is closed"
    wait_until(lambda: complaints.counts[what] == 1, WAIT_S, what)
    again = pair.call(parcel(sent))
    assert isinstance(again, wire.Ok) and isinstance(again.answer, Parcels)
    assert torch.equal(again.answer.parts[0], sent[0])
