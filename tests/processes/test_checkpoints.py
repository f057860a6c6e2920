"""State dicts of several trainers: sharded, through `torch.distributed.checkpoint` and back, TorchRec's and ours.

The oracle is the model that was saved: tables and optimizer state bit for bit, and the steps that follow.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec.distributed
from fake_session import FakeSession
from harness import Scenario, SimulatedCluster
from models import (
    CPU,
    META,
    Net,
    batch_of,
    collection,
    job_of,
    plain_torchrec,
    shard,
    table,
    tables,
    train,
)
from shards import all_whole, local, whole
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingPlan
from virtual_session import VirtualSession

from torch_ecrec import DistributedModelParallel, checkpoint
from torch_ecrec.nn import tables_state
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.state_dicts import streamed

pytestmark = pytest.mark.usefixtures("process_group")
warnings.filterwarnings("ignore")

TRAINERS = 3
KIND = "rowwise_adagrad"
WIDE = "collections.0.embedding_bags.wide.weight"


def configs() -> list[Any]:
    """The last has fewer rows than there are trainers, and two leave the last trainer fewer than the others."""
    return [*tables()[:3], table("last", 2, 4, "f3")]


def net(device: torch.device = META) -> Net:
    return Net(collection(KIND, configs(), device=device))


def batches(trainer: int, *seeds: int) -> list[Any]:
    return [batch_of(5, 10 * seed + trainer, rows=2) for seed in seeds]


def state_of(model: nn.Module) -> dict[str, Any]:
    """What people save."""
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def load(model: nn.Module, folder: Path) -> None:
    """As people do it: into the state dict, then that into the model."""
    state = state_of(model)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Of whole state dicts."""
    assert a.keys() == b.keys()
    return all(same(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) for k in a)


def stock(rowwise: bool) -> nn.Module:
    """TorchRec's own, of row-wise or of table-wise and column-wise sharded tables."""
    module = net()
    if not rowwise:
        return plain_torchrec(module, TRAINERS)
    sharder: Any = EmbeddingBagCollectionSharder()
    ranks = {config.name: row_wise(compute_kernel="fused") for config in configs()}
    plan = construct_module_sharding_plan(module.collections[0], ranks, sharder, local_size=TRAINERS, device_type="cpu")
    return torchrec.distributed.DistributedModelParallel(
        module, device=CPU, plan=ShardingPlan({"collections.0": plan}), sharders=[sharder]
    )


