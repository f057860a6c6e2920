"""The state of a trainer beside the dense model and the reader: tables' learning rates, and whatever is attached.

    values()   as they are now, by name
    load_()    puts them back

**The rule.** Whatever a push carries is kept and brought back by who sends it, attached or not: the groups of all of
the model's fused optimizers, with their learning rates, and what gradients are divided by. (The iteration is the
servers', which tables get gradients `ModuleSettings` keeps, and all else of a push is the job's.) What moves these
numbers, a scheduler or a warm-up, counts for itself, and must be attached: `attachment_checks.py` sees to that.

Does not hold the dense model (`nn/dense.py` does) or the place in the reader (`reader.py`), and sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from torch_ecrec.compat.torch import STEP_HOOKS
from torch_ecrec.resume.random_states import GENERATORS, set_state_of, state_of
from torch_ecrec.resume.reader import Stateful
from torch_ecrec.resume.values import decode, encode

log = logging.getLogger(__name__)


def unwrapped(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Returns some optimizers, and those inside wrappers (TorchRec's and others), the innermost last, each once."""
    found: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, CombinedOptimizer):
            inside: list[Optimizer] = [inner for _, inner in optimizer.optimizers]
        else:
            inside = [thing for thing in vars(optimizer).values() if isinstance(thing, Optimizer)]
        for one in (optimizer, *unwrapped(inside)):
            found.setdefault(id(one), one)
    return list(found.values())


def check_optimizers(optimizers: Iterable[object]) -> None:
    """Raises TypeError, with the name, for what is no optimizer, or a wrapper without the parts of one."""
    for given in optimizers:
        name = type(given).__name__
        within = [f"`{key}`" for key, thing in getattr(given, "__dict__", {}).items() if isinstance(thing, Optimizer)]
        instead = f"; attach the one in it, {' and '.join(within)}" if within else ""
        if not isinstance(given, Optimizer):
            raise TypeError(
                f"`optimizer` must be torch optimizers, got {name}{instead}. What {name} keeps itself is attached by a"
                " name of its own, if it has state_dict and load_state_dict"
            )
        for inner in unwrapped([given]):
            needed = ["param_groups", "state"]
            if len(unwrapped([inner])) == 1 and not isinstance(inner, KeyedOptimizer):
                needed.append(STEP_HOOKS)  # one in a wrapper is seen to step in its place
            lacks = [part for part in needed if not hasattr(inner, part)]
            if lacks:
                raise TypeError(
                    f"{type(inner).__name__} has no {' and no '.join(lacks)}: was `Optimizer.__init__` not called? What"
                    f" it keeps cannot be brought back{instead}"
                )


def counters_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns a wrapper's own counting parameters (warm-up has some), by name; none of other optimizers."""
    if not isinstance(optimizer, KeyedOptimizer) or isinstance(optimizer, CombinedOptimizer):
        return {}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in optimizer.params.items() if id(parameter) not in own}


# What `encoded` calls them, and what moves between `attach` and the first step is called.
GROUPS, DIVISION = "hyperparameters of the tables' optimizers", "what gradients are divided by"
COUNTERS = "counts of the optimizers"


