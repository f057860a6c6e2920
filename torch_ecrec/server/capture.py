"""What a slot gives to a checkpoint: its records as they were after one step, in portions, while later steps go on.

A capture of step t goes through the records once, in the order of their positions. Records that a later step changes
before the scan has reached them are kept first, as they were after t: by the delta, `old = new XOR delta`, so that the
step itself is not slower for it. So what is written is of t, whatever was applied meanwhile, and taken back too: only
steps after t are, and what they had changed is kept already.

Example: t = 7, the scan is at position 10. Step 8 changes the records 4 and 20. Record 4 was written as of 7 already;
the old bytes of record 20 are kept, and written when the scan comes there.

Pure: no threads, no files. What writes the portions asks for them inside `Node.run`.

Shapes: P records of a table group, U of them changed by a step, N in a portion, B record bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.records.captured import MARKED, MarksOf
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.tiers.tiered import Reading

Marks = list[MarksOf]  # of each table group


NextPortion = Callable[[int], "Portion | Reading | None"]
"""`Capture.next_portion`, for those who write what it gives."""


@dataclass(frozen=True)
class Portion:
    """Some records of one table group.

    Args:
        table_group: which.
        rows_N: (N,) int64, rows of the table group, ascending within a rank of the layout.
        records_NB: (N, B) uint8.
    """

    table_group: int
    rows_N: Positions
    records_NB: Bytes


def all_marked(held: Holdings) -> Marks:
    """Marks of every record of a slot."""
    return [np.full(shard.data_rows, MARKED, np.uint8) for shard in held.shards]


def none_marked(held: Holdings) -> Marks:
    """Returns marks that mark no record."""
    return [np.zeros(shard.data_rows, np.uint8) for shard in held.shards]


def mark_changed_(marks: Marks, held: Holdings, after: int) -> None:
    """Marks what the logged steps after `after` have changed. Raises LookupError if the log does not reach back."""
    for step in range(after + 1, held.rule.applied + 1):
        for marks_P, (positions_U, _) in zip(marks, held.log.get(step), strict=True):
            marks_P[positions_U] = MARKED


class Capture:
    """Records of one slot as they were after a step.

    Args:
        held: of the slot. Nothing of it is missing, and its log reaches back to `step`.
        step: which.
        marks: of the records that are wanted. Mutated.
        broken: told of records (table group, (U,) int64 positions) that do not fit their seals when they are given.

    Raises:
        LookupError: the log does not reach back to `step`.
    """

    def __init__(
        self,
        held: Holdings,
        step: int,
        marks: Marks,
        broken: Callable[[int, Positions], None] = lambda table_group, at: None,
    ) -> None:
        self.step, self._broken, self._held = step, broken, held
        self._table_group = 0  # where it is
        self._read: Reading | None = None  # of the next portion, which was asked for before
        self._captured = [shard.captured(marks_P) for shard, marks_P in zip(held.shards, marks, strict=True)]
        for later in range(step + 1, held.rule.applied + 1):
            for table_group, (positions_U, _) in enumerate(held.log.get(later)):
                wanted_U = positions_U[marks[table_group][positions_U] == MARKED]
                deltas_UB = held.log.changes(table_group, wanted_U, step, held.rule.applied)
                if deltas_UB is not None:
                    self._captured[table_group].keep(wanted_U, deltas_UB)

    def before_forgetting(self, positions: Sequence[Positions], deltas: Sequence[Bytes]) -> None:
        """Keeps the captured records as they were: a step was applied that changed these (U,) of each table group by
        these deltas (U, B)."""
        for table_group in range(self._table_group, len(self._captured)):
            self._captured[table_group].keep(positions[table_group], deltas[table_group])

    def next_portion(self, most_bytes: int) -> Portion | Reading | None:
        """Returns the next records, of at most so many bytes (at least one record); None: that was all.

        A portion may have fewer, or none where nothing is marked. Where some are on a disk, it returns at first what
        reads them: to be run beside the node, and then this is called again with the same `most_bytes`.
        """
        while self._table_group < len(self._captured) and self._captured[self._table_group].is_over:
            self._captured[self._table_group].let_go()
            self._table_group += 1
        if self._table_group == len(self._captured):
            return None
        table_group, held = self._table_group, self._held
        most = max(1, most_bytes // held.shards[table_group].schema.nbytes)
        captured = self._captured[table_group]
        if self._read is None:
            self._read = captured.absent(most)
            if self._read is not None:
                return self._read
        read, self._read = self._read, None
        positions_M, records_MB, broken_U = captured.portion(most, read)
        if len(broken_U):
            self._broken(table_group, broken_U)
        rows_M = held.layouts[table_group].row_at(held.index, positions_M)
        if len(rows_M) and rows_M.min() < 0:  # padding
            rows_M, records_MB = rows_M[rows_M >= 0], records_MB[rows_M >= 0]
        return Portion(table_group, rows_M, records_MB)

    @property
    def kept_bytes(self) -> int:
        """Memory of what is kept, which is the price of not pausing."""
        return sum(captured.kept_bytes for captured in self._captured)
