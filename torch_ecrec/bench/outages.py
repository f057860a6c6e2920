"""How long training stands when a server's host, a link or the coordinator's host goes, and what a drain costs.

    torch-ecrec bench outages --repeats 5                    # needs root, iproute2 and etcd's server
    torch-ecrec bench outages --events host,kill,cut         # without etcd

    host, kill                a server's host vanishes (its link is down); a server's processes are killed
    cut, cut-one-way          two servers cannot reach each other, in both directions or in one
    leader                    the host of the coordinator that leads dies; etcd is on hosts of its own
    leader-and-server         a server's host dies at the same instant
    drain                     `torch-ecrec drain` of a server, in a cluster of its own (`--drain-gigabytes`)

One cluster over hosts made of network namespaces trains a DLRM without a pause, and each event comes `--repeats` times,
in turn. After each, all slots must be healthy and training go on for `--steady-s`; only then comes back what was taken,
and once all is whole, the next event. Figures and what is wanted of them: `outage_figures.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record
from torch_ecrec.bench.outage_figures import DRAIN, ELECTED, KINDS, plot, rows, targets
from torch_ecrec.bench.outage_trial import Trial
from torch_ecrec.bench.places import require_hosts
from torch_ecrec.bench.recovery_processes import Stopped, add_cluster
from torch_ecrec.demo.chaos.hosted import require_etcd
from torch_ecrec.demo.result import arguments_json
from torch_ecrec.errors import ClusterError
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing.hosts import HostsError


def check(arguments: argparse.Namespace) -> tuple[CodeSpec, list[str], Path | None]:
    """The code, the kinds of events, and etcd's server, if one is needed. Raises ValueError or TypeError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r)
    require(code.parities > 0, "without parity nothing is survived: `-r` must be at least 1")
    kinds = arguments.events.split(",")
    unknown = sorted(set(kinds) - set(KINDS))
    require(not unknown, f"unknown events {', '.join(unknown)}; there are {', '.join(KINDS)}")
    require(len(set(kinds)) == len(kinds), f"an event is named twice: {arguments.events}")
    for name in ("repeats", "trainers", "batch_size", "spares"):
        require_int(name.replace("_", "-"), getattr(arguments, name), 1)
    for name in ("gigabytes", "drain_gigabytes", "steady_s"):
        require(getattr(arguments, name) > 0, f"`{name}` must be positive, got {getattr(arguments, name)}")
    require_hosts()
    return code, kinds, require_etcd() if set(kinds) & set(ELECTED) else None


def measure(
    arguments: argparse.Namespace,
    code: CodeSpec,
    kinds: list[str],
    etcd: Path | None,
    found: dict[str, list[dict[str, Any]]],
) -> None:
    """All events; what was measured stays in `found` if one of them fails. Raises what `Trial` raises."""
    others = [kind for kind in kinds if kind != DRAIN]
    parts = [(others, arguments.gigabytes, etcd, "outages")]
    parts.append(([kind for kind in kinds if kind == DRAIN], arguments.drain_gigabytes, None, "drain"))
    for some, gigabytes, elects, name in parts:
        if not some:
            continue
        logs = arguments.out / "logs" / name
        shutil.rmtree(logs, ignore_errors=True)
        print(f"starting a cluster with {gigabytes:g} GB of records", flush=True)
        with Trial(arguments, code, gigabytes, elects, logs) as trial:
            for turn in range(arguments.repeats):
                for kind in some:
                    one = trial.event(kind)
                    found[kind].append(one)
                    print(f"  {kind}, {turn + 1}/{arguments.repeats}: {_line(one)}", flush=True)


def _line(one: dict[str, Any]) -> str:
    """An event in one line."""
    shown = ["longest_s", "detected_s", "placed_s", "repaired_s", "median_s", "calm_s"]
    shown += ["after / before", "during / around"]
    return ", ".join(f"{name} {one[name]:.3f}" for name in shown if one[name] is not None)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes outages.json, .csv and .png to `arguments.out`.

    Returns:
        0, or 1 if something stopped: what was measured until then is written, with the reason in `error`, and the
        processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    code, kinds, etcd = check(arguments)
    header = record.header()
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    error: str | None = "interrupted"
    name = "-".join(filter(None, ("outages", arguments.label)))
    try:
        measure(arguments, code, kinds, etcd, found)
        error = None
    except (Stopped, ClusterError, HostsError) as failure:
        error = str(failure)
    finally:
        lines, aims = rows(found), targets(found)
        told = {"arguments": arguments_json(arguments), "events": found, "targets": aims, "error": error}
        record.write(arguments.out, name, {"header": header, **told}, lines)
    if lines:
        plot(found, arguments.out / f"{name}.png")
    print("\n\n".join(map(record.table, (lines, aims))))
    print(f"written: {arguments.out / name}.json, .csv, .png")
    if error is not None:
        print(f"torch-ecrec: {error}\nlogs: {arguments.out / 'logs'}", file=sys.stderr)
    return 0 if error is None else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench outages`."""
    parser.add_argument("--events", default=",".join(KINDS), metavar="A,B,...", help=f"default {','.join(KINDS)}")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each event (default 5)")
    add_cluster(parser)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples per trainer and step")
    parser.add_argument("--zipf", type=float, default=1.05, metavar="A", help="exponent of the law that ids follow")
    parser.add_argument("--gigabytes", type=float, default=0.1, metavar="GB", help="of records, without parity")
    parser.add_argument(
        "--drain-gigabytes",
        type=float,
        default=2.0,
        metavar="GB",
        help="likewise for the drain; with parity a server of three has half of it (default 2)",
    )
    parser.add_argument("--steady-s", type=float, default=4.0, metavar="S", help="training measured around each event")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="added to the names of the files")
    parser.add_argument("--out", type=Path, default=Path("build/outages"), metavar="DIR")
