"""Places tables on slots: which slot has which rows. Pure, and equal on every process.

A table is *whole* on one slot, so that the slot can pool its bags and answers with one vector for each; or its rows
are dealt out in turns to several slots. Each table group fills all slots equally: a stripe has a record of each of its
slots.

    auto         whole where the table is at most half of a slot's share of its table group, or has long bags and fits;
                 else dealt to all slots, or, with long bags, to the fewest that have room
    table_wise   whole, even if slots then differ in size
    row_wise     dealt to all slots, to each in proportion to its room. A table group all of whose tables are so is
                 not placed at all (`stripes.py`)

Whole tables are placed one by one, those of the most load first, each on the slot of the least load that has room;
then the others fill the slots. Where that leaves a slot with more load than a tenth above the mean, one of its whole
tables is dealt to all.

The load of a table is what a sample costs its slots: features * ids of a bag * numbers of a row. Where bags are short,
trainers look up each row of a batch once, so a small table counts for less.

Does not know what is in a record, or which server hosts a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch_ecrec.runtime.checks import require, require_int

SHARDINGS = ("auto", "table_wise", "row_wise")
LONG_BAG = 2.0  # ids: from there on one vector for a bag is less than its rows
LEVEL = 1.1  # the most load of a slot, of the mean, where dealing tables can bring it there
TRIES = 16  # whole tables that are dealt for that
SMALL = 8  # a slot's share of a table group has room for so many small tables, at least
BATCH = 1024  # samples, for what a batch has of a small table


def are_long(ids: Any, bags: Any) -> Any:
    """Returns whether a sum for each of so many bags, with so many ids together, is clearly less than their rows.

    Of numbers, or of arrays of them, as `are_long_in_parts`.
    """
    return ids >= LONG_BAG * bags


def are_long_in_parts(ids: Any, rows: Any, bags: Any, slots: Any) -> Any:
    """Likewise, where each slot of a table sums the ids that it has. Rows count if they are less: each travels once."""
    least = LONG_BAG * bags * slots
    return (ids >= least) & (rows >= least)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a placed table group, dealt out in turns to some slots: the first row to the first of them.

    Args:
        rows: how many, at least 1.
        slots: to which, without duplicates, at least one.
    """

    rows: int
    slots: tuple[int, ...]

    def __post_init__(self) -> None:
        require_int("rows of a piece", self.rows, 1)
        require(len(self.slots) > 0, "a piece needs a slot")
        require(len(set(self.slots)) == len(self.slots), f"a piece has a slot twice, got {self.slots}")

    def shares(self) -> Iterator[tuple[int, int]]:
        """Yields the slots, and how many of the rows each has."""
        whole, rest = divmod(self.rows, len(self.slots))
        for turn, slot in enumerate(self.slots):
            yield slot, whole + (turn < rest)


@dataclass(frozen=True)
class Wanted:
    """A table to be placed.

    Args:
        rows: how many, at least 1.
        sharding: one of `SHARDINGS`.
        bag: ids of a bag, on average.
        weight: features that look into it, times the numbers of a row.
    """

    rows: int
    sharding: str
    bag: float
    weight: float

    @property
    def long(self) -> bool:
        """Whether its bags are long enough to be pooled on its slots."""
        return bool(are_long(self.bag, 1))

    @property
    def load(self) -> float:
        """The numbers that slots read of this table for one sample."""
        return self.weight * (self.bag if self.long else min(1.0, self.rows / BATCH))


