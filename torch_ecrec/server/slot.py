"""One incarnation of a slot: the steps it applies, what it answers, and what it tells the coordinator.

A slot runs inside its node (`Node.run`), so nothing here locks. It has

    held          records, parities, log, and the rule of which steps are applied, folded, acknowledged (`Holdings`)
    scrubber      looks for records and parities that are damaged (`durability/scrubber.py`)
    durability    makes its steps survive and brings lost records back (`durability/policy.py`); given to it
    inbox         pushes and loads that wait for their step (`inbox.py`)
    applier       what a step does to the records (`apply.py`)
    reads         what trainers read (`reads.py`)
    announced     what they will read in later steps (`announced.py`)
    snapshots     parts of the dense model (`snapshots.py`)
    checkpoints   its part in checkpoints (`checkpoints.py`)
    restoring     how it begins with its records of one, if it does (`slot_restore.py`)
    slot_export   gives the slot to another server that copies it (`exporting.py`)

Each of these is given the slot as a `SlotContext` (`durability/context.py`), and the parts above it that it needs. The
slot alone assigns its fields: a part that has news calls a method.

The way of a gradient: `handle`, `_on_push`, `Inbox.put`, `try_apply`, `Applier.update_`, `merge.merge` and
`Shard.apply_`, then `Durability.on_applied`, and, when the step has settled, `on_settled`.

A request that cannot be answered yet is parked (`waiting`) and looked at again when something changed: a step was
applied, a record was repaired, the slot became ready. Its caller has the time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from torch_ecrec.durability.context import Reply, SlotContext
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.durability.policy import PeerRequest, Policy
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.messages import PartialRestore
from torch_ecrec.protocol.status import SlotReport
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.positions import Positions
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.tiers.tiered import TierFigures
from torch_ecrec.server.announced import Announcements
from torch_ecrec.server.apply import Applier
from torch_ecrec.server.checkpoints import SlotCheckpoints
from torch_ecrec.server.exporting import MoveRequest, SlotExport
from torch_ecrec.server.importing import SlotImport
from torch_ecrec.server.inbox import Inbox
from torch_ecrec.server.process import ServerProcess
from torch_ecrec.server.reads import Reads
from torch_ecrec.server.slot_restore import SlotRestore
from torch_ecrec.server.snapshots import SnapshotStore
from torch_ecrec.server.spoiling import SpoilingApplier
from torch_ecrec.spec.settings import Settings

VAIN_ARRIVALS = 16  # then the next request waits for its records inside the node: else they go before it has its turn


class Slot(SlotContext):
    """One incarnation of one slot.

    Args:
        host: the server process it lives in.
        held: its records and all that goes with them.
        policy: makes what makes its steps survive.
        settings: of the process.
        fresh: true at the start of a job. False on the new host of a lost slot: it serves once `durability` knows where
            it stands.
        partial_restore: of a slot that begins with its records of a checkpoint, since the cluster does, or since it was
            lost beyond repair: which; None: it is no such one.
        arrival: of a slot that was copied here and goes on as it was; None: it is no such one.
    """

    def __init__(
        self,
        host: ServerProcess,
        held: Holdings,
        policy: Policy,
        settings: Settings,
        fresh: bool,
        partial_restore: PartialRestore | None = None,
        arrival: SlotImport | None = None,
    ) -> None:
        super().__init__(held, host, fresh)
        self.host: ServerProcess = host
        self.index, self.incarnation, self.job = held.index, held.incarnation, held.job
        self.code, self.layouts, self.shards = held.code, held.layouts, held.shards
        self.rule, self.missing = held.rule, held.missing
        self.inbox = Inbox(self.job.trainers)
        self.push_replies: dict[int, list[Reply[wire.Acknowledged]]] = {}
        self.waiting: list[tuple[Callable[[], Any], Reply[Any]]] = []
        self._vain_arrivals = 0  # of records from the disk, since anybody had all that he needs
        self.scrubber = Scrubber(self, settings.record_checks == "use", self._mend, self._compare)
        self.durability = policy(self, host, self.scrubber, settings)
        self.snapshots = SnapshotStore(self, host, self.scrubber)
        spoil, at = settings.spoil, settings.spoil_step
        self.applier = SpoilingApplier(self, spoil, at) if at else Applier(self)
        self.reads = Reads(self, self.scrubber)
        self.announced = Announcements(self)
        most_bytes = settings.checkpoint_memory_bytes
        self.checkpoints = SlotCheckpoints(self, host, self.snapshots, self.scrubber, most_bytes)
        self.restoring = SlotRestore(self, host, partial_restore) if partial_restore is not None else None
        self.slot_export = SlotExport(self, host, self.scrubber, self.durability, self.snapshots)
        if arrival is not None:
            self._take_over(arrival)
        elif self.restoring is not None:
            self.restoring.begin()
        elif not fresh:
            self.durability.adopt()

    @property
    def log(self) -> DeltaLog:
        """The deltas of its recent steps."""
        return self.held.log

    # requests -----------------------------------------------------------------------------------

    def handle(self, request: wire.Request[Any], reply: Reply[Answer]) -> None:
        """Answers a request; `reply` is called now, or when it can be answered."""
        match request:
            case _ if isinstance(request, MoveRequest) or self.slot_export.stopped:
                self.slot_export.handle(request, reply)
            case wire.Lookup():
                self.reads.on_lookup(request, reply)
            case wire.Push() | wire.NoUpdate():
                self._on_push(request, reply)
            case wire.Announce():
                self.announced.on_announce(request)
                reply(wire.Announced())
            case wire.WhenAcknowledged():
                self.durability.on_forgotten(request.step)
                self._once_acknowledged(request.step, reply)
                self.forget()
            case wire.Snapshot():
                self.snapshots.on_snapshot(request, reply)
            case wire.Load():
                self._on_load(request, reply)
            case wire.Export():
                self.reads.on_export(request, reply)
            case wire.WhoIsAwaited():
                step = self.rule.applied + 1
                reply(wire.Awaited(step, self.inbox.lacking(step) if self.ready else []))
            case wire.FetchSnapshots():
                self.snapshots.on_fetch(request, reply)
            case _ if isinstance(request, PeerRequest):
                self.durability.handle(request, reply)
            case _:
                raise TypeError(f"`request` must be one to a slot, got {type(request).__name__}")

    def park(self, attempt: Callable[[], Answer | None], reply: Reply[Any]) -> None:
        answer = attempt() if self.ready else None
        if answer is None:
            self.waiting.append((attempt, reply))
        else:
            self._vain_arrivals = 0
            reply(answer)

    def progress(self) -> None:
        """Applies what can be applied and answers what can be answered."""
        self.try_apply()
        if not self.ready:
            return
        waiting, self.waiting = self.waiting, []
        for attempt, reply in waiting:
            self.park(attempt, reply)

    def is_missing(self, positions: list[np.ndarray], looked: bool = False) -> bool:
        # First what only others can give: no disk is read again and again meanwhile.
        if self.scrubber.beyond or self.durability.is_missing(positions) or self.is_away(positions):
            return True
        self.scrubber.on_use(positions, looked)
        return self.scrubber.beyond != "" or self.durability.is_missing(positions)

    def is_away(self, positions: list[np.ndarray]) -> bool:
        if not self.tiered:
            return False
        if self.expect(positions) and self._vain_arrivals < VAIN_ARRIVALS:
            return True
        # Also where nothing is on its way: what need not be read now (it was only just written) may have to be once
        # there is room for the others. Who comes after this reads no disk, and uses nothing that was not looked at.
        for shard, positions_U in zip(self.shards, positions, strict=True):
            shard.bring(positions_U)
        for table_group in range(len(self.shards)):
            for parity in (False, True):
                self.scrubber.came_whole(table_group, parity)
        return False

    def expect(self, positions: list[np.ndarray], later: bool = False) -> bool:
        away = False
        if self.ready and not self.scrubber.beyond:
            self.durability.is_missing(positions)  # repaired while the rest of the step is awaited
        for shard, positions_U in zip(self.shards, positions, strict=True):
            reading, coming = shard.want(positions_U)
            away |= coming
            if reading is not None:
                self.read_tier(reading, partial(self._arrived, shard, reading, later))
        return away

    def read_tier(self, reading: Any, done: Callable[[], None], awaited: bool = True) -> None:
        self.host.read_tier(reading.run, done, awaited)

    def tend_tiers(self) -> None:
        if self.host.tier is None:
            return
        for shard in self.shards:
            for reading, parity in shard.soon():
                self.read_tier(reading, partial(shard.settle, reading, parity))

    def _arrived(self, shard: Shard, reading: Any, later: bool) -> None:
        if not self.dead:
            shard.arrive(reading)
            self._vain_arrivals += not later
            self.progress()

    def _mend(self, table_group: int, parity: bool, positions_M: Positions) -> str:
        """Has these damaged records or parities, (M,) int64 ascending, repaired; see `Durability.mend`."""
        if not parity:
            self.checkpoints.on_damage()
        return self.durability.mend(table_group, parity, positions_M)

    def _compare(self, table_group: int, first: int, end: int) -> None:
        self.durability.compare(table_group, first, end)

    def _refuse_all(self, reason: str) -> None:
        replies = [reply for _, reply in self.waiting] + [r for rs in self.push_replies.values() for r in rs]
        self.waiting, self.push_replies = [], {}
        for reply in replies:
            reply(Refused(reason))

    # steps --------------------------------------------------------------------------------------

    def _on_push(self, request: wire.Push | wire.NoUpdate, reply: Reply[wire.Acknowledged]) -> None:
        self.rule.on_resumable(request.trainer, request.resumable)
        self._take(request, reply)

    def _on_load(self, request: wire.Load, reply: Reply[wire.Acknowledged]) -> None:
        # alone, before training: the others have done nothing yet that could be taken back
        for trainer in range(self.rule.trainers) if request.alone else (request.trainer,):
            self.rule.on_resumable(trainer, request.resumable)
        self._take(request, reply)

    def _take(self, request: wire.Part, reply: Reply[wire.Acknowledged]) -> None:
        """Keeps it until its step is due; answers once the step counts, or once there are the rows that it asks for."""
        asking = request if isinstance(request, wire.Push) and request.then else None
        if asking is None:
            self._once_acknowledged(request.step, reply)
        if request.step > self.rule.applied:
            self.inbox.put(request)
            self.progress()
        if asking is not None:
            self.reads.on_push(asking, reply)
        self.forget()

    def _once_acknowledged(self, step: int, reply: Reply[wire.Acknowledged]) -> None:
        if self.rule.is_acknowledged(step):
            reply(wire.Acknowledged(step, [], self.wants_hints))
        else:
            self.push_replies.setdefault(step, []).append(reply)

    def try_apply(self) -> None:
        """Applies every step of which everything is here and whose records are all there, in order."""
        while self.ready:
            step = self.rule.applied + 1
            due = self.inbox.due(step)
            if due is None:
                return
            change = self.applier.load_(due) if isinstance(due, list) else self.applier.update_(step, due)
            if change is None:
                return
            self._vain_arrivals = 0
            self.inbox.on_applied(step)
            iteration = None if isinstance(due, list) else due[0].iteration
            self.load_steps = _load_steps(self.load_steps, step, iteration)
            self.rule.on_applied(step)
            self.log.append(step, *change)
            self.announced.on_applied(step)
            self.checkpoints.on_applied(step, *change[:2], iteration)
            self.durability.on_applied(step)

    def pass_over(self, through: int) -> None:
        for step in range(self.rule.applied + 1, through + 1):
            positions = [np.empty(0, np.int64) for _ in self.shards]
            deltas = [np.empty((0, shard.schema.nbytes), np.uint8) for shard in self.shards]
            self.inbox.on_applied(step)
            self.rule.on_applied(step)
            self.log.append(step, positions, deltas)
            self.announced.on_applied(step)
            iteration = None if self.load_steps is None else step - self.load_steps
            self.checkpoints.on_applied(step, positions, deltas, iteration)
            self.durability.on_applied(step)
        self.progress()

    def on_settled(self, through: int) -> None:
        """Tells the trainers what counts now."""
        if self.rule.acknowledge(through):
            self._answer_pushes()
        self.forget()
        self.check_durable()

    def _answer_pushes(self) -> None:
        for step in [t for t in self.push_replies if self.rule.is_acknowledged(t)]:
            for reply in self.push_replies.pop(step):
                reply(wire.Acknowledged(step, [], self.wants_hints))

    def forget(self) -> None:
        """Lets go of what nobody can ask for any more."""
        self.log.forget(self.checkpoints.keeps(self.rule.may_forget()))
        self.snapshots.forget(self.checkpoints.keeps(self.rule.watermark))
        self.tend_tiers()

    # its life -----------------------------------------------------------------------------------

    def become_ready(self, cut: int, floor: int, log: DeltaLog) -> None:
        """Serves from now on: the new host of a lost slot knows the cut, and the slot's own log before it."""
        self.held.go_on(log)
        self.rule.adopt(cut, floor)
        self.ready = True
        self._tell_ready()
        self.inbox.keep_after(cut)
        self._answer_pushes()  # those of steps up to the cut that came while this was not known
        self.durability.connect()
        if self.restoring is None or not self.restoring.partial_restore.dense_lost:
            self.snapshots.copy_all()
        self.durability.restore()
        self.progress()
        self.tell_reach()
        self.check_rebuilt()
        self.check_durable()

    def begin_anew(self, cut: int, floor: int, log: DeltaLog, done: int) -> None:
        self.load_steps = cut - done
        self.going_back_to = cut  # if the others went back there, they wait until that is durable here, too
        self.become_ready(cut, floor, log)

    def _take_over(self, arrival: SlotImport) -> None:
        """This life goes on as the one before, which has stopped, on another server."""
        assert arrival.handed is not None
        self.slot_export.take_over(arrival)
        self.load_steps = arrival.handed.load_steps
        self.ready = self.reported = True
        self.durability.connect()

    def give_up(self, reason: str = "") -> None:
        """Gives up: no holder that has caught up knows this slot, so more is lost than the code repairs."""
        self.hopeless = True
        self.tell(messages.Unrecoverable(*self.life, reason))

    def check_rebuilt(self) -> None:
        """Reports the slot as rebuilt, once nothing is missing, and it has caught up with all that the sources have
        acknowledged (rule 5)."""
        due = self.whole and not (self.reported or self.dead or self.snapshots.lacks_all)
        if due and self.durability.caught_up:
            self.reported = True
            self._tell_rebuilt()

    def die(self) -> None:
        """This incarnation has been replaced: everyone who waits is told to ask again."""
        self.ready, self.dead = False, True
        self.durability.stop()
        self.checkpoints.abandon()
        if self.restoring is not None:
            self.restoring.cancel()
        self._refuse_all(f"slot {self.index} moved")

    # other slots --------------------------------------------------------------------------------

    def meet(self, slot: int, incarnation: int) -> None:
        self.durability.meet(slot, incarnation)

    def on_partial_restore(self, partial_restore: PartialRestore) -> None:
        """Notes slots that begin anew: parities that had their records are missing, until they are encoded again."""
        lives = [(other, life) for other, life, _ in partial_restore.lives if other != self.index]
        if any([self.durability.meet_anew(other, life) for other, life in lives]):
            self.reported = False
        if partial_restore.dense_lost:
            self.snapshots.begin_anew()
        if self.reported:
            self._tell_rebuilt()  # it was not forgotten what it said before
        self.check_rebuilt()

    def on_snapshot_kept(self, step: int, done: int) -> None:
        self.checkpoints.on_snapshot(done, self.snapshots.is_whole(step))

    def on_snapshots_copied(self) -> None:
        self.check_rebuilt()
        self.check_durable()

    # going back ---------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stops, as the trainers are lost: nothing of theirs counts from now on, until it is known where they start
        again."""
        self.going_back_to = None
        self.slot_export.end()
        self.inbox.clear()
        self.applier.forget()
        self.announced.forget()
        self._refuse_all("the trainers were lost")
        self.durability.stop()
        self.snapshots.check()
        self.tell_reach()

    def go_back(self, step: int, done: int) -> None:
        """Takes back every step after `step`, here and in the parities; then makes `step` durable.

        Args:
            step: training goes on after it.
            done: steps of training until then.
        """
        self.load_steps = step - done
        self.checkpoints.on_going_back(step)
        self.held.undo_after(step)
        self.durability.go_back(step)
        self.rule.go_back(step)
        self.snapshots.go_back(step)
        self.going_back_to = step
        self.go_on()
        self.check_durable()

    def go_on(self) -> None:
        """Goes on after all servers have stopped: steps flow again, and what is missing is brought back."""
        if self.ready:
            self.durability.connect()
            self.durability.restore()
        self.progress()
        if self.restoring is not None:
            self.restoring.proceed()

    def check_durable(self) -> None:
        """Reports once the step that the trainers start again after survives r losses, of records and of the dense
        model."""
        step = self.going_back_to
        if step is None or self.host.frozen or self.durability.settled < step or not self.snapshots.complete:
            return
        self.going_back_to = None
        self.tell(messages.Durable(*self.life, self.host.era))

    # what the coordinator is told ---------------------------------------------------------------

    def _tell_ready(self) -> None:
        self.tell(messages.Ready(*self.life, None if self.restoring is None else self.restoring.at))

    def _tell_rebuilt(self) -> None:
        """Reports that nothing is missing, as far as this host knows of slots that began anew."""
        self.tell(messages.Rebuilt(*self.life, len(self.host.partial_restores)))

    def tell_reach(self) -> None:
        """Reports which steps the slot can go back to, if that is asked for."""
        if self.host.frozen and self.ready:
            kept = [(step, *found) for step, found in self.snapshots.found().items()]
            done = None if self.load_steps is None else self.rule.applied - self.load_steps
            reach = self.durability.reach, self.log.floor
            self.tell(messages.Reach(*self.life, self.host.era, *reach, kept, done))

    def tell_again(self) -> None:
        """Reports everything that the coordinator should know of this incarnation: it may have missed some of it."""
        self.scrubber.tell_beyond()
        if self.ready:
            self._tell_ready()
            if self.reported:
                self._tell_rebuilt()
            self.tell_reach()
            if not self.host.frozen and self.going_back_to is None:
                self.tell(messages.Durable(*self.life, self.host.era))
        elif self.hopeless:
            self.give_up(self.restoring.failed if self.restoring is not None else "")

    def figures(self) -> SlotReport:
        """Returns the figures that `torch-ecrec status` shows of the slot."""
        rule = self.rule
        return SlotReport(
            slot=self.index,
            incarnation=self.incarnation,
            ready=self.ready,
            step=self.trained(rule.applied),
            acknowledged=self.trained(rule.acknowledged),
            watermark=self.trained(rule.watermark),
            rebuilt=self.missing.done_fraction if self.restoring is None else self.restoring.done_fraction,
            record_bytes=sum(shard.data_bytes for shard in self.shards),
            parity_bytes=sum(shard.parity_bytes for shard in self.shards),
            log_bytes=self.log.bytes + self.durability.kept().bytes,
            snapshot_bytes=self.snapshots.bytes,
            checkpoint_bytes=self.checkpoints.kept_bytes,
            saver_bytes=self.checkpoints.saver_bytes,
            saver_pick_s=round(self.checkpoints.picked_s, 6),
            scrubbed_bytes=self.scrubber.scrubbed_bytes,
            scrub_rounds=self.scrubber.rounds,
            damaged=self.scrubber.damaged,
            mended=self.scrubber.mended,
            wrong_stripes=self.scrubber.mismatched,
            lost_steps=self.durability.lost_steps,
            **self._tier_figures(),
        )

    def _tier_figures(self) -> dict[str, Any]:
        """Returns the fields of `SlotReport` about the tier."""
        figures = [found for shard in self.shards for found in shard.tier_figures()]
        if self.host.tier is None or not figures:
            return {}
        sums = {f"tier_{name}": sum(getattr(one, name) for one in figures) for name in TierFigures._fields}
        return {"tier": self.host.tier.how, "tier_over_bytes": self.host.tier.over_bytes, **sums}


def _load_steps(before: int | None, step: int, iteration: int | None) -> int | None:
    """Returns how many steps up to `step` are none of training. `iteration`: which one it is of training; None: it
    loads."""
    if iteration is not None:
        return step - iteration
    return None if before is None else before + 1
