"""A table in a state dict that holds no rows: `torch.distributed.checkpoint` fetches them while it writes, in portions.

DCP asks a tensor which chunks of it are here (`__create_write_items__`), and for one chunk at a time when it writes it
(`__get_tensor_shard__`). So a portion is read of the servers when it is written, and freed after.

    rows 0 to 9 of a table, portions of 4 rows, two trainers: chunks [0, 4), [4, 5) and [5, 9), [9, 10)

Whatever else is asked of it is refused by name. Loading has another way, `checkpoint/portions.py`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ecrec.compat.torch import tensor_without_memory
from torch_ecrec.state_dicts.columns import noted
from torch_ecrec.state_dicts.table_tensors import Tie

PORTION_BYTES = 32 << 20  # that a trainer holds at a time, twice while DCP writes it
_ONE_AT_A_TIME = threading.Lock()  # DCP may write with several threads, and a session is of one


class StreamedTable(Tensor):
    """A field of a table, (rows, C) or (rows,), that holds no rows. This trainer writes some of them.

    Args:
        what: for messages.
        size: the shape of the whole field.
        dtype: of its numbers.
        rows: [first, last) that are this trainer's.
        read: gives rows [first, last).
        load: overwrites this trainer's rows: see `TablesState.load_portions`.

    Attributes:
        columns: the order of the collection's features, which is noted with what is saved; empty: not with this one.
        tie: of the first table of a collection; None: of others, and of what has no model.
    """

    what: str
    rows: tuple[int, int]
    read: Callable[[int, int], Tensor]
    load: Callable[..., None]
    loaded: bool  # a checkpoint has been, by `checkpoint.load`
    columns: tuple[str, ...] = ()
    tie: Tie | None = None

    @staticmethod
    def __new__(
        cls,
        what: str,
        size: Sequence[int],
        dtype: torch.dtype,
        rows: tuple[int, int],
        read: Callable[[int, int], Tensor],
        load: Callable[..., None],
    ) -> StreamedTable:
        made: StreamedTable = tensor_without_memory(cls, torch.Size(size), dtype)
        made.what, made.rows, made.read, made.load, made.loaded = what, rows, read, load, False
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StreamedTable({self.what}: {tuple(self.size())}, on the servers)"

    @property
    def chunks(self) -> Iterator[ChunkStorageMetadata]:
        """Yields the chunks of rows that this trainer writes, each of at most `PORTION_BYTES`."""
        rest = tuple(self.size()[1:])
        most = max(1, PORTION_BYTES // (self.itemsize * math.prod(rest)))
        first, last = self.rows
        for begin in range(first, last, most):
            sizes = torch.Size([min(most, last - begin), *rest])
            yield ChunkStorageMetadata(offsets=torch.Size([begin, *(0 for _ in rest)]), sizes=sizes)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        items = [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.chunks
        ]
        return noted(items, self.columns) if self.columns else items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise self._refusal("loaded into")

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        chunk = next(chunk for chunk in self.chunks if chunk.offsets == index.offset)
        with _ONE_AT_A_TIME:
            return self.read(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])

    def check_loaded(self) -> None:
        """Raises RuntimeError unless a checkpoint was loaded through it: it has no rows that it could give."""
        if not self.loaded:
            raise self._refusal("loaded from")

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{self.what} is streamed to a checkpoint, and cannot be {what}: `torch_ecrec.checkpoint.load` loads one,"
            " `model.state_dict()` has tensors"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise next(arg for arg in args if isinstance(arg, StreamedTable))._refusal(f"asked for `{func}`")
