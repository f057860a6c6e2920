"""`torch-ecrec serve`: a server, which joins a cluster and keeps records until the cluster ends."""

from __future__ import annotations

import argparse
import dataclasses

from torch_ecrec.cli.arguments import add_end_with_parent, add_grace, add_join, add_tier, asks, tell_of_memory
from torch_ecrec.spec.settings import require_tier

HELP = "run one server of a cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `serve`."""
    add_join(parser)
    parser.add_argument("--servers", type=int, metavar="S", help="refuse a cluster with another number of slots")
    parser.add_argument("-k", type=int, help="refuse a cluster with another k")
    parser.add_argument("-r", type=int, help="refuse a cluster with another r")
    parser.add_argument(
        "--failure-domain",
        metavar="PATH",
        help="failure domains of this server, the widest first, e.g. row1/rack3/host17 (default: the host's name)",
    )
    add_tier(parser)
    add_grace(parser)
    add_end_with_parent(parser, tells=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs a server in this process."""
    from torch_ecrec.transport.whereabouts import require_whereabouts

    settings, join = asks(arguments)
    require_tier(settings)
    if arguments.failure_domain is not None:
        settings = dataclasses.replace(settings, failure_domain=arguments.failure_domain)
    wanted = {"k": arguments.k, "r": arguments.r, "slots": arguments.servers}
    require_whereabouts(join)
    if not arguments.end_with_parent:  # that one has said it of all
        tell_of_memory(settings, 1)
    from torch_ecrec.processes.launch import run_server, warm  # it loads torch: seconds, for a mistake to wait

    if not arguments.end_with_parent:
        warm(tells=True)
    return run_server(settings, wanted)
