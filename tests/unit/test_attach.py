"""`attach`: a trainer that is made anew goes on as the one that was lost would have, bit for bit.

The first trainer runs to the end and its session keeps the tables after every step. Then everything is made anew, from
other seeds, on a session that says it has trained before, and runs to the end, too.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attached
import numpy as np
import pytest
import torch
from attached import END, Net, Passes, Trainer, attach, made, passes, same, unscheduled
from fake_session import FakeSession
from models import (
    CPU,
    LR,
    batch_of,
    dense_parameters,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.attachment import STEPS_OF_A_DRAW, STEPS_UNSEEN
from torch_ecrec.nn.dense import Header
from torch_ecrec.observe.rehearsed import mark, script_digest

pytestmark = pytest.mark.usefixtures("process_group")


class TwoHeads(Net):
    """One of two layers is over the tables, as the batch says: the other one gets no gradient."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__(tables)
        self.other = nn.Linear(6 + 32, 1, dtype=torch.float32)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.below(batch.dense_features), self.tables(batch.sparse_features).values()], dim=1)
        head = self.over if float(batch.dense_features.sum()) < 2 else self.other
        loss = nn.functional.mse_loss(torch.tanh(head(both)).squeeze(1), batch.labels)
        return loss, loss.detach()


class Unwrapped(DataParallelWrapper):
    """One trainer has nobody to average gradients with."""

    def wrap(self, *args: Any) -> None:
        pass


FEW = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)  # not all get a gradient in each step


def dense_of(trainer: Trainer) -> Optimizer:
    (_, dense) = trainer.optimizer.optimizers[1]
    inner: Optimizer = dense._optimizer
    return inner


# what comes back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
def test_a_restarted_trainer_goes_on_bit_for_bit(step: int) -> None:
    first = attach(made())
    first.steps(END)
    assert len(set(first.losses)) == END == first.model.steps_done
    second = made(first.session, step, seed=2)
    assert not torch.equal(second.model.module.over.weight, first.model.module.over.weight)
    attach(second)
    assert second.model.steps_done == step == len(second.losses)
    second.steps(END)
    assert second.losses == first.losses and same(first, second)
    assert sorted(second.session.snapshots) == list(range(step + 1, END))
    for later in second.session.snapshots:
        assert torch.equal(part(second, later), part(first, later))


def part(trainer: Trainer, step: int) -> Tensor:
    """What `load_` reads of a snapshot."""
    payload, header = trainer.session.snapshots[step]
    return payload[: len(payload) - Header.of(header, payload).own_bytes]


def test_a_trainer_may_be_restarted_again_and_again() -> None:
    first = attach(made())
    first.steps(END)
    before = first.session
    for seed, step in enumerate([2, 3, 6, 7], start=2):
        trainer = attach(made(before, step, seed))
        trainer.steps(step + 4 if step < 6 else END)
        before = trainer.session
    assert trainer.losses == first.losses and same(first, trainer)


def warmed(before: FakeSession | None = None, step: int = 0, seed: int = 1) -> Trainer:
    """One with a warm-up around the dense optimizer, which counts in that one's state."""
    trainer = made(before, step, seed)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)]
    (_, fused), (_, dense) = trainer.optimizer.optimizers
    trainer.optimizer = CombinedOptimizer([("tables", fused), ("dense", WarmupOptimizer(dense, stages, lr=LR))])
    trainer.scheduler = StepLR(fused, step_size=3, gamma=0.5)
    return trainer


@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_warm_up_around_the_dense_optimizer_goes_on_bit_for_bit(step: int) -> None:
    first = attach(warmed())
    first.steps(END)
    second = attach(warmed(first.session, step, seed=2))
    second.steps(END)
    assert second.losses == first.losses and same(first, second)
    rates = {group["lr"] for group in second.optimizer.optimizers[1][1].param_groups}
    assert rates == {LR}, "the warm-up is over"


def test_a_warm_up_that_is_not_attached_is_refused_by_name() -> None:
    """Else it would begin anew after a restart. With nothing attached, nobody starts again: it trains."""
    warmed().steps(3, iter(Passes()))
    trainer = warmed()
    whole, trainer.optimizer = trainer.optimizer, trainer.optimizer.optimizers[1][1]._optimizer._optimizer
    attach(trainer)
    trainer.optimizer = whole
    with pytest.raises(TypeError, match=r"in none of its groups \(a wrapper counts there\? attach that wrapper\)"):
        trainer.steps(3)


