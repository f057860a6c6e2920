"""What a reader refuses by name: loops and batches that could not be brought about again."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from readers import MADE, PASS, Endless, Loop, Numbers, Passes, close, loader, seed
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_ecrec.resume.loop import LoopInspector
from torch_ecrec.resume.reader import Reader
from torch_ecrec.resume.values import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def test_a_second_pass_needs_a_loop_that_is_known_to_begin_with_the_right_one() -> None:
    reader = Reader([1, 2])
    assert list(reader) == [1, 2]
    with pytest.raises(RuntimeError, match=r"a second pass .* `for epoch in batches.epochs\(N\)"):
        next(iter(reader))


def test_a_loop_within_another_is_refused_as_its_second_pass_begins() -> None:
    reader, seen = Reader([1, 2]), []
    with pytest.raises(RuntimeError, match=r"a second pass .* `for epoch in batches.epochs\(N\)"):
        for _ in range(3):
            for batch in reader:
                seen.append(batch)
    assert seen == [1, 2]


def test_a_pass_that_islice_leaves_is_refused_as_the_next_one_begins() -> None:
    reader = Reader([1, 2, 3])
    with pytest.raises(RuntimeError, match=r"pass 0 .* was left after 2 batches.*`batches.drawn`"):
        for _ in reader.epochs(2):
            list(itertools.islice(reader, 2))


def test_after_a_draw_that_failed_the_pass_does_not_go_on() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            if index == 1:
                raise ValueError("a bad record")
            return index

    stream = iter(Reader(DataLoader(Broken(), batch_size=1)))
    next(stream)
    with pytest.raises(ValueError, match="a bad record"):
        next(stream)
    with pytest.raises(RuntimeError, match="a draw of this pass has failed before"):
        next(stream)


@pytest.mark.parametrize(("step", "refused"), [(1, False), (2, True), (0, True)])
def test_a_counter_of_passes_is_one_that_counts_them_one_by_one(step: int, refused: bool) -> None:
    count = 0
    reader = Reader([1, 2], inspector=LoopInspector(lambda: {"epoch": count}))
    list(reader)
    count += step
    if refused:
        with pytest.raises(RuntimeError, match="a second pass"):
            list(reader)
    else:
        assert list(reader) == [1, 2]


def test_steps_done_tells_the_pass_only_if_it_is_asked_before_the_first_batch() -> None:
    reader = Reader([1, 2])
    next(iter(reader))
    reader.on_steps_done()
    with pytest.raises(RuntimeError, match="a second pass"):
        next(iter(reader))
    other = Reader([1, 2])
    other.on_steps_done()
    assert list(other) == list(other)


def test_a_pass_is_left_only_by_a_loop_that_counts_from_where_training_goes_on() -> None:
    reader = Reader([1, 2, 3])
    for _ in reader.epochs(2):
        stream = iter(reader)
        next(stream)
        break
    with pytest.raises(RuntimeError, match=r"pass 0 .* was left after 1 batches.*`batches.drawn`"):
        next(iter(reader))
    other = Reader([1, 2, 3])
    for _ in other.epochs(2):
        next(iter(other))
        assert other.drawn == 1


def test_a_last_pass_that_was_left_by_a_loops_own_count_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first = Loop("list").run(3)
    again = Loop("list", first.saved[2])
    next(iter(again.reader))
    again.reader.check_end()
    assert "the last pass was left after" in caplog.text
    caplog.clear()
    first.reader.check_end()
    assert not caplog.text


def test_two_passes_at_once_are_refused() -> None:
    reader = Reader([1, 2, 3])
    assert reader.epoch == 0 and reader.drawn == 0
    one, two = iter(reader), iter(reader)
    next(one), next(two)
    with pytest.raises(RuntimeError, match="this pass was left"):
        next(one)


def test_a_loop_that_draws_ahead_by_itself_is_refused() -> None:
    reader = Reader([1, 2, 3])
    stream = iter(reader)
    next(stream), next(stream)
    with pytest.raises(RuntimeError, match="2 batches were drawn before the first was trained on"):
        reader.on_forward()


def test_another_thread_must_not_draw() -> None:
    reader, raised = Reader([1, 2, 3]), []

    def draw() -> None:
        try:
            next(iter(reader))
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join(10)
    assert len(raised) == 1 and "on another thread than the one that called `attach`" in raised[0]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: DataLoader(Endless(), batch_size=1), "torch"),
        (lambda: (random.random() for _ in range(4)), "Python's random"),
        (lambda: (np.random.rand() for _ in range(4)), "NumPy"),
    ],
)
def test_a_reader_that_draws_from_global_generators_in_the_middle_of_a_pass_is_refused(make: Any, names: str) -> None:
    stream = iter(Reader(make()))
    next(stream)
    with pytest.raises(RuntimeError, match=rf"draws from {names} in the middle of a pass.*state_dict"):
        next(stream)


class Drawing:
    """A sampler that draws from Python's global generator for each index."""

    def __iter__(self) -> Iterator[int]:
        return (random.randrange(PASS) for _ in range(PASS))

    def __len__(self) -> int:
        return PASS


