"""What a trainer keeps beside the model: random states, counters, rates; and what is refused."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from models import collection, dense_parameters, shard
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torch_ecrec.resume.random_states import random_states, set_random_states
from torch_ecrec.resume.trainer_state import TrainerState, unwrapped
from torch_ecrec.resume.values import encode

pytestmark = pytest.mark.usefixtures("process_group")

# random states ----------------------------------------------------------------------------------------


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_states_are_taken_and_put_back() -> None:
    states = pickle.loads(pickle.dumps(random_states()))
    expected = [drawn() for _ in range(3)]
    assert all(a != b for a, b in zip(drawn(), expected[0], strict=True))
    set_random_states(states)
    assert [drawn() for _ in range(3)] == expected


# optimizers -------------------------------------------------------------------------------------------


def keyed(model: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dense_parameters(model), lambda p: Adam(p, lr=1.0))


def warm(optimizer: Any) -> WarmupOptimizer:
    return WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)], lr=0.5)


def kept_by(optimizers: Any = (), stateful: Any = None, tables: Optimizer | None = None) -> TrainerState:
    """Of a model without tables, unless they are given."""
    return TrainerState(list(optimizers), stateful or {}, CombinedOptimizer([]) if tables is None else tables)


def test_wrappers_are_opened_down_to_torchs_optimizers() -> None:
    one, two, three = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    inner, wrapped, alone = keyed(one), keyed(two), Adam(three.parameters())
    warmup = warm(wrapped)
    combined = CombinedOptimizer([("one", inner), ("two", warmup)])
    found = unwrapped([combined, alone])
    assert found == [combined, inner, inner._optimizer, warmup, wrapped, wrapped._optimizer, alone]
    assert unwrapped([inner, combined]) == [inner, inner._optimizer, combined, warmup, wrapped, wrapped._optimizer]
    state = kept_by([combined, alone], {})
    assert state.dense_optimizers == [inner._optimizer, wrapped._optimizer, alone]
    assert unwrapped([]) == []


def steps(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def inside(model: nn.Module) -> Optimizer:
    """A warm-up of the dense rates alone."""
    return CombinedOptimizer([warm(keyed(model))])


def around(model: nn.Module) -> Optimizer:
    """A warm-up of all rates, those of the servers included."""
    fused = shard(collection("adagrad"))[0].fused_optimizer
    return warm(CombinedOptimizer([("tables", fused), ("dense", keyed(model))]))


def kept(optimizer: Optimizer) -> dict[str, bytes]:
    return kept_by([optimizer], {}).encoded()


def bring_back(optimizer: Optimizer, kept: dict[str, bytes], before: Optimizer) -> None:
    """The groups of dense optimizers come back with the dense model, before the rest."""
    state = kept_by([optimizer], {})
    state.check(state.decoded(kept))
    for group, other in zip(optimizer.param_groups, before.param_groups, strict=True):
        group["lr"] = other["lr"]
    state.load_(state.decoded(kept))


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("make", [inside, around])
def test_a_warm_up_goes_on_where_it_was(make: Any) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    before, after = make(model), make(other)
    steps(model, before, 4)
    packed = kept(before)
    steps(other, after, 1)
    bring_back(after, packed, before)
    assert rates(after) == rates(before) and rates(after)[0] == pytest.approx(0.5 * (0.1 + 0.9 * 0.4))
    for _ in range(8):  # over the end of the stage
        steps(model, before, 1)
        steps(other, after, 1)
        assert rates(after) == rates(before)


@pytest.mark.parametrize("make", [inside, around])
def test_a_warm_up_that_was_made_anew_goes_on_where_it_was(make: Any) -> None:
    model = nn.Linear(2, 1)
    before, after = make(model), make(nn.Linear(2, 1))
    steps(model, before, 4)
    bring_back(after, kept(before), before)
    assert rates(after) == rates(before) != rates(make(model))


@pytest.mark.parametrize("attached", [(False, False), (True, False), (False, True), (True, True)])
def test_rates_of_the_tables_come_back_attached_or_not(attached: tuple[bool, bool]) -> None:
    """Even where it was attached before and is not now, or the other way round."""
    before, after = (shard(collection("adagrad"))[0].fused_optimizer for _ in range(2))
    for group, rate in zip(before.param_groups, [0.5, 1 / 3], strict=True):
        group["lr"] = rate
    owned = [group["params"] for group in after.param_groups]
    first, second = (
        kept_by([tables] if named else [], tables=tables)
        for tables, named in zip((before, after), attached, strict=True)
    )
    second.check(saved := second.decoded(first.encoded()))
    second.load_(saved)
    assert rates(after) == [0.5, 1 / 3]
    assert all(group["params"] is mine for group, mine in zip(after.param_groups, owned, strict=True))


@pytest.mark.parametrize("attached", [False, True])
def test_what_the_build_before_kept_is_read(attached: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It kept rates of tables whose optimizer was attached, under other names."""
    before, after = (shard(collection("adagrad"))[0].fused_optimizer for _ in range(2))
    for group in before.param_groups:
        group["lr"] = 0.25
    values, own = kept_by([before], tables=before).values(), rates(after)
    old = {"groups": values["groups"] if attached else [], "counters": values["counters"]}
    state = kept_by([], tables=after)
    state.check(saved := state.decoded({name: encode(value, name) for name, value in old.items()}))
    state.load_(saved)
    assert rates(after) == (rates(before) if attached else own)
    assert ("NOT EXACT" in caplog.text) is not attached


