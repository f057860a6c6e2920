"""`torch-ecrec rehearse -- SCRIPT`: kills a script's trainers and compares. See `rehearsal/run.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.cli.arguments import add_code
from torch_ecrec.runtime.installed import require_torchrec
from torch_ecrec.spec.settings import REHEARSALS

HELP = "your own script: does it go on to the same bits when killed?"


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
        help="kill all trainers so many times: at the end of a pass, in the step after it, and spread over the run"
        " (default 4)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="end each run after so many steps, unless it ends before; 0: it ends by itself (default 40)",
    )
    parser.add_argument("--server-too", action="store_true", help="kill a server with the trainers, each time")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, metavar="S", help="without news for so long, it hangs (default 300)"
    )
    parser.add_argument("--out", type=Path, default=Path(REHEARSALS), metavar="DIR", help="for logs and records")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS...", help="as torchrun takes it")


def run(arguments: argparse.Namespace) -> int:
    """Runs the script undisturbed and with kills, and compares."""
    require_torchrec()
    from torch_ecrec.rehearsal.run import run_rehearse

    return run_rehearse(arguments)
