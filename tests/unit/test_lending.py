"""Pool and lending together, in any order of what may happen to them: a state machine.

A process lends over two connections, whose messages arrive late or never. Every array carries a stamp of its own, so
that memory which is handed out while somebody looks at it shows.
"""

from __future__ import annotations

import gc
import os
import socket
from collections import deque
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import free_bytes
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from socket_pair import files_open

from torch_ecrec.runtime import shared
from torch_ecrec.runtime.shared import Pool
from torch_ecrec.transport.frames import FrameReader
from torch_ecrec.transport.lending import FILES_MOST, Lending

GRAIN = shared._GRAIN
MOST_BYTES = 8 * GRAIN
CONNECTIONS = 2
SIZES = st.sampled_from([GRAIN // 2, GRAIN // 2, 2 * GRAIN, 3 * GRAIN, 7 * GRAIN])


@dataclass
class Message:
    """On its way from the lender: notes with their files, which tensors it lends, and their stamps."""

    notes: bytes
    files: list[int]
    lent: list[int]
    stamps: list[int]
    sizes: list[int]


class Ends:
    """Both ends of a connection, and what is under way on it."""

    def __init__(self, pool: Pool, readers: Pool) -> None:
        self.lender, self.reader = Lending(pool), Lending(readers)
        self.under_way: deque[Message] = deque()
        self.back: deque[bytes] = deque()


class Lends(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.pool, self.readers = Pool(MOST_BYTES), Pool(MOST_BYTES)
        self.connections = [Ends(self.pool, self.readers) for _ in range(CONNECTIONS)]
        self.held: list[tuple[np.ndarray, int]] = []  # arrays of the process, and their stamps
        self.read: list[tuple[np.ndarray, int]] = []  # what readers look at
        self.stamp = 0

    def _stamped(self, memory: np.ndarray) -> None:
        self.stamp = self.stamp % 250 + 1
        memory[:] = self.stamp
        self.held.append((memory, self.stamp))

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        memory = self.pool.take(size)
        if memory is not None:
            self._stamped(memory)

    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        if self.held:
            del self.held[which % len(self.held)]

    @rule(which=st.integers(0, 99), more=st.integers(0, 2), over=st.integers(0, CONNECTIONS - 1), copy=st.booleans())
    def send(self, which: int, more: int, over: int, copy: bool) -> None:
        """A message with some tensors of the pool, or one that is copied into it; without any: notes alone."""
        ends = self.connections[over]
        chosen = [self.held[(which + i) % len(self.held)] for i in range(more)] if self.held else []
        if copy:
            self.stamp = self.stamp % 250 + 1
            chosen = [*chosen, (np.full(GRAIN, self.stamp, np.uint8), self.stamp)]
        tensors = [torch.from_numpy(memory) for memory, _ in chosen]
        sent, notes, shown = ends.lender.lend(tensors)
        files = [os.dup(segment.fd) for segment in shown]
        lent = [i for i, tensor in enumerate(tensors) if not any(tensor is one for one in sent)]
        stamps, sizes = [chosen[i][1] for i in lent], [len(chosen[i][0]) for i in lent]
        ends.under_way.append(Message(notes, files, lent, stamps, sizes))

    @rule(over=st.integers(0, CONNECTIONS - 1))
    def arrive(self, over: int) -> None:
        ends = self.connections[over]
        if not ends.under_way:
            return
        message = ends.under_way.popleft()
        ends.reader.take_files(message.files)
        places = ends.reader.take_notes(message.notes) if message.notes else {}
        assert list(places) == message.lent and not ends.reader.files
        lent = dict.fromkeys(segment for segment, _ in places.values())  # a message borrows each of them once
        borrowed = {segment: ends.reader.borrow(segment) for segment in lent}
        for (segment, offset), stamp, size in zip(places.values(), message.stamps, message.sizes, strict=True):
            self.read.append((borrowed[segment][offset : offset + size], stamp))

    @rule(which=st.integers(0, 99))
    def look_away(self, which: int) -> None:
        if self.read:
            del self.read[which % len(self.read)]

    @rule(over=st.integers(0, CONNECTIONS - 1))
    def tell_back(self, over: int) -> None:
        ends = self.connections[over]
        ends.back.append(ends.reader.lend([])[1])

    @rule(over=st.integers(0, CONNECTIONS - 1))
    def hear_back(self, over: int) -> None:
        ends = self.connections[over]
        if ends.back and (notes := ends.back.popleft()):
            assert ends.lender.take_notes(notes) == {}

    @rule(which=st.integers(0, 99), over=st.integers(0, CONNECTIONS - 1))
    def round_trip(self, which: int, over: int) -> None:
        """All that is under way arrives, one more, too, and whoever looked has looked enough."""
        self.send(which, 1, over, False)
        while self.connections[over].under_way:
            self.arrive(over)
        self.read.clear()
        self.tell_back(over)
        while self.connections[over].back:
            self.hear_back(over)

    @rule()
    def let_go_of_all(self) -> None:
        self.held.clear()

    @rule(over=st.integers(0, CONNECTIONS - 1))
    def end(self, over: int) -> None:
        """The connection ends, with what is under way on it, and another one comes."""
        self._end(self.connections[over])
        self.connections[over] = Ends(self.pool, self.readers)

    def _end(self, ends: Ends) -> None:
        ends.lender.end()
        ends.reader.end()
        ends.lender.let_go()
        ends.reader.let_go()
        for message in ends.under_way:
            for fd in message.files:
                os.close(fd)

    @invariant()
    def nobody_sees_another_stamp(self) -> None:
        for memory, stamp in getattr(self, "held", []) + getattr(self, "read", []):
            assert bool((memory == stamp).all()), "handed out while somebody looks at it"

    @invariant()
    def the_limit_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.bytes <= MOST_BYTES
        used = {id(segment): segment for _, segment in pool._held} | {id(segment): segment for segment in pool._free}
        assert sum(segment.size for segment in used.values()) <= pool._bytes, "more than is counted"
        assert len(used) == len(pool._held) + len(pool._free), "one that is held is free, or free twice"
        assert not any(segment.dropped or segment.lent or segment.lost for segment in pool._free)

    def teardown(self) -> None:
        """In the end all is free: nothing is counted that nobody has."""
        if not hasattr(self, "pool"):
            return
        for ends in self.connections:
            self._end(ends)
        self.held.clear()
        self.read.clear()
        gc.collect()
        assert self.pool.bytes == free_bytes(self.pool)


TestLends = Lends.TestCase
TestLends.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_lends_at_length() -> None:
    machine = type("LendsAtLength", (Lends.TestCase,), {})
    machine.settings = settings(max_examples=2000, stateful_step_count=100, deadline=None)
    machine("runTest").runTest()


def test_a_segment_that_made_room_stays_away() -> None:
    """Its reader has given it back, and has not been told yet that it is not used again, when the connection ends."""
    pool = Pool(4 << 20)
    lending = Lending(pool)
    memory = pool.take(1 << 20)
    assert memory is not None
    sent, _, shown = lending.lend([torch.from_numpy(memory)])
    assert not sent
    segment = shown[0].number
    lending.take_notes(np.array([0, 1, 0, 0], "<u4").tobytes() + np.array([segment], "<u8").tobytes())
    del memory
    larger = pool.take(3 << 20)
    assert larger is not None and free_bytes(pool) == 0, "the first one made room"
    lending.end()
    assert free_bytes(pool) == 0 and pool.take(1 << 20) is None and pool.bytes <= pool.most_bytes


def test_two_tensors_of_a_segment_in_one_message_are_one_loan() -> None:
    state = Lends()
    state.begin()
    state.take(GRAIN)
    state.send(which=0, more=2, over=0, copy=False)
    state.arrive(0)
    state.read.clear()
    state.tell_back(0)
    state.hear_back(0)
    state.teardown()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_that_could_be_shortened_is_not_looked_at(sealed: bool) -> None:
    """Reading beyond the end of a file kills a process."""
    lending = Lending(Pool(1 << 20))
    fd = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1000 if sealed else 4096)
    if sealed:
        shared.fcntl.fcntl(fd, shared.fcntl.F_ADD_SEALS, shared.fcntl.F_SEAL_SHRINK)
    lending.take_files([fd])
    with pytest.raises(ValueError, match="shorter than was said, or may become so"):
        lending.take_notes(np.array([1, 0, 0, 0], "<u4").tobytes() + np.array([5, 4096], "<u8").tobytes())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_files_that_nobody_asked_for_are_few() -> None:
    lending = Lending(Pool(1 << 20))
    with pytest.raises(ValueError, match="files that were not shown"):
        for _ in range(3 * FILES_MOST):
            lending.take_files([os.open(os.devnull, os.O_RDONLY)])
    assert len(lending.files) == 2 * FILES_MOST + 1
    lending.let_go()
    assert not lending.files


def test_no_file_of_a_peer_that_sends_too_many_stays_open() -> None:
    ours, theirs = socket.socketpair()
    lending, file = Lending(Pool(1 << 20)), os.open(os.devnull, os.O_RDONLY)
    before = files_open()
    with theirs:
        for _ in range(3):
            socket.send_fds(theirs, [b"x"], [file] * FILES_MOST)
        with pytest.raises(ValueError, match="files that were not shown"):
            FrameReader(ours, lending).read()
        lending.let_go()
        assert files_open() == before
    ours.close()
    os.close(file)
