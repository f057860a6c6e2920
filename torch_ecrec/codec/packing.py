"""Packs 32-bit words without their leading zero bytes, so that fewer bytes travel between hosts.

The format is Stream VByte (D. Lemire, N. Kurz, C. Rupp: "Stream VByte: Faster Byte-Oriented Integer Compression",
Information Processing Letters 130, 2018):

    control   a byte for every four words: two bits each, how many bytes it has beyond the first
    data      those bytes of every word, the least significant first

Few are left of a delta's words, the XOR of floats that are close to each other, and of ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from torch_ecrec.codec import vectors
from torch_ecrec.codec.field import BYTE, WORD_BYTES
from torch_ecrec.codec.vectors import I8, I32, I64, ir, tools
from torch_ecrec.runtime.kernel_cache import kernel

GROUP = 4  # words for each byte of control
GROUP_BYTES = WORD_BYTES * GROUP
SAMPLE_GROUPS = 128  # looked at to find out whether packing pays, all over what would be packed
GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: the fractions of its multiples lie evenly
PAYS_BELOW = 0.8  # of the bytes: docs/performance.md, "Between hosts"
SLACK_BYTES = GROUP_BYTES  # behind packed bytes, for the last group is read and written as a whole vector

Bytes = NDArray[np.uint8]


def _tables() -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Returns four tables by which groups of words are packed and unpacked.

    Three are by control byte: the number of bytes of data; their places among the words' bytes; and the other way round
    (0x80: a zero). The fourth gives the control byte by which words are more than 0xFF, 0xFFFF and 0xFFFFFF: four bits
    each.
    """
    words = np.arange(GROUP)
    lengths = (np.arange(256)[:, None] >> 2 * words & 3) + 1  # (256, 4)
    pack, unpack = np.full((256, GROUP_BYTES), 0x80, np.uint8), np.full((256, GROUP_BYTES), 0x80, np.uint8)
    for code in range(256):
        kept = [WORD_BYTES * word + byte for word in range(GROUP) for byte in range(lengths[code, word])]
        pack[code, : len(kept)], unpack[code, kept] = kept, np.arange(len(kept))
    more = np.arange(1 << 3 * GROUP)[:, None] >> words
    codes = ((more & 1) + (more >> GROUP & 1) + (more >> 2 * GROUP & 1)) << 2 * words
    return lengths.sum(1).astype(np.uint8), pack, unpack, codes.sum(1).astype(np.uint8)


_LENGTHS, _PACK, _UNPACK, _CODES = _tables()

# -------------------------------------------------------------------------------------------------- vectors of 16 bytes


def _type_shuffle(context: Any, target: Any, source: Any, places: Any) -> Any:
    """The intrinsic `shuffle(target, source, places)`: target[i] = source[places[i]], or 0.

    Each of the three is an address of 16 bytes.
    """

    def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(I8, GROUP_BYTES)
        written, read, which = (builder.inttoptr(address, kind.as_pointer()) for address in args)
        value, picks = builder.load(read, align=1), builder.load(which, align=1)
        if "+ssse3" in vectors.features(compiler):
            function = tools.get_or_insert_function(
                builder.module, ir.FunctionType(kind, [kind, kind]), "llvm.x86.ssse3.pshuf.b.128"
            )
            found = builder.call(function, [value, picks])
        else:
            found = ir.Constant(kind, None)
            for i in range(GROUP_BYTES):
                pick = builder.extract_element(picks, I32(i))
                byte = builder.extract_element(value, builder.and_(pick, I8(GROUP_BYTES - 1)))
                kept = builder.select(builder.icmp_signed("<", pick, I8(0)), I8(0), byte)
                found = builder.insert_element(found, kept, I32(i))
        builder.store(found, written, align=1)
        return compiler.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


