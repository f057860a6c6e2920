"""`fused_optimizer` beside TorchRec's, in one process: keys, state, groups, refusals, and optimizers wrapped around it.

TorchRec's tests of `torchrec.optim` are not in its wheel; these ask the same questions of both models.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    Net,
    batch_of,
    collection,
    compare_shards,
    dense_parameters,
    optimizer_of,
    plain_torchrec,
    seeded_tables,
    shard,
    train,
)
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

pytestmark = pytest.mark.usefixtures("process_group")

KINDS = ("sgd", "adagrad", "rowwise_adagrad")
STAGES = [
    WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.2, lr_scale=2.0),
    WarmupStage(WarmupPolicy.POLY, max_iters=20, value=0.5, decay_iters=20),
]


def models(kind: str, steps: int = 2) -> tuple[Any, Any]:
    """Ours and TorchRec's, of the same weights, after some steps."""
    made = []
    for of in (lambda module: shard(module)[0], lambda module: plain_torchrec(module, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made.append(of(Net(collection(kind, seeded_tables()))))
    weights = {name: value.detach().clone() for name, value in dense_parameters(made[0]).items()}
    for name, value in dense_parameters(made[1]).items():
        value.data.copy_(weights[name])
    for model in made:
        train(model, [batch_of(6, seed) for seed in range(steps)])
    return made[0], made[1]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_states_are_torchrecs(kind: str) -> None:
    ours, theirs = (model.fused_optimizer for model in models(kind))
    assert isinstance(ours, CombinedOptimizer) and isinstance(ours, type(theirs))
    assert set(ours.params) == set(theirs.params)
    assert [name for name, _ in ours.optimizers] == [name for name, _ in theirs.optimizers]
    for (_, one), (_, other) in zip(ours.optimizers, theirs.optimizers, strict=True):
        assert isinstance(one, KeyedOptimizer) and isinstance(other, KeyedOptimizer)
    found, wanted = ours.state_dict(), theirs.state_dict()
    assert found.keys() == wanted.keys() == {"state"}
    assert found["state"].keys() == wanted["state"].keys() and len(found["state"]) == 4
    for key, state in wanted["state"].items():
        assert found["state"][key].keys() == state.keys(), key
        for name, values in state.items():
            compare_shards(found["state"][key][name], values)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_saved_and_loaded_as_torchrecs(kind: str) -> None:
    rates = []
    for model in models(kind):
        optimizer = model.fused_optimizer
        optimizer.save_param_groups(True)
        saved = optimizer.state_dict()
        assert saved.keys() == {"state", "param_groups"}
        names = [name for group in saved["param_groups"] for name in group["params"]]
        assert sorted(names) == sorted(optimizer.params), "each table is in one group"
        for group in saved["param_groups"]:
            group["lr"] = 0.125
        before = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
        optimizer.load_state_dict(saved)
        rates.append((set(before), {group["lr"] for group in optimizer.param_groups}))
        spoilt = {**saved, "param_groups": saved["param_groups"][:-1]}
        with pytest.raises(ValueError, match="param_groups count"):
            optimizer.load_state_dict(spoilt)
    (ours, loaded), (theirs, loaded_theirs) = rates
    assert list(ours) == pytest.approx(list(theirs)) == [0.05], "of float32 in FBGEMM"
    assert loaded == loaded_theirs == {0.125}


def _without_a_table(state: dict[str, Any]) -> None:
    del state["state"][next(iter(state["state"]))]


def _with_another_table(state: dict[str, Any]) -> None:
    state["state"]["collections.0.embedding_bags.other.weight"] = {}


def _with_a_renamed_table(state: dict[str, Any]) -> None:
    state["state"]["other"] = state["state"].pop(next(iter(state["state"])))


def _without_a_field(state: dict[str, Any]) -> None:
    next(iter(state["state"].values())).popitem()


def _with_another_field(state: dict[str, Any]) -> None:
    next(iter(state["state"].values()))["other"] = torch.ones(1)


@pytest.mark.parametrize(
    "spoil", [_without_a_table, _with_another_table, _with_a_renamed_table, _without_a_field, _with_another_field]
)
def test_what_torchrec_refuses_to_load_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    told = []
    for model in models("adagrad"):
        state = model.fused_optimizer.state_dict()
        spoil(state)
        with pytest.raises(ValueError, match=r"Different parameter count|not found|Different state size") as raised:
            model.fused_optimizer.load_state_dict(state)
        told.append(str(raised.value))
    assert told[0] == told[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_methods_of_an_optimizer_do_what_torchrecs_do(kind: str) -> None:
    losses = []
    for model in models(kind):
        optimizer = model.fused_optimizer
        with pytest.raises(NotImplementedError):
            optimizer.optimizers[0][1].add_param_group({"params": []})
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()
        optimizer.set_optimizer_step(7)
        optimizer.post_load_state_dict()
        assert isinstance(repr(optimizer), str)
        assert not {name for name, _ in in_backward_optimizer_filter(model.named_parameters())} & set(optimizer.params)
        modules = [module for module in model.modules() if isinstance(module, FusedOptimizerModule)]
        assert model in modules and len(modules) >= 2
        losses.append(train(model, [batch_of(6, seed) for seed in range(5)]))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_around_it_train_as_around_torchrecs(kind: str) -> None:
    """Warm-up, which sets the rates of the tables as well, and clipping of the dense gradients; saved, and loaded."""
    results = []
    for model in models(kind):

        def wrapped(model: Any) -> CombinedOptimizer:
            dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adagrad(p, lr=0.05))
            clipped = GradientClippingOptimizer(dense, clipping=GradientClipping.NORM, max_gradient=0.1)
            assert isinstance(clipped, OptimizerWrapper)
            return CombinedOptimizer(
                [
                    ("tables", WarmupOptimizer(model.fused_optimizer, STAGES, lr=0.05)),
                    ("dense", WarmupOptimizer(clipped, STAGES, lr=0.05, param_name="__dense_warmup")),
                ]
            )

        optimizer, rates = wrapped(model), []
        losses = []
        for seed in range(10):
            losses += train(model, [batch_of(6, seed)], optimizer)
            rates.append({group["lr"] for group in model.fused_optimizer.param_groups})
        assert len(set(map(tuple, rates))) > 4, "the rate did not change"
        state = copy.deepcopy(optimizer.state_dict())
        again = wrapped(model)
        again.step()  # TorchRec loads into state that is there
        again.load_state_dict(state)
        losses += train(model, [batch_of(6, 20)], again)
        results.append((losses, rates, {key: set(value) for key, value in state["state"].items()}))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert results[0][1:] == results[1][1:]


def test_what_torchrec_has_saved_is_loaded() -> None:
    """Its sharded tensors, and both go on alike. The other way leads through `torch.distributed.checkpoint`."""
    ours, theirs = models("rowwise_adagrad")
    train(theirs, [batch_of(6, 30)])
    ours.load_state_dict(theirs.state_dict())
    ours.fused_optimizer.load_state_dict(theirs.fused_optimizer.state_dict())
    losses = [train(model, [batch_of(6, seed) for seed in (31, 32)], optimizer_of(model)) for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
