"""Every optimizer there is: against its formula bit for bit, against torch and FBGEMM, undone and decoded exactly.

A new file in `records/optimizers/` is visited here without a change; its formula goes into `formulas.py`.
"""

import importlib
import itertools

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from formulas import FORMULAS, stepped, variants

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.records import moments
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import Merged, merge
from torch_ecrec.records.optimizers import NAMES, by_class, by_type, optimizer
from torch_ecrec.records.shard import Shard

F32 = np.float32
DIMS = (1, 3, 4, 7, 8, 13, 16, 33, 64, 100)


def make_records(kind, rows, dim, seed=0):
    records = np.random.default_rng(seed).standard_normal((rows, optimizer(kind).schema(dim).width)).astype(F32)
    records[:, dim:] = np.abs(records[:, dim:])
    return records


def make_gradients(count, dim, seed=1):
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(F32)


def update_(kind, records, positions, gradients, lr=0.1, iteration=1, fixed=None, out=None):
    """Positions in any order, and one trainer."""
    index = np.arange(len(positions))[None, :]
    return optimizer(kind).update_(records, Merged(positions, [gradients], index), lr, iteration, fixed, out)


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8)


# --------------------------------------------------------------------------------------------------------- declarations


def test_every_optimizer_is_declared_in_a_file_of_its_name():
    widths = {kind: optimizer(kind).schema(16).width for kind in NAMES}
    assert widths | {
        "sgd": 16, "momentum_sgd": 32, "adagrad": 32, "rowwise_adagrad": 17, "lars_sgd": 32, "adam": 48,
        "partial_rowwise_adam": 33, "lamb": 48, "partial_rowwise_lamb": 33,
    } == widths  # fmt: skip
    classes = [path for kind in NAMES for path in optimizer(kind).classes]
    types = [name for kind in NAMES for name in optimizer(kind).types]
    assert len(set(classes)) == len(classes) >= 11 and len(set(types)) == len(types) >= 8
    for path in classes:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name)
        assert by_class(found).classes.count(path) == 1
    for name in types:
        assert by_type(EmbOptimType[name]).types.count(name) == 1
    assert by_class(torch.optim.RMSprop) is None and by_type(EmbOptimType.SHAMPOO) is None


@pytest.mark.parametrize("kind", NAMES)
def test_hyperparameters_are_known_and_in_range(kind):
    found = optimizer(kind)
    assert set(FORMULAS) >= {kind}, f"add the formula of {kind} to tests/support/formulas.py"
    assert found.complete({}) == dict(found.fixed)
    with pytest.raises(ValueError, match=f"optimizer {kind} has no nonsense; it has"):
        found.complete({"nonsense": 1.0})
    for name in found.fixed:
        with pytest.raises(ValueError, match=f"`{name}` must not be negative, got -1"):
            found.complete({name: -1.0})
    for name, most in found.below.items():
        with pytest.raises(ValueError, match=f"`{name}` of {kind} must be less than {most}"):
            found.complete({name: most})
    for name in found.choices:
        with pytest.raises(ValueError, match=f"`{name}` of {kind} must be one of"):
            found.complete({name: 0.5})
    with pytest.raises(ValueError, match="`iteration` must be at least 1, got 0"):
        found.values(0.1, 0, {})


def test_values_of_adam_are_corrected_by_the_iteration():
    assert [moments.power(0.5, n) for n in (0, 1, 2, 10)] == [1.0, 0.5, 0.25, 2.0**-10]
    for iteration in (1, 7, 1000, 10**6):
        assert moments.power(0.999, iteration) == pytest.approx(0.999**iteration, rel=1e-12)
    at = [optimizer("adam").values(0.1, t, {}).tolist() for t in (1, 2)]
    assert at[0][:5] == at[1][:5] and at[0][6:8] == at[1][6:8]
    assert (at[0][5], at[0][8]) == (at[0][4], at[0][7]), "after one iteration all that counts is its gradient"
    assert at[1][5] == F32(1 - float(F32(0.9)) ** 2) and at[1][8] == F32(1 - float(F32(0.999)) ** 2)


# -------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", NAMES)
def test_update_is_the_formula_bit_for_bit_and_its_delta_exact(kind, dim):
    positions = np.random.default_rng(dim).permutation(40)[:23].astype(np.int64)
    gradients = make_gradients(23, dim, seed=dim + 1)
    for fixed, iteration in itertools.product(variants(kind), (1, 2, 901)):
        records = make_records(kind, 40, dim, seed=dim)
        old = records.copy()
        delta = update_(kind, records, positions, gradients, 0.1, iteration, fixed)
        wanted = stepped(kind, old, positions, gradients, 0.1, iteration, fixed)
        assert np.array_equal(as_bytes(records), as_bytes(wanted)), (fixed, iteration)
        assert delta.shape == (23, 4 * records.shape[1]) and delta.dtype == np.uint8
        assert np.array_equal(delta, as_bytes(old[positions]) ^ as_bytes(records[positions]))
        assert delta.any(axis=1).all()
        undone = as_bytes(records)
        undone[positions] ^= delta
        assert np.array_equal(undone, as_bytes(old)), "the delta undoes, and nothing else was touched"


