"""Training loops that people write, made from a description, and run again after trainers were lost at any step.

`Loop` describes one; `undisturbed(loop)` runs it, `resumed(loop, run, step)` runs it anew from other seeds, on a
session that goes on after `step` of the run before. What a loop sees and does is in its trace, which is attached, so it
comes back with the rest: two runs are the same if trace and final state are, bit for bit.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from fake_session import FakeSession
from models import CPU, LR, job_of, table
from shards import changed, local
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDistLite
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.streamable import Pipelineable

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.resume.trainer_state import unwrapped
from torch_ecrec.spec.settings import Settings

ROWS, SIZE = 40, 4

READERS = (
    "list",  # the same batches in every pass
    "loader",  # DataLoader
    "shuffled",  # DataLoader(shuffle=True)
    "own generator",  # DataLoader(shuffle=True, generator=...)
    "augmented",  # a dataset that draws from torch's global generator for every sample
    "distributed",  # DistributedSampler, set_epoch before every pass
    "iterable",  # an IterableDataset with a place of its own
    "custom",  # an iterable that nobody knows, with a NumPy generator of its own
    "stateful",  # state_dict and load_state_dict
    "torchdata",  # StatefulDataLoader(shuffle=True)
    "torchdata own generator",
)
PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "lite": TrainPipelineSparseDistLite,
}
DRIVERS = ("plain", *PIPELINES)
TRACING = ("sparse", "lite")  # these trace the model
STYLES = ("epochs", "counter", "steps_done")
FLUSHES = ("backward", "optimizer", "scheduler", "pass")
LOADS = ("before", "backward", "after", "pass")
DRAWS = ("before", "after", "pass")
MODULES = ("attribute", "mode", "generator")
EVALS = ("no_grad", "grad", "training no_grad", "pass")
PUSHES = (  # what moves the numbers of a push, see `_move_pushes`
    "exponential",  # a scheduler of the tables alone
    "plateau",  # ReduceLROnPlateau of the tables alone
    "warm-up",  # TorchRec's, around the tables' optimizer
    "all",  # by hand, each table's rate
    "one",  # by hand, of one table
    "tensor",  # by hand, rates that are tensors
    "division",  # what gradients are divided by
    "frozen",  # whether a table gets any
)
MOVES = ("before", "after", "pass")  # when they do
# What is attached or not, besides what has to be: the tables' optimizer, and what counts for itself and sets rates.
ATTACHED = ("tables", "schedule", "exponential", "plateau", "warm-up")


@dataclass(frozen=True)
class Loop:
    """A loop. Every field is one way in which loops differ."""

    reader: str | None = "list"  # None: `with model.step()`
    driver: str = "plain"
    style: str = "epochs"
    epochs: int = 2
    batches: int = 3
    leave_after: int = 0  # batches of each pass after which it is left; 0: never
    optimizers: tuple[str, ...] = ("adam",)
    schedule: frozenset[str] = frozenset({"step"})  # "step", "pass"
    flushes: frozenset[str] = frozenset()
    loads: frozenset[str] = frozenset()  # when tables and dense weights are loaded, in every other turn
    in_place: bool = False  # as one writes into a state dict
    draws: frozenset[str] = frozenset()
    evals: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset({"after"})  # when an attached counter moves: before, between, after, pass
    modules: frozenset[str] = frozenset()  # what changes in modules beside tensors, see `Net` and `_change_modules`
    generator: bool = False  # the loop draws from one of its own, which is attached
    numbered: bool = False  # batches of a pass are counted by `batches.enumerate()`
    losses: int = 1  # backwards of one forward
    accumulate: int = 1  # batches for each optimizer step
    clip: bool = False
    skip_every: int = 0  # every so many batches the optimizer's step is left out
    pass_over_every: int = 0  # every so many batches, one is not trained on
    alters: bool = False  # the forward writes into its batch
    nan_at: int = 0  # the batch of the run whose labels are NaN
    fails_after: int = 0  # steps after which something raises, once, and the loop goes on; 0: nothing does
    fails: str = "forward"  # what: the "forward" as it begins, "between" tables and the rest, the "optimizer"
    begins: frozenset[str] = frozenset()  # what each pass begins with, see `_begin_pass`
    tables: str = "adagrad"  # the optimizer of the tables
    pushes: frozenset[str] = frozenset()
    moves: str = "after"
    attached: frozenset[str] = frozenset(ATTACHED)
    zero: str = "before"  # gradients: "before" the forward, "late" between forward and backward, "after" the step
    snapshot_every: int = 1
    look_ahead: str = "auto"
    hints: str = ""

    @property
    def name(self) -> str:
        """What differs from the plainest loop; the same text in every process, as the order of a set's text is not."""
        fields = {one.name: (getattr(self, one.name), one.default) for one in dataclasses.fields(self)}
        text = {key: sorted(mine) if isinstance(mine, frozenset) else mine for key, (mine, _) in fields.items()}
        return ", ".join(f"{key}={text[key]}" for key, (mine, plain) in fields.items() if mine != plain) or "plainest"

    @property
    def forgotten(self) -> frozenset[str]:
        """What sets rates, counts for itself, and is not attached."""
        setters = self.pushes & set(ATTACHED) | ({"schedule"} if self.schedule else frozenset())
        return setters - self.attached

    @property
    def refused(self) -> bool:
        """A scheduler that marks the tables' optimizer is not attached, and no attached one sets the same rates.

        That of "schedule" marks a combination of optimizers, which is not attached where not all is: its parts are.
        Of what else is forgotten nothing tells: such a loop goes on otherwise, which is for a rehearsal to find.
        """
        covered = (self.schedule and "schedule" in self.attached) or "plateau" in self.pushes & self.attached
        return "exponential" in self.forgotten and not covered


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device), self.dense.to(device), self.labels.to(device))

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> Batch:
        return self


