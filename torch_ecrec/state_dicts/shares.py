"""Which trainer has which rows of a table: the sharded tensors of state dicts, and the parts of those being loaded.

A state dict has a table as TorchRec's row-wise sharding has it, a `ShardedTensor`: as many rows for each trainer, and
what is left of them, or none, for the last. Ten rows and three trainers: [0, 4), [4, 8) and [8, 10). Who has none has a
shard without rows: of a tensor without a shard DCP takes a checkpoint for one of an earlier torch. That is the form
of which `torch.distributed.checkpoint` makes whole tensors, too (`StateDictOptions(full_state_dict=True)`). A single
trainer has all rows, in plain tensors.

What is loaded may be sharded in another way, by rows, by columns or by tables: each trainer loads what it has of it.
Of a whole tensor, which every trainer has, that of trainer 0 is loaded; nobody looks at the others.

Asks nobody for rows: `tables_state.py` does. Shape legend: U rows, C columns of a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.shards_wrapper import LocalShardsWrapper

from torch_ecrec.compat.torch import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    local_shape_and_offset,
    sharded_of,
)


class Shares:
    """Divides the rows of tables among the trainers.

    Args:
        trainer, trainers: this one, of how many.
        group: of the trainers, in their order; None with one trainer.
    """

    def __init__(self, trainer: int, trainers: int, group: dist.ProcessGroup | None) -> None:
        self.trainer, self.trainers, self._group = trainer, trainers, group

    def range_of(self, rows: int, trainer: int) -> tuple[int, int]:
        """Returns the first row that a trainer has of a table of `rows` rows, and the row behind its last."""
        each = -(-rows // self.trainers)
        return min(trainer * each, rows), min((trainer + 1) * each, rows)

    def mine(self, rows: int) -> tuple[int, int]:
        """Returns the row range [first, end) that this trainer has of a table of `rows` rows."""
        return self.range_of(rows, self.trainer)

    def sharded(self, rows: int, values: Tensor) -> Tensor:
        """Returns a table of `rows` rows as a tensor, sharded if there are several trainers.

        This trainer's rows are `values`, (U, C) or (U,), perhaps none. They are not copied.
        """
        if self._group is None:
            return values
        ranks = dist.get_process_group_ranks(self._group)
        metadata = ShardedTensorMetadata(
            shards_metadata=[
                ShardMetadata(
                    [begin, *(0 for _ in values.shape[1:])], [end - begin, *values.shape[1:]], f"rank:{rank}/cpu"
                )
                for trainer, rank in enumerate(ranks)
                for begin, end in [self.range_of(rows, trainer)]
            ],
            size=torch.Size([rows, *values.shape[1:]]),
            tensor_properties=TensorProperties(dtype=values.dtype),
        )
        here = f"rank:{ranks[self.trainer]}/cpu"
        shards = [Shard(values, shard) for shard in metadata.shards_metadata if str(shard.placement) == here]
        return sharded_of(shards, metadata, self._group)


def shape_of(value: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole tensor. (Torch warns of `value.shape` for a `ShardedTensor`.)"""
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


@dataclass(frozen=True)
class Part:
    """Values (U, C) of one field of a table: of rows from `row` on, and of columns from `column` on."""

    row: int
    column: int
    values: Tensor


def check_numbers(values: Tensor) -> None:
    """Raises ValueError unless a tensor has real numbers, one for each element, on a device."""
    if values.is_complex() or values.is_quantized or values.layout != torch.strided or values.is_meta:
        raise ValueError(
            "real numbers are needed, in a dense tensor that is not on the meta device, got"
            f" {values.dtype}, {values.layout}, on {values.device}"
        )


def is_whole(value: Any) -> bool:
    """Returns whether every trainer has all of a tensor. Trainer 0's is loaded then."""
    if isinstance(value, DTensor):
        return all(placement.is_replicate() for placement in value.placements)
    return not isinstance(value, ShardedTensor)


def parts_of(value: Any, trainer: int) -> list[Part]:
    """Returns the parts that this trainer has of a tensor, (rows, C) or (rows,): plain, sharded or distributed.

    Raises:
        TypeError: `value` is no tensor.
        ValueError: it is a distributed tensor of partial sums.
    """
    if isinstance(value, ShardedTensor):
        return [_part(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    if isinstance(value, DTensor):
        return _parts_of_dtensor(value, trainer)
    if not isinstance(value, Tensor):
        raise TypeError(f"a tensor is needed to load a table, got {type(value).__name__}")
    return [_part([0, 0], value)] if trainer == 0 else []


def _parts_of_dtensor(value: DTensor, trainer: int) -> list[Part]:
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(
            f"a DTensor with placements {value.placements} has parts of sums and no values: `redistribute` it to"
            " `Shard` or `Replicate` first"
        )
    if is_whole(value) and trainer != 0:
        return []
    local: Any = value.to_local()
    if isinstance(local, LocalShardsWrapper):
        return [_part(at, shard) for at, shard in zip(local.local_offsets(), local.local_shards(), strict=True)]
    _, offsets = local_shape_and_offset(value.shape, value.device_mesh, value.placements)
    return [_part(offsets, local)] if local.numel() else []


def _part(offsets: Sequence[int], values: Tensor) -> Part:
    values = values.detach()
    return Part(offsets[0], 0, values.unsqueeze(1)) if values.dim() == 1 else Part(offsets[0], offsets[1], values)
