"""`torch-ecrec chaos`: see docs/chaos.md."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.cli.arguments import add_code, add_data, add_training
from torch_ecrec.spec.settings import CHAOS_EVENTS

HELP = "kills and hangs at random while it trains: does one bit differ?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `chaos`."""
    add_code(parser)
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="of disturbed training, about")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and of the model")
    parser.add_argument(
        "--events",
        type=lambda text: text.split(","),
        default=list(CHAOS_EVENTS),
        metavar="EVENT,...",
        help=f"of {', '.join(CHAOS_EVENTS)} (default: all)",
    )
    add_data(parser)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples per trainer and step")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    add_training(parser)
    parser.add_argument("--out", type=Path, default=Path("chaos"), metavar="DIR")


def run(arguments: argparse.Namespace) -> int:
    """Trains, disturbed at random and undisturbed."""
    from torch_ecrec.demo.chaos import run_chaos

    return run_chaos(arguments)
