"""Captures while steps come and go, and what they keep: against the records as they were, copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kept import small_job

from torch_ecrec.codec import LinearCode
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.layout.stripes import layout_of
from torch_ecrec.records import captured
from torch_ecrec.records.captured import CLEAN, MARKED
from torch_ecrec.server.capture import Capture, Portion

POOLS = (1, 70, 16 << 20)  # bytes: a record in each piece; some; all in one


class Trained:
    """What a slot holds, and all of its records after every step, copied."""

    def __init__(self, rng: np.random.Generator, sealed: bool) -> None:
        job = small_job(rows=60)
        layouts = tuple(layout_of(3, 2, 1, table_group.rows) for table_group in job.table_groups)
        self.rng = rng
        self.held = Holdings(job, LinearCode(2, 1), layouts, 0, 0, [0, 0, 0], fresh=True, sealed=sealed)
        self.after = {0: self.records()}

    def records(self) -> list[Any]:
        return [shard.gather(np.arange(shard.data_rows)) for shard in self.held.shards]

    def step(self, capture: Capture | None = None) -> None:
        held, step = self.held, self.held.rule.applied + 1
        touch = self.rng.choice([0.0, 0.1, 0.5, 1.0])
        positions = [np.flatnonzero(self.rng.random(shard.data_rows) < touch) for shard in held.shards]
        values = [
            self.rng.integers(0, 256, (len(at), shard.schema.nbytes), np.uint8)
            for at, shard in zip(positions, held.shards, strict=True)
        ]
        changes = [shard.overwrite_(*of) for shard, *of in zip(held.shards, positions, values, strict=True)]
        held.rule.on_applied(step)
        held.log.append(step, positions, [c.deltas_UB for c in changes], [c.seals_U for c in changes])
        if capture is not None:
            capture.before_forgetting(positions, [c.deltas_UB for c in changes])
        self.after[step] = self.records()

    def go_back(self, step: int) -> None:
        self.held.undo_after(step)
        self.held.rule.go_back(step)
        assert all((got == was).all() for got, was in zip(self.records(), self.after[step], strict=True))


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("pool", POOLS)
def test_a_capture_is_of_its_step_whatever_comes_and_is_undone(
    pool: int, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "POOL_BYTES", pool)
    rng, undone, kept = np.random.default_rng([pool, sealed]), 0, 0
    for _ in range(60):
        trained = Trained(rng, sealed)
        held = trained.held
        for _ in range(rng.integers(0, 4)):
            trained.step()
        of = int(rng.integers(held.log.floor, held.rule.applied + 1))
        share = rng.choice([0.3, 1.0])
        marks = [np.where(rng.random(shard.data_rows) < share, MARKED, CLEAN).astype(np.uint8) for shard in held.shards]
        wanted = [np.flatnonzero(marks_P) for marks_P in marks]
        capture = Capture(held, of, marks)
        portions, peak, most = [], 0, int(rng.choice([1, 60, 1000]))
        while (portion := capture.next_portion(most)) is not None:
            assert isinstance(portion, Portion), "nothing is on a disk"
            portions.append(portion)
            peak = max(peak, capture.kept_bytes)
            while rng.random() < 0.3:
                trained.step(capture)
            if rng.random() < 0.1 and held.rule.applied > of:
                trained.go_back(int(rng.integers(of, held.rule.applied)))
                undone += 1
        for table_group, at in enumerate(wanted):
            mine = [portion for portion in portions if portion.table_group == table_group]
            rows = np.concatenate([portion.rows_N for portion in mine])
            assert np.array_equal(rows, held.layouts[table_group].row_at(0, at))
            assert (np.concatenate([p.records_NB for p in mine]) == trained.after[of][table_group][at]).all()
        kept += peak
        assert not any(len(shard.broken_run(0, shard.data_rows)) for shard in held.shards)
    assert undone > 20 and kept > 1000
