"""Wraps the reader given to `attach`: knows which batch comes next, and gets back there after a restart.

Terms. A *pass* is one iteration over the reader; `epoch` counts them from 0. A *draw* is one call for a batch. A
*position* is where a draw begins: the epoch, how many batches of the pass came before, and the random states.

A pipeline draws batches ahead of those it trains on. A snapshot then is of the first batch that was not trained on, and
keeps the random states with which that one and those after it were drawn: they are drawn again with the same.

How a position is brought about again depends on the reader:

    state   it has state_dict and load_state_dict: they are used
    pass    a sequence, or a DataLoader whose passes depend on nothing but the random states they begin with: that pass
            is begun again, and as many batches drawn (or only their indices, where no worker has to make them)
    all     anything else: every pass is drawn again, from the first

Drawing again gives the same only if a reader draws from the global generators when a pass begins, and not in the middle
of one: that is refused where it happens. And since nobody can know all that a reader does, every snapshot keeps
checksums of the batches that come next, and of those of the pass that are drawn again: other batches after a restart
are an error, never another run.

The next batches may be drawn before the loop asks for them (`look_ahead`): *early draws*. Nobody sees them. What one
has moved is put back until the loop makes that draw, and all that is kept and checked is as of then.

Does not decide when a snapshot is taken, and does not send it (`attachment.py` does); does not inspector the loop that
draws (`loop.py` does).
"""

from __future__ import annotations

import logging
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from torch_ecrec.compat.torch import next_index_of, set_next_index
from torch_ecrec.resume.altered import Watched, is_held, may_give_again, watched
from torch_ecrec.resume.checksum import checksum_of, checksum_of_sums
from torch_ecrec.resume.loop import Given, LoopInspector
from torch_ecrec.resume.random_states import (
    Generators,
    moved,
    random_states,
    random_states_of_host,
    same_state,
    set_random_states,
)
from torch_ecrec.resume.values import decode, encode
from torch_ecrec.runtime.checks import take_int
from torch_ecrec.spec.settings import LOOK_AHEAD_AUTO

log = logging.getLogger(__name__)

STEADY_TURNS = 2  # of one draw and one training forward, before a batch is drawn early
DRAWS_OF_A_TURN = 2  # early ones, at most: no turn waits for many batches
SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    WeightedRandomSampler,
    SubsetRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
WITHOUT = "set TORCH_ECREC_LOOK_AHEAD=0, and no batch is drawn before the loop asks for it"

Number = tuple[int, int]
"""Which batch: of which pass, and how many of it came before."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is kept, as in `torch.distributed.checkpoint.stateful`: a reader, a scheduler and so on."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def kind_of(reader: object) -> str:
    """Returns how a reader's position is restored: "state", "pass" or "all"; see the module."""
    if isinstance(reader, Stateful):
        return "state"
    if isinstance(reader, DataLoader):
        in_this_process = reader.num_workers == 0
        keeps_workers = reader.num_workers > 0 and reader.persistent_workers
        iterable = isinstance(reader.dataset, IterableDataset)
        return "all" if keeps_workers or (iterable and in_this_process) else "pass"
    return "pass" if isinstance(reader, Sequence) else "all"


def has_indices(reader: object) -> bool:
    """Returns whether batches can be skipped by drawing indices only: this process alone makes them, one by one."""
    return (
        isinstance(reader, DataLoader)
        and not isinstance(reader, Stateful)
        and reader.num_workers == 0
        and not isinstance(reader.dataset, IterableDataset)
    )


def draws_unseen(reader: object) -> bool:
    """Returns whether nobody can tell if a batch was drawn early: other processes make it, ahead of the loop anyway.

    Persistent workers could: their state goes on into the next pass, if the loop leaves one. So could a sampler that
    looks at what the loop has done, or draws in the middle of a pass from a generator that the loop may have, too. A
    `RandomSampler` draws from its own once more as it ends, for nothing: a loop that draws from that, too, is refused.
    """
    if type(reader) is not DataLoader or reader.num_workers == 0 or reader.persistent_workers:
        return False
    if isinstance(reader.dataset, IterableDataset):
        return True
    batches: Any = reader.batch_sampler
    sampler = batches.sampler if type(batches) is BatchSampler else reader.sampler if batches is None else batches
    if type(sampler) is RandomSampler and sampler.generator is not None:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in SAMPLERS


