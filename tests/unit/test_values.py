"""Values as bytes: what comes back is the same, type for type and bit for bit; the rest is refused by name; no bytes do
harm.
"""

from __future__ import annotations

import enum
import math
import pickle
import random
import struct
import tracemalloc
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, lr_scheduler

from torch_ecrec.resume import values
from torch_ecrec.resume.tensor_bytes import TensorsIn, TensorsOut, bytes_of, order_of
from torch_ecrec.resume.values import DEPTH_MOST, decode, encode

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.bool, torch.uint8]
DTYPES += [torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def assert_same(got: Any, wanted: Any, where: str = "value") -> None:
    """Of the same type everywhere, and equal bit for bit."""
    assert type(got) is type(wanted), f"{where}: {type(got)} is not {type(wanted)}"
    if isinstance(wanted, float):
        assert struct.pack("d", got) == struct.pack("d", wanted), where
    elif isinstance(wanted, complex):
        assert struct.pack("2d", got.real, got.imag) == struct.pack("2d", wanted.real, wanted.imag), where
    elif isinstance(wanted, (list, tuple, deque)):
        assert len(got) == len(wanted) and getattr(got, "maxlen", None) == getattr(wanted, "maxlen", None), where
        for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(wanted, dict):
        assert len(got) == len(wanted), where
        assert getattr(got, "default_factory", None) is getattr(wanted, "default_factory", None), where
        for (a, x), (b, y) in zip(got.items(), wanted.items(), strict=True):  # in order
            assert_same(a, b, f"{where} key {b!r}")
            assert_same(x, y, f"{where}[{b!r}]")
    elif isinstance(wanted, (set, frozenset)):
        assert spelled(got) == spelled(wanted), where
    elif isinstance(wanted, np.ndarray):
        assert (got.dtype, got.dtype.char, got.shape) == (wanted.dtype, wanted.dtype.char, wanted.shape), where
        assert got.tobytes() == wanted.tobytes() and got.flags.writeable, where
        assert got.flags.f_contiguous == wanted.flags.f_contiguous or not wanted.flags.forc, where
    elif isinstance(wanted, np.generic):
        assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), where
    elif isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape, got.device) == (wanted.dtype, wanted.shape, wanted.device), where
        assert got.requires_grad == wanted.requires_grad and order_of(got) == order_of(wanted), where
        assert torch.equal(bytes_of(got), bytes_of(wanted)), where
    else:
        assert got == wanted, where


def spelled(key: Any) -> str:
    """A key with its types, whatever the order of its sets, whether or not it equals itself."""
    if isinstance(key, (set, frozenset)):
        return f"{type(key).__name__}{sorted(map(spelled, key))}"
    return f"({', '.join(map(spelled, key))})" if isinstance(key, tuple) else repr(key)


def there_and_back(value: Any) -> bytes:
    data = encode(value, "value")
    back = decode(data)
    assert_same(back, value)
    assert_same(decode(memoryview(data)), value)
    return data


def nan(bits: int) -> float:
    found: float = struct.unpack("d", struct.pack("Q", bits))[0]
    return found


