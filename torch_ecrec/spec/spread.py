"""How the tables of a job are spread over its slots: which slot has how many rows, and what it carries of them.

    spread = spread_of(job)     3 slots; `a`: 6 rows of 4 weights, whole on slot 0; `b`: 9 such rows, dealt out
    spread.tables[0].rows_S     [6, 0, 0]; `home` is 0
    spread.tables[1].rows_S     [0, 5, 4]; `home` is None
    spread.records_S            [96, 80, 64] bytes of rows
    spread.padding_S            [0, 16, 32] bytes that no row has, since all slots are as large as the largest

Load is what `layout/placing.py` levels: numbers that a slot reads for a sample. It follows from what the job says of
bags, not from what was trained.

Pure, and equal on every process. Does not know which server hosts a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.layout.stripes import Layout
from torch_ecrec.spec.job import JobSpec, TableSpec

PADDING_LEAST_BYTES = 100_000  # less is that of a toy
PADDING_SAID = 0.05  # of the records: what is less is the rounding to full stripes, or not worth a word


@dataclass(frozen=True, eq=False)
class TableSpread:
    """Where the rows of one table lie.

    Args:
        table: which.
        rows_S: (S,) int64, how many each slot has.
        record_bytes: of one row's record.
    """

    table: TableSpec
    rows_S: NDArray[np.int64]
    record_bytes: int

    @property
    def home(self) -> int | None:
        """The slot that has all of them, one behind the other, so that it can pool bags; None: there is none."""
        return int(self.rows_S.argmax()) if np.count_nonzero(self.rows_S) == 1 else None

    @property
    def load_S(self) -> NDArray[np.float64]:
        """(S,) float64, numbers that each slot reads for a sample."""
        share_S: NDArray[np.float64] = self.rows_S / self.table.rows
        return share_S * self.table.wanted.load

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The slots that have rows of it, as runs (first, last), ascending: (0, 2), (4, 4) are 0, 1, 2 and 4."""
        found = np.flatnonzero(self.rows_S)
        ends = np.flatnonzero(np.diff(found) > 1)
        firsts, lasts = found[np.concatenate([[0], ends + 1])], found[np.concatenate([ends, [-1]])]
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class Spread:
    """All tables of a job, in its order, and what slots have of them.

    Args:
        tables: each of them.
        padding_S: (S,) int64, bytes of records that no row has: each table group fills all slots to the same size.
    """

    tables: tuple[TableSpread, ...]
    padding_S: NDArray[np.int64]

    @property
    def records_S(self) -> NDArray[np.int64]:
        """(S,) int64, bytes of the records of rows, without padding."""
        found: NDArray[np.int64] = sum(
            (one.rows_S * one.record_bytes for one in self.tables), np.zeros_like(self.padding_S)
        )
        return found

    @property
    def load_S(self) -> NDArray[np.float64]:
        """(S,) float64, numbers that each slot reads for a sample, of all tables."""
        found: NDArray[np.float64] = sum((one.load_S for one in self.tables), np.zeros(len(self.padding_S)))
        return found


def of_mean(values_S: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns each slot's number over the mean, (S,); 1 for all where it is 0."""
    mean = float(values_S.mean())
    return values_S / mean if mean else np.ones(len(values_S))


def spread_of(job: JobSpec) -> Spread:
    """Returns how the tables of a job are spread over its slots."""
    slots, padding_S = job.code.slots, np.zeros(job.code.slots, np.int64)
    for table_group, layout in zip(job.table_groups, job.layouts, strict=True):
        padding_S += table_group.schema.nbytes * _padding(layout)
    found = []
    for table, pieces in zip(job.tables, job.pieces, strict=True):
        table_group_index, first = job.place_of_table[table.name]
        rows_S = np.zeros(slots, np.int64)
        for piece in pieces:
            for slot, rows in piece.shares():
                rows_S[slot] += rows
        if not pieces:
            rows_S = _unplaced(job.layouts[table_group_index], first, table.rows)
        found.append(TableSpread(table, rows_S, job.table_groups[table_group_index].schema.nbytes))
    return Spread(tuple(found), padding_S)


def said_of_padding(job: JobSpec) -> str:
    """Returns what padding the tables cost that somebody wants whole, what to do instead; "" if that is little.

    A table that is "table_wise" and larger than its share makes all slots as large as its own.
    """
    spread = spread_of(job)
    total, padding, names = int(spread.records_S.sum()), 0, []
    for table_group, layout in zip(job.table_groups, job.layouts, strict=True):
        share, slots = -(-table_group.rows // job.code.slots), range(job.code.slots)
        fullest = max(layout.rows_on(slot) for slot in slots)
        full = {slot for slot in slots if layout.rows_on(slot) == fullest}
        there = [
            spread.tables[index] for index in table_group.table_indices if job.tables[index].sharding == "table_wise"
        ]
        causes = [one.table.name for one in there if full & set(np.flatnonzero(one.rows_S).tolist())]
        if causes and fullest > share:
            padding += int(_padding(layout).sum()) * table_group.schema.nbytes
            names += causes
    if padding < max(PADDING_SAID * total, PADDING_LEAST_BYTES):
        return ""
    parity = padding * job.code.parities // job.code.k
    which = f"table {names[0]} is" if len(names) == 1 else f"tables {', '.join(names)} are"
    return (
        f"{which} whole on one slot by `erasure_coded_table_wise`, which has more than its share of the rows then."
        f" All slots are as large as the largest: that makes {padding / 1e6:.3g} MB of padding, {padding / total:.0%}"
        f" of the records, and {parity / 1e6:.3g} MB of parity of it. `erasure_coded` keeps whole what fits, and deals"
        " out the rest; with fewer slots a share is larger"
    )


def _padding(layout: Layout) -> NDArray[np.int64]:
    """Returns how many records of each slot no row has, (S,)."""
    return np.array([layout.data_rows(slot) - layout.rows_on(slot) for slot in range(layout.slots)], np.int64)


def _unplaced(layout: Layout, first: int, rows: int) -> NDArray[np.int64]:
    """Returns how many of some rows of a table group that is not placed each slot has, (S,) int64.

    Of `slots * k` consecutive rows each slot has k, wherever they begin.
    """
    rotations, rest = divmod(rows, layout.slots * layout.k)
    slot_U, _ = layout.locate(np.arange(first, first + rest))
    return np.bincount(slot_U, minlength=layout.slots) + rotations * layout.k
