"""Imports a folder of `torch.distributed.checkpoint` (DCP), or a file of safetensors, as a cluster's checkpoint.

    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, checkpoint_id=folder)
    torch-ecrec checkpoints URL --import folder --job job.json

Plain TorchRec has saved that, sharded in any way over any number of trainers; or we have exported it. It says nothing
of the job: `describing.py` writes that, and `dcp_export.py` adds it. What goes over, and where from:

    tables, optimizer state    tensors under TorchRec's names (`description.py`)
    dense model, buffers       all else under the model's name; `attach` brings them (`imported.py`)
    dense optimizers' state    *.state.PARAMETER.KEY, where parameters have names, as in TorchRec's wrappers
    all else                   not: `Imported.absent` names it, and the script loads it from the folder, as before

It is a checkpoint of step 0: DCP does not say how many steps optimizers of tables have made, and TorchRec begins to
count anew, too. Memory is a portion of records, also where DCP has a table in one chunk: chunks are mapped.
"""

from __future__ import annotations

import heapq
import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from torch_ecrec.checkpoint.dcp_export import DESCRIPTION
from torch_ecrec.checkpoint.dcp_metadata import place_within, read_metadata
from torch_ecrec.compat.torch import FakeTensorMode, place_in_file
from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn import imported
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.schema import Field
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.state_dicts.columns import Found, found_in
from torch_ecrec.storage import exporting, importing
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.description import Description, find, is_below
from torch_ecrec.storage.description import Found as FoundTensors
from torch_ecrec.storage.importing import check_tensor, tensors_of
from torch_ecrec.storage.manifest import Manifest
from torch_ecrec.storage.tensor_file import SUFFIX, TensorFile

SCRIPTS = "random states, the reader's place, schedulers, learning rates and what else is attached: the script has them"
_STATE, _GROUPS, _EXTRA = ".state.", ".param_groups", "_extra_state"


@dataclass(frozen=True)
class Wanted:
    """The options of an import.

    Args:
        job: file of `describing.describe`; None: the source has one with it, since we have exported it.
        trainers, seed: others than the job's.
        model: what the model was saved as; None: it is found.
        tables_only: the dense model stays the script's.
        fresh: tables whose optimizer state is not there begin with zeros.
    """

    job: Path | None = None
    trainers: int | None = None
    seed: int | None = None
    model: str | None = None
    tables_only: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class Imported:
    """The result of an import. `absent`: the parts of the source that it lacks, for people."""

    manifest: Manifest
    absent: tuple[str, ...]


def import_(catalog: Catalog, source: Path, wanted: Wanted) -> Imported:
    """Makes a checkpoint of step 0 of a folder of DCP, or of a file of safetensors.

    Raises:
        CheckpointError: the source lacks something, is cut off, or is of another model; or the checkpoint cannot be
            written. Nothing is left then.
        ValueError: neither a folder nor such a file.
    """
    if source.suffix == SUFFIX:
        file = TensorFile(source)
        said = file.metadata.get(exporting.DESCRIPTION, "").encode()
        described = _described(wanted, said, source)
        found = find(file.tensors, described, str(source), wanted.model, wanted.fresh)
        tables: importing.Source = importing.TensorSource(file, found, described.job, source)
        dense, columns = _Dense({}, {}, ["the dense model: the script has it"] if found.model is None else []), {}
        others = sorted(file.tensors.keys() - set(found.names.values()))
        dense.absent += _said(others, ())
    else:
        require(source.is_dir(), f"--import takes a folder of DCP or a file that ends in {SUFFIX}, got {source}")
        folder = Folder(source)
        beside = source / DESCRIPTION
        described = _described(wanted, beside.read_bytes() if beside.is_file() else b"", source)
        found = find(folder.tensors, described, str(source), wanted.model, wanted.fresh)
        tables = DcpSource(folder, found, described.job)
        dense = _dense(folder, found, described, wanted.tables_only)
        columns = {} if found.model is None else folder.columns(found.model, described)
    job = described.job
    parts = imported.packed(job.trainers, dense.tensors, dense.state, described.tables, columns)
    layouts = job.layouts

    def slots_of(table_group: int, rows_N: Positions) -> NDArray[np.int64]:
        slot_N: NDArray[np.int64] = layouts[table_group].locate(rows_N)[0]
        return slot_N

    manifest = importing.write(catalog, job, tables, parts, slots_of, described.inexact)
    zeros = [f"optimizer state `{field}` of table {table}, which begins with zeros" for table, field in found.zero]
    return Imported(manifest, (*zeros, *dense.absent, SCRIPTS))