def test_a_warm_up_that_is_made_later_and_not_attached_is_refused_by_name() -> None:
    trainer = unscheduled(made())
    trainer.model.attach(optimizer=(inner := trainer.optimizer.optimizers[1][1]._optimizer), reader=Passes())
    batches = passes(trainer.model._attached.reader)  # type: ignore[union-attr]
    batch = next(batches)
    late = WarmupOptimizer(
        KeyedOptimizerWrapper(dense_parameters(trainer.model), lambda p: inner),
        [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)],
    )
    trainer.model(batch)[0].backward()
    late.step()
    with pytest.raises(TypeError, match=r"in none of its groups \(a wrapper counts there\? attach that wrapper\)"):
        next(batches)


def test_it_goes_on_after_the_last_step_that_has_a_snapshot() -> None:
    first = attach(made(snapshot_every=3))
    first.steps(END)
    assert sorted(first.session.snapshots) == [3, 6]
    second = attach(made(first.session, 6, seed=2, snapshot_every=3))
    second.steps(END)
    assert second.losses == first.losses and same(first, second)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_the_pipeline_goes_on_bit_for_bit_though_it_draws_ahead(step: int) -> None:
    piped = attach(made(), Passes(20))
    piped.pipeline(END)
    assert len(set(piped.losses)) == END
    again = attach(made(piped.session, step, seed=2), Passes(20))
    again.pipeline(END)
    assert again.losses == piped.losses and same(again, piped)
    mixed = attach(made(piped.session, step, seed=3), Passes(20))
    mixed.steps(END)
    assert mixed.losses == piped.losses and same(mixed, piped)


def test_a_module_that_counts_while_a_pipeline_traces_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Net.forward

    def counting(net: Net, batch: Batch) -> tuple[Tensor, Tensor]:
        net.calls += 1
        return forward(net, batch)

    monkeypatch.setattr(Net, "forward", counting)
    trainer = made()
    trainer.model.module.calls = 0
    with pytest.raises(RuntimeError, match="calls changed while a pipeline was made, which traces the model"):
        attach(trainer, Passes(20)).pipeline(3)


def test_a_reader_without_state_is_drawn_again() -> None:
    batches = [batch_of(6, seed) for seed in range(4)]
    ends = []
    for before, step in [(None, 0), ("first", 6)]:
        trainer = attach(made(ends[0].session if before else None, step, seed=step), batches)
        trainer.steps(END, cycle(trainer.batches))
        ends.append(trainer)
    assert ends[0].losses == ends[1].losses and same(*ends)


def cycle(batches: Iterator[Batch]) -> Iterator[Batch]:
    while True:
        try:
            yield next(batches)
        except StopIteration:
            continue


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("step", [2, 4, 6])
def test_torchdatas_loader_goes_on(step: int) -> None:
    first = attach(made(), loader())
    first.steps(END)
    assert len(set(first.losses)) == END
    second = attach(made(first.session, step, seed=2), loader())
    second.steps(END)
    assert second.losses == first.losses and same(first, second)


def loader() -> StatefulDataLoader[Batch]:
    """4 batches a pass, in another order each. Every pass draws a seed from torch's generator as it begins."""
    batches = [batch_of(6, seed) for seed in range(4)]
    return StatefulDataLoader(batches, batch_size=1, shuffle=True, collate_fn=lambda batch: batch[0])


def test_a_refused_step_has_used_a_batch_and_no_step() -> None:
    def batches() -> list[Batch]:
        made_here = [batch_of(6, seed) for seed in range(20)]
        made_here[2].labels[0] = float("nan")
        return made_here

    first = attach(made(), batches())
    first.steps(END)
    assert len(first.losses) == END == first.model.steps_done
    second = attach(made(first.session, 5, seed=2), batches())
    second.steps(END, cycle(second.batches))
    assert second.losses == first.losses and same(first, second)


