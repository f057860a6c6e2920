"""The sharded module against its oracles: the unsharded `EmbeddingBagCollection`, and TorchRec's own model parallelism.

The backend is `FakeSession`, tables of records in memory.
"""

from __future__ import annotations

import copy
import functools
import json
import operator
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchrec.distributed
from fake_session import FakeSession
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.dense import load_, unpack
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import job_names, optimizer_spec, table_specs
from torch_ecrec.nn.unsharded import COLLECTIONS
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore", category=DeprecationWarning)
CPU, META = torch.device("cpu"), torch.device("meta")
OPTIMIZERS: dict[str, type] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}
LR, EPS = 0.05, 1e-8
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


class Net(nn.Module):
    """One or more collections and a dense layer. The loss is a mean over the batch."""

    def __init__(self, *collections: EmbeddingBagCollection) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        width = sum(c.embedding_dim * len(c.feature_names) for e in collections for c in e.embedding_bag_configs())
        self.keys = [
            sorted(name for names in get_embedding_names_by_table(e.embedding_bag_configs()) for name in names)
            for e in collections
        ]
        self.over = nn.Linear(width, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = [collection(batch.sparse_features) for collection in self.collections]
        pooled = torch.cat([o[key] for o, keys in zip(outputs, self.keys, strict=True) for key in keys], dim=1)
        logits = torch.tanh(self.over(pooled)).squeeze(1) + batch.dense_features.sum(dim=1)
        return nn.functional.mse_loss(logits, batch.labels), logits


def table(
    name: str, rows: int, dim: int, *features: str, pooling: PoolingType = SUM, **more: Any
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), pooling=pooling, **more
    )


def tables() -> list[EmbeddingBagConfig]:
    """Two dims, two features in a table, a feature in two tables, both poolings, another order than the batch's."""
    return [
        table("wide", 50, 8, "f2", "f0"),
        table("small", 20, 4, "f1", pooling=MEAN),
        table("shared", 30, 8, "f1", pooling=MEAN),
        table("last", 7, 4, "f3"),
    ]


FEATURES = ["f0", "f1", "f2", "f3"]


