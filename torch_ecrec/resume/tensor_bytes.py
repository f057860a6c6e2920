"""Tensors as bytes in the order of their memory, and streams of such bytes beside an encoded value.

    out = TensorsOut()
    out.add(a), out.add(b), out.add(a)    ->  0, a.nbytes, 0      where the bytes of each begin
    TensorsIn(stream).bytes_at(0, a.nbytes)                       the bytes of a, in a stream of both

`values.py` says what is kept of a tensor beside its bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TensorsOut:
    """Collects the tensors that `encode` leaves out. Their bytes follow each other, without padding.

    A tensor that is met twice is kept once, and is decoded to one tensor.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.bytes = 0
        self._known: dict[int, int] = {}  # id of a tensor in `tensors` -> offset

    def add(self, tensor: Tensor) -> int:
        """Adds a tensor; returns the offset of its bytes."""
        offset = self._known.get(id(tensor))
        if offset is None:
            offset = self._known[id(tensor)] = self.bytes
            self.tensors.append(tensor)
            self.offsets.append(offset)
            self.bytes += tensor.nbytes
        return offset


class TensorsIn:
    """The bytes of a `TensorsOut`, from which values are decoded.

    Args:
        stream: (bytes,) uint8, on the CPU. Tensors are copies of what it holds.
    """

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream
        self.made: dict[tuple[Any, ...], Tensor] = {}  # whatever describes a tensor -> the tensor
        self._left = len(stream)

    def bytes_at(self, offset: int, size: int) -> Tensor:
        """Returns the bytes of one tensor. Raises ValueError if there are too few, or too many are taken in all."""
        self._left -= size  # tensors do not overlap: a few bytes that say otherwise would fill all memory
        if self._left < 0:
            raise ValueError(f"tensors of more than {len(self.stream)} bytes in as many")
        if not 0 <= offset <= offset + size <= len(self.stream):
            raise ValueError(f"a tensor at bytes {offset} to {offset + size} of {len(self.stream)}")
        return self.stream[offset : offset + size]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns a tensor's dimensions from the slowest in memory to the fastest; () if in order, or with gaps."""
    if tensor.is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d), reverse=True))
    return order if tensor.permute(order).is_contiguous() else ()


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes (uint8, one dimension) in the order of memory: a view, or a copy if it has gaps."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        order = order_of(tensor)
        tensor = (tensor.permute(order) if order else tensor).contiguous()
    return tensor.view(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Makes a tensor with memory of its own from bytes."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.nbytes:
        out.view(-1).view(torch.uint8).copy_(data)
    return out
