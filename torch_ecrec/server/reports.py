"""What the coordinator is told of a slot: words that it may have missed are said again, and figures for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch_ecrec.durability.holdings import Missing
from torch_ecrec.durability.policy import Durability
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import Renewal
from torch_ecrec.protocol.status import SlotReport
from torch_ecrec.protocol.step_rule import StepRule
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.shard import Shard
from torch_ecrec.server.checkpoints import SlotCheckpoints
from torch_ecrec.server.renewing import Renewing
from torch_ecrec.server.snapshots import SnapshotStore


class ReportingHost(Protocol):
    """What this needs of the process that hosts the slot."""

    @property
    def era(self) -> int:
        """Which life of the trainers it is."""

    @property
    def frozen(self) -> bool:
        """All servers have stopped, and where they go on is not known yet."""

    @property
    def origin(self) -> int | None:
        """The step that training begins after; None: initial values are being loaded."""

    @property
    def renewals(self) -> list[Renewal]:
        """Slots that began anew, in this run."""


class Looks(Protocol):
    """What looks for damage."""

    scrubbed_bytes: int
    rounds: int
    damaged: int
    mended: int

    def tell_beyond(self) -> None:
        """Says that the slot has given up, if it has."""


class ReportedSlot(Protocol):
    """What this needs of its slot: it reads that, and changes nothing."""

    index: int
    incarnation: int
    ready: bool
    reported: bool
    hopeless: bool
    going_back_to: int | None
    not_trained: int | None
    rule: StepRule
    missing: Missing
    snapshots: SnapshotStore
    durability: Durability
    checkpoints: SlotCheckpoints
    renewing: Renewing | None

    @property
    def scrubber(self) -> Looks:
        """Looks for what is damaged."""

    @property
    def host(self) -> ReportingHost:
        """The process that hosts it."""

    @property
    def shards(self) -> Sequence[Shard]:
        """Its records and parities, by slab."""

    @property
    def log(self) -> DeltaLog:
        """The deltas of its recent steps."""

    @property
    def life(self) -> tuple[int, int]:
        """Its index and incarnation: how each message about it begins."""

    def tell(self, word: messages.OfMember) -> None:
        """Tells the coordinator something of this incarnation."""

    def give_up(self, reason: str = "") -> None:
        """Says that it cannot serve."""


class Reports:
    """Of one life of a slot."""

    def __init__(self, slot: ReportedSlot) -> None:
        self._slot = slot

    def ready(self) -> None:
        """It serves."""
        renewing = self._slot.renewing
        self._slot.tell(messages.Ready(*self._slot.life, None if renewing is None else renewing.at))

    def rebuilt(self) -> None:
        """Nothing is missing, as far as this host knows of slots that began anew."""
        self._slot.tell(messages.Rebuilt(*self._slot.life, len(self._slot.host.renewals)))

    def reach(self) -> None:
        """Which steps it can go back to, if that is asked for."""
        slot = self._slot
        if slot.host.frozen and slot.ready:
            kept = [(step, *found) for step, found in slot.snapshots.found().items()]
            applied, floor = slot.rule.applied, slot.log.floor
            done = None if slot.not_trained is None else applied - slot.not_trained
            slot.tell(messages.Reach(*slot.life, slot.host.era, applied, floor, kept, done))

    def again(self) -> None:
        """Everything the coordinator should know of this incarnation."""
        slot = self._slot
        slot.scrubber.tell_beyond()
        if slot.ready:
            self.ready()
            if slot.reported:
                self.rebuilt()
            self.reach()
            if not slot.host.frozen and slot.going_back_to is None:
                slot.tell(messages.Durable(*slot.life, slot.host.era))
        elif slot.hopeless:
            slot.give_up(slot.renewing.failed if slot.renewing is not None else "")

    def trained(self, step: int) -> int:
        """Steps of training up to a step near the last applied; one that loads, in between, counts as one, too."""
        slot = self._slot
        others = slot.host.origin if slot.not_trained is None else slot.not_trained
        return 0 if others is None else max(0, step - others)

    def figures(self) -> SlotReport:
        """For `torch-ecrec status`."""
        slot, rule = self._slot, self._slot.rule
        return SlotReport(
            slot=slot.index,
            incarnation=slot.incarnation,
            ready=slot.ready,
            step=self.trained(rule.applied),
            acknowledged=self.trained(rule.acknowledged),
            watermark=self.trained(rule.watermark),
            rebuilt=slot.missing.done_fraction,
            record_bytes=sum(shard.data_bytes for shard in slot.shards),
            parity_bytes=sum(shard.parity_bytes for shard in slot.shards),
            log_bytes=slot.log.bytes + slot.durability.log_bytes,
            snapshot_bytes=slot.snapshots.bytes,
            checkpoint_bytes=slot.checkpoints.kept_bytes,
            saver_bytes=slot.checkpoints.saver_bytes,
            saver_pick_s=round(slot.checkpoints.picked_s, 6),
            scrubbed_bytes=slot.scrubber.scrubbed_bytes,
            scrub_rounds=slot.scrubber.rounds,
            damaged=slot.scrubber.damaged,
            mended=slot.scrubber.mended,
        )
