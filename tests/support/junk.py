"""Messages that are wrong somewhere: mutations of valid ones, in every field."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import torch

from torch_ecrec.protocol.encoding import WIRE, Encoded, Vocabulary
from torch_ecrec.protocol.wire import Answer, Request

NUMBERS = (-(1 << 63), -(1 << 31), -7, -2, -1, 0, 1, 2, 3, 5, 17, 99, 255, 1 << 20, 1 << 31, (1 << 48) - 1, 1 << 48)
NUMBERS = (*NUMBERS, (1 << 48) + 1, (1 << 63) - 1, (1 << 64) - 1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)


def junk(rng: random.Random) -> Any:
    """A value of any kind."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        shape = [rng.choice((0, 1, 2, 5)) for _ in range(rng.randrange(4))]
        return torch.zeros(shape, dtype=rng.choice(DTYPES))
    others: list[Any] = [None, "", "x" * 50, 0.5, float("nan"), True, [], {}, [1, 2], [[]], {0: 0}, {"a": 1}, [None]]
    return rng.choice(others)


def change_tensor(tensor: torch.Tensor, rng: random.Random) -> Any:
    """Another dtype, rank, length, order, or an element of any size."""
    kind = rng.randrange(7)
    if kind == 0:
        return tensor.to(rng.choice(DTYPES))
    if kind == 1:
        return tensor[None]
    if kind == 2:
        return tensor.flatten() if tensor.dim() > 1 else tensor.reshape(-1, 1)
    if kind == 3 and tensor.dim():
        return tensor[: rng.randrange(len(tensor) + 1)]
    if kind == 4 and tensor.dim():
        return torch.cat([tensor, tensor[:1]])
    if kind == 5 and tensor.dim():
        return tensor.flip(0)
    changed = tensor.clone()
    if changed.numel() and not changed.dtype.is_floating_point:
        number = rng.choice(NUMBERS[:-1])
        changed.view(-1)[rng.randrange(changed.numel())] = number if changed.dtype == torch.int64 else number % 256
    return changed


def change(value: Any, rng: random.Random) -> Any:
    """`value` with a change somewhere."""
    if rng.random() < 0.15:
        return junk(rng)
    if isinstance(value, bool) or value is None:
        return junk(rng)
    if isinstance(value, int):
        return rng.choice(NUMBERS) if rng.random() < 0.6 else value + rng.choice((-3, -2, -1, 1, 2, 3, 1000, 5000))
    if isinstance(value, torch.Tensor):
        return change_tensor(value, rng)
    if isinstance(value, list):
        kind = rng.randrange(4)
        if kind == 0 or not value:
            return value + [value[-1] if value else junk(rng)]
        if kind == 1:
            return value[:-1]
        which = rng.randrange(len(value))
        return [change(item, rng) if i == which else item for i, item in enumerate(value)]
    if isinstance(value, dict):
        which = rng.choice([*value, 0])
        return {**value, rng.choice((which, junk(rng) if rng.random() < 0.2 else 99)): change(value.get(which, 0), rng)}
    return junk(rng)


def plain(values: Any) -> Encoded:
    """Any values as a message would be sent, whether they are one or not."""
    tensors: list[torch.Tensor] = []

    def leave_out(tensor: torch.Tensor) -> int:
        tensors.append(tensor.contiguous())
        return len(tensors) - 1

    return msgspec.msgpack.encode(values, enc_hook=leave_out), tensors


class Says(Vocabulary):
    """Sends the same, whatever it is told to."""

    def __init__(self, values: Any) -> None:
        super().__init__(list(WIRE.requests.values()))
        self._encoded = plain(values)

    def encode(self, message: Any) -> tuple[Encoded, int]:
        return self._encoded, 0


def mutated(message: Request[Any] | Answer, rng: random.Random) -> Encoded:
    """The message with one or two fields changed, now and then one too many or too few."""
    kind, fields = type(message).__name__, list(msgspec.structs.astuple(message))
    for _ in range(rng.choice((1, 1, 1, 2))):
        if fields:
            which = rng.randrange(len(fields))
            try:
                fields[which] = change(fields[which], rng)
            except TypeError:  # a key that cannot be one
                fields[which] = junk(rng)
    if rng.random() < 0.03:
        fields = fields[:-1] if rng.random() < 0.5 else [*fields, junk(rng)]
    if rng.random() < 0.02:
        kind = rng.choice(["", "Nonsense", "Placement", "Refused", "Malformed", *WIRE.requests])
    try:
        body, tensors = plain([kind, *fields])
    except OverflowError:  # an integer that does not travel
        return mutated(message, rng)
    if rng.random() < 0.03 and tensors:  # one too few, too many, or none
        tensors = rng.choice([tensors[:-1], [*tensors, tensors[0]], []])
    return body, tensors


def read(encoded: Encoded, to: Request[Any] | None = None) -> Any:
    """The request, or the answer to one; None if it is none."""
    try:
        return WIRE.decode_request(encoded) if to is None else WIRE.decode_answer(encoded, type(to))
    except ValueError:
        return None


def same(a: Any, b: Any) -> bool:
    """Whether two messages say the same."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and same([*msgspec.structs.astuple(a)], [*msgspec.structs.astuple(b)])
    return bool(a == b)
