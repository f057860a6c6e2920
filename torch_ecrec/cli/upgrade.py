"""`torch-ecrec upgrade`: moves all slots to servers of this version, server by server, while training goes on.

It is run by the version that is to come, as its servers are. First it asks whether this build may serve the cluster at
all (`protocol/build.py`), and whether there is room; until both are so it changes nothing. Then it drains the servers
of other versions, spares first, so that no slot moves to one. Run again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch_ecrec
from torch_ecrec.cli.arguments import ASK_S, ASKED_S, add_join, asker, asks
from torch_ecrec.observe.words import versions_named
from torch_ecrec.runtime.checks import require

if TYPE_CHECKING:
    from torch_ecrec.protocol.status import MemberStatus, Status

HELP = "move all slots to servers of this version, server by server, while training goes on"
NOT_KNOWN = "the coordinator does not know where slots are: nothing is placed yet, or it was started again just now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `upgrade`."""
    parser.add_argument("--check", action="store_true", help="only say whether this build may serve the cluster")
    add_join(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks whether this build may be there, then drains server after server, as `Plan` says, until none is left."""
    from torch_ecrec.processes.kernel_bits import kernel_bits
    from torch_ecrec.processes.launch import warm
    from torch_ecrec.protocol.messages import whole_build
    from torch_ecrec.protocol.status import of_message

    settings, join = asks(arguments)
    ask, build, limit_s = asker(join), whole_build(), settings.give_up_s

    def look() -> Status:
        return of_message(ask({"type": "status"}, limit_s))

    def compare(bits: dict[str, str]) -> Status:
        told = {"type": "compare", "version": build.version, "messages": {**build.messages, **bits}}
        answer = ask(told, min(ASKED_S, limit_s))
        if answer["type"] == "refused":
            raise ValueError(f"this build may not serve the cluster at {join}: {answer['reason']}")
        return of_message(answer)

    compare({})  # at once: kernels may have to be compiled first
    warm(tells=True)
    status = compare(kernel_bits())
    print(f"version {build.version} may serve the cluster at {join}, which has {versions_named(status)}", flush=True)
    if arguments.check:
        return 0
    last, begun = "", False
    while True:
        plan = Plan.of(status)
        if plan.is_over:
            print(plan.summary(), flush=True)
            return 0
        require(begun or plan.is_known, f"nothing was moved: {NOT_KNOWN}. `torch-ecrec status` shows when it does")
        require(begun or plan.has_room or not plan.left, f"nothing was moved: {plan.lacks_room(join)}")
        begun = True
        for name in plan.to_drain:
            answer = ask({"type": "drain", "what": name}, limit_s, led=True)
            if answer["type"] == "refused" and is_there(look(), name):
                raise ValueError(f"{name} cannot be drained: {answer['reason']}")
        if (news := plan.progress(join)) != last:
            print(news, flush=True)
        last = news
        time.sleep(ASK_S)
        status = look()


def is_there(status: Status, name: str) -> bool:
    """Returns whether the server is there, of a coordinator that does not wait for members of another one."""
    return status.regathering is None and any(one.name == name for one in status.servers)


@dataclass(frozen=True)
class Plan:
    """Works out the next steps of an upgrade from one status. Pure.

    Attributes:
        left: servers of other versions that have slots, with these.
        spares: servers of this version that can take a slot.
        others: servers of other versions without slots.
    """

    status: Status
    left: dict[str, list[int]]
    spares: list[str]
    others: list[MemberStatus]

    @classmethod
    def of(cls, status: Status, version: str = "") -> Plan:
        """Returns what is to be done to have all slots on servers of `version`; "": of this one's."""
        version = version or torch_ecrec.__version__
        hosted: dict[str, list[int]] = {}
        for place in status.slots:
            hosted.setdefault(place.server, []).append(place.slot)
        old = [one for one in status.servers if one.version != version]
        new = [one for one in status.servers if one.version == version]
        return cls(
            status,
            {one.name: hosted[one.name] for one in old if one.name in hosted},
            [one.name for one in new if one.name not in hosted and not one.draining],
            [one for one in old if one.name not in hosted],
        )

    @property
    def is_known(self) -> bool:
        """Where slots are is known: nothing that a coordinator shows says so while members of the one before return."""
        return bool(self.status.slots) and self.status.regathering is None

    @property
    def is_over(self) -> bool:
        """Every slot is on a server of the version, none waits for one."""
        return self.is_known and not self.left and all(place.server for place in self.status.slots)

    @property
    def has_room(self) -> bool:
        """A slot can move, or does."""
        return bool(self.spares) or self.status.move is not None

    @property
    def to_drain(self) -> list[str]:
        """Servers to be drained now: spares of other versions, and one that has slots, where none is under way."""
        if not self.has_room or not self.is_known:
            return []
        draining = {one.name for one in self.status.servers if one.draining}
        spares = [one.name for one in self.others if one.name not in draining]
        return spares if spares or draining & self.left.keys() or not self.left else [next(iter(self.left))]

    def lacks_room(self, join: str) -> str:
        """Returns what to do where there is no room."""
        free = ", ".join(f"{one.name} (pid {one.pid} on {one.host or 'its host'})" for one in self.others)
        end = f"end {free}, and" if free else "then"
        wanted = f"no server of version {torch_ecrec.__version__} is there without a slot: {end} start one of it"
        return f"{wanted} (`torch-ecrec serve --join {join}`)"

    def progress(self, join: str) -> str:
        """Returns how far it is, as text."""
        if not self.is_known:
            return f"waits: {NOT_KNOWN}"
        left = "; ".join(f"{name}: {', '.join(map(str, slots))}" for name, slots in self.left.items()) or "none"
        slots = f"slots on servers of other versions: {left}"
        if self.status.move is not None:
            return f"{slots}. Slot {self.status.move.slot} is being copied to {self.status.move.server}"
        if not all(place.healthy for place in self.status.slots):
            return f"{slots}. Others are being repaired first"
        return f"{slots}. " + ("The next one moves soon" if self.spares else f"Waits: {self.lacks_room(join)}")

    def summary(self) -> str:
        """Returns which members run which version, and what is left to do."""
        lines = [f"upgraded: no slot is on a server of another version. {versions_named(self.status)}"]
        if self.others:
            lines.append(f"end {', '.join(one.name for one in self.others)}: they have no slot any more")
        if self.status.version != torch_ecrec.__version__:
            lines.append("then start the coordinator again from this version (docs/howto/upgrade.md)")
        old = [one.name for one in self.status.trainers if one.version != torch_ecrec.__version__]
        if old:
            lines.append(f"{', '.join(old)}: of another version until they are started again")
        return "\n".join(lines)
