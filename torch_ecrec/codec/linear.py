"""The systematic (k, r) code: r parity records of k data records. Any k of the n = k + r records give the others.

Terms. Member j of a stripe is data for j < k and parity for k <= j < n. `generator` has a row of k coefficients for
each member: the identity for data, `coefficients` for parity. Member j is the sum over m of generator[j, m] * data[m].
Example: k = 2, r = 1 has coefficients [[1, 1]], so the parity of 0x0F and 0xF0 is 0xFF; with member 0 lost,
`decode([1, 2], [0xF0, 0xFF], want=0)` is 0xF0 ^ 0xFF = 0x0F.

Construction. With r = 1 every coefficient is 1 and the code is XOR. With more, a Cauchy matrix 1 / (x_i + y_j): all
its square submatrices are invertible, hence so is every k-of-n submatrix of the generator (Bloemer et al., "An
XOR-based erasure-resilient coding scheme", 1995). Scaling rows and columns keeps that, and is used to make the first
row and the first column ones, which are the cheap coefficients.

Invariants. Linear over XOR: parity(old) ^ g * (old ^ new) == parity(new), so a change is folded without its siblings.
Exact on bytes; no dtype, no rounding.

Shapes: K members given, N parity rows held, U records, B bytes in a record (a multiple of 4).

Does not know where members live; missing members of a partial stripe are zeros that the caller passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from torch_ecrec.codec import seals
from torch_ecrec.codec.field import FIELD_SIZE, PRODUCT, Bytes, Rows, combine, combine_rows_, fold_rows_
from torch_ecrec.codec.seals import SealsOf
from torch_ecrec.runtime.checks import require, require_int


def _inverse_table() -> Bytes:
    """Returns 1 / x for every element, (256,) uint8. The entry of 0 is not used."""
    table = np.argmax(PRODUCT == 1, axis=1).astype(np.uint8)
    table.setflags(write=False)
    return table


INVERSE: Bytes = _inverse_table()


class LinearCode:
    """A systematic maximum-distance-separable code over GF(2^8).

    Args:
        k: data members of a stripe, at least 1.
        r: parity members, 0 (no protection) or more; k + r at most 256.

    Attributes:
        n: k + r.
        coefficients: (r, k) uint8, read-only; row 0 is all ones.
        generator: (n, k) uint8, read-only; identity above `coefficients`.
    """

    def __init__(self, k: int, r: int) -> None:
        require_int("k", k, 1)
        require_int("r", r, 0)
        require(k + r <= FIELD_SIZE, f"`k + r` must be at most {FIELD_SIZE}, got {k + r}")
        self.k, self.r, self.n = k, r, k + r
        self.coefficients: Bytes = _cauchy(k, r) if r > 1 else np.ones((r, k), np.uint8)
        self.generator: Bytes = np.concatenate([np.eye(k, dtype=np.uint8), self.coefficients])
        self.coefficients.setflags(write=False)
        self.generator.setflags(write=False)
        # (have, want) -> k coefficients. Only grows; written by any thread, always with the same value.
        self._decode_rows: dict[tuple[tuple[int, ...], int], Bytes] = {}

    def encode(self, data_KUB: Sequence[Bytes] | Bytes) -> Bytes:
        """Returns the parity of whole stripes.

        Args:
            data_KUB: k arrays (U, B) uint8, or one (k, U, B).

        Returns:
            (r, U, B) uint8, fresh.

        Raises:
            ValueError: not k arrays, or their shapes or dtypes do not fit.
        """
        return self._combine("data_KUB", self.coefficients, data_KUB)

    def fold_(
        self,
        parity_NB: Bytes,
        rows_U: Rows,
        delta_UB: Bytes,
        coefficients_U: Bytes,
        seals_N: SealsOf | None = None,
    ) -> SealsOf | None:
        """Folds changes of data members into their stripes' parity, in place.

        Args:
            parity_NB: (N, B) uint8, contiguous. Mutated. Must not alias `delta_UB`.
            rows_U: (U,) int64, the parity record of each delta; -1 skips one.
            delta_UB: (U, B) uint8, old XOR new of the record bytes.
            coefficients_U: (U,) uint8, `coefficients[parity index, member]` of each delta.
            seals_N: (N,) uint32, the parities' seals, which follow. Mutated.

        Returns:
            (U,) uint32, the seals of the deltas, fresh; None without `seals_N`.

        Raises:
            ValueError: a shape or a dtype does not fit.
            IndexError: a row is out of range. Nothing was changed then.

        Not checked: that a delta is folded exactly once. The step rule owns that.
        """
        if seals_N is not None:
            return seals.fold_rows_(parity_NB, rows_U, delta_UB, coefficients_U, seals_N)
        fold_rows_(parity_NB, rows_U, delta_UB, coefficients_U)
        return None

    def decode_row(self, have: Sequence[int], want: int) -> Bytes:
        """Returns the k coefficients that make member `want` from the members `have`: (k,) uint8, read-only.

        Raises:
            ValueError: `have` is not k distinct members, or `want` is not another member.
        """
        members = tuple(int(member) for member in have)
        key = (members, int(want))
        row = self._decode_rows.get(key)
        if row is None:
            require(len(members) == self.k, f"`have` must name k = {self.k} members, got {len(members)}: {members}")
            require(len(set(members)) == self.k, f"`have` must name distinct members, got {members}")
            require(
                all(0 <= member < self.n for member in members), f"`have` must be in 0..{self.n - 1}, got {members}"
            )
            require(0 <= key[1] < self.n, f"`want` must be in 0..{self.n - 1}, got {want}")
            require(key[1] not in members, f"`want` must not be one of `have`, got {want} and {members}")
            row = self._solve(members, key[1])
            row.setflags(write=False)
            self._decode_rows[key] = row
        return row

    def decode(self, have: Sequence[int], values: Sequence[Bytes], want: int) -> Bytes:
        """Returns any member of some stripes, decoded from k others.

        Args:
            have: k distinct members in 0..n-1, in the order of `values`.
            values: k arrays (U, B) uint8.
            want: member to compute, not one of `have`.

        Returns:
            (U, B) uint8, fresh.

        Raises:
            ValueError: a member, a shape or a dtype does not fit.

        Not checked: that all values are of one stripe and as of matching steps. Recovery owns that.
        """
        row = self.decode_row(have, want)
        return self._combine("values", row[None, :], values)[0]

    def decode_rows_(
        self,
        target_NB: Bytes,
        rows_U: Rows,
        wanted_N: Bytes,
        have: Sequence[int],
        values: Sequence[Bytes],
        want: int,
    ) -> int:
        """Decodes a member of some stripes into those records that are still wanted, in place.

        Args:
            target_NB: (N, B) uint8, contiguous. Mutated. Must not alias `values`.
            rows_U: (U,) int64, in 0..N-1, where the record of each stripe goes; fastest in runs.
            wanted_N: (N,) uint8, zero where a record is not wanted. Mutated: zero for all `rows_U` afterwards.
            have, values, want: as for `decode`.

        Returns:
            How many records were wanted.

        Raises:
            ValueError: a member, a shape or a dtype does not fit.
            IndexError: a row is out of range. Nothing was changed then.
        """
        return combine_rows_(target_NB, rows_U, wanted_N, self.decode_row(have, want), values)

    def _solve(self, have: tuple[int, ...], want: int) -> Bytes:
        if self.r == 1:
            return np.ones(self.k, np.uint8)
        return _decode_row(self.k, self.r, have, want)

    def _combine(self, name: str, coefficients_RK: Bytes, values: Sequence[Bytes] | Bytes) -> Bytes:
        require(len(values) == self.k, f"`{name}` must hold k = {self.k} arrays, got {len(values)}")
        return combine(coefficients_RK, values, name)


@functools.cache
def _decode_row(k: int, r: int, have: tuple[int, ...], want: int) -> Bytes:
    """Solves for `LinearCode.decode_row`. Cached in the process: it takes milliseconds for k = 100."""
    generator = np.concatenate([np.eye(k, dtype=np.uint8), _cauchy(k, r)])
    return _solve_left(generator[list(have)], generator[want])


def _solve_left(matrix_KK: Bytes, wanted_K: Bytes) -> Bytes:
    """Returns the x, (K,) uint8, with x @ matrix = wanted. The matrix must be regular, as Cauchy matrices are.

    Gauss and Jordan, on the columns: what is done to a column of the matrix is done to its entry of `wanted`.
    """
    work = np.concatenate([matrix_KK, wanted_K[None, :]]).T.copy()  # rows: equations; the last column: right-hand side
    for pivot in range(len(work)):
        found = pivot + int(np.argmax(work[pivot:, pivot] != 0))
        assert work[found, pivot], "a k-of-n submatrix of the generator is singular"
        work[[pivot, found]] = work[[found, pivot]]
        work[pivot] = PRODUCT[INVERSE[work[pivot, pivot]], work[pivot]]
        factors = work[:, pivot].copy()
        factors[pivot] = 0
        work ^= PRODUCT[factors[:, None], work[pivot][None, :]]
    return work[:, -1].copy()


@functools.cache
def _cauchy(k: int, r: int) -> Bytes:
    """Returns 1 / (x_i + y_j), x = k.. and y = 0..k-1, (r, k) uint8, scaled to ones in first row and column."""
    x, y = np.arange(k, k + r, dtype=np.uint8), np.arange(k, dtype=np.uint8)
    matrix = INVERSE[x[:, None] ^ y[None, :]]
    matrix = PRODUCT[matrix, INVERSE[matrix[:1, :]]]
    return PRODUCT[matrix, INVERSE[matrix[:, :1]]]
