"""Arguments that several commands have."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_ecrec.records.optimizers import NAMES as OPTIMIZERS
from torch_ecrec.spec.job import PROTECTIONS, CodeSpec
from torch_ecrec.spec.settings import WITHOUT_SPARE


def port(text: str) -> int:
    """A TCP port; 0 for a free one."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number up to 65535, got {text!r}")
    return int(text)


def add_code(parser: argparse.ArgumentParser) -> None:
    """How many servers there are, and the code that protects their records; `code_of` reads it."""
    parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
    parser.add_argument("--spares", type=int, default=1, metavar="P", help="servers in reserve (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe: losses tolerated (default 1)")
    parser.add_argument("--protection", choices=PROTECTIONS, default="parity", help="default parity")
    parser.add_argument(
        "--without-spare",
        choices=WITHOUT_SPARE,
        default="survivor",
        help="who takes the slots of a lost server when there is no spare: a survivor, or the process that is started"
        " in its place (wait); default survivor",
    )


def code_of(arguments: argparse.Namespace) -> CodeSpec:
    """What `add_code` has read. Raises ValueError where there is no such code."""
    return CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)


def add_data(parser: argparse.ArgumentParser) -> None:
    """The rows that the demonstration's model is trained on."""
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="Criteo rows (.tsv or .tsv.gz); default: made-up rows"
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """How the demonstration's model is trained, besides the size of a batch."""
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad", help="of the tables")
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between snapshots of the dense model: lost trainers go on after the last one (default 1)",
    )


def add_join(parser: argparse.ArgumentParser) -> None:
    """The cluster that a process is to talk to."""
    parser.add_argument("--join", metavar="HOST:PORT", help="the coordinator (default: $TORCH_ECREC_JOIN)")


def add_end_with_parent(parser: argparse.ArgumentParser) -> None:
    """For a process that runs until it is told to end: a supervisor starts it with this (`main` looks for it)."""
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
