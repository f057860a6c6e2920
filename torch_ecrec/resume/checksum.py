"""A checksum of a batch of any kind, to find that a reader gives other batches than before.

Looks at every tensor and array in it, of large ones at a part; where there are none, at plain values. It is quick, and
no protection against who wants to be mistaken.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

HEAD_BYTES = 1 << 13  # bytes of a large tensor: so many at its start,
SPREAD = 1 << 11  # and so many elements, spread evenly over it
DEPTH_MOST = 8
_PLAIN = (str, bytes, int, float, bool, type(None))


def checksum_of(batch: object) -> int:
    """Returns a CRC-32 of all that a batch holds."""
    return checksum_of_sums(sums_of(parts_of(batch)))


def checksum_of_all(value: object, known: Collection[int]) -> int:
    """Returns the checksum as `checksum_of` does, with plain values beside tensors, and without objects whose ids are
    in `known`."""
    return checksum_of_sums(sums_of((path, part) for path, part in _parts(value, "", 0) if id(part) not in known))


def checksum_of_sums(sums: Iterable[tuple[str, int]]) -> int:
    """Returns `checksum_of` of the batch from which `sums_of` made these."""
    return zlib.crc32(b"".join(total.to_bytes(4, "little") for _, total in sums))


def sums_of(parts: Iterable[tuple[str, Any]]) -> list[tuple[str, int]]:
    """Returns a CRC-32 of each of the parts, with its path."""
    return [(path, _sum(part)) for path, part in parts]


def parts_of(batch: object) -> list[tuple[str, Any]]:
    """Yields the tensors and arrays in a batch with their paths (`['dense']`, `.labels`), or plain values if none."""
    found = list(_parts(batch, "", 0))
    return [(path, part) for path, part in found if isinstance(part, (Tensor, np.ndarray))] or found


def _sum(part: Any) -> int:
    return zlib.crc32(_sample(part) if isinstance(part, (Tensor, np.ndarray)) else repr(part).encode())


def _parts(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yields tensors, arrays and plain values, in their order."""
    if isinstance(value, (Tensor, np.ndarray, *_PLAIN)):
        yield path, value
    elif depth == DEPTH_MOST:
        return
    elif isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
        parts = {"values()": value.values(), "lengths()": value.lengths(), "weights()": value.weights_or_none()}
        if isinstance(value, KeyedJaggedTensor) and (repeats := value.inverse_indices_or_none()) is not None:
            parts["inverse_indices()"] = repeats[1]
        yield from ((f"{path}.{name}", part) for name, part in parts.items() if part is not None)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _parts(key, f"{path} key {key!r}", depth + 1)
            yield from _parts(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _parts(item, f"{path}[{i}]", depth + 1)
    elif hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield from _parts(item, f"{path}.{name}", depth + 1)


def _sample(value: Tensor | np.ndarray) -> bytes:
    """Returns bytes of a value: its type, its shape, and all or a part of its elements."""
    if isinstance(value, Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}"
        if value.layout != torch.strided or value.device.type != "cpu" or value.numel() == 0:
            return kind.encode()
        flat = value.detach().reshape(-1)
        some = flat
        if flat.nbytes > 2 * HEAD_BYTES:
            head = HEAD_BYTES // flat.element_size()
            some = torch.cat([flat[:head], flat[head :: max(1, len(flat) // SPREAD)], flat[-1:]])
        return kind.encode() + some.contiguous().view(torch.uint8).numpy().tobytes()
    if value.dtype.hasobject:
        return repr(value.tolist()).encode()
    flat_array = value.reshape(-1)
    if flat_array.nbytes > 2 * HEAD_BYTES:
        head = HEAD_BYTES // flat_array.itemsize
        flat_array = np.concatenate(
            [flat_array[:head], flat_array[head :: max(1, len(flat_array) // SPREAD)], flat_array[-1:]]
        )
    return f"{value.dtype} {value.shape}".encode() + flat_array.tobytes()