def batch(number: int, noise: float = 0.0) -> Batch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS, (4 * SIZE,), generator=generator)
    sparse = KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, torch.full((2 * SIZE,), 2, dtype=torch.int32))
    dense = torch.randn(SIZE, 2, generator=generator) + noise
    return Batch(sparse, dense, torch.randn(SIZE, generator=generator))


class Samples(Dataset[Batch]):
    def __init__(self, size: int, augmented: bool = False) -> None:
        self.size, self.augmented = size, augmented

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        return batch(index, float(torch.rand(())) if self.augmented else 0.0)


class Stream(IterableDataset[Batch]):
    """Goes on where the pass before stopped."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.size):
            self.place += 1
            yield batch(self.place)


class Custom:
    """Another order in each pass, from a generator of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.random = size, np.random.default_rng(7)

    def __iter__(self) -> Iterator[Batch]:
        for number in self.random.permutation(self.size).tolist():
            yield batch(number)


class Passes:
    """Stateful."""

    def __init__(self, size: int) -> None:
        self.size, self.drawn, self.passes = size, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.drawn < self.size:
            self.drawn += 1
            yield batch(100 * self.passes + self.drawn)
        self.drawn, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.passes = state["drawn"], state["passes"]


def one(batches: list[Batch]) -> Batch:
    return batches[0]


def reader_of(loop: Loop) -> tuple[Any, Callable[[int], None]]:
    """A new reader, and what a loop calls before each pass."""
    size, kind = loop.batches, loop.reader
    nothing: Callable[[int], None] = lambda epoch: None  # noqa: E731
    generator = torch.Generator().manual_seed(11)
    if kind == "list":
        return [batch(i) for i in range(size)], nothing
    if kind == "iterable":
        return DataLoader(Stream(size), batch_size=1, collate_fn=one), nothing
    if kind == "custom":
        return Custom(size), nothing
    if kind == "stateful":
        return Passes(size), nothing
    samples = Samples(size, augmented=kind == "augmented")
    if kind == "distributed":
        sampler: Any = DistributedSampler(samples, num_replicas=1, rank=0, shuffle=True)
        return DataLoader(samples, batch_size=1, sampler=sampler, collate_fn=one), sampler.set_epoch
    if kind == "torchdata":
        return StatefulDataLoader(samples, batch_size=1, shuffle=True, collate_fn=one), nothing
    if kind == "torchdata own generator":
        made = StatefulDataLoader(samples, batch_size=1, shuffle=True, collate_fn=one, generator=generator)
        return made, nothing
    return DataLoader(
        samples,
        batch_size=1,
        shuffle=kind != "loader",
        generator=generator if kind == "own generator" else None,
        collate_fn=one,
    ), nothing


