"""Copies between the host, where rows are looked up and pooled, and the device of the dense model.

    ids        device -> host   as soon as a batch is known; waited for when its rows are looked up
    pooled     host -> device   from pinned memory; the model's stream waits for it, the host does not
    gradients  device -> host   into pinned memory, once the model's stream has them; the host waits for them alone,
                                while the device goes on with the rest of the backward

All on a stream of its own, so that no copy waits for kernels that it does not need. With a dense model on the CPU
nothing is copied at all. What is pooled, and how its gradient is taken apart, is the same on every device: the host
does it, in one order of summation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class Staging:
    """Copies tensors between the host and one device.

    Args:
        device: that of the dense model. Copies to CUDA use pinned memory and a stream; others are plain copies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pins = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The CUDA stream of the copies, made when it is first used."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor must be copied before the host can read it."""
        return self.pins and tensor.is_cuda

    def follow(self) -> torch.cuda.Stream:
        """Returns the copy stream, which first waits for all work that the current stream was given so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return self.stream

    def ids(self, features: KeyedJaggedTensor) -> HostIds:
        """Begins to copy the ids and lengths of a batch to the host."""
        return HostIds(self, features)

    def crossing(self) -> Crossing:
        """Returns a new crossing, for one pooled tensor and its gradient."""
        return Crossing(self)


class HostIds:
    """The ids and lengths of a batch (and its inverse indices) on the host, or while they are copied there."""

    def __init__(self, staging: Staging, features: KeyedJaggedTensor) -> None:
        self.features = features
        self._coming: tuple[list[Tensor], torch.cuda.Event] | None = None  # ids, lengths ..., when they are here
        if staging.has(features.values()):
            tensors = [features.values().detach(), features.lengths().detach()]
            if (repeats := features.inverse_indices_or_none()) is not None:
                tensors.append(repeats[1].to(features.device()))
            with torch.cuda.stream(staging.follow()):
                self._coming = [_to_pinned(tensor) for tensor in tensors], staging.stream.record_event()
            for tensor in tensors:
                tensor.record_stream(staging.stream)

    def wait(self) -> KeyedJaggedTensor:
        """Waits for the copies, and returns the features with ids and lengths on the host, without weights."""
        if self._coming is None:
            return self.features
        (values_N, lengths_L, *index), arrived = self._coming
        arrived.synchronize()
        given = self.features
        more: dict[str, Any] = {}
        if given.variable_stride_per_key():
            more["stride_per_key_per_rank"] = given.stride_per_key_per_rank()
        if index:
            more["inverse_indices"] = (given.inverse_indices()[0], *index)
        return KeyedJaggedTensor(keys=given.keys(), values=values_N, lengths=lengths_L, **more)


def copied(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a copy of the ids and lengths of a batch (and its inverse indices), which nobody alters."""
    more: dict[str, Any] = {}
    if features.variable_stride_per_key():
        more["stride_per_key_per_rank"] = [list(strides) for strides in features.stride_per_key_per_rank()]
    else:
        more["stride"] = features.stride()
    if (repeats := features.inverse_indices_or_none()) is not None:
        more["inverse_indices"] = list(repeats[0]), repeats[1].clone()
    return KeyedJaggedTensor(
        keys=list(features.keys()), values=features.values().clone(), lengths=features.lengths().clone(), **more
    )


def same_ids(a: KeyedJaggedTensor, b: KeyedJaggedTensor) -> bool:
    """Returns whether two batches on one device have the same ids in the same bags, and no weights."""
    if a.keys() != b.keys() or a.variable_stride_per_key() != b.variable_stride_per_key():
        return False
    if a.stride_per_key() != b.stride_per_key() or not (a.weights_or_none() is b.weights_or_none() is None):
        return False
    if not (_equal(a.values(), b.values()) and _equal(a.lengths(), b.lengths())):
        return False
    ours, theirs = a.inverse_indices_or_none(), b.inverse_indices_or_none()
    if ours is None or theirs is None:
        return ours is theirs
    return list(ours[0]) == list(theirs[0]) and _equal(ours[1], theirs[1])


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


class Crossing:
    """Copies one pooled tensor to the device, and its gradient back."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.arrived: torch.cuda.Event | None = None  # the gradient is on the host

    def empty(self, *shape: int) -> Tensor:
        """Allocates host memory for a float32 tensor that will be copied to the device."""
        return torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=self.staging.pins)

    def over(self, tensor: Tensor) -> Tensor:
        """Copies a tensor made by `empty` to the device. The result is differentiable once."""
        if tensor.device == self.staging.device:
            return tensor
        if not self.staging.pins:
            return tensor.to(self.staging.device)
        over: Tensor = _Over.apply(tensor, self)
        return over

    def wait(self) -> None:
        """Waits until the host can read the gradient that autograd has handed back."""
        if self.arrived is not None:
            self.arrived.synchronize()


class _Over(torch.autograd.Function):
    """An autograd copy from pinned memory to the device. Autograd gets its gradient early: see `Crossing.wait`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, crossing: Crossing) -> Tensor:
        staging, ctx.crossing = crossing.staging, crossing
        current = torch.cuda.current_stream(staging.device)
        with torch.cuda.stream(staging.stream):
            there = tensor.to(staging.device, non_blocking=True)
        current.wait_stream(staging.stream)
        there.record_stream(current)
        return there

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        crossing: Crossing = ctx.crossing
        with torch.cuda.stream(crossing.staging.follow()):
            here = _to_pinned(gradient)
            crossing.arrived = crossing.staging.stream.record_event()
        gradient.record_stream(crossing.staging.stream)
        return here, None


def _to_pinned(tensor: Tensor) -> Tensor:
    """Returns a contiguous copy in pinned memory, made on the current stream."""
    here = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return here.copy_(tensor, non_blocking=True)
