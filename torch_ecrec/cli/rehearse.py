"""`torch-ecrec rehearse -- SCRIPT`: kills a script's trainers and compares. See `rehearsal/run.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.cli.arguments import add_code
from torch_ecrec.runtime.installed import require_torchrec
from torch_ecrec.spec.settings import REHEARSALS

HELP = "kill the trainers of your own script, and compare every step with an undisturbed run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rehearse`."""
    add_code(parser)
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="T", help="trainers (default 1)")
    parser.add_argument("--at", metavar="STEP,...", help="kill all trainers in these steps (default: see --restarts)")
    parser.add_argument(
        "--restarts",
        type=int,
        default=4,
        metavar="N",
        help="how often all trainers are killed: at the end of a pass, in the step after it, and spread over the run"
        " (default 4)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="end each run after this many steps; 0: let it come to its end (default 40)",
    )
    parser.add_argument("--server-too", action="store_true", help="kill a server with the trainers, each time")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds without a step after which a run counts as hanging (default 300)",
    )
    parser.add_argument("--out", type=Path, default=Path(REHEARSALS), metavar="DIR", help="folder for logs and records")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS...", help="script and arguments, as for torchrun"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the script undisturbed and with kills, and compares."""
    require_torchrec()
    from torch_ecrec.rehearsal.run import run_rehearse

    return run_rehearse(arguments)
