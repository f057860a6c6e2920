"""The tables of a checkpoint as one file of safetensors: for serving, and for programs that know nothing of clusters.

    a.weight       F32   (rows, dim)
    a.momentum1    F32   (rows,)          optimizer state has TorchRec's names, one number a row, or as many as weights

Names begin with the table's name in the job: the paths of modules in a model are not in a checkpoint, and neither are
weights of the dense model. (`checkpoint/dcp_export.py` writes both, for TorchRec: it knows what a snapshot of a model
is.)

The format is told in `tensor_file.py`. Rows are put into their place as they come: memory is a block, for tables of any
size. The job is among the file's words, so that it can be imported again (`importing.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.positions import Bytes
from torch_ecrec.records.schema import ITEM_BYTES, Field
from torch_ecrec.runtime.files import written_whole
from torch_ecrec.spec.job import JobSpec, TableSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import records_of
from torch_ecrec.storage.description import Description
from torch_ecrec.storage.manifest import Manifest
from torch_ecrec.storage.tensor_file import DTYPES, SUFFIX

DESCRIPTION = "torch_ecrec.describes"  # of the metadata: what an import of the file has to know


class _Tensor(NamedTuple):
    """One field of one table. `row_bytes`: of a row."""

    table: TableSpec
    field: Field
    row_bytes: int

    @property
    def name(self) -> str:
        return f"{self.table.name}.{self.field.name}"

    @property
    def nbytes(self) -> int:
        return self.table.rows * self.row_bytes


def _tensors(job: JobSpec) -> list[_Tensor]:
    """Returns the tensors of all tables. Those of wider numbers come first, so that every tensor begins aligned."""
    found = [
        _Tensor(table, field, field.values * ITEM_BYTES[field.dtype])
        for table_group in job.table_groups
        for table in table_group.tables
        for field in table_group.schema.fields
    ]
    return sorted(found, key=lambda one: -ITEM_BYTES[one.field.dtype])


def _header(catalog: Catalog, manifest: Manifest, tensors: list[_Tensor]) -> bytes:
    inexact = notes_of(catalog, manifest)
    words = {
        "torch_ecrec.checkpoint": manifest.id,
        "torch_ecrec.step": str(manifest.done),
        DESCRIPTION: Description(manifest.spec, inexact=inexact).encoded().decode(),
    }
    if inexact:
        words["torch_ecrec.inexact"] = "NOT EXACT: " + "; ".join(inexact)
    said: dict[str, Any] = {"__metadata__": words}
    offset = 0
    for tensor in tensors:
        shape = [tensor.table.rows] if tensor.field.per_row else [tensor.table.rows, tensor.field.values]
        place = [offset, offset + tensor.nbytes]
        said[tensor.name] = {"dtype": DTYPES[tensor.field.dtype], "shape": shape, "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def notes_of(catalog: Catalog, manifest: Manifest) -> tuple[str, ...]:
    """Returns why a checkpoint is not what an undisturbed run would have written, as its exports say it."""
    return tuple(what for _, what in catalog.inexact(manifest))


def export(catalog: Catalog, manifest: Manifest, path: Path) -> int:
    """Writes the tables of a checkpoint, with all that it builds on; returns the bytes of the file.

    Args:
        catalog, manifest: which.
        path: of the file, on this machine; it ends in `SUFFIX`. It appears whole, or not at all.

    Raises:
        ValueError: another ending.
        CheckpointError: the checkpoint is not whole, or the file cannot be written.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"an exported file ends in {SUFFIX}, got {path}")
    remove_left(path)
    try:
        with contextlib.ExitStack() as until_replaced, written_whole(path, durable=True) as part:
            part.touch(exist_ok=False)
            until_replaced.enter_context(held(part))
            return _write(catalog, manifest, part)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}; name another place, or make room") from error


@contextlib.contextmanager
def held(part: Path) -> Iterator[bool]:
    """Locks a file or folder, so that `remove_left` takes it for one that is being written; whether it is locked.

    The lock ends with the process, however that ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:  # another holds it; or this file system has no locks, and what is left there stays
            locked = False
        yield locked


def remove_left(path: Path) -> None:
    """Removes what exports to `path` that were killed have left beside it: hidden, and as large as all tables."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}")
    with contextlib.suppress(OSError):  # no such folder: whoever writes there says so
        for part in [one for one in path.absolute().parent.iterdir() if name.fullmatch(one.name)]:
            with held(part) as is_left:
                if is_left and part.is_dir():
                    shutil.rmtree(part, ignore_errors=True)
                elif is_left:
                    part.unlink(missing_ok=True)


def _write(catalog: Catalog, manifest: Manifest, path: Path) -> int:
    job = manifest.spec
    tensors = _tensors(job)
    header = _header(catalog, manifest, tensors)
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    with open(path, "wb") as file:
        file.write(header)
        file.flush()
        if size > len(header):
            _reserve(file.fileno(), size)
        whole = np.memmap(path, np.uint8, "r+", shape=(size,))
        places: dict[tuple[str, str], Bytes] = {}
        offset = len(header)
        for tensor in tensors:
            rows_RB = whole[offset : offset + tensor.nbytes].reshape(tensor.table.rows, tensor.row_bytes)
            places[tensor.table.name, tensor.field.name] = rows_RB
            offset += tensor.nbytes
        _fill(catalog, manifest, job, places)
        whole.flush()
    return size


def _reserve(descriptor: int, size: int) -> None:
    """Takes the room for a file: a disk that is full is an error here, and the end of a process where it is mapped."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        with open(descriptor, "ab", closefd=False) as file:
            for begin in range(os.fstat(descriptor).st_size, size, 1 << 20):
                file.write(bytes(min(1 << 20, size - begin)))


def _fill(catalog: Catalog, manifest: Manifest, job: JobSpec, places: dict[tuple[str, str], Bytes]) -> None:
    for index, rows_N, records_NB in records_of(catalog, manifest):
        table_group = job.table_groups[index]
        table_N = np.searchsorted(table_group.first_rows, rows_N, side="right") - 1
        for t in np.unique(table_N):
            of_table = table_N == t
            inside, records = rows_N[of_table] - table_group.first_rows[t], records_NB[of_table]
            for field in table_group.schema.fields:
                begin, end = table_group.schema.bytes_of(field.name)
                places[table_group.tables[t].name, field.name][inside] = records[:, begin:end]
