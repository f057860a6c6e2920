"""The seam between a slot and what makes its steps count: pushes that wait for their step, and a given policy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.durability.holdings import HERE, Holdings, Missing
from torch_ecrec.durability.none import Unprotected
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.messages import Checkpointing
from torch_ecrec.server.inbox import Inbox
from torch_ecrec.server.slot import Slot
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.spec.settings import Settings

TRAINERS, DIM = 2, 2


def push(step: int, trainer: int, complete: int = 0) -> wire.Push:
    """A gradient of 1 for each weight of the first record."""
    gradients = [torch.ones(1, DIM)]
    return wire.Push(0, 0, step, trainer, [torch.zeros(1, dtype=torch.int64)], gradients, [0.5], step, complete)


def load(step: int, alone: bool = True, trainer: int = 0) -> wire.Load:
    return wire.Load(0, 0, step, trainer, 0, torch.empty(0, dtype=torch.int64), 0, None, 0, alone)


def pass_(step: int, trainer: int) -> wire.NoUpdate:
    return wire.NoUpdate(0, 0, step, trainer, 0)


# what waits for its step --------------------------------------------------------------------------


def test_a_step_is_due_when_every_trainer_has_pushed_it() -> None:
    inbox = Inbox(TRAINERS)
    for request in (push(5, 0), push(4, 0), push(5, 1)):
        inbox.put(request)
    assert inbox.due(4) is None and len(inbox) == 2
    inbox.put(push(4, 1))
    due = inbox.due(4)
    assert isinstance(due, dict) and due.keys() == {0, 1}
    inbox.on_applied(4)
    assert inbox.due(4) is None and inbox.due(5) is not None and len(inbox) == 1


def test_a_push_that_comes_twice_counts_once() -> None:
    inbox = Inbox(TRAINERS)
    inbox.put(push(1, 0))
    inbox.put(push(1, 0))
    assert inbox.due(1) is None


def test_a_load_is_all_that_its_step_needs() -> None:
    inbox = Inbox(TRAINERS)
    inbox.put(load(1))
    assert isinstance(inbox.due(1), list) and inbox.due(2) is None
    inbox.on_applied(1)
    assert inbox.due(1) is None and not len(inbox)


def test_loads_of_several_trainers_are_in_their_order() -> None:
    inbox = Inbox(3)
    inbox.put(load(4, alone=False, trainer=2))
    inbox.put(pass_(4, 0))
    assert inbox.due(4) is None
    inbox.put(load(4, alone=False, trainer=1))
    due = inbox.due(4)
    assert isinstance(due, list) and [part.trainer for part in due] == [1, 2]


def test_a_load_in_training_is_due_when_all_others_pass() -> None:
    inbox = Inbox(3)
    for request in (load(4, alone=False), pass_(4, 2), pass_(4, 2)):
        inbox.put(request)
        assert inbox.due(4) is None
    inbox.put(pass_(4, 1))
    assert isinstance(inbox.due(4), list) and len(inbox) == 1
    inbox.on_applied(4)
    assert inbox.due(4) is None and not len(inbox)
    inbox.put(pass_(5, 1))
    inbox.put(pass_(5, 2))
    assert inbox.due(5) is None, "trainer 0 has said nothing"
    inbox.put(pass_(5, 0))
    assert inbox.due(5) == [], "all pass: a step that changes nothing"
    inbox.keep_after(5)
    assert not len(inbox)


def test_a_step_in_which_some_load_and_others_push_is_never_due() -> None:
    inbox = Inbox(TRAINERS)
    for request in (load(1, alone=False), push(1, 1)):
        inbox.put(request)
    assert inbox.due(1) is None and len(inbox) == 1


def test_what_was_sent_of_steps_before_the_cut_is_let_go() -> None:
    inbox = Inbox(1)
    for step in range(1, 5):
        inbox.put(load(step) if step % 2 else push(step, 0))
    inbox.keep_after(2)
    assert [inbox.due(step) is not None for step in range(1, 5)] == [False, False, True, True]
    inbox.clear()
    assert not len(inbox)


# a policy -----------------------------------------------------------------------------------------


class Nobody:
    """A process with one slot and no others."""

    era, frozen, load_end, history, snapshot_slots = 0, False, 0, (0, False), ()
    writer, checkpointing, tier = None, Checkpointing(), None

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def unhealthy_slots(self) -> list[int]:
        return []

    def ask(self, slot: int, make: Any, done: Any, *, bound_to: int | None = None) -> Any:
        raise AssertionError("there is nobody to ask")

    def ask_once(self, slot: int, make: Any, done: Any) -> None:
        raise AssertionError("there is nobody to ask")

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        raise AssertionError("nothing is asked again")

    def emit(self, effect: Callable[[], None]) -> None:
        raise AssertionError("nothing is left to do")


class Later(Unprotected):
    """Steps count when somebody says so, as they would with a log that is written to disk now and then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.applied: list[tuple[int, np.ndarray]] = []  # and which positions each has changed

    def on_applied(self, step: int) -> None:
        ((positions_U, _deltas_UB),) = self.held.log.get(step)
        self.applied.append((step, positions_U))