def test_lookups_without_grad_before_the_first_step_change_nothing() -> None:
    first = attach(made())
    first.steps(END)
    second = attach(made(first.session, 4, seed=2))
    with torch.no_grad():
        second.model.eval()
        second.model(batch_of(6, 99))
        second.model.train()
    second.model.flush()
    second.steps(END)
    assert second.losses == first.losses and same(first, second)


def test_a_flush_takes_no_snapshot_before_the_step_has_ended() -> None:
    first = attach(made())
    first.steps(3)
    first.model.flush()
    first.steps(END)
    second = attach(made(first.session, 3, seed=2))
    second.steps(END)
    assert second.losses == first.losses and same(first, second)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_flush_between_passes_is_as_good() -> None:
    first = attach(made(), loader())
    first.steps(4)
    first.model.flush()
    first.steps(END)
    second = attach(made(first.session, 4, seed=2), loader())
    second.steps(END)
    assert second.losses == first.losses


def test_the_pipeline_begins_another_pass() -> None:
    trainer = attach(made(), Passes(4))
    runner = TrainPipelineSparseDist(trainer.model, trainer.optimizer, CPU)
    for epoch in trainer.batches.epochs(2):
        stream = iter(trainer.batches)
        for _ in range(4):
            runner.progress(stream)
        with pytest.raises(StopIteration):
            runner.progress(stream)
        assert trainer.model.steps_done == 4 * (epoch + 1)


def test_a_forward_that_nothing_is_trained_on_does_not_move_the_reader() -> None:
    first = attach(made())
    first.steps(2)
    first.model.eval()
    first.model(batch_of(6, 99))  # somebody's evaluation, without no_grad
    first.model.train()
    first.steps(END)
    second = attach(made(first.session, 4, seed=2))
    second.steps(END)
    assert second.losses == first.losses


def test_nothing_is_restored_at_step_0() -> None:
    first = attach(made())
    first.steps(END)
    restarted = made(first.session, 0)
    weights = [p.detach().clone() for p in dense_parameters(restarted.model).values()]
    attach(restarted)
    assert restarted.session.restarted and restarted.model.steps_done == 0 and restarted.losses == []
    for weight, now in zip(weights, dense_parameters(restarted.model).values(), strict=True):
        assert torch.equal(weight, now)
    restarted.steps(END)
    assert restarted.losses == first.losses and same(first, restarted)


def test_a_new_cluster_is_not_asked_to_resume() -> None:
    trainer = attach(made())
    assert not trainer.session.restarted and trainer.model.steps_done == 0


@pytest.mark.parametrize("marked", [False, True])
def test_a_loop_without_a_reader_goes_on(marked: bool) -> None:
    def run(trainer: Trainer) -> Trainer:
        assert list(trainer.model.attach(optimizer=trainer.optimizer, lr_scheduler=trainer.scheduler)) == []
        for step in range(trainer.model.steps_done, 6):
            with trainer.model.step() if marked else contextlib.nullcontext():
                number = int(torch.randint(0, 99, ())) if marked else step
                trainer.steps(step + 1, iter([batch_of(6, number)]))
        return trainer

    first = run(made())
    for step in range(1, 6):
        again = run(made(first.session, step, seed=2))
        assert again.losses == first.losses[step:]
        again.losses[:0] = first.losses[:step]
        assert same(first, again)


def test_a_batch_that_was_drawn_at_random_before_a_forward_is_another_one_after_a_restart() -> None:
    def run(trainer: Trainer) -> Trainer:
        trainer.model.attach(optimizer=trainer.optimizer, lr_scheduler=trainer.scheduler)
        for step in range(trainer.model.steps_done, 4):
            trainer.steps(step + 1, iter([batch_of(6, int(torch.randint(0, 99, ())))]))
        return trainer

    first = run(made())
    with pytest.raises(RuntimeError, match=r"another batch than before the restart.*`with model.step\(\)"):
        run(made(first.session, 2, seed=2))


def test_a_value_that_is_set_again_to_the_same_is_no_change() -> None:
    ends = []
    for before, step in [(None, 0), ("first", 4)]:
        trainer = attach(made(ends[0].session if before else None, step, seed=1 + step))
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] if before else LR
        trainer.steps(END)
        ends.append(trainer)
    assert ends[0].losses == ends[1].losses and same(*ends)