def _described(wanted: Wanted, there: bytes, source: Path) -> Description:
    """Returns the description of the job. Raises CheckpointError if there is none, or it cannot be imported."""
    if wanted.job is not None:
        try:
            there = wanted.job.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {wanted.job}: {error}") from error
    if not there:
        raise CheckpointError(
            f"{source} does not say which optimizers its tables have, nor how many trainers there are: write that with"
            " `torch_ecrec.checkpoint.describe(model, FILE, trainers=N)` in the script, and say --job FILE"
        )
    described = Description.decoded(there, str(wanted.job or source))
    if described.beside:
        raise CheckpointError(
            f"{', '.join(described.beside)} remap ids, and which row is whose is not imported: load the whole model in"
            " the script, with `torch_ecrec.checkpoint.load`"
        )
    job = described.job
    trainers = job.trainers if wanted.trainers is None else wanted.trainers
    slots = max(job.code.slots, trainers)  # so that every trainer has a share to read
    seed = job.seed if wanted.seed is None else wanted.seed
    job = replace(job, trainers=trainers, seed=seed, code=replace(job.code, slots=slots))
    return replace(described, job=job)


# DCP ----------------------------------------------------------------------------------------------


class Folder:
    """A folder of DCP, and the tensors in it.

    Attributes:
        tensors: by name. `others`: names of what is no tensor.

    Raises:
        CheckpointError: it is no folder of DCP.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata: Any = read_metadata(path)
        found, self._places = self._metadata.state_dict_metadata, self._metadata.storage_data
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: one for name, one in found.items() if isinstance(one, TensorStorageMetadata)
        }
        self.others = [name for name in found if name not in self.tensors]

    def columns(self, before: str, described: Description) -> dict[str, Found]:
        """Returns, by path of a module, what the folder tells of the order of its features.

        Args:
            before: what stands before the model's keys.
            described: what the model calls its tables.
        """
        modules: dict[str, dict[str, str]] = {}
        for key, name in described.tables.values():  # of the model's: PATH.embedding_bags.NAME.weight
            modules.setdefault(".".join(key.split(".")[:-3]), {})[name] = f"{before}{key}"
        said = ((path, found_in(self._metadata, keys)) for path, keys in modules.items())
        return {path: found for path, found in said if found is not None}

    def dtype_of(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor's numbers."""
        dtype: torch.dtype = self.tensors[name].properties.dtype
        return dtype

    def chunks(self, name: str) -> list[Chunk]:
        """Returns the chunks of a tensor, in the order of their first rows.

        Raises:
            CheckpointError: together they are not the tensor, or one is not where the metadata says.
        """
        said = self.tensors[name]
        chunks = []
        for i, one in enumerate(said.chunks):
            places = (self._places.get(MetadataIndex(name, one.offsets, index)) for index in (i, None))
            place = next((place for place in places if place is not None), None)
            if place is None:
                raise CheckpointError(f"{self.path}: its metadata does not say where {name}{list(one.offsets)} is")
            chunks.append(Chunk(self, name, tuple(one.offsets), tuple(one.sizes), place))
        chunks.sort(key=lambda chunk: (chunk.offsets, chunk.sizes))
        chunks = [chunk for i, chunk in enumerate(chunks) if not i or chunk.bounds != chunks[i - 1].bounds]
        numbers = sum(int(np.prod(chunk.sizes)) for chunk in chunks)
        if numbers != said.size.numel() or _overlap(chunks):
            raise CheckpointError(
                f"{self.path}: {name} has {said.size.numel()} numbers, and {numbers} in parts that"
                f" {'lie over each other' if _overlap(chunks) else 'leave some out'}"
            )
        return chunks

    def whole(self, name: str) -> Tensor:
        """Reads a tensor as a whole."""
        tensor = torch.empty(self.tensors[name].size, dtype=self.dtype_of(name), device="cpu")
        for chunk in self.chunks(name):
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            tensor[place] = chunk.tensor()
        return tensor


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Returns whether two chunks of a tensor overlap. They are in the order of their first rows."""
    live: list[tuple[int, int]] = []  # end, index
    for i, chunk in enumerate(chunks):
        if not chunk.sizes or 0 in chunk.sizes:
            continue
        while live and live[0][0] <= chunk.offsets[0]:
            heapq.heappop(live)
        for _, j in live:
            other = chunks[j]
            pairs = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in pairs):
                return True
        heapq.heappush(live, (chunk.offsets[0] + chunk.sizes[0], i))
    return False


class Chunk:
    """A part of a tensor: some rows, and perhaps only some of the columns.

    Args:
        folder: where it is.
        name: of the tensor.
        offsets, sizes: what it has of the tensor.
        place: file, first byte and bytes, as DCP says it.
    """

    def __init__(self, folder: Folder, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Any) -> None:
        self._folder, self._name, self.offsets, self.sizes = folder, name, offsets, sizes
        self._place = place
        self._mapped: Tensor | None = None

    @property
    def bounds(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The place of the chunk in the tensor: offsets, then sizes."""
        return self.offsets, self.sizes

    @property
    def end(self) -> int:
        """The row behind its last one."""
        return self.offsets[0] + self.sizes[0]

    def tensor(self) -> Tensor:
        """Returns the chunk's tensor, mapped. Raises CheckpointError if the file is missing, cut off or another one."""
        if self._mapped is None:
            self._mapped = self._read()
        return self._mapped

    def let_go(self) -> None:
        """Releases the memory into which the file is mapped."""
        self._mapped = None

    def _read(self) -> Tensor:
        what = f"{self._name}{list(self.offsets)}"
        path = place_within(self._folder.path, self._place.relative_path)
        dtype = self._folder.dtype_of(self._name)
        try:
            size = path.stat().st_size
            if size < self._place.offset + self._place.length:
                raise CheckpointError(
                    f"{path} has {size} bytes, and {what} ends at {self._place.offset + self._place.length}: it was cut"
                    " off"
                )
            found = self._load(path)
        except OSError as error:
            raise CheckpointError(f"{self._folder.path}: cannot read {what}: {error}") from error
        except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{path}: {what} cannot be read, it was altered: {error}") from error
        if tuple(found.shape) != self.sizes or found.dtype != dtype:
            raise CheckpointError(
                f"{path}: {what} is {found.dtype} of shape {tuple(found.shape)}, the metadata says {dtype} of shape"
                f" {self.sizes}"
            )
        return found

    def _load(self, path: Path) -> Tensor:
        """Maps the tensor if torch has saved it as it is; else reads it."""
        if getattr(self._place, "transform_descriptors", None):
            raise ValueError("it is compressed or otherwise transformed, which is not supported: save it without")
        with open(path, "rb") as file, FakeTensorMode():
            fake = torch.load(self._slice(file), "cpu", weights_only=True)
        first = place_in_file(fake)
        if first is None or not fake.is_contiguous() or not fake.numel():
            with open(path, "rb") as file:
                read: Tensor = torch.load(self._slice(file), weights_only=True)
            return read
        begin = self._place.offset + first + fake.storage_offset() * fake.itemsize
        nbytes = fake.numel() * fake.itemsize
        if begin + nbytes > self._place.offset + self._place.length:
            raise ValueError("its numbers end after it")
        mapped = np.memmap(path, np.uint8, "c", offset=begin, shape=(nbytes,))  # never written: torch wants it so
        return torch.from_numpy(mapped).view(fake.dtype).view(fake.shape)

    def _slice(self, file: BinaryIO) -> BinaryIO:
        return io.BufferedReader(_Slice(file, self._place.offset, self._place.length))