@pytest.mark.parametrize("kind", NAMES)
def test_more_than_a_block_of_several_trainers_is_the_formula(kind):
    """Gradients of a record are added in trainer order."""
    random, rows, dim = np.random.default_rng(5), 900, 12
    records, parts = make_records(kind, rows, dim), []
    for trainer in range(3):
        positions = np.flatnonzero(random.random(rows) < 0.6).astype(np.int64)
        parts.append((positions, make_gradients(len(positions), dim, seed=trainer)))
    merged = merge(parts)
    total = np.zeros((rows, dim), F32)
    for positions, gradients in parts:
        total[positions] += gradients
    wanted = stepped(kind, records, merged.positions, total[merged.positions], 0.05, 3)
    optimizer(kind).update_(records, merged, 0.05, 3)
    assert len(merged.positions) > 700 and np.array_equal(records, wanted)


@pytest.mark.parametrize("kind", NAMES)
def test_a_row_of_zeros_with_a_gradient_of_zeros_stays_finite(kind):
    for fixed in variants(kind):
        records = np.zeros((2, optimizer(kind).schema(4).width), F32)
        for iteration in (1, 2):
            update_(kind, records, np.arange(2), np.zeros((2, 4), F32), 0.1, iteration, fixed)
        assert not records[:, :4].any() and np.isfinite(records).all()


def test_update_rounds_after_every_operation():
    """A fused multiply-add would keep 2^-24 of the product: other bits on a CPU that has it."""
    rate = F32(1 + 2**-12)
    records = np.full((64, 64), rate * rate, F32)  # the product, rounded
    update_("sgd", records, np.arange(64), np.full((64, 64), rate, F32), float(rate))
    assert not records.any()
    exact = float(rate) * float(rate)
    assert float(rate * rate) != exact, "the case tells the two apart"


@pytest.mark.parametrize("kind", NAMES)
def test_update_writes_into_out_and_accepts_empty_steps(kind):
    records = make_records(kind, 9, 5)
    positions, gradients = np.array([8, 0, 3]), make_gradients(3, 5)
    wanted = update_(kind, records.copy(), positions, gradients)
    out = np.full_like(wanted, 77)
    assert update_(kind, records, positions, gradients, out=out) is out
    assert np.array_equal(out, wanted)
    before = records.copy()
    empty = update_(kind, records, positions[:0], gradients[:0])
    assert empty.shape == (0, 4 * records.shape[1]) and np.array_equal(records, before)


@pytest.mark.parametrize("kind", NAMES)
def test_update_keeps_the_order_of_operations_whatever_the_batch(kind):
    """One record at a time gives the same bits as all at once."""
    together, apart = make_records(kind, 20, 19), make_records(kind, 20, 19)
    gradients = make_gradients(20, 19)
    update_(kind, together, np.arange(20), gradients, 0.3, 2)
    for i in reversed(range(20)):
        update_(kind, apart, np.array([i]), gradients[i : i + 1], 0.3, 2)
    assert np.array_equal(as_bytes(together), as_bytes(apart))


def test_update_refuses_what_does_not_fit():
    records, positions, gradients = make_records("sgd", 5, 4), np.array([0, 4]), make_gradients(2, 4)
    before = records.copy()
    with pytest.raises(ValueError, match=r"unknown optimizer 'nadam'.*sgd"):
        update_("nadam", records, positions, gradients)
    with pytest.raises(ValueError, match="8 floats, got 4"):
        update_("adagrad", records, positions, gradients)
    for outside in (5, -1):
        with pytest.raises(IndexError, match=f"position {outside} .* 5 records"):
            update_("sgd", records, np.array([0, outside]), gradients)
    with pytest.raises(ValueError, match="float32"):
        update_("sgd", records, positions, gradients.astype(np.float64))
    with pytest.raises(ValueError, match="contiguous"):
        update_("sgd", np.asfortranarray(records), positions, gradients)
    with pytest.raises(ValueError, match="out"):
        update_("sgd", records, positions, gradients, out=np.zeros((2, 4), np.uint8))
    assert np.array_equal(records, before)


# -------------------------------------------------------------------------------------------------------- undo, rebuild


