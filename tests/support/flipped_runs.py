"""Simulated clusters in whose servers' memory bits flip."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness.scenario import Scenario
from harness.simulation import SimulatedCluster

from torch_ecrec.records.store import RecordStore
from torch_ecrec.server.slot import Slot

SCRUB_EVERY_S = 0.003  # virtual: a message takes about as long
SCRUB_BYTES = 200


class Flipped(SimulatedCluster):
    """A cluster in which bits flip.

    Args:
        scenario: what runs.
        flips: at which events.
        parity: the share of flips that are in parities.
        checks: `Settings.record_checks`.
        scrubs: whether somebody looks in the background: "always", "last" (when training is over) or "never".
        crash_damaged: servers may die while something is damaged: the code must repair one more.
    """

    def __init__(
        self,
        scenario: Scenario,
        flips: Sequence[int],
        parity: float = 0.3,
        checks: str = "use",
        scrubs: str = "always",
        crash_damaged: bool = False,
    ) -> None:
        super().__init__(scenario)
        self.crash_damaged, self.next_s = crash_damaged, 0.0
        self.settings = dataclasses.replace(self.settings, record_checks=checks)
        self.due, self.share, self.scrubs = list(flips), parity, scrubs
        self.chance = random.Random(scenario.network_seed)
        self.flipped: list[tuple[Slot, int, bool, int]] = []
        self.stripes: set[tuple[int, int]] = set()  # that have something damaged

    def on_event(self, number: int) -> None:
        if self.due and number >= self.due[0] and self.flip():
            self.due.pop(0)
        now_s = self.network.clock.now_s
        if self.scrubbing and now_s >= self.next_s:
            self.next_s = now_s + SCRUB_EVERY_S
            self.scrub(SCRUB_BYTES)

    @property
    def scrubbing(self) -> bool:
        return self.scrubs == "always" or (self.scrubs == "last" and self.scripts.done)

    def scrub(self, most_bytes: int) -> None:
        """All servers look at some of what they have."""
        for slot in self.slots():
            self.hosts[self.slots_known[slot.index].server].run(slot.scrubber.scrub, most_bytes)

    def flip(self) -> bool:
        """A bit, of a stripe that has nothing damaged or lost; false if there is none now."""
        if not self.whole() or not self.slots():
            return False
        slot = self.chance.choice(self.slots())
        table_group, parity = self.chance.randrange(len(slot.shards)), self.chance.random() < self.share
        shard, layout = slot.shards[table_group], slot.layouts[table_group]
        rows = shard.parity_rows if parity else shard.data_rows
        if not rows or not slot.ready:
            return False
        position = self.chance.randrange(rows)
        (group,) = layout.group(slot.index, parity, np.array([position]))
        stripe = (table_group, int(group.rotations[0]) * layout.slots + group.base)
        if self.all_mended():
            self.stripes.clear()
        if stripe in self.stripes or slot.missing.lacks(table_group, parity, np.array([position])):
            return False
        self.stripes.add(stripe)
        shard.flip_(position, self.chance.randrange(8 * shard.schema.nbytes), parity)
        self.flipped.append((slot, table_group, parity, position))
        return True

    def all_mended(self) -> bool:
        """Nothing is damaged in a slot that lives."""
        slots = self.slots()
        living = [flip for flip in self.flipped if flip[0] in slots]
        return not any(
            is_damaged(slot.shards[table_group].stores[parity], at, at + 1) for slot, table_group, parity, at in living
        )

    def settled(self) -> bool:
        return super().settled() and (self.all_mended() or self.scrubs == "never")

    def may_crash(self, name: str) -> bool:
        return super().may_crash(name) and (self.crash_damaged or self.all_mended())

    def verify(self) -> None:
        if self.all_mended():
            super().verify()

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What the coordinator has announced."""
        return [event for event in self.run.events if event["event"] == kind]

    def names(self) -> list[tuple[str, str, int, int]]:
        """Of all that was damaged: what it is, table, row, member."""
        return [(event["what"], *place) for event in self.told("damaged") for place in event["places"]]


def is_damaged(store: RecordStore, first: int, end: int) -> bool:
    """Whether any of some records does not fit its seal, in memory or on a disk. Nobody hears of that from this."""
    if not store.sealed:
        return False
    if len(store.broken_run(first, end)):
        return True
    seen, reading = store.scan(first, end, sys.maxsize)
    assert seen == end
    if reading is None:
        return False
    reading.run()
    return bool(reading.broken_A.any())


def name_of(slot: Slot, table_group: int, parity: bool, position: int) -> tuple[str, str, int, int]:
    """What a record or parity is called."""
    (place,) = slot.scrubber.places(table_group, parity, np.array([position]))
    return ("parity" if parity else "record", *place)
