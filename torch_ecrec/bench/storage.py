"""Measures how fast one thread writes and reads a part of a checkpoint.

    write       records to a file, hashed on the way
    synced      the same, and the file made durable
    read        the file read again, every block checked, records decoded

    write ns    processor time of the thread that writes, for each byte of records: what is taken from steps

GB/s are of records, 10^9 bytes, whatever became of them in the file. Files are in the folders that are named: /dev/shm
has no disk behind it. What is read lies in the page cache, where the machine has room for it.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from torch_ecrec.bench import record
from torch_ecrec.observe.progress import counted
from torch_ecrec.records import quantised
from torch_ecrec.records.halves import records_of
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.records.schema import Schema, StateField
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import Encoding
from torch_ecrec.storage.parts import PartReader, PartWriter

DIM = 64
PORTION_BYTES = 2 << 20  # as a server's writer takes them
ENCODINGS = (Encoding(), Encoding(bits=8), Encoding(bits=4), Encoding(zstd=1))
COLUMNS = ("write", "synced", "read")
NOTES = """GB/s of records of {dim} weights and row-wise Adagrad ({mb} MB), one thread: the best of {repeats} rounds."""


def _once(location: Location, encoding: Encoding, rows_N: Positions, records_NB: Bytes) -> tuple[int, dict[str, float]]:
    """Writes and reads one part; returns the bytes of its file, and seconds."""
    schema = Schema.of(DIM, (StateField("momentum1", True),))
    portion = PORTION_BYTES // schema.nbytes
    part = PartWriter(location, "measured.part", [schema], encoding)
    try:
        begin_s, thread_s = time.perf_counter(), time.thread_time()
        for first in range(0, len(rows_N), portion):
            part.write(0, rows_N[first : first + portion], records_NB[first : first + portion])
        written_s, thread_s = time.perf_counter(), time.thread_time() - thread_s
        entry = part.close()
        synced_s = time.perf_counter()
    finally:
        part.abandon()
    rows = sum(len(found_N) for _, found_N, _ in PartReader(location, entry, [schema]).blocks())
    assert rows == len(rows_N), "what is timed is a part that can be read"
    read_s = time.perf_counter()
    times = {"write": written_s - begin_s, "synced": synced_s - begin_s, "read": read_s - synced_s}
    return entry.bytes, {**times, "thread": thread_s}


def measure(folder: Path, encoding: Encoding, megabytes: int, repeats: int) -> dict[str, Any]:
    """Returns one row of the table."""
    schema = Schema.of(DIM, (StateField("momentum1", True),))
    count = max(megabytes * 10**6 // schema.nbytes, 1)
    numbers_NW = np.random.default_rng(0).standard_normal((count, schema.width), np.float32)
    records_NB, rows_N = records_of(numbers_NW, schema), 3 * np.arange(count)
    with tempfile.TemporaryDirectory(dir=folder) as at:
        found = [_once(Location(at), encoding, rows_N, records_NB) for _ in range(repeats)]
    row: dict[str, Any] = {"folder": str(folder), "bits": encoding.bits, "zstd": encoding.zstd}
    row["file MB"] = round(found[0][0] / 1e6, 1)
    for name in COLUMNS:
        row[f"{name} GB/s"] = round(records_NB.nbytes / 1e9 / min(times[name] for _, times in found), 3)
    row["write ns/B"] = round(1e9 * min(times["thread"] for _, times in found) / records_NB.nbytes, 3)
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench storage`."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    parser.add_argument("--folders", nargs="+", type=Path, default=folders, help="default: /dev/shm, temporary files")
    parser.add_argument("--megabytes", type=int, default=200, help="of records (default 200)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--out", type=Path, default=Path("build/storage"), metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table; writes OUT/storage.json and .csv."""
    record.require_counts(arguments, "repeats", "megabytes")
    quantised.warm()
    rows = [
        measure(folder, encoding, arguments.megabytes, arguments.repeats)
        for folder, encoding in counted("storage: rows", list(itertools.product(arguments.folders, ENCODINGS)))
    ]
    notes = NOTES.format(dim=DIM, mb=arguments.megabytes, repeats=arguments.repeats)
    content = {"header": record.header(), "notes": [notes]}
    return record.finish(arguments.out, "storage", content, rows, shown=f"{record.table(rows)}\n{notes}")
