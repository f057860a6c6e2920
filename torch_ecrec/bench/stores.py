"""Measures our store of records that do not fit in memory beside well-kept ones: RocksDB and LMDB.

All replay the same steps: each looks up the step's records, then changes them by an optimizer's step, as a slot does.
The records are those of real Criteo rows (`--data`) or of made-up ones whose ids follow Zipf's law. Each store is a
process of its own, and they take turns, block by block of steps, so that what the machine does meanwhile meets all.

    memory      all records in memory: what the steps themselves cost
    ours        `TieredStore`: as many frames as `--shares` says. What it takes with them is the budget of the others
    ours+ahead  the same, told which records the next steps ask for (`--ahead`): they are read before, and stay
    rocksdb     the block cache and two memtables are the budget. Tuned as FBGEMM tunes it for tables on SSDs: no log of
                writes, no compression, no checksums, bloom filters, direct I/O, universal compaction
    frames+rocksdb    our frames and policy, with such a RocksDB below in place of our file: its cache and memtables
                are three sixteenths of the budget, on top of it
    lmdb        nothing is synced. A map takes the page cache, which has no budget: so the process is put in a cgroup of
                the budget and `SLACK_BYTES` for its own work, where it may make one; else it is told as unbounded

RocksDB and LMDB alone are given what they do not have: the records of a step are read once, for its lookup, and stay in
an array until they are changed, which costs them no memory of the budget.

`own CPU ms` is beyond the CPU time of the same steps in memory. `reads` are of the disk: requests of ours, system calls
of RocksDB, major faults of LMDB. `hit rate` is of those records of a step that were written before; `LRU` and `Belady`
(which knows the future) are computed for as many frames. `CPU us/read` is of a record that has no frame, from when it
is asked for until it has one.

`--reads` measures how blocks come from the disk alone: our rings of io_uring, the package `liburing`, threads.

Does not measure training: see `bench tiers`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.tiers import PROBE_BLOCKS, probe_file
from torch_ecrec.codec import seals
from torch_ecrec.codec.seals import SEAL_BYTES, SealsOf
from torch_ecrec.demo import criteo
from torch_ecrec.observe.progress import Progress
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.pages import untouched
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import First, MemoryStore, RecordStore, Use, View
from torch_ecrec.records.tiers import tiered
from torch_ecrec.records.tiers.disk import BLOCK_BYTES, DEPTH, Numbers, Reader, ScratchFile, Threads, reader
from torch_ecrec.records.tiers.tiered import FRAME_BYTES, ROW_BYTES, TieredStore
from torch_ecrec.runtime.checks import require
from torch_ecrec.server.announced import SHARE
from torch_ecrec.spec.settings import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "rowwise_adagrad"
LR = 0.02
SLACK_BYTES = 48 << 20  # of a bounded process, for what is not its store's
AT_ONCE = 1 << 13  # records that are filled or compared
MAP_BYTES = 1 << 36  # of addresses, for LMDB: its file grows as it must
AHEAD = "ours+ahead"
OURS = "ours", AHEAD
PACKAGES = {"rocksdb": "rocksdict", "frames+rocksdb": "rocksdict", "lmdb": "lmdb"}
SHOWN = (
    *("in memory", "pass", "store", "CPU ms", "own CPU ms", "own CPU / ours", "wall ms", "wall / ours", "reads"),
    *("MB read", "MB written", "resident MB", "hit rate", "LRU", "Belady", "hits / Belady"),
    "CPU us/read",
)
READ_BATCHES = (32, 512, 4096)  # reads that are asked for at once


# what is replayed ---------------------------------------------------------------------------------


class Trace(NamedTuple):
    """The records that each step asks for."""

    rows: int
    steps: list[Positions]  # of all passes, one behind the other: ascending, each once
    per_pass: int
    filled: bool  # all records were written before


def trace_of(arguments: argparse.Namespace) -> Trace:
    """Returns the trace of real rows, the later passes in another order, or of made-up ones, which never come again."""
    rng = np.random.default_rng(arguments.seed)
    if arguments.data is not None:
        clicks = criteo.read(arguments.data, 2**31 - 1)
        count = len(clicks) // arguments.batch_size
        require(count > 0, f"`--data` has {len(clicks)} rows, less than a batch of {arguments.batch_size}")
        ids = clicks.categories[: count * arguments.batch_size].astype(np.int64)
        ids += np.arange(ids.shape[1]) << 31
        known, which = np.unique(ids.reshape(-1), return_inverse=True)
        rows = len(known)
        of_samples = rng.permutation(rows)[which].reshape(-1, ids.shape[1])
        orders = [np.arange(len(of_samples)), *(rng.permutation(len(of_samples)) for _ in range(arguments.passes - 1))]
        batches = [batch for order in orders for batch in of_samples[order].reshape(count, -1)]
    else:
        count, rows = arguments.steps, criteo.CATEGORIES * arguments.rows
        of_tables = rng.permutation(rows).reshape(criteo.CATEGORIES, -1)

        def draw() -> Positions:
            shape = criteo.CATEGORIES, arguments.batch_size
            ranks = workload.zipf_ranks(rng, math.prod(shape), arguments.rows, arguments.zipf).reshape(shape)
            return np.take_along_axis(of_tables, ranks, axis=1).reshape(-1)

        batches = [draw() for _ in range(count * arguments.passes)]
    steps = [np.unique(batch) for batch in batches]
    return Trace(rows, steps, count, arguments.data is None)


def hit_rates(trace: Trace, frames: int, foresees: bool) -> list[float]:
    """Returns the hit rate of each pass of LRU, or of Belady's policy, with so many frames.

    They are empty at first, or, where all records were written before, have any.
    """
    known_P, held_P = np.full(trace.rows, trace.filled), np.zeros(trace.rows, np.bool_)
    keep_P = np.zeros(trace.rows, np.int64)  # what has the least goes first
    never = len(trace.steps)
    next_P, soon = np.full(trace.rows, never), []
    for number in reversed(range(never)):
        rows = trace.steps[number]
        soon.append(next_P[rows])
        next_P[rows] = number
    if trace.filled:
        held_P[np.random.default_rng(0).permutation(trace.rows)[:frames]] = True
        keep_P[:] = -next_P if foresees else -1
    hits, asked = np.zeros(never), np.zeros(never)
    for number, rows in enumerate(trace.steps):
        hits[number], asked[number] = held_P[rows].sum(), known_P[rows].sum()
        keep_P[rows] = -soon[-1 - number] if foresees else number
        held_P[rows] = known_P[rows] = True
        (held,) = np.nonzero(held_P)
        if len(held) > frames:
            out = np.argpartition(keep_P[held], len(held) - frames)[: len(held) - frames]
            held_P[held[out]] = False
    per_pass = zip(hits.reshape(-1, trace.per_pass), asked.reshape(-1, trace.per_pass), strict=True)
    return [float(of_pass.sum() / max(1, of_asked.sum())) for of_pass, of_asked in per_pass]


# other stores -------------------------------------------------------------------------------------


class Keyed:
    """A store that has a value for each key, as a `RecordStore`. Those of the last call are in an array.

    Args:
        rows, nbytes: as of `RecordStore`.
    """

    in_place = False
    sealed = True

    def __init__(self, rows: int, nbytes: int) -> None:
        self.rows, self.nbytes, self.frames = rows, nbytes, 0
        self._first: First | None = None
        self._held: Positions | None = None
        self._view = View(np.empty((0, nbytes), np.uint8), None, np.empty(0, np.int64))
        self._changed = False

    def fetch(self, positions_U: Positions) -> tuple[Any, Bytes]:
        """Returns which of some records were ever written, (U,) bool, and these, in order, with their seals."""
        raise NotImplementedError

    def put(self, positions_U: Positions, cells_UC: Bytes) -> None:
        """Writes records with their seals."""
        raise NotImplementedError

    def begin_(self, first: First) -> None:
        self._first = first

    def at(self, positions_U: Positions, use: Use) -> View:
        same = self._held is not None and np.array_equal(self._held, positions_U)
        if not same:
            self.flush()
            self._held = None
            there_U = positions_U >= 0
            at_U = np.where(there_U, np.cumsum(there_U) - 1, -1)
            records_XB, seals_X, _ = self._read(positions_U[there_U])
            self._held, self._view = np.array(positions_U), View(records_XB, seals_X, at_U)
        self._changed |= use is not Use.READ
        return self._view

    def flush(self) -> None:
        """Writes what was changed since the last call."""
        if self._changed and self._held is not None and self._view.seals_X is not None:
            positions_X = self._held[self._held >= 0]
            self.put(positions_X, cells_of(self._view.records_XB, self._view.seals_X))
        self._changed = False

    def absent(self, positions_U: Positions) -> None:
        return None

    def look(self, positions_U: Positions, read: Any = None) -> View:
        self.flush()
        return self._read(positions_U)

    def _read(self, positions_U: Positions) -> View:
        there_U, cells_VC = self.fetch(positions_U)
        if there_U.all():
            return View(np.ascontiguousarray(cells_VC[:, : self.nbytes]), seals_in(cells_VC), np.arange(len(cells_VC)))
        records_UB = np.zeros((len(positions_U), self.nbytes), np.uint8)
        seals_U: SealsOf = np.zeros(len(positions_U), np.uint32)
        records_UB[there_U], seals_U[there_U] = cells_VC[:, : self.nbytes], seals_in(cells_VC)
        if self._first is not None:
            values_VB = self._first(positions_U[~there_U])
            records_UB[~there_U], seals_U[~there_U] = values_VB, seals.seals_of(values_VB)
        return View(records_UB, seals_U, np.arange(len(positions_U)))

    def seals_at(self, positions_U: Positions) -> SealsOf:
        found = self.look(positions_U).seals_X
        assert found is not None
        return found

    def broken_run(self, first: int, end: int) -> Positions:
        return np.empty(0, np.int64)  # none is in memory

    def below(self) -> Positions:
        return np.empty(0, np.int64)

    def flip_below_(self, position: int, bit: int) -> None:
        raise TypeError("no bit flips here")

    def keep_last_(self, runs: Sequence[tuple[int, int]]) -> None:
        raise TypeError("nothing is kept here")

    def take_damaged(self) -> Positions:
        return np.empty(0, np.int64)

    def want(self, positions_U: Positions) -> tuple[Any, bool]:
        return None, False

    def arrive(self, reading: Any) -> None:
        raise TypeError("nothing is read ahead here")

    def pin(self, later: Sequence[Positions]) -> None:
        pass

    def scan(self, first: int, end: int, most_bytes: int) -> tuple[int, None]:
        return end, None

    def scanned(self, reading: Any) -> tuple[Positions, Positions]:
        raise TypeError("nothing is looked through here")

    def soon(self) -> None:
        return None

    def settle(self, reading: Any) -> None:
        raise TypeError("nothing is read ahead here")

    def prepare(self, begin: int, end: int) -> None:
        pass

    @property
    def memory_bytes(self) -> int:
        return 0

    def figures(self) -> None:
        return None


class Rocks:
    """Cells by numbers, in RocksDB, by the package `rocksdict`.

    Args:
        folder: where its files go; made.
        cell_bytes: of each.
        cache_bytes: of the cache of blocks.
        memtables_bytes: of both memtables.
    """

    def __init__(self, folder: Path, cell_bytes: int, cache_bytes: int, memtables_bytes: int) -> None:
        rocks: Any = importlib.import_module("rocksdict")
        table, options = rocks.BlockBasedOptions(), rocks.Options(raw_mode=True)
        table.set_block_cache(rocks.Cache(cache_bytes))
        table.set_block_size(BLOCK_BYTES)
        table.set_bloom_filter(10, False)
        table.set_checksum_type(rocks.ChecksumType.no_checksum())
        table.set_data_block_index_type(rocks.DataBlockIndexType.binary_and_hash())
        options.set_block_based_table_factory(table)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_compaction_style(rocks.DBCompactionStyle.universal())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_write_buffer_size(memtables_bytes // 2)
        options.set_max_write_buffer_number(2)
        options.set_max_background_jobs(2)
        options.set_max_open_files(-1)
        options.create_if_missing(True)
        self._cell_bytes, self._new_batch = cell_bytes, rocks.WriteBatch
        self._write_options, read_options = rocks.WriteOptions(), rocks.ReadOptions()
        self._write_options.disable_wal = True
        read_options.set_verify_checksums(False)
        self._db = rocks.Rdict(str(folder), options)
        self._db.set_read_options(read_options)

    @staticmethod
    def _keys(numbers_U: Positions) -> list[bytes]:
        keys: list[bytes] = numbers_U.astype(">u4").view("V4").tolist()
        return keys

    def get(self, numbers_U: Positions) -> tuple[Any, Bytes]:
        """Returns which of some cells there are, (U,) bool, and these, in order."""
        values = self._db.get(self._keys(numbers_U))
        found = [value for value in values if value is not None]
        there_U = np.array([value is not None for value in values], np.bool_)
        return there_U, np.frombuffer(b"".join(found), np.uint8).reshape(-1, self._cell_bytes)

    def put(self, numbers_U: Positions, cells_UC: Bytes) -> None:
        """Writes (U, C) bytes to cells, whole ones only."""
        batch, values = self._new_batch(raw_mode=True), cells_UC.view(f"V{self._cell_bytes}")[:, 0].tolist()
        for key, value in zip(self._keys(numbers_U), values, strict=True):
            batch[key] = value
        self._db.write(batch, self._write_options)


class RocksDB(Keyed):
    """Records in RocksDB. Three quarters of the budget are its block cache, the others its memtables."""

    def __init__(self, rows: int, nbytes: int, folder: Path, budget_bytes: int) -> None:
        super().__init__(rows, nbytes)
        self._rocks = Rocks(folder / "rocksdb", nbytes + SEAL_BYTES, budget_bytes * 3 // 4, budget_bytes // 4)

    def fetch(self, positions_U: Positions) -> tuple[Any, Bytes]:
        return self._rocks.get(positions_U)

    def put(self, positions_U: Positions, cells_UC: Bytes) -> None:
        self._rocks.put(positions_U, cells_UC)


class RocksLog:
    """RocksDB in place of the `SegmentLog` of a `TieredStore`: a place is the number of a cell, and is used again.

    Args:
        rocks: where records are.
        rows: how many there may be.
        memory_bytes: it takes.
    """

    per_segment, open_segment = 1, -1  # none is in memory
    failed_reads = file_bytes = written_bytes = 0

    def __init__(self, rocks: Rocks, rows: int, memory_bytes: int) -> None:
        self._rocks, self.memory_bytes, self.reads = rocks, memory_bytes, 0
        self._free = np.arange(rows)[::-1].copy()
        self._left = rows  # of `_free`
        self._begun = np.zeros(rows, np.int64)

    def append(self, records_XW: Any, at_U: Positions) -> Positions:
        places_U = self._free[self._left - len(at_U) : self._left].copy()
        self._left -= len(at_U)
        self._begun[places_U] += 1
        self._rocks.put(places_U, records_XW.view(np.uint8)[at_U])
        return places_U

    def versions(self, places_U: Positions) -> Positions:
        return self._begun[places_U]

    def let_go(self, places_U: Positions) -> None:
        self._free[self._left : self._left + len(places_U)] = places_U
        self._left += len(places_U)

    def to_clean(self) -> None:
        return None

    def read(self, places_U: Positions, seals_U: SealsOf, into_XB: Bytes, at_U: Positions, apart: bool = False) -> Any:
        there_U, into_XB[at_U] = self._rocks.get(places_U)
        require(bool(there_U.all()), "RocksDB has lost a record")
        return ~there_U


def cells_of(records_UB: Bytes, seals_U: SealsOf) -> Bytes:
    """Returns records with their seals behind them, (U, C) uint8."""
    return np.concatenate([records_UB, seals_U.view(np.uint8).reshape(-1, SEAL_BYTES)], axis=1)


def seals_in(cells_UC: Bytes) -> SealsOf:
    """Returns the seals of cells, (U,) uint32."""
    return np.ascontiguousarray(cells_UC[:, -SEAL_BYTES:]).view(np.uint32)[:, 0]


class LMDB(Keyed):
    """Records in LMDB, by the package `lmdb`. It has no memory of its own: its file is mapped."""

    def __init__(self, rows: int, nbytes: int, folder: Path) -> None:
        super().__init__(rows, nbytes)
        lmdb: Any = importlib.import_module("lmdb")
        self._env = lmdb.open(
            str(folder / "lmdb"),
            map_size=MAP_BYTES,
            max_dbs=1,
            sync=False,
            metasync=False,
            writemap=True,
            map_async=True,
            readahead=False,
            lock=False,
        )
        self._db = self._env.open_db(b"records", integerkey=True)

    @staticmethod
    def _keys(positions_U: Positions) -> list[bytes]:
        keys: list[bytes] = positions_U.astype(np.uint32).view("V4").tolist()
        return keys

    def fetch(self, positions_U: Positions) -> tuple[Any, Bytes]:
        with self._env.begin(db=self._db, buffers=True) as transaction:
            found = transaction.cursor().getmulti(self._keys(positions_U))
            cells_VC = np.frombuffer(b"".join(value for _, value in found), np.uint8)
            cells_VC = cells_VC.reshape(-1, self.nbytes + SEAL_BYTES)
            if len(found) == len(positions_U):
                return np.ones(len(found), np.bool_), cells_VC
            positions_V = np.frombuffer(b"".join(key for key, _ in found), np.uint32)
            return np.isin(positions_U, positions_V), cells_VC

    def put(self, positions_U: Positions, cells_UC: Bytes) -> None:
        values = cells_UC.view(f"V{cells_UC.shape[1]}")[:, 0].tolist()
        with self._env.begin(db=self._db, write=True) as transaction:
            transaction.cursor().putmulti(list(zip(self._keys(positions_U), values, strict=True)))


# the process of one store -------------------------------------------------------------------------


@dataclasses.dataclass
class Job:
    """What the process of a store is told."""

    store: str
    trace: str  # a file of NumPy's
    folder: str
    rows: int
    dim: int
    frames: int
    budget_bytes: int  # 0: it is ours, and says it
    filled: bool
    seed: int
    ahead: int  # steps


class Replay:
    """Replays steps on one store."""

    def __init__(self, job: Job) -> None:
        self.job = job
        with np.load(job.trace) as found:
            cuts, positions = found["cuts"], found["positions"]
        self.steps = np.split(positions, cuts)
        self.kind = optimizer(KIND)
        self.schema = self.kind.schema(job.dim)
        most = max(AT_ONCE, max(map(len, self.steps)))
        self.gradients = np.random.default_rng(job.seed).standard_normal((most, job.dim), np.float32)
        self._number, self._known_P = 0, np.full(job.rows, job.filled)
        tiered.warm()
        self._use(Shard(self.schema, 2, 0))  # compiles, or loads what is compiled
        self._use(Shard(self.schema, 2, 0, stores=self._tiny))
        if job.store in PACKAGES:
            importlib.import_module(PACKAGES[job.store])
        self.process = psutil.Process()
        self.before_bytes = self.process.memory_info().rss
        self.read_cpu_s, self.read = 0.0, 0

    def open(self) -> None:
        """Makes the store, whose records have their initial values."""
        job = self.job
        self.shard = Shard(self.schema, job.rows, 0, stores=self._make)
        self.store = self.shard._stores[False]
        initial = InitialRecords(self.schema, job.seed, (0,), (-0.1,), (0.1,), (0,))
        self.shard.initialise_(initial.of)

    def _tiny(self, rows: int, nbytes: int, parity: bool, sealed: bool) -> RecordStore:
        return TieredStore(rows, nbytes, ScratchFile(Path(self.job.folder), reader()), 1)

    def _make(self, rows: int, nbytes: int, parity: bool, sealed: bool) -> RecordStore:
        folder, name = Path(self.job.folder), self.job.store
        if parity or name == "memory":
            return MemoryStore(rows, nbytes)
        if name in OURS:
            return TieredStore(rows, nbytes, ScratchFile(folder, reader()), self.job.frames)
        if name == "rocksdb":
            return RocksDB(rows, nbytes, folder, self.job.budget_bytes)
        if name == "frames+rocksdb":
            part = self.job.budget_bytes // 16
            found = TieredStore(rows, nbytes, ScratchFile(folder, reader()), self.job.frames)
            rocks = Rocks(folder / "rocksdb", nbytes, part, 2 * part)
            found._log = RocksLog(rocks, rows, 3 * part)  # type: ignore[assignment]
            return found
        return LMDB(rows, nbytes, folder)

    def _use(self, shard: Shard) -> None:
        both = np.arange(2)
        for number in range(2):
            shard.want(both)
            shard.gather_weights(both)
            shard.apply_(self.kind, merge([(both, self.gradients[:2])]), LR, number + 1, {})
        shard.gather(both)

    @property
    def budget_bytes(self) -> int:
        """The memory of our store once all of its frames are in use."""
        assert isinstance(self.store, TieredStore)
        fixed = self.job.rows * ROW_BYTES + self.store.file.memory_bytes
        return fixed + self.job.frames * (self.store.nbytes + FRAME_BYTES)

    def step(self, positions_U: Positions, later: Sequence[Positions] = ()) -> None:
        """Looks up some records, and changes them. `later`: those of the next steps, which are read before."""
        self._number += 1
        merged = merge([(positions_U, self.gradients[: len(positions_U)])])
        pinned: list[Positions] = []
        for ahead_U in later:  # as `server/announced.py` does
            if sum(map(len, pinned)) + len(ahead_U) <= self.shard.frames // SHARE:
                pinned.append(ahead_U)
        self.shard.pin(pinned)
        for wanted_U in (positions_U, *pinned):
            begin_s = time.process_time()
            reading, _ = self.shard.want(wanted_U)
            if reading is not None:
                reading.run()
                self.shard.arrive(reading)
                self.read_cpu_s += time.process_time() - begin_s
                self.read += len(reading.positions_A)
        self.shard.gather_weights(positions_U)
        self.shard.apply_(self.kind, merged, LR, self._number, {})

    def fill(self) -> None:
        """Writes all records, in any order."""
        order = np.random.default_rng(self.job.seed + 1).permutation(self.job.rows)
        most = max(1, min(AT_ONCE, self.job.frames // 4))
        for begin in range(0, len(order), most):
            self.step(np.sort(order[begin : begin + most]))

    def block(self, first: int, end: int) -> dict[str, Any]:
        """Replays some steps; returns their figures, sums."""
        known = new = 0
        for positions_U in self.steps[first:end]:
            of_these = int(self._known_P[positions_U].sum())
            known, new = known + of_these, new + len(positions_U) - of_these
            self._known_P[positions_U] = True
        before = self._counts()
        ahead = self.job.ahead if self.job.store == AHEAD else 0
        for number in range(first, end):
            self.step(self.steps[number], self.steps[number + 1 : number + 1 + ahead])
        if isinstance(self.store, Keyed):
            self.store.flush()
        after = self._counts()
        found: dict[str, Any] = {name: after[name] - before[name] for name in before}
        return {**found, "known": known, "new": new, "resident_bytes": self.process.memory_info().rss}

    def _counts(self) -> dict[str, float]:
        disk = self.process.io_counters()
        found = {
            "cpu_s": time.process_time(),
            "wall_s": time.perf_counter(),
            "read_bytes": disk.read_bytes,
            "write_bytes": disk.write_bytes,
            "read_cpu_s": self.read_cpu_s,
            "read": self.read,
            "reads": 0,
            "misses": 0,
        }
        if isinstance(self.store, TieredStore):
            found["reads"], found["misses"] = self.store.file.reads, self.store.misses
        if "rocksdb" in self.job.store:
            found["reads"] = disk.read_count
        elif self.job.store == "lmdb":
            found["reads"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return found

    def digest(self) -> str:
        """Returns a hash of all records, by which two stores have the same."""
        found = hashlib.sha256()
        for begin in range(0, self.job.rows, AT_ONCE):
            found.update(self.shard.gather(np.arange(begin, min(self.job.rows, begin + AT_ONCE))).tobytes())
        return found.hexdigest()


def confine(limit_bytes: int) -> tuple[str, str]:
    """Puts this process in a cgroup of its own with so much memory.

    Returns:
        How it is bounded, for people; and the folder of the group, "": there is none.
    """
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = Path("/sys/fs/cgroup"), "memory.max"
            if "memory" in controllers.split(","):
                root, name = root / "memory", "memory.limit_in_bytes"
            elif controllers:
                continue
            group = root / path.strip("/") / f"torch_ecrec-{os.getpid()}"
            if not (group.parent / name).exists():
                continue
            group.mkdir()
            (group / name).write_text(str(limit_bytes))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return "a cgroup", str(group)
    except OSError as error:
        return f"unbounded: no cgroup ({error.strerror})", ""
    return "unbounded: no cgroup with memory", ""


def serve(text: str) -> None:
    """Is the process of a store: a job as JSON, then a request a line, each with an answer."""
    replay = Replay(Job(**json.loads(text)))
    bounded, cgroup = "its own", ""
    if replay.job.store == "lmdb":
        bounded, cgroup = confine(replay.job.budget_bytes + SLACK_BYTES)
    replay.open()
    if replay.job.filled:
        replay.fill()
    hello = {"bounded": bounded, "cgroup": cgroup, "before_bytes": replay.before_bytes}
    if replay.job.store == "ours":
        hello["budget_bytes"] = replay.budget_bytes
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = replay.block(*asked["block"]) if "block" in asked else {"digest": replay.digest()}
        print(json.dumps(answer), flush=True)


class Running:
    """The process of a store, from outside. A context manager; the process ends with it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        Path(job.folder).mkdir()
        command = [sys.executable, "-P", "-m", "torch_ecrec.bench.stores", json.dumps(dataclasses.asdict(job))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello: dict[str, Any] = {}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        if self.hello.get("cgroup"):
            with contextlib.suppress(OSError):
                os.rmdir(self.hello["cgroup"])

    def start(self) -> None:
        """Waits until it is there."""
        self.hello = self._answer()

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        """Sends a request, and waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.job.store} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


# all of them --------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(names: Sequence[str], job: Job, folder: Path) -> Iterator[dict[str, Running]]:
    """Starts the processes of some stores, ours first: it says what the budget is."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Running] = {}
        budget_bytes = 0
        for name in sorted(names, key=lambda name: name != "ours"):
            one = dataclasses.replace(job, store=name, folder=str(folder / name), budget_bytes=budget_bytes)
            found[name] = stack.enter_context(Running(one))
            found[name].start()
            budget_bytes = budget_bytes or int(found[name].hello["budget_bytes"])
        yield {name: found[name] for name in names}


def measure(arguments: argparse.Namespace, trace: Trace, names: Sequence[str]) -> list[dict[str, Any]]:
    """Replays the trace with each share of records in memory; returns the rows of the table."""
    lines = []
    total = len(arguments.shares) * len(trace.steps) * len(names)
    with tempfile.TemporaryDirectory(dir=arguments.tier) as made, Progress("stores: steps", total) as progress:
        at = Path(made)
        np.savez(at / "trace.npz", positions=np.concatenate(trace.steps), cuts=np.cumsum([*map(len, trace.steps)])[:-1])
        for share in arguments.shares:
            frames, folder = max(1, int(share * trace.rows)), at / f"{share:g}"
            folder.mkdir()
            job = Job(
                "",
                str(at / "trace.npz"),
                "",
                trace.rows,
                arguments.dim,
                frames,
                0,
                trace.filled,
                arguments.seed,
                arguments.ahead,
            )
            with started(names, job, folder) as running:
                per_pass = []
                for number in range(arguments.passes):
                    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
                    end = (number + 1) * trace.per_pass
                    for turn, first in enumerate(range(number * trace.per_pass, end, arguments.block_steps)):
                        some = [first, min(first + arguments.block_steps, end)]
                        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                            found = running[name].ask({"block": some})
                            blocks[name].append({**found, "steps": some[1] - some[0]})
                            progress.add(some[1] - some[0])
                    per_pass.append(blocks)
                digests = {name: one.ask({"digest": True})["digest"] for name, one in running.items()}
                require(len(set(digests.values())) == 1, f"the stores have other records than each other: {digests}")
                bounds = hit_rates(trace, frames, False), hit_rates(trace, frames, True)
                for number, blocks in enumerate(per_pass):
                    base = {"in memory": share, "pass": number + 1}
                    lines += rows(base, blocks, running, (bounds[0][number], bounds[1][number]))
    return lines


def rows(
    base: Mapping[str, Any],
    blocks: Mapping[str, Sequence[Mapping[str, Any]]],
    running: Mapping[str, Running],
    bounds: tuple[float, float],
) -> list[dict[str, Any]]:
    """Returns the rows of one pass: one of each store. `bounds`: the hit rates of LRU and Belady."""

    def per_step(name: str, key: str) -> float:
        return sum(float(block[key]) for block in blocks[name]) / sum(int(block["steps"]) for block in blocks[name])

    lines = []
    budget_bytes = running["ours"].hello["budget_bytes"]
    for name in blocks:
        cpu = record.spread(1e3 * block["cpu_s"] / block["steps"] for block in blocks[name])
        own = {one: per_step(one, "cpu_s") - per_step("memory", "cpu_s") for one in (name, "ours")}
        tiers, of_file = name in (*OURS, "frames+rocksdb"), name != "memory"
        read = sum(block["read"] for block in blocks[name])
        misses, known = (sum(block[key] for block in blocks[name]) for key in ("misses", "known"))
        lines.append(
            {
                **base,
                "store": name,
                "bounded by": running[name].hello["bounded"] if of_file else "nothing",
                "budget MB": budget_bytes / 1e6 if of_file else None,
                "records/step": per_step(name, "known") + per_step(name, "new"),
                "CPU ms": 1e3 * per_step(name, "cpu_s"),
                "least": cpu["min"],
                "most": cpu["max"],
                "own CPU ms": 1e3 * own[name] if of_file else None,
                "own CPU / ours": own[name] / own["ours"] if of_file else None,
                "wall ms": 1e3 * per_step(name, "wall_s"),
                "wall / ours": per_step(name, "wall_s") / per_step("ours", "wall_s"),
                "reads": per_step(name, "reads"),
                "MB read": per_step(name, "read_bytes") / 1e6,
                "MB written": per_step(name, "write_bytes") / 1e6,
                "resident MB": (blocks[name][-1]["resident_bytes"] - running[name].hello["before_bytes"]) / 1e6,
                "hit rate": 1 - misses / known if tiers and known else None,
                "LRU": bounds[0] if tiers else None,
                "Belady": bounds[1] if tiers else None,
                "hits / Belady": (1 - misses / known) / bounds[1] if tiers and known and bounds[1] else None,
                "CPU us/read": 1e6 * sum(block["read_cpu_s"] for block in blocks[name]) / read
                if tiers and read
                else None,
            }
        )
    return lines


def draw(lines: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plots CPU and wall time of a step in each store."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys((line["in memory"], line["pass"]) for line in lines))
    figure = Figure(figsize=(10, 1.2 * len(cases) + 1.4), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    names = list(dict.fromkeys(line["store"] for line in lines))
    for axes, key in zip(both, ("CPU ms", "wall ms"), strict=True):
        for i, name in enumerate(names):
            values = [line[key] for line in lines if line["store"] == name]
            bars = axes.barh(np.arange(len(cases)) + 0.8 * i / len(names), values, 0.75 / len(names), label=name)
            axes.bar_label(bars, [f"{value:,.1f}" for value in values], fontsize=8)
        axes.set_xlabel(f"{key} a step")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_yticks(
        np.arange(len(cases)) + 0.3, [f"{share:.0%} in memory, pass {number}" for share, number in cases]
    )
    both[0].invert_yaxis()
    both[1].legend()
    figure.suptitle(title)
    return figure


# reads alone --------------------------------------------------------------------------------------


class Liburing:
    """Reads by io_uring through the package `liburing`. It reads into bytearrays only, whose content is copied then."""

    def __init__(self) -> None:
        self._api: Any = importlib.import_module("liburing")
        self.name = "liburing"
        self._ring = self._api.Ring()
        self._api.io_uring_queue_init(DEPTH, self._ring)
        self._cqe = self._api.Cqe()
        self._buffers = [self._aligned() for _ in range(DEPTH)]

    @staticmethod
    def _aligned() -> bytearray:
        """Returns a bytearray of a block, where a block of memory begins: a bytearray is cut without being moved."""
        buffer = bytearray(2 * BLOCK_BYTES - 1)
        view = np.frombuffer(buffer, np.uint8)
        over = -view.ctypes.data % BLOCK_BYTES
        del view
        if over:
            del buffer[:over]
        del buffer[BLOCK_BYTES:]
        return buffer

    def read(self, handle: int, offsets_R: Numbers, lengths_R: Numbers, into: Any, at_R: Numbers) -> Any:
        require(bool((lengths_R == BLOCK_BYTES).all()), "`liburing` is asked for single blocks here")
        api, ring, target = self._api, self._ring, into.data
        results_R = np.empty(len(offsets_R), np.int64)
        offsets, places = offsets_R.tolist(), at_R.tolist()
        free, taken = list(range(DEPTH)), {}
        begun = done = 0
        while done < len(offsets):
            while free and begun < len(offsets):
                slot = free.pop()
                taken[slot] = begun
                sqe = api.io_uring_get_sqe(ring)
                api.io_uring_prep_read(sqe, handle, self._buffers[slot], offsets[begun])
                api.io_uring_sqe_set_data64(sqe, slot)
                begun += 1
            api.io_uring_submit_and_wait(ring, min(begun - done, DEPTH // 4))
            came, entries = 0, api.io_uring_cqe_iter_init(ring)
            while api.io_uring_cqe_iter_next(entries, self._cqe):
                slot = self._cqe[0].user_data
                number = taken.pop(slot)
                results_R[number] = self._cqe[0].res
                target[places[number] : places[number] + BLOCK_BYTES] = self._buffers[slot]
                free.append(slot)
                came += 1
            api.io_uring_cq_advance(ring, came)
            done += came
        return results_R


def measure_reads(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Reads blocks at random places, in batches of some sizes; returns a row of each way and size."""
    ways: list[Callable[[], Reader]] = [lambda: reader("uring"), Liburing, Threads]
    readers = [(one, probe_file(arguments.tier, one)) for one in (way() for way in ways)]
    rng = np.random.default_rng(arguments.seed)
    into = untouched(max(READ_BATCHES) * BLOCK_BYTES, np.uint8)
    found: dict[tuple[int, str], list[tuple[int, float, float]]] = {}
    for _, batch in itertools.product(range(arguments.repeats), READ_BATCHES):
        at_R, lengths_R = np.arange(batch) * BLOCK_BYTES, np.full(batch, BLOCK_BYTES)
        for one, file in readers:
            count, begin_s, cpu_s = 0, time.perf_counter(), time.process_time()
            while time.perf_counter() - begin_s < arguments.seconds or not count:
                offsets_R = rng.integers(0, PROBE_BLOCKS, batch) * BLOCK_BYTES
                results_R = file.read(offsets_R, lengths_R, into, at_R)
                require(bool((results_R == BLOCK_BYTES).all()), f"{one.name} could not read: {results_R.min()}")
                count += batch
            spent = time.perf_counter() - begin_s, time.process_time() - cpu_s
            found.setdefault((batch, one.name), []).append((count, *spent))
    lines = []
    for (batch, name), measured in sorted(found.items(), key=lambda item: item[0][0]):
        rate = record.spread(count / wall_s for count, wall_s, _ in measured)
        lines.append(
            {
                "reader": name,
                "at once": batch,
                "reads/s": rate["median"],
                "least": rate["min"],
                "most": rate["max"],
                "CPU us/read": record.spread(1e6 * cpu_s / count for count, _, cpu_s in measured)["median"],
            }
        )
    return lines


def draw_reads(lines: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plots the CPU time of a read."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.35 * len(lines) + 1.4), layout="constrained")
    axes = figure.subplots()
    names = [f"{line['reader']}, {line['at once']} at once" for line in lines]
    bars = axes.barh(names, [line["CPU us/read"] for line in lines], color="#2b6cb0")
    axes.bar_label(bars, [f"{line['CPU us/read']:.1f} us, {line['reads/s']:,.0f}/s" for line in lines])
    axes.set_xlabel("CPU us a read")
    axes.margins(x=0.35)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure


# the command --------------------------------------------------------------------------------------


def require_package(name: str, what: str, without: str) -> None:
    """Raises ValueError unless a package is installed."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{what} needs the package {name}: pip install {name}, or {without}") from error


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes stores.json, .csv and .png.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    record.require_counts(arguments, "batch_size", "rows", "steps", "passes", "block_steps", "dim", "repeats")
    record.require_positive(arguments, "seconds")
    check_folder(arguments.tier)
    content: dict[str, Any] = {"header": record.header(), "bench": "stores"}
    if arguments.reads:
        require_package("liburing", "`--reads`", "leave `--reads` out")
        lines = measure_reads(arguments)
        name = record.labelled("stores-reads", arguments)
        title = f"Blocks of {BLOCK_BYTES} bytes at random places of a file"
        shown = record.table(lines)
        return record.finish(
            arguments.out, name, content, lines, shown=shown, draw=lambda: draw_reads(lines, title), copy=arguments.json
        )
    others = [name for name in arguments.stores.split(",") if name]
    for other in others:
        require(other in PACKAGES, f"`--stores` are of {', '.join(PACKAGES)}, got {other}")
        rest = ",".join(name for name in others if name != other)
        require_package(PACKAGES[other], f"`--stores {other}`", f"leave it out: --stores {rest or repr('')}")
    arguments.shares = [float(text) for text in arguments.shares.split(",") if text]
    require(all(0 < s <= 1 for s in arguments.shares), f"`--shares` are of all records, 0 to 1, got {arguments.shares}")
    trace = trace_of(arguments)
    record.require_counts(arguments, "ahead", least=0)
    ours = OURS if arguments.ahead else OURS[:1]
    lines = measure(arguments, trace, ["memory", *ours, *others])
    content |= {
        "trace": "Criteo rows" if arguments.data is not None else f"Zipf {arguments.zipf:g}, all written before",
        "records": trace.rows,
        "record_bytes": optimizer(KIND).schema(arguments.dim).nbytes,
        "batch_size": arguments.batch_size,
        "steps_per_pass": trace.per_pass,
        "packages": {PACKAGES[other]: _version(PACKAGES[other]) for other in others},
    }
    title = f"{content['trace']}: {trace.rows:,} records of {content['record_bytes']} bytes"
    return record.finish(
        arguments.out,
        record.labelled("stores", arguments),
        content,
        lines,
        shown=f"{title}, batches of {arguments.batch_size}, a step:\n{record.table(lines, SHOWN)}",
        draw=lambda: draw(lines, title),
        copy=arguments.json,
    )


def _version(package: str) -> str:
    from importlib import metadata

    return metadata.version(package)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench stores`."""
    parser.add_argument("--tier", type=Path, required=True, metavar="DIR", help="a folder on the disk to measure")
    parser.add_argument(
        "--stores",
        type=str,  # "": ours alone
        default="rocksdb,frames+rocksdb,lmdb",
        metavar="A,B",
        help="beside ours (rocksdb,frames+rocksdb,lmdb)",
    )
    parser.add_argument("--shares", default="0.25,0.1", metavar="A,B,...", help="of records in memory (0.25,0.1)")
    parser.add_argument(
        "--ahead", type=int, default=4, metavar="N", help="steps that are known before (default 4; 0: none)"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows; else made-up ones, by Zipf's law")
    parser.add_argument("--passes", type=int, default=2, metavar="N", help="over the rows (default 2)")
    parser.add_argument("--batch-size", type=int, default=1024, help="samples of a step, all trainers' (default 1024)")
    parser.add_argument("--dim", type=int, default=64, help="weights of a record (default 64)")
    parser.add_argument("--rows", type=int, default=20_000, help="per table, without --data (default 20000)")
    parser.add_argument("--steps", type=int, default=60, help="of a pass, without --data (default 60)")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent, without --data (default 1.05)")
    parser.add_argument("--block-steps", type=int, default=10, metavar="N", help="steps of a turn (default 10)")
    parser.add_argument("--reads", action="store_true", help="measure reads of the disk alone, without stores")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="turns of each reader, --reads (default 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn of a reader, --reads (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    record.add_files(parser, "build/bench", copies=True)


if __name__ == "__main__":
    serve(sys.argv[1])
