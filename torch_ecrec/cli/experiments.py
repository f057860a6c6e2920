"""`torch-ecrec experiments`: the experiments of ECRec's paper, scaled to this machine (docs/experiments.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.demo.interrupts import sigterm_interrupts

HELP = "run the experiments of ECRec's paper, scaled to this machine"
OUT = Path("build/experiments")
DEFAULT_FACTOR = 1024  # that of `experiments/scale.py`, which takes seconds to load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the commands on experiments."""
    commands = parser.add_subparsers(dest="experiments", required=True, metavar="WHAT")
    commands.add_parser("list", help="what there is, how many cells each has, and how long it takes")
    run = commands.add_parser("run", help="run one experiment, all, or smoke (a small part of each)")
    run.add_argument("name", metavar="NAME|all|smoke", help="as `torch-ecrec experiments list` names it")
    run.add_argument(
        "--factor",
        type=int,
        default=DEFAULT_FACTOR,
        metavar="N",
        help=f"rows are divided by it, times by 60 / 1,024 of it (default {DEFAULT_FACTOR:,})",
    )
    run.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows (.tsv or .tsv.gz); default: made-up rows")
    resume = commands.add_parser("resume", help="run the cells that have not run, or failed")
    report = commands.add_parser("report", help="write a page with tables and pictures")
    report.add_argument(
        "--to", type=Path, default=Path("docs/evidence.md"), metavar="FILE", help="default docs/evidence.md"
    )
    report.add_argument(
        "--out",
        type=Path,
        action="append",
        metavar="DIR",
        help=f"results, of several runs if given again (default {OUT})",
    )
    for one in (run, resume):
        one.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"of the results (default {OUT})")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command that is named."""
    from torch_ecrec.experiments import catalogue, report, scale
    from torch_ecrec.experiments import run as runs
    from torch_ecrec.experiments.results import Results

    with sigterm_interrupts():
        if arguments.experiments == "run":
            return runs.begin(arguments.name, arguments.factor, arguments.data, arguments.out)
        if arguments.experiments == "resume":
            return runs.resume(arguments.out)
    if arguments.experiments == "report":
        report.write([Results.open(folder) for folder in arguments.out or [OUT]], arguments.to)
        return 0
    print(runs.listing(list(catalogue.all_specs().values()), scale.Scale()))
    return 0
