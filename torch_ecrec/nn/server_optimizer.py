"""The optimizer that the servers run, in the form that TorchRec's schedulers and checkpoints expect."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torch_ecrec.nn.tables_state import TablesState
from torch_ecrec.records.schema import Field


class ServerOptimizer(FusedOptimizer):
    """The optimizer that the servers run, as TorchRec's schedulers and checkpoints expect it: one group per slab.

    `param_groups[i]["lr"]` at the time of a backward is the learning rate of that step. `state_dict` and
    `load_state_dict` read and load the state on the servers, under TorchRec's names (`<table>.momentum1`).
    """

    def __init__(self, state: TablesState) -> None:
        slabs, tables = state.step.session.job.slabs, state.tables
        params = {
            state.key_of(table.name): torch.empty(table.rows, table.dim, dtype=torch.float32, device="meta")
            for table in tables.values()
        }
        keyed = list(zip(tables.values(), params.values(), strict=True))
        fields = {
            param: {f"{table.name}.{field.name}": TableField(state, table.name, field) for field in table.schema.state}
            for table, param in keyed
        }
        self.slabs = sorted({table.slab for table in tables.values()})
        groups = []
        for slab in self.slabs:
            spec = slabs[slab].optimizer
            mine = [param for table, param in keyed if table.slab == slab]
            groups.append({"params": mine, "lr": spec.lr, **dict(spec.fixed)})
        super().__init__(params, fields, groups)

    def step(self, closure: Any = None) -> None:
        """Nothing: the servers have stepped in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: no gradient stays here."""


class TableField:
    """A field of optimizer state of one table. `KeyedOptimizer` calls the two methods when it saves and loads."""

    def __init__(self, state: TablesState, name: str, field: Field) -> None:
        self._state, self._name, self._field = state, name, field

    def state_dict(self) -> Tensor | None:
        """(rows,) if there is one value per row, else (rows, D): sharded as the weights are."""
        return self._state.read(self._name, self._field)

    def load_state_dict(self, values: Tensor) -> None:
        """Loads what has the shape that `state_dict` gives, sharded in any way, or whole (then trainer 0's counts)."""
        self._state.load(self._name, self._field, values)