class Net(nn.Module):
    """Draws from every generator, and has a buffer that moves."""

    def __init__(self, tables: EmbeddingBagCollection, losses: int, modules: frozenset[str], alters: bool) -> None:
        super().__init__()
        self.losses, self.alters = losses, alters
        self._calls, self.counts = 0, "attribute" in modules
        self.random = np.random.default_rng(5) if "generator" in modules else None
        self.tables = tables
        self.below = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.BatchNorm1d(3))
        self.over = nn.Linear(3 + 4 + 8, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.alters:
            batch.dense.clamp_(max=0.0)
        pooled = self.tables(batch.sparse).values()
        logits = torch.tanh(self.over(torch.cat([self.below(batch.dense), pooled], dim=1))).squeeze(1)
        logits = logits + 0.01 * random.random() + 0.01 * float(np.random.rand())
        if self.counts and self.training and torch.is_grad_enabled():
            self._calls += 1
            logits = logits * (1 + 0.01 * self._calls)
        if self.random is not None:
            logits = logits + 0.01 * float(self.random.random())
        losses = torch.stack([((logits - batch.labels) ** 2).mean(), logits.abs().mean()][: self.losses])
        return losses, losses.detach()


class Failed(Exception):
    """Raised in a step; the loop catches it."""


class Trace(list[Any]):
    """What a loop has seen and done."""

    def state_dict(self) -> dict[str, Any]:
        return {"trace": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["trace"]


class Counter:
    """How often something has happened, and in which epoch a loop is."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.epoch = 0

    def add(self, name: str) -> int:
        self.values[name] = self.values.get(name, 0) + 1
        return self.values[name]

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.epoch = dict(state["values"]), state["epoch"]


class Strange(torch.optim.SGD):
    """Keeps nested state, a scalar and a flag for each parameter."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    inner = state.setdefault("inner", {"mean": torch.zeros_like(parameter), "steps": [0]})
                    inner["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                    inner["steps"][0] += 1
                    with torch.no_grad():
                        parameter.sub_(inner["mean"] * (0.01 / inner["steps"][0]))


TABLES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "numpy rate": lambda p: torch.optim.SGD(p, lr=0.05),
    "strange": lambda p: Strange(p, lr=0.05),
}


@dataclass
class Run:
    """One life of a loop."""

    loop: Loop
    session: FakeSession
    model: DistributedModelParallel
    optimizers: list[Optimizer]
    schedulers: dict[str, Any]
    random: random.Random = field(default_factory=lambda: random.Random(3))  # of the loop's own
    trace: Trace = field(default_factory=Trace)
    counter: Counter = field(default_factory=Counter)
    batches: Any = None
    eval_seed: int = 0

    def state(self) -> list[Any]:
        """All that training has changed, as leaves."""
        return tree_leaves(
            [
                self.session.records,
                [parameter.detach() for parameter in self.model.module.below.parameters()],
                [parameter.detach() for parameter in self.model.module.over.parameters()],
                list(self.model.buffers()),
                [list(o.state.values()) for o in unwrapped(self.optimizers) if not isinstance(o, KeyedOptimizer)],
                [
                    [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
                    for optimizer in unwrapped(self.optimizers)
                ],
                [scheduler.state_dict() for scheduler in self.schedulers.values()],
                [self.session.rates, get_gradient_division()],
                self.counter.state_dict(),
                list(self.trace),
            ]
        )


def made(loop: Loop, before: FakeSession | None = None, step: int = 0, seed: int = 1) -> Run:
    """A trainer's process after its start, not attached yet."""
    set_gradient_division(True)
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=[table("t", ROWS, 4, "f"), table("u", ROWS, 8, "g")])
    apply_optimizer_in_backward(TABLES[loop.tables], tables.parameters(), {"lr": LR})
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    net = Net(tables, loop.losses, loop.modules, loop.alters)
    session, settings = FakeSession(job_of(net), before=before, step=step), Settings(look_ahead=loop.look_ahead)
    session.hints = loop.hints
    model = DistributedModelParallel(
        net, device=CPU, session=session, snapshot_every=loop.snapshot_every, settings=settings
    )
    dense = dict(model.module.named_parameters())
    dense = {name: parameter for name, parameter in dense.items() if not name.startswith("tables")}
    names = sorted(dense)
    shares = np.array_split(np.array(names), len(loop.optimizers))
    inner = [
        KeyedOptimizerWrapper({name: dense[name] for name in share.tolist()}, OPTIMIZERS[kind])
        for kind, share in zip(loop.optimizers, shares, strict=True)
    ]
    fused: Any = model.fused_optimizer
    if "warm-up" in loop.pushes:
        fused = WarmupOptimizer(fused, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)], lr=0.1)
    if "tensor" in loop.pushes:
        for group in fused.param_groups:
            group["lr"] = torch.tensor(group["lr"])
    optimizer = CombinedOptimizer([fused, *((str(i), o) for i, o in enumerate(inner))])
    factor = (lambda t: np.float32(0.9) ** np.float32(t)) if "numpy rate" in loop.optimizers else (lambda t: 0.9**t)
    schedulers: dict[str, Any] = {}
    if loop.schedule:
        schedulers["schedule"] = LambdaLR(optimizer, factor)
    if "exponential" in loop.pushes:
        schedulers["exponential"] = ExponentialLR(model.fused_optimizer, 0.8)
    if "plateau" in loop.pushes:
        schedulers["plateau"] = ReduceLROnPlateau(model.fused_optimizer, factor=0.7, patience=0)
    return Run(loop, session, model, [optimizer], schedulers)