def _type_more(context: Any, source: Any) -> Any:
    """The intrinsic `more(source)`: which of the four words at an address are more than 0xFF, 0xFFFF, 0xFFFFFF.

    It gives four bits for each of the three bounds.
    """

    def generate(compiler: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, flags = ir.VectorType(I32, GROUP), ir.IntType(GROUP)
        words = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
        found = I64(0)
        for which in range(3):
            most = ir.Constant(kind, [(1 << 8 * (which + 1)) - 1] * GROUP)
            bits = builder.bitcast(builder.icmp_unsigned(">", words, most), flags)
            found = builder.or_(found, builder.shl(builder.zext(bits, I64), I64(GROUP * which)))
        return found

    return types.intp(types.intp), generate


_shuffle: Any = intrinsic(_type_shuffle)
_more: Any = intrinsic(_type_more)

# -------------------------------------------------------------------------------------------------------------- kernels


@kernel()
def _pack(words: Any, groups: Any, control: Any, data: Any, codes: Any, lengths: Any, tables: Any) -> Any:
    table, at, begin = np.intp(tables.ctypes.data), np.intp(data.ctypes.data), np.intp(data.ctypes.data)
    for g in range(groups):
        read = words + GROUP_BYTES * g
        code = codes[_more(read)]
        control[g] = code
        _shuffle(at, read, table + GROUP_BYTES * np.intp(code))
        at += np.intp(lengths[code])
    return at - begin


@kernel()
def _unpack(words: Any, groups: Any, control: Any, data: Any, lengths: Any, tables: Any) -> None:
    table, at = np.intp(tables.ctypes.data), np.intp(data.ctypes.data)
    for g in range(groups):
        code = np.intp(control[g])
        _shuffle(words + GROUP_BYTES * g, at, table + GROUP_BYTES * code)
        at += np.intp(lengths[code])


@kernel()
def _sample(words: Any, groups: Any, step: Any, codes: Any, lengths: Any) -> Any:
    """Returns the bytes of data of a sample: one group of every `step`.

    Each time another of them: with every `step`-th one, where rows are as long as a whole number of steps or the other
    way round, only the same columns would be seen.
    """
    total = np.intp(0)
    for i in range((groups + step - 1) // step):
        g = min(i * step + ((i * GOLDEN & 0xFFFFFFFF) * step >> 32), groups - 1)
        total += np.intp(lengths[codes[_more(words + GROUP_BYTES * g)]])
    return total


@kernel()
def _data_bytes(control: Any, lengths: Any) -> Any:
    total = np.intp(0)
    for g in range(control.shape[0]):
        total += np.intp(lengths[control[g]])
    return total


def _check(name: str, array: Bytes) -> None:
    """Raises ValueError unless an array is 1-D uint8 and contiguous: kernels use its memory by address."""
    if array.ndim != 1 or array.dtype != BYTE or not array.flags.c_contiguous:
        got = f"{array.ndim}-D {array.dtype}" + (", strided" if not array.flags.c_contiguous else "")
        raise ValueError(f"`{name}` must be 1-D uint8, contiguous, got {got}")


def pack(values: Bytes) -> Bytes | None:
    """Returns the packed bytes; None if a sample says that too few bytes would be saved, or none are.

    Args:
        values: (N,) uint8, contiguous, at any address. Bytes behind the last whole group of four words go as they are.

    Raises:
        ValueError: another dimension or dtype, or not contiguous.
    """
    _check("values", values)
    groups = len(values) // GROUP_BYTES
    step = max(groups // SAMPLE_GROUPS, 1)
    looked = -(-groups // step)
    address = values.ctypes.data
    if looked + _sample(address, groups, step, _CODES, _LENGTHS) > PAYS_BELOW * looked * GROUP_BYTES or not groups:
        return None
    packed = np.empty(groups + len(values) + SLACK_BYTES, np.uint8)
    end = groups + _pack(address, groups, packed[:groups], packed[groups:], _CODES, _LENGTHS, _PACK)
    rest = values[groups * GROUP_BYTES :]
    size = end + len(rest)
    if size >= len(values):
        return None  # the sample was not like the rest; and nobody takes for packed what has become more
    packed[end:size] = rest
    return packed[:size]


def least_packed_bytes(size: int) -> int:
    """Returns how many bytes the packed form of so many bytes has at least: fewer are not their packed form."""
    groups, rest = divmod(size, GROUP_BYTES)
    return groups * (1 + GROUP) + rest


def unpack(packed: Bytes, size: int, values: Bytes) -> None:
    """Unpacks into `values`.

    Args:
        packed: (size + SLACK_BYTES,) uint8, contiguous: its first `size` bytes are what `pack` returned, perhaps a
            stranger's.
        values: (N,) uint8, contiguous, writeable: as many as were packed.

    Raises:
        ValueError: they are not the packed form of so many bytes, or an array is not as said. Then nothing is written.
    """
    _check("packed", packed)
    _check("values", values)
    if not values.flags.writeable:
        raise ValueError("`values` is written to, and is read-only")
    groups, rest = divmod(len(values), GROUP_BYTES)
    control, data = packed[:groups], packed[groups:]
    short = size < least_packed_bytes(len(values)) or len(packed) < size + SLACK_BYTES
    if short or groups + _data_bytes(control, _LENGTHS) + rest != size:
        raise ValueError(f"{size} bytes that are not {len(values)} packed ones")
    _unpack(values.ctypes.data, groups, control, data, _LENGTHS, _UNPACK)
    values[len(values) - rest :] = packed[size - rest : size]


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    values = np.zeros(2 * GROUP_BYTES, np.uint8)
    packed = pack(values)
    assert packed is not None
    unpack(np.concatenate([packed, np.zeros(SLACK_BYTES, np.uint8)]), len(packed), values)
