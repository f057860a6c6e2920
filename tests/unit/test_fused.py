"""Fused collections on the servers, against TorchRec's own sharding of them and against the same tables unfused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torchrec.distributed
from models import CPU, META, SUM, Net, batch_of, compare_shards, seeded_tables, shard, tables
from test_sequences import Reader
from test_sequences import batch_of as sequence_batch
from test_sequences import configs as sequence_configs
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import ShardedFusedEmbeddingCollection
from torchrec.distributed.fused_embeddingbag import (
    FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)

ON_A_CPU: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}),
}


def bags(
    cls: type, arguments: dict[str, Any], device: torch.device = CPU, is_weighted: bool = False
) -> FusedEmbeddingBagCollection:
    configs = seeded_tables()
    for config in configs:
        if is_weighted:  # FBGEMM's backward of a weighted mean on a CPU is not the gradient of its forward
            config.pooling = SUM
    return FusedEmbeddingBagCollection(configs, cls, arguments, device=device, is_weighted=is_weighted)


def net(fused: FusedEmbeddingBagCollection) -> Net:
    torch.manual_seed(0)
    return Net(fused)  # type: ignore[arg-type]


def stock(module: nn.Module) -> nn.Module:
    sharder = FusedEmbeddingBagCollectionSharder()
    ranks = {config.name: table_wise(rank=0, compute_kernel="fused") for config in tables()}
    plan = construct_module_sharding_plan(module.collections[0], ranks, sharder, device_type="cpu")
    return torchrec.distributed.DistributedModelParallel(
        module, device=CPU, plan=ShardingPlan({"collections.0": plan}), sharders=[sharder]
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ON_A_CPU)
def test_bags_are_trained_and_named_as_by_torchrec(kind: str, weighted: bool) -> None:
    theirs, module = (net(bags(*ON_A_CPU[kind], META, is_weighted=weighted)) for _ in range(2))
    oracle, (mine, _) = stock(theirs), shard(module)
    assert isinstance(mine.module.collections[0], ShardedFusedEmbeddingBagCollection)
    for seed in range(5):
        batch = batch_of(6, seed, weighted=weighted)
        (expected, _), (loss, _) = oracle(batch), mine(batch)
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
    for left, right in ((mine, oracle), (mine.fused_optimizer, oracle.fused_optimizer)):
        ours, stocks = left.state_dict(), right.state_dict()
        if left is not mine:
            ours, stocks = ours["state"], stocks["state"]
            for key in stocks:
                assert ours[key].keys() == stocks[key].keys()
            ours, stocks = (
                {(k, n): value for k, values in state.items() for n, value in values.items()}
                for state in (ours, stocks)
            )
        assert ours.keys() == stocks.keys()
        for name in ours:
            compare_shards(ours[name], stocks[name])


def test_adam_is_what_the_same_tables_with_adam_are() -> None:
    """FBGEMM makes no module with Adam on a CPU: what one made on a GPU says of itself is said by another."""
    cls, arguments = torch.optim.Adam, {"lr": 0.02, "eps": 1e-6, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.01}
    made = bags(*ON_A_CPU["sgd"], META)
    made._optimizer_type, made._optimizer_kwargs = cls, arguments
    fused, _ = shard(net(made))
    converted = convert_optimizer_type_and_kwargs(cls, arguments)
    assert converted is not None
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": converted[0], **converted[1]})
    torch.manual_seed(0)
    plain, _ = shard(Net(EmbeddingBagCollection(tables=seeded_tables(), device=META)), sharders=[sharder])
    for seed in range(3):
        batch = batch_of(6, seed)
        (one, _), (other, _) = fused(batch), plain(batch)
        assert torch.equal(one, other)
        one.backward()
        other.backward()
    assert fused.session.job.tables == plain.session.job.tables
    assert fused.session.job.tables[0].optimizer.kind == "adam"
    assert fused.digest() == plain.digest()


def test_weights_of_a_module_that_has_some_are_kept() -> None:
    """As with the unfused; TorchRec draws new ones."""
    module = net(bags(*ON_A_CPU["sgd"]))
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    model, _ = shard(module)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_sequences_are_what_the_same_tables_with_that_optimizer_are() -> None:
    """TorchRec makes them on a GPU or on the meta device only."""
    cls, arguments = ON_A_CPU["adagrad"]
    made = FusedEmbeddingCollection(sequence_configs(), cls, arguments, device=META)
    unfused = EmbeddingCollection(tables=sequence_configs(), device=META)
    apply_optimizer_in_backward(cls, unfused.parameters(), arguments)
    fused, _ = shard(Reader(made))  # type: ignore[arg-type]
    plain, _ = shard(Reader(unfused))
    assert isinstance(fused.module.tables, ShardedFusedEmbeddingCollection)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    for seed in range(3):
        one, other = fused(sequence_batch(5, seed)), plain(sequence_batch(5, seed))
        assert torch.equal(one, other)
        one.backward()
        other.backward()
    assert fused.digest() == plain.digest()


def test_a_learning_rate_is_set_as_ever() -> None:
    model, session = shard(net(bags(*ON_A_CPU["sgd"])))
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    model(batch_of(4, 0))[0].backward()
    assert session.rates == [[0.25] * len(session.job.table_groups)]


def test_what_it_wants_and_is_not_there_is_refused_by_name() -> None:
    fused = bags(torch.optim.SGD, {"lr": 0.1, "stochastic_rounding": False})
    fused.optimizer_kwargs()["counter_halflife"] = 7
    with pytest.raises(ValueError, match="table wide: optimizer sgd with counter_halflife=7 is not supported"):
        shard(net(fused))


class Custom(FusedEmbeddingBagCollectionSharder):
    def shard(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the tables are on servers")


def test_a_sharder_with_a_shard_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="sharder Custom has a `shard` of its own"):
        shard(net(bags(*ON_A_CPU["sgd"])), sharders=[Custom()])