def test_a_sampler_that_shares_a_global_generator_in_the_middle_of_a_pass_is_refused_at_once() -> None:
    """After a restart its indices are drawn one behind the other, without what has drawn in between."""
    stream = iter(Reader(loader(sampler=Drawing())))
    for _ in range(2):
        next(stream)
        torch.rand(1), np.random.rand()  # a model's dropout, say: not what the sampler draws from
    random.random()
    with pytest.raises(
        RuntimeError, match=r"the sampler of .* draws from Python's random in the .*a generator of its own"
    ):
        next(stream)


@pytest.mark.parametrize(
    "sampler", [Drawing, lambda: RandomSampler(range(PASS)), lambda: WeightedRandomSampler([1.0] * PASS, PASS)]
)
def test_a_sampler_that_draws_as_a_pass_begins_or_from_what_nobody_else_does_is_not(sampler: Any) -> None:
    """That is brought back."""
    reader = Reader(loader(sampler=sampler()))
    for _ in reader.epochs(2):
        for _ in reader:
            torch.rand(1)
        random.random()


class Hidden:
    """Depends on something that nobody can bring back."""

    lives = itertools.count()

    def __init__(self) -> None:
        self.life = next(self.lives)

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(PASS):
            yield torch.tensor([i, self.life])


@pytest.mark.parametrize("used", [1, 4, 6])
def test_other_batches_than_before_are_an_error(used: int) -> None:
    MADE["hidden"] = Hidden
    try:
        first = Loop("hidden").run(8)
        with pytest.raises(RuntimeError, match=r"is another one than before the restart.*\(Hidden\)"):
            Loop("hidden", first.saved[used]).run(8)
    finally:
        del MADE["hidden"]


class Changing:
    """Its first two batches of every pass are those of its life, the others not."""

    lives = itertools.count()

    def __init__(self) -> None:
        self.life = next(self.lives)

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(PASS):
            yield torch.tensor([i, self.life if i < 2 else 0])


def test_batches_that_are_drawn_again_are_those_of_before() -> None:
    MADE["changing"] = Changing
    try:
        first = Loop("changing").run(8)
        with pytest.raises(RuntimeError, match=r"one of the 3 batches that were drawn before in a pass is another one"):
            Loop("changing", first.saved[3]).run(8)
    finally:
        del MADE["changing"]


def test_indices_that_are_drawn_again_are_those_of_before() -> None:
    weights = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]
    MADE["weights"] = lambda: loader(
        sampler=WeightedRandomSampler(weights.pop(0), PASS, generator=torch.Generator().manual_seed(3))
    )
    try:
        first = Loop("weights").run(4)
        with pytest.raises(RuntimeError, match=r"drawn before in a pass is another one.*\(DataLoader\)"):
            Loop("weights", first.saved[3]).run(4)
    finally:
        del MADE["weights"]


