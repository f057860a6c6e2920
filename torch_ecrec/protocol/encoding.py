"""Messages as bytes, and their tensors beside them: what the transports carry.

    Lookup(slot=2, ..., positions=[p, q])   <->   ["Lookup", 2, ..., [0, 1], ...] as MessagePack, and [p, q]

How tensors travel is the transport's business; in the bytes each is the number of its place among them. Reading is
validating: nothing but a message of `wire` comes out, with values that are what their declarations say, dtype and rank
of tensors included. What the values mean, say that a position is one of a slot's, is for those who know the job:
`wellformed.py`.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
import threading
import types
import typing
from collections.abc import Collection
from typing import Any

import msgspec
from torch import Tensor

from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import A, Answer, Malformed, Refused, Request

Encoded = tuple[bytes, list[Tensor]]

_Kinds = dict[str, type[Any]]

_AT_FIELD = re.compile(r"\$\[(\d+)\]")  # as msgspec says where in an array something is wrong


def answers_of(kind: type[Request[Any]]) -> tuple[type[Answer], ...]:
    """Returns the classes that a request declares as its answers; `Refused` and `Malformed` may come instead of any."""
    (declared,) = (base for base in vars(kind)["__orig_bases__"] if typing.get_origin(base) is Request)
    (answers,) = typing.get_args(declared)
    return typing.get_args(answers) or (answers,)


class Vocabulary:
    """Requests and their answers, written and read. From any thread.

    Args:
        requests: the classes; their names must differ, those of their answers too.
    """

    def __init__(self, requests: Collection[type[Request[Any]]]) -> None:
        self.requests: _Kinds = {kind.__name__: kind for kind in requests}
        self.answers_to: dict[type[Request[Any]], tuple[type[Answer], ...]] = {
            kind: (*answers_of(kind), Refused, Malformed) for kind in requests
        }
        self.answers: _Kinds = {kind.__name__: kind for answers in self.answers_to.values() for kind in answers}
        self._classes = frozenset((*self.requests.values(), *self.answers.values()))
        self._readers = threading.local()

    def encode(self, message: Request[Any] | Answer) -> tuple[Encoded, int]:
        """Returns a message as bytes and tensors, and the number of bytes in its tensors.

        Tensors are shared with the message, not copied, unless they are strided: leave them unchanged until the call
        has ended.

        Raises:
            TypeError: it is none of this vocabulary, or holds something else than plain values and tensors.
            ValueError: a number has more than 64 bits.
        """
        kind = type(message)
        if kind not in self._classes:
            raise TypeError(f"`message` must be of a class in wire.py, got {kind.__name__}")
        tensors: list[Tensor] = []

        def leave_out(value: Any) -> int:
            if not isinstance(value, Tensor):
                raise TypeError(f"a message holds plain values and tensors, got {type(value).__name__}")
            tensors.append(_on_cpu(value))
            return len(tensors) - 1

        try:
            body = msgspec.msgpack.encode(message, enc_hook=leave_out)
        except OverflowError as error:
            raise ValueError(f"{error}") from error
        return (body, tensors), sum([tensor.nbytes for tensor in tensors])

    def decode_request(self, encoded: Encoded) -> Request[Any]:
        """Raises ValueError if it is none."""
        request: Request[Any] = self._read(encoded, None, self.requests)
        return request

    def decode_answer(self, encoded: Encoded, kind: type[Request[A]]) -> A | Refused:
        """Returns the answer to a request of that class. Raises ValueError if it is none that the class declares."""
        answer: A | Refused = self._read(encoded, kind, self.answers)
        return answer

    def _read(self, encoded: Encoded, kind: type[Request[Any]] | None, known: _Kinds) -> Any:
        try:
            readers = self._readers.by_kind
        except AttributeError:  # the first of this thread
            readers = self._readers.by_kind = {}
        reader = readers.get(kind)
        if reader is None:
            reader = readers[kind] = _Reader(self.answers_to[kind] if kind else tuple(self.requests.values()))
        try:
            return reader.read(*encoded)
        except (msgspec.MsgspecError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(_why(encoded[0], kind, known, error)) from error


class _Reader:
    """Reads messages of some classes, on one thread."""

    def __init__(self, kinds: tuple[type[Any], ...]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            functools.reduce(operator.or_, kinds), dec_hook=self._take
        )
        self._tensors: list[Tensor] = []
        self._taken = 0  # of those

    def read(self, body: bytes, tensors: list[Tensor]) -> Any:
        self._tensors, self._taken = tensors, 0
        try:
            message = self._decoder.decode(body)
            if self._taken != len(tensors):
                raise ValueError(f"{len(tensors)} tensors came, and it has {self._taken}")
            return message
        finally:
            self._tensors = []  # they live as long as the message

    def _take(self, kind: Any, which: Any) -> Tensor:
        if type(which) is not int or which != self._taken or which >= len(self._tensors):
            raise ValueError(f"must be tensor {self._taken} of {len(self._tensors)}")
        self._taken += 1
        tensor = self._tensors[which]
        if tensor.dtype not in kind.dtypes or tensor.dim() != kind.rank:
            raise ValueError(f"must have {kind}, got {tensor.dim()}-D {str(tensor.dtype)[6:]}")
        return tensor


def _why(body: bytes, kind: type[Request[Any]] | None, known: _Kinds, error: Exception) -> str:
    """Returns what is wrong with a message, with the names of its class and field instead of numbers."""
    try:
        fields = msgspec.msgpack.decode(body)
        name = fields[0]
        found = known.get(name)
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError):  # no array, or of no name
        return f"not a message: {error}"
    if found is None:
        return f"unknown message {str(name)[:40]!r}"
    if kind is not None and not issubclass(found, (*answers_of(kind), Refused)):
        wanted = " or ".join(answer.__name__ for answer in answers_of(kind))
        return f"{name} is no answer to a {kind.__name__}: {wanted} is"

    def named(match: re.Match[str]) -> str:
        names: tuple[str, ...] = found.__struct_fields__
        which = int(match[1]) - 1
        return names[which] if 0 <= which < len(names) else match[0]

    return f"not a {name}: {_AT_FIELD.sub(named, str(error), count=1)}"


def _on_cpu(tensor: Tensor) -> Tensor:
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = tensor.detach()
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()


def _requests_of(module: types.ModuleType) -> list[type[Request[Any]]]:
    return [
        found
        for found in vars(module).values()
        if inspect.isclass(found) and issubclass(found, Request) and found is not Request
    ]


WIRE = Vocabulary(_requests_of(wire))
