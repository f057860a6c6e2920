"""Checkpoints of the simulated cluster: who writes them there, in virtual time, and what was written.

    shelf = Shelf(clock, random)
    host.writer = shelf.writer(host, lambda: alive)     # of each server
    Router(..., manifests=shelf)                           # of each coordinator

Portions are written one by one, each a moment after the one before, so that steps come in between; a write, or the word
of its end, is lost with its process. What counts is what whoever writes manifests was told to commit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness.network import VirtualClock
from torch_ecrec.coordinator.checkpointing import Finished, Restorable, run_of
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.pieces import Key, Part
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.tiers.tiered import Reading
from torch_ecrec.server.capture import NextPortion, Portion
from torch_ecrec.server.process import CheckpointReader, CheckpointWriter
from torch_ecrec.spec.job import JobSpec, TableGroup
from torch_ecrec.transport.node import Node

WRITE_S = (0.0002, 0.006)  # of one portion
READ_S = (0.0, 0.0005)  # for what is on a disk, before that
COMMIT_S = (0.0002, 0.006)
PORTION_BYTES = 60


@dataclass
class WrittenPart:
    """One slot's part: portions, and the dense model's parts by trainer."""

    portions: list[Portion] = field(default_factory=list)
    dense: dict[int, Part] = field(default_factory=dict)


class Shelf:
    """All checkpoints of one simulated cluster; the manifests of its coordinators.

    Attributes:
        parts: (folder, slot) -> what was written last under that name.
        counts: those that count, in their order; `saves`: prioritised saves that were written whole.
        begun: (slot, life) of those that began anew -> the prioritised saves that it has read, oldest first.
        failing: says whether the next write, or read, fails, and why.
        hangs: what fails may be there later.
        others: folder -> records of checkpoints of other runs, of each table group (rows, B) uint8.
    """

    def __init__(self, clock: VirtualClock, seed: int, job: JobSpec) -> None:
        self._job = job
        self._clock, self._random = clock, random.Random(f"shelf {seed}")
        self.parts: dict[tuple[str, int], WrittenPart] = {}
        self.counts: list[Finished] = []
        self.saves: list[Finished] = []
        self.begun: dict[tuple[int, int], list[str]] = {}
        self.hangs = False
        self.others: dict[str, list[torch.Tensor]] = {}
        self.writes = 0
        self.failing: Callable[[int], str] = lambda write: ""
        self.on_write: Callable[[int, str], None] = lambda write, what: None

    def writer(self, host: Node, alive: Callable[[], bool]) -> CheckpointWriter:
        """Of a server, which writes as long as it lives."""
        return _VirtualScribe(self, host, alive)

    def reader(self, host: Node, alive: Callable[[], bool]) -> CheckpointReader:
        """Of a server, which reads as long as it lives."""
        return _VirtualReader(self, host, alive)

    def later(self, span_s: tuple[float, float], what: str, action: Callable[[str], None]) -> None:
        """One write: a moment later, with the reason if it failed."""

        def act() -> None:
            number, self.writes = self.writes, self.writes + 1
            action(self.failing(number))
            self.on_write(number, what)

        self._clock.later(self._random.uniform(*span_s), act)

    def commit(self, finished: Finished, done: Callable[[str | None, bool], None]) -> None:
        """See `Manifests`. The third one of each base is to be followed by a full one."""

        def act(reason: str) -> None:
            if not reason:
                (self.saves if finished.save else self.counts).append(finished)
            done(reason or None, bool(reason) or len(self.counts) % 3 == 0)

        self.later(COMMIT_S, "manifest", act)

    def discard(self, folder: str, save: bool = False) -> None:
        """See `Manifests`."""
        assert all(one.folder != folder for one in self.counts), f"{folder} counts"
        for key in [key for key in self.parts if key[0] == folder]:
            del self.parts[key]

    def newest(
        self,
        run: str,
        began_with: messages.Restored | None,
        done: Callable[[Restorable | None, str], None],
        read: bool = True,
    ) -> None:
        """See `Manifests`."""

        def act(reason: str) -> None:
            of_run = [
                messages.Restored("memory://shelf", one.folder, one.done, inexact=list(one.inexact))
                for one in self.counts
                if run_of(one.folder) == run
            ]
            if not of_run and began_with is not None:  # which may be another run's
                of_run = [messages.Restored("memory://shelf", began_with.folder, began_with.done)]
            if reason or not of_run:
                done(None, reason or "none was written")
            else:
                done((of_run[-1], self._job), "")

        self.later(COMMIT_S, "newest", act)

    def find(self, folder: str) -> Finished:
        """A checkpoint that counts, or a prioritised save."""
        return next(one for one in (*self.counts, *self.saves) if one.folder == folder)

    def records(self, job: JobSpec, finished: Finished, saves: Sequence[str] = ()) -> list[torch.Tensor]:
        """What a checkpoint holds, with all that it builds on, and these saves on it: of each table group (rows, B)
        uint8.

        Raises if a row lacks.
        """
        found = [
            torch.zeros(table_group.rows, table_group.schema.nbytes, dtype=torch.uint8)
            for table_group in job.table_groups
        ]
        have = [torch.zeros(table_group.rows, dtype=torch.bool) for table_group in job.table_groups]
        some = [self.find(name) for name in saves]
        assert all(one.base == finished.folder for one in some)
        for one in (*self._chain(finished), *some):
            for slot in one.parts:
                for portion in self.parts[one.folder, slot].portions:
                    rows_N = torch.from_numpy(portion.rows_N)
                    found[portion.table_group][rows_N] = torch.from_numpy(portion.records_NB)
                    have[portion.table_group][rows_N] = True
        assert all(bool(have_R.all()) for have_R in have), f"{finished.folder} lacks rows"
        return found

    def _chain(self, finished: Finished) -> list[Finished]:
        if not finished.base:
            return [finished]
        return [*self._chain(self.find(finished.base)), finished]


class _VirtualReader:
    def __init__(self, shelf: Shelf, host: Node, alive: Callable[[], bool]) -> None:
        self._shelf, self._host, self._alive = shelf, host, alive

    def read(
        self,
        partial_restore: messages.PartialRestore,
        job: JobSpec,
        slot: int,
        take: Callable[[int, Positions, Bytes], None],
        done: Callable[[], None],
        failed: Callable[[str, bool], None],
    ) -> _VirtualWriting:
        """See `CheckpointReader`. A table group at a time."""
        reading = _VirtualWriting()
        names = [name for name, _ in partial_restore.saves]
        life = next(life for other, life, _ in partial_restore.lives if other == slot)
        self._shelf.begun[slot, life] = names
        if (records := self._shelf.others.get(partial_restore.folder, [])) == []:
            records = self._shelf.records(job, self._shelf.find(partial_restore.folder), names)
        table_groups = list(enumerate(job.layouts))

        def go_on(reason: str) -> None:
            if self._alive() and not reading.cancelled:
                self._host.run(go_on_inside, reason)

        def go_on_inside(reason: str) -> None:
            if reason:
                failed(reason, self._shelf.hangs)
            elif not table_groups:
                done()
            else:
                table_group, layout = table_groups.pop()
                positions_N = np.arange(layout.rows_on(slot))[::-1].copy()
                take(table_group, positions_N, records[table_group].numpy()[layout.row_at(slot, positions_N)])
                self._shelf.later(WRITE_S, f"read of slot {slot}", go_on)

        self._shelf.later(WRITE_S, f"first read of slot {slot}", go_on)
        return reading


class _VirtualScribe:
    def __init__(self, shelf: Shelf, host: Node, alive: Callable[[], bool]) -> None:
        self._shelf, self._host, self._alive = shelf, host, alive

    def write(
        self,
        order: messages.Capture,
        slot: int,
        table_groups: Sequence[TableGroup],
        next_portion: NextPortion,
        dense: Sequence[tuple[Key, Part]],
        done: Callable[[dict[str, Any]], None],
        failed: Callable[[str], None],
    ) -> _VirtualWriting:
        """See `CheckpointWriter`."""
        assert (order.folder, slot) not in self._shelf.parts, f"slot {slot} of {order.folder} is written twice"
        part = self._shelf.parts[order.folder, slot] = WrittenPart()
        part.dense = {trainer: kept for (_, trainer), kept in dense}
        writing = _VirtualWriting()

        def go_on(reason: str) -> None:
            if not writing.cancelled and self._alive():
                self._host.run(go_on_inside, reason)

        def go_on_inside(reason: str) -> None:
            if reason:
                failed(reason)
                return
            portion = next_portion(PORTION_BYTES)
            while order.portion < 1 and isinstance(portion, Portion) and not len(portion.rows_N):
                portion = next_portion(PORTION_BYTES)  # nothing is written of it
            if isinstance(portion, Reading):
                portion.run()
                self._shelf.later(READ_S, f"reading of slot {slot}", go_on)
            elif portion is None:
                done({"bytes": sum(portion.records_NB.nbytes for portion in part.portions)})
            else:
                part.portions.append(portion)
                self._shelf.later(WRITE_S, f"portion of slot {slot}", go_on)

        self._shelf.later(WRITE_S, f"first of slot {slot}", go_on)
        return writing


class _VirtualWriting:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
