"""A batch size per feature and inverse indices: against the unsharded collection, and TorchRec's own sharding."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torchrec.distributed
from models import (
    CPU,
    FEATURES,
    MEAN,
    OPTIMIZERS,
    SUM,
    LossNet,
    Oracle,
    collection,
    plain_torchrec,
    repeated_batch,
    seeded,
    shard,
    table,
    tables,
    train,
    train_in_pipeline,
)
from test_sequences import FEATURES as OF_SEQUENCES
from test_sequences import KEYS, Reader, sequences
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan

from torch_ecrec.nn.repeats import repeated

pytestmark = pytest.mark.usefixtures("process_group")


def batch(samples: int, seed: int, **more: Any) -> Batch:
    random = torch.Generator().manual_seed(seed)
    sparse = repeated_batch(FEATURES, samples, seed, **more)
    return Batch(
        torch.randn(samples, 2, generator=random, dtype=torch.float32),
        sparse,
        torch.randn(samples, generator=random, dtype=torch.float32),
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_sharded_equals_unsharded(kind: str, weighted: bool) -> None:
    configs = tables()
    if weighted:  # torch's own bags cannot take a weighted mean
        for config in configs:
            config.pooling = SUM
    original = collection(kind, configs, is_weighted=weighted)
    oracle = Oracle(original, kind)
    model, session = shard(original)
    for seed in range(6):
        features = repeated_batch(FEATURES, 3 + seed, seed, weighted=weighted)
        ours, theirs = model(features), oracle.module(features)
        assert ours.keys() == theirs.keys() and ours.length_per_key() == theirs.length_per_key()
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6)
        weights = torch.randn(1, ours.values().shape[1], dtype=torch.float32)
        (ours.values() * weights).square().sum().backward()
        oracle.optimizer.zero_grad()
        (theirs.values() * weights).square().sum().backward()
        oracle.optimizer.step()
        for config in configs:
            expected = oracle.module.embedding_bags[config.name].weight.detach()
            torch.testing.assert_close(session.weights(config.name), expected, rtol=1e-4, atol=1e-5)
    assert session.step == 7


def test_bit_for_bit_where_sums_have_one_order() -> None:
    """One id in a bag, each id once: a row's gradient is the sum over its samples, in their order."""
    original = collection("sgd", [table("t", 10, 4, "f0")])
    oracle = Oracle(original, "sgd")
    model, session = shard(original)
    features = KeyedJaggedTensor(
        keys=["f0"],
        values=torch.tensor([3, 8, 1]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[3]],
        inverse_indices=(["f0"], torch.tensor([[0, 2, 0, 0, 2]])),
    )
    ours, theirs = model(features), oracle.module(features)
    assert torch.equal(ours.values(), theirs.values()) and len(ours.values()) == 5
    slopes = torch.randn(5, 4, dtype=torch.float32)
    (ours.values() * slopes).sum().backward()
    (theirs.values() * slopes).sum().backward()
    rows, gradients = session.pushed[-1]
    assert torch.equal(gradients[0], oracle.module.embedding_bags["t"].weight.grad[rows[0]])
    by_row = dict(zip(rows[0].tolist(), gradients[0], strict=True))
    assert torch.equal(by_row[8], torch.zeros(4, dtype=torch.float32)), "a bag that no sample has"


def lossy() -> LossNet:
    configs = [table("a", 50, 8, "f2", "f0"), table("b", 20, 4, "f1"), table("c", 30, 8, "f1"), table("d", 7, 4, "f3")]
    for i, config in enumerate(configs):
        config.init_fn = functools.partial(seeded, seed=i)  # TorchRec's model draws first weights again
    return LossNet(collection("rowwise_adagrad", configs))  # on a CPU TorchRec does not do two poolings at a time


def test_it_is_torchrecs_own_sharding_and_the_pipeline_is_the_plain_loop() -> None:
    batches = [batch(6, seed) for seed in range(5)]
    (model, session), (other, other_session) = shard(lossy()), shard(lossy())
    stock = plain_torchrec(lossy(), trainers=1)
    torch.testing.assert_close(train(model, batches), train(stock, batches))
    train_in_pipeline(other, batches)
    assert all(map(torch.equal, session.records, other_session.records))


