"""The events that a coordinator sends to those who watch it: every kind, with its fields and their types.

An event is an object of JSON whose "event" names its struct. It stands in the coordinator's log as it is, and goes to
watchers as a message of type "event" with the time of day:

    json_of(MemberLeft("server-1"))                 # {"event": "left", "member": "server-1"}
    of_message({"type": "event", "event": "left", "member": "server-1", "time_s": 1.5})     # MemberLeft("server-1")

Where what happened is that a message was said, the event is that message (`protocol/messages.py`): `Ready`, `Damaged`,
`Mended`, `NotExact` and `Fatal`. All others are declared here, and none has the name of a message.

Nothing that the cluster does follows from an event: they are for logs, figures and people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field

from torch_ecrec.protocol.messages import Damaged, Fatal, Mended, NotExact, Ready

Host = tuple[str, int]  # of a slot: server, incarnation


class Happened(Struct, frozen=True, tag_field="type"):
    """The base of events: something has happened, as the coordinator sees it."""


Event = Happened | Ready | Damaged | Mended | NotExact | Fatal  # what is announced


# members ----------------------------------------------------------------------------------------------


class Joined(Happened, frozen=True, tag="joined"):
    """A process has joined, or rejoined a restarted coordinator. `rank`: -1 for a server."""

    member: str
    role: str
    rank: int
    pid: int


class Back(Happened, frozen=True, tag="back"):
    """A member has reconnected, and has lost nothing."""

    member: str
    pid: int


class TurnedAway(Happened, frozen=True, tag="turned_away"):
    """A member of another cluster has connected to this coordinator. It goes on looking for its own.

    Attributes:
        member, run: it, and its cluster. `refuses`: this one is to end for it.
    """

    member: str
    run: str
    pid: int
    why: str
    refuses: bool


class MemberLeft(Happened, frozen=True, tag="left"):
    """A member has left the cluster, since it is done."""

    member: str


class Lost(Happened, frozen=True, tag="lost"):
    """A member is gone, or was declared lost. `slots`: those that it hosted."""

    member: str
    why: str
    slots: list[int]


class Killed(Happened, frozen=True, tag="killed"):
    """A member was told to end at once, since a person asked for it on the live page (`--allow-kill`)."""

    member: str


class Cut(Happened, frozen=True, tag="cut"):
    """Members that can reach the coordinator cannot reach each other. `pairs`: who complains of whom.

    `fenced`: servers that are declared lost, so that training goes on. If it is empty, training cannot go on, and `why`
    says so.
    """

    pairs: list[tuple[str, str]]
    fenced: list[str]
    why: str


class StandsStill(Happened, frozen=True, tag="stands_still"):
    """Training waits for silent members, which are more than the code could repair together.

    Attributes:
        left_s: after so many seconds at most they are given up; None: no member is heard, and none is given up.
    """

    members: list[str]
    why: str
    left_s: float | None


class GoesOn(Happened, frozen=True, tag="goes_on"):
    """Training waits for no silent member any more: all are back, or were given up."""


class Slow(Happened, frozen=True, tag="slow"):
    """Training has waited for this server for a while: a hint to drain it (`torch-ecrec drain`).

    Attributes:
        share: of the trainers' time, 0 to 1, in which its answer was out and those of most others were there.
        late_s: so much later it answers than most others. `usual_s`: so long those take.
    """

    member: str
    share: float
    late_s: float
    usual_s: float


class NotSlow(Happened, frozen=True, tag="not_slow"):
    """Training no longer waits for this server."""

    member: str


class RosterIs(Happened, frozen=True, tag="roster"):
    """A member has come or gone. `members`: the new roster, as all members are told."""

    version: int
    members: list[str]


class Regathering(Happened, frozen=True, tag="regathering"):
    """This coordinator was restarted: members begin to tell it what they know."""


class Regathered(Happened, frozen=True, tag="regathered"):
    """The restarted coordinator goes on with the members that have reported.

    `epoch`: its own, before it takes over theirs.
    """

    epoch: int
    members: list[str]


# placement --------------------------------------------------------------------------------------------


class NewEpoch(Happened, frozen=True):
    """The base of changes of the placement. `slots`: the host of each slot."""

    epoch: int
    slots: list[Host]


class PlacedFirst(NewEpoch, frozen=True, tag="placed"):
    """Every slot has a server for the first time."""


class PlacedAnew(NewEpoch, frozen=True, tag="re-placed"):
    """Slots whose hosts were lost have new ones, or wait for one."""


class Moved(NewEpoch, frozen=True, tag="moved"):
    """A spare has taken over a slot from a server that hosted several."""


class Stayed(NewEpoch, frozen=True, tag="stayed"):
    """A slot's migration was cancelled: the server that was to host it is gone, or an era began."""


class Drained(Happened, frozen=True, tag="drained"):
    """No slot is left on a server that was drained."""

    member: str


class Draining(Happened, frozen=True, tag="draining"):
    """The coordinator itself has begun to drain a server, and why."""

    member: str
    why: str


class Kept(NewEpoch, frozen=True, tag="kept"):
    """A restarted coordinator keeps the placement of before."""


class HealthyAgain(NewEpoch, frozen=True, tag="rebuilt"):
    """A slot is healthy again. `SlotRebuilt` says which."""


class OfOneSlot(Happened, frozen=True):
    """The base of events that the host of one slot has reported."""

    slot: int
    incarnation: int


