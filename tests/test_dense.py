"""Snapshots of the dense part: what is packed comes back, bit for bit, and nothing less is taken."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from torch_ecrec.dense import DenseSnapshot, load_, unpack


def dense_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, dtype=torch.float32))


def optimizers_of(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model[0].parameters(), lr=0.1, betas=(0.5, 0.9)),
        torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], 0.2, 0.9),
    ]


def step_dense(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_snapshot_brings_model_and_optimizers_back(parts: int) -> None:
    model = dense_model()
    optimizers = optimizers_of(model)
    packers = [DenseSnapshot(model, part, parts) for part in range(parts)]
    stranger = torch.optim.SGD(dense_model().parameters(), lr=1.0)
    stranger.step()
    step_dense(model, optimizers, 1)
    optimizers[1].param_groups[1]["lr"] = 1 / 3
    step_dense(model, optimizers, 2)
    assert packers[0].optimizers == optimizers
    pieces = [packer.pack(2) for packer in packers]
    assert sum(len(payload) for payload, _ in pieces) == json.loads(pieces[0][1])["bytes"]
    other = dense_model()
    others = optimizers_of(other)
    step_dense(other, others, 3)
    assert load_(other, others, pieces[::-1]) == 2
    for trained, restored in [(model, other)]:
        for name, value in trained.state_dict().items():
            assert torch.equal(value, restored.state_dict()[name]), name
    for seed in (4, 5):
        step_dense(model, optimizers, seed)
        step_dense(other, others, seed)
    for (name, value), restored in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, restored), name
    for trained, restored in zip(optimizers, others, strict=True):
        assert str(trained.state_dict()) == str(restored.state_dict())
    for packer in packers:
        packer.close()
        packer.close()


def test_incomplete_snapshots_are_refused() -> None:
    model = dense_model()
    packers = [DenseSnapshot(model, part, 2) for part in range(2)]
    first, second = (packer.pack(1) for packer in packers)
    with pytest.raises(ValueError, match=r"step 1: need parts 0 to 1, got \[0\]"):
        unpack([first])
    with pytest.raises(ValueError, match="one step"):
        unpack([first, packers[1].pack(2)])
    with pytest.raises(ValueError, match="the parts hold"):
        unpack([first, (second[0][:-1], second[1])])
    with pytest.raises(ValueError, match=r"the model and the snapshot differ in .*parameter/0\.bias"):
        load_(nn.Linear(2, 2), [], [first, second])
    with pytest.raises(ValueError, match="optimizers"):
        load_(dense_model(), optimizers_of(model), [first, second])


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    model = dense_model()
    packer = DenseSnapshot(model, 0, 1)
    payload, _ = packer.pack(1)
    kept = payload.clone()
    step_dense(model, optimizers_of(model), 1)
    assert torch.equal(payload, kept)
