"""The savers of CPR's prioritised saves: rules for which rows are saved first.

A lost slot that begins anew from what was saved lacks what was trained since. So between two saves of everything, the
rows that matter most are saved more often: a portion r of them every r-th part of the interval. A *saver* notes what
each step changes, and picks rows when a save is due. Rows that it has picked begin anew: they count as saved. A save
may come to nothing: then they are put back.

    name         picks                                  memory for each row
    everything   all rows                               none
    mfu          the rows that most steps changed       4 bytes, a counter
    ssu          rows that a sample of changes has met  1 byte, and 8 for each row of the portion
    scar         the rows whose weights changed most    a copy of its weights

and, from a pick until it is settled or put back, what undoes it: 8 bytes for each row that was picked, with mfu 4 more,
with scar its weights.

Example: r = 1/2, four rows, steps change 0 and 1, then 1 and 3, then 1: mfu has counted 1, 3, 0, 1 and picks 0 and 1
(of as many, the first).

After K. Maeng et al., "CPR" (MLSys 2021), which names them; scar is from A. Qiao et al., "Fault Tolerance in
Iterative-Convergent Machine Learning" (ICML 2019). A row counts once a step here, however often a batch has it: so it
is that servers see them.

Pure: no files, no threads. Savers know nothing of when to save, nor where.

Shapes: P rows, U of them changed by a step, N picked, K remembered, D weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.records.positions import Floats, Positions
from torch_ecrec.runtime.checks import require, require_int

BLOCK = 1 << 16  # rows that are compared at a time
SAMPLED = 4  # ssu: every so many changes one is looked at

Weights = Callable[[Positions], Floats]  # of rows (N,): (N, D) float32, fresh


class Saver(Protocol):
    """Chooses which rows of one table group of one slot to save first. Positions ascend, and each is there once."""

    @property
    def memory_bytes(self) -> int:
        """The memory that the saver uses now, in bytes."""

    def note(self, positions_U: Positions) -> None:
        """Notes that a step has changed these rows (U,)."""

    def pick(self, most: int) -> Positions:
        """Returns at most `most` rows (N,) to save now. They count as saved, as they are now."""

    def settle(self) -> None:
        """Confirms the last pick: it was saved, and cannot be put back any more."""

    def put_back(self) -> None:
        """Undoes the last pick unless it is settled: it was not saved, so its rows count as before it."""


class Everything:
    """Picks all rows, always. Raises ValueError when asked for fewer, since it has no order among them."""

    memory_bytes = 0

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def note(self, positions_U: Positions) -> None:
        """Does nothing: this saver keeps no notes of rows."""

    def pick(self, most: int) -> Positions:
        """Picks all rows, see `Saver`."""
        require(most >= self._rows, f"`most` must be at least {self._rows}, which is everything, got {most}")
        return np.arange(self._rows, dtype=np.int64)

    def settle(self) -> None:
        """Does nothing: this saver keeps no notes of rows."""

    def put_back(self) -> None:
        """Does nothing: this saver keeps no notes of rows."""


class MostFrequentlyUsed:
    """Picks the rows that most steps have changed since they were last saved."""

    def __init__(self, rows: int) -> None:
        self._counts_P = np.zeros(rows, np.uint32)
        self._picked_N: Positions
        self.settle()

    @property
    def memory_bytes(self) -> int:
        """The memory of the counts and of the last pick, in bytes."""
        return self._counts_P.nbytes + self._picked_N.nbytes + self._were_N.nbytes

    def note(self, positions_U: Positions) -> None:
        """Counts a change of these rows, see `Saver`."""
        self._counts_P[positions_U] += np.uint32(1)

    def pick(self, most: int) -> Positions:
        """Picks the rows with the greatest counts, and sets these to 0, see `Saver`."""
        picked_N = greatest(self._counts_P, most)
        self._picked_N, self._were_N = picked_N, self._counts_P[picked_N]
        self._counts_P[picked_N] = 0
        return picked_N

    def settle(self) -> None:
        """Forgets the counts of the last pick, see `Saver`."""
        self._picked_N, self._were_N = np.empty(0, np.int64), np.empty(0, np.uint32)

    def put_back(self) -> None:
        """Adds the counts of the last pick again, see `Saver`."""
        self._counts_P[self._picked_N] += self._were_N
        self.settle()


class SubSampledUsed:
    """Picks rows found in a sample of the changes: those that change often are found most likely.

    Args:
        rows: how many there are.
        most: rows that are remembered; once there are more, some of those remembered before are forgotten at random.
        seed: for that choice.
        every: every so many changes one is looked at.
    """

    def __init__(self, rows: int, most: int, seed: int, every: int = SAMPLED) -> None:
        require_int("most", most, 1)
        require_int("every", every, 1)
        self._every, self._rng = every, np.random.default_rng(seed)
        self._kept_K: Positions = np.empty(most, np.int64)  # in no order; the first `_count` are remembered
        self._is_kept_P = np.zeros(rows, np.bool_)
        self._count = 0
        self._until = 0  # so many changes are passed over before the next one is looked at
        self._picked_N: Positions
        self.settle()

    @property
    def memory_bytes(self) -> int:
        """The memory of the remembered rows and of the last pick, in bytes."""
        return self._kept_K.nbytes + self._is_kept_P.nbytes + self._picked_N.nbytes

    def note(self, positions_U: Positions) -> None:
        """Remembers a sample of these rows, see `Saver`."""
        sample = positions_U[self._until :: self._every]
        self._until = (self._until - len(positions_U)) % self._every
        self._remember(sample)

    def _remember(self, rows_N: Positions) -> None:
        new, most = rows_N[~self._is_kept_P[rows_N]], len(self._kept_K)
        if len(new) > most:
            new = self._some_of(new, most)
        before, room = self._count, most - self._count
        self._count = min(most, before + len(new))
        self._kept_K[before : self._count] = new[:room]
        if len(new) > room:
            places = self._rng.choice(before, len(new) - room, replace=False, shuffle=False)
            self._is_kept_P[self._kept_K[places]] = False
            self._kept_K[places] = new[room:]
        self._is_kept_P[new] = True

    def pick(self, most: int) -> Positions:
        """See `Saver`. Picks all rows that it remembers; of more than `most`, a random choice stays for later."""
        kept = np.sort(self._kept_K[: self._count])
        picked_N = kept if len(kept) <= most else np.sort(self._some_of(kept, most))
        self._is_kept_P[picked_N] = False
        stay = kept[self._is_kept_P[kept]]
        self._count = len(stay)
        self._kept_K[: self._count] = stay
        self._picked_N = picked_N
        return picked_N

    def settle(self) -> None:
        """Forgets the last pick, see `Saver`."""
        self._picked_N = np.empty(0, np.int64)

    def put_back(self) -> None:
        """See `Saver`. Remembers the rows again, in place of others if there are too many."""
        self._remember(self._picked_N)
        self.settle()

    def _some_of(self, rows_N: Positions, count: int) -> Positions:
        return self._rng.choice(rows_N, count, replace=False, shuffle=False)


class ChangedMost:
    """Picks the rows whose weights are furthest (L2) from what was last saved of them.

    Args:
        rows: how many.
        weights: gives them as they are now.
    """

    def __init__(self, rows: int, weights: Weights) -> None:
        self._weights = weights
        self._saved_PD: Floats = np.empty((rows, weights(np.empty(0, np.int64)).shape[1]), np.float32)
        for first in range(0, rows, BLOCK):
            block = slice(first, min(rows, first + BLOCK))
            self._saved_PD[block] = weights(np.arange(block.start, block.stop, dtype=np.int64))
        self._picked_N: Positions
        self._were_ND: Floats
        self.settle()

    @property
    def memory_bytes(self) -> int:
        """The memory of the saved weights and of the last pick, in bytes."""
        return self._saved_PD.nbytes + self._picked_N.nbytes + self._were_ND.nbytes

    def note(self, positions_U: Positions) -> None:
        """Does nothing, see `Saver`: it looks at every row when it picks."""

    def pick(self, most: int) -> Positions:
        """Picks the rows with the greatest change since they were saved, see `Saver`."""
        rows = len(self._saved_PD)
        squares_P = np.empty(rows, np.float32)
        for first in range(0, rows, BLOCK):
            block = slice(first, min(rows, first + BLOCK))
            change_ND = self._weights(np.arange(block.start, block.stop, dtype=np.int64))
            change_ND -= self._saved_PD[block]
            np.einsum("nd,nd->n", change_ND, change_ND, out=squares_P[block])
        picked_N = greatest(squares_P, most)
        self._picked_N, self._were_ND = picked_N, self._saved_PD[picked_N]
        self._saved_PD[picked_N] = self._weights(picked_N)
        return picked_N

    def settle(self) -> None:
        """Forgets the weights before the last pick, see `Saver`."""
        self._picked_N = np.empty(0, np.int64)
        self._were_ND = np.empty((0, self._saved_PD.shape[1]), np.float32)

    def put_back(self) -> None:
        """Restores the saved weights from before the last pick, see `Saver`."""
        self._saved_PD[self._picked_N] = self._were_ND
        self.settle()


SAVERS = ("everything", "mfu", "ssu", "scar")


def saver_of(name: str, rows: int, portion: float, weights: Weights, seed: int = 0) -> Saver:
    """Makes the saver of one table group of one slot.

    Args:
        name: one of `SAVERS`.
        rows: of the table group on the slot.
        portion: of the rows that is saved at a time.
        weights: gives rows' weights as they are now.
        seed: for random choices.

    Raises:
        ValueError: no such name.
    """
    match name:
        case "everything":
            return Everything(rows)
        case "mfu":
            return MostFrequentlyUsed(rows)
        case "ssu":
            return SubSampledUsed(rows, max(1, int(portion * rows)), seed)
        case "scar":
            return ChangedMost(rows, weights)
    raise ValueError(f"unknown saver {name!r}; expected one of {', '.join(SAVERS)}")


def greatest(values_P: NDArray[np.uint32] | Floats, most: int) -> Positions:
    """Returns the places (N,), ascending, of at most `most` greatest values above 0; of equal values the first ones.

    A NaN counts as the greatest of all, so that a row that has become NaN is saved.
    """
    some_S = np.flatnonzero(values_P != 0).astype(np.int64, copy=False)
    if len(some_S) <= most:
        return some_S
    if most <= 0:
        return np.empty(0, np.int64)
    of_S = values_P[some_S]
    if of_S.dtype.kind == "f":
        of_S = np.where(np.isnan(of_S), np.float32(np.inf), of_S)
    least = np.partition(of_S, len(of_S) - most)[len(of_S) - most]
    above = of_S > least
    equal = np.flatnonzero(of_S == least)[: most - int(np.count_nonzero(above))]
    above[equal] = True
    return some_S[above]