class AtRisk(Happened, frozen=True, tag="at_risk"):
    """The servers of these failure domains together host more than the code repairs. An empty list: no longer."""

    domains: list[str]


class Rehosted(OfOneSlot, frozen=True, tag="re-hosted"):
    """A slot's new host serves. Records that are still missing are repaired when they are read."""


class SlotRebuilt(OfOneSlot, frozen=True, tag="slot rebuilt"):
    """All records of a slot are restored."""


# lost trainers ----------------------------------------------------------------------------------------


class EraBegun(Happened, frozen=True, tag="era"):
    """A new era has begun: trainers were lost, or a server while all went back.

    `trainers`: those of the new era that have joined already.
    """

    era: int
    trainers: list[str]


class GoingBack(Happened, frozen=True, tag="going back"):
    """Servers roll back to a step of training. `applied`: the last step that all of them had applied."""

    era: int
    step: int
    applied: int


class Resumable(Happened, frozen=True, tag="resumable"):
    """The step that all went back to is durable: trainers may go on after it."""

    era: int
    step: int


# checkpoints ------------------------------------------------------------------------------------------


class CheckpointBegun(Happened, frozen=True, tag="checkpoint_begun"):
    """Servers were told to write a checkpoint. `step`: of training; `base`: what it builds on, or ""."""

    name: str
    step: int
    base: str


class Checkpointed(Happened, frozen=True, tag="checkpointed"):
    """A checkpoint is complete. `step`: of training; `base`: what it builds on, or "".

    `seconds`: from its beginning, in ticks of the coordinator.
    """

    name: str
    step: int
    base: str
    bytes: int
    seconds: float


class Saved(Happened, frozen=True, tag="saved"):
    """A prioritised save is complete: some rows of every slot. It is no checkpoint itself.

    `step`: of training; `base`: the checkpoint that it adds to; `seconds`: as of `Checkpointed`.
    """

    name: str
    step: int
    base: str
    bytes: int
    seconds: float


class WentBeyond(Happened, frozen=True, tag="went_beyond"):
    """More was lost than parity can repair: all roll back to a checkpoint. `step`: of training, the checkpoint's."""

    name: str
    step: int
    reason: str


class BeganAnew(Happened, frozen=True, tag="began_anew"):
    """The cluster begins anew: what was trained before, if anything, is gone.

    This coordinator was restarted, no member with knowledge of the training has come back, and there is no checkpoint.
    """


class JobForgotten(Happened, frozen=True, tag="job_forgotten"):
    """The first trainers gave up before anything was made of their job. The job is now that of those who came later.

    `difference`: between the two jobs.
    """

    difference: str


class RecoveredPartly(Happened, frozen=True, tag="recovered_partly"):
    """More was lost than parity can repair. NOT EXACT: these slots took their records from a checkpoint.

    What was trained in them since is lost; the other slots are as they were.

    `step`: of training, the checkpoint's; `at`: where training goes on; `lost_samples`: CPR's portion of lost samples
    of the whole run until now; `saves`: prioritised saves since the checkpoint, whose rows were newer.
    """

    slots: list[int]
    name: str
    step: int
    at: int
    lost_samples: float
    reason: str
    saves: int = 0


class CheckpointVoid(Happened, frozen=True, tag="checkpoint_void"):
    """A checkpoint failed; another is tried later. `step`: of training, 0 if none was chosen yet."""

    step: int
    reason: str


# ends -------------------------------------------------------------------------------------------------


class MessagesRefused(Happened, frozen=True, tag="refused"):
    """Messages were refused. The last one's sender and fault are given, and the number since the last such event."""

    sender: str = field(name="from")
    why: str
    messages: int


AnyEvent = (
    Joined
    | Back
    | TurnedAway
    | MemberLeft
    | Lost
    | Killed
    | Cut
    | StandsStill
    | GoesOn
    | Slow
    | NotSlow
    | RosterIs
    | Regathering
    | Regathered
    | PlacedFirst
    | PlacedAnew
    | Moved
    | Stayed
    | Draining
    | Drained
    | Kept
    | HealthyAgain
    | AtRisk
    | Ready
    | Rehosted
    | SlotRebuilt
    | Damaged
    | Mended
    | EraBegun
    | GoingBack
    | Resumable
    | CheckpointBegun
    | Checkpointed
    | CheckpointVoid
    | Saved
    | WentBeyond
    | BeganAnew
    | JobForgotten
    | RecoveredPartly
    | NotExact
    | Fatal
    | MessagesRefused
)


# What a person learns from others, too.
MINOR = (RosterIs, PlacedAnew, Kept, HealthyAgain, Rehosted, Ready, EraBegun, CheckpointBegun)


def json_of(event: Event) -> dict[str, Any]:
    """Returns an event as a JSON object."""
    found: dict[str, Any] = msgspec.to_builtins(event)
    return {"event": found.pop("type"), **found}


def of_message(message: Mapping[str, Any]) -> AnyEvent:
    """Returns the event in a message of type "event". Other fields of the message, such as the time, are dropped.

    Raises:
        ValueError: it is none of those above; the text says which field, what was wanted and what came.
    """
    if "event" not in message:
        raise ValueError("no event: `event` must name one")
    found = {name: value for name, value in message.items() if name not in ("event", "time_s")}
    event: AnyEvent = msgspec.convert({**found, "type": message["event"]}, AnyEvent)
    return event
