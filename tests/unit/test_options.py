"""Every option of the commands that make a cluster, and every argument of the model: what follows where two processes,
or two lives of one cluster, have others. What is new fails here until somebody has judged it.

Settings of the environment have their verdicts in `test_arithmetic.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from torch_ecrec.cli.main import parser
from torch_ecrec.compat.argparse import commands_of
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import ErasureCodedSharder

REFUSED = "members that know another code turn the coordinator away, and it a server that asks for another"
TOLD = "the coordinator's counts, and it tells all; one of a later life takes its own"
WHEN = "when, how fast or how often; no bits"
PLACES = "where slots, bytes, processes or lines are; no bits"
RUN = "a run keeps what it began with: of a later life `--restore` counts only where nobody is left who trains"
OWN = "of this process alone, which nobody else asks for"
JOB = "part of the job, which trainers bring and compare"
MEETS = "hosts meet by it: others that say another word wait for theirs, as torchrun tells, and then end"
ONE = "of one command that starts all processes itself"

CODE = dict.fromkeys(("servers", "k", "r", "protection"), REFUSED)
CHECKPOINTS = {
    **dict.fromkeys(("checkpoint", "checkpoint_every", "checkpoint_policy", "checkpoint_bytes_per_s"), TOLD),
    **dict.fromkeys(("checkpoint_keep", "checkpoint_timeout"), WHEN),
    **dict.fromkeys(("checkpoint_zstd", "checkpoint_bits"), "each checkpoint says its own; a chain may mix them"),
    **dict.fromkeys(("beyond", "most_lost_samples", "checkpoint_saver", "checkpoint_portion"), TOLD),
}
TIER = dict.fromkeys(("tier", "memory", "tier_for", "tier_keep"), PLACES)
WATCHED = dict.fromkeys(("http", "events", "allow_kill"), OWN)
COORDINATOR = {
    **CODE,
    **CHECKPOINTS,
    **WATCHED,
    **dict.fromkeys(("spares", "without_spare", "drain_slow"), "where slots go next; no bits"),
    **dict.fromkeys(("host", "port", "insecure_rpc"), "where it is; who cannot reach it is told so"),
    **dict.fromkeys(("run", "again", "began_with", "restore"), RUN),
    **dict.fromkeys(("grace", "end_with_parent"), OWN),
}
OPTIONS: dict[str, dict[str, str]] = {
    "coordinator": {**COORDINATOR, **dict.fromkeys(("elect", "leader_lease"), "which of several leads, as etcd says")},
    "up": {**COORDINATOR, **TIER, **dict.fromkeys(("no_restart", "logs", "quiet"), OWN)},
    "serve": {
        **TIER,
        **dict.fromkeys(("servers", "k", "r"), REFUSED),
        "join": "which cluster",
        "failure_domain": PLACES,
        **dict.fromkeys(("grace", "end_with_parent"), OWN),
    },
    "run": {
        "join": "which cluster; trainers of two wait in each, and are told for whom",
        **dict.fromkeys(("nodes", "meet", "job"), MEETS),
        "nproc_per_node": "torchrun adds up the hosts'; the number of trainers is " + JOB,
        **dict.fromkeys(("address", "max_restarts"), OWN),
        "again": "a job that has ended is refused without it",
        "script": "another script is another job, or told at its first step",
    },
    "demo": {
        **CODE,
        **CHECKPOINTS,
        **TIER,
        **dict.fromkeys(("spares", "without_spare", "data", "steps", "batch_size", "trainers", "kill"), ONE),
        **dict.fromkeys(("max_restarts", "optimizer", "ids", "device", "snapshot_every", "seed"), ONE),
        **dict.fromkeys(("compare", "http", "out"), ONE),
    },
}
ALIKE = "trainers agree on it as they make their models: `test_torchrec.py`"
FIRST = "trainers agree on it in each step: `test_torchrec.py`"
LATER = "another one than before a restart is refused, or told: `test_attach_refusals.py`"
EACH = "each trainer's own; of no other is it asked"
ARGUMENTS: dict[Callable[..., Any], dict[str, str]] = {
    DistributedModelParallel.__init__: {
        "module": f"tables are {JOB}; dense layers that differ do not fit TorchRec's own all-reduce, which raises",
        **dict.fromkeys(("env", "device", "settings", "session"), EACH),
        **dict.fromkeys(("plan", "sharders", "seed"), JOB),
        "code": "refused unless it is the cluster's, protection included",
        "model_tracker_configs": "refused",
        **dict.fromkeys(("init_data_parallel", "init_parameters", "data_parallel_wrapper"), ALIKE),
        **dict.fromkeys(("nan_gradients", "snapshot_every", "unprotected"), ALIKE),
    },
    DistributedModelParallel.attach: {
        "optimizer": f"{FIRST}; {LATER}",
        **dict.fromkeys(("lr_scheduler", "reader", "stateful"), f"each trainer keeps its own; {LATER}"),
    },
    ErasureCodedSharder.__init__: {
        **dict.fromkeys(("served", "step", "names"), "follow from the model"),
        "other": JOB,
        **dict.fromkeys(
            ("outputs", "columns"),
            "each trainer's own; a later life compares modules",
        ),
    },
}


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_judged(command: str) -> None:
    found = next(one for name, one, _ in commands_of(parser()) if name == command)
    assert {action.dest for action in found._actions} - {"help"} == OPTIONS[command].keys()


@pytest.mark.parametrize("of", ARGUMENTS, ids=lambda one: one.__qualname__)
def test_every_argument_is_judged(of: Callable[..., Any]) -> None:
    assert inspect.signature(of).parameters.keys() - {"self"} == ARGUMENTS[of].keys()
