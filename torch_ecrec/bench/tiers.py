"""Measures training with tables that do not fit in memory, beside the same with all of them in memory.

The systems take turns, as in `bench train`: k2r1 in memory, with a share of its records and parities in memory and the
others on a disk (`--shares`), and with the parities alone there; without looking ahead, and with batches drawn early,
of which servers are told (`--ahead`). Each step draws other ids, so that what is looked up is not what was looked up 32
steps before. The budget of a server is the share of its records' and parities' bytes, and what a tier takes beside
(`records/tiers/budget.py`).

`reads/step` are of the disk; the reads that the disk does by itself, 32 at once, stand above the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.experiment import Experiment, Mode, Model, Part, Running, parse_mode
from torch_ecrec.bench.train import Blocks, add_blocks, add_shape, blocks_of, shape_of, summarise
from torch_ecrec.records.pages import untouched
from torch_ecrec.records.tiers.budget import least_budget, need_of
from torch_ecrec.records.tiers.disk import BLOCK_BYTES, Reader, ScratchFile, reader
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.settings import LOOK_AHEAD_MOST, check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N = TypeVar("N", int, float)

MEMORY = "in memory"
PARITIES = "parities on disk"
PROBE_BLOCKS = 1 << 16  # of the file that the disk is asked for
PROBE_S = 2.0
COUNTED = ("tier_hits", "tier_misses", "tier_reads", "tier_written_bytes")


def probe_file(folder: Path, reads: Reader) -> ScratchFile:
    """Returns a file of `PROBE_BLOCKS` blocks, none of them zeros."""
    file, size = ScratchFile(folder, reads), PROBE_BLOCKS * BLOCK_BYTES
    piece = untouched(1 << 22, np.uint8)
    piece[:] = np.random.default_rng(0).integers(0, 256, len(piece), np.uint8)
    for offset in range(0, size, len(piece)):
        file.write(offset, piece)
    return file


def disk_rate(folder: Path, depth: int = 32) -> float:
    """Returns how many blocks of 4 KiB a second come from random places of a file, so many at once."""
    file, rng, piece = probe_file(folder, reader()), np.random.default_rng(0), untouched(depth * BLOCK_BYTES, np.uint8)
    count, begin_s = 0, time.perf_counter()
    while time.perf_counter() - begin_s < PROBE_S:
        offsets_R = rng.integers(0, PROBE_BLOCKS, depth) * BLOCK_BYTES
        found_R = file.read(offsets_R, np.full(depth, BLOCK_BYTES), piece, np.arange(depth) * BLOCK_BYTES)
        assert (found_R == BLOCK_BYTES).all()
        count += depth
    return count / (time.perf_counter() - begin_s)


def budget(shape: workload.Shape, mode: Mode, share: float) -> int:
    """Returns the memory, in bytes, of a server of which a share of the records and parities is in memory."""
    assert mode.code is not None
    nbytes, code = 4 * (shape.dim + 1), mode.code
    rows = shape.tables * shape.rows // code.slots
    return least_budget(need_of([(rows, nbytes), (rows * code.parities // code.k, nbytes)]), share)


def tier_settings(folder: Path, memory_bytes: int, kind: str = "all") -> dict[str, str]:
    """Returns the settings of servers with a tier, as variables of the environment."""
    return {
        "TORCH_ECREC_TIER": str(folder.resolve()),
        "TORCH_ECREC_TIER_MEMORY_BYTES": str(memory_bytes),
        "TORCH_ECREC_TIER_FOR": kind,
    }


class Counted:
    """Turns of `Blocks`, with what the disks did meanwhile."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks

    def turn(self, mode: Mode, running: Running) -> dict[str, Any]:
        """Trains one block of a mode; returns its figures."""
        before = self._counts(running)
        block, steps = self.blocks.turn(mode, running), self.blocks.steps[mode.name]
        after = self._counts(running)
        per_step = {name: (after[name] - before[name]) / steps for name in COUNTED}
        return {**block, **per_step, "tier_memory_bytes": after["tier_memory_bytes"]}

    def _counts(self, running: Running) -> dict[str, int]:
        slots = [slot for member in running.cluster.status().members for slot in member.report.slots or ()]
        return {name: sum(getattr(slot, name) for slot in slots) for name in (*COUNTED, "tier_memory_bytes")}


def _numbers(name: str, kind: Callable[[str], N], text: str) -> list[N]:
    """Returns the numbers of an option, each once. Raises ValueError."""
    try:
        found = [kind(one) for one in text.split(",") if one]
    except ValueError as error:
        raise ValueError(f"`--{name}` are numbers with commas between them, got {text}") from error
    require(len(set(found)) == len(found), f"`--{name}` has a number twice: {text}")
    return found


