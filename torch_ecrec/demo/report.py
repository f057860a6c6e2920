"""The record of a run, made of a watched coordinator's messages, with figures from it and their printing.

    record = Record(trainers=2, slots=3)
    record.on_message({"type": "progress", "trainer": 0, "step": 1, "loss": 0.7, "time_s": 100.0})
    record.on_kill("server:1@60", slot=1, time_s=103.0)
    record.kills[0].to_json(record.step_times)

A *kill* and its times, all as seconds since the epoch, relative to the first in `after_kill_s`:

    kill        SIGKILL was sent                                                           0.000
    detected    the coordinator noticed the end of the process                             0.004
    rehosted    all slots that were lost with it serve again, on other processes           0.029
    first_step  the first step that began after the kill is complete at all trainers       0.061
    rebuilt     all records of these slots are there again, in full protection             0.713

Of a coordinator, only `rejoined` (all members have, at another one) and `first_step`. Of a trainer that is killed, in
place of the last two: `resumable`, all servers have gone back to a step that survives r losses, and `rejoined`, all
trainers, which torchrun has started again, have joined.

Of what is beyond parity, when all go back to a checkpoint: `went_back`, the coordinator says to which; `rejoined`; and
`trains`, the first step after the checkpoint is complete once more. `first_step` is the first that is new, then.

A step that was in progress at the kill may end without noticing it, so `first_step` is not that one. `stall` is the
longest time between two completed steps from the last before the kill to `first_step`.

Pure: no clock, no threads, no processes. Whoever calls from several threads holds a lock.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_ecrec.observe import events
from torch_ecrec.observe.events import AnyEvent
from torch_ecrec.observe.words import size, table
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.status import MemberStatus, RestoredStatus, Status, of_message

Message = dict[str, Any]
Life = tuple[int, int]  # slot, incarnation
REPAIRED = ("record", "parity", "mismatch")  # what is damaged and has the same bits again later; logs only get shorter
KINDS = ("lookup", "push", "fold", "rebuild", "snapshot")
WARM_STEPS = 5  # not counted in the throughput before a kill


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete. `time_s`: None if it was completed while nobody watched."""

    name: str
    step: int
    base: str
    bytes: int
    seconds: float
    time_s: float | None


@dataclass(frozen=True)
class Void:
    """A checkpoint that failed. `step`: 0 if none was chosen yet."""

    step: int
    reason: str
    time_s: float


@dataclass(frozen=True)
class WentBack:
    """All rolled back to a checkpoint. `step`: the checkpoint's, or 0; `from_step`: the last that was complete."""

    checkpoint: str
    step: int
    from_step: int
    time_s: float
    reason: str


@dataclass(frozen=True)
class Partly:
    """Slots took their records from a checkpoint, and what was trained since is lost: NOT EXACT."""

    slots: list[int]
    checkpoint: str
    step: int
    at: int
    lost_samples: float
    time_s: float
    reason: str


