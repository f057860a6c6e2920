"""Tensors of tables in a state dict that tell `torch.distributed.checkpoint` (DCP) in which order columns come.

DCP asks a tensor for what it saves (`__create_write_items__`) and for what it takes (`__create_chunk_list__`). When it
asks the first table of a collection, the order of the collection's features is noted in the metadata of what is saved,
and that of the checkpoint is looked up before anything is loaded (`columns.py`).

DCP hands its metadata to nobody whom it asks, so that it is looked for in the frames above. Where it is not (another
planner, `torch.load`), nothing is known of the order, and nothing is said.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import WriteItem

from torch_ecrec.compat.torch import (
    ShardedTensor,
    chunk_of_shard,
    chunk_of_tensor,
    plain_torch_function,
    write_item_of_shard,
    write_item_of_tensor,
)
from torch_ecrec.state_dicts.columns import Columns, found_in, noted


class Tie:
    """Ties the tensors of a collection's first table to the order of the collection's columns.

    Args:
        columns: held weakly: a state dict may outlive its model.
        keys: by table, the key of its weights in the state dict of the collection.
    """

    def __init__(self, columns: Columns, keys: Mapping[str, str]) -> None:
        self.order = columns.keys
        self._columns, self._keys = weakref.ref(columns), dict(keys)

    def tie(self, sharded: ShardedTensor) -> None:
        """Makes DCP call this tie when it saves or loads the first table's weights. (Plain ones: `TableTensor`.)"""

        def write_items(name: str, tensor: ShardedTensor) -> list[WriteItem]:
            shards = [write_item_of_shard(name, tensor, shard.metadata) for shard in tensor.local_shards()]
            return noted(shards, self.order)

        def chunk_list() -> list[ChunkStorageMetadata]:
            self.meet_above(sys._getframe(1))
            return list(chunks)

        chunks = [chunk_of_shard(shard.metadata) for shard in sharded.local_shards()]
        made: Any = sharded
        made.__create_write_items__, made.__create_chunk_list__ = write_items, chunk_list

    def meet_above(self, frame: FrameType | None) -> None:
        """Finds the metadata of the checkpoint that DCP is about to load, and the tensor's name, in the calling frames.

        Raises:
            CheckpointError: its order is another one, see `Columns.meet`.
        """
        name: object = None
        while frame is not None:
            here = frame.f_locals
            name = here.get("fqn") if name is None else name
            if isinstance(name, str) and isinstance(here.get("metadata"), Metadata):
                return self.meet(name, here["metadata"])
            frame = frame.f_back

    def meet(self, name: str, metadata: Metadata) -> None:
        """Called when a checkpoint is about to be loaded: hands its order of columns to `Columns.meet`.

        Args:
            name: the name of the first table's weights in the checkpoint.
            metadata: the checkpoint's.

        Raises:
            CheckpointError: its order is another one, see `Columns.meet`.
        """
        columns, own = self._columns(), next(iter(self._keys.values()))
        if columns is None or not name.endswith(own):
            return
        before = name.removesuffix(own)
        found = found_in(metadata, {table: f"{before}{key}" for table, key in self._keys.items()})
        if found is not None:
            columns.meet(found)


def _write_items(order: Sequence[str], name: str, tensor: Tensor) -> list[WriteItem]:
    return noted([write_item_of_tensor(name, tensor)], order)


class TableTensor(Tensor):
    """The first table's weights, where one trainer has all rows. Results computed from it are plain tensors."""

    tie: Tie
    __torch_function__ = plain_torch_function  # type: ignore[assignment]

    @staticmethod
    def of(values: Tensor, tie: Tie) -> TableTensor:
        """Returns `values` as a `TableTensor` with the same memory."""
        made: Any = values.as_subclass(TableTensor)
        made.tie = tie
        # of the tensor, and not of its class: what `async_save` writes is a plain one with what this one has
        made.__create_write_items__ = functools.partial(_write_items, tie.order)
        return cast(TableTensor, made)

    def plain(self) -> Tensor:
        """Returns a plain tensor with the same memory."""
        return self.as_subclass(Tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        self.tie.meet_above(sys._getframe(1))
        return [chunk_of_tensor(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())