def attach(run: Run) -> Callable[[int], None]:
    loop = run.loop
    before_pass: Callable[[int], None] = lambda epoch: None  # noqa: E731
    reader = None
    if loop.reader is not None:
        reader, before_pass = reader_of(loop)
    optimizers, ((_, fused), *dense) = run.optimizers, run.optimizers[0].optimizers  # type: ignore[attr-defined]
    if loop.attached != frozenset(ATTACHED):
        optimizers = [one for _, one in dense]
        if "tables" in loop.attached:
            optimizers.append(run.model.fused_optimizer)
        if "warm-up" in loop.attached & loop.pushes:
            optimizers.append(fused)
    run.batches = run.model.attach(
        optimizer=optimizers,
        lr_scheduler=[scheduler for name, scheduler in run.schedulers.items() if name in loop.attached],
        reader=reader,
        trace=run.trace,
        counter=run.counter,
        **({"negatives": run.random} if loop.generator else {}),
    )
    return before_pass


def go(run: Run) -> Run:
    """Attaches, and runs the loop to its end."""
    before_pass = attach(run)
    run.model.module.register_forward_pre_hook(lambda *_: _fail(run, "forward"))
    run.model.module.over.register_forward_pre_hook(lambda *_: _fail(run, "between"))
    unwrapped(run.optimizers)[-1].register_step_pre_hook(lambda *_: _fail(run, "optimizer"))
    if run.loop.reader is None:
        _without_reader(run)
    else:
        for epoch in _epochs(run):
            before_pass(epoch)
            _begin_pass(run)
            _one_pass(run)
            _after_pass(run)
    run.model.flush()
    return run


def undisturbed(loop: Loop) -> Run:
    return go(made(loop))


def resumed(loop: Loop, first: Run, step: int) -> Run:
    """The loop in a new life, after trainers were lost and the servers have gone back to `step`."""
    seed = 1 if step == 0 else 100 + step
    return go(made(loop, first.session, step, seed))


def same(a: Run, b: Run) -> bool:
    """All of the state, bit for bit."""
    mine, theirs = a.state(), b.state()
    return len(mine) == len(theirs) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y) and x == y
        for x, y in zip(mine, theirs, strict=True)
    )


