"""Managed collisions on two trainers: the same ids, rows and losses as in one process with their batches together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from fake_session import FakeSession
from managed import SIZES, Net, batch_of, stock, together, whole
from models import LR, dense_parameters, shard
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

STEPS = 7


def two_trainers(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone = dist.new_group([0])  # of some of the trainers: ours found no name for its own group then
    forms = ("bags", "sequences")
    models = [shard(Net("adagrad", "distance", form), trainers=2, trainer=rank) for form in forms]
    for form, (mine, session) in zip(forms, models, strict=True):  # TorchRec makes groups on trainer 0 only
        as_one_process(rank, form, alone, mine, session)
    dist.barrier()
    dist.destroy_process_group()


def as_one_process(rank: int, form: str, alone: dist.ProcessGroup, mine: Any, session: FakeSession) -> None:
    oracle = stock(Net("adagrad", "distance", form), ShardingEnv.from_process_group(alone)) if rank == 0 else None
    names = [name for name in mine.state_dict() if "_embedding_module" in name]
    state = mine.state_dict()
    for name in names:  # whole: trainer 0's tables count, the others' are not looked at
        state[name] = torch.empty(state[name].size(), device="meta")
        if oracle is not None:
            state[name] = whole(oracle.state_dict()[name]).clone()
    mine.load_state_dict(state)
    for seed in range(STEPS):
        batches = [batch_of(4, 10 * seed + each) for each in range(2)]
        torch.manual_seed(seed + 100 * rank)
        loss, remapped = mine(batches[rank])
        loss.backward()
        found: list[tuple[float, KeyedJaggedTensor]] = [(0.0, remapped)] * 2
        dist.all_gather_object(
            found,
            (loss.item(), KeyedJaggedTensor.from_lengths_sync(remapped.keys(), remapped.values(), remapped.lengths())),
        )
        for parameter in dense_parameters(mine).values():
            parameter.data -= LR * parameter.grad
            parameter.grad = None
        if oracle is None:
            continue
        torch.manual_seed(seed)
        expected, wanted = oracle(together(batches))
        expected.backward()
        for parameter in dense_parameters(oracle).values():
            parameter.data -= LR * parameter.grad
            parameter.grad = None
        for name in wanted.keys():
            both = torch.cat([features[name].values() for _, features in found])
            assert torch.equal(both, wanted[name].values()), (seed, name)
        torch.testing.assert_close(sum(each for each, _ in found) / 2, expected.item())
        for name in names:
            table = name.split(".")[-2]
            torch.testing.assert_close(session.weights(table), whole(oracle.state_dict()[name]))
    maps = [b for n, b in mine.named_buffers() if "_mch_" in n]
    assert any(len(buffer.unique()) > 2 for buffer in maps) and set(SIZES) <= {n.split(".")[-2] for n in names}
    for buffer in maps:
        other = buffer.clone()
        dist.broadcast(other, 1)
        assert torch.equal(other, buffer)
    differ(mine, rank)


def differ(model: torch.nn.Module, rank: int) -> None:
    """A map that differs on one trainer: both say so before they would mean other rows."""
    if rank == 1:
        maps = model.module.managed._managed_collision_collection._managed_collision_modules
        maps["a"]._mch_counts[0] += 5
    with pytest.raises(RuntimeError, match="the trainers' maps of a, b in managed differ"):
        for seed in range(4):
            model(batch_of(4, 200 + 20 * seed))


@pytest.mark.slow  # test_models.py has managed tables with up to three trainers
def test_two_trainers_remap_as_one_process_with_both_batches(tmp_path: Path) -> None:
    forked.call(two_trainers, 2, str(tmp_path), limit_s=240)
