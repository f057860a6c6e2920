"""What is said on the control channel, declared: every message, every field, its type and its range.

A line is a JSON object whose "type" names its struct (`encode_line` and `Lines` in control.py make and cut lines).
Nothing of a message is looked at before it was converted here, as a whole and strictly: a field that is missing, too
many, of another type or out of its range makes all of it a `BadMessage`, and nothing changes.

    from_member({"type": "ready", "slot": 1, "incarnation": 2})     # Ready(slot=1, incarnation=2)
    from_member({"type": "ready", "slot": "1", "incarnation": 2})   # BadMessage: Expected `int`, got `str` ...

What needs the state of the coordinator (a slot that exists) is `Coordinator`'s to check.

Invariants.
- Every string, list and table has a most, so that a member's word takes a bounded place wherever it is kept.
- A version (of the roster, epoch, era, incarnation, term) that a member says is at most 2**53: there is always a next
  one, which any reader of JSON has without rounding.
- A member whose build may not be here (`build.py`) is told so, whatever else its message looks like.
"""

from __future__ import annotations

import functools
import ipaddress
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from torch_ecrec.protocol.bounds import (
    COUNT_MOST,
    FIGURES_MOST,
    MEMBERS_MOST,
    MESSAGES_MOST,
    PLACES_MOST,
    SHOWN_MOST,
    SLOTS_MOST,
    TABLES_MOST,
    TEXT_MOST,
    Address,
    Addresses,
    Count,
    Endpoint,
    Endpoints,
    Folder,
    FolderOrNone,
    Host,
    Inexact,
    Name,
    Names,
    Portion,
    Rank,
    Ranks,
    Reason,
    Role,
    Run,
    Scalar,
    SessionId,
    Snapshots,
    Text,
    TransportName,
    Url,
    Version,
)
from torch_ecrec.protocol.build import Build, digests_of_words, own_build, refusal
from torch_ecrec.protocol.recoveries import PartialRestore as PartialRestore
from torch_ecrec.protocol.recoveries import PartialRestores
from torch_ecrec.protocol.recoveries import Restored as Restored
from torch_ecrec.protocol.recoveries import Saves as Saves
from torch_ecrec.protocol.status import Gathering as Gathering
from torch_ecrec.protocol.status import Report
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import CheckpointSaver


class BadMessage(ValueError):
    """Raised for what is no message of this protocol; the text says which field, what was wanted and what came."""


class OtherBuild(BadMessage):
    """The other process runs another build: it can never be a member of this cluster."""


