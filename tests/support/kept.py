"""Small jobs, and checkpoints of them in a catalog, for tests of `torch_ecrec.storage`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_ecrec.processes.part_reader import slot_records
from torch_ecrec.protocol.messages import PartialRestore, Restored
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.storage import chain_reader
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.manifest import Encoding, Manifest
from torch_ecrec.storage.parts import PartWriter

EXACT = Encoding()


def small_job(trainers: int = 2, rows: int = 40) -> JobSpec:
    """Two slabs: two tables of float32 with row-wise Adagrad, one of float16 with Adam."""
    adagrad, adam = OptimizerSpec("rowwise_adagrad"), OptimizerSpec("adam")
    tables = (
        TableSpec("a", rows, 5, -1, 1, adagrad),
        TableSpec("b", 7, 5, -1, 1, adagrad),
        TableSpec("c", 9, 3, -1, 1, adam, "float16"),
    )
    return JobSpec(tables, CodeSpec(3, 2, 1), trainers)


def random_records(job: JobSpec, seed: int) -> list[Any]:
    """Of each slab, (rows, B) uint8: finite numbers."""
    random = np.random.default_rng(seed)
    numbers = [random.standard_normal((slab.rows, slab.schema.width)).astype(np.float32) for slab in job.slabs]
    return [records_of(n_NW, slab.schema) for n_NW, slab in zip(numbers, job.slabs, strict=True)]


class Shelf:
    """Writes checkpoints of a job whose records are `truth`, at a URL."""

    def __init__(self, url: str, job: JobSpec | None = None, slots: int = 2) -> None:
        self.catalog, self.slots = Catalog(url), slots
        self.job = job if job is not None else small_job()
        self.truth = random_records(self.job, 0)
        self.schemas = [slab.schema for slab in self.job.slabs]

    def change(self, slab: int, rows: Sequence[int], seed: int) -> None:
        """Gives some rows other values."""
        self.truth[slab][rows] = random_records(self.job, seed)[slab][rows]

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
        """A checkpoint: the parts, then its manifest. `rows`: of each slab; None: all."""
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
            tables = [[*zip((t.name for t in slab.tables), slab.first_rows, strict=True)] for slab in self.job.slabs]
            part = PartWriter(at, f"slot-{slot:04d}.part", self.schemas, encoding, slot, tables)
            try:
                for s, slab in enumerate(self.job.slabs):
                    of_slab = np.arange(slab.rows) if rows is None else np.array(rows[s], np.int64)
                    mine = of_slab[of_slab % self.slots == slot]
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
        for slab, rows_N, records_NB in chain_reader.records_of(self.catalog, manifest, **how):
            found[slab][rows_N] = records_NB
        return found

    def holds(self, manifest: Manifest) -> bool:
        """Whether a restore gives exactly the truth, and the dense model of its step."""
        same = all(np.array_equal(a, b) for a, b in zip(self.read(manifest), self.truth, strict=True))
        wanted = {trainer: self.dense(trainer, manifest.done) for trainer in range(self.job.trainers)}
        return same and chain_reader.dense_of(self.catalog, manifest) == wanted


def weights_of(shelf: Shelf, records: Sequence[Any], slab: int) -> Any:
    """The weights of records of a slab, float32."""
    return numbers_of(records[slab], shelf.schemas[slab])[:, : shelf.schemas[slab].dim]


def read_by_slots(restored: Restored, job: JobSpec) -> tuple[list[Any], list[Any]]:
    """As the servers of a cluster read the checkpoint that it begins with, each slot its own.

    Returns:
        Of each slab the records, (R, B) uint8, 255 where none is given; and how often each row was, (R,) int64.
    """
    layouts = job.layouts
    found = [np.full((slab.rows, slab.schema.nbytes), 255, np.uint8) for slab in job.slabs]
    times = [np.zeros(slab.rows, np.int64) for slab in job.slabs]
    for slot in range(job.code.slots):
        partial_restore = PartialRestore([(slot, 0, restored.done)], restored.url, restored.folder, restored.done)
        for slab, positions_N, records_NB in slot_records(partial_restore, job, slot):
            rows_N = layouts[slab].row_at(slot, positions_N)
            found[slab][rows_N] = records_NB
            times[slab][rows_N] += 1
    return found, times
