"""`torch-ecrec drain`: moves all slots off a server, or a failure domain, while training goes on."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from torch_ecrec.cli.arguments import ASK_S, ASKED_S, add_join, asker, asks

if TYPE_CHECKING:
    from torch_ecrec.protocol.status import Status

HELP = "move all slots away from a server, or from a host or rack, without spending redundancy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `drain`."""
    parser.add_argument("what", metavar="SERVER|DOMAIN", help="as `torch-ecrec status` and --failure-domain name it")
    parser.add_argument(
        "--undo", action="store_true", help="let it have slots again; slots that have moved stay where they are"
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until no slot is left there")
    add_join(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks for the drain again and again until no slot is left, so that a new coordinator hears of it, too."""
    from torch_ecrec.protocol.status import of_message

    settings, join = asks(arguments)
    ask, accepted, last = asker(join), False, ""
    word = {"type": "drain", "what": arguments.what, "undo": arguments.undo}
    while True:
        limit_s = settings.give_up_s if accepted else min(ASKED_S, settings.give_up_s)
        answer = ask(word, limit_s, led=True)
        if answer["type"] == "refused":
            if not accepted:
                raise ValueError(answer["reason"])
            if is_gone(of_message(ask({"type": "status"}, limit_s)), arguments.what):
                lost = f"{arguments.what} was lost before all its slots had moved: they are rebuilt elsewhere"
                print(f"{lost} (`torch-ecrec status`)", flush=True)
                return 1
        else:
            status = of_message(answer)
            accepted, left = True, slots_left(status)
            news = "" if arguments.undo else progress(status, left)
            if news != last:
                print(news, flush=True)
            last = news
            if arguments.undo or arguments.no_wait or not left:
                return 0
        time.sleep(ASK_S)


def is_gone(status: Status, what: str) -> bool:
    """Returns whether no server of that name or domain is there, of a coordinator that knows who is."""
    from torch_ecrec.protocol.status import is_meant

    there = any(is_meant(what, one.name, one.domain) for one in status.servers)
    return bool(status.slots) and status.regathering is None and not there


def slots_left(status: Status) -> list[int]:
    """Returns the slots that are still on draining servers."""
    draining = {member.name for member in status.members if member.draining}
    return [place.slot for place in status.slots if place.server in draining]


def progress(status: Status, left: list[int]) -> str:
    """Returns the progress of a drain as text."""
    names = ", ".join(member.name for member in status.members if member.draining)
    if not left:
        return f"drained: no slot is left on {names}, which may be stopped now"
    there = ", ".join(f"{place.slot} on {place.server}" for place in status.slots if place.slot in left)
    slots = f"still to be moved: slot {there}"
    if status.move is not None:
        return f"{slots}; slot {status.move.slot} is being copied to {status.move.server}"
    if not all(place.healthy for place in status.slots):
        return f"{slots}; lost slots are repaired first"
    return f"{slots}; no spare is there to take one: start a server (`torch-ecrec serve`)"
