"""Which batch comes next, and how it is brought about again: each kind of reader, and what is refused by name."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from torch_ecrec.nn.checksum import checksum_of
from torch_ecrec.nn.loop import PIPELINES, Judge
from torch_ecrec.nn.random_states import Generators, moved, random_states
from torch_ecrec.nn.reader import Reader, has_indices, kind_of
from torch_ecrec.nn.values import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
PASS = 4


class Passes:
    """Stateful: 100 * pass + place."""

    def __init__(self) -> None:
        self.turn, self.place = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < PASS:
            self.place += 1
            yield 100 * self.turn + self.place
        self.turn, self.place = self.turn + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turn, self.place = state["turn"], state["place"]


class Growing:
    """No state that anybody could see: goes on where it was in every pass."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(PASS):
            self.place += 1
            yield self.place


class Numbers(Dataset[Tensor]):
    def __init__(self, augmented: str = "") -> None:
        self.augmented = augmented

    def __len__(self) -> int:
        return PASS

    def __getitem__(self, index: int) -> Tensor:
        noise = {"": lambda: 0.0, "torch": lambda: float(torch.rand(())), "random": random.random}[self.augmented]()
        return torch.tensor(index + noise)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(PASS):
            yield torch.rand(())


def loader(**more: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(), batch_size=1, **more)


