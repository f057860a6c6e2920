"""The dtype of a table's embeddings: `output_dtype`, of `fused_params` or of a plan.

    EmbeddingBagCollectionSharder(fused_params={"output_dtype": SparseType.FP16})

As FBGEMM's: rows are looked up and pooled as float32, the result is rounded once, to nearest. Of gradients what arrives
is made float32 again, before it is divided by the number of trainers, which TorchRec does after.

Where tables of one collection of bags differ, all come out as the least dtype that has the values of each, as from
`torch.cat`; each is rounded before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.modules.embedding_configs import DataType

from torch_ecrec.compat.torch import attached_arguments

_DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


def as_output_dtype(value: Any) -> torch.dtype:
    """Returns the dtype that a value of `output_dtype` means; None is float32.

    Raises:
        ValueError: it is another one, or none of TorchRec's or FBGEMM's.
    """
    if value is None:
        return torch.float32
    if not isinstance(value, (DataType, SparseType)) or value.name not in _DTYPES:
        raise ValueError(f"`output_dtype`={value} is not supported; supported are {', '.join(_DTYPES)}")
    return _DTYPES[value.name]


def output_dtype(
    table: str, parameter: nn.Parameter, fused_params: Mapping[str, Any], planned: Mapping[str, Any]
) -> torch.dtype:
    """Returns the output dtype of a table. As in TorchRec, a plan's comes first, then that of the arguments of an
    attached optimizer, then the sharder's.

    Args:
        table: its name, for errors.
        parameter: its weights, to which an optimizer may be attached.
        fused_params: of the sharder that was given for its module.
        planned: wishes of a plan.

    Raises:
        ValueError: as `as_output_dtype`.
    """
    attached: Mapping[str, Any] = attached_arguments(parameter)
    found = [value for wishes in (planned, attached, fused_params) if (value := wishes.get("output_dtype")) is not None]
    try:
        return as_output_dtype(next(iter(found), None))
    except ValueError as error:
        raise ValueError(f"table {table}: {error}") from None
