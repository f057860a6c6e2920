"""Click logs in Criteo's format: a reader, a synthetic stand-in, and the area under the ROC curve.

A line is tab-separated, 40 columns, no header: label (0 or 1), 13 integers (may be empty or negative), 26 categories
(at most 8 hex digits, may be empty). Files may be gzipped.

    1 <tab> 5 <tab> <tab> -2 ... <tab> 68fd1e64 <tab> ... <tab> (empty)
    label       1.0
    integers    log(1 + max(x, 0)): 1.79, 0.0 (empty counts as 0), 0.0 (negative counts as 0), ...
    categories  a row in [0, rows_per_table), hashed from the value and its column; empty is a value of its own

The hash is fixed (splitmix64): the same file gives the same rows on every machine and in every version.

Reads in blocks: memory is that of the arrays (164 bytes per line) and a block. Uses NumPy only.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INTEGERS = 13
CATEGORIES = 26
COLUMNS = 1 + INTEGERS + CATEGORIES
_BLOCK_BYTES = 8 << 20
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = (ord(c) for c in "\t\n\r-0")
_EMPTY = np.uint64(1 << 32)  # the category that stands for an empty field
_NO_DIGIT = 255
REDRAWN_SLOPE = 0.6  # of labels that are drawn anew, over the sum of 26 effects between -1/2 and 1/2
_DIGIT = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _place, _digit in enumerate("0123456789abcdef0123456789ABCDEF"):
    _DIGIT[ord(_digit)] = _place % 16

# Distinct categories per column in the Kaggle data set; they shape the synthetic data, and the placement that is drawn.
CARDINALITIES = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306]
CARDINALITIES += [10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]


@dataclass(frozen=True)
class Clicks:
    """N click records. `labels` (N,) and `dense` (N, 13) are float32, `categories` (N, 26) are rows, int32."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    categories: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: slice | NDArray[np.int64]) -> Clicks:
        """Returns some of the records: a slice, or an array of positions."""
        return Clicks(self.labels[at], self.dense[at], self.categories[at])

    def split(self, held_out: float = 0.2) -> tuple[Clicks, Clicks]:
        """Returns the first records, to train on, and the last `held_out` ones, to test on."""
        cut = len(self) - int(len(self) * held_out)
        return self[:cut], self[cut:]


