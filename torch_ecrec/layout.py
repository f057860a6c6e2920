"""Where every record lives: row <-> (slot, position, stripe, member). Pure integer maths, equal on every process.

Terms. Stripe c holds the rows c*k .. c*k+k-1 of a slab: row x is member m = x % k of stripe x // k; members k .. n-1
are its parities. The stripe's *base* is b = c % slots and its *rotation* q = c // slots. Slots are cut into contiguous
*coding groups* of n to 2n slots, and member j of a stripe with base b lives on the slot j places after b, going round
within b's group. On a slot, records are ordered by stripe: the *position* of a data record is q*k + rank, where the
rank (0..k-1) counts the bases that have a data member on this slot, in ascending order; likewise q*r + rank for
parity.

Example: slots = 3, k = 2, r = 1, rows = 8. Row 5 is member 1 of stripe 2: base 2, rotation 0; members 0, 1, 2 live on
slots 2, 0, 1. Slot 0 has data of the bases 0 (member 0) and 2 (member 1), so row 5 is at position 0*2 + 1 = 1 of slot
0. Row 7 is member 1 of stripe 3: base 0, rotation 1, slot 1, where bases 0 and 1 have data: position 1*2 + 0 = 2.

Invariants. Members of a stripe are on n different slots. Positions are dense: slot s holds exactly the positions 0 ..
data_rows(s)-1 and 0 .. parity_rows(s)-1. In every full rotation each slot holds k data and r parity records, whatever
gcd(n, slots) is. All stripes of one base share the same map from members to slots, so work on many records splits by
rank. The last stripe may be partial: its missing members do not exist and count as zeros; its parities exist.

Shapes: S slots, U records, G records of one base, k and r as in the code.

Does not know which server hosts a slot, or what is in a record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from torch_ecrec.config import require, require_int

Integers = NDArray[np.int64]


@njit(nogil=True, cache=True)
def _locate(rows_U: Any, period: Any, k: Any, slot_of: Any, rank_of: Any, slot_U: Any, position_U: Any) -> None:
    """`period` is the rows of a full rotation; `slot_of` and `rank_of` are indexed by row % period."""
    for i in range(rows_U.shape[0]):
        row = np.uint64(rows_U[i])
        rotation = row // np.uint64(period)
        offset = row - rotation * np.uint64(period)
        slot_U[i] = slot_of[offset]
        position_U[i] = np.int64(rotation) * k + rank_of[offset]


@dataclass(frozen=True)
class StripeGroup:
    """Records of one slot whose stripes have one base, hence one map from members to slots.

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


