"""Messages as plain values: what the transports send in place of the dataclasses of wire.py.

    Lookup(slot=2, ...)   <->   ("Lookup", (2, ...))

Tensors stay tensors, contiguous ones on the CPU; how they travel is the transport's business.

Only classes of `wire` are ever built from what arrives, and only of values that are what their declarations say: the
types (msgspec looks at them), dtype and rank of tensors (`TensorOf`), and no step or number beyond `MOST`. What the
values mean, say that a position is one of a slot's, is for those who know the job: `wellformed.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from torch import Tensor

from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import Answer, Request, TensorOf

Encoded = tuple[str, tuple[Any, ...]]

LEAST, MOST = -1, 1 << 48  # integers count things (steps, slots, lives), and -1 is none of them
_COUNT = Annotated[int, msgspec.Meta(ge=LEAST, le=MOST)]


def _wire_classes(base: type) -> dict[str, type]:
    return {
        name: cls
        for name, cls in vars(wire).items()
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and cls.__module__ == wire.__name__
    }


REQUESTS = _wire_classes(Request)
ANSWERS = _wire_classes(Answer)

# reading --------------------------------------------------------------------------------------------

_Tensors = Callable[[Any], list[tuple[Tensor, TensorOf]]]  # those of a field, with what each of them must be


def _bare(hint: Any) -> Any:
    """A field's type as msgspec is told it: integers with their bounds, tensors as such."""
    if hint is int:
        return _COUNT
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _bare(parts[0])
    if origin is list:
        return list[int if parts[0] is int else _bare(parts[0])]  # type: ignore[misc]
    if origin is dict:
        return dict[_bare(parts[0]), _bare(parts[1])]  # type: ignore[misc]
    return functools.reduce(operator.or_, map(_bare, parts)) if origin is not None else hint


def _tensors(hint: Any) -> _Tensors | None:
    """None if nothing is declared of them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        wanted = [part for part in parts[1:] if isinstance(part, TensorOf)]
        return (lambda tensor: [(tensor, wanted[0])]) if wanted else None
    inner = _tensors(parts[0]) if origin is not None else None
    if inner is None or origin is dict:
        return None
    if origin is list:
        return lambda values: [pair for value in values for pair in inner(value)]
    return lambda value: [] if value is None else inner(value)  # it may be left out


@dataclasses.dataclass(frozen=True)
class _Form:
    """What is known of a class of messages. The fields' order is that of the dataclass."""

    names: tuple[str, ...]
    struct: type  # msgspec's, of an array of the fields
    tensors: tuple[tuple[str, _Tensors], ...]


@functools.cache
def _form(cls: type) -> _Form:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(field.name for field in dataclasses.fields(cls))
    fields = [(name, _bare(hints[name])) for name in names]
    struct = msgspec.defstruct(cls.__name__, fields, array_like=True, forbid_unknown_fields=True, gc=False)
    tensors = [(name, _tensors(hints[name])) for name in names]
    return _Form(names, struct, tuple((name, found) for name, found in tensors if found is not None))


def decode(encoded: Encoded, classes: dict[str, type]) -> Any:
    """The message that was encoded.

    Raises:
        ValueError: it is none of `classes`, or a value is not what its class declares; nothing was built then.
    """
    kind, values = encoded
    cls = classes.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"unknown message {kind!r}; the processes run different versions")
    form = _form(cls)
    try:
        fields = msgspec.structs.asdict(msgspec.convert(values, form.struct))
    except (msgspec.MsgspecError, AttributeError, TypeError, RecursionError) as error:  # a tensor may pass for a dict
        raise ValueError(f"not a {kind}: {error}") from error
    for name, tensors_of in form.tensors:
        for tensor, wanted in tensors_of(fields[name]):
            if tensor.dtype not in wanted.dtypes or tensor.dim() != wanted.rank:
                raise ValueError(
                    f"not a {kind}: `{name}` must have {wanted}, got {tensor.dim()}-D {str(tensor.dtype)[6:]}"
                )
    return cls(**fields)


# writing --------------------------------------------------------------------------------------------


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
    cls: Any = type(message)
    kind: str = cls.__name__
    if REQUESTS.get(kind, ANSWERS.get(kind)) is not cls:
        raise TypeError(f"`message` must be of a class in wire.py, got {kind}")
    values: list[Any] = []
    total = 0
    for name in _form(cls).names:
        value = getattr(message, name)
        if type(value) is not int:  # most fields are
            value, size = _plain(value)
            total += size
        values.append(value)
    return (kind, tuple(values)), total
