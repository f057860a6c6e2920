"""`torch-ecrec demo`: trains a DLRM, kills processes, and compares with an undisturbed run. See docs/demo.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.cli.arguments import (
    add_checkpoints,
    add_code,
    add_data,
    add_http,
    add_tier,
    add_training,
    checkpoint_arguments,
    code_of,
    require_http,
    tier_environment,
)
from torch_ecrec.runtime.installed import require_torchrec

HELP = "train a DLRM, kill servers, compare with the undisturbed run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `demo`."""
    add_code(parser)
    add_data(parser)
    parser.add_argument("--steps", type=int, default=240, metavar="N", help="steps of training (default 240)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B", help="samples per trainer and step")
    parser.add_argument("--trainers", type=int, default=2, metavar="T", help="processes that train (default 2)")
    parser.add_argument(
        "--kill",
        action="append",
        metavar="{server:SLOT,trainer:RANK,coordinator,all}@STEP[~][+MS]",
        help="kill, with SIGKILL, the server of SLOT, trainer RANK, the coordinator or all processes, when STEP is"
        " complete; +MS: so many milliseconds later; ~: not before earlier losses are rebuilt; may be repeated; default"
        " server:1 in the middle; 'none' for no kill",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=10, metavar="N", help="how often torchrun restarts trainers (default 10)"
    )
    add_training(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the model and of made-up rows (default 0)")
    parser.add_argument(
        "--compare", action=argparse.BooleanOptionalAction, default=True, help="also run undisturbed, and compare"
    )
    add_checkpoints(parser, restore=False)
    add_tier(parser)
    parser.set_defaults(checkpoint_bytes_per_s=100e6)  # its tables are small, and so few steps are over soon
    add_http(parser.add_argument)
    parser.set_defaults(allow_kill=False)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), metavar="DIR", help="folder of the report (default demo)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains with kills and undisturbed, and compares."""
    require_torchrec()
    require_http(arguments)
    code_of(arguments)
    from torch_ecrec.demo.run import run_demo

    return run_demo(arguments, checkpoint_arguments(arguments), tier_environment(arguments))
