"""`torch-ecrec checkpoint`: has a checkpoint written now, though none is due, while training goes on."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from torch_ecrec.cli.arguments import ASK_S, ASKED_S, add_join, asker, asks

if TYPE_CHECKING:
    from torch_ecrec.protocol.status import CheckpointsStatus

HELP = "have a checkpoint written now, and wait until it is complete"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `checkpoint`."""
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is written")
    add_join(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks for it again and again until it counts, so that a new coordinator hears of it, too."""
    from torch_ecrec.observe.progress import Progress
    from torch_ecrec.protocol.status import of_message

    settings, join = asks(arguments)
    ask, last = asker(join), ""
    after: int | None = None  # of a later step of training than this
    with Progress("parts of it are written", 0) as shown:
        while True:
            limit_s = min(ASKED_S, settings.give_up_s) if after is None else settings.give_up_s
            answer = ask({"type": "checkpoint", "after": after}, limit_s, led=True)
            if answer["type"] == "refused":
                raise ValueError(answer["reason"])
            status = of_message(answer)
            kept = status.checkpoints
            if kept is None:
                raise ValueError("the coordinator that leads now keeps no checkpoints")
            after = kept.asked if after is None else after
            counts = after is None or kept.last_step > after
            if (news := progress(kept, counts)) != last:
                print(news, flush=True)
            last = news
            if counts or arguments.no_wait:
                return 0
            shown.at(kept.written, status.code.slots if kept.running else 0)
            time.sleep(ASK_S)


def progress(kept: CheckpointsStatus, counts: bool) -> str:
    """Returns how far a checkpoint is that was asked for, as text. `counts`: it is complete."""
    if counts:
        return f"written: {kept.last}, of step {kept.last_step}, at {kept.url}"
    if kept.failing:
        return f"it failed, and is tried again: {kept.failing}"
    if kept.running:
        return f"is being written: {kept.running}, at {kept.url}"
    return "asked for: it begins once every slot has all its records, and trainers train"
