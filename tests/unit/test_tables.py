"""What a model's tables are to the sharded module: values, checkpoints, optimizers, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fake_session import FakeSession
from models import (
    FEATURES,
    META,
    Net,
    batch_of,
    collection,
    compare_shards,
    job_of,
    plain_torchrec,
    seeded_tables,
    shard,
    table,
    tables,
    train,
)
from shards import whole
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

from torch_ecrec.nn.parallel import DistributedModelParallel

pytestmark = pytest.mark.usefixtures("process_group")


def test_a_stock_plan_is_taken() -> None:
    module = Net(collection("sgd", device=META))
    path = "collections.0"
    ranks = {config.name: table_wise(rank=0) for config in tables()}
    stock = construct_module_sharding_plan(
        module.collections[0], ranks, EmbeddingBagCollectionSharder(), device_type="cpu"
    )
    plan = ShardingPlan({path: stock})
    model, session = shard(module, plan=plan, sharders=[EmbeddingBagCollectionSharder()])
    model(batch_of(3, 0))[0].backward()
    assert session.step == 2
    assert model.plan.plan[path]["wide"].sharding_type == "erasure_coded"
    assert plan.plan[path]["wide"].sharding_type == "table_wise"


# first weights, saving and loading ----------------------------------------------------------------------


def test_meta_tables_are_left_to_the_servers() -> None:
    model, session = shard(collection(device=META))
    model(batch_of(3, 0).sparse_features)
    assert session.loads == 0 and session.opened == 1
    spec = session.job.tables[0]
    assert (spec.low, spec.high) == (-(50**-0.5), 50**-0.5)


def test_init_fn_runs_seeded_per_table() -> None:
    configs = [table("a", 30, 4, "f0", init_fn=nn.init.normal_), table("b", 30, 4, "f1", init_fn=nn.init.normal_)]
    weights = []
    for seed in (1, 2):
        original = collection(configs=copy.deepcopy(configs), device=META)
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        _, session = shard(original)
        weights.append([session.weights("a"), session.weights("b")])
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(weights[0][0], weights[1][0]) and torch.equal(weights[0][1], weights[1][1])
    assert not torch.equal(weights[0][0], weights[0][1]) and weights[0][0].std() > 0.5


def test_materialised_weights_are_loaded_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ecrec.nn.tables_state.CHUNK_BYTES", 4 * 9 * 20)
    original = collection("rowwise_adagrad")
    expected = {name: value.clone() for name, value in original.state_dict().items()}
    parameters = list(original.parameters())
    model, session = shard(original)
    for name, value in expected.items():
        assert torch.equal(session.weights(name.split(".")[1]), value)
        assert torch.equal(whole(model.state_dict()[name]), value)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    assert session.loads > len(expected)


def test_state_travels_through_a_checkpoint() -> None:
    model, session = shard(Net(collection("rowwise_adagrad"), collection("adagrad", [table("x", 9, 4, "f1")])))
    train(model, [batch_of(6, seed) for seed in range(3)])
    saved, optimizer = model.state_dict(), model.fused_optimizer.state_dict()
    state = optimizer["state"]
    assert "collections.0.embedding_bags.wide.weight" in saved and "over.weight" in saved
    assert state["collections.0.embedding_bags.wide.weight"]["wide.momentum1"].size() == (50,)
    assert state["collections.1.embedding_bags.x.weight"]["x.momentum1"].size() == (9, 4)
    other, loaded = shard(Net(collection("rowwise_adagrad"), collection("adagrad", [table("x", 9, 4, "f1")])))
    assert not torch.equal(loaded.records[0], session.records[0])
    keys = other.load_state_dict(dict(saved))  # TorchRec changes the dict
    other.fused_optimizer.load_state_dict(optimizer)
    assert not keys.missing_keys and not keys.unexpected_keys
    for a, b in zip(session.records, loaded.records, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(other.state_dict()["over.weight"], saved["over.weight"])
    with torch.no_grad():
        assert torch.equal(other(batch_of(6, 9))[1], model(batch_of(6, 9))[1])


def test_a_collection_with_two_names_is_one_tensor_in_a_state_dict() -> None:
    """What is written into it under one name was lost when the other was loaded."""
    net: Any = nn.Module()
    net.one = net.other = collection()
    session = FakeSession(job_of(net))
    model: Any = DistributedModelParallel(net, session=session)
    state = model.state_dict()
    names = sorted(name for name in state if name.startswith("one."))
    assert len(names) == 4 and all(state[name] is state[name.replace("one", "other")] for name in names)
    wanted = {name: 2 * state[name].clone() for name in names}
    for name in names:
        state[name].mul_(2)
    model.load_state_dict(state)
    for destination in ({}, state):
        again = model.state_dict(destination=destination)
        for name, value in wanted.items():
            assert torch.equal(again[name], value) and torch.equal(again[name.replace("one", "other")], value)


def test_a_model_may_be_put_back_in_training() -> None:
    """Tables, their optimizer state and dense weights: the same steps come out the same."""
    model, session = shard(Net(collection("rowwise_adagrad"), collection("adagrad", [table("x", 9, 4, "f1")])))
    train(model, [batch_of(6, 0)])
    saved, optimizer = copy.deepcopy((model.state_dict(), model.fused_optimizer.state_dict()))
    batches = [batch_of(6, seed) for seed in (1, 2)]
    train(model, batches)
    first = [records.clone() for records in session.records]
    key = "collections.1.embedding_bags.x.weight"
    assert not torch.equal(whole(model.state_dict()[key]), whole(saved[key]))
    model.load_state_dict(dict(saved))
    model.fused_optimizer.load_state_dict(optimizer)
    assert session.step == 4, "a load is no step of training"
    train(model, batches)
    assert all(map(torch.equal, session.records, first)) and session.step == 6


def test_sharded_tensors_of_torchrec_can_be_loaded() -> None:
    theirs = plain_torchrec(Net(collection("adagrad", seeded_tables(), device=META)), 1)
    train(theirs, [batch_of(6, 0)])
    model, _ = shard(Net(collection("adagrad", device=META)))
    model.load_state_dict(theirs.state_dict())
    model.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    for name, value in theirs.state_dict().items():
        compare_shards(model.state_dict()[name], value)
    momentum = model.full_optim_state_dict()["state"]["collections.0.embedding_bags.wide.weight"]["wide.momentum1"]
    assert momentum.any()


def test_wrong_shapes_and_keys_are_told() -> None:
    model, _ = shard(Net(collection(device=META)))
    saved = dict(model.state_dict())
    model, _ = shard(Net(collection(device=META)))
    name = "collections.0.embedding_bags.wide.weight"
    with pytest.raises(RuntimeError, match=r"table wide takes shape \(50, 8\) here, got \(3, 8\)"):
        model.load_state_dict({**saved, name: torch.zeros(3, 8)})
    del saved[name]
    keys = model.load_state_dict(saved, strict=False)
    assert keys.missing_keys == ["embedding_bags.wide.weight"]


def test_the_module_prints_its_tables() -> None:
    model, _ = shard(Net(collection("adagrad")))
    assert "(wide): 50 x 8, sum, adagrad, features=['f2', 'f0']" in repr(model)
    assert "(small): 20 x 4, mean, adagrad" in repr(model)


# what is refused ----------------------------------------------------------------------------------------


def test_unsuitable_models_are_refused() -> None:
    with pytest.raises(ValueError, match="the session's job has other tables"):
        DistributedModelParallel(nn.Linear(2, 2), session=FakeSession(job_of(collection("sgd"))))
    with pytest.raises(ValueError, match=r"table t: data type .* is not supported; supported are FP32, FP16, BF16"):
        shard(collection("sgd", [table("t", 4, 4, "f0", data_type=DataType.INT8)]))
    with pytest.raises(ValueError, match="`nan_gradients` must be one of raise, pass, got 'stop'"):
        shard(collection(), nan_gradients="stop")
    other = FakeSession(job_of(collection("adagrad")))
    with pytest.raises(ValueError, match="the session's job has other tables"):
        DistributedModelParallel(collection("sgd"), session=other)
    other.trainer = 1
    with pytest.raises(ValueError, match="trainer 1 of 1, but this process is rank 0 of 1"):
        DistributedModelParallel(collection("adagrad"), session=other)


@pytest.mark.parametrize("bad", [7, -1, 2**40])
def test_rows_out_of_range_are_refused(bad: int) -> None:
    model, session = shard(collection())
    values = torch.tensor([1, 2, 3, 4, 5, bad, 6, 0])
    features = KeyedJaggedTensor.from_lengths_sync(FEATURES, values, torch.tensor([1, 1, 1, 1, 1, 0, 1, 2]))
    with pytest.raises(ValueError, match=f"id {bad} of feature f3 is out of range: table last has 7 rows"):
        model(features)
    assert session.lookups == 0


def test_a_missing_feature_is_told() -> None:
    model, _ = shard(collection())
    features = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="the batch lacks features f2, f3; it has f0, f1"):
        model(features)


def test_equal_names_in_two_collections_are_told_apart() -> None:
    first, second = collection("sgd", [table("t", 20, 8, "f0")]), collection("sgd", [table("t", 20, 4, "f1")])
    model, session = shard(Net(first, second))
    assert [t.name for t in session.job.tables] == ["collections.0.t", "collections.1.t"]
    assert "collections.1.embedding_bags.t.weight" in model.state_dict()