def read(path: str | os.PathLike[str], rows_per_table: int, limit: int | None = None) -> Clicks:
    """Reads a file, gzipped or not.

    Args:
        path: the file.
        rows_per_table: categories are hashed into this many rows.
        limit: read at most so many lines.

    Raises:
        ValueError: the file is missing, empty, a truncated or damaged gzip file, or a line is not in the format; the
            message names the file and the line.
    """
    if rows_per_table < 1:
        raise ValueError(f"`rows_per_table` must be at least 1, got {rows_per_table}")
    parts, lines = [], 0
    for block in _blocks(Path(path)):
        part = _parse(np.frombuffer(block, dtype=np.uint8), str(path), lines, rows_per_table)
        parts.append(part)
        lines += len(part)
        if limit is not None and lines >= limit:
            break
    if not parts:
        raise ValueError(f"{path}: the file is empty")
    whole = Clicks(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.categories for part in parts]),
    )
    return whole if limit is None else whole[:limit]


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields whole lines, about `_BLOCK_BYTES` at a time. Each block ends in a newline."""
    lines, rest = 0, b""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not zipped and path.suffix == ".gz" and path.stat().st_size:
                raise ValueError(f"{path}: not a gzip file")
            with gzip.open(raw) if zipped else raw as file:
                while data := file.read(_BLOCK_BYTES):
                    head, newline, tail = data.rpartition(b"\n")
                    if newline:
                        block = rest + head + newline
                        lines += block.count(b"\n")
                        yield block
                        rest = tail
                    else:
                        rest += data
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except EOFError:
        raise ValueError(f"{path}: the gzip file is truncated after line {lines + rest.count(10)}") from None
    except (OSError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read after line {lines}: {error}") from None
    if rest:
        yield rest + b"\n"


def _parse(text: NDArray[np.uint8], path: str, lines_before: int, rows_per_table: int) -> Clicks:
    """Parses the lines of a block that ends with a whole line."""

    def fail(line: int, problem: str) -> ValueError:
        return ValueError(f"{path}, line {lines_before + line + 1}: {problem}")

    def field(line: int, column: int) -> str:
        start = int(starts[line, column])
        return bytes(text[start : start + int(lengths[line, column])]).decode("utf-8", "replace")

    ends = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
    newlines = np.flatnonzero(text[ends] == _NEWLINE)
    columns = np.diff(newlines, prepend=-1)
    wrong = np.flatnonzero(columns != COLUMNS)
    if len(wrong):
        raise fail(int(wrong[0]), f"{columns[wrong[0]]} columns, expected {COLUMNS}")
    starts = np.concatenate([[0], ends[:-1] + 1]).reshape(-1, COLUMNS)
    lengths = ends.reshape(-1, COLUMNS) - starts
    returns = (lengths[:, -1] > 0) & (text[ends.reshape(-1, COLUMNS)[:, -1] - 1] == _RETURN)
    lengths[:, -1] -= returns

    labels = text[starts[:, 0]] - np.uint8(_ZERO)
    bad = np.flatnonzero((lengths[:, 0] != 1) | (labels > 1))
    if len(bad):
        raise fail(int(bad[0]), f"label {field(bad[0], 0)!r}, expected 0 or 1")

    sections = slice(1, 1 + INTEGERS), slice(1 + INTEGERS, COLUMNS)
    first, count = starts[:, sections[0]], lengths[:, sections[0]]
    negative = (count > 0) & (text[first] == _MINUS)
    integers, valid = _digits(text, first + negative, count - negative, base=10)
    bad_fields = np.argwhere(~valid | (negative & (count == 1)) | (count - negative > 18))
    if len(bad_fields):
        line, column = bad_fields[0]
        raise fail(int(line), f"integer I{column + 1} is {field(line, 1 + column)!r}")
    integers[negative] = 0

    first, count = starts[:, sections[1]], lengths[:, sections[1]]
    values, valid = _digits(text, first, count, base=16)
    bad_fields = np.argwhere(~valid | (count > 8))
    if len(bad_fields):
        line, column = bad_fields[0]
        text_there = field(line, 1 + INTEGERS + column)
        raise fail(int(line), f"category C{column + 1} is {text_there!r}, expected at most 8 hex digits")
    values[count == 0] = _EMPTY
    return _clicks(labels, integers, values, rows_per_table)


def _digits(
    text: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64], base: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Returns the numbers at `starts` (0 where empty), and whether each has digits only. Reads at most 18 digits."""
    values = np.zeros(starts.shape, dtype=np.uint64)
    valid = np.ones(starts.shape, dtype=bool)
    flat_values, flat_valid = values.reshape(-1), valid.reshape(-1)
    flat_starts, flat_lengths = starts.reshape(-1), lengths.reshape(-1)
    for place in range(min(int(lengths.max(initial=0)), 18)):
        at = np.flatnonzero(flat_lengths > place)
        digits = _DIGIT[text[flat_starts[at] + place]]
        flat_valid[at] &= digits < base
        flat_values[at] = flat_values[at] * np.uint64(base) + digits
    return values, valid


def _clicks(
    labels: NDArray[np.uint8], integers: NDArray[np.uint64], values: NDArray[np.uint64], rows_per_table: int
) -> Clicks:
    """Returns the data as training sees it. `values` are categories below 2^32, or `_EMPTY`."""
    column = np.arange(1, CATEGORIES + 1, dtype=np.uint64) << np.uint64(33)
    rows = _mix(values + column) % np.uint64(rows_per_table)
    return Clicks(labels.astype(np.float32), np.log1p(integers).astype(np.float32), rows.astype(np.int32))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mixes bits by splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def synthetic(rows: int, seed: int, rows_per_table: int) -> Clicks:
    """Makes up data of Criteo's form: skewed categories (Zipf), a quarter clicks, labels that features predict.

    The same as writing them with `write_synthetic` and reading that file.
    """
    labels, integers, _, values = _draw(rows, seed)
    return _clicks(labels, integers, values, rows_per_table)


