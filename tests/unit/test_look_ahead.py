"""The next batch is drawn before the loop asks for it: nobody sees that, in this life or in a later one."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from readers import MADE, Numbers, Passes, close, loader
from readers import seed as seed_all
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from torch_ecrec.resume import reader as reader_module
from torch_ecrec.resume.loop import PIPELINES
from torch_ecrec.resume.random_states import Generators, random_states
from torch_ecrec.resume.reader import Reader, draws_unseen, kind_of
from torch_ecrec.resume.values import decode, encode

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SIZE = 7
ASKS_FOR_IT = "set TORCH_ECREC_LOOK_AHEAD=0"


class Long(Numbers):
    def __len__(self) -> int:
        return SIZE


class Slow(Passes):
    """Stateful, and its state moves at the end of a pass."""

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        while self.place < SIZE:
            self.place += 1
            yield torch.tensor([100 * self.turn + self.place])
        self.turn, self.place = self.turn + 1, 0


class Drawing:
    """Stateful, and draws from a global generator for every batch."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < SIZE:
            self.place += 1
            yield torch.rand(2)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Own:
    """Another order in each pass, from a generator of its own, from which it draws for every batch, too."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(7)

    def __iter__(self) -> Iterator[Tensor]:
        for number in self.random.permutation(SIZE).tolist():
            yield torch.tensor([number + float(self.random.random())])


class Failing(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        if index == 4:
            raise ValueError("a bad record")
        return torch.tensor([index])


QUICK: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.tensor([i, i]) for i in range(SIZE)],
    "tuple": lambda: tuple({"ids": torch.tensor([i])} for i in range(SIZE)),
    "stateful": Slow,
    "drawing": Drawing,
    "own": Own,
    "generator": lambda: (torch.tensor([i]) for i in range(40)),
    "loader": lambda: DataLoader(Long(), shuffle=True),
    "own generator": lambda: DataLoader(Long(), shuffle=True, generator=torch.Generator().manual_seed(5)),
    "with replacement": lambda: DataLoader(Long(), sampler=RandomSampler(Long(), replacement=True, num_samples=36)),
    "weighted": lambda: DataLoader(Long(), sampler=WeightedRandomSampler([0.1, 0.4, 0.5], SIZE)),
    "augmented": lambda: DataLoader(Long("torch"), shuffle=True),
    "failing": lambda: DataLoader(Failing()),
    "torchdata": MADE["torchdata"],
    "torchdata own generator": MADE["torchdata own generator"],
}
WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(Long("random"), shuffle=True, num_workers=2),
    "kept workers": lambda: DataLoader(Long("random"), shuffle=True, num_workers=1, persistent_workers=True),
}
READERS = QUICK | WORKERS
UNSEEN = {"list", "tuple", "workers"}  # drawn early unless it is switched off


@dataclasses.dataclass(frozen=True)
class Script:
    """A loop. `turns`: what it does in each turn, in turn."""

    kind: str
    passes: int = 2
    leave_after: int = 0
    turns: tuple[frozenset[str], ...] = (frozenset(),)


ACTIONS = ("draw before", "draw between", "draw after", "alter", "evaluate", "forward twice", "no forward", "own draw")


class Life:
    """One run of a script; `saved[n]` goes on with the batch after n that were used.

    With a plus behind `look_ahead`, servers want hints, with a tilde, in turns of a few batches.
    """

    def __init__(self, script: Script, look_ahead: str, saved: bytes | None = None) -> None:
        self.script, self.hints, look_ahead = script, look_ahead.strip("auto0123456789"), look_ahead.rstrip("+~")
        self.foreseen: dict[Any, Any] = {}
        made = READERS[script.kind]()
        self.reader = Reader(made, self._on_draw, look_ahead=look_ahead)
        self.own = next((g for g in Generators.of(made)._own.values() if isinstance(g, torch.Generator)), None)
        self.used, self.saved, self.seen = 0, {}, []  # type: ignore[var-annotated]
        self.error, self.early, self.untold = "", 0, 0
        if saved is not None:
            state: Any = decode(saved)
            self.used = state["used"]
            self.reader.load(state["reader"], state["checksum"])

    def _on_draw(self) -> Any:
        kept, used, states = self.reader.saved(), self.used, random_states()

        def then(checksum: int | None) -> None:
            entry = {"reader": kept, "checksum": checksum, "used": used, "states": states}
            self.saved[used] = encode(entry, "loop")

        return then

    def go(self) -> Life:
        try:
            for _ in self.reader.epochs(self.script.passes):
                self._pass()
        except (RuntimeError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            close(self)  # type: ignore[arg-type]
        return self

    def _pass(self) -> None:
        for batch in self.reader:
            does = self.script.turns[self.used % len(self.script.turns)]
            told = batch["ids"] if isinstance(batch, dict) else torch.as_tensor(batch)
            self.seen.append((told.tolist(), self.reader.drawn, self.reader.epoch, *self._draws()))
            drawn = self.reader.epoch, self.reader.drawn - 1
            assert self.foreseen.pop(drawn, told.tolist()) == told.tolist(), "what was foreseen is what comes"
            self.used += 1
            if "draw before" in does:
                self.seen.append(self._draws())
            if "no forward" not in does:
                self._forward()
            if "forward twice" in does:
                self._forward()
            if "alter" in does:
                told.add_(1)
            if "draw between" in does:
                self.seen.append(self._draws())
            if "own draw" in does and self.own is not None:
                self.seen.append(float(torch.rand((), generator=self.own)))
            if "evaluate" in does:
                self.seen += [other.tolist() for other in loader(shuffle=True)]
            if "draw after" in does:
                self.seen.append(self._draws())
            if self.reader.drawn == self.script.leave_after:
                return

    def _forward(self) -> None:
        self.reader.on_forward()
        coming = self.reader.look_ahead(self.hints == "+" or (self.hints == "~" and self.reader.drawn // 3 % 2 == 0))
        self.early += bool(coming)
        for number, batch in coming:
            told = batch["ids"] if isinstance(batch, dict) else torch.as_tensor(batch)
            assert self.foreseen.setdefault(number, told.tolist()) == told.tolist()

    def _draws(self) -> tuple[float, float, float]:
        """All that a loop could see of the generators."""
        states = random_states()
        numbers = random.random(), float(np.random.rand()), float(torch.rand(()))
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        return numbers


def moved_by_loop(script: Script) -> bool:
    return any(does & {"draw between", "draw after", "evaluate", "own draw"} for does in script.turns)


def check(script: Script, look_ahead: str) -> int:
    """Returns how often a batch was drawn early."""
    lives = []
    for setting in ("0", look_ahead):
        seed_all(1)
        lives.append(Life(script, setting).go())
    off, on = lives
    assert off.early == 0
    if ASKS_FOR_IT in on.error:
        left = script.leave_after and kind_of(READERS[script.kind]()) != "pass"
        assert look_ahead[0] in "14" and (left or moved_by_loop(script)), on.error
        assert on.seen == off.seen[: len(on.seen)]
    else:
        assert (on.seen, on.error) == (off.seen, off.error)
        assert on.saved.keys() == off.saved.keys()
    for used, saved in on.saved.items():
        assert saved == off.saved[used], f"another snapshot after {used}"
    if off.error or script.kind in WORKERS:
        return on.early
    for i, (used, saved) in enumerate(on.saved.items()):
        if used == 0 or (i > 6 and i % 9):
            continue
        for setting in ("0", look_ahead)[i % 2 :]:
            seed_all(50 + used)
            again = Life(script, setting, saved).go()
            if ASKS_FOR_IT in again.error and setting[0] in "14":
                continue
            assert not again.error
            tail = off.seen[len(off.seen) - len(again.seen) :] if again.seen else []
            assert again.seen == tail and again.used == off.used, f"after {used}"
    return on.early


@st.composite
def scripts(draw: Any, kinds: Sequence[str]) -> Script:
    turn = st.frozensets(st.sampled_from(ACTIONS), max_size=2)
    return Script(
        kind=draw(st.sampled_from(kinds)),
        passes=draw(st.integers(1, 3)),
        leave_after=draw(st.sampled_from([0, 0, 0, 4, 6])),
        turns=tuple(draw(st.lists(turn, min_size=1, max_size=5))),
    )


SWEEP = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.parametrize("look_ahead", ["auto", "auto+", "1", "4+", "4~"])
@pytest.mark.parametrize("kind", QUICK)
def test_no_loop_sees_an_early_draw(kind: str, look_ahead: str) -> None:
    early = 0

    @seed(0)
    @settings(max_examples=4 if kind == "with replacement" else 10, database=None, **SWEEP)
    @given(scripts([kind]))
    def check_some(script: Script) -> None:
        nonlocal early
        early += check(script, look_ahead)

    check_some()
    assert (early > 0) == (look_ahead[0] in "14" or kind in UNSEEN)


@pytest.mark.slow
@settings(max_examples=5000, **SWEEP)
@given(scripts(sorted(QUICK)), st.sampled_from(["auto", "1", "auto+", "1+", "2+", "4+", "16+", "4~"]))
def test_thousands_of_loops_see_no_early_draw(script: Script, look_ahead: str) -> None:
    check(script, look_ahead)


def nothing_is_put_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reader_module, "same_state", lambda a, b: True)


def nothing_is_caught_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "_catch_up", lambda self, current, early, now: None)


def the_state_is_as_of_the_early_draw(patch: pytest.MonkeyPatch) -> None:
    """A snapshot asks for it when the loop draws."""
    draw_early = Reader._draw_early
    patch.setattr(Reader, "_draw_early", lambda self, current, state: draw_early(self, current, None))


def indices_count_at_once(patch: pytest.MonkeyPatch) -> None:
    draw_early = Reader._draw_early

    def counted(self: Reader, current: Any, state: bytes | None) -> Any:
        early = draw_early(self, current, state)
        current.sum = early.sum
        return early

    patch.setattr(Reader, "_draw_early", counted)


def each_begins_where_the_loop_is(patch: pytest.MonkeyPatch) -> None:
    """And not where the early draw before it has ended."""
    draw_early = Reader._draw_early

    def alone(self: Reader, current: Any, state: bytes | None) -> Any:
        queue, self._early = self._early, deque()
        early = draw_early(self, current, state)
        self._early = queue
        return early

    patch.setattr(Reader, "_draw_early", alone)


PLAIN = (frozenset[str](),)
MUTATIONS = {
    nothing_is_put_back: Script("augmented", 1, turns=(frozenset({"draw before"}),)),
    nothing_is_caught_up: Script("augmented", 1, turns=PLAIN),
    the_state_is_as_of_the_early_draw: Script("stateful", 1, turns=PLAIN),
    indices_count_at_once: Script("loader", 1, turns=PLAIN),
}


@pytest.mark.parametrize("look_ahead", ["1", "4+"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mutation_is_found(mutate: Any, look_ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = MUTATIONS[mutate]
    assert check(script, look_ahead) == SIZE - 3
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(script, look_ahead)


@pytest.mark.parametrize("kind", ["augmented", "loader", "own"])
def test_an_early_draw_goes_on_where_the_one_before_has_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(kind, 1, turns=PLAIN)
    assert check(script, "4+") == SIZE - 3
    each_begins_where_the_loop_is(monkeypatch)
    with pytest.raises(AssertionError):
        check(script, "4+")


@pytest.mark.parametrize(("look_ahead", "ahead"), [("1+", [1] * 4), ("2+", [2] * 3 + [1]), ("4+", [2, 3, 2, 1])])
def test_as_many_are_drawn_early_as_the_setting_says_and_two_in_a_turn(look_ahead: str, ahead: list[int]) -> None:
    """Of 7 batches: a loop is known after three."""
    found: list[int] = []
    look = Reader.look_ahead
    with pytest.MonkeyPatch.context() as patch:

        def counted(self: Reader, far: bool) -> Any:
            coming = look(self, far)
            found.append(len(coming))
            return coming

        patch.setattr(Reader, "look_ahead", counted)
        Life(Script("stateful", 1), look_ahead).go()
    assert found == [0, 0, *ahead, 0]


def test_memory_that_a_reader_gives_again_after_some_batches_is_refused() -> None:
    """Here no batch that the loop still has is written over, but one that it has yet to get."""

    def reused() -> Iterator[Tensor]:
        memory = torch.zeros(2)
        for i in range(20):
            yield memory.fill_(i) if i in (6, 8) else torch.full((2,), float(i))

    reader, seen = Reader(reused(), look_ahead="4"), []
    with pytest.raises(RuntimeError, match=r"has written into a batch .* drawn early.*TORCH_ECREC_LOOK_AHEAD=0"):
        for batch in reader:
            reader.on_forward()
            reader.look_ahead(far=True)
            seen.append(batch[0].item())
    assert seen == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("leave_after", [0, 5])
@pytest.mark.parametrize(("kind", "look_ahead"), [("workers", "auto"), ("workers", "1"), ("kept workers", "auto")])
def test_no_loop_sees_an_early_draw_of_workers(kind: str, look_ahead: str, leave_after: int) -> None:
    turns = (frozenset[str](), frozenset({"alter"}), frozenset({"draw after", "evaluate"}))
    assert (check(Script(kind, 2, leave_after, turns), look_ahead) > 0) == (kind in UNSEEN)


def test_kept_workers_that_are_left_with_an_early_batch_are_refused() -> None:
    """They would give others in the next pass: the process that made it goes on."""
    seed_all(1)
    life = Life(Script("kept workers", 2, 5), "1").go()
    assert life.early == 3 and "pass 0 was left after 5 batches" in life.error and ASKS_FOR_IT in life.error


@pytest.mark.parametrize("kind", ["stateful", "own", "generator", "drawing"])
def test_a_pass_that_is_left_is_refused_where_its_early_batch_cannot_be_put_back(kind: str) -> None:
    life = Life(Script(kind, 2, 5), "1").go()
    assert "has given the next one already" in life.error and ASKS_FOR_IT in life.error


@pytest.mark.parametrize("kind", ["drawing", "augmented"])
def test_a_reader_that_draws_from_what_the_loop_draws_from_is_refused(kind: str) -> None:
    """At once, and only if the loop does so between the early draw and its own."""
    life = Life(Script(kind, 1, turns=(frozenset({"draw before"}),)), "1").go()
    assert not life.error and life.early == SIZE - 3
    reader = Reader(READERS[kind](), look_ahead="1")
    with pytest.raises(RuntimeError, match=r"draw from the same random generator \(torch\).*TORCH_ECREC_LOOK_AHEAD=0"):
        for _ in reader:
            reader.on_forward()
            reader.look_ahead()
            torch.rand(())


def test_a_reader_that_gives_one_memory_again_is_refused() -> None:
    def reused() -> Iterator[Tensor]:
        memory = torch.zeros(2)
        for i in range(SIZE):
            yield memory.fill_(i)

    reader, seen = Reader(reused(), look_ahead="1"), []
    with pytest.raises(RuntimeError, match=r"in the memory of the one before.*TORCH_ECREC_LOOK_AHEAD=0"):
        for batch in reader:
            reader.on_forward()
            reader.look_ahead()
            seen.append(batch.tolist())
    assert seen == [[0.0, 0.0], [1.0, 1.0]]


def test_what_ends_the_process_is_not_put_off() -> None:
    def interrupted() -> Iterator[int]:
        yield from range(3)
        raise KeyboardInterrupt

    reader = Reader(interrupted(), look_ahead="1")
    stream = iter(reader)
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            reader.on_forward()
            reader.look_ahead()
    assert reader.drawn == 3
    with pytest.raises(RuntimeError, match="a draw of this pass has failed before"):
        next(stream)


def test_a_script_that_saves_the_readers_state_saves_that_of_its_own_draws() -> None:
    reader: Any = Reader(Slow(), look_ahead="1")
    early = 0
    for place, _ in enumerate(reader, 1):
        reader.on_forward()
        early += bool(reader.look_ahead())
        assert reader.state_dict() == {"turn": 0, "place": place}
    assert early == SIZE - 3


def test_a_script_that_loads_the_readers_state_in_the_middle_of_a_pass_is_refused() -> None:
    """The batches that were drawn early are of the state before."""

    def run(look_ahead: str) -> list[int]:
        seen: list[int] = []
        reader: Any = Reader(Slow(), look_ahead=look_ahead)
        reader.load_state_dict({"turn": 1, "place": 0})
        for batch in reader:
            seen.append(batch.item())
            reader.on_forward()
            reader.look_ahead()
            if seen == [101, 102, 103, 104]:
                reader.load_state_dict({"turn": 1, "place": 1})
        reader.load_state_dict({"turn": 2, "place": 0})  # between passes nothing was drawn early
        return seen

    assert run("0")[:6] == [101, 102, 103, 104, 102, 103]
    with pytest.raises(RuntimeError, match=rf"state of the reader \(Slow\) cannot be loaded .*{ASKS_FOR_IT}"):
        run("1")


def test_nothing_is_drawn_early_in_a_pipeline_or_on_another_thread() -> None:
    reader = Reader([1] * 9, look_ahead="1")
    scope: dict[str, Any] = {"__name__": PIPELINES + ".train_pipelines"}
    exec("def draw(stream):\n    return next(stream)", scope)
    stream = iter(reader)
    for _ in range(6):
        scope["draw"](stream)
        reader.on_forward()
        assert reader.look_ahead() == []


def test_readers_that_tell_nobody() -> None:
    unseen = {kind for kind, make in (READERS | MADE).items() if draws_unseen(make())}
    assert unseen == {"workers"}
    assert not draws_unseen(DataLoader(Long(), num_workers=1, sampler=loader(shuffle=True)))  # nobody knows it
    assert draws_unseen(DataLoader(Long(), num_workers=1, sampler=[3, 1]))
    assert draws_unseen(DataLoader(Long(), num_workers=1, batch_sampler=[[3], [1]]))
    own = torch.Generator()
    assert draws_unseen(DataLoader(Long(), num_workers=1, shuffle=True, generator=own))
    again = RandomSampler(Long(), replacement=True, generator=own)
    assert not draws_unseen(DataLoader(Long(), num_workers=1, sampler=again))
