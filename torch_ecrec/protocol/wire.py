"""What processes say to each other over the data plane, and how a call may end.

A *request* goes to one named process and gets at most one *answer*. A request's class says which: `call(Lookup(...))`
ends with `Rows` or `Forgotten`, or with `Refused`, which may come instead of any. Messages are structs of msgspec, so
that what arrives is what is declared here, or no message (`encoding.py`): types, bounds of numbers, and the dtype and
rank of tensors. Every call ends as exactly one `Outcome`:

    Ok(answer)        the peer handled it
    Failed(reason)    it certainly was not handled (the peer is not there, or refused it)
    Unknown(reason)   it may have been handled: time ran out or the peer died. Every request here is idempotent, so
                      the caller makes it again.

Shape legend: U records, D embedding dim, B record bytes, G bags with N ids together; lists hold one tensor per table
group, in the job's table group order.
Positions are int64 indices into a slot's records (not table rows).

Every request about a slot carries the slot's incarnation as the caller knows it; a host that is not that incarnation
answers `Refused`. Requests of a source carry the source's incarnation, so that one that was replaced is ignored.

Every request carries its sender's *era*, too: which life of the trainers it belongs to (docs/design.md, "Losing
trainers").

Steps here count everything that changes records. The first ones load initial values; training begins after the last of
them, which is called the *load end*. With three loads the load end is 3, and the first step of training is step 4 here.
Tables may be loaded later, too, between steps of training: each such load is a step here and none of training. So how
many steps of training are *done* does not follow from a step here; pushes and snapshots say it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Generic, TypeAlias, TypeVar

import torch
from msgspec import Meta, Struct, field
from torch import Tensor

LEAST, MOST = -1, 1 << 48  # numbers count things (steps, slots, lives), and -1 is none of them
Count = Annotated[int, Meta(ge=LEAST, le=MOST)]


class TensorOf(type):
    """Declares rank and dtypes of a message's tensor, as a type: msgspec has none of its own with these."""

    rank: int
    dtypes: tuple[torch.dtype, ...]

    def __new__(cls, name: str, rank: int, dtypes: tuple[torch.dtype, ...]) -> TensorOf:
        return super().__new__(cls, name, (), {"rank": rank, "dtypes": dtypes})

    def __init__(cls, name: str, rank: int, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__(name, (), {})

    def __str__(cls) -> str:
        return f"{cls.rank}-D {' or '.join(str(dtype)[6:] for dtype in cls.dtypes)}"

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor)  # rank and dtype were looked at where it was taken from the frame


if TYPE_CHECKING:
    Positions: TypeAlias = Tensor
    Values: TypeAlias = Tensor
    Weights: TypeAlias = Tensor
    RecordBytes: TypeAlias = Tensor
    Payload: TypeAlias = Tensor
    Words: TypeAlias = Tensor
    Places: TypeAlias = Tensor
    Lengths: TypeAlias = Tensor
    Factors: TypeAlias = Tensor
else:
    Positions = TensorOf("Positions", 1, (torch.int64,))  # (U,)
    Values = TensorOf("Values", 2, (torch.float32, torch.bfloat16))  # (U, D)
    Weights = TensorOf("Weights", 2, (torch.float32, torch.bfloat16, torch.uint8))  # (U, D), or (U, D + 8) of uint8
    RecordBytes = TensorOf("RecordBytes", 2, (torch.uint8,))  # (U, B)
    Words = TensorOf("Words", 1, (torch.int32,))  # (U,), of 4 bytes each
    Places = TensorOf("Places", 1, (torch.int32,))  # (N,), positions of less than 2^31 records
    Lengths = TensorOf("Lengths", 1, (torch.int32,))  # (G,)
    Factors = TensorOf("Factors", 1, (torch.float32,))  # (N,)
    Payload = TensorOf("Payload", 1, (torch.uint8,))  # (bytes,)


