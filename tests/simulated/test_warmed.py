"""`warm` compiles every kernel that a cluster calls, for all that it is called with.

What is missed is compiled in the middle of a step, or of the first recovery: a second or two of a core, once on each
machine. So whole runs, with losses, moves, loads, checkpoints, every optimizer and dtype, may call nothing new.
"""

from __future__ import annotations

import dataclasses
import sys

import forked
from captured import PLAIN, Checkpointed, with_checkpoints
from numba.core.dispatcher import Dispatcher

from torch_ecrec.processes import launch
from torch_ecrec.records.optimizers import NAMES
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec
from torch_ecrec.testing import Scenario, simulate
from torch_ecrec.testing.scenario import LOADS, half_tables


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


RUNS = {
    "steps": Scenario(),
    "a server is lost": Scenario(steps=8, kills=((0, 2), (1, 5)), spares=1, reborn=True),
    "two are lost": Scenario(steps=8, kills=((0, 2), (1, 2)), code=CodeSpec(4, 2, 2), spares=2, settle_first=False),
    "many slots": Scenario(steps=6, kills=((2, 2),), code=CodeSpec(6, 4, 2)),
    "copies": Scenario(steps=6, kills=((0, 2),), code=CodeSpec(3, 1, 2)),
    "a move": Scenario(
        steps=12, kills=((0, 1),), spares=0, reborn=True, rebuild_chunk_bytes=64, rebuild_bytes_per_s=1e4
    ),
    "trainers are lost": Scenario(steps=8, trainer_kills=((0, 3),)),
    "the coordinator is lost": Scenario(steps=8, random_coordinator_kills=2, reborn=True),
    "loads": Scenario(loads=LOADS, overwrites=((2, True, LOADS[0]),)),
    "halves": Scenario(steps=8, tables=half_tables(), kills=((0, 3),), reborn=True),
    "a narrow wire": Scenario(wire="bfloat16", kills=((0, 2),)),
    **{name: Scenario(tables=tables_of(name), kills=((1, 2),)) for name in NAMES},
}


def run_all(_: int) -> None:
    launch.warm()
    known, missed = signatures(), []

    def look(what: str) -> None:
        for kernel, compiled in signatures().items():
            for one in compiled - known.setdefault(kernel, set()):
                missed.append(f"{what}: {kernel}{one}")
                known[kernel].add(one)

    assert sum(map(len, known.values())) > 60
    for what, scenario in RUNS.items():
        simulate(scenario)
        look(what)
    for policy in ("full", "consecutive"):
        scenario = with_checkpoints(dataclasses.replace(PLAIN, kills=((0, 7),)), policy)
        Checkpointed(scenario).go()
        look(policy)
    assert not missed, "\n".join(missed)


def test_nothing_is_compiled_in_the_middle_of_anything() -> None:
    forked.call(run_all, 1)