def slot_with(policy: Any) -> Slot:
    table = TableSpec("a", rows=4, dim=DIM, low=-1.0, high=1.0)
    job = JobSpec((table,), CodeSpec(1, 1, 1, protection="none"), TRAINERS)
    held = Holdings(job, LinearCode(1, 0), (Layout(1, 1, 0, 4),), 0, 0, [0], fresh=True)
    return Slot(Nobody(), held, policy, Settings(), fresh=True)


def test_a_step_counts_when_the_policy_says_so() -> None:
    slot, answers = slot_with(Later), []
    before = slot.shards[0].gather_weights(np.zeros(1, np.int64)).copy()
    for step in (1, 2):
        for trainer in range(TRAINERS):
            slot.handle(push(step, trainer), answers.append)
    policy = slot.durability
    assert isinstance(policy, Later)
    assert [step for step, _ in policy.applied] == [1, 2] and all(list(rows) == [0] for _, rows in policy.applied)
    assert slot.rule.applied == 2 and not answers, "applied, and nothing counts yet"
    slot.on_settled(1)
    assert answers == [wire.Acknowledged(1)] * TRAINERS
    slot.on_settled(2)
    assert answers[TRAINERS:] == [wire.Acknowledged(2)] * TRAINERS
    after = slot.shards[0].gather_weights(np.zeros(1, np.int64))
    assert np.allclose(before - after, 2 * TRAINERS * 0.5), "two steps of rate 0.5, gradients summed over trainers"


def test_nothing_counts_that_was_not_applied() -> None:
    slot = slot_with(Later)
    slot.on_settled(7)
    assert slot.rule.acknowledged == 0


def test_without_protection_a_step_counts_at_once_and_nobody_else_is_served() -> None:
    slot, answers = slot_with(Unprotected), []
    for trainer in range(TRAINERS):
        slot.handle(push(1, trainer), answers.append)
    assert answers == [wire.Acknowledged(1)] * TRAINERS
    slot.handle(wire.Versions(0, 0), answers.append)
    assert isinstance(answers[-1], wire.Refused) and "no protection" in answers[-1].reason


# what is missing ----------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_once_nothing_is_missing_the_notes_of_it_need_no_memory() -> None:
    rows = 64 << 20
    shard: Any = SimpleNamespace(data_rows=rows, parity_rows=100)
    missing = Missing([shard], whole=False)
    whole, some = resident_bytes(), np.arange(100)
    missing.of(0, False)[100:] = HERE
    assert missing.on_installed(0, False, np.arange(100, 101), rows - 100) == 0
    assert missing.lacks(0, False, some) and whole - resident_bytes() < rows // 2, "some are missing"
    missing.of(0, False)[some] = HERE
    missing.of(0, True)[some] = HERE
    missing.on_installed(0, False, some, 100)
    missing.on_installed(0, True, some, 100)
    assert missing.remaining == 0 and missing.has_all_data and whole - resident_bytes() > rows // 2
    missing.damage(0, False, np.array([7, rows - 1]))
    assert missing.remaining == 2 and np.flatnonzero(missing.of(0, False)).tolist() == [7, rows - 1]
