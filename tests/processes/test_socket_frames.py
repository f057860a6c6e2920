"""Frames on a socket: in pieces, of any size, and what is none."""

import logging
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from conftest import wait_until
from junk import Says, plain
from socket_pair import (
    Pair,
    as_bytes,
    pair_of,
    parcel,
    read_end,
    tensors,
)

from torch_ecrec.protocol import wire
from torch_ecrec.protocol.encoding import WIRE
from torch_ecrec.transport import frames
from torch_ecrec.transport.frames import (
    BUFFER_BYTES,
    HEADER,
    MAGIC,
    Frame,
    FrameReader,
    is_between_hosts,
)

PROMPTLY_S = 20.0  # by itself, on whatever machine


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request) as pair:
        yield pair


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


# what is well formed and is no message --------------------------------------------------------------

ONES = torch.ones(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (["Lookup", 0, 0, 1, 5, False, False, 0], "not a Lookup: Expected `array`, got `int` - at `positions`"),
        (["Lookup", 0, 0, 1, [torch.zeros(3)], False, False, 0], "1-D int64, got 1-D float32 - at `positions[0]`"),
        (["Lookup", 0, 0, 1, [torch.zeros((3, 1), dtype=torch.int64)], False, False, 0], "1-D int64, got 2-D int64"),
        (["Lookup", 0, 0, 1, [0], False, False, 0], "must be tensor 0 of 0 - at `positions[0]`"),
        (["Lookup", 0, 0, 1, ["a"], False, False, 0], "must be tensor 0 of 0"),
        (["Lookup", 0, 0, 1, [ONES, 0], False, False, [], 0], "must be tensor 1 of 1"),
        (["Versions", 0, 0, ONES], "1 tensors came, and it has 0"),
        (["Lookup", "0", 0, 1, [], False, False, [], 0], "Expected `int`, got `str` - at `slot`"),
        (["Lookup", 0, 0, 1 << 60, [], False, False, [], 0], "Expected `int` <= 281474976710656 - at `step`"),
        (["Lookup", -2, 0, 1, [], False, False, [], 0], "Expected `int` >= -1"),
        (["Lookup", 0, 0, True, [], False, False, [], 0], "Expected `int`, got `bool`"),
        (["Lookup", 0, 0, 1], "Expected `array` of at least length 5"),
        (["Lookup", 0, 0, 1, [], False, False, [], 0, 1], "at most length 8"),
        (["Lookup", 0, 0, 1, [], False, False, [[ONES, ONES]], 0], "Expected `array` of at least length 3"),
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
            assert Frame(ticket, plain(message)).send_to(sock, None, is_between_hosts(sock))
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
