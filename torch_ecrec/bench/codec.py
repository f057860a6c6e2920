"""Measures how fast one core encodes, decodes and folds, beside memcpy of the same bytes and ISA-L.

Every number is GB/s of *source* bytes: the k members that are encoded or decoded from, the deltas that are folded.
Times are the thread's own: while the machine runs something else they stand still. The same source bytes are also
copied, in turns with the rest, so that what noise is left is there for all:

    memcpy          np.copyto of the source bytes to one contiguous place
    scattered copy  fold only: each delta is copied to the row that the fold would change, with the fold's prefetches
    ISA-L           its own kernels on the same arrays, where libisal.so.2 is found; its folds one row a call

They do not move the same bytes: per source byte a copy reads 1 and writes 1; a fold reads 2 (delta and parity) and
writes 1; encoding reads 1 and writes r / k, decoding reads 1 and writes 1 / k. The columns `moved` say so.

In *memory*, a call takes `CALL_BYTES` of a pool much larger than the caches, each call others, and folds go to rows in
ascending order, spread over the whole pool. In *cache*, every call takes the same `CACHED_BYTES`. Decoding makes member
0 from the others and the last parity. A fold is that of one holder, its rows a mixture of its sources' coefficients.
Results of encode and decode are allocated in the call, as always; those of memcpy and ISA-L before it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from torch_ecrec.bench import record
from torch_ecrec.codec import LinearCode
from torch_ecrec.observe.progress import counted
from torch_ecrec.records.shard import scatter
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.kernels import prefetch_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bytes = NDArray[np.uint8]
Call = Callable[[], object]

CODES = ((2, 1), (4, 1), (4, 2), (8, 2), (8, 3))
RECORD_BYTES = (64, 260, 512, 1028, 2048)  # 260 and 1028: 64 and 256 weights with row-wise Adagrad's state
CALL_BYTES = 16 << 20
CACHED_BYTES = 512 << 10
CACHED_CALLS = 16  # timed as one, for the clock
PLACES = ("memory", "cache")
RIVALS = ("memcpy", "scattered_copy", "isal")
COLUMNS = {
    "what": "what",
    "k": "k",
    "r": "r",
    "record_bytes": "record B",
    "place": "in",
    "gbps": "GB/s",
    "gbps_min": "min",
    "gbps_max": "max",
    "moved": "moved",
    "memcpy_gbps": "memcpy",
    "memcpy_moved": "memcpy moved",
    "of_memcpy": "of memcpy",
    "scattered_copy_gbps": "scattered copy",
    "of_scattered_copy": "of it",
    "isal_gbps": "ISA-L",
    "of_isal": "of ISA-L",
}
NOTES = """GB/s of source bytes, in the time of one core: median of {repeats} interleaved blocks, least and most.
moved: bytes read and written per source byte. memcpy is contiguous. scattered copy: the same rows as the fold, copied.
of ...: the median over the blocks of the ratio within a block."""

# ----------------------------------------------------------------------------------------------------------- the rivals


class Isal:
    """The erasure codes of ISA-L, with our coefficients.

    Raises:
        OSError: there is no libisal.so.2.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libisal.so.2")

        number, address = ctypes.c_int, ctypes.c_ssize_t  # addresses as numbers, which Numba passes on as well
        self._init_tables: Any = library.ec_init_tables
        self._init_tables.argtypes, self._init_tables.restype = [number, number, address, address], None
        self._encode: Any = library.ec_encode_data
        self._encode.argtypes, self._encode.restype = [number] * 3 + [address] * 3, None
        update: Any = library.ec_encode_data_update
        update.argtypes, update.restype = [number] * 4 + [address] * 3, None

        def fold(target_NB: Any, rows_U: Any, source_UB: Any, members_U: Any, tables: Any, k: Any) -> None:
            place = np.empty(1, np.int64)
            width, target, source = source_UB.shape[1], target_NB.ctypes.data, source_UB.ctypes.data
            for i in range(rows_U.shape[0]):
                prefetch_row(target_NB, rows_U, i)
                place[0] = target + rows_U[i] * width
                update(width, k, 1, members_U[i], tables.ctypes.data, source + i * width, place.ctypes.data)

        self.fold_: Any = njit(nogil=True)(fold)

    def tables(self, coefficients_RK: Bytes) -> Bytes:
        """Returns the tables that ISA-L makes of coefficients: 32 bytes for each."""
        r, k = coefficients_RK.shape
        coefficients, tables = np.ascontiguousarray(coefficients_RK), np.zeros(32 * k * r, np.uint8)
        self._init_tables(k, r, coefficients.ctypes.data, tables.ctypes.data)
        return tables

    def encode_(self, result_RUB: Bytes, tables: Bytes, sources_KUB: Bytes) -> None:
        """Computes result = coefficients * sources. Both are contiguous."""
        sources, results = _addresses(sources_KUB), _addresses(result_RUB)
        self._encode(
            sources_KUB[0].nbytes,
            len(sources_KUB),
            len(result_RUB),
            tables.ctypes.data,
            sources.ctypes.data,
            results.ctypes.data,
        )


