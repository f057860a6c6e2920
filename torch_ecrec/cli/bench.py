"""`torch-ecrec bench NAME`: runs a benchmark, a module of `bench` with its own `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.runtime.checks import require_int

HELP = "run a benchmark"
BENCHMARKS = {
    "train": "throughput beside plain TorchRec, by shape and code",
    "recovery": "kills at steady state: how long a pause, how fast a rebuild",
    "outages": "how long training stands when a host, a link or the leader goes; what a drain costs; over hosts",
    "checkpoint": "training while checkpoints are written, their bytes, and restores; beside TorchRec's",
    "partial": "CPR's emulation, scaled: full recovery, and partial recovery by what is saved first",
    "tiers": "training with tables that do not fit in memory, beside all in memory",
    "stores": "our store of records on a disk, beside RocksDB and LMDB; reads of a disk alone",
    "watching": "training while pages are open and metrics are read, beside nobody",
    "codec": "encode, fold and decode, beside memcpy and ISA-L",
    "optimizers": "a step of each sparse optimizer, beside memcpy and a scattered copy",
    "seals": "what seals cost a step, a fold and a log of it; how fast a scrubber reads",
    "operators": "pooling, routing and rounding of a batch, beside FBGEMM and torch",
    "messages": "a push as a message: written, read, sent; what packing leaves of deltas and ids between hosts",
    "connections": "a call and a MB over TCP: CPU time of both ends",
    "storage": "a part of a checkpoint, written and read: raw, quantised, compressed",
    "exactness": "kills in real runs: bit-identical? how long a pause?",
    "overlap": "copies between host and GPU: do they overlap with kernels? a profiler's trace",
    "gpu": "all that a machine with a GPU can show: streams, exactness, overlap, rates; one report",
    "scaling": "how each cost of a step grows: rows, dim, batch, trainers, servers, codes; fan-out",
    "placement": "where the tables of a job lie: records and load of each slot, drawn; nothing is measured",
    "report": "writes docs/performance.md and the tables of docs/scaling.md from what the others left",
}


def named_in(words: list[str]) -> str | None:
    """Returns the benchmark that a command line names, if any."""
    return words[1] if len(words) > 1 and words[0] == "bench" and words[1] in BENCHMARKS else None


def _module_of(benchmark: str) -> Any:
    """Imports a benchmark only when it is named: a server that starts should not wait for TorchRec and plots."""
    return importlib.import_module(f"torch_ecrec.bench.{benchmark}")


def add_arguments(parser: argparse.ArgumentParser, benchmark: str | None = None) -> None:
    """Adds a command for each benchmark. Only the one that is named gets its arguments."""
    benchmarks = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, text in BENCHMARKS.items():
        one = benchmarks.add_parser(name, help=text)
        if name == benchmark:
            _module_of(name).add_arguments(one)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark that is named."""
    require_int("seed", getattr(arguments, "seed", 0), 0)  # NumPy, or a trainer, would refuse it without its name
    arguments.out.mkdir(parents=True, exist_ok=True)
    with sigterm_interrupts():  # some have trainers
        return int(_module_of(arguments.bench).run(arguments))
