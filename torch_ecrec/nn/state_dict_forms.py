"""State dicts of a model in other forms than the sharded one of TorchRec: whole on trainer 0, or streamed.

    full_state_dict()        whole tensors, on trainer 0 alone: for `torch.save`
    streamed_state_dict()    tables without rows, which are fetched as a checkpoint is written: `checkpoint.py`

`TablesState.read` makes the three, of tables on the servers. Those that TorchRec shards are gathered for a whole one,
and are sharded tensors in a streamed one, which DCP writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_ecrec.compat import ShardedTensor, group_of
from torch_ecrec.nn.step import SparseStep


class StateDictForms:
    """What a `DistributedModelParallel` has of them."""

    _step: SparseStep
    state_dict: Callable[..., Any]
    fused_optimizer: Any

    def full_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, with whole tensors on the CPU, on trainer 0; {} on the others. Every trainer calls it.

        For `torch.save`, exports, comparisons. Trainer 0 needs memory for all tables; it asks the servers for them in
        portions, and the others for nothing.
        """
        made = _gathered(self._in_form("whole", self.state_dict))
        return made if self._step.session.trainer == 0 else {}

    def full_optim_state_dict(self) -> dict[str, Any]:
        """As `fused_optimizer.state_dict()`, likewise."""
        made = _gathered(self._in_form("whole", self.fused_optimizer.state_dict))
        return made if self._step.session.trainer == 0 else {}

    def streamed_state_dict(self) -> dict[str, Any]:
        """As `state_dict`, for `torch_ecrec.checkpoint`: tables have no rows yet. Every trainer calls it."""
        return self._in_form("streamed", self.state_dict)

    def streamed_optim_state_dict(self) -> dict[str, Any]:
        """As `fused_optimizer.state_dict()`, likewise."""
        return self._in_form("streamed", self.fused_optimizer.state_dict)

    def _in_form(self, form: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self._step.form = form
        try:
            return make()
        finally:
            self._step.form = "sharded"


def _gathered(value: Any) -> Any:
    """A state dict with TorchRec's sharded tensors whole on trainer 0; every trainer calls it."""
    if isinstance(value, dict):
        for key in list(value):
            value[key] = _gathered(value[key])
    elif isinstance(value, ShardedTensor):
        metadata = value.metadata()
        first = dist.get_rank(group_of(value)) == 0
        whole = torch.empty(metadata.size, dtype=metadata.tensor_properties.dtype, device="cpu") if first else None
        value.gather(dst=0, out=whole)
        return whole
    return value