class Said(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base class of all messages of the control channel."""


NO_HOST = ""  # of a slot that waits for one


class SlotPlace(Struct, frozen=True, array_like=True):
    """Says where a slot is hosted: on a server, or `NO_HOST`. `healthy`: all its records are there; otherwise a rebuild
    is under way."""

    server: Host
    incarnation: Version
    healthy: bool


class Placement(Struct, frozen=True, forbid_unknown_fields=True):
    """Maps slots to servers, as of an epoch. Newer epochs replace older ones.

    Attributes:
        restoring: every slot that gets a host begins with its records of the checkpoint that the cluster begins with;
            once all have them, and all parities, there is a placement without, and training begins.
    """

    epoch: Version
    slots: Annotated[tuple[SlotPlace, ...], Meta(min_length=1, max_length=SLOTS_MOST)]
    restoring: bool = False


class WantedCode(Struct, frozen=True, forbid_unknown_fields=True):
    """Names the code parameters that a process insists on."""

    k: Count | None = None
    r: Count | None = None
    slots: Count | None = None
    protection: Literal["parity", "none"] | None = None


# from processes that are no members yet, and from tools -----------------------------------------------


class ForLeader(Said, frozen=True, kw_only=True):
    """Base of messages for one leader: a coordinator that has begun to lead later than that one ignores them.

    Attributes:
        led: since which revision of etcd the coordinator led that this is meant for; 0: one that was named.
    """

    led: Version = 0


class Entering(ForLeader, frozen=True, kw_only=True, omit_defaults=True):
    """Base of `join` and `rejoin`: says who is there.

    Attributes:
        messages: of the data plane, as its build declares them: `Build.messages`; and, where it takes part in an
            experiment, the settings that say in which.
        session_id: a random word, the same for as long as this membership lasts, on however many connections.
        address: (host, port) where the process listens for as long as it lives, and closes what it accepts; None: it
            does not, and the end of its connection counts as its own.
        domain: of a server, what it is lost together with (`coordinator/domains.py`); "": it does not say.
        launch: of a trainer, a word of whoever starts all of them, again and again; "": there is none.
        relaunched: of a trainer, that launch has started its trainers before: this one takes the place of another.
        again: of a trainer, a job that has ended is to be trained on.
        draining: of a server, that it was told `Drains`: whichever coordinator it comes to, no slot is to be there.
    """

    version: Text
    messages: Annotated[dict[Text, Text], Meta(min_length=1, max_length=MESSAGES_MOST)]
    role: Role
    pid: Count
    session_id: SessionId
    address: Address | None = None
    domain: Text = ""
    launch: Text = ""
    relaunched: bool = False
    again: bool = False
    draining: bool = False
    rank: Rank = -1

    def __post_init__(self) -> None:
        if self.address is not None:
            ipaddress.ip_address(self.address[0])  # nothing is looked up by name: that could block
        require((self.rank >= 0) == (self.role == "trainer"), f"a {self.role} of rank {self.rank}")
        require(self.role == "server" or not self.draining, f"a {self.role} that is drained")

    def check_job(self, job: JobSpec | None) -> None:
        """Raises ValueError: who enters cannot be of this job."""
        require(self.role == "server" or job is not None, "not a job: a trainer without one")
        if job is not None:
            require(len(job.tables) <= TABLES_MOST, f"a job of {len(job.tables)} tables")
            require(job.trainers <= MEMBERS_MOST, f"a job of {job.trainers} trainers")
            require(max(table.rows * table.dim for table in job.tables) <= COUNT_MOST, "a table that is too large")
            require(self.rank < job.trainers, f"trainer rank must be below {job.trainers}, got {self.rank}")


class Join(Entering, frozen=True, kw_only=True, tag="join"):
    """Asks to make this process a member. `code`: what it insists on; `job`: of a trainer, what it trains."""

    code: WantedCode = WantedCode()
    job: JobSpec | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_job(self.job)


class Known(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tells a coordinator that was started again what a member knows of the run.

    Attributes:
        job: None: it has not heard of one.
        placement: the newest that it was told; None: none.
        era: the newest that it was told. `frozen`: of a server, it has stopped, and was not told where that era begins.
        resume_step: the protocol's, that the era began after. `done`: steps of training until then. `floor`: see `Era`.
        load_end: the protocol's step that training begins after; None: initial values are not loaded.
        left: trainers that are done, as it was told (`Left`).
        partial_restores: all slots that began anew, in this run, as it was told.
        saves: prioritised ones that count, as it was told.
        kept: (slot, incarnation, whether dense snapshots are there) of the slots here that have all their records.
        whole: (slot, incarnation) of the slots here that have everything.
        incarnations: of a server, the latest life of each slot that somebody here has heard of; nothing: of none.
    """

    job: JobSpec | None
    placement: Placement | None
    era: Count
    frozen: bool
    resume_step: Count
    done: Count
    floor: Count = 0
    load_end: Count | None
    left: Ranks = []
    partial_restores: PartialRestores = []
    saves: Saves = Saves()
    kept: Annotated[list[tuple[Count, Count, bool]], Meta(max_length=SLOTS_MOST)] = []
    whole: Annotated[list[tuple[Count, Count]], Meta(max_length=SLOTS_MOST)] = []
    incarnations: Annotated[list[Count], Meta(max_length=SLOTS_MOST)] = []

    def __post_init__(self) -> None:
        if self.placement is not None:
            require(self.job is not None, "a placement without a job")
            versions = [self.placement.epoch, *(place.incarnation for place in self.placement.slots)]
            require(max(versions) <= COUNT_MOST, f"version {max(versions)} of a placement")


class Rejoin(Entering, frozen=True, kw_only=True, tag="rejoin"):
    """Tells what a member knows, to a coordinator that it has not spoken to yet, or that it had lost for a moment.

    Attributes:
        name, code, term, run: its own, and of its cluster, as it was told.
        endpoint: where it takes calls; see `Listens`.
        roster: the version of the newest roster that it was told; 0: of none.
        world: who is in that roster.
        addresses: where they listen, for as long as they live.
        restored: the checkpoint that the cluster began with. `inexact`: what has made the run so, as it was told.
        known: what its node knows.
    """

    name: Name
    code: CodeSpec
    term: Count
    run: Run
    endpoint: Endpoint
    roster: Count
    world: Names
    addresses: Addresses = {}
    restored: Restored | None = None
    inexact: Inexact = []
    known: Known

    @property
    def times(self) -> int:
        """How often its cluster had gone back to a checkpoint."""
        return 0 if self.restored is None else self.restored.times

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_job(self.known.job)
        slots, known = self.code.slots, self.known
        require(self.name.startswith(self.role), f"a {self.role} that is called {self.name}")
        require(slots <= SLOTS_MOST, f"{slots} slots")
        require(not self.roster or self.name in self.world, f"{self.name} is not in the roster that it was told")
        require(all(slot < slots for slot, _ in known.whole), f"a slot that is not there; there are {slots}")
        require(len(known.incarnations) in (0, slots), f"{len(known.incarnations)} incarnations of {slots} slots")
        for address in self.addresses.values():
            ipaddress.ip_address(address[0])
        if known.placement is not None:
            placed = len(known.placement.slots)
            require(placed == slots, f"{placed} of {slots} slots are placed")


class AskStatus(Said, frozen=True, tag="status"):
    """Asks how the cluster is. The answer is a `Status` (`status.py`)."""


class Watch(Said, frozen=True, tag="watch"):
    """Asks as `status` does, and to be told from now on all that happens."""


class Stop(ForLeader, frozen=True, kw_only=True, tag="stop"):
    """Asks the coordinator to end the job for everybody."""


class Drain(ForLeader, frozen=True, kw_only=True, tag="drain"):
    """Asks that a server, or all of a failure domain, be without slots. `undo`: that it be so no more."""

    what: Text
    undo: bool = False


class Compare(Said, frozen=True, tag="compare"):
    """Asks whether a process of this build may be a member. The answer is a `Status`, or a refusal with what differs.

    `messages`: as of `Entering`.
    """

    version: Text
    messages: Annotated[dict[Text, Text], Meta(min_length=1, max_length=MESSAGES_MOST)]


class AskCheckpoint(ForLeader, frozen=True, kw_only=True, tag="checkpoint"):
    """Asks for a checkpoint to be written now, though none is due. The answer is a `Status`.

    `after`: of a later step of training than this one, so that it may be said again and again; None: than that of the
    last checkpoint, or of one that is being written.
    """

    after: Count | None = None


# from members -----------------------------------------------------------------------------------------


class Beat(Said, frozen=True, tag="beat"):
    """Says that a member is there. `unreachable`: members of other hosts that it cannot reach though it tries; itself,
    where it has no threads or descriptors for connections."""

    report: Report = Report()
    unreachable: Names = []


class Leave(Said, frozen=True, tag="leave"):
    report: Report = Report()


class Listens(Said, frozen=True, tag="listens"):
    """Says that a member can be called from now on. `endpoint`: how, for the transports of the others
    (`Transport.endpoint`)."""

    endpoint: Endpoint


class OfSlot(Said, frozen=True):
    """Base of what the host of a slot says about one incarnation of it."""

    slot: Annotated[int, Meta(ge=0, lt=SLOTS_MOST)]
    incarnation: Count


class Ready(OfSlot, frozen=True, omit_defaults=True, tag="ready"):
    """Says that a slot serves. `at`: of one that begins anew, the steps of training after which it goes on."""

    at: Count | None = None


class Rebuilt(OfSlot, frozen=True, tag="rebuilt"):
    """Says that nothing of a slot is missing. `partial_restores`: how many its host knows of; after a later one, parity
    may be missing."""

    partial_restores: Count = 0


class Unrecoverable(OfSlot, frozen=True, tag="unrecoverable"):
    """Says that nobody has what a slot needs. `reason`: why a checkpoint could not give it, where it was to."""

    reason: Reason = ""


class Damaged(OfSlot, frozen=True, tag="damaged"):
    """Says that something that a slot keeps is not what it was.

    Attributes:
        what: "record", "parity", "mismatch" (a parity that is not the code of its stripe, though all fit their seals),
            "delta log" or "dense snapshot".
        places: (table, row, member of the stripe) of each, `PLACES_MOST` at most; of a parity the stripe's first row.
        count: how many.
        used: so many of them a step may have used.
        step: of training, that the slot stands at; of what a step may have used, the one that it stood at before the
            first that may.
        reason: why they cannot be repaired; "": they are being repaired. Of a log or a snapshot, what follows.
    """

    what: Text
    places: Annotated[list[tuple[Text, Count, Count]], Meta(max_length=PLACES_MOST)]
    count: Count
    used: Count
    step: Count
    reason: Text = ""


class Mended(OfSlot, frozen=True, tag="mended"):
    """Says that so many damaged records or parities were repaired."""

    count: Count


class Reach(OfSlot, frozen=True, tag="reach"):
    """Says which steps a slot can go back to. `done`: steps of training until `applied`; None: it does not know."""

    era: Count
    applied: Count
    floor: Count
    snapshots: Snapshots
    done: Count | None = None


class Durable(OfSlot, frozen=True, tag="durable"):
    era: Count


class OfMove(OfSlot, frozen=True):
    """Base of what is said about a slot that moves, by the server that it moves to. `incarnation`: that begins there.
    Another epoch or era ends a move."""

    epoch: Version
    era: Version


class Level(OfMove, frozen=True, tag="level"):
    """Says that nearly all of a slot was copied: the rest can be had at once."""


class Arrived(OfMove, frozen=True, tag="arrived"):
    """Says that all of a slot was copied, and that it has stopped where it was."""


class Due(OfSlot, frozen=True, tag="due"):
    """Says that a checkpoint is due after `done` steps of training: the dense snapshot of that step is whole, or of the
    next one that has a snapshot."""

    done: Count


class Shown(OfSlot, frozen=True, tag="shown"):
    """Says as of which steps a slot can show itself, from `floor` to `applied`; it keeps them."""

    checkpoint: Count
    applied: Count
    floor: Count
    snapshots: Snapshots


class Written(OfSlot, frozen=True, tag="written"):
    """Says that a slot's part of a checkpoint is durable. `part`: what the manifest says of it."""

    checkpoint: Count
    part: dict[Text, Any]


class Unwritten(OfSlot, frozen=True, tag="unwritten"):
    """Says that a slot's part of a checkpoint was given up."""

    checkpoint: Count
    reason: Reason


class Loaded(Said, frozen=True, tag="loaded"):
    """Says that initial values are there: training begins after step `load_end` of the protocol."""

    load_end: Count


class NotExact(Said, frozen=True, tag="not_exact"):
    """NOT EXACT: what comes from here on is not, or may not be, what an undisturbed run gives. Said again, it counts
    once.

    Attributes:
        step: steps of training that were done then. `what`: has happened.
    """

    step: Count
    what: Text


class Progress(Struct, frozen=True, tag_field="type", tag="progress"):
    """Says how training goes, for who watches.

    `figures`: of users, beside these in the same object of JSON: numbers or short texts, `FIGURES_MOST` at most.
    """

    trainer: Count
    step: Count = 0
    figures: dict[str, Any] = {}


# from the coordinator to members ----------------------------------------------------------------------


class Welcome(Said, frozen=True, tag="welcome"):
    name: Name
    code: CodeSpec
    restarted: bool
    term: Version
    transport: TransportName
    run: Run
    restored: Restored | None = None


class Refused(Said, frozen=True, tag="refused"):
    """Kinds: `refused`, a message counts for nothing; `other_build`, no message of that process will count; else why a
    join is refused.
    """

    kind: Text
    reason: str


class Waits(Said, frozen=True, tag="waits"):
    """Says why a process that wants to join is not let in yet; the reason may last. A welcome or a refusal follows."""

    reason: str


class Roster(Said, frozen=True, tag="roster"):
    """Says who is in the cluster from now on: whoever is in it may call all others.

    Attributes:
        version: newer ones replace older ones.
        endpoints: how each is called, as it has said (`Listens`). The order is the same for everybody.
        addresses: where they listen for as long as they live, for a coordinator that follows.
    """

    version: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    endpoints: Endpoints
    addresses: Addresses = {}


class Job(Said, frozen=True, tag="job"):
    """Tells a member which job is trained.

    Attributes:
        run: the identity of the cluster, which may be another than it was at the welcome: of a coordinator that was
            welcoming as if it were the first, and has found members of one before.
        restored: the checkpoint that the cluster began with; None: it began at its beginning.
    """

    job: JobSpec
    run: Run
    restored: Restored | None = None


class Placed(Said, frozen=True, tag="placement"):
    placement: Placement


class Era(Said, frozen=True, tag="era"):
    """Has all servers stop (no step yet), then go on.

    Attributes:
        step: the protocol's, that they go back to. If `keeps`, nobody goes back: slots that begin anew do so there.
        done: steps of training until then.
        floor: a slot that begins anew is as it begins as of every step from here to `step`.
        partial_restores: of all this run.
    """

    era: Version
    step: Count | None
    load_end: Count | None
    done: Count
    keeps: bool = False
    floor: Count = 0
    partial_restores: PartialRestores = []


class Resume(Said, frozen=True, tag="resume"):
    era: Version
    step: Count
    load_end: Count | None
    done: Count


class PartlyRestored(Said, frozen=True, tag="partly_restored"):
    """Says that some slots begin anew, and trainers go on as they are, in another era: what is not complete is sent to
    these."""

    era: Version
    partial_restores: PartialRestores


class Checkpointing(Said, frozen=True, tag="checkpointing"):
    """Tells servers how to prepare for checkpoints to come.

    Attributes:
        every_steps: of training, after which a checkpoint is due; 0: when the coordinator asks.
        marks: some checkpoints hold only what has changed, so changed records are marked.
        saver: which rows prioritised saves have; "everything": there are none.
        portion: of each slot's rows, that one has. `saves_every`: steps of training, as `every_steps`.
    """

    every_steps: Count = 0
    marks: bool = False
    saver: CheckpointSaver = "everything"
    portion: Portion = 1.0
    saves_every: Count = 0


class Survey(Said, frozen=True, tag="survey"):
    """Asks slots which steps they can show, for a checkpoint that is being prepared."""

    checkpoint: Version


class Capture(Said, frozen=True, tag="capture"):
    """Has every slot write its records as of a step.

    Attributes:
        checkpoint: its number.
        step: of the protocol. `done`: steps of training until then.
        dense_of: the slot that writes the dense model's parts, too.
        base: the checkpoint since which a slot may write only what has changed; "": all.
        url, folder: where.
        encoding: of the parts, as `storage` reads it.
        bytes_per_s: limit of what one process writes; 0: none; None: what the cores of its machine allow for.
        portion: below 1, it is a prioritised save on `base`, of that portion of the rows, which the slot's saver picks.
    """

    checkpoint: Version
    step: Count
    done: Count
    dense_of: Count
    base: FolderOrNone
    url: Url
    folder: Folder
    encoding: dict[Text, Scalar]
    bytes_per_s: Annotated[float, Meta(ge=0)] | None
    portion: Portion = 1.0


class Release(Said, frozen=True, tag="release"):
    """A checkpoint, or a prioritised save, is over. `counts`: its name, or "" if it does not; `rebase`: the next
    checkpoint builds on it; `saves`: those that count now."""

    checkpoint: Version
    counts: FolderOrNone
    rebase: bool
    saves: Saves = Saves()


class Move(OfMove, frozen=True, tag="move"):
    """Has a server copy a slot, of which `incarnation` would begin there. `now`: the slot is to stop where it is."""

    now: bool = False


class Stands(Said, frozen=True, tag="stands"):
    """Says that training stands for members that are silent, and may be back: a trainer has patience with them.

    Attributes:
        names: who they are; nobody: it goes on.
        left_s: for how long at most; None: until the coordinator hears of somebody.
    """

    names: Names
    left_s: Annotated[float, Meta(ge=0)] | None = None


class KnownInexact(Said, frozen=True, tag="known_inexact"):
    """Tells members all that has made this run inexact; they keep it for a coordinator that is started again."""

    known: Inexact


class Rejoined(Said, frozen=True, tag="rejoined"):
    term: Version


class OtherCluster(Said, frozen=True, tag="other_cluster"):
    """Turns away a member of another cluster, which is to go on looking for its own coordinator.

    Attributes:
        run, code: of the coordinator's cluster.
        reason: why it is another.
    """

    run: Run
    code: CodeSpec
    reason: str


class Left(Said, frozen=True, tag="left"):
    """Says which trainers are done: the one that leaves may end now, and all others tell the next coordinator."""

    trainers: Ranks


class Fatal(Said, frozen=True, tag="fatal"):
    """Says that the job has ended, for everybody or only for whom it is said to.

    Attributes:
        kind: "data_loss", "checkpoint" (that it begins with cannot be read) or "stopped"; to one, also "trainers_lost"
            or "fenced".
    """

    kind: Text
    reason: str


class Drains(Said, frozen=True, tag="drains"):
    """Tells a server whether its slots are to move away; it says so wherever it joins or rejoins (`Entering`)."""

    draining: bool


class Die(Said, frozen=True, tag="die"):
    """Has a member end at once, as by SIGKILL: somebody wants to see what happens then."""


OfCheckpoint = Due | Shown | Written | Unwritten
OfMember = (
    Beat
    | Leave
    | Listens
    | Ready
    | Rebuilt
    | Unrecoverable
    | Damaged
    | Mended
    | Reach
    | Durable
    | Level
    | Arrived
    | Loaded
    | NotExact
    | Progress
    | OfCheckpoint
)
TOOLS = (AskStatus, Watch, Stop, Drain, Compare, AskCheckpoint)  # not between members: whoever says one is answered
FromMember = Join | Rejoin | AskStatus | Watch | Stop | Drain | Compare | AskCheckpoint | OfMember
FromCoordinator = (
    Welcome
    | Refused
    | Waits
    | Gathering
    | Roster
    | Job
    | Placed
    | Era
    | Resume
    | PartlyRestored
    | Loaded
    | Checkpointing
    | Survey
    | Capture
    | Release
    | Move
    | Stands
    | KnownInexact
    | Rejoined
    | OtherCluster
    | Left
    | Fatal
    | Drains
    | Die
)


def from_member(message: Mapping[str, Any]) -> FromMember:
    """Returns, as a struct, a message that arrived at the coordinator. Raises BadMessage if it is none of those
    above."""
    if message.get("type") in ("join", "rejoin", "compare"):
        _check_build(message)
    if message.get("type") == "progress":
        return _progress(message)
    word: FromMember = _convert(message, FromMember)
    return word


def _progress(message: Mapping[str, Any]) -> Progress:
    known = {key: value for key, value in message.items() if key in ("type", "trainer", "step")}
    figures = {key: value for key, value in message.items() if key not in known}
    scalars = all(value is None or isinstance(value, (bool, int, float, str)) for value in figures.values())
    if not scalars or len(message) > FIGURES_MOST or len(repr(figures)) > FIGURES_MOST * TEXT_MOST:
        raise BadMessage(f"progress: figures must be at most {FIGURES_MOST} numbers or short texts")
    word: Progress = _convert({**known, "figures": figures}, Progress)
    return word


def _check_build(message: Mapping[str, Any]) -> None:
    """Refuses another build before anything else of its message is looked at, which it may mean otherwise."""
    if reason := refusal(whole_build(), message.get("version"), message.get("messages")):
        raise OtherBuild(reason)


@functools.cache
def whole_build() -> Build:
    """Returns the build of this process, with the words of the control channel."""
    build, kinds = own_build(), {*typing.get_args(FromMember), *typing.get_args(FromCoordinator)}
    words = digests_of_words(sorted(kinds - set(TOOLS), key=lambda kind: str(kind.__name__)))
    return Build(build.version, {**build.messages, **words})


def from_coordinator(message: Mapping[str, Any]) -> FromCoordinator:
    """Returns, as a struct, a message that arrived at a member. Raises BadMessage if it is none of those above."""
    word: FromCoordinator = _convert(message, FromCoordinator)
    return word


def _convert(message: Mapping[str, Any], wanted: Any) -> Any:
    try:
        return msgspec.convert(message, wanted)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        kind = str(message.get("type"))[:40]
        raise BadMessage(f"{kind}: {str(error)[:SHOWN_MOST]}") from None


def json_of(message: Struct) -> dict[str, Any]:
    """Returns a message, or a part of one, as an object of JSON: the inverse of `from_member` and
    `from_coordinator`."""
    found: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message, Progress):
        found |= found.pop("figures")
    return found
