"""A tiered store beside one in memory: whatever is done to both, they are the same, bit for bit."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_pairs import (
    READER,
    Doing,
    check_a_place_that_others_had_meanwhile,
    check_cleaning_that_cannot_read,
    check_frames_that_were_needed_once_are_given_back,
    check_zeros_and_other_records,
    pair,
    put,
    store_of,
    tiny,
    value_of,
)

from torch_ecrec.codec import seals
from torch_ecrec.errors import TierFailed
from torch_ecrec.records.pages import untouched
from torch_ecrec.records.store import Use
from torch_ecrec.records.tiers import disk, tiered
from torch_ecrec.records.tiers import log as segments
from torch_ecrec.records.tiers.budget import LEAST_SHARE, Tier, least_budget, most_on_disk, need_of
from torch_ecrec.records.tiers.disk import _ENTER as ENTER
from torch_ecrec.records.tiers.disk import BLOCK_BYTES, ScratchFile, Uring
from torch_ecrec.records.tiers.tiered import TieredStore
from torch_ecrec.records.tiers.trouble import Trouble
from torch_ecrec.server.service import Host


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([1, 2, 30, 200]),
    frames=st.sampled_from([1, 2, 7, 25, 300]),
    dim=st.sampled_from([1, 4, 130, 1100]),
    first=st.booleans(),
)
def test_whatever_is_done_the_bits_are_those_of_memory(
    seed: int, rows: int, frames: int, dim: int, first: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "LEAST_SEGMENT_BYTES", 8192)
        patch.setattr(segments, "SEGMENT_BYTES", 32768)
        doing = Doing(pair(rows, dim, frames, folder, first), seed)
        doing.go(60)
        store: Any = doing.shards[1]._stores[0]
        assert store.in_memory <= max(frames, 13)
    assert not list(folder.glob(".torch_ecrec*")), "the file has no name"


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([1, 3, 30, 100]),
    frames=st.sampled_from([1, 2, 7, 25]),
    dim=st.sampled_from([1, 3, 14]),
)
def test_segments_of_a_few_records_are_cleaned_and_used_again(seed: int, rows: int, frames: int, dim: int) -> None:
    doing = Doing(tiny(rows, dim, frames), seed)
    doing.go(120)


def test_what_was_read_of_a_place_that_others_had_meanwhile_does_not_count() -> None:
    check_a_place_that_others_had_meanwhile()


def test_cleaning_that_cannot_read_a_record_leaves_the_one_in_memory_to_be_written() -> None:
    check_cleaning_that_cannot_read()


def test_zeros_and_other_records_in_place_of_one_do_not_fit() -> None:
    check_zeros_and_other_records()


def test_frames_that_were_needed_once_are_given_back() -> None:
    check_frames_that_were_needed_once_are_given_back()


@pytest.mark.parametrize("prefers", [False, True])
def test_what_is_to_be_kept_goes_last(prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was changed once, and others more and more often; counts are halved meanwhile. Without it, it goes."""
    monkeypatch.setattr(tiered, "HALVE_AFTER", 50)
    store, _ = store_of(100, 20)
    kept = np.array([*range(20, 25), 50, 51])
    if prefers:
        store.keep_last_([(20, 25), (50, 52)])
    store.at(kept, Use.CHANGE)
    others = np.setdiff1d(np.arange(100), kept)
    for step in range(300):
        store.at(others[np.arange(step % 7, 93, 31)], Use.CHANGE)
        store.at(others[np.arange(step % 9, 93, 46)], Use.READ)
    there = ~np.isin(kept, store.below()) & (store._frame_P[kept] >= 0)
    assert there.all() == prefers and there.any() == prefers
    if not prefers:
        return
    store.at(others, Use.CHANGE)  # more than there are frames
    for _ in range(3):
        store.at(others[:40], Use.CHANGE)
    store.at(kept, Use.READ)
    for step in range(300):
        store.at(others[np.arange(step % 7, 93, 31)], Use.CHANGE)
    assert (store._frame_P[kept] >= 0).all(), "as well where they had gone"