@dataclass
class Kill:
    """One kill that was made, and the times of what followed.

    Args:
        role: "server", "trainer", "coordinator" or "all".
        number: which slot it hosted, or which trainer it was.
        member: its name; of all, "everybody".
        pid: None of all.
        step: the last that was complete at all trainers.
        begun: the last step that some trainer may have begun.
        lost: slot -> incarnation, for the slots that the process hosted.
        resumed_after: the step after which new trainers go on.
    """

    spec: str
    role: str
    number: int
    member: str
    pid: int | None
    step: int
    begun: int
    kill_s: float
    lost: dict[int, int]
    detected_s: float | None = None
    rehosted: dict[int, float] = field(default_factory=dict)
    rebuilt: dict[int, float] = field(default_factory=dict)
    resumable_s: float | None = None
    resumed_after: int | None = None
    rejoined_s: float | None = None
    went_back_s: float | None = None
    trains_s: float | None = None

    @property
    def rehosted_s(self) -> float | None:
        return max(self.rehosted.values()) if len(self.rehosted) == len(self.lost) > 0 else None

    @property
    def rebuilt_s(self) -> float | None:
        return max(self.rebuilt.values()) if len(self.rebuilt) == len(self.lost) > 0 else None

    @property
    def repaired_s(self) -> float | None:
        """The time at which the cluster was as before the kill; None: not yet."""
        if self.went_back_s is not None or self.role == "all":
            return self.trains_s
        return self.rebuilt_s if self.role == "server" else self.rejoined_s

    @property
    def marks(self) -> int:
        """How many of the times that may follow it are known."""
        times = self.detected_s, self.resumable_s, self.rejoined_s, self.went_back_s, self.trains_s
        return sum(time_s is not None for time_s in times) + len(self.rehosted) + len(self.rebuilt)

    @property
    def lacks(self) -> str:
        """Tells what the cluster still lacks after this kill, in words; "" once it is as it was before."""
        if self.repaired_s is not None:
            return ""
        who = f"{self.spec} of {self.member} at step {self.step}"
        if self.role == "all" or self.went_back_s is not None:
            return f"{who}: no step is complete since all went back to a checkpoint"
        if self.role == "coordinator":
            return f"{who}: not all members have rejoined at another one"
        if self.detected_s is None:
            return f"{who}: nobody has noticed its loss"
        if self.role == "trainer":
            return f"{who}: not all trainers have joined since"
        nobody, rebuilt = sorted(self.lost.keys() - self.rehosted), sorted(self.lost.keys() - self.rebuilt)
        return f"{who}: nobody serves its slots {nobody}" if nobody else f"{who}: its slots {rebuilt} are not rebuilt"

    def to_json(self, step_times: Sequence[float]) -> Message:
        """Returns an entry of `kills` in result.json. `step_times[i]`: when step i + 1 was complete at all trainers."""
        # What was heard by the kill may be late: of steps that were complete by then, the one after may have begun.
        first_step = max(self.begun, bisect.bisect_right(step_times, self.kill_s) + 1) + 1
        first_step_s = step_times[first_step - 1] if len(step_times) >= first_step else None
        times = {
            "kill_s": self.kill_s,
            "detected_s": self.detected_s,
            "rehosted_s": self.rehosted_s,
            "first_step_s": first_step_s,
            "rebuilt_s": self.rebuilt_s,
            "resumable_s": self.resumable_s,
            "rejoined_s": self.rejoined_s,
            "went_back_s": self.went_back_s,
            "trains_s": self.trains_s,
        }
        after = {name: since(value, self.kill_s) for name, value in times.items() if name != "kill_s"}
        around = step_times[max(self.step - 1, 0) : first_step]
        gaps = [b - a for a, b in itertools.pairwise(around)]
        after["stall_s"] = round(max(gaps), 6) if gaps and first_step_s is not None else None
        return {
            "spec": self.spec,
            "role": self.role,
            "number": self.number,
            "slots_lost": sorted(self.lost),
            "member": self.member,
            "pid": self.pid,
            "resumed_after": self.resumed_after,
            "step": self.step,
            "first_step": first_step if first_step_s is not None else None,
            "times": times,
            "after_kill_s": after,
        }


def since(time_s: float | None, start_s: float) -> float | None:
    return None if time_s is None else round(time_s - start_s, 6)


TIER_FIGURES = ("tier_memory_bytes", "tier_file_bytes", "tier_hits", "tier_misses", "tier_reads", "tier_written_bytes")