def test_what_gradients_are_divided_by_comes_back() -> None:
    state = kept_by()
    try:
        set_gradient_division(False)
        saved = state.decoded(state.encoded())
        set_gradient_division(True)
        state.load_(saved)
        assert get_gradient_division() is False
    finally:
        set_gradient_division(True)


def test_a_rate_that_was_changed_after_a_warm_up_had_set_it_comes_back() -> None:
    model = nn.Linear(2, 1)
    before, after = around(model), around(nn.Linear(2, 1))
    steps(model, before, 4)
    for group in before.param_groups:
        group["lr"] *= 0.5
    assert rates(before)[0] == pytest.approx(0.25 * (0.1 + 0.9 * 0.4))
    bring_back(after, kept(before), before)
    assert rates(after) == rates(before)


def test_a_scheduler_goes_on_where_it_was() -> None:
    optimizers, schedulers, states = [], [], []
    for _ in range(2):
        optimizers.append(CombinedOptimizer([shard(collection("adagrad"))[0].fused_optimizer]))
        schedulers.append(StepLR(optimizers[-1], step_size=3, gamma=0.5))
        states.append(kept_by([optimizers[-1]], {"scheduler": schedulers[-1]}))
    for step in range(8):
        if step == 4:
            assert rates(optimizers[1]) != rates(optimizers[0])
            states[1].load_(TrainerState.decoded(states[0].encoded()))
        for optimizer, scheduler in list(zip(optimizers, schedulers, strict=True))[: 1 if step < 4 else 2]:
            optimizer.step()
            scheduler.step()
    assert rates(optimizers[1]) == rates(optimizers[0]) == [0.05 * 0.25] * 2
    assert schedulers[1].state_dict() == schedulers[0].state_dict()


# all of it --------------------------------------------------------------------------------------------


class Counter:
    """Something of the user's."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_everything_attached_comes_back() -> None:
    before = kept_by([], {"one": Counter(3), "two": Counter(np.float32(0.1))})
    one, two = Counter(), Counter()
    after = kept_by([], {"two": two, "one": one})
    after.load_(after.decoded(before.encoded()))
    assert one.count == 3 and type(two.count) is np.float32 and two.count == np.float32(0.1)


def test_what_was_kept_does_not_change_later() -> None:
    counter, model = Counter([3]), nn.Linear(2, 1)
    optimizer = around(model)
    state = kept_by([optimizer], {"counter": counter})
    steps(model, optimizer, 2)
    kept, before = state.encoded(), rates(optimizer)
    counter.count.append(9)
    steps(model, optimizer, 3)
    state.load_(state.decoded(kept))
    assert counter.count == [3] and rates(optimizer)[:2] == before[:2], "two groups of tables, then the dense one"
    steps(model, optimizer, 1)
    assert rates(optimizer) == pytest.approx([0.5 * (0.1 + 0.9 * 0.3)] * 3), "the warm-up goes on after the second step"


@pytest.mark.parametrize(
    ("others", "names", "message"),
    [
        ([], ["one"], "two"),
        ([], ["one", "three", "two"], "three"),
        ([], ["one", "three"], "three, two"),
        (["reader"], ["one", "two"], "reader"),
    ],
)
def test_other_attachments_are_refused(others: list[str], names: list[str], message: str) -> None:
    kept = kept_by([], {"one": Counter(3), "two": Counter(5)}).encoded()
    state = kept_by([], {name: Counter(7) for name in names})
    with pytest.raises(
        ValueError, match=f"attached now but not when the snapshot was taken, or the other way: {message}$"
    ):
        state.check(state.decoded(kept), others)


def test_other_optimizers_are_refused() -> None:
    fused = shard(collection("adagrad"))[0].fused_optimizer
    kept = kept_by([fused], {}).encoded()
    state = kept_by([], {})
    with pytest.raises(ValueError, match="other optimizers are attached than when the snapshot was taken"):
        state.check(state.decoded(kept))


def test_a_thing_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`losses` must have state_dict .*random generator.*got list"):
        kept_by([], {"losses": []})  # type: ignore[dict-item]


def test_a_state_that_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"progress\['count'\]\[1\]"):
        kept_by([], {"progress": Counter([1, nn.Linear(1, 1)])})