def _addresses(array: Bytes) -> NDArray[np.int64]:
    """Returns the addresses of array[0], array[1], ..."""
    return array.ctypes.data + array.strides[0] * np.arange(len(array), dtype=np.int64)


def find_isal() -> tuple[Isal | None, str]:
    """Returns ISA-L, if it is installed, and a note."""
    try:
        return Isal(), "ISA-L: libisal.so.2"
    except OSError as error:
        return None, f"ISA-L is left out: {error}"


# ------------------------------------------------------------------------------------------------------------ the cases


class Pool:
    """Memory much larger than the caches, handed out in turns, and arrays of the rest.

    Args:
        nbytes: of the pool.
        seed: of its contents and of the rows.
    """

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.bytes: Bytes = np.zeros(nbytes, np.uint8)
        piece = self.rng.integers(0, 256, (1 << 20) - 1, dtype=np.uint8)  # of odd length: no two windows are alike
        for start in range(0, nbytes, len(piece)):
            self.bytes[start : start + len(piece)] = piece[: nbytes - start]
        self._next = 0

    def window(self, place: str, k: int, record_bytes: int) -> Callable[[], Bytes]:
        """Returns a function that gives (k, U, B) sources: the same in the cache, others at each call in memory."""
        nbytes = min(CACHED_BYTES if place == "cache" else CALL_BYTES, len(self.bytes))
        records = max(1, nbytes // (k * record_bytes))
        shape, size = (k, records, record_bytes), k * records * record_bytes
        require(size <= len(self.bytes), f"the pool is smaller than one stripe: {len(self.bytes)} < {size} bytes")

        def take() -> Bytes:
            start = 0
            if place == "memory":
                start = self._next if self._next + size <= len(self.bytes) else 0
                self._next = start + -(-size // 4096) * 4096
            return self.bytes[start : start + size].reshape(shape)

        return take

    def rows(self, place: str, record_bytes: int) -> tuple[Bytes, int, Callable[[], NDArray[np.int64]]]:
        """Returns (N, B) parity, U, and a function that gives other (U,) rows of it at each call.

        The rows ascend, with gaps.
        """
        in_cache = place == "cache"
        nbytes = min(2 * CACHED_BYTES, len(self.bytes)) if in_cache else len(self.bytes)
        parity = self.bytes[: nbytes // record_bytes * record_bytes].reshape(-1, record_bytes)
        count = (CACHED_BYTES if in_cache else CALL_BYTES) // record_bytes
        count = max(1, min(count, len(parity) // 2))
        gap = len(parity) / count
        base = np.floor((np.arange(count) + self.rng.random(count)) * gap).astype(np.int64)
        base = np.unique(np.minimum(base, len(parity) - 1))

        def take() -> NDArray[np.int64]:
            shifted = base + int(self.rng.integers(0, len(parity)))
            shifted[shifted >= len(parity)] -= len(parity)
            shifted.sort()
            return shifted

        return parity, len(base), take


def interleaved(
    alternatives: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]], repeats: int, calls: int
) -> dict[str, list[float]]:
    """Returns the seconds of this thread that a call of each alternative takes, once per block.

    In a block all have their turn, in every block another one first. An alternative is what prepares a call, untimed,
    and the call, which gets what that returned.
    """
    names = list(alternatives)
    times: dict[str, list[float]] = {name: [] for name in names}
    for block in range(-1, repeats):  # the first is not counted
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            prepare, call = alternatives[name]
            taken = [prepare() for _ in range(calls)]
            begin = time.thread_time()
            for value in taken:
                call(value)
            seconds = (time.thread_time() - begin) / calls
            if block >= 0:
                times[name].append(seconds)
    return times


def _row(
    what: str, code: LinearCode, width: int, place: str, nbytes: int, moved: float, times: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Returns a row of the table: the rates of "ours" and each of `RIVALS`, None for one that did not take part."""
    row: dict[str, Any] = {"what": what, "k": code.k, "r": code.r, "record_bytes": width, "place": place}
    row |= {"call_bytes": nbytes, "moved": moved, "memcpy_moved": 2.0}
    for name, prefix in (("ours", ""), *((rival, f"{rival}_") for rival in RIVALS)):
        rates = record.spread([nbytes / seconds / 1e9 for seconds in times[name]]) if name in times else {}
        row |= {f"{prefix}gbps": rates.get("median")}
        row |= {f"{prefix}gbps_{edge}": rates.get(edge) for edge in ("min", "max")}
    for rival in RIVALS:
        ratios = [theirs / ours for theirs, ours in zip(times.get(rival, ()), times["ours"], strict=False)]
        row[f"of_{rival}"] = statistics.median(ratios) if ratios else None
    return row


def _measure_sums(
    what: str, code: LinearCode, width: int, place: str, pool: Pool, isal: Isal | None, repeats: int
) -> dict[str, Any]:
    """Measures how fast our code, and its rivals, encode or decode."""
    take = pool.window(place, code.k, width)
    sources = take()
    copy = np.empty_like(sources)
    have = [*range(1, code.k), code.n - 1]
    if what == "encode":
        coefficients_RK = code.coefficients
    else:
        coefficients_RK = code.decode_row(have, 0)[None, :]

    def ours(taken: Bytes) -> Bytes:
        return code.encode(taken) if what == "encode" else code.decode(have, list(taken), 0)[None]

    def memcpy(taken: Bytes) -> None:
        np.copyto(copy, taken)

    alternatives: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
    alternatives["ours"], alternatives["memcpy"] = (take, ours), (take, memcpy)
    if isal is not None:
        library, tables = isal, isal.tables(coefficients_RK)
        result = np.empty((len(coefficients_RK), *sources.shape[1:]), np.uint8)

        def theirs(taken: Bytes) -> None:
            library.encode_(result, tables, taken)

        theirs(sources)
        require(np.array_equal(result, ours(sources)), f"ISA-L's {what} differs, k = {code.k}, r = {code.r}")
        alternatives["isal"] = (take, theirs)
    times = interleaved(alternatives, repeats, CACHED_CALLS if place == "cache" else 1)
    return _row(what, code, width, place, sources.nbytes, 1 + len(coefficients_RK) / code.k, times)


def _measure_fold(
    code: LinearCode, width: int, place: str, pool: Pool, isal: Isal | None, repeats: int
) -> dict[str, Any]:
    parity, count, take = pool.rows(place, width)
    delta = pool.rng.integers(0, 256, (count, width), dtype=np.uint8)
    copy = np.empty_like(delta)
    members = pool.rng.integers(0, code.k, count)
    coefficients = np.ascontiguousarray(code.coefficients[-1, members])

    def ours(rows: NDArray[np.int64]) -> None:
        code.fold_(parity, rows, delta, coefficients)

    def memcpy(rows: NDArray[np.int64]) -> None:
        np.copyto(copy, delta)

    def scattered(rows: NDArray[np.int64]) -> None:
        scatter(parity.view(np.uint32), rows, delta.view(np.uint32))

    alternatives: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
    alternatives["ours"], alternatives["memcpy"] = (take, ours), (take, memcpy)
    alternatives["scattered_copy"] = (take, scattered)
    if isal is not None:
        library, tables = isal, isal.tables(code.coefficients[-1:])

        def theirs(rows: NDArray[np.int64]) -> None:
            library.fold_(parity, rows, delta, members, tables, code.k)

        rows = take()
        before = parity[rows]
        theirs(rows)
        ours(rows)  # once more is back again
        require(np.array_equal(parity[rows], before), f"ISA-L's fold differs, k = {code.k}, r = {code.r}")
        alternatives["isal"] = (take, theirs)
    times = interleaved(alternatives, repeats, CACHED_CALLS if place == "cache" else 1)
    return _row("fold", code, width, place, delta.nbytes, 3.0, times)


def measure(
    codes: Sequence[tuple[int, int]], widths: Sequence[int], pool: Pool, isal: Isal | None, repeats: int
) -> list[dict[str, Any]]:
    """Measures all rows of the table; folds come first."""
    cases = list(itertools.product(("fold", "encode", "decode"), codes, PLACES, widths))
    rows = []
    for what, (k, r), place, width in counted("codec: rows of the table", cases):
        code = LinearCode(k, r)
        if what == "fold":
            rows.append(_measure_fold(code, width, place, pool, isal, repeats))
        else:
            rows.append(_measure_sums(what, code, width, place, pool, isal, repeats))
    return rows


# ---------------------------------------------------------------------------------------------------------- the picture

INK, GREY = "#1f2933", "#7b8794"
COLOURS = ("#2563eb", "#0d9488", "#d97706", "#dc2626", "#7c3aed", "#475569")


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plots GB/s over the size of a record: a panel for each of fold, encode, decode, in memory and in cache."""
    from matplotlib.figure import Figure

    widths = sorted({row["record_bytes"] for row in rows})
    codes = list(dict.fromkeys((row["k"], row["r"]) for row in rows))
    figure = Figure(figsize=(12, 7.4), dpi=130, facecolor="white", layout="constrained")
    panels = figure.subplots(len(PLACES), 3, squeeze=False, sharex=True)
    figure.suptitle(title, fontsize=10, color=INK)
    for i, place in enumerate(PLACES):
        for j, what in enumerate(("fold", "encode", "decode")):
            axes = panels[i][j]
            here = [row for row in rows if row["what"] == what and row["place"] == place]

            def line(key: str, chosen: Sequence[Mapping[str, Any]], axes: Any = axes, **style: Any) -> None:
                found = [
                    [row[key] for row in chosen if row["record_bytes"] == w and row[key] is not None] for w in widths
                ]
                if all(found):
                    axes.plot(range(len(widths)), [statistics.median(values) for values in found], **style)

            line("memcpy_gbps", here, color=GREY, linestyle="--", linewidth=2, label="memcpy")
            line("scattered_copy_gbps", here, color=GREY, linestyle="-.", linewidth=1.5, label="scattered copy")
            for colour, (k, r) in zip(COLOURS * len(codes), codes, strict=False):
                chosen = [row for row in here if (row["k"], row["r"]) == (k, r)]
                line("gbps", chosen, color=colour, marker="o", markersize=4, label=f"({k}, {r})")
                line("isal_gbps", chosen, color=colour, linestyle=":", marker="x", markersize=4, linewidth=1)
            axes.set_title(f"{what}, in {place}", fontsize=10, color=INK, loc="left")
            axes.set_ylim(bottom=0)
            axes.set_xticks(range(len(widths)), [str(width) for width in widths])
            axes.grid(axis="y", color="#e4e7eb")
            axes.spines[["top", "right"]].set_visible(False)
            if i == len(PLACES) - 1:
                axes.set_xlabel("record size (bytes)")
            if j == 0:
                axes.set_ylabel("GB/s of source bytes, one core")
    handles, labels = panels[0][0].get_legend_handles_labels()
    if any(row["isal_gbps"] is not None for row in rows):
        (handle,) = panels[0][0].plot([], [], color=INK, linestyle=":", marker="x", markersize=4, linewidth=1)
        handles, labels = [*handles, handle], [*labels, "ISA-L, same colours"]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    return figure


# ---------------------------------------------------------------------------------------------------------- the command


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table; writes OUT/codec.json, .csv and .png."""
    record.require_counts(arguments, "repeats", "memory_mib")
    for width in arguments.records:
        require(width > 0 and width % 4 == 0, f"`records` must be positive multiples of 4, got {width}")
    isal, note = find_isal()
    pool = Pool(arguments.memory_mib << 20, arguments.seed)
    rows = measure(arguments.codes, arguments.records, pool, isal, arguments.repeats)
    columns = {key: title for key, title in COLUMNS.items() if isal is not None or "isal" not in key}
    notes = [*NOTES.format(repeats=arguments.repeats).splitlines(), note]
    shown = [record.table([{title: row[key] for key, title in columns.items()} for row in rows]), *notes]
    header = record.header()
    content = {"header": header, "repeats": arguments.repeats, "memory_mib": arguments.memory_mib, "notes": notes}
    title = f"{header['processor']}, one core; median of {arguments.repeats}; commit {header['commit']}"
    return record.finish(
        arguments.out,
        "codec",
        content,
        rows,
        shown="\n".join(shown),
        draw=lambda: draw(rows, title),
        copy=arguments.json,
    )


def _code(text: str) -> tuple[int, int]:
    try:
        k, r = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a code is K,R, got {text!r}") from None
    if k < 1 or r < 1 or k + r > 256:
        raise argparse.ArgumentTypeError(f"a code has k and r of at least 1, together at most 256, got {text!r}")
    return k, r


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench codec`."""
    parser.add_argument("--codes", nargs="+", type=_code, default=list(CODES), metavar="K,R")
    parser.add_argument("--records", nargs="+", type=int, default=list(RECORD_BYTES), metavar="BYTES", help="sizes")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="interleaved blocks (default 15)")
    parser.add_argument("--memory-mib", type=int, default=1024, metavar="MIB", help="of the pool (default 1024)")
    parser.add_argument("--seed", type=int, default=0, help="of contents and rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there as well")
    parser.add_argument("--out", type=Path, default=Path("build/codec"), metavar="DIR")