@pytest.mark.parametrize("kind", NAMES)
def test_many_steps_are_undone_made_again_and_decoded_to_the_same_bits(kind):
    """What a slot does that goes back, and what a new host does with the parity of one that was lost."""
    code, schema, every = LinearCode(2, 1), optimizer(kind).schema(6), np.arange(30)
    data, sibling, parity = Shard(schema, 30, 0), Shard(schema, 30, 0), Shard(schema, 0, 30)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    for i, shard in enumerate((data, sibling)):
        shard.initialise_(lambda at, first=30 * i: initial.of(at + first))
        parity.fold_(code, every, shard.gather(every), np.ones(30, np.uint8))
    random, fixed = np.random.default_rng(1), variants(kind)[-1]
    steps = [np.flatnonzero(random.random(30) < 0.5).astype(np.int64) for _ in range(8)]

    def apply(step):
        part = (steps[step - 1], make_gradients(len(steps[step - 1]), 6, seed=step))
        delta = data.apply_(optimizer(kind), merge([part]), 0.1 / step, step, fixed).deltas_UB
        parity.fold_(code, part[0], delta, np.ones(len(delta), np.uint8))
        return delta

    deltas, after = {}, {0: data.gather(every)}
    for step in range(1, 9):
        deltas[step] = apply(step)
        after[step] = data.gather(every)
    for step in range(8, 3, -1):
        data.undo_(steps[step - 1], deltas[step])
        parity.fold_(code, steps[step - 1], deltas[step], np.ones(len(deltas[step]), np.uint8))
        assert np.array_equal(data.gather(every), after[step - 1])
    for step in range(4, 9):
        assert np.array_equal(apply(step), deltas[step]) and np.array_equal(data.gather(every), after[step])
    lost, missing = Shard(schema, 30, 0), np.ones(30, np.uint8)
    have = [sibling.gather(every), parity.gather(every, parity=True)]
    assert lost.install_(code, every, missing, [1, 2], have, 0) == 30
    assert np.array_equal(lost.gather(every), after[8])


# ------------------------------------------------------------------------------------------------------ beside others


TORCH = {  # what means the same where every row has a gradient in every step
    "sgd": (torch.optim.SGD, {}, {}),
    "momentum_sgd": (torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.01}, {"momentum": 0.8, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-6}, {"eps": 1e-6}),
    "adam": (torch.optim.Adam, {"betas": (0.8, 0.99)}, {"beta1": 0.8, "beta2": 0.99}),
}


@pytest.mark.parametrize("kind", sorted(TORCH))
def test_many_steps_stay_close_to_torch(kind):
    cls, of_torch, fixed = TORCH[kind]
    rows, dim, lr = 30, 24, 0.05
    records = make_records(kind, rows, dim)
    records[:, dim:] = 0
    weight = torch.nn.Parameter(torch.tensor(records[:, :dim]))
    theirs = cls([weight], lr=lr, **of_torch)
    for iteration in range(1, 31):
        gradients = make_gradients(rows, dim, seed=iteration)
        update_(kind, records, np.arange(rows), gradients, lr, iteration, fixed)
        weight.grad = torch.tensor(gradients)
        theirs.step()
    torch.testing.assert_close(torch.tensor(records[:, :dim]), weight.detach(), rtol=2e-5, atol=2e-6)


FBGEMM = {  # all that it runs on a CPU, where it leaves out weight decay
    "sgd": {},
    "adagrad": {"eps": 1e-6},
    "rowwise_adagrad": {"eps": 1e-6},
}


@pytest.mark.parametrize("kind", sorted(FBGEMM))
def test_many_steps_stay_close_to_fbgemm(kind):
    rows, dim, lr, fixed = 30, 16, 0.05, FBGEMM[kind]
    records = make_records(kind, rows, dim)
    records[:, dim:] = 0
    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType[optimizer(kind).types[0]],
        learning_rate=lr,
        **fixed,
    )
    (weights,) = theirs.split_embedding_weights()
    weights.copy_(torch.tensor(records[:, :dim]))
    random = np.random.default_rng(3)
    for iteration in range(1, 21):
        positions = np.flatnonzero(random.random(rows) < 0.5).astype(np.int64)
        gradients = make_gradients(len(positions), dim, seed=iteration)
        update_(kind, records, positions, gradients, lr, iteration, fixed)
        pooled = theirs(torch.tensor(positions), torch.arange(len(positions) + 1))
        pooled.backward(torch.tensor(gradients))
    torch.testing.assert_close(torch.tensor(records[:, :dim]), weights, rtol=1e-5, atol=1e-6)
    for field, state in zip(optimizer(kind).state, theirs.split_optimizer_states()[0] if fixed else (), strict=True):
        mine = torch.tensor(records[:, dim:])
        torch.testing.assert_close(mine[:, 0] if field.per_row else mine, state, rtol=1e-5, atol=1e-6)
