"""Measures what copies between the host and a GPU overlap with: `torch-ecrec bench overlap`, from a profiler's trace.

A trainer with its dense model on the GPU (`nn/staging.py`) warms up, then trains some steps under `torch.profiler`, in
a plain loop and in TorchRec's pipeline. Of the traces, which stay in the folder:

    kernels      what runs on the GPU's streams; most of it on one, the *model's stream*
    copies       between pinned memory and the GPU: to the device (pooled bags), to the host (ids, gradients)
    own stream   the share of the copies' time that is on other streams than the model's
    overlapped   of the copies on other streams, the share of time during which a kernel runs
    host waits   time of the host in waits for an event or a stream, per step

With copies at 0-4 ms and 6-8 ms of a stream of their own, and a kernel at 3-7 ms, 2 of 6 ms are overlapped. Copies of
memory that is not pinned are the loop's, not ours: it copies its batches so.

It fails if a direction has no copy on a stream of its own. On a CPU there are none, and the trace alone is left.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.experiment import Experiment, Mode, Model, Part, Running, parse_mode
from torch_ecrec.demo.training import require_device
from torch_ecrec.runtime.checks import require

DIRECTIONS = {"HtoD": "to device", "DtoH": "to host"}  # by what is in the name of a copy
WAITS = {"cudaEventSynchronize", "cudaStreamSynchronize"}

Event = Mapping[str, Any]
Spans = list[tuple[float, float]]  # of begin and end, in microseconds


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Returns the same times as spans that neither touch nor overlap, in order."""
    found: Spans = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length(spans: Spans) -> float:
    """Returns the microseconds of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def common(some: Spans, others: Spans) -> float:
    """Returns the microseconds that are in both. Each is in order, and its spans do not overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def _spans(events: Iterable[Event]) -> Spans:
    return merged((event["ts"], event["ts"] + event["dur"]) for event in events)


def figures(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Returns the figures of a trace, times in milliseconds per step, shares from 0 to 1.

    Args:
        events: `traceEvents` of a Chrome trace of torch's profiler.
        steps: that were trained in it.

    Raises:
        ValueError: no kernel ran, or a direction has no copy on a stream of its own.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    copies = [event for event in complete if event.get("cat") == "gpu_memcpy" and "Pinned" in event["name"]]
    require(bool(kernels), "the trace has no kernel of a GPU: was the model on it?")
    time_us = Counter[int]()
    for kernel in kernels:
        time_us[kernel["args"]["stream"]] += kernel["dur"]
    ((models, _),) = time_us.most_common(1)
    busy = _spans(kernels)
    found: dict[str, Any] = {"kernels_ms": length(busy) / 1e3 / steps}
    for mark, name in DIRECTIONS.items():
        of_all = [event for event in copies if mark in event["name"]]
        own = [event for event in of_all if event["args"]["stream"] != models]
        require(bool(own), f"the trace has no copy {name} on a stream of its own, of {len(of_all)} that there are")
        spans = _spans(own)
        found[name] = {
            "copies": len(of_all) / steps,
            "copies_ms": length(_spans(of_all)) / 1e3 / steps,
            "own_stream": sum(e["dur"] for e in own) / sum(e["dur"] for e in of_all),
            "overlapped": common(spans, busy) / length(spans),
        }
    ours = _spans(e for e in copies if e["args"]["stream"] != models and any(m in e["name"] for m in DIRECTIONS))
    found["overlapped"] = common(ours, busy) / length(ours)
    found["host_waits_ms"] = sum(event["dur"] for event in complete if event["name"] in WAITS) / 1e3 / steps
    return found


def _turn(mode: Mode, arguments: argparse.Namespace, running: Running) -> dict[str, Any]:
    """Warms up, trains under the profiler, and returns the figures; with `problem` where the trace is not as wanted."""
    running.block(arguments.warmup, mode)
    plain = running.block(arguments.steps, mode)
    trace = trace_of(arguments.out, mode.name)
    running.ask({"profile": str(trace.resolve()), "steps": arguments.steps})
    found: dict[str, Any] = {"trace": trace.name, "step_ms": plain["step_ms"], "waits_share": plain["waits_share"]}
    if arguments.device == "cpu":
        return found
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    try:
        return {**found, **figures(events, arguments.steps)}
    except ValueError as problem:
        return {**found, "problem": f"{mode.name}: {problem}"}


def trace_of(out: Path, system: str) -> Path:
    """Returns where the trace of a system is left."""
    return out / f"trace-{system.replace(':', '-')}.json.gz"


def rows(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the table: a row for each system and direction, or for a system alone whose trace has no figures."""
    lines = []
    for system, turns in found.items():
        for one in turns:
            for name in DIRECTIONS.values():
                of = one.get(name, {})
                share = {key: None if key not in of else 100 * of[key] for key in ("own_stream", "overlapped")}
                lines.append(
                    {
                        "system": system,
                        "copies": name,
                        "a step": of.get("copies"),
                        "ms/step": of.get("copies_ms"),
                        "own stream %": share["own_stream"],
                        "overlapped %": share["overlapped"],
                        "kernels ms/step": one.get("kernels_ms"),
                        "host waits ms/step": one.get("host_waits_ms"),
                        "step ms": one["step_ms"],
                        "waits for rows %": 100 * one["waits_share"],
                    }
                )
    return lines


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes OUT/overlap.json, .csv and a trace of each system.

    Returns:
        0, or 1 if something stopped, or a trace is not as it should be.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    require_device(arguments.device)
    record.require_counts(arguments, "steps", "warmup")
    modes = [parse_mode(name) for name in arguments.systems.split(",")]
    require(all(mode.code is not None for mode in modes), "`--systems` are ours: TorchRec does not stage copies")
    shape = workload.resized(workload.SHAPES[arguments.shape], rows=arguments.rows, batch=arguments.batch_size)
    model = Model(shape, trainers=1, device=arguments.device)
    parts = [Part(mode.name, mode, model, [functools.partial(_turn, mode, arguments)]) for mode in modes]
    experiment = Experiment("overlap", arguments.out, parts)
    experiment.run()
    problems = [one["problem"] for turns in experiment.found.values() for one in turns if "problem" in one]
    experiment.error = experiment.error or "; ".join(problems) or None
    content = {"device": arguments.device, "shape": arguments.shape, "found": experiment.found}
    lines = rows(experiment.found)
    return experiment.finish(content, lines, record.table(lines), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench overlap`."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="of the dense model (default cuda)")
    parser.add_argument("--systems", default="k2r1,k2r1:pipeline", metavar="A,B,...", help="of ours")
    parser.add_argument("--shape", choices=list(workload.SHAPES), default="multi-hot")
    parser.add_argument("--steps", type=int, default=20, help="under the profiler, and as many before without it")
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="steps before both (default 10)")
    parser.add_argument("--rows", type=int, help="rows per table, instead of the shape's")
    parser.add_argument("--batch-size", type=int, help="samples per step, instead of the shape's")
    parser.add_argument("--out", type=Path, default=Path("build/overlap"), metavar="DIR", help="of the files")