MADE: dict[str, Callable[[], Iterable[Any]]] = {
    "list": lambda: list(range(PASS)),
    "range": lambda: range(PASS),
    "stateful": Passes,
    "growing": Growing,
    "generator": lambda: (i for i in range(50)),
    "loader": loader,
    "shuffled": lambda: loader(shuffle=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([0.1, 0.4, 0.2, 0.3], PASS)),
    "augmented": lambda: DataLoader(Numbers("torch"), shuffle=True),
    "workers": lambda: DataLoader(Numbers("random"), shuffle=True, num_workers=2),
    "kept workers": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "torchdata": lambda: StatefulDataLoader(Numbers(), shuffle=True),
    "torchdata own generator": lambda: StatefulDataLoader(
        Numbers(), shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "torchdata workers": lambda: StatefulDataLoader(Numbers(), shuffle=True, num_workers=2),
}
WITH_WORKERS = {"workers", "kept workers", "torchdata workers"}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Loop:
    """Draws and forwards, as a training loop has them; `saved[n]` goes on with the batch after n that were used."""

    def __init__(self, kind: str, saved: Any = None) -> None:
        self.reader = Reader(MADE[kind](), self._on_draw)
        self.saved: dict[int, bytes] = {}
        self.used = 0
        self.seen: list[Any] = []
        if saved is not None:
            state: Any = decode(saved)
            self.used = state["used"]
            self.reader.load(state["reader"], state["checksum"])

    def _on_draw(self) -> Callable[[int | None], None]:
        kept = self.reader.saved()
        used = self.used

        def then(checksum: int | None) -> None:
            self.saved[used] = encode({"reader": kept, "checksum": checksum, "used": used}, "loop")

        return then

    def run(self, turns: int) -> Loop:
        """So many batches, pass after pass, with draws from the global generators before and after each."""
        for _ in self.reader.epochs(99):
            for batch in self.reader:
                self.seen.append((torch.as_tensor(batch).tolist(), random.random(), float(torch.rand(()))))
                self.reader.on_forward()
                self.used += 1
                float(np.random.rand())
                if self.used == turns:
                    return self
        return self


def close(loop: Loop | Ahead) -> None:
    """Ends the workers of a loader that was left."""
    batches: Any = loop.reader._reader
    shut = getattr(getattr(batches, "_iterator", None), "_shutdown_workers", None)
    current = loop.reader._current
    for end in (shut, getattr(current.batches if current else None, "_shutdown_workers", None)):
        if end is not None:
            end()


# brought back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MADE)
def test_every_reader_goes_on_with_the_next_batch(kind: str) -> None:
    seed(1)
    first = Loop(kind).run(10)
    assert len(first.seen) == 10 and len(set(map(str, first.seen))) > 4
    close(first)
    for used in [5] if kind in WITH_WORKERS else range(1, 10):
        seed(50 + used)
        again = Loop(kind, first.saved[used]).run(10)
        close(again)
        assert again.seen == first.seen[used:], f"after {used}"


@pytest.mark.parametrize("kind", ["list", "stateful", "shuffled", "torchdata own generator", "growing"])
def test_a_reader_that_was_brought_back_is_brought_back_again(kind: str) -> None:
    seed(1)
    first = Loop(kind).run(10)
    saved = first.saved
    for used in (2, 3, 4, 8):
        seed(used)
        again = Loop(kind, saved[used]).run(10)
        assert again.seen == first.seen[used:]
        saved = again.saved


def test_batches_that_are_left_out_stay_left_out() -> None:
    seed(1)
    first = Loop("shuffled").run(9)
    left_out = Loop("shuffled", first.saved[2])
    drawn = iter(left_out.reader)
    next(drawn), next(drawn)
    assert left_out.reader.drawn == 4


class Ahead:
    """Draws as TorchRec's pipelines do."""

    def __init__(self, kind: str, depth: int, saved: bytes | None = None) -> None:
        self.used, self.saved, self.seen = 0, {}, []  # type: ignore[var-annotated]
        self.reader = Reader(MADE[kind](), self._on_draw)
        if saved is not None:
            state: Any = decode(saved)
            self.used = state["used"]
            self.reader.load(state["reader"], state["checksum"])
        # its calls come from a module of that name
        scope: dict[str, Any] = {"__name__": PIPELINES + ".train_pipelines"}
        exec("def draw(stream):\n    return next(stream, None)", scope)
        self.draw, self.depth = scope["draw"], depth

    def _on_draw(self) -> Any:
        kept, used = self.reader.saved(), self.used
        return lambda checksum: self._keep(used, kept, checksum)

    def _keep(self, used: int, kept: dict[str, Any], checksum: int | None) -> None:
        if used not in self.saved:
            self.saved[used] = encode({"reader": kept, "checksum": checksum, "used": used}, "loop")

    def run(self, passes: int) -> Ahead:
        for _ in self.reader.epochs(passes):
            stream, queue, ended = iter(self.reader), [], False
            while True:
                while len(queue) <= self.depth and not ended:
                    batch = self.draw(stream)
                    ended = batch is None
                    queue += [] if ended else [batch]
                if not queue:
                    break
                if self.used not in self.saved and self.used:
                    self._keep(self.used, self.reader.saved(at_forward=True), None)
                self.reader.on_forward()
                self.seen.append((torch.as_tensor(queue.pop(0)).tolist(), random.random(), float(torch.rand(()))))
                self.used += 1
        return self


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        (kind, depth)
        for kind in MADE
        for depth in (1, 2)
        if kind != "generator" and (depth == 2 or kind not in WITH_WORKERS)
    ],
)
def test_a_pipeline_draws_again_what_it_had_drawn_ahead(kind: str, depth: int) -> None:
    seed(1)
    first = Ahead(kind, depth).run(3)
    assert len(first.seen) == 3 * PASS and first.reader.pipelined
    close(first)
    for used in [5] if kind in WITH_WORKERS else range(1, 3 * PASS):
        seed(50 + used)
        again = Ahead(kind, depth, first.saved[used]).run(3)
        close(again)
        assert again.seen == first.seen[used:], f"after {used}"


