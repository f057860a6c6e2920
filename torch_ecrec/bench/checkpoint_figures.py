"""Arithmetic of `bench checkpoint`: what steps say of the time in which a checkpoint is written; table and picture.

A block is one turn of one way of training (`checkpoint.py`). Its `begin_s` and `ends_s` are when it began and when each
of its steps ended, its `spans_s` when each checkpoint began and ended, all by the same clock.

    begin 0, ends 1, 2, 4, 6, 7; a checkpoint from 2.5 to 5
    steps beside it: the third and the fourth, since they overlap it: 2 steps in 4 s; the longest took 2 s
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record

Block = Mapping[str, Any]
Blocks = Mapping[str, Sequence[Block]]


def durations(block: Block) -> list[float]:
    """Seconds of each step."""
    return [end - begin for begin, end in pairwise([block["begin_s"], *block["ends_s"]])]


def beside(block: Block) -> list[float]:
    """Seconds of each step that overlaps a checkpoint of the block."""
    return [
        end - begin
        for begin, end in pairwise([block["begin_s"], *block["ends_s"]])
        if any(begin < last and end > first for first, last in block["spans_s"])
    ]


def figures(block: Block, samples: int) -> dict[str, float | None]:
    """What one block says.

    Args:
        block: see above, with `cpu_s`: of all processes.
        samples: of a step, of all trainers together.

    Returns:
        `samples_per_s` of the whole block; `writing_samples_per_s` of the steps beside a checkpoint, and
        `longest_step_s` of them (None: there were none; of a block without checkpoints, of all its steps);
        `median_step_s`; `cpu_s_per_step`; `written_s`: how long the checkpoints took.
    """
    steps = durations(block)
    there = beside(block)
    looked_at = there if block["spans_s"] else steps
    return {
        "samples_per_s": samples * len(steps) / sum(steps),
        "writing_samples_per_s": samples * len(there) / sum(there) if there else None,
        "median_step_s": statistics.median(steps),
        "longest_step_s": max(looked_at, default=None),
        "cpu_s_per_step": block["cpu_s"] / len(steps),
        "written_s": sum(last - first for first, last in block["spans_s"]) if block["spans_s"] else None,
    }


def spreads(blocks: Blocks, samples: int) -> dict[str, dict[str, dict[str, float] | None]]:
    """Of each way, median, least and most of each figure over its blocks; None where no block has it."""
    result: dict[str, dict[str, dict[str, float] | None]] = {}
    for way, some in blocks.items():
        found = [figures(block, samples) for block in some]
        result[way] = {}
        for name in found[0]:
            values = [value for one in found if (value := one[name]) is not None]
            result[way][name] = record.spread(values) if values else None
    return result


def ratio_within(blocks: Blocks, way: str, base: str, figure: str, samples: int) -> dict[str, float] | None:
    """A way's figure / the same turn's `samples_per_s` without checkpoints; None where no turn has both."""
    found = []
    for mine, without in zip(blocks[way], blocks[base], strict=True):
        value, other = figures(mine, samples)[figure], figures(without, samples)["samples_per_s"]
        if value is not None and other is not None:
            found.append(value / other)
    return record.spread(found) if found else None


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
        base = base_of[way]
        writing = ratio_within(blocks, way, base, "writing_samples_per_s", samples)
        whole = ratio_within(blocks, way, base, "samples_per_s", samples)
        longest, usual = median(way, "longest_step_s"), median(base, "median_step_s")
        cpu, cpu_without = median(way, "cpu_s_per_step"), median(base, "cpu_s_per_step")
        full = [size for block in some for size, kind in zip(block["bytes"], block["kinds"], strict=True) if kind == "full"]
        increments = [
            size for block in some for size, kind in zip(block["bytes"], block["kinds"], strict=True) if kind != "full"
        ]
        lines.append(
            {
                "way": way,
                "samples/s": median(way, "samples_per_s"),
                "while writing": median(way, "writing_samples_per_s"),
                "/ without": whole["median"] if whole else None,
                "while writing / without": writing["median"] if writing else None,
                "CPU ms/step": 1e3 * cpu if cpu is not None else None,
                "CPU / without": cpu / cpu_without if cpu and cpu_without else None,
                "longest / median step": longest / usual if longest and usual else None,
                "written s": median(way, "written_s"),
                "full MB": statistics.median(full) / 1e6 if full else None,
                "increment MB": statistics.median(increments) / 1e6 if increments else None,
            }
        )
    return lines


def plot(shape: str, blocks: Blocks, samples: int, path: Path) -> None:
    """Of each way's last block, throughput step by step, with the time of a checkpoint shaded."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(blocks), 1, figsize=(10, 1.5 * len(blocks) + 1), sharex=True, squeeze=False)
    for axes, (way, some) in zip(grid[:, 0], blocks.items(), strict=True):
        block = some[-1]
        begin_s = block["begin_s"]
        rates = [samples / seconds for seconds in durations(block)]
        axes.step([end - begin_s for end in block["ends_s"]], rates, where="pre", color="#2b6cb0", linewidth=0.8)
        for first, last in block["spans_s"]:
            axes.axvspan(first - begin_s, last - begin_s, color="#dd8833", alpha=0.3, linewidth=0)
        axes.set_ylim(bottom=0)
        axes.set_title(way, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("s since the block began; shaded: a checkpoint is written")
    figure.suptitle(f"samples/s, {shape}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