def test_what_modules_have_beside_tensors_is_brought_back_where_it_has_changed() -> None:
    first = attach(made())
    first.steps(3)
    net = first.model.module
    net.note, net.below[1].p, net.below[2].training = "warm", 0.25, False
    net.over.bias.requires_grad_(False)
    next(first.batches)
    again = made(first.session, 3, seed=2)
    again.model.module.kept = 3  # by the script, for itself
    attach(again)
    net = again.model.module
    assert (net.note, net.below[1].p, net.below[2].training, net.below[1].training) == ("warm", 0.25, False, True)
    assert not net.over.bias.requires_grad and net.over.weight.requires_grad and net.kept == 3


@pytest.mark.parametrize(
    ("built", "then"),
    [(1.0, np.exp(-0.5)), (np.float32(1), np.float32(0.25)), (2, 2.0), (3, None), (None, 3), (None, None), (1j, 2j)],
    ids=repr,
)
def test_a_number_of_a_module_comes_back_of_whatever_kind_it_is(built: Any, then: Any) -> None:
    """A temperature that falls in the forward becomes one of NumPy's easily."""
    first = made()
    first.model.module.below[1].temperature = built
    attach(first).steps(3)
    first.model.module.below[1].temperature = then
    next(first.batches)
    again = made(first.session, 3, seed=2)
    again.model.module.below[1].temperature = built
    attach(again).steps(4)
    found = again.model.module.below[1].temperature
    assert type(found) is type(then) and found == then


class Counting(nn.Linear):
    """Has a state that is no tensor, which `state_dict` has, too."""

    def __init__(self) -> None:
        super().__init__(2, 2, dtype=torch.float32)
        self.history: list[int] = []

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]


def test_extra_state_of_modules_comes_back() -> None:
    first = made()
    first.model.module.below[1].counting = Counting()
    attach(first).steps(3)
    first.model.module.below[1].counting.history.append(7)
    next(first.batches)
    again = made(first.session, 3, seed=2)
    again.model.module.below[1].counting = Counting()
    assert attach(again).model.module.below[1].counting.history == [7]
    refused = made()
    refused.model.module.below[1].counting = Counting()
    refused.model.module.below[1].counting.history = Counting()
    with pytest.raises(TypeError, match=r"extra state of Counting\['history'\]: .* cannot be kept"):
        attach(refused)


def test_steps_are_not_nested() -> None:
    trainer = made()
    trainer.model.attach(optimizer=trainer.optimizer, lr_scheduler=trainer.scheduler)
    with trainer.model.step(), pytest.raises(RuntimeError, match="one step at a time"), trainer.model.step():
        pass