def modes_of(arguments: argparse.Namespace, shape: workload.Shape) -> list[Mode]:
    """Returns the systems that are measured."""
    base = parse_mode("k2r1")

    def mode(name: str, ahead: int, settings: Mapping[str, str] = {}) -> Mode:
        named = f"{name}, {ahead} ahead" if ahead else name
        return dataclasses.replace(
            base, name=named, group=named, settings={**settings, "TORCH_ECREC_LOOK_AHEAD": str(ahead)}
        )

    def tiered(name: str, share: float, kind: str, ahead: int = 0) -> Mode:
        return mode(name, ahead, tier_settings(arguments.tier, budget(shape, base, share), kind))

    shares, distances = _numbers("shares", float, arguments.shares), _numbers("ahead", int, arguments.ahead)
    require(all(0 < share <= 1 for share in shares), f"`--shares` are of all records, 0 to 1, got {arguments.shares}")
    require(distances[:1] == [0], f"`--ahead` begins with 0, what the others are compared with, got {arguments.ahead}")
    require(
        all(0 <= ahead <= LOOK_AHEAD_MOST for ahead in distances),
        f"`--ahead` must be 0 to {LOOK_AHEAD_MOST}, got {arguments.ahead}",
    )
    found = [mode(MEMORY, ahead) for ahead in distances]
    found += [tiered(f"{100 * share:g} % in memory", share, "all", ahead) for share in shares for ahead in distances]
    # all data records, and as good as no parity
    return [*found, tiered(PARITIES, 0.7, "parities")] if arguments.parities else found


def rows(result: Mapping[str, Any], blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the table: a row per system, with ratios to the one in memory."""
    lines, rates = [], result["samples_per_s"]
    for name in rates:
        ratios = [
            block["samples_per_s"] / whole["samples_per_s"]
            for block, whole in zip(blocks[name], blocks[MEMORY], strict=False)
        ]
        middle = {key: record.spread(block[key] for block in blocks[name])["median"] for key in COUNTED}
        without = name.partition(", ")[0]
        more = [
            block["samples_per_s"] / other["samples_per_s"]
            for block, other in zip(blocks[name], blocks[without], strict=False)
        ]
        asked = middle["tier_hits"] + middle["tier_misses"]
        held = result["server_bytes"][name]
        lines.append(
            {
                "system": name,
                "samples/s": rates[name]["median"],
                "rate / in memory": record.spread(ratios)["median"] if ratios else None,
                "least": min(ratios, default=None),
                "most": max(ratios, default=None),
                "rate / not ahead": record.spread(more)["median"] if more and name != without else None,
                "CPU / in memory": result["cpu_s_per_step"][name]["median"]
                / result["cpu_s_per_step"][MEMORY]["median"],
                "hit rate": middle["tier_hits"] / asked if asked else None,
                "reads/step": middle["tier_reads"],
                "MB written/step": middle["tier_written_bytes"] / 1e6,
                "tier MB": blocks[name][-1]["tier_memory_bytes"] / 1e6,
                "records MB": (held["record_bytes"] + held["parity_bytes"]) / 1e6,
                "resident GB": result["rss_bytes"][name]["median"] / 1e9,
            }
        )
    return lines


def draw(lines: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plots the rate of each system beside the one in memory, with its hit rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.5 * len(lines) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [line["system"] for line in lines]
    bars = axes.barh(names, [line["rate / in memory"] for line in lines], color="#2b6cb0")
    hits = [f"{line['hit rate']:.1%} hits" if line["hit rate"] is not None else "" for line in lines]
    axes.bar_label(bars, [f"{line['rate / in memory']:.2f}  {text}" for line, text in zip(lines, hits, strict=True)])
    axes.set_xlabel("samples/s, of those with all records in memory")
    axes.set_xlim(0, 1.35)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes tiers-SHAPE.json, .csv and .png.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    shape = shape_of(arguments)
    record.require_counts(arguments, "trainers")
    blocks = blocks_of(arguments)
    check_folder(arguments.tier)
    modes = modes_of(arguments, shape)
    name = record.labelled(f"tiers-{arguments.shape}", arguments)
    reads_per_s = disk_rate(arguments.tier)
    print(f"the disk of {arguments.tier} reads {reads_per_s:,.0f} blocks of 4 KiB a second, 32 at once", flush=True)
    model = Model(shape, arguments.trainers, arguments.seed, pool=0)
    counted = Counted(blocks)
    experiment = Experiment(
        name,
        arguments.out,
        [Part(mode.name, mode, model, [functools.partial(counted.turn, mode)]) for mode in modes],
        repeats=arguments.blocks,
        together=True,
        begin=blocks.warm_up,
        after=lambda name, block: print(f"{name}: {block['samples_per_s']:,.0f} samples/s", flush=True),
    )
    experiment.run()
    result = summarise(modes, experiment.found)
    lines = rows(result, experiment.found) if experiment.found[MEMORY] else []
    content = {
        "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
        "trainers": arguments.trainers,
        "disk_reads_per_s": reads_per_s,
        "filesystem_block": os.statvfs(arguments.tier).f_bsize,
        "steps_per_block": blocks.steps,
        **result,
    }
    title = f"Records on disk, {arguments.shape}; a disk of {reads_per_s:,.0f} reads/s"
    return experiment.finish(content, lines, record.table(lines), lambda: draw(lines, title), arguments.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench tiers`."""
    parser.add_argument("--tier", type=Path, required=True, metavar="DIR", help="a folder on the disk to measure")
    parser.add_argument("--shares", default="0.25,0.1", metavar="A,B,...", help="of records in memory (0.25,0.1)")
    parser.add_argument("--parities", action=argparse.BooleanOptionalAction, default=True, help="on disk alone, too")
    parser.add_argument("--ahead", default="0,4", metavar="0,A,...", help="batches that are drawn early, at most (0,4)")
    add_shape(parser)
    add_blocks(parser, warmup=60)
    record.add_files(parser, "build/bench", copies=True)