class Record:
    """All that is known of one run.

    Args:
        trainers: how many there are.
        slots: how many there are.
    """

    def __init__(self, trainers: int, slots: int) -> None:
        self.pids: dict[str, int] = {}  # of members, by name
        self.roles: dict[str, str] = {}  # "server" or "trainer", likewise
        self.trainers: dict[int, str] = {}  # those that are there, by rank
        self.places: list[tuple[str, int]] = [("", -1)] * slots  # server and incarnation per slot
        self.healthy = [False] * slots
        self.rebuilt = [0.0] * slots  # fraction, of slots that are not healthy
        self.steps = [0] * trainers  # the last step each trainer has completed
        self.step = 0  # complete at all trainers
        self.step_times: list[float] = []  # [i]: when step i + 1 was
        self.loss = math.nan  # the last that was reported
        self.trained: list[tuple[int, float]] = []  # step, when; those again that were trained again
        self.checkpoints: list[Written] = []
        self.void: list[Void] = []
        self.went_back: list[WentBack] = []
        self.recovered_partly: list[Partly] = []
        self.damaged: list[messages.Damaged] = []
        self._found: Counter[Life] = Counter()  # records and parities that lives of slots have found damaged
        self._mended: Counter[Life] = Counter()  # of these, those that were repaired
        self._damage_before = (0, 0)  # found and repaired before all began anew, and lives with them
        self.kills: list[Kill] = []
        self.may_be_lost: set[str] = set()  # members that we stopped for so long that they may be taken for lost
        self.lost: dict[str, str] = {}  # members, and why
        self.excused: set[str] | None = None  # others that may be lost now; unless None, trainers are checked, too
        self.unexpected: list[str] = []  # losses that are not our doing
        self._ranks: set[int] = set()  # of trainers that have joined
        self._told: Counter[Life] = Counter()  # as `_found`, by events alone: a coordinator that dies takes some along
        self._healed: Counter[Life] = Counter()  # likewise as `_mended`
        self.fatal: Message | None = None  # kind and reason
        self.status: Status | None = None  # the last
        self.status_count = 0

    # what arrives ---------------------------------------------------------------------------------

    def on_message(self, message: Message) -> AnyEvent | None:
        """Takes a message of the watched coordinator: status, event or progress. Returns the event, if it is one.

        Raises:
            ValueError: it is called an event or a status, but is none (`observe/events.py`, `protocol/status.py`).
        """
        kind = message.get("type")
        if kind == "event":
            event = events.of_message(message)
            self._on_event(event, message["time_s"])
            return event
        if kind == "progress":
            self._on_progress(message)
        elif kind == "status":
            self._on_status(of_message(message))
        return None

    def _on_progress(self, message: Message) -> None:
        before = min(self.steps)
        self.steps[message["trainer"]] = message["step"]
        self.loss = message.get("loss", self.loss)
        if min(self.steps) > before:
            self.trained += [(step, message["time_s"]) for step in range(before + 1, min(self.steps) + 1)]
            for kill in self.kills:
                if kill.went_back_s is not None:
                    kill.trains_s = kill.trains_s or message["time_s"]
        while self.step < min(self.steps):
            self.step += 1
            self.step_times.append(message["time_s"])

    def _on_event(self, event: AnyEvent, time_s: float) -> None:
        if isinstance(event, events.Joined):
            self._on_joined(event, time_s)
        elif isinstance(event, events.Regathered):
            self._mark("rejoined_s", time_s, "coordinator")
        elif isinstance(event, events.EraBegun):
            self.trainers = {rank: name for rank, name in self.trainers.items() if name in event.trainers}
            self._mark("detected_s", time_s)
        elif isinstance(event, events.Resumable):
            for kill in self._mark("resumable_s", time_s):
                kill.resumed_after = event.step
            self.steps = [min(step, event.step) for step in self.steps]
        elif isinstance(event, events.Checkpointed):
            self.checkpoints.append(Written(event.name, event.step, event.base, event.bytes, event.seconds, time_s))
        elif isinstance(event, events.CheckpointVoid):
            self.void.append(Void(event.step, event.reason, time_s))
        elif isinstance(event, events.WentBeyond):
            self._go_back(event.name, event.step, event.reason, time_s)
        elif isinstance(event, events.RecoveredPartly):
            self.recovered_partly.append(
                Partly(event.slots, event.name, event.step, event.at, event.lost_samples, time_s, event.reason)
            )
        elif isinstance(event, (events.PlacedFirst, events.PlacedAnew, events.Moved)):
            for slot, (server, incarnation) in enumerate(event.slots):
                if incarnation > self.places[slot][1]:
                    self.healthy[slot], self.rebuilt[slot] = isinstance(event, events.PlacedFirst), 0.0
                self.places[slot] = (server, incarnation)
        elif isinstance(event, messages.Damaged):
            self.damaged.append(event)
            if event.what in REPAIRED:
                self._told[event.slot, event.incarnation] += event.count
                self._note_damage(event.slot, event.incarnation, found=self._told[event.slot, event.incarnation])
        elif isinstance(event, messages.Mended):
            self._healed[event.slot, event.incarnation] += event.count
            self._note_damage(event.slot, event.incarnation, mended=self._healed[event.slot, event.incarnation])
        elif isinstance(event, events.Lost):
            self._on_lost(event, time_s)
        elif isinstance(event, (events.Rehosted, events.SlotRebuilt)):
            self._on_slot(event, time_s)
        elif isinstance(event, messages.Fatal):
            self.fatal = self.fatal or {"kind": event.kind, "reason": event.reason}

    def _on_joined(self, event: events.Joined, time_s: float) -> None:
        rejoins = self.pids.get(event.member) == event.pid  # at another coordinator
        self.pids[event.member], self.roles[event.member] = event.pid, event.role
        if event.role == "trainer":
            if not rejoins and event.rank in self._ranks and not self._trainers_may_be_lost:
                self.unexpected.append(f"a trainer ended by itself: {event.member} was started again")
            self._ranks.add(event.rank)
            self.trainers[event.rank] = event.member
            if len(self.trainers) == len(self.steps):
                self._mark("rejoined_s", time_s, after="detected_s")
                for kill in self.kills:
                    if kill.went_back_s is not None:
                        kill.rejoined_s = kill.rejoined_s or time_s

    def _on_lost(self, event: events.Lost, time_s: float) -> None:
        self.lost[event.member] = event.why
        for kill in self.kills:
            if kill.member == event.member and kill.detected_s is None:
                kill.detected_s = time_s
        expected = {kill.member for kill in self.kills} | self.may_be_lost | (self.excused or set())
        counts = event.slots or (self.excused is not None and self.roles.get(event.member) == "trainer")
        if counts and event.member not in expected:
            self.unexpected.append(f"{event.member} was lost though nobody killed it: {event.why}")

    def _on_slot(self, event: events.Rehosted | events.SlotRebuilt, time_s: float) -> None:
        rebuilt = isinstance(event, events.SlotRebuilt)
        if rebuilt and self.places[event.slot][1] == event.incarnation:
            self.healthy[event.slot] = True
        for kill in self.kills:
            times = kill.rebuilt if rebuilt else kill.rehosted
            if event.incarnation > kill.lost.get(event.slot, event.incarnation):
                times.setdefault(event.slot, time_s)

    def _go_back(self, checkpoint: str, step: int, reason: str, time_s: float) -> None:
        """Notes that all begin anew from a checkpoint, as other members; "" and 0 stand for the very beginning."""
        for kill in self.kills:
            if kill.repaired_s is None and kill.went_back_s is None:
                kill.went_back_s, kill.resumed_after = time_s, step
                kill.detected_s = kill.detected_s or (time_s if kill.role != "all" else None)
        if checkpoint and all(one.name != checkpoint for one in self.checkpoints):
            self.checkpoints.append(Written(checkpoint, step, "", 0, 0.0, None))
        self.went_back.append(WentBack(checkpoint, step, self.trained[-1][0] if self.trained else 0, time_s, reason))
        self._forget_members()
        self.steps = [step] * len(self.steps)

    def _forget_members(self) -> None:
        self._damage_before = self.found, self.mended
        for counts in (self._found, self._mended, self._told, self._healed):
            counts.clear()
        self.trainers, self.places = {}, [("", -1)] * len(self.places)
        self.healthy = [False] * len(self.healthy)

    def _on_status(self, status: Status) -> None:
        self.status = status
        self.status_count += 1
        if any(kill.role == "all" and kill.went_back_s is None for kill in self.kills):
            last_s = max(kill.kill_s for kill in self.kills if kill.role == "all")
            if status.time_s <= last_s or status.looks:
                return  # of the coordinator before, or its successor does not know yet what to begin with
            restored = status.restored or RestoredStatus("", 0)
            self._go_back(restored.folder, restored.step, "everything was killed", status.time_s)
        for kill in self.kills:  # the next coordinator may have told of itself before we found it
            if kill.role == "coordinator" and status.slots and status.time_s > kill.kill_s:
                kill.rejoined_s = kill.rejoined_s or status.time_s
        for member in status.members:
            self.pids[member.name], self.roles[member.name] = member.pid, member.role
        for place in status.slots:
            self.places[place.slot] = (place.server, place.incarnation)
            self.healthy[place.slot] = place.healthy
        for slot, figures in status.slot_reports().items():
            self._note_damage(slot, figures.incarnation, figures.damaged, figures.mended)
            if figures.incarnation == self.places[slot][1]:
                self.rebuilt[slot] = figures.rebuilt

    def _note_damage(self, slot: int, incarnation: int, found: int = 0, mended: int = 0) -> None:
        """So many records and parities of a life were found damaged, and repaired, at least."""
        life = (slot, incarnation)
        self._found[life] = max(self._found[life], found)
        self._mended[life] = max(self._mended[life], mended)

    def _mark(self, what: str, time_s: float, role: str = "trainer", after: str = "kill_s") -> list[Kill]:
        """Sets a time of the kills of a role that lack it, and that have the time `after`."""
        kills = [k for k in self.kills if k.role == role and getattr(k, what) is None and getattr(k, after) is not None]
        for kill in kills:
            setattr(kill, what, time_s)
        return kills

    @property
    def _trainers_may_be_lost(self) -> bool:
        """Whether we have stopped or killed trainers in this run. Torchrun may then restart them more than once."""
        excused = self.may_be_lost | (self.excused or set())
        stopped = any(self.roles.get(name) == "trainer" for name in excused)
        return stopped or bool(self.went_back) or any(kill.role in ("trainer", "all") for kill in self.kills)

    def target(self, role: str, number: int) -> str | None:
        """Returns the member that hosts a slot, or is a trainer, if there is one at the moment."""
        if role in ("coordinator", "all"):
            return role
        return (self.places[number][0] or None) if role == "server" else self.trainers.get(number)

    def on_kill(self, spec: str, role: str, number: int, time_s: float) -> Kill:
        """Notes that SIGKILL is being sent to the host of a slot, or to a trainer."""
        member = self.target(role, number)
        assert member is not None
        if role == "all":
            return self._on_kill_of_all(spec, time_s)
        lost = {i: incarnation for i, (host, incarnation) in enumerate(self.places) if host == member}
        begun = max(self.step, *self.steps) + 1
        kill = Kill(spec, role, number, member, self.pids[member], self.step, begun, time_s, lost)
        same = next((k for k in self.kills if k.member == member), None)
        if same is not None:  # it hosted both slots: one loss
            kill.detected_s = same.detected_s
        self.kills.append(kill)
        return kill

    def _on_kill_of_all(self, spec: str, time_s: float) -> Kill:
        begun = max(self.step, *self.steps) + 1
        lost = {slot: incarnation for slot, (_, incarnation) in enumerate(self.places)}
        kill = Kill(spec, "all", 0, "everybody", None, self.step, begun, time_s, lost)
        for other in self.kills:  # whatever was under way ends with this one
            if other.repaired_s is None:
                other.detected_s = other.detected_s or time_s
        self.kills.append(kill)
        self._forget_members()
        return kill

    # what follows ---------------------------------------------------------------------------------

    @property
    def found(self) -> int:
        """How many records and parities were found damaged."""
        return self._damage_before[0] + self._found.total()

    @property
    def mended(self) -> int:
        """How many of these were repaired."""
        return self._damage_before[1] + self._mended.total()

    @property
    def unmended(self) -> dict[int, int]:
        """How many are still to be repaired, by slot; slots that have none are left out.

        What a life has not repaired ends with it: the next one has all of the slot decoded.
        """
        lives = [(slot, incarnation) for slot, (_, incarnation) in enumerate(self.places)]
        left = {life[0]: self._found[life] - self._mended[life] for life in lives}
        return {slot: count for slot, count in left.items() if count > 0}

    @property
    def whole(self) -> bool:
        """Whether every kill was detected, and all that it took is back."""
        return all(self.healthy) and all(kill.repaired_s is not None for kill in self.kills)

    @property
    def settled(self) -> bool:
        """Whether the cluster is whole and no server hosts two slots, so that r may be lost again."""
        return self.whole and len({server for server, _ in self.places}) == len(self.places)

    @property
    def members(self) -> list[MemberStatus]:
        """The members in the last status; none before the first."""
        return [] if self.status is None else self.status.members

    def throughput(self, samples_per_step: int) -> Message:
        """Returns samples per second before the first kill, while something was missing, and after the last rebuild."""
        times = self.step_times
        if not times:
            return {"before": None, "rebuild": None, "after": None}
        end_s = times[-1]
        spans: list[tuple[float, float]] = []
        for kill in sorted(self.kills, key=lambda kill: kill.kill_s):
            over_s = kill.repaired_s
            if kill.went_back_s is not None:  # trained again until then
                over_s = times[kill.step] if len(times) > kill.step else None
            until_s = min(end_s, over_s if over_s is not None else end_s)
            if spans and kill.kill_s <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], until_s))
            elif until_s > kill.kill_s:
                spans.append((kill.kill_s, until_s))
        warm_s = times[min(WARM_STEPS, len(times)) - 1]
        return {
            "before": _rate(times, [(warm_s, spans[0][0] if spans else end_s)], samples_per_step),
            "rebuild": _rate(times, spans, samples_per_step),
            "after": _rate(times, [(spans[-1][1], end_s)], samples_per_step) if spans else None,
        }

    def bytes_sent(self) -> dict[str, int]:
        """Returns the bytes sent by kind, over all processes, lost ones as they last reported."""
        total = dict.fromkeys(KINDS, 0)
        for member in self.members:
            for kind, count in (member.report.bytes_sent or {}).items():
                total[kind] = total.get(kind, 0) + count
        return total

    def servers(self) -> list[Message]:
        """Returns the bytes that each living server holds."""
        servers = []
        for member in self.members:
            if member.role == "server" and member.alive:
                slots = member.report.slots or []
                entry: Message = {"server": member.name, "pid": member.pid, "slots": [one.slot for one in slots]}
                entry["record_bytes"] = sum(one.record_bytes for one in slots)
                entry["parity_bytes"] = sum(one.parity_bytes for one in slots)
                entry["log_bytes"] = sum(one.log_bytes for one in slots)
                entry["snapshot_bytes"] = sum(one.snapshot_bytes for one in slots)
                if any(one.tier for one in slots):
                    entry |= {name: sum(getattr(one, name) for one in slots) for name in TIER_FIGURES}
                servers.append(entry)
        return servers

    def progress_line(self, steps: int, samples_per_step: int) -> str:
        """Returns a line with step, loss, samples per second over the last second, and the state of every slot."""
        if not self.step:
            joined = Counter(self.roles.values())
            return f"starting: {joined['server']} servers, {joined['trainer']} trainers have joined"
        recent = [t for t in self.step_times[-1000:] if t >= self.step_times[-1] - 1.0]
        span_s = recent[-1] - recent[0]  # 0 where they came together, after a coordinator was missing
        rate = (len(recent) - 1) * samples_per_step / span_s if span_s > 0 else 0.0
        slots = []
        for slot, (server, _) in enumerate(self.places):
            state = "" if self.healthy[slot] else f" rebuilding {self.rebuilt[slot]:.0%}" if server else "nobody"
            slots.append(f"[{slot}: {server}{state}]")
        now = self.trained[-1][0] if self.trained else self.step
        now = self.went_back[-1].step if self.went_back and not self.trainers else now
        again = " (again)" if now < self.step else ""
        return f"step {now:>4}/{steps}{again}  loss {self.loss:.4f}  {rate:>7,.0f} samples/s  {' '.join(slots)}"


