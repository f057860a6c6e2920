"""A server process on the data plane: the slots it hosts, the messages for them, the placement, and the era.

The coordinator says which slots live here (`on_control`); requests are handed to their slot. A slot of another
incarnation than the caller means is refused, which fences both stale callers and stale hosts.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.durability import policy_of
from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.errors import ClusterError, TierFailed
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import messages, wire
from torch_ecrec.protocol.bounds import REASON_MOST
from torch_ecrec.protocol.messages import Known, Placement
from torch_ecrec.protocol.status import Report
from torch_ecrec.protocol.wellformed import MessageValidator
from torch_ecrec.protocol.wire import Answer, Malformed, Refused
from torch_ecrec.records.pages import ReadyMemory
from torch_ecrec.records.store import Stores, stores_in
from torch_ecrec.server.flipping import flip, flip_below
from torch_ecrec.server.importing import SlotImport
from torch_ecrec.server.process import CheckpointReader, CheckpointWriter, ServerProcess
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.node import COMPLAINTS, Port

log = logging.getLogger(__name__)

# Each time that it looks has a price, in messages about parities above all; and the node is busy for 0.1 ms per MB.
SCRUB_BYTES = 4e6
SCRUB_LEAST_S, SCRUB_MOST_S = 0.05, 0.5
FLIPPED_READ_S = 0.5  # after a bit was flipped on a disk
FLIP_AGAIN_S = 1.0  # after there was none to flip
TABLES_NAMED = 5  # in an error
FOLDED = (wire.Folded, wire.Attached)  # they say how far a holder is
TRAINERS_ONLY = (
    wire.Lookup,
    wire.Push,
    wire.Announce,
    wire.WhenAcknowledged,
    wire.Snapshot,
    wire.Load,
    wire.NoUpdate,
    wire.Export,
    wire.WhoIsAwaited,
)


class Host(ServerProcess):
    """All slots of one server process.

    Args:
        name, port, settings, writer, reader: see `ServerProcess`.

    Attributes:
        term: of the coordinator that it has heard last; who builds it says that of the one that has welcomed it.
    """

    def __init__(
        self,
        name: str,
        port: Port,
        settings: Settings,
        writer: CheckpointWriter | None = None,
        reader: CheckpointReader | None = None,
    ) -> None:
        super().__init__(name, port, settings, writer, reader)
        self.term = 0
        self.job: JobSpec | None = None
        self.restored: messages.Restored | None = None  # the checkpoint that the cluster began with
        self.slots: dict[int, Slot] = {}
        self.arrivals: dict[int, SlotImport] = {}  # slots on their way here
        self.left: list[int] = []  # trainers that are done: for a coordinator that is started again
        self.layouts: tuple[Layout, ...] = ()
        self.validator: MessageValidator | None = None
        self.ready_memory: ReadyMemory | None = None  # for the slot of another server, should that be lost

    # from the coordinator -----------------------------------------------------------------------

    def on_control(self, word: messages.FromCoordinator) -> None:
        """Handles a message of the coordinator; one about membership is not for the data plane, and ignored."""
        match word:
            case messages.Job():
                self.run(self._take_job, word.job, word.restored)
            case messages.Placed():
                self.run(self._take_placement, word.placement)
            case messages.Era():
                self.run(self._take_era, word)
            case messages.Loaded():
                self.load_end = word.load_end
            case messages.Left():
                self.left = word.trainers
            case messages.Rejoined():
                self.run(self._tell_again, word.term)
            case messages.Move():
                self.run(self._on_move, word)
            case messages.Checkpointing() | messages.Survey() | messages.Capture() | messages.Release():
                self.run(self._on_checkpoint, word)

    def known(self) -> Known:
        """Returns what this server knows of the run, for a coordinator that was started again."""
        found: list[Known] = []

        def look() -> None:
            known = [slot.known_incarnations() for slot in self.slots.values()]
            told = Known(
                job=self.job,
                placement=self.placement,
                era=self.era,
                frozen=self.frozen,
                resume_step=self.resume_step,
                done=self.done,
                load_end=self.load_end,
                floor=self.floor,
                left=self.left,
                partial_restores=self.partial_restores,
                saves=self.saves,
                kept=[
                    (slot.index, slot.incarnation, not slot.snapshots.lacks_all)
                    for slot in self.slots.values()
                    if slot.ready and slot.missing.has_all_data
                ],
                whole=[(slot.index, slot.incarnation) for slot in self.slots.values() if slot.reported],
                incarnations=[max(lives) for lives in zip(*known, strict=True)],
            )
            found.append(told)

        self.run(look)
        return found[0]

    def _tell_again(self, term: int) -> None:
        """Sends again what a coordinator may have missed or never heard. `term`: of that coordinator."""
        for slot in self.slots.values():
            slot.tell_again()
            slot.checkpoints.tell_again(same=term == self.term)
        self.term = term

    def _on_checkpoint(self, word: messages.FromCoordinator) -> None:
        if isinstance(word, messages.Checkpointing):
            self.checkpointing = word
        elif isinstance(word, messages.Release):
            self.saves = word.saves
        for slot in self.slots.values():
            slot.checkpoints.on_word(word)

    def end(self) -> None:
        """This membership is over: what writes its checkpoints stops, and lets go of its slots."""

        def abandon() -> None:
            self._drop_arrivals()
            if self.ready_memory is not None:
                self.ready_memory.prepare(())
            for slot in self.slots.values():
                slot.checkpoints.abandon()
                if slot.restoring is not None:
                    slot.restoring.cancel()

        self.run(abandon)

    def _on_move(self, word: messages.Move) -> None:
        """Begins to copy a slot here."""
        placement = self.placement
        if self.job is None or placement is None or (word.epoch, word.era) != (placement.epoch, self.era):
            return  # over
        arrival = self.arrivals.get(word.slot)
        if arrival is None or (arrival.word.epoch, arrival.word.era) != (word.epoch, word.era):
            if arrival is not None:
                arrival.cancel()
                self._let_go(arrival.held)
            lives = [place.incarnation for place in placement.slots]
            held = self._holdings(self.job, word.slot, word.incarnation, lives, fresh=False)
            arrival = self.arrivals[word.slot] = SlotImport(self, held, word, self.settings)
        arrival.on_word(word)

    def _let_go(self, held: Holdings) -> None:
        """Gives back what a stopped slot had of the tier's memory, for the others."""
        if self.tier is not None:
            self.tier.let_go(store for shard in held.shards for store in shard.stores)
            self.emit(_collect)

    def _drop_arrivals(self) -> None:
        for arrival in self.arrivals.values():
            arrival.cancel()
            if all(slot.held is not arrival.held for slot in self.slots.values()):
                self._let_go(arrival.held)
        self.arrivals = {}

    def _take_era(self, word: messages.Era) -> None:
        """Stops all slots in a new era, as trainers were lost, or slots beyond repair; and lets them go on once it is
        known where."""
        era, step = word.era, word.step
        self.load_end = word.load_end  # `step` was chosen with it: before training no dense model is needed
        if era > self.era:
            self.era, self.frozen = era, True
            for slot in self.slots.values():
                slot.freeze()
        self._learn(word.partial_restores)
        if era == self.era and self.frozen and step is not None:
            self.frozen, self.resume_step, self.done, self.floor = False, step, word.done, word.floor
            self.saves = self.saves.until(word.done)
            for slot in self.slots.values():
                if word.keeps:
                    slot.go_on()
                else:
                    slot.go_back(step, word.done)

    def _learn(self, partial_restores: list[messages.PartialRestore]) -> None:
        """Applies partial restores that this server has not seen. Must run before anything else of that era is done or
        answered."""
        news = partial_restores[len(self.partial_restores) :]
        if len(partial_restores) >= len(self.partial_restores):
            self.partial_restores = partial_restores
        for partial_restore in news:
            for slot in self.slots.values():
                slot.on_partial_restore(partial_restore)

    def _restore_of(self, index: int, incarnation: int) -> messages.PartialRestore:
        """Returns what a slot reads as the whole cluster begins with a checkpoint."""
        restored = self.restored
        assert restored is not None, "a placement that restores comes with the checkpoint"
        lives: list[tuple[int, int, int | None]] = [(index, incarnation, restored.done)]
        return messages.PartialRestore(lives, restored.url, restored.folder, restored.done, dense_lost=True)

    def _partial_restore_of(self, index: int, incarnation: int) -> messages.PartialRestore | None:
        """Returns the partial restore by which this incarnation of a slot begins; None if it does not begin by one."""
        lives = {(slot, life): one for one in self.partial_restores for slot, life, _ in one.lives if life > 0}
        return lives.get((index, incarnation))

    def _take_job(self, job: JobSpec, restored: messages.Restored | None) -> None:
        if self.job is not None and self.job != job:
            raise ValueError("this server already serves another job; start the cluster anew")
        begins = 0 if restored is None else restored.done
        if self.job is None and self.resume_step == 0:
            self.done = begins
        self.job, self.restored = job, restored
        self.code = LinearCode(job.code.k, job.code.parities)
        self.layouts = job.layouts
        self.validator = MessageValidator(job, self.layouts, begins)

    def _take_placement(self, placement: Placement) -> None:
        if self.job is None or not self.place(placement):
            return
        self.waits.end_all()
        incarnations = [p.incarnation for p in placement.slots]
        for slot in self.slots.values():
            for other, incarnation in enumerate(incarnations):
                if other != slot.index:
                    slot.meet(other, incarnation)
        for index, place in enumerate(placement.slots):
            mine = self.slots.get(index)
            if mine is not None and place.incarnation > mine.incarnation:
                del self.slots[index]
                mine.die()
                self._let_go(mine.held)
            if mine is not None and mine is self.slots.get(index):
                mine.slot_export.end()
            if place.server == self.name and index not in self.slots:
                self._host(self.job, index, place.incarnation, incarnations)
        self._drop_arrivals()
        self._make_ready()

    def _make_ready(self) -> None:
        """As long as it has no slot, memory for any of them is made ready: one that is lost comes here at once."""
        if self.job is None or self.ready_memory is None or self.tier is not None:
            return
        sizes = []
        for table_group, layout in zip(self.job.table_groups, self.layouts, strict=True) if not self.slots else ():
            for rows_of in (layout.data_rows, layout.parity_rows):
                sizes.append(table_group.schema.nbytes * max(map(rows_of, range(layout.slots))))
        self.ready_memory.prepare(sizes)

    def _host(self, job: JobSpec, index: int, incarnation: int, incarnations: list[int]) -> None:
        """Hosts an incarnation of a slot from now on."""
        restores = self.placement is not None and self.placement.restoring
        fresh, arrival = incarnation == 0 and not restores, self.arrivals.get(index)
        if arrival is not None and (not arrival.arrived or arrival.word.incarnation != incarnation):
            arrival = None
        partial_restore = (
            self._restore_of(index, incarnation) if restores else self._partial_restore_of(index, incarnation)
        )
        if arrival is not None:
            held = arrival.settle()
        else:
            born = [0] * len(incarnations) if fresh else incarnations
            try:
                held = self._holdings(job, index, incarnation, born, fresh, filled=partial_restore is not None)
            except TierFailed as error:
                if incarnation:
                    raise  # this server is lost; another one may have room
                log.error("slot %d cannot begin: %s", index, error)
                self.tell(messages.Unrecoverable(index, incarnation, f"{self.name}: {error}"[:REASON_MOST]))
                return
        policy = policy_of(job.code.protection, self.settings.experiment)
        slot = self.slots[index] = Slot(self, held, policy, self.settings, fresh, partial_restore, arrival)
        for partial_restore in self.partial_restores if fresh else ():
            slot.on_partial_restore(partial_restore)
        if slot.ready:  # the placement may come late: others were replaced meanwhile, trainers lost
            for other, life in enumerate(incarnations):
                if other != index:
                    slot.meet(other, life)
            slot.tell(messages.Ready(*slot.life))
            slot.tell_reach()

    def _holdings(
        self, job: JobSpec, index: int, incarnation: int, incarnations: list[int], fresh: bool, filled: bool = False
    ) -> Holdings:
        sealed = self.settings.record_checks != "none"
        stores: Stores | None = None
        if self.tier is not None:
            stores = partial(self.tier.make, must=incarnation > 0)
        elif self.ready_memory is not None and not (fresh or filled):
            stores = stores_in(self.ready_memory)
        kept = [name for name in self.settings.tier_keep.split(",") if name]
        known = [name for name in kept if name in job.place_of_table]
        unknown = ", ".join(name for name in kept if name not in known)
        if unknown and not incarnation:
            few = ", ".join([table.name for table in job.tables][:TABLES_NAMED])
            raise TierFailed(f"`tier_keep` names {unknown}, and no table of the job is called so: it has {few} ...")
        if self.tier is not None and not incarnation:
            self.tier.require_room(
                (rows, table_group.schema.nbytes, parity)
                for table_group, layout in zip(job.table_groups, self.layouts, strict=True)
                for rows, parity in ((layout.data_rows(index), False), (layout.parity_rows(index), True))
            )
        held = Holdings(job, self.code, self.layouts, index, incarnation, incarnations, fresh, sealed, filled, stores)
        held.keep_last_(known)
        return held

    def read_tier(self, read: Callable[[], None], done: Callable[[], None], awaited: bool) -> None:
        tier = self.tier
        assert tier is not None, "who reads has a tier"

        self.emit(lambda: tier.run(read, lambda: self.run(done), awaited))

    # from other processes -----------------------------------------------------------------------

    def handle(self, request: wire.Request[Any], reply: Callable[[Answer], None]) -> None:
        self.run(self._handle, request, lambda answer: self.emit_answer(lambda: reply(answer)))

    def _handle(self, request: wire.Request[Any], reply: Callable[[Answer], None]) -> None:
        slot = self.slots.get(request.slot)
        if slot is None:
            reply(Refused(f"slot {request.slot} is not on {self.name}"))
        elif slot.incarnation != request.incarnation:
            reply(Refused(f"slot {request.slot} is incarnation {slot.incarnation} here, not {request.incarnation}"))
        elif request.era != self.era:
            reply(Refused(f"slot {request.slot} is in era {self.era}, not {request.era}"))
        elif isinstance(request, (wire.Adopt, wire.Cut)) and request.frozen != self.frozen:
            reply(Refused("one of the two has gone back, the other has not yet"))
        elif self.frozen and isinstance(request, TRAINERS_ONLY):
            reply(Refused("the trainers were lost"))
        elif (fault := self._fault_of(slot, request)) is not None:
            COMPLAINTS.add("a request is refused", f"{type(request).__name__}: {fault}")
            reply(Malformed(f"not a request of this job: {fault}"))
        else:
            slot.handle(request, reply)

    def _fault_of(self, slot: Slot, request: wire.Request[Any]) -> str | None:
        if self.validator is None:
            return None
        applied = slot.rule.applied if slot.ready else None
        return self.validator.fault_of_request(request, applied, self._life_of)

    def _life_of(self, slot: int) -> int:
        return self.placement.slots[slot].incarnation if self.placement is not None else 0

    def fault_of_answer(self, request: wire.Request[Any], answer: Answer) -> str | None:
        if self.validator is None:
            return None
        fault = self.validator.fault_of_answer(request, answer, self._life_of)
        if fault is None and isinstance(request, wire.Fold | wire.Attach) and isinstance(answer, FOLDED):
            source = self.slots.get(request.source)
            folded = answer.step if isinstance(answer, wire.Folded) else answer.folded
            if source is not None and folded > source.rule.applied:
                fault = f"step {folded} of slot {request.source} is folded, which has applied {source.rule.applied}"
        return fault

    # looking for damage -------------------------------------------------------------------------

    def start_scrubbing(self) -> None:
        """Begins to look at records and parities in the background. For who has a real clock; called once."""
        if self.settings.record_checks != "none" and self.settings.scrub_bytes_per_s > 0:
            self.run(self._scrub_later)

    def flip(self, parity: bool) -> None:
        """Flips a bit of a record or a parity behind its seal: for `torch-ecrec chaos`, which waits until it is found.

        Where no slot is whole just now, it does so once one is.
        """

        def change() -> None:
            if not flip(list(self.slots.values()), parity, random.Random()):
                self.later(FLIP_AGAIN_S, change)

        self.run(change)

    def flip_below(self) -> None:
        """Flips a bit of a record or parity that is on the disk of its tier; it is read a little later."""

        def change() -> None:
            look = flip_below(list(self.slots.values()), random.Random())
            self.later(*((FLIP_AGAIN_S, change) if look is None else (FLIPPED_READ_S, look)))

        self.run(change)

    def stalled(self) -> ClusterError | None:
        unanswered_s = self.tier.unanswered_s if self.tier is not None else 0.0
        if self.tier is None or unanswered_s < self.settings.lease_s:
            return None
        return TierFailed(f"the disk of {self.tier.folder} has not answered for {unanswered_s:.1f} s: it hangs")

    def _scrub_later(self) -> None:
        self.later(self._scrub_every_s, self._scrub)

    @property
    def _scrub_every_s(self) -> float:
        return min(max(SCRUB_BYTES / self.settings.scrub_bytes_per_s, SCRUB_LEAST_S), SCRUB_MOST_S)

    def _scrub(self) -> None:
        """Scrubs as many bytes as are due since the last time, in equal shares for all slots."""
        due = self.settings.scrub_bytes_per_s * self._scrub_every_s
        for slot in list(self.slots.values()):
            slot.scrubber.scrub(max(1, int(due) // len(self.slots)))
        self._scrub_later()

    # for people -----------------------------------------------------------------------------------

    def report(self) -> Report:
        """Figures of every slot; nothing while the host is busy, so that a heartbeat never waits for it."""
        found = [Report()]

        def look() -> None:
            slots = [slot.figures() for slot in self.slots.values()]
            found.append(Report(slots=slots, waits=self.waits.take() if slots else None))

        self.run_if_idle(look)
        return found[-1]


def _collect() -> None:
    """Frees what has left: a slot and its parts hold each other."""
    gc.collect()
