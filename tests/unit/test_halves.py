"""Weights of 16 bits: every value there is, rounding as torch's, records of them under every optimizer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formulas import stepped, variants
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import thinned

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import Merged
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import Field, Schema, StateField
from torch_ecrec.records.shard import Shard

F32 = np.float32
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
HALVES = list(TORCH)


def of_torch(values: np.ndarray, weights: str) -> np.ndarray:
    """float32 -> bits of 16, as torch rounds."""
    return torch.from_numpy(values).to(TORCH[weights]).view(torch.uint16).numpy()


def to_torch(bits: np.ndarray, weights: str) -> np.ndarray:
    return torch.from_numpy(bits).view(TORCH[weights]).float().numpy()


def stored(values_UD: np.ndarray, weights: str) -> np.ndarray:
    """(U, D) bits of 16 that records of these weights have."""
    schema = Schema.of(values_UD.shape[1], weights=weights)
    return records_of(np.ascontiguousarray(values_UD), schema).view(np.uint16)[:, : schema.dim]


def same(a: np.ndarray, b: np.ndarray, nan: np.ndarray) -> bool:
    """Bit for bit, but for which NaN one is."""
    return bool(((a == b) | nan).all())


# ----------------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("weights", HALVES)
def test_every_value_of_16_bits_is_the_float32_that_torch_makes_of_it_and_comes_back(weights: str) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    schema = Schema.of(256, weights=weights)
    numbers = numbers_of(bits.reshape(256, 256).view(np.uint8), schema).ravel()
    theirs = to_torch(bits, weights)
    nan = np.isnan(theirs)
    assert nan.sum() == {"float16": 2 * 1023, "bfloat16": 2 * 127}[weights] and np.array_equal(np.isnan(numbers), nan)
    assert same(numbers.view(np.uint32), theirs.view(np.uint32), nan)
    if weights == "float16":
        assert same(numbers.view(np.uint32), bits.view(np.float16).astype(F32).view(np.uint32), nan)
    back = stored(numbers.reshape(256, 256), weights).ravel()
    assert same(back, bits, nan) and np.isnan(to_torch(back[nan], weights)).all()


def boundaries(weights: str) -> np.ndarray:
    """Every value, the middle between it and the next, and both neighbours of that: where rounding is decided."""
    with np.errstate(all="ignore"):
        values = to_torch(np.arange(65536, dtype=np.uint16), weights)
        finite = np.sort(values[np.isfinite(values)])
        middles = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(F32)
        most = finite[-1] + (finite[-1] - finite[-2]) / F32(2)  # half a step beyond the greatest
        every = np.concatenate([finite, middles, [most, -most, np.inf, -np.inf, 0.0, -0.0]]).astype(F32)
        return np.concatenate([every, np.nextafter(every, F32(np.inf)), np.nextafter(every, F32(-np.inf))])


@pytest.mark.parametrize("weights", HALVES)
def test_rounding_is_torchs_at_every_value_and_in_every_middle(weights: str) -> None:
    values = boundaries(weights)
    values = values[~np.isnan(values)]
    assert len(values) > 300_000
    assert np.array_equal(stored(values[:, None], weights).ravel(), of_torch(values, weights))


@pytest.mark.parametrize("weights", HALVES)
def test_rounding_is_torchs_on_random_bits_and_does_not_mind_flushed_subnormals(weights: str) -> None:
    values = np.random.default_rng(7).integers(0, 2**32, 1 << 20, dtype=np.uint32).view(F32)
    nan, wanted = np.isnan(values), of_torch(values, weights)
    assert nan.any() and (np.abs(values) < 2.0**-126).any(), "subnormal ones too"
    assert same(stored(values[:, None], weights).ravel(), wanted, nan)
    every = np.arange(65536, dtype=np.uint16).reshape(256, 256).view(np.uint8)
    numbers = numbers_of(every, Schema.of(256, weights=weights))
    assert torch.set_flush_denormal(True)
    try:
        flushed = numbers_of(every, Schema.of(256, weights=weights))
        again = stored(values[:, None], weights).ravel()
    finally:
        torch.set_flush_denormal(False)
    assert same(again, wanted, nan) and np.array_equal(flushed.view(np.uint32), numbers.view(np.uint32))


def test_beyond_the_greatest_it_is_infinite() -> None:
    values = np.array([[65504.0, 65519.996, 65520.0, 1e9, -65520.0, 2.0**-25, 2.0**-25 * 1.0001, -(2.0**-26)]], F32)
    assert stored(values, "float16").tolist() == [[0x7BFF, 0x7BFF, 0x7C00, 0x7C00, 0xFC00, 0, 1, 0x8000]]


# -------------------------------------------------------------------------------------------------------------- records


def test_a_record_of_halves_is_whole_words() -> None:
    schema = Schema.of(3, (StateField("momentum1"), StateField("exp_avg_sq", per_row=True)), "float16")
    assert (schema.dim, schema.width, schema.nbytes, schema.halves, schema.bfloat16) == (3, 7, 8 + 12 + 4, True, False)
    assert [schema.bytes_of(field.name) for field in schema.fields] == [(0, 6), (8, 20), (20, 24)]
    numbers = np.array([[1.0, -2.0, 0.5, 3.0, 4.0, 5.0, 6.0]], F32)
    record = records_of(numbers, schema)
    assert record.tobytes().hex(" ") == "00 3c 00 c0 00 38 00 00 " + numbers[:, 3:].tobytes().hex(" ")
    assert np.array_equal(numbers_of(record, schema), numbers)
    with pytest.raises(ValueError, match="optimizer state is float32, got other fields momentum1"):
        Schema((Field("weight", 2, dtype="float16"), Field("momentum1", 2, dtype="float16")))
    with pytest.raises(ValueError, match="records have float32, float16, bfloat16, got int8"):
        Field("weight", 2, dtype="int8")
    with pytest.raises(ValueError, match="`records_UB` must be uint8 of 24 columns"):
        numbers_of(record[:, :4], schema)
    with pytest.raises(ValueError, match="`numbers_UW` must be float32 of 7 columns"):
        records_of(numbers.astype(np.float64), schema)


def numbers_at_random(kind: str, rows: int, dim: int, seed: int, weights: str) -> np.ndarray:
    """(P, W), weights such as records of halves can have."""
    width = optimizer(kind).schema(dim).width
    numbers = np.random.default_rng(seed).standard_normal((rows, width)).astype(F32)
    numbers[:, dim:] = np.abs(numbers[:, dim:])
    numbers[:, :dim] = to_torch(of_torch(numbers[:, :dim].copy(), weights), weights)
    return numbers


@pytest.mark.parametrize("dims", [(3, 33), pytest.param((1, 8), marks=pytest.mark.slow)], ids=["3 and 33", "1 and 8"])
@pytest.mark.parametrize(("kind", "weights"), thinned(NAMES, HALVES, 2))
def test_a_step_is_the_formula_in_float32_with_its_weights_rounded(
    kind: str, weights: str, dims: tuple[int, ...]
) -> None:
    """Over more than one block, odd dims included; the delta is old XOR new of the bytes."""
    for dim in dims:
        for fixed in variants(kind):
            schema = optimizer(kind).schema(dim, weights)
            numbers = numbers_at_random(kind, 300, dim, dim, weights)
            positions = np.random.default_rng(1).permutation(300)[:290]
            gradients = np.random.default_rng(2).standard_normal((290, dim)).astype(F32)
            merged = Merged(positions, [gradients], np.arange(290)[None, :])
            records = records_of(numbers, schema).copy()
            before = records.copy()
            for iteration in (1, 2):
                delta = optimizer(kind).update_(records.view(F32), merged, 0.1, iteration, fixed, weights=weights)
                numbers = stepped(kind, numbers, positions, gradients, 0.1, iteration, fixed)
                numbers[:, :dim] = to_torch(of_torch(numbers[:, :dim].copy(), weights), weights)
                wanted = records_of(numbers, schema)
                assert np.array_equal(records, wanted), (dim, fixed, iteration)
                assert np.array_equal(before[positions] ^ delta, records[positions])
                before = records.copy()


@pytest.mark.parametrize("weights", HALVES)
def test_a_shard_of_halves(weights: str) -> None:
    """First values, lookups, steps, undo, decoding: by the bytes."""
    kind, code = "rowwise_adagrad", LinearCode(2, 1)
    schema = optimizer(kind).schema(5, weights)
    shard, rows = Shard(schema, 70_000, 3), np.arange(70_000)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    shard.initialise_(initial.of)
    exact = InitialRecords(optimizer(kind).schema(5), 3, (0,), (-1.0,), (1.0,), (0,)).of(rows).view(F32)
    assert np.array_equal(shard.gather(rows), initial.of(rows))
    assert np.array_equal(stored(exact[:, :5], weights), shard.gather(rows).view(np.uint16)[:, :5])
    some = np.array([69_999, 0, 7])
    looked_up = shard.gather_weights(some)
    assert looked_up.dtype == F32
    assert np.array_equal(looked_up, to_torch(of_torch(exact[some, :5].copy(), weights), weights))
    rounded = shard.gather_weights(some, bfloat16=True)
    assert rounded.dtype == np.uint16 and np.array_equal(rounded, of_torch(looked_up, "bfloat16"))
    first = shard.gather(rows[:2])
    parity = Shard(schema, 0, 1)
    for member in range(2):
        parity.fold_(code, np.zeros(1, np.int64), first[member : member + 1], code.coefficients[0, member : member + 1])
    positions = np.arange(2)
    merged = Merged(positions, [np.full((2, 5), 0.3, F32)], positions[None, :])
    delta = shard.apply_(optimizer(kind), merged, 0.1, 1, {}).deltas_UB
    assert delta.shape == (2, schema.nbytes) and (shard.gather(positions) != first).any(axis=1).all()
    for member in range(2):
        parity.fold_(code, np.zeros(1, np.int64), delta[member : member + 1], code.coefficients[0, member : member + 1])
    members = [shard.gather(positions[:1]), parity.gather(positions[:1], parity=True)]
    assert np.array_equal(code.decode([0, 2], members, 1), shard.gather(positions[1:]))
    shard.undo_(positions, delta)
    assert np.array_equal(shard.gather(positions), first)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 9),
    weights=st.sampled_from(HALVES),
    state=st.integers(0, 3),
    rows=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_what_records_hold_goes_in_and_out_bit_for_bit(
    dim: int, weights: str, state: int, rows: int, seed: int
) -> None:
    more = tuple(StateField(f"s{i}", per_row=i == 2) for i in range(state))
    schema, random = Schema.of(dim, more, weights), np.random.default_rng(seed)
    numbers = random.standard_normal((rows, schema.width)).astype(F32) * F32(10.0 ** random.integers(-6, 4))
    record = records_of(numbers, schema)
    assert record.shape == (rows, schema.nbytes) and record.dtype == np.uint8
    held = numbers_of(record, schema)
    assert np.array_equal(held[:, dim:], numbers[:, dim:])
    assert np.array_equal(held[:, :dim], to_torch(of_torch(numbers[:, :dim].copy(), weights), weights))
    assert np.array_equal(records_of(held, schema), record)
    assert not record[:, 2 * dim : schema.nbytes - 4 * (schema.width - dim)].any(), "what is left of a word"
