"""Packed words beside a plain reading of the format, and what strangers may send in their place."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torch_ecrec.codec import packing
from torch_ecrec.codec.packing import PAYS_BELOW, SLACK_BYTES, least_packed_bytes, pack, unpack

WIDTHS = st.sampled_from([0, 1, 0xFF, 0x100, 0xFFFF, 0x10000, 0xFFFFFF, 0x1000000, 0xFFFFFFFF])


def with_slack(packed: np.ndarray, fill: int = 0xEE) -> np.ndarray:
    return np.concatenate([packed, np.full(SLACK_BYTES, fill, np.uint8)])


def plainly(values: np.ndarray) -> bytes:
    """As the module's first lines say."""
    whole = len(values) - len(values) % 16
    control, data = [], b""
    words = [int.from_bytes(values[i : i + 4].tobytes(), "little") for i in range(0, whole, 4)]
    for g in range(0, len(words), 4):
        lengths = [max(1, (word.bit_length() + 7) // 8) for word in words[g : g + 4]]
        control.append(sum(length - 1 << 2 * i for i, length in enumerate(lengths)))
        data += b"".join(word.to_bytes(4, "little")[:n] for word, n in zip(words[g : g + 4], lengths, strict=True))
    return bytes(control) + data + values[whole:].tobytes()


@settings(max_examples=300, deadline=None)
@given(words=st.lists(WIDTHS, min_size=4, max_size=60), rest=st.binary(max_size=15), begin=st.integers(0, 3))
@example(words=[0] * 4, rest=b"", begin=0)
def test_a_round_trip_in_the_format_that_is_written(words, rest, begin):
    """From any address, and with bytes behind the last whole group."""
    memory = b"\0" * begin + np.array(words, np.uint32).tobytes() + rest
    values = np.frombuffer(memory, np.uint8)[begin:]
    packed, wanted = pack(values), plainly(values)
    if packed is None:
        assert len(wanted) > PAYS_BELOW * (len(values) - len(values) % 16)
        return
    assert packed.tobytes() == wanted and len(packed) >= least_packed_bytes(len(values))
    found = np.full(len(values) + 2, 0x77, np.uint8)
    unpack(with_slack(packed), len(packed), found[1:-1])
    assert np.array_equal(found[1:-1], values) and found[0] == found[-1] == 0x77, "nothing is written beside it"


def test_deltas_and_ids_are_packed_and_noise_is_not():
    rng = np.random.default_rng(0)
    weights = rng.normal(size=50_000).astype(np.float32)
    deltas = (weights.view(np.uint32) ^ (weights * np.float32(1.0001)).view(np.uint32)).view(np.uint8)
    for values, most in [(deltas, 0.75), (rng.integers(0, 1 << 24, 20_000).view(np.uint8), 0.6)]:
        packed = pack(values)
        assert packed is not None and len(packed) < most * len(values)
    assert pack(weights.view(np.uint8)) is None
    for size in range(16):
        assert pack(np.zeros(size, np.uint8)) is None, "not a group"


def test_a_sample_is_taken_from_all_of_it():
    values = np.zeros(1 << 20, np.uint8)
    values[: 1 << 19] = 0xFF
    assert pack(values) is not None, "half of it is nothing"
    values[: 15 << 16] = 0xFF
    assert pack(values) is None


@pytest.mark.parametrize("row_bytes", [64, 256, 260, 512, 2048])
@pytest.mark.parametrize("rows", [128, 512, 640])
def test_columns_do_not_hide_from_the_sample(row_bytes, rows):
    """Rows as long as a step of the sample, or a part of it: their first words are not taken for all of them."""
    values = np.random.default_rng(0).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    values[:, 16:] = 0
    assert row_bytes == 64 or pack(values.reshape(-1)) is not None, "only the first four words of each are large"
    values = np.random.default_rng(0).integers(0, 256, (rows, row_bytes), dtype=np.uint8)
    values[:, :16] = 0
    assert row_bytes == 64 or pack(values.reshape(-1)) is None, "only the first four words of each are small"


@pytest.mark.parametrize("size", [16, 17, 31, 4096, 100_003])
def test_what_has_become_more_is_not_packed_whatever_the_sample_says(size, monkeypatch):
    monkeypatch.setattr(packing, "_sample", lambda *_: 0)
    assert pack(np.full(size, 0xFF, np.uint8)) is None
    at_least = np.full(size // 16 * 4, 0xFFFFFFFF, np.uint32)
    at_least[::8] = 0xFFFF  # as many bytes less as there are of control, where it is two groups or more
    found = pack(at_least.view(np.uint8))
    assert found is None or len(found) < at_least.nbytes


def test_arrays_that_do_not_lie_as_kernels_read_them_are_refused():
    values = np.zeros(640, np.uint8)
    packed = with_slack(pack(values))
    size, frozen = len(packed) - SLACK_BYTES, np.zeros(640, np.uint8)
    frozen.setflags(write=False)
    for wrong in (values[::2], values.reshape(2, 320), values.view(np.int8)):
        with pytest.raises(ValueError, match="`values` must be 1-D uint8, contiguous, got"):
            pack(wrong)
        with pytest.raises(ValueError, match="`values` must be"):
            unpack(packed, size, wrong)
    with pytest.raises(ValueError, match="`packed` must be 1-D uint8, contiguous, got 1-D uint8, strided"):
        unpack(np.repeat(packed, 2)[::2], size, values)
    with pytest.raises(ValueError, match="read-only"):
        unpack(packed, size, frozen)
    assert pack(frozen) is not None


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), values=st.integers(0, 200), size=st.integers(0, 230))
def test_whatever_comes_is_unpacked_within_its_bounds_or_refused(data, values, size):
    """What is packed of a stranger's words, or nothing at all: a refusal leaves everything as it was."""
    found = np.full(values + 64, 0x77, np.uint8)
    packed = np.frombuffer(data + b"\xee" * SLACK_BYTES, np.uint8)
    groups = values // 16
    lengths = sum((code >> 2 * i & 3) + 1 for code in data[:groups] for i in range(4))
    holds = size <= len(data) and groups <= size and size == groups + lengths + values % 16
    if holds:
        unpack(packed, size, found[:values])
    else:
        with pytest.raises(ValueError, match=f"{size} bytes that are not {values} packed ones"):
            unpack(packed, size, found[:values])
        assert (found == 0x77).all()
    assert (found[values:] == 0x77).all()


def test_one_byte_more_or_less_is_refused():
    values = np.arange(64, dtype=np.uint32).view(np.uint8)
    packed = pack(values)
    for size in (len(packed) - 1, len(packed) + 1, 0):
        with pytest.raises(ValueError, match="packed"):
            unpack(with_slack(with_slack(packed)), size, np.empty(len(values), np.uint8))
    with pytest.raises(ValueError, match="packed"):
        unpack(packed, len(packed), np.empty(len(values), np.uint8))  # no room behind it
