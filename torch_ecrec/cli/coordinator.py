"""`torch-ecrec coordinator`: the process that every member of a cluster joins. It starts no servers."""

from __future__ import annotations

import argparse
import json
import sys

from torch_ecrec.cli.arguments import (
    add_checkpoints,
    add_code,
    add_drain_slow,
    add_end_with_parent,
    add_grace,
    add_host,
    add_watching,
    checkpoints_of,
    code_of,
    port,
    require_experiment,
    require_guarded,
    require_store,
    require_watchable,
    settings_of,
)
from torch_ecrec.errors import CheckpointError
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.transport.etcd import parse_place

HELP = "run the coordinator of a cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `coordinator`."""
    add_code(parser)
    add_drain_slow(parser)
    add_host(parser)
    parser.add_argument("--port", type=port, default=0, help="the port to listen on (default: a free one)")
    parser.add_argument(
        "--elect",
        metavar="etcd://HOST:PORT[,...]/NAME",
        default="",
        help="run several coordinators, of which etcd lets one lead, and the others stand by; members and trainers join"
        " this name (needs torch-ecrec[etcd])",
    )
    parser.add_argument(
        "--leader-lease",
        metavar="SECONDS",
        type=int,
        default=2,
        help="how long a leader is silent before another leads (default 2, the least that etcd grants)",
    )
    add_checkpoints(parser)
    add_watching(parser)
    add_grace(parser)
    add_end_with_parent(parser, tells=True)


def run(arguments: argparse.Namespace) -> int:
    """Runs a coordinator in this process."""
    from torch_ecrec.processes.coordination import Coordination, run_coordinator

    require_guarded(arguments)
    require_experiment(arguments)
    require_watchable(arguments)
    code, checkpoint = code_of(arguments), checkpoints_of(arguments)
    require_int("spares", arguments.spares, 0)
    if arguments.elect:
        parse_place(arguments.elect)
        require_int("leader-lease", arguments.leader_lease, 2)
    if not arguments.end_with_parent:  # else a supervisor has looked
        require_store(arguments, patient=True)
    told = Coordination(
        host=arguments.host,
        port=arguments.port,
        code=code,
        spares=arguments.spares,
        without_spare=arguments.without_spare,
        drain_slow=arguments.drain_slow,
        settings=settings_of(arguments),
        checkpoint=checkpoint,
        restore=arguments.restore,
        began_with=arguments.began_with,
        again=arguments.again,
        alone=not arguments.end_with_parent,
        elect=arguments.elect,
        leader_lease_s=arguments.leader_lease,
        http=arguments.http,
        events=arguments.events,
        allow_kill=arguments.allow_kill,
    )
    try:
        return run_coordinator(told, sys.stdout)
    except (OSError, CheckpointError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        if not arguments.end_with_parent:
            raise type(error)(reason) from error
        print(json.dumps({"error": reason}), flush=True)  # for the supervisor, which says it
        return 2
