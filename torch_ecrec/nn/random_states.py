"""The random states that training draws from: the global generators, and those that a reader has of its own.

    states = Generators.of(loader).states()     # {"python": ..., "numpy": ..., "torch": ..., ...}
    Generators.of(loader).set_(states)

A reader's own are found by looking at it, and at what it has under the names `LOOKED_INTO`: generators of torch, NumPy
and Python, and the epoch of a sampler that has `set_epoch`. Others, deeper inside, are not seen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

LOOKED_INTO = ("sampler", "batch_sampler", "dataset", "data_source")
OWN = "reader"
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def random_states() -> dict[str, Any]:
    """Of Python, NumPy, torch, and its CUDA devices."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Inverse of `random_states`; other keys are left alone."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Which of the global generators of the CPU were drawn from between two `random_states`."""
    names = []
    if before["python"] != after["python"]:
        names.append("Python's random")
    if not _same_numpy(before["numpy"], after["numpy"]):
        names.append("NumPy")
    if not torch.equal(before["torch"], after["torch"]):
        names.append("torch")
    return names


def _same_numpy(a: Any, b: Any) -> bool:
    return bool(a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2:] == b[2:])


class Generators:
    """The global generators and a reader's own.

    Args:
        own: where each of the reader's lies, by path: an object with a state.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = dict(own)

    @staticmethod
    def of(reader: object) -> Generators:
        """Those of a reader; looked for once: one that the reader makes later is not seen."""
        found: dict[str, Any] = {}
        seen: set[int] = set()

        def look(thing: object, path: str) -> None:
            if id(thing) in seen or not hasattr(thing, "__dict__"):
                return
            seen.add(id(thing))
            if callable(getattr(thing, "set_epoch", None)) and isinstance(getattr(thing, "epoch", None), int):
                found[f"{path}.epoch"] = thing
            for name, value in vars(thing).items():
                if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
                    found[f"{path}.{name}"] = value
            for name in LOOKED_INTO:
                look(getattr(thing, name, None), f"{path}.{name}")

        look(reader, OWN)
        return Generators(found)

    def states(self) -> dict[str, Any]:
        """Of all of them, as values that nobody changes later."""
        return random_states() | {path: _state_of(thing) for path, thing in self._own.items()}

    def set_(self, states: Mapping[str, Any]) -> None:
        """Puts states back. A generator that was not there when they were taken keeps its own."""
        set_random_states(states)
        for path, thing in self._own.items():
            if path in states:
                _set_state_of(thing, states[path])


def _state_of(thing: Any) -> Any:
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.random.Generator):
        return _copied(thing.bit_generator.state)
    if isinstance(thing, np.random.RandomState):
        return thing.get_state()
    if isinstance(thing, random.Random):
        return thing.getstate()
    return thing.epoch


def _set_state_of(thing: Any, state: Any) -> None:
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
    """A bit generator's state holds arrays: nested mappings of them."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    return state.copy() if isinstance(state, np.ndarray) else state
