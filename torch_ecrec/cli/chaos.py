"""`torch-ecrec chaos`: disturbs real training at random and compares every bit. See docs/contributing/chaos.md."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from torch_ecrec.cli.arguments import (
    add_code,
    add_data,
    add_tier,
    add_training,
    checkpoint_arguments,
    interval,
    tier_environment,
)
from torch_ecrec.runtime.installed import require_torchrec
from torch_ecrec.spec.settings import (
    ALONE_EVENTS,
    BEYOND_EVENTS,
    CHAOS_EVENTS,
    FLIP_EVENTS,
    HOST_EVENTS,
    JOB_EVENTS,
    LEADER_EVENTS,
    STORE_EVENTS,
    TIER_EVENTS,
    WORLD_EVENTS,
    CheckpointPolicy,
)

HELP = "kill and stop processes at random in a training, and compare every bit with an undisturbed one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `chaos`."""
    add_code(parser)
    parser.add_argument(
        "--hosts",
        type=int,
        default=0,
        metavar="N",
        help="run on 4 to 6 hosts made of network namespaces (needs root); hosts are killed, links cut or slowed",
    )
    parser.add_argument(
        "--elect", action="store_true", help="with --hosts: three coordinators, of which etcd elects one"
    )
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="minutes of disturbed training, about")
    parser.add_argument(
        "--check-power",
        type=int,
        metavar="STEPS",
        help="no chaos; check instead that a dropped push, a step applied twice, or a record put back would be found,"
        " late in this many steps",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the schedule and of the model")
    parser.add_argument(
        "--events",
        type=lambda text: text.split(","),
        metavar="EVENT,...",
        help=f"of {', '.join(CHAOS_EVENTS)} (default: all of these); with --hosts, of {', '.join(HOST_EVENTS)}"
        f" (and all of these), with --elect, of {', '.join(LEADER_EVENTS)} (likewise); of"
        f" {', '.join(FLIP_EVENTS)}, bits that change in servers' memory; with --tier, of"
        f" {', '.join(TIER_EVENTS)}; of {', '.join(JOB_EVENTS)}, and with --hosts"
        f" {', '.join(WORLD_EVENTS)}, for which nobody may be lost; {', '.join(ALONE_EVENTS)} alone, of a job with a"
        " cluster of its own, that saves and goes on; and of"
        f" {', '.join(BEYOND_EVENTS + STORE_EVENTS)},"
        " with which the cluster writes checkpoints to a file system in the memory of this host",
    )
    parser.add_argument(
        "--checkpoint-every",
        metavar="N|TIME",
        type=interval,
        default=(0, 3.0),
        help="how often, where checkpoints are written (default 3s)",
    )
    parser.add_argument(
        "--checkpoint-policy", choices=get_args(CheckpointPolicy), default="consecutive", help="what they have"
    )
    parser.set_defaults(
        checkpoint="",
        checkpoint_keep=3,
        checkpoint_bytes_per_s=100e6,
        checkpoint_timeout=3600.0,
        checkpoint_zstd=0,
        checkpoint_bits=0,
        most_lost_samples=0.0,
        checkpoint_saver="everything",
        checkpoint_portion=0.125,
        beyond="stop",
        restore="",
        run="",
    )
    add_data(parser)
    parser.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples per trainer and step")
    parser.add_argument("--trainers", type=int, default=2, metavar="T", help="processes that train (default 2)")
    add_training(parser)
    add_tier(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("chaos"), metavar="DIR", help="folder of the report (default chaos)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains with random disturbances and undisturbed, and compares."""
    require_torchrec()
    from torch_ecrec.demo.chaos.command import check, run_chaos
    from torch_ecrec.demo.chaos.power import run_check

    code, servers = check(arguments), tier_environment(arguments)
    if arguments.check_power is not None:
        return run_check(arguments, code)

    def words(url: str) -> list[str]:
        arguments.checkpoint, arguments.beyond = url, "checkpoint"
        return checkpoint_arguments(arguments)

    return run_chaos(arguments, code, words, servers)