class _Slots:
    """Keeps what is placed so far: the load of each slot over all table groups, and for how many rows of the present
    table group it has room."""

    def __init__(self, slots: int) -> None:
        self.load = [0.0] * slots
        self.free = [0] * slots

    def begin(self, rows: int) -> None:
        """Begins a table group of so many rows."""
        self.free = [-(-rows // len(self.load))] * len(self.load)

    def put(self, table: Wanted, piece: Piece) -> Piece:
        """Counts a piece of a table as placed, and returns it."""
        for slot, rows in piece.shares():
            self.free[slot] -= rows
            self.load[slot] += table.load * rows / table.rows
        return piece

    def emptiest(self) -> list[int]:
        """Returns all slots, those with most room first."""
        return sorted(range(len(self.free)), key=lambda slot: (-self.free[slot], self.load[slot], slot))

    def whole(self, table: Wanted, forced: bool, density: float) -> tuple[Piece, ...] | None:
        """Puts a table on one slot; None if none has room.

        Args:
            forced: it is put somewhere even so.
            density: load of a row of those tables that will fill the slots.
        """
        able = [slot for slot, free in enumerate(self.free) if free >= table.rows]
        if not able and forced:
            able = self.emptiest()[:1]
        if not able:
            return None
        best = min(able, key=lambda slot: (self.load[slot] + density * self.free[slot], -self.free[slot], slot))
        return (self.put(table, Piece(table.rows, (best,))),)

    def cut(self, table: Wanted, tight: bool) -> tuple[Piece, ...]:
        """Deals a table to the fewest slots that have room for it together.

        Args:
            tight: it fills all of them but the last, so that the next one lies on few slots, too.
        """
        share: dict[int, int] = {}
        left = table.rows
        for slot in self.emptiest():
            share[slot] = min(left, max(0, self.free[slot]))
            left -= share[slot]
            if not left:
                break
        return self._dealt(table, share) if tight else self.deal(table, [*share])

    def deal(self, table: Wanted, chosen: Sequence[int]) -> tuple[Piece, ...]:
        """Deals a table to some slots, to each in proportion to its room."""
        room = {slot: max(0, self.free[slot]) for slot in chosen}
        total = max(1, sum(room.values()))
        return self._dealt(table, {slot: table.rows * most // total for slot, most in room.items()})

    def _dealt(self, table: Wanted, share: Mapping[int, int]) -> tuple[Piece, ...]:
        """Puts so many rows of a table on each slot, in turns as long as it lasts, and what is left on all of them."""
        pieces, left, given = [], table.rows, 0
        for most in sorted({rows for rows in share.values() if rows}):
            open_ = self._by_room(slot for slot, rows in share.items() if rows >= most)
            pieces.append(self.put(table, Piece((most - given) * len(open_), tuple(open_))))
            left, given = left - (most - given) * len(open_), most
        if left:  # what divisions left over: a row for each of some slots, or all where there is no room
            pieces.append(self.put(table, Piece(left, tuple(self._by_room(share)))))
        return tuple(pieces)

    def _by_room(self, chosen: Iterable[int]) -> list[int]:
        chosen = set(chosen)
        return [slot for slot in self.emptiest() if slot in chosen]


def place(table_groups: Sequence[Sequence[Wanted]], slots: int) -> list[list[tuple[Piece, ...]]]:
    """Places tables.

    Args:
        table_groups: the tables of each table group, in order.
        slots: how many there are.

    Returns:
        For each table the pieces of its rows, in order; () for all of a table group that is not placed.
    """
    state = _Slots(slots)
    found: list[list[tuple[Piece, ...]]] = []
    for tables in table_groups:
        if all(table.sharding == "row_wise" for table in tables):
            for slot in range(slots):
                state.load[slot] += sum(table.load for table in tables) / slots
            found.append([()] * len(tables))
        else:
            found.append(_levelled(state, tables))
    return found


def _levelled(state: _Slots, tables: Sequence[Wanted]) -> list[tuple[Piece, ...]]:
    """Places the tables of a table group, as level as dealing out some whole tables of the fullest slots makes it.

    First, tables that are cut fill their slots one after the other; where that is not level, they are spread.
    """
    dealt: set[int] = set()
    before = [*state.load]
    tight = _placed(state, tables, dealt, tight=True)
    if max(state.load) <= LEVEL * sum(state.load) / len(state.load):
        return tight
    tried: list[tuple[float, list[float], list[tuple[Piece, ...]]]] = []
    while True:
        state.load = [*before]
        placed = _placed(state, tables, dealt, tight=False)
        most = max(state.load)
        tried.append((most, state.load, placed))
        there = (state.load.index(most),)
        whole = [
            i
            for i, table in enumerate(tables)
            if table.sharding == "auto" and i not in dealt and placed[i][0].slots == there
        ]
        if most <= LEVEL * sum(state.load) / len(state.load) or not whole or len(dealt) >= TRIES:
            break
        dealt.add(max(whole, key=lambda i: (tables[i].load, i)))
    _, state.load, placed = min(tried, key=lambda one: one[0])
    return placed


def _placed(state: _Slots, tables: Sequence[Wanted], dealt: Set[int], tight: bool) -> list[tuple[Piece, ...]]:
    """Returns the pieces of each table of a table group; those of the tables `dealt` lie on all slots.

    Large whole tables come first, then those that are cut; small ones, which go anywhere, level the load; and the
    others fill the slots. What a slot has room for will be filled so: that load is reckoned with before.
    """
    slots, rows = len(state.load), sum(table.rows for table in tables)
    share = -(-rows // slots)
    state.begin(rows)
    forced = [table.sharding == "table_wise" for table in tables]
    whole = [
        i
        for i, table in enumerate(tables)
        if forced[i] or (table.sharding == "auto" and _fits(table, share) and i not in dealt)
    ]
    taken = {*dealt, *whole}
    cut = [i for i, table in enumerate(tables) if i not in taken and table.sharding == "auto" and table.long]
    taken = {*whole, *cut}
    filling = [i for i in range(len(tables)) if i not in taken]
    if not filling:
        filling, cut = cut[-1:], cut[:-1]
    placed: dict[int, tuple[Piece, ...]] = {}

    def density(of: Sequence[int]) -> float:
        return sum(tables[i].load for i in of) / max(1, sum(tables[i].rows for i in of))

    def put_whole(of: Sequence[int], later: Sequence[int]) -> None:
        fill = density(later)
        for i in sorted(of, key=lambda i: (not forced[i], fill * tables[i].rows - tables[i].load, i)):
            pieces = state.whole(tables[i], forced[i], fill)
            placed[i] = pieces if pieces is not None else state.cut(tables[i], tight)

    small = [i for i in whole if tables[i].rows * SMALL <= share]
    large = [i for i in whole if tables[i].rows * SMALL > share]
    put_whole(large, [*cut, *filling, *small])
    for i in sorted(cut, key=lambda i: -tables[i].rows):
        placed[i] = state.cut(tables[i], tight)
    put_whole(small, filling)
    for i in filling:
        placed[i] = state.deal(tables[i], range(slots))
    return [placed[index] for index in range(len(tables))]


def _fits(table: Wanted, share: int) -> bool:
    """Returns whether a table may be whole: so small that it goes somewhere, or one that gains by it."""
    return table.rows <= (share if table.long else share // 2)