class _Generator:
    """Wraps a random generator as an object with a state."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": state_of(self.generator)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_of(self.generator, state_dict["state"])


class TrainerState:
    """All attached state except the reader's, and the hyperparameters of the tables' optimizer.

    Args:
        optimizers: the attached ones, TorchRec's or torch's. The counts of wrappers are kept here.
        stateful: whatever else, by name: Stateful, or a random generator.
        tables: the optimizer of all of the model's tables; its hyperparameters are kept here, attached or not.

    Attributes:
        attached: the optimizers, and those in wrappers among them.

    Raises:
        TypeError: an attached object has no state, or one that cannot be kept; names it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], stateful: Mapping[str, Any], tables: Optimizer) -> None:
        for name, thing in stateful.items():
            if not isinstance(thing, (Stateful, *GENERATORS)):
                raise TypeError(
                    f"`{name}` must have state_dict and load_state_dict, or be a random generator of torch, NumPy or"
                    f" Python; got {type(thing).__name__}"
                )
        self.attached = unwrapped(optimizers)
        self._kept = unwrapped([tables, *self.attached])
        self.stateful: dict[str, Stateful] = {
            name: _Generator(thing) if isinstance(thing, GENERATORS) else thing for name, thing in stateful.items()
        }
        self.encoded()

    @property
    def all_optimizers(self) -> list[Optimizer]:
        """The optimizers whose groups are kept, here or with the dense model, and TorchRec's wrappers of them."""
        return list(self._kept)

    @property
    def dense_optimizers(self) -> list[Optimizer]:
        """The attached optimizers that torch runs."""
        return [o for o in self.attached if not isinstance(o, KeyedOptimizer)]

    @property
    def _fused(self) -> list[Optimizer]:
        return [o for o in self._kept if isinstance(o, FusedOptimizer)]

    @property
    def counters(self) -> list[Any]:
        """The parameters of wrappers' own by which they count."""
        return [parameter for _, parameter in self._counters().values()]

    def _counters(self) -> dict[str, tuple[Optimizer, Any]]:
        """Returns the parameters by which wrappers count: name -> (wrapper, parameter)."""
        found: dict[int, tuple[str, Optimizer, Any]] = {}
        for optimizer in self._kept:
            for name, parameter in counters_of(optimizer).items():
                found.setdefault(id(parameter), (name, optimizer, parameter))
        return {f"{i}/{name}": (whose, p) for i, (name, whose, p) in enumerate(found.values())}

    def values(self) -> dict[str, Any]:
        """Returns all state as it is now. It is shared with what is attached: encode it before that changes."""
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
            "gradient division": get_gradient_division(),
            "counters": counters,
            "stateful": {name: thing.state_dict() for name, thing in self.stateful.items()},
        }

    def encoded(self) -> dict[str, bytes]:
        """Returns each part of `values` as bytes.

        Raises:
            TypeError: a value that cannot be kept, with the name of what has it.
        """
        found = self.values()
        return {
            GROUPS: encode(found["groups"], "fused optimizers"),
            DIVISION: encode(found["gradient division"], DIVISION),
            COUNTERS: encode(found["counters"], "optimizers"),
            **{f"stateful/{name}": encode(value, name) for name, value in found["stateful"].items()},
        }

    @staticmethod
    def decoded(saved: Mapping[str, bytes]) -> dict[str, Any]:
        """Returns `values` from `encoded`.

        An earlier build did not keep the rates of tables whose optimizer was not attached, nor the divisor of
        gradients: "groups" is empty then, and the divisor is the present one.
        """
        prefix = "stateful/"
        before = GROUPS not in saved
        return {
            "groups": decode(saved["groups" if before else GROUPS]),
            "gradient division": get_gradient_division() if before else decode(saved[DIVISION]),
            "counters": decode(saved["counters" if before else COUNTERS]),
            "stateful": {n.removeprefix(prefix): decode(v) for n, v in saved.items() if n.startswith(prefix)},
        }

    @property
    def kinds(self) -> dict[str, str]:
        """The class of each attached object, by name; the optimizers' are kept with the dense model."""
        objects = {n: o.generator if isinstance(o, _Generator) else o for n, o in self.stateful.items()}
        return {name: type(thing).__qualname__ for name, thing in objects.items()}

    def check(
        self, saved: Mapping[str, Any], others: Sequence[str] = (), kinds: Mapping[str, str] | None = None
    ) -> None:
        """Raises ValueError if other objects are attached now than when `values` were taken; also for `others`.

        Args:
            kinds: of that time; None: not known.
        """
        names = sorted([*(saved["stateful"].keys() ^ self.stateful.keys()), *others])
        if names:
            raise ValueError(f"attached now but not when the snapshot was taken, or the other way: {', '.join(names)}")
        now = self.kinds
        changed = (
            [f"{name} was {kinds[name]} and is {now[name]}" for name in sorted(now) if kinds[name] != now[name]]
            if kinds
            else []
        )
        if changed:
            raise ValueError(
                f"attached with another class than when the snapshot was taken, whose state it would take for its own:"
                f" {', '.join(changed)}. Start the script with what it had"
            )
        if len(saved["groups"]) not in (0, len(self._fused)) or not saved["counters"].keys() <= self._counters().keys():
            raise ValueError("other optimizers are attached than when the snapshot was taken")

    def load_(self, saved: Mapping[str, Any]) -> None:
        """Restores `values`, after the dense model's. Not checked: that they fit; `check` does that."""
        if self._fused and not saved["groups"]:
            log.warning(
                "NOT EXACT: learning rates of the tables are not in this checkpoint, which a build before has written;"
                " they are as the script has set them"
            )
        for optimizer, groups in zip(self._fused, saved["groups"] or [[]] * len(self._fused), strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=bool(groups)):
                group.update(values)
        set_gradient_division(saved["gradient division"])
        counters = self._counters()
        for name, values in saved["counters"].items():
            whose, parameter = counters[name]
            whose.state[parameter] = values
        loaded = [(group, dict(group)) for optimizer in self._kept for group in optimizer.param_groups]
        for optimizer in self.attached:
            if isinstance(optimizer, KeyedOptimizer):
                optimizer.post_load_state_dict()
        for group, values in loaded:  # a warm-up has set what follows from its count, and not what the loop made of it
            group.update(values)
        for name, thing in self.stateful.items():
            thing.load_state_dict(saved["stateful"][name])
