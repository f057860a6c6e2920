"""Describes a model for an import: the job that a cluster would train, and the names of its tables in state dicts.

    torch_ecrec.checkpoint.describe(DLRMTrain(...), "job.json", trainers=2)

It takes what the script gives to `DistributedModelParallel`, so that the job is the one that the script will bring:
the module with the optimizers of its tables, the plan and the sharders, if there are any. Nothing is trained or
started, and tables may be on the meta device. A model that is built on a cluster already is described as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torch_ecrec.nn.coverage import Coverage, check_sharders, coverage_of
from torch_ecrec.nn.dense import further_paths, tables_of, with_tables
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.sharder import all_table_specs, job_names
from torch_ecrec.runtime.checks import require, take_int, take_str
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.state_dicts.unsharded import configs_of, weight_of
from torch_ecrec.storage.description import Description


def describe(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    trainers: int | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    seed: int = 0,
    unprotected: str = "refuse",
) -> Description:
    """Writes the description of a model that `torch-ecrec checkpoints URL --import FOLDER --job FILE` reads.

    Args:
        model: as the script gives it to `torch_ecrec.DistributedModelParallel`; or that, made already.
        path: of the file.
        trainers: how many there will be; None: as many as the process group has. Of a model made already, as it has.
        plan: as the script gives it to `DistributedModelParallel`.
        sharders: as the script gives them.
        seed: as the script gives it.
        unprotected: as the script gives it.

    Returns:
        What was written.

    Raises:
        ValueError: a model without tables, or one that the servers do not serve; the number of trainers is not known.
    """
    if isinstance(model, DistributedModelParallel):
        found = _of_sharded(model)
    else:
        if trainers is None:
            require(dist.is_initialized(), "no process group says how many trainers there will be: give `trainers`")
            trainers = dist.get_world_size()
        trainers, seed = take_int("trainers", trainers, 1), take_int("seed", seed, 0)
        found = _of_module(model, trainers, plan, sharders, seed, take_str("unprotected", unprotected))
    Path(path).write_bytes(found.encoded())
    return found


def _of_sharded(model: DistributedModelParallel) -> Description:
    job = model.session.job
    require(len(job.tables) > 0, "a model without tables on the servers has nothing to import")
    return _described(job, tables_of(model), model.coverage, further_paths(model.module, with_tables(model)))


def _of_module(
    model: nn.Module,
    trainers: int,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None,
    seed: int,
    unprotected: str,
) -> Description:
    others = [s for s in get_default_sharders() if sharders is None] + list(sharders or ())
    check_sharders(others)
    covered = coverage_of(model, plan, others)
    covered.check(unprotected)
    names = job_names(covered.served)
    specs = all_table_specs(model, covered.served, names, others, plan)
    require(len(specs) > 0, "a model without tables for the servers has nothing to import")
    keys = {id(parameter): name for name, parameter in model.named_parameters()}
    tables = {
        names[path][config.name]: (keys[id(weight_of(module, config.name))], config.name)
        for path, module in covered.served.items()
        for config in configs_of(module)
    }
    job = JobSpec(specs, CodeSpec(), trainers, seed)
    return _described(job, tables, covered, further_paths(model, covered.served))


def _described(
    job: JobSpec, tables: dict[str, tuple[str, str]], covered: Coverage, again: Collection[str]
) -> Description:
    return Description(job, tables, tuple(covered.unprotected), covered.dense, tuple(covered.remapping), tuple(again))
