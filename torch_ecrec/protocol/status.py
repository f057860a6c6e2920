"""What a coordinator says of its cluster when it is asked, and what members report for that: every figure, declared.

    asked      {"type": "status"}, on the control channel; who watches asks the same on its connection
    answer     `Status`: an object of JSON, which `torch-ecrec status --json` prints as it is

    json_of(status)                 # {"type": "status", "version": "0.9", ..., "slots": [{"slot": 0, ...}], ...}
    of_message(message).slots[0].healthy

A figure that is added is a field here, set by who computes it: `coordinator/status.py` of the cluster,
`server/reports.py` of a slot, `processes/member.py` of a process. Whoever reads it reads an attribute.

Terms. *Steps* are of training, not of the protocol: 0 before the first. *Seconds* are of the coordinator's clock, since
something happened, unless the name ends in `time_s`. A *report* is what a member has said of itself with its last
heartbeat, so it is as old as that.

Invariants.
- What a member reports is strict, as all that it says is: a figure that is not declared makes its message none.
- A status is read strictly, too, but for what is declared nowhere here: a newer coordinator may say more, also within
  what its members report.
- This module loads neither torch nor NumPy: `torch-ecrec status` answers at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, inspect
from msgspec.structs import replace

import torch_ecrec
from torch_ecrec.protocol.bounds import (
    FIGURES_MOST,
    MEMBERS_MOST,
    SHOWN_MOST,
    SLOTS_MOST,
    Count,
    Name,
    PoolingName,
    Ranks,
    Role,
    Text,
    TransportName,
    Version,
    WireName,
)
from torch_ecrec.spec.job import CodeSpec

UNREADABLE = "the checkpoint to begin with cannot be read"  # so begins why all has stopped before it began
Seconds = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

# what members report ----------------------------------------------------------------------------------


class WaitedFor(Struct, frozen=True, forbid_unknown_fields=True):
    """For whom a process has waited since it said so last; see `protocol/waits.py`.

    Attributes:
        over_s: since then.
        lookups: that a trainer made, of several servers; steps of which a server sent folds to several.
        usual_s: summed over them, until most servers had answered.
        late_s: of each server, for how long its answer was out and those of most others were there.
        held_s: for how long a trainer could not go on, since earlier steps were not acknowledged.
    """

    over_s: Seconds
    lookups: Count
    usual_s: Seconds
    late_s: Annotated[dict[Name, Seconds], Meta(max_length=MEMBERS_MOST)]
    held_s: Seconds = 0.0


class Connections(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts a member's connections to others by their kind, and the bytes that packing saves.

    Attributes:
        memory, tcp, rpc: connections in shared memory, over TCP, and those of torch RPC.
        bytes_packed: of tensors that were packed, on the connections that are there, before that.
        bytes_saved: of these, by packing.
    """

    memory: Version = 0
    tcp: Version = 0
    rpc: Version = 0
    bytes_packed: Version = 0
    bytes_saved: Version = 0


