"""Tracks which records of a shard have changed since they were last asked for.

Whoever copies a shard while steps go on reads all of it once, then what was touched meanwhile, and so on: what every
verb of `Shard` that changes bytes says here is never lost, and said at most once more than needed.

Shapes: P data records, Q parity records, U of them changed, M asked for.
"""

from __future__ import annotations

import numpy as np

from torch_ecrec.records.positions import Positions


class Touched:
    """A flag for each data and parity record. None is set at first.

    Args:
        data_rows, parity_rows: how many there are.
    """

    def __init__(self, data_rows: int, parity_rows: int) -> None:
        self._flags = [np.zeros(rows, np.bool_) for rows in (data_rows, parity_rows)]

    def note(self, parity: bool, positions_U: Positions) -> None:
        """Sets the flags of these records, (U,) int64. A position of -1 is skipped."""
        self._flags[parity][positions_U[positions_U >= 0]] = True

    def look(self, parity: bool) -> Positions:
        """Returns the positions of records that have changed: (M,) int64, ascending."""
        return np.flatnonzero(self._flags[parity])

    def take(self, parity: bool) -> Positions:
        """Returns the positions of records that have changed, and clears their flags."""
        positions_M = self.look(parity)
        self._flags[parity][positions_M] = False
        return positions_M
