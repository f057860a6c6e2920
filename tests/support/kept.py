"""Small jobs, and checkpoints of them in a catalog, for tests of `torch_ecrec.storage`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from torch_ecrec.errors import StoreUnavailable
from torch_ecrec.processes.part_reader import slot_records
from torch_ecrec.protocol.messages import PartialRestore, Restored
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.storage import chain_reader
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import Encoding, Manifest
from torch_ecrec.storage.parts import PartWriter

EXACT = Encoding()


def small_job(trainers: int = 2, rows: int = 40) -> JobSpec:
    """Two table groups: two tables of float32 with row-wise Adagrad, one of float16 with Adam."""
    adagrad, adam = OptimizerSpec("rowwise_adagrad"), OptimizerSpec("adam")
    tables = (
        TableSpec("a", rows, 5, -1, 1, adagrad),
        TableSpec("b", 7, 5, -1, 1, adagrad),
        TableSpec("c", 9, 3, -1, 1, adam, "float16"),
    )
    return JobSpec(tables, CodeSpec(3, 2, 1), trainers)


def random_records(job: JobSpec, seed: int) -> list[Any]:
    """Of each table group, (rows, B) uint8: finite numbers."""
    random = np.random.default_rng(seed)
    numbers = [
        random.standard_normal((table_group.rows, table_group.schema.width)).astype(np.float32)
        for table_group in job.table_groups
    ]
    return [records_of(n_NW, table_group.schema) for n_NW, table_group in zip(numbers, job.table_groups, strict=True)]


class Shelf:
    """Writes checkpoints of a job whose records are `truth`, at a URL."""

    def __init__(self, url: str, job: JobSpec | None = None, slots: int = 2) -> None:
        self.catalog, self.slots = Catalog(url), slots
        self.job = job if job is not None else small_job()
        self.truth = random_records(self.job, 0)
        self.schemas = [table_group.schema for table_group in self.job.table_groups]

    def change(self, table_group: int, rows: Sequence[int], seed: int) -> None:
        """Gives some rows other values."""
        self.truth[table_group][rows] = random_records(self.job, seed)[table_group][rows]

    def dense(self, trainer: int, done: int) -> tuple[list[int], bytes]:
        return [done, trainer, -1], f"dense of {trainer} at {done}".encode() * (trainer + 1)

    def write(
        self,
        done: int,
        base: Manifest | None = None,
        rows: Sequence[Sequence[int]] | None = None,
        encoding: Encoding = EXACT,
        folder: str = "",
    ) -> Manifest:
        """A checkpoint: the parts, then its manifest. `rows`: of each table group; None: all."""
        manifest = self.parts(done, base, rows, encoding, folder)
        return self.catalog.commit(manifest.id, manifest)

    def parts(
        self,
        done: int,
        base: Manifest | None = None,
        rows: Sequence[Sequence[int]] | None = None,
        encoding: Encoding = EXACT,
        folder: str = "",
    ) -> Manifest:
        """The parts of a checkpoint; returns the manifest that would make it one."""
        folder = folder or self.catalog.new_folder(done)
        at, entries = self.catalog.folder(folder), []
        for slot in range(self.slots):
            tables = [
                [*zip((t.name for t in table_group.tables), table_group.first_rows, strict=True)]
                for table_group in self.job.table_groups
            ]
            part = PartWriter(at, f"slot-{slot:04d}.part", self.schemas, encoding, slot, tables)
            try:
                for s, table_group in enumerate(self.job.table_groups):
                    of_table_group = np.arange(table_group.rows) if rows is None else np.array(rows[s], np.int64)
                    mine = of_table_group[of_table_group % self.slots == slot]
                    part.write(s, mine, self.truth[s][mine])
                if slot == 0:
                    for trainer in range(self.job.trainers):
                        part.write_dense(trainer, *self.dense(trainer, done))
                entries.append(part.close())
            finally:
                part.abandon()
        return Manifest(
            id=folder,
            done=done,
            kind="incremental" if base else "full",
            base=base.id if base else None,
            job=self.job.to_json(),
            parts=entries,
            encoding=encoding,
            written_s=1000.0 + done,
        )

    def read(self, manifest: Manifest, **how: Any) -> list[Any]:
        """Records as a restore gives them; rows that it does not give are all 255."""
        found = [np.full_like(truth, 255) for truth in self.truth]
        for table_group, rows_N, records_NB in chain_reader.records_of(self.catalog, manifest, **how):
            found[table_group][rows_N] = records_NB
        return found

    def holds(self, manifest: Manifest) -> bool:
        """Whether a restore gives exactly the truth, and the dense model of its step."""
        same = all(np.array_equal(a, b) for a, b in zip(self.read(manifest), self.truth, strict=True))
        wanted = {trainer: self.dense(trainer, manifest.done) for trainer in range(self.job.trainers)}
        return same and chain_reader.dense_of(self.catalog, manifest) == wanted


def weights_of(shelf: Shelf, records: Sequence[Any], table_group: int) -> Any:
    """The weights of records of a table group, float32."""
    return numbers_of(records[table_group], shelf.schemas[table_group])[:, : shelf.schemas[table_group].dim]


def read_by_slots(restored: Restored, job: JobSpec) -> tuple[list[Any], list[Any]]:
    """As the servers of a cluster read the checkpoint that it begins with, each slot its own.

    Returns:
        Of each table group the records, (R, B) uint8, 255 where none is given; and how often each row was, (R,) int64.
    """
    layouts = job.layouts
    found = [np.full((table_group.rows, table_group.schema.nbytes), 255, np.uint8) for table_group in job.table_groups]
    times = [np.zeros(table_group.rows, np.int64) for table_group in job.table_groups]
    for slot in range(job.code.slots):
        partial_restore = PartialRestore([(slot, 0, restored.done)], restored.url, restored.folder, restored.done)
        for table_group, positions_N, records_NB in slot_records(partial_restore, job, slot):
            rows_N = layouts[table_group].row_at(slot, positions_N)
            found[table_group][rows_N] = records_NB
            times[table_group][rows_N] += 1
    return found, times


def unreadable(monkeypatch: pytest.MonkeyPatch, *names: str, times: int = 1 << 30) -> list[str]:
    """Manifests of these cannot be read just now, so many times. Returns of which that was asked, as it is."""
    asked: list[str] = []
    read = Location.read

    def failing(self: Location, name: str) -> bytes:
        folder = self.url.rpartition("/")[2]
        if folder in names and len(asked) < times:
            asked.append(folder)
            raise StoreUnavailable(f"cannot read {self.url}/{name}: the store is busy")
        return read(self, name)

    monkeypatch.setattr(Location, "read", failing)
    return asked