def trainers(trainer: int, folder: str) -> None:
    """All that is checked with several trainers, in one start."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(trainer), WORLD_SIZE=str(TRAINERS), LOCAL_RANK=str(trainer))
    os.environ.update(LOCAL_WORLD_SIZE=str(TRAINERS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=trainer, world_size=TRAINERS)
    model, session = shard(net(CPU), TRAINERS, trainer)
    train(model, batches(trainer, 1, 2))
    saved = all_whole(state_of(model))
    look_at_shards(model, trainer, saved)
    dcp.save(state_of(model), checkpoint_id=Path(folder) / "ours")
    others = [(name, check) for name, check in globals().items() if name.startswith("check_")]
    for _, check in others:
        check(trainer, Path(folder), saved, session)
    again, later = shard(net(), TRAINERS, trainer)
    load(again, Path(folder) / "ours")
    more = batches(trainer, 3, 4, 5)
    assert train(again, more) == train(model, more), "it goes on as the one that was saved"
    assert all(map(torch.equal, session.records, later.records))
    dist.destroy_process_group()


def look_at_shards(model: Any, trainer: int, saved: dict[str, Any]) -> None:
    """Each has as many rows, the last what is left, or none; together they are what the servers have."""
    state = state_of(model)
    for rows, value in [(50, state["model"][WIDE]), (50, state["optimizer"]["state"][WIDE]["wide.momentum1"])]:
        assert isinstance(value, ShardedTensor) and value.size()[0] == rows
        assert len(local(value)[0]) == (17, 17, 16)[trainer]
    last = state["model"]["collections.0.embedding_bags.last.weight"]
    assert [len(values) for values in local(last)] == [1 if trainer < 2 else 0]
    for config in configs():
        key = f"collections.0.embedding_bags.{config.name}.weight"
        assert torch.equal(saved["model"][key], model.session.weights(config.name))


def check_torchrecs_own(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """Row-wise and table-wise: theirs loads ours, changes, saves, and ours loads theirs; also without files."""
    for rowwise in (True, False):
        theirs = stock(rowwise)
        load(theirs, folder / "ours")
        assert_same_here(theirs, saved)
        change_in_place(theirs)
        dcp.save(state_of(theirs), checkpoint_id=folder / f"theirs {rowwise}")
        ours, _ = shard(net(), TRAINERS, trainer)
        load(ours, folder / f"theirs {rowwise}")
        found = all_whole(state_of(ours))
        assert_same_here(theirs, found)
        assert not same(found["model"], saved["model"])
        direct, _ = shard(net(), TRAINERS, trainer)
        direct.load_state_dict(theirs.state_dict())
        assert same(all_whole(direct.state_dict()), found["model"])


def change_in_place(theirs: nn.Module) -> None:
    """Weights and optimizer state. (FBGEMM's backward on a CPU does not bear a rank without rows of a table.)"""
    state = state_of(theirs)
    fields = [value for fields in state["optimizer"]["state"].values() for value in fields.values()]
    with torch.no_grad():
        for value in [*state["model"].values(), *fields]:
            for tensor in local(value):
                tensor.mul_(1.5).add_(0.25)


def assert_same_here(theirs: nn.Module, ours: dict[str, Any]) -> None:
    """What TorchRec's model has here is what ours has there."""
    state = state_of(theirs)
    pairs = [(value, ours["model"][name]) for name, value in state["model"].items()]
    for name, fields in state["optimizer"]["state"].items():
        pairs += [(value, ours["optimizer"]["state"][name][field]) for field, value in fields.items()]
    for value, right in pairs:
        if isinstance(value, ShardedTensor):
            for piece in value.local_shards():
                begin = piece.metadata.shard_offsets[0]
                assert torch.equal(right[begin : begin + len(piece.tensor)], piece.tensor)
        else:
            assert torch.equal(right, value.detach())


def check_whole_state_dicts(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """Ours of trainer 0 alone, that of `torch.distributed.checkpoint`, a file of `torch.save`, and back."""
    model, _ = shard(net(), TRAINERS, trainer)
    load(model, folder / "ours")
    full, optimizer = model.full_state_dict(), model.full_optim_state_dict()
    if trainer == 0:
        assert same(full, saved["model"]) and same(optimizer["state"], saved["optimizer"]["state"])
        torch.save((full, optimizer), folder / "whole")
    else:
        assert full == optimizer == {}
    everywhere = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True))
    assert same(everywhere, saved["model"])
    ranks_0 = get_model_state_dict(model.module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert same(ranks_0, saved["model"]) if trainer == 0 else ranks_0 == {}
    dist.barrier()
    for way in ("load_state_dict", "set", "broadcast", "sharded"):
        other, _ = shard(net(), TRAINERS, trainer)
        given, states = torch.load(folder / "whole", mmap=True)
        if way == "load_state_dict":
            other.load_state_dict(dict(given))
        elif way == "set":
            set_model_state_dict(other.module, given, options=StateDictOptions(full_state_dict=True))
        elif way == "broadcast":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(other.module, given if trainer == 0 else {}, options=options)
        else:
            set_model_state_dict(other.module, get_model_state_dict(model.module))
        other.fused_optimizer.load_state_dict(states)
        assert same(all_whole(state_of(other)), saved), way


def check_streamed(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """Tables that go through trainers in portions, of four rows of `wide` and of 32 momenta: either way reads both."""
    model, _ = shard(net(), TRAINERS, trainer)
    portion, streamed.PORTION_BYTES = streamed.PORTION_BYTES, 4 * 8 * 4
    chunk, tables_state.CHUNK_BYTES = tables_state.CHUNK_BYTES, 3 * 9 * 4
    numbers = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="names in `more` must be others than model, optimizer, got model"):
        checkpoint.save(model, folder / "no", {"model": 1})
    more = checkpoint.load(model, folder / "ours") | {"numbers": numbers + trainer * 0, "epoch": 3}
    assert same(all_whole(state_of(model)), saved)
    checkpoint.save(model, folder / "streamed", more)
    for name in ("streamed", "theirs True", "theirs False"):
        plain, _ = shard(net(), TRAINERS, trainer)
        load(plain, folder / name)
        later, _ = shard(net(), TRAINERS, trainer)
        wanted = {"numbers": torch.zeros(2), "epoch": 0} if name == "streamed" else None
        found = checkpoint.load(later, folder / name, wanted)
        assert same(all_whole(state_of(later)), all_whole(state_of(plain)))
        assert found.get("epoch", 3) == 3 and torch.equal(found.get("numbers", numbers), numbers)
    metadata: Any = dcp.FileSystemReader(folder / "streamed").read_metadata().state_dict_metadata[f"model.{WIDE}"]
    rows = [part.sizes[0] for part in metadata.chunks]
    assert sorted(set(rows)) == [1, 4] and sum(rows) == 50
    other, _ = shard(Net(collection(KIND, [table("wide", 51, 8, "f0")], device=META)), TRAINERS, trainer)
    with pytest.raises(ValueError, match=r"takes shape \(51, 8\) here, the checkpoint has \(50, 8\)"):
        checkpoint.load(other, folder / "streamed")
    with pytest.raises(ValueError, match="has no tensor"):
        checkpoint.load(another(trainer), folder / "streamed")
    with pytest.raises(RuntimeError, match="of table wide is streamed to a checkpoint, and cannot be asked for"):
        model.streamed_state_dict()[WIDE] + 1
    streamed.PORTION_BYTES, tables_state.CHUNK_BYTES = portion, chunk


def another(trainer: int) -> Any:
    return shard(Net(collection(KIND, [table("unknown", 5, 8, "f0")], device=META)), TRAINERS, trainer)[0]


def check_other_shards(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """Column-wise: each trainer has some columns of every row, which makes them all write the same records."""
    module, sharder = Net(collection(KIND, [table("t", 30, 8, "f0")], device=META)), EmbeddingBagCollectionSharder()
    ranks = {"t": column_wise(ranks=[2, 0], compute_kernel="fused")}
    plan = construct_module_sharding_plan(module.collections[0], ranks, sharder, local_size=TRAINERS, device_type="cpu")
    theirs = torchrec.distributed.DistributedModelParallel(
        module, device=CPU, plan=ShardingPlan({"collections.0": plan}), sharders=[sharder]
    )
    ours, _ = shard(Net(collection(KIND, [table("t", 30, 8, "f0")], device=META)), TRAINERS, trainer)
    key = "collections.0.embedding_bags.t.weight"
    ours.load_state_dict(theirs.state_dict())
    mine, right = whole(ours.state_dict()[key]), whole(theirs.state_dict()[key])
    assert torch.equal(mine, right) and not right.isnan().any()


def check_a_state_dict_of_one_trainer(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """One may look at its own, as people do on rank 0 to print names; to write into it is refused, to all."""
    model, _ = shard(net(), TRAINERS, trainer)
    right, _ = shard(net(), TRAINERS, trainer)
    for seed in (1, 2):
        if trainer == 0:
            assert list(model.state_dict())
        assert train(model, batches(trainer, seed)) == train(right, batches(trainer, seed))
    if trainer == 0:
        local(model.state_dict()[WIDE])[0].zero_()
    jobs = model.session.job.table_groups
    rows, gradients = [torch.tensor([1])] * len(jobs), [torch.ones(1, table_group.dim) for table_group in jobs]
    with pytest.raises(
        RuntimeError, match=r"this trainer (has a state dict|trains), and another one does something else"
    ):
        if trainer == 0:
            model._step.load_written("training")
        else:
            model._step.check_finite(rows, gradients, True, model._step.rates())()


def check_dtensors(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """Sharded by rows or columns, in TorchRec's wrapper of shards, and replicated: then trainer 0's."""
    mesh = init_device_mesh("cpu", (TRAINERS,))
    model, _ = shard(net(), TRAINERS, trainer)
    right = saved["model"][WIDE] * 2

    def loaded(value: Any) -> Tensor:
        model.load_state_dict(model.state_dict() | {WIDE: torch.zeros(50, 8)})
        model.load_state_dict(model.state_dict() | {WIDE: value})
        return whole(model.state_dict()[WIDE])

    for placement in (Shard(0), Shard(1), Replicate()):
        assert torch.equal(loaded(distribute_tensor(right, mesh, [placement])), right), placement
    mine = [
        (right[17 * trainer : 17 * trainer + 9], (17 * trainer, 0)),
        (right[17 * trainer + 9 :][:8], (17 * trainer + 9, 0)),
    ]
    wrapper: Any = LocalShardsWrapper([part for part, _ in mine], [at for _, at in mine])
    made = DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=right.shape, stride=right.stride())
    assert torch.equal(loaded(made), right)
    differs = DTensor.from_local(right + trainer, mesh, [Replicate()], run_check=False)
    assert torch.equal(loaded(differs), right)
    assert torch.equal(loaded(right.to(torch.float64)), right)
    mixed = model.state_dict() if trainer else model.state_dict() | {WIDE: right}
    with pytest.raises(RuntimeError, match=r"loads `weight` of table wide, (whole|sharded), and another one does"):
        model.load_state_dict(mixed)


def check_writes_in_place(trainer: int, folder: Path, saved: dict[str, Any], session: FakeSession) -> None:
    """By one trainer, of its rows; before an evaluation, which not all have; and without a reader left."""
    model, _ = shard(net(), TRAINERS, trainer)
    expected = whole(model.state_dict()[WIDE])
    state = model.state_dict()
    if trainer == 1:
        local(state[WIDE])[0][2] = 7.0
    expected[17 + 2] = 7.0
    with torch.no_grad():
        if trainer == 1:
            with pytest.raises(RuntimeError, match="was changed in place: before an evaluation or"):
                model(batches(trainer, 1)[0])
        if trainer == 2:
            model(batches(trainer, 1)[0])
        model.flush()
        model(batches(trainer, 1)[0])
    assert torch.equal(whole(model.state_dict()[WIDE]), expected)
    if trainer == 0:
        local(model.state_dict()[WIDE])[0][3] = 5.0
    else:
        model.state_dict()
    expected[3] = 5.0
    assert torch.equal(whole(model.state_dict()[WIDE]), expected)
    state = model.state_dict()
    train(model, batches(trainer, 1))
    trained = whole(model.state_dict()[WIDE])
    if trainer == 0:
        local(state[WIDE])[0].zero_()
        with pytest.warns(UserWarning, match="table wide in a state dict was changed in place, and the table was not"):
            train(model, batches(trainer, 2))
    else:
        train(model, batches(trainer, 2))
    assert not torch.equal(whole(model.state_dict()[WIDE])[:17], torch.zeros(17, 8)) and not trained.isnan().any()


def test_three_trainers_and_other_numbers_of_them(tmp_path: Path) -> None:
    """Saved by three trainers, loaded by one, over servers that speak the protocol, and in an unsharded model; back."""
    forked.call(trainers, TRAINERS, str(tmp_path))
    model = alone(CodeSpec(5, 3, 2))
    load(model, tmp_path / "ours")
    full, states = torch.load(tmp_path / "whole")
    assert same(model.state_dict(), full) and same(model.fused_optimizer.state_dict()["state"], states["state"])
    plain = net(CPU)
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "ours")
    plain.load_state_dict(state)
    assert same(plain.state_dict(), full)
    with torch.no_grad():
        for bag in plain.collections[0].embedding_bags.values():
            bag.weight.mul_(2.0)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "plain")
    model.load_state_dict(state["model"])
    assert same(model.state_dict(), plain.state_dict())


def alone(code: CodeSpec) -> Any:
    """One trainer's model, over a simulated cluster."""
    job = job_of(net())
    cluster = SimulatedCluster(Scenario(tables=job.tables, code=code, trainers=1))
    while not cluster.clients:
        assert cluster.network.clock.advance()
    session = VirtualSession(next(iter(cluster.clients.values())), lambda message: None, lambda: None)
    session.cluster = cluster
    return DistributedModelParallel(net(), device=CPU, session=session)