class SlotReport(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reports the state of one slot, as its host sees it.

    Attributes:
        slot, incarnation: of which life of which slot.
        ready: it serves.
        step: that its records are of.
        acknowledged: the last step that survives r losses, as trainers were told.
        watermark: nobody goes back to before this step.
        rebuilt: the share of its records and parities that are there, 0 to 1.
        record_bytes: of records, with optimizer state. `parity_bytes`: of parities.
        log_bytes: of its own delta log and of those that it folded for others.
        snapshot_bytes: of dense snapshots. `checkpoint_bytes`: kept for checkpoints that are under way.
        saver_bytes: of memory of the saver that picks rows for prioritised saves.
        saver_pick_s: seconds that its longest pick took.
        scrubbed_bytes: looked at for damage, since it began. `scrub_rounds`: so often at everything.
        damaged, mended: records and parities that were found damaged, and those that were repaired.
        wrong_stripes: parities that were not the code of their stripes, as the scrubber saw; counted in `damaged`, too.
        lost_steps: acknowledged steps whose changes this life of the slot lacks: in an experiment only.
        tier: how records come from the disk (io_uring, threads); "": there is no tier, and the following are 0.
        tier_memory_bytes: that records and parities take of memory, with what says where they are.
        tier_file_bytes: of the files that have the others.
        tier_hits: records that steps and lookups asked for and that were in memory. `tier_misses`: that were read.
        tier_reads: of the disk, each of one or more records. `tier_failed_reads`: of these.
        tier_written_bytes: to the disk.
        tier_over_bytes: that all slots of its server together take beyond its `--memory`, since it hosts a lost one.
    """

    slot: Annotated[int, Meta(ge=0, lt=SLOTS_MOST)]
    incarnation: Version
    ready: bool
    step: Count
    acknowledged: Count
    watermark: Count
    rebuilt: Share
    record_bytes: Version
    parity_bytes: Version
    log_bytes: Version
    snapshot_bytes: Version
    checkpoint_bytes: Version
    saver_bytes: Version
    saver_pick_s: Seconds
    scrubbed_bytes: Version
    scrub_rounds: Version
    damaged: Version
    mended: Version
    wrong_stripes: Version = 0
    lost_steps: Version = 0
    tier: Text = ""
    tier_memory_bytes: Version = 0
    tier_file_bytes: Version = 0
    tier_hits: Version = 0
    tier_misses: Version = 0
    tier_reads: Version = 0
    tier_failed_reads: Version = 0
    tier_written_bytes: Version = 0
    tier_over_bytes: Version = 0


class ProcessReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Reports how much memory a member's process takes of its host.

    Attributes:
        host: the host's name.
        resident_bytes: of memory, shared memory included.
        limit_bytes: of memory, of the control group with the least room that the process is in, or of its host; 0: not
            known.
        used_bytes: of that limit, by all that it holds for.
    """

    host: Text
    resident_bytes: Version
    limit_bytes: Version
    used_bytes: Version


class Trained(Struct, frozen=True, forbid_unknown_fields=True):
    """How far a trainer is: `step`, of training, that it has done, and `samples` of its own since it began."""

    step: Count
    samples: Version


class Report(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A member's figures. None: it does not say, and what it said before holds; in JSON the key is absent then.

    Attributes:
        slots: of a server, those that it hosts.
        bytes_sent: of tensors, since the process began, by what they were for: "lookup", "push", "fold", "snapshot",
            "rebuild", "scrubbing", "other".
        connections: those with other members.
        refused_messages: of the data plane, with connections that were not let in.
        waits: for whom it has waited, if for somebody.
        awaits: of a trainer, the ranks of those without whom it does not go on.
        wire: of a trainer, how its rows and gradients travel.
        pooling: of a trainer, for which tables it has slots make sums of long bags.
        process: what it takes of its host.
        trained: of a trainer, how far it is.
    """

    slots: Annotated[list[SlotReport], Meta(max_length=SLOTS_MOST)] | None = None
    bytes_sent: Annotated[dict[Text, Version], Meta(max_length=FIGURES_MOST)] | None = None
    connections: Connections | None = None
    refused_messages: Version | None = None
    waits: WaitedFor | None = None
    awaits: Ranks | None = None
    wire: WireName | None = None
    pooling: PoolingName | None = None
    process: ProcessReport | None = None
    trained: Trained | None = None

    def followed_by(self, later: Report) -> Report:
        """Returns this report with the fields of a later one; a field that the later one lacks stays."""
        said = {name: getattr(later, name) for name in later.__struct_fields__}
        return replace(self, **{name: value for name, value in said.items() if value is not None})


# what the coordinator says ----------------------------------------------------------------------------


class Filling(Struct, frozen=True):
    """How a slot gets what it lacks: its records and parities are decoded from others, or read from a checkpoint.

    Attributes:
        share: of them, that is there, 0 to 1.
        bytes_per_s: of records and parities, of late; None: not known yet.
        left_s: seconds until all is there, at that rate; None: not known yet.
    """

    share: float
    bytes_per_s: float | None
    left_s: float | None


class SlotStatus(Struct, frozen=True):
    """Where a slot is.

    Attributes:
        slot: its index.
        server: its host; "": it waits for one.
        incarnation: how many hosts it had before.
        healthy: all its records and parities are there.
        filling: how it gets what it lacks, once its host has said so; None: nothing is said of it, or it lacks nothing.
    """

    slot: int
    server: str
    incarnation: int
    healthy: bool
    filling: Filling | None = None


class TableStatus(Struct, frozen=True, kw_only=True):
    """Where a table lies, and how it is served.

    Attributes:
        rows, dim: its size.
        slots: those that have rows of it, as runs (first, last), ascending. One slot: the table is whole there.
        pooled: where its bags are long, its slots make sums of them in training, so that its rows do not travel. A
            trainer sees for each batch whether they are.
    """

    name: str
    rows: int
    dim: int
    slots: list[tuple[int, int]]
    pooled: bool


class SpreadStatus(Struct, frozen=True):
    """How the tables of the job are spread over the slots: `spec/spread.py`.

    Attributes:
        tables: each of them, in the order of the job.
        load: of each slot, what samples cost it by what the job says of bags, of the mean over the slots.
        records: of each slot, the bytes of its rows' records, of the mean. Padding, which makes up for it, is left out.
    """

    tables: list[TableStatus]
    load: list[float]
    records: list[float]


class Late(Struct, frozen=True):
    """How training waits for a server (`coordinator/slowness.py`).

    Attributes:
        share: of the trainers' time, 0 to 1, in which its answer was out and those of most others were there.
        late_s: seconds by which it answers a lookup later than most others. `usual_s`: that those take.
    """

    share: float
    late_s: float
    usual_s: float


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A process that has joined; who is gone is shown for a while.

    Attributes:
        rank: of a trainer; -1 of a server.
        pid: its process id, on its own host.
        launch: of a trainer, a word of whoever starts all of them, again and again; "": there is none.
        alive: it was not taken for lost. `left`: it is done.
        spare: a server without a slot. `draining`: one that is to be without.
        slow: how training waits for it, where that is long; None: it is not.
        silent_s: seconds since it was heard of.
        report: its figures.
        address: of its host, as it has said; "": it did not.
        domain: of a server, what it is lost together with, the widest first; "": it did not say.
        gone_s: seconds since it was lost, or left; None: it is there.
        why_gone: why it was taken for lost; "": it was not.
        version: of the package that it runs.
    """

    name: str
    role: Role
    rank: int
    pid: int
    launch: str = ""
    alive: bool
    left: bool
    spare: bool
    draining: bool
    slow: Late | None = None
    silent_s: float
    report: Report
    address: str = ""
    domain: str = ""
    gone_s: float | None = None
    why_gone: str = ""
    version: str = ""

    @property
    def host(self) -> str:
        """The name of its host, else what it is lost together with, else its address; "": it did not say."""
        process = self.report.process
        return process.host if process is not None else self.domain.rpartition("/")[2] or self.address

    @property
    def present(self) -> bool:
        """It is there: neither lost nor done."""
        return self.alive and not self.left


class SavesStatus(Struct, frozen=True):
    """Prioritised saves: some rows of every slot, on the last checkpoint.

    Attributes:
        saver: the rule that picks the rows. `portion`: of each slot's rows, that one save has, 0 to 1.
        saves: how many count, since that checkpoint. `last_step`: of the newest, or of the checkpoint.
        failing: why the last one came to nothing; "": it did not.
    """

    saver: str
    portion: float
    saves: int
    last_step: int
    failing: str


class CheckpointsStatus(Struct, frozen=True):
    """The checkpoints that a cluster writes.

    Attributes:
        url: where they are kept.
        last: the name of the last that counts; "": none yet in this run. `last_step`: that it is of.
        last_age_s: seconds since it counted; None: there is none.
        running: the name of one that is being written; "": none is. `written`: by so many slots, as to their parts.
        failing: why the last one came to nothing; "": it did not. `failing_for_s`: seconds since none has succeeded.
        saves: prioritised ones; None: none are wanted.
        asked: somebody has asked for one of a later step than this, which does not count yet; None: nobody has.
    """

    url: str
    last: str
    last_step: int
    last_age_s: float | None
    running: str
    failing: str
    failing_for_s: float | None
    saves: SavesStatus | None
    asked: int | None = None
    written: int = 0


class PartialStatus(Struct, frozen=True, kw_only=True):
    """Tells what partial recoveries have lost for good.

    Attributes:
        exact: False: this run is not what an undisturbed one is.
        times: how many there were.
        lost_samples: CPR's portion of lost samples, 0 to 1, of the run until step `of_steps`.
        lost_steps: of each slot that lost some, steps whose changes it lacks.
        last: the name of the checkpoint of the last recovery. `last_step`: that it is of.
        last_saves: prioritised saves on it, of which rows were newer. `last_slots`: that began anew.
    """

    exact: bool
    times: int
    lost_samples: float
    of_steps: int
    lost_steps: list[int]
    last: str
    last_step: int
    last_saves: int
    last_slots: list[int]


class Inexactness(Struct, frozen=True):
    """Something that makes this run another than an undisturbed one. `step`: training's, until then."""

    step: int
    what: str


class RestoredStatus(Struct, frozen=True):
    """The checkpoint that a cluster began with: its name, and the step that it is of."""

    folder: str
    step: int


class Complaint(Struct, frozen=True):
    """A member cannot reach another one, and has said so for so many seconds."""

    who: str
    whom: str
    for_s: float


class Unresolved(Struct, frozen=True):
    """Members that cannot reach each other, where nobody can be given up for it: training cannot go on until they can.

    Attributes:
        pairs: (who, whom). Nobody: all is resolved. `why`: nobody can be given up.
    """

    pairs: list[tuple[str, str]]
    why: str


class DomainAtRisk(Struct, frozen=True):
    """A failure domain whose servers host more together than the code repairs: which `slots`, and `why`, for people."""

    domain: str
    slots: list[int]
    why: str


class HostStatus(Struct, frozen=True):
    """A host, and what its loss would mean now.

    Attributes:
        domain: the failure domain of its servers, the narrowest.
        servers: those that are there. `slots`: that they host.
        may_be_lost: all that it holds could be repaired; and `why` not, for people.
    """

    domain: str
    servers: list[str]
    slots: list[int]
    may_be_lost: bool
    why: str


class Redundancy(Struct, frozen=True):
    """Tells how many servers and hosts can be lost now without losing data.

    Attributes:
        losses: so many servers, whichever they are, could be lost together now. `of`: when all slots are whole.
        spares: servers without a slot, which would host what is lost.
        elsewhere: without a spare, a survivor hosts it; else it waits for a server to come.
        hosts: every host that has servers.
    """

    losses: int
    of: int
    spares: int
    elsewhere: bool
    hosts: list[HostStatus]


class Rate(Struct, frozen=True):
    """How fast training goes, over the last `over_s` seconds.

    Attributes:
        steps_per_s: of all trainers together.
        samples_per_s: likewise; None: no trainer says how many samples it has.
    """

    over_s: float
    steps_per_s: float
    samples_per_s: float | None


class Recent(Struct, frozen=True):
    """An event (`observe/events.py`), and when it was, in seconds since the epoch; 0: there is no clock."""

    time_s: float
    event: dict[str, Any]


class RegatheringStatus(Struct, frozen=True):
    """This coordinator was started in place of another, and members tell it what they know.

    Attributes:
        back: those who have. `missing`: those who are still awaited, as the others say.
    """

    back: list[str]
    missing: list[str]


class Standstill(Struct, frozen=True):
    """Training stands for members that are silent.

    Attributes:
        why: of each member, by name. `left_s`: seconds until they are given up; None: not before somebody is heard.
    """

    why: dict[str, str]
    left_s: float | None


class Gathering(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="gathering"):
    """The cluster has not begun, since somebody is lacking: (those that are there, those that it takes).

    `trainers`: it takes 0 where none has come that would say how many there will be.
    """

    servers: tuple[Count, Count]
    trainers: tuple[Count, Count]


class ExperimentStatus(Struct, frozen=True):
    """The cluster gives up a part of what the protocol promises, for an experiment (`spec/experiment.py`).

    Attributes:
        mode: one of `experiment.MODES`; "": none. `ranges`: that a rebuild locks; 0: none.
        gives_up: what is not as it is without, for people.
    """

    mode: str
    ranges: int
    gives_up: list[str]


class MoveStatus(Struct, frozen=True):
    """A slot is being copied to that server, and goes on where it is meanwhile."""

    slot: int
    server: str


class Refusal(Struct, frozen=True):
    """A message, or a process that wanted to join, was refused: `whose`, `why`, and how many seconds `ago_s`."""

    whose: str
    why: str
    ago_s: float


class Status(Struct, frozen=True, kw_only=True, tag_field="type", tag="status"):
    """All that a coordinator says of its cluster.

    Attributes:
        version: of the package. `run`: the identity of the cluster.
        code, transport: of the cluster.
        roster: its version. `epoch`: of the placement; 0: nothing is placed yet. `era`: of the trainers.
        going_back: servers go back, or say how far they can.
        resume_step: the step that the era began after; None: that is being found out.
        step: the last of training that slots have applied, or that a trainer has reported.
        finished: the job has ended, as all its trainers were done.
        fatal: why it has ended for everybody; None: it has not.
        checkpoints: that are written; None: none are wanted.
        partial: what partial recoveries have lost; None: nothing.
        inexact: all that makes this run another than an undisturbed one.
        restored: the checkpoint that it began with; None: with none.
        unreachable: who cannot reach whom. `unresolved`: those for whom training cannot go on.
        at_risk: failure domains that must not be lost.
        stands_still: for whom training waits; None: for nobody.
        gathering: who is lacking; None: the cluster has begun, or all are there.
        tables: of the job; 0: no trainer has come yet that would say.
        spread: where these tables lie; None: likewise.
        slots: by index; none: they are not placed yet.
        move: that is under way; None: none is.
        members: who has joined.
        looks: a checkpoint is looked for, and whoever joins waits.
        cannot_begin: why there is nothing to begin with, so that whoever joins is refused; "": there is, or may be.
        store_trouble: why it is not known yet what to begin with; "": it is, or nothing is in the way.
        refused_messages: on the control channel, since the coordinator began. `refusal`: the last; None: none was.
        experiment: that all members take part in; None: none, and all is as it is promised.
        wanted_trainers: so many trainers has the job; 0: none has come that would say.
        rate: how fast training goes; None: not known yet.
        still_s: seconds since a step was last done, or since this coordinator began; None: it has just begun.
        absent_s: seconds since there was a trainer less, or since this coordinator began without one; None: not yet.
        redundancy: what can be lost now; None: nothing is placed, or nothing is protected.
        regathering: members of the coordinator before are awaited; None: not now.
        recent: the last events that a person wants to know, since this coordinator began, the newest at the end.
        time_s: when this was said, by the coordinator's clock, in seconds since the epoch; 0: it has none.
    """

    version: str
    run: str
    code: CodeSpec
    transport: TransportName
    roster: int
    epoch: int
    era: int
    going_back: bool
    resume_step: int | None
    step: int
    finished: bool
    fatal: str | None
    checkpoints: CheckpointsStatus | None
    partial: PartialStatus | None
    inexact: list[Inexactness]
    restored: RestoredStatus | None
    unreachable: list[Complaint]
    at_risk: list[DomainAtRisk]
    stands_still: Standstill | None
    unresolved: Unresolved
    gathering: Gathering | None
    tables: int
    slots: list[SlotStatus]
    move: MoveStatus | None
    members: list[MemberStatus]
    spread: SpreadStatus | None = None
    looks: bool = False
    cannot_begin: str = ""
    store_trouble: str = ""
    refused_messages: int = 0
    refusal: Refusal | None = None
    experiment: ExperimentStatus | None = None
    wanted_trainers: int = 0
    rate: Rate | None = None
    still_s: float | None = None
    absent_s: float | None = None
    redundancy: Redundancy | None = None
    regathering: RegatheringStatus | None = None
    recent: list[Recent] = []
    time_s: float = 0.0

    @property
    def healthy(self) -> bool:
        """Slots are placed, and all of them have all that is theirs."""
        return bool(self.slots) and all(slot.healthy for slot in self.slots)

    @property
    def servers(self) -> list[MemberStatus]:
        """The servers that are there."""
        return [one for one in self.members if one.role == "server" and one.present]

    @property
    def trainers(self) -> list[MemberStatus]:
        """The trainers that are there."""
        return [one for one in self.members if one.role == "trainer" and one.present]

    def member(self, name: str) -> MemberStatus:
        """Returns the member of that name. Raises KeyError: there is none."""
        found = [one for one in self.members if one.name == name]
        if not found:
            raise KeyError(name)
        return found[0]

    def slot_reports(self) -> dict[int, SlotReport]:
        """Returns the report of each slot by its present host, where there is one; it may be of an earlier
        incarnation."""
        host = {place.slot: place.server for place in self.slots}
        return {
            report.slot: report
            for member in self.members
            for report in member.report.slots or ()
            if host.get(report.slot) == member.name
        }


def is_meant(what: str, name: str, domain: str) -> bool:
    """Returns whether `torch-ecrec drain WHAT` is about a server: by its name, or by a failure domain that it is in."""
    return what == name or (bool(domain) and f"{domain}/".startswith(f"{what}/"))


def json_of(status: Status) -> dict[str, Any]:
    """Returns a status as an object of JSON: the inverse of `of_message`."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    return found


def of_message(message: Mapping[str, Any]) -> Status:
    """Returns the status in a coordinator's answer.

    Raises:
        ValueError: it is none; the text says which field, what was wanted and what came, and if it came from another
            version of this package.
    """
    try:
        return msgspec.convert(_declared(message, _type_of_status()), Status)
    except (msgspec.ValidationError, ValueError) as error:
        here = torch_ecrec.__version__
        there = str(message.get("version", here))[:SHOWN_MOST]
        other = f", of torch-ecrec {there}, here {here}" if there != here else ""
        raise ValueError(f"no status{other}: {str(error)[:SHOWN_MOST]}") from None


@functools.cache
def _type_of_status() -> inspect.Type:
    return inspect.type_info(Status)


def _declared(value: Any, kind: inspect.Type) -> Any:
    """Returns a value without fields that are not declared, however deep: what members report is strict by itself."""
    if isinstance(kind, inspect.UnionType):
        inner = [one for one in kind.types if isinstance(one, (inspect.StructType, inspect.ListType, inspect.DictType))]
        return _declared(value, inner[0]) if len(inner) == 1 else value
    if isinstance(kind, inspect.StructType) and isinstance(value, Mapping):
        known: dict[Any, Any] = {one.encode_name: one.type for one in kind.fields}
        tag = {kind.tag_field: value[kind.tag_field]} if kind.tag_field in value else {}
        return tag | {name: _declared(part, known[name]) for name, part in value.items() if name in known}
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        return [_declared(one, kind.item_type) for one in value]
    if isinstance(kind, inspect.DictType) and isinstance(value, Mapping):
        return {name: _declared(one, kind.value_type) for name, one in value.items()}
    return value
