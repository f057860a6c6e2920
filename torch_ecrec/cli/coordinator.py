"""`torch-ecrec coordinator`: the process that every member of a cluster joins; servers are started by others."""

from __future__ import annotations

import argparse
import json
import sys

from torch_ecrec.cli.arguments import add_checkpoints, add_code, add_end_with_parent, checkpoints_of, code_of, port
from torch_ecrec.errors import CheckpointError
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.spec.settings import Settings

HELP = "the coordinator alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `coordinator`."""
    add_code(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=0)
    add_checkpoints(parser)
    add_end_with_parent(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs a coordinator in this process."""
    from torch_ecrec.processes.launch import run_coordinator

    code, checkpoint = code_of(arguments), checkpoints_of(arguments)
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
            checkpoint,
            arguments.restore,
            arguments.again,
        )
    except (OSError, CheckpointError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        if not arguments.end_with_parent:
            raise type(error)(reason) from error
        print(json.dumps({"error": reason}), flush=True)  # for the supervisor, which says it
        return 2
