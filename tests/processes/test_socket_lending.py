"""Memory that processes of one host lend each other."""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import free_bytes, wait_until
from socket_pair import SHARED_BYTES, Pair, Parcel, Parcels, files_open, lends, pair_of, parcel, tensors

from torch_ecrec.protocol import wire
from torch_ecrec.runtime import shared
from torch_ecrec.transport.lending import FILES_MOST, Lending

PROMPTLY_S = 20.0  # by itself, on whatever machine


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request) as pair:
        yield pair


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
def test_what_is_lent_outlives_its_connection(pair: Pair) -> None:
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
def test_a_tensor_that_was_lent_on_one_connection_may_be_lent_on_the_next(pair: Pair) -> None:
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
    assert {channel.sock.family for channel in pair.a._channels.values()} == {socket.AF_INET}


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
    small, large = torch.zeros(3), torch.from_numpy(memory)[10:50_010]
    sent, told, shown = lending.lend([small, large])
    assert sent == [small] and len(shown) == 1, "small ones are sent"
    number = shown[0].number
    assert told == notes(1, 0, 0, 1, number, shown[0].size, 1, number, 10)
    lending.take_notes(notes(0, 1, 0, 0, number))
    with pytest.raises(ValueError, match="more was returned than was lent"):
        lending.take_notes(notes(0, 1, 0, 0, number))
    with pytest.raises(ValueError, match="not shown"):
        lending.borrow(number)
    lending.end()
    assert lending.lend([large])[1] == b"", "nobody reads any more"
