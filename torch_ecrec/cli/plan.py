"""`torch-ecrec plan`: compares what failures, and the guards against them, cost. See docs/plan.md."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch_ecrec.runtime.checks import require

HELP = "compute what checkpoints, partial recovery and parity cost a cluster, and which to take"
# name in `Costs` -> what it is without a word or a measurement; None: it must be said
FIGURES: dict[str, float | None] = {
    "save_s": None,
    "load_s": None,
    "restart_s": None,
    "parity_share": None,
    "stall_s": None,
    "repair_s": None,
    "repair_rate": 1.0,
}
MEANINGS = {
    "save_s": "seconds of training time that one checkpoint costs",
    "load_s": "seconds to read a checkpoint back",
    "restart_s": "seconds until all processes run again",
    "parity_share": "share of each step that parity costs (`bench train`)",
    "stall_s": "seconds that training pauses at a loss that parity repairs",
    "repair_s": "seconds until lost records are rebuilt",
    "repair_rate": "rate of training during a rebuild, as a share (default 1)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan`."""
    parser.add_argument("--hosts", type=int, required=True, metavar="H", help="hosts that keep tables")
    parser.add_argument(
        "--mtbf-hours", type=float, required=True, metavar="M", help="mean hours between failures of a host"
    )
    parser.add_argument(
        "--all-mtbf-hours", type=float, metavar="M", help="mean hours between losses of all hosts (default: never)"
    )
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe (default 1)")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="result.json of `torch-ecrec demo`, for figures not given here"
    )
    for name, meaning in MEANINGS.items():
        unit = "S" if name.endswith("_s") else "X"
        parser.add_argument(f"--{name.removesuffix('_s').replace('_', '-')}", type=float, metavar=unit, help=meaning)
    parser.add_argument(
        "--pls", type=float, metavar="X", help="share of samples that may be lost: adds partial recovery"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the overhead, to a .png or .svg")
    parser.add_argument(
        "--over", choices=("mtbf", "hosts"), default="mtbf", help="horizontal axis of --plot (default mtbf)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the costs of failures and of the guards against them."""
    from torch_ecrec.overhead.model import HOUR_S, NEVER_S, Costs
    from torch_ecrec.overhead.report import draw, measured, to_json, to_text

    figures: dict[str, float] = {name: value for name, value in FIGURES.items() if value is not None}
    figures |= measured(arguments.measured) if arguments.measured is not None else {}
    said = {name: getattr(arguments, name.removesuffix("_s")) for name in FIGURES}
    figures |= {name: value for name, value in said.items() if value is not None}
    missing = [f"--{name.removesuffix('_s').replace('_', '-')}" for name in FIGURES if name not in figures]
    require(
        not missing, f"{', '.join(missing)}: say what it costs, or name a run that has measured it (`--measured FILE`)"
    )
    require(arguments.pls is None or 0 < arguments.pls < 1, f"`--pls` must be above 0 and below 1, got {arguments.pls}")
    together_s = NEVER_S if arguments.all_mtbf_hours is None else arguments.all_mtbf_hours * HOUR_S
    costs = Costs(
        hosts=arguments.hosts,
        mtbf_s=arguments.mtbf_hours * HOUR_S,
        k=arguments.k,
        r=arguments.r,
        all_mtbf_s=together_s,
        **figures,
    )
    print(json.dumps(to_json(costs, arguments.pls), indent=1) if arguments.json else to_text(costs, arguments.pls))
    if arguments.plot is not None:
        draw(costs, arguments.pls, arguments.over, arguments.plot)
    return 0
