"""Arithmetic of `bench checkpoint`: what steps say of the time in which a checkpoint is written; tables and picture.

A block is one turn of one way of training (`checkpoint.py`). Its `begin_s` and `ends_s` are when it began and when each
of its steps ended, its `spans_s` when each checkpoint began and ended, all by the same clock.

    begin 0, ends 1, 2, 4, 6, 7; a checkpoint from 2.5 to 5
    before it: two steps in 2 s
    beside it: the third and the fourth, since they overlap it: two steps in 4 s; the longest took 2 s
    / before: half as many steps in a second
    the same steps without: the third and the fourth step of the other way's block of that turn, / its first two

A machine that others use, too, is not as fast in every part of a turn: so a ratio stands beside that of the same steps
without a checkpoint, and with the spread of its median, as of a box plot's notch (McGill, Tukey and Larsen 1978): two
medians whose notches do not meet differ, at about 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record

Block = Mapping[str, Any]
Blocks = Mapping[str, Sequence[Block]]

FULL, INCREMENT = "k2r1+full", "k2r1+incremental"
WANTED = (  # of which way, what, wanted: at least (>=) or at most (<=)
    (FULL, "samples/s while writing / before", ">=", 0.97),
    (INCREMENT, "samples/s while writing / before", ">=", 0.99),
    (INCREMENT, "bytes / full", "<=", 1 / 6),
    (f"{INCREMENT}:4", "bytes / full", "<=", 1 / 15),
    (FULL, "longest step / median", "<=", 2.0),
    (INCREMENT, "longest step / median", "<=", 2.0),
)
THEIRS = ("torchrec+save", "torchrec+async")
RESTORED_S = 5.0  # from processes that have imported all to the end of the first step, for 1 GB of tables


def durations(block: Block) -> list[float]:
    """How many seconds each step took."""
    return [end - begin for begin, end in pairwise([block["begin_s"], *block["ends_s"]])]


def beside(block: Block) -> list[int]:
    """Which steps overlap a checkpoint of the block."""
    return [
        i
        for i, (begin, end) in enumerate(pairwise([block["begin_s"], *block["ends_s"]]))
        if any(begin < last and end > first for first, last in block["spans_s"])
    ]


def before(block: Block) -> list[int]:
    """Which steps ended before the first checkpoint of the block began; all where there is none."""
    begins_s = min((first for first, _ in block["spans_s"]), default=float("inf"))
    return [i for i, end in enumerate(block["ends_s"]) if end <= begins_s]


def rate(block: Block, steps: Sequence[int], samples: int) -> float | None:
    """Samples per second of some steps; None of none."""
    seconds = durations(block)
    return samples * len(steps) / sum(seconds[i] for i in steps) if steps else None


def figures(block: Block, samples: int) -> dict[str, float | None]:
    """What one block says.

    Args:
        block: see above, with `cpu_s`: of all processes.
        samples: of a step, of all trainers together.

    Returns:
        `samples_per_s` of the whole block; `before_samples_per_s` of the steps before a checkpoint,
        `writing_samples_per_s` of those beside it, and `longest_step_s` of them (None: there were none; of a block
        without checkpoints, of all its steps); `median_step_s`; `cpu_s_per_step`; `written_s`: how long the checkpoints
        took.
    """
    steps, there = durations(block), beside(block)
    looked_at = [steps[i] for i in there] if block["spans_s"] else steps
    return {
        "samples_per_s": rate(block, range(len(steps)), samples),
        "before_samples_per_s": rate(block, before(block), samples),
        "writing_samples_per_s": rate(block, there, samples),
        "median_step_s": statistics.median(steps),
        "longest_step_s": max(looked_at, default=None),
        "cpu_s_per_step": block["cpu_s"] / len(steps),
        "written_s": sum(last - first for first, last in block["spans_s"]) if block["spans_s"] else None,
    }


def spreads(blocks: Blocks, samples: int) -> dict[str, dict[str, dict[str, float] | None]]:
    """Returns the median, least and most of each figure of each way over its blocks; None where no block has it."""
    result: dict[str, dict[str, dict[str, float] | None]] = {}
    for way, some in blocks.items():
        found = [figures(block, samples) for block in some]
        result[way] = {}
        for name in found[0]:
            values = [value for one in found if (value := one[name]) is not None]
            result[way][name] = record.spread(values) if values else None
    return result


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratios(blocks: Blocks, mine: tuple[str, str], other: tuple[str, str], samples: int) -> list[float]:
    """A figure of one way / a figure of another (or the same), each of (way, figure), in each turn that has both."""
    found = []
    for one, another in zip(blocks[mine[0]], blocks[other[0]], strict=True):
        value, divisor = figures(one, samples)[mine[1]], figures(another, samples)[other[1]]
        if value is not None and divisor is not None:
            found.append(value / divisor)
    return found


def same_steps(blocks: Blocks, way: str, base: str, samples: int) -> list[float]:
    """In each turn, of the way without checkpoints: the steps beside which the other one wrote / those before."""
    found = []
    for block, plain in zip(blocks[way], blocks[base], strict=True):
        there, earlier = rate(plain, beside(block), samples), rate(plain, before(block), samples)
        if block["spans_s"] and there is not None and earlier is not None:
            found.append(there / earlier)
    return found


def notch(values: Sequence[float]) -> float | None:
    """Half a notch of the median: 1.57 times the range between the quartiles / the square root of how many; None of
    fewer than four."""
    if len(values) < 4:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return 1.57 * (high - low) / math.sqrt(len(values))


def sizes(some: Sequence[Block], kind: str) -> float | None:
    """Bytes of a checkpoint of that kind, "full" or "incremental": their median; None where there is none."""
    return _median(
        [
            size
            for block in some
            for size, of_kind in zip(block["bytes"], block["kinds"], strict=True)
            if of_kind == kind
        ]
    )


def rows(blocks: Blocks, base_of: Mapping[str, str], samples: int) -> list[dict[str, Any]]:
    """The table: a line per way; ratios are medians of the ratios within a turn.

    Args:
        base_of: of each way, the one that trains the same without checkpoints.
    """
    spread = spreads(blocks, samples)

    def median(way: str, name: str) -> float | None:
        found = spread[way][name]
        return None if found is None else found["median"]

    lines = []
    for way, some in blocks.items():
        without, cpu = (base_of[way], "samples_per_s"), median(way, "cpu_s_per_step")
        full, increment = sizes(some, "full"), sizes(some, "incremental")
        writing = (way, "writing_samples_per_s")
        of_before = ratios(blocks, writing, (way, "before_samples_per_s"), samples)
        unwritten = same_steps(blocks, way, base_of[way], samples)
        lines.append(
            {
                "way": way,
                "samples/s": median(way, "samples_per_s"),
                "before": median(way, "before_samples_per_s"),
                "while writing": median(way, "writing_samples_per_s"),
                "/ before": _median(of_before),
                "/ before, ±": notch(of_before),
                "same steps without": _median(unwritten),
                "same steps, ±": notch(unwritten),
                "/ without": _median(ratios(blocks, writing, without, samples)),
                "whole turn / without": _median(ratios(blocks, (way, "samples_per_s"), without, samples)),
                "CPU ms/step": None if cpu is None else 1e3 * cpu,
                "longest / median step": _median(
                    ratios(blocks, (way, "longest_step_s"), (way, "median_step_s"), samples)
                ),
                "written s": median(way, "written_s"),
                "full MB": None if full is None else full / 1e6,
                "increment MB": None if increment is None else increment / 1e6,
            }
        )
    return lines


def restore_rows(restored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of a restore: a start with a checkpoint, and one without."""
    return [
        {
            "start": name,
            "GB of tables": restored["table_bytes"] / 1e9,
            "processes s": restored[key]["imported_s"],
            "model built s": restored[key]["built_s"],
            "first step s": restored[key]["first_step_s"],
            "without processes s": restored[key]["first_step_s"] - restored[key]["imported_s"],
        }
        for name, key in (("from a checkpoint", "restored"), ("anew", "begun_anew"))
    ]