@pytest.mark.parametrize("wrapper", [FEW, Unwrapped()], ids=["ddp", "alone"])
@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_is_not_one_with_a_gradient_of_zero(
    to_none: bool, wrapper: DataParallelWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam moves the latter."""
    monkeypatch.setattr(attached, "Net", TwoHeads)

    def run(trainer: Trainer) -> Trainer:
        batches, reached = passes(attach(trainer).batches), set()
        while trainer.model.steps_done < END:
            dense_of(trainer).zero_grad(set_to_none=to_none)
            loss, value = trainer.model(next(batches))
            loss.backward()
            gradient = trainer.model.module.other.weight.grad
            reached.add(gradient is not None and bool(gradient.any()))
            trainer.optimizer.step()
            trainer.scheduler.step()
            trainer.losses.append(float(value))
        assert reached == {True, False}
        return trainer

    first = run(made(data_parallel_wrapper=wrapper))
    for step in range(1, END - 1):
        second = run(made(first.session, step, seed=2, data_parallel_wrapper=wrapper))
        assert second.losses == first.losses and same(first, second), step


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_a_parameter_that_is_trained_from_some_step_on_wait_for_their_step(to_none: bool) -> None:
    """It is frozen when it is attached, as one should be that is to train later."""

    def run(trainer: Trainer) -> Trainer:
        over = trainer.model.module.over.weight
        over.requires_grad_(False)
        batches = passes(attach(trainer).batches)
        while trainer.model.steps_done < 13:
            batch, done = next(batches), trainer.model.steps_done
            over.requires_grad_(done >= 4)
            loss, value = trainer.model(batch)
            loss.backward()
            if done % 3 != 1:
                dense_of(trainer).step()
                dense_of(trainer).zero_grad(set_to_none=to_none)
            trainer.losses.append(float(value))
        return trainer

    first = run(made(data_parallel_wrapper=Unwrapped()))
    for step in range(1, 12):
        second = run(made(first.session, step, seed=2, data_parallel_wrapper=Unwrapped()))
        assert second.losses == first.losses and same(first, second), step


def test_gradients_that_no_optimizer_steps_with_come_back() -> None:
    """They add up for good, and count where all gradients are clipped: a restart began them anew, without a word."""

    def run(trainer: Trainer) -> Trainer:
        optimizer = torch.optim.Adam([trainer.model.module.over.weight], lr=LR)
        batches = passes(trainer.model.attach(optimizer=optimizer, reader=Passes(), losses=trainer.losses))
        while trainer.model.steps_done < END:
            optimizer.zero_grad()
            loss, value = trainer.model(next(batches))
            loss.backward()
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
            optimizer.step()
            trainer.losses.append(float(value))
        return trainer

    first = run(made())
    for step in range(1, END - 1):
        second = run(made(first.session, step, seed=2))
        assert second.losses == first.losses, step
        assert torch.equal(second.model.module.over.weight, first.model.module.over.weight), step


def test_snapshots_go_on_though_a_refused_step_moves_the_turns() -> None:
    """A turn of two steps ends after an odd one from there on, and a snapshot is due after every even one."""

    def run(trainer: Trainer) -> Trainer:
        batches = passes(attach(trainer, Passes(20)).batches)
        while trainer.model.steps_done < 11:
            batch, turn = next(batches), len(trainer.losses)
            for part in range(2):
                trainer.optimizer.zero_grad()
                loss, value = trainer.model(batch)
                with contextlib.suppress(NonFiniteGradient):
                    (loss * float("nan") if (turn, part) == (1, 1) else loss).backward()
                    trainer.optimizer.step()
            trainer.scheduler.step()
            trainer.losses.append(float(value))
        return trainer

    first = run(made(snapshot_every=2))
    assert sorted(first.session.snapshots) == [2, 5, 7, 9]
    for step in first.session.snapshots:
        second = run(made(first.session, step, seed=2, snapshot_every=2))
        assert second.losses == first.losses and same(first, second)
        assert sorted(second.session.snapshots) == [later for later in first.session.snapshots if later > step]


def test_two_backwards_of_one_forward_are_two_steps_with_one_snapshot() -> None:
    trainer = attach(made())
    for _ in range(3):
        trainer.optimizer.zero_grad()
        loss, _ = trainer.model(next(trainer.batches))
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.optimizer.step()
    assert trainer.model.steps_done == 6 and sorted(trainer.session.snapshots) == [2, 4]


def test_training_again_and_again_on_one_batch_that_was_drawn_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No snapshot is taken meanwhile: logs grow, and a restart makes all of it again."""
    trainer = attach(made())
    for turns in (STEPS_OF_A_DRAW, STEPS_OF_A_DRAW + 1):
        assert "steps were trained since a batch was drawn" not in caplog.text
        trainer.steps(trainer.model.steps_done + turns, itertools.repeat(next(trainer.batches)))
    trainer.steps(trainer.model.steps_done + 2 * STEPS_OF_A_DRAW, itertools.repeat(next(trainer.batches)))
    assert caplog.text.count(f"{STEPS_OF_A_DRAW} steps were trained since a batch was drawn") == 1


@pytest.mark.parametrize("how", ["eval", "module", "model.step()", "train"])
def test_steps_whose_forwards_nobody_has_seen_are_told(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """No snapshot is taken of them: logs grow, and a restart makes all of them again."""
    trainer = unscheduled(made())
    model, session = trainer.model, trainer.session
    model.attach(optimizer=trainer.optimizer)
    model.train(how in ("train", "module"))
    called = model.module if how == "module" else model
    for seed in range(2 * STEPS_UNSEEN):
        with model.step() if how == "model.step()" else contextlib.nullcontext():
            trainer.optimizer.zero_grad()
            called(batch_of(6, seed))[0].backward()
            trainer.optimizer.step()
    unseen = how in ("eval", "module")
    assert model.steps_done == 2 * STEPS_UNSEEN and len(session.snapshots) == (0 if unseen else 2 * STEPS_UNSEEN - 1)
    assert caplog.text.count(f"{STEPS_UNSEEN} steps were trained by forwards that begin no step") == int(unseen)


class Detached(Net):
    """Its tables get no gradients once it is told."""

    detaches = False

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = self.tables(batch.sparse_features).values()
        both = torch.cat([self.below(batch.dense_features), rows.detach() if self.detaches else rows], dim=1)
        loss = nn.functional.mse_loss(torch.tanh(self.over(both)).squeeze(1), batch.labels)
        return loss, loss.detach()


def test_backwards_that_reach_no_table_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no steps, and no snapshot is taken: a restart makes all of them again."""
    monkeypatch.setattr(attached, "Net", Detached)
    trainer = attach(made(data_parallel_wrapper=Unwrapped()))
    trainer.steps(STEPS_UNSEEN + 2)
    assert "have reached no row of a table" not in caplog.text
    trainer.model.module.detaches = True
    for batch in itertools.islice(passes(trainer.batches), 3 * STEPS_UNSEEN):
        trainer.optimizer.zero_grad()
        trainer.model(batch)[0].backward()
        trainer.optimizer.step()
    assert trainer.model.steps_done == STEPS_UNSEEN + 2
    assert caplog.text.count(f"{STEPS_UNSEEN} backwards since step {STEPS_UNSEEN + 2} have reached no row") == 1


def test_one_batch_that_a_reader_gives_again_and_again_goes_on() -> None:
    first = attach(made(), itertools.repeat(batch_of(6, 1)))
    first.steps(END)
    second = attach(made(first.session, 4, seed=2), itertools.repeat(batch_of(6, 1)))
    second.steps(END)
    assert second.losses == first.losses and same(first, second) and len(first.session.snapshots) == END - 1


def test_that_trainers_would_hang_when_they_are_started_again_is_told_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They hang before anything of ours begins."""

    def told(store: str, restarts: str, trainers: int) -> bool:
        caplog.clear()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", store)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        trainer = made()
        trainer.session.trainers = trainers
        attach(trainer)
        return "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text

    assert told("True", "3", 2)
    assert not told("False", "3", 2) and not told("True", "0", 2) and not told("True", "3", 1)


def test_that_a_script_was_not_rehearsed_is_told_as_a_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By trainer 0, unless a rehearsal of the script as it is now has left its mark."""
    script = tmp_path / "train.py"
    script.write_text("one")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    monkeypatch.setenv("TORCH_ECREC_REHEARSED", str(tmp_path))

    def told(trainer: Trainer) -> int:
        caplog.clear()
        attach(trainer)
        return caplog.text.count("this script was not rehearsed as it is")

    first = made()
    assert told(first) == 1 and f"({tmp_path} has no mark of it)" in caplog.text
    first.steps(2)
    assert told(made(first.session, 1)) == 0, "it goes on: a job tells it once"
    assert told(made(snapshot_every=0)) == 0, "nobody goes on"
    mark(tmp_path, script_digest())
    assert told(made()) == 0
    script.write_text("another")
    assert told(made()) == 1
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None)
    mark(tmp_path, script_digest())
    assert told(made()) == 1, "a notebook: nobody knows"


def test_settings_of_torch_are_those_of_before_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    """A job that was started again with another OMP_NUM_THREADS went on otherwise, without a word."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(threads + 1)
        first = attach(made())
        first.steps(4)
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
        torch.use_deterministic_algorithms(True)
        second = attach(made(first.session, 2, seed=2))
        assert torch.get_num_threads() == threads
        second.steps(4)
        assert torch.get_num_threads() == threads + 1 and torch.get_default_dtype() == dtype
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(False)
    assert f"threads: {threads + 1}, not {threads}" in caplog.text
    assert f"default dtype: {str(dtype).removeprefix('torch.')}, not" in caplog.text
