"""`torch-ecrec doctor`: whether this machine can run torch-ecrec, and how to mend what cannot.

Exit codes: 0 all is well, 1 something is to be looked at (WARN), 2 it does not run so (ERROR).
"""

from __future__ import annotations

import argparse
import json
import time

from torch_ecrec.cli.arguments import add_join
from torch_ecrec.spec.settings import Settings

HELP = "check whether this machine can run torch-ecrec, and say how to mend what is wrong"


def count(text: str) -> int:
    """Parses a number of processes."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1_000_000:
        raise argparse.ArgumentTypeError(f"a number of processes is 1 or more, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    add_join(parser)
    parser.add_argument(
        "--checkpoint", metavar="URL", default="", help="also check that checkpoints can be written there"
    )
    parser.add_argument(
        "--members",
        metavar="N",
        type=count,
        default=8,
        help="processes of the cluster: servers, spares and trainers, on all hosts together (default 8)",
    )
    parser.add_argument(
        "--here", metavar="N", type=count, help="how many of them run on this host (default: 8, or --members if less)"
    )
    link = parser.add_mutually_exclusive_group()
    link.add_argument(
        "--to", metavar="HOST[:PORT]", default="", help="measure the network to a host where `doctor --listen` runs"
    )
    link.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        nargs="?",
        const="",
        help="only wait for `doctor --to` of other hosts, for 10 minutes (default: this host's address if there is a"
        " secret, else 127.0.0.1)",
    )
    parser.add_argument(
        "--only", metavar="CHECK,...", default="", help="make these checks alone, named as in the output (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; returns 0, 1 or 2 by the worst finding."""
    from torch_ecrec.doctor import link
    from torch_ecrec.doctor.examination import Asked, examine, named, terminal_of
    from torch_ecrec.doctor.findings import diagnosis_of, format_diagnosis, json_of
    from torch_ecrec.observe.verdict import EXIT_CODES

    if arguments.listen is not None:
        link.listen(arguments.listen, lambda line: print(line, flush=True))
        return 0
    checks = named(arguments.only)
    began_s = time.monotonic()
    settings, wrong = Settings.examine_environment()
    members = arguments.members
    asked = Asked(
        settings=settings,
        wrong=wrong,
        join=arguments.join or settings.join or "",
        checkpoint=arguments.checkpoint,
        to=arguments.to,
        members=members,
        here=arguments.here or min(members, 8),
    )
    diagnosis = diagnosis_of(examine(asked, checks, terminal_of()), time.monotonic() - began_s)
    print(json.dumps(json_of(diagnosis), indent=2) if arguments.json else format_diagnosis(diagnosis))
    return EXIT_CODES[diagnosis.level]
