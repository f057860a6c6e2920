"""How long a failure takes, phase by phase, what the rebuild costs training, and what a checkpoint would have cost.

    torch-ecrec bench recovery --gigabytes 1 4 8 --kills 5 --rebuild-mb-per-s 0 50 200

A *case* is one cluster of one size with one limit of the rebuild rate, "0.5 GB, 50 MB/s" for example. Trainers take
real steps of a DLRM. At steady state the process that hosts a random slot gets SIGKILL at a random moment, and the
times of all phases are taken (`demo/report.py` says what they are). The next kill waits until everything is healthy, a
spare is there again, and another window of steady training is over. The case `idle` is the unlimited one with the
trainers paused and no process starting: the speed of the rebuild alone.

Figures of a kill: seconds after SIGKILL, but `rebuild_s`, from re-hosted to rebuilt. Lost are the data and parity
records of the slot. Samples per second are of all trainers together: `before` over a window that ends at the kill,
`during` from the kill until all is rebuilt, the pause included, `after` over a window once a spare is there again (the
next kill's `before`). A step counts in part where a window cuts it.

The alternative is measured on plain TorchRec with the same tables: start the processes, load a checkpoint from the
local disk (not from the page cache), redo half an interval between checkpoints; the last is computed.

All processes share this machine: the killed one is started again at once, and its start takes cores from training
while the rebuild runs, as it would not on a host of its own. `--restart rebuilt`, and `idle`, start it once all is
rebuilt.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record as bench_record
from torch_ecrec.bench.recovery_checkpoint import from_checkpoint
from torch_ecrec.bench.recovery_figures import DIM, RECORD_BYTES, TABLES, Case, cases, summary
from torch_ecrec.bench.recovery_processes import Stopped, add_cluster
from torch_ecrec.bench.recovery_report import draw, tables
from torch_ecrec.bench.recovery_trial import measure
from torch_ecrec.demo.result import arguments_json
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import CodeSpec


def check(arguments: argparse.Namespace) -> CodeSpec:
    """Everything about the arguments that can be wrong, before anything starts. Raises ValueError, TypeError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r)
    require_int("spares", arguments.spares, 0)
    for name in ("trainers", "batch_size", "kills"):
        require_int(name.replace("_", "-"), getattr(arguments, name), 1)
    for name in ("steady_s", "checkpoint_interval_s"):
        require(getattr(arguments, name) > 0, f"`{name}` must be positive, got {getattr(arguments, name)}")
    for size in arguments.gigabytes:
        require(size > 0, f"`--gigabytes` must be positive, got {size}")
    require(arguments.zipf >= 0, f"`--zipf` must not be negative, got {arguments.zipf}")
    for limit in arguments.rebuild_mb_per_s:
        require(limit >= 0, f"`--rebuild-mb-per-s` must not be negative, got {limit}")
    size = arguments.throttled_gigabytes
    require(
        size is None or size in arguments.gigabytes,
        f"`--throttled-gigabytes` must be one of {arguments.gigabytes}, got {size}",
    )
    return code


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes recovery.json, .csv and .png, with the label in their names, to `arguments.out`.

    Returns:
        0, or 1 if a kill did not fire or something stopped; what was measured until then is written, with the reason
        in `error`, and the processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    code = check(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    todo = cases(arguments.gigabytes, arguments.rebuild_mb_per_s, arguments.throttled_gigabytes, not arguments.no_idle)
    measured: list[tuple[Case, list[dict[str, Any]]]] = []
    checkpoints: list[dict[str, Any]] = []
    error: str | None = "interrupted"
    header = bench_record.header()
    name = "-".join(filter(None, ("recovery", arguments.label)))
    try:
        warm()
        for case in todo:
            print(f"{case.name}: {arguments.kills} kills", flush=True)
            measured.append((case, []))
            measure(case, code, arguments, measured[-1][1])
        for gigabytes in () if arguments.no_checkpoint else arguments.gigabytes:
            print(f"{gigabytes:g} GB: restart of plain TorchRec from a checkpoint", flush=True)
            checkpoints.append(from_checkpoint(gigabytes, arguments))
        error = None
    except (Stopped, ClusterError) as failure:
        error = str(failure)
    finally:
        rows = [summary(case, kills) for case, kills in measured if kills]
        content = {
            "header": header,
            "arguments": arguments_json(arguments),
            "tables": TABLES,
            "dim": DIM,
            "record_bytes": RECORD_BYTES,
            "cases": [{"case": case.name, "kills": kills} for case, kills in measured],
            "checkpoints": checkpoints,
            "error": error,
        }
        bench_record.write(arguments.out, name, content, rows)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(arguments.out / f"{name}.json", arguments.json)
    print("\n" + tables(rows, checkpoints, arguments.checkpoint_interval_s))
    try:
        if rows:
            draw(rows, checkpoints, arguments.out / f"{name}.png")
    except ImportError as missing:
        print(f"no picture: {missing} (pip install matplotlib)", file=sys.stderr)
    if error is not None:
        print(f"torch-ecrec: {error}\nlogs: {arguments.out / 'logs'}", file=sys.stderr)
    return 0 if error is None else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench recovery`."""
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[1.0, 4.0, 8.0], metavar="GB", help="of records, without parity"
    )
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="in each case")
    parser.add_argument(
        "--rebuild-mb-per-s",
        type=float,
        nargs="*",
        default=[0.0, 50.0, 200.0],
        metavar="MB",
        help="limits of the background rebuild, which counts the k records that it reads for each; 0 for none",
    )
    parser.add_argument(
        "--throttled-gigabytes", type=float, metavar="GB", help="measure limits other than 0 at this size only"
    )
    add_cluster(parser)
    parser.add_argument("--batch-size", type=int, default=1024, metavar="B", help="samples per trainer and step")
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        metavar="A",
        help="exponent of the law that ids follow (default 1.05); 0 for uniform ones, so that hardly any row"
        " that a step asks for was repaired before: the worst case for training during a rebuild",
    )
    parser.add_argument("--steady-s", type=float, default=8.0, metavar="S", help="training measured around each kill")
    parser.add_argument(
        "--restart",
        choices=["at-once", "rebuilt"],
        default="at-once",
        help="when the killed process is started again: its start takes cores that a host of its own would have",
    )
    parser.add_argument("--no-idle", action="store_true", help="do not measure the rebuild with paused trainers")
    parser.add_argument("--no-checkpoint", action="store_true", help="do not measure a restart of plain TorchRec")
    parser.add_argument(
        "--checkpoint-interval-s", type=float, default=1800.0, metavar="S", help="half of it is redone (computed)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="added to the names of the files")
    parser.add_argument("--json", type=Path, metavar="FILE", help="another copy of the JSON")
    parser.add_argument("--out", type=Path, default=Path("build/recovery"), metavar="DIR")
