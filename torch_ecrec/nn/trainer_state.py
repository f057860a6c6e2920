"""What a trainer has beside the dense model and the reader: schedulers, fused optimizers' rates, whatever is attached.

    values()   as they are now, by name
    load_()    puts them back

Does not hold the dense model (`dense.py` does) or the place in the reader (`reader.py`), and sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torch_ecrec.nn.random_states import GENERATORS, set_state_of, state_of
from torch_ecrec.nn.reader import Stateful
from torch_ecrec.nn.values import decode, encode


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


class _Generator:
    """A random generator, as what has a state."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": state_of(self._generator)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_of(self._generator, state_dict["state"])


class TrainerState:
    """What is attached, but for the reader.

    Args:
        optimizers: TorchRec's or torch's; hyperparameters of fused ones, and what wrappers count, are kept here.
        stateful: whatever else, by name: Stateful, or a random generator.

    Raises:
        TypeError: something of it has no state, or one that cannot be kept, by name.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stateful: Mapping[str, Any]) -> None:
        for name, thing in stateful.items():
            if not isinstance(thing, (Stateful, *GENERATORS)):
                raise TypeError(
                    f"`{name}` must have state_dict and load_state_dict, or be a random generator of torch, NumPy or"
                    f" Python; got {type(thing).__name__}"
                )
        self._optimizers = unwrapped(optimizers)
        self.stateful: dict[str, Stateful] = {
            name: _Generator(thing) if isinstance(thing, GENERATORS) else thing for name, thing in stateful.items()
        }
        self.encoded()

    @property
    def all_optimizers(self) -> list[Optimizer]:
        """And TorchRec's wrappers around them."""
        return list(self._optimizers)

    @property
    def dense_optimizers(self) -> list[Optimizer]:
        """Those that torch runs."""
        return [o for o in self._optimizers if not isinstance(o, KeyedOptimizer)]

    @property
    def _fused(self) -> list[Optimizer]:
        return [o for o in self._optimizers if isinstance(o, FusedOptimizer)]

    @property
    def counters(self) -> list[Any]:
        """Parameters of wrappers' own, under which they count."""
        return [parameter for _, parameter in self._counters().values()]

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

    def values(self) -> dict[str, Any]:
        """All of it as it is now. Shared with what is attached: encode it before that goes on."""
        groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self._fused
        ]
        counters = {
            name: dict(whose.state[parameter])
            for name, (whose, parameter) in self._counters().items()
            if parameter in whose.state
        }
        return {
            "groups": groups,
            "counters": counters,
            "stateful": {name: thing.state_dict() for name, thing in self.stateful.items()},
        }

    def encoded(self) -> dict[str, bytes]:
        """Each part of `values` as bytes.

        Raises:
            TypeError: a value that cannot be kept, with the name of what has it.
        """
        found = self.values()
        return {
            "groups": encode(found["groups"], "fused optimizers"),
            "counters": encode(found["counters"], "optimizers"),
            **{f"stateful/{name}": encode(value, name) for name, value in found["stateful"].items()},
        }

    @staticmethod
    def decoded(saved: Mapping[str, bytes]) -> dict[str, Any]:
        """`values`, from `encoded`."""
        prefix = "stateful/"
        return {
            "groups": decode(saved["groups"]),
            "counters": decode(saved["counters"]),
            "stateful": {n.removeprefix(prefix): decode(v) for n, v in saved.items() if n.startswith(prefix)},
        }

    def check(self, saved: Mapping[str, Any], others: Sequence[str] = ()) -> None:
        """Raises ValueError if other things are attached now than when `values` gave that; `others` are, too."""
        names = sorted([*(saved["stateful"].keys() ^ self.stateful.keys()), *others])
        if names:
            raise ValueError(f"attached now but not when the snapshot was taken, or the other way: {', '.join(names)}")
        if len(saved["groups"]) != len(self._fused) or not saved["counters"].keys() <= self._counters().keys():
            raise ValueError("other optimizers are attached than when the snapshot was taken")

    def load_(self, saved: Mapping[str, Any]) -> None:
        """Puts `values` back. Not checked: that they fit; `check` does."""
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
        for name, thing in self.stateful.items():
            thing.load_state_dict(saved["stateful"][name])