class _Message(Struct, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: an array that begins with the name of its class. Not looked at by the garbage collector: no
    cycles."""


class Answer(_Message):
    """Base class of all answers."""


class Refused(Answer):
    """Says that a request was not handled: stale or unknown incarnation, or a state that will pass. Ask again after the
    next placement."""

    reason: str


class Malformed(Refused):
    """Says that nobody could handle a request: a value is not what it must be. Asked again only if it was spoilt on its
    way."""


class Forgotten(Answer):
    """Says that a step is not to be had any more: the logs have let go of it. Asking again is of no use."""

    reason: str


A = TypeVar("A", bound=Answer)
A_co = TypeVar("A_co", bound=Answer, covariant=True)


@dataclass(frozen=True)
class Ok(Generic[A_co]):
    answer: A_co | Refused


@dataclass(frozen=True)
class Failed:
    reason: str


@dataclass(frozen=True)
class Unknown:
    reason: str


Outcome = Ok[A] | Failed | Unknown


class _OfEra(_Message, kw_only=True):
    era: Count = 0


class Request(_OfEra, Generic[A_co]):
    """Base of all requests; its parameter says what answers it, `Refused` apart.

    `slot` is the slot addressed, `incarnation` the host's incarnation as the caller knows it. `era` is set by the node
    that sends it.
    """

    slot: Count
    incarnation: Count


# trainer -> slot ----------------------------------------------------------------------------------


class Bags(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """Carries the ids of some bags as positions at one slot: each bag has one at least."""

    positions: Places  # (N,) int32, one bag behind the other, in any order, with repetitions
    lengths: Lengths  # (G,) int32
    factors: Factors | None  # (N,) float32, the weight of each id; None: 1


class Rows(Answer):
    weights: list[Weights]  # (U, D) float32 each, or bfloat16; or (U, D + 8) uint8, see `records/quantised.py`
    pooled: list[Values] = []  # (G, D) each, float32 or bfloat16: the sums of the bags; none where none were asked for


class Lookup(Request[Rows | Forgotten]):
    """Asks for the weights of some records as they are after step - 1, and for sums of them, bag by bag."""

    step: Count
    positions: list[Positions]  # (U,) int64 each
    bfloat16: bool = False  # the answer is rounded to it,
    int8: bool = False  # or quantised row by row: of an evaluation
    bags: list[Bags] = []  # to be pooled, of each table group, or none at all


class Ask(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A lookup that travels with the push of the step before."""

    positions: list[Positions]  # (U,) int64 each
    bfloat16: bool = False  # as in `Lookup`
    bags: list[Bags] = []  # likewise


class Acknowledged(Answer):
    step: Count  # cumulative: every step up to here survives r losses
    rows: list[Rows] = []  # of what a push asks for, one for each `Ask`; or none
    wants_hints: bool = False  # some of the slot's records are on a disk only, or not rebuilt yet: see `Announce`


class Push(Request[Acknowledged]):
    """Carries one trainer's gradients of one step for one slot; answered once the step is applied and folded by all
    holders.

    With lookups of the next step (`then`) it is answered once the step is applied here, and their rows are there: with
    those, and with the last step that is acknowledged by then, which may be an earlier one. `WhenAcknowledged` asks for
    the rest. Where the log has let go of the step, the answer is as that of a push without lookups.
    """

    step: Count
    trainer: Count
    positions: list[Positions]  # (U,) int64 each, ascending, unique
    gradients: list[Values]  # (U, D) float32 each, or bfloat16
    rates: list[float]  # learning rate per table group
    iteration: Count  # which step of training it is, from 1
    resumable: Count  # the last step that this trainer may resume from: acknowledged up to there, its snapshot stored
    bags: list[Bags] = []  # of each table group, or none at all; a record may have gradients of rows, and of bags
    bag_gradients: list[Values] = []  # (G, D) each, of the sums
    then: list[Ask] = []


class Announced(Answer):
    pass


class Announce(Request[Announced]):
    """Names records that a trainer will look up in a later step, and that are perhaps not in the slot's memory.

    Those on a disk begin to be read, and stay in memory; those that are missing begin to be repaired. A hint: sent
    once, to slots that want it (`Acknowledged.wants_hints`). If it is lost, comes late or twice, or is wrong, that
    costs time.
    """

    step: Count  # whose lookup it is
    positions: list[Positions]  # (N,) int64 each, in any order, with repetitions


class WhenAcknowledged(Request[Acknowledged]):
    """Asks to be answered once a step is acknowledged, as its push would be. Who asks sends the push to each
    incarnation of the slot; but in the experiment minus2PC, where a new one is asked for the last step that it will not
    be sent again."""

    step: Count


class Stored(Answer):
    step: Count
    incarnations: list[Count]  # of every slot, as the holder knows them: what an earlier one stored may be gone


class Snapshot(Request[Stored]):
    """Carries one trainer's part of the dense model after a step."""

    step: Count
    trainer: Count
    payload: Payload  # (bytes,) uint8
    header: list[int]  # steps of training that are done; then what the payload is, for who reads it (`dense.Header`)


class Load(Request[Acknowledged]):
    """Carries a trainer's part of a step that overwrites records, or some bytes of each; answered as a push is.

    Like a push it goes to every slot, also to those of which it changes nothing. Initial values (`alone`) are those
    of trainer 0, and due when they are here; others, when every other trainer has sent its own, or `NoUpdate`. What
    several trainers write becomes what the last of them, in trainer order, has written.
    """

    step: Count
    trainer: Count  # `alone`: 0
    table_group: Count
    positions: Positions  # (U,) int64, ascending, unique
    first_byte: Count  # of a record, that is written
    records: RecordBytes | None  # (U, b) uint8, so many bytes of each; None: all, as the servers initialise them
    resumable: Count  # as in `Push`; `alone`: the word of all trainers, as nobody else loads
    alone: bool


class NoUpdate(Request[Acknowledged]):
    """Says that a trainer changes nothing in a step in which others load. Answered as a push is."""

    step: Count
    trainer: Count
    resumable: Count  # as in `Push`


class Awaited(Answer):
    step: Count  # the next one to be applied
    trainers: list[Count]  # whose part of it is not here


class WhoIsAwaited(Request[Awaited]):
    """Asks for which trainers a slot waits. A trainer asks that has waited for long: who evaluates takes no part."""


Part = Push | Load | NoUpdate  # of a step: what one trainer sends of it


class Records(Answer):
    records: RecordBytes  # (U, B) uint8


class Export(Request[Records | Forgotten]):
    """Asks for whole records as of the end of a step, for state_dict and digests."""

    table_group: Count
    step: Count
    positions: Positions  # (U,) int64
    parity: bool = False


# slot -> slot: protection -------------------------------------------------------------------------


class Folded(Answer):
    step: Count  # cumulative: everything of the source up to here is folded


class Fold(Request[Folded]):
    """Carries what one step changed in the records of `source`, to be folded into the parities of the addressed
    slot."""

    source: Count
    source_incarnation: Count
    step: Count
    floor: Count  # the source's log goes back to here; the holder may forget older steps
    positions: list[Positions]  # (U,) int64 each: positions at the source, ascending
    deltas: list[RecordBytes]  # (U, B) uint8 each: old XOR new


class Attached(Answer):
    folded: Count  # the last step of the source that the holder has folded


class Attach(Request[Attached]):
    """Has a source meet a holder's new incarnation (or the source is new itself)."""

    source: Count
    source_incarnation: Count
    base: Count  # a holder that knows nothing of the source starts here
    acknowledged: Count  # the holder has caught up once it has folded this


class Adopted(Answer):
    folded: Count | None  # None: knows nothing of the lost slot
    caught_up: bool  # has everything the lost slot ever acknowledged


class Adopt(Request[Adopted]):
    """Asks a holder what it has folded of a lost slot, for its new host, and fences the old incarnation."""

    lost: Count
    lost_incarnation: Count  # the new one
    frozen: bool  # whether the new host waits for the step to go back to; a holder that does not likewise refuses


class CutLog(Answer):
    steps: list[Count]
    positions: list[list[Positions]]  # per step, per table group: (U,) int64, positions at the lost slot
    deltas: list[list[RecordBytes]]  # per step, per table group: (U, B) uint8
    floor: Count  # the log holds every step after this one, up to the cut
    caught_up: bool  # false: this holder does not know all of it


class Cut(Request[CutLog]):
    """Tells holders the cut of a lost slot: they undo what they folded after it, and hand over their log of its earlier
    steps."""

    lost: Count
    lost_incarnation: Count
    frozen: bool  # as in `Adopt`
    cut: Count


# slot -> slot: recovery ---------------------------------------------------------------------------


class VersionsAre(Answer):
    folded: dict[Count, Count]  # source -> step


class Versions(Request[VersionsAre]):
    """Asks which step of each source the parities of the addressed slot stand for."""


class Damaged(Answer):
    """Says that some of the records that were asked for are being repaired themselves: they are not what they should
    be, or not rebuilt yet."""

    places: Positions  # (M,) int64, ascending: which of those asked for


class Fetch(Request[Records | Damaged]):
    """Asks for records of a stripe's member as of given steps, to decode another member from."""

    table_group: Count
    parity: bool
    positions: Positions  # (U,) int64
    as_of: dict[Count, Count]  # source -> step; for data: the slot's own step
    awaited: bool  # a step waits for them


class Seals(Answer):
    seals: Words  # (U,)


class FetchSeals(Request[Seals]):
    """Asks for the seals of some data records as of a step, to compare those of parities with."""

    table_group: Count
    positions: Positions  # (U,) int64
    step: Count


class Snapshots(Answer):
    steps: list[Count] = field(default_factory=list)
    trainers: list[Count] = field(default_factory=list)
    headers: list[list[int]] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)  # (bytes,) uint8 each; the first and the last may be a piece
    more: list[Count] = field(default_factory=list)  # step, trainer, byte that the next answer begins with; []: no more


