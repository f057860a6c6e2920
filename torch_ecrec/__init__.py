"""Erasure-coded parameter servers for TorchRec embeddings: kill any r servers, and training goes on, bit-identical.

Public names (imported on first use, so that a server process does not load TorchRec):

    DistributedModelParallel   drop-in for torchrec.distributed.DistributedModelParallel
    TensorBoard                what the cluster does, as scalars for TensorBoard
    CodeSpec, Settings         how records are protected; time limits
    ClusterError, DataLoss, ClusterUnavailable, JoinRefused, TrainersLost, Fenced, NonFiniteGradient
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see of `_PLACES` and `_MODULES`
    from torch_ecrec import checkpoint as checkpoint
    from torch_ecrec import errors as errors
    from torch_ecrec import model_parallel as model_parallel
    from torch_ecrec import planner as planner
    from torch_ecrec.errors import (
        ClusterError,
        ClusterUnavailable,
        DataLoss,
        Fenced,
        JoinRefused,
        NonFiniteGradient,
        TrainersLost,
    )
    from torch_ecrec.nn.parallel import DistributedModelParallel
    from torch_ecrec.nn.tensorboard import TensorBoard
    from torch_ecrec.spec.job import CodeSpec
    from torch_ecrec.spec.settings import Settings

__version__ = "0.1.0"
__all__ = [
    "ClusterError",
    "ClusterUnavailable",
    "CodeSpec",
    "DataLoss",
    "DistributedModelParallel",
    "Fenced",
    "JoinRefused",
    "NonFiniteGradient",
    "Settings",
    "TensorBoard",
    "TrainersLost",
    "__version__",
]

_PLACES = {
    "DistributedModelParallel": "torch_ecrec.nn.parallel",
    "TensorBoard": "torch_ecrec.nn.tensorboard",
    "CodeSpec": "torch_ecrec.spec.job",
    "Settings": "torch_ecrec.spec.settings",
    "ClusterError": "torch_ecrec.errors",
    "ClusterUnavailable": "torch_ecrec.errors",
    "DataLoss": "torch_ecrec.errors",
    "Fenced": "torch_ecrec.errors",
    "JoinRefused": "torch_ecrec.errors",
    "TrainersLost": "torch_ecrec.errors",
    "NonFiniteGradient": "torch_ecrec.errors",
}

_MODULES = ("checkpoint", "errors", "model_parallel", "planner")  # documented as `torch_ecrec.checkpoint.save`

if not TYPE_CHECKING:  # else every name that is not there would be of type Any, in place of an error

    def __getattr__(name: str) -> object:
        """Imports a public name when it is first asked for."""
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_PLACES[name]), name)

    def __dir__() -> list[str]:
        """What completion at a prompt and `help` show: also names that were not asked for yet."""
        return sorted({*globals(), *_PLACES, *_MODULES})
