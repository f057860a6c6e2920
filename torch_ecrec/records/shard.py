"""The records of one table group on one slot, and the parity records beside them.

A parity record has the length of a data record but is bytes only: XORs of records are no numbers.

Each record and parity has a *seal* (`codec/seals.py`), which every verb keeps up by what it changes: a record that was
changed in any other way does not fit it. Seals lie beside the records, in memory of their own, so that records, deltas
and messages are what they would be without, and a page that is lost takes no record and its seal together.

Invariants. Only this object and its stores (`store.py`) touch records: others use the verbs. Positions are checked
before anything is read or written. Bytes move unchanged, NaNs included. A verb adds the seal of what it changes, and
never makes a seal anew from a record that was there before: damage stays visible.

Shapes: P data records, Q parity records, W numbers and B bytes in a record, D weights, U positions asked for.

Does not know rows, stripes or steps, and does not lock: the server owns the order of reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.codec import seals
from torch_ecrec.codec.field import as_words, xor_rows_
from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.records import quantised
from torch_ecrec.records.captured import Captured, MarksOf
from torch_ecrec.records.halves import bfloat16_of, gather_weights
from torch_ecrec.records.merge import Merged
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.positions import Bytes, Floats, Positions, check_bags, check_positions, mark
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.store import First, MemoryStore, RecordStore, Stores, Use, View
from torch_ecrec.records.touched import Touched
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import AHEAD, prefetch, prefetch_row
from torch_ecrec.runtime.row_sums import row_address, sum_table_rows

POOLED_AT_ONCE = 1 << 10  # records of halves, whose weights are float32 while they are pooled
_NO_WEIGHTS = np.empty(0, np.float32)
_NOTHING = np.empty(0, np.int64)


@kernel()
def _gather(source_PW: Any, positions_U: Any, result_UV: Any) -> None:
    """result[i] = the leading words of source[positions[i]]."""
    for i in range(positions_U.shape[0]):
        prefetch_row(source_PW, positions_U, i)
        position = positions_U[i]
        for j in range(result_UV.shape[1]):
            result_UV[i, j] = source_PW[position, j]


@kernel()
def _gather_bfloat16(source_PW: Any, positions_U: Any, result_UV: Any) -> None:
    """As `_gather`, rounded from float32 to bfloat16: to nearest, ties to even, as torch does; NaN stays NaN."""
    for i in range(positions_U.shape[0]):
        prefetch_row(source_PW, positions_U, i)
        position = positions_U[i]
        for j in range(result_UV.shape[1]):
            result_UV[i, j] = bfloat16_of(source_PW[position, j])


@kernel()
def _pool(table_PW: Any, positions_N: Any, lengths_G: Any, weights_N: Any, weighted: Any, out_GD: Any) -> None:
    """out[g] = the sum of the leading numbers of the rows at the positions of bag g, each times its weight."""
    dim, count = out_GD.shape[1], positions_N.shape[0]
    table, row_bytes = row_address(table_PW, 0), table_PW.shape[1] * table_PW.itemsize
    n = 0
    for g in range(lengths_G.shape[0]):
        end = n + lengths_G[g]
        for i in range(n + AHEAD, min(end + AHEAD, count)):
            prefetch(table + positions_N[i] * row_bytes, dim * table_PW.itemsize)
        out = row_address(out_GD, g)
        sum_table_rows(out, dim, table, row_bytes, table_PW, positions_N, weights_N, weighted, n, end)
        n = end


@kernel()
def scatter(target_PW: Any, positions_U: Any, values_UW: Any) -> None:
    """target[positions[i]] = values[i]. Not checked: that the positions are rows of the target."""
    for i in range(positions_U.shape[0]):
        prefetch_row(target_PW, positions_U, i)
        position = positions_U[i]
        for j in range(values_UW.shape[1]):
            target_PW[position, j] = values_UW[i, j]


def pool_numbers(
    numbers_UW: Floats, dim: int, index_N: NDArray[Any], lengths_G: NDArray[np.int32], weights_N: Floats | None
) -> Floats:
    """Returns the sums (G, D) of the first `dim` numbers of some rows, bag by bag, as `Shard.pool` makes them.

    Args:
        numbers_UW: (U, W) float32, contiguous.
        index_N: (N,) int64, each in 0..U-1; not checked.
        lengths_G, weights_N: as of `Shard.pool`.
    """
    pooled_GD = np.empty((len(lengths_G), dim), np.float32)
    weighted, factors_N = weights_N is not None, _NO_WEIGHTS if weights_N is None else weights_N
    _pool(numbers_UW, index_N, lengths_G, factors_N, weighted, pooled_GD)
    return pooled_GD


class SealedDeltas(NamedTuple):
    """The change that an operation made to some records, in the order of their positions. Fresh memory."""

    deltas_UB: Bytes  # (U, B) uint8, old XOR new
    seals_U: SealsOf | None  # (U,) uint32, of the deltas; None where none are kept


class Shard:
    """One table group's records on one slot, and the parity records beside them. All are zero at first.

    Args:
        schema: of the records.
        data_rows: number of data records.
        parity_rows: number of parity records.
        scattered: records are first written here and there; `merge_pages` is called before many in a row are.
        sealed: seals are kept.
        stores: makes the two stores; None: they are in memory.

    Attributes:
        touched: is told of all changes while the shard is being copied; None: it is not being copied.
    """

    def __init__(
        self,
        schema: Schema,
        data_rows: int,
        parity_rows: int,
        scattered: bool = False,
        sealed: bool = True,
        stores: Stores | None = None,
    ) -> None:
        require_int("data_rows", data_rows, 0)
        require_int("parity_rows", parity_rows, 0)
        self.schema, self.data_rows, self.parity_rows, self.sealed = schema, data_rows, parity_rows, sealed

        def make(rows: int, parity: bool) -> RecordStore:
            if stores is None:
                return MemoryStore(rows, schema.nbytes, scattered, sealed)
            return stores(rows, schema.nbytes, parity, sealed)

        self._stores = make(data_rows, False), make(parity_rows, True)
        self.touched: Touched | None = None

    @property
    def data_bytes(self) -> int:
        """The data records, in bytes, wherever they lie."""
        return self.data_rows * self.schema.nbytes

    @property
    def parity_bytes(self) -> int:
        """The parity records, in bytes, wherever they lie."""
        return self.parity_rows * self.schema.nbytes

    @property
    def stores(self) -> tuple[RecordStore, RecordStore]:
        """Where records and parities lie: for who shares memory out among stores, and for nobody else."""
        return self._stores

    def captured(self, marks_P: MarksOf) -> Captured:
        """Returns the marked data records as they are now, to be read in portions while steps go on."""
        return Captured(self._stores[False], marks_P)

    def tier_figures(self) -> list[Any]:
        """Returns the figures of its stores on disks, a `TierFigures` of each."""
        return [figures for store in self._stores if (figures := store.figures()) is not None]

    @property
    def in_memory(self) -> bool:
        """All data records are: `want` and `bring` have nothing to do."""
        return self._stores[False].in_place

    def want(self, positions_U: Positions) -> tuple[Any, bool]:
        """Prepares some data records that are needed soon; see `TieredStore.want`."""
        return self._stores[False].want(positions_U)

    def arrive(self, reading: Any) -> None:
        """Takes in data records that `want` has asked for, as they were read."""
        self._stores[False].arrive(reading)

    @property
    def frames(self) -> int:
        """For how many of the data records there is memory."""
        return self._stores[False].frames

    def pin(self, later: Sequence[Positions]) -> None:
        """Keeps some data records in memory once they are there; see `TieredStore.pin`."""
        self._stores[False].pin(later)

    def soon(self) -> list[tuple[Any, bool]]:
        """Returns what its stores should read before long: `RecordStore.soon`, and whether it is of parities."""
        found = [(store.soon(), parity) for parity, store in enumerate(self._stores)]
        return [(reading, bool(parity)) for reading, parity in found if reading is not None]

    def settle(self, reading: Any, parity: bool) -> None:
        """Takes in what `soon` has asked for, as it was read."""
        self._stores[parity].settle(reading)

    def keep_last_(self, runs: Sequence[tuple[int, int]]) -> None:
        """Keeps some data records in memory until no others are left to leave it; see `TieredStore.keep_last_`."""
        self._stores[False].keep_last_(runs)

    def bring(self, positions_U: Positions) -> None:
        """Sees to it that some data records are in memory; waits for the disk."""
        self._stores[False].at(positions_U, Use.READ)

    def scan(self, first: int, end: int, most_bytes: int, parity: bool) -> tuple[int, Any]:
        """Begins to look at those that are on a disk only: see `RecordStore.scan`."""
        return self._stores[parity].scan(first, end, most_bytes)

    def scanned(self, reading: Any, parity: bool) -> tuple[Positions, Positions]:
        """Returns which of these fit their seals, and which do not: see `RecordStore.scanned`."""
        return self._stores[parity].scanned(reading)

    def take_damaged(self, parity: bool) -> Positions:
        """Returns those that came damaged from a disk since the last call, (M,) int64 ascending; mended ones, too."""
        return self._stores[parity].take_damaged()

    # steps --------------------------------------------------------------------------------------

    def initialise_(self, first: First, parity: bool = False) -> None:
        """Gives every data record, or every parity record, its first value: `first` says what it is."""
        self._stores[parity].begin_(first)

    def apply_(
        self, optimizer: SparseOptimizer, merged: Merged, lr: float, iteration: int, fixed: Mapping[str, float]
    ) -> SealedDeltas:
        """Applies one optimizer step, and returns the deltas of `SparseOptimizer.update_` with their seals."""
        seals_V = np.empty(len(merged.positions), np.uint32) if self.sealed else None
        view = self._stores[False].at(merged.positions, Use.CHANGE)
        deltas_VB = optimizer.update_(
            view.records_XB.view(np.float32),
            merged,
            lr,
            iteration,
            fixed,
            weights=self.schema.weights,
            seals_V=seals_V,
            at_V=view.at_U,
        )
        self._note(False, merged.positions, view, seals_V)
        return SealedDeltas(deltas_VB, seals_V)

    def undo_(self, positions_U: Positions, deltas_UB: Bytes) -> None:
        """Undoes changes made by `apply_` or `overwrite_`.

        Args:
            positions_U: (U,) int64; -1 skips one.
            deltas_UB: (U, B) uint8.

        Raises:
            ValueError: a shape or a dtype does not fit.
            IndexError: a position is out of range. Nothing was changed then.
        """
        view = self._stores[False].at(positions_U, Use.FOLD)
        xor_rows_(view.records_XB, view.at_U, deltas_UB)
        self._note(False, positions_U, view, seals.seals_of(deltas_UB) if self.sealed else None)

    def fold_(
        self, code: LinearCode, positions_U: Positions, deltas_UB: Bytes, coefficients_U: Bytes, parity: bool = True
    ) -> SealsOf | None:
        """Folds changes of other records into parity records, or into data records that were decoded.

        Args:
            code: of the stripes.
            positions_U: (U,) int64, the record of each delta; -1 skips one.
            deltas_UB: (U, B) uint8.
            coefficients_U: (U,) uint8, see `LinearCode.fold_`.
            parity: whether the positions are of parity records.

        Returns:
            (U,) uint32, the seal of every delta, fresh; None where none are kept.

        Raises:
            As `LinearCode.fold_`.
        """
        view = self._stores[parity].at(positions_U, Use.FOLD)
        of_deltas_U = code.fold_(view.records_XB, view.at_U, deltas_UB, coefficients_U, view.seals_X)
        self._touch(parity, positions_U)
        return of_deltas_U

    def install_(
        self,
        code: LinearCode,
        positions_U: Positions,
        missing_P: Bytes,
        have: Sequence[int],
        values: Sequence[Bytes],
        want: int,
        parity: bool = False,
    ) -> int:
        """Decodes those of some records that are still missing, into place.

        Args:
            code: of the stripes.
            positions_U: (U,) int64, where the record of each stripe goes.
            missing_P: (P,) uint8, of all records; zero where one is there. Mutated: zero for all `positions_U`
                afterwards.
            have, values, want: as for `LinearCode.decode`.
            parity: whether the positions are of parity records.

        Returns:
            How many were missing.

        Raises:
            As `LinearCode.decode_rows_`.
        """
        store, wanted_U = self._stores[parity], missing_P[positions_U] != 0
        installed_U = positions_U[wanted_U]
        view = store.at(installed_U, Use.REPLACE)
        if store.in_place:
            count = code.decode_rows_(view.records_XB, positions_U, missing_P, have, values, want)
        else:
            if len(installed_U) < len(positions_U):
                values = [value_UB[wanted_U] for value_UB in values]
            scatter(view.records_XB.view(np.uint32), view.at_U, as_words(code.decode(have, values, want)))
            missing_P[positions_U] = 0
            count = len(installed_U)
        self._touch(parity, positions_U)
        if view.seals_X is not None:
            seals.seal_(view.records_XB, view.at_U, view.seals_X)
        return count

    # memory -------------------------------------------------------------------------------------

    def merge_pages(self, begin: int, end: int, parity: bool = False) -> None:
        """Prepares for writing nearly all records from `begin` to `end`: see `Memory.merge`."""
        self._stores[parity].prepare(begin, end)

    # reading and writing ------------------------------------------------------------------------

    def gather_weights(self, positions_U: Positions, bfloat16: bool = False, int8: bool = False) -> NDArray[Any]:
        """Returns the weights of some records.

        Args:
            positions_U: (U,) int64.
            bfloat16: round to it.
            int8: quantise row by row, see `quantised.py`. Not with `bfloat16`.

        Returns:
            (U, D) float32, or uint16 that is bfloat16, or (U, D + 8) uint8; fresh.

        Raises:
            IndexError: a position is out of range.
        """
        positions_U = check_positions(positions_U, self.data_rows)
        view = self._stores[False].at(positions_U, Use.READ)
        shape, words_XW, at_U = (len(positions_U), self.schema.dim), view.records_XB.view(np.uint32), view.at_U
        if int8:
            weights_UD = np.empty(shape, np.float32)
            if self.schema.halves:
                gather_weights(view.records_XB, at_U, self.schema, weights_UD)
            else:
                _gather(words_XW, at_U, weights_UD.view(np.uint32))
            return quantised.pack(weights_UD)
        if self.schema.halves:
            weights_UD = np.empty(shape, np.float32) if bfloat16 else shared.empty(shape, np.float32)
            gather_weights(view.records_XB, at_U, self.schema, weights_UD)
            if not bfloat16:
                return weights_UD
            words_XW, at_U = weights_UD.view(np.uint32), np.arange(len(positions_U))
        if bfloat16:
            rounded_UD = shared.empty(shape, np.uint16)
            _gather_bfloat16(words_XW, at_U, rounded_UD)
            return rounded_UD
        weights_UD = shared.empty(shape, np.float32)
        _gather(words_XW, at_U, weights_UD.view(np.uint32))
        return weights_UD

    def pool(
        self,
        positions_N: NDArray[Any],
        lengths_G: NDArray[np.int32],
        weights_N: Floats | None = None,
        bfloat16: bool = False,
    ) -> NDArray[Any]:
        """Returns the sums of the weights of records, bag by bag.

        They are added in the order of the positions, the first of a bag is copied, and products are rounded before they
        are added: the bits of `client/pooling.py:pool` on what `gather_weights` returns.

        Args:
            positions_N: (N,) int32 or int64, of all bags, one bag behind the other: in any order, also several times.
            lengths_G: (G,) int32, how many positions each bag has, at least 1. Their sum is N.
            weights_N: (N,) float32, by which each record is multiplied; None: by none.
            bfloat16: round the sums to it.

        Returns:
            (G, D) float32, or uint16 that is bfloat16; fresh.

        Raises:
            ValueError: a shape, a dtype or a length does not fit.
            IndexError: a position is out of range.
        """
        check_bags("", positions_N, lengths_G, weights_N, self.data_rows)
        positions_N, lengths_G = np.ascontiguousarray(positions_N), np.ascontiguousarray(lengths_G)
        weighted = weights_N is not None
        weights_N = _NO_WEIGHTS if weights_N is None else np.ascontiguousarray(weights_N)
        store = self._stores[False]
        if store.in_place:  # positions of 4 bytes stay such
            records_XB, at_N = store.at(_NOTHING, Use.READ).records_XB, positions_N
        else:
            records_XB, _, at_N = store.at(positions_N.astype(np.int64), Use.READ)
        shape = (len(lengths_G), self.schema.dim)
        pooled_GD = np.empty(shape, np.float32) if bfloat16 else shared.empty(shape, np.float32)
        if self.schema.halves:
            self._pool_halves(records_XB, at_N, lengths_G, weights_N, weighted, pooled_GD)
        else:
            _pool(records_XB.view(np.float32), at_N, lengths_G, weights_N, weighted, pooled_GD)
        if not bfloat16:
            return pooled_GD
        rounded_GD = shared.empty(shape, np.uint16)
        _gather_bfloat16(pooled_GD.view(np.uint32), np.arange(len(pooled_GD)), rounded_GD)
        return rounded_GD

    def _pool_halves(
        self,
        records_XB: Bytes,
        at_N: NDArray[Any],
        lengths_G: NDArray[np.int32],
        weights_N: Floats,
        weighted: bool,
        out_GD: Floats,
    ) -> None:
        """Pools records of 16-bit weights, which are float32 while they are pooled, in portions of whole bags."""
        end_G = np.cumsum(lengths_G, dtype=np.int64)
        first, n = 0, 0
        while first < len(lengths_G):
            last = max(first + 1, int(np.searchsorted(end_G, n + POOLED_AT_ONCE, "right")))
            bags, ids = slice(first, last), slice(n, int(end_G[last - 1]))
            weights_UD = np.empty((ids.stop - n, self.schema.dim), np.float32)
            gather_weights(records_XB, at_N[ids].astype(np.int64), self.schema, weights_UD)
            every_N = np.arange(len(weights_UD))
            _pool(weights_UD, every_N, lengths_G[bags], weights_N[ids], weighted, out_GD[bags])
            first, n = last, ids.stop

    def gather(self, positions_U: Positions, parity: bool = False) -> Bytes:
        """Returns the bytes of some data records, or of some parity records.

        Returns:
            (U, B) uint8, fresh.

        Raises:
            IndexError: a position is out of range.
        """
        store = self._stores[parity]
        view = store.look(check_positions(positions_U, store.rows))
        values_UB = shared.empty((len(view.at_U), store.nbytes), np.uint8)
        _gather(view.records_XB.view(np.uint32), view.at_U, values_UB.view(np.uint32))
        return values_UB

    def absent(self, positions_U: Positions, parity: bool = False) -> Any:
        """Returns what reads those of some records that are on a disk only; see `RecordStore.absent`."""
        store = self._stores[parity]
        return store.absent(check_positions(positions_U, store.rows))

    def gather_whole(self, positions_U: Positions, parity: bool = False, read: Any = None) -> tuple[Bytes, Positions]:
        """Returns what `gather` does, and what `broken` does of them, (M,) int64: each is read once.

        Args:
            positions_U, parity: as of both.
            read: what `absent` has returned for the same ones, once it was run.
        """
        store = self._stores[parity]
        if not store.sealed:
            return self.gather(positions_U, parity), np.empty(0, np.int64)
        view = store.look(check_positions(positions_U, store.rows), read)
        assert view.seals_X is not None
        values_UB = shared.empty((len(view.at_U), store.nbytes), np.uint8)
        return values_UB, seals.gather(view.records_XB, view.seals_X, view.at_U, values_UB)

    def scatter_(self, positions_U: Positions, values_UB: Bytes, parity: bool = False) -> None:
        """Overwrites some data records, or some parity records, in place.

        Args:
            positions_U: (U,) int64. Where one comes twice, the last value stays.
            values_UB: (U, B) uint8.
            parity: whether the positions are of parity records.

        Raises:
            ValueError: `values_UB` has another shape or dtype.
            IndexError: a position is out of range. Nothing was changed then.
        """
        store = self._stores[parity]
        positions_U = check_positions(positions_U, store.rows)
        shape = (len(positions_U), store.nbytes)
        require(
            values_UB.shape == shape and values_UB.dtype == np.uint8,
            f"`values_UB` must be uint8 of shape {shape}, got {values_UB.dtype} of {values_UB.shape}",
        )
        view = store.at(positions_U, Use.REPLACE)
        scatter(view.records_XB.view(np.uint32), view.at_U, as_words(values_UB))
        self._touch(parity, positions_U)
        if view.seals_X is not None:
            view.seals_X[view.at_U] = seals.seals_of(values_UB)

    def overwrite_(self, positions_U: Positions, values_UB: Bytes) -> SealedDeltas:
        """Overwrites some data records, in place. Returns the change, as an optimizer's step does.

        Args:
            positions_U: (U,) int64, no duplicates.
            values_UB: (U, B) uint8.

        Raises:
            ValueError, IndexError: see `scatter_`. Nothing was changed then.
        """
        deltas_UB = self.gather(positions_U)
        self.scatter_(positions_U, values_UB)
        np.bitwise_xor(deltas_UB, values_UB, out=deltas_UB)
        return SealedDeltas(deltas_UB, seals.seals_of(deltas_UB) if self.sealed else None)

    # seals --------------------------------------------------------------------------------------

    def _touch(self, parity: bool, positions_U: Positions) -> None:
        """Notes that these records have changed."""
        if self.touched is not None:
            self.touched.note(parity, positions_U)

    def _note(self, parity: bool, positions_U: Positions, view: View, seals_U: SealsOf | None) -> None:
        """Notes that records, which lie there, changed by deltas of these seals: updates the records' own seals."""
        self._touch(parity, positions_U)
        if view.seals_X is not None and seals_U is not None:
            seals.xor_(view.seals_X, view.at_U, seals_U)

    def broken(self, positions_U: Positions, parity: bool = False) -> Positions:
        """Returns which of some records do not fit their seals; none if this shard keeps no seals.

        Args:
            positions_U: (U,) int64.
            parity: whether they are parities.

        Returns:
            (M,) int64, ascending indices into `positions_U`.

        Raises:
            IndexError: a position is out of range.
        """
        store = self._stores[parity]
        if not store.sealed:
            return np.empty(0, np.int64)
        records_XB, seals_X, at_U = store.look(check_positions(positions_U, store.rows))
        assert seals_X is not None
        return seals.broken(records_XB, seals_X, at_U)

    def broken_run(self, first: int, end: int, parity: bool = False) -> Positions:
        """Returns the positions in [first, end) of records that do not fit their seals: (M,) int64, ascending.

        Those that are on a disk only are for `scan`.
        """
        store = self._stores[parity]
        if not store.sealed:
            return np.empty(0, np.int64)
        if not 0 <= first <= end <= store.rows:
            raise IndexError(f"rows {first}..{end} of {store.rows}")
        return store.broken_run(first, end)

    def seals_at(self, positions_U: Positions, parity: bool = False) -> NDArray[np.uint32]:
        """Returns the seals of some records, (U,) uint32, fresh. Raises ValueError if this shard keeps none."""
        store = self._stores[parity]
        if not store.sealed:
            raise ValueError("this shard keeps no seals")
        return store.seals_at(check_positions(positions_U, store.rows))

    def flip_(self, position: int, bit: int, parity: bool = False) -> None:
        """Flips one bit of a record and leaves its seal, as failing memory does: for tests and `chaos`."""
        records_XB, _, at = self._stores[parity].at(np.array([position]), Use.CHANGE)
        records_XB[at[0], bit // 8] ^= np.uint8(1 << (bit % 8))

    def below(self, parity: bool = False) -> Positions:
        """Returns the records that are on a disk and not in memory, (M,) int64 ascending."""
        return self._stores[parity].below()

    def flip_below_(self, position: int, bit: int, parity: bool = False) -> None:
        """Flips one bit of such a record, as a failing disk does: for tests and `chaos`."""
        self._stores[parity].flip_below_(position, bit)


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    shard = Shard(Schema.of(1), 2, 2)
    positions_U = np.zeros(1, np.int64)
    mark(np.zeros(1, np.bool_), positions_U, True)
    shard.gather_weights(positions_U)
    shard.gather_weights(positions_U, bfloat16=True)
    shard.scatter_(positions_U, shard.gather(positions_U))
    for dtype in (np.int32, np.int64):
        shard.pool(positions_U.astype(dtype), np.ones(1, np.int32))