def test_the_epoch_is_that_in_which_training_goes_on() -> None:
    seed(1)
    first = Loop("list").run(10)
    assert [Loop("list", first.saved[used]).reader.epoch for used in (1, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
    assert list(Loop("list", first.saved[5]).reader.epochs(3)) == [1, 2]
    again = Loop("list", first.saved[6])
    assert again.reader.drawn == 2 and len(again.reader) == PASS


def test_batches_of_a_pass_are_counted_from_none_again() -> None:
    reader, counts = Reader([1, 2, 3]), []
    for _ in reader.epochs(2):
        counts += [reader.drawn, sum(1 for _ in reader)]
    assert counts == [0, 3, 0, 3]


def test_a_pipeline_may_draw_through_a_generator() -> None:
    reader = Reader([1, 2, 3])
    scope: dict[str, Any] = {"__name__": PIPELINES + ".train_pipelines"}
    exec("def draw(stream):\n    return next(stream)", scope)
    scope["draw"](batch for batch in reader)
    assert reader.pipelined


def test_a_pass_that_gave_all_its_batches_was_not_left() -> None:
    reader = Reader([1, 2])
    for _ in reader.epochs(2):
        stream = iter(reader)
        assert [next(stream) for _ in range(len(reader))] == [1, 2]


def test_next_goes_from_pass_to_pass() -> None:
    reader = Reader([1, 2])
    assert list(reader.epochs(2)) == [0, 1]
    assert [next(reader), next(reader), next(reader, None), next(reader)] == [1, 2, None, 1]


# refused ------------------------------------------------------------------------------------------------


def test_a_second_pass_needs_a_loop_that_is_known_to_begin_with_the_right_one() -> None:
    reader = Reader([1, 2])
    assert list(reader) == [1, 2]
    with pytest.raises(RuntimeError, match=r"a second pass .* `for epoch in batches.epochs\(N\)"):
        next(iter(reader))


def test_a_loop_within_another_is_refused_before_its_first_batch() -> None:
    reader = Reader([1, 2])
    with pytest.raises(RuntimeError, match=r"is within another one.*`for epoch in batches.epochs\(N\)"):
        for _ in range(3):
            for _batch in reader:
                pytest.fail("a batch")
    assert reader._current is None
    for _batch in Reader([1, 2]):
        for _ in range(2):  # within, not around
            pass
    for _ in range(1):
        for _batch in Reader([1, 2], judge=Judge(attached=[object()])):  # that may count
            pass


@pytest.mark.parametrize(
    ("around", "what"),
    [
        (enumerate, r"`enumerate`.*`for i, batch in batches.enumerate\(\)"),
        (lambda batches: zip(batches, itertools.count(), strict=False), "`zip` begins the others anew"),
        (lambda batches: itertools.islice(batches, 2), "`islice`.*`batches.drawn`"),
        (lambda batches: enumerate(tqdm(batches, disable=None)), "`enumerate` counts from 0 again"),
        (lambda batches: enumerate(batch for batch in (b for b in batches)), "`enumerate` counts from 0 again"),
    ],
)
def test_what_counts_batches_by_itself_is_refused_by_name(around: Any, what: str) -> None:
    with pytest.raises(RuntimeError, match=what):
        next(iter(around(Reader([1, 2, 3]))))


def test_a_progress_bar_is_no_harm() -> None:
    assert list(tqdm(Reader([1, 2, 3]), disable=None)) == [1, 2, 3]


@pytest.mark.parametrize("used", [1, 3, 5])
def test_batches_are_numbered_from_where_training_goes_on(used: int) -> None:
    def run(loop: Loop) -> list[tuple[int, int]]:
        seen = []
        for _ in loop.reader.epochs(2):
            for i, batch in loop.reader.enumerate(start=1):
                seen.append((i, batch))
                loop.reader.on_forward()
                loop.used += 1
        return seen

    first = Loop("list")
    everything = run(first)
    assert everything == [(i, i - 1) for _ in range(2) for i in (1, 2, 3, 4)]
    assert run(Loop("list", first.saved[used])) == everything[used:]


def test_a_count_of_the_loops_own_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def loop(reader: Reader, asks: bool) -> None:
        turns, seen, factor = 0, 10, 3
        for _ in reader.epochs(2):
            for _batch in reader:
                turns += reader.drawn - turns if asks else 1
                seen -= 0 if asks else 2 + 0 * factor

    loop(Reader(list("abcdefg")), asks=True)
    assert not caplog.text
    loop(Reader(list("abcdefg")), asks=False)
    assert caplog.text.count("the loop counts in `turns`, `seen`, which begins anew after a restart") == 1


@pytest.mark.parametrize(
    "make", [lambda: random.Random(1), lambda: np.random.default_rng(1), lambda: torch.Generator().manual_seed(1)]
)
def test_a_generator_of_the_loops_own_is_refused_by_name_or_attached(make: Any) -> None:
    def loop(reader: Reader, negatives: Any) -> None:
        for _batch in reader:
            draw = getattr(negatives, "random", None)
            float(torch.rand((), generator=negatives) if draw is None else draw())

    with pytest.raises(RuntimeError, match=r"draws from `negatives`.*`model.attach\(..., negatives=negatives\)`"):
        loop(Reader([1, 2, 3]), make())
    attached = make()
    loop(Reader([1, 2, 3], judge=Judge(attached=[attached])), attached)


def test_a_generator_of_an_owner_is_seen() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.random = random.Random(1)

        def train(self, reader: Reader) -> None:
            for _batch in reader:
                self.random.random()

    with pytest.raises(RuntimeError, match=r"draws from `self\.random`"):
        Trainer().train(Reader([1, 2, 3]))


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


def test_attributes_are_those_of_the_reader() -> None:
    made = loader(batch_sampler=None)
    reader: Any = Reader(made)
    assert reader.dataset is made.dataset and reader.batch_size == 1
    with pytest.raises(AttributeError, match="nothing"):
        _ = reader.nothing


@pytest.mark.parametrize(("step", "refused"), [(1, False), (2, True), (0, True)])
def test_a_counter_of_passes_is_one_that_counts_them_one_by_one(step: int, refused: bool) -> None:
    count = 0
    reader = Reader([1, 2], judge=Judge(lambda: {"epoch": count}))
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


def test_another_kind_of_reader_is_refused() -> None:
    first = Loop("list").run(3)
    with pytest.raises(ValueError, match=r"the reader \(Passes\) is of another kind"):
        Loop("stateful", first.saved[2])


def test_a_state_that_cannot_be_kept_is_named() -> None:
    class Odd(Passes):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    reader = Reader(Odd(), lambda: reader.saved() and None)
    with pytest.raises(TypeError, match=r"reader\['file'\]"):
        next(iter(reader))


# pieces -------------------------------------------------------------------------------------------------


def test_kinds() -> None:
    kinds = {kind: kind_of(make()) for kind, make in MADE.items()}
    assert {kind for kind, how in kinds.items() if how == "all"} == {"growing", "generator", "kept workers"}
    assert {kind for kind in MADE if kinds[kind] == "state"} == {k for k in MADE if "torchdata" in k or k == "stateful"}
    assert kind_of(DataLoader(Endless())) == "all" and kind_of(DataLoader(Endless(), num_workers=1)) == "pass"
    assert has_indices(loader()) and not has_indices(loader(num_workers=1)) and not has_indices([1])


def test_generators_of_a_reader_are_found_and_put_back() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epoch, self.random, self.numpy = 3, random.Random(1), np.random.default_rng(2)
            self.old = np.random.RandomState(3)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Thing:
        def __init__(self) -> None:
            self.sampler, self.generator = Sampler(), torch.Generator().manual_seed(4)

    thing = Thing()
    generators = Generators.of(thing)
    states = decode(encode(generators.states(), "states"))
    draw = lambda: (  # noqa: E731
        thing.sampler.random.random(),
        float(thing.sampler.numpy.random()),
        float(thing.sampler.old.rand()),
        float(torch.rand((), generator=thing.generator)),
        random.random(),
    )
    expected = draw()
    thing.sampler.set_epoch(9)
    assert draw() != expected
    generators.set_(states)  # type: ignore[arg-type]
    assert draw() == expected and thing.sampler.epoch == 3


def test_it_is_told_which_generators_moved() -> None:
    before = random_states()
    assert moved(before, random_states()) == []
    torch.rand(())
    assert moved(before, random_states()) == ["torch"]
    random.random(), np.random.rand()
    assert moved(before, random_states()) == ["Python's random", "NumPy", "torch"]


def test_a_checksum_sees_every_kind_of_part() -> None:
    large = torch.arange(100_000)
    batches: list[Any] = [
        1, 2, "a", torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64), np.ones(2), np.zeros(2),
        {"a": torch.ones(1)}, [torch.ones(1), torch.zeros(1)], (torch.zeros(1), torch.ones(1)), large, large.flip(0),
        torch.cat([large[:50_000], large[50_000:].flip(0)]), large.numpy().astype(float), None,
    ]  # fmt: skip
    sums = [checksum_of(batch) for batch in batches]
    assert len(set(sums)) == len(sums) and sums == [checksum_of(batch) for batch in batches]
    assert checksum_of({"x": torch.ones(1), "at": 1.5}) == checksum_of({"x": torch.ones(1), "at": 2.5})
