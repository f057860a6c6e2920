"""The backend of tests of the nn layer: tables of records in memory, which every trainer holds in full.

`test_backend.py` holds it to what the real session does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pooled import as_rows, sums_of
from torch import Tensor

from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.merge import Merged
from torch_ecrec.spec.job import JobSpec


class FakeSession:
    """`EmbeddingBackend` in memory. Trainers exchange their pushes and apply them in trainer order.

    Args:
        job, trainer: as of a real session.
        before: that of an earlier life of the trainer: this one goes on after `step` of it.

    Attributes:
        hints: when servers want hints: "always", "now and then", "": never. It notes what is announced, of which step.
        after: step -> the tables as they were after it.
        rates: those of the push of each step from the first, those of an earlier life included.
        inexact: what was said to make the run so.
    """

    def __init__(self, job: JobSpec, trainer: int = 0, before: FakeSession | None = None, step: int = 0) -> None:
        self.job, self.trainer, self.trainers, self.step = job, trainer, job.trainers, 1
        self.records, self.pushed, self.rates, self.snapshot_every = [], [], [], 1
        self.restarted, self.resumed = before is not None, False
        self.after: dict[int, list[Tensor]] = {}
        self.parts: list[tuple[Tensor, list[int]]] = []
        self.ahead: list[tuple[int, list[Tensor]]] = []
        self.hints, self.announced = "", list[tuple[int, list[Tensor]]]()
        self.looked_up: list[tuple[int, list[Tensor]]] = []
        self.lookups, self.loads, self.opened, self.flushed, self.closed = 0, 0, 0, 0, 0
        self.snapshots: dict[int, tuple[Tensor, list[int]]] = {}
        self.inexact: list[str] = []
        self.reports: list[dict[str, float]] = []
        self.group = dist.new_group() if self.trainers > 1 else None
        for table_group in job.table_groups:
            numbers = torch.zeros(table_group.rows, table_group.schema.width, dtype=torch.float32, device="cpu")
            for table, first in zip(table_group.tables, table_group.first_rows, strict=True):
                random = torch.Generator().manual_seed(job.seed + first + table_group.dim)
                made = torch.empty(table.rows, table_group.dim, dtype=torch.float32, device="cpu")
                made.uniform_(table.low, table.high, generator=random)
                numbers[first : first + table.rows, : table_group.dim] = made
            self.records.append(torch.from_numpy(records_of(numbers.numpy(), table_group.schema)).view(torch.float32))
        if before is not None:
            self.step = step + 1
            self.records = [records.clone() for records in before.after[step]]
            self.rates = before.rates[:step]
            self.parts = [before.snapshots[step]] if step else []
            self.after[step] = before.after[step]

    def overtaken(self) -> bool:
        return False

    def arrange(self, table_group: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Descending: any order will do."""
        unique, inverse = torch.unique(rows, return_inverse=True)
        return unique.flip(0), len(unique) - 1 - inverse

    def trained_on(self, samples: int) -> None:
        pass

    def not_exact(self, what: str) -> None:
        self.inexact.append(what)

    def pooling(self, evaluation: bool) -> str:
        return "parts"

    def lookup_bags(self, rows: list[Tensor], bags: Sequence[BagRoute]) -> tuple[list[list[Tensor]], list[Tensor]]:
        sums = [
            sums_of(self.job.layouts[s], route, functools.partial(self._weights, s), self.job.table_groups[s].dim)
            for s, route in enumerate(bags)
        ]
        return self.lookup_parts(rows), sums

    def look_ahead(self, rows: list[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        self._check_training()
        self.ahead.append((self.step, rows))

    @property
    def wants_hints(self) -> bool:
        return self.hints == "always" or (self.hints == "now and then" and self.step // 3 % 2 == 0)

    def announce(self, later: int, rows: list[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        self._check_training()
        assert later > 0
        self.announced.append((self.step + later, rows))

    def lookup_parts(self, rows: list[Tensor], evaluation: bool = False) -> list[list[Tensor]]:
        """In two parts, the second of which may be empty."""
        self._check_training()
        self.lookups += 1
        self.looked_up.append((self.step, rows))
        for table_group, rows_U in zip(self.job.table_groups, rows, strict=True):
            assert rows_U.dtype == torch.int64 and rows_U.device == torch.device("cpu")
            assert len(rows_U.unique()) == len(rows_U) and (rows_U >= 0).all() and (rows_U < table_group.rows).all()
        return [
            list(self._weights(s, rows_U).split([(len(rows_U) + 1) // 2, len(rows_U) // 2]))
            for s, rows_U in enumerate(rows)
        ]

    def _numbers(self, table_group: int, rows: Tensor) -> Tensor:
        records = self.records[table_group][rows].view(torch.uint8)
        return torch.from_numpy(numbers_of(records.numpy(), self.job.table_groups[table_group].schema))

    def _weights(self, table_group: int, rows: Tensor) -> Tensor:
        return self._numbers(table_group, rows)[:, : self.job.table_groups[table_group].dim].contiguous()

    def push(
        self,
        rows: list[Tensor],
        gradients: list[Tensor],
        rates: list[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        ahead: Sequence[tuple[Sequence[Tensor], Sequence[BagRoute]]] = (),
    ) -> None:
        self._check_training()
        rows, gradients = as_rows(self.job.layouts, rows, gradients, bags, bag_gradients)
        parts: list[Any] = [(rows, gradients)]
        if self.trainers > 1:
            parts = [None] * self.trainers
            dist.all_gather_object(parts, (rows, gradients), group=self.group)
        self.pushed.append((rows, gradients))
        self.ahead += [(self.step + 1, list(its_rows)) for its_rows, _ in ahead]
        self.rates.append(rates)
        for s, (table_group, records) in enumerate(zip(self.job.table_groups, self.records, strict=True)):
            for part_rows, part_gradients in parts:
                assert part_gradients[s].shape == (len(part_rows[s]), table_group.dim)
                assert len(part_rows[s].unique()) == len(part_rows[s])
            rows_U, inverse = torch.unique(torch.cat([part[0][s] for part in parts]), return_inverse=True)
            gradient = torch.zeros(len(rows_U), table_group.dim, dtype=torch.float32, device="cpu")
            gradient.index_add_(0, inverse, torch.cat([p[1][s] for p in parts]))
            one = Merged(rows_U.numpy(), [gradient.numpy()], np.arange(len(rows_U))[None, :])
            spec = table_group.optimizer
            spec.optimizer.update_(
                records.numpy(), one, rates[s], self.step, dict(spec.fixed), weights=table_group.weights
            )
        self.step += 1
        self._keep()

    def _check_training(self) -> None:
        if self.opened != 1:
            raise RuntimeError("training has not begun: every trainer calls `loaded` once, before its first step")

    def _keep(self) -> None:
        self.after[self.step - 1] = [records.clone() for records in self.records]

    def read(self, table_group: int, rows: Tensor) -> Tensor:
        return self.records[table_group][rows]

    def load(self, table_group: int, rows: Tensor, records: Tensor) -> None:
        if self.restarted:
            return
        if self.trainer != 0 or self.opened:
            raise ValueError("only trainer 0 loads initial values, before the first step")
        self._check_rows(table_group, rows)
        assert records.shape == (len(rows), self.job.table_groups[table_group].schema.nbytes // 4)
        self.loads += 1
        self.records[table_group][rows] = records

    def _check_rows(self, table_group: int, rows: Tensor) -> None:
        if not bool((rows[1:] > rows[:-1]).all()) or not bool(
            ((rows >= 0) & (rows < self.job.table_groups[table_group].rows)).all()
        ):
            raise ValueError("`rows` must be ascending and unique")

    def overwrite(self, table_group: int, rows: Tensor, values: Tensor | None, first_byte: int = 0) -> None:
        self._check_training()
        mine: Any = None
        if values is not None:
            self._check_rows(table_group, rows)
            end, nbytes = first_byte + values.shape[1], self.job.table_groups[table_group].schema.nbytes
            if len(values) != len(rows) or not 0 <= first_byte < end <= nbytes:
                raise ValueError(f"`values` must have {len(rows)} rows of bytes of records, which have {nbytes}")
            mine = (table_group, rows, values, first_byte)
        if self.restarted and not self.resumed and self.step > 1:
            return
        parts = [mine]
        if self.trainers > 1:
            parts = [None] * self.trainers
            dist.all_gather_object(parts, mine, group=self.group)
        for part in parts:
            if part is not None:
                table_group, rows, values, first_byte = part
                self.records[table_group].view(torch.uint8)[rows, first_byte : first_byte + values.shape[1]] = values
        self.ahead.clear()
        if self.step > 1 and self.step - 1 not in self.snapshots:  # else a later life goes on before it
            self._keep()

    def loaded(self) -> None:
        self.opened += 1
        if self.trainers > 1:
            for records in self.records:
                dist.broadcast(records, 0, group=self.group)
        self._keep()

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        if not all(isinstance(number, int) for number in header):
            raise TypeError(f"`header` must be a list of int, got {header!r}")
        assert self.step - 1 not in self.snapshots
        assert header[0] == self.step - 1
        self.snapshots[self.step - 1] = (payload, header)

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        assert self.restarted
        self.resumed = True
        return self.step - 1, self.parts

    def report(self, **figures: float) -> None:
        self.reports.append(figures)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1

    def weights(self, table: str) -> Tensor:
        table_group, first = self.job.place_of_table[table]
        rows = next(t.rows for t in self.job.tables if t.name == table)
        return self._weights(table_group, torch.arange(first, first + rows, device="cpu"))
