"""`warm` compiles every kernel that a cluster calls, for all that it is called with.

What is missed is compiled in the middle of a step, or of the first recovery: a second or two of a core, once on each
machine. So whole runs, with losses, moves, loads, checkpoints, every optimizer and dtype, may call nothing new.
"""

from __future__ import annotations

import dataclasses
import sys

import forked
from captured import PLAIN, Checkpointed, with_checkpoints
from cut_runs import SITUATIONS
from harness import Scenario, SimulatedCluster, simulation
from harness.scenario import LOADS, half_tables
from numba.core.dispatcher import Dispatcher

from torch_ecrec.processes import launch
from torch_ecrec.records.optimizers import NAMES
from torch_ecrec.server import importing
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec


def signatures() -> dict[str, set[str]]:
    """Of each kernel that is loaded, what it is compiled for."""
    found: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("torch_ecrec.") else ():
            if isinstance(value, Dispatcher):
                function = value.py_func
                found[f"{function.__module__}.{function.__name__}"] = set(map(str, value.signatures))
    return found


def tables_of(optimizer: str) -> tuple[TableSpec, ...]:
    spec = OptimizerSpec(optimizer, lr=0.1)
    return tuple(
        TableSpec(f"{weights} {dim}", 17, dim, -1.0, 1.0, spec, weights)
        for weights in ("float32", "float16", "bfloat16")
        for dim in (3, 8)
    )


LOST = Scenario(steps=8, kills=((0, 2),), reborn=True)
RUNS = {  # and an event without which a run has not shown what it is for
    "steps": (Scenario(), "placed"),
    "two are lost, one after the other": (dataclasses.replace(LOST, kills=((0, 2), (1, 5))), "rebuilt"),
    "two at once": (
        dataclasses.replace(LOST, kills=((0, 2), (1, 2)), code=CodeSpec(4, 2, 2), settle_first=False),
        "rebuilt",
    ),
    "many slots": (dataclasses.replace(LOST, kills=((2, 2),), code=CodeSpec(6, 4, 2)), "rebuilt"),
    "copies": (dataclasses.replace(LOST, code=CodeSpec(3, 1, 2)), "rebuilt"),
    "a move": (SITUATIONS["a move"], "moved"),
    "trainers are lost": (SITUATIONS["a going-back"], "going back"),
    "the coordinator is lost": (Scenario(steps=8, random_coordinator_kills=2, reborn=True), "regathered"),
    "loads": (Scenario(loads=LOADS, overwrites=((2, True, LOADS[0]),)), "placed"),
    "halves": (dataclasses.replace(LOST, tables=half_tables()), "rebuilt"),
    "a tier": (dataclasses.replace(LOST, tier_frames=2), "rebuilt"),
    "a tier, halves": (dataclasses.replace(LOST, tables=half_tables(), tier_frames=2), "rebuilt"),
    "a narrow wire": (dataclasses.replace(LOST, wire="bfloat16"), "rebuilt"),
    **{name: (dataclasses.replace(LOST, tables=tables_of(name)), "rebuilt") for name in NAMES},
    **{
        policy: (with_checkpoints(dataclasses.replace(PLAIN, kills=((0, 7),)), policy), "checkpointed")
        for policy in ("full", "consecutive")
    },
}


class Unchecked(SimulatedCluster):
    """Records have no seals."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.settings = dataclasses.replace(self.settings, record_checks="none")


def run_all(_: int) -> None:
    launch.warm()
    known, missed = signatures(), []

    def look(what: str) -> None:
        for kernel, compiled in signatures().items():
            for one in compiled - known.setdefault(kernel, set()):
                missed.append(f"{what}: {kernel}{one}")
                known[kernel].add(one)

    assert sum(map(len, known.values())) > 60
    simulation.REBORN_S, importing.LITTLE_BYTES = 0.02, 50  # a server comes, and a slot moves, while training goes on
    unchecked = {f"{what}, no seals": RUNS[what] for what in ("steps", "many slots", "a move", "loads", "halves")}
    for what, (scenario, wanted) in {**RUNS, **unchecked}.items():
        cluster = Unchecked if what in unchecked else Checkpointed if scenario.checkpoint.url else SimulatedCluster
        told = {event["event"] for event in cluster(scenario).go().events}
        assert wanted in told, f"{what}: no {wanted!r} in {sorted(told)}"
        look(what)
    assert not missed, "\n".join(missed)


def test_nothing_is_compiled_in_the_middle_of_anything() -> None:
    forked.call(run_all, 1)
