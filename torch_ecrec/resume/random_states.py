"""The random states from which training draws: the global generators, and a reader's own ones.

    states = Generators.of(loader).states()     # {"python": ..., "numpy": ..., "torch": ..., ...}
    Generators.of(loader).set_(states)

A reader's own are found by looking at it and into what it has, through attributes, lists and dicts: generators of
torch, NumPy and Python, and the epoch of a sampler that has `set_epoch`. Not seen are those that a function keeps in
its closure, and those that are made later.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH_MOST = 6
THINGS_MOST = 2_000  # that a reader has; a dataset may be a list of millions
OWN = "reader"
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def random_states_of_host() -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy and torch on a CPU."""
    return {"python": random.getstate(), "numpy": _numpy_state(np.random), "torch": torch.get_rng_state()}


def random_states() -> dict[str, Any]:
    """Returns the states of the generators of Python, NumPy, torch, and its CUDA devices."""
    states = random_states_of_host()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restores what `random_states` returned. Generators without a saved state keep theirs."""
    random.setstate(states["python"])
    _set_numpy_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Returns which of the CPU's global generators were used between two `random_states`."""
    names = []
    if before["python"] != after["python"]:
        names.append("Python's random")
    if not same_state(before["numpy"], after["numpy"]):
        names.append("NumPy")
    if not torch.equal(before["torch"], after["torch"]):
        names.append("torch")
    return names


def _numpy_state(of: Any) -> Any:
    """Returns the state of NumPy's global generator, or of a `RandomState`, whatever makes its bits."""
    return _copied(of.get_state(legacy=False))


def _set_numpy_state(state: Any) -> None:
    """Restores the state of NumPy's global generator, and what makes its bits, should that be another now."""
    numbers: Any = np.random  # whose types lack two of the functions
    made_by = state["bit_generator"] if isinstance(state, Mapping) else state[0]  # a tuple in older snapshots
    if made_by != type(numbers.get_bit_generator()).__name__:
        if not hasattr(numbers, made_by):
            raise RuntimeError(
                f"NumPy's global random numbers were made by {made_by} before the restart, which is none of NumPy's:"
                " call `numpy.random.set_bit_generator` before `attach` in each start of the script"
            )
        numbers.set_bit_generator(getattr(numbers, made_by)())
    numbers.set_state(state)


def same_state(a: Any, b: Any) -> bool:
    """Returns whether two states of one generator are the same."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_state(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and a and not isinstance(a[0], int):  # those of Python begin with a number
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)


class Generators:
    """The global random generators and a reader's own.

    Args:
        own: where each of the reader's lies, by path: an object with a state.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = dict(own)

    @staticmethod
    def of(reader: object) -> Generators:
        """Finds the generators of a reader, once: one that the reader makes later is not found."""
        found: dict[str, Any] = {}
        seen: set[int] = set()

        def look(thing: object, path: str, depth: int) -> None:
            if id(thing) in seen or len(seen) > THINGS_MOST or depth > DEPTH_MOST:
                return
            seen.add(id(thing))
            if isinstance(thing, GENERATORS):
                if not isinstance(thing, random.SystemRandom):
                    found[path] = thing
                return
            if isinstance(thing, (list, tuple)):
                for i, item in enumerate(thing[:THINGS_MOST]):
                    look(item, f"{path}[{i}]", depth + 1)
            elif isinstance(thing, dict):
                for key, item in itertools.islice(thing.items(), THINGS_MOST):
                    look(item, f"{path}[{key!r}]", depth + 1)
            elif hasattr(thing, "__dict__") and not isinstance(thing, (type, ModuleType, Tensor, nn.Module)):
                if callable(getattr(thing, "set_epoch", None)) and _is_whole(getattr(thing, "epoch", None)):
                    found[f"{path}.epoch"] = thing
                for name, item in vars(thing).items():
                    look(item, f"{path}.{name}", depth + 1)

        look(reader, OWN, 0)
        return Generators(found)

    def states(self) -> dict[str, Any]:
        """Returns the states of all generators, as values that nobody changes later."""
        return random_states() | {path: state_of(thing) for path, thing in self._own.items()}

    def set_(self, states: Mapping[str, Any]) -> None:
        """Restores states. A generator that did not exist when they were taken keeps its own."""
        set_random_states(states)
        for path, thing in self._own.items():
            if path in states:
                set_state_of(thing, states[path])


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer))


def state_of(thing: Any) -> Any:
    """Returns the state of a generator, or the epoch of a sampler."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.random.Generator):
        return _copied(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return _numpy_state(thing)
    if isinstance(thing, random.Random):
        return thing.getstate()
    return thing.epoch


def set_state_of(thing: Any, state: Any) -> None:
    """Restores a state that `state_of` has returned."""
    if isinstance(thing, torch.Generator):
        thing.set_state(state)
    elif isinstance(thing, np.random.Generator):
        thing.bit_generator.state = state
    elif isinstance(thing, np.random.RandomState):
        thing.set_state(state)
    elif isinstance(thing, random.Random):
        thing.setstate(state)
    elif thing.epoch != state:
        thing.set_epoch(state)


def _copied(state: Any) -> Any:
    """Returns a copy of a bit generator's state: nested mappings that hold arrays."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state
