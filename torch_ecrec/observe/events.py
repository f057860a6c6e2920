"""What a coordinator tells those who watch it, declared: every event, its fields and their types.

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
    """Base: something that has happened, as the coordinator sees it."""


Event = Happened | Ready | Damaged | Mended | NotExact | Fatal  # what is announced


# members ----------------------------------------------------------------------------------------------


class Joined(Happened, frozen=True, tag="joined"):
    """A process has joined, or has rejoined at a coordinator that was started again. `rank`: -1 for a server."""

    member: str
    role: str
    rank: int
    pid: int


class Back(Happened, frozen=True, tag="back"):
    """A member whose connection had ended is there again, and has lost nothing."""

    member: str
    pid: int


class TurnedAway(Happened, frozen=True, tag="turned_away"):
    """A member of another cluster has found this coordinator, and goes on looking for its own.

    Attributes:
        member, run: it, and its cluster. `refuses`: this one is to end for it.
    """

    member: str
    run: str
    pid: int
    why: str
    refuses: bool


class MemberLeft(Happened, frozen=True, tag="left"):
    """A member is done."""

    member: str


class Lost(Happened, frozen=True, tag="lost"):
    """A member is gone, or was taken for lost. `slots`: those that it hosted."""

    member: str
    why: str
    slots: list[int]


class Cut(Happened, frozen=True, tag="cut"):
    """Members that the coordinator hears cannot reach each other. `pairs`: who complains of whom.

    `fenced`: servers that are taken for lost, so that training goes on. Nobody: it cannot, and `why`.
    """

    pairs: list[tuple[str, str]]
    fenced: list[str]
    why: str


class StandsStill(Happened, frozen=True, tag="stands_still"):
    """Members are silent that the code could not repair together: training waits for them. `left_s`: for how long at
    most, then they are given up; None: nobody is heard, and nobody is given up."""

    members: list[str]
    why: str
    left_s: float | None


class GoesOn(Happened, frozen=True, tag="goes_on"):
    """Training waits for nobody any more: they are back, or were given up."""


class Slow(Happened, frozen=True, tag="slow"):
    """Training waits for this server, as it has for a while: a hint to drain it (`torch-ecrec drain`).

    Attributes:
        share: of the trainers' time, 0 to 1, in which its answer was out and those of most others were there.
        late_s: so much later it answers than most others. `usual_s`: so long those take.
    """

    member: str
    share: float
    late_s: float
    usual_s: float


class NotSlow(Happened, frozen=True, tag="not_slow"):
    """Training does not wait for this server any more."""

    member: str


class RosterIs(Happened, frozen=True, tag="roster"):
    """Somebody has come or gone: who is there now, as all of them are told."""

    version: int
    members: list[str]


class Regathering(Happened, frozen=True, tag="regathering"):
    """This coordinator was started again: members begin to tell it what they know."""


class Regathered(Happened, frozen=True, tag="regathered"):
    """It goes on with those who have. `epoch`: its own before it takes over theirs."""

    epoch: int
    members: list[str]


# placement --------------------------------------------------------------------------------------------


class NewEpoch(Happened, frozen=True):
    """Base: the placement has changed. `slots`: by slot."""

    epoch: int
    slots: list[Host]


class PlacedFirst(NewEpoch, frozen=True, tag="placed"):
    """Every slot has a server, for the first time."""


class PlacedAnew(NewEpoch, frozen=True, tag="re-placed"):
    """Slots whose hosts were lost have others, or wait for one."""


class Moved(NewEpoch, frozen=True, tag="moved"):
    """A spare has relieved a server that hosted several slots of one."""


class Stayed(NewEpoch, frozen=True, tag="stayed"):
    """A slot was to move, and stays: the server that was to have it is gone."""


class Drained(Happened, frozen=True, tag="drained"):
    """No slot is left on a server that was to be without."""

    member: str


class Draining(Happened, frozen=True, tag="draining"):
    """The coordinator itself has begun to move all slots away from a server, and why."""

    member: str
    why: str


class Kept(NewEpoch, frozen=True, tag="kept"):
    """A coordinator that was started again goes on with the placement of before."""


class HealthyAgain(NewEpoch, frozen=True, tag="rebuilt"):
    """A slot is healthy again; `SlotRebuilt` says which."""


class OfOneSlot(Happened, frozen=True):
    """Base: the host of a slot has said something."""

    slot: int
    incarnation: int


class AtRisk(Happened, frozen=True, tag="at_risk"):
    """The servers of these failure domains host more together than the code repairs. None: that is over."""

    domains: list[str]


class Rehosted(OfOneSlot, frozen=True, tag="re-hosted"):
    """A new host of a slot serves; records that are not there yet are repaired when they are touched."""


class SlotRebuilt(OfOneSlot, frozen=True, tag="slot rebuilt"):
    """All records of a slot are there again."""


# lost trainers ----------------------------------------------------------------------------------------


class EraBegun(Happened, frozen=True, tag="era"):
    """Trainers were lost, or a server while all went back. `trainers`: those of the new era that are there already."""

    era: int
    trainers: list[str]


class GoingBack(Happened, frozen=True, tag="going back"):
    """Servers go back to a step of training. `applied`: the last one that all of them had applied."""

    era: int
    step: int
    applied: int


class Resumable(Happened, frozen=True, tag="resumable"):
    """That step is durable everywhere: trainers may go on after it."""

    era: int
    step: int


# checkpoints ------------------------------------------------------------------------------------------


class CheckpointBegun(Happened, frozen=True, tag="checkpoint_begun"):
    """Servers were told to write a checkpoint. `step`: of training; `base`: what it builds on, or ""."""

    name: str
    step: int
    base: str


class Checkpointed(Happened, frozen=True, tag="checkpointed"):
    """A checkpoint counts. `step`: of training; `base`: what it builds on, or ""; `seconds`: from its beginning, in
    ticks of the coordinator."""

    name: str
    step: int
    base: str
    bytes: int
    seconds: float


class Saved(Happened, frozen=True, tag="saved"):
    """A prioritised save counts: some rows of every slot, on the checkpoint `base`, which is no checkpoint itself.
    `step`: of training; `seconds`: as of `Checkpointed`."""

    name: str
    step: int
    base: str
    bytes: int
    seconds: float


class WentBeyond(Happened, frozen=True, tag="went_beyond"):
    """More was lost than parity can repair, or everything at once: all go back to a checkpoint. `step`: of training,
    that it is of."""

    name: str
    step: int
    reason: str


class BeganAnew(Happened, frozen=True, tag="began_anew"):
    """This coordinator was started again, nobody has come back who knows what was trained, and there is no checkpoint:
    the cluster begins at its beginning. What was trained before, if something was, is gone."""


class JobForgotten(Happened, frozen=True, tag="job_forgotten"):
    """The job of the first trainers was given up before anything was made of it; others have come, whose job it is now.

    `difference`: between the two.
    """

    difference: str


class RecoveredPartly(Happened, frozen=True, tag="recovered_partly"):
    """More was lost than parity can repair. NOT EXACT: these slots alone have their records of a checkpoint, and lack
    what was trained since.

    `step`: of training, that the checkpoint is of; `at`: where training goes on; `lost_samples`: CPR's portion of lost
    samples, of the whole run until now; `saves`: prioritised ones that there were since, of which rows were newer.
    """

    slots: list[int]
    name: str
    step: int
    at: int
    lost_samples: float
    reason: str
    saves: int = 0


class CheckpointVoid(Happened, frozen=True, tag="checkpoint_void"):
    """A checkpoint came to nothing; another is tried later. `step`: of training, 0 where none was chosen yet."""

    step: int
    reason: str


# ends -------------------------------------------------------------------------------------------------


class MessagesRefused(Happened, frozen=True, tag="refused"):
    """Messages that counted for nothing: the last one's sender and what was wrong, and how many since the last word."""

    sender: str = field(name="from")
    why: str
    messages: int


AnyEvent = (
    Joined
    | Back
    | TurnedAway
    | MemberLeft
    | Lost
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


def json_of(event: Event) -> dict[str, Any]:
    """An event as an object of JSON."""
    found: dict[str, Any] = msgspec.to_builtins(event)
    return {"event": found.pop("type"), **found}


def of_message(message: Mapping[str, Any]) -> AnyEvent:
    """The event in a message of type "event"; what else is in it (the time) is left out.

    Raises:
        ValueError: it is none of those above; the text says which field, what was wanted and what came.
    """
    if "event" not in message:
        raise ValueError("no event: `event` must name one")
    found = {name: value for name, value in message.items() if name not in ("event", "time_s")}
    event: AnyEvent = msgspec.convert({**found, "type": message["event"]}, AnyEvent)
    return event
