"""One incarnation of a slot: its records and parities, the steps it applies, and what it answers.

A slot runs inside its node (`Node.run`), so nothing here locks. It owns

    shards        records and parities, one `Shard` per slab
    rule          which steps are applied, folded, acknowledged (`step.py`)
    log           the deltas of its recent steps: redo for holders, undo for readers
    pushes        gradients that wait for their step, by step and trainer
    loads         initial values that wait for theirs: the first steps, see `wire.Load`
    protection    folds sent and received (`protection.py`)
    rebuild       what is missing, on the new host of a lost slot (`rebuild.py`)
    snapshots     parts of the dense model (`snapshots.py`)

A request that cannot be answered yet is parked (`waiting`) and looked at again when something changed: a step was
applied, a record was repaired, the slot became ready. Its caller has the time limit.

Shape legend: U records, D embedding dim, B record bytes; lists hold one array per slab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.step_rule import StepRule
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records import merge
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.shard import Shard
from torch_ecrec.runtime.tensors import as_array, as_tensor
from torch_ecrec.server.protection import Protection
from torch_ecrec.server.rebuild import Rebuild
from torch_ecrec.server.snapshots import SnapshotStore
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings

if TYPE_CHECKING:
    from torch_ecrec.server.service import Host

Reply = Callable[[Answer], None]
Changed = tuple[list[np.ndarray], list[np.ndarray]]  # by a step, per slab: (U,) positions and (U, B) deltas


class Slot:
    """One incarnation of one slot.

    Args:
        host: the server process it lives in.
        job: what is trained.
        index: which slot.
        incarnation: which life of it.
        incarnations: the incarnation of every slot, known from birth.
        fresh: true at the start of a job: records get their initial values, parities encode them. False on the new
            host of a lost slot: everything is missing until it is rebuilt.
    """

    def __init__(
        self, host: Host, job: JobSpec, index: int, incarnation: int, incarnations: Sequence[int], fresh: bool
    ) -> None:
        self.host = host
        self.job = job
        self.index = index
        self.incarnation = incarnation
        self.settings: Settings = host.settings
        self.code: LinearCode = host.code
        self.layouts: tuple[Layout, ...] = host.layouts
        first = self.layouts[0]
        holders, sources = first.holders(index), first.sources(index)
        self.rule = StepRule(
            slot=index,
            holders=holders,
            sources=sources,
            trainers=job.trainers,
            incarnations=dict(enumerate(incarnations)),
            confirmed=dict.fromkeys(holders, 0),
            folded=dict.fromkeys(sources, 0) if fresh else {},
            catch_up=dict.fromkeys(sources, 0) if fresh else {},
        )
        self.shards = [
            Shard(slab.schema, layout.data_rows(index), layout.parity_rows(index), scattered=not fresh)
            for slab, layout in zip(job.slabs, self.layouts, strict=True)
        ]
        self.log = DeltaLog(len(job.slabs))
        self.pushes: dict[int, dict[int, wire.Push]] = {}
        self.loads: dict[int, wire.Load] = {}
        self.push_replies: dict[int, list[Reply]] = {}
        self.merged: tuple[int, list[merge.Merged]] | None = None
        self.waiting: list[tuple[Callable[[], Answer | None], Reply]] = []
        self.ready = fresh
        self.dead = False
        self.hopeless = False
        self.going_back_to: int | None = None  # until that step is durable
        self.snapshots = SnapshotStore(self)
        self.protection = Protection(self)
        self.rebuild = Rebuild(self, whole=fresh)
        if fresh:
            self.initialise_()
        else:
            self.protection.adopt()

    def initialise_(self) -> None:
        """Gives every record its initial value and every parity the code of its stripe's initial values."""
        for slab, layout, shard in zip(self.job.slabs, self.layouts, self.shards, strict=True):
            positions = np.arange(layout.data_rows(self.index), dtype=np.int64)
            initial = slab.initial(self.job.seed)
            shard.initialise_(layout.row_at(self.index, positions), initial)
            parities = np.arange(layout.parity_rows(self.index), dtype=np.int64)
            for group in layout.group(self.index, True, parities):
                j = group.member - layout.k
                for member in range(layout.k):
                    exists = layout.exists(group.base, member, group.rotations)
                    stripes = group.rotations[exists] * layout.slots + group.base
                    coefficient = self.code.coefficients[j, member]
                    shard.fold_(
                        self.code,
                        np.ascontiguousarray(parities[group.where][exists]),
                        initial.of(stripes * layout.k + member),
                        np.full(len(stripes), coefficient, dtype=np.uint8),
                    )

    # requests -----------------------------------------------------------------------------------

    def handle(self, request: wire.Request, reply: Reply) -> None:
        """Dispatches a request; `reply` is called now or when it can be answered."""
        handlers: dict[type, Callable[..., None]] = {
            wire.Lookup: self._on_lookup,
            wire.Push: self._on_push,
            wire.Snapshot: self.snapshots.on_snapshot,
            wire.Load: self._on_load,
            wire.Export: self._on_export,
            wire.Fold: self.protection.on_fold,
            wire.Attach: self.protection.on_attach,
            wire.Adopt: self.protection.on_adopt,
            wire.Cut: self.protection.on_cut,
            wire.Versions: self.protection.on_versions,
            wire.Fetch: self.protection.on_fetch,
            wire.FetchSnapshots: self.snapshots.on_fetch,
        }
        handlers[type(request)](request, reply)

    def park(self, attempt: Callable[[], Answer | None], reply: Reply) -> None:
        """Answers now if `attempt` yields an answer, else when it first does."""
        answer = attempt() if self.ready else None
        if answer is None:
            self.waiting.append((attempt, reply))
        else:
            reply(answer)

    def progress(self) -> None:
        """Something changed: applies what can be applied and answers what can be answered."""
        self.try_apply()
        if not self.ready:
            return
        waiting, self.waiting = self.waiting, []
        for attempt, reply in waiting:
            self.park(attempt, reply)

    def become_ready(self, cut: int, floor: int, log: DeltaLog) -> None:
        """The new host of a lost slot knows the cut and the slot's own log before it: it serves from now on."""
        self.log = log
        self.rule.applied = self.rule.acknowledged = cut
        self.rule.confirmed = dict.fromkeys(self.rule.holders, floor)
        self.ready = True
        self.tell("ready")
        self.pushes = {step: got for step, got in self.pushes.items() if step > cut}
        self.loads = {step: load for step, load in self.loads.items() if step > cut}
        self._answer_pushes()  # those of steps up to the cut that came while this was not known
        if not self.host.frozen:
            self.protection.attach_all()
        self.rebuild.start()
        self.progress()
        self.report_reach()

    def die(self) -> None:
        """This incarnation has been replaced: everyone who waits is told to ask again."""
        self.ready, self.dead = False, True
        self.protection.stop()
        self._refuse_all(f"slot {self.index} moved")

    def _refuse_all(self, reason: str) -> None:
        replies = [reply for _, reply in self.waiting] + [r for rs in self.push_replies.values() for r in rs]
        self.waiting, self.push_replies = [], {}
        for reply in replies:
            reply(Refused(reason))

    def known_incarnations(self) -> list[int]:
        """Of every slot, the life that this one listens to."""
        return [
            self.rule.incarnations.get(i, 0) if i != self.index else self.incarnation
            for i in range(self.job.code.slots)
        ]

    def tell(self, kind: str, **more: object) -> None:
        """Tells the coordinator something of this incarnation."""
        self.host.tell({"type": kind, "slot": self.index, "incarnation": self.incarnation, **more})

    def tell_again(self) -> None:
        """Everything the coordinator should know of this incarnation."""
        if self.ready:
            self.tell("ready")
            self.rebuild.tell_again()
            self.report_reach()
            if not self.host.frozen and self.going_back_to is None:
                self.tell("durable", era=self.host.era)
        elif self.hopeless:
            self.give_up()

    def give_up(self) -> None:
        """No holder that has caught up knows this slot: more is lost than the code repairs."""
        self.hopeless = True
        self.tell("unrecoverable")

    # going back ---------------------------------------------------------------------------------

    def freeze(self) -> None:
        """The trainers are lost: nothing of theirs counts from now on, until it is known where they start again."""
        self.going_back_to = None
        self.pushes, self.loads, self.merged = {}, {}, None
        self._refuse_all("the trainers were lost")
        self.protection.freeze()
        self.report_reach()

    def report_reach(self) -> None:
        """Tells the coordinator which steps this slot can go back to."""
        if self.host.frozen and self.ready:
            kept = [[step, trainers] for step, trainers in self.snapshots.trainers_of().items()]
            self.tell("reach", era=self.host.era, applied=self.rule.applied, floor=self.log.floor, snapshots=kept)

    def go_back(self, step: int) -> None:
        """Takes back every step after `step`, here and in the parities; then makes `step` durable."""
        while self.log.last > step:
            for slab, (positions_U, deltas_UB) in enumerate(self.log.pop()):
                if self.rebuild.remaining:  # what is missing is decoded as of a step that is left
                    there = ~self.rebuild.missing[slab, False][positions_U]
                    positions_U = np.where(there, positions_U, -1)
                self.shards[slab].undo_(positions_U, deltas_UB)
        self.protection.undo_all_after(step)
        self.rule.go_back(step)
        self.snapshots.go_back(step)
        self.going_back_to = step
        self.protection.attach_all()
        self.progress()
        self.check_durable()

    def check_durable(self) -> None:
        """The step that the trainers start again after survives r losses, of records and of the dense model."""
        step = self.going_back_to
        if step is None or self.host.frozen or self.rule.settled < step or not self.snapshots.complete:
            return
        self.going_back_to = None
        self.tell("durable", era=self.host.era)

    def _on_lookup(self, request: wire.Lookup, reply: Reply) -> None:
        positions = [p.numpy() for p in request.positions]

        def attempt() -> Answer | None:
            before = request.step - 1
            if self.rule.applied < before or self.rebuild.is_missing(positions):
                return None
            if before < self.log.floor and before < self.rule.applied:
                return self._forgotten(before)
            weights = []
            for s, (shard, rows) in enumerate(zip(self.shards, positions, strict=True)):
                if self.rule.applied == before:
                    weights.append(as_tensor(shard.gather_weights(rows, request.bfloat16)))
                else:
                    records_UW = self.records_as_of(s, rows, before).view(np.float32)
                    weight_UD = torch.from_numpy(records_UW[:, : self.job.slabs[s].dim].copy())
                    weights.append(weight_UD.bfloat16() if request.bfloat16 else weight_UD)
            return wire.Rows(weights)

        self.park(attempt, reply)

    def _on_push(self, request: wire.Push, reply: Reply) -> None:
        rule = self.rule
        rule.on_resumable(request.trainer, request.resumable)
        if rule.is_acknowledged(request.step):
            reply(wire.Acknowledged(request.step))
        else:
            self.push_replies.setdefault(request.step, []).append(reply)
            if request.step > rule.applied:
                self.pushes.setdefault(request.step, {})[request.trainer] = request
                self.progress()
        self.forget()

    def _on_load(self, request: wire.Load, reply: Reply) -> None:
        rule = self.rule
        for trainer in range(rule.trainers):  # the others have done nothing yet that could be taken back
            rule.on_resumable(trainer, request.resumable)
        if rule.is_acknowledged(request.step):
            reply(wire.Acknowledged(request.step))
        else:
            self.push_replies.setdefault(request.step, []).append(reply)
            if request.step > rule.applied:
                self.loads[request.step] = request
                self.progress()
        self.forget()

    def _on_export(self, request: wire.Export, reply: Reply) -> None:
        """Whole records as of a step; parities only when nothing is under way (they are for checks)."""
        positions = request.positions.numpy()
        asked = [positions if s == request.slab else positions[:0] for s in range(len(self.shards))]

        def attempt() -> Answer | None:
            if request.parity:
                whole = self.rebuild.whole and all(step >= request.step for step in self.rule.folded.values())
                parity = self.shards[request.slab].gather(positions, parity=True) if whole else None
                return None if parity is None else wire.Records(torch.from_numpy(parity))
            if request.step < self.log.floor and request.step < self.rule.applied:
                return self._forgotten(request.step)
            if self.rule.applied < request.step or self.rebuild.is_missing(asked):
                return None
            return wire.Records(torch.from_numpy(self.records_as_of(request.slab, positions, request.step)))

        self.park(attempt, reply)

    def _forgotten(self, step: int) -> Answer:
        """Nobody who takes part in training asks for a step before the watermark, but by a copy that comes late."""
        return wire.Forgotten(f"slot {self.index} cannot show step {step}: its log begins after step {self.log.floor}")

    def records_as_of(self, slab: int, positions: np.ndarray, step: int) -> np.ndarray:
        """(U, B) record bytes after `step`; raises LookupError if the log does not go back that far."""
        records = self.shards[slab].gather(positions)
        if step < self.rule.applied:
            undo = self.log.changes(slab, positions, step, self.rule.applied)
            if undo is not None:
                np.bitwise_xor(records, undo, out=records)
        return records

    # steps --------------------------------------------------------------------------------------

    def try_apply(self) -> None:
        """Applies every step of which everything is here and whose records are all there, in order."""
        while self.ready:
            step = self.rule.applied + 1
            change = self._load_(step) if step in self.loads else self._update_(step)
            if change is None:
                return
            self.rule.on_applied(step)
            self.log.append(step, *change)
            self.protection.on_applied(step)
            self.acknowledge()

    def _update_(self, step: int) -> Changed | None:
        """Applies a step of training; None if pushes or records are missing."""
        got = self.pushes.get(step, {})
        if len(got) < self.rule.trainers:
            return None
        if self.merged is None or self.merged[0] != step:
            self.merged = (step, self._merge(got))
        merged = self.merged[1]
        positions, deltas = [part.positions for part in merged], []
        if self.rebuild.is_missing(positions):
            return None
        for slab, shard, rate, part in zip(self.job.slabs, self.shards, got[0].rates, merged, strict=True):
            deltas.append(shard.apply_(slab.optimizer.optimizer, part, rate, dict(slab.optimizer.fixed)))
        self.merged = None
        del self.pushes[step]
        return positions, deltas

    def _load_(self, step: int) -> Changed | None:
        """Applies a step that loads initial values; None if records are missing."""
        load = self.loads[step]
        nothing = np.empty(0, dtype=np.int64)
        positions = [load.positions.numpy() if s == load.slab else nothing for s in range(len(self.shards))]
        if self.rebuild.is_missing(positions):
            return None
        deltas = []
        for slab, (positions_U, shard) in enumerate(zip(positions, self.shards, strict=True)):
            values_UB = np.empty((0, shard.schema.nbytes), dtype=np.uint8)
            if slab == load.slab:
                values_UB = self._initial(slab, positions_U) if load.records is None else load.records.numpy()
            deltas.append(shard.overwrite_(positions_U, values_UB))
        del self.loads[step]
        return positions, deltas

    def _initial(self, slab: int, positions: np.ndarray) -> np.ndarray:
        """(U, B) what records were before anything was loaded."""
        initial = self.job.slabs[slab].initial(self.job.seed)
        return initial.of(self.layouts[slab].row_at(self.index, positions))

    def _merge(self, got: dict[int, wire.Push]) -> list[merge.Merged]:
        """Gradients of the same record are summed in trainer order: the bits do not depend on who came first."""
        return [
            merge.merge([(got[i].positions[s].numpy(), as_array(got[i].gradients[s])) for i in sorted(got)])
            for s in range(len(self.shards))
        ]

    def acknowledge(self) -> None:
        """Tells the trainers what now survives r losses."""
        if self.rule.acknowledge():
            self._answer_pushes()
        self.forget()
        self.check_durable()

    def _answer_pushes(self) -> None:
        for step in [t for t in self.push_replies if self.rule.is_acknowledged(t)]:
            for reply in self.push_replies.pop(step):
                reply(wire.Acknowledged(step))

    def forget(self) -> None:
        self.log.forget(self.rule.may_forget())
        self.snapshots.forget(self.rule.watermark)

    # reports ------------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Figures for `torch-ecrec status`."""
        rule, origin = self.rule, self.host.origin
        return {
            "slot": self.index,
            "incarnation": self.incarnation,
            "ready": self.ready,
            "step": wire.training_step(rule.applied, origin),
            "acknowledged": wire.training_step(rule.acknowledged, origin),
            "watermark": wire.training_step(rule.watermark, origin),
            "rebuilt": self.rebuild.done_fraction,
            "record_bytes": sum(shard.data_bytes for shard in self.shards),
            "parity_bytes": sum(shard.parity_bytes for shard in self.shards),
            "log_bytes": self.log.bytes + self.protection.log_bytes,
            "snapshot_bytes": self.snapshots.bytes,
        }