@dataclass(frozen=True)
class Layout:
    """The records of one slab on all slots.

    Args:
        slots: logical shards, at least k + r.
        k: data members of a stripe, at least 1.
        r: parity members, 0 or more.
        rows: rows of the slab, 0 or more.

    Attributes:
        n: k + r.
        stripes: number of stripes, the partial one included.
        member_slot: (S, n) slot of each member, by base.
        member_rank: (S, n) rank of each member among the data (j < k) or parity (j >= k) records of its slot, by base.
        data_base, data_member: (S, k) base and member of the data record of each rank, by slot.
        parity_base, parity_member: (S, r) the same of the parity records; members are in k..n-1.

    All arrays are int64 and read-only.
    """

    slots: int
    k: int
    r: int
    rows: int
    n: int = _derived()
    stripes: int = _derived()
    member_slot: Integers = _derived()
    member_rank: Integers = _derived()
    data_base: Integers = _derived()
    data_member: Integers = _derived()
    parity_base: Integers = _derived()
    parity_member: Integers = _derived()
    _group_first: Integers = _derived()  # (S,) first slot of a slot's group
    _group_size: Integers = _derived()  # (S,)
    _slot_of: Integers = _derived()  # (S * k,) slot by row % (S * k)
    _rank_of: Integers = _derived()  # (S * k,)

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
        self._set("stripes", -(-self.rows // k))
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
        self._set("_rank_of", member_rank[:, :k].reshape(-1))

    def _set(self, name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value, dtype=np.int64)
            value.setflags(write=False)
        object.__setattr__(self, name, value)

    def data_rows(self, slot: int) -> int:
        """Number of data records on a slot."""
        self._check_slot(slot)
        rotations, rest = divmod(self.stripes, self.slots)
        count = rotations * self.k + int((self.data_base[slot] < rest).sum())
        missing = self.stripes * self.k - self.rows
        if missing:
            last = (self.stripes - 1) % self.slots
            count -= int((self.member_slot[last, self.k - missing : self.k] == slot).sum())
        return count

    def parity_rows(self, slot: int) -> int:
        """Number of parity records on a slot."""
        self._check_slot(slot)
        rotations, rest = divmod(self.stripes, self.slots)
        return rotations * self.r + int((self.parity_base[slot] < rest).sum())

    def locate(self, rows_U: Integers) -> tuple[Integers, Integers]:
        """Where rows live.

        Args:
            rows_U: (U,) int64, rows of the slab.

        Returns:
            slot_U, position_U: (U,) int64 each.

        Not checked: that rows are in 0..rows-1. The caller does.
        """
        slot_U, position_U = np.empty(len(rows_U), np.int64), np.empty(len(rows_U), np.int64)
        rows_U = np.ascontiguousarray(rows_U, dtype=np.int64)
        _locate(rows_U, self.slots * self.k, self.k, self._slot_of, self._rank_of, slot_U, position_U)
        return slot_U, position_U

    def row_at(self, slot: int, positions_U: Integers) -> Integers:
        """The rows of data records of a slot: inverse of `locate`.

        Not checked: that positions are in 0..data_rows(slot)-1. The caller does.
        """
        self._check_slot(slot)
        rotations_U, ranks_U = np.divmod(np.asarray(positions_U, dtype=np.int64), self.k)
        stripes_U = rotations_U * self.slots + self.data_base[slot][ranks_U]
        return stripes_U * self.k + self.data_member[slot][ranks_U]

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
        per_rotation = self.r if parity else self.k
        bases, members = (self.parity_base, self.parity_member) if parity else (self.data_base, self.data_member)
        if len(positions_U) == 0:
            return []
        require(per_rotation > 0, "`parity` must be False where r is 0, as there are no parity records")
        rotations_U, ranks_U = np.divmod(np.asarray(positions_U, dtype=np.int64), per_rotation)
        groups = []
        for rank in range(per_rotation):
            where = np.flatnonzero(ranks_U == rank).astype(np.int64, copy=False)
            if len(where):
                groups.append(StripeGroup(int(bases[slot, rank]), int(members[slot, rank]), rotations_U[where], where))
        return groups

    def position(self, base: int, member: int, rotations_G: Integers) -> Integers:
        """Positions of a member of some stripes of one base on its slot, which is `member_slot[base, member]`.

        They are positions of data records for member < k, else of parity records.
        """
        self._check_member(base, member)
        per_rotation = self.k if member < self.k else self.r
        return np.asarray(rotations_G, dtype=np.int64) * per_rotation + self.member_rank[base, member]

    def exists(self, base: int, member: int, rotations_G: Integers) -> NDArray[np.bool_]:
        """Whether the member exists, (G,) bool: False for what the last stripe lacks and for stripes past the end."""
        self._check_member(base, member)
        stripes_G = np.asarray(rotations_G, dtype=np.int64) * self.slots + base
        if member >= self.k:
            return stripes_G < self.stripes
        return stripes_G * self.k + member < self.rows

    def holders(self, slot: int) -> tuple[int, ...]:
        """Slots that hold parity of records of `slot`, ascending; whatever the number of rows."""
        self._check_slot(slot)
        return tuple(np.unique(self.member_slot[self.data_base[slot], self.k :]).tolist())

    def sources(self, slot: int) -> tuple[int, ...]:
        """Slots of whose records `slot` holds parity, ascending; whatever the number of rows."""
        self._check_slot(slot)
        return tuple(np.unique(self.member_slot[self.parity_base[slot], : self.k]).tolist())

    def group_of(self, slot: int) -> tuple[int, ...]:
        """All slots of the coding group of `slot`, ascending, itself included."""
        self._check_slot(slot)
        first = int(self._group_first[slot])
        return tuple(range(first, first + int(self._group_size[slot])))

    def fold_map(self, source: int, holder: int) -> tuple[Integers, Integers, Integers]:
        """How changes on `source` reach the parity on `holder`, by rank of the source position (position % k).

        The parity of source position p is at position (p // k) * r + parity_rank[p % k] of the holder.

        Returns:
            parity_rank: (k,) int64, -1 where the holder has no parity of the record.
            parity_index: (k,) int64, which parity of the stripe it is, 0..r-1; -1 likewise.
            member: (k,) int64, which member of its stripe the record is, 0..k-1.
        """
        self._check_slot(source)
        self._check_slot(holder)
        bases = self.data_base[source]
        held = self.member_slot[bases, self.k :] == holder  # (k, r), at most one in a row
        parity_rank, parity_index = np.full(self.k, -1, np.int64), np.full(self.k, -1, np.int64)
        ranks, indices = np.nonzero(held)
        parity_index[ranks] = indices
        parity_rank[ranks] = self.member_rank[bases[ranks], self.k + indices]
        return parity_rank, parity_index, self.data_member[source].copy()

    def _check_slot(self, slot: int) -> None:
        require(0 <= slot < self.slots, f"`slot` must be in 0..{self.slots - 1}, got {slot}")

    def _check_member(self, base: int, member: int) -> None:
        require(0 <= base < self.slots, f"`base` must be in 0..{self.slots - 1}, got {base}")
        require(0 <= member < self.n, f"`member` must be in 0..{self.n - 1}, got {member}")


def warm() -> None:
    """Compiles or loads the kernel."""
    Layout(1, 1, 0, 1).locate(np.zeros(1, np.int64))
