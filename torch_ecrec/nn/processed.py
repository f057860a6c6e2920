"""Refuses batches that feature processors around a served collection cannot handle.

`FeatureProcessedEmbeddingBagCollection` makes a new batch with the weights that its processors give. TorchRec's code
for that leaves out batch sizes of features and inverse indices: the collection inside would pool other bags, and say
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torch_ecrec.compat.torchrec import collection_processed
from torch_ecrec.nn.served import ServedModule


def refuse_sizes(features: Any) -> None:
    """Raises ValueError for a batch with a batch size per feature."""
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise ValueError(
            "a batch size per feature (`stride_per_key_per_rank`, `inverse_indices`) is not supported where features"
            " are processed: TorchRec's FeatureProcessedEmbeddingBagCollection drops it. Give each sample its own bags"
        )


torch.fx.wrap("refuse_sizes")  # pipelines trace the wrapper, without a batch


def watch_batches(model: nn.Module) -> None:
    """Checks every batch that reaches a wrapper of a served collection."""
    for module in model.modules():
        if isinstance(module, FeatureProcessedEmbeddingBagCollection) and isinstance(
            collection_processed(module), ServedModule
        ):
            module.register_forward_pre_hook(_look)


def _look(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    refuse_sizes(*inputs[:1])
