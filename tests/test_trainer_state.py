"""What a trainer keeps beside the model: readers drawn again, random states, counters, rates; and what is refused."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_nn import collection, dense_parameters, shard
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torch_ecrec.nn.trainer_state import TrackedReader, TrainerState, random_states, set_random_states, unwrapped

pytestmark = pytest.mark.usefixtures("process_group")

PASS = 4


class Passes:
    """Stateful: (pass, place) for ever, `PASS` of them a pass."""

    def __init__(self) -> None:
        self.turn, self.place = 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while self.place < PASS:
            self.place += 1
            yield self.turn, self.place
        self.turn, self.place = self.turn + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn, self.place = state["turn"], state["place"]


class Repeated:
    """No state: the same every pass, from a new generator each."""

    def __iter__(self) -> Iterator[int]:
        yield from range(PASS)


def plain(kind: str) -> Iterable[int]:
    return {"list": list(range(PASS)), "factory": Repeated(), "generator": (i for i in range(100))}[kind]


def by_for(reader: Iterable[Any]) -> Iterator[Any]:
    """Pass after pass, as a loop over epochs does."""
    while True:
        yield from reader


def by_next(reader: Iterator[Any]) -> Iterator[Any]:
    """Pass after pass, as a pipeline does."""
    while True:
        try:
            yield next(reader)
        except StopIteration:
            continue


def first(number: int, batches: Iterator[Any]) -> list[Any]:
    return list(itertools.islice(batches, number))


# readers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("walk", [by_for, by_next])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("forwards", [0, 1, 3, 4, 5, 8, 10])
def test_a_stateful_reader_goes_on_where_its_state_was_taken(walk: Any, ahead: int, forwards: int) -> None:
    expected = first(15, by_for(Passes()))
    before = TrackedReader(Passes())
    assert first(forwards + ahead, walk(before)) == expected[: forwards + ahead]
    after = TrackedReader(Passes())
    after.load(before.state_after(forwards))
    assert first(15 - forwards, walk(after)) == expected[forwards:]


@pytest.mark.parametrize("kind", ["list", "factory", "generator"])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("forwards", [0, 1, 4, 6, 8, 11])
def test_a_plain_reader_is_drawn_again(kind: str, ahead: int, forwards: int) -> None:
    expected = first(15, by_for(plain(kind)))
    before = TrackedReader(plain(kind))
    assert first(forwards + ahead, by_next(before)) == expected[: forwards + ahead]
    after = TrackedReader(plain(kind))
    after.load(before.state_after(forwards))
    assert first(15 - forwards, by_next(after)) == expected[forwards:]


@pytest.mark.parametrize("kind", ["list", "factory"])
def test_a_plain_reader_that_was_drawn_again_goes_on_in_a_for_loop(kind: str) -> None:
    before = TrackedReader(plain(kind))
    assert first(6, by_for(before)) == [0, 1, 2, 3, 0, 1]
    after = TrackedReader(plain(kind))
    after.load(before.state_after(6))
    assert first(4, by_for(after)) == [2, 3, 0, 1]


def test_a_reader_is_put_back_a_second_time() -> None:
    expected = first(12, by_for(Passes()))
    saved = {"draws": 0, "state": pickle.dumps(Passes().state_dict())}
    for begin in range(0, 12, 3):
        reader = TrackedReader(Passes())
        reader.load(saved)
        assert first(3, by_for(reader)) == expected[begin : begin + 3]
        saved = reader.state_after(begin + 3)
        assert saved["draws"] == begin + 3


def test_states_are_kept_until_a_later_one_is_asked_for() -> None:
    reader = TrackedReader(Passes())
    first(6, by_for(reader))
    states = [reader.state_after(draws) for draws in (2, 2, 5, 6)]
    assert [state["draws"] for state in states] == [2, 2, 5, 6] and states[0] == states[1]
    with pytest.raises(RuntimeError, match="5 batches"):
        reader.state_after(5)


def test_the_state_is_that_of_its_draw_and_not_the_last_one() -> None:
    reader = TrackedReader(Passes())
    first(3, by_for(reader))
    assert pickle.loads(reader.state_after(1)["state"]) == {"turn": 0, "place": 1}


def test_a_reader_that_is_iterated_past_the_tracked_one_is_told() -> None:
    mine = Passes()
    tracked = TrackedReader(mine)
    first(2, by_for(mine))
    with pytest.raises(RuntimeError, match=r"trained on 2 batches, but 0 were drawn from what `attach` returned: iter"):
        tracked.state_after(2)


def test_the_tracked_reader_has_the_length_of_the_reader() -> None:
    assert len(TrackedReader([1, 2, 3])) == 3
    with pytest.raises(TypeError):
        len(TrackedReader(Repeated()))


def test_an_empty_reader_cannot_be_drawn_again() -> None:
    with pytest.raises(RuntimeError, match="the reader ended before the 3 batches that were drawn before"):
        TrackedReader([]).load({"draws": 3, "state": None})


def test_a_generator_that_ends_too_early_is_told() -> None:
    with pytest.raises(Exception) as caught:  # of any type: pytest takes StopIteration badly
        TrackedReader(i for i in range(2)).load({"draws": 3, "state": None})
    assert caught.type is RuntimeError and "the reader ended before the 3 batches" in str(caught.value)


def shuffled(seed: int) -> TrackedReader:
    """7 batches a pass. (With a `generator` of its own, torchdata 0.11 puts the pass back but not those after it.)"""
    torch.manual_seed(seed)
    return TrackedReader(StatefulDataLoader(torch.arange(20), batch_size=3, shuffle=True, num_workers=0))


def numbers(reader: TrackedReader, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in first(count, by_for(reader))]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("forwards", [0, 3, 6, 7, 11])
def test_torchdatas_loader_goes_on_in_the_middle_of_a_pass(ahead: int, forwards: int) -> None:
    expected = numbers(shuffled(1), 21)
    passes = [sorted(itertools.chain(*expected[begin : begin + 7])) for begin in (0, 7, 14)]
    assert passes == [list(range(20))] * 3 and expected[:7] != expected[7:14]
    before, after = shuffled(1), shuffled(2)
    assert numbers(before, forwards + ahead) == expected[: forwards + ahead]
    after.load(pickle.loads(pickle.dumps(before.state_after(forwards))))
    assert numbers(after, 21 - forwards) == expected[forwards:]


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


def test_wrappers_are_opened_down_to_torchs_optimizers() -> None:
    one, two, three = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    inner, wrapped, alone = keyed(one), keyed(two), Adam(three.parameters())
    warmup = warm(wrapped)
    combined = CombinedOptimizer([("one", inner), ("two", warmup)])
    found = unwrapped([combined, alone])
    assert found == [combined, inner, inner._optimizer, warmup, wrapped, wrapped._optimizer, alone]
    state = TrainerState([combined, alone], None, {})
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


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("make", [inside, around])
def test_a_warm_up_goes_on_where_it_was(make: Any) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    before, after = make(model), make(other)
    steps(model, before, 4)
    packed = TrainerState([before], None, {}).pack(4, random_states())
    steps(other, after, 1)
    assert TrainerState([after], None, {}).load(packed) == 4
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
    TrainerState([after], None, {}).load(TrainerState([before], None, {}).pack(4, random_states()))
    assert rates(after) == rates(before) != rates(make(model))


def test_rates_of_fused_optimizers_come_back() -> None:
    before, after = (shard(collection("adagrad"))[0].fused_optimizer for _ in range(2))
    for group, rate in zip(before.param_groups, [0.5, 1 / 3], strict=True):
        group["lr"] = rate
    owned = [group["params"] for group in after.param_groups]
    TrainerState([after], None, {}).load(TrainerState([before], None, {}).pack(0, random_states()))
    assert rates(after) == [0.5, 1 / 3]
    assert all(group["params"] is mine for group, mine in zip(after.param_groups, owned, strict=True))


def test_a_scheduler_goes_on_where_it_was() -> None:
    optimizers, schedulers, states = [], [], []
    for _ in range(2):
        optimizers.append(CombinedOptimizer([shard(collection("adagrad"))[0].fused_optimizer]))
        schedulers.append(StepLR(optimizers[-1], step_size=3, gamma=0.5))
        states.append(TrainerState([optimizers[-1]], None, {"scheduler": schedulers[-1]}))
    for step in range(8):
        if step == 4:
            assert rates(optimizers[1]) != rates(optimizers[0])
            states[1].load(states[0].pack(4, random_states()))
        for optimizer, scheduler in list(zip(optimizers, schedulers, strict=True))[: 1 if step < 4 else 2]:
            optimizer.step()
            scheduler.step()
    assert rates(optimizers[1]) == rates(optimizers[0]) == [0.05 * 0.25] * 2
    assert schedulers[1].state_dict() == schedulers[0].state_dict()


# all of it --------------------------------------------------------------------------------------------


class Counter:
    """Something of the user's."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_everything_attached_comes_back() -> None:
    before = TrainerState([], Passes(), {"one": Counter(3), "two": Counter(5)})
    assert before.reader is not None
    first(6, by_for(before.reader))
    states = random_states()
    packed = before.pack(3, states)
    expected = drawn()
    one, two = Counter(), Counter()
    after = TrainerState([], Passes(), {"two": two, "one": one})
    assert after.random is None and after.load(packed) == 3
    assert (one.count, two.count) == (3, 5)
    assert after.reader is not None and first(2, by_for(after.reader)) == [(0, 4), (1, 1)]
    assert after.random is not None and drawn() != expected
    set_random_states(after.random)
    assert drawn() == expected


