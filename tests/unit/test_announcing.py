"""In a plain loop, what the next batch looks up is asked for with the push: of batches in any form, and only if so."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_session import FakeSession
from loops import Loop, Trace, resumed, same, undisturbed
from models import CPU, LR, batch_of, collection, dense_parameters, job_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.optim.keyed import KeyedOptimizerWrapper

from torch_ecrec.nn import served
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.staging import copied, same_ids
from torch_ecrec.resume.reader import Reader
from torch_ecrec.spec.settings import Settings

pytestmark = [
    pytest.mark.usefixtures("process_group"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
STEPS = 8
AHEAD = list(range(4, STEPS + 1))  # a loop is known after three steps
Named = namedtuple("Named", ["other", "features"])


class Net(nn.Module):
    """Takes ids however a loop passes them."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.over = nn.Linear(32, 1, dtype=torch.float32)

    def forward(self, features: KeyedJaggedTensor, *more: KeyedJaggedTensor) -> Tensor:
        pooled = [self.tables(some).values() for some in (features, *more)]
        return torch.tanh(self.over(sum(pooled))).square().mean()


@dataclasses.dataclass
class Nested:
    inside: dict[str, Any]


def ids(number: int) -> KeyedJaggedTensor:
    return batch_of(6, number).sparse_features


