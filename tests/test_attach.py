"""`attach`: a trainer that is made anew goes on as the one that was lost would have, bit for bit.

The first trainer runs to the end and its session keeps the tables after every step. Then everything is made anew, from
other seeds, on a session that says it has trained before, and runs to the end, too.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from fake_session import FakeSession
from test_nn import (
    CPU,
    LR,
    batch_of,
    collection,
    dense_parameters,
    job_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.dense import Header, own_of
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.trainer_state import unwrapped
from torch_ecrec.nn.values import decode, encode

pytestmark = pytest.mark.usefixtures("process_group")

END = 9
Part = tuple[Tensor, list[int]]


class Net(nn.Module):
    """Draws from every generator: dropout before the lookup, noise after it."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
        self.tables = tables
        self.over = nn.Linear(6 + 32, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        below = self.below(batch.dense_features)
        pooled = self.tables(batch.sparse_features).values()
        logits = torch.tanh(self.over(torch.cat([below, pooled], dim=1))).squeeze(1)
        noise = 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss = nn.functional.mse_loss(logits + noise, batch.labels)
        return loss, loss.detach()


class Losses(list[float]):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["losses"]


class Passes:
    """Stateful: a pass of `size` batches, each of its own, then another pass."""

    def __init__(self, size: int = 4) -> None:
        self.size, self.drawn = size, 0

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.drawn % self.size, self.size):
            self.drawn += 1
            yield batch_of(6, self.drawn)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