def test_a_bit_that_flips_in_the_file_is_found(tmp_path: Path) -> None:
    stores = TieredStore(20_000, 16, ScratchFile(tmp_path, READER), 4), store_of(100, 1)[0]
    for store in stores:
        for position in range(0, store.rows, 50 if store.rows > 100 else 1):
            store.at(np.arange(position, min(store.rows, position + 50)), Use.REPLACE)
        below = store.below()
        assert len(below)
        flipped = int(below[len(below) // 2])
        store.flip_below_(flipped, 77)
        assert not len(store.take_damaged())
        store.look(below)
        assert store.take_damaged().tolist() == [flipped]


def tier_of(folder: Path) -> tuple[Tier, Trouble, Any]:
    """A tier whose disk may be in trouble, and a store of it with records in the file."""
    tier = Tier(folder, 64 << 20, trouble=Trouble())
    assert tier.trouble is not None
    store: Any = tier.make(20_000, 16, False, True)
    store.frames = 10
    for position in range(0, 20_000, 500):
        store.at(np.arange(position, position + 500), Use.REPLACE)
    assert len(store.below())
    return tier, tier.trouble, store


def test_trouble_of_a_disk_is_felt(tmp_path: Path) -> None:
    _, trouble, store = tier_of(tmp_path)
    trouble.begin("errors")
    store.look(store.below()[:1])
    assert store.figures().failed_reads == 2, "once more, and in vain"
    assert len(store.take_damaged()) == 1
    trouble.begin("full")
    with pytest.raises(TierFailed, match="cannot be written: No space left on device"):
        for position in range(0, 20_000, 500):
            store.at(np.arange(position, position + 500), Use.REPLACE)
    for again in (lambda: store.at(np.arange(3), Use.READ), lambda: store.look(np.arange(3))):
        with pytest.raises(TierFailed):
            again()


def test_what_a_rebuild_asks_for_is_read_once_and_beside_the_node() -> None:
    store, _ = store_of(200, 40)
    for position in range(200):
        put(store, position, position % 250)
    folded = store.below()[:3]
    for position in folded:
        view = store.at(np.array([position]), Use.FOLD)  # of which only what was folded is in memory
        view.records_XB[view.at_U] ^= 1
        view.seals_X[view.at_U] ^= seals.seals_of(np.ones((1, 16), np.uint8))
    asked = np.union1d(folded, store.below())
    reading = store.absent(asked)
    assert reading is not None
    reading.run()
    reads = store.file.reads
    assert reads
    view = store.look(asked, reading)
    assert store.file.reads == reads, "what was read is not read again"
    assert not len(seals.broken(view.records_XB, view.seals_X, view.at_U))
    assert [int(x) for x in view.records_XB[view.at_U, 0]] == [
        position % 250 ^ (position in folded) for position in asked
    ]


def test_what_is_asked_for_twice_at_once_is_what_it_is() -> None:
    """It was XORed twice with what was folded into it: what had been folded was all that was left, with a seal that
    fits."""
    store, _ = store_of(200, 40)
    for position in range(200):
        put(store, position, position % 250)
    position = int(store.below()[5])
    view = store.at(np.array([position]), Use.FOLD)
    view.records_XB[view.at_U] ^= 1
    view.seals_X[view.at_U] ^= seals.seals_of(np.ones((1, 16), np.uint8))
    asked = np.array([position, store.below()[0], position, store.below()[0]])
    reading = store.absent(asked)
    assert reading is not None
    reading.run()
    view = store.look(asked, reading)
    assert not len(seals.broken(view.records_XB, view.seals_X, view.at_U))
    assert view.records_XB[view.at_U, 0].tolist() == [at % 250 ^ (at == position) for at in asked.tolist()]
    assert value_of(store, position) == position % 250 ^ 1


def test_what_waits_to_be_read_takes_no_memory_for_records() -> None:
    """A server has as many such readings as others ask it for, beside its budget."""
    store, _ = store_of(200, 40)
    for position in range(200):
        put(store, position, position % 250)
    reading = store.absent(store.below())
    assert reading is not None

    def is_there() -> bool:
        return any(getattr(value, "nbytes", 0) >= 16 * len(reading.positions_A) for value in vars(reading).values())

    assert not is_there()
    reading.run()
    assert is_there()


@pytest.mark.parametrize("awaited", [False, True])
def test_what_was_read_is_not_kept_until_more_is(tmp_path: Path, awaited: bool) -> None:
    """The last reading kept its slot, and all frames of that, on a server that the slot had left."""
    tier, slot, done = Tier(tmp_path, 1 << 20), Few(None), list[int]()
    gone = weakref.ref(slot)
    tier.run(lambda slot=slot: None, lambda slot=slot: done.append(1), awaited)  # type: ignore[misc]
    del slot
    wait_until(lambda: bool(done), 60.0, "it has run")
    wait_until(lambda: gone() is None, 60.0, "nobody keeps it")


class Few:
    """A system that is short of memory: it takes a few requests of a call only, and does not wait for results then."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc

    def syscall(self, number: int, *arguments: Any) -> int:
        if number == ENTER:
            handle, submit, least, *more = arguments
            few = min(submit, 3)
            arguments = handle, few, least if few == submit else 0, *more
        return int(self._libc.syscall(number, *arguments))


def test_reads_of_which_the_system_takes_a_few_at_a_time_all_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had not taken was never read, and the reader waited for ever."""
    libc = Few(ctypes.CDLL(None, use_errno=True))
    monkeypatch.setattr("torch_ecrec.records.tiers.disk.ctypes.CDLL", lambda *_, **__: libc)
    try:
        uring = Uring()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    file, many, draws = ScratchFile(tmp_path, uring), 600, np.random.default_rng(1)
    content, into = (untouched(many * BLOCK_BYTES, np.uint8) for _ in range(2))
    content[:] = draws.integers(0, 256, len(content), np.uint8)
    file.write(0, content)
    order = draws.permutation(many)
    lengths = np.full(many, BLOCK_BYTES)
    results = file.read(order * BLOCK_BYTES, lengths, into, np.arange(many) * BLOCK_BYTES)
    assert np.array_equal(results, lengths)
    assert np.array_equal(into.reshape(many, -1), content.reshape(many, -1)[order])


def test_a_system_with_room_for_few_rings_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.12 they count as locked memory, of which there may be room for less than all."""
    ring, made = disk._Ring, list[Any]()

    def make() -> Any:
        if made:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(ring())
        return made[0]

    try:
        make()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    made.clear()
    monkeypatch.setattr(disk, "_Ring", make)
    found = disk.reader("uring")
    file, (content, into) = ScratchFile(tmp_path, found), (untouched(BLOCK_BYTES, np.uint8) for _ in range(2))
    content[:] = 7
    file.write(0, content)
    for _ in range(3):
        into[:] = 0
        assert file.read(np.array([0]), np.array([BLOCK_BYTES]), into, np.array([0])).tolist() == [BLOCK_BYTES]
        assert (into == 7).all()


def test_a_disk_that_hangs_is_seen_from_another_thread(tmp_path: Path) -> None:
    tier, trouble, store = tier_of(tmp_path)
    assert tier.unanswered_s == 0.0
    trouble.begin("hung")
    arrived: list[bool] = []
    tier.run(lambda: store.look(store.below()[:1]), lambda: arrived.append(True))
    wait_until(lambda: tier.unanswered_s > 0.2, 60.0, "somebody waits for the disk")
    host = SimpleNamespace(tier=tier, settings=SimpleNamespace(lease_s=0.1))
    with mock.patch.object(tier, "folder", Path("/data")):
        error = Host.stalled(host)  # type: ignore[arg-type]
    assert isinstance(error, TierFailed) and "the disk of /data has not answered for 0." in str(error)
    host.settings.lease_s = 1000.0
    assert Host.stalled(host) is None and not arrived  # type: ignore[arg-type]
    trouble._until_s = 0.0  # it answers after all
    wait_until(lambda: bool(arrived) and tier.unanswered_s == 0.0, 60.0, "it has answered")


def test_what_a_read_raises_is_told_and_the_next_ones_run(tmp_path: Path) -> None:
    tier, errors, done = Tier(tmp_path, 1 << 20), list[BaseException](), list[int]()
    tier.on_error = errors.append

    def fails() -> None:
        raise TierFailed("no more")

    tier.run(fails, lambda: done.append(1))
    tier.run(lambda: None, fails)
    tier.run(lambda: None, lambda: done.append(2))
    wait_until(lambda: done == [2], 60.0, "the last one has run")
    assert [str(error) for error in errors] == ["no more"] * 2


def test_a_slot_that_nobody_else_has_is_taken_where_memory_is_too_little_and_one_that_leaves_gives_it_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To refuse a lost slot is to lose those that are here with it."""
    rows, nbytes = 20_000, 64
    needed = least_budget(need_of([(rows, nbytes)]))
    assert "is too little for the records of this server" in too_little(Tier(tmp_path, needed - 1000), rows, nbytes)
    tier = Tier(tmp_path, 2 * needed - 1000)
    first: Any = tier.make(rows, nbytes, False, True)
    alone = first.frames
    second: Any = tier.make(rows, nbytes, False, True, must=True)
    assert "bytes more than `tier_memory_bytes`" in caplog.text
    assert alone > first.frames == second.frames == rows // LEAST_SHARE
    assert "is too little for the records of this server" in too_little(tier, rows, nbytes)
    caplog.clear()
    tier.let_go([second])
    assert first.frames == alone and caplog.text == "", "though somebody still holds it"
    second.at(np.arange(100), Use.CHANGE)
    in_memory: Any = Tier(tmp_path, 3 << 20, parities_only=True)
    kept = in_memory.make(1000, nbytes, False, True)
    below = in_memory.make(rows, nbytes, True, True)
    frames = below.frames
    other = in_memory.make(5000, nbytes, False, True)
    assert below.frames < frames
    in_memory.let_go([other])
    assert below.frames == frames and kept.rows == 1000


@pytest.mark.parametrize("parities_only", [False, True])
def test_the_memory_that_is_named_as_enough_is_enough_for_all_stores_of_a_slot(
    parities_only: bool, tmp_path: Path
) -> None:
    """Also where records are in memory whatever is asked for: of those an eighth is not for logs."""
    sizes = [(20_000, 64, False), (10_000, 64, True), (90_000, 32, False), (45_000, 32, True)]
    with pytest.raises(TierFailed) as refused:
        Tier(tmp_path, 1000, parities_only).require_room(sizes)
    needed = re.search(r"at least ([\d,]+)", str(refused.value))
    assert needed is not None
    tier = Tier(tmp_path, int(needed[1].replace(",", "")), parities_only)
    tier.require_room(sizes)
    stores = [tier.make(rows, nbytes, parity, True) for rows, nbytes, parity in sizes]
    assert len(tier.stores) == (2 if parities_only else 4) and not tier.over_bytes
    assert [store.in_place for store in stores] == [parities_only and not parity for _, _, parity in sizes]
    with pytest.raises(TierFailed, match="is too little"):
        tier.require_room(sizes[:1])


def test_a_disk_must_have_room_for_all_stores_of_a_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files become longer as records are written: what those that are here will take is not free."""
    whole, sizes = os.statvfs(tmp_path), [(20_000, 64, False), (20_000, 64, True)]
    most = most_on_disk(20_000, 64)

    class Small:
        f_bavail, f_frsize = (2 * most) // whole.f_frsize, whole.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda _: Small)
    tier = Tier(tmp_path, 64 << 20)
    with pytest.raises(TierFailed, match=rf"bytes left, and 40,000 records need up to {2 * most:,}$"):
        tier.require_room(sizes)
    Small.f_bavail += 1
    tier.require_room(sizes)
    made = [tier.make(rows, nbytes, parity, True) for rows, nbytes, parity in sizes]
    assert len(made) == len(tier.stores)
    with pytest.raises(TierFailed, match="60,000 records need up to"):
        tier.make(20_000, 64, False, True)


@pytest.mark.skipif(sys.platform != "linux", reason="how much memory is promised is Linux's word")
def test_a_store_may_be_larger_than_the_memory_of_the_host(tmp_path: Path) -> None:
    """Linux refuses memory that is more than it has, unless it is told that most of it is never written."""
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("this system promises no more than it has, whoever asks")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    nbytes = 1 << 20
    rows = 2 * total // nbytes
    store = TieredStore(rows, nbytes, ScratchFile(tmp_path, READER), 2)
    for position in (0, rows - 1, rows // 2, 7):
        view = store.at(np.array([position]), Use.CHANGE)
        view.records_XB[view.at_U] = position % 251
        view.seals_X[view.at_U] = seals.seals_of(view.records_XB[view.at_U])
    assert [int(store.look(np.array([at])).records_XB[0, 0]) for at in (0, rows - 1, rows // 2, 7)] == [
        at % 251 for at in (0, rows - 1, rows // 2, 7)
    ]
    assert store.memory_bytes < 64 << 20


def test_what_a_system_promises_to_nobody_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: Any, **__: Any) -> Any:
        raise MemoryError("no 7 bytes of memory: Cannot allocate memory")

    monkeypatch.setattr(tiered, "Memory", no_more)
    with pytest.raises(TierFailed, match=r"^no 7 bytes .* `vm.overcommit_memory` of this Linux is 2, set it to 0 or 1"):
        Tier(tmp_path, 64 << 20).make(20_000, 64, False, True)


@pytest.mark.parametrize("seed", range(6))
def test_weeks_of_calls_are_counted_anew_and_nothing_else_goes_than_would_have(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more calls in weeks of training than numbers for them."""

    def whereabouts() -> list[Any]:
        doing, found = Doing(tiny(60, 3, 9), seed), []
        for _ in range(8):
            doing.go(25)
            store: Any = doing.shards[1].stores[0]
            found += [store._frame_P.tolist(), store._place_P.tolist(), store._count_P.tolist()]
        return found

    once, counted = whereabouts(), []
    anew = TieredStore._count_calls_anew
    monkeypatch.setattr(tiered, "LAST_CALL", 9)
    monkeypatch.setattr(TieredStore, "_count_calls_anew", lambda store: (counted.append(store._call), anew(store)))
    assert whereabouts() == once
    assert len(counted) > 20 and max(counted) == 9


def test_calls_have_numbers_as_long_as_anybody_trains() -> None:
    store, _ = store_of(50, 4)
    put(store, 7, 7)
    store._call = store._steps[1] = (1 << 32) - 4
    for value in range(30):
        put(store, value, value)
        store.at(np.array([value, 7]), Use.CHANGE)
        reading, _ = store.want(np.array([0, 5]))
        if reading is not None:
            reading.run()
            store.arrive(reading)
    assert store._call < 1000 and [value_of(store, at) for at in (0, 7, 29)] == [0, 7, 29]


def too_little(tier: Tier, rows: int, nbytes: int) -> str:
    with pytest.raises(TierFailed) as found:
        tier.make(rows, nbytes, False, True)
    return str(found.value)


def test_a_folder_that_was_tidied_away_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An empty one below /tmp goes after some days. A server that took a lost slot ended, and its own was lost."""
    (tmp_path / "disk").mkdir()
    tier = Tier(tmp_path / "disk" / "tier", 64 << 20)
    tier.folder.mkdir()
    tier.make(1000, 64, parity=False, sealed=True)
    tier.folder.rmdir()
    store = tier.make(1000, 64, parity=False, sealed=True, must=True)
    assert isinstance(store, TieredStore) and "tier was gone, and was made again" in caplog.text
    tier.folder.rmdir()
    (tmp_path / "disk").rmdir()  # perhaps the disk is away: a folder made there would be on another one
    with pytest.raises(TierFailed, match=r"no file can be made in .*tier: No such file"):
        tier.make(1000, 64, parity=False, sealed=True, must=True)


def test_a_lost_slot_is_taken_also_where_the_disk_may_be_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, whole = Tier(tmp_path, 64 << 20), os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, whole.f_frsize

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    assert "bytes left, and 20,000 records need up to" in too_little(tier, 20_000, 64)
    assert tier.make(20_000, 64, False, True, must=True).rows == 20_000
    assert "goes on until it is full, since nobody else has them" in caplog.text


def test_no_bit_flips_where_a_record_is_being_read(tmp_path: Path) -> None:
    """What is read was there before, and once it has a frame nobody reads the file: the flip would never be found."""
    _, _, store = tier_of(tmp_path)
    below = store.below()
    reading, coming = store.want(below[:7])
    assert coming and reading is not None
    assert store.below().tolist() == below[7:].tolist()
