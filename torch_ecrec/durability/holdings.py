"""What one life of a slot has: its records and parities, the log of its recent steps, the step it stands at, and which
records are missing, on the new host of a lost slot.

Owned by the slot and shared with its parts, so that none of them needs to know the slot itself. Records and parities
change by the verbs of `Shard` only, steps by those of `StepRule`.

Shape legend: P records of a table group, U of them asked for, M of them that changed, B record bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.errors import MemoryDamaged
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol.step_rule import StepRule
from torch_ecrec.protocol.wire import Handed
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.pages import release
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import Stores
from torch_ecrec.spec.job import JobSpec

# To be folded into some records: (M,) int64 indices of those that changed, (M, B) deltas, (M,) coefficients
Change = tuple[np.ndarray, np.ndarray, np.ndarray]

RUNS_AT_ONCE = 1 << 20  # positions
# Of a record: it is there; it is missing, and nobody repairs it; its repair is under way; and somebody waits for it.
HERE, LOST, REPAIRED, AWAITED = range(4)


def with_coefficient(part: tuple[np.ndarray, np.ndarray], coefficient: int) -> Change:
    """Returns a change that all goes with one coefficient; `part` is (M,) int64 indices and (M, B) uint8 deltas."""
    rows_M, deltas_MB = part
    return rows_M, deltas_MB, np.full(len(rows_M), coefficient, dtype=np.uint8)


class Missing:
    """Which records and parities are missing. They only get fewer while the slot lives, but for `lose` and `damage`.

    A byte for each record and parity: `HERE`, or what is done about it (`LOST`, `REPAIRED`, `AWAITED`).

    Args:
        shards: of the slot, one of each table group.
        whole: true if nothing is missing (a slot at the start of a job).
    """

    def __init__(self, shards: Sequence[Shard], whole: bool) -> None:
        self._states: dict[tuple[int, bool], np.ndarray] = {}
        self._shards = shards
        self.total = 0  # records and parities
        self._left = {False: 0, True: 0}  # of them, how many are missing; by whether parities
        self.damaged: dict[tuple[int, bool], set[int]] = {}  # of those that are missing: they were here, and damaged
        if not whole:
            self._count(LOST)

    def _count(self, state: int) -> None:
        for table_group, shard in enumerate(self._shards):
            for parity, count in ((False, shard.data_rows), (True, shard.parity_rows)):
                # zeros take no memory until they are written
                states_P = np.zeros(count, np.uint8) if state == HERE else np.full(count, state, np.uint8)
                self._states[table_group, parity] = states_P
                self.total += count
                self._left[parity] += count * (state != HERE)

    @property
    def remaining(self) -> int:
        """How many records and parities are missing."""
        return sum(self._left.values())

    @property
    def kinds(self) -> list[tuple[int, bool]]:
        """(table group, whether parities) of all that was ever missing."""
        return list(self._states)

    @property
    def done_fraction(self) -> float:
        return 1.0 if self.total == 0 else 1.0 - self.remaining / self.total

    def of(self, table_group: int, parity: bool) -> np.ndarray:
        """Returns (P,) uint8, `HERE` or how each record (or parity) is missing; only where anything ever was."""
        return self._states[table_group, parity]

    def lacks(self, table_group: int, parity: bool, positions_U: np.ndarray) -> bool:
        """Returns whether any of these is missing; (U,) int64."""
        return self.remaining > 0 and bool(self._states[table_group, parity][positions_U].any())

    def are(self, table_group: int, parity: bool, positions_U: np.ndarray) -> np.ndarray:
        """Returns (U,) bool, whether each of these is missing; only where anything ever was."""
        missing_U: np.ndarray = self._states[table_group, parity][positions_U] != HERE
        return missing_U

    def present(self, table_group: int, parity: bool, positions_U: np.ndarray) -> np.ndarray | None:
        """Returns (U,) bool, whether each of these is there; None if nothing of the slot is missing."""
        return None if self.remaining == 0 else ~self.are(table_group, parity, positions_U)

    # repair -------------------------------------------------------------------------------------

    def lost(self, table_group: int, parity: bool, first: int, end: int) -> np.ndarray:
        """Returns (U,) int64, ascending: which of the positions from `first` to `end` nobody repairs."""
        return first + np.flatnonzero(self._states[table_group, parity][first:end] == LOST)

    def on_repair(self, table_group: int, parity: bool, positions_U: np.ndarray) -> None:
        """Notes that the repair of these has begun; (U,) int64, of what `lost` has returned."""
        self._states[table_group, parity][positions_U] = REPAIRED

    def wait_for(self, table_group: int, parity: bool, positions_U: np.ndarray) -> np.ndarray | None:
        """Notes that somebody waits for those of these records, (U,) int64, that are missing.

        Returns:
            Whose repair must begin now, (N,) int64, ascending, without duplicates: nobody had begun it. None if none
            of these records is missing.
        """
        states_P = self._states[table_group, parity]
        gone_N = positions_U[states_P[positions_U] != HERE]
        if not len(gone_N):
            return None
        begun_N = np.unique(gone_N[states_P[gone_N] == LOST])
        states_P[gone_N] = AWAITED
        return begun_N

    def is_awaited(self, table_group: int, parity: bool, positions_U: np.ndarray) -> bool:
        """Returns whether somebody waits for one of these, (U,) int64, as it is missing."""
        return bool((self._states[table_group, parity][positions_U] == AWAITED).any())

    def on_installed(self, table_group: int, parity: bool, positions_U: np.ndarray, count: int) -> int:
        """Notes that these are there, so many of them since now; `Shard.install_` has noted it of each.

        Returns:
            How many of them had been damaged.
        """
        self._left[parity] -= count
        self._let_go()
        damaged = self.damaged.get((table_group, parity))
        if not damaged:
            return 0
        mended = damaged.intersection(positions_U.tolist())
        damaged -= mended
        return len(mended)

    @property
    def has_all_data(self) -> bool:
        """No data record is missing, whatever is of the parities."""
        return self._left[False] == 0

    def find(self) -> None:
        """Notes that all data records are there, however they came."""
        for (_, parity), states_P in self._states.items():
            if not parity:
                states_P[:] = HERE
        self._left[False] = 0
        self._let_go()

    def _let_go(self) -> None:
        """Once nothing is missing, all states are zeros, which need no memory: a byte for each record."""
        for states_P in self._states.values() if not self.remaining else ():
            release(states_P)

    # loss ---------------------------------------------------------------------------------------

    def lose(self, table_group: int, positions_U: np.ndarray, parity: bool = True) -> None:
        """Notes that these parities (or records), (U,) int64 without duplicates, stand for nothing any more."""
        if not self._states:
            self._count(HERE)
        states_P = self._states[table_group, parity]
        new_U = positions_U[states_P[positions_U] == HERE]
        self._left[parity] += len(new_U)
        states_P[new_U] = LOST

    def damage(self, table_group: int, parity: bool, positions_U: np.ndarray) -> None:
        """Notes that these records or parities, (U,) int64 without duplicates, are not what they should be."""
        self.lose(table_group, positions_U, parity)
        self.damaged.setdefault((table_group, parity), set()).update(positions_U.tolist())


class Holdings:
    """Holds all that one incarnation of a slot has: records, parities, log, and the step rule.

    Args:
        job: what is trained.
        code: of its stripes.
        layouts: of its table groups.
        index: which slot.
        incarnation: which life of it.
        incarnations: the incarnation of every slot, known from its beginning.
        fresh: true at the start of a job: records get their initial values, parities encode them. False on the new
            host of a lost slot, or where records come from a checkpoint: everything is missing.
        sealed: every record and parity has a seal, by which damage to it is found.
        filled: all records are about to come from a checkpoint, and are not repaired here and there.
        stores: makes what records lie in; None: memory.

    Attributes:
        shards: records and parities, one `Shard` per table group.
        log: the deltas of the slot's recent steps: redo for others, undo for readers.
        rule: which steps are applied, folded, acknowledged.
        missing: which records and parities are.
    """

    def __init__(
        self,
        job: JobSpec,
        code: LinearCode,
        layouts: tuple[Layout, ...],
        index: int,
        incarnation: int,
        incarnations: Sequence[int],
        fresh: bool,
        sealed: bool = True,
        filled: bool = False,
        stores: Stores | None = None,
    ) -> None:
        self.job, self.code, self.layouts = job, code, layouts
        self.index, self.incarnation = index, incarnation
        holders, sources = layouts[0].holders(index), layouts[0].sources(index)
        self.rule = StepRule(
            slot=index,
            holders=holders,
            sources=sources,
            trainers=job.trainers,
            incarnations=dict(enumerate(incarnations)),
            confirmed=dict.fromkeys(holders, 0),
            folded=dict.fromkeys(sources, 0) if fresh else {},
            catch_up=dict.fromkeys(sources, 0) if fresh else {},
        )
        self.shards = [
            Shard(
                table_group.schema,
                layout.data_rows(index),
                layout.parity_rows(index),
                not (fresh or filled),
                sealed,
                stores,
            )
            for table_group, layout in zip(job.table_groups, layouts, strict=True)
        ]
        self.sealed = sealed
        self.log = self.new_log()
        self.missing = Missing(self.shards, fresh)
        if fresh:
            self._initialise_()

    def keep_last_(self, tables: Iterable[str]) -> None:
        """Keeps the records of these tables in memory until no others are left to leave it."""
        runs: dict[int, list[tuple[int, int]]] = {}  # of each table group
        for table_group, first, end in map(self.job.rows_of_table, tables):
            runs.setdefault(table_group, []).extend(self._runs(table_group, first, end))
        for table_group, found in runs.items():
            self.shards[table_group].keep_last_(sorted(found))

    def _runs(self, table_group: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yields where some rows of a table group lie here, ascending: first positions and ends."""
        layout = self.layouts[table_group]
        for begin in range(0, layout.data_rows(self.index), RUNS_AT_ONCE):
            positions_U = np.arange(begin, min(begin + RUNS_AT_ONCE, layout.data_rows(self.index)))
            row_U = layout.row_at(self.index, positions_U)
            inside_U = np.concatenate([[False], (row_U >= first) & (row_U < end), [False]])
            edges = begin + np.flatnonzero(np.diff(inside_U))
            yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

    def _initialise_(self) -> None:
        """Gives every record its initial value and every parity the code of its stripe's initial values."""
        for table_group, shard in enumerate(self.shards):
            shard.initialise_(partial(self.initial, table_group))
            shard.initialise_(partial(self._initial_parities, table_group), parity=True)

    def _initial_parities(self, table_group: int, positions_U: np.ndarray) -> np.ndarray:
        """Returns (U, B) uint8, the code of what the records of some stripes were before anything was loaded."""
        layout, initial = self.layouts[table_group], self.job.table_groups[table_group].initial(self.job.seed)
        parities_UB = np.zeros((len(positions_U), self.job.table_groups[table_group].schema.nbytes), np.uint8)
        groups = layout.group(self.index, True, positions_U)
        for member in range(layout.k if groups else 0):
            found = []  # of each group: which of the positions have such a member, its row, the coefficient
            for group in groups:
                exists_G = layout.exists(group.base, member, group.rotations)
                rows = layout.rows_of(group.base, member, group.rotations[exists_G])
                coefficient = self.code.coefficients[group.member - layout.k, member]
                found.append((group.where[exists_G], rows, np.full(len(rows), coefficient, np.uint8)))
            where, rows, factors = map(np.concatenate, zip(*found, strict=True))
            self.code.fold_(parities_UB, where, initial.of(rows), factors)
        return parities_UB

    def go_on(self, log: DeltaLog) -> None:
        """Goes on after the last step of this log of its own, as a slot that was lost."""
        self.log = log

    def take_over(self, before: Handed, floor: int) -> None:
        """Goes on as an incarnation that has stopped; the log is still to be filled.

        Args:
            before: what that life handed over; its records are here already.
            floor: the step that the log begins after.
        """
        self.missing = Missing(self.shards, True)
        self.log = self.new_log(floor)
        self.rule.take_over(before, floor)

    def new_log(self, floor: int = 0) -> DeltaLog:
        """Returns an empty log of the slot's own deltas, after a step."""

        def name_of(table_group: int, position: int) -> str:
            return self.name_of(self.index, table_group, position)

        return DeltaLog(len(self.job.table_groups), floor, self.sealed, name_of, MemoryDamaged)

    def name_of(self, slot: int, table_group: int, position: int) -> str:
        """Returns the name of a slot's record for messages: the row and table, or the place of padding."""
        spec, layout = self.job.table_groups[table_group], self.layouts[table_group]
        row = int(layout.row_at(slot, np.array([position]))[0])
        if row < 0:
            return f"padding at position {position} (slot {slot})"
        table = int(np.searchsorted(np.array(spec.first_rows), row, side="right")) - 1
        return f"row {row - spec.first_rows[table]} of table {spec.tables[table].name} (slot {slot})"

    def initial(self, table_group: int, positions_U: np.ndarray) -> np.ndarray:
        """Returns (U, B) uint8, what some data records were before anything was loaded; positions (U,) int64."""
        initial = self.job.table_groups[table_group].initial(self.job.seed)
        return initial.of(self.layouts[table_group].row_at(self.index, positions_U))

    def records_as_of(self, table_group: int, positions_U: np.ndarray, step: int) -> np.ndarray:
        """Returns some data records as they were after a step.

        Args:
            table_group: index of the table group.
            positions_U: (U,) int64.
            step: at most what is applied.

        Returns:
            (U, B) uint8, fresh.

        Raises:
            LookupError: the log does not go back that far.
        """
        records_UB = self.shards[table_group].gather(positions_U)
        if step < self.rule.applied:
            undo_UB = self.log.changes(table_group, positions_U, step, self.rule.applied)
            if undo_UB is not None:
                np.bitwise_xor(records_UB, undo_UB, out=records_UB)
        return records_UB

    def data_changes(self, table_group: int, positions_U: np.ndarray, step: int) -> list[Change] | None:
        """Returns the changes between data records as applied now and as of `step`; None if the log does not reach
        back."""
        applied = self.rule.applied
        if step == applied:
            return []
        if not self.log.floor <= step < applied:
            return None
        return [with_coefficient(part, 1) for part in self.log.parts(table_group, positions_U, step, applied)]

    def undo_after(self, step: int) -> None:
        """Takes the slot's own steps after `step` out of its records and its log.

        What is missing is left alone: it is decoded as of a step that is left.
        """
        while self.log.last > step:
            for table_group, (positions_U, deltas_UB) in enumerate(self.log.pop()):
                there_U = self.missing.present(table_group, False, positions_U)
                if there_U is not None:
                    positions_U = np.where(there_U, positions_U, -1)
                self.shards[table_group].undo_(positions_U, deltas_UB)
