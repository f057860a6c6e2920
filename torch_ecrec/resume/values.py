"""Values as bytes: a snapshot keeps by them whatever a user's object returns as its state.

`decode(encode(value, name))` is `value` again: of the same type at every place, equal bit for bit, dicts in their
order. What would not come back like that is refused by name when it is encoded, and nothing is left out:

    encode({"history": [1, 2, model]}, "progress")
    TypeError: progress['history'][2]: a torch.nn.modules.linear.Linear cannot be kept: ...

Kept are None, numbers (Python's of any size, NumPy's), strings, bytes, Python's own containers, and arrays and tensors
with their dtype, shape and order in memory. Not kept is what a value is to others: two references to one list come back
as two lists that are equal, a tensor comes back without its `.grad`. Tensors of a CUDA device come back on the device
that `decode` is told, by default the process's current one: another rank has another device.

The bytes are one MessagePack value. None, bools, integers of 64 bits, floats, strings and bytes are MessagePack's own;
everything else is an array that begins with a tag (`_LIST` and those after it): [3, "a", 1] is the dict {"a": 1}. Bytes
may come from anywhere: `decode` builds values of the types above or raises ValueError; it runs no code of theirs, and
takes no more memory than in proportion to what has really come.

Tensors of a size that matters can be kept apart (`TensorsOut`, `TensorsIn`): their bytes then lie one behind the other
in a stream of the caller's, and what is encoded says where. Does not say who keeps what: `dense.py` and
`nn/attachment.py` do.
"""

from __future__ import annotations

import functools
import math
import re
import reprlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torch_ecrec.resume.tensor_bytes import TensorsIn, TensorsOut, bytes_of, from_bytes, order_of

DEPTH_MOST = 100  # of containers within containers; also what ends a value that contains itself

# Tags. Their numbers are the format: new ones are added at the end.
(
    _LIST,
    _TUPLE,
    _SET,
    _DICT,
    _FROZENSET,
    _ORDERED_DICT,
    _COUNTER,
    _DEFAULT_DICT,
    _DEQUE,
    _INT,
    _STR,
    _COMPLEX,
    _BYTEARRAY,
    _RANGE,
    _ARRAY,
    _SCALAR,
    _TENSOR,
    _SIZE,
    _DTYPE,
    _DEVICE,
) = range(20)

_SEQUENCES: dict[int, Any] = {_LIST: list, _TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
_DICTS: dict[int, Any] = {_DICT: dict, _ORDERED_DICT: OrderedDict, _COUNTER: lambda pairs: Counter(dict(pairs))}
_SEQUENCE_TAGS: dict[type, int] = {kind: tag for tag, kind in _SEQUENCES.items()}
_DICT_TAGS: dict[type, int] = {dict: _DICT, OrderedDict: _ORDERED_DICT, Counter: _COUNTER}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}

# Bits of a tensor's flags.
_REQUIRES_GRAD, _IS_PARAMETER, _ON_CUDA = 1, 2, 4

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if type(dtype) is torch.dtype}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WHOLE_BYTES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|bfloat16|float8_\w+|complex(32|64|128)")
_OF_TENSORS = {name: dtype for name, dtype in _DTYPES.items() if _WHOLE_BYTES.fullmatch(name)}

# Numbers by their character (two C types may have as many bits), where in this machine's byte order; all else as NumPy
# spells it.
_NUMPY_NAME = re.compile(r"[?bhilqBHILQefdgFDG]|[<>|][biufcSUV]\d{1,9}|[<>][mM]8(\[\d{0,9}[YMWDhmsunpfa]s?\])?")

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SURELY_PLAIN = _PLAIN - {int, str}  # an int may be too large for MessagePack, a string no Unicode

_T = TypeVar("_T")
# Depth, path of the container, the value; and its place: how places there are spelled, which, among which items.
_Spell = Callable[[int, list[Any]], str]
_Path = tuple[int, Any, object, _Spell, int, list[Any]]


# encoding -----------------------------------------------------------------------------------------


def encode(value: object, name: str, tensors: TensorsOut | None = None) -> bytes:
    """Returns the bytes of a value.

    Args:
        value: not changed. May be nested `DEPTH_MOST` deep.
        name: what errors call it.
        tensors: where tensors are put instead; the bytes then say where there. None: among the bytes.

    Raises:
        TypeError: something in it cannot be kept; says what and where.
    """
    try:
        return _packed(value, name, tensors, _PLAIN)
    except (OverflowError, UnicodeEncodeError):
        return _packed(value, name, tensors, _SURELY_PLAIN)  # every integer and string is looked at