# the loops ----------------------------------------------------------------------------------------------


def _epochs(run: Run) -> Iterable[int]:
    loop = run.loop
    if loop.style == "epochs":
        return run.batches.epochs(loop.epochs)
    if loop.style == "counter":
        return _counted(run)
    assert loop.style == "steps_done", loop.style
    return range(run.model.steps_done // loop.batches, loop.epochs)


def _counted(run: Run) -> Iterator[int]:
    while run.counter.epoch < run.loop.epochs:
        yield run.counter.epoch
        run.counter.epoch += 1


def _begin_pass(run: Run) -> None:
    if "zero" in run.loop.begins:
        run.optimizers[0].zero_grad()
    if "evaluate" in run.loop.begins:
        with torch.no_grad():
            run.model(batch(1000))  # moves the BatchNorm
    if "load" in run.loop.begins:
        _change_by_load(run)


def _one_pass(run: Run) -> None:
    loop = run.loop
    if loop.driver == "plain":
        for number, batch in run.batches.enumerate() if loop.numbered else ((None, b) for b in run.batches):
            run.trace.append(number)
            _turn(run, batch)
            if run.batches.drawn == loop.leave_after:
                break
        return
    pipeline = PIPELINES[loop.driver](run.model, run.optimizers[0], CPU)
    stream = iter(run.batches)
    while True:
        try:
            losses = pipeline.progress(stream)
        except StopIteration:
            break
        except Failed:  # it trains on that batch once more
            run.trace.append("failed")
            continue
        _after_step(run, losses)
        if loop.leave_after and run.counter.values["after"] % loop.leave_after == 0:
            break
    if loop.driver in TRACING:
        pipeline.detach()


def _without_reader(run: Run) -> None:
    loop = run.loop
    while run.counter.values.get("turns", 0) < loop.epochs * loop.batches:
        with run.model.step():
            run.counter.add("turns")
            _turn(run, batch(int(torch.randint(0, 100, ()))))


def _turn(run: Run, batch: Batch) -> None:
    """A turn of the loop, with what it does before and after the step."""
    loop, model, optimizer = run.loop, run.model, run.optimizers[0]
    number = run.counter.add("batches")
    if "before" in loop.counts:
        run.counter.add("before")
    if loop.moves == "before":
        _move_pushes(run)
    if "before" in loop.draws:
        _draw(run)
    if loop.generator:
        batch = replace(batch, labels=batch.labels + 0.1 * run.random.random())
    if loop.pass_over_every and number % loop.pass_over_every == 0 and number > 1:
        run.trace.append("passed over")
        return
    if loop.nan_at == number:
        batch = replace(batch, labels=torch.full_like(batch.labels, float("nan")))  # a list has it in every pass
    _load(run, "before")
    first = (number - 1) % loop.accumulate == 0
    if loop.zero == "before" and first:
        optimizer.zero_grad()
    try:
        losses, seen = model(batch)
    except Failed:
        run.trace.append("failed")
        return
    if loop.zero == "late" and first:
        optimizer.zero_grad()
    try:
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i + 1 < len(losses))
    except NonFiniteGradient:
        run.trace.append("refused")
        optimizer.zero_grad()
        return
    if "backward" in loop.flushes:
        model.flush()
    _load(run, "backward")
    if "between" in loop.counts:
        run.counter.add("between")
    if loop.clip:
        torch.nn.utils.clip_grad_norm_(model.module.over.parameters(), 0.1)
    if number % loop.accumulate == 0 and not (loop.skip_every and number % loop.skip_every == 0):
        try:
            optimizer.step()
        except Failed:
            run.trace.append("failed")
        if loop.zero == "after":
            optimizer.zero_grad()
    _after_step(run, seen)


def _fail(run: Run, where: str) -> None:
    here = run.loop.fails == where and run.loop.fails_after and run.model.training
    if here and run.counter.values.get("after") == run.loop.fails_after:
        if not run.counter.values.get("failed"):
            run.counter.add("failed")
            raise Failed