PLAIN = [None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**400, -(10**400), 255, 256]
PLAIN += [
    0.0,
    -0.0,
    1.5,
    math.inf,
    -math.inf,
    nan(0x7FF8000000000123),
    nan(0xFFF8000000000001),
    nan(0x7FF0000000000001),
]
PLAIN += [1j, complex(-0.0, math.nan), complex(math.inf, -0.0), "", "ä", "\0", "\ud800", "a\udfffé", b"", b"\0\xff"]
PLAIN += [bytearray(b"ab"), range(3), range(5, -(2**70), -2)]
CONTAINERS: list[Any] = [[], [1, [2, (3, ())]], (1, 1.0, True, None), [1] * 1000, tuple(range(625)), [2**70, 1]]
CONTAINERS += [{}, {"b": 1, "a": 2}, {1: "x", (1, (2, "y")): [3], None: 4, b"k": 5, frozenset({1}): 6, 2.5: {}}]
CONTAINERS += [{True: 1, 2: 3}, OrderedDict([("b", 1), ("a", [2])]), Counter("abca"), Counter({3: 2, "x": -1})]
CONTAINERS += [defaultdict(list, {"x": [1]}), defaultdict(None, {1: 2}), defaultdict(dict), defaultdict(float, a=1.0)]
CONTAINERS += [deque([1, [2]], maxlen=4), deque(), deque(maxlen=0), {1, 2, "x"}, set(), frozenset({(1, 2), None})]
CONTAINERS += [{"\ud800": "x", "y": 2**64}, [["\ud800"]], {2**80: {2**81}}]
SCALARS: list[Any] = [np.dtype(c).type(1) for c in "?bhilqBHILQefdgFDG"]
SCALARS += [np.float32(0.1), np.float64(-0.0), np.longdouble(1) / 3, np.str_("a\0"), np.str_(""), np.bytes_(b"a\0")]
SCALARS += [np.datetime64("2026-01-02T03", "ns"), np.timedelta64(3, "D"), np.void(b"ab\0"), np.float16(np.nan)]
SCALARS += [np.str_("\ud800"), np.datetime64("NaT")]
ARRAYS: list[Any] = [np.arange(6, dtype=c).reshape(2, 3) for c in "bhilqBHILQefdgFDG"]
ARRAYS += [
    np.array([True, False]),
    np.array(3.5),
    np.zeros((0, 3)),
    np.zeros((2, 0, 5), np.int8),
    np.array(["a", "bcd"]),
]
ARRAYS += [np.array([b"a", b"bc"]), np.array(["2026-01-01"], "M8[D]"), np.arange(3, dtype="m8[5us]"), np.zeros(2, "V3")]
ARRAYS += [np.arange(6.0).reshape(2, 3).T, np.asfortranarray(np.arange(24).reshape(2, 3, 4)), np.arange(10)[::3]]
ARRAYS += [np.arange(3, dtype=">i4"), np.arange(3, dtype=">f8"), np.zeros(3, "U0"), np.arange(12).reshape(3, 4)[:, 1:3]]
TENSORS: list[Any] = [torch.arange(6).reshape(2, 3).to(torch.float32).to(dtype) for dtype in DTYPES]
TENSORS += [
    torch.tensor(2.5),
    torch.tensor(True),
    torch.zeros(0),
    torch.zeros(2, 0, 3),
    torch.rand(3, requires_grad=True),
]
TENSORS += [nn.Parameter(torch.rand(2, 2)), nn.Parameter(torch.rand(2), requires_grad=False), torch.rand(2, 3).T]
TENSORS += [torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.rand(6)[::2], torch.rand(1).expand(3)]
TENSORS += [torch.rand(3, dtype=torch.complex64).conj(), torch.rand(2, 3, 4).permute(2, 0, 1), torch.tensor(math.nan)]
TENSORS += [torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.qint8, torch.device("cpu")]
TENSORS += [torch.device("cuda:3"), torch.device("cuda"), torch.device("meta")]


@pytest.mark.parametrize("kind", ["plain", "containers", "scalars", "arrays", "tensors"])
def test_what_can_be_kept_comes_back(kind: str) -> None:
    for value in {"plain": PLAIN, "containers": CONTAINERS, "scalars": SCALARS, "arrays": ARRAYS, "tensors": TENSORS}[
        kind
    ]:
        there_and_back(value)
        there_and_back({"in": [value, (value,)]})
    everything: Any = [PLAIN, CONTAINERS, SCALARS, ARRAYS, TENSORS]
    there_and_back(everything)


def test_what_a_decoded_value_shares_is_nothing() -> None:
    array, tensor, listed = np.arange(3), torch.arange(3), [1]
    data = bytearray(encode([array, tensor, listed, listed], "value"))
    back = decode(memoryview(data))
    data[:] = bytes(len(data))
    assert_same(back, [array, tensor, listed, listed])
    back[0][0] = back[1][0] = 9  # both may be written to
    assert back[2] is not back[3]  # a list that was there twice is two lists


def test_a_nan_among_keys_comes_back() -> None:
    back = decode(encode({math.nan: 1, 2: 3}, "value"))
    assert list(back.values()) == [1, 3] and math.isnan(next(iter(back)))


# what users' states are made of -------------------------------------------------------------------


def typical_own_state() -> dict[str, Any]:
    """Much like what a trainer keeps beside the model."""
    random.seed(3)
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    reader = {"draws": 17, "state": {"epoch": 2, "iterator": {"yielded": 34, "rng": torch.get_rng_state()}}}
    return {"forwards": 17, "random": states, "reader": reader, "stateful": {"lr_scheduler[0]": {"base_lrs": [0.1]}}}


