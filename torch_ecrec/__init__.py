"""Erasure-coded parameter servers for TorchRec embeddings: kill any r servers, and training goes on, bit-identical.

Public names (imported on first use, so that a server process does not load TorchRec):

    DistributedModelParallel   drop-in for torchrec.distributed.DistributedModelParallel
    CodeSpec, Settings         how records are protected; time limits
    ClusterError, DataLoss, ClusterUnavailable, JoinRefused, TrainersLost, Fenced, NonFiniteGradient
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "DistributedModelParallel": "torch_ecrec.nn.parallel",
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
__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