def test_a_reader_with_fewer_batches_than_before_is_told() -> None:
    first = Loop("list").run(4)
    shorter = Loop("list", first.saved[3])
    shorter.reader._reader = [0, 1]
    with pytest.raises(RuntimeError, match="the reader ended after 2 of the 3 batches that were drawn before"):
        next(iter(shorter.reader))


def test_a_pass_that_has_become_longer_is_told() -> None:
    first = Loop("growing").run(6)
    longer = Loop("growing", first.saved[5])
    longer.reader._reader = iter(range(1, 100))
    with pytest.raises(RuntimeError, match="a pass of the reader has more than the 4 batches"):
        next(iter(longer.reader))


def test_a_sequence_that_the_loop_has_changed_is_told() -> None:
    """Hard examples, say, that the lost life had added."""
    first = Loop("list").run(3)
    saved = decode(first.saved[2])
    saved["reader"]["size"] += 1
    first.saved[2] = encode(saved, "loop")
    with pytest.raises(ValueError, match="a sequence that the loop changes is not brought back"):
        Loop("list", first.saved[2])


def test_another_kind_of_reader_is_refused() -> None:
    first = Loop("list").run(3)
    with pytest.raises(ValueError, match=r"the reader \(Passes\) is of another kind"):
        Loop("stateful", first.saved[2])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(PASS))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: loader(), lambda: loader(num_workers=2)),
        (lambda: loader(num_workers=2), lambda: loader()),
        (lambda: DataLoader(Stream()), lambda: DataLoader(Stream(), num_workers=2)),
        (lambda: StatefulDataLoader(Numbers()), lambda: StatefulDataLoader(Numbers(), num_workers=2)),
        (lambda: StatefulDataLoader(Numbers(), num_workers=1), lambda: StatefulDataLoader(Numbers(), num_workers=2)),
    ],
    ids=["0 to 2", "2 to 0", "iterable, 0 to 2", "torchdata, 0 to 2", "torchdata, 1 to 2"],
)
def test_another_number_of_workers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, before: Any, after: Any) -> None:
    """It was said that a batch is another one, or that the reader lacks `state_dict`; torchdata has an empty error."""
    monkeypatch.setitem(MADE, "tried", before)
    first = Loop("tried").run(3)
    close(first)
    then, now = before().num_workers, after().num_workers
    monkeypatch.setitem(MADE, "tried", after)
    with pytest.raises(ValueError, match=rf"had num_workers={then} .*has {now}.*Give it num_workers={then} again"):
        Loop("tried", first.saved[2])


def test_another_batch_size_is_a_reason_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Loop("loader").run(3)
    monkeypatch.setitem(MADE, "loader", lambda: DataLoader(Numbers(), batch_size=2))
    with pytest.raises(RuntimeError, match=r"than before the restart: .* has another batch size, data or seed now"):
        Loop("loader", first.saved[2]).run(1)


def test_more_workers_of_a_loader_without_a_state_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they do not draw at random, their number changes nothing."""
    monkeypatch.setitem(MADE, "tried", lambda: loader(num_workers=1, shuffle=True))
    seed(3)
    first = Loop("tried").run(PASS)
    monkeypatch.setitem(MADE, "tried", lambda: loader(num_workers=2, shuffle=True))
    seed(4)
    second = Loop("tried", first.saved[2]).run(PASS)
    assert second.seen[0][0] == first.seen[2][0] and second.seen[1][0] == first.seen[3][0]
    assert "had num_workers=1 when the snapshot was taken, and has 2" in caplog.text
    close(first), close(second)


def test_a_state_that_cannot_be_kept_is_named() -> None:
    class Odd(Passes):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    reader = Reader(Odd(), lambda: reader.saved() and None)
    with pytest.raises(TypeError, match=r"reader\['file'\]"):
        next(iter(reader))


def _draw_again(reader: object, alter: Any) -> None:
    """Draws once, alters the batch, and draws the next one."""
    batches = iter(Reader(reader))  # type: ignore[arg-type]
    batch = next(batches)
    alter(batch)
    next(batches)


def _dicts() -> list[dict[str, Any]]:
    return [{"dense": torch.ones(2, 3), "at": i} for i in range(3)]


def _give_what_is_kept() -> Iterator[dict[str, Any]]:
    yield from _dicts()


class _Kept:
    """As TorchRec's random datasets: batches that it made once."""

    def __init__(self) -> None:
        self.batches = _dicts()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.batches)