def test_random_states_go_on_where_they_were() -> None:
    there_and_back(typical_own_state())
    back = decode(encode([random.getstate(), np.random.get_state(), torch.get_rng_state()], "random"))
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    random.setstate(back[0])
    np.random.set_state(back[1])
    torch.set_rng_state(back[2])
    assert drawn == [random.random(), np.random.rand(), torch.rand(1).item()]
    for generator in (np.random.default_rng(5), np.random.Generator(np.random.MT19937(5))):
        data = there_and_back(generator.bit_generator.state)  # a PCG64 has integers of 128 bits
        drawn = generator.random(3).tolist()
        generator.bit_generator.state = decode(data)
        assert drawn == generator.random(3).tolist()


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: np.float32(0.9) ** t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, np.float32(0.9)),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 1)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_come_back(name: str) -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
    scheduler = SCHEDULERS[name](optimizer)
    for loss in (3.0, 2.0, 2.0, 2.0):
        optimizer.step()
        scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))
    state = decode(there_and_back(scheduler.state_dict()))
    SCHEDULERS[name](SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)).load_state_dict(state)


def test_the_state_of_a_stateful_loader_comes_back() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    for workers in (0, 1):
        loader = loaders.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True, num_workers=workers)
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = there_and_back(loader.state_dict())
        rest = [batch.tolist() for batch in iterator]
        other = loaders.StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True, num_workers=workers)
        other.load_state_dict(decode(state))
        assert [batch.tolist() for batch in other] == rest


# refused ------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Words(dict):  # type: ignore[type-arg]
    """A dict that may do anything."""


class Ones(torch.Tensor):
    """A tensor that may do anything."""


Pair = namedtuple("Pair", "a b")
with warnings.catch_warnings():  # of torch, of layouts and dtypes
    warnings.simplefilter("ignore")
    SPARSE, QUANTIZED = torch.eye(2).to_sparse_csr(), torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