def _rate(times: Sequence[float], spans: Sequence[tuple[float, float]], samples: int) -> float | None:
    """Returns samples per second over some spans of time."""
    length_s = sum(end - begin for begin, end in spans)
    count = sum(begin < t <= end for t in times for begin, end in spans)
    return round(count * samples / length_s, 1) if length_s > 0 else None


# printing ---------------------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    return "   (not)" if value is None else f"{value:8.3f}"


def format_kill(entry: Message) -> list[str]:
    """Returns the timeline of one failure, in seconds after the kill, as text."""
    after = entry["after_kill_s"]
    hosted = f", host of slot {', '.join(map(str, entry['slots_lost']))}" if entry["slots_lost"] else ""
    if entry["role"] == "all":
        hosted = ": coordinator, servers and trainers"
    first = "first step begun after it" + (f" ({entry['first_step']})" if entry["first_step"] is not None else "")
    pid = f", pid {entry['pid']}" if entry["pid"] is not None else ""
    who = f"{entry['member']}{pid}{hosted}"
    lines = [f"failure {entry['spec']}", f"  {_seconds(0.0)} s  killed: {who}, at step {entry['step']}"]
    marks = [
        (after["detected_s"], "detected"),
        (after["rehosted_s"], "re-hosted: lost rows are decoded on first touch"),
        (after["first_step_s"], f"{first} complete at all trainers"),
        (after["rebuilt_s"], "rebuilt: fully protected again"),
    ]
    if entry["role"] == "coordinator":
        marks = [marks[2], (after["rejoined_s"], "another one is there, and all members have rejoined")]
    if entry["role"] == "trainer":
        marks[1] = (after["resumable_s"], f"servers have gone back to step {entry['resumed_after']}, and keep it safe")
        marks[3] = (after["rejoined_s"], "torchrun has started all trainers again, and they have joined")
    if after["went_back_s"] is not None:
        again = entry["step"] - entry["resumed_after"]
        marks = [
            (after["went_back_s"], f"all go back to the checkpoint of step {entry['resumed_after']}: {again} again"),
            (after["rejoined_s"], "torchrun has started all trainers again, and they have joined"),
            (after["trains_s"], f"step {entry['resumed_after'] + 1} is complete once more"),
            (after["first_step_s"], f"first new step ({entry['first_step']}) complete at all trainers"),
        ]
    marks.sort(key=lambda mark: math.inf if mark[0] is None else mark[0])
    lines += [f"  {_seconds(time_s)} s  {what}" for time_s, what in marks]
    if after["stall_s"] is not None:
        lines.append(f"            longest pause of training around it: {after['stall_s']:.3f} s")
    return lines


