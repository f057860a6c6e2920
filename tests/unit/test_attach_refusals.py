"""`attach`: what cannot be kept, or would not come back, is refused or told by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import attached
import numpy as np
import pytest
import torch
import torch.distributed as dist
from attached import END, Passes, Trainer, attach, made, passes, unscheduled
from models import batch_of, collection, dense_parameters, tables
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torchmetrics import MeanMetric
from torchrec import PoolingType
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from torch_ecrec.compat.torchrec import wrapped_module
from torch_ecrec.nn.attachment import OTHER_FROZEN, OTHER_MODULES
from torch_ecrec.nn.dense import own_of
from torch_ecrec.nn.placeholder import TableParameter
from torch_ecrec.resume.trainer_state import unwrapped
from torch_ecrec.resume.values import decode, encode

pytestmark = pytest.mark.usefixtures("process_group")
Part = tuple[Tensor, list[int]]


def test_without_attach_a_restarted_trainer_does_not_train() -> None:
    first = attach(made())
    first.steps(3)
    second = made(first.session, 2, seed=2)
    with torch.no_grad():
        second.model(batch_of(6, 0))
    with pytest.raises(RuntimeError, match=r"the servers have trained before.*call `attach` before the first step"):
        second.model(batch_of(6, 0))
    second.model.flush()  # waits, and keeps nothing: the script may attach yet
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


@pytest.mark.parametrize("both", [False, True], ids=["one ahead", "two of a turn"])
def test_a_draw_between_forward_and_backward_is_refused_where_a_batch_would_be_lost(both: bool) -> None:
    """It is not where all that was drawn is trained on when the next step begins."""
    trainer = attach(made(), Passes(6))
    batches = iter(trainer.batches)
    loss, _ = trainer.model(next(batches))
    for step in range(1, 3):
        coming = next(batches)
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        loss, _ = trainer.model(coming)
        if both:
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            loss, _ = trainer.model(next(batches))
            assert trainer.model.steps_done == 2 * step
        else:
            with pytest.raises(RuntimeError, match="batches are drawn between a forward and its backward"):
                next(batches)
            return
    assert trainer.session.snapshots


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
    def tables_alone(trainer: Trainer) -> dict[str, Any]:
        fused = trainer.model.fused_optimizer
        named = {"optimizer": fused, "lr_scheduler": StepLR(fused, step_size=3)}
        return {**named, "reader": Passes(), "losses": trainer.losses}

    refused("optimizers", tables_alone)


def test_other_attachments_are_refused_and_nothing_is_changed() -> None:
    refused(
        "attached now but not when the snapshot was taken, or the other way: losses, reader",
        lambda t: {"optimizer": t.optimizer, "lr_scheduler": t.scheduler},
    )


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({}, {"WIRE": "bfloat16"}, "training went on with TORCH_ECREC_WIRE=float32, and this trainer has bfloat16"),
        ({"WIRE": "bfloat16"}, {}, "training went on with TORCH_ECREC_WIRE=bfloat16, and this trainer has float32"),
        ({}, {"EVALUATION_WIRE": "int8"}, "with TORCH_ECREC_EVALUATION_WIRE=wire, and this trainer has int8"),
        ({}, {"POOLING": "parts"}, "training went on with TORCH_ECREC_POOLING=whole, and this trainer has parts"),
        ({"POOLING": "rows"}, {"POOLING": "whole"}, ""),
        ({"WIRE": "bfloat16"}, {"WIRE": "bfloat16", "POOLING": "parts"}, ""),
    ],
)
def test_a_trainer_that_rounds_otherwise_than_before_is_refused(
    before: dict[str, str], after: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums, rows or gradients would have other bits from there on, and nobody would know."""
    with monkeypatch.context() as set_before:
        for name, value in before.items():
            set_before.setenv(f"TORCH_ECREC_{name}", value)
        first = attach(made())
    first.steps(4)
    for name, value in after.items():
        monkeypatch.setenv(f"TORCH_ECREC_{name}", value)
    second = made(first.session, 3, seed=2)
    if not says:
        attach(second)
        return
    with pytest.raises(ValueError, match=re.escape(says)):
        attach(second)


def test_parts_of_other_slots_are_told_as_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_POOLING", "parts")
    first = attach(made())
    first.steps(4)
    second = made(first.session, 3, seed=2)
    attach(second)
    assert second.session.inexact == []
    third = made(first.session, 3, seed=2)
    job = third.session.job
    third.session.job = replace(job, code=replace(job.code, slots=job.code.slots + 1))
    attach(third)
    (said,) = third.session.inexact
    assert re.fullmatch(r"4 slots, .* sum bags in parts, and round otherwise than the 3 slots, .* of before", said)


