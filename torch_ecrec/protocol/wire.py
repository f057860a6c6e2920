"""What processes say to each other over the data plane, and how a call may end.

A *request* goes to one named process and gets at most one *answer*; both are dataclasses whose array fields are torch
tensors. Every call ends as exactly one `Outcome`:

    Ok(answer)        the peer handled it
    Failed(reason)    it certainly was not handled (the peer is not there, or refused it)
    Unknown(reason)   it may have been handled: time ran out or the peer died. Every request here is idempotent, so
                      the caller makes it again.

Shape legend: U records, D embedding dim, B record bytes; lists hold one tensor per slab, in the job's slab order.
Positions are int64 indices into a slot's records (not table rows).

Every request about a slot carries the slot's incarnation as the caller knows it; a host that is not that incarnation
answers `Refused`. Requests of a source carry the source's incarnation, so that one that was replaced is ignored.

Every request carries its sender's *era*, too: which life of the trainers it belongs to (docs/design.md, "Losing
trainers").

Steps here count everything that changes records. The first ones load initial values; training begins after the last of
them, which is called the *origin*. With three loads, origin is 3, and the first step of training is step 4 here. Tables
may be loaded later, too, between steps of training: each such load is a step here and none of training. So how many
steps of training are *done* does not follow from a step here; pushes and snapshots say it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorOf:
    """What a message's tensor must be; an annotation of its type. What arrives otherwise is not a message."""

    rank: int
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.rank}-D {' or '.join(str(dtype)[6:] for dtype in self.dtypes)}"


Positions = Annotated[Tensor, TensorOf(1, (torch.int64,))]  # (U,)
Values = Annotated[Tensor, TensorOf(2, (torch.float32, torch.bfloat16))]  # (U, D)
RecordBytes = Annotated[Tensor, TensorOf(2, (torch.uint8,))]  # (U, B)
Payload = Annotated[Tensor, TensorOf(1, (torch.uint8,))]  # (bytes,)


@dataclass(frozen=True)
class Ok:
    answer: Any


@dataclass(frozen=True)
class Failed:
    reason: str


@dataclass(frozen=True)
class Unknown:
    reason: str


Outcome = Ok | Failed | Unknown


@dataclass
class Request:
    """Base: `slot` is the slot addressed, `incarnation` the host's incarnation as the caller knows it.

    `era` is set by the node that sends it.
    """

    slot: int
    incarnation: int
    era: int = field(default=0, kw_only=True)


@dataclass
class Answer:
    """Base of all answers."""


@dataclass
class Refused(Answer):
    """Not handled: stale or unknown incarnation, or a state that will pass. Ask again after the next placement."""

    reason: str


@dataclass
class Malformed(Refused):
    """Not handled, as nobody could: a value is not what it must be. Asked again only if it was spoilt on its way."""


@dataclass
class Forgotten(Answer):
    """Not to be had any more: the logs have let go of the step that was asked for. Asking again is of no use."""

    reason: str


# trainer -> slot ----------------------------------------------------------------------------------


@dataclass
class Lookup(Request):
    """The weights of some records as they are after step - 1."""

    step: int
    positions: list[Positions]  # (U,) int64 each
    bfloat16: bool = False  # the answer is rounded to it


@dataclass
class Rows(Answer):
    weights: list[Values]  # (U, D) float32 each, or bfloat16


@dataclass
class Push(Request):
    """One trainer's gradients of one step for one slot; answered once the step is applied and folded by all holders."""

    step: int
    trainer: int
    positions: list[Positions]  # (U,) int64 each, ascending, unique
    gradients: list[Values]  # (U, D) float32 each, or bfloat16
    rates: list[float]  # learning rate per slab
    iteration: int  # which step of training it is, from 1
    resumable: int  # the last step that this trainer may resume from: acknowledged up to there, its snapshot stored


@dataclass
class Acknowledged(Answer):
    step: int


@dataclass
class Snapshot(Request):
    """One trainer's part of the dense model after a step."""

    step: int
    trainer: int
    payload: Payload  # (bytes,) uint8
    header: list[int]  # steps of training that are done; then what the payload is, for who reads it (`dense.Header`)


@dataclass
class Stored(Answer):
    step: int
    incarnations: list[int]  # of every slot, as the holder knows them: what an earlier one stored may be gone


@dataclass
class Load(Request):
    """A step of trainer 0 that overwrites some records of a slab; answered as a push is.

    Like a push it goes to every slot, also to those of which it changes nothing. Before training (`alone`) it is due
    when it is here; later, when every other trainer has sent `Pass`.
    """

    step: int
    slab: int
    positions: Positions  # (U,) int64, ascending, unique
    records: RecordBytes | None  # (U, B) uint8; None: the initial values that the servers give them
    resumable: int  # as in `Push`; `alone`: the word of all trainers, as nobody else loads
    alone: bool


