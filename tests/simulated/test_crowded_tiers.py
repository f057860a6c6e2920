"""Servers with memory for the records of one slot, and no more: a survivor takes a second one all the same."""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disk_runs import calm
from harness import simulation
from harness.scenario import Scenario
from harness.simulation import SimulatedCluster, simulate

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import RecordStore
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.server.slot import Slot

ONE_LOST = Scenario(steps=25, spares=0, kills=((1, 2),), reborn=True, touch=0.2, tier_frames=1)


class Crowded(SimulatedCluster):
    """A cluster whose servers have real tiers.

    Args:
        scenario: what runs.
        folder: for their files.
        memory_bytes: of each.

    Attributes:
        most: how many slots one server has had at once.
        over: bytes that one has taken beyond its budget, at most, and at the end.
        shared: stores of slots, and those among which memory was shared, whenever a slot had died.
    """

    def __init__(self, scenario: Scenario, folder: Path, memory_bytes: int) -> None:
        self.folder, self.memory_bytes, self.most, self.over = folder, memory_bytes, 0, (0, 0)
        self.shared: list[tuple[int, int]] = []
        super().__init__(scenario)

    def tier_of(self, name: str) -> Tier | None:
        tier: Any = Tier(self.folder, self.memory_bytes)

        def run(read: Callable[[], None], then: Callable[[], None], awaited: bool = True) -> None:
            self.network.clock.later(0.001, lambda: (read(), then()) if name not in self.network.dead else None)

        tier.run = run
        return tier  # type: ignore[no-any-return]

    def on_event(self, number: int) -> None:
        for name, host in self.hosts.items():
            if name not in self.network.dead and host.tier is not None:
                self.most = max(self.most, len(host.slots))
                self.over = max(self.over[0], host.tier.over_bytes), host.tier.over_bytes
                slots = sum(len(slot.shards) for slot in host.slots.values())
                arrivals = sum(len(one.held.shards) for one in host.arrivals.values())
                self.shared.append((2 * (slots + arrivals), len(host.tier.stores) + len(host.tier._in_memory)))


def begins(folder: Path, slots: list[Slot], memory_bytes: int) -> bool:
    """Whether one server can begin with each of these slots, and not with two of them."""
    for slot in slots:
        tier, made = Tier(folder, memory_bytes), list[RecordStore]()
        try:
            for shard in slot.shards:
                for parity, store in enumerate(shard.stores):
                    made.append(tier.make(store.rows, store.nbytes, bool(parity), True))
        except TierFailed:
            return False
    return True


@pytest.mark.parametrize("without_spare", ["survivor", "wait"])
def test_a_survivor_takes_a_lost_slot_though_there_is_memory_for_one(
    without_spare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it would be lost, too, with its own slot: and one parity does not repair two."""
    monkeypatch.setattr(simulation, "REBORN_S", 0.01)  # while it trains: then the slot moves to the new process
    base = simulate(calm(ONE_LOST))
    ample = Crowded(dataclasses.replace(ONE_LOST, kills=()), tmp_path, 64 << 20)
    ample.go().check_against(base)
    sizes = range(1 << 20, 64 << 20, 1 << 16)
    enough = sizes[bisect.bisect_left(sizes, True, key=lambda size: begins(tmp_path, ample.slots(), size))]
    scenario = dataclasses.replace(ONE_LOST, without_spare=without_spare)
    cluster = Crowded(scenario, tmp_path, enough)
    run = cluster.go()
    assert run.fatal is None and run.kills == 1
    run.check_against(base)
    crowded = without_spare == "survivor"
    assert cluster.most == 1 + crowded
    assert any(event["event"] == "moved" for event in run.events) == crowded, "and it leaves again"
    assert ("bytes more than `tier_memory_bytes`" in caplog.text) == (cluster.over[0] > 0) == crowded
    assert not cluster.over[1]
    assert all(stores == beside for stores, beside in cluster.shared), "who has left has no share of the memory"


class Keeping(Crowded):
    """Whose servers are to keep some tables in memory."""

    def __init__(self, folder: Path, *tables: str) -> None:
        super().__init__(ONE_LOST, folder, 64 << 20)
        names = ",".join(tables)
        self.settings = dataclasses.replace(self.settings, tier=str(folder), tier_memory_bytes=1, tier_keep=names)
        for host in self.hosts.values():
            host.settings = self.settings


def test_tables_that_are_to_be_kept_are_those_of_the_job(tmp_path: Path) -> None:
    """The records of a table of that name go last; of another name it is said which there are."""
    first = ONE_LOST.tables[0]
    cluster = Keeping(tmp_path, first.name)
    run = cluster.go()
    run.check_against(simulate(calm(ONE_LOST)))
    table_group, start = ONE_LOST.job.place_of_table[first.name]
    for slot in cluster.slots():
        row_U = slot.layouts[table_group].row_at(slot.index, np.arange(slot.layouts[table_group].data_rows(slot.index)))
        wanted = np.flatnonzero((row_U >= start) & (row_U < start + first.rows)).tolist()
        assert [
            at for begin, end in slot.shards[table_group].stores[0]._last_to_go for at in range(begin, end)
        ] == wanted
    fatal = Keeping(tmp_path, first.name, "usres").go().fatal
    assert fatal is not None
    assert f"`tier_keep` names usres, and no table of the job is called so: it has {first.name}, " in fatal


def test_servers_with_too_little_memory_say_at_once_how_much_all_tables_take(tmp_path: Path) -> None:
    """Who gives them as much has a cluster that begins."""
    scenario = dataclasses.replace(ONE_LOST, kills=())
    assert len(scenario.job.table_groups) > 1
    fatal = Crowded(scenario, tmp_path, 1000).go().fatal
    needed = re.search(r"too little for the records of this server: give it at least ([\d,]+)", fatal or "")
    assert needed is not None, fatal
    cluster = Crowded(scenario, tmp_path, int(needed[1].replace(",", "")))
    cluster.go().check_against(simulate(calm(scenario)))
    assert cluster.over == (0, 0)
