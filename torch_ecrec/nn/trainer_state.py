"""What a trainer has beside the model, kept with its part of every dense snapshot: reader, schedulers, random states.

Terms. *Forwards*: how many batches the model has trained on. Pipelines draw batches ahead, so a reader's state is kept
after every draw, and the one that is saved is that after as many draws as there were forwards: the batch that comes
next is drawn again.

Random states are taken when a training forward begins and put back when the first one after a restart does: what a
reader draws from the generators as it starts does not matter then.

Does not send anything, and does not hold the dense model (`dense.py` does).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer


@runtime_checkable
class Stateful(Protocol):
    """As in `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch, and its CUDA devices."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def unwrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Some optimizers, and those in TorchRec's wrappers, the innermost last."""
    found: list[Optimizer] = []
    for optimizer in optimizers:
        found.append(optimizer)
        if isinstance(optimizer, CombinedOptimizer):
            found += unwrapped(inner for _, inner in optimizer.optimizers)
        elif isinstance(inner := getattr(optimizer, "_optimizer", None), Optimizer):
            found += unwrapped([inner])
    return found


class _Pass(Iterator[Any]):
    """One pass over a reader."""

    def __init__(self, owner: TrackedReader, batches: Iterator[Any]) -> None:
        self._owner, self._batches = owner, batches

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._owner.on_drawn()
        return batch


class TrackedReader(Iterator[Any]):
    """Iterates a reader and remembers its state after every draw. After `load` the first pass is the rest of one.

    Args:
        reader: an iterable. If it is `Stateful` it is put back by its state, else by drawing as often again.
    """

    def __init__(self, reader: Iterable[Any]) -> None:
        self._reader = reader
        self._begun: Iterator[Any] | None = None  # a pass that `load` has brought to its place
        self._pass: Iterator[Any] | None = None  # of `next`
        self._drawn = 0
        self._states = {0: self._state()}  # draws -> pickled state; from the last that was asked for on

    def __iter__(self) -> Iterator[Any]:
        """Begins the reader's next pass."""
        begun, self._begun = self._begun, None
        return _Pass(self, iter(self._reader) if begun is None else begun)

    def __next__(self) -> Any:
        if self._pass is None:
            self._pass = iter(self)
        try:
            return next(self._pass)
        except StopIteration:
            self._pass = None
            raise

    def __len__(self) -> int:
        return len(self._reader)  # type: ignore[arg-type]

    def _state(self) -> bytes | None:
        return pickle.dumps(self._reader.state_dict()) if isinstance(self._reader, Stateful) else None

    def on_drawn(self) -> None:
        self._drawn += 1
        self._states[self._drawn] = self._state()

    def forget(self, draws: int) -> None:
        """Nobody will ask for the state after fewer draws."""
        for n in [n for n in self._states if n < draws]:
            del self._states[n]

    def state_after(self, draws: int) -> dict[str, Any]:
        """The state after so many draws; forgets those of fewer.

        Raises:
            RuntimeError: there were not so many: the reader is iterated past this object.
        """
        if draws not in self._states:
            raise RuntimeError(
                f"the model has trained on {draws} batches, but {self._drawn} were drawn from what `attach` returned:"
                " iterate that, not the reader itself"
            )
        self.forget(draws)
        return {"draws": draws, "state": self._states[draws]}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Goes on where the state was taken.

        Raises:
            RuntimeError: a reader without a state has fewer batches than were drawn before.
        """
        state, self._drawn = saved["state"], saved["draws"]
        if isinstance(self._reader, Stateful) and state is not None:
            self._reader.load_state_dict(pickle.loads(state))
        else:
            self._begun = self._skipped(self._drawn)
        self._states = {self._drawn: state}

    def _skipped(self, draws: int) -> Iterator[Any]:
        batches, drawn, begun = iter(self._reader), 0, 0  # begun: draws of this pass
        while drawn < draws:
            try:
                next(batches)
            except StopIteration:
                if not begun:
                    raise RuntimeError(f"the reader ended before the {draws} batches that were drawn before") from None
                batches, begun = iter(self._reader), 0
            else:
                drawn, begun = drawn + 1, begun + 1
        return batches


class TrainerState:
    """Everything of one trainer that a restart must bring back beside the dense model.

    Args:
        optimizers: TorchRec's or torch's; hyperparameters of fused ones, and what wrappers count, are kept here.
        reader: where batches come from, or None.
        stateful: whatever else, by name.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], reader: Iterable[Any] | None, stateful: Mapping[str, Stateful]
    ) -> None:
        for name, thing in stateful.items():
            if not isinstance(thing, Stateful):
                raise TypeError(f"`{name}` must have state_dict and load_state_dict, got {type(thing).__name__}")
        self._optimizers = unwrapped(optimizers)
        self.reader = None if reader is None else TrackedReader(reader)
        self._stateful = dict(stateful)
        self.random: dict[str, Any] | None = None  # to be put back when the first forward begins

    @property
    def dense_optimizers(self) -> list[Optimizer]:
        """Those that torch runs."""
        return [o for o in self._optimizers if not isinstance(o, KeyedOptimizer)]

    @property
    def _fused(self) -> list[Optimizer]:
        return [o for o in self._optimizers if isinstance(o, FusedOptimizer)]

    def _counters(self) -> dict[str, tuple[Optimizer, Any]]:
        """Parameters of wrappers' own, under which they count (warm-up does): name -> (whose, parameter)."""
        found: dict[int, tuple[str, Optimizer, Any]] = {}
        for optimizer in self._optimizers:
            if isinstance(optimizer, KeyedOptimizer) and not isinstance(optimizer, CombinedOptimizer):
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                for name, parameter in optimizer.params.items():
                    if id(parameter) not in own:
                        found.setdefault(id(parameter), (name, optimizer, parameter))
        return {f"{i}/{name}": (whose, p) for i, (name, whose, p) in enumerate(found.values())}

    def pack(self, forwards: int, states: Mapping[str, Any]) -> bytes:
        """As it is now.

        Args:
            forwards: how many batches the model has trained on.
            states: random states when the next forward begins.
        """
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self._fused
        ]
        return pickle.dumps(
            {
                "forwards": forwards,
                "random": dict(states),
                "groups": groups,
                "counters": {
                    name: dict(whose.state[parameter])
                    for name, (whose, parameter) in self._counters().items()
                    if parameter in whose.state
                },
                "reader": None if self.reader is None else self.reader.state_after(forwards),
                "stateful": {name: thing.state_dict() for name, thing in self._stateful.items()},
            }
        )

    def check(self, packed: bytes) -> None:
        """Raises ValueError if other things are attached now than when that was packed."""
        self._unpack(packed)

    def _unpack(self, packed: bytes) -> dict[str, Any]:
        saved: dict[str, Any] = pickle.loads(packed)
        names = sorted(saved["stateful"].keys() ^ self._stateful.keys())
        if (saved["reader"] is None) != (self.reader is None):
            names.append("reader")
        if names:
            raise ValueError(f"attached now but not when the snapshot was taken, or the other way: {', '.join(names)}")
        if len(saved["groups"]) != len(self._fused) or not saved["counters"].keys() <= self._counters().keys():
            raise ValueError("other optimizers are attached than when the snapshot was taken")
        return saved

    def load(self, packed: bytes) -> int:
        """Puts everything back; returns how many batches the model had trained on.

        Raises:
            ValueError: as `check`; nothing was changed.
        """
        saved = self._unpack(packed)
        for optimizer, groups in zip(self._fused, saved["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        counters = self._counters()
        for name, values in saved["counters"].items():
            whose, parameter = counters[name]
            whose.state[parameter] = values
        for optimizer in self._optimizers:
            if isinstance(optimizer, KeyedOptimizer):
                optimizer.post_load_state_dict()
        if self.reader is not None:
            self.reader.load(saved["reader"])
        for name, thing in self._stateful.items():
            thing.load_state_dict(saved["stateful"][name])
        self.random = saved["random"]
        return int(saved["forwards"])