def _after_step(run: Run, seen: Tensor) -> None:
    loop, model = run.loop, run.model
    if "optimizer" in loop.flushes:
        model.flush()
    if "step" in loop.schedule:
        run.schedulers["schedule"].step()
    if loop.moves == "after":
        _move_pushes(run)
    if "scheduler" in loop.flushes:
        model.flush()
    _load(run, "after")
    if "after" in loop.draws:
        _draw(run)
    _change_modules(run)
    if "after" in loop.counts:
        run.counter.add("after")
    if loop.evals - {"pass"}:
        _evaluate(run, loop.evals)
    run.trace.append(seen.tolist())


def _after_pass(run: Run) -> None:
    loop = run.loop
    if "pass" in loop.evals:
        _evaluate(run, frozenset({"grad"}))
    if "pass" in loop.draws:
        _draw(run)
    _load(run, "pass")
    if "pass" in loop.flushes:
        run.model.flush()
    if "pass" in loop.schedule:
        run.schedulers["schedule"].step()
    if loop.moves == "pass":
        _move_pushes(run)
    if "pass" in loop.counts:
        run.counter.add("pass")
    run.trace.append("end of a pass")


def _move_pushes(run: Run) -> None:
    """The numbers that the next push carries become others."""
    ways, number = run.loop.pushes, run.counter.add("moves")
    groups: Any = run.model.fused_optimizer.param_groups
    if "exponential" in ways:
        run.schedulers["exponential"].step()
    if "plateau" in ways:
        run.schedulers["plateau"].step(1.0 + number)
    for i, group in enumerate(groups):
        if "all" in ways or ("one" in ways and i == 0):
            group["lr"] = group["lr"] * 0.9
        if "tensor" in ways and isinstance(group["lr"], Tensor):
            group["lr"].mul_(0.95)
    if "division" in ways:
        set_gradient_division(number % 2 == 0)
    if "frozen" in ways:
        dict(run.model.named_parameters())["tables.embedding_bags.u.weight"].requires_grad_(number % 2 == 0)


def _change_modules(run: Run) -> None:
    """What a loop switches as training goes on."""
    ways, below, number = run.loop.modules, run.model.module.below, len(run.trace)
    if "mode" in ways and number % 2 == 1:
        below[2].train(not below[2].training)
        below[1].p = 0.5 if below[1].p == 0.1 else 0.1


def _load(run: Run, place: str) -> None:
    """Weights of tables and of the rest become a function of what they are; so does the tables' optimizer state."""
    if place not in run.loop.loads or run.counter.add(f"loads {place}") % 2 == 0:
        return
    _change_by_load(run)
    run.trace.append("loaded")


def _change_by_load(run: Run) -> None:
    state = run.model.state_dict()
    if run.loop.in_place:
        fused = run.model.fused_optimizer.state_dict()
        with torch.no_grad():
            for value in [*state.values(), *(v for values in fused["state"].values() for v in values.values())]:
                for tensor in local(value):
                    if tensor.is_floating_point():
                        tensor.mul_(0.5).add_(0.1)
        return
    run.model.load_state_dict(
        {key: changed(value, lambda v: v * 0.5 + 0.1 if v.is_floating_point() else v) for key, value in state.items()}
    )
    fused = run.model.fused_optimizer.state_dict()
    for values in fused["state"].values():
        for name, value in values.items():
            values[name] = changed(value, lambda v: v * 2 + 0.5)
    run.model.fused_optimizer.load_state_dict(fused)


def _draw(run: Run) -> None:
    run.trace.append([random.random(), float(np.random.rand()), float(torch.rand(()))])


def _evaluate(run: Run, ways: frozenset[str]) -> None:
    model, other = run.model, batch(1000)
    if "training no_grad" in ways:
        with torch.no_grad():
            run.trace.append(model(other)[1].tolist())
    model.eval()
    if "no_grad" in ways:
        with torch.no_grad():
            run.trace.append(model(other)[1].tolist())
    if "grad" in ways:
        run.trace.append(model(other)[1].tolist())
    model.train()
