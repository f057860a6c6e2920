"""`torch-ecrec coordinator`: the process that every member of a cluster joins; servers are started by others."""

from __future__ import annotations

import argparse
import json
import sys

from torch_ecrec.cli.arguments import add_code, add_end_with_parent, code_of, port
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.spec.settings import Settings

HELP = "the coordinator alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `coordinator`."""
    add_code(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=0)
    add_end_with_parent(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs a coordinator in this process."""
    from torch_ecrec.processes.launch import run_coordinator

    code = code_of(arguments)
    require_int("spares", arguments.spares, 0)
    try:
        return run_coordinator(
            arguments.host,
            arguments.port,
            code,
            arguments.spares,
            arguments.without_spare,
            Settings.from_environment(),
            sys.stdout,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if not arguments.end_with_parent:
            raise OSError(reason) from error
        print(json.dumps({"error": reason}), flush=True)  # for the supervisor, which says it
        return 2
