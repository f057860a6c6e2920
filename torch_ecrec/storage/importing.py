"""Makes a checkpoint of a cluster out of tensors that lie elsewhere: the reverse of an export.

It is one of step 0: tables as they are there, and training begins with them. Its parts are those that a cluster of the
job's code would have written, so that trainers share them when they restore it; any other cluster reads it, too.

Memory is a portion of records, and a block of each slot, for tables of any size. The manifest comes last: what an
interrupted import leaves is no checkpoint.

Does not know where tensors come from, nor which slot has which row: `Source` and `slots_of` do.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.schema import Field, Schema
from torch_ecrec.spec.job import JobSpec, TableSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.description import Found
from torch_ecrec.storage.manifest import NOTE_MOST, NOTES_MOST, Encoding, Manifest, PartEntry
from torch_ecrec.storage.parts import PartWriter
from torch_ecrec.storage.tensor_file import TensorFile

PORTION_BYTES = 16 << 20  # of records in memory at a time, and once more while they are sorted by slot

SlotsOf = Callable[[int, Positions], NDArray[np.int64]]  # table group, rows (N,) -> slot of each
Dense = Sequence[tuple[list[int], Bytes]]  # of each trainer: header, payload


class Source(Protocol):
    """Where tables come from: `TensorSource`, `checkpoint/dcp_import.py:DcpSource`."""

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        """Rows [first, last) of a field, (N, bytes of its numbers) uint8; None: they are zero.

        It is asked for every row of a table, in ascending order.

        Raises:
            CheckpointError: they are not there, or not of that dtype and shape.
        """


class TensorSource:
    """A file of safetensors as a `Source`.

    Args:
        file: the tensors.
        found: which of them is what.
        job: what the tables are.
        where: the file, for errors.

    Raises:
        CheckpointError: a tensor has another shape or dtype than the job says.
    """

    def __init__(self, file: TensorFile, found: Found, job: JobSpec, where: Path) -> None:
        self._rows: dict[tuple[str, str], Bytes] = {}
        for table, field, name in tensors_of(job, found):
            tensor = file.tensors[name]
            check_tensor(f"{where}: {name}", table.rows, field, tensor.shape, tensor.numbers)
            self._rows[table.name, field.name] = file.rows_of(name)

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        """Returns rows of one field from the file, as `Source.rows` says."""
        rows_RB = self._rows.get((table, field.name))
        return None if rows_RB is None else rows_RB[first:last]


def tensors_of(job: JobSpec, found: Found) -> Iterator[tuple[TableSpec, Field, str]]:
    """Returns the name of the tensor for each table and field that a source has."""
    for table_group in job.table_groups:
        for table in table_group.tables:
            for field in table_group.schema.fields:
                if (name := found.names.get((table.name, field.name))) is not None:
                    yield table, field, name


def check_tensor(what: str, rows: int, field: Field, shape: Sequence[int], dtype: str) -> None:
    """Raises CheckpointError unless a tensor is what a field of a table of so many rows is."""
    wanted = [[rows], [rows, 1]] if field.per_row else [[rows, field.values]]
    if list(shape) not in wanted or dtype != field.dtype:
        columns = field.per_row and len(shape) == 1 and shape[0] > rows and shape[0] % rows == 0
        raise CheckpointError(
            f"{what} is {dtype} of shape {tuple(shape)}, the job has {field.dtype} of shape {tuple(wanted[0])} there"
            + ". Tables that are sharded by columns have one for each shard, and no other sharding can go on from that"
            * columns
        )


def write(
    catalog: Catalog, job: JobSpec, source: Source, dense: Dense, slots_of: SlotsOf, inexact: Sequence[str] = ()
) -> Manifest:
    """Writes a checkpoint of step 0; returns its manifest.

    Args:
        catalog: where. No cluster writes checkpoints there meanwhile.
        job: of which it is.
        source: of all tables.
        dense: of each trainer.
        slots_of: which slot of the job's code has which rows.
        inexact: why its tables are not what an undisturbed run would have trained.

    Raises:
        CheckpointError: something of it cannot be read or written; nothing is left then.
    """
    folder = catalog.new_folder(0)
    schemas = [table_group.schema for table_group in job.table_groups]
    tables = [
        [*zip((table.name for table in table_group.tables), table_group.first_rows, strict=True)]
        for table_group in job.table_groups
    ]
    at, parts = catalog.folder(folder), []
    try:
        for slot in range(job.code.slots):
            parts.append(PartWriter(at, f"slot-{slot:05d}", schemas, None, slot, tables))
        for trainer, (header, payload) in enumerate(dense):
            parts[0].write_dense(trainer, header, payload)
        _write_records(job, source, parts, slots_of)
        return catalog.commit(folder, _manifest(folder, job, [part.close() for part in parts], inexact))
    except BaseException:
        for part in parts:
            part.abandon()
        with contextlib.suppress(CheckpointError):  # the first error says why; `torch-ecrec checkpoints` lists the rest
            catalog.location.remove(folder)
        raise


def _write_records(job: JobSpec, source: Source, parts: Sequence[PartWriter], slots_of: SlotsOf) -> None:
    for s, table_group in enumerate(job.table_groups):
        most = max(1, PORTION_BYTES // table_group.schema.nbytes)
        for table, first_row in zip(table_group.tables, table_group.first_rows, strict=True):
            for begin in range(0, table.rows, most):
                end = min(begin + most, table.rows)
                records_NB = _records(source, table.name, table_group.schema, begin, end)
                rows_N = np.arange(begin, end, dtype=np.int64) + first_row
                slot_N = slots_of(s, rows_N)
                for slot, part in enumerate(parts):
                    mine_n = np.flatnonzero(slot_N == slot)
                    if len(mine_n):
                        part.write(s, rows_N[mine_n], records_NB[mine_n])


def _records(source: Source, table: str, schema: Schema, first: int, last: int) -> Bytes:
    """Returns (N, B) uint8: rows [first, last) of a table, all fields."""
    records_NB = np.zeros((last - first, schema.nbytes), np.uint8)
    for field in schema.fields:
        begin, end = schema.bytes_of(field.name)
        found = source.rows(table, field, first, last)
        if found is not None:
            records_NB[:, begin:end] = found
    return records_NB


def _manifest(folder: str, job: JobSpec, parts: list[PartEntry], inexact: Sequence[str]) -> Manifest:
    return Manifest(
        id=folder,
        done=0,
        kind="full",
        base=None,
        job=job.to_json(),
        parts=parts,
        encoding=Encoding(),
        written_s=time.time(),
        inexact=[(0, what[:NOTE_MOST]) for what in inexact][:NOTES_MOST],
    )
