"""Bags that a slot pools, and gradients of bags that it applies, against a trainer that does both with unique rows."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.client import pooling
from torch_ecrec.records import shard as of_shard
from torch_ecrec.records.halves import records_of
from torch_ecrec.records.merge import BLOCK, Bags, merge
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.sorting import sort_by_bits

F32 = np.float32
SPECIAL = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf, 1e-42], F32)


def same(left, right):
    """Whether two arrays of float32 have the same bits; one NaN is as good as another."""
    assert left.dtype == right.dtype == F32 and left.shape == right.shape
    no_number = np.isnan(left)
    bits = [np.where(no_number, 0, array.view(np.uint32)) for array in (left, right)]
    return np.array_equal(no_number, np.isnan(right)) and np.array_equal(*bits)


def numbers(random, shape, special):
    """Numbers of very different sizes, so that the order of addition shows, some of them `SPECIAL`."""
    scale = 10.0 ** random.integers(-5, 6, shape)
    found = (random.standard_normal(shape) * scale).astype(F32)
    return np.where(random.random(shape) < (0.2 if special else 0), random.choice(SPECIAL, shape), found).astype(F32)


def make_bags(random, records, most, dim, dtype=np.int64, weighted=False, bfloat16=False, special=False):
    """Bags of few records, so that these come several times in a bag, and in several bags."""
    lengths_G = random.integers(1, 5, int(random.integers(0, most + 1))).astype(np.int32)
    positions_N = random.choice(records, int(lengths_G.sum())).astype(dtype)
    gradients_GD = numbers(random, (len(lengths_G), dim), special)
    if bfloat16:
        gradients_GD = torch.from_numpy(gradients_GD).bfloat16().view(torch.uint16).numpy()
    weights_N = numbers(random, positions_N.shape, special) if weighted else None
    return Bags(positions_N, lengths_G, weights_N, gradients_GD)


def as_floats(array):
    return (array.astype(np.uint32) << 16).view(F32) if array.dtype == np.uint16 else array


def rows_of(bags):
    """What a trainer sends without bags: positions and gradients of unique rows, by `pool_backward`."""
    rows_U, inverse_N = np.unique(bags.positions.astype(np.int64), return_inverse=True)
    gradients_GD = as_floats(bags.gradients)
    per_id_N = np.empty(0, F32) if bags.weights is None else bags.weights
    out_UD, seen_U = np.full((len(rows_U), gradients_GD.shape[1]), 7, F32), np.zeros(len(rows_U), np.bool_)
    pooling.pool_backward(
        np.ascontiguousarray(gradients_GD[:, None, :]), inverse_N.reshape(-1), bags.lengths[None, :], per_id_N,
        bags.weights is not None, np.zeros(1, np.bool_), F32(1), seen_U, out_UD,
    )  # fmt: skip
    assert seen_U.all()
    return rows_U, out_UD


def filled(schema, rows, random, sealed=True):
    shard = Shard(schema, rows, 0, sealed=sealed)
    values_PW = np.abs(random.standard_normal((rows, schema.width))).astype(F32)
    shard.scatter_(np.arange(rows), records_of(values_PW, schema))
    return shard


# ------------------------------------------------------------------------------------------------------------- pooled


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    dim=st.integers(1, 70),
    weights=st.sampled_from(["float32", "float32", "float16", "bfloat16"]),
    dtype=st.sampled_from([np.int32, np.int64]),
    weighted=st.booleans(),
    special=st.booleans(),
)
def test_a_slot_pools_to_the_bits_of_a_trainer(seed, dim, weights, dtype, weighted, special):
    random = np.random.default_rng(seed)
    schema = optimizer(NAMES[seed % len(NAMES)]).schema(dim, weights)
    shard = Shard(schema, 50, 0)
    values_PW = numbers(random, (50, schema.width), special)
    with np.errstate(all="ignore"):
        shard.scatter_(np.arange(50), records_of(values_PW, schema))
    bags = make_bags(random, np.arange(50), 40, dim, dtype, weighted, special=special)
    rows_PD = shard.gather_weights(np.arange(50))
    wanted = np.empty((len(bags.lengths), 1, dim), F32)
    per_id_N = bags.weights if weighted else np.empty(0, F32)
    inverse_N = bags.positions.astype(np.int64)
    pooling.pool([rows_PD], inverse_N, bags.lengths[None, :], per_id_N, weighted, np.zeros(1, np.bool_), wanted)
    found = shard.pool(bags.positions, bags.lengths, bags.weights)
    assert same(found, wanted[:, 0])
    rounded = shard.pool(bags.positions, bags.lengths, bags.weights, bfloat16=True)
    assert rounded.dtype == np.uint16
    assert same(as_floats(rounded), torch.from_numpy(found).bfloat16().float().numpy())


def test_records_of_halves_are_pooled_in_portions_of_whole_bags():
    random = np.random.default_rng(1)
    shard = filled(Schema.of(3, weights="float16"), 50, random)
    lengths_G = np.array([1, of_shard.POOLED_AT_ONCE - 1, 1, 3 * of_shard.POOLED_AT_ONCE, 2, 1], np.int32)
    positions_N = random.integers(0, 50, lengths_G.sum())
    weights_N = random.standard_normal(len(positions_N)).astype(F32)
    floats = Shard(Schema.of(3), 50, 0)
    floats.scatter_(np.arange(50), shard.gather_weights(np.arange(50)).view(np.uint8))
    for given_N in (None, weights_N):
        assert same(shard.pool(positions_N, lengths_G, given_N), floats.pool(positions_N, lengths_G, given_N))


def test_nothing_is_pooled_of_no_bags():
    shard = Shard(Schema.of(3), 4, 0)
    nothing = shard.pool(np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert nothing.shape == (0, 3) and nothing.dtype == F32


BAD = [
    ("positions must be 1-D int32 or int64", lambda p, n, w: (p.astype(F32), n, w)),
    ("positions must be 1-D int32 or int64", lambda p, n, w: (p[None], n, w)),
    ("lengths must be 1-D int32, got 1-D int64", lambda p, n, w: (p, n.astype(np.int64), w)),
    ("lengths must be at least 1, got 0", lambda p, n, w: (p, np.array([3, 0, 1], np.int32), w)),
    ("lengths must be at least 1, got -1", lambda p, n, w: (p, np.array([5, -1], np.int32), w)),
    ("lengths must sum to 4 positions, got 5", lambda p, n, w: (p, n + np.array([0, 1], np.int32), w)),
    ("lengths must sum to 4 positions, got 2147483648", lambda p, n, w: (p, np.array([2**31 - 1, 1], np.int32), w)),
    ("weights must be 1-D float32", lambda p, n, w: (p, n, w.astype(np.float64))),
    ("weights must be 4, as positions are, got 3", lambda p, n, w: (p, n, w[:3])),
    ("position -1 is out of range", lambda p, n, w: (np.array([0, -1, 2, 3]), n, w)),
    ("position -7 is out of range", lambda p, n, w: (np.array([0, 1, 2, -7], np.int32), n, w)),
]


@pytest.mark.parametrize(("words", "change"), BAD)
def test_bags_that_do_not_fit_are_refused_by_name(words, change):
    positions, lengths, weights = change(np.arange(4), np.array([3, 1], np.int32), np.ones(4, F32))
    kind = IndexError if "out of range" in words else ValueError
    with pytest.raises(kind, match=words):
        Shard(Schema.of(2), 5, 0).pool(positions, lengths, weights)
    good = (np.array([1]), np.ones((1, 2), F32))
    with pytest.raises(kind, match=rf"^parts\[1\] {words}"):
        merge([good, Bags(positions, lengths, weights, np.ones((len(lengths), 2), F32))])


def test_positions_behind_the_records_are_refused_before_anything_changes():
    random = np.random.default_rng(0)
    shard = filled(optimizer("sgd").schema(2), 5, random)
    before = shard.gather(np.arange(5))
    ones, gradient = np.ones(1, np.int32), np.ones((1, 2), F32)
    with pytest.raises(IndexError, match="position 5 is out of range: there are 5 records"):
        shard.pool(np.array([5]), ones)
    for position in (5, 2**40):
        with pytest.raises(IndexError, match=f"position {position} is out of range: there are 5 records"):
            merged = merge([Bags(np.array([position]), ones, None, gradient)])
            shard.apply_(optimizer("sgd"), merged, 0.1, 1, {})
    for position in (2**63 - 2, 2**63 - 1):  # position and place do not fit into a word
        with pytest.raises(IndexError, match=f"position {position} is out of range"):
            merge([Bags(np.array([0, position]), 2 * ones, None, gradient)])
    assert np.array_equal(shard.gather(np.arange(5)), before)


def test_gradients_of_bags_that_do_not_fit_are_refused():
    lengths, positions = np.array([3, 1], np.int32), np.arange(4)
    for gradients in (np.ones((3, 2), F32), np.ones((2, 3), F32), np.ones((2, 2))):
        with pytest.raises(ValueError, match=r"gradients of parts\[1\] must be float32 .* \(2, 2\)"):
            merge([(np.array([1]), np.ones((1, 2), F32)), Bags(positions, lengths, None, gradients)])


# ---------------------------------------------------------------------------------------------------------- gradients


@st.composite
def trainers(draw):
    """Parts as they are sent, and the same as gradients of unique rows, of one to three trainers."""
    random, dim = np.random.default_rng(draw(st.integers(0, 9999))), draw(st.integers(1, 70))
    special, most = draw(st.booleans()), draw(st.sampled_from([0, 3, 40]))
    parts, rows = [], []
    for _ in range(draw(st.integers(1, 3))):
        records = random.permutation(60)
        cut = draw(st.sampled_from([0, 30, 60]))  # records whose gradients come as those of rows
        sent = {
            "dtype": draw(st.sampled_from([np.int32, np.int64])), "weighted": draw(st.booleans()),
            "bfloat16": draw(st.booleans()), "special": special,
        }  # fmt: skip
        if cut:
            as_rows = rows_of(make_bags(random, records[:cut], most, dim, special=special))
            parts.append(as_rows)
            rows.append(as_rows)
        if cut < 60:
            parts.append(make_bags(random, records[cut:], most, dim, **sent))
            rows.append(rows_of(parts[-1]))
    return parts, rows


@settings(max_examples=150, deadline=None)
@given(both=trainers())
def test_gradients_of_bags_are_those_of_rows_bit_for_bit(both):
    parts, rows = both
    found, wanted = merge(parts), merge(rows)
    assert found.positions.dtype == np.int64 and np.array_equal(found.positions, wanted.positions)
    assert same(found.gradients(), wanted.gradients())


@functools.cache
def parts_and_rows(dim, count):
    """Parts of several trainers, and the same as gradients of unique rows: made once for all optimizers."""
    random = np.random.default_rng(3)
    sent = {"most": 2 * count, "dim": dim, "dtype": np.int32}
    parts = [
        rows_of(make_bags(random, np.arange(0, count, 2), 40, dim)),
        make_bags(random, np.arange(1, count, 2), bfloat16=True, **sent),
        make_bags(random, np.arange(count), weighted=True, **sent),
        rows_of(make_bags(random, np.arange(count), 100, dim)),
    ]
    rows = [rows_of(part) if isinstance(part, Bags) else part for part in parts]
    assert len(merge(rows).positions) > BLOCK
    return parts, rows


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_step_of_bags_is_that_of_rows_bit_for_bit(kind, weights, sealed):
    dim, count = 19, 3 * BLOCK
    parts, rows = parts_and_rows(dim, count)
    schema = optimizer(kind).schema(dim, weights)
    shards = [filled(schema, count, np.random.default_rng(5), sealed) for _ in range(2)]
    for iteration in (1, 2):
        found, wanted = (
            shard.apply_(optimizer(kind), merge(given), 0.1, iteration, {})
            for shard, given in zip(shards, (parts, rows), strict=True)
        )
        assert np.array_equal(found.deltas_UB, wanted.deltas_UB) and found.deltas_UB.any()
        assert (found.seals_U is None) == (not sealed)
        assert not sealed or np.array_equal(found.seals_U, wanted.seals_U)
    left, right = (shard.gather(np.arange(count)) for shard in shards)
    assert np.array_equal(left, right) and not len(shards[0].broken(np.arange(count)))


def test_no_input_is_changed():
    part = make_bags(np.random.default_rng(2), np.arange(9), 40, 3, weighted=True)
    fields = (part.positions, part.lengths, part.weights, part.gradients)
    before = [array.copy() for array in fields]
    merge([part, part]).gradients()
    assert all(np.array_equal(*pair) for pair in zip(fields, before, strict=True))


def test_of_a_trainer_that_sends_a_record_in_both_forms_the_pair_is_added_first():
    pair = (np.array([4]), np.full((1, 2), 2.0**24, F32))
    bags = Bags(np.array([4, 4]), np.array([1, 1], np.int32), None, np.ones((2, 2), F32))
    assert (merge([pair, bags]).gradients() == 2.0**24 + 2).all()  # 2^24 + (1 + 1), not (2^24 + 1) + 1


# --------------------------------------------------------------------------------------------------------------- sort


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999), count=st.integers(0, 700), first=st.integers(0, 40), bits=st.sampled_from([0, 1, 8, 13])
)
def test_words_are_sorted_by_some_bits_and_stay_in_order_otherwise(seed, count, first, bits):
    word_N = np.random.default_rng(seed).integers(0, 2**63, count, np.uint64)
    end = first + bits
    key_N = (word_N >> np.uint64(first)) & np.uint64((1 << bits) - 1)
    wanted = word_N[np.argsort(key_N, kind="stable")]
    found = sort_by_bits(word_N.copy(), np.empty_like(word_N), first, end)
    assert np.array_equal(found, wanted)
