"""The sharded module against TorchRec's own model parallelism; two trainers in processes of their own."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from fake_session import FakeSession
from models import (
    LR,
    META,
    OPTIMIZERS,
    Net,
    batch_of,
    collection,
    compare_shards,
    dense_parameters,
    plain_torchrec,
    seeded_tables,
    shard,
    train,
)
from shards import all_whole
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.dense import unpack
from torch_ecrec.spec.job import JobSpec

pytestmark = pytest.mark.usefixtures("process_group")


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
        rows = model.state_dict()
        ends.append((losses, all_whole(rows), all_whole(state)) if ours else (losses, rows, state))
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
    with pytest.raises(NonFiniteGradient, match=r"step 1: gradients of .*wide.* hold NaN.*nan_gradients"):
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
    put_back(trainer)
    load_not_alike(trainer)
    make_not_alike(trainer)
    run_example(trainer, folder)
    look_nothing_up(trainer)
    dist.destroy_process_group()


def put_back(trainer: int) -> None:
    """A load in training is of all trainers: of sharded tensors each one's rows count, of whole ones trainer 0's."""
    model, session = shard(Net(collection("adagrad")), 2, trainer)
    train(model, [batch_of(4, trainer)])
    saved, optimizer = copy.deepcopy((model.state_dict(), model.fused_optimizer.state_dict()))
    batches = [batch_of(4, seed + trainer) for seed in (10, 20)]
    train(model, batches)
    first = [records.clone() for records in session.records]
    whole = all_whole(saved), all_whole(optimizer)
    if trainer == 1:
        dense = dict(dense_parameters(model))
        whole[0].update({name: value + 1 for name, value in whole[0].items() if name not in dense})
    for i, (weights, states) in enumerate([(saved, optimizer), whole]):
        model.load_state_dict(dict(weights))
        model.fused_optimizer.load_state_dict(states)
        train(model, batches)
        assert all(map(torch.equal, session.records, first)) and session.step == 6 + 2 * i


def load_not_alike(trainer: int) -> None:
    """Both are told, whatever the other one does."""
    model, session = shard(Net(collection()), 2, trainer)
    train(model, [batch_of(4, trainer)])
    step = model._step
    rows, gradients = (
        [torch.tensor([1])] * len(session.job.table_groups),
        [torch.ones(1, s.dim) for s in session.job.table_groups],
    )
    for who_loads in range(2):
        with pytest.raises(
            RuntimeError, match=r"step 2: this trainer (loads x|trains), and another one does something"
        ):
            if trainer == who_loads:
                step.begin_load("x", 1)
            step.check_finite(rows, gradients, True, step.rates())()
    with pytest.raises(RuntimeError, match=r"this trainer loads table [01], and another"):
        step.begin_load(f"table {trainer}", 1)
    assert step.begin_load("x", 3 - trainer) == 3
    for group in model.fused_optimizer.param_groups:
        group["lr"] *= 1 + trainer
    with pytest.raises(RuntimeError, match=r"trains, and .* else, or not with the learning rates \[.*\] .*of this one"):
        step.check_finite(rows, gradients, True, step.rates())()
    for group in model.fused_optimizer.param_groups:
        group["lr"] /= 1 + trainer
    assert step.check_finite(rows, gradients, True, step.rates())() is None
    model.snapshot_every = trainer
    with pytest.raises(RuntimeError, match=r"trains, and .* else, .* or snapshot_every=[01] or nothing attached of"):
        step.check_finite(rows, gradients, True, step.rates())()
    model.snapshot_every = 1
    next(p for name, p in model.named_parameters() if name.endswith("wide.weight")).requires_grad_(trainer == 0)
    with pytest.raises(RuntimeError, match=r"trains, and .* else, or not with the learning rates \[.*\]"):
        step.check_finite(rows, gradients, True, step.rates())()


def make_not_alike(trainer: int) -> None:
    """Trainers that were given different arguments are told so by name; some waited for each other for ever."""
    for name, values in {
        "nan_gradients": ("raise", "pass"),
        "snapshot_every": (1, 2),
        "unprotected": ("refuse", "snapshot"),
        "init_data_parallel": (True, False),
        "init_parameters": (True, False),
        "data_parallel_wrapper": (None, DefaultDataParallelWrapper()),
    }.items():
        own = re.escape(f"{name}={values[trainer]!r}") if trainer == 0 or name != "data_parallel_wrapper" else name
        with pytest.raises(RuntimeError, match=f"makes its model, and another one .* or not with the .*{own}"):
            shard(Net(collection()), 2, trainer, **{name: values[trainer]})
    model, _ = shard(Net(collection()), 2, trainer)
    model.attach(optimizer=[torch.optim.SGD(dense_parameters(model).values(), lr=LR)][trainer:])
    with pytest.raises(RuntimeError, match=r"trains, and another .* or optimizers \[(SGD)?\] attached of this one"):
        train(model, [batch_of(4, trainer)])


def look_nothing_up(trainer: int) -> None:
    """Trainer 1 looks no row up in one turn: both are told in the first push that would be of two turns."""

    class Sometimes(Net):
        looks = True

        def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            if self.looks:
                return super().forward(batch)
            logits = self.over(torch.zeros(4, self.over.in_features)).squeeze(1)
            return torch.nn.functional.mse_loss(logits, batch.labels), logits

    model, session = shard(Sometimes(collection()), 2, trainer, init_data_parallel=False)
    train(model, [batch_of(4, trainer)])
    with pytest.raises(RuntimeError, match=r"step 2: .* or the [23] backward passes so far \(rows must be looked"):
        for turn in range(2):
            model.module.looks = trainer == 0 or turn > 0
            train(model, [batch_of(4, 10 + turn)])
    assert session.step == 2


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
    from torch_ecrec.processes import launch

    sessions = []

    def connect(job: JobSpec, settings: Any, trainer: int, code: Any, snapshot_every: int) -> FakeSession:
        assert settings.join is None and code is None and snapshot_every == 1
        sessions.append(FakeSession(job, trainer))
        return sessions[-1]

    launch.connect = connect
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


@pytest.mark.smoke
def test_two_trainers(tmp_path: Path) -> None:
    forked.call(two_trainers, 2, str(tmp_path))
