"""The pool of shared memory alone: when a segment is handed out again, and what becomes of it otherwise."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, free_bytes
from socket_pair import files_open

from torch_ecrec.runtime import shared
from torch_ecrec.runtime.shared import Mapping, Pool, Segment

SIZE = 100_000


class Reader:
    """It is told what is not used again."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, segment: int) -> None:
        self.forgotten.append(segment)


def take(pool: Pool, size: int = SIZE) -> np.ndarray:
    memory = pool.take(size)
    assert memory is not None
    return memory


def segment_of(pool: Pool, memory: np.ndarray) -> Segment:
    found = pool.find(memory.__array_interface__["data"][0])
    assert found is not None
    return found[0]


def test_a_segment_is_free_when_its_last_array_is_gone() -> None:
    """Views and tensors of it count, whatever became of the array they were made from."""
    pool = Pool(1 << 30)
    memory = take(pool)
    address = memory.__array_interface__["data"][0]
    tensor = torch.from_numpy(memory.view(np.float32).reshape(-1, 10)[5:])[1:]
    del memory
    assert free_bytes(pool) == 0
    other = take(pool)
    assert other.__array_interface__["data"][0] != address
    del tensor
    assert free_bytes(pool) > 0
    assert take(pool).__array_interface__["data"][0] == address


def test_a_segment_that_is_lent_is_free_when_it_is_given_back() -> None:
    pool, reader = Pool(1 << 30), Reader()
    memory = take(pool)
    segment = segment_of(pool, memory)
    pool.lend(segment, reader.forget)
    pool.lend(segment, reader.forget)
    del memory
    pool.give_back(segment)
    assert free_bytes(pool) == 0
    pool.give_back(segment)
    assert free_bytes(pool) == segment.size


@pytest.mark.parametrize("held", [False, True])
def test_a_segment_whose_reader_is_gone_is_never_handed_out_again(held: bool) -> None:
    """Nor is it kept: the reader's own mapping keeps the bytes."""
    pool, gone, other = Pool(1 << 30), Reader(), Reader()
    memory = take(pool)
    memory[:] = 7
    segment = segment_of(pool, memory)
    pool.lend(segment, gone.forget)
    pool.lend(segment, other.forget)
    theirs = shared.held(Mapping(segment.fd, segment.size, writable=False), SIZE, 0, deque())
    if not held:
        del memory
    pool.leave(segment, gone.forget, 1)
    if held:
        assert pool.bytes == segment.size and segment_of(pool, memory) is segment
        del memory
    assert pool.bytes == 0 and other.forgotten == [segment.number] and not gone.forgotten
    pool.give_back(segment)
    assert free_bytes(pool) == 0
    take(pool)[:] = 9
    assert bool((theirs == 7).all())


def test_a_reader_that_owes_nothing_leaves_the_segment_as_it_was() -> None:
    pool, reader = Pool(1 << 30), Reader()
    memory = take(pool)
    segment = segment_of(pool, memory)
    pool.lend(segment, reader.forget)
    pool.give_back(segment)
    pool.leave(segment, reader.forget, 0)
    del memory
    assert free_bytes(pool) == segment.size


def test_there_is_a_limit_and_free_segments_make_room() -> None:
    pool, reader = Pool(1 << 20), Reader()
    memory = take(pool, 600_000)
    segment = segment_of(pool, memory)
    pool.lend(segment, reader.forget)
    pool.give_back(segment)
    assert pool.take(600_000) is None, "no room beside it"
    del memory
    assert len(take(pool, 900_000)) == 900_000
    assert reader.forgotten == [segment.number] and pool.bytes <= 1 << 20
    assert pool.take(2 << 20) is None


def test_a_process_has_so_many_segments_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SEGMENTS_MOST", 3)
    pool = Pool(1 << 30)
    kept = [take(pool) for _ in range(3)]
    assert pool.take(SIZE) is None
    kept.pop()
    assert len(take(pool, 20 * SIZE)) == 20 * SIZE, "a free one makes room, though it is too small"


