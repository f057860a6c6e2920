"""Every optimizer on the simulated cluster: a replay by its formula, and losses that change nothing.

Adam and its relatives depend on the number of the step: it must be the same when a step is made again by a new host,
after going back, after a restart, and however many steps have loaded values, before training and in it.
"""

import functools

import msgspec
import numpy as np
import pytest
import torch
from formulas import stepped, variants
from harness import Scenario, simulate
from harness.scenario import LOADS, Load, dense_after, gradients_of, loss_of, touched
from thinned import thinned

from torch_ecrec.protocol import wire
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import NAMES
from torch_ecrec.server.apply import Applier
from torch_ecrec.spec.job import CodeSpec, OptimizerSpec, TableSpec

STEPS = 5
OVERWRITES = ((2, False, Load(0, 6, 19, change=True)), (3, True, Load(1, 0, 9, change=True)))  # after steps 2 and 3


DTYPES = {"float32": ("float32", "float32"), "halves": ("float16", "bfloat16")}


def scenario_of(kind, dtypes="float32", **more):
    """Two table groups of one layout, which differ in the learning rate alone, and a third with other
    hyperparameters."""
    one, (first, second) = OptimizerSpec(kind, lr=0.1, **variants(kind)[-1]), DTYPES[dtypes]
    tables = (
        TableSpec("a", rows=17, dim=3, low=-1.0, high=1.0, optimizer=one, weights=first),
        TableSpec("b", rows=8, dim=3, low=-0.5, high=0.5, optimizer=one, weights=first),
        TableSpec("c", rows=13, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec(kind, lr=0.1), weights=second),
        TableSpec("d", rows=13, dim=2, low=-1.0, high=1.0, optimizer=OptimizerSpec(kind, lr=0.02)),
    )
    return Scenario(tables=tables, pooled=False, steps=STEPS, loads=LOADS, overwrites=OVERWRITES, **more)


@functools.cache
def undisturbed(kind, dtypes="float32"):
    return simulate(scenario_of(kind, dtypes))


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("kind", NAMES)
def test_training_is_a_replay_by_the_formula_bit_for_bit(kind, dtypes):
    scenario, dense = scenario_of(kind, dtypes), 1.0
    job = scenario.job
    assert [
        (table_group.dim, table_group.optimizer.lr, len(table_group.tables)) for table_group in job.table_groups
    ] == [
        (3, 0.1, 2),
        (2, 0.1, 1),
        (2, 0.02, 1),
    ]
    tables = [
        numbers_of(table_group.initial(job.seed).of(np.arange(table_group.rows)), table_group.schema).copy()
        for table_group in job.table_groups
    ]

    def rounded(s):
        tables[s] = numbers_of(records_of(tables[s], job.table_groups[s].schema), job.table_groups[s].schema).copy()

    def overwrite(load):
        part = torch.from_numpy(tables[load.table_group][load.first : load.end].copy())
        tables[load.table_group][load.first : load.end] = load.values(part).numpy()
        rounded(load.table_group)

    for load in LOADS:
        overwrite(load)
    for step in range(1, STEPS + 1):
        losses, parts = {}, [[] for _ in tables]
        for trainer in range(scenario.trainers):
            rows = touched(scenario, step, trainer)
            weights = [torch.from_numpy(t[r, : s.dim]) for t, r, s in zip(tables, rows, job.table_groups, strict=True)]
            losses[trainer] = loss_of(weights, dense)
            gradients = gradients_of(weights, step, trainer, dense)
            for part, row, gradient in zip(parts, rows, gradients, strict=True):
                part.append((row, gradient.numpy()))
        for s, table_group in enumerate(job.table_groups):
            merged, spec = merge(parts[s]), table_group.optimizer
            args = merged.positions, merged.gradients(), spec.lr, step, dict(spec.fixed)
            tables[s] = stepped(kind, tables[s], *args)
            rounded(s)
        dense = dense_after(dense, losses)
        for after, _, load in OVERWRITES:
            if after == step:
                overwrite(load)
    found = undisturbed(kind, dtypes)
    assert found.dense[STEPS] == dense
    for s, table in enumerate(tables):
        records = records_of(table, job.table_groups[s].schema)
        assert np.array_equal(found.records[s].numpy().view(np.uint8), records), f"table group {s}"


LOSSES = {
    "a server, onto a spare": {"kills": ((0, 2),), "spares": 2},
    "a server, onto a survivor, and another": {"kills": ((1, 1), (2, 3)), "spares": 0, "reborn": True},
    "trainers, who go back": {"trainer_kills": ((1, 3),), "trainers_return": True, "snapshot_every": 2},
    "both": {"kills": ((0, 2),), "trainer_kills": ((0, 3),), "trainers_return": True, "spares": 2},
    "the coordinator, in noise": {"random_coordinator_kills": 2, "noise": 0.03, "kills": ((2, 2),), "spares": 2},
}


OF_DTYPES = {f"{dtypes}: {name}": (dtypes, name) for dtypes in DTYPES for name in LOSSES}


@pytest.mark.parametrize(("kind", "loss"), thinned(NAMES, list(OF_DTYPES), 4))
def test_losses_change_nothing(kind, loss):
    dtypes, name = OF_DTYPES[loss]
    for code in (CodeSpec(3, 2, 1), CodeSpec(5, 3, 2)):
        run = simulate(scenario_of(kind, dtypes, code=code, **LOSSES[name]))
        assert run.kills >= len(LOSSES[name].get("kills", ())) and bool(run.resumed) == (
            "trainer_kills" in LOSSES[name]
        )
        run.check_against(undisturbed(kind, dtypes))


def test_an_iteration_that_is_not_that_of_the_step_would_be_seen(monkeypatch):
    """Had a host counted the steps that it made, a rebuilt one would go on with other bits."""
    update_ = Applier.update_

    def counted(self, step, pushes):
        self.made = getattr(self, "made", 0) + 1
        first = msgspec.structs.replace(pushes[0], iteration=self.made)
        assert isinstance(first, wire.Push)
        return update_(self, step, {**pushes, 0: first})

    wanted = undisturbed("adam")
    monkeypatch.setattr(Applier, "update_", counted)
    run = simulate(scenario_of("adam", **LOSSES["a server, onto a spare"]))
    with pytest.raises(AssertionError, match="differ"):
        run.check_against(wanted)