@pytest.mark.parametrize("change", ["nothing", "its own", "a mode", "a number", "a kind"])
def test_a_model_that_computes_otherwise_than_before_is_told_as_not_exact(change: str) -> None:
    def built(*before: Any, **more: Any) -> Trainer:
        trainer = made(*before, **more)
        trainer.model.module.drop = nn.Dropout(0.1)
        return trainer

    first = attach(built())
    first.steps(4)
    second = built(first.session, 3, seed=2)
    net = second.model.module
    match change:
        case "its own":
            net.made_at = 17.0
        case "a mode":
            net.drop.eval()
        case "a number":
            net.drop.p = 0.2
        case "a kind":
            net.drop = nn.AlphaDropout(0.1)
    attach(second)
    assert second.session.inexact == [OTHER_MODULES] * (change in ("a number", "a kind"))


@pytest.mark.parametrize("change", ["nothing", "pooling", "features", "output dtype"])
def test_tables_whose_outputs_are_others_than_before_are_told_as_not_exact(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attach(made())
    first.steps(4)
    configs = tables()
    if change == "pooling":
        configs[0].pooling = PoolingType.MEAN if configs[0].pooling is PoolingType.SUM else PoolingType.SUM
    if change == "features":
        configs[0].feature_names = configs[0].feature_names[::-1] + ["another"]
    monkeypatch.setattr(attached, "collection", lambda kind: collection(kind, configs))
    second = made(first.session, 3, seed=2)
    if change == "output dtype":
        second.model.module.tables.give_out_as({configs[0].name: torch.float16})
    attach(second)
    assert second.session.inexact == [OTHER_MODULES] * (change != "nothing")


@pytest.mark.parametrize("loop_freezes", [False, True])
@pytest.mark.parametrize("what", ["over.bias", "table"])
def test_what_is_frozen_now_and_was_not_before_is_told_as_not_exact(what: str, loop_freezes: bool) -> None:
    def freeze(trainer: Trainer) -> str:
        named = dict(trainer.model.module.named_parameters())
        name = what if what in named else next(n for n, p in named.items() if isinstance(p, TableParameter))
        named[name].requires_grad_(False)
        return name

    first = attach(made())
    first.steps(4)
    if loop_freezes:
        freeze(first)
    next(first.batches)  # takes the snapshot of step 4
    second = made(first.session, 4, seed=2)
    name = freeze(second)
    attach(second)
    assert second.session.inexact == ([] if loop_freezes else [OTHER_FROZEN % name])


def test_a_scheduler_of_another_class_is_refused() -> None:
    """It would go on with the numbers of the other one that have its names, and make its own of the rest."""
    first = attach(made())
    first.steps(4)
    second = unscheduled(made(first.session, 3, seed=2))
    second.scheduler = ExponentialLR(second.optimizer, 0.5)
    with pytest.raises(ValueError, match=r"lr_scheduler\[0\] was StepLR and is ExponentialLR. Start the script with"):
        attach(second)


def test_a_thing_without_a_state_is_refused() -> None:
    trainer = made()
    with pytest.raises(TypeError, match=r"`losses` must have state_dict .*random generator.*got list"):
        trainer.model.attach(optimizer=trainer.optimizer, losses=[])
    attach(trainer)  # it was not attached


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


def test_every_optimizer_of_dense_parameters_is_attached() -> None:
    trainer = unscheduled(made())
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


def test_a_gradient_that_was_stepped_with_is_not_stepped_with_again() -> None:
    """Without a batch between the two, trainers that are started again make both."""
    trainer = attach(made())
    trainer.steps(2)
    trainer.optimizer.step()
    trainer.steps(3)
    next(trainer.batches)
    with pytest.raises(RuntimeError, match="steps once more with a gradient it has stepped with already"):
        trainer.optimizer.step()


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


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("of", ["fused", "dense"])
@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau", "WarmupOptimizer"])
def test_a_scheduler_that_marks_an_optimizer_is_attached(kind: str, of: str, attached: bool) -> None:
    """Whether or not its optimizer is. What leaves no mark is for a rehearsal to find."""
    trainer = unscheduled(made())
    (_, fused), (_, dense) = trainer.optimizer.optimizers
    chosen = {"fused": fused, "dense": dense}[of]
    more: dict[str, Any] = {"optimizer": dense}
    if kind == "WarmupOptimizer":
        setter: Any = WarmupOptimizer(chosen, [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)])
        if attached:
            more["optimizer"] = [dense, setter]
    else:
        setter = StepLR(chosen, 1) if kind == "StepLR" else ReduceLROnPlateau(chosen)
        if attached:
            more["lr_scheduler"] = setter
    batches = trainer.model.attach(reader=Passes(), **more)
    if attached or kind != "StepLR":
        next(batches)
        return
    with pytest.raises(RuntimeError, match=r"a scheduler was made for \w+, but not attached: it would begin anew"):
        next(batches)


