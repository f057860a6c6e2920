"""Measures throughput of training: our servers with several codes beside plain TorchRec, in turn.

All systems (`experiment.py` has their names) are started, then take turns: one block of steps each, again and again,
while the others wait. So noise that comes and goes meets all of them, and ratios hold where times do not. CPU seconds
are user + system time of all processes of a system. Trainers of ours wait from when they ask for rows until these are
there, and until a push may be sent: of a block's time, the share of the trainer that does so most. Bytes on the wire
are what passes the loopback interface while a block runs, or, with `--hosts`, what leaves the hosts (places.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.experiment import KERNELS, Experiment, Mode, Model, Part, Running, parse_mode
from torch_ecrec.bench.places import Here, OnHosts, require_hosts
from torch_ecrec.demo.training import require_device
from torch_ecrec.runtime.checks import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "torchrec,torchrec+ckpt,none,none+snap,k2r1,k2r1+snap,k4r1,k4r1+snap,k4r2,k4r2+snap"
DEFAULT_OF_SEQUENCES = "torch,none,k2r1,k2r1+snap,k4r2,k4r2+snap"
BASES = ("torchrec", *(f"torchrec{kernel}" for kernel in KERNELS), "torch", "none")  # rates are divided by theirs
FIGURES = ("samples_per_s", "step_ms", "cpu_s_per_step", "server_cpu_s_per_step", "wire_bytes", "rss_bytes")


class Blocks:
    """Turns of about so many seconds. How many steps that is, is measured while a mode warms up.

    Args:
        warmup: steps before that, and again as many that are timed.
        least_steps: of a block.
        seconds: of a block, about.
        checkpoint_every: steps, where TorchRec saves itself.
    """

    def __init__(self, warmup: int, least_steps: int, seconds: float, checkpoint_every: int = 0) -> None:
        self.warmup, self.least_steps, self.seconds, self.every = warmup, least_steps, seconds, checkpoint_every
        self.steps: dict[str, int] = {}  # of a block, by the name of the mode

    def warm_up(self, running: Running, part: Part) -> None:
        """Called before the first turn of a part: warms up, and measures the steps of a turn."""
        warm, timed = (running.block(self.warmup, dataclasses.replace(part.mode, checkpoint=False)) for _ in range(2))
        self.steps[part.mode.name] = max(self.least_steps, round(1e3 * self.seconds / timed["step_ms"]))
        print(f"{part.name:16} warm: {warm['step_ms']:.1f}, then {timed['step_ms']:.1f} ms/step", flush=True)

    def turn(self, mode: Mode, running: Running) -> dict[str, Any]:
        """Trains one block of a mode; returns its figures."""
        return running.block(self.steps[mode.name], mode, self.every)


def summarise(modes: Sequence[Mode], blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Returns median, least and most of every figure over the blocks of each mode that has some."""
    modes = [mode for mode in modes if blocks[mode.name]]
    result: dict[str, Any] = {
        figure: {mode.name: record.spread(block[figure] for block in blocks[mode.name]) for mode in modes}
        for figure in FIGURES
    }
    ours = [mode.name for mode in modes if mode.code is not None]
    result["waits_share"] = {name: record.spread(block["waits_share"] for block in blocks[name]) for name in ours}
    last = {mode.name: blocks[mode.name][-1] for mode in modes}
    result["sent_bytes"] = {
        name: {kind: round(size) for kind, size in block["sent"].items() if size} for name, block in last.items()
    }
    result["server_bytes"] = {name: last[name]["server_bytes"] for name in ours}
    return {**result, "blocks": blocks}


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the table: a row per mode, with ratios to those of `BASES` that ran."""
    medians = {figure: {name: v["median"] for name, v in result[figure].items()} for figure in FIGURES}
    lines = []
    for name, rate in medians["samples_per_s"].items():
        cpu = medians["cpu_s_per_step"][name]
        line: dict[str, Any] = {
            "system": name,
            "samples/s": rate,
            "least": result["samples_per_s"][name]["min"],
            "most": result["samples_per_s"][name]["max"],
            "step ms": medians["step_ms"][name],
            "CPU ms/step": 1e3 * cpu,
            "of it servers": 1e3 * medians["server_cpu_s_per_step"][name],
            "wire MB/step": medians["wire_bytes"][name] / 1e6,
            "resident GB": medians["rss_bytes"][name] / 1e9,
        }
        for base in BASES:
            if base in medians["samples_per_s"]:
                line[f"rate / {base}"] = rate / medians["samples_per_s"][base]
                line[f"CPU / {base}"] = cpu / medians["cpu_s_per_step"][base]
        waits = result.get("waits_share", {}).get(name)  # not there in results of before
        line["waits %"] = None if waits is None else 100 * waits["median"]
        held = result["server_bytes"].get(name)
        line["memory / records"] = sum(held.values()) / held["record_bytes"] if held else None
        lines.append(line)
    return lines


def draw(shape: str, lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots throughput, and CPU seconds per step, of every mode."""
    from matplotlib.figure import Figure

    names = [line["system"] for line in lines]
    figure = Figure(figsize=(11, 0.45 * len(names) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    colours = ["#8a8a8a" if name.startswith("torch") else "#2b6cb0" for name in names]
    low = [line["samples/s"] - line["least"] for line in lines]
    high = [line["most"] - line["samples/s"] for line in lines]
    rates = [line["samples/s"] for line in lines]
    left.barh(names, rates, xerr=[low, high], color=colours, ecolor="#333333", capsize=2)
    left.set_xlabel("samples/s (median; least to most of the blocks)")
    right.barh(names, [line["CPU ms/step"] for line in lines], color=colours)
    right.set_xlabel("CPU ms per step, all processes")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.bar_label(axes.containers[-1], fmt="{:,.0f}", padding=3, fontsize=8)
    figure.suptitle(f"Training, {shape}")
    return figure


def shape_of(arguments: argparse.Namespace) -> workload.Shape:
    """Returns the model's shape (`add_shape`). Raises ValueError or TypeError if an argument is wrong."""
    require(arguments.data is None or arguments.shape == "criteo", "`--data` goes with `--shape criteo`")
    return workload.resized(
        workload.SHAPES[arguments.shape],
        rows=arguments.rows,
        dim=arguments.dim,
        ids=arguments.ids,
        batch=arguments.batch_size,
        data=str(arguments.data) if arguments.data else None,
    )


def blocks_of(arguments: argparse.Namespace) -> Blocks:
    """Returns turns of systems, as long as the command line says (`add_blocks`). Raises ValueError or TypeError."""
    record.require_counts(arguments, "blocks", "least_steps", "warmup")
    record.require_positive(arguments, "seconds")
    return Blocks(arguments.warmup, arguments.least_steps, arguments.seconds)


def check(arguments: argparse.Namespace) -> tuple[workload.Shape, list[Mode]]:
    """Returns the model's shape and the modes. Raises ValueError or TypeError if an argument is wrong."""
    shape = shape_of(arguments)
    default = DEFAULT_OF_SEQUENCES if shape.sequence else DEFAULT
    modes = [parse_mode(name) for name in (arguments.systems or default).split(",")]
    for mode in modes:
        rival = mode.group.partition(":")[0]
        require(
            mode.code is not None or (rival == "torch") == shape.sequence,
            f"`--shape {arguments.shape}` is not for {rival}: "
            + ("FBGEMM has no Adam on a CPU; take torch" if shape.sequence else "take torchrec"),
        )
    require(len({mode.name for mode in modes}) == len(modes), f"a system is named twice: {arguments.systems}")
    for mode in modes:
        require(
            arguments.device == "cuda" or mode.kernel == "fused",
            f"{mode.name!r}: tables that a GPU reads in the host's memory go with `--device cuda`",
        )
    require_device(arguments.device)
    if arguments.device == "cuda" and any(mode.code is None for mode in modes):
        workload.require_fbgemm_cuda()
    blocks_of(arguments)  # refused with the others
    record.require_counts(arguments, "trainers", "checkpoint_every")
    record.require_counts(arguments, "hosts", least=0)
    require(arguments.link_gbit >= 0, f"`--link-gbit` must not be negative, got {arguments.link_gbit}")
    require(arguments.hosts > 0 or not arguments.link_gbit, "`--link-gbit` goes with `--hosts`")
    if arguments.hosts:
        require_hosts()
    return shape, modes


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes train-SHAPE.json, .csv and .png, with the label in their names.

    Returns:
        0, or 1 if something stopped: what was measured until then is written, and the processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    shape, modes = check(arguments)
    model = Model(shape, arguments.trainers, arguments.seed, device=arguments.device)
    blocks = Blocks(arguments.warmup, arguments.least_steps, arguments.seconds, arguments.checkpoint_every)
    experiment = Experiment(
        record.labelled(f"train-{arguments.shape}", arguments),
        arguments.out,
        [Part(mode.name, mode, model, [functools.partial(blocks.turn, mode)]) for mode in modes],
        repeats=arguments.blocks,
        together=True,
        place=lambda part: OnHosts(arguments.hosts, 1e9 * arguments.link_gbit) if arguments.hosts else Here(),
        begin=blocks.warm_up,
        after=lambda name, block: print(f"{name}: {block['samples_per_s']:,.0f} samples/s", flush=True),
    )
    experiment.run()
    result = summarise(modes, experiment.found)
    content = {
        "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
        "trainers": arguments.trainers,
        "hosts": arguments.hosts,
        "link_gbit": arguments.link_gbit,
        "device": arguments.device,
        "steps_per_block": blocks.steps,
        "checkpoint_every": arguments.checkpoint_every,
        **result,
    }
    lines = rows(result)
    return experiment.finish(content, lines, record.table(lines), lambda: draw(arguments.shape, lines), arguments.json)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Adds the model, its trainers and their batches. `shape_of` reads the shape."""
    parser.add_argument("--shape", choices=list(workload.SHAPES), default="embedding-heavy")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument("--rows", type=int, help="rows per table, instead of the shape's")
    parser.add_argument("--dim", type=int, help="embedding dim, instead of the shape's")
    parser.add_argument("--ids", type=int, help="ids per bag, instead of the shape's")
    parser.add_argument("--batch-size", type=int, help="samples per trainer and step, instead of the shape's")
    parser.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows, for --shape criteo")
    parser.add_argument("--seed", type=int, default=0)


def add_blocks(parser: argparse.ArgumentParser, warmup: int) -> None:
    """Adds what `Blocks` is made of. `warmup`: the default. `blocks_of` reads it."""
    parser.add_argument("--blocks", type=int, default=5, metavar="N", help="turns of each system (default 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block, about (default 4)")
    parser.add_argument("--least-steps", type=int, default=8, help="steps of a block, at least (default 8)")
    parser.add_argument("--warmup", type=int, default=warmup, metavar="N", help="steps, twice, before the first block")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench train`."""
    parser.add_argument("--systems", metavar="A,B,...", help=f"default {DEFAULT}; for sequence {DEFAULT_OF_SEQUENCES}")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="of the dense model and TorchRec's tables; cuda: trainers take the GPUs in turn, servers stay on the CPU",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=0,
        metavar="N",
        help="on so many hosts of network namespaces (needs root): trainers from the first on, servers from the last",
    )
    parser.add_argument(
        "--link-gbit",
        type=float,
        default=0.0,
        metavar="G",
        help="rate of each host's link, each way (default: no limit)",
    )
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="X", help="steps, for torchrec+ckpt")
    add_shape(parser)
    add_blocks(parser, warmup=40)
    record.add_files(parser, "build/bench", copies=True)
