"""A cluster's status as metrics for Prometheus.

    totals = Totals()
    totals.follow(status)                       # whenever there is one
    text_of(metrics_of(status, totals), "")     # "# HELP torch_ecrec_step ..."

Every name begins with `torch_ecrec_` and is in base units: seconds, bytes, ratios of 0 to 1. Labels are bounded by the
cluster: `member`, `role`, `slot`, `state`, and `kind`, of which there are those that are named here.

Terms. A *gauge* is what the status says. A *counter* ends in `_total` and never falls while this process lives. What a
member or a slot reports begins at 0 again with each of its lives, and who is gone leaves the status: `Totals` adds up
what each life has added. Where the coordinator itself was started again, who was there before it has counted for long:
what that one's first report says was counted by the coordinator before, and counts for nothing here. (A counter that
begins at 0 again is what Prometheus expects of a process that was started again.)

A figure that is new in the status is a line of `metrics_of`, and, if it only grows, one of `Totals.follow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import torch_ecrec
from torch_ecrec.observe.verdict import EXIT_CODES, verdict_of
from torch_ecrec.protocol.status import MemberStatus, SlotReport, SlotStatus, Status

PREFIX = "torch_ecrec_"
ROLES = ("server", "trainer")
KINDS = ("lookup", "push", "fold", "snapshot", "rebuild", "scrubbing", "other")  # what tensors are sent for
SLOT_STATES = ("healthy", "rebuilding", "starting", "waiting")
MEMBER_STATES = ("serving", "spare", "draining", "training", "left", "lost")
MEMORY = {  # kinds of a slot's memory: fields of its report
    "records": "record_bytes",
    "parities": "parity_bytes",
    "logs": "log_bytes",
    "snapshots": "snapshot_bytes",
    "checkpoints": "checkpoint_bytes",
    "savers": "saver_bytes",
}
SLOT_COUNTERS = {  # fields of a slot's report that only grow: their counters, and what those say
    "damaged": ("damaged_records", "Records and parities of the slot that were found damaged."),
    "mended": ("mended_records", "Damaged records and parities of the slot that were repaired."),
    "wrong_stripes": ("wrong_stripes", "Parities of the slot that were not the code of their stripes."),
    "scrubbed_bytes": ("scrubbed_bytes", "Bytes of the slot that its scrubber has looked at for damage."),
    "scrub_rounds": ("scrub_rounds", "Times that the scrubber has looked at everything of the slot."),
}
Labels = tuple[str, ...]


class Totals:
    """Counters that never fall, from reports that begin at 0 with each life of a member or slot.

    Args:
        again: this coordinator takes the place of another; see above.
    """

    def __init__(self, again: bool = False) -> None:
        self._again, self._placed = again, False
        self._sums: dict[str, dict[Labels, float]] = {}  # counter -> labels -> value
        self._last: dict[Labels, tuple[int, float]] = {}  # who, and of what -> (life, what it has said last)
        self._of_before: dict[tuple[str, int], bool] = {}  # members: were they there before this coordinator was?
        self._step: int | None = None

    def of(self, counter: str) -> Mapping[Labels, float]:
        """Returns the values of a counter, by labels."""
        return self._sums.get(counter, {})

    def follow(self, status: Status) -> None:
        """Takes in what a status says; they come in the order in which they were said."""
        early = self._again and not self._placed
        for member in status.members:
            before = self._of_before.setdefault((member.name, member.pid), early)
            for kind, sent in _by_kind(member).items():
                self._count("sent_bytes", (member.role, kind), (member.name, kind), member.pid, sent, before)
            if (refused := member.report.refused_messages) is not None:
                who = (member.name, "refused")
                self._count("refused_messages", (member.role,), who, member.pid, refused, before)
        self._count("refused_messages", ("coordinator",), ("", "refused"), 0, status.refused_messages, False)
        for slot, report in current_reports(status).items():
            for field, (counter, _) in SLOT_COUNTERS.items():
                who = f"slot {slot}", field
                self._count(counter, (str(slot),), who, report.incarnation, getattr(report, field), self._again)
        if status.partial is not None:
            self._count("partial_recoveries", (), ("", "partial"), 0, status.partial.times, early)
        self._count_steps(status)
        self._placed = self._placed or bool(status.slots)
        self._forget(status)

    def _count(self, counter: str, labels: Labels, who: Labels, life: int, said: float, before: bool) -> None:
        sums = self._sums.setdefault(counter, {})
        known = self._last.get(who)
        if known is None:
            added = 0.0 if before else said
        else:
            added = said - known[1] if life == known[0] and said >= known[1] else said
        self._last[who] = life, said
        sums[labels] = sums.get(labels, 0.0) + added

    def _count_steps(self, status: Status) -> None:
        """Steps that are trained once more, after all went back, count once more."""
        sums = self._sums.setdefault("steps", {(): 0.0})
        if self._step is None:
            began_late = self._again or status.restored is not None
            if status.step == 0 and began_late:
                return  # nobody has said where training is
            self._step = status.step if began_late else 0
        sums[()] += max(status.step - self._step, 0)
        self._step = status.step

    def _forget(self, status: Status) -> None:
        """Members that a status no longer shows have no later report."""
        there = {(one.name, one.pid) for one in status.members}
        self._of_before = {who: before for who, before in self._of_before.items() if who in there}
        known = {"", *(name for name, _ in there), *(f"slot {place.slot}" for place in status.slots)}
        self._last = {who: last for who, last in self._last.items() if who[0] in known}


class _Families:
    """The metrics that are made, in order."""

    def __init__(self) -> None:
        self.made: list[Metric] = []

    def gauge(self, name: str, says: str, value: float | None) -> None:
        """Adds a gauge of one value; None: there is none now."""
        self.gauges(name, says, (), [] if value is None else [((), value)])

    def gauges(self, name: str, says: str, labels: Sequence[str], rows: Iterable[tuple[Labels, float]]) -> None:
        """Adds a gauge with a value for each row of labels."""
        family = GaugeMetricFamily(PREFIX + name, says, labels=labels)
        for of, value in rows:
            family.add_metric(of, value)
        self.made.append(family)

    def counters(self, name: str, says: str, labels: Sequence[str], values: Mapping[Labels, float]) -> None:
        """Adds a counter; its name gets `_total`."""
        family = CounterMetricFamily(PREFIX + name, says, labels=labels)
        for of, value in values.items():
            family.add_metric(of, value)
        self.made.append(family)


def not_leading() -> list[Metric]:
    """Returns the metrics of a coordinator that stands by for another."""
    families = _Families()
    _about_process(families, leads=False)
    return families.made


def metrics_of(status: Status, totals: Totals | None = None) -> list[Metric]:
    """Returns all metrics of a cluster. Pure.

    Args:
        status: what its coordinator says.
        totals: which has followed it; None: counters are as the reports have them now.
    """
    if totals is None:
        totals = Totals()
        totals.follow(status)
    families = _Families()
    _about_process(families, leads=True)
    _verdict(families, status)
    _training(families, status, totals)
    _slots(families, status, totals)
    _members(families, status, totals)
    _checkpoints(families, status)
    _troubles(families, status, totals)
    return families.made


def text_of(metrics: Sequence[Metric], accept: str) -> tuple[bytes, str]:
    """Returns metrics as text, and its content type: that of Prometheus, or OpenMetrics for who accepts it."""
    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Fixed(metrics))
    return encode(registry), kind


class _Fixed(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def current_reports(status: Status) -> dict[int, SlotReport]:
    """Returns the report of each slot that is of its present life."""
    lives = {place.slot: place.incarnation for place in status.slots}
    return {slot: one for slot, one in status.slot_reports().items() if one.incarnation == lives[slot]}


def slot_state(place: SlotStatus, report: SlotReport | None) -> str:
    """Returns the state of a slot: one of `SLOT_STATES`. `report`: of its present life."""
    if place.healthy:
        return "healthy"
    if not place.server:
        return "waiting"
    return "starting" if report is None or not report.ready else "rebuilding"


def member_state(member: MemberStatus) -> str:
    """Returns the state of a member: one of `MEMBER_STATES`."""
    if member.left:
        return "left"
    if not member.alive:
        return "lost"
    if member.role == "trainer":
        return "training"
    return "draining" if member.draining else "spare" if member.spare else "serving"


def _by_kind(member: MemberStatus) -> Counter[str]:
    """Returns what a member has sent, by those kinds that are known here."""
    found: Counter[str] = Counter()
    for kind, sent in (member.report.bytes_sent or {}).items():
        found[kind if kind in KINDS else "other"] += sent
    return found


def _about_process(families: _Families, leads: bool) -> None:
    version = [((torch_ecrec.__version__,), 1.0)]
    families.gauges(
        "build_info", "The version of torch_ecrec that the coordinator runs; always 1.", ["version"], version
    )
    families.gauge("leading", "Whether this coordinator leads its cluster (1), or stands by for another (0).", leads)


def _verdict(families: _Families, status: Status) -> None:
    verdict = verdict_of(status)
    families.gauge("verdict", "As `torch-ecrec status` begins: 0 OK, 1 WARN, 2 ERROR.", EXIT_CODES[verdict.level])
    found = {(one.code, one.level): 1.0 for one in verdict.findings}
    families.gauges("finding", "What is to be looked at, by its code; always 1.", ["code", "level"], found.items())


def _training(families: _Families, status: Status, totals: Totals) -> None:
    code = status.code
    about = (status.run, str(code.k), str(code.r), code.protection, status.transport)
    families.gauges(
        "cluster_info", "What the cluster is; always 1.", ["run", "k", "r", "protection", "transport"], [(about, 1.0)]
    )
    families.gauge("status_timestamp_seconds", "When the status was taken, since the epoch.", status.time_s)
    families.gauge(
        "step", "The last step of training that a trainer has reported; it falls when all go back.", status.step
    )
    steps = totals.of("steps")
    families.counters("steps", "Steps of training, those that were trained once more included.", (), steps)
    reports = current_reports(status)
    ready = [one for one in reports.values() if one.ready]
    least = min((one.acknowledged for one in ready), default=None)
    families.gauge("acknowledged_step", "The last step that all slots hold so that it survives r losses.", least)
    watermark = min((one.watermark for one in ready), default=None)
    families.gauge("watermark_step", "Nobody goes back to before this step.", watermark)
    families.gauge("placement_epoch", "The version of the placement; 0: nothing is placed yet.", status.epoch)
    families.gauge("trainer_era", "How often trainers were lost, or all went back.", status.era)
    families.gauge("step_age_seconds", "Since a step was last done; absent: it has just begun.", status.still_s)
    samples = None if status.rate is None else status.rate.samples_per_s
    families.gauge("samples_per_second", "Samples that are trained, of late; absent: nobody says.", samples)
    families.gauge(
        "regathering", "Whether members of the coordinator before are awaited.", status.regathering is not None
    )
    safe = status.redundancy
    losses = "Servers that could be lost together now, whichever they are; absent: nothing is protected yet."
    families.gauge("losses_tolerated", losses, None if safe is None else safe.losses)
    families.gauge("hosts", "Hosts that have servers; absent likewise.", None if safe is None else len(safe.hosts))
    families.gauge("tables", "Tables of the job; 0: no trainer has come yet.", status.tables)
    families.gauge("going_back", "Whether servers go back to an earlier step.", status.going_back)
    families.gauge("finished", "Whether the job has ended, as all its trainers were done.", status.finished)


def _slots(families: _Families, status: Status, totals: Totals) -> None:
    reports = current_reports(status)
    states = {place.slot: slot_state(place, reports.get(place.slot)) for place in status.slots}
    number = [((state,), float(list(states.values()).count(state))) for state in SLOT_STATES]
    families.gauges("slots", "Slots by state; waiting: for a server.", ["state"], number)
    places = status.slots
    hosts = [((str(one.slot), one.server), 1.0) for one in places if one.server]
    families.gauges("slot_info", "Which member hosts the slot; always 1.", ["slot", "member"], hosts)
    healthy = [((str(one.slot),), float(one.healthy)) for one in places]
    families.gauges("slot_healthy", "Whether all records and parities of the slot are there.", ["slot"], healthy)
    shares = {one.slot: 1.0 if one.healthy else 0.0 for one in places}
    shares |= {slot: one.rebuilt for slot, one in reports.items() if shares[slot] < 1.0}
    rebuilt = [((str(slot),), share) for slot, share in shares.items()]
    families.gauges(
        "slot_rebuilt_ratio", "The share of the slot's records and parities that is there.", ["slot"], rebuilt
    )
    lives = [((str(one.slot),), float(one.incarnation)) for one in places]
    families.gauges("slot_incarnation", "How many hosts the slot had before.", ["slot"], lives)
    at = [((str(slot),), float(one.step)) for slot, one in reports.items()]
    families.gauges("slot_step", "The step of training that the slot's records are of.", ["slot"], at)
    memory = [
        ((str(slot), kind), float(getattr(one, field)))
        for slot, one in reports.items()
        for kind, field in MEMORY.items()
    ]
    families.gauges("slot_memory_bytes", "Memory of the slot, by what is kept there.", ["slot", "kind"], memory)
    broken = [((str(slot),), float(max(one.damaged - one.mended, 0))) for slot, one in reports.items()]
    families.gauges("slot_unmended_records", "Records and parities of the slot that are damaged now.", ["slot"], broken)
    lost = [((str(slot),), float(one.lost_steps)) for slot, one in reports.items()]
    families.gauges("slot_lost_steps", "Acknowledged steps that the slot lacks: in experiments only.", ["slot"], lost)
    for counter, says in SLOT_COUNTERS.values():
        known = totals.of(counter)
        by_slot: dict[Labels, float] = {(str(one.slot),): known.get((str(one.slot),), 0.0) for one in places}
        families.counters(counter, says, ["slot"], by_slot)
    filling = {str(one.slot): one.filling for one in places if one.filling is not None}
    rates = [((slot,), one.bytes_per_s) for slot, one in filling.items() if one.bytes_per_s is not None]
    says = "Bytes of records and parities that the slot gets back in a second, of late."
    families.gauges("slot_filling_bytes_per_second", says, ["slot"], rates)
    left = [((slot,), one.left_s) for slot, one in filling.items() if one.left_s is not None]
    families.gauges("slot_filling_left_seconds", "Until the slot is whole, at that rate.", ["slot"], left)
    families.gauge("moving_slots", "Slots that are being copied to another server.", status.move is not None)


def _members(families: _Families, status: Status, totals: Totals) -> None:
    present = [one for one in status.members if one.present]
    alive = [((role,), float(sum(one.role == role for one in present))) for role in ROLES]
    families.gauges("members_alive", "Members that are there, neither lost nor done.", ["role"], alive)
    states = [member_state(one) for one in status.members]
    number = [((state,), float(states.count(state))) for state in MEMBER_STATES]
    families.gauges("members", "Members by state; those that are gone are shown for a while.", ["state"], number)
    missing = {role: 0 for role in ROLES}
    if status.wanted_trainers:
        missing["trainer"] = max(status.wanted_trainers - int(alive[1][1]), 0) * (not status.finished)
    if status.gathering is not None:
        for role, (there, of) in zip(ROLES, (status.gathering.servers, status.gathering.trainers), strict=True):
            missing[role] = max(of - there, 0)
    lacking = [((role,), float(count)) for role, count in missing.items()]
    families.gauges("missing_members", "Members that are wanted, and are not there.", ["role"], lacking)
    about = [((one.name, one.role, one.host), 1.0) for one in present]
    families.gauges("member_info", "On which host the member is; always 1.", ["member", "role", "host"], about)
    processes = {one.name: one.report.process for one in present if one.report.process is not None}
    resident = [((name,), float(one.resident_bytes)) for name, one in processes.items()]
    says = "Memory of the member's process, shared memory included."
    families.gauges("member_resident_memory_bytes", says, ["member"], resident)
    used = [((name,), one.used_bytes / one.limit_bytes) for name, one in processes.items() if one.limit_bytes]
    says = "What is used of the memory that the member's process may take, with all that the limit is of."
    families.gauges("member_memory_used_ratio", says, ["member"], used)
    silent = [((one.name, one.role), one.silent_s) for one in present]
    families.gauges("member_silent_seconds", "Since the member was heard of.", ["member", "role"], silent)
    slow = [((one.name,), one.slow.share) for one in present if one.slow is not None]
    families.gauges(
        "member_late_ratio", "The share of time in which training waits for a slow server.", ["member"], slow
    )
    sent: dict[Labels, float] = {
        (role, kind): totals.of("sent_bytes").get((role, kind), 0.0) for role in ROLES for kind in KINDS
    }
    families.counters("sent_bytes", "Bytes of tensors that members have sent, by what for.", ["role", "kind"], sent)
    ways = {"memory": 0, "tcp": 0, "rpc": 0}
    for one in present:
        for way in ways if one.report.connections is not None else ():
            ways[way] += getattr(one.report.connections, way)
    connections = [((way,), float(count)) for way, count in ways.items()]
    families.gauges("connections", "Connections of members, by what carries them.", ["kind"], connections)
    refused: dict[Labels, float] = {
        (who,): totals.of("refused_messages").get((who,), 0.0) for who in ("coordinator", *ROLES)
    }
    families.counters("refused_messages", "Messages that were refused, by who has refused them.", ["role"], refused)


def _checkpoints(families: _Families, status: Status) -> None:
    said = status.checkpoints
    families.gauge("checkpoints_wanted", "Whether the cluster writes checkpoints.", said is not None)
    families.gauge("checkpoint_running", "Whether one is being written.", said is not None and bool(said.running))
    failing = said is not None and (said.failing_for_s is not None or bool(said.failing))
    families.gauge("checkpoint_failing", "Whether the last one came to nothing.", failing)
    failing_s = 0.0 if said is None or said.failing_for_s is None else said.failing_for_s
    families.gauge("checkpoint_failing_seconds", "For so long none has succeeded; 0: none has failed.", failing_s)
    last = said is not None and said.last_age_s is not None
    families.gauge(
        "checkpoint_age_seconds",
        "Since the last checkpoint counted; absent: there is none in this run.",
        said.last_age_s if said is not None and last else None,
    )
    families.gauge(
        "checkpoint_step", "The step of the last checkpoint.", said.last_step if said is not None and last else None
    )
    saves = None if said is None else said.saves
    families.gauge("saves", "Prioritised saves on the last checkpoint.", None if saves is None else saves.saves)
    families.gauge("save_failing", "Whether the last one came to nothing.", saves is not None and bool(saves.failing))


def _troubles(families: _Families, status: Status, totals: Totals) -> None:
    stands, partial = status.stands_still, status.partial
    families.gauge(
        "fatal", "Whether the cluster has stopped for good: data is lost, or it was told to.", bool(status.fatal)
    )
    families.gauge("standstill", "Whether training waits for silent members.", stands is not None)
    left_s = None if stands is None else stands.left_s
    families.gauge("standstill_left_seconds", "Until silent members are given up; absent: nobody is.", left_s)
    families.gauge(
        "standstill_members", "Members for whom training waits.", len(stands.why) if stands is not None else 0
    )
    families.gauge("cut_pairs", "Pairs of members of whom one cannot reach the other.", len(status.unreachable))
    longest_s = max((one.for_s for one in status.unreachable), default=0.0)
    families.gauge("cut_seconds", "For so long the longest of these.", longest_s)
    unresolved = len(status.unresolved.pairs)
    families.gauge("unresolved_pairs", "Cut pairs for whom nobody can be given up: training stands.", unresolved)
    families.gauge("at_risk_domains", "Failure domains that must not be lost.", len(status.at_risk))
    families.gauge("inexact", "Things that make this run another than an undisturbed one.", len(status.inexact))
    recoveries: dict[Labels, float] = {(): totals.of("partial_recoveries").get((), 0.0)}
    families.counters("partial_recoveries", "Partial recoveries, each of which has lost some updates.", (), recoveries)
    lost = 0.0 if partial is None else partial.lost_samples
    families.gauge("lost_samples_ratio", "The share of samples that partial recoveries have lost.", lost)
    families.gauge("looking_for_checkpoint", "Whether one is looked for, and whoever joins waits.", status.looks)
    families.gauge("cannot_begin", "Whether there is nothing to begin with.", bool(status.cannot_begin))
    families.gauge("experiment", "Whether a part of what is promised is given up.", status.experiment is not None)
