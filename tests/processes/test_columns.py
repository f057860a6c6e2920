"""The order of columns behind `.values()`: TorchRec's sharded one of a plan, in outputs and through checkpoints.

The oracle is TorchRec's own `DistributedModelParallel` under that plan, in two processes: what it predicts, ours
predicts, bit for bit, with its checkpoint and the plan, or with its checkpoint alone; and TorchRec with ours.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.distributed
from models import CPU, MEAN, META, SUM, optimizer_of, shard, table
from shards import local
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torch_ecrec import checkpoint
from torch_ecrec.errors import CheckpointError
from torch_ecrec.nn.dense import DenseSnapshot
from torch_ecrec.nn.dense import load_ as load_snapshot
from torch_ecrec.state_dicts.columns import Columns

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore")

TRAINERS, TABLES, BATCH, DIM = 2, 5, 6, 8
FEATURES = ["f0", "f1", "f2", "f3", "f4", "f5"]

# What each table is sharded as. Tables t0 and t3 average; t2 has two features; f4 is of t3 and of t4.
PLANS: dict[str, list[Any]] = {
    "in turns": [table_wise(i % 2) for i in range(TABLES)],
    "the other way": [table_wise(1 - i % 2) for i in range(TABLES)],
    "all on the last": [table_wise(1)] * TABLES,
    "by rows": [row_wise()] * TABLES,
    "by columns": [column_wise(ranks=ranks) for ranks in ([1, 0], [0, 1], [0, 1], [0, 1], [1, 0])],
    "all columns on one": [column_wise(ranks=ranks) for ranks in ([1, 0], [0, 1], [1], [0], [1, 0])],
    "by hosts": [table_row_wise(0)] * TABLES,
    "mixed": [row_wise(), table_wise(1), column_wise(ranks=[1, 0]), table_wise(0), row_wise()],
    "some data-parallel": [data_parallel(), table_wise(1), data_parallel(), table_wise(0), row_wise()],
    "all data-parallel": [data_parallel()] * TABLES,
}
# Of tables that average, one is by rows: TorchRec then divides all columns of the collection, sums too, by ids + 1e-6.
AVERAGED_BY_ROWS = {"by rows", "by hosts", "mixed"}
GUESSED = {"all data-parallel", "all columns on one"}  # DCP's metadata is also that of another plan


class Model(nn.Module):
    """A dense layer behind the columns, as most models have it."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        pooling = [MEAN, SUM, SUM, MEAN, SUM]
        features = [["f0"], ["f1"], ["f2", "f3"], ["f4"], ["f4", "f5"]]
        configs = [table(f"t{i}", 10 + i, DIM, *features[i], pooling=pooling[i]) for i in range(TABLES)]
        self.tables = EmbeddingBagCollection(tables=configs, device=device)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.tables.parameters(), {"lr": 0.1})
        self.over = nn.Linear(7 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values())


def batch(seed: int) -> KeyedJaggedTensor:
    """At most one id in a bag: row-wise sharding sums rows of several in another order."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 2, (len(FEATURES) * BATCH,), generator=random)
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=random)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def plan_of(module: nn.Module, sharder: Any, per_table: list[Any], path: str = "tables") -> ShardingPlan:
    generators = {f"t{i}": how for i, how in enumerate(per_table)}
    plan = construct_module_sharding_plan(module, generators, sharder, local_size=TRAINERS, device_type="cpu")
    return ShardingPlan({path: plan})


def theirs(name: str) -> nn.Module:
    model, sharder = Model(), EmbeddingBagCollectionSharder()
    plan = plan_of(model.tables, sharder, PLANS[name])
    return torchrec.distributed.DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def ours(trainer: int, name: str | None, trainers: int = TRAINERS) -> Any:
    model = Model()
    plan = None if name is None else plan_of(model.tables, EmbeddingBagCollectionSharder(), PLANS[name])
    return shard(model, trainers, trainer, plan=plan)[0]


def train(model: nn.Module, steps: range, trainer: int) -> None:
    optimizer = optimizer_of(model)
    for step in steps:
        optimizer.zero_grad()
        model(batch(2 * step + trainer)).sum().backward()
        optimizer.step()


def predicted(model: nn.Module, trainer: int) -> Tensor:
    """Every trainer calls it."""
    with torch.no_grad():
        return torch.cat([model(batch(100 + 2 * i + trainer)) for i in range(4)])


def keys(model: Any) -> list[str]:
    return list(model.module.tables(batch(0)).keys())


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model.state_dict()}


def save(model: nn.Module, folder: Path) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=folder)


def load(model: nn.Module, folder: Path) -> None:
    """Without the state of the tables' optimizer, which TorchRec has of none that is data-parallel."""
    state = state_of(model)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