def kjt(keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(keys, values, lengths, weights)


def made(
    look_ahead: str = "auto", tiered: bool = False, **more: Any
) -> tuple[DistributedModelParallel, FakeSession, Any]:
    net = Net(collection("adagrad", **more))
    torch.manual_seed(2)
    nn.init.normal_(net.over.weight)
    session = FakeSession(job_of(net))
    session.hints = "always" if tiered else ""
    model = DistributedModelParallel(net, device=CPU, session=session, settings=Settings(look_ahead=look_ahead))
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    return model, session, dense


def run(
    reader: Any, take: Callable[[Any], Any], look_ahead: str = "auto", tiered: bool = False
) -> tuple[FakeSession, list[float]]:
    model, session, optimizer = made(look_ahead, tiered)
    batches, losses = model.attach(optimizer=optimizer, reader=reader), Trace()
    for batch in batches:
        optimizer.zero_grad()
        features = take(batch)
        loss = model(*features) if isinstance(features, tuple) else model(features)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return session, losses


def check(make: Callable[[], Any], take: Callable[[Any], Any], ahead: list[int], look_ahead: str = "auto") -> None:
    """Those steps' lookups were made ahead, and used; the run is that without."""
    off, losses = run(make(), take, "0")
    on, seen = run(make(), take, look_ahead)
    assert seen == losses and not off.ahead and len(set(seen)) == STEPS
    assert [step for step, rows in on.ahead if any(same_tensors(rows, mine) for mine in looked(on, step))] == ahead
    for mine, theirs in zip(on.records, off.records, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(on.snapshots.values(), off.snapshots.values(), strict=True):
        assert torch.equal(mine[0], theirs[0]) and mine[1] == theirs[1]


def looked(session: FakeSession, step: int) -> list[list[Tensor]]:
    return [rows for at, rows in session.looked_up if at == step]


def same_tensors(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


FORMS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "itself": (ids, lambda batch: batch),
    "dataclass": (lambda i: batch_of(6, i), lambda batch: batch.sparse_features),
    "moved": (lambda i: batch_of(6, i), lambda batch: batch.to(CPU).sparse_features),
    "copied": (ids, lambda batch: kjt(batch.keys(), batch.values().clone(), batch.lengths().clone())),
    "dict": (lambda i: {"dense": torch.ones(2), "ids": ids(i), 7: ids(i + 50)}, lambda batch: batch["ids"]),
    "tuple": (lambda i: (ids(i + 50), ids(i), 3), lambda batch: batch[1]),
    "named": (lambda i: Named(ids(i + 50), ids(i)), lambda batch: batch.features),
    "nested": (lambda i: Nested({"x": [ids(i + 50), (ids(i),)]}), lambda batch: batch.inside["x"][1][0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_found_in_batches_of_any_form(form: str) -> None:
    make, take = FORMS[form]
    check(lambda: [make(i) for i in range(STEPS)], take, AHEAD)


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Batch:
        return batch_of(6, index)


def first(samples: list[Any]) -> Any:
    return samples[0]


def test_batches_of_workers_are_announced() -> None:
    def make() -> Any:
        return DataLoader(Samples(), batch_size=1, num_workers=1, collate_fn=first)

    check(make, lambda batch: batch.sparse_features, AHEAD)


@pytest.mark.parametrize(("look_ahead", "ahead"), [("auto", []), ("1", AHEAD)])
def test_of_other_readers_only_if_the_user_says_so(look_ahead: str, ahead: list[int]) -> None:
    check(lambda: (ids(i) for i in range(STEPS)), lambda batch: batch, ahead, look_ahead)


def test_more_ids_than_hold_up_a_push_are_asked_for_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "WITH_PUSH_MOST", 3)
    check(lambda: [ids(i) for i in range(STEPS)], lambda batch: batch, AHEAD)


def tiered(make: Callable[[], Any], take: Callable[[Any], Any], look_ahead: str) -> list[int]:
    """Steps that servers with tiers were told of before, once each; the run is that without."""
    off, losses = run(make(), take, "0", tiered=True)
    on, seen = run(make(), take, look_ahead, tiered=True)
    assert seen == losses and not off.announced
    for mine, theirs in zip(on.records, off.records, strict=True):
        assert torch.equal(mine, theirs)
    for step, rows in on.announced:
        (looked_up,) = looked(on, step)
        assert same_tensors(rows, looked_up), "what was found then is used"
    assert [step for step, _ in on.ahead] == AHEAD
    return [step for step, _ in on.announced]


@pytest.mark.parametrize("form", FORMS)
def test_servers_with_tiers_are_told_of_later_steps(form: str) -> None:
    make, take = FORMS[form]
    assert tiered(lambda: [make(i) for i in range(STEPS)], take, "auto") == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("look_ahead", "told"), [("1", []), ("2", [5, 6, 7, 8]), ("4", [5, 6, 7, 8]), ("16", [5, 6, 7, 8])]
)
def test_as_far_as_the_setting_says(look_ahead: str, told: list[int]) -> None:
    assert tiered(lambda: (ids(i) for i in range(STEPS)), lambda batch: batch, look_ahead) == told


def test_where_all_records_are_in_memory_one_batch_is_drawn_early_and_nobody_told() -> None:
    drawn = []

    def batches() -> Iterator[KeyedJaggedTensor]:
        for i in range(STEPS):
            drawn.append(i)
            yield ids(i)

    model, session, optimizer = made("4")
    for number, batch in enumerate(model.attach(optimizer=optimizer, reader=batches())):
        model(batch).backward()
        assert len(drawn) <= number + 2
    assert [step for step, _ in session.ahead] == AHEAD and not session.announced


def test_many_ids_that_are_known_for_long_go_with_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody had time to find the places of are asked for behind it."""
    monkeypatch.setattr(served, "WITH_PUSH_MOST", 3)
    behind: list[int] = []
    look_ahead = FakeSession.look_ahead
    monkeypatch.setattr(
        FakeSession, "look_ahead", lambda self, *asked: behind.append(self.step) or look_ahead(self, *asked)
    )
    assert tiered(lambda: [ids(i) for i in range(STEPS)], lambda batch: batch, "auto") == [5, 6, 7, 8]
    assert behind == [4]


class Altering:
    """Gives the ids of one step changed in place, by NumPy: no version counter tells."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.step = steps, 0

    def __call__(self, batch: Batch) -> KeyedJaggedTensor:
        self.step += 1
        if self.step in self.steps:
            values = batch.sparse_features.values().numpy()
            values[:] = (values + 1) % 7
        return batch.sparse_features


def workers() -> Any:
    return DataLoader(Samples(), batch_size=1, num_workers=1, collate_fn=first)


def altered(*steps: int) -> Callable[[Any], Any]:
    """Counts from one again in each run."""
    makes = {"taking": Altering(*steps)}

    def take(batch: Any) -> Any:
        if makes["taking"].step == STEPS:
            makes["taking"] = Altering(*steps)
        return makes["taking"](batch)

    return take


def test_ids_that_were_altered_since_are_asked_for_again() -> None:
    check(workers, altered(5, 7), [4, 6, 8])


def test_without_the_comparison_altered_ids_would_get_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "same_ids", lambda a, b: True)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check(workers, altered(5, 7), [4, 6, 8])


def test_after_three_misses_a_module_is_told_no_more() -> None:
    session, _ = run(workers(), altered(5, 6, 7, 8))
    assert [step for step, _ in session.ahead] == [4, 5, 6, 7]


def drawn_early(reader: Any, take: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a run asks the reader for ahead of the loop."""
    asked: list[Any] = []
    look_ahead = Reader.look_ahead
    monkeypatch.setattr(Reader, "look_ahead", lambda self, far: asked.append(1) or look_ahead(self, far))
    session, _ = run(reader, take, "1")
    assert not session.ahead
    return asked


def test_where_ids_are_made_of_the_batch_nothing_is_drawn_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return kjt(batch.keys(), (batch.values() + 1) % 7, batch.lengths())

    assert drawn_early([ids(i) for i in range(STEPS)], take, monkeypatch) == []


def test_a_module_that_is_called_twice_in_a_step_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = [(ids(i), ids(i + 50)) for i in range(STEPS)]
    assert drawn_early(reader, lambda batch: batch, monkeypatch) == []


def test_in_a_pipeline_nothing_more_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that announce nothing either."""

    class Whole(Net):
        def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            loss = super().forward(batch.sparse_features)
            return loss, loss.detach()

    net = Whole(collection("adagrad"))
    session = FakeSession(job_of(net))
    model = DistributedModelParallel(net, device=CPU, session=session)
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    batches = model.attach(optimizer=dense, reader=[batch_of(6, i) for i in range(STEPS)])
    pipeline, stream = TrainPipelineBase(model, dense, CPU), iter(batches)
    for _ in range(STEPS):
        pipeline.progress(stream)
    assert session.step == STEPS + 1 and not session.ahead


def test_an_evaluation_in_between_costs_nothing() -> None:
    model, session, optimizer = made()
    batches = model.attach(optimizer=optimizer, reader=[ids(i) for i in range(STEPS)])
    for batch in batches:
        model(batch).backward()
        model.eval()
        with torch.no_grad():
            model(ids(99))
        model.train()
    assert [step for step, _ in session.ahead] == AHEAD
    for step, rows in session.ahead:
        assert any(same_tensors(rows, mine) for mine in looked(session, step))


@pytest.mark.parametrize(
    ("value", "says"),
    [("17", "a number from 0 to 16, got '17'"), ("yes", "must be auto, or a number from 0 to 16, got 'yes'")],
)
def test_what_the_setting_cannot_be(value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_LOOK_AHEAD", value)
    with pytest.raises(ValueError, match=says):
        Settings.from_environment()


def test_copies_are_compared_whole() -> None:
    one = kjt(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1]))
    assert same_ids(one, copied(one))
    others = [
        kjt(["b", "a"], one.values(), one.lengths()),
        kjt(["a", "b"], one.values(), torch.tensor([1, 0, 1, 1])),
        kjt(["a", "b"], one.values().int(), one.lengths()),
        kjt(["a", "b"], torch.tensor([1, 2, 4]), one.lengths()),
        kjt(["a", "b"], one.values(), one.lengths(), torch.ones(3)),
    ]
    assert not any(same_ids(one, other) for other in others)


# loops, and their later lives ---------------------------------------------------------------------

ALL = (
    Loop(epochs=3, batches=5, evals=frozenset({"no_grad", "pass"}), draws=frozenset({"before", "after"})),
    Loop(epochs=2, batches=6, leave_after=5, loads=frozenset({"backward", "after"}), counts=frozenset({"after"})),
    Loop(epochs=2, batches=5, reader="own generator", accumulate=2, zero="after", flushes=frozenset({"backward"})),
    Loop(epochs=2, batches=5, reader="stateful", losses=2, evals=frozenset({"grad"})),
    Loop(epochs=2, batches=5, reader="torchdata", snapshot_every=2, draws=frozenset({"before"})),
    Loop(epochs=2, batches=5, reader="augmented", schedule=frozenset({"step", "pass"})),
    Loop(epochs=2, batches=6, reader="iterable", pass_over_every=5, zero="after"),
    Loop(epochs=2, batches=6, reader="distributed", skip_every=3, nan_at=5),
)


@pytest.mark.parametrize(
    ("look_ahead", "hints"), [("1", ""), ("4", "always"), ("4", "now and then")], ids=["1", "4", "4, now and then"]
)
@pytest.mark.parametrize("loop", ALL, ids=lambda loop: loop.name)
def test_a_loop_and_its_later_lives_are_those_without(loop: Loop, look_ahead: str, hints: str) -> None:
    if hints and loop.reader == "augmented":  # reader and dropout draw from one generator
        with pytest.raises(RuntimeError, match=r"draw from the same random generator \(torch\)"):
            undisturbed(dataclasses.replace(loop, look_ahead=look_ahead, hints=hints))
        return
    off = undisturbed(dataclasses.replace(loop, look_ahead="0"))
    on = undisturbed(dataclasses.replace(loop, look_ahead=look_ahead, hints=hints))
    assert on.session.ahead and not off.session.ahead and bool(on.session.announced) == bool(hints)
    assert on.trace == off.trace and same(on, off)
    assert on.session.snapshots.keys() == off.session.snapshots.keys()
    for step, (payload, header) in on.session.snapshots.items():
        assert torch.equal(payload, off.session.snapshots[step][0]) and header == off.session.snapshots[step][1]
    for step in [0, *on.session.snapshots][:: 2 if len(on.session.snapshots) > 6 else 1]:
        for setting in ("0", look_ahead):
            again = resumed(dataclasses.replace(loop, look_ahead=setting, hints=hints), on, step)
            assert again.trace == off.trace and same(again, off), f"after step {step}, {setting}"
