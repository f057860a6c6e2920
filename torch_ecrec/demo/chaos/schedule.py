"""Chooses which events come at one instant. Pure: chance is an argument.

Of each kind there is what it takes: one server, one trainer, the coordinator, a host, a link between two ... What is of
`COMBINED` comes together with others, at most as many of each as `most` says; anything else comes alone.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

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
)

EVERY_KIND = (
    *(CHAOS_EVENTS + FLIP_EVENTS + TIER_EVENTS + BEYOND_EVENTS + STORE_EVENTS),
    *(HOST_EVENTS + LEADER_EVENTS + JOB_EVENTS + WORLD_EVENTS + ALONE_EVENTS),
)
COMBINED = CHAOS_EVENTS + HOST_EVENTS + LEADER_EVENTS
MUST_COME = tuple(kind for kind in EVERY_KIND if kind not in CHAOS_EVENTS)  # where they were asked for
NEW_SHARE = 0.75  # of the instants are for kinds that must come and have not come yet
MORE_SHARE = 0.3  # of the instants have another event, and so on
FIRST = ("kill-host", "cut-trainers", "cut")  # at an instant: what they may cost decides who else may be hit
ROLES = {  # of kinds whose name does not end with it
    "kill-all": "all",
    "kill-beyond-r": "server",
    "full-disk": "store",
    "flip-record": "server",
    "flip-parity": "server",
    **dict.fromkeys(TIER_EVENTS, "server"),
    "kill-host": "host",
    "cut": "cut",
    "cut-trainers": "cut",
    "slow-link": "link",
    "lossy-link": "link",
    "kill-leader": "coordinator",
    "stop-leader": "coordinator",
    "blip": "hosts",
}


def role_of(kind: str) -> str:
    """Returns the role that an event hits."""
    return ROLES.get(kind, kind.partition("-")[2])


def at_one_instant(
    possible: Sequence[str], came: Collection[str], most: Mapping[str, int], chance: random.Random
) -> list[str]:
    """Returns kinds of events for one instant: mostly one, now and then several; none if none may come.

    Args:
        possible: kinds that may come now.
        came: kinds that have come already.
        most: of each role, how many at one instant; 1 where it says nothing.
        chance: decides.
    """
    new = [kind for kind in possible if kind in MUST_COME and kind not in came]
    others = [kind for kind in possible if kind not in MUST_COME] if new else list(possible)
    if not possible:
        return []
    first = chance.choice(new if new and (not others or chance.random() < NEW_SHARE) else others)
    if first not in COMBINED:
        return [first]
    combined, chosen = [kind for kind in possible if kind in COMBINED], [first]
    while chance.random() < MORE_SHARE:
        chosen.append(chance.choice(combined))
    return _kept(chosen, most)


def _kept(chosen: Sequence[str], most: Mapping[str, int]) -> list[str]:
    kept: list[str] = []
    for kind in chosen:
        role = role_of(kind)
        if sum(role_of(other) == role for other in kept) < most.get(role, 1):
            kept.append(kind)
    return kept
