"""Reads a checkpoint with all that it builds on: every row once, with its newest value.

    full, step 100          rows 0 1 2 3 4 5
    incremental, step 200   rows 1 4
    incremental, step 300   rows 4 5
    read in this order      step 300: 4 5    step 200: 1    step 100: 0 2 3

The newest comes first, and two bits a row say what was given and what the checkpoint that is being read had before. So
memory is those bits and a block, whatever the size of the tables, and no row is decoded that a newer one overrides.

Refused by name: a row that one checkpoint has twice, an incremental one with a row that the full one lacks, rows that
are missing or beyond their table, parts of a slot that are not there.

Shapes: N rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import JobSpec, TableGroup
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import ADVICE, Manifest, PartEntry
from torch_ecrec.storage.parts import Block, PartReader
from torch_ecrec.storage.saves import Saves
from torch_ecrec.storage.seen import mark_

MANY_ROWS = 1 << 24  # 2 MiB of bits: of fewer, it need not be asked how large files are

Mine = Callable[[int, Positions], NDArray[np.bool_]]
Ranges = Sequence[tuple[int, int]]  # of each table group: the first row that is wanted, and the end


class _Coverage:
    """Which rows of a table group were given."""

    def __init__(self, table_group: TableGroup, index: int, begin: int, end: int) -> None:
        require(
            0 <= begin <= end <= table_group.rows,
            f"table group {index} has rows 0 to {table_group.rows}, wanted are {begin} to {end}",
        )
        self._table_group, self._index, self._begin, self._end = table_group, index, begin, end
        self._given = np.zeros(-(-(end - begin) // 8), np.uint8)
        self._seen = np.zeros_like(self._given)

    def fresh(self, rows_N: Positions, where: str) -> NDArray[np.bool_]:
        """Returns which rows are wanted and newer than what is still to come."""
        outside = rows_N[(rows_N < 0) | (rows_N >= self._table_group.rows)]
        if len(outside):
            raise CheckpointError(f"{where} has {self._named(int(outside[0]))}, which is beyond its table; {ADVICE}")
        fresh_N = np.empty(len(rows_N), np.bool_)
        twice = mark_(rows_N, self._begin, self._end, self._given, self._seen, fresh_N)
        if twice >= 0:
            raise CheckpointError(f"{where} has {self._named(twice)} twice; {ADVICE}")
        return fresh_N

    def next_older(self) -> None:
        """Goes on with the next older checkpoint, once one was read."""
        self._given |= self._seen
        self._seen[:] = 0

    def finish(self, where: str, every: bool) -> None:
        """Checks what was read of the full checkpoint: raises unless it had all rows that were given, and (`every`) all
        there are."""
        more = self._given & ~self._seen
        if more.any():
            raise CheckpointError(
                f"{where}, a full checkpoint, lacks {self._first(more)}, which a newer one has; {ADVICE}"
            )
        if every:
            missing = ~self._seen
            if beyond := -(self._end - self._begin) % 8:  # bits of the last byte that are of no row
                missing[-1] &= 0xFF >> beyond
            if missing.any():
                count = int(np.bitwise_count(missing).sum())
                raise CheckpointError(f"{where} lacks {count} rows, first {self._first(missing)}; {ADVICE}")

    def _first(self, bits: Bytes) -> str:
        place = int(np.flatnonzero(bits)[0])
        bit = int(np.flatnonzero(np.unpackbits(bits[place : place + 1], bitorder="little"))[0])
        return self._named(self._begin + 8 * place + bit)

    def _named(self, row: int) -> str:
        table = max(int(np.searchsorted(self._table_group.first_rows, row, side="right")) - 1, 0)
        name = self._table_group.tables[table].name
        return f"row {row - self._table_group.first_rows[table]} of table {name} (table group {self._index})"


def records_of(
    catalog: Catalog,
    manifest: Manifest,
    wanted: Ranges | None = None,
    mine: Mine | None = None,
    slots: Collection[int] | None = None,
    saves: Sequence[Manifest] = (),
) -> Iterator[Block]:
    """Yields every record of a checkpoint once, with its newest value.

    Args:
        catalog: where it is.
        manifest: which.
        wanted: of each table group, the rows to give, begin and end; None: all.
        mine: of the rows of a block, (N,) int64, which are to be given: (N,) bool. What is not is read and checked all
            the same, but not decoded.
        slots: read the parts of these slots alone. For a cluster of the same layout, whose slots have the same rows;
            that other rows are missing is then not found.
        saves: prioritised ones on the checkpoint, oldest first: what they have counts in the place of what it has. That
            is no step of the job any more.

    Yields:
        Table group, rows (N,) int64, records (N, B) uint8: of a block, in no order.

    Raises:
        CheckpointError: it is not whole, or was altered: perhaps after rows were given. Whoever takes them uses them
            when all were.
    """
    chain = catalog.chain(manifest)
    table_groups = manifest.spec.table_groups
    ranges = wanted if wanted is not None else [(0, table_group.rows) for table_group in table_groups]
    require(
        len(ranges) == len(table_groups),
        f"`wanted` must have a range for each of {len(table_groups)} table groups, got {len(ranges)}",
    )
    if slots is None:
        _require_possible(catalog, chain)
    coverage = [_Coverage(table_group, i, *ranges[i]) for i, table_group in enumerate(table_groups)]
    for one in [*reversed(saves), *reversed(chain)]:
        at = _folder(catalog, one)
        where = at.url

        def newest(table_group: int, rows_N: Positions, where: str = where) -> NDArray[np.bool_]:
            fresh_N = coverage[table_group].fresh(rows_N, where)
            return fresh_N if mine is None else fresh_N & mine(table_group, rows_N)

        for reader in _readers(at, one.parts, table_groups, slots):
            yield from reader.blocks(newest)
        for of_table_group in coverage:
            if one.base is None:
                of_table_group.finish(where, slots is None)
            else:
                of_table_group.next_older()


def _require_possible(catalog: Catalog, chain: Sequence[Manifest]) -> None:
    """Raises CheckpointError for more rows than the files can have, before there is a bit for each.

    A record has 4 bytes at least, and zstd makes 2^15 of one at most.
    """
    (full,) = (one for one in chain if one.base is None)
    for index, table_group in enumerate(full.spec.table_groups):
        if table_group.rows < MANY_ROWS:
            continue
        said = sum(part.rows[index] for part in full.parts)
        if said != table_group.rows:
            where = catalog.folder(full.id).url
            raise CheckpointError(
                f"{where} has {said:,} rows of table group {index}, the job {table_group.rows:,}; {ADVICE}"
            )
        for part in full.parts:
            PartReader(catalog.folder(full.id), part, [one.schema for one in full.spec.table_groups]).check_size()
            if part.rows[index] > part.bytes << 13:
                raise CheckpointError(
                    f"{catalog.folder(full.id).url}/{part.name} cannot have {part.rows[index]:,} rows in"
                    f" {part.bytes:,} bytes; {ADVICE}"
                )


def _folder(catalog: Catalog, one: Manifest) -> Location:
    return Saves(catalog.location).folder(one.id) if one.kind == "save" else catalog.folder(one.id)


def _readers(
    at: Location, parts: Sequence[PartEntry], table_groups: Sequence[TableGroup], slots: Collection[int] | None
) -> Iterator[PartReader]:
    schemas = [table_group.schema for table_group in table_groups]
    missing = set() if slots is None else set(slots) - {part.slot for part in parts}
    if missing:
        raise CheckpointError(f"{at.url} has no parts of slots {sorted(missing)}: read it without `slots`")
    for part in parts:
        if slots is None or part.slot in slots:
            yield PartReader(at, part, schemas)


def dense_of(catalog: Catalog, manifest: Manifest) -> dict[int, tuple[list[int], bytes]]:
    """Returns header and payload of each trainer's part of the dense model, by trainer.

    Raises:
        CheckpointError: a part cannot be read, or was altered.
    """
    at, schemas = catalog.folder(manifest.id), [table_group.schema for table_group in manifest.spec.table_groups]
    found: dict[int, tuple[list[int], bytes]] = {}
    for part in manifest.parts:
        if part.dense:
            found.update(PartReader(at, part, schemas).dense())
    return {trainer: found[trainer] for trainer in range(manifest.spec.trainers)}


def check_rows(catalog: Catalog, manifest: Manifest, on_block: Callable[[], None] = lambda: None) -> int:
    """Reads all that a restore reads, and says so after each block; returns how many rows there are.

    Raises:
        CheckpointError: it is not whole.
    """
    dense_of(catalog, manifest)

    def mine(_: int, rows_N: Positions) -> NDArray[np.bool_]:
        on_block()
        return np.ones(len(rows_N), np.bool_)

    return sum(len(rows_N) for _, rows_N, _ in records_of(catalog, manifest, mine=mine))


def require_same_model(manifest: Manifest, job: JobSpec) -> None:
    """Raises CheckpointError, with the first difference, unless a job can go on from a checkpoint, or a save."""
    difference = manifest.spec.difference(job, placed=False)
    if difference:
        raise CheckpointError(f"checkpoint {manifest.id} is of another job: {difference}; restore one of this job")
