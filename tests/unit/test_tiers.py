"""A tiered store beside one in memory: whatever is done to both, they are the same, bit for bit."""

from __future__ import annotations

import os
import re
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
    store_of,
    tiny,
)

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import Use
from torch_ecrec.records.tiers import log as segments
from torch_ecrec.records.tiers import tiered
from torch_ecrec.records.tiers.budget import LEAST_SHARE, Tier
from torch_ecrec.records.tiers.disk import ScratchFile
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
    needed = re.search(r"at least ([\d,]+)", too_little(Tier(tmp_path, 1000), rows, nbytes))
    assert needed is not None
    tier = Tier(tmp_path, 2 * int(needed[1].replace(",", "")) - 1000)
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


def too_little(tier: Tier, rows: int, nbytes: int) -> str:
    with pytest.raises(TierFailed) as found:
        tier.make(rows, nbytes, False, True)
    return str(found.value)


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
