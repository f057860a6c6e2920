"""What must be so of a simulated cluster a while after its last step, and after whatever has gone wrong is over.

What was to follow has followed: slots have left servers that drain, and those that have several; no checkpoint is
under way that nobody writes. And nothing is left of what is over: no call, no parked request, nothing in a log that
nobody can ask for.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from harness.simulation import SimulatedCluster
from harness.verification import BOUNDS, steps_kept
from torch_ecrec.client.client import Client
from torch_ecrec.coordinator.coordinator import Coordinator
from torch_ecrec.durability.parity import Parity
from torch_ecrec.records.tiers.tiered import NO_PLACE, TieredStore
from torch_ecrec.server.checkpoints import PINNED_STEPS
from torch_ecrec.server.service import Host
from torch_ecrec.server.slot import Slot

LONG_S = 2.0  # virtual, for which no checkpoint of tables as small as these takes


def check_over(cluster: SimulatedCluster) -> None:
    """Raises AssertionError that names what did not follow, or is left."""
    lacks = to_follow(cluster.coordinator, cluster.network.clock.now_s)
    assert not lacks, f"it does not go on: {lacks}"
    for name, host in cluster.hosts.items():
        if name not in cluster.network.dead:
            _check_host(host, cluster)
    for name, client in cluster.clients.items():
        if name not in cluster.network.dead:
            left = [*_asked(client), *client.open, *client._settling]
            assert not left, f"{name} still has {left}"


def to_follow(coordinator: Coordinator, now_s: float) -> str:
    """Returns what the coordinator still has to do, or ""."""
    state, table = coordinator._state, coordinator._state.table
    if coordinator.regathering or not table.slots:
        return "members have not told it all"
    draining = {member.name for member in state.members.present("server") if member.draining}
    spares = [spare for spare in table.spares() if not table.troubles_of(spare)]
    hosted = Counter(place.server for place in table.slots)
    if spares and (draining & hosted.keys() or max(hosted.values()) > 1):
        return f"slots are to move to {spares}: {hosted}, {draining} drain; the last move: {table.moves._move}"
    running = state.checkpointing._running
    if running is not None and now_s > running.since_s + LONG_S:
        return f"a checkpoint is under way: {running}"
    return ""


def _check_host(host: Host, cluster: SimulatedCluster) -> None:
    placed = cluster.slots_known
    hosted = {i for i, place in enumerate(placed) if place.server == host.name}
    assert host.slots.keys() == hosted, f"{host.name} has slots {set(host.slots)}, and is to have {hosted}"
    left: list[Any] = [*host.arrivals.values(), *host.calls]
    assert not left, f"{host.name} still has {left}"
    for slot in host.slots.values():
        left = [*slot.waiting, *slot.push_replies, *slot.inbox.pushes, *slot.inbox.loads, *slot.inbox.passes]
        if isinstance(slot.durability, Parity):
            folds, rebuild = slot.durability.folds, slot.durability.rebuild
            left += [*slot.durability._rounds, *filter(None, folds.early.values()), *rebuild.portions]
        assert not left, f"slot {slot.index} still has {left}"
        more = max(0, cluster.scenario.snapshot_every - 1) + len(cluster.scenario.overwrites)
        more += PINNED_STEPS if cluster.scenario.checkpoint.url else 0
        long = {what: steps for what, steps in steps_kept(slot).items() if steps > BOUNDS[what] + more}
        assert not long, f"slot {slot.index} keeps {long}"
        _check_disks(slot)


def _check_disks(slot: Slot) -> None:
    for store in [store for shard in slot.shards for store in shard.stores if isinstance(store, TieredStore)]:
        there = int(np.count_nonzero(store._place_P != NO_PLACE))
        assert store._log.live == there, f"slot {slot.index}: {store._log.live} cells of a file have {there} records"


def _asked(client: Client) -> list[Any]:
    """Calls, but for those of lookups that travel ahead and that nobody waits for."""
    lookups = {call for one in client._lookups for call in one.calls}
    return [call for call in client.calls if call not in lookups]
