"""Which batch comes next, and how it is brought about again: each kind of reader."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from readers import MADE, PASS, WITH_WORKERS, Ahead, Endless, Loop, close, loader, seed
from torch.utils.data import DataLoader
from tqdm import tqdm

from torch_ecrec.resume.checksum import checksum_of
from torch_ecrec.resume.loop import PIPELINES
from torch_ecrec.resume.random_states import Generators, moved, random_states
from torch_ecrec.resume.reader import Reader, has_indices, kind_of
from torch_ecrec.resume.values import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


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


@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        # every day one depth of each
        pytest.param(kind, depth, marks=[] if depth == 1 + i % 2 or kind in WITH_WORKERS else [pytest.mark.slow])
        for i, kind in enumerate(MADE)
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


def test_attributes_are_those_of_the_reader() -> None:
    made = loader(batch_sampler=None)
    reader: Any = Reader(made)
    assert reader.dataset is made.dataset and reader.batch_size == 1
    with pytest.raises(AttributeError, match="nothing"):
        _ = reader.nothing


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


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
@pytest.mark.parametrize("again", ["MT19937", "PCG64"])
def test_whatever_makes_numpys_global_numbers_is_put_back(kind: str, again: str) -> None:
    """Another one, too, than the script has set since it was started again."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        own = np.random.RandomState(getattr(np.random, kind)(6))
        states = decode(encode(Generators({"own": own}).states(), "states"))
        assert moved(states, random_states()) == []  # type: ignore[arg-type]
        drawn = np.random.rand(3).tolist(), own.rand(3).tolist()
        assert moved(states, random_states()) == ["NumPy"]  # type: ignore[arg-type]
        np.random.set_bit_generator(getattr(np.random, again)(7))
        Generators({"own": own}).set_(states)  # type: ignore[arg-type]
        assert (np.random.rand(3).tolist(), own.rand(3).tolist()) == drawn
    finally:
        np.random.set_bit_generator(before)


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
        1, 2, "a", torch.ones(2, dtype=torch.float32), torch.ones(3), torch.ones(2, dtype=torch.float64), np.ones(2),
        np.zeros(2),
        {"a": torch.ones(1)}, [torch.ones(1), torch.zeros(1)], (torch.zeros(1), torch.ones(1)), large, large.flip(0),
        torch.cat([large[:50_000], large[50_000:].flip(0)]), large.numpy().astype(float), None,
    ]  # fmt: skip
    sums = [checksum_of(batch) for batch in batches]
    assert len(set(sums)) == len(sums) and sums == [checksum_of(batch) for batch in batches]
    assert checksum_of({"x": torch.ones(1), "at": 1.5}) == checksum_of({"x": torch.ones(1), "at": 2.5})
