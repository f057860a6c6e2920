"""Refuses training pipelines of TorchRec that look rows up before the previous step is over.

    Base, SparseDist, SparseDistLite, PrefetchSparseDist, FusedSparseDist, Staged     rows as the step before left them
    SemiSync                                                                      rows as the step before that left them
    EvalPipelineCPUSparse                               an evaluation, which it does not say: `torch.no_grad()` does

A trainer that goes on after step s has the rows of s only, so it could not repeat what a batch had read that was looked
up earlier: such pipelines are refused.
"""

from __future__ import annotations

import torch
from torchrec.distributed.train_pipeline.runtime_forwards import (
    EmbeddingPipelinedForward,
    InSyncEmbeddingPipelinedForward,
    PrefetchEmbeddingPipelinedForward,
)

AHEAD = EmbeddingPipelinedForward, PrefetchEmbeddingPipelinedForward


def check_in_sync(forward: object) -> None:
    """Called before a lookup: refuses, in training, a pipeline that looks rows up too early.

    Args:
        forward: the `forward` of a sharded module, which a pipeline may have replaced.

    Raises:
        RuntimeError: it looks rows up before the step before them is over.
    """
    ahead = isinstance(forward, AHEAD) and not isinstance(forward, InSyncEmbeddingPipelinedForward)
    if ahead and torch.is_grad_enabled():
        raise RuntimeError(
            "this pipeline (TrainPipelineSemiSync, or one with its order of stages) looks rows up before the step"
            " before them is over. After a loss of trainers those rows are gone, and training would not go on with the"
            " same bits. Take TrainPipelineSparseDist or TrainPipelineFusedSparseDist; put an evaluation under"
            " torch.no_grad()"
        )
