"""Tiered stores beside those in memory, and random things that are done to both: they stay the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from harness.tiers import SmallTier, VirtualFile

from torch_ecrec.codec import seals
from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.records.captured import MARKED
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import RecordStore, Use
from torch_ecrec.records.tiers.disk import ScratchFile, reader
from torch_ecrec.records.tiers.log import SegmentLog
from torch_ecrec.records.tiers.tiered import TieredStore

READER = reader()
KIND = optimizer("rowwise_adagrad")
CODE = LinearCode(2, 2)


def pair(rows: int, dim: int, frames: int, folder: Path, first: bool = True) -> tuple[Shard, Shard]:
    """Two shards with the same first values: in memory, and in tiers."""
    schema = KIND.schema(dim)

    def make(count: int, nbytes: int, parity: bool, sealed: bool) -> RecordStore:
        assert sealed
        return TieredStore(count, nbytes, ScratchFile(folder, READER), frames)

    shards = Shard(schema, rows, rows), Shard(schema, rows, rows, stores=make)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    for shard in shards if first else ():
        shard.initialise_(initial.of)
        shard.initialise_(lambda at: CODE.encode([initial.of(at), initial.of(at)])[0], parity=True)
    return shards


def tiny(rows: int, dim: int, frames: int) -> tuple[Shard, Shard]:
    """As `pair`, with a file of tiny segments in memory."""
    schema = KIND.schema(dim)
    shards = Shard(schema, rows, rows), Shard(schema, rows, rows, stores=SmallTier(frames).make)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    for shard in shards:
        shard.initialise_(initial.of)
    return shards


def both(shards: tuple[Shard, Shard], action: Any) -> Any:
    """Does something to both, and returns what the one in memory says."""
    here, there = (action(shard) for shard in shards)
    pairs = [(here, there)] if isinstance(here, np.ndarray) else list(zip(here or (), there or (), strict=True))
    for one, other in pairs:
        assert one.shape == other.shape and one.tobytes() == other.tobytes()
    return here


class Doing:
    """Does random things to both shards of a pair."""

    def __init__(self, shards: tuple[Shard, Shard], seed: int) -> None:
        self.shards, self.rng = shards, np.random.default_rng(seed)
        self.rows, self.dim = shards[0].data_rows, shards[0].schema.dim
        self.undo: list[Any] = []
        self.coming: list[Any] = []  # readings, with what is done with each once it has run
        self.passing: list[Any] = []  # readings of what was only looked at, with what was asked for
        self.step = 0

    def some(self, most: int = 12) -> Any:
        count = int(self.rng.integers(0, min(most, self.rows) + 1))
        # skewed, so that some are hot
        return np.unique((self.rows * self.rng.random(count) ** 3).astype(np.int64))

    def apply(self) -> None:
        at, self.step = self.some(), self.step + 1
        gradients = self.rng.standard_normal((len(at), self.dim), np.float32)
        deltas = both(self.shards, lambda s: s.apply_(KIND, merge([(at, gradients)]), 0.1, self.step, {}))[0]
        self.undo.append((at, deltas))
        self.fold(at, deltas)

    def fold(self, at: Any, deltas: Any) -> None:
        at = np.where(self.rng.random(len(at)) < 0.1, -1, at)
        factors = np.full(len(at), CODE.coefficients[1, 1])
        both(self.shards, lambda s: s.fold_(CODE, at, deltas, factors))

    def take_back(self) -> None:
        if self.undo:
            at, deltas = self.undo.pop()
            both(self.shards, lambda s: s.undo_(at, deltas))

    def lookup(self) -> None:
        at = self.some()
        both(self.shards, lambda s: s.gather_weights(at))
        both(self.shards, lambda s: s.gather_weights(at, bfloat16=True))
        lengths = np.ones(len(at), np.int32)
        both(self.shards, lambda s: s.pool(at.astype(np.int32), lengths))

    def ahead(self) -> None:
        """Records are asked for, and bases of parities, that come when others have changed and moved them."""
        tier = self.shards[1]
        tier.pin([self.some() for _ in range(int(self.rng.integers(3)))])
        reading, _ = tier.want(self.some())
        if reading is not None:
            self.coming.append((reading, lambda one=reading: tier.arrive(one)))
        for one, parity in tier.soon():
            self.coming.append((one, lambda one=one, parity=parity: tier.settle(one, parity)))
        if self.coming and self.rng.random() < 0.5:
            at = int(self.rng.integers(len(self.coming)))
            reading, then = self.coming[at]
            if reading is not None:
                reading.run()
            self.coming[at] = (None, then)  # read long before it arrives
        while self.coming and self.rng.random() < 0.4:
            reading, then = self.coming.pop(int(self.rng.integers(len(self.coming))))
            if reading is not None:
                reading.run()
            then()

    def pass_by(self) -> None:
        """Records are read for a rebuild while others change and move them; `gather_whole` gives them as they are."""
        parity, at = bool(self.rng.integers(2)), self.some()
        self.passing.append((at, parity, self.shards[1].absent(at, parity), False))
        for i, (at, parity, reading, has_run) in enumerate(self.passing):
            if reading is not None and not has_run and self.rng.random() < 0.5:
                reading.run()
                self.passing[i] = (at, parity, reading, True)
        while self.passing and self.rng.random() < 0.4:
            at, parity, reading, has_run = self.passing.pop(int(self.rng.integers(len(self.passing))))
            if reading is not None and not has_run:
                reading.run()
            found = self.shards[1].gather_whole(at, parity, reading)
            for here, there in zip(self.shards[0].gather_whole(at, parity), found, strict=True):
                assert here.tobytes() == there.tobytes()

    def gather(self) -> None:
        parity, at = bool(self.rng.integers(2)), self.some()
        both(self.shards, lambda s: s.gather(at, parity))
        both(self.shards, lambda s: s.seals_at(at, parity))

    def overwrite(self) -> None:
        at, parity = self.some(), bool(self.rng.integers(2))
        values = self.rng.integers(0, 256, (len(at), self.shards[0].schema.nbytes), np.uint8)
        if parity:
            both(self.shards, lambda s: s.scatter_(at, values, True))
        else:
            both(self.shards, lambda s: s.overwrite_(at, values))

    def install(self) -> None:
        at, parity = self.some(), bool(self.rng.integers(2))
        missing = np.zeros(self.rows, np.uint8)
        missing[at[self.rng.random(len(at)) < 0.7]] = 1
        values = [self.rng.integers(0, 256, (len(at), self.shards[0].schema.nbytes), np.uint8) for _ in range(2)]
        both(self.shards, lambda s: np.array(s.install_(CODE, at, missing.copy(), [1, 2], values, 0, parity)))

    def scrub(self) -> None:
        first, end = sorted(self.rng.integers(0, self.rows + 1, 2).tolist())
        assert not len(both(self.shards, lambda s: s.broken_run(first, end, bool(first % 2))))
        at = self.some()
        assert not len(both(self.shards, lambda s: s.broken(at, True)))

    def capture(self) -> None:
        """A checkpoint, between whose portions steps go on."""
        marked = self.rng.random(self.rows) < 0.7
        captured = [s.captured(np.where(marked, np.uint8(MARKED), np.uint8(0))) for s in self.shards]
        while not captured[0].is_over:
            at = self.some()
            merged = merge([(at, np.ones((len(at), self.dim), np.float32))])
            deltas = both(self.shards, lambda s, merged=merged: s.apply_(KIND, merged, 0.1, 1, {}))[0]
            for one in captured:
                one.keep(at, deltas)
            most = int(self.rng.integers(1, 9))
            reading = captured[1].absent(most)
            if reading is not None:
                reading.run()
            at = self.some()
            merged = merge([(at, np.ones((len(at), self.dim), np.float32))])
            deltas = both(self.shards, lambda s, merged=merged: s.apply_(KIND, merged, 0.1, 1, {}))[0]
            for one in captured:
                one.keep(at, deltas)
            portions = [one.portion(most, reading if one is captured[1] else None) for one in captured]
            for here, there in zip(*portions, strict=True):
                assert here.tobytes() == there.tobytes()
            assert not len(portions[0][2])

    def prefer(self) -> None:
        edges = np.sort(self.rng.integers(0, self.rows + 1, 4)).tolist()
        both(self.shards, lambda s: s.keep_last_([(edges[0], edges[1]), (edges[2], edges[3])]))

    def go(self, steps: int) -> None:
        verbs = [self.apply] * 6 + [self.lookup] * 3 + [self.take_back, self.gather, self.overwrite, self.install]
        verbs += [self.scrub, self.capture, self.prefer, *[self.ahead] * 4, *[self.pass_by] * 3]
        for _ in range(steps):
            verbs[int(self.rng.integers(len(verbs)))]()
        every = np.arange(self.rows)
        for parity in (False, True):
            both(self.shards, lambda s, parity=parity: s.gather(every, parity))
            both(self.shards, lambda s, parity=parity: s.seals_at(every, parity))
            assert not len(self.shards[1].broken(every, parity))


def store_of(rows: int, frames: int) -> tuple[TieredStore, VirtualFile]:
    """A store of records of 16 bytes, and its file."""
    store: Any = SmallTier(frames).make(rows, 16, False, True)
    return store, store.file._file


def put(store: TieredStore, position: int, value: int) -> None:
    """Overwrites a record."""
    view = store.at(np.array([position]), Use.REPLACE)
    view.records_XB[view.at_U] = value
    view.seals_X[view.at_U] = seals.seals_of(view.records_XB[view.at_U])


def value_of(store: TieredStore, position: int) -> int:
    view = store.look(np.array([position]))
    assert not len(seals.broken(view.records_XB, view.seals_X, view.at_U))
    return int(view.records_XB[view.at_U[0], 0])


def check_a_place_that_others_had_meanwhile() -> None:
    """The record is at the place again where it was when it was read, and is another."""
    store, _ = store_of(3, 1)
    put(store, 2, 7)  # so that a segment ends with record 0
    for value in range(20):
        put(store, 0, value)
        put(store, 1, value)  # in its place: it goes to the file
        if 0 in store.below() and store.file.segments > 2:
            break
    reading, coming = store.want(np.array([0]))
    assert reading is not None and coming
    reading.run()
    place = int(reading.places_A[0])
    for value in range(100, 200):
        put(store, 0, value)
        put(store, 1, value)
        if int(store._place_P[0]) == place and 0 in store.below():
            break
    again, _ = store.want(np.array([0]))
    assert again is not None, "it is on its way once more"
    store.arrive(reading)
    assert value_of(store, 0) == value


def check_cleaning_that_cannot_read() -> None:
    store, file = store_of(200, 40)
    for position in range(200):
        put(store, position, position % 250)
    kept = np.arange(20)
    store.at(kept, Use.READ)  # in memory, as they are in the file
    before = store.file.segments
    with mock.patch.object(file, "_read", lambda offset, length, into: -5):
        chosen = np.ones(before, np.bool_)
        chosen[store.file.open_segment] = False
        with mock.patch.object(SegmentLog, "to_clean", lambda log: chosen):
            store._clean()
    assert not set(kept.tolist()) & set(store.take_damaged().tolist()), "only what was not in memory is lost"
    store.frames = 1
    store.at(np.arange(100, 140), Use.REPLACE)
    for position in kept.tolist():
        assert value_of(store, position) == position


def check_frames_that_were_needed_once_are_given_back() -> None:
    store, _ = store_of(9000, 100)
    for position in range(0, 9000, 1000):
        view = store.at(np.arange(position, position + 1000), Use.REPLACE)
        view.records_XB[view.at_U] = position // 1000
        view.seals_X[view.at_U] = seals.seals_of(view.records_XB[view.at_U])
    store.at(np.arange(9000), Use.READ)
    held = store.memory_bytes
    assert store.in_memory == 9000
    at = np.array([3, 4567, 8999])
    for _ in range(4):  # steps: what the last but one has used stays
        store.at(at, Use.CHANGE)
    assert store.in_memory <= 200 and store.memory_bytes < held - 7000 * 16
    for position in range(0, 9000, 100):
        assert value_of(store, position) == position // 1000
    assert all(value_of(store, int(position)) == position // 1000 for position in at)
    store.at(np.arange(9000), Use.READ)
    assert not len(store.take_damaged()) and not len(store.broken_run(0, 9000))


def check_zeros_and_other_records() -> None:
    """A write that never came, or a read from somewhere else: it is not what the store knows the seal of."""
    store, file = store_of(64, 1)
    for position in range(64):
        put(store, position, position + 1)
    below = store.below()
    assert len(below) > 40
    content = file._content.copy()
    for wrong in (np.zeros_like(content), np.roll(content, 64)):
        file._content = wrong
        view = store.look(below)
        assert len(seals.broken(view.records_XB, view.seals_X, view.at_U)) == len(below)
        assert store.take_damaged().tolist() == below.tolist()
    file._content = content
    assert not len(seals.broken(*store.look(below))) and not len(store.take_damaged())