class _Slice(io.RawIOBase):
    """A part of a file, as a file object."""

    def __init__(self, file: BinaryIO, first: int, size: int) -> None:
        super().__init__()
        self._file, self._first, self._size, self._at = file, first, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory)[: max(0, self._size - self._at)]
        self._file.seek(self._first + self._at)
        found = self._file.read(view.nbytes)
        view[: len(found)] = found
        self._at += len(found)
        return len(found)


class DcpSource:
    """A folder of DCP as an `importing.Source`.

    Args:
        folder: its tensors.
        found: which of them is what.
        job: what the tables are.

    Raises:
        CheckpointError: a tensor has another shape or dtype than the job says, or is not whole.
    """

    def __init__(self, folder: Folder, found: FoundTensors, job: JobSpec) -> None:
        self._chunks: dict[tuple[str, str], list[Chunk]] = {}
        for table, field, name in tensors_of(job, found):
            dtype = str(folder.dtype_of(name)).removeprefix("torch.")
            check_tensor(f"{folder.path}: {name}", table.rows, field, folder.tensors[name].size, dtype)
            self._chunks[table.name, field.name] = folder.chunks(name)

    def rows(self, table: str, field: Field, first: int, last: int) -> Bytes | None:
        """Returns a field of some rows, see `importing.Source`."""
        chunks = self._chunks.get((table, field.name))
        if chunks is None:
            return None
        out: Tensor | None = None
        while chunks and chunks[0].end <= first:
            chunks.pop(0).let_go()
        for chunk in chunks:
            if chunk.offsets[0] >= last:
                break
            if chunk.end <= first:
                continue
            low, high = max(first, chunk.offsets[0]), min(last, chunk.end)
            part = chunk.tensor()[low - chunk.offsets[0] : high - chunk.offsets[0]].reshape(high - low, -1)
            if out is None:
                out = torch.empty(last - first, field.values, dtype=part.dtype, device="cpu")
            column = chunk.offsets[1] if len(chunk.offsets) > 1 else 0
            out[low - first : high - first, column : column + part.shape[1]] = part
        assert out is not None, "chunks are all there is of a tensor"
        found: Bytes = out.view(torch.uint8).numpy()
        return found