@pytest.mark.parametrize("kind", [StepLR, ReduceLROnPlateau])
def test_a_scheduler_of_what_is_not_kept_is_refused_by_name(kind: Any) -> None:
    trainer = unscheduled(made())
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = kind(other, 1) if kind is StepLR else kind(other)
    match = rf"\({kind.__name__}\) is attached, but the SGD whose learning rates it sets is not"
    inner = trainer.optimizer.optimizers[1][1]
    for named in ({"lr_scheduler": scheduler}, {"others": scheduler}):
        with pytest.raises(RuntimeError, match=match):
            trainer.model.attach(optimizer=inner, reader=Passes(), **named)  # type: ignore[arg-type]
    next(trainer.model.attach(optimizer=inner, reader=Passes(), lr_scheduler=scheduler, other=other))


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


@pytest.mark.parametrize("kind", ["grows", "comes", "goes", "stays"])
def test_a_buffer_that_will_not_fit_after_a_restart_is_told_before(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """That a script whose buffer got another shape could not go on was said after trainers were lost only."""

    def with_buffer(trainer: Trainer) -> Trainer:
        trainer.model.module.register_buffer("seen", None if kind == "comes" else torch.zeros(2))
        return attach(trainer)

    first = with_buffer(made())
    first.steps(2)
    first.model.module.seen = {"comes": torch.ones(2), "grows": torch.ones(3), "goes": None}.get(kind, torch.ones(2))
    first.steps(5)
    told = "tensors of the model have other shapes than at `attach` (seen)"
    assert caplog.text.count(told) == (kind != "stays")
    if kind == "stays":
        with_buffer(made(first.session, 3, seed=2)).steps(5)
    else:
        with pytest.raises(ValueError, match=r"buffers seen|differ in buffers seen"):
            with_buffer(made(first.session, 3, seed=2))


def test_a_parameter_that_comes_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """After a restart it is an error, since the model has none."""
    trainer = attach(made())
    trainer.steps(2)
    trainer.model.module.late = nn.Parameter(torch.ones(2))
    trainer.steps(5)
    assert caplog.text.count("tensors of the model have other shapes than at `attach` (late)") == 1


def add_up(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A user's own."""
    return allreduce_hook(None, bucket)


# torch insists on annotations that are classes, not their names
add_up.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


@pytest.mark.parametrize("kind", ["PowerSGD", "own with a state", "without a state"])
def test_a_state_by_which_gradients_are_averaged_is_not_forgotten(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What PowerSGD had put off was lost, without a word."""
    trainer = made()
    hook, state = {
        "PowerSGD": (powerSGD_hook, PowerSGDState(None)),
        "own with a state": (add_up, Passes()),
        "without a state": (allreduce_hook, None),
    }[kind]
    wrapped_module(trainer.model).register_comm_hook(state, hook)
    attach(trainer)
    if kind == "PowerSGD":
        with pytest.raises(
            RuntimeError, match=r"^powerSGD_hook, which averages dense gradients, keeps a PowerSGDState"
        ):
            trainer.steps(1)
    else:
        trainer.steps(2)
    assert caplog.text.count("add_up, which averages dense gradients, keeps a Passes") == (kind == "own with a state")


def test_an_optimizer_of_parameters_outside_the_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    attach(made())
    other = nn.Parameter(torch.ones(2))
    stranger = torch.optim.SGD([other], lr=0.1)
    other.grad = torch.ones(2)
    stranger.step()
    told = caplog.text.count("SGD steps parameters outside the model, and was not attached")
    stranger.step()
    assert told and caplog.text.count("SGD steps parameters") == told


class Averaging(torch.optim.SGD):
    """Keeps what it needs in attributes."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.kind, self.same, self.model = kind, [1, torch.ones(3)], nn.BatchNorm1d(2)
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.count, self.means, self._last = 0, {i: torch.zeros(1) for i in range(3)}, np.zeros(2)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.model(torch.rand(4, 2))
        if self.kind == "count":
            self.count += 1
        elif self.kind == "means":
            self.means[1] += 1
        elif self.kind == "_last":
            self._last = self._last + 0.5


class WithStateDict(Averaging):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({"state": state_dict["state"], "param_groups": state_dict["param_groups"]})


def with_dense(trainer: Trainer, make: Callable[[Any], Any]) -> Any:
    """In place of its optimizer of dense parameters."""
    unscheduled(trainer)
    trainer.optimizer = make(list(dense_parameters(trainer.model).values()))
    return trainer.model.attach(optimizer=trainer.optimizer, reader=Passes())


def step(trainer: Trainer, batch: Any) -> None:
    trainer.optimizer.zero_grad()
    trainer.model(batch)[0].backward()
    trainer.optimizer.step()


@pytest.mark.parametrize("kind", ["nothing", "count", "means", "_last"])
def test_what_an_attached_optimizer_keeps_in_attributes_is_refused_when_it_moves(kind: str) -> None:
    """Not its parameters, or a model that it has, or what stays as it is."""
    trainer = made()
    batches = passes(with_dense(trainer, lambda parameters: Averaging(parameters, kind)))
    step(trainer, next(batches))
    step(trainer, next(batches))
    if kind == "nothing":
        step(trainer, next(batches))
        return
    with pytest.raises(RuntimeError, match=rf"`{kind}` of optimizer 0 \(Averaging\) moves .* would begin anew"):
        next(batches)


class Passing(nn.Module):
    """A module with a buffer that is in no state dict."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def add(self) -> None:
        self.seen += 1


class PassingKept(Passing):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"seen": self.seen}


@pytest.mark.parametrize("kind", ["buffer", "persistent", "constant", "state_dict", "metric", "persistent metric"])
def test_what_the_state_dict_of_an_attached_module_leaves_out_is_refused_when_it_moves(kind: str) -> None:
    """It began anew after a restart, and nothing said so."""
    thing: Any = PassingKept() if kind == "state_dict" else Passing(kind == "persistent")
    move = thing.add if kind != "constant" else lambda: None
    if "metric" in kind:
        thing = MeanMetric()
        thing.persistent(kind != "metric")
        move = lambda: thing.update(2.0)  # noqa: E731
    trainer = unscheduled(made())
    batches = passes(
        trainer.model.attach(optimizer=trainer.optimizer, reader=Passes(), held=nn.ModuleDict({"a": thing}))
    )
    for _ in range(2):
        step(trainer, next(batches))
        move()
    if kind in ("buffer", "metric"):
        name, of = ("seen", "Passing") if kind == "buffer" else ("mean_value", "MeanMetric")
        with pytest.raises(RuntimeError, match=rf"`{name}` of held \({of}\).* moves .*persistent\(True\)` first"):
            next(batches)
    else:
        next(batches)


def test_a_state_dict_of_its_own_keeps_them() -> None:
    trainer = made()
    batches = passes(with_dense(trainer, lambda parameters: WithStateDict(parameters, "count")))
    for _ in range(4):
        step(trainer, next(batches))
    again = made(trainer.session, 2, seed=2)
    batches = passes(with_dense(again, lambda parameters: WithStateDict(parameters, "count")))
    assert again.optimizer.count == 2
    for _ in range(2):
        step(again, next(batches))
    assert again.optimizer.count == 4 and torch.equal(trainer.session.records[0], again.session.records[0])


class Around:
    """As apex's LARC: an optimizer around another, which is none of torch's, and calls no `__init__` of theirs."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)


class AroundAsOptimizer(torch.optim.Optimizer):
    """Likewise, by inheritance."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    param_groups = property(lambda self: self.optim.param_groups)
    state = property(lambda self: self.optim.state)

    def step(self, closure: Any = None) -> None:
        self.optim.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


class WithoutAll(torch.optim.Optimizer):
    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim


def test_a_wrapper_that_is_no_optimizer_of_torchs_is_refused_by_name() -> None:
    adam = torch.optim.Adam
    with pytest.raises(TypeError, match=r"must be torch optimizers, got Around; attach the one in it, `optim`"):
        with_dense(made(), lambda parameters: Around(adam(parameters)))
    with pytest.raises(TypeError, match="must be torch optimizers, got int"):
        with_dense(made(), lambda parameters: [3])
    with pytest.raises(TypeError, match=r"WithoutAll has no param_groups and no state: was .*; attach the one in it"):
        with_dense(made(), lambda parameters: WithoutAll(adam(parameters)))


def test_a_wrapper_that_has_the_parts_of_an_optimizer_goes_on() -> None:
    ends = []
    for before, at in ((None, 0), ("first", 3)):
        trainer = made(ends[0].session if before else None, at, seed=1 + at)
        batches = passes(
            with_dense(trainer, lambda parameters: AroundAsOptimizer(torch.optim.Adam(parameters, lr=0.1)))
        )
        while trainer.model.steps_done < 5:
            step(trainer, next(batches))
        ends.append(trainer)
    assert torch.equal(ends[0].session.records[0], ends[1].session.records[0])
    assert torch.equal(ends[0].model.module.over.weight, ends[1].model.module.over.weight)


@pytest.mark.parametrize("moment", [0, 3])
def test_a_parameter_that_takes_the_place_of_another_is_refused(moment: int) -> None:
    """No optimizer stepped it; after a restart the first one was trained again, without a word."""
    trainer = attach(
        made(data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True))
    )
    trainer.steps(moment)
    weight = trainer.model.module.over.weight
    trainer.model.module.over.weight = nn.Parameter(weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"^over\.weight of the model were replaced after `attach`: no attached"):
        trainer.steps(moment + 3)
