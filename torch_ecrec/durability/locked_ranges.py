"""The rebuild of the experiment "ranges": it locks the slot in ranges, and decodes one after another.

As ECRec recovers (PVLDB 2023; its number of locks): while a range is decoded, whoever needs a record of it, or of one
that comes later, waits until its range is whole. `rebuild.py`, which it is compared with, locks nothing: it decodes
first what somebody waits for. All else is that one's: what is read, decoded and installed, at which rate.

    3 ranges of a slot with 90 records: 0 to 29 are decoded; a lookup of record 12 waits for the first range, one of
    record 70 for all three. Once the first is whole, record 12 is given, though 70 is still missing.

The i-th range has the i-th part of the records of each table group, and of its parities. Parities are not locked:
nobody reads them, and what others fold meanwhile goes where it does without locks.

Shape legend: U records.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from torch_ecrec.durability.rebuild import Rebuild

Portion = tuple[int, bool, int, int]  # table group, whether parities, first position and the one behind the last


class LockedRebuild(Rebuild):
    """A rebuild that locks ranges of its slot; how many, the settings say."""

    def begin_anew(self) -> None:
        super().begin_anew()
        self._later = deque(self._in_ranges())  # of each range that is not begun, its portions
        self._open_below = [0] * len(self.held.shards)  # data records of each table group below it are not locked
        self._number = 0  # of the range that is decoded, from 1
        self._locks = not self.missing.has_all_data  # of lost parities alone nobody needs any
        self.portions = deque()

    def _in_ranges(self) -> list[list[Portion]]:
        """Returns all portions, by the range that each is in, cut where a range ends."""
        ranges: list[list[Portion]] = [[] for _ in range(self.settings.experiment.ranges)]
        for table_group, parity, first, end in self._portions():
            for number, portions in enumerate(ranges):
                low = max(first, self._end_of(number, table_group, parity))
                high = min(end, self._end_of(number + 1, table_group, parity))
                if low < high:
                    portions.append((table_group, parity, low, high))
        return ranges

    def _end_of(self, ranges: int, table_group: int, parity: bool) -> int:
        """Returns where the first so many ranges end."""
        return len(self.missing.of(table_group, parity)) * ranges // self.settings.experiment.ranges

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        if self.missing.remaining == 0:
            return False
        if self._locks:
            for table_group, positions_U in enumerate(positions):
                if (positions_U >= self._open_below[table_group]).any():
                    return True
        return super().is_missing(positions)

    def _start_portion(self) -> bool:
        while not super()._start_portion():
            if self.portions_under_way or not self._next_range():
                return False
        return True

    def _on_portion(self) -> None:
        if self.portions_under_way == 1 and not self.portions:
            self._unlock()
        super()._on_portion()

    def _next_range(self) -> bool:
        """Begins the next range, if there is one: the one that was decoded is whole."""
        self._unlock()
        if not self._later:
            return False
        self.portions = deque(self._later.popleft())
        self._number += 1
        return True

    def _unlock(self) -> None:
        """Lets those go on who waited for the first ranges, which are whole."""
        if not self._locks:
            return
        ends = [self._end_of(self._number, table_group, False) for table_group in range(len(self.held.shards))]
        if ends != self._open_below:
            self._open_below = ends
            self.slot.progress()