def test_what_was_packed_does_not_change_later() -> None:
    counter, model = Counter(3), nn.Linear(2, 1)
    optimizer = warm(keyed(model))
    state = TrainerState([optimizer], None, {"counter": counter})
    steps(model, optimizer, 2)
    packed, rate = state.pack(2, random_states()), optimizer.param_groups[0]["lr"]
    counter.count = 9
    steps(model, optimizer, 3)
    assert state.load(packed) == 2
    assert counter.count == 3 and optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize(
    ("reader", "names", "message"),
    [
        ([1], ["one"], "two"),
        ([1], ["one", "three", "two"], "three"),
        ([1], ["one", "three"], "three, two"),
        (None, ["one", "two"], "reader"),
    ],
)
def test_other_attachments_are_refused(reader: list[int] | None, names: list[str], message: str) -> None:
    packed = TrainerState([], [1], {"one": Counter(3), "two": Counter(5)}).pack(0, random_states())
    things = {name: Counter(7) for name in names}
    state = TrainerState([], reader, things)
    with pytest.raises(
        ValueError, match=f"attached now but not when the snapshot was taken, or the other way: {message}$"
    ):
        state.load(packed)
    assert all(thing.count == 7 for thing in things.values()) and state.random is None


def test_a_reader_that_was_not_attached_before_is_refused() -> None:
    packed = TrainerState([], None, {}).pack(0, random_states())
    state = TrainerState([], [1, 2], {})
    with pytest.raises(ValueError, match="the other way: reader"):
        state.load(packed)
    assert state.reader is not None and list(state.reader) == [1, 2] and state.random is None


def test_other_optimizers_are_refused() -> None:
    fused = shard(collection("adagrad"))[0].fused_optimizer
    counter = Counter(3)
    packed = TrainerState([fused], None, {"counter": counter}).pack(0, random_states())
    counter.count = 7
    state = TrainerState([], None, {"counter": counter})
    with pytest.raises(ValueError, match="other optimizers are attached than when the snapshot was taken"):
        state.load(packed)
    assert counter.count == 7 and state.random is None


def test_a_thing_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`losses` must have state_dict and load_state_dict, got list"):
        TrainerState([], None, {"losses": []})  # type: ignore[dict-item]
