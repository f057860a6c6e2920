"""What comes of a simulation, and whether it is what an undisturbed one gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.scenario import Scenario
from torch_ecrec.server.slot import Slot


@dataclass
class SimulationResult:
    """What came of a simulation. Keys are (step, trainer), steps counted from the first of training."""

    scenario: Scenario
    lookups: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    dense: dict[int, float] = field(default_factory=dict)  # after each step
    reads: dict[int, torch.Tensor] = field(default_factory=dict)  # what was read for each load that changes
    overwritten: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (number, trainer): rows before it
    records: list[torch.Tensor] = field(
        default_factory=list
    )  # of each table group, (rows, M) float32: their memory in words
    snapshots: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (step, trainer)
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    kills: int = 0  # of servers
    trainer_kills: int = 0
    coordinator_kills: int = 0
    leaves: int = 0  # of servers, told to end
    control_messages: int = 0
    fenced: int = 0
    resumed: list[int] = field(default_factory=list)  # steps of training after which new trainers went on
    asked_ahead: int = 0  # lookups that travelled with the push of the step before
    announced: int = 0  # messages with which trainers told what they would look up later
    loaded_again: int = 0  # how often new trainers took back what lost ones had loaded
    fatal: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    overdue: list[int] = field(default_factory=list)
    longest: dict[str, int] = field(default_factory=dict)  # of each bounded thing, in steps

    def check_against(self, undisturbed: SimulationResult) -> None:
        """Raises AssertionError naming the first difference."""
        assert self.fatal is None, f"stopped: {self.fatal}"
        for number, read in undisturbed.reads.items():
            assert torch.equal(self.reads[number], read), f"what was read for load {number} differs"
        for key, read in undisturbed.overwritten.items():
            assert torch.equal(self.overwritten[key], read), f"what was read before (overwrite, trainer) {key} differs"
        for key, weights in undisturbed.lookups.items():
            for table_group, (mine, theirs) in enumerate(zip(self.lookups[key], weights, strict=True)):
                assert torch.equal(mine, theirs), (
                    f"lookup of (step, trainer) {key} differs in table group {table_group}"
                )
        assert self.losses == undisturbed.losses, "losses differ"
        assert self.dense == undisturbed.dense, "dense values differ"
        for table_group, (mine, theirs) in enumerate(zip(self.records, undisturbed.records, strict=True)):
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), (
                f"records of table group {table_group} differ"
            )
        every = self.scenario.snapshot_every
        last = self.scenario.steps // every * every if every else 0
        for trainer in range(self.scenario.trainers if last else 0):
            mine, theirs = self.snapshots[last, trainer], undisturbed.snapshots[last, trainer]
            assert torch.equal(mine, theirs), f"the last snapshot of trainer {trainer} differs"

    def collect(self, slots: Sequence[Slot]) -> None:
        """Takes records and snapshots from the slots, once all is settled: the live incarnation of each, in order."""
        job = self.scenario.job
        for s, table_group in enumerate(job.table_groups):
            records = np.zeros((table_group.rows, table_group.schema.nbytes // 4), dtype=np.float32)
            for slot in slots:
                layout = slot.layouts[s]
                positions = np.arange(layout.rows_on(slot.index), dtype=np.int64)
                padding = np.arange(layout.rows_on(slot.index), layout.data_rows(slot.index), dtype=np.int64)
                assert not slot.shards[s].gather(padding).any(), f"padding of slot {slot.index} was written to"
                records[layout.row_at(slot.index, positions)] = slot.shards[s].gather(positions).view(np.float32)
            self.records.append(torch.from_numpy(records))
        for index in range(min(self.scenario.code.parities + 1, len(slots))):
            for (_, trainer), (header, payload) in slots[index].snapshots.parts.items():
                key = header[0], trainer
                known = self.snapshots.setdefault(key, payload)
                assert torch.equal(known, payload), f"the snapshots of (step, trainer) {key} differ between slots"
