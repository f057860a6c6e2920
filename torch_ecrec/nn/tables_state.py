"""What the servers keep of a module's tables, read and loaded by column: weights first, then optimizer state.

A record of a table with D = 4 and row-wise Adagrad has columns [0, 4) of weights and [4, 5) of `momentum1`. Both
`state_dict` of the module and that of its optimizer are made of such columns, in chunks of rows.

What is loaded before the first lookup or read of any module of the model (`SparseStep.open`) are initial values, which
trainer 0 loads. Later, a load is a step of its own, of every trainer; trainer 0's values count then, too. What is
written into a state dict in place is loaded, too (`given.py`).

Shape legend: D embedding dim, M words, W numbers of a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from torch_ecrec.nn.given import GivenTensors
from torch_ecrec.nn.slices import Table
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.records.halves import numbers_of, records_of

CHUNK_BYTES = 4 << 20  # of records read or loaded at a time


class TablesState:
    """The tables of one sharded module.

    Args:
        step: shared by all modules of the model; has the backend.
        tables: by their names in the module.
        folder: what the module calls the module of its tables, see `key_of`.
    """

    def __init__(self, step: SparseStep, tables: Mapping[str, Table], folder: str) -> None:
        self.step, self.tables, self._folder = step, tables, folder
        self._given = GivenTensors()
        step.on_open.append(self._load_written)

    def key_of(self, name: str) -> str:
        """Of a table's weights in the module's state dict: `embedding_bags.t.weight`."""
        return f"{self._folder}.{name}.weight"

    def read_columns(self, name: str, first: int, last: int) -> Tensor:
        """Columns [first, last) of the records of a table, (rows, last - first). Every trainer calls it."""
        self.step.open()
        table = self.tables[name]
        with torch.inference_mode(False):  # a tensor of inference does not count what is written into it
            out = torch.empty(table.rows, last - first, dtype=table.dtype if last <= table.dim else torch.float32)
        for begin, end in chunks(table):
            out[begin:end] = self._numbers(table, torch.arange(begin, end) + table.first_row)[:, first:last]
        self._given.add((name, first, last), out)
        return out

    def load_columns(self, name: str, first: int, last: int, values: Tensor) -> None:
        """Overwrites columns [first, last) with `values` (rows, last - first). Every trainer calls it.

        Raises:
            ValueError: another shape.
            RuntimeError: not all trainers load alike (`SparseStep.begin_load`).
        """
        self._load_written()  # before these, not after
        self._given.expire((name, first, last))
        self._load(name, first, last, values)

    def _load_written(self) -> None:
        for (name, first, last), values in self._given.take_written():
            self._load(name, first, last, values)

    def _load(self, name: str, first: int, last: int, values: Any) -> None:
        table, session = self.tables[name], self.step.session
        values = whole(values, session.trainer)
        if tuple(values.shape) != (table.rows, last - first):
            raise ValueError(f"table {name} takes shape {(table.rows, last - first)} here, got {tuple(values.shape)}")
        in_training = self.step.is_open
        if not self.step.may_load():
            return
        if in_training:
            self.step.begin_load(f"columns {first} to {last - 1} of table {name}")
        elif session.trainer != 0 or session.restarted:
            return
        for begin, end in chunks(table):
            rows, records = torch.arange(begin, end) + table.first_row, None
            if session.trainer == 0:
                numbers = self._numbers(table, rows).clone()
                numbers[:, first:last] = values[begin:end]
                records = _records(table, numbers)
            if in_training:
                session.overwrite(table.slab, rows, records)
            elif records is not None:
                session.load(table.slab, rows, records)

    def load_initial(self, name: str, weights: Tensor) -> None:
        """Trainer 0: gives a table its first weights (rows, D), with fresh optimizer state."""
        table, session = self.tables[name], self.step.session
        for begin, end in chunks(table):
            numbers = torch.zeros(end - begin, table.schema.width)
            numbers[:, : table.dim] = weights[begin:end]
            session.load(table.slab, torch.arange(begin, end) + table.first_row, _records(table, numbers))

    def _numbers(self, table: Table, rows: Tensor) -> Tensor:
        """(U, W) float32, what records of some slab rows hold."""
        records = self.step.session.read(table.slab, rows)
        return torch.from_numpy(numbers_of(records.view(torch.uint8).numpy(), table.schema))

    def save_weights(self, destination: dict[str, Any], prefix: str) -> None:
        """Puts the weights of every table, (rows, D), into a state dict. Every trainer calls it."""
        for name, table in self.tables.items():
            destination[f"{prefix}{self.key_of(name)}"] = self.read_columns(name, 0, table.dim)

    def on_training_lookup(self) -> None:
        """The tables are about to change."""
        self._given.tell_of_lost_writes()
        self._given.expire()

    def load_weights(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the weights that a state dict has, and adds to the three lists as `nn.Module` wants it."""
        keys = {f"{prefix}{self.key_of(name)}": name for name in self.tables}
        for key, name in keys.items():
            if key in state_dict:
                try:
                    self.load_columns(name, 0, self.tables[name].dim, state_dict[key])
                except ValueError as error:
                    error_msgs.append(str(error))
            elif strict:
                missing_keys.append(key)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in keys)


def _records(table: Table, numbers: Tensor) -> Tensor:
    """(U, M) float32, the memory of records that hold `numbers` (U, W)."""
    return torch.from_numpy(records_of(numbers.numpy(), table.schema)).view(torch.float32)


def chunks(table: Table) -> Iterator[tuple[int, int]]:
    """Row ranges of a table, each of at most `CHUNK_BYTES` of records."""
    rows = max(1, CHUNK_BYTES // table.schema.nbytes)
    for begin in range(0, table.rows, rows):
        yield begin, min(begin + rows, table.rows)


def whole(value: Any, trainer: int) -> Tensor:
    """The full tensor of a plain, sharded or distributed one; a sharded one is gathered, in full on trainer 0 only."""
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size(), dtype=value.dtype) if trainer == 0 else None
        value.gather(0, out)
        return torch.empty(value.size(), device="meta") if out is None else out
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        raise TypeError(f"a tensor is needed to load a table, got {type(value).__name__}")
    return value.detach().cpu() if value.device.type != "meta" else value
