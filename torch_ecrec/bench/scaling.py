"""Measures how each cost of a training step grows, with parity and without, and the messages of a step.

    torch-ecrec bench scaling --sweeps rows servers --out build/scaling
    torch-ecrec bench scaling --quick                                    # about a minute, tiny sizes

A *sweep* changes one thing about a base: 26 tables x 20,000 rows x 64, batch 512, 2 trainers, 3 servers, code (2, 1).

    rows       of all tables together       batch     samples per trainer and step     servers   at (2, 1)
    dim        floats in a row              trainers  processes that train             code      (k, r) on 8 servers

A *point* is one place in that space, on a cluster of its own (an `Experiment` with one part), started, warmed up,
measured in a few short blocks and ended before the next one starts. Each is measured with its code and without
protection on as many servers; the ratio is what parity costs. All processes share this machine: more servers here are
more processes on the same cores, not more machines, so look at CPU time and bytes rather than at the time of a step.
Ratios are of two runs one after the other; `bench train` lets systems take turns and is the finer instrument.

Bytes on the wire are what passes the loopback interface, whoever sends it: run it alone. Bytes sent are those of our
tensors, from the members' own counts. Messages are requests, counted from the layout, not observed: a trainer asks and
pushes to every slot, and a slot folds to each of its holders once. (With a batch so small that some slot has none of
its rows, lookups are fewer.) The dense snapshot is off.

The *fan-out* needs no cluster: the folds of a slot with our coding groups (`Layout.holders`), with one group of all
slots in the same rotation, and with members placed anywhere; and which share of all sets of r + 1 slots some stripe
does not survive. Example: 8 slots, (2, 1): a slot folds to 2 others with groups, 2 with one group, 7 if members are
anywhere; of the 28 pairs of slots, 12, 16 and 28 hold two members of some stripe.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from torch_ecrec.bench import record, train, workload
from torch_ecrec.bench.experiment import Experiment, Model, Part, Stopped, parse_mode
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.observe.progress import counted
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.spec.job import CodeSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES = 26
PROCESS_BYTES = 600 << 20  # of a server or trainer beside its records: Python, torch, what it keeps of freed memory
SERVERS_OF_CODES = 8  # all codes on as many servers, so that only the code differs
SWEEPS = ("rows", "dim", "batch", "trainers", "servers", "code")
AXES = {
    "rows": "rows of all tables",
    "dim": "floats in a row (dim)",
    "batch": "samples per trainer and step",
    "trainers": "trainers",
    "servers": "servers, code (2, 1)",
    "code": f"code (k, r) on {SERVERS_OF_CODES} servers",
}
FAN_OUT_CODES = ((2, 1), (4, 2))
FAN_OUT_SERVERS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
COLUMNS = {
    "value": "value",
    "step_ms": "step ms",
    "none_step_ms": "none",
    "step_of_none": "ratio",
    "cpu_ms": "CPU ms/step",
    "none_cpu_ms": "none ",
    "cpu_of_none": "ratio ",
    "wire_mb": "wire MB/step",
    "sent_mb": "sent MB/step",
    "none_sent_mb": "none  ",
    "sent_of_none": "ratio  ",
    "messages": "messages/step",
    "none_messages": "none   ",
    "resident_gb": "resident GB",
    "none_resident_gb": "none    ",
    "memory_of_records": "memory / records",
}
FAN_OUT_COLUMNS = {
    "servers": "servers",
    "code": "code",
    "groups": "coding groups",
    "folds": "folds of a slot",
    "folds_one_group": "one group",
    "folds_anywhere": "anywhere",
    "requests": "requests of a trainer",
    "fatal": "fatal sets",
    "fatal_one_group": "one group ",
    "fatal_anywhere": "anywhere ",
}


@dataclass(frozen=True)
class Point:
    """The sizes of one cluster. `rows` are of one table. Without parity, k and r name the code it is compared with."""

    rows: int = 20_000
    dim: int = 64
    batch: int = 512
    trainers: int = 2
    servers: int = 3
    k: int = 2
    r: int = 1
    parity: bool = True

    @property
    def bare(self) -> Point:
        """The same point without protection. k and r do not matter then: one run serves all codes."""
        return dataclasses.replace(self, k=2, r=1, parity=False)

    @property
    def name(self) -> str:
        code = f"k{self.k}r{self.r}" if self.parity else "none"
        return f"{code}-s{self.servers}-t{self.trainers}-rows{TABLES * self.rows}-dim{self.dim}-batch{self.batch}"

    @property
    def code(self) -> CodeSpec:
        return CodeSpec(self.servers, self.k, self.r, "parity" if self.parity else "none")

    @property
    def shape(self) -> workload.Shape:
        return workload.resized(workload.Shape(tables=TABLES), rows=self.rows, dim=self.dim, batch=self.batch)


@dataclass(frozen=True)
class Plan:
    """The base point and the values of the sweeps: (k, r) for `code`, numbers for the others."""

    base: Point
    values: Mapping[str, Sequence[Any]]
    blocks: int  # measured in each point, if the command line does not say
    seconds: float  # of one

    def point(self, sweep: str, value: Any) -> Point:
        if sweep == "rows":
            value = max(1, round(value / TABLES))
        if sweep == "code":
            k, r = value
            return dataclasses.replace(self.base, servers=max(SERVERS_OF_CODES, k + r), k=k, r=r)
        return dataclasses.replace(self.base, **{sweep: value})


FULL = Plan(
    Point(),
    {
        "rows": (200_000, 520_000, 2_000_000, 6_000_000, 20_000_000),
        "dim": (16, 32, 64, 128, 256),
        "batch": (128, 512, 1024, 2048),
        "trainers": (1, 2, 3, 4),
        "servers": (3, 6, 9, 12),
        "code": ((2, 1), (4, 1), (6, 1), (4, 2), (6, 2)),
    },
    blocks=3,
    seconds=1.0,
)
QUICK = Plan(
    Point(rows=2_000, dim=16, batch=128),
    {
        "rows": (52_000, 260_000),
        "dim": (16, 64),
        "batch": (128, 512),
        "trainers": (1, 2),
        "servers": (3, 6),
        "code": ((2, 1), (4, 2)),
    },
    blocks=1,
    seconds=0.3,
)
QUICK_SWEEPS = ("rows", "batch")  # what `--quick` takes by itself: two clusters for each further point

# pure: counts and sizes -------------------------------------------------------------------------------


def holders_of(member_slot_BN: NDArray[np.int64], k: int) -> list[set[int]]:
    """Returns for each slot the slots that hold a parity of a stripe of its data.

    Args:
        member_slot_BN: (B, N) the slot of each of the N members of the stripes of each of B bases.
        k: members before this one are data.
    """
    found: list[set[int]] = [set() for _ in range(int(member_slot_BN.max()) + 1)]
    for members in member_slot_BN.tolist():
        for slot in members[:k]:
            found[slot].update(members[k:])
    return found


def fatal_sets(member_slot_BN: NDArray[np.int64], r: int) -> int:
    """Returns how many sets of r + 1 slots hold r + 1 members of one stripe: losing such a set loses data."""
    return len({s for members in member_slot_BN.tolist() for s in itertools.combinations(sorted(members), r + 1)})


def one_group(slots: int, n: int) -> NDArray[np.int64]:
    """Returns the members by base as if all slots were one coding group, in the rotation of `Layout`."""
    return (np.arange(slots)[:, None] + np.arange(n)[None, :]) % slots


def fan_out(servers: int, k: int, r: int) -> dict[str, Any]:
    """Returns the requests of a step, and the sets of r + 1 slots that must not be lost together, by placement.

    `anywhere`: each stripe on slots of its own choice. With many stripes every slot then folds to every other, and
    every set of r + 1 slots meets in some stripe.
    """
    layout = Layout(servers, k, r, 0)
    folds = [len(layout.holders(slot)) for slot in range(servers)]
    together = one_group(servers, k + r)
    folds_together = [len(holders) for holders in holders_of(together, k)]
    groups = {layout.group_of(slot) for slot in range(servers)}
    sets = math.comb(servers, r + 1)
    return {
        "servers": servers,
        "code": f"({k}, {r})",
        "groups": len(groups),
        "folds": max(folds),
        "folds_one_group": max(folds_together),
        "folds_anywhere": servers - 1,
        "requests": 2 * servers,  # a lookup and a push to every slot, however members are placed
        "folds_of_all": sum(folds),
        "folds_of_all_one_group": sum(folds_together),
        "folds_of_all_anywhere": servers * (servers - 1),
        "fatal": fatal_sets(layout.member_slot, r) / sets,
        "fatal_one_group": fatal_sets(together, r) / sets,
        "fatal_anywhere": 1.0,
    }


def messages(point: Point) -> int:
    """Returns the requests of a step: a lookup and a push per trainer and slot, a fold per slot and holder."""
    layout = Layout(point.servers, point.k, point.code.parities, 0)
    folds = sum(len(layout.holders(slot)) for slot in range(point.servers)) if point.parity else 0
    return 2 * point.trainers * point.servers + folds


def needed_bytes(point: Point) -> int:
    """Estimates the memory of a point: records and parities, the trainers' drawing of ids, and the processes."""
    rows = TABLES * point.rows
    record_bytes = optimizer("rowwise_adagrad").schema(point.dim).nbytes
    records = rows * record_bytes * (1 + point.code.parities / point.k)
    drawing = point.trainers * 8 * (rows + 2 * point.rows)
    return int(records) + drawing + PROCESS_BYTES * (point.servers + point.trainers)


