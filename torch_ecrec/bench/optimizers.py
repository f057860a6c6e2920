"""Measures how fast one core applies a step of each optimizer, beside memcpy and a scattered copy.

Every number is GB/s of bytes *moved*, read or written. A step reads a row's gradient, reads and writes its record, and
writes the delta: (D + 3 M) * 4 bytes of a record of M words and D weights. A copy moves each byte twice.

    memcpy          np.copyto of the records' bytes to one contiguous place
    scattered copy  each delta is copied to the record that the step would change, with the step's prefetches

Records are those of a table much larger than the caches, rows ascending with gaps, others in every call; gradients are
of one trainer. Times are the thread's own, alternatives take turns: see `codec.py`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.bench import record
from torch_ecrec.bench.codec import interleaved
from torch_ecrec.observe.progress import counted
from torch_ecrec.records.merge import Merged
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import ITEM_BYTES
from torch_ecrec.records.shard import scatter
from torch_ecrec.runtime.checks import require_int

DIMS = (16, 64, 128)
CALL_BYTES = 16 << 20  # of records in a step
COLUMNS = {
    "optimizer": "optimizer",
    "dim": "dim",
    "record_bytes": "record B",
    "gbps": "GB/s",
    "gbps_min": "min",
    "gbps_max": "max",
    "memcpy_gbps": "memcpy",
    "of_memcpy": "of memcpy",
    "scattered_copy_gbps": "scattered copy",
    "of_scattered_copy": "of it",
    "million_rows_per_s": "million rows/s",
}
NOTES = """GB/s of bytes moved, in the time of one core: median of {repeats} interleaved blocks, least and most.
A step moves a row's gradient, its record twice, and its delta; a copy moves each byte twice.
of ...: the median over the blocks of the ratio within a block."""


def _measure(kind: str, dim: int, weights: str, memory: NDArray[np.float32], repeats: int, seed: int) -> dict[str, Any]:
    found, random = optimizer(kind), np.random.default_rng(seed)
    width = found.schema(dim, weights).nbytes // 4  # in words
    records_PW = memory[: len(memory) // width * width].reshape(-1, width)
    count = max(1, min(CALL_BYTES // (4 * width), len(records_PW) // 2))
    gap = len(records_PW) // count
    base = np.arange(count, dtype=np.int64) * gap
    gradients_UD = random.standard_normal((count, dim), dtype=np.float32)
    delta_UB, copy_UB = np.zeros((count, 4 * width), np.uint8), np.zeros((count, 4 * width), np.uint8)
    index = np.arange(count)[None, :]

    def take() -> NDArray[np.int64]:
        return base + random.integers(0, gap, count)

    def step(positions_U: NDArray[np.int64]) -> None:
        merged = Merged(positions_U, [gradients_UD], index)
        found.update_(records_PW, merged, 0.01, 10, out=delta_UB, weights=weights)

    def memcpy(_: NDArray[np.int64]) -> None:
        np.copyto(copy_UB, delta_UB)

    def scattered(positions_U: NDArray[np.int64]) -> None:
        scatter(records_PW.view(np.uint32), positions_U, copy_UB.view(np.uint32))

    memory[:] = 0.25
    copy_UB[:] = records_PW[:count].view(np.uint8)
    alternatives: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "": (take, step), "memcpy": (take, memcpy), "scattered_copy": (take, scattered),
    }  # fmt: skip
    moved = {"": (dim + 3 * width) * 4 * count, "memcpy": 8 * width * count, "scattered_copy": 8 * width * count}
    times = interleaved(alternatives, repeats, 1)
    rates = {name: [moved[name] / seconds / 1e9 for seconds in taken] for name, taken in times.items()}
    name = kind if weights == "float32" else f"{kind}, {weights}"
    row: dict[str, Any] = {"optimizer": name, "dim": dim, "record_bytes": 4 * width, "rows": count}
    for name, values in rates.items():
        spread = record.spread(values)
        prefix = f"{name}_gbps" if name else "gbps"
        row |= {prefix: spread["median"], f"{prefix}_min": spread["min"], f"{prefix}_max": spread["max"]}
    for name in ("memcpy", "scattered_copy"):
        row[f"of_{name}"] = statistics.median(a / b for a, b in zip(rates[""], rates[name], strict=True))
    row["million_rows_per_s"] = count / statistics.median(times[""]) / 1e6
    return row


def measure(
    kinds: Sequence[str],
    dims: Sequence[int],
    memory_mib: int,
    repeats: int,
    seed: int = 0,
    weights: Sequence[str] = ("float32",),
) -> list[dict[str, Any]]:
    """Returns a row for each optimizer, dim and dtype of weights."""
    memory = np.zeros(memory_mib << 18, np.float32)
    cases = [(kind, dim, dtype) for kind in kinds for dim in dims for dtype in weights]
    return [_measure(*case, memory, repeats, seed) for case in counted("optimizers: rows of the table", cases)]


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table; writes OUT/optimizers.json and .csv."""
    record.require_counts(arguments, "repeats", "memory_mib")
    for dim in arguments.dims:
        require_int("dims", dim, 1)
    sizes = arguments.memory_mib, arguments.repeats, arguments.seed
    rows = measure(arguments.optimizers, arguments.dims, *sizes, arguments.weights)
    notes = NOTES.format(repeats=arguments.repeats).splitlines()
    shown = [record.table([{title: row[key] for key, title in COLUMNS.items()} for row in rows]), *notes]
    content = {"header": record.header(), "repeats": arguments.repeats, "memory_mib": arguments.memory_mib}
    return record.finish(arguments.out, "optimizers", {**content, "notes": notes}, rows, shown="\n".join(shown))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench optimizers`."""
    parser.add_argument("--optimizers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS), metavar="D", help="weights in a row")
    parser.add_argument("--weights", nargs="+", choices=list(ITEM_BYTES), default=["float32"], help="their dtypes")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="interleaved blocks (default 15)")
    parser.add_argument("--memory-mib", type=int, default=512, metavar="MIB", help="of records (default 512)")
    parser.add_argument("--seed", type=int, default=0, help="of gradients and rows")
    parser.add_argument("--out", type=Path, default=Path("build/optimizers"), metavar="DIR")
