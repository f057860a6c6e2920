"""The policy "none": a step counts as soon as it is applied; nothing is kept elsewhere, and any loss is final."""

from __future__ import annotations

import numpy as np

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.durability.policy import Owner, PeerRequest, Peers, Reply
from torch_ecrec.protocol.wire import Answer, Refused
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.settings import Settings


class Unprotected:
    """The `Durability` of a slot without protection."""

    def __init__(self, owner: Owner, peers: Peers, held: Holdings, settings: Settings) -> None:
        self.owner, self.held = owner, held

    @property
    def caught_up(self) -> bool:
        return True

    @property
    def log_bytes(self) -> int:
        return 0

    def steps_kept(self) -> dict[str, int]:
        return {}

    def on_applied(self, step: int) -> None:
        self.owner.on_settled(self.held.rule.settled)

    def adopt(self) -> None:
        """Nobody knows anything of a lost slot; the coordinator stops the cluster when one is lost."""

    def connect(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        return False

    def mend(self, slab: int, parity: bool, positions: np.ndarray) -> str:
        return "there is no protection"

    def compare(self, slab: int, first: int, end: int) -> None:
        """There are no parities."""

    def freeze(self) -> None:
        pass

    def go_back(self, step: int) -> None:
        pass

    def stop(self) -> None:
        pass

    def folds_kept(self) -> tuple[dict[int, DeltaLog], dict[int, int]]:
        return {}, {}

    def new_fold_log(self, source: int, floor: int) -> DeltaLog:
        raise LookupError(f"slot {self.held.index} keeps nothing of slot {source}: there is no protection")

    def take_over(self, logs: dict[int, DeltaLog], attached: dict[int, int]) -> None:
        pass

    def die(self) -> None:
        pass

    def meet(self, slot: int, incarnation: int) -> None:
        self.held.rule.learn(slot, incarnation, self.held.log.floor)

    def meet_anew(self, slot: int, incarnation: int) -> bool:
        self.meet(slot, incarnation)
        return False

    def handle(self, request: PeerRequest, reply: Reply[Answer]) -> None:
        reply(Refused(f"slot {self.held.index} keeps nothing of other slots: there is no protection"))
