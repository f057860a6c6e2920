"""Reads and loads the state of a module's tables on the servers, field by field: weights, then optimizer state.

A record of a table with D = 4 and row-wise Adagrad has the fields `weight`, 4 numbers, and `momentum1`, one. Both
`state_dict` of the module and that of its optimizer are made of such fields, of which every trainer has its range of
rows (`state_dicts/shares.py`): nobody holds a table whole. They are read and loaded in portions of `CHUNK_BYTES`.

A load is a step of its own, of every trainer, in which each writes what it has of the table; before the first lookup or
read of any module of the model it ends the loading of first weights (`SparseStep.open`). What is written into a state
dict in place is loaded, too (`state_dicts/given.py`).

Shape legend: U rows, D embedding dim, C numbers of a field, W numbers of a record.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.optim.fused import FusedOptimizer

from torch_ecrec.compat.torch import ShardedTensor
from torch_ecrec.nn.slices import Table
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.records.halves import records_of
from torch_ecrec.records.schema import WEIGHT, Field
from torch_ecrec.state_dicts.columns import Columns
from torch_ecrec.state_dicts.given import GivenTensors, Place
from torch_ecrec.state_dicts.shares import Part, Shares, check_numbers, is_whole, parts_of, shape_of
from torch_ecrec.state_dicts.streamed import StreamedTable
from torch_ecrec.state_dicts.table_tensors import TableTensor, Tie

CHUNK_BYTES = 4 << 20  # of records read or loaded at a time


class TablesState:
    """The state of one sharded module's tables, on the servers.

    Args:
        step: shared by all modules of the model; has the backend.
        tables: by their names in the module.
        folder: what the module calls the module of its tables, see `key_of`.
        columns: the order of its features.
    """

    def __init__(self, step: SparseStep, tables: Mapping[str, Table], folder: str, columns: Columns) -> None:
        self.step, self.tables, self._folder, self._columns = step, tables, folder, columns
        self._given = GivenTensors()
        self._saved: dict[str, tuple[str, weakref.ref[Tensor]]] = {}  # by table: its key in a state dict, what is there
        step.on_written.append(self.load_written)
        step.on_pushed.append(self._given.on_trained)

    def key_of(self, name: str) -> str:
        """Returns the key of a table's weights in the module's state dict: `embedding_bags.t.weight`."""
        return f"{self._folder}.{name}.weight"

    @property
    def _shares(self) -> Shares:
        return self.step.shares

    # reading ----------------------------------------------------------------------------------------

    def read(self, name: str, field: Field) -> Tensor | None:
        """Returns this trainer's rows of a field, (rows, C), or (rows,) if the field has one number per row.

        `SparseStep.form` may ask for another form; every trainer must call it then. "whole": all rows on trainer 0,
        None on the others. "streamed": no rows yet (`state_dicts/streamed.py`).
        """
        self.step.open()
        if self.step.form != "sharded":
            self.step.load_written()
        if self.step.form == "whole":
            return self._rows_of(name, field, 0, self.tables[name].rows) if self._shares.trainer == 0 else None
        if self.step.form == "streamed":
            return self._streamed(name, field)
        values = self._given.written_to((name, field.name))
        if values is None:
            values = self._rows_of(name, field, *self._shares.mine(self.tables[name].rows))
        tie = self._tie_of(name, field)
        if tie is not None and self._shares.trainers == 1:
            values = TableTensor.of(values, tie)
        self._given.add((name, field.name), values)
        made = self._shares.sharded(self.tables[name].rows, values)
        if tie is not None and isinstance(made, ShardedTensor):
            tie.tie(made)
        return made

    def _tie_of(self, name: str, field: Field) -> Tie | None:
        """Returns the tie of the first table's weights, which stand for the collection; None for all other fields."""
        if field.name != WEIGHT or name != next(iter(self.tables)):
            return None
        return Tie(self._columns, {table: self.key_of(table) for table in self.tables})

    def _rows_of(self, name: str, field: Field, first: int, last: int) -> Tensor:
        """Reads rows [first, last) of a field from the servers."""
        table, dtype = self.tables[name], dtype_of(field)
        begin_byte, end_byte = table.schema.bytes_of(field.name)
        with torch.inference_mode(False):  # a tensor of inference does not count what is written into it
            out = torch.empty(last - first, field.values, dtype=dtype, device="cpu")
        for begin, end in chunks(table, first, last):
            records = self.step.session.read(
                table.table_group, torch.arange(begin, end, dtype=torch.int64, device="cpu") + table.first_row
            )
            values_Ub = records.view(torch.uint8)[:, begin_byte:end_byte].contiguous()
            out[begin - first : end - first] = values_Ub.view(dtype)
        return out.squeeze(1) if field.per_row else out

    def _streamed(self, name: str, field: Field) -> StreamedTable:
        rows, tie = self.tables[name].rows, self._tie_of(name, field)
        made = StreamedTable(
            what=f"`{field.name}` of table {name}",
            size=(rows,) if field.per_row else (rows, field.values),
            dtype=dtype_of(field),
            rows=self._shares.mine(rows),
            read=functools.partial(self._rows_of, name, field),
            load=functools.partial(self.load_parts, name, field),
        )
        if tie is not None:
            made.columns, made.tie = tie.order, tie
        return made

    def save_weights(self, destination: dict[str, Any], prefix: str) -> None:
        """Puts the weights of every table, (rows, D), into a state dict. Every trainer calls it.

        Where a model has this module under several names they are one tensor, as in torch: what is written into it is
        loaded, whichever name is loaded last.
        """
        for name, table in self.tables.items():
            key = f"{prefix}{self.key_of(name)}"
            value = self._under_another_key(name, key, destination)
            value = self.read(name, table.schema.fields[0]) if value is None else value
            destination[key] = value
            if value is not None:
                self._saved[name] = key, weakref.ref(value)

    def _under_another_key(self, name: str, key: str, destination: Mapping[str, Any]) -> Tensor | None:
        before, found = self._saved.get(name, (key, None))
        value = None if found is None or before == key or (name, WEIGHT) not in self._given.places else found()
        return value if destination.get(before) is value else None

    # loading ----------------------------------------------------------------------------------------

    def load(self, name: str, field: Field, value: Any) -> None:
        """Overwrites a field of a table with a tensor in the form that `read` returns, sharded in any way or whole.

        Every trainer calls it. Each loads the shards that it has; of a whole tensor, trainer 0's is loaded.

        Raises:
            TypeError: no tensor.
            ValueError: another shape, or parts of sums.
            RuntimeError: not all trainers load alike (`SparseStep.begin_load`); a `StreamedTable` that nothing was
                loaded through.
        """
        if isinstance(value, StreamedTable):
            return value.check_loaded()
        columns, rows = (self.tables[name].rows, field.values), (self.tables[name].rows,)
        wanted = [rows, columns] if field.per_row else [columns]
        if not isinstance(value, Tensor):
            got = type(value).__name__
            raise TypeError(f"`{field.name}` of table {name} is loaded from a tensor of shape {wanted[0]}, got {got}")
        if shape_of(value) not in wanted:
            raise ValueError(f"`{field.name}` of table {name} takes shape {wanted[0]} here, got {shape_of(value)}")
        try:
            parts = parts_of(value, self._shares.trainer)
            for part in parts:
                check_numbers(part.values)
        except ValueError as error:
            raise ValueError(f"`{field.name}` of table {name}: {error}") from None
        form = "whole" if is_whole(value) else "sharded"  # all trainers must load the same form
        self.load_parts(name, field, [len(part.values) for part in parts], parts, form)

    def load_parts(
        self, name: str, field: Field, rows: Sequence[int], parts: Iterable[Part], form: str = "in portions"
    ) -> None:
        """Overwrites a field with the parts that this trainer has. Every trainer calls it.

        Args:
            rows: of each part.
            parts: are taken one after the other, as they are loaded.
            form: the same on all trainers.
        """
        table = self.tables[name]
        count = sum(len(list(chunks(table, 0, many))) for many in rows)
        self._load((name, field.name), portions_of(table, parts), count, form)

    def load_drawn(self, name: str, draw: Callable[[int], Tensor]) -> None:
        """Overwrites a table's weights with what trainer 0 draws: (U, D) at a time, in row order."""
        table = self.tables[name]
        ranges = list(chunks(table, 0, table.rows)) if self._shares.trainer == 0 else []
        drawn = (Part(begin, 0, draw(end - begin)) for begin, end in ranges)
        self._load((name, WEIGHT), drawn, len(ranges), "drawn")

    def _load(self, place: Place, portions: Iterable[Part], count: int, form: str) -> None:
        """Loads the `count` portions that this trainer has."""
        if self.step.may_load():
            self.step.open()
            self._given.expire(place)
            self._overwrite(place, portions, count, form)

    def _overwrite(self, place: Place, portions: Iterable[Part], count: int, form: str) -> None:
        """Overwrites portion by portion. Each is a step of all trainers, with nothing from those that are done."""
        name, field_name = place
        table, session = self.tables[name], self.step.session
        field, (first_byte, _) = table.schema.field(field_name), table.schema.bytes_of(field_name)
        dtype, most = dtype_of(field), self.step.begin_load(f"`{field_name}` of table {name}, {form}", count)
        for part in portions:
            values = part.values.to(device="cpu", dtype=dtype).contiguous()
            if dtype.itemsize == 2 and bool((values.isinf() & part.values.isfinite().to(values.device)).any()):
                what = f"weights of table {name} are loaded that its {dtype} cannot hold: they become infinite"
                warnings.warn(what, stacklevel=2)
                session.not_exact(what)
            rows = torch.arange(len(values), dtype=torch.int64, device="cpu") + (table.first_row + part.row)
            session.overwrite(
                table.table_group, rows, values.view(torch.uint8), first_byte + part.column * dtype.itemsize
            )
            del part, values  # their memory is free before the next portion is read
        for _ in range(most - count):
            session.overwrite(table.table_group, torch.empty(0, dtype=torch.int64, device="cpu"), None)

    def load_initial(self, name: str, weights: Tensor) -> None:
        """Gives a table its initial weights (rows, D), with fresh optimizer state. Only trainer 0 calls it."""
        table, session = self.tables[name], self.step.session
        for begin, end in chunks(table, 0, table.rows):
            numbers = torch.zeros(end - begin, table.schema.width, dtype=torch.float32, device="cpu")
            numbers[:, : table.dim] = weights[begin:end]
            records = torch.from_numpy(records_of(numbers.numpy(), table.schema)).view(torch.float32)
            session.load(
                table.table_group, torch.arange(begin, end, dtype=torch.int64, device="cpu") + table.first_row, records
            )

    def load_weights(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads the weights that a state dict has, and extends the three lists as `nn.Module` does."""
        keys = {f"{prefix}{self.key_of(name)}": name for name in self.tables}
        for key, name in keys.items():
            if key in state_dict:
                try:
                    self.load(name, self.tables[name].schema.fields[0], state_dict[key])
                except ValueError as error:
                    error_msgs.append(str(error))
            elif strict:
                missing_keys.append(key)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in keys)

    # what was written into state dicts --------------------------------------------------------------

    def load_written(self, when: str) -> None:
        """Loads what was written into state dicts in place. For `when`, see `SparseStep.load_written`.

        Raises:
            RuntimeError: something was written, and not all trainers can be asked to load it.
        """
        if when != "all" and not self._given.places:
            return
        quick = when == "evaluation"
        if when in ("alone", "evaluation") and self._shares.trainers > 1:
            if self._given.any_written(quick):
                raise RuntimeError(
                    "a tensor of a table in a state dict was changed in place: before an evaluation or the end of a"
                    " step, every trainer calls `model.flush()`, or `model.load_state_dict(...)` with it"
                )
            return
        written = self._given.take_written(quick)
        tables = self.step.agree_on_written({self.tables[name].job_name for name, _ in written})
        for place in self._places():
            if tables is not None and self.tables[place[0]].job_name in tables and self.step.may_load():
                self._overwrite_written(place, written.get(place))

    def _places(self) -> list[Place]:
        return [(name, field.name) for name, table in self.tables.items() for field in table.schema.fields]

    def _overwrite_written(self, place: Place, values: Tensor | None) -> None:
        table = self.tables[place[0]]
        first, _ = self._shares.mine(table.rows)
        parts = [] if values is None else [Part(first, 0, values.view(len(values), -1))]
        portions = list(portions_of(table, parts))
        self._overwrite(place, portions, len(portions), "written")

    def on_training_lookup(self) -> None:
        """Warns of writes into state dicts that came too late to be loaded."""
        self._given.tell_of_lost_writes()


def chunks(table: Table, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields row ranges of [first, last), each of at most `CHUNK_BYTES` of the table's records."""
    rows = max(1, CHUNK_BYTES // table.schema.nbytes)
    for begin in range(first, last, rows):
        yield begin, min(begin + rows, last)


def portions_of(table: Table, parts: Iterable[Part]) -> Iterator[Part]:
    """Cuts parts of a table into portions. A part is released before the next one is taken."""
    for part in parts:
        for begin, end in chunks(table, 0, len(part.values)):
            yield Part(part.row + begin, part.column, part.values[begin:end])
        del part


def dtype_of(field: Field) -> torch.dtype:
    """Returns the torch dtype of a field's numbers."""
    dtype: torch.dtype = getattr(torch, field.dtype)
    return dtype


class ServerOptimizer(FusedOptimizer):
    """The optimizer that the servers run, in the form of TorchRec's schedulers and checkpoints: one group per table
    group.

    `param_groups[i]["lr"]` at the time of a backward is the learning rate of that step. `state_dict` and
    `load_state_dict` read and load the state on the servers, under TorchRec's names (`<table>.momentum1`).
    """

    def __init__(self, state: TablesState) -> None:
        table_groups, tables = state.step.session.job.table_groups, state.tables
        params = {
            state.key_of(table.name): torch.empty(table.rows, table.dim, dtype=torch.float32, device="meta")
            for table in tables.values()
        }
        keyed = list(zip(tables.values(), params.values(), strict=True))
        fields = {
            param: {f"{table.name}.{field.name}": TableField(state, table.name, field) for field in table.schema.state}
            for table, param in keyed
        }
        self.table_groups = sorted({table.table_group for table in tables.values()})
        groups = []
        for table_group in self.table_groups:
            spec = table_groups[table_group].optimizer
            mine = [param for table, param in keyed if table.table_group == table_group]
            groups.append({"params": mine, "lr": spec.lr, **dict(spec.fixed)})
        super().__init__(params, fields, groups)

    def step(self, closure: Any = None) -> None:
        """Does nothing: the servers have applied the step in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing: gradients of tables are sent, not kept."""


class TableField:
    """A field of one table's optimizer state. `KeyedOptimizer` calls its methods to save and to load."""

    def __init__(self, state: TablesState, name: str, field: Field) -> None:
        self._state, self._name, self._field = state, name, field

    def state_dict(self) -> Tensor | None:
        """Returns the field, (rows,) if it has one value per row, else (rows, D), sharded as the weights are."""
        return self._state.read(self._name, self._field)

    def load_state_dict(self, values: Tensor) -> None:
        """Loads a tensor of the shape of `state_dict`, sharded in any way, or whole: then trainer 0's is loaded."""
        self._state.load(self._name, self._field, values)