def batch_of(size: int, seed: int, most: int = 3, weighted: bool = False, rows: int = 7) -> Batch:
    """Bags of 0 to `most` ids below `rows`, with repetitions."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES) * size,), generator=random, dtype=torch.int32)
    count = int(lengths.sum())
    values = torch.randint(0, rows, (count,), generator=random)
    weights = torch.rand(count, generator=random) if weighted else None
    sparse = KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths, weights)
    return Batch(torch.randn(size, 2, generator=random), sparse, torch.randn(size, generator=random))


def collection(
    kind: str = "sgd", configs: list[EmbeddingBagConfig] | None = None, device: torch.device = CPU, **more: Any
):
    torch.manual_seed(0)
    made = EmbeddingBagCollection(tables=configs or tables(), device=device, **more)
    arguments = {"lr": LR} if kind == "sgd" else {"lr": LR, "eps": EPS}
    apply_optimizer_in_backward(OPTIMIZERS[kind], made.parameters(), arguments)
    return made


def job_of(module: nn.Module, trainers: int = 1, seed: int = 0) -> JobSpec:
    collections = {p: m for p, m in module.named_modules() if type(m) in COLLECTIONS}
    names = job_names(collections)
    specs = tuple(spec for path, child in collections.items() for spec in table_specs(child, names[path]))
    return JobSpec(tables=specs, code=CodeSpec(), trainers=trainers, seed=seed)


def shard(
    module: nn.Module, trainers: int = 1, trainer: int = 0, device: torch.device = CPU, **more: Any
) -> tuple[Any, FakeSession]:
    session = FakeSession(job_of(module, trainers), trainer)
    return DistributedModelParallel(module, device=device, session=session, **more), session


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(in_backward_optimizer_filter(model.named_parameters()))


# against the unsharded module -----------------------------------------------------------------------


class Oracle:
    """The same collection in one process, its rows updated by dense torch optimizers."""

    def __init__(self, original: EmbeddingBagCollection, kind: str) -> None:
        self.module = EmbeddingBagCollection(
            tables=original.embedding_bag_configs(), device=CPU, is_weighted=original.is_weighted()
        )
        self.module.load_state_dict(original.state_dict())
        arguments = {} if kind == "sgd" else {"eps": EPS}
        self.optimizer = OPTIMIZERS[kind](self.module.parameters(), lr=LR, **arguments)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [1, 4])
def test_sharded_equals_unsharded(kind: str, weighted: bool, most: int) -> None:
    configs = tables()
    if weighted:  # torch's own bags cannot take a weighted mean
        for config in configs:
            config.pooling = SUM
    original = collection(kind, configs, is_weighted=weighted)
    oracle = Oracle(original, kind)
    model, session = shard(original)
    for seed in range(4):
        features = batch_of(6, seed, most, weighted).sparse_features
        weights = torch.randn(1, 8 * 2 + 4 + 8 + 4)
        ours, theirs = model(features), oracle.module(features)
        assert ours.keys() == theirs.keys() == ["f2", "f0", "f1@small", "f1@shared", "f3"]
        assert ours.length_per_key() == theirs.length_per_key()
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-6)
        (ours.values() * weights).square().sum().backward()
        oracle.optimizer.zero_grad()
        (theirs.values() * weights).square().sum().backward()
        rows, gradients = session.pushed[-1]
        for config in configs:
            slab, first = session.job.place_of_table[config.name]
            grad = torch.zeros(session.job.slabs[slab].rows, config.embedding_dim)
            grad[rows[slab]] = gradients[slab]
            expected = oracle.module.embedding_bags[config.name].weight.grad
            torch.testing.assert_close(grad[first : first + config.num_embeddings], expected, rtol=1e-4, atol=1e-5)
        oracle.optimizer.step()
        for config in configs:
            expected = oracle.module.embedding_bags[config.name].weight
            torch.testing.assert_close(session.weights(config.name), expected, rtol=1e-4, atol=1e-5, check_device=False)
    assert session.step == 5 and len(session.pushed) == 4


def test_weighted_mean_divides_by_the_number_of_ids() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0", pooling=MEAN)], is_weighted=True)
    rows = original.embedding_bags["t"].weight.detach().clone()
    model, _ = shard(original)
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f0"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([0.5, 2.0, 3.0])
    )
    expected = torch.stack([(0.5 * rows[1] + 2 * rows[2]) / 2, torch.zeros(4), 3 * rows[3]])
    torch.testing.assert_close(model(features).values().detach(), expected)


def test_id_weights_get_gradients() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0")], is_weighted=True)
    rows = original.embedding_bags["t"].weight.detach().clone()
    model, _ = shard(original)
    weights = torch.ones(3, requires_grad=True)
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1, 2, 3]), torch.tensor([2, 1]), weights)
    model(features).values().sum().backward()
    torch.testing.assert_close(weights.grad, rows[[1, 2, 3]].sum(dim=1))


def test_empty_bags_and_empty_batches_are_steps_too() -> None:
    model, session = shard(collection())
    before = [records.clone() for records in session.records]
    for size, most in [(3, 0), (0, 0)]:
        values = model(batch_of(size, 0, most).sparse_features).values()
        assert values.shape == (size, 32) and not values.any()
        values.sum().backward()
    assert session.step == 3
    assert all(len(rows) == 0 for push in session.pushed for rows in push[0])
    assert all(torch.equal(a, b) for a, b in zip(before, session.records, strict=True))


def test_duplicate_ids_are_asked_for_once_and_their_gradients_summed() -> None:
    model, session = shard(collection("sgd", [table("t", 10, 4, "f0", "f1")]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0", "f1"], torch.tensor([3, 3, 1, 3]), torch.tensor([2, 1, 1, 0]))
    model(features).values().sum().backward()
    rows, gradients = session.pushed[0]
    assert dict(zip(rows[0].tolist(), gradients[0].tolist(), strict=True)) == {1: [1.0] * 4, 3: [3.0] * 4}


# what is a step ---------------------------------------------------------------------------------------


def test_only_a_backward_ends_a_step() -> None:
    model, session = shard(collection())
    features = batch_of(4, 0).sparse_features
    with torch.no_grad():
        model(features).values()
    model.eval()
    model(features).values()
    model.train()
    first = model(features).values().sum()
    second = model(features).values().sum()
    assert session.step == 1 and session.lookups == 4
    second.backward()
    assert session.step == 2
    first.backward()  # later than it should: a step of its own, as in TorchRec
    assert session.step == 3


def test_several_collections_are_one_step() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0"), table("b", 20, 4, "f1")]), collection()
    model, session = shard(Net(first, second))
    loss, _ = model(batch_of(5, 1))
    loss.backward()
    assert session.step == 2 and session.lookups == 2
    assert all(len(rows) for rows in session.pushed[0][0])


def test_a_collection_used_twice_gets_the_sum() -> None:
    original = collection("sgd", [table("t", 10, 4, "f0")])
    model, session = shard(original)
    one, two = (
        KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor(v), torch.tensor([2])) for v in ([1, 2], [2, 5])
    )
    (model(one).values().sum() + 10 * model(two).values().sum()).backward()
    rows, gradients = session.pushed[0]
    assert session.step == 2 and rows[0].tolist() == [1, 2, 5]
    assert gradients[0][:, 0].tolist() == [1.0, 11.0, 10.0]


def test_an_unused_collection_does_not_hold_the_step_up() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 4, "f1")])
    model, session = shard(nn.ModuleList([first, second]))
    features = batch_of(5, 1).sparse_features
    used, unused = (child(features).values() for child in model.module)
    used.sum().backward()
    assert session.step == 2 and len(session.pushed[0][0][0]) and not len(session.pushed[0][0][1])
    assert unused.requires_grad


def test_the_push_does_not_wait_for_the_rest_of_the_backward() -> None:
    model, session = shard(collection("sgd", [table("t", 10, 4, "f0")]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1]), torch.tensor([1]))
    bottom = torch.ones(1, requires_grad=True)
    scaled = bottom * 2  # made before the lookup: its backward comes after that of the lookup
    steps = []
    scaled.register_hook(lambda _: steps.append(session.step))
    for _ in range(2):
        (model(features).values().sum() * scaled).sum().backward(retain_graph=True)
    assert steps == [2, 3]


def test_running_a_graph_twice_is_two_steps() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 4, "f1")])
    model, session = shard(Net(first, second))
    loss, _ = model(batch_of(5, 1))
    loss.backward(retain_graph=True)
    loss.backward()
    assert session.step == 3
    for slab in range(2):
        assert torch.equal(session.pushed[0][0][slab], session.pushed[1][0][slab])
        assert torch.equal(session.pushed[0][1][slab], session.pushed[1][1][slab])


def test_a_backward_that_fails_leaves_nothing_behind() -> None:
    first, second = collection("sgd", [table("a", 20, 4, "f0")]), collection("sgd", [table("b", 20, 4, "f0")])
    model, session = shard(nn.ModuleList([first, second]))
    features = KeyedJaggedTensor.from_lengths_sync(["f0"], torch.tensor([1]), torch.tensor([1]))

    def fail(*_: Any) -> None:
        raise ConnectionError("gone")

    breaks, gathered = (child(features).values() for child in model.module)
    breaks.register_hook(fail)  # made first, so its gradient comes last
    with pytest.raises(ConnectionError):
        (breaks.sum() + gathered.sum()).backward()
    del breaks, gathered
    model.module[1](features).values().sum().backward()
    push, session.push = session.push, fail
    with pytest.raises(ConnectionError):
        model.module[1](features).values().sum().backward()
    session.push = push
    model.module[1](features).values().sum().backward()
    assert session.step == 3
    assert [gradients[0].tolist() for _, gradients in session.pushed] == [[[1.0] * 4]] * 2


# through TorchRec's machinery -------------------------------------------------------------------------


def optimizer_of(model: nn.Module) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adagrad(p, lr=LR))
    return CombinedOptimizer([model.fused_optimizer, dense])


def train(model: nn.Module, batches: list[Batch], optimizer: CombinedOptimizer | None = None) -> list[float]:
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_in_pipeline(model: nn.Module, batches: list[Batch], device: torch.device = CPU) -> list[float]:
    """As `train`, in TorchRec's pipeline, which takes the batches to the device."""
    runner, stream = TrainPipelineSparseDist(model, optimizer_of(model), device), iter(batches)
    return [float(runner.progress(stream)) for _ in batches]