@dataclass
class Pass(Request):
    """A trainer's part of a step in which trainer 0 loads: it changes nothing itself. Answered as a push is."""

    step: int
    trainer: int  # not 0
    resumable: int  # as in `Push`


Part = Push | Load | Pass  # of a step: what one trainer sends of it


@dataclass
class Export(Request):
    """Whole records as of the end of a step, for state_dict and digests."""

    slab: int
    step: int
    positions: Positions  # (U,) int64
    parity: bool = False


@dataclass
class Records(Answer):
    records: RecordBytes  # (U, B) uint8


# slot -> slot: protection -------------------------------------------------------------------------


@dataclass
class Fold(Request):
    """What one step changed in the records of `source`, to be folded into the parities that the addressed slot has."""

    source: int
    source_incarnation: int
    step: int
    floor: int  # the source's log goes back to here; the holder may forget older steps
    positions: list[Positions]  # (U,) int64 each: positions at the source, ascending
    deltas: list[RecordBytes]  # (U, B) uint8 each: old XOR new


@dataclass
class Folded(Answer):
    step: int  # cumulative: everything of the source up to here is folded


@dataclass
class Attach(Request):
    """A source meets a holder's new incarnation (or the source is new itself)."""

    source: int
    source_incarnation: int
    base: int  # a holder that knows nothing of the source starts here
    acknowledged: int  # the holder has caught up once it has folded this


@dataclass
class Attached(Answer):
    folded: int  # the last step of the source that the holder has folded


@dataclass
class Adopt(Request):
    """The new host of a lost slot asks a holder what it has folded of it, and fences the old incarnation."""

    lost: int
    lost_incarnation: int  # the new one
    frozen: bool  # whether the new host waits for the step to go back to; a holder that does not likewise refuses


@dataclass
class Adopted(Answer):
    folded: int | None  # None: knows nothing of the lost slot
    caught_up: bool  # has everything the lost slot ever acknowledged


@dataclass
class Cut(Request):
    """The cut of a lost slot: holders undo what they folded after it and hand over their log of its earlier steps."""

    lost: int
    lost_incarnation: int
    frozen: bool  # as in `Adopt`
    cut: int


@dataclass
class CutLog(Answer):
    steps: list[int]
    positions: list[list[Positions]]  # per step, per slab: (U,) int64, positions at the lost slot
    deltas: list[list[RecordBytes]]  # per step, per slab: (U, B) uint8
    floor: int  # the log holds every step after this one, up to the cut
    caught_up: bool  # false: this holder does not know all of it


# slot -> slot: recovery ---------------------------------------------------------------------------


@dataclass
class Versions(Request):
    """Which step of each source the parities of the addressed slot stand for."""


@dataclass
class VersionsAre(Answer):
    folded: dict[int, int]  # source -> step


@dataclass
class Fetch(Request):
    """Records of a stripe's member as of given steps, to decode another member from."""

    slab: int
    parity: bool
    positions: Positions  # (U,) int64
    as_of: dict[int, int]  # source -> step; for data: the slot's own step


@dataclass
class FetchSnapshots(Request):
    """Dense snapshots that a slot holds, for the new host of another one, or for a trainer; in pieces (`pieces.py`)."""

    of: int  # a step, or -1 for all; of a step, a holder that asks gets what there is, a trainer all parts
    holder: int = -1  # which slot asks, and in which life; -1: a trainer
    holder_incarnation: int = 0
    begin: list[int] = field(default_factory=list)  # `more` of the answer before; [] at first


@dataclass
class Snapshots(Answer):
    steps: list[int] = field(default_factory=list)
    trainers: list[int] = field(default_factory=list)
    headers: list[list[int]] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)  # (bytes,) uint8 each; the first and the last may be a piece
    more: list[int] = field(default_factory=list)  # step, trainer, byte that the next answer begins with; []: no more


# placement ----------------------------------------------------------------------------------------


NO_HOST = ""  # the server of a slot that waits for one


@dataclass(frozen=True)
class SlotPlace:
    """Where a slot lives: on a server, or `NO_HOST`. `healthy`: all its records are there; otherwise a rebuild is under
    way."""

    server: str
    incarnation: int
    healthy: bool


@dataclass(frozen=True)
class Placement:
    """Slot -> server, as of an epoch. Newer epochs replace older ones."""

    epoch: int
    slots: tuple[SlotPlace, ...]

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "slots": [[p.server, p.incarnation, p.healthy] for p in self.slots]}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Placement:
        return Placement(value["epoch"], tuple(SlotPlace(*p) for p in value["slots"]))