def test_the_last_descriptors_are_left_for_connections() -> None:
    pool, before = Pool(1 << 30), resource.getrlimit(resource.RLIMIT_NOFILE)
    kept: list[object] = []
    try:
        most = files_open() + 2 * shared.FILES_LEFT
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
        while (memory := pool.take(SIZE)) is not None:
            kept.append(memory)
        os.close(first_free := os.dup(0))  # others of this process may have opened some meanwhile
        assert 0 < len(kept) <= shared.FILES_LEFT + 2 and first_free >= most - shared.FILES_LEFT
        kept += [socket.socket() for _ in range(shared.FILES_LEFT - 2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for one in kept:
        if isinstance(one, socket.socket):
            one.close()


def test_what_nobody_has_used_for_a_while_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 100.0}
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: now["s"]))
    pool, reader = Pool(1 << 30), Reader()
    memory, kept = take(pool, 10 * SIZE), take(pool)
    segment = segment_of(pool, memory)
    pool.lend(segment, reader.forget)
    pool.give_back(segment)
    del memory
    take(pool)  # frees the large one, and then another small one
    now["s"] += shared.IDLE_S / 2
    take(pool)  # the small one, again
    assert free_bytes(pool) > 10 * SIZE and not reader.forgotten
    now["s"] += shared.IDLE_S / 2 + 1
    take(pool)
    assert reader.forgotten == [segment.number], "its reader need not look at it any more"
    assert free_bytes(pool) == segment_of(pool, kept).size and pool.bytes == 2 * free_bytes(pool)


def test_small_needs_do_not_take_large_segments() -> None:
    pool = Pool(1 << 30)
    take(pool, 10_000_000)
    take(pool, 100_000)
    assert pool.bytes > 10_000_000 and free_bytes(pool) > 10_000_000


def test_an_address_outside_is_not_found() -> None:
    pool = Pool(1 << 30)
    memory = take(pool)
    assert pool.find(np.zeros(3).__array_interface__["data"][0]) is None
    assert pool.find(1) is None
    assert pool.find(memory.__array_interface__["data"][0] + 77) == (segment_of(pool, memory), 77)


def files() -> set[int]:
    """Numbers (inodes) of the files that this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.fstat(int(name)).st_ino)
    return found


def test_no_files_are_left_open_and_no_more_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    before = files()
    pool = Pool(1 << 20)
    for size in (100_000, 400_000, 900_000, 200_000, 900_000):
        take(pool, size)
    assert len(files() - before) == 1, "that of the last, which made room for itself"
    del pool
    assert not files() - before

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert Pool(1 << 20).take(SIZE) is None


@pytest.fixture
def pool() -> Iterator[Pool]:
    shared.enable(1 << 26)
    found = shared.pool()
    assert found is not None
    yield found
    shared.enable(0)


def test_empty_is_shared_where_it_is_worth_it(pool: Pool) -> None:
    large, small = shared.empty((50, 1000), np.float32), shared.empty((3, 2), np.float32)
    assert large.shape == (50, 1000) and large.dtype == np.float32 and small.shape == (3, 2)
    assert segment_of(pool, large) and pool.find(small.__array_interface__["data"][0]) is None
    assert shared.empty((0, 5), np.int64).shape == (0, 5)
    beyond = shared.empty((1 << 27,), np.uint8)
    assert len(beyond) == 1 << 27 and pool.find(beyond.__array_interface__["data"][0]) is None


def test_without_a_pool_empty_is_numpys(pool: Pool) -> None:
    shared.enable(0)
    assert shared.pool() is None
    assert pool.find(shared.empty((50, 1000), np.float32).__array_interface__["data"][0]) is None


def test_a_pool_of_the_same_size_stays(pool: Pool) -> None:
    shared.enable(1 << 26)
    assert shared.pool() is pool
    shared.enable(1 << 25)
    assert shared.pool() is not pool


def test_what_is_left_at_the_end_does_no_harm() -> None:
    """The interpreter ends with arrays alive, and no name of a file was ever there."""
    code = (
        "import numpy as np, torch\n"
        "from torch_ecrec.runtime import shared\n"
        "shared.enable(1 << 26)\n"
        "kept = [torch.from_numpy(shared.empty((100_000,), np.uint8)) for _ in range(5)]\n"
        "kept[0].fill_(1)\n"
    )
    before = set(os.listdir("/dev/shm"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")
    assert set(os.listdir("/dev/shm")) <= before
