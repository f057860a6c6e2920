"""`torch-ecrec run`: runs trainers on this host, under torchrun. Each host runs the same line, see
`processes/nodes.py`.
"""

from __future__ import annotations

import argparse

from torch_ecrec.cli.arguments import add_join
from torch_ecrec.runtime.installed import require_torchrec
from torch_ecrec.spec.settings import Settings

HELP = "start the trainers of a script, on one host or on several"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `run`."""
    add_join(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts with trainers (default 1)")
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="T", help="trainers on each (default 1)")
    parser.add_argument(
        "--meet",
        metavar="HOST[:PORT]",
        default="",
        help="where the hosts meet: the address of one of them, the same on each (default port 29500)",
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        default="",
        help="address of this host that the others reach (default: the one from which it reaches --meet)",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often lost trainers are started again (default 10)",
    )
    parser.add_argument(
        "--job", default="torch_ecrec", metavar="WORD", help="name that tells apart jobs with the same --meet"
    )
    parser.add_argument("--again", action="store_true", help="continue the cluster's job although it has ended")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS...", help="script and arguments, as for torchrun"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs torchrun to its end; returns its exit code, or 3 if data was lost, 2 if the cluster refuses the trainers."""
    from torch_ecrec.processes.nodes import Nodes, run_torchrun

    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    if not script:
        raise ValueError("name the script: torch-ecrec run ... -- train.py ARGS")
    require_torchrec()
    nodes = Nodes(
        arguments.nodes,
        arguments.nproc_per_node,
        arguments.meet,
        arguments.address,
        arguments.max_restarts,
        arguments.job,
    )
    join = arguments.join or Settings.from_environment().join or ""
    return run_torchrun(nodes, join, script, arguments.again)