def value_name(sweep: str, value: Any) -> str:
    return f"({value[0]}, {value[1]})" if sweep == "code" else f"{value:,}"


Figures = Mapping[str, Any]


def row_of(sweep: str, value: Any, point: Point, ours: Figures, none: Figures | None) -> dict[str, Any]:
    """Returns a row of the table: a point beside the same without protection. None where that is not known."""

    def of(key: str) -> float | None:
        return ours[key] / none[key] if none is not None and none[key] else None

    columns = ("step_ms", "cpu_ms", "wire_mb", "sent_mb", "messages", "resident_gb")
    return {
        "sweep": sweep,
        "value": value_name(sweep, value),
        "rows": TABLES * point.rows,
        "dim": point.dim,
        "batch": point.batch,
        "trainers": point.trainers,
        "servers": point.servers,
        "k": point.k,
        "r": point.r,
        **ours,
        **{f"none_{key}": none[key] if none is not None else None for key in columns},
        "step_of_none": of("step_ms"),
        "cpu_of_none": of("cpu_ms"),
        "wire_of_none": of("wire_mb"),
        "sent_of_none": of("sent_mb"),
    }


# measuring --------------------------------------------------------------------------------------------


def measure(point: Point, arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts a cluster, warms it up, measures some blocks and ends it; returns the medians.

    Raises:
        Stopped: a process failed; its log is in OUT/logs.
    """
    mode = dataclasses.replace(parse_mode(f"k{point.k}r{point.r}" if point.parity else "none"), code=point.code)
    turns = train.blocks_of(arguments)
    model = Model(point.shape, point.trainers, arguments.seed)
    part = Part(point.name, mode, model, [functools.partial(turns.turn, mode)])
    experiment = Experiment(point.name, arguments.out, [part], repeats=arguments.blocks, begin=turns.warm_up)
    blocks = experiment.results()[point.name]
    middle = {key: statistics.median(b[key] for b in blocks) for key in train.FIGURES}
    step_ms = record.spread(block["step_ms"] for block in blocks)
    held = blocks[-1]["server_bytes"]
    return {
        "samples_per_s": middle["samples_per_s"],
        "step_ms": step_ms["median"],
        "step_ms_min": step_ms["min"],
        "step_ms_max": step_ms["max"],
        "cpu_ms": 1e3 * middle["cpu_s_per_step"],
        "wire_mb": middle["wire_bytes"] / 1e6,
        "sent_mb": sum(blocks[-1]["sent"].values()) / 1e6,
        "messages": messages(point),
        "resident_gb": middle["rss_bytes"] / 1e9,
        "memory_of_records": sum(held.values()) / held["record_bytes"] if held.get("record_bytes") else None,
        "steps": turns.steps[mode.name] * len(blocks),
    }


class Sweeper:
    """Measures points, each once, even if several sweeps have it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.done: dict[Point, dict[str, Any] | None] = {}
        self.left_out: list[dict[str, Any]] = []  # points without figures, each with its reason
        self.failed = False

    def figures(self, point: Point) -> dict[str, Any] | None:
        """Returns the figures of a point; None if it was left out."""
        if point not in self.done:
            self.done[point] = self._try(point)
        return self.done[point]

    def _try(self, point: Point) -> dict[str, Any] | None:
        needed, available = needed_bytes(point), psutil.virtual_memory().available
        if needed > available:
            self._leave_out(point, f"needs about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free")
            return None
        try:
            figures = measure(point, self.arguments)
        except Stopped as error:
            self.failed = True
            self._leave_out(point, f"failed: {error}")
            return None
        print(
            f"{point.name:52} {figures['step_ms']:7.1f} ms/step  {figures['cpu_ms']:7.1f} CPU ms"
            f"  {figures['wire_mb']:6.2f} MB",
            flush=True,
        )
        return figures

    def _leave_out(self, point: Point, reason: str) -> None:
        print(f"{point.name:52} left out: {reason}", file=sys.stderr, flush=True)
        self.left_out.append({"point": point.name, "reason": reason})


# the picture ------------------------------------------------------------------------------------------

INK, BLUE, AMBER, GREY = "#1f2933", "#2563eb", "#d97706", "#7b8794"


def _short(number: float) -> str:
    """Formats a number briefly: 1,500,000 is 1.5M. Numbers of up to four digits stay as they are."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= 10_000 and number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:,.0f}"


def _panel_of_sweep(axes: Any, sweep: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots time and CPU time of a step over what the sweep changes, with parity and without."""
    at = list(range(len(rows))) if sweep == "code" else [row["rows" if sweep == "rows" else sweep] for row in rows]
    for key, colour, label in (("cpu_ms", BLUE, "CPU time"), ("step_ms", AMBER, "time")):
        axes.plot(at, [row[key] for row in rows], color=colour, marker="o", markersize=4, label=f"{label}, parity")
        bare = [math.nan if row[f"none_{key}"] is None else row[f"none_{key}"] for row in rows]
        axes.plot(at, bare, color=colour, marker="o", markersize=4, mfc="white", linestyle="--", label=f"{label}, none")
    axes.set_ylim(bottom=0)
    if sweep in ("rows", "dim", "batch"):
        axes.set_xscale("log")
    if sweep == "code":
        names = [f"({row['k']}, {row['r']})" for row in rows]
    else:
        names = [_short(value) for value in at]
    axes.set_xticks(at, names, fontsize=8)
    axes.minorticks_off()
    axes.set(title=f"by {sweep}", xlabel=AXES[sweep], ylabel="ms per step")


def _panel_of_memory(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    at = [row["rows"] for row in rows]
    axes.plot(at, [row["resident_gb"] for row in rows], color=BLUE, marker="o", markersize=4)
    bare = [math.nan if row["none_resident_gb"] is None else row["none_resident_gb"] for row in rows]
    axes.plot(at, bare, color=BLUE, marker="o", markersize=4, mfc="white", linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xscale("log")
    axes.set_xticks(at, [_short(value) for value in at], fontsize=8)
    axes.minorticks_off()
    axes.set(title="memory by rows (dashed: none)", xlabel=AXES["rows"], ylabel="resident GB, all processes")


def _panel_of_fan_out(axes: Any, fans: Sequence[Mapping[str, Any]]) -> None:
    code = fans[0]["code"]
    some = [fan for fan in fans if fan["code"] == code]
    at = [fan["servers"] for fan in some]
    for key, colour, style, label in (
        ("requests", INK, "-", "trainer: lookups, pushes"),
        ("folds_anywhere", GREY, "--", "slot: folds, members anywhere"),
        ("folds", BLUE, "-", "slot: folds, ours"),
    ):
        axes.plot(at, [fan[key] for fan in some], color=colour, linestyle=style, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title=f"fan-out, code {code} (counted)", xlabel="servers", ylabel="requests per step")
    axes.legend(fontsize=7, frameon=False)


def draw(rows: Sequence[Mapping[str, Any]], fans: Sequence[Mapping[str, Any]], title: str, columns: int = 4) -> Figure:
    """Plots a panel for each sweep, memory over rows, and the fan-out."""
    from matplotlib.figure import Figure

    sweeps = [s for s in SWEEPS if any(row["sweep"] == s for row in rows)]
    of = {sweep: [row for row in rows if row["sweep"] == sweep] for sweep in sweeps}
    panels: list[Callable[[Any], None]] = [
        functools.partial(_panel_of_sweep, sweep=sweep, rows=of[sweep]) for sweep in sweeps
    ]
    if "rows" in of:
        panels.append(functools.partial(_panel_of_memory, rows=of["rows"]))
    panels.append(functools.partial(_panel_of_fan_out, fans=fans))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.2 * lines + 0.8), dpi=110, facecolor="white", layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axes, panel in itertools.zip_longest(grid, panels):
        if panel is None:
            axes.set_axis_off()
            continue
        panel(axes)
        axes.title.set_fontsize(10)
        axes.grid(True, which="major", color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    if sweeps:
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=10, color=INK)
    return figure


# the command ------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and writes scaling.json, scaling.csv and scaling.png to `arguments.out`.

    Returns:
        0, or 1 if a point failed: the others are written, with the reason. A point that does not fit in memory is left
        out, said so, and no failure.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    plan = QUICK if arguments.quick else FULL
    sweeps = arguments.sweeps if arguments.sweeps is not None else QUICK_SWEEPS if arguments.quick else SWEEPS
    arguments.blocks = plan.blocks if arguments.blocks is None else arguments.blocks
    arguments.seconds = plan.seconds if arguments.seconds is None else arguments.seconds
    train.blocks_of(arguments)  # refused before anything is started
    header = record.header()
    fans = [fan_out(servers, k, r) for k, r in FAN_OUT_CODES for servers in FAN_OUT_SERVERS if servers >= k + r]
    sweeper = Sweeper(arguments)
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        points = [(sweep, value) for sweep in SWEEPS if sweep in sweeps for value in plan.values[sweep]]
        for sweep, value in counted("scaling: points", points):
            point = plan.point(sweep, value)
            none, ours = sweeper.figures(point.bare), sweeper.figures(point)
            if ours is not None:
                rows.append(row_of(sweep, value, point, ours, none))
    except KeyboardInterrupt:  # what was measured is kept, also when somebody has had enough
        interrupted = True
    content = {
        "header": header,
        "tables": TABLES,
        "base": dataclasses.asdict(plan.base),
        "axes": AXES,
        "columns": COLUMNS,
        "fan_out_columns": FAN_OUT_COLUMNS,
        "points": {p.name: figures for p, figures in sweeper.done.items() if figures is not None},
        "left_out": sweeper.left_out,
        "fan_out": fans,
    }
    shown = []
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        lines = [{title: row[key] for key, title in COLUMNS.items()} for row in rows if row["sweep"] == sweep]
        shown.append(f"by {AXES[sweep]}:\n{record.table(lines)}")
    lines = [{title: fan[key] for key, title in FAN_OUT_COLUMNS.items()} for fan in fans]
    shown.append(f"fan-out, counted from the layout:\n{record.table(lines)}")
    title = f"{header['processor']}, {header['cores']} cores; medians; commit {header['commit']}"
    code = record.finish(
        arguments.out,
        "scaling",
        content,
        rows,
        shown="\n\n".join(shown),
        draw=lambda: draw(rows, fans, title),
        error="a point failed" if sweeper.failed else None,
    )
    if interrupted:
        raise KeyboardInterrupt
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench scaling`."""
    parser.add_argument("--sweeps", nargs="*", choices=SWEEPS, help="default: all; with --quick: rows batch")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and two points a sweep: does it work?")
    parser.add_argument("--blocks", type=int, metavar="N", help="measured in each point (default 3, quick 1)")
    parser.add_argument("--seconds", type=float, help="length of a block, about (default 1, quick 0.3)")
    parser.add_argument(
        "--least-steps", type=int, default=8, metavar="N", help="steps of a block, at least (default 8)"
    )
    parser.add_argument("--warmup", type=int, default=8, metavar="N", help="steps before the first block (default 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/scaling"), metavar="DIR")
