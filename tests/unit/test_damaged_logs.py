"""Delta logs and dense snapshots that change in memory: found when they are used, and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torch_ecrec.errors import MemoryDamaged
from torch_ecrec.protocol import wire
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.server.snapshots import SnapshotStore


def name_of(table_group: int, position: int) -> str:
    return f"row {position} of table {'ab'[table_group]}"


def log_of(steps: int, sealed: bool = True) -> DeltaLog:
    rng, log = np.random.default_rng(0), DeltaLog(2, 3, sealed, name_of, MemoryDamaged)
    for step in range(4, 4 + steps):
        positions = [np.arange(0, 20, 2), np.array([1, 5, 9])]
        log.append(step, positions, [rng.integers(0, 256, (len(at), 12), np.uint8) for at in positions])
    return log


def flip(log: DeltaLog, step: int, table_group: int, row: int, bit: int = 37) -> None:
    log.get(step)[table_group][1][row, bit // 8] ^= np.uint8(1 << (bit % 8))


def test_a_delta_that_changed_is_found_by_whoever_uses_it_and_named() -> None:
    log = log_of(4)
    for step in range(4, 8):
        log.check(step)
    flip(log, 6, 0, 3)
    named = r"1 deltas of step 6 are damaged in memory, first that of row 6 of table a"
    for use in (
        lambda: log.check(6),
        lambda: log.changes(0, np.array([0, 6]), 4, 7),
        lambda: log.parts(0, np.array([6]), 5, 6),
    ):
        with pytest.raises(MemoryDamaged, match=named):
            use()
    assert log.changes(0, np.array([6]), 6, 7) is not None, "another step"
    assert log.changes(0, np.array([4, 8]), 3, 7) is not None, "other records of it"
    assert log.changes(1, np.array([5]), 3, 7) is not None, "another table group"
    assert len(log.pop()) == 2 and log.last == 6
    with pytest.raises(MemoryDamaged, match=named):
        log.pop()
    assert log.last == 6, "nothing was taken away"


def test_a_position_that_changed_is_found() -> None:
    log = log_of(2)
    log.get(5)[1][0][1] ^= 1 << 40
    with pytest.raises(MemoryDamaged, match="positions in the delta log of step 5, table group 1"):
        log.pop()


def test_every_one_of_a_thousand_flips_in_a_log_is_found() -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):
        log = log_of(1)
        flip(
            log, 4, table_group := int(rng.integers(2)), int(rng.integers((10, 3)[table_group])), int(rng.integers(96))
        )
        with pytest.raises(MemoryDamaged):
            log.pop()


def test_what_is_forgotten_and_what_is_not_sealed_is_not_looked_at() -> None:
    log = log_of(3)
    flip(log, 4, 0, 0)
    log.forget(4)
    log.check(5), log.check(6)
    plain = log_of(1, sealed=False)
    flip(plain, 4, 0, 0)
    plain.pop()


class Owner:
    """In the place of a slot, its host and its scrubber."""

    ready, dead, load_end, snapshot_slots, life = True, False, 0, (0, 1), (0, 0)
    held = SimpleNamespace(job=SimpleNamespace(trainers=2), sealed=True)

    def __init__(self) -> None:
        self.damaged: list[tuple[int, int]] = []
        self.asked: list[int] = []

    def on_snapshot(self, step: int, trainer: int) -> None:
        self.damaged.append((step, trainer))

    def ask_once(self, slot: int, make: Any, done: Any) -> None:
        self.asked.append(slot)

    def known_incarnations(self) -> list[int]:
        return [0, 0]

    def meet(self, slot: int, incarnation: int) -> None:
        pass

    def on_snapshot_kept(self, step: int, done: int) -> None:
        pass


def test_a_part_of_a_snapshot_that_changed_is_not_kept_and_another_holder_is_asked() -> None:
    owner: Any = Owner()
    store = SnapshotStore(owner, owner, owner)
    payloads = [torch.arange(100, dtype=torch.uint8) for _ in range(2)]
    for trainer in range(2):
        store.on_snapshot(wire.Snapshot(0, 0, 7, trainer, payloads[trainer], [7]), lambda answer: None)
    store.check()
    assert store.is_whole(7) and not owner.damaged
    payloads[1][33] ^= 8
    answers: list[Any] = []
    store.most = 7
    store.on_fetch(wire.FetchSnapshots(0, 0, 7), answers.append)
    assert owner.damaged == [(7, 1)] and owner.asked == [1], "the other holder has it"
    assert isinstance(answers[0], wire.Refused) and not store.is_whole(7)