def test_gradient_clipping_is_of_bags() -> None:
    """As FBGEMM, which does not know samples: it clamps after their gradients are summed."""
    original = collection("sgd", [table("t", 10, 4, "f0")])
    model, session = shard(original)
    model.module._slices[0].limit = 1.0
    features = KeyedJaggedTensor(
        keys=["f0"],
        values=torch.tensor([3, 8]),
        lengths=torch.ones(2, dtype=torch.int64),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["f0"], torch.tensor([[0, 0, 1]])),
    )
    (model(features).values() * torch.tensor([[0.75], [0.75], [0.5]], dtype=torch.float32)).sum().backward()
    rows, gradients = session.pushed[-1]
    by_row = dict(zip(rows[0].tolist(), gradients[0], strict=True))
    assert torch.equal(by_row[3], torch.full((4,), 1.0, dtype=torch.float32)) and torch.equal(
        by_row[8], torch.full((4,), 0.5, dtype=torch.float32)
    )


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_are_those_of_torchrecs_own_sharding(need_indices: bool) -> None:
    module, sharder = Reader(sequences(need_indices=need_indices)), EmbeddingCollectionSharder()
    places = {c.name: table_wise(rank=0, compute_kernel="fused") for c in module.tables.embedding_configs()}
    plan = ShardingPlan({"tables": construct_module_sharding_plan(module.tables, places, sharder, device_type="cpu")})
    model, _ = shard(copy.deepcopy(module))
    stock = torchrec.distributed.DistributedModelParallel(module, device=CPU, plan=plan, sharders=[sharder])
    for seed in range(4):
        features = repeated_batch(OF_SEQUENCES, 4, seed)
        with torch.no_grad():
            ours, theirs = model.module.tables(features), stock.module.tables(features)
        for key in KEYS:
            assert torch.equal(ours[key].lengths(), theirs[key].lengths())
            assert torch.equal(ours[key].values(), theirs[key].values())
            if need_indices:
                assert torch.equal(ours[key].weights(), theirs[key].weights())


def test_sequences_are_trained_as_if_every_sample_had_its_own() -> None:
    """On a CPU TorchRec's own sharding has no gradients here, and says so."""
    (plain, plain_session), (model, session) = (shard(Reader(sequences("rowwise_adagrad"))) for _ in "ab")
    for seed in range(4):
        features = repeated_batch(OF_SEQUENCES, 4, seed)
        loss, expected = model(features), plain(repeated(features))
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert all(map(torch.equal, session.records, plain_session.records))
    assert session.step == plain_session.step == 5


def features_with(**changes: Any) -> KeyedJaggedTensor:
    arguments: dict[str, Any] = {
        "keys": ["f0", "f1"],
        "values": torch.tensor([1, 2, 3]),
        "lengths": torch.ones(3, dtype=torch.int64),
        "stride_per_key_per_rank": [[1], [2]],
        "inverse_indices": (["f1", "f0"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
        **changes,
    }
    return KeyedJaggedTensor(**arguments)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no inverse indices": ({"inverse_indices": None}, "a batch size per feature .* needs `inverse_indices`"),
    "no batch sizes": (
        {"stride_per_key_per_rank": None, "values": torch.tensor([1, 2, 3, 4]), "lengths": torch.ones(4).long()},
        "`inverse_indices` and no batch size per feature",
    ),
    "a feature is lacking": ({"inverse_indices": (["f0"], torch.zeros(1, 3).long())}, "lack features f1"),
    "another shape": ({"inverse_indices": (["f0", "f1"], torch.zeros(6).long())}, "must have a row for each"),
    "no such bag": (
        {"inverse_indices": (["f0", "f1"], torch.tensor([[0, 0], [0, 2]]))},
        "inverse index 2 of feature f1 is out of range: it has 2 bags",
    ),
    "negative": (
        {"inverse_indices": (["f0", "f1"], torch.tensor([[0, -1], [0, 0]]))},
        "inverse index -1 of feature f0 is out of range: it has 1 bags",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_says_nothing_certain_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    model, session = shard(collection("sgd", [table("a", 9, 4, "f0"), table("b", 9, 4, "f1", pooling=MEAN)]))
    assert model(features_with()).values().shape == (3, 8)
    looked_up = session.lookups
    with pytest.raises(ValueError, match=message):
        model(features_with(**changes))
    assert session.lookups == looked_up


def test_what_is_not_pooled_is_repeated_sample_by_sample() -> None:
    features = features_with(lengths=torch.tensor([1, 0, 2]))
    found = repeated(features)
    assert found.stride() == 3 and found.keys() == ["f0", "f1"]
    assert found.values().tolist() == [1, 1, 1, 2, 3, 2, 3] and found.lengths().tolist() == [1, 1, 1, 0, 2, 2]


def test_no_samples_and_no_bags() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0"), table("u", 10, 4, "f1")])
    model, _ = shard(original)
    nothing = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.empty(0, dtype=torch.int64),
        lengths=torch.empty(0, dtype=torch.int64),
        stride_per_key_per_rank=[[0], [0]],
        inverse_indices=(["f0", "f1"], torch.empty(2, 0, dtype=torch.int64)),
    )
    assert model(nothing).values().shape == (0, 8)
