"""Measures what seals cost a server's step, fold and log, and how fast a scrubber reads.

Nanoseconds of one thread for each record that a step touches, scattered over the table; the median of `--repeats`.
Beside them a lookup, which has nothing to do with seals, and a look (`TORCH_ECREC_RECORD_CHECKS=use`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from torch_ecrec.bench.record import require_counts
from torch_ecrec.codec import LinearCode
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.shard import SealedDeltas, Shard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bench seals`."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="records, and as many parities")
    parser.add_argument("--touched", type=int, default=40_000, help="of them, in a step")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--optimizer", choices=NAMES, default="rowwise_adagrad")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("build/seals"), metavar="DIR", help="gets seals.json")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table, and writes it.

    Raises:
        ValueError, TypeError: a number is less than 1.
    """
    require_counts(arguments, "rows", "touched", "dim", "repeats")
    without, with_seals = (measure(arguments, sealed) for sealed in (False, True))
    print(f"{'ns for each record':20}{'no seals':>10}{'seals':>10}")
    for name, seconds in with_seals.items():
        if name != "scrub":
            before = f" {1e9 * without[name]:9.1f}" if name in without else f"{'':10}"
            print(f"{name:20}{before} {1e9 * seconds:9.1f}")
    (arguments.out / "seals.json").write_text(json.dumps({"no seals": without, "seals": with_seals}, indent=1) + "\n")
    print(f"a scrubber reads {with_seals['scrub'] / 1e9:.1f} GB/s")
    return 0


def measure(arguments: argparse.Namespace, sealed: bool) -> dict[str, float]:
    """Returns seconds for each record, by operation; for `scrub`, bytes per second."""
    spec, code, rng = optimizer(arguments.optimizer), LinearCode(2, 1), np.random.default_rng(0)
    shard = Shard(spec.schema(arguments.dim), arguments.rows, arguments.rows, sealed=sealed)
    count = min(arguments.touched, arguments.rows)
    ones, times = np.ones(count, np.uint8), dict[str, list[float]]()

    def timed(name: str, action: Callable[[], object]) -> None:
        begin_s = time.perf_counter()
        action()
        times.setdefault(name, []).append((time.perf_counter() - begin_s) / count)

    def once(step: int) -> None:
        at = np.sort(rng.choice(arguments.rows, count, replace=False))
        merged = merge([(at, rng.standard_normal((count, arguments.dim), np.float32))])
        log, made = DeltaLog(1, sealed=sealed), list[SealedDeltas]()
        timed("lookup", lambda: shard.gather_weights(at))
        timed("step", lambda: made.append(shard.apply_(spec, merged, 0.1, step, {})))
        deltas_UB, seals_U = made[0]
        timed("log", lambda: log.append(1, [at], [deltas_UB], [seals_U]))
        timed("fold", lambda: shard.fold_(code, at, deltas_UB, ones))
        if sealed:
            timed("look", lambda: shard.broken(at))

    for step in range(1, arguments.repeats + 1):
        once(step)
    found = {name: float(np.median(values)) for name, values in times.items()}
    begin_s = time.perf_counter()
    shard.broken_run(0, arguments.rows)
    found["scrub"] = shard.data_bytes / (time.perf_counter() - begin_s)
    return found