def write_synthetic(path: str | os.PathLike[str], rows: int, seed: int) -> None:
    """Writes `synthetic` data as a file, gzipped if its name ends in .gz."""
    labels, integers, missing, values = _draw(rows, seed)
    with gzip.open(path, "wt") if str(path).endswith(".gz") else open(path, "w") as file:
        for label, line, gaps, categories in zip(labels, integers, missing, values, strict=True):
            fields = [str(label)]
            fields += ["" if gap else str(value) for value, gap in zip(line, gaps, strict=True)]
            fields += ["" if value == _EMPTY else f"{value:08x}" for value in categories]
            file.write("\t".join(fields) + "\n")


def _draw(rows: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.bool_], NDArray[np.uint64]]:
    """Draws labels, integers (0 where missing), which integers are missing, and categories."""
    if rows < 1:
        raise ValueError(f"`rows` must be at least 1, got {rows}")
    random = np.random.default_rng(seed)
    cardinality = np.array(CARDINALITIES, dtype=np.float64)
    # Log-uniform ranks: the frequency of a category falls with 1 / rank, as in Zipf's law.
    ranks = np.exp(random.random((rows, CATEGORIES)) * np.log(cardinality + 1)).astype(np.uint64) - np.uint64(1)
    hashed = _mix(ranks + (np.arange(CATEGORIES, dtype=np.uint64) << np.uint64(40)))
    values = hashed & np.uint64(0xFFFFFFFF)
    effect = (hashed >> np.uint64(40)).astype(np.float64) / (1 << 24) - 0.5
    empty = random.random((rows, CATEGORIES)) < np.where(np.arange(CATEGORIES) % 5 == 4, 0.3, 0.01)
    values[empty], effect[empty] = _EMPTY, 0.0
    missing = random.random((rows, INTEGERS)) < 0.15
    integers = np.floor(np.exp(random.normal(1.5, 1.5, (rows, INTEGERS)))).astype(np.uint64)
    integers[missing] = 0
    score = 1.2 * effect.sum(axis=1) + 0.5 * (np.log1p(integers[:, :4]) - 1.5).mean(axis=1) - 1.35
    labels = (random.random(rows) < 1 / (1 + np.exp(-score))).astype(np.uint8)
    return labels, integers, missing, values


def redraw(clicks: Clicks, count: int, *key: int) -> Clicks:
    """Makes new records out of given ones: the same for the same key, never the same for another.

    Each category, and the integers together, are those of a line of their own, drawn with equal chances: how often a
    category comes, and how much it is missing, is what it was. The label is drawn with a chance that follows from the
    categories, by weights that nobody has told (a fixed hash), and is never far from even: who has learned all that
    there is to learn has a loss of 0.6 still. So gradients stay large however long one trains, where lines that come
    again are known by heart some time, and give none.

    Args:
        clicks: N lines, at least 1.
        count: how many are made.
        key: integers of at least 0, say (seed, step, trainer).

    Returns:
        `count` lines: (count,), (count, 13) and (count, 26), dtypes as in `Clicks`.

    Raises:
        ValueError: there are no lines, or a number is negative.
    """
    if not len(clicks) or count < 0 or min(key, default=0) < 0:
        raise ValueError(f"nothing is made of {len(clicks)} lines for `count` {count} and `key` {key}")
    random = np.random.default_rng((len(key), *key))
    at = random.integers(0, len(clicks), (count, 1 + CATEGORIES))
    categories = clicks.categories[at[:, 1:], np.arange(CATEGORIES)]
    hashed = _mix(categories.astype(np.uint64) + (np.arange(CATEGORIES, dtype=np.uint64) << np.uint64(40)))
    effect = (hashed >> np.uint64(40)).astype(np.float64) / (1 << 24) - 0.5
    chance = 1 / (1 + np.exp(-REDRAWN_SLOPE * effect.sum(axis=1)))
    return Clicks((random.random(count) < chance).astype(np.float32), clicks.dense[at[:, 0]], categories)


def auc(labels: NDArray[np.float32], scores: NDArray[np.float32]) -> float:
    """Returns the area under the ROC curve: the chance that a click scores above a non-click, ties counting half.

    NaN where there is only one kind.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank_of_value = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0.5
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return float("nan")
    ranks = rank_of_value[inverse][positive].sum()
    return float((ranks - positives * (positives + 1) / 2) / (positives * negatives))
