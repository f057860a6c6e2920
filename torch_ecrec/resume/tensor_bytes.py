"""Tensors as bytes, in the order of their memory, and streams of such bytes that lie beside an encoded value.

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
    """Tensors that `encode` leaves out: their bytes follow each other in the order of `tensors`, without padding.

    One tensor that is met twice is kept once, and comes back as one.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.offsets: list[int] = []
        self.bytes = 0
        self._known: dict[int, int] = {}  # id of a tensor in `tensors` -> offset

    def add(self, tensor: Tensor) -> int:
        """Adds a tensor, and returns where its bytes begin."""
        offset = self._known.get(id(tensor))
        if offset is None:
            offset = self._known[id(tensor)] = self.bytes
            self.tensors.append(tensor)
            self.offsets.append(offset)
            self.bytes += tensor.nbytes
        return offset


class TensorsIn:
    """The bytes of `TensorsOut`, to decode from.

    Args:
        stream: (bytes,) uint8, on the CPU. Tensors are copies of what it holds.
    """

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream
        self.made: dict[tuple[Any, ...], Tensor] = {}  # whatever describes a tensor -> the tensor
        self._left = len(stream)

    def bytes_at(self, offset: int, size: int) -> Tensor:
        """Returns the bytes of one tensor. Raises ValueError if they are not there, or more are taken together than
        there are."""
        self._left -= size  # tensors do not overlap: a few bytes that say otherwise would fill all memory
        if self._left < 0:
            raise ValueError(f"tensors of more than {len(self.stream)} bytes in as many")
        if not 0 <= offset <= offset + size <= len(self.stream):
            raise ValueError(f"a tensor at bytes {offset} to {offset + size} of {len(self.stream)}")
        return self.stream[offset : offset + size]


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Its dimensions from the slowest in memory to the fastest; () if they are in that order, or have gaps."""
    if tensor.is_contiguous():
        return ()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d), reverse=True))
    return order if tensor.permute(order).is_contiguous() else ()


def bytes_of(tensor: Tensor) -> Tensor:
    """Its bytes (uint8, one dimension) in the order of its memory, where it is: a view, or a copy if it has gaps."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        order = order_of(tensor)
        tensor = (tensor.permute(order) if order else tensor).contiguous()
    return tensor.view(-1).view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of its own memory."""
    out = torch.empty(shape, dtype=dtype, device="cpu")
    if out.nbytes:
        out.view(-1).view(torch.uint8).copy_(data)
    return out