def targets(
    blocks: Blocks, base_of: Mapping[str, str], samples: int, restored: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """What is wanted beside what was measured; "-" where it was not.

    Bytes are of an increment, in its encoding, / those of a full checkpoint with exact weights.
    """
    by_way = {line["way"]: line for line in rows(blocks, base_of, samples)}
    full = next((size for way in (FULL, INCREMENT) if way in blocks if (size := sizes(blocks[way], "full"))), None)
    found = []
    for way, what, relation, bound in WANTED:
        measured = None
        if way in by_way:
            increment = sizes(blocks[way], "incremental")
            measured = {
                "samples/s while writing / before": by_way[way]["/ before"],
                "longest step / median": by_way[way]["longest / median step"],
                "bytes / full": increment / full if increment and full else None,
            }[what]
        found.append(record.aim(f"{way}: {what}", relation, bound, measured))
    found += _beside_theirs(by_way)
    if restored is not None:
        line = restore_rows(restored)[0]
        gigabytes = line["GB of tables"]
        name = f"restore of {gigabytes:.3g} GB to the first step, s after the imports"
        found.append(record.aim(name, "<=", RESTORED_S * gigabytes, line["without processes s"]))
    return found


def _beside_theirs(by_way: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each of ours beside the better one of TorchRec's: how much of the throughput is left, and bytes."""

    def of_theirs(figure: str) -> list[float]:
        return [value for way in THEIRS if way in by_way and (value := by_way[way][figure]) is not None]

    found = []
    left, size = of_theirs("whole turn / without"), of_theirs("full MB")
    for way in (FULL, INCREMENT):
        mine = by_way.get(way, {}).get("whole turn / without")
        if left:
            found.append(record.aim(f"{way}: whole turn / without, beside TorchRec's best", ">=", max(left), mine))
    if size:
        mine = by_way.get(FULL, {}).get("full MB")
        found.append(record.aim(f"{FULL}: MB, beside TorchRec's least", "<=", min(size), mine))
    return found


def plot(shape: str, blocks: Blocks, samples: int, path: Path) -> None:
    """Draws the throughput of each way's last block, step by step, with the time of a checkpoint shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    last_ones = {way: some[-1] for way, some in blocks.items()}
    steps_s = max(block["ends_s"][-1] - block["begin_s"] for block in last_ones.values())
    size = (10, 1.5 * len(blocks) + 1)
    figure, grid = pyplot.subplots(len(blocks), 1, figsize=size, sharex=True, sharey=True, squeeze=False)
    for axes, (way, block) in zip(grid[:, 0], last_ones.items(), strict=True):
        begin_s = block["begin_s"]
        rates = [samples / seconds for seconds in durations(block)]
        axes.step([end - begin_s for end in block["ends_s"]], rates, where="pre", color="#2b6cb0", linewidth=0.8)
        for first, last in block["spans_s"]:
            axes.axvspan(first - begin_s, last - begin_s, color="#dd8833", alpha=0.3, linewidth=0)
            if last - begin_s > 1.05 * steps_s:
                said, at = f"written after {last - begin_s:.0f} s", (0.995, 0.08)
                axes.annotate(said, at, xycoords="axes fraction", ha="right", fontsize=8, color="#9c4a00")
        axes.set_title(way, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].set_xlim(0, 1.05 * steps_s)
    grid[-1, 0].set_xlabel("s since the block began; shaded: a checkpoint is written")
    figure.suptitle(f"samples/s, {shape}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