# the dense model ----------------------------------------------------------------------------------


@dataclass
class _Dense:
    tensors: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    absent: list[str]


def _dense(folder: Folder, found: FoundTensors, described: Description, tables_only: bool) -> _Dense:
    """Returns the dense model and its optimizers' state, and a list of what else there is."""
    taken = set(found.names.values())
    before = found.model
    left = sorted(
        name
        for name in folder.tensors
        if name not in taken and not (before is not None and _is_again(name, before, described))
    )
    absent = [f"the tables of {path}, which TorchRec keeps: the script loads them" for path in described.elsewhere]
    if tables_only or before is None:
        return _Dense({}, {}, [*absent, *_said(left, folder.others)])
    names = {
        name: name.removeprefix(before)
        for name in left
        if name.startswith(before)
        and (before or _STATE not in name)
        and name.rpartition(".")[2] != _EXTRA  # of a module, which the script has
        and not is_below(name.removeprefix(before), described.elsewhere)
    }
    dense = {key: folder.whole(name) for name, key in names.items()}
    state: dict[str, dict[str, Tensor]] = {}
    rest = []
    for name in left:
        if name in names:
            continue
        place = _state_place(name, dense)
        if place is None:
            rest.append(name)
            continue
        parameter, key = place
        if key in state.setdefault(parameter, {}):
            raise CheckpointError(
                f"{folder.path} has `{key}` of an optimizer of {parameter} twice: import the tables alone"
                " (--tables-only), and load the dense model in the script"
            )
        state[parameter][key] = folder.whole(name)
    strange = [name for name in folder.others if _state_place(name, dense) is not None]
    if strange:
        raise CheckpointError(
            f"{folder.path} has optimizer state that is no tensor, {', '.join(strange[:4])}: import the tables alone"
            " (--tables-only), and load the dense model in the script"
        )
    return _Dense(dense, state, [*absent, *_said(rest, folder.others)])


def _is_again(name: str, before: str, described: Description) -> bool:
    """Returns whether a tensor is a table under another of its names."""
    return name.startswith(before) and is_below(name.removeprefix(before), described.again)


def _state_place(name: str, dense: dict[str, Tensor]) -> tuple[str, str] | None:
    """Returns the parameter whose optimizer state a tensor is, and its name there; None if it is none."""
    _, state, rest = f".{name}".partition(_STATE)
    if not state:
        return None
    words = rest.split(".")
    for first in range(len(words)):
        for last in range(len(words) - 1, first, -1):
            parameter = ".".join(words[first:last])
            if parameter in dense:
                return parameter, ".".join(words[last:])
    return None


def _said(tensors: Sequence[str], others: Sequence[str]) -> list[str]:
    """Returns a short list, for people, of what was not imported."""
    plain = sorted(name for name in others if _GROUPS not in f".{name}")
    found = [f"tensor {name}" for name in tensors[:10]]
    found += [f"{len(tensors) - 10} more tensors"] if len(tensors) > 10 else []
    found += [f"{name}, which is no tensor" for name in plain[:10]]
    return [*found, *([f"{len(plain) - 10} more of such"] if len(plain) > 10 else [])]