@dataclass
class Position:
    """A position in a reader at which a draw begins.

    Attributes:
        epoch, drawn: the number of the pass, and of the batches drawn in it before.
        began: random states with which the pass began; None for a reader that is put back by its state.
        state: the encoded state of a reader that has one; None: not asked for yet.
        random: random states with which the draw begins.
        sum: the checksum of the pass so far, see `EpochIterator.sum`.
    """

    epoch: int
    drawn: int
    began: dict[str, Any] | None
    state: bytes | None
    random: dict[str, Any]
    sum: int


@dataclass
class _Draw:
    """A batch that was drawn, and where it was drawn.

    Attributes:
        watched: None where it may be altered.
    """

    position: Position
    checksum: int
    watched: Watched | None

    def check_unaltered(self, reader: object) -> None:
        """Called when the batch's turn is over. Raises RuntimeError if the batch was altered."""
        if self.watched is not None:
            self.watched.check(f"batch {self.position.drawn} of pass {self.position.epoch}", reader)


@dataclass
class _Early:
    """A draw that was made before the loop asked for it.

    Attributes:
        batch, error: what it gave, or raised.
        watched: the batch as it was then; None where it may be altered.
        state: of the reader before, as of `Position`.
        sum: the checksum of the pass after it.
        before, after: states of those generators that it has moved.
    """

    batch: Any
    error: Exception | None
    watched: Watched | None
    state: bytes | None
    sum: int
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    def give(self) -> Any:
        """Returns the batch, which is not held here any more; or raises what the draw has raised."""
        if self.error is not None:
            raise self.error
        batch, self.batch = self.batch, None
        return batch


class EpochIterator(Iterator[Any]):
    """One pass over a reader. It asks the reader for an iterator when its first batch is asked for."""

    def __init__(self, owner: Reader) -> None:
        self._owner = owner
        self.batches: Iterator[Any] | None = None  # None: it has not begun
        self.epoch = 0
        self.drawn = 0
        self.whole = False  # drawn to its end
        self.began: dict[str, Any] | None = None
        self.depends = False  # on the global generators, as they were when it began
        self.sum = 0  # of the checksums of all its batches; or of their indices, where only those are drawn again
        self.failed: BaseException | None = None

    def __next__(self) -> Any:
        return self._owner.draw(self)

    def add(self, checksum: int) -> None:
        """Adds a drawn batch's checksum to that of the pass."""
        self.sum = zlib.crc32(checksum.to_bytes(4, "little"), self.sum)

    def begin(self, reader: Iterable[Any]) -> None:
        """Asks the reader for its iterator."""
        self.batches = iter(reader)
        if has_indices(reader):
            self._watch_indices(reader)

    def _watch_indices(self, reader: Iterable[Any]) -> None:
        """Adds the indices that a DataLoader gets from its sampler to the checksum, and looks at how it draws them.

        After a restart they are drawn again, one behind the other, from the states with which the pass began. That
        gives the same unless somebody else has used the sampler's generator in between.
        """
        next_index = next_index_of(self.batches)
        left: dict[str, Any] | None = None  # the states that the draw before has left

        def watched() -> Any:
            nonlocal left
            before = random_states_of_host()
            index = next_index()
            after = random_states_of_host()
            if left is not None and (used := moved(before, after)):
                shared = [name for name in moved(left, before) if name in used]
                if shared:
                    raise RuntimeError(
                        f"the sampler of the reader ({type(reader).__name__}) draws from {' and '.join(shared)} in the"
                        " middle of a pass, as does something else in between, and can therefore not be brought back"
                        " after a restart by drawing again. Give the sampler a generator of its own, as an attribute"
                        " (a `torch.Generator` or `random.Random`), or the reader state_dict and load_state_dict"
                    )
            left = after
            self.add(zlib.crc32(repr(index).encode()))
            return index

        set_next_index(self.batches, watched)