def _packed(value: object, name: str, tensors: TensorsOut | None, plain: frozenset[type]) -> bytes:
    node = _Encoder(tensors, plain).node(value, (0, None, value, lambda i, items: name, 0, []))
    try:
        return msgspec.msgpack.encode(node)
    except (OverflowError, UnicodeEncodeError):
        raise
    except ValueError as error:
        raise TypeError(f"{name}: cannot be kept, a piece of it is too large: {error}") from error


class _Encoder:
    """Encodes values as plain nodes (see the module).

    Args:
        tensors: see `encode`.
        plain: types whose values MessagePack takes as they are.
    """

    def __init__(self, tensors: TensorsOut | None, plain: frozenset[type]) -> None:
        self.tensors, self.plain = tensors, plain

    def node(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if kind in self.plain:
            return value
        make = _NODES.get(kind)
        if make is not None:
            return make(self, value, path)
        if isinstance(value, np.generic):
            return self._scalar(value, path)
        raise _refusal(value, path)

    def _items(self, node: list[Any], items: Iterable[Any], path: _Path, spell: _Spell) -> list[Any]:
        """Appends the nodes of some items to `node`, and returns it."""
        depth = path[0]
        if depth > DEPTH_MOST:
            raise _too_deep(path)
        items = list(items)
        if self.plain.issuperset(map(type, items)):
            node += items
            return node
        plain, depth = self.plain, depth + 1
        for i, item in enumerate(items):
            node.append(item if type(item) in plain else self.node(item, (depth, path, item, spell, i, items)))
        return node

    def _list(self, value: list[Any] | tuple[Any, ...], path: _Path) -> list[Any]:
        return self._items([_SEQUENCE_TAGS[type(value)]], value, path, _in_list)

    def _set(self, value: set[Any] | frozenset[Any], path: _Path) -> list[Any]:
        _check_keys(value, path)
        return self._items([_SEQUENCE_TAGS[type(value)]], value, path, _in_set)

    def _dict(self, value: dict[Any, Any], path: _Path) -> list[Any]:
        return self._pairs([_DICT_TAGS[type(value)]], value, path)

    def _default_dict(self, value: defaultdict[Any, Any], path: _Path) -> list[Any]:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORY_NAMES:
            raise _refusal(value, path, f"a defaultdict of {reprlib.repr(factory)}")
        return self._pairs([_DEFAULT_DICT, None if factory is None else _FACTORY_NAMES[factory]], value, path)

    def _pairs(self, node: list[Any], value: dict[Any, Any], path: _Path) -> list[Any]:
        _check_keys(value, path)
        return self._items(node, chain.from_iterable(value.items()), path, _in_dict)

    def _deque(self, value: deque[Any], path: _Path) -> list[Any]:
        return self._items([_DEQUE, value.maxlen], value, path, _in_list)

    def _int(self, value: int, path: _Path) -> Any:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return [_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]

    def _str(self, value: str, path: _Path) -> Any:
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            return [_STR, value.encode("utf-8", "surrogatepass")]
        return value

    def _complex(self, value: complex, path: _Path) -> list[Any]:
        return [_COMPLEX, value.real, value.imag]

    def _bytearray(self, value: bytearray, path: _Path) -> list[Any]:
        return [_BYTEARRAY, bytes(value)]

    def _range(self, value: range, path: _Path) -> list[Any]:
        return self._items([_RANGE], (value.start, value.stop, value.step), path, _in_list)

    def _array(self, value: NDArray[Any], path: _Path) -> list[Any]:
        name = _numpy_name(value.dtype, value.dtype.char)
        if name is None:
            raise _refusal(value, path, f"a NumPy array of dtype {value.dtype}")
        fortran = not value.flags.c_contiguous and value.flags.f_contiguous
        return [_ARRAY, name, fortran, value.tobytes("F" if fortran else "C"), *value.shape]

    def _scalar(self, value: np.generic, path: _Path) -> list[Any]:
        if type(value) is np.str_ or type(value) is np.bytes_:  # arrays, and str(), forget zeros at their ends
            inner = "".join(value) if isinstance(value, np.str_) else b"".join((value,))
            return [_SCALAR, "U" if isinstance(value, np.str_) else "S", self.node(inner, path)]
        name = _numpy_name(value.dtype, value.dtype.char)
        if name is None or type(value) is not value.dtype.type:
            raise _refusal(value, path)
        return [_SCALAR, name, value.tobytes()]

    def _tensor(self, value: Tensor, path: _Path) -> list[Any]:
        reason = unfit(value)
        if reason is not None:
            raise _refusal(value, path, reason)
        flags = _REQUIRES_GRAD * value.requires_grad + _IS_PARAMETER * (type(value) is nn.Parameter)
        if not value.is_cpu:
            flags += _ON_CUDA
        if self.tensors is not None:
            data: Any = self.tensors.add(value)
        else:
            data = bytes_of(value).cpu().numpy().tobytes()
        return [_TENSOR, _DTYPE_NAMES[value.dtype], flags, data, order_of(value), *value.shape]

    def _size(self, value: torch.Size, path: _Path) -> list[Any]:
        return [_SIZE, *value]

    def _dtype(self, value: torch.dtype, path: _Path) -> list[Any]:
        return [_DTYPE, _DTYPE_NAMES[value]]

    def _device(self, value: torch.device, path: _Path) -> list[Any]:
        return [_DEVICE, value.type, value.index]


_NODES: dict[type, Callable[[_Encoder, Any, _Path], Any]] = {
    list: _Encoder._list,
    tuple: _Encoder._list,
    set: _Encoder._set,
    frozenset: _Encoder._set,
    dict: _Encoder._dict,
    OrderedDict: _Encoder._dict,
    Counter: _Encoder._dict,
    defaultdict: _Encoder._default_dict,
    deque: _Encoder._deque,
    int: _Encoder._int,
    str: _Encoder._str,
    complex: _Encoder._complex,
    bytearray: _Encoder._bytearray,
    range: _Encoder._range,
    np.ndarray: _Encoder._array,
    Tensor: _Encoder._tensor,
    nn.Parameter: _Encoder._tensor,
    torch.Size: _Encoder._size,
    torch.dtype: _Encoder._dtype,
    torch.device: _Encoder._device,
}


def unfit(tensor: Tensor) -> str | None:
    """Returns why a tensor cannot be kept, as "a tensor that ..."; None if it can."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return f"a tensor of class {_class_name(tensor)}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if not tensor.is_cpu and not tensor.is_cuda:
        return f"a tensor on device {tensor.device.type}"
    if _DTYPE_NAMES[tensor.dtype] not in _OF_TENSORS:
        return f"a tensor of dtype {tensor.dtype}"
    if tensor.grad_fn is not None:
        return "a tensor with a graph behind it (detach it)"
    return None


@functools.lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[Any], char: str) -> str | None:
    """Returns a name that gives this dtype again, or None. `char` is the dtype's: those of two C types may be equal."""
    name = char if dtype.kind in "biufc" and dtype.isnative else dtype.str
    return name if _NUMPY_NAME.fullmatch(name) and dtype.itemsize and np.dtype(name) == dtype else None


def _check_keys(keys: Iterable[Any], path: _Path) -> None:
    """Refuses tensors as keys: they are found by identity, and come back as other objects."""
    for key in keys:
        kind = type(key)
        if kind is tuple or kind is frozenset:
            _check_keys(key, path)
        elif kind not in _PLAIN and isinstance(key, Tensor):
            raise _refusal(key, path, "a tensor as key")


# errors -------------------------------------------------------------------------------------------


def _in_list(i: int, items: list[Any]) -> str:
    return f"[{i}]"


def _in_dict(i: int, items: list[Any]) -> str:
    return f"[{reprlib.repr(items[i - 1])}]" if i % 2 else f" key {reprlib.repr(items[i])}"


def _in_set(i: int, items: list[Any]) -> str:
    return f" element {reprlib.repr(items[i])}"


def _spelled(path: _Path) -> str:
    places: list[str] = []
    step: _Path | None = path
    while step is not None:
        _, above, _, spell, i, items = step
        places.append(spell(i, items))
        step = above
    if len(places) > 16:
        places[8:-8] = ["..."]
    return "".join(reversed(places))


def _class_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: object, path: _Path, what: str | None = None) -> TypeError:
    return TypeError(
        f"{_spelled(path)}: {what or f'a {_class_name(value)}'} cannot be kept: only None, numbers, strings, bytes,"
        " Python's own containers, NumPy arrays and dense tensors can; leave it out of the state, or put in what it is"
        " made of"
    )


