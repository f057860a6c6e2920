"""Tensors and arrays that share their memory, bfloat16 included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns the memory of a CPU tensor as an array. NumPy has no bfloat16: it becomes uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Returns the memory of an array as a tensor: the inverse of `as_array`. A uint16 array becomes bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
