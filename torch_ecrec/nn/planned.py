"""What a given plan says of tables that the servers hold, beside where they lie.

    ParameterConstraints(output_dtype=DataType.FP16)     a wish, as if `fused_params` had it: `outputs.py`
    ParameterConstraints(compute_kernels=["dense"])      TorchRec leaves the table's step to the script's own optimizer

Where rows lie is the servers' business: sharding types, ranks, kernels and caches change no number, and are taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType

_WISHES = ("output_dtype", "stochastic_rounding", "bounds_check_mode")


def entries_of(plan: ShardingPlan | None, path: str) -> Mapping[str, ParameterSharding]:
    """By table: what a plan says of the collection at a path, or of its wrapper, which plans name instead."""
    planned: Mapping[str, Any] = plan.plan if plan is not None else {}
    found = planned.get(path) or planned.get(path.rpartition(".")[0])
    return found if isinstance(found, EmbeddingModuleShardingPlan) else {}


def wishes_of(entry: ParameterSharding | None) -> dict[str, Any]:
    """Under the names of `fused_params`, over which TorchRec has them take precedence."""
    return {name: value for name in _WISHES if (value := getattr(entry, name, None)) is not None}


def is_scripts(entry: ParameterSharding | None) -> bool:
    """Whether TorchRec would leave the steps of a table to the script's own optimizer."""
    return entry is not None and (
        entry.sharding_type == ShardingType.DATA_PARALLEL.value
        or entry.compute_kernel == EmbeddingComputeKernel.DENSE.value
    )


def tell_of_scripts(optimizers: Mapping[str, str], stacklevel: int) -> None:
    """Warns of tables that the script's own optimizer would step with TorchRec.

    Args:
        optimizers: table -> the one that the servers run.
    """
    if optimizers:
        tables = ", ".join(f"{table} ({optimizer})" for table, optimizer in optimizers.items())
        warnings.warn(
            "the plan has tables data-parallel, and TorchRec leaves their steps to an optimizer of the script; the"
            f" servers hold them like any other, and step them in the backward: {tables}. Attach the optimizer that is"
            " meant; one of the script does not get them",
            stacklevel=stacklevel + 1,
        )