@dataclass
class Trainer:
    model: DistributedModelParallel
    session: FakeSession
    optimizer: CombinedOptimizer
    scheduler: StepLR
    losses: Losses
    batches: Any

    def steps(self, end: int, batches: Iterator[Any] | None = None) -> None:
        """The plain loop."""
        batches = batches or passes(self.batches)
        while self.model.steps_done < end:
            self.optimizer.zero_grad()
            loss, _ = self.model(next(batches))
            try:
                loss.backward()
            except NonFiniteGradient:
                continue
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(float(loss.detach()))

    def pipeline(self, end: int) -> None:
        runner = TrainPipelineSparseDist(self.model, self.optimizer, CPU)
        while self.model.steps_done < end:
            loss = runner.progress(self.batches)
            self.scheduler.step()
            self.losses.append(float(loss))

    def state(self) -> list[Any]:
        """Everything that training has changed, as leaves."""
        return tree_leaves(
            [
                self.session.records,
                list(dense_parameters(self.model).values()),
                list(self.model.buffers()),
                self.optimizer.state_dict(),
                [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
                self.scheduler.state_dict(),
                list(self.losses),
            ]
        )


def passes(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def made(before: FakeSession | None = None, step: int = 0, seed: int = 1, **more: Any) -> Trainer:
    """A trainer, not attached yet; after a restart in place of `before` if it is given."""
    tables = collection("adagrad")  # it seeds
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    net = Net(tables)
    session = FakeSession(job_of(net), before=before, step=step)
    model = DistributedModelParallel(net, device=CPU, session=session, **more)
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    return Trainer(model, session, optimizer, StepLR(optimizer, step_size=3, gamma=0.5), Losses(), None)


def attach(trainer: Trainer, reader: Any = None) -> Trainer:
    trainer.batches = trainer.model.attach(
        optimizer=trainer.optimizer,
        lr_scheduler=trainer.scheduler,
        reader=Passes() if reader is None else reader,
        losses=trainer.losses,
    )
    return trainer


def same(a: Trainer, b: Trainer) -> bool:
    """All of the state, bit for bit."""
    pairs = list(zip(a.state(), b.state(), strict=True))
    assert len(pairs) > 20 and sum(isinstance(x, Tensor) for x, _ in pairs) > 15
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


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


# where nothing comes back -----------------------------------------------------------------------------


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


# what is refused --------------------------------------------------------------------------------------


def test_without_attach_a_restarted_trainer_does_not_train() -> None:
    first = attach(made())
    first.steps(3)
    second = made(first.session, 2, seed=2)
    with torch.no_grad():
        second.model(batch_of(6, 0))
    with pytest.raises(RuntimeError, match=r"the servers have trained before.*call `attach` before the first step"):
        second.model(batch_of(6, 0))
    with pytest.raises(RuntimeError, match="call `attach`"):
        second.model.flush()
    assert second.session.step == 3 and not second.session.snapshots


def test_attach_is_called_once() -> None:
    trainer = attach(made())
    with pytest.raises(RuntimeError, match="`attach` is called once, before the first step"):
        attach(trainer)


def test_attach_after_a_step_is_refused() -> None:
    trainer = made()
    trainer.steps(1, passes(Passes()))
    with pytest.raises(RuntimeError, match="`attach` is called once, before the first step"):
        attach(trainer)


def test_a_snapshot_taken_without_attach_cannot_be_resumed() -> None:
    first = made()
    first.steps(4, passes(Passes()))
    second = made(first.session, 3, seed=2)
    with pytest.raises(RuntimeError, match="after step 3: nothing was attached when that snapshot was taken"):
        attach(second)


def test_the_reader_itself_must_not_be_iterated() -> None:
    trainer, reader = made(), Passes()
    attach(trainer, reader)
    with pytest.raises(RuntimeError, match="a batch that was not drawn from what `attach` returned: iterate that"):
        trainer.model(next(iter(reader)))


def refused(match: str, attachments: Callable[[Trainer], dict[str, Any]]) -> None:
    """What differs from what was attached when the snapshot was taken is said, and nothing is changed."""
    first = attach(made())
    first.steps(4)
    second = made(first.session, 3, seed=2)
    before = [x.clone() if isinstance(x, Tensor) else x for x in second.state()]
    with pytest.raises(ValueError, match=match):
        second.model.attach(**attachments(second))
    after = second.state()
    assert len(before) == len(after) and second.losses == []
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y


def test_other_dense_optimizers_are_refused_and_nothing_is_changed() -> None:
    refused("optimizers", lambda t: {"lr_scheduler": t.scheduler, "reader": Passes(), "losses": t.losses})


def test_other_attachments_are_refused_and_nothing_is_changed() -> None:
    refused(
        "attached now but not when the snapshot was taken, or the other way: losses, reader",
        lambda t: {"optimizer": t.optimizer, "lr_scheduler": t.scheduler},
    )


def test_a_thing_without_a_state_is_refused() -> None:
    trainer = made()
    with pytest.raises(TypeError, match=r"`losses` must have state_dict .*random generator.*got list"):
        trainer.model.attach(optimizer=trainer.optimizer, losses=[])
    attach(trainer)  # it was not attached


def test_load_state_dict_comes_before_attach() -> None:
    trainer = made()
    state = {"module.over.bias": torch.ones(1)}
    trainer.model.load_state_dict({f"{k}": v for k, v in state.items()}, strict=False)
    attach(trainer)
    with pytest.raises(RuntimeError, match="`load_state_dict` comes before `attach`"):
        trainer.model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_attached_does_not_move_before_the_first_step(
    restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = attach(made())
    first.steps(4)
    trainer = attach(made(first.session, 3, seed=2) if restarted else made())
    trainer.losses.append(0.5)
    with torch.no_grad():
        trainer.model.module.over.bias.add_(1)
    if restarted:
        with pytest.raises(RuntimeError, match=r"losses, over.bias changed between `attach` and the first step"):
            trainer.steps(END)
        assert trainer.model.steps_done == 3
    else:
        trainer.steps(1)
        assert "changed between `attach` and the first step: after a restart that would happen again" in caplog.text


def test_a_value_that_is_set_again_to_the_same_is_no_change() -> None:
    ends = []
    for before, step in [(None, 0), ("first", 4)]:
        trainer = attach(made(ends[0].session if before else None, step, seed=1 + step))
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["lr"] if before else LR
        trainer.steps(END)
        ends.append(trainer)
    assert ends[0].losses == ends[1].losses and same(*ends)


def test_every_optimizer_of_dense_parameters_is_attached() -> None:
    trainer = made()
    trainer.model.attach(optimizer=trainer.model.fused_optimizer, reader=Passes())
    loss, _ = trainer.model(next(trainer.model._attached.reader))  # type: ignore[union-attr]
    loss.backward()
    with pytest.raises(RuntimeError, match=r"Adam steps \S*below.0.weight, but was not attached"):
        trainer.optimizer.step()


def test_a_state_that_cannot_be_kept_is_refused_when_it_is_attached() -> None:
    trainer = made()
    trainer.losses.append(lambda: 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"losses\['losses'\]\[0\].*function"):
        attach(trainer)
    trainer.losses.clear()
    attach(trainer).steps(2)
    trainer.losses.append({1}.__contains__)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"losses\['losses'\]\[2\]"):
        trainer.steps(3)


def test_a_gradient_that_was_stepped_with_is_not_added_to() -> None:
    trainer = attach(made())
    trainer.steps(1)
    loss, _ = trainer.model(next(trainer.batches))
    with pytest.raises(RuntimeError, match="adds to a gradient that its optimizer has stepped with already"):
        loss.backward()


def test_dense_parameters_that_differ_between_trainers_are_told() -> None:
    first = attach(made())
    first.steps(4)
    payload, header = first.session.snapshots[3]
    own: Any = decode(own_of(payload, header))
    other = {**own, "dense": own["dense"] + 1}
    second = made(first.session, 3, seed=2)
    second.session.parts = [*second.session.parts, with_own(payload, header, encode(other, "own"))]
    with pytest.raises(RuntimeError, match="the trainers' dense parameters differed from each other"):
        attach(second)


def with_own(payload: Tensor, header: list[int], own: bytes) -> Part:
    size = len(own_of(payload, header))
    made_anew = torch.cat([payload[: payload.numel() - size], torch.frombuffer(bytearray(own), dtype=torch.uint8)])
    return made_anew, [*header[:-1], len(own)]


def test_a_scheduler_that_was_not_attached_is_refused_before_the_first_step() -> None:
    trainer = made()
    batches = trainer.model.attach(optimizer=trainer.optimizer, reader=Passes())
    with pytest.raises(RuntimeError, match="a scheduler was made for CombinedOptimizer, but not attached"):
        next(batches)


def test_a_scheduler_that_something_attached_keeps_is_attached() -> None:
    class Progress:
        def __init__(self, scheduler: StepLR) -> None:
            self.scheduler = scheduler
            self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict

    trainer = made()
    next(trainer.model.attach(optimizer=trainer.optimizer, reader=Passes(), progress=Progress(trainer.scheduler)))


def test_parameters_that_an_optimizer_is_given_later_are_refused_before_the_next_step() -> None:
    trainer = attach(made())
    trainer.steps(2)
    inner = next(o for o in unwrapped([trainer.optimizer]) if isinstance(o, torch.optim.Adam))
    inner.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="an optimizer was given parameters after `attach`"):
        trainer.steps(3)
    assert trainer.model.steps_done == 2


def test_an_optimizer_of_parameters_outside_the_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    attach(made())
    other = nn.Parameter(torch.ones(2))
    stranger = torch.optim.SGD([other], lr=0.1)
    other.grad = torch.ones(2)
    stranger.step()
    told = caplog.text.count("SGD steps parameters outside the model, and was not attached")
    stranger.step()
    assert told and caplog.text.count("SGD steps parameters") == told


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


def test_steps_are_not_nested() -> None:
    trainer = made()
    trainer.model.attach(optimizer=trainer.optimizer, lr_scheduler=trainer.scheduler)
    with trainer.model.step(), pytest.raises(RuntimeError, match="one step at a time"), trainer.model.step():
        pass


def test_two_backwards_of_one_forward_are_two_steps_with_one_snapshot() -> None:
    trainer = attach(made())
    for _ in range(3):
        trainer.optimizer.zero_grad()
        loss, _ = trainer.model(next(trainer.batches))
        loss.backward(retain_graph=True)
        loss.backward()
        trainer.optimizer.step()
    assert trainer.model.steps_done == 6 and sorted(trainer.session.snapshots) == [2, 4]
