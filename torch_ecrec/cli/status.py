"""`torch-ecrec status`: asks a cluster's coordinator for its status."""

from __future__ import annotations

import argparse
import json

from torch_ecrec.cli.arguments import add_join
from torch_ecrec.spec.settings import Settings

HELP = "slots, servers, epoch, step, watermark, rebuild progress, memory, where tables lie"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `status`."""
    add_join(parser)
    parser.add_argument("--tables", action="store_true", help="say where each table lies, however many there are")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the status."""
    from torch_ecrec.observe.text import format_status
    from torch_ecrec.protocol.status import json_of
    from torch_ecrec.transport.whereabouts import status_of

    settings = Settings.from_environment(**({"join": arguments.join} if arguments.join else {}))
    if settings.join is None:
        raise ValueError("name the coordinator: --join HOST:PORT, or --join etcd://HOST:PORT/NAME")
    answer = status_of(settings.join, settings.give_up_s)
    print(json.dumps(json_of(answer), indent=2) if arguments.json else format_status(answer, arguments.tables))
    return 0
