"""The policy "none": a step counts as soon as it is applied; nothing is kept elsewhere, and any loss is final."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torch_ecrec.durability.context import HostContext, Reply, SlotContext
from torch_ecrec.durability.policy import Durability, Kept, PeerRequest
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.settings import Settings


class Unprotected(Durability):
    """The `Durability` of a slot without protection."""

    def __init__(self, slot: SlotContext, host: HostContext, scrubber: Scrubber, settings: Settings) -> None:
        self.slot, self.held = slot, slot.held

    @property
    def settled(self) -> int:
        return self.held.rule.applied

    @property
    def reach(self) -> int:
        return self.held.rule.applied

    @property
    def caught_up(self) -> bool:
        return True

    def kept(self) -> Kept:
        return Kept()

    def on_applied(self, step: int) -> None:
        self.slot.on_settled(self.settled)

    def on_forgotten(self, step: int) -> None:
        """Does nothing: what is lost is final."""

    def adopt(self) -> None:
        """Does nothing: nobody knows anything of a lost slot, and the coordinator stops the cluster when one is
        lost."""

    def take_over(self, floors: Mapping[int, int], attached: Mapping[int, int]) -> Mapping[int, DeltaLog]:
        if floors:
            raise LookupError(f"slot {self.held.index} keeps nothing of slots {[*floors]}: there is no protection")
        return {}

    def connect(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def go_back(self, step: int) -> None:
        pass

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        return False

    def mend(self, table_group: int, parity: bool, positions: np.ndarray) -> str:
        return "there is no protection"

    def compare(self, table_group: int, first: int, end: int) -> None:
        """Does nothing: there are no parities."""

    def meet(self, slot: int, incarnation: int) -> None:
        self.held.rule.learn(slot, incarnation, self.held.log.floor)

    def meet_anew(self, slot: int, incarnation: int) -> bool:
        self.meet(slot, incarnation)
        return False

    def handle(self, request: PeerRequest, reply: Reply[Answer]) -> None:
        reply(Refused(f"slot {self.held.index} keeps nothing of other slots: there is no protection"))