class Reader(Iterator[Any]):
    """Iterates a user's reader, pass after pass, and can go on there after a restart. `attach` returns it.

        for epoch in batches.epochs(3):
            for batch in batches: ...

    Has the attributes of the reader, too (`batches.sampler.set_epoch(1)`).

    Args:
        reader: an iterable.
        on_draw: called before each draw; what it returns, if anything, is called once there is a batch, with its
            checksum (None: it was drawn ahead before a restart, and has one already).
        inspector: of the loop that draws.
        look_ahead: of the settings.

    Attributes:
        on_batch: called with each batch that the loop gets, unless it is None.
    """

    def __init__(
        self,
        reader: Iterable[Any],
        on_draw: Callable[[], Callable[[int | None], None] | None] = lambda: None,
        inspector: LoopInspector | None = None,
        look_ahead: str = "0",
    ) -> None:
        self._reader, self._on_draw = reader, on_draw
        self._inspector = inspector or LoopInspector()
        self._kind, self._has_indices = kind_of(reader), has_indices(reader)
        self._generators = Generators.of(reader)
        self._pass: EpochIterator | None = None  # of `next`
        self._current: EpochIterator | None = None  # that has begun last
        self._passes = 0  # that have begun
        # of kind "all": drawn, whole, sum, began
        self._history: list[tuple[int, bool, int, dict[str, Any] | None]] = []
        self._now: Position | None = None  # position of the draw that is being made
        self._ahead: deque[_Draw] = deque()  # drawn, and not trained on yet
        self._in_turn: list[_Draw] = []  # trained on, since the last draw
        self._trained_on: int | None = None  # checksum of the batch that a pipeline trained on last
        self._given: Given | None = None  # what the forward was called with that trained on it
        self._watches = may_give_again(reader)
        self.on_batch: Callable[[Any], None] | None = None
        self._most = LOOK_AHEAD_AUTO if look_ahead == "auto" else int(look_ahead)
        self._peeks = self._most > 0 and type(reader) in (list, tuple)  # nothing has to be drawn to see what comes
        self._draws_early = draws_unseen(reader) if look_ahead == "auto" else self._most > 0
        self._early: deque[_Early] = deque()
        self._forwards, self._steady = 0, 0  # since the last draw; turns in a row that had one
        # after a restart
        self._target: Position | None = None  # where the first draw begins
        self._again: deque[tuple[dict[str, Any], int]] = deque()  # draws to be made again: random states, checksum
        self._then: dict[str, Any] | None = None  # random states after those
        self._then_at_forward = False  # they were taken when a forward began, after a pass was drawn to its end
        self._expected: int | None = None  # checksum of the batch after those

    # the loop's side ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Returns an iterator over the batches of one pass."""
        return EpochIterator(self)

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = EpochIterator(self)
        try:
            return self.draw(self._pass)
        except StopIteration:
            self._pass = None
            raise

    def __len__(self) -> int:
        return len(self._reader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "state_dict" and self._early and (state := self._early[0].state) is not None:
            return lambda: decode(state)
        if name == "load_state_dict" and self._early:
            return self._refuse_to_load
        return getattr(self._reader, name)

    def _refuse_to_load(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"the state of the reader ({type(self._reader).__name__}) cannot be loaded in the middle of a pass of which"
            f" the next batch was drawn already: {WITHOUT}"
        )

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Iterates a pass with the number of each batch. Unlike `enumerate`, it counts batches before a restart."""
        start = take_int("start", start, -sys.maxsize)
        batches = EpochIterator(self)
        while True:
            try:
                batch = self.draw(batches)
            except StopIteration:
                return
            yield start + batches.drawn - 1, batch

    @property
    def epoch(self) -> int:
        """The pass that is under way or comes next, from 0. After a restart it is the one in which training goes on."""
        self._inspector.on_epoch_asked()
        return self._target.epoch if self._target is not None else max(self._passes - 1, 0)

    @property
    def drawn(self) -> int:
        """The number of batches drawn in the present pass, those before a restart included."""
        self._inspector.on_count_asked()
        if self._target is not None:
            return self._target.drawn
        return 0 if self._current is None or self._current.whole else self._current.drawn

    def on_steps_done(self) -> None:
        """Called when the loop reads the number of steps done. Before its first draw, its passes may follow from it."""
        self._inspector.on_count_asked()
        self._inspector.on_epoch_asked()

    @property
    def pipelined(self) -> bool:
        """Whether one of TorchRec's pipelines draws batches, ahead of those that it trains on."""
        return self._inspector.pipelined

    @property
    def looks_ahead(self) -> bool:
        """Whether `look_ahead` may give something."""
        return self._peeks or self._draws_early

    @property
    def within_step(self) -> bool:
        """Whether a drawing pipeline has yet to step on the last batch it trained on: nothing else is left to it."""
        current = self._current
        return self.pipelined and not self._ahead and current is not None and current.drawn > 0 and not current.whole

    def epochs(self, number: int) -> range:
        """Returns those of `number` passes that are left, beginning with the one in which training goes on."""
        return range(self.epoch, take_int("number", number, 0))

    # draws ----------------------------------------------------------------------------------------

    def draw(self, current: EpochIterator) -> Any:
        """Returns the next batch of a pass.

        Raises:
            StopIteration: there is none.
            RuntimeError: the loop, or the reader, is one that could not be brought back after a restart; or it gives
                other batches after a restart than before.
        """
        self._inspector.on_draw(len(self._ahead) if self.pipelined else 0)
        if current.failed is not None:
            raise RuntimeError(
                "a draw of this pass has failed before, and nobody knows how far the reader got: after a restart it"
                " would go on elsewhere. Let the reader leave out what it cannot read"
            ) from current.failed
        if current.batches is not None and current is not self._current:
            raise RuntimeError("this pass was left: another one over what `attach` returned has begun since")
        if not self.pipelined:
            self._in_turn += self._ahead  # trained on, or left out for good
            self._ahead.clear()
        while self._in_turn:
            self._in_turn.pop(0).check_unaltered(self._reader)
        if current.batches is None:
            self._begin(current)
        self._steady, self._forwards = self._steady + 1 if self._forwards == 1 else 0, 0
        if not self._again and self._then is not None:
            self._generators.set_(self._then)
            self._then = self._then if self._then_at_forward else None
        outside = self._generators.states()
        early = self._early[0] if self._early else None
        state = self._state() if self.pipelined and early is None else None  # else `saved` asks for it
        state = state if early is None else early.state
        self._now = Position(current.epoch, current.drawn, current.began, state, outside, current.sum)
        on_batch = self._on_draw()
        expected: int | None
        if again := bool(self._again):
            begin, expected = self._again[0]
            self._generators.set_(begin)
            batch = self._next(current, begin, None)
            set_random_states(outside)  # the reader's own generators go on
            self._again.popleft()
        else:
            begin, expected, self._expected = outside, self._expected, None
            if early is not None:
                self._early.popleft()
                self._catch_up(current, early, outside)
            batch = self._next(current, begin, early)
        seen = None
        if early is not None:
            seen = early.watched
        elif self._watches:
            held = is_held(batch)
            seen = watched(batch, held)
        checksum = checksum_of(batch) if seen is None else checksum_of_sums(seen.sums)
        if not self._has_indices:
            current.add(checksum)
        if expected is not None and checksum != expected:
            raise _other(self._reader, f"batch {current.drawn - 1} of pass {current.epoch} is another one")
        self._ahead.append(_Draw(Position(**{**vars(self._now), "random": begin}), checksum, seen))
        if on_batch is not None:
            on_batch(None if again else checksum)
        if self.on_batch is not None:
            self.on_batch(batch)
        return batch

    def look_ahead(self, far: bool = False) -> list[tuple[Number, Any]]:
        """Returns the batches that a plain loop will draw next; it does not notice. Called as a training forward ends.

        Args:
            far: more than one batch is of use: servers read from disks, or repair, what they are told of.

        Returns:
            Batches in the order in which they will be drawn, each with a number that stays; none if they are not known,
            or must not be drawn yet.

        Raises:
            RuntimeError: the reader has given memory again that the loop still has.
        """
        current, most = self._current, self._most if far else min(1, self._most)
        if current is None or current.batches is None or current.whole or current.failed is not None:
            return []
        steady = self._forwards == 1 and self._steady >= STEADY_TURNS
        if not steady or self.pipelined or not self._inspector.on_its_thread:
            return []
        if self._again or self._then is not None or self._target is not None:
            return []
        batches: list[Any]
        if self._peeks:
            all_of_them: Any = self._reader
            batches = list(all_of_them[current.drawn : current.drawn + most])
        else:
            for _ in range(DRAWS_OF_A_TURN):
                if not self._draws_early or len(self._early) >= most or not self._draw_one_early(current):
                    break
            batches = [early.batch for early in self._early if early.error is None]
        return [((current.epoch, current.drawn + i), batch) for i, batch in enumerate(batches)]

    def _draw_one_early(self, current: EpochIterator) -> bool:
        """Makes one more early draw, unless there is nothing to draw, or nobody could know then what comes."""
        over = bool(self._early) and self._early[-1].error is not None
        if over or current.drawn + len(self._early) == _length(self._reader) or self._altered() is not None:
            return False
        try:
            state = self._state()
        except Exception:  # the draw says so, where it belongs
            return False
        self._early.append(self._draw_early(current, state))
        if (altered := self._altered()) is not None:
            current.failed = RuntimeError(
                f"the reader ({type(self._reader).__name__}) gives a batch in the memory of the one before"
                f" (`batch{altered}`), which the loop still trains on: {WITHOUT}"
            )
            raise current.failed
        return True

    def _altered(self) -> str | None:
        """Returns the path of a part of the batch under way that was altered; None if none is known to be."""
        paths = (draw.watched.altered() for draw in self._ahead if draw.watched is not None)
        return next((path for path in paths if path is not None), None)

    def _draw_early(self, current: EpochIterator, state: bytes | None) -> _Early:
        """Draws, and puts everything back that this has moved beside the reader's iterator.

        It goes on where the early draw before it has ended.
        """
        assert current.batches is not None
        total, outside, failed = current.sum, self._generators.states(), None
        batch, seen, before = None, None, outside
        if earlier := {name: value for early in self._early for name, value in early.after.items()}:
            before = {**outside, **earlier}
            self._generators.set_(before)
        if self._early:
            current.sum = self._early[-1].sum
        try:
            batch = next(current.batches)
        except Exception as error:
            failed = error
        except BaseException as error:  # the user ends the process, say
            current.failed = error
            raise
        else:
            held = is_held(batch)
            seen = watched(batch, held) if self._watches else None
        after = self._generators.states()
        names = [name for name in after if name in before and not same_state(before[name], after[name])]
        if names or earlier:
            self._generators.set_(outside)
        current.sum, total = total, current.sum
        return _Early(
            batch, failed, seen, state, total, {name: before[name] for name in names}, {n: after[n] for n in names}
        )

    def _catch_up(self, current: EpochIterator, early: _Early, now: Mapping[str, Any]) -> None:
        """Moves what an early draw has moved.

        Raises:
            RuntimeError: the loop has moved it, too, in between; or the reader has used the batch's memory again.
        """
        for name, state in early.before.items():
            if not same_state(state, now[name]):
                current.failed = RuntimeError(
                    f"the loop and the reader ({type(self._reader).__name__}) draw from the same random generator"
                    f" ({name}), and the reader's batch was drawn before the loop has drawn: {WITHOUT}"
                )
                raise current.failed
        if early.watched is not None and (altered := early.watched.altered()) is not None:
            current.failed = RuntimeError(
                f"the reader ({type(self._reader).__name__}) has written into a batch (`batch{altered}`) that was drawn"
                f" early, before the loop has got it: {WITHOUT}"
            )
            raise current.failed
        if early.after:
            self._generators.set_({**now, **early.after})
        if self._has_indices:
            current.sum = early.sum

    def _state(self) -> bytes | None:
        """Returns a copy of the state of a reader that has one: what it returns may change later."""
        return encode(self._reader.state_dict(), "reader") if isinstance(self._reader, Stateful) else None

    def _begin(self, current: EpochIterator) -> None:
        """Begins a pass, or the one in which training goes on."""
        target, self._target = self._target, None
        if self._current is not None and target is None:
            left = self._current
            self._inspector.on_pass_over(left.epoch, left.drawn, left.whole, _length(self._reader))
            if self._early and self._kind != "pass":
                raise RuntimeError(
                    f"pass {left.epoch} was left after {left.drawn} batches, and the reader"
                    f" ({type(self._reader).__name__}) has given the next one already, which cannot be put back:"
                    f" {WITHOUT}"
                )
            self._early.clear()  # another pass is not told by them
            if self._kind == "all":
                self._history.append((left.drawn, left.whole, left.sum, left.began if left.depends else None))
        if target is not None:
            self._go_to(current, target)
        else:
            began = self._generators.states()
            current.epoch, current.began = self._passes, None if self._kind == "state" else began
            current.begin(self._reader)
            current.depends = bool(moved(began, random_states()))
        self._current, self._passes = current, current.epoch + 1
        self._inspector.on_pass_begun()

    def _next(self, current: EpochIterator, begin: Mapping[str, Any], early: _Early | None) -> Any:
        """Draws a batch, or takes the early one.

        Raises RuntimeError if the draw used the global generators later than at the first batch.

        Such a batch could not be drawn again after a restart.
        """
        assert current.batches is not None
        try:
            batch = next(current.batches) if early is None else early.give()
        except StopIteration:
            self._now, current.whole = None, True
            self._forwards = 1  # a turn is not over with its pass
            raise
        except BaseException as error:
            current.failed = error
            raise
        current.drawn += 1
        if self._kind == "state" or self._has_indices:
            return batch
        names = moved(begin, random_states())
        current.depends |= bool(names)
        if names and current.drawn > 1:
            raise RuntimeError(
                f"the reader ({type(self._reader).__name__}) draws from {' and '.join(names)} in the middle of a pass,"
                " and can therefore not be brought back after a restart by drawing again. Give it generators of its"
                " own, or state_dict and load_state_dict, or use a DataLoader with num_workers > 0"
            )
        return batch

    def on_batch_given(self, batch: object) -> None:
        """Called before `on_forward`, and before anything is kept as of then, with what the forward is called with.

        Raises:
            RuntimeError: a pipeline trains on the batch before once more, as its step has failed.
        """
        if not self.pipelined:
            return
        again = self._given is not None and self._given.is_again(batch)
        repeats = bool(self._ahead) and self._ahead[0].checksum == self._trained_on
        if not self._ahead or (again and not repeats):
            raise RuntimeError(
                "a pipeline trains on a batch again, whose step has failed perhaps, or on one that was not drawn from"
                " what `attach` returned: which batches it will train on is not known, and a restart would go on"
                " elsewhere. Let what is raised in a step end the script, which goes on with that step when it is"
                " started again; or have the reader leave out what cannot be trained on"
            )
        self._given = Given(batch)

    def on_forward(self) -> None:
        """Called when a training forward begins on a batch drawn here. Raises as `LoopInspector.on_forward` does."""
        self._inspector.on_forward()
        self._forwards += 1
        if self._then is not None:
            # of the reader's own generators, too, unless it will be drawn from with those of before
            set_random_states(self._then) if self._again else self._generators.set_(self._then)
            self._then = None
        if self.pipelined:
            self._in_turn.append(self._ahead.popleft())
            self._trained_on = self._in_turn[-1].checksum

    def check_end(self) -> None:
        """Called when training is over. Warns of a pass that the loop may have left too late."""
        if self._current is not None:
            self._inspector.on_end(self._current.drawn, self._current.whole)

    # restarts -------------------------------------------------------------------------------------

    def saved(self, at_forward: bool = False) -> dict[str, Any]:
        """Returns the position at which training would go on. Called in `on_draw`, or as a pipeline's forward begins.

        Raises:
            TypeError: the reader's state has something that cannot be kept.
        """
        position = self._ahead[0].position if self._ahead else self._now
        assert position is not None, "nothing was drawn"
        state = position.state
        if self._kind == "state" and state is None:
            state = self._state()
        return {
            "kind": self._kind,
            "size": len(self._reader) if isinstance(self._reader, Sequence) else -1,
            "workers": _workers_of(self._reader),
            "epoch": position.epoch,
            "drawn": position.drawn,
            "began": position.began,
            "sum": position.sum,
            "state": state,
            "history": self._history[: position.epoch],
            "again": [(draw.position.random, draw.checksum) for draw in self._ahead] + list(self._again),
            "then": self._generators.states() if at_forward or self._now is None else self._now.random,
            "at_forward": at_forward,
        }

    def load(self, saved: Mapping[str, Any], checksum: int | None) -> None:
        """Makes the next draw go on at a saved position.

        Args:
            saved: as `saved` gave it.
            checksum: that of the batch after those that were drawn ahead, if it is known.

        Raises:
            ValueError: it was another kind of reader, a sequence of another length, or one with other workers.
        """
        _check_same(self._reader, saved)
        self._target = Position(
            saved["epoch"], saved["drawn"], saved["began"], saved["state"], saved["then"], saved["sum"]
        )
        self._history = list(saved["history"])
        self._again = deque(saved["again"])
        self._then, self._then_at_forward = saved["then"], saved["at_forward"]
        self._expected = checksum
        self._inspector.on_restored()

    def _go_to(self, current: EpochIterator, target: Position) -> None:
        """Begins the pass in which training goes on, and skips the batches before its position."""
        current.epoch, current.drawn, current.began, current.depends = target.epoch, target.drawn, target.began, True
        if isinstance(self._reader, Stateful):
            assert target.state is not None
            self._reader.load_state_dict(decode(target.state))
            current.batches, current.sum = iter(self._reader), target.sum
            return
        if target.drawn and not self._has_indices:
            log.info("the reader has no state: draws %d batches again", target.drawn)
        for drawn, whole, total, began in self._history:
            if began is not None:
                self._generators.set_(began)
            _draw_again(self._reader, EpochIterator(self), drawn, whole, total)
        assert target.began is not None
        self._generators.set_(target.began)
        current.begin(self._reader)
        _skip(self._reader, current, target.drawn, target.sum)


def _workers_of(reader: object) -> int:
    """Returns how many processes make a reader's batches, where it says that; -1: it does not."""
    workers = getattr(reader, "num_workers", None)
    return workers if isinstance(workers, int) else -1


def _check_workers(reader: object, then: int) -> None:
    """Raises ValueError if another number of processes cannot go on from where `then` have been."""
    workers = _workers_of(reader)
    if workers == then or -1 in (workers, then):
        return
    name = type(reader).__name__
    if isinstance(reader, Stateful) or 0 in (workers, then):
        raise ValueError(
            f"the reader ({name}) had num_workers={then} when the snapshot was taken, and has {workers}: what"
            f" one has drawn the other cannot go on from. Give it num_workers={then} again"
        )
    log.warning(
        "the reader (%s) had num_workers=%d when the snapshot was taken, and has %d: what workers draw at random, or"
        " split among them, is other from here on, and so is training. If they do neither, nothing changes",
        *(name, then, workers),
    )


def _check_same(reader: object, saved: Mapping[str, Any]) -> None:
    _check_workers(reader, saved.get("workers", -1))  # an earlier build has not kept it
    if saved["kind"] != kind_of(reader):
        raise ValueError(f"the reader ({type(reader).__name__}) is of another kind than when the snapshot was taken")
    if isinstance(reader, Sequence) and saved["size"] != len(reader):
        raise ValueError(
            f"the reader had {saved['size']} batches when the snapshot was taken, and has {len(reader)}: a"
            " sequence that the loop changes is not brought back. Attach a reader with state_dict and"
            " load_state_dict"
        )


def _length(reader: Any) -> int:
    """Returns the number of batches in a pass; -1 if the reader does not tell."""
    try:
        return len(reader)
    except (TypeError, NotImplementedError):
        return -1


def _other(reader: object, what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} than before the restart: the reader ({type(reader).__name__}) has another batch size, data or seed"
        " now, or depends on something that was not brought back. Give it what it had, or state_dict and"
        " load_state_dict that cover it, or random generators that are seeded from its position"
    )


def _draw_again(reader: Iterable[Any], before: EpochIterator, number: int, whole: bool, total: int) -> None:
    """Draws the `number` batches of an earlier pass again; `whole`: it had no more."""
    before.begin(reader)
    _skip(reader, before, number, total)
    assert before.batches is not None
    if whole and next(before.batches, before) is not before:
        raise RuntimeError(f"a pass of the reader has more than the {number} batches that it had before")


def _skip(reader: object, current: EpochIterator, number: int, total: int) -> None:
    """Draws `number` batches of a pass that were trained on before. Their checksum must be `total` again."""
    batches: Any = current.batches
    indices = has_indices(reader)
    for drawn in range(number):
        try:
            if indices:
                next_index_of(batches)()
            else:
                current.add(checksum_of(next(batches)))
        except StopIteration:
            raise RuntimeError(
                f"the reader ended after {drawn} of the {number} batches that were drawn before"
            ) from None
    if current.sum != total:
        raise _other(reader, f"one of the {number} batches that were drawn before in a pass is another one")
