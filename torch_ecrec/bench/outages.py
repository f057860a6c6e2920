"""Measures how long training stands still when a server's host, a link or the coordinator's host is lost, or in a
drain.

    torch-ecrec bench outages --repeats 5                    # needs root, iproute2 and etcd's server
    torch-ecrec bench outages --events host,kill,cut         # without etcd

    host, kill                a server's host vanishes (its link is down); a server's processes are killed
    cut, cut-one-way          two servers cannot reach each other, in both directions or in one
    leader                    the host of the coordinator that leads dies; etcd is on hosts of its own
    leader-and-server         a server's host dies at the same instant
    drain                     `torch-ecrec drain` of a server, in a cluster of its own (`--drain-gigabytes`)

One cluster over hosts made of network namespaces, one for each process, trains a DLRM without a pause, and each event
comes `--repeats` times, in turn. After each, all slots must be healthy and training go on for `--steady-s`; only then
comes back what was taken, and once all is whole, the next event. `faults.py` has the figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_ecrec.bench import record
from torch_ecrec.bench.experiment import Experiment, Part, parse_mode
from torch_ecrec.bench.faults import (
    CUT,
    DRAIN,
    ELECTED,
    HOST,
    KILL,
    KINDS,
    LEADER,
    LEADER_AND_SERVER,
    ONE_WAY,
    Outage,
    start_training,
)
from torch_ecrec.bench.places import Apart, require_hosts
from torch_ecrec.bench.recovery import add_cluster, model_of
from torch_ecrec.demo.chaos.hosted import require_etcd
from torch_ecrec.demo.result import arguments_json
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Events = Sequence[Mapping[str, Any]]
WANTED = (  # of which kind, what, of which events, wanted
    (HOST, "longest_s", "worst", "<=", 3.0),
    (KILL, "longest_s", "worst", "<=", 0.5),
    (CUT, "longest_s", "worst", "<=", 5.0),
    (CUT, "after / before", "median", ">=", 0.95),
    (ONE_WAY, "longest_s", "worst", "<=", 5.0),
    (ONE_WAY, "after / before", "median", ">=", 0.95),
    (LEADER, "longest / median", "worst", "<=", 2.0),
    (LEADER_AND_SERVER, "repaired_s", "worst", "<=", 5.0),
    (DRAIN, "during / around", "median", ">=", 0.90),
    (DRAIN, "unhealthy", "worst", "<=", 0),
)
SHOWN = (
    *("longest_s", "detected_s", "placed_s", "repaired_s", "median_s", "calm_s"),
    *("after / before", "during / around"),
)


def rows(found: Mapping[str, Events]) -> list[dict[str, Any]]:
    """Returns the table, a row for each kind: medians, and the worst of the longest steps and of the repair."""
    lines = []
    for kind, some in found.items():
        if some:
            line: dict[str, Any] = {"event": kind, "times": len(some)}
            for name in ("longest_s", "calm_s", "repaired_s"):
                line |= {name: _of(some, name, "median"), f"{name} worst": _of(some, name, "worst")}
            names = ("detected_s", "placed_s", "median_s", "after / before", "during / around")
            lines.append(line | {name: _of(some, name, "median") for name in names})
    return lines


def _of(some: Events, name: str, which: str) -> float | None:
    values = [value for one in some if (value := one[name]) is not None]
    if not values:
        return None
    return max(values) if which == "worst" else float(np.median(values))


def targets(found: Mapping[str, Events]) -> list[dict[str, Any]]:
    """Returns the targets beside what was measured; "-" where it was not."""
    return [
        record.aim(f"{KINDS[kind]}: {name}, {which}", relation, bound, _of(found.get(kind, ()), name, which))
        for kind, name, which, relation, bound in WANTED
    ]


def draw(found: Mapping[str, Events]) -> Figure:
    """Plots steps per second around each event: a picture for each kind, a line for each time."""
    from matplotlib.figure import Figure

    shown = [(kind, some) for kind, some in found.items() if some]
    figure = Figure(figsize=(10, 1.7 * len(shown) + 0.8), layout="constrained")
    grid = figure.subplots(len(shown), 1, squeeze=False)
    for axes, (kind, some) in zip(grid[:, 0], shown, strict=True):
        for event in some:
            ends = np.asarray(event["step_ends_s"])
            axes.step(ends[1:], np.diff(ends), where="pre", linewidth=0.8)
        axes.axvline(0.0, color="#9c4a00", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_title(KINDS[kind], loc="left", fontsize=9)
        axes.set_ylabel("step, s", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("s after the event")
    return figure


def _tell(name: str, one: Mapping[str, Any]) -> None:
    """Prints an event in one line."""
    shown = ", ".join(f"{key} {one[key]:.3f}" for key in SHOWN if one[key] is not None)
    print(f"  {one['kind']}, {name.rpartition(', ')[2]}: {shown}", flush=True)


def check(arguments: argparse.Namespace) -> tuple[CodeSpec, list[str], Path | None]:
    """Returns the code, the kinds of events, and etcd's server if needed. Raises ValueError or TypeError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r)
    require(code.parities > 0, "without parity nothing is survived: `-r` must be at least 1")
    kinds = arguments.events.split(",")
    unknown = sorted(set(kinds) - set(KINDS))
    require(not unknown, f"unknown events {', '.join(unknown)}; there are {', '.join(KINDS)}")
    require(len(set(kinds)) == len(kinds), f"an event is named twice: {arguments.events}")
    record.require_counts(arguments, "repeats", "trainers", "batch_size", "spares")
    record.require_positive(arguments, "gigabytes", "drain_gigabytes", "steady_s")
    for name in ("link-mbit", "zipf"):
        value = getattr(arguments, name.replace("-", "_"))
        require(0 <= value < math.inf, f"`--{name}` must not be negative, got {value}")
    record.labelled("outages", arguments)
    require_hosts()
    return code, kinds, require_etcd() if set(kinds) & set(ELECTED) else None


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes outages.json, .csv and .png to `arguments.out`.

    Returns:
        0, or 1 if something stopped: what was measured until then is written, with the reason in `error`, and the
        processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    code, kinds, etcd = check(arguments)
    mode = dataclasses.replace(parse_mode("k2r1"), code=code, snapshot=True)

    def part_of(name: str, some: Sequence[str], gigabytes: float) -> Part:
        rng, model = random.Random(arguments.seed), model_of(gigabytes, arguments)
        turns = [Outage(kind, arguments.steady_s, rng) for kind in some]
        return Part(name, mode, model, turns, spares=arguments.spares, watched=True)

    parts = [
        part_of("outages", [kind for kind in kinds if kind != DRAIN], arguments.gigabytes),
        part_of("drain", [kind for kind in kinds if kind == DRAIN], arguments.drain_gigabytes),
    ]
    experiment = Experiment(
        record.labelled("outages", arguments),
        arguments.out,
        [part for part in parts if part.turns],
        repeats=arguments.repeats,
        place=lambda part: Apart(
            code, part.spares, part.model.trainers, None if part.name == "drain" else etcd, 1e6 * arguments.link_mbit
        ),
        begin=start_training,
        after=_tell,
    )
    experiment.run()
    events = [event for some in experiment.found.values() for event in some]
    found = {kind: [event for event in events if event["kind"] == kind] for kind in kinds}
    lines, aims = rows(found), targets(found)
    content = {"arguments": arguments_json(arguments), "events": found, "targets": aims}
    shown = "\n\n".join(map(record.table, (lines, aims)))
    return experiment.finish(content, lines, shown, lambda: draw(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench outages`."""
    parser.add_argument("--events", default=",".join(KINDS), metavar="A,B,...", help=f"default {','.join(KINDS)}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each event (default 5)")
    add_cluster(parser)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples per trainer and step")
    parser.add_argument("--gigabytes", type=float, default=0.1, metavar="GB", help="of records, without parity")
    parser.add_argument(
        "--drain-gigabytes",
        type=float,
        default=2.0,
        metavar="GB",
        help="likewise for the drain; with parity a server of three has half of it (default 2)",
    )
    parser.add_argument(
        "--link-mbit",
        type=float,
        default=0.0,
        metavar="M",
        help="rate of the links of servers' hosts, each way (default: no limit)",
    )
    parser.add_argument("--steady-s", type=float, default=4.0, metavar="S", help="training measured around each event")
    record.add_files(parser, "build/outages")