class FetchSnapshots(Request[Snapshots]):
    """Asks for dense snapshots that a slot holds, for the new host of another one, or for a trainer; in pieces
    (`pieces.py`)."""

    of: Count  # a step, or -1 for all; of a step, a holder that asks gets what there is, a trainer all parts
    holder: Count = -1  # which slot asks, and in which life; -1: a trainer
    holder_incarnation: Count = 0
    begin: list[Count] = field(default_factory=list)  # `more` of the answer before; [] at first


# slot -> where it moves to ------------------------------------------------------------------------


class Changed(Answer):
    data: list[Positions]  # (U,) int64 each, ascending: records
    parities: list[Positions]  # (U,) int64 each, ascending


class FetchChanged(Request[Changed]):
    """Asks which records and parities have changed since the turn before. Turn 0: somebody begins to copy the slot."""

    epoch: Count  # of the placement: in another one, nobody copies
    turn: Count  # the same once more gets the same answer


class Copy(Request[Records | Damaged]):
    """Asks for some records (or parities) as they are now: to be had again if they change."""

    epoch: Count  # as in `FetchChanged`
    table_group: Count
    parity: bool
    positions: Positions  # (U,) int64


class Handed(Answer):
    """Carries all that a slot is, but for the records that were copied already, and the dense model."""

    applied: Count
    acknowledged: Count
    load_steps: Annotated[int, Meta(ge=-MOST, le=MOST)] | None  # of the steps up to `applied`; below 0 after a restore
    incarnations: list[Count]  # of every slot
    folded: dict[Count, Count]  # source -> step; likewise
    catch_up: dict[Count, Count]
    attached: dict[Count, Count]  # source -> incarnation
    resumable: dict[Count, Count]  # trainer -> step
    newest: Count | None  # the step that training goes on after, as long as no later dense snapshot came
    logs: list[Count]  # whose: the slot's own first, then those of its sources
    floors: list[Count]  # of each log: the step that it begins after
    steps: list[Count]  # of each log: how many it holds
    positions: list[list[Positions]]  # of each step of each log, of each table group (and run): (U,) int64
    deltas: list[list[RecordBytes]]  # likewise: (U, B) uint8
    data: list[Positions]  # of each table group: (U,) int64, records that have changed since the last turn
    data_records: list[RecordBytes]  # (U, B) uint8
    parities: list[Positions]  # likewise
    parity_records: list[RecordBytes]


class HandOver(Request[Handed]):
    """Has a slot stop, which goes on where it was copied to. It goes on itself if a placement leaves it there."""

    epoch: Count  # as in `FetchChanged`


# placement ----------------------------------------------------------------------------------------
