"""A tiered store beside one in memory: whatever is done to both, they are the same, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.records.captured import MARKED
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import RecordStore
from torch_ecrec.records.tiers import log as segments
from torch_ecrec.records.tiers.disk import ScratchFile, reader
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
        self.step = 0
        self.coming: list[Any] = []  # readings, with what is done with each once it has run

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

    def ahead(self) -> None:
        """Records are asked for, and bases of parities, that come when others have changed and moved them."""
        tier = self.shards[1]
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

    def lookup(self) -> None:
        at = self.some()
        both(self.shards, lambda s: s.gather_weights(at))
        both(self.shards, lambda s: s.gather_weights(at, bfloat16=True))
        lengths = np.ones(len(at), np.int32)
        both(self.shards, lambda s: s.pool(at.astype(np.int32), lengths))

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
        missing = np.zeros(self.rows, bool)
        missing[at[self.rng.random(len(at)) < 0.7]] = True
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
            portions = [one.portion(most) for one in captured]
            for here, there in zip(*portions, strict=True):
                assert here.tobytes() == there.tobytes()
            assert not len(portions[0][2])

    def go(self, steps: int) -> None:
        verbs = (
            [self.apply] * 6
            + [self.lookup] * 3
            + [self.ahead] * 4
            + [self.take_back, self.gather, self.overwrite, self.install]
        )
        verbs += [self.scrub, self.capture]
        for _ in range(steps):
            verbs[int(self.rng.integers(len(verbs)))]()
        every = np.arange(self.rows)
        for parity in (False, True):
            both(self.shards, lambda s, parity=parity: s.gather(every, parity))
            both(self.shards, lambda s, parity=parity: s.seals_at(every, parity))
            assert not len(self.shards[1].broken(every, parity))


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
