"""Batches in which each feature has a batch size of its own, with inverse indices from samples to bags.

    f0   2 bags, inverse [0, 1, 0, 0]     4 samples, of which 0, 2 and 3 have the same bag of f0
    f1   3 bags, inverse [2, 2, 1, 0]

TorchRec calls this a variable batch size per feature (`stride_per_key_per_rank`): what several samples have alike is
sent, looked up and pooled once. The host repeats what it has pooled, and sums the gradients of a bag in the order of
its samples, so that this has one order on every device.

Shape legend: F features, B bags of the feature that has most, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Repeats: TypeAlias = tuple[list[str], Tensor]
"""Names of features, and for each of them (a row) the bag of each sample: what TorchRec calls inverse indices."""


def check_repeats(features: KeyedJaggedTensor, needed: Sequence[str]) -> None:
    """Refuses a batch with a batch size per feature but without the inverse indices that map samples to bags.

    Args:
        needed: features that are looked up.

    Raises:
        ValueError: inverse indices without batch sizes or the other way round, or they lack a feature.
    """
    repeats = features.inverse_indices_or_none()
    if not features.variable_stride_per_key():
        if repeats is not None:
            raise ValueError(
                "the batch has `inverse_indices` and no batch size per feature: TorchRec's module follows them"
                " unsharded, and does not when it is sharded; give `stride_per_key_per_rank`, too"
            )
        return
    if repeats is None:
        raise ValueError(
            "a batch size per feature (`stride_per_key_per_rank`) needs `inverse_indices`, as in TorchRec: which bag"
            " of each feature each sample has"
        )
    names, index_FN = repeats
    if index_FN.dim() != 2 or len(index_FN) != len(names):
        raise ValueError(f"`inverse_indices` of {len(names)} features must have a row for each, got {index_FN.shape}")
    if index_FN.is_floating_point() or index_FN.is_complex() or index_FN.dtype == torch.bool:
        raise ValueError(f"`inverse_indices` must be integers, got {index_FN.dtype}")
    lacking = sorted(set(needed) - set(names))
    if lacking:
        raise ValueError(f"`inverse_indices` lack features {', '.join(lacking)}; they have {', '.join(names)}")


def check_lengths(features: KeyedJaggedTensor) -> None:
    """Refuses a batch whose lengths do not fit its values: the kernels would read and write memory out of bounds.

    TorchRec checks the first batch only.

    Raises:
        ValueError: lengths are negative, do not add up to the number of ids, or are not as many for each feature; ids
            or weights have several dimensions; or weights are not one for each id.
    """
    lengths_L, count, weights = features.lengths(), features.values().numel(), features.weights_or_none()
    for what, tensor in (("ids", features.values()), ("weights", weights)):
        if tensor is not None and tensor.dim() != 1:
            raise ValueError(f"the batch's {what} must have one dimension, got shape {tuple(tensor.shape)}")
    keys = len(features.keys())
    if not features.variable_stride_per_key() and lengths_L.numel() % max(keys, 1):
        raise ValueError(f"the batch must have as many bags of each of its {keys} features, got {lengths_L.numel()}")
    named, least = (int(lengths_L.sum()), int(lengths_L.min())) if lengths_L.numel() else (0, 0)
    if named != count or least < 0:
        raise ValueError(
            f"the lengths of the batch's bags must be those of its {count} ids, and not negative, got {named} in all,"
            f" the least {least}"
        )
    if weights is not None and weights.numel() != count:
        raise ValueError(f"the batch has {weights.numel()} weights for {count} ids")


def lengths_of(features: KeyedJaggedTensor) -> np.ndarray:
    """Returns ids per bag (F, B), on the host. The row of a feature with fewer bags ends in zeros."""
    lengths_L = features.lengths().detach().cpu().contiguous()
    if not features.variable_stride_per_key():
        return lengths_L.view(len(features.keys()), -1).numpy()
    strides = features.stride_per_key()
    lengths_FB = lengths_L.new_zeros(len(strides), max(strides, default=0))
    for row_B, some in zip(lengths_FB, lengths_L.split(strides), strict=True):
        row_B[: len(some)] = some
    return lengths_FB.numpy()


def bag_of_sample(repeats: Repeats, features: Sequence[str], strides: Sequence[int]) -> np.ndarray:
    """Returns (F, N) int64 on the host: for each feature, the bag of each sample.

    Args:
        features, strides: those wanted, and how many bags each has.

    Raises:
        ValueError: an index is no bag of its feature.
    """
    names, index = repeats
    index_FN = index.detach().cpu()[[names.index(name) for name in features]].long().contiguous()
    if index_FN.numel():
        for name, stride, low, high in zip(
            features, strides, index_FN.amin(dim=1).tolist(), index_FN.amax(dim=1).tolist(), strict=True
        ):
            if low < 0 or high >= stride:
                wrong = low if low < 0 else high
                raise ValueError(f"inverse index {wrong} of feature {name} is out of range: it has {stride} bags")
    return index_FN.numpy()


def repeated(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns the batch with bags repeated so that every sample has its own: for features that are not pooled.

    Features without inverse indices, which are not looked up, are left out.

    Raises:
        ValueError: as `bag_of_sample`.
    """
    repeats = features.inverse_indices()
    order = [i for i, key in enumerate(features.keys()) if key in repeats[0]]
    features = features.permute(order)
    keys, strides = features.keys(), features.stride_per_key()
    index_FN = torch.from_numpy(bag_of_sample(repeats, keys, strides))
    first_F = torch.tensor([0, *strides[:-1]], dtype=torch.int64, device="cpu").cumsum(0)
    bags = (index_FN + first_F.unsqueeze(1)).flatten().int().to(features.device())
    lengths, values, _ = torch.ops.fbgemm.permute_1D_sparse_data(bags, features.lengths(), features.values())
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, stride=index_FN.shape[1])


def samples_of(batch: object, depth: int = 2) -> int:
    """Returns how many samples a model is given, as its features or its first dense tensor say; 0: neither is there.

    Args:
        batch: the arguments of a forward, or what they are made of.
        depth: so far it is looked into what is neither.
    """
    if isinstance(batch, KeyedJaggedTensor):
        given = batch.inverse_indices_or_none()
        if given is None:
            return batch.stride()
        return int(given[1].shape[1]) if given[1].dim() == 2 else 0  # of another shape they are refused, elsewhere
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 0
    if depth == 0:
        return 0
    parts: list[object] = []
    if isinstance(batch, (tuple, list)):
        parts = list(batch)
    elif isinstance(batch, dict):
        parts = list(batch.values())
    elif hasattr(batch, "__dict__"):  # a dataclass of a dataset, say
        parts = list(vars(batch).values())
    parts.sort(key=lambda part: not isinstance(part, KeyedJaggedTensor))  # features know it best
    return next((found for part in parts if (found := samples_of(part, depth - 1))), 0)
