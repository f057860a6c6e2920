"""Where every record lives: row <-> (slot, position, stripe, member). Pure integer arithmetic, equal on every process.

Terms. Stripe c holds the rows c*k .. c*k+k-1 of a table group: row x is member m = x % k of stripe x // k; members k ..
n-1 are its parities. The stripe's *base* is b = c % slots and its *rotation* q = c // slots. Slots are cut into
contiguous *coding groups* of n to 2n slots, and member j of a stripe with base b lives on the slot j places after b,
going round within b's group. So a slot has data records of k bases, which have *ranks* 0..k-1 in ascending order of the
base, and parity records of r bases, with ranks likewise. Records are stored rank by rank, and by rotation within a
rank: the *position* of a data record is data_first[slot, rank] + q; likewise parity_first[slot, rank] + q for parity.

Example: slots = 3, k = 2, r = 1, rows = 8. Row 5 is member 1 of stripe 2: base 2, rotation 0; members 0, 1, 2 live on
slots 2, 0, 1. Slot 0 has data of the bases 0 (member 0, stripes 0 and 3) and 2 (member 1, stripe 2), so row 5 is behind
the two records of rank 0, at position 2 + 0 = 2 of slot 0.

Invariants. Members of a stripe are on n different slots. Positions are dense: slot s holds exactly the positions 0 ..
data_rows(s)-1 and 0 .. parity_rows(s)-1. In every full rotation each slot holds k data and r parity records, whatever
gcd(n, slots) is. All stripes of one base share the same map from members to slots, so the records of one rank have
their siblings and their parities at consecutive positions too: work on many records goes rank by rank, in runs. The
last stripe may be partial: its missing members do not exist and count as zeros; its parities exist.

Placed rows. Coding needs positions only: which row lies at a position is another matter. A table group that is *placed*
is cut into `Piece`s of consecutive rows; the rows of a piece are dealt out in turns to the slots of the piece (to one,
say), and go there behind those of the pieces before. Each slot then has as many positions as the fullest slot needs,
rounded up to a full rotation; those behind its last row are *padding*: records of zeros that no row has. What is said
above holds of such a layout with "row x" read as "cell x", of slots * k * rotations cells.

Example: slots = 3, k = 2, r = 1, pieces of 4 rows on slot 1 and of 3 rows on slots 0 and 2. Rows 0 to 3 are positions
0 to 3 of slot 1; rows 4 and 6 are positions 0 and 1 of slot 0, row 5 is position 0 of slot 2. Slot 1 needs 4 positions,
which are 2 rotations; so slot 0 has 2 records of padding, and slot 2 has 3.

Shapes: S slots, U records, G records of one base, k and r as in the code.

Does not know which server hosts a slot, or what is in a record.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.layout.placing import Piece
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.kernel_cache import kernel

Integers = NDArray[np.int64]


@kernel()
def _locate(rows_U: Any, period: Any, slot_of: Any, first_of: Any, slot_U: Any, position_U: Any) -> None:
    """Writes slot and position of each row. `slot_of` and `first_of` are indexed by row % period, a full rotation."""
    for i in range(rows_U.shape[0]):
        row = np.uint64(rows_U[i])
        rotation = row // np.uint64(period)
        offset = row - rotation * np.uint64(period)
        slot_U[i] = slot_of[offset]
        position_U[i] = np.int64(rotation) + first_of[offset]


@kernel()
def _row_at(positions_U: Any, first: Any, base: Any, member: Any, slots: Any, row_U: Any) -> None:
    """Writes the row at each position of one slot. `first`, `base` and `member` are those of its ranks.

    It is fast where neighbours are of one rank.
    """
    rank, k = 0, base.shape[0]
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        while position < first[rank]:
            rank -= 1
        while position >= first[rank + 1]:
            rank += 1
        row_U[i] = ((position - first[rank]) * slots + base[rank]) * k + member[rank]


@kernel()
def _locate_placed(
    rows_U: Any, first_Q: Any, from_Q: Any, slots_M: Any, starts_M: Any, slot_U: Any, position_U: Any
) -> None:
    """Writes slot and position of each row. Piece q begins at row first[q]; its slots are slots[from[q] : from[q + 1]],
    and `starts` has the position of its first row on each. It is fast where neighbours are of one piece.
    """
    q = 0
    for i in range(rows_U.shape[0]):
        row = rows_U[i]
        if row < first_Q[q] or row >= first_Q[q + 1]:
            low, high = 0, first_Q.shape[0] - 1  # the last entry is the number of rows
            while high - low > 1:
                middle = (low + high) // 2
                if first_Q[middle] <= row:
                    low = middle
                else:
                    high = middle
            q = low
        many, index = from_Q[q + 1] - from_Q[q], row - first_Q[q]
        turn = index // many if many > 1 else index
        at = from_Q[q] + index - turn * many
        slot_U[i] = slots_M[at]
        position_U[i] = starts_M[at] + turn


@kernel()
def _placed_row_at(positions_U: Any, start_Q: Any, first_Q: Any, stride_Q: Any, end: Any, row_U: Any) -> None:
    """Writes the row at each position of one slot, -1 for padding. The slot's share of a piece begins at position
    start[q], with row first[q], and goes on in steps of stride[q] rows; padding begins at `end`.
    """
    q = 0
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        if position >= end:
            row_U[i] = -1
            continue
        while position < start_Q[q]:
            q -= 1
        while q + 1 < start_Q.shape[0] and position >= start_Q[q + 1]:
            q += 1
        row_U[i] = first_Q[q] + (position - start_Q[q]) * stride_Q[q]


@dataclass(frozen=True)
class SharedRun:
    """Data records of one rank of a source whose parities one holder has. Both lie at consecutive positions.

    The parity of the record at position p, first <= p < end, is at position p + shift of the holder.

    Args:
        first, end: positions on the source.
        shift: from a record's position to that of its parity.
        parity: which parity of the stripe it is, 0..r-1.
        member: which member of its stripe the record is, 0..k-1.
    """

    first: int
    end: int
    shift: int
    parity: int
    member: int


@dataclass(frozen=True)
class StripeGroup:
    """Records of one slot whose stripes have the same base, so that their members are on the same slots.

    Args:
        base: base of their stripes.
        member: which member of its stripe each of them is.
        rotations: (G,) int64, the stripes: stripe = rotation * slots + base.
        where: (G,) int64, their indices in the positions asked about.
    """

    base: int
    member: int
    rotations: Integers
    where: Integers


def _derived() -> Any:
    return field(init=False, repr=False, compare=False)


class _Placed:
    """The pieces of a placed table group, as arrays.

    Attributes:
        used_S: (S,) int64, rows of each slot.
    """

    def __init__(self, slots: int, rows: int, pieces: Sequence[Piece]) -> None:
        total = sum(piece.rows for piece in pieces)
        require(total == rows, f"`pieces` must have the table group's {rows} rows, got {total}")
        outside = sorted({slot for piece in pieces for slot in piece.slots if not 0 <= slot < slots})
        require(not outside, f"`pieces` must be on slots 0..{slots - 1}, got {outside}")
        self.used_S = np.zeros(slots, np.int64)
        firsts, starts = [0], []
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(slots)]  # (position, row, stride), by slot
        for piece in pieces:
            for turn, (slot, many) in enumerate(piece.shares()):
                start = int(self.used_S[slot])
                starts.append(start)
                if many:
                    shares[slot].append((start, firsts[-1] + turn, len(piece.slots)))
                self.used_S[slot] += many
            firsts.append(firsts[-1] + piece.rows)
        self.used_S.setflags(write=False)
        self._first_Q = np.array(firsts, np.int64)
        self._from_Q = np.cumsum([0, *(len(piece.slots) for piece in pieces)], dtype=np.int64)
        self._slots_M = np.array([slot for piece in pieces for slot in piece.slots], np.int64)
        self._starts_M = np.array(starts, np.int64)
        self._shares = [np.array(share, np.int64).reshape(-1, 3).T.copy() for share in shares]

    def locate(self, rows_U: Integers, slot_U: Integers, position_U: Integers) -> None:
        places = self._first_Q, self._from_Q, self._slots_M, self._starts_M
        _locate_placed(rows_U, *places, slot_U, position_U)

    def row_at(self, slot: int, positions_U: Integers, row_U: Integers) -> None:
        _placed_row_at(positions_U, *self._shares[slot], int(self.used_S[slot]), row_U)

    def count(self, slot: int, low: int, high: int, first: int, end: int) -> int:
        """Returns how many rows of the whole pieces from row `first` to `end` lie at positions low .. high - 1."""
        starts_Q, rows_Q, _ = self._shares[slot]
        ends_Q = np.append(starts_Q[1:], self.used_S[slot])
        inside_Q = np.minimum(ends_Q, high) - np.maximum(starts_Q, low)
        return int(inside_Q[(rows_Q >= first) & (rows_Q < end) & (inside_Q > 0)].sum())


@dataclass(frozen=True)
class Layout:
    """The places of one table group's records on all slots.

    Args:
        slots: logical shards, at least k + r.
        k: data members of a stripe, at least 1.
        r: parity members, 0 or more.
        rows: rows of the table group, 0 or more.
        pieces: where a placed table group's rows lie, in order; (): the table group is not placed.

    Attributes:
        n: k + r.
        cells: data records on all slots, padding included; `rows` without pieces.
        stripes: number of stripes, the partial one included.
        member_slot: (S, n) slot of each member, by base.
        member_rank: (S, n) rank of each member among the data (j < k) or parity (j >= k) records of its slot, by base.
        data_base, data_member: (S, k) base and member of the data records of each rank, by slot.
        parity_base, parity_member: (S, r) the same of the parity records; members are in k..n-1.
        data_first: (S, k + 1) position of the first data record of each rank, by slot; their number at the end.
        parity_first: (S, r + 1) the same of the parity records.

    All arrays are int64 and read-only.
    """

    slots: int
    k: int
    r: int
    rows: int
    pieces: tuple[Piece, ...] = ()
    n: int = _derived()
    cells: int = _derived()
    stripes: int = _derived()
    member_slot: Integers = _derived()
    member_rank: Integers = _derived()
    data_base: Integers = _derived()
    data_member: Integers = _derived()
    parity_base: Integers = _derived()
    parity_member: Integers = _derived()
    data_first: Integers = _derived()
    parity_first: Integers = _derived()
    _group_first: Integers = _derived()  # (S,) first slot of a slot's group
    _group_size: Integers = _derived()  # (S,)
    _slot_of: Integers = _derived()  # (S * k,) slot by row % (S * k)
    _first_of: Integers = _derived()  # (S * k,) position of the first record of its slot and rank, likewise
    _placed: _Placed | None = _derived()

    def __post_init__(self) -> None:
        require_int("slots", self.slots, 1)
        require_int("k", self.k, 1)
        require_int("r", self.r, 0)
        require_int("rows", self.rows, 0)
        slots, k, r = self.slots, self.k, self.r
        n = k + r
        require(
            n <= slots,
            f"a stripe of k + r = {n} members needs as many slots, got {slots}: two members on one slot would be lost"
            " together",
        )
        self._set("n", n)
        self._set("_placed", _Placed(slots, self.rows, self.pieces) if self.pieces else None)
        cells = self.rows if self._placed is None else slots * k * -(-int(self._placed.used_S.max()) // k)
        self._set("cells", cells)
        self._set("stripes", -(-cells // k))
        groups = max(1, -(-slots // (2 * n)))
        edges = np.array([slots * g // groups for g in range(groups + 1)], np.int64)
        sizes = np.diff(edges)
        group_first, group_size = np.repeat(edges[:-1], sizes), np.repeat(sizes, sizes)

        bases = np.arange(slots, dtype=np.int64)[:, None]
        members = np.arange(n, dtype=np.int64)[None, :]
        first, size = group_first[:, None], group_size[:, None]
        member_slot = first + (bases - first + members) % size
        # The other way round: member j on slot s belongs to the base j places before s.
        base_of = first + (bases - first - members) % size
        data_member = np.argsort(base_of[:, :k], axis=1)
        parity_member = np.argsort(base_of[:, k:], axis=1) + k
        data_base = np.take_along_axis(base_of, data_member, axis=1)
        parity_base = np.take_along_axis(base_of, parity_member, axis=1)
        member_rank = np.zeros((slots, n), np.int64)
        member_rank[data_base, data_member] = np.arange(k)
        member_rank[parity_base, parity_member] = np.arange(r)

        self._set("member_slot", member_slot)
        self._set("member_rank", member_rank)
        self._set("data_base", data_base)
        self._set("data_member", data_member)
        self._set("parity_base", parity_base)
        self._set("parity_member", parity_member)
        self._set("_group_first", group_first)
        self._set("_group_size", group_size)
        self._set("_slot_of", member_slot[:, :k].reshape(-1))
        all_rotations, rest = divmod(self.stripes, slots)
        stripes_of = all_rotations + (np.arange(slots) < rest)  # (S,) stripes of each base
        counts = stripes_of[data_base]
        missing = self.stripes * k - self.cells
        counts -= (data_base == (self.stripes - 1) % slots) & (data_member >= k - missing)
        self._set("data_first", np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0))))
        self._set("parity_first", np.pad(np.cumsum(stripes_of[parity_base], axis=1), ((0, 0), (1, 0))))
        self._set("_first_of", self.data_first[member_slot[:, :k], member_rank[:, :k]].reshape(-1))

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value, dtype=np.int64)
            value.setflags(write=False)
        object.__setattr__(self, name, value)

    def data_rows(self, slot: int) -> int:
        """Returns the number of data records on a slot, padding included."""
        self._check_slot(slot)
        return int(self.data_first[slot, -1])

    def rows_on(self, slot: int) -> int:
        """Returns how many rows a slot has: they are at its first positions, and padding is behind them."""
        self._check_slot(slot)
        return self.data_rows(slot) if self._placed is None else int(self._placed.used_S[slot])

    def parity_rows(self, slot: int) -> int:
        """Returns the number of parity records on a slot."""
        self._check_slot(slot)
        return int(self.parity_first[slot, -1])

    def locate(self, rows_U: Integers) -> tuple[Integers, Integers]:
        """Returns slot and position of some rows.

        Args:
            rows_U: (U,) int64, rows of the table group.

        Returns:
            slot_U, position_U: (U,) int64 each.

        Not checked: that rows are in 0..rows-1. The caller does.
        """
        slot_U, position_U = np.empty(len(rows_U), np.int64), np.empty(len(rows_U), np.int64)
        rows_U = np.ascontiguousarray(rows_U, dtype=np.int64)
        if self._placed is not None:
            self._placed.locate(rows_U, slot_U, position_U)
            return slot_U, position_U
        _locate(rows_U, self.slots * self.k, self._slot_of, self._first_of, slot_U, position_U)
        return slot_U, position_U

    def home_of(self, first: int, rows: int) -> tuple[int, int] | None:
        """Returns the slot that has `rows` rows from `first` on, and the position of the first, whom the others follow.

        Returns:
            None if they are not all there, or not in this order.
        """
        slot_2, position_2 = self.locate(np.array([first, first + rows - 1]))
        alone = slot_2[0] == slot_2[1] and position_2[1] - position_2[0] == rows - 1
        return (int(slot_2[0]), int(position_2[0])) if alone else None

    def row_at(self, slot: int, positions_U: Integers) -> Integers:
        """Returns the rows of data records of a slot: the inverse of `locate`; -1 for padding.

        Not checked: that positions are in 0..data_rows(slot)-1. The caller does.
        """
        self._check_slot(slot)
        row_U = np.empty(len(positions_U), np.int64)
        if self._placed is not None:
            self._placed.row_at(slot, np.ascontiguousarray(positions_U, dtype=np.int64), row_U)
            return row_U
        of_slot = self.data_first[slot], self.data_base[slot], self.data_member[slot]
        _row_at(np.ascontiguousarray(positions_U, dtype=np.int64), *of_slot, self.slots, row_U)
        return row_U

    def rows_of(self, base: int, member: int, rotations_G: Integers) -> Integers:
        """Returns the rows of a member k or less of stripes of one base that exist, (G,) int64; -1 for padding."""
        return self.row_at(int(self.member_slot[base, member]), self.position(base, member, rotations_G))

    def rows_of_rank(self, slot: int, rank: int, first: int, end: int) -> int:
        """Returns how many of the rows first .. end - 1 are among the records of one rank of a slot.

        Of a placed table group, these rows must be whole pieces.
        """
        low, high = self.data_first[slot, rank : rank + 2].tolist()
        if self._placed is not None:
            return self._placed.count(slot, low, high, first, end)
        apart = self.slots * self.k  # rows from one record of the rank to the next
        lowest = int(self.data_base[slot, rank]) * self.k + int(self.data_member[slot, rank])
        return max(0, -((lowest - end) // apart)) - max(0, -((lowest - first) // apart))

    def group(self, slot: int, parity: bool, positions_U: Integers) -> list[StripeGroup]:
        """Splits records of a slot by the base of their stripes.

        Args:
            slot: where they live.
            parity: whether the positions are of parity records, else of data records.
            positions_U: (U,) int64, in any order.

        Returns:
            The groups that have a record, in order of rank; within one, records keep their order.
        """
        self._check_slot(slot)
        bases, members = (self.parity_base, self.parity_member) if parity else (self.data_base, self.data_member)
        first = (self.parity_first if parity else self.data_first)[slot]
        if len(positions_U) == 0:
            return []
        require(len(first) > 1, "`parity` must be False where r is 0, as there are no parity records")
        ranks_U = np.searchsorted(first, positions_U, side="right") - 1
        groups = []
        for rank in range(len(first) - 1):
            where = np.flatnonzero(ranks_U == rank).astype(np.int64, copy=False)
            if len(where):
                rotations = positions_U[where] - first[rank]
                groups.append(StripeGroup(int(bases[slot, rank]), int(members[slot, rank]), rotations, where))
        return groups

    def position(self, base: int, member: int, rotations_G: Integers) -> Integers:
        """Returns the positions of a member of stripes of one base, on its slot `member_slot[base, member]`.

        They are positions of data records for member < k, else of parity records.
        """
        return np.asarray(rotations_G, dtype=np.int64) + self.first_position(base, member)

    def first_position(self, base: int, member: int) -> int:
        """Returns the position of a base's member in rotation 0, on its slot. In rotation q it is q further."""
        self._check_member(base, member)
        first = self.data_first if member < self.k else self.parity_first
        return int(first[self.member_slot[base, member], self.member_rank[base, member]])

    def exists(self, base: int, member: int, rotations_G: Integers) -> NDArray[np.bool_]:
        """Returns whether members exist, (G,) bool: the last stripe may lack some, and later ones lack all."""
        self._check_member(base, member)
        stripes_G = np.asarray(rotations_G, dtype=np.int64) * self.slots + base
        if member >= self.k:
            return stripes_G < self.stripes
        return stripes_G * self.k + member < self.cells

    def holders(self, slot: int) -> tuple[int, ...]:
        """Returns the slots that hold parity of records of `slot`, ascending, whatever the number of rows."""
        self._check_slot(slot)
        return tuple(np.unique(self.member_slot[self.data_base[slot], self.k :]).tolist())

    def sources(self, slot: int) -> tuple[int, ...]:
        """Returns the slots of whose records `slot` holds parity, ascending, whatever the number of rows."""
        self._check_slot(slot)
        return tuple(np.unique(self.member_slot[self.parity_base[slot], : self.k]).tolist())

    def group_of(self, slot: int) -> tuple[int, ...]:
        """Returns all slots of the coding group of `slot`, ascending, itself included."""
        self._check_slot(slot)
        first = int(self._group_first[slot])
        return tuple(range(first, first + int(self._group_size[slot])))

    def companions(self, slot: int) -> tuple[int, ...]:
        """Returns the other slots that share a stripe with `slot`, ascending, whatever the number of rows."""
        self._check_slot(slot)
        together = self.member_slot[(self.member_slot == slot).any(axis=1)]
        return tuple(np.setdiff1d(together, [slot]).tolist())

    def runs(self, source: int, holder: int) -> tuple[SharedRun, ...]:
        """Returns how changes on `source` reach parity on `holder`, by position. Ranks without records are included.

        Their number does not depend on the number of rows, so it is the same for every table group of a job.
        """
        self._check_slot(source)
        self._check_slot(holder)
        found = []
        for rank, base in enumerate(self.data_base[source].tolist()):
            for parity in np.flatnonzero(self.member_slot[base, self.k :] == holder).tolist():  # at most one
                first, end = self.data_first[source, rank : rank + 2].tolist()
                shift = self.first_position(base, self.k + parity) - first
                found.append(SharedRun(first, end, shift, parity, int(self.data_member[source, rank])))
        return tuple(found)

    def _check_slot(self, slot: int) -> None:
        require(0 <= slot < self.slots, f"`slot` must be in 0..{self.slots - 1}, got {slot}")

    def _check_member(self, base: int, member: int) -> None:
        require(0 <= base < self.slots, f"`base` must be in 0..{self.slots - 1}, got {base}")
        require(0 <= member < self.n, f"`member` must be in 0..{self.n - 1}, got {member}")


@functools.lru_cache(maxsize=1024)
def layout_of(slots: int, k: int, r: int, rows: int, pieces: tuple[Piece, ...] = ()) -> Layout:
    """Returns the layout of a table group, as `Layout(...)`. It is cached: coordinator, servers and trainers share
    it."""
    return Layout(slots, k, r, rows, pieces)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    Layout(1, 1, 0, 1).locate(np.zeros(1, np.int64))
    Layout(1, 1, 0, 1).row_at(0, np.zeros(1, np.int64))
    Layout(1, 1, 0, 1, (Piece(1, (0,)),)).locate(np.zeros(1, np.int64))
    Layout(1, 1, 0, 1, (Piece(1, (0,)),)).row_at(0, np.zeros(1, np.int64))
