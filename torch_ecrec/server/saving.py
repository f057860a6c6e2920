"""A slot's savers: which of its rows a prioritised save has, one saver (`records/savers.py`) for each table group.

    note        a step has changed records
    pick        a save of step t begins: its rows. What steps after t have changed in them counts from then on
    settle      it counts; or, put_back, it does not, and its rows are as if they had not been picked

A checkpoint of everything picks all. A new life of a slot begins with savers that have noted nothing: until its next
save it prefers what has changed since, which is a worse choice of rows and no other contents of them.

Shapes: P records of a table group, U of them changed by a step, N picked, D weights.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import numpy as np

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.records.captured import MARKED
from torch_ecrec.records.halves import numbers_of
from torch_ecrec.records.positions import Floats, Positions
from torch_ecrec.records.savers import saver_of
from torch_ecrec.server.capture import Marks, none_marked


class SlotSavers:
    """The savers of one life of a slot.

    Args:
        held: of the slot, nothing of it missing.
        name: of the savers.
        portion: of the rows that a save has.

    Attributes:
        picked_s: how long the last pick took, during which no step was applied.
    """

    def __init__(self, held: Holdings, name: str, portion: float) -> None:
        self._held, self._portion = held, portion
        self._step = held.rule.applied  # that weights are shown as of
        self.picked_s = 0.0
        self._savers = [
            saver_of(
                name,
                shard.data_rows,
                portion,
                functools.partial(self._weights, table_group),
                held.job.seed + held.index,
            )
            for table_group, shard in enumerate(held.shards)
        ]

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the savers keep."""
        return sum(saver.memory_bytes for saver in self._savers)

    def _weights(self, table_group: int, positions_N: Positions) -> Floats:
        """Returns weights (N, D) float32, as of the step that is saved."""
        shard = self._held.shards[table_group]
        if self._step == self._held.rule.applied:
            weights_ND: Floats = shard.gather_weights(positions_N)
        else:
            records_NB = self._held.records_as_of(table_group, positions_N, self._step)
            weights_ND = np.ascontiguousarray(numbers_of(records_NB, shard.schema)[:, : shard.schema.dim])
        return weights_ND

    def note(self, positions: Sequence[Positions]) -> None:
        """Notes that a step has changed these records, (U,) int64 of each table group."""
        for saver, positions_U in zip(self._savers, positions, strict=True):
            saver.note(positions_U)

    def pick(self, step: int, everything: bool = False) -> Marks:
        """Picks the rows of a save.

        Args:
            step: that it is of; the log reaches back to there.
            everything: all rows, which a checkpoint has.

        Returns:
            Marks of those that have changed, by what the saver knows.
        """
        begin_s = time.perf_counter()
        held, self._step, marks = self._held, step, none_marked(self._held)
        for saver, marks_P in zip(self._savers, marks, strict=True):
            rows = len(marks_P)
            marks_P[saver.pick(rows if everything else min(rows, max(1, int(self._portion * rows))))] = MARKED
        for later in range(step + 1, held.rule.applied + 1):
            for saver, marks_P, (positions_U, _) in zip(self._savers, marks, held.log.get(later), strict=True):
                saver.note(positions_U[marks_P[positions_U] == MARKED])
        self.picked_s = time.perf_counter() - begin_s
        return marks

    def settle(self) -> None:
        """Confirms the last pick of each saver: the rows are durable."""
        for saver in self._savers:
            saver.settle()

    def put_back(self) -> None:
        """Takes back the last pick of each saver: the rows were not saved."""
        for saver in self._savers:
            saver.put_back()
