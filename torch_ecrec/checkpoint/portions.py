"""Checkpoints of `torch.distributed.checkpoint` (DCP) whose tables go through the trainers in portions.

    checkpoint.save(model, folder, {"optimizer_of_the_rest": optimizer.state_dict(), "epoch": 3})
    more = checkpoint.load(model, folder, {"optimizer_of_the_rest": optimizer.state_dict(), "epoch": 0})

What is written is what

    dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict(), **more}, ...)

writes, but for where chunks begin, so that either may be loaded by the other, and by TorchRec. The difference is
memory: there a trainer holds its rows of all tables, here a portion of one (`streamed.PORTION_BYTES`).

Loading reads the chunks of the checkpoint that have rows of this trainer, one after the other. DCP reads a chunk as a
whole: with one of TorchRec's, which has as many chunks of a table as trainers, that is the memory that is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from torch_ecrec.compat.torch import flatten_state_dict, set_element
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.state_dicts.shares import Part
from torch_ecrec.state_dicts.streamed import StreamedTable

Folder = str | os.PathLike[str]
TAKEN = ("model", "optimizer")


def save(
    model: DistributedModelParallel,
    checkpoint_id: Folder | None = None,
    more: Mapping[str, Any] | None = None,
    *,
    storage_writer: StorageWriter | None = None,
) -> None:
    """Saves a model, the state of its tables' optimizer, and more. Every trainer calls it, between two steps.

    Args:
        model: its keys begin with `model.`, those of its fused optimizer with `optimizer.`.
        checkpoint_id: the folder, as in `torch.distributed.checkpoint.save`.
        more: other things to save, by name: optimizers' state dicts, numbers.
        storage_writer: as in `torch.distributed.checkpoint.save`.

    Raises:
        ValueError: a name in `more` is taken.
    """
    state = _state_of(model, more)
    save_tensors(state, checkpoint_id=checkpoint_id, storage_writer=storage_writer)


def load(
    model: DistributedModelParallel,
    checkpoint_id: Folder | None = None,
    more: Mapping[str, Any] | None = None,
    *,
    storage_reader: StorageReader | None = None,
) -> dict[str, Any]:
    """Loads what `save` or DCP has saved, by any number of trainers and servers. Every trainer calls it.

    It is a load like `model.load_state_dict`, also during training, and as safe as any step.

    Args:
        model: see `save`.
        checkpoint_id: the folder, as in `torch.distributed.checkpoint.load`.
        more: other things to load, by name; tensors are loaded in place.
        storage_reader: as in `torch.distributed.checkpoint.load`.

    Returns:
        `more` as loaded. Hand it to whom it belongs: `optimizer.load_state_dict(...)`.

    Raises:
        ValueError: a name in `more` is taken, the checkpoint lacks a table or has another size of it. Nothing was
            loaded then.
        CheckpointError: features come in another order than the model's plan has them. Nothing was loaded
            either.
    """
    if (checkpoint_id is None) == (storage_reader is None):
        raise ValueError("one of `checkpoint_id` and `storage_reader` says where the checkpoint is")
    reader = storage_reader or FileSystemReader(checkpoint_id or "")
    state = _state_of(model, more)
    flat, places = flatten_state_dict(state)
    tables = {name: value for name, value in flat.items() if isinstance(value, StreamedTable)}
    metadata = reader.read_metadata()
    for name, table in tables.items():
        _check(name, table, metadata)
    for name, table in tables.items():
        if table.tie is not None:
            table.tie.meet(name, metadata)
    rest = {name: value for name, value in flat.items() if name not in tables}
    load_tensors(rest, storage_reader=reader)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    for name, table in tables.items():
        _load_table(name, table, metadata, reader)
    for name, value in rest.items():  # what is no tensor is not loaded in place
        set_element(state, places[name], value)
    model.load_state_dict(state.pop("model"))
    model.fused_optimizer.load_state_dict(state.pop("optimizer"))
    return state


def _state_of(model: DistributedModelParallel, more: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = [name for name in more or () if name in TAKEN]
    if taken:
        raise ValueError(f"names in `more` must be others than {', '.join(TAKEN)}, got {', '.join(taken)}")
    states = model.streamed_state_dict(), model.streamed_optim_state_dict()
    return {**dict(zip(TAKEN, states, strict=True)), **(more or {})}


def _check(name: str, table: StreamedTable, metadata: Metadata) -> None:
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, TensorStorageMetadata):
        raise ValueError(f"the checkpoint has no tensor {name}")
    if saved.size != table.size():
        raise ValueError(f"{name} takes shape {tuple(table.size())} here, the checkpoint has {tuple(saved.size)}")
    found = sum(chunk.sizes.numel() for chunk in saved.chunks)
    if found < saved.size.numel():
        raise ValueError(
            f"the checkpoint has {found} of the {saved.size.numel()} numbers of {name}: a part of it is missing"
        )


def _load_table(name: str, table: StreamedTable, metadata: Metadata, reader: StorageReader) -> None:
    """Reads the checkpoint's values of this trainer's rows, chunk by chunk, and loads them."""
    first, last = table.rows
    saved: Any = metadata.state_dict_metadata[name]
    rest = table.size()[1:]
    mine = ChunkStorageMetadata(
        offsets=torch.Size([first, *(0 for _ in rest)]), sizes=torch.Size([last - first, *rest])
    )
    items = create_read_items_for_chunk_list(name, saved, [mine] if first < last else [])

    def read(item: ReadItem) -> Part:
        values = torch.empty(item.lengths, dtype=saved.properties.dtype, device="cpu")
        reader.read_data(LoadPlan([item]), _Into(values)).wait()
        row, column = first + item.dest_offsets[0], item.dest_offsets[1] if rest else 0
        return Part(row, column, values if rest else values.unsqueeze(1))

    table.load([item.lengths[0] for item in items], map(read, items))
    table.loaded = True


class _Into(DefaultLoadPlanner):
    """A load planner that reads one item into a tensor of its size."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self._values = values

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._values
