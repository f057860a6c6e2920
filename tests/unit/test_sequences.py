"""`EmbeddingCollection` on the servers, against the unsharded module and against TorchRec's own model parallelism."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torchrec.distributed
from models import (
    CPU,
    EPS,
    LR,
    META,
    OPTIMIZERS,
    collection,
    dense_parameters,
    shard,
    table,
    train,
    train_in_pipeline,
)
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)

FEATURES = ["f0", "f1", "f2"]


def configs(dim: int = 8) -> list[EmbeddingConfig]:
    """Two features in a table, a feature in two tables, another order than the batch's."""
    return [
        EmbeddingConfig(name="words", num_embeddings=30, embedding_dim=dim, feature_names=["f2", "f0"]),
        EmbeddingConfig(name="places", num_embeddings=9, embedding_dim=dim, feature_names=["f1"]),
        EmbeddingConfig(name="again", num_embeddings=12, embedding_dim=dim, feature_names=["f1"]),
    ]


def sequences(kind: str = "sgd", device: torch.device = CPU, need_indices: bool = False) -> EmbeddingCollection:
    torch.manual_seed(0)
    made = EmbeddingCollection(tables=configs(), device=device, need_indices=need_indices)
    arguments = {"lr": LR} if kind == "sgd" else {"lr": LR, "eps": EPS}
    apply_optimizer_in_backward(OPTIMIZERS[kind], made.parameters(), arguments)
    return made


def batch_of(size: int, seed: int, most: int = 4) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES) * size,), generator=random, dtype=torch.int32)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths)


KEYS = ["f2", "f0", "f1@places", "f1@again"]


class Reader(nn.Module):
    """Weighs the rows of each sequence by their place, so that an order mixed up would be seen."""

    def __init__(self, tables: EmbeddingCollection) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(1)
        self.over = nn.Linear(8, 1, dtype=torch.float32)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.tables(features)
        total = torch.zeros((), dtype=torch.float32)
        for number, key in enumerate(KEYS):
            values = rows[key].values()
            places = torch.ones_like(values[:, 0]).cumsum(0) * (number + 1)
            total = total + (torch.tanh(self.over(values)).squeeze(1) * places).sum() / 10
        return total


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sharded_equals_unsharded(kind: str) -> None:
    module = Reader(sequences(kind))
    oracle = copy.deepcopy(module)
    model, session = shard(module)
    dense = [p for name, p in oracle.named_parameters() if "embeddings" not in name]
    sparse = [p for name, p in oracle.named_parameters() if "embeddings" in name]
    arguments = {} if kind == "sgd" else {"eps": EPS}
    theirs = [torch.optim.SGD(dense, lr=0.1), OPTIMIZERS[kind](sparse, lr=LR, **arguments)]
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(6):
        features = batch_of(5, seed, most=4 if seed != 3 else 0)
        expected, loss = oracle(features), model(features)
        torch.testing.assert_close(loss, expected)
        for optimizer in (*theirs, mine):
            optimizer.zero_grad()
        expected.backward()
        loss.backward()
        for optimizer in (*theirs, mine):
            optimizer.step()
    assert session.step == 7
    state = model.full_state_dict()
    for name, parameter in oracle.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach())


@pytest.mark.parametrize("need_indices", [False, True])
def test_the_output_is_that_of_the_unsharded_module(need_indices: bool) -> None:
    module = sequences(need_indices=need_indices)
    oracle = copy.deepcopy(module)
    model, _ = shard(module)
    features = batch_of(4, 2)
    with torch.no_grad():
        expected, rows = oracle(features), model(features)
    assert list(rows.keys()) == list(expected.keys()) == KEYS
    for key, theirs in expected.items():
        assert torch.equal(rows[key].values(), theirs.values())
        assert torch.equal(rows[key].lengths(), theirs.lengths())
        assert torch.equal(rows[key].offsets(), theirs.offsets())
        if need_indices:
            assert torch.equal(rows[key].weights(), theirs.weights())
        else:
            assert rows[key].weights_or_none() is None


class Both(nn.Module):
    """Bags and sequences, of tables with equal names."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection("sgd", [table("words", 30, 8, "f0")])
        self.sequences = sequences()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = self.sequences(features)
        return self.bags(features).values().sum() + sum(rows[key].values().sum() for key in KEYS)


def test_bags_and_sequences_are_one_step() -> None:
    model, session = shard(Both())
    assert [t.name for t in session.job.tables] == ["bags.words", "sequences.words", "places", "again"]
    model(batch_of(4, 0)).backward()
    assert session.step == 2
    keys = {"bags.embedding_bags.words.weight", "sequences.embeddings.words.weight"}
    assert keys <= set(model.state_dict())


def test_state_travels_from_torchrec() -> None:
    module = Reader(sequences("adagrad", device=META))
    ranks = {config.name: table_wise(rank=0) for config in configs()}
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(module.tables, ranks, sharder, local_size=1, device_type="cpu")
    theirs = torchrec.distributed.DistributedModelParallel(module, device=CPU, plan=ShardingPlan({"tables": plan}))
    theirs(batch_of(4, 0)).backward()
    model, _ = shard(Reader(sequences("adagrad", device=META)))
    assert set(model.state_dict()) == set(theirs.state_dict())
    state = theirs.fused_optimizer.state_dict()["state"]
    assert {name: set(fields) for name, fields in model.fused_optimizer.state_dict()["state"].items()} == {
        name: set(fields) for name, fields in state.items()
    }
    later, _ = shard(Reader(sequences("adagrad", device=META)))
    later.load_state_dict(theirs.state_dict())
    later.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    for seed in (1, 2):
        features = batch_of(4, seed)
        losses = [one(features) for one in (later, theirs)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()


class InPipeline(Reader):
    """A pipeline's batch, and its pair of loss and output."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = super().forward(batch.sparse_features)
        return loss, loss.detach()


def test_the_pipeline_equals_the_plain_loop() -> None:
    batches = [
        Batch(torch.zeros(1, dtype=torch.float32), batch_of(4, seed), torch.zeros(1, dtype=torch.float32))
        for seed in range(6)
    ]
    ends, losses = [], []
    for run in (train, train_in_pipeline):
        model, session = shard(InPipeline(sequences("rowwise_adagrad")))
        losses.append(run(model, batches))
        assert session.step == 7 and len(session.ahead) == (5 if run is train_in_pipeline else 0)
        ends.append([*session.records, *dense_parameters(model).values()])
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
    assert all(torch.equal(plain, piped) for plain, piped in zip(*ends, strict=True))


def test_a_batch_of_no_samples_is_a_step_too() -> None:
    model, session = shard(sequences())
    rows = model(batch_of(0, 0))
    assert [tuple(rows[key].values().shape) for key in KEYS] == [(0, 8)] * 4
    sum(jagged.values().sum() for jagged in rows.values()).backward()
    assert session.step == 2


def test_ids_that_are_no_integers_are_refused() -> None:
    model, session = shard(sequences())
    features = KeyedJaggedTensor.from_lengths_sync(
        FEATURES, torch.rand(3, dtype=torch.float32), torch.ones(3, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match=r"ids must be int64 or int32, got torch\.float32"):
        model(features)
    assert session.lookups == 0
