"""Row numbers as bytes: runs where they are regular, differences where they are not.

Records of one slot lie in rows a constant distance apart, so all of them are a few runs (first, stride, count). Rows
that have changed are irregular: then the first, and the differences in the smallest signed integers that hold them.

    encode([3, 9, 15, 21])   -> "runs", 24 bytes: (3, 6, 4)
    encode([3, 4, 9, 11])    -> "int8", 8 + 3 bytes: 3; 1, 5, 2
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIFFERENCES = ("int8", "int16", "int32", "int64")
Rows = NDArray[np.int64]


def encode(rows_N: Rows) -> tuple[str, bytes]:
    """Rows (N,) int64, in any order, as a kind and bytes."""
    if not len(rows_N):
        return "runs", b""
    steps = np.diff(rows_N)
    starts = _run_starts(steps)
    kind = next(name for name in DIFFERENCES if _fits(steps, np.dtype(name)))
    if 24 * len(starts) <= 8 + np.dtype(kind).itemsize * len(steps):
        ends = np.append(starts[1:], len(rows_N))
        counts = ends - starts
        strides = np.where(counts > 1, steps[np.minimum(starts, max(0, len(steps) - 1))] if len(steps) else 0, 0)
        return "runs", np.stack([rows_N[starts], strides, counts], axis=1).astype("<i8").tobytes()
    return kind, rows_N[:1].astype("<i8").tobytes() + steps.astype(f"<i{np.dtype(kind).itemsize}").tobytes()


def _run_starts(steps: Rows) -> Rows:
    """Where runs begin: greedily, each takes rows as long as the step stays the same."""
    changes = np.flatnonzero(np.diff(steps)) + 1  # steps[i] differs from steps[i - 1]
    starts, at = [0], 0
    if len(changes) > len(steps) // 8 + 4:
        return np.arange(len(steps) + 1)  # irregular: not worth a look
    for change in changes:
        if change >= at + 1 and change + 1 > at:
            at = int(change) + 1  # the step before `change` ends a run at row `change`
            starts.append(at)
    return np.asarray(starts, dtype=np.int64)


def _fits(steps: Rows, dtype: np.dtype[np.signedinteger]) -> bool:
    limits = np.iinfo(dtype)
    return not len(steps) or (int(steps.min()) >= limits.min and int(steps.max()) <= limits.max)


def decode(kind: str, data: bytes, count: int) -> Rows:
    """The rows (N,) int64 again. Raises ValueError: these are not so many rows."""
    if kind == "runs":
        if len(data) % 24:
            raise ValueError(f"{len(data)} bytes of runs")
        runs = np.frombuffer(data, "<i8").reshape(-1, 3).astype(np.int64)
        if (runs[:, 2] < 1).any() or int(runs[:, 2].sum()) != count:
            raise ValueError(f"runs of {int(runs[:, 2].sum())} rows, not {count}")
        return np.concatenate([first + stride * np.arange(n) for first, stride, n in runs.tolist()] or [_none()])
    if kind not in DIFFERENCES or len(data) != 8 + np.dtype(kind).itemsize * (count - 1):
        raise ValueError(f"{len(data)} bytes of {kind} for {count} rows")
    steps = np.frombuffer(data, f"<i{np.dtype(kind).itemsize}", offset=8).astype(np.int64)
    first = np.frombuffer(data, "<i8", 1).astype(np.int64)
    return np.concatenate([first, first + np.cumsum(steps)])


def _none() -> Rows:
    return np.empty(0, np.int64)