REFUSED: dict[str, Any] = {
    "builtin_function_or_method": print,
    "function": typical_own_state,
    "object": object(),
    "test_values.Colour": Colour.RED,
    "test_values.Words": Words(),
    "test_values.Pair": Pair(1, 2),
    "a NumPy array of dtype object": np.array([None]),
    r"a NumPy array of dtype \[\('a', '<i4'\)\]": np.zeros(2, [("a", "i4")]),
    "numpy.void": np.zeros(2, [("a", "i4")])[0],
    r"a NumPy array of dtype \|V0": np.empty(2, "V0"),
    "numpy.ma.MaskedArray": np.ma.array([1]),
    "numpy.random._generator.Generator": np.random.default_rng(0),
    "a tensor of layout sparse_coo": torch.eye(2).to_sparse(),
    "a tensor of layout sparse_csr": SPARSE,
    "a tensor on device meta": torch.zeros(2, device="meta"),
    "test_values.Ones": torch.ones(2).as_subclass(Ones),
    "a tensor of dtype torch.quint8": QUANTIZED,
    "a tensor with a graph behind it": torch.ones(2, requires_grad=True) * 2,
    "a defaultdict of <function": defaultdict(lambda: 3),
    "a tensor as key": {torch.ones(1): 2},
    "memoryview": memoryview(b""),
    f"{type(Path()).__module__}.PosixPath": Path("x"),
    "torch.nn.modules.linear.Linear": nn.Linear(1, 1),
    "torch._C.Generator": torch.Generator(),
    "type": int,
    "slice": slice(1),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(what: str) -> None:
    bad = REFUSED[what]
    for value, place in [
        (bad, r"progress"),
        ({"history": [1, 2, 3, bad]}, r"progress\['history'\]\[3\]"),
        ({"x": {(1, "y"): deque([bad])}}, r"progress\['x'\]\[\(1, 'y'\)\]\[0\]"),
        ({"\ud800": [2**70, bad]}, r"progress\['\\ud800'\]\[1\]"),
    ]:
        with pytest.raises(TypeError, match=rf"^{place}: .*{what}.* cannot be kept"):
            encode(value, "progress")


def test_keys_and_elements_are_named_too() -> None:
    with pytest.raises(TypeError, match=r"^a key <Colour.RED: 1>: a test_values.Colour cannot be kept"):
        encode({Colour.RED: 1}, "a")
    with pytest.raises(TypeError, match=r"^a element <Colour.RED: 1>: a test_values.Colour cannot be kept"):
        encode({Colour.RED}, "a")
    with pytest.raises(TypeError, match=r"^a\['b'\]: a tensor as key cannot be kept"):
        encode({"b": {(1, (torch.ones(1),)): 1}}, "a")
    with pytest.raises(TypeError, match=r"^a: a tensor as key"):
        encode({torch.ones(1)}, "a")


def nested(levels: int) -> Any:
    value: Any = 2**70
    for i in range(levels):
        value = {"x": value} if i % 2 else [value]
    return value


def test_a_value_that_contains_itself_is_refused_by_name() -> None:
    loop: list[Any] = [1, {"x": []}]
    loop[1]["x"].append(loop)
    with pytest.raises(TypeError, match=r"^a\[1\]\['x'\]\[0\].*: a list that contains itself cannot be kept"):
        encode(loop, "a")
    wide: list[Any] = []
    wide += [wide] * 1000
    with pytest.raises(TypeError, match="contains itself"):
        encode({"x": wide}, "a")


def test_deep_values_come_back_or_are_refused_by_name() -> None:
    there_and_back(nested(DEPTH_MOST + 1))
    with pytest.raises(TypeError, match=r"^a\['x'\]\[0\].*: a list that is nested more than 100 deep cannot be kept"):
        encode(nested(1000), "a")
    encode([nested(DEPTH_MOST)] * 3, "a")  # the same list at many places is no loop


# apart --------------------------------------------------------------------------------------------


def test_tensors_can_be_kept_apart() -> None:
    shared = torch.rand(3)
    value = {"a": shared, "b": [shared, torch.rand(2, 3).T, torch.zeros(0), torch.tensor(3, dtype=torch.int8)], "c": 1}
    out = TensorsOut()
    data = encode(value, "value", out)
    assert len(data) < 150 and out.bytes == 12 + 24 + 0 + 1 and len(out.tensors) == 4  # one that is there twice is one
    assert out.offsets == [0, 12, 36, 36]
    stream = torch.cat([bytes_of(tensor) for tensor in out.tensors])
    back = decode(data, TensorsIn(stream))
    assert_same(back, value)
    assert back["a"] is back["b"][0]
    for short in (TensorsIn(stream[:-1]), TensorsIn(stream[:0]), None):
        with pytest.raises(ValueError, match=r"a tensor at bytes|tensors of more than|bytes expected"):
            decode(data, short)


def test_tensors_apart_are_no_more_than_their_bytes() -> None:
    """The same bytes again and again, each time as something else, would be a small input with a large value."""
    nodes = [[values._TENSOR, "uint8", 0, 0, [], *[1] * ndim, 1000] for ndim in range(50)]
    with pytest.raises(ValueError, match="tensors of more than 1000 bytes in as many"):
        decode(msgspec.msgpack.encode([values._LIST, *nodes]), TensorsIn(torch.zeros(1000, dtype=torch.uint8)))


# hostile bytes ------------------------------------------------------------------------------------


def outcome(data: bytes) -> Any:
    """What `decode` makes of any bytes; the test fails if that is anything but a value or a ValueError."""
    try:
        return decode(data, TensorsIn(torch.arange(64, dtype=torch.uint8)))
    except ValueError:
        return ValueError


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("code from bytes was run",)


def test_nothing_is_unpickled() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps([Bomb()], protocol)
        for packed in (data, msgspec.msgpack.encode(data), msgspec.msgpack.encode([values._BYTEARRAY, data])):
            assert outcome(packed) in (ValueError, data)
    for name in ("O", "|O8", "O8", "i4,O", "(2,)i4", "U" + "9" * 30, "ö", "", "p", "T"):
        assert outcome(msgspec.msgpack.encode([values._ARRAY, name, False, bytes(8), 1])) is ValueError, name
        assert outcome(msgspec.msgpack.encode([values._SCALAR, name, bytes(8)])) is ValueError, name


HOSTILE: list[Any] = [[], [99], [-1], [True], ["x"], [1.5], {}, {"a": 1}, msgspec.msgpack.Ext(5, b"x")]
HOSTILE += [msgspec.Raw(b"\xd6\xff\0\0\0\0")]  # a time
HOSTILE += [[values._DICT, 1], [values._DICT, [values._LIST], 1], [values._SET, [values._LIST]], [values._INT]]
HOSTILE += [[values._DEFAULT_DICT, "eval"], [values._DEFAULT_DICT, "__import__"], [values._DEFAULT_DICT, 1]]
HOSTILE += [[values._DEFAULT_DICT], [values._DEQUE, -1], [values._DEQUE, 1.5], [values._COMPLEX, "1", "2"]]
HOSTILE += [[values._RANGE, 1, 2, 0], [values._BYTEARRAY, 1 << 62], [values._INT, 1 << 62], [values._STR, b"\xff"]]
HOSTILE += [[values._ARRAY, "d", False, b"", 1 << 40], [values._ARRAY, "d", False, b"", -1, 0], [values._ARRAY]]
HOSTILE += [[values._ARRAY, "d", False, b"", *[1] * 64, 0], [values._ARRAY, "d", False, b"", 1 << 47, 1 << 47, 0]]
HOSTILE += [[values._ARRAY, "<U0", False, b"", 1 << 40], [values._ARRAY, "|V0", False, b"", 1 << 27]]
HOSTILE += [[values._SCALAR, "|V0", b""], [values._ARRAY, "|S00", False, b"", 1 << 27]]
HOSTILE += [[values._TENSOR, "float32", 0, 0, [], 1 << 40], [values._TENSOR, "float32", 0, 1 << 62, [], 1]]
HOSTILE += [[values._TENSOR, "float32", 0, -4, [], 1], [values._TENSOR, "float32", 0, b"", [0, 0], 0, 0]]
HOSTILE += [[values._TENSOR, "int64", 1, bytes(8), [], 1], [values._TENSOR, "qint8", 0, b"a", [], 1]]
HOSTILE += [[values._TENSOR, "float32", 8, b"", [], 0], [values._TENSOR, "float32", 0, b"", ["x"], 0]]
HOSTILE += [[values._TENSOR, "float32", 0, b"", [], 1 << 47, 1 << 47, 0], [values._TENSOR, "float32", 0, b"", None, 0]]
HOSTILE += [[values._SIZE, -1], [values._SIZE, "x"], [values._DTYPE, "save"], [values._DTYPE, 1]]
HOSTILE += [[values._DEVICE, "nothing", None], [values._DEVICE, "cuda", -1], [values._DEVICE, "cuda", 1 << 70 >> 7]]


def test_wrong_nodes_are_refused() -> None:
    for node in HOSTILE:
        assert outcome(msgspec.msgpack.encode(node)) is ValueError, node
    assert outcome(b"\x91" * 5000 + b"\x01") is ValueError  # deep
    assert outcome(b"\x92\0" * 500 + b"\x01") is ValueError


def test_lengths_that_are_not_there_take_no_memory() -> None:
    tracemalloc.start()
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\x94\x0e\xa1d\xc2\xc6", b"\x92\x00\xdd", b"\x92\x09\xc6"):
        for size in (0x7FFFFFFF, 0xFFFFFFFF, 1 << 28):
            assert outcome(head + struct.pack(">I", size) + bytes(100)) is ValueError
            assert outcome((head + struct.pack(">I", size)) * 50) is ValueError
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def mutated(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at, kind = rng.randrange(len(out) + 1), rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.choice([0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xCF, 0xD3, 0xDD, 0xFF, rng.randrange(256)])
        elif kind == 2:
            del out[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            begin = rng.randrange(len(out) + 1)
            out[at:at] = out[begin : begin + rng.randrange(1, 20)]
        else:
            del out[at:]
    return bytes(out)


def test_no_bytes_do_harm() -> None:
    """Mutations of valid bytes, and random ones: a value or a ValueError; what is a value is encoded again."""
    rng, made, refused = random.Random(11), 0, 0
    sources = [encode(v, "v") for v in (*PLAIN, *CONTAINERS, *SCALARS, *ARRAYS, *TENSORS)]
    sources += [encode([CONTAINERS, SCALARS], "v"), encode({"t": TENSORS[:3], "o": ARRAYS[:4]}, "v")]
    for i in range(15_000):
        data = rng.randbytes(rng.randrange(40)) if i % 10 == 0 else mutated(rng, rng.choice(sources))
        value = outcome(data)
        refused += value is ValueError
        if value is not ValueError:
            made += 1
            encode(value, "again")
    assert made > 1000 and refused > 5000, (made, refused)


# any value ----------------------------------------------------------------------------------------


def leaves() -> st.SearchStrategy[Any]:
    text = st.text(st.characters(exclude_categories=[]), max_size=6)  # surrogates as well
    arrays = st.sampled_from([*SCALARS, *ARRAYS, *TENSORS])
    return st.one_of(
        st.none(), st.booleans(), st.integers(), st.integers(-(2**80), 2**80), st.floats(), text, st.binary(max_size=6)
    ) | st.one_of(st.complex_numbers(), arrays)


def keys() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.binary(max_size=4) | st.floats()
    return st.recursive(plain, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=4)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(keys(), inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        pairs,
        pairs.map(OrderedDict),
        pairs.map(lambda d: defaultdict(set, d)),
        pairs.map(lambda d: Counter(dict(d))),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=9)),
        st.sets(keys(), max_size=4),
    )


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(leaves(), containers, max_leaves=25))
def test_any_value_comes_back(value: Any) -> None:
    there_and_back(value)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    outcome(data)
