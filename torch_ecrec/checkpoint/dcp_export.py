"""Exports a checkpoint of the cluster to `torch.distributed.checkpoint` (DCP), under TorchRec's names.

    model.tables.embedding_bags.a.weight                               (rows, dim)
    optimizer.state.tables.embedding_bags.a.weight.a.momentum1         (rows,)
    model.over.0.weight                                                of the dense model, buffers too
    dense_optimizer.state.over.0.weight.exp_avg                        a second one is dense_optimizer_1

So `dcp.load` fills `{"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict(), "dense_optimizer":
keyed.state_dict()}` of a plain TorchRec model, sharded in any way; `keyed` is a `KeyedOptimizerWrapper`. The names are
kept with every dense snapshot (`dense.WithTables`), so no model is needed here.

What only the script can use is not in it; `Exported.absent` says what that is. Tables go by way of a file of
safetensors beside the folder: rows come in the order of slots, chunks of DCP are ranges of rows. Memory: two portions,
and the dense model.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn.dense import State, unpack
from torch_ecrec.nn.slices import DTYPES
from torch_ecrec.records.schema import WEIGHT, Field
from torch_ecrec.resume import values
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.files import sync_folder
from torch_ecrec.state_dicts.streamed import StreamedTable
from torch_ecrec.storage import exporting
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import dense_of
from torch_ecrec.storage.description import Description
from torch_ecrec.storage.manifest import Manifest
from torch_ecrec.storage.tensor_file import SUFFIX, TensorFile

DESCRIPTION = "torch_ecrec.json"  # in the folder: what an import of it has to know
SCRIPTS = (
    "random states, the reader's place, schedulers, counts of warm-ups, extra state of modules (`get_extra_state`) and"
    " what else was attached: the script has them",
    "hyperparameters of optimizers, learning rates among them: the script gives them, as with TorchRec",
)


@dataclass(frozen=True)
class Exported:
    """The result of an export. `absent`: the parts of the checkpoint that it lacks, for people."""

    bytes: int
    absent: tuple[str, ...]


def export(catalog: Catalog, manifest: Manifest, folder: Path) -> Exported:
    """Writes a checkpoint, with all that it builds on, as a checkpoint of DCP.

    Args:
        catalog, manifest: the checkpoint.
        folder: on this machine, not there yet. It appears whole, or not at all; meanwhile it needs room twice.

    Raises:
        ValueError: it is there already.
        CheckpointError: the checkpoint is not whole, does not say what its tables are called in a model, or the folder
            cannot be written.
    """
    require(not folder.exists(), f"{folder} is there already: name a folder that is not")
    state = _state_of(catalog, manifest)
    content, absent = _dense(state)
    exporting.remove_left(folder)
    near = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
    try:
        near.mkdir(parents=True)
        with exporting.held(near):
            tables = near / f"tables{SUFFIX}"
            exporting.export(catalog, manifest, tables)
            content.update(_tables(manifest, state, tables))
            for name, first in state.further.items():
                if f"model.{first}" in content:
                    content.setdefault(f"model.{name}", content[f"model.{first}"])
            _save(content, near / "dcp")
            described = Description(
                manifest.spec,
                state.tables,
                beside=tuple(state.replicated),
                again=_again(state),
                inexact=exporting.notes_of(catalog, manifest),
            )
            (near / "dcp" / DESCRIPTION).write_bytes(described.encoded())
            os.replace(near / "dcp", folder)
            sync_folder(folder.absolute().parent)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error}; name another place, or make room") from error
    finally:
        shutil.rmtree(near, ignore_errors=True)
    return Exported(sum(path.stat().st_size for path in folder.iterdir()), tuple(absent))


def _save(content: dict[str, Any], folder: Path) -> None:
    """Writes a checkpoint of DCP. Raises OSError if it cannot be written."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it saves for one process: it does
            save(content, checkpoint_id=folder, no_dist=True)
    except CheckpointException as failed:  # no Exception; it has whatever was raised, a KeyboardInterrupt too
        error = failed.failures[0][0]
        if isinstance(error, RuntimeError):  # torch's file of a full disk, which names neither disk nor file
            raise OSError(f"torch cannot write all of it ({str(error).strip()})") from error
        raise error from None