def _too_deep(path: _Path) -> TypeError:
    above, step = set(), path[1]
    while step is not None:
        above.add(id(step[2]))
        step = step[1]
    why = "contains itself" if id(path[2]) in above else f"is nested more than {DEPTH_MOST} deep"
    return TypeError(f"{_spelled(path)}: a {_class_name(path[2])} that {why} cannot be kept")


# decoding -----------------------------------------------------------------------------------------


def decode(data: bytes | memoryview, tensors: TensorsIn | None = None, device: torch.device | str | None = None) -> Any:
    """Returns the value that some bytes encode: new objects that share nothing with `data`.

    Args:
        data: what `encode` gave, or anything.
        tensors: where the tensors are that were kept apart.
        device: where tensors come back that were on a CUDA device. None: the current one; without CUDA, the CPU.

    Raises:
        ValueError: these bytes are of no value.
    """
    try:
        return _Decoder(tensors, device).value(msgspec.msgpack.decode(data), 0)
    except (TypeError, LookupError, OverflowError, RuntimeError, AttributeError) as error:
        raise ValueError(f"not an encoded value: {error}") from error


class _Decoder:
    """Decodes nodes to values. Here, or by what is made of it, each node is checked."""

    def __init__(self, tensors: TensorsIn | None, device: torch.device | str | None) -> None:
        self.tensors, self.device = tensors, device

    def value(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind in _PLAIN:
            return node
        if kind is not list or not node or type(node[0]) is not int or node[0] not in _VALUES:
            raise ValueError("not an encoded value: unknown kind")
        if depth > DEPTH_MOST + 1:  # numbers and strings may have a tag, too
            raise ValueError("not an encoded value: nested too deep")
        return _VALUES[node[0]](self, node, depth)

    def _items(self, items: list[Any], depth: int) -> list[Any]:
        if _PLAIN.issuperset(map(type, items)):
            return items
        return [self.value(item, depth + 1) for item in items]

    def _sequence(self, node: list[Any], depth: int) -> Any:
        return _SEQUENCES[node[0]](self._items(node[1:], depth))

    def _pairs(self, items: list[Any], depth: int) -> Any:
        items = self._items(items, depth)
        return zip(items[::2], items[1::2], strict=True)

    def _dict(self, node: list[Any], depth: int) -> Any:
        return _DICTS[node[0]](self._pairs(node[1:], depth))

    def _default_dict(self, node: list[Any], depth: int) -> Any:
        factory = None if node[1] is None else _FACTORIES[node[1]]
        return defaultdict(factory, self._pairs(node[2:], depth))

    def _deque(self, node: list[Any], depth: int) -> Any:
        return deque(self._items(node[2:], depth), None if node[1] is None else _checked(node[1], int))

    def _int(self, node: list[Any], depth: int) -> Any:
        return int.from_bytes(_only(node, bytes), "little", signed=True)

    def _str(self, node: list[Any], depth: int) -> Any:
        return _only(node, bytes).decode("utf-8", "surrogatepass")

    def _complex(self, node: list[Any], depth: int) -> Any:
        _, real, imag = node
        return complex(_checked(real, float), _checked(imag, float))

    def _bytearray(self, node: list[Any], depth: int) -> Any:
        return bytearray(_only(node, bytes))

    def _range(self, node: list[Any], depth: int) -> Any:
        start, stop, step = self._items(node[1:], depth)
        return range(_checked(start, int), _checked(stop, int), _checked(step, int))

    def _array(self, node: list[Any], depth: int) -> Any:
        _, name, fortran, data, *shape = node
        dtype = _numpy_dtype(name)
        if math.prod(_checked_shape(shape)) * dtype.itemsize != len(_checked(data, bytes)):
            raise ValueError(f"an array of shape {tuple(shape)}, {dtype}, of {len(data)} bytes")
        order: Any = "F" if fortran is True else "C"
        return np.ndarray(tuple(shape), dtype, data, 0, None, order).copy("K")

    def _scalar(self, node: list[Any], depth: int) -> Any:
        _, name, data = node
        if name == "U":
            return np.str_(_checked(self.value(data, depth + 1), str))
        if name == "S":
            return np.bytes_(_checked(data, bytes))
        dtype = _numpy_dtype(name)
        if dtype.itemsize != len(_checked(data, bytes)):
            raise ValueError(f"a scalar of {dtype} of {len(data)} bytes")
        return np.ndarray((), dtype, data).copy()[()]

    def _tensor(self, node: list[Any], depth: int) -> Any:
        _, name, flags, data, order, *sizes = node
        dtype, shape = _OF_TENSORS[name], _checked_shape(sizes)
        order = _checked(order, list)
        if order:
            if sorted(order) != list(range(len(shape))):
                raise ValueError(f"a tensor's dimensions in order {order}")
            shape = tuple(shape[d] for d in order)
        if not 0 <= _checked(flags, int) < 8 or (flags & _REQUIRES_GRAD and not _may_require_grad(dtype)):
            raise ValueError(f"a tensor with flags {flags}")
        size = math.prod(shape) * dtype.itemsize
        if type(data) is int and self.tensors is not None:
            known = (data, size, name, flags, tuple(order), shape)
            if known not in self.tensors.made or not size:
                tensor = from_bytes(self.tensors.bytes_at(data, size), dtype, shape)
                self.tensors.made[known] = self._placed(tensor, flags, order)
            return self.tensors.made[known]
        array = np.frombuffer(bytearray(_checked(data, bytes)), np.uint8)
        if size != len(array):
            raise ValueError(f"a tensor of shape {shape}, {dtype}, of {len(array)} bytes")
        return self._placed(from_bytes(torch.from_numpy(array), dtype, shape), flags, order)

    def _placed(self, tensor: Tensor, flags: int, order: list[int]) -> Tensor:
        if order:
            tensor = tensor.permute([order.index(d) for d in range(len(order))])
        if flags & _ON_CUDA:
            device = self.device
            if device is None and torch.cuda.is_available():
                device = "cuda"
            if device is not None:
                tensor = tensor.to(device)
        if flags & _IS_PARAMETER:
            return nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
        return tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor

    def _size(self, node: list[Any], depth: int) -> Any:
        return torch.Size(_checked_shape(node[1:]))

    def _dtype(self, node: list[Any], depth: int) -> Any:
        return _DTYPES[_only(node, str)]

    def _device(self, node: list[Any], depth: int) -> Any:
        _, kind, index = node
        if not re.fullmatch("[a-z]{1,16}", _checked(kind, str)) or (index is not None and not 0 <= index < 256):
            raise ValueError(f"device {kind} {index}")
        try:
            return torch.device(kind) if index is None else torch.device(kind, _checked(index, int))
        except RuntimeError as error:
            raise ValueError(f"device {kind} {index}") from error


_VALUES: dict[int, Callable[[_Decoder, list[Any], int], Any]] = {
    **dict.fromkeys(_SEQUENCES, _Decoder._sequence),
    **dict.fromkeys(_DICTS, _Decoder._dict),
    _DEFAULT_DICT: _Decoder._default_dict,
    _DEQUE: _Decoder._deque,
    _INT: _Decoder._int,
    _STR: _Decoder._str,
    _COMPLEX: _Decoder._complex,
    _BYTEARRAY: _Decoder._bytearray,
    _RANGE: _Decoder._range,
    _ARRAY: _Decoder._array,
    _SCALAR: _Decoder._scalar,
    _TENSOR: _Decoder._tensor,
    _SIZE: _Decoder._size,
    _DTYPE: _Decoder._dtype,
    _DEVICE: _Decoder._device,
}


def _checked(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise ValueError(f"not an encoded value: {kind.__name__} expected, got {type(value).__name__}")
    return value


def _only(node: list[Any], kind: type[_T]) -> _T:
    _, value = node
    return _checked(value, kind)


def _checked_shape(sizes: list[Any]) -> tuple[int, ...]:
    if len(sizes) > 64 or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError(f"shape {reprlib.repr(sizes)}")
    return tuple(sizes)


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if not _NUMPY_NAME.fullmatch(_checked(name, str)):
        raise ValueError(f"NumPy dtype {reprlib.repr(name)}")
    dtype: np.dtype[Any] = np.dtype(name)
    if not dtype.itemsize:  # any number of such items has no bytes
        raise ValueError(f"NumPy dtype {name}")
    return dtype


def _may_require_grad(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