class _Samples(Dataset[Any]):
    """Of dicts that it keeps."""

    def __init__(self) -> None:
        self.samples = _dicts()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.samples[at]


def _write(batch: dict[str, Any]) -> None:
    batch["dense"].mul_(2)


ALTERED = {
    "a write": (_write, r"\['dense'\]"),
    "a write into a view": (lambda batch: batch["dense"][0].add_(1), r"\['dense'\]"),
    "another tensor": (lambda batch: batch.update(dense=batch["dense"] * 2), r"\['dense'\]"),
    "a part less": (lambda batch: batch.pop("dense"), r"\['dense'\]"),
}


@pytest.mark.parametrize("how", sorted(ALTERED))
@pytest.mark.parametrize(
    "make",
    [_dicts, _Kept, lambda: DataLoader(_Samples(), collate_fn=min)],
    ids=["list", "iterable", "own collate"],
)
def test_a_batch_that_the_loop_alters_in_place_is_refused(make: Any, how: str) -> None:
    """After a restart the script makes its batches anew: those of later passes would come without the change."""
    alter, path = ALTERED[how]
    with pytest.raises(RuntimeError, match=rf"batch 0 of pass 0 was altered in place .*`batch{path}`.*x.clone"):
        _draw_again(make(), alter)


def test_the_tensors_in_a_container_of_the_loops_own_are_the_readers() -> None:
    """Without collating, a DataLoader gives new containers, of the samples' memory."""
    samples = TensorDataset(torch.ones(4, 3), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"`batch\[0\]`"):
        _draw_again(DataLoader(samples, batch_size=None), lambda batch: batch[0].mul_(2))
    _draw_again(DataLoader(samples, batch_size=None), lambda batch: batch.pop(0))  # of a list that only the loop has
    with pytest.raises(RuntimeError, match=r"`batch\['dense'\]`"):
        _draw_again(DataLoader(_Samples(), batch_size=None), _write)
    _draw_again(DataLoader(_Samples(), batch_size=None), lambda batch: batch.pop("dense"))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "collate_fn": min}], ids=["torch's collate", "workers"])
def test_a_batch_that_is_a_copy_may_be_altered(options: dict[str, Any]) -> None:
    _draw_again(DataLoader(_Samples(), **options), _write)


def test_reading_a_batch_does_not_alter_it() -> None:
    """Neither does what an object computes once and keeps."""

    class Batch:
        def __init__(self) -> None:
            self.dense, self.total = torch.ones(3), None

        def sum(self) -> Any:
            self.total = self.dense.sum() if self.total is None else self.total
            return self.total

    _draw_again([Batch(), Batch()], lambda batch: batch.sum())


def test_a_batch_that_a_pipeline_trains_on_may_not_be_altered_either() -> None:
    inspector = LoopInspector()
    inspector.pipelined = True
    reader = Reader(_dicts(), inspector=inspector)
    batches = iter(reader)
    first, _ = next(batches), next(batches)
    reader.on_forward()
    _write(first)
    with pytest.raises(RuntimeError, match="batch 0 of pass 0 was altered"):
        next(batches)
