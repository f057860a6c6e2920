"""Messages as plain values: what the transports send in place of the dataclasses of wire.py.

    Lookup(slot=2, ...)   <->   ("Lookup", (2, ...))

Tensors stay tensors, contiguous ones on the CPU; how they travel is the transport's business. Only classes of `wire`
are ever built from what arrives.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import Tensor

from torch_ecrec.transport import wire
from torch_ecrec.transport.wire import Answer, Request

Encoded = tuple[str, tuple[Any, ...]]


def _wire_classes(base: type) -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(wire).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == wire.__name__
    }


REQUESTS = _wire_classes(Request)
ANSWERS = _wire_classes(Answer)
_FIELDS = {
    name: tuple(field.name for field in dataclasses.fields(cls)) for name, cls in {**REQUESTS, **ANSWERS}.items()
}


def _on_cpu(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = tensor.detach()
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()


def _plain(value: Any) -> tuple[Any, int]:
    """`value` as plain data with contiguous tensors on the CPU, and the number of bytes in its tensors."""
    if value is None or isinstance(value, (int, float, str)):
        return value, 0
    if isinstance(value, Tensor):
        tensor = _on_cpu(value)
        return tensor, tensor.nbytes
    if isinstance(value, (list, tuple)):
        pairs = [_plain(item) for item in value]
        return [item for item, _ in pairs], sum(size for _, size in pairs)
    if isinstance(value, dict):
        pairs = [_plain(item) for item in value.values()]
        return dict(zip(value, (item for item, _ in pairs), strict=True)), sum(size for _, size in pairs)
    raise TypeError(f"a message holds plain values and tensors, got {type(value).__name__}")


def encode(message: Request | Answer) -> tuple[Encoded, int]:
    """A message as (class name, field values), and the number of bytes in its tensors.

    Tensors are shared with the message, not copied, unless they are strided: leave them unchanged until the call has
    ended.
    """
    kind = type(message).__name__
    if REQUESTS.get(kind, ANSWERS.get(kind)) is not type(message):
        raise TypeError(f"`message` must be of a class in wire.py, got {kind}")
    values: list[Any] = []
    total = 0
    for name in _FIELDS[kind]:
        value = getattr(message, name)
        if type(value) is not int:  # most fields are
            value, size = _plain(value)
            total += size
        values.append(value)
    return (kind, tuple(values)), total


def decode(encoded: Encoded, classes: dict[str, type]) -> Any:
    """The message that was encoded. Raises ValueError if it is none of `classes`."""
    kind, values = encoded
    cls = classes.get(kind)
    if cls is None:
        raise ValueError(f"unknown message {kind!r}; the processes run different versions")
    return cls(**dict(zip(_FIELDS[kind], values, strict=True)))
