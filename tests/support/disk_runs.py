"""Simulated clusters whose servers have tiers, on disks that fail, lie, and answer late."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flipped_runs import Flipped, is_damaged
from harness.membership import VirtualProcess
from harness.scenario import Scenario
from harness.simulation import SimulatedCluster
from harness.tiers import Disks, SmallTier

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.tiers.budget import Tier


class OnDisks(Flipped):
    """A cluster whose servers have tiers.

    Args:
        scenario: what runs; `tier_frames` is not 0.
        reads, writes: what is wrong with which, see `Disks`.
        late: reads take their time, and some much of it.
        checks: `Settings.record_checks`.

    Attributes:
        disks: of all servers.
        failed: why servers ended: their disks could not be written.
    """

    def __init__(
        self,
        scenario: Scenario,
        reads: Mapping[int, str] = {},
        writes: Mapping[int, str] = {},
        late: bool = False,
        checks: str = "background",
    ) -> None:
        self.disks, self.failed = Disks(reads, writes, seed=scenario.network_seed), list[str]()
        self.late = late
        super().__init__(scenario, (), checks=checks)

    def tier_of(self, name: str) -> Tier | None:
        if self.late:
            self.disks.clock = self.network.clock
        assert self.scenario.tier_frames
        return SmallTier(self.scenario.tier_frames, self.disks, lambda: name not in self.network.dead)

    def on_welcome(self, process: VirtualProcess) -> None:
        super().on_welcome(process)
        name = process.name
        if process.role != "server":
            return
        host: Any = self.hosts[name]
        turn = host._turn

        def asking(action: Any, args: Any) -> Any:
            """As `Node._turn`. A process that a `TierFailed` ends does nothing more."""
            if name in self.network.dead:
                host._lock.release()
                return []
            self.disks.asking += 1
            try:
                return turn(action, args)
            except TierFailed as error:
                self.failed.append(str(error))
                self.network.kill(name)
                return []
            finally:
                self.disks.asking -= 1

        host._turn = asking

    @property
    def may_be_damaged(self) -> bool:
        """Whether anything has gone wrong so far."""
        return bool(self.disks.fired or self.flipped)

    def verify(self) -> None:
        """Before anything has gone wrong, without asking all disks whether it is mended."""
        if self.may_be_damaged:
            super().verify()
        else:
            SimulatedCluster.verify(self)

    def all_mended(self) -> bool:
        """Nothing that is there is damaged."""
        stores = [store for slot in self.slots() for shard in slot.shards for store in shard.stores]
        return not any(is_damaged(store, 0, store.rows) for store in stores)

    @property
    def figures(self) -> list[Any]:
        """What the stores of the slots that live have done."""
        return [one for slot in self.slots() for shard in slot.shards for one in shard.tier_figures()]


def calm(scenario: Scenario) -> Scenario:
    """The same training without losses, in memory."""
    undo: dict[str, Any] = {"random_kills": 0, "random_trainer_kills": 0, "random_coordinator_kills": 0, "kills": ()}
    return dataclasses.replace(
        scenario, network_seed=0, trainer_kills=(), noise=0.0, reborn=False, tier_frames=0, **undo
    )
