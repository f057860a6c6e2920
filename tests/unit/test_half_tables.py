"""Tables of FP16 and BF16 in a model: against TorchRec's own, state dicts, first weights, mixed with others."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from models import (
    META,
    OPTIMIZERS,
    LossNet,
    Net,
    batch_of,
    collection,
    plain_torchrec,
    seeded,
    shard,
    table,
    tables,
    train,
    train_in_pipeline,
)
from test_sequences import batch_of as sequence_of
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.embedding_configs import DataType

pytestmark = pytest.mark.usefixtures("process_group")

DTYPES = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16, DataType.FP32: torch.float32}
HALVES = [DataType.FP16, DataType.BF16]


def of(data_type: DataType) -> list[EmbeddingBagConfig]:
    configs = tables()
    for i, config in enumerate(configs):
        config.data_type, config.init_fn = data_type, functools.partial(seeded, seed=i)
    return configs


def mixed() -> list[EmbeddingBagConfig]:
    """One of each in one collection; all of one dim and optimizer: the dtype alone makes three table groups."""
    return [table(str(t.value), 20, 8, f"f{i}", data_type=t) for i, t in enumerate(DTYPES)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fp16_is_trained_as_by_torchrec(kind: str) -> None:
    """Its sums and ours differ in order: weights by a step of float16 at most, losses by as little."""
    batches = [batch_of(6, seed) for seed in range(5)]
    model, session = shard(LossNet(collection(kind, of(DataType.FP16))))
    stock = plain_torchrec(LossNet(collection(kind, of(DataType.FP16))), trainers=1)
    torch.testing.assert_close(train(model, batches), train(stock, batches), rtol=1e-3, atol=1e-4)
    state, theirs = model.state_dict(), stock.state_dict()
    for config in tables():
        key = f"collections.0.embedding_bags.{config.name}.weight"
        expected = theirs[key].local_shards()[0].tensor
        assert state[key].dtype == expected.dtype == torch.float16
        torch.testing.assert_close(state[key], expected, rtol=2**-9, atol=1e-3)
    assert {table_group.weights for table_group in session.job.table_groups} == {"float16"}
    optimizer = model.fused_optimizer.state_dict()["state"]
    assert all(value.dtype == torch.float32 for values in optimizer.values() for value in values.values())


@pytest.mark.parametrize("data_type", DTYPES)
def test_lookups_are_the_weights_in_float32(data_type: DataType) -> None:
    original = collection("sgd", of(data_type))
    oracle = copy.deepcopy(original).float()
    model, _ = shard(original)
    features = batch_of(6, 3).sparse_features
    with torch.no_grad():
        if data_type is DataType.BF16:  # TorchRec makes float16 of it before it is sharded
            for parameter in oracle.parameters():
                parameter.copy_(parameter.bfloat16())
        ours, theirs = model(features).values(), oracle(features).values()
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("data_type", HALVES)
def test_state_dicts_have_the_tables_dtype_and_come_back_bit_for_bit(data_type: DataType) -> None:
    batches = [batch_of(6, seed) for seed in range(4)]
    model, session = shard(LossNet(collection("rowwise_adagrad", of(data_type))))
    train(model, batches[:2])
    state, optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(model.fused_optimizer.state_dict())
    key = "collections.0.embedding_bags.wide.weight"
    assert state[key].dtype == DTYPES[data_type] == dict(model.named_parameters())[key].dtype
    other, fresh = shard(LossNet(collection("rowwise_adagrad", of(data_type))))
    other.load_state_dict(dict(state))
    other.fused_optimizer.load_state_dict(optimizer)
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(session.records, fresh.records, strict=True)
    )
    losses = train(model, batches[2:])
    assert losses == train(other, batches[2:])
    model.load_state_dict(dict(state))  # in training, too; TorchRec changes the dict
    assert torch.equal(model.state_dict()[key], state[key])
    wide = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    other.load_state_dict(dict(wide))
    assert torch.equal(other.state_dict()[key], state[key]), "from float32 it is rounded"


@pytest.mark.parametrize("data_type", HALVES)
def test_first_weights(data_type: DataType) -> None:
    """Those of a module that has them; of an `init_fn`, which gets the table's dtype; or the servers' own, rounded."""
    given = collection("sgd", [table("t", 30, 4, "f0", data_type=data_type)])
    expected = given.embedding_bags["t"].weight.detach().to(DTYPES[data_type])
    model, _ = shard(given)
    assert torch.equal(model.state_dict()["embedding_bags.t.weight"], expected)
    seen: list[torch.dtype] = []

    def init(weight: torch.Tensor) -> None:
        seen.append(weight.dtype)
        nn.init.normal_(weight)

    drawn = [table("t", 30, 4, "f0", data_type=data_type, init_fn=init)]
    model, _ = shard(collection("sgd", drawn, device=META))
    weight = model.state_dict()["embedding_bags.t.weight"]
    assert seen == [DTYPES[data_type]] and weight.dtype == DTYPES[data_type] and weight.float().std() > 0.5
    model, _ = shard(collection("sgd", [table("t", 30, 4, "f0", data_type=data_type)], device=META))
    weight = model.state_dict()["embedding_bags.t.weight"]
    assert weight.dtype == DTYPES[data_type] and 0 < weight.float().abs().max() <= 30**-0.5 * 1.01


def test_tables_of_three_dtypes_in_one_collection() -> None:
    batches = [batch_of(6, seed) for seed in range(4)]
    model, session = shard(Net(collection("adagrad", mixed())))
    assert [table_group.weights for table_group in session.job.table_groups] == ["float16", "bfloat16", "float32"]
    losses = train(model, batches)
    piped, other = shard(LossNet(collection("adagrad", mixed())))
    assert train_in_pipeline(piped, batches) == losses
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(session.records, other.records, strict=True)
    )
    single, plain = shard(Net(collection("adagrad", [table(c.name, 20, 8, *c.feature_names) for c in mixed()])))
    torch.testing.assert_close(losses, train(single, batches), rtol=0.02, atol=0.02)
    assert losses != train(single, batches) and len(plain.job.table_groups) == 1, "something was rounded"


@pytest.mark.parametrize("data_type", HALVES)
def test_sequences(data_type: DataType) -> None:
    names = {"words": ["f2", "f0"], "places": ["f1"]}
    configs = [
        EmbeddingConfig(name=n, num_embeddings=30, embedding_dim=8, feature_names=f, data_type=data_type)
        for n, f in names.items()
    ]
    original = EmbeddingCollection(tables=configs)
    oracle = copy.deepcopy(original).to(DTYPES[data_type])
    with pytest.warns(UserWarning, match="have no optimizer"):
        model, _ = shard(original)
    with torch.no_grad():
        ours, theirs = model(sequence_of(4, 1)), oracle(sequence_of(4, 1))
    for key, expected in theirs.items():
        assert ours[key].values().dtype == torch.float32 and torch.equal(ours[key].values(), expected.values())