def _state_of(catalog: Catalog, manifest: Manifest) -> State:
    parts = dense_of(catalog, manifest)
    payloads = [torch.from_numpy(np.frombuffer(payload, np.uint8).copy()) for _, payload in parts.values()]
    try:
        state = unpack(list(zip(payloads, (header for header, _ in parts.values()), strict=True)))
    except ValueError as error:
        raise CheckpointError(
            f"{manifest.id} has a dense model that is none of `torch_ecrec.DistributedModelParallel` ({error}), so it"
            f" does not say what its tables are called in a model: write a file of {SUFFIX}"
        ) from error
    unnamed = [table.name for table in manifest.spec.tables if table.name not in state.tables]
    if unnamed:
        raise CheckpointError(
            f"{manifest.id} does not say what tables {', '.join(unnamed)} are called in a model: write a file of"
            f" {SUFFIX}"
        )
    return state


def _dense(state: State) -> tuple[dict[str, Any], list[str]]:
    """Returns names and tensors of the dense model and its optimizers, and a list of what else there is."""
    content: dict[str, Any] = {f"model.{name}": tensor for name, tensor in state.parameters.items()}
    content.update({f"model.{name}": tensor for name, tensor in state.buffers(0).items()})
    absent = [f"what module {path} keeps beside its tables" for path in state.replicated]
    shards = values.decode(state.whole[0], device="cpu")["shards"]
    absent += [f"{name}, a table that TorchRec has sharded" for name in shards]
    if len(state.whole) > 1 and state.buffers(0):
        absent.append("buffers of trainers but the first (the same, unless trainers normalise apart)")
    for i, entry in enumerate(state.optimizers):
        prefix = "dense_optimizer" + (f"_{i}" if i else "")
        for place, key, data in entry["state"]:
            if not isinstance(place, str) or data is None:
                what = values.decode(key) if place is None else f"parameter {place}, which is none of the model's"
                absent.append(f"state of {entry['class']}: {what}")
                continue
            found = values.decode(data, state.tensors, "cpu")
            for name, value in found.items() if isinstance(found, Mapping) else {"state": found}.items():
                content[f"{prefix}.state.{place}.{name}"] = value
    return content, [*absent, *SCRIPTS]


def _again(state: State) -> tuple[str, ...]:
    """Returns the other paths of modules that have tables under several: see `Description`."""
    keys = {key for key, _ in state.tables.values()}
    paths = (".".join(name.split(".")[:-3]) for name, first in state.further.items() if first in keys)
    return tuple(dict.fromkeys(paths))


def _tables(manifest: Manifest, state: State, path: Path) -> dict[str, Tensor]:
    file = TensorFile(path)
    found: dict[str, Tensor] = {}
    for table_group in manifest.spec.table_groups:
        for table in table_group.tables:
            key, name = state.tables[table.name]
            for field in table_group.schema.fields:
                of_state = f"optimizer.state.{key}.{name}.{field.name}"
                full = f"model.{key}" if field.name == WEIGHT else of_state
                found[full] = made = _streamed(full, field, file.rows_of(f"{table.name}.{field.name}"))
                order = state.columns.get(".".join(key.split(".")[:-3]))
                if field.name == WEIGHT and order is not None and order.said is not None:
                    made.columns = order.said
    return found


def _streamed(what: str, field: Field, rows_RB: np.ndarray) -> StreamedTable:
    size = [len(rows_RB)] if field.per_row else [len(rows_RB), field.values]

    def read(first: int, last: int) -> Tensor:
        values_nb = torch.from_numpy(rows_RB[first:last].copy())
        return values_nb.view(DTYPES[field.dtype]).view(last - first, *size[1:])

    def load(*_: object) -> None:
        raise RuntimeError(f"{what} is written to a checkpoint, nothing is loaded into it")

    return StreamedTable(what, size, DTYPES[field.dtype], (0, len(rows_RB)), read, load)