def format_summary(result: Message) -> str:
    """Returns what the demonstration prints at its end."""
    lines: list[str] = []
    for entry in result["kills"]:
        lines += [*format_kill(entry), ""]
    rows = [["", "digest", "last loss", "AUC", "samples/s"]]
    name = f"with {len(result['kills'])} killed" if result["kills"] else "this run"
    for title, run in ((name, result), ("undisturbed", result["undisturbed"])):
        if run is not None:
            losses = [loss for loss in (run["losses"][-1] if run["losses"] else []) if loss is not None]
            loss = f"{sum(losses) / len(losses):.6f}" if losses else "-"
            area = f"{run['auc']:.4f}" if run["auc"] is not None else "-"
            rows.append([title, (run["digest"] or "-")[:32], loss, area, f"{run['samples_per_s'] or 0:,.0f}"])
    lines += table(rows, indent="")
    if result["recovered_partly"]:
        lines.append(format_partly(result))
    elif result["equal"] is not None:
        verdict = "EQUAL: every record, every dense parameter and every loss, bit for bit"
        lines.append(verdict if result["equal"] else "NOT EQUAL: " + "; ".join(result["differences"]))
    rates = {name: value for name, value in result["throughput"].items() if value is not None}
    if rates and result["kills"]:
        lines.append("samples/s: " + ", ".join(f"{value:,.0f} {_WHEN[name]}" for name, value in rates.items()))
    if result["checkpoints"]:
        kept, void = result["checkpoints"], len(result["checkpoints_void"])
        more = f"; {void} came to nothing" if void else ""
        lines.append(f"checkpoints: {len(kept)}, the last of step {kept[-1]['step']}{more}")
    if any(result["bytes_sent"].values()):
        lines.append("sent: " + ", ".join(f"{size(sent)} {kind}" for kind, sent in result["bytes_sent"].items()))
    return "\n".join(lines)


def format_partly(result: Message) -> str:
    """Returns what was lost for good, and how far the result is from the undisturbed run's, as text."""
    last = result["recovered_partly"][-1]
    text = (
        f"NOT EXACT, as asked for by --beyond partial: slots {last['slots']} took their records from the checkpoint of"
        f" step {last['step']} at step {last['at']}; {100 * last['lost_samples']:.3g} % of the samples until then"
        " are lost"
    )
    calm = result["undisturbed"]
    if calm is not None and calm["auc"] is not None and result["auc"] is not None:
        text += f"; AUC {result['auc']:.4f} against {calm['auc']:.4f}"
    return text


_WHEN = {"before": "before", "rebuild": "during rebuild", "after": "after"}