def load_streamed(model: Any, folder: Path) -> None:
    checkpoint.load(model, folder)


# several trainers -----------------------------------------------------------------------------------


def start(trainer: int, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(trainer), WORLD_SIZE=str(TRAINERS), LOCAL_RANK=str(trainer))
    os.environ.update(LOCAL_WORLD_SIZE=str(TRAINERS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=trainer, world_size=TRAINERS)


def follow_torchrec(trainer: int, folder: str, name: str) -> None:
    """TorchRec trains under a plan; ours takes its checkpoint over, and TorchRec ours."""
    start(trainer, folder)
    stock, place = theirs(name), Path(folder)
    train(stock, range(3), trainer)
    save(stock, place / "a")
    wanted, order = predicted(stock, trainer), list(stock.module.tables._embedding_names)
    unplanned = ours(trainer, None)
    save(unplanned, place / "of the module")
    others = [there for there in ("in turns", "the other way") if keys(ours(trainer, there)) != order]
    givens = [name] if name in GUESSED else [name, None]
    for given in givens:
        for i, way in enumerate(ways_of(name)):
            model, back = ours(trainer, given), place / f"back {given} {i}"
            assert keys(model) == (keys(unplanned) if given is None else order)
            way(model, place / "a")
            assert keys(model) == order and same(predicted(model, trainer), wanted, name), (given, way)
            save(model, back)
            checkpoint.save(model, place / f"streamed {given} {i}")
            for saved in (back, place / f"streamed {given} {i}"):
                for other in (theirs(name), ours(trainer, name), ours(trainer, None)):
                    load(other, saved)
                    assert same(predicted(other, trainer), wanted, name), "the order that it was saved in"
            if name not in GUESSED:
                refused(ours(trainer, others[0]), place / "a", "as the plan has it", way)
            refused(ours(trainer, others[0]), back, "as the plan has it")
            train(model, range(3, 5), trainer)
            load(model, back)
            assert same(predicted(model, trainer), wanted, name), "of the same order: at any time"
            if order != keys(unplanned):
                refused(model, place / "of the module", "as the plan has it" if given else "as it was trained so far")
    dist.destroy_process_group()


def same(found: Tensor, wanted: Tensor, name: str) -> bool:
    """Bit for bit, where TorchRec's sums are."""
    if name in AVERAGED_BY_ROWS:
        return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    return torch.equal(found, wanted)


def ways_of(name: str) -> list[Callable[[Any, Path], None]]:
    return [load] if "data-parallel" in name else [load, load_streamed]


def refused(model: Any, folder: Path, why: str, way: Callable[[Any, Path], None] = load) -> None:
    """And nothing is loaded."""
    before = keys(model), local_bytes(model)
    with pytest.raises(BaseException, match=f"features of the checkpoint come in the order .* {why}") as caught:
        way(model, folder)
    assert isinstance(caught.value, (CheckpointError, CheckpointException))
    assert (keys(model), local_bytes(model)) == before


def local_bytes(model: Any) -> list[bytes]:
    return [part.numpy().tobytes() for value in model.state_dict().values() for part in local(value)]


@pytest.mark.parametrize("name", PLANS)
def test_the_order_is_torchrecs_of_the_plan_and_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    forked.call(follow_torchrec, TRAINERS, str(tmp_path), name)


def follow_sequences(trainer: int, folder: str) -> None:
    """A dict has an order, too: `torch.cat(list(found.values()))`."""
    start(trainer, folder)
    for per_table in ([table_wise(i % 2) for i in range(4)], [row_wise(), table_wise(1), row_wise(), table_wise(0)]):
        made = []
        for _ in range(3):
            configs = [
                EmbeddingConfig(name=f"t{i}", num_embeddings=10, embedding_dim=DIM, feature_names=[f"f{i}"])
                for i in range(4)
            ]
            made.append(nn.ModuleDict({"tables": EmbeddingCollection(tables=configs, device=META)}))
            apply_optimizer_in_backward(torch.optim.SGD, made[-1].parameters(), {"lr": 0.1})
        sharder = EmbeddingCollectionSharder()
        plan = plan_of(made[0]["tables"], sharder, per_table)
        stock = torchrec.distributed.DistributedModelParallel(made[0], device=CPU, plan=plan, sharders=[sharder])
        order = list(stock.module["tables"](batch(0)).wait())
        assert order != sorted(order)
        with_plan, _ = shard(made[1], TRAINERS, trainer, plan=plan)
        assert list(with_plan.module["tables"](batch(0)).wait()) == order
        without, _ = shard(made[2], TRAINERS, trainer)
        assert list(without.module["tables"](batch(0)).wait()) == sorted(order)
        dcp.save(state_of(stock), checkpoint_id=Path(folder) / str(order))
        load(without, Path(folder) / str(order))
        found = without.module["tables"](batch(0)).wait()
        assert list(found) == order
        for key, right in stock.module["tables"](batch(0)).wait().items():
            assert torch.equal(found[key].values(), right.values())
    dist.destroy_process_group()


def test_the_order_of_sequences(tmp_path: Path) -> None:
    forked.call(follow_sequences, TRAINERS, str(tmp_path))


# one trainer ----------------------------------------------------------------------------------------


def follow_alone(trainer: int, folder: str) -> None:
    """Two trainers of TorchRec, and then none: what they have saved is for one of ours, below."""
    start(trainer, folder)
    stock = theirs("in turns")
    train(stock, range(3), trainer)
    save(stock, Path(folder) / "a")
    torch.save((predicted(stock, 0), stock.module.tables._embedding_names), Path(folder) / f"wanted {trainer}")
    dist.destroy_process_group()


def test_one_trainer_takes_over_what_several_have_saved(tmp_path: Path) -> None:
    """Plain tensors say it, too, and stay what users take them for: pickled, copied, added to."""
    forked.call(follow_alone, TRAINERS, str(tmp_path))
    wanted, order = torch.load(tmp_path / "wanted 0")
    model = ours(0, None, trainers=1)
    load(model, tmp_path / "a")
    assert keys(model) == order and torch.equal(predicted(model, 0), wanted)
    save(model, tmp_path / "back")
    group: Any = dist.new_group(backend="gloo")
    dcp.async_save(state_of(model), checkpoint_id=tmp_path / "beside", process_group=group).result()  # type: ignore[union-attr]
    for way in ("back", "beside"):
        again = ours(0, None, trainers=1)
        load(again, tmp_path / way)
        assert keys(again) == order and torch.equal(predicted(again, 0), wanted), way
    first = model.state_dict()["tables.embedding_bags.t0.weight"]
    torch.save(model.state_dict(), tmp_path / "whole")
    loaded = torch.load(tmp_path / "whole", weights_only=True)["tables.embedding_bags.t0.weight"]
    for plain in (loaded, copy.deepcopy(first), first + 0, first.clone()):
        assert type(plain) is Tensor and torch.equal(plain, first)
    assert repr(first) == repr(loaded)


def test_what_a_snapshot_has_and_a_plan_has_otherwise(tmp_path: Path) -> None:
    """Features come back in the order that they were trained in; a plan of another one is refused by name."""
    forked.call(follow_alone, TRAINERS, str(tmp_path))
    model = ours(0, None, trainers=1)
    load(model, tmp_path / "a")
    snapshot = [DenseSnapshot(model, 0, 1).pack(3)]
    again = ours(0, None, trainers=1)
    load_snapshot(again, [], snapshot, 0)
    assert keys(again) == keys(model) != keys(ours(0, None, trainers=1))
    planned = Model()
    plan = plan_of(planned.tables, EmbeddingBagCollectionSharder(), PLANS["all on the last"])
    other, _ = shard(planned, plan=plan)
    with pytest.raises(CheckpointError, match=r"order f0, f2, f3, .* as the plan has it"):
        load_snapshot(other, [], snapshot, 0)


# what cannot be known -------------------------------------------------------------------------------


def test_a_plan_that_torchrec_would_not_take_is_told() -> None:
    model = Model()
    plan = plan_of(model.tables, EmbeddingBagCollectionSharder(), PLANS["in turns"])
    plan.plan["tables"]["t0"].sharding_spec = None
    with pytest.warns(UserWarning, match="tables: TorchRec shards nothing as this plan has it"):
        sharded, _ = shard(model, plan=plan)
    assert keys(sharded) == keys(ours(0, None, trainers=1))


def test_an_unsharded_models_order_is_the_modules_and_told_to_be_a_guess(tmp_path: Path) -> None:
    plain = Model(CPU)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    model = ours(0, None, trainers=1)
    with pytest.warns(UserWarning, match="does not say for sure in which order its features come"):
        load(model, tmp_path / "plain")
    with torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))
    with pytest.raises(BaseException, match="as the plan has it"):
        load(ours(0, "in turns", trainers=1), tmp_path / "plain")


def test_to_ask_torchrec_changes_nothing_that_is_the_users() -> None:
    model = Model()
    plan = plan_of(model.tables, EmbeddingBagCollectionSharder(), PLANS["in turns"])
    parameter = model.tables.embedding_bags["t0"].weight
    before, entry = copy.deepcopy(parameter._optimizer_kwargs), copy.deepcopy(plan.plan["tables"]["t0"])
    Columns(model.tables, "tables", plan.plan["tables"], {"learning_rate": 0.1})
    assert parameter._optimizer_kwargs == before and plan.plan["tables"]["t0"] == entry
