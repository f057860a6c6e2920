"""What a step does to the records of a slot: gradients merged and handed to the optimizer, or initial values loaded.

Returns what changed, `old XOR new`, which is the redo for others and the undo for readers. Touches nothing while a
record that the step needs is missing: then the step is tried again later.

Shape legend: U records, B record bytes; lists hold one array per table group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.durability.context import SlotContext
from torch_ecrec.protocol import wire
from torch_ecrec.records import merge
from torch_ecrec.records.shard import SealedDeltas
from torch_ecrec.runtime.tensors import as_array

Changed = tuple[list[np.ndarray], list[np.ndarray], list[SealsOf | None]]
"""By a step, per table group: (U,) positions, (U, B) deltas, and (U,) seals of these, where they are kept."""


class Applier:
    """Applies steps to the records of one slot.

    Args:
        slot: which; it says which records are missing.
    """

    def __init__(self, slot: SlotContext) -> None:
        self.slot, self.held = slot, slot.held
        self._merged: tuple[int, list[merge.Merged]] | None = None  # of a step that waits for records

    def forget(self) -> None:
        """Forgets the step that waits for records: it will come again with other pushes."""
        self._merged = None

    def update_(self, step: int, pushes: Mapping[int, wire.Push]) -> Changed | None:
        """Applies a step of training; None if records are missing.

        Args:
            step: which.
            pushes: of every trainer.
        """
        if self._merged is None or self._merged[0] != step:
            self._merged = (step, self._merge(pushes))
        merged = self._merged[1]
        positions, changes = [part.positions for part in merged], []
        if self.slot.is_missing(positions):
            return None
        held, iteration = self.held, pushes[0].iteration
        for table_group, shard, rate, part in zip(
            held.job.table_groups, held.shards, pushes[0].rates, merged, strict=True
        ):
            spec = table_group.optimizer
            changes.append(shard.apply_(spec.optimizer, part, rate, iteration, dict(spec.fixed)))
        self._merged = None
        return _changed(positions, changes)

    def load_(self, loads: Sequence[wire.Load]) -> Changed | None:
        """Applies a step that loads values; None if records are missing.

        Args:
            loads: of those trainers that load, in their order: of a byte that several write, the last counts.
        """
        held, positions = self.held, []
        for table_group in range(len(held.shards)):
            mine = [load.positions.numpy() for load in loads if load.table_group == table_group]
            positions.append(_union(mine))
        if self.slot.is_missing(positions, looked=True):  # what is written over would hide it, and its parity keep it
            return None
        changes = []
        for table_group, (positions_U, shard) in enumerate(zip(positions, held.shards, strict=True)):
            of_table_group = [load for load in loads if load.table_group == table_group]
            whole = of_table_group[0].records if len(of_table_group) == 1 else None
            if whole is not None and whole.shape[1] == shard.schema.nbytes:
                values_UB = as_array(whole)
            else:
                values_UB = shard.gather(positions_U)
                for load in of_table_group:
                    self._write_(values_UB, positions_U, load)
            changes.append(shard.overwrite_(positions_U, values_UB))
        return _changed(positions, changes)

    def _write_(self, values_UB: np.ndarray, positions_U: np.ndarray, load: wire.Load) -> None:
        """Writes a load into `values_UB`, the records at `positions_U`; the load's positions must be among these."""
        at = np.searchsorted(positions_U, load.positions.numpy())
        if load.records is None:
            values_UB[at] = self.held.initial(load.table_group, load.positions.numpy())
        else:
            values_UB[at, load.first_byte : load.first_byte + load.records.shape[1]] = load.records.numpy()

    def _merge(self, pushes: Mapping[int, wire.Push]) -> list[merge.Merged]:
        """Gradients of the same record are summed in trainer order: the bits do not depend on who came first."""
        return [merge.merge(_parts(pushes, table_group)) for table_group in range(len(self.held.shards))]


def with_bags(positions: Sequence[np.ndarray], bags: Sequence[wire.Bags]) -> list[np.ndarray]:
    """Returns all positions of each table group, those of bags among them, in no order: (N,) int64."""
    if not bags:
        return [*positions]
    return [np.concatenate([mine, one.positions.numpy()]) for mine, one in zip(positions, bags, strict=True)]


def _parts(pushes: Mapping[int, wire.Push], table_group: int) -> list[merge.Part]:
    """Returns the gradients that trainers have sent of one table group, in their order: of rows, then of bags."""
    found: list[merge.Part] = []
    for trainer in sorted(pushes):
        push = pushes[trainer]
        found.append((push.positions[table_group].numpy(), as_array(push.gradients[table_group])))
        if push.bags and len(push.bags[table_group].lengths):
            bags = push.bags[table_group]
            factors_N = None if bags.factors is None else bags.factors.numpy()
            of_bags_GD = as_array(push.bag_gradients[table_group])
            found.append(merge.Bags(bags.positions.numpy(), bags.lengths.numpy(), factors_N, of_bags_GD))
    return found


def _changed(positions: list[np.ndarray], changes: list[SealedDeltas]) -> Changed:
    return positions, [change.deltas_UB for change in changes], [change.seals_U for change in changes]


def _union(of_loads: list[np.ndarray]) -> np.ndarray:
    """Returns every position once, ascending, of loads that each have theirs ascending and once."""
    if len(of_loads) == 1:
        return of_loads[0].copy()  # a log keeps it, and the message need not
    return np.unique(np.concatenate(of_loads)) if of_loads else np.empty(0, dtype=np.int64)
