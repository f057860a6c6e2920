"""Where the members of a generation meet: at the coordinator's store, place by place, before a deadline.

At a *place* each member says something of itself; the first member waits until all have, the others for its word. So
all of them are there, know what the others said, and agree who they are.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol.build import Build

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")  # torch allows 128 characters, and the generation is added
LEAST_TIMEOUT_S = 0.001  # 0 would mean "no limit" to torch
POLL_LEAST_S, POLL_MOST_S = 0.002, 0.02


@dataclass(frozen=True)
class World:
    """A generation: its members, by rank."""

    generation: int
    members: tuple[str, ...]

    def check(self, name: str) -> None:
        """Raises ValueError if these cannot be the members of a world that `name` is in."""
        if name not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"`members` must be different names, {name} among them, got {list(self.members)}")
        for member in self.members:
            check_name("members", member)


def check_name(what: str, name: str) -> None:
    """Raises ValueError if no member can have it."""
    if not NAME.fullmatch(name):
        raise ValueError(f"`{what}` must be 1 to 100 letters, digits, '_' or '-', got {name!r}")


class Rendezvous:
    """A member's side of it.

    Args:
        name: the member's.
        check_wanted: of a generation, called again and again while this waits: raises what ends the wait.
    """

    def __init__(self, name: str, check_wanted: Callable[[int], None]) -> None:
        self._name, self._check_wanted = name, check_wanted
        self._kept: tuple[tuple[str, int], TCPStore | None] = (("", 0), None)

    def close(self) -> None:
        """Keeps no connection any more."""
        self._kept = (("", 0), None)

    def keep(self, store: tuple[str, int], connection: TCPStore) -> None:
        """For the next generation: this one has served."""
        self._kept = (store, connection)

    def connect(self, store: tuple[str, int], deadline_s: float) -> TCPStore:
        """The connection to the store, the one of the generation before if it still holds.

        torch looks up the name of the store's host, backwards, for every connection it makes: seconds where no name
        server answers.
        """
        address, connection = self._kept
        self._kept = (store, None)  # until it has served once more
        if connection is not None and address == store:
            connection.set_timeout(remaining(deadline_s))
            with contextlib.suppress(RuntimeError):
                connection.check(["alive"])
                return connection
        return TCPStore(*store, is_master=False, wait_for_workers=False, timeout=remaining(deadline_s))

    def meet(self, shared: Store, place: str, world: World, says: str, deadline_s: float) -> None:
        """Says something at `place`; returns when all members have: the first waits for all, the others for its word.

        Polls, since torch's own waiting is neither quiet nor interruptible.
        """
        members = ",".join(world.members)
        shared.set(f"{place}/{self._name}", says)
        leading = self._name == world.members[0]
        awaited = [f"{place}/{member}" for member in world.members] if leading else [f"{place}:all"]
        pause_s = POLL_LEAST_S
        while awaited:
            self._check_wanted(world.generation)
            if shared.check(awaited[-1:]):
                awaited.pop()
            elif time.monotonic() > deadline_s:
                missing = [member for member in world.members if not shared.check([f"{place}/{member}"])]
                raise ClusterUnavailable(
                    f"generation {world.generation}: not {place} in time: {', '.join(missing) or world.members[0]}"
                )
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, POLL_MOST_S)
        if leading:
            shared.set(f"{place}:all", members)
        elif shared.get(f"{place}:all").decode() != members:
            raise ClusterUnavailable(f"generation {world.generation}: members disagree about who is in it")

    def arrive(self, shared: Store, world: World, build: Build, says: str, deadline_s: float) -> list[str]:
        """Returns when all members have arrived, with what each of them said, by rank. `build`: what this one runs.

        Raises:
            ClusterUnavailable: not all in time, not all of one build, or nobody wants that generation any more.
        """
        own = build.digest.hex()
        self.meet(shared, "arrived", world, f"{own} {says}", deadline_s)
        said = [shared.get(f"arrived/{member}").decode().partition(" ") for member in world.members]
        others = [member for member, (digest, _, _) in zip(world.members, said, strict=True) if digest != own]
        if others:
            raise ClusterUnavailable(
                f"generation {world.generation}: {', '.join(others)} run another build of torch_ecrec than {self._name}"
                f" (version {build.version}): their messages differ"
            )
        return [claim for _, _, claim in said]


def remaining(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(deadline_s - time.monotonic(), LEAST_TIMEOUT_S))


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