class LossNet(Net):
    """A pipeline returns the second of (loss, output)."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, _ = super().forward(batch)
        return loss, loss.detach()


def test_the_pipeline_equals_the_plain_loop() -> None:
    batches = [batch_of(8, seed) for seed in range(6)]
    ends, losses = [], []
    for pipeline in (False, True):
        model, session = shard(LossNet(collection("rowwise_adagrad")))
        losses.append(train_in_pipeline(model, batches) if pipeline else train(model, batches))
        assert session.step == 7
        used = dict(session.looked_up)
        assert [step for step, _ in session.ahead] == ([2, 3, 4, 5, 6] if pipeline else [])
        assert all(rows is used[step] or all(map(operator.is_, rows, used[step])) for step, rows in session.ahead)
        ends.append((session.records, list(dense_parameters(model).values())))
    assert losses[0] == losses[1] and len(set(losses[0])) == 6
    for plain, piped in zip(ends[0][0] + ends[0][1], ends[1][0] + ends[1][1], strict=True):
        assert torch.equal(plain, piped)


def seeded(weight: Tensor, seed: int) -> None:
    with torch.no_grad():
        weight.copy_(torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed)) - 0.5)


def seeded_tables() -> list[EmbeddingBagConfig]:
    configs = tables()
    for i, config in enumerate(configs):
        config.init_fn = functools.partial(seeded, seed=i)
    return configs


def plain_torchrec(module: nn.Module, trainers: int) -> nn.Module:
    plans = {}
    for path, child in module.named_modules():
        if isinstance(child, EmbeddingBagCollection):
            ranks = {c.name: table_wise(rank=i % trainers) for i, c in enumerate(child.embedding_bag_configs())}
            plans[path] = construct_module_sharding_plan(
                child, ranks, EmbeddingBagCollectionSharder(), device_type="cpu"
            )
    return torchrec.distributed.DistributedModelParallel(module, device=CPU, plan=ShardingPlan(plans))


def compare_with_torchrec(trainers: int, trainer: int, kind: str) -> None:
    """The same losses, rows and optimizer state as TorchRec's own model parallelism, step by step."""
    batches = [batch_of(6, 100 * seed + trainer) for seed in range(8)]
    ends = []
    for ours in (True, False):
        module = Net(collection(kind, seeded_tables(), device=META))
        if ours:
            model, session = shard(module, trainers, trainer)
        else:
            model = plain_torchrec(module, trainers)
        losses = train(model, batches)
        state = model.fused_optimizer.state_dict()["state"]
        ends.append((losses, model.state_dict(), state))
    (our_losses, our_rows, our_state), (losses, rows, state) = ends
    print(kind, "losses", losses)
    torch.testing.assert_close(torch.tensor(our_losses), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    assert our_rows.keys() == rows.keys() and our_state.keys() >= state.keys()  # TorchRec: of the rank's own tables
    for name, theirs in rows.items():
        compare_shards(our_rows[name], theirs)
    for name, theirs in state.items():
        assert our_state[name].keys() == theirs.keys(), name
        for key in theirs:
            compare_shards(our_state[name][key], theirs[key])
    assert session.step == 9


def compare_shards(ours: Tensor, theirs: Any) -> None:
    if isinstance(theirs, Tensor) and not hasattr(theirs, "local_shards"):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        return
    assert tuple(theirs.size()) == tuple(ours.shape)
    for piece in theirs.local_shards():
        begin = piece.metadata.shard_offsets[0]
        torch.testing.assert_close(ours[begin : begin + len(piece.tensor)], piece.tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_trainer_equals_torchrec(kind: str) -> None:
    compare_with_torchrec(1, 0, kind)


def refuse_nan(trainers: int, trainer: int) -> None:
    """NaN on trainer 1 alone: every trainer refuses the step, names the table, and can go on."""
    model, session = shard(Net(collection("adagrad")), trainers, trainer)
    optimizer = torch.optim.SGD(dense_parameters(model).values(), lr=LR)
    before = [records.clone() for records in session.records]
    good, bad = batch_of(6, trainer), batch_of(6, trainer)
    if trainer == trainers - 1:
        bad.labels[2] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"step 1: gradients of .*wide.* hold NaN"):
        model(bad)[0].backward()
    assert session.step == 1 and not session.pushed
    optimizer.zero_grad()
    model(good)[0].backward()
    optimizer.step()
    assert session.step == 2
    assert not any(torch.equal(a, b) for a, b in zip(before, session.records, strict=True))
    assert all(parameter.isfinite().all() for parameter in dense_parameters(model).values())


def test_nan_gradients_are_refused() -> None:
    refuse_nan(1, 0)


def test_nan_gradients_may_pass() -> None:
    model, session = shard(Net(collection()), nan_gradients="pass")
    batch = batch_of(6, 0)
    batch.labels[:] = float("nan")
    model(batch)[0].backward()
    assert session.step == 2 and not session.weights("wide").isfinite().all()


def two_trainers(trainer: int, folder: str) -> None:
    """All that is checked with two trainers, in one start."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(trainer), WORLD_SIZE="2", LOCAL_RANK=str(trainer), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=trainer, world_size=2)
    for kind in OPTIMIZERS:
        compare_with_torchrec(2, trainer, kind)
    refuse_nan(2, trainer)
    share_snapshot(trainer)
    run_example(trainer, folder)
    dist.destroy_process_group()


def share_snapshot(trainer: int) -> None:
    """The parts of both trainers make one snapshot."""
    model, session = shard(Net(collection()), 2, trainer)
    train(model, [batch_of(4, trainer), batch_of(4, 10 + trainer)])
    model.flush()
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, session.snapshots[2])
    assert abs(parts[0][0].numel() - parts[1][0].numel()) <= 1
    parameters = unpack(parts).parameters
    for name, parameter in dense_parameters(model).items():
        assert torch.equal(parameters[name], parameter)


def run_example(trainer: int, folder: str) -> None:
    """The example gives the same losses over either backend."""
    from examples import dlrm_criteo

    sessions = []

    def connect(job: JobSpec, settings: Any, trainer: int, code: Any, snapshot_every: int) -> FakeSession:
        assert settings.join is None and code is None and snapshot_every == 1
        sessions.append(FakeSession(job, trainer))
        return sessions[-1]

    sys.modules["torch_ecrec.processes.launch"] = types.SimpleNamespace(connect=connect)
    reports = {}
    leave, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    enter, dist.init_process_group = dist.init_process_group, lambda backend: None
    for backend, more in [("ecrec", []), ("torchrec", []), ("piped", ["--pipeline"])]:
        out = Path(folder) / f"{backend}.json"
        sys.argv = [
            "dlrm_criteo.py",
            "--backend",
            backend.replace("piped", "ecrec"),
            "--same-init",
            "--report",
            str(out),
        ]
        sys.argv += ["--steps", "12", "--batch-size", "64", "--rows-per-table", "300", *more]
        dlrm_criteo.main()
        reports[backend] = json.loads(out.with_suffix(f".{trainer}.json").read_text())
    dist.destroy_process_group, dist.init_process_group = leave, enter
    ours, theirs = reports["ecrec"], reports["torchrec"]
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=1e-4, atol=1e-5)
    assert abs(ours["auc"] - theirs["auc"]) < 1e-3
    assert {k: reports["piped"][k] for k in ("losses", "auc", "dense_digest")} == {
        k: ours[k] for k in ("losses", "auc", "dense_digest")
    }
    assert [figures["loss"] for figures in sessions[0].reports] == ours["losses"]
    assert sessions[0].closed == 1 and sorted(sessions[0].snapshots) == list(range(1, 12))


def spawn(worker: Callable[..., None], processes: int, *arguments: Any, limit_s: float = 600) -> None:
    """Runs `worker(i, *arguments)` in processes; a hang fails."""
    context = mp.spawn(worker, args=arguments, nprocs=processes, join=False)
    end = time.monotonic() + limit_s
    while not context.join(timeout=1):
        if time.monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{worker.__name__} took longer than {limit_s} s")


def test_two_trainers(tmp_path: Path) -> None:
    spawn(two_trainers, 2, str(tmp_path))


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


def test_a_scheduler_changes_the_rate_of_the_next_backward() -> None:
    configs = tables()
    original = collection("sgd", configs)
    model, session = shard(Net(original))
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.SGD(p, lr=1.0))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    assert [len(group["params"]) for group in model.fused_optimizer.param_groups] == [2, 2]
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.5**step
        model(batch_of(3, step))[0].backward()
        optimizer.step()
    assert session.rates == [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    scheduler.step()
    model(batch_of(3, 3))[0].backward()
    assert session.rates[-1] == pytest.approx([0.025, 0.025])


def test_tables_of_one_slab_need_one_rate() -> None:
    first, second = collection("sgd", [table("a", 20, 8, "f0")]), collection("sgd", [table("b", 20, 8, "f1")])
    model, _ = shard(Net(first, second))
    model.fused_optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(ValueError, match=r"tables a, b share one optimizer but got learning rates 1\.0 and 0\.05"):
        model(batch_of(3, 0))[0].backward()


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
        assert torch.equal(model.state_dict()[name], value)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    assert session.loads > len(expected)


def test_state_travels_through_a_checkpoint() -> None:
    model, session = shard(Net(collection("rowwise_adagrad"), collection("adagrad", [table("x", 9, 4, "f1")])))
    train(model, [batch_of(6, seed) for seed in range(3)])
    saved, optimizer = model.state_dict(), model.fused_optimizer.state_dict()
    state = optimizer["state"]
    assert "collections.0.embedding_bags.wide.weight" in saved and "over.weight" in saved
    assert state["collections.0.embedding_bags.wide.weight"]["wide.momentum1"].shape == (50,)
    assert state["collections.1.embedding_bags.x.weight"]["x.momentum1"].shape == (9, 4)
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
    with pytest.raises(RuntimeError, match="cannot be loaded any more"):
        other.load_state_dict(saved)


def test_sharded_tensors_of_torchrec_can_be_loaded() -> None:
    theirs = plain_torchrec(Net(collection("adagrad", seeded_tables(), device=META)), 1)
    train(theirs, [batch_of(6, 0)])
    model, _ = shard(Net(collection("adagrad", device=META)))
    model.load_state_dict(theirs.state_dict())
    model.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    for name, value in theirs.state_dict().items():
        compare_shards(model.state_dict()[name], value)
    momentum = model.fused_optimizer.state_dict()["state"]["collections.0.embedding_bags.wide.weight"]["wide.momentum1"]
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
    assert not [name for name, _ in model.named_parameters() if "embedding" in name]


# what is refused ----------------------------------------------------------------------------------------


def attached(cls: type, arguments: dict[str, Any]) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(2, 2))
    apply_optimizer_in_backward(cls, [parameter], arguments)
    return parameter


def test_optimizers_are_understood() -> None:
    assert optimizer_spec("t", attached(torch.optim.SGD, {"lr": 0.5})) == OptimizerSpec("sgd", 0.5)
    assert optimizer_spec("t", attached(torch.optim.SGD, {})) == OptimizerSpec("sgd", 0.01)
    assert optimizer_spec("t", attached(torch.optim.Adagrad, {"lr": 1, "eps": 0.1})) == OptimizerSpec(
        "adagrad", 1.0, eps=0.1
    )
    spec = optimizer_spec("t", attached(RowWiseAdagrad, {"lr": 0.02, "weight_decay": 0.0}))
    assert spec == OptimizerSpec("rowwise_adagrad", 0.02, eps=1e-8)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (
            torch.optim.Adam,
            {"lr": 0.1},
            "table t: optimizer Adam is not supported; supported are Adagrad, RowWiseAdagrad, SGD",
        ),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "table t: optimizer SGD with momentum=0.9 is not supported"),
        (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}, "Adagrad with weight_decay=0.1 is not supported"),
    ],
)
def test_other_optimizers_are_refused(cls: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_spec("t", attached(cls, arguments))


def test_a_table_needs_an_optimizer() -> None:
    with pytest.raises(ValueError, match="table t has no optimizer; attach one before sharding"):
        optimizer_spec("t", nn.Parameter(torch.zeros(2, 2)))


def test_unsuitable_models_are_refused() -> None:
    session: Any = types.SimpleNamespace()
    with pytest.raises(ValueError, match="holds no EmbeddingBagCollection"):
        DistributedModelParallel(nn.Linear(2, 2), session=session)
    with pytest.raises(ValueError, match=r"table t: data type .* is not supported"):
        shard(collection("sgd", [table("t", 4, 4, "f0", data_type=DataType.FP16)]))
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


# the dense part -------------------------------------------------------------------------------------------


def test_each_step_is_snapshotted_once_with_its_optimizer() -> None:
    model, session = shard(Net(collection("adagrad")))
    optimizer = optimizer_of(model)
    train(model, [batch_of(6, seed) for seed in range(3)], optimizer)
    assert sorted(session.snapshots) == [1, 2]
    with torch.no_grad():
        model(batch_of(6, 0))
    assert sorted(session.snapshots) == [1, 2]
    model.flush()
    model.flush()
    model.close()
    assert sorted(session.snapshots) == [1, 2, 3] and session.flushed == 3 and not session.closed
    state = unpack([session.snapshots[3]])
    for name, parameter in dense_parameters(model).items():
        assert torch.equal(state.parameters[name], parameter)
    assert [entry["class"] for entry in state.optimizers] == ["Adagrad"]
    # put back into a fresh model, it goes on as the first one does
    other, _ = shard(Net(collection("adagrad")))
    fresh = torch.optim.Adagrad(dense_parameters(other).values(), lr=LR)
    assert load_(other, [fresh], [session.snapshots[3]], 0) == 3
    for name, parameter in dense_parameters(other).items():
        assert torch.equal(parameter, dense_parameters(model)[name])
        assert torch.equal(fresh.state[parameter]["sum"], optimizer.state[dense_parameters(model)[name]]["sum"])
