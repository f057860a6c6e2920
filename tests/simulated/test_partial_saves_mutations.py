"""Each rule of prioritised saves, taken out, is missed: a schedule fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import virtual_trainers
from partial_runs import Partial, check
from schedules import first_failure
from virtual_trainers import Kill

from torch_ecrec.coordinator.saving import Saving
from torch_ecrec.protocol.messages import Saves
from torch_ecrec.server.capture import Capture
from torch_ecrec.server.renewing import Renewing
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing import checkpoints as shelves

pytestmark = pytest.mark.slow  # half a minute for a rule that is missed late
EVENTS_MOST = 12_000  # of a run that ends, a fourth
Patch = Callable[[pytest.MonkeyPatch], None]
CODE = CodeSpec(5, 2, 1)
QUICK_S = (1e-5, 1e-4)


def schedules() -> list[dict[str, Any]]:
    """Two slots are lost around saves, or around the checkpoint after them; trainers, or two others, a little later.

    `quick`: what is written is there within a step, so that saves are of the last steps.
    """
    found: list[dict[str, Any]] = []
    for at in range(560, 800, 16):
        for quick in (True, False):
            first = Kill("beyond", -2, at)
            found.append({"quick": quick, "kills": [first], "then": Kill("trainer", 1, 6 + at % 24)})
            found.append({"quick": quick, "kills": [first, Kill("trainer", 1, at)], "then": Kill("beyond", 2, 90)})
    return found


def all_saves_are_read(patch: pytest.MonkeyPatch) -> None:
    """Also those of steps after which others may have to go back."""
    patch.setattr(Renewing, "_told", lambda self: self.renewal)


def read_before_it_is_known_where(patch: pytest.MonkeyPatch) -> None:
    """And what was read then, is taken."""
    patch.setattr(Renewing, "begin", lambda self: self._ask(self.renewal))
    patch.setattr(Renewing, "_told", lambda self: self._asked)


def nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Records that change before the scan comes are written as they are then."""
    patch.setattr(Capture, "before_forgetting", lambda self, positions, deltas: None)


def saves_outlive_their_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Rows of before a checkpoint count in the place of its own."""

    def on_checkpoint(self: Saving, folder: str, done: int, now_s: float) -> None:
        self.known = Saves(folder, done, self.known.since)
        self._wait(now_s)

    patch.setattr(Saving, "on_checkpoint", on_checkpoint)


def steps_that_were_taken_back_stay_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Saving, "forget_after", lambda self, done: None)
    patch.setattr(Saves, "until", lambda self, done: self)


MUTATIONS: list[Any] = [
    all_saves_are_read,
    read_before_it_is_known_where,
    nothing_is_kept,
    saves_outlive_their_checkpoint,
    steps_that_were_taken_back_stay_saved,
]


def checked() -> dict[str, Callable[[], None]]:
    return {str(schedule): functools.partial(go, schedule) for schedule in schedules()}


def go(schedule: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if schedule["quick"]:
            patch.setattr(shelves, "WRITE_S", QUICK_S)
            patch.setattr(shelves, "COMMIT_S", QUICK_S)
        run = Partial(saver="mfu", code=CODE, kills=schedule["kills"])
        run.then = schedule["then"]
        run.go()
        check(run)


def test_all_schedules_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_trainers, "EVENTS_MOST", EVENTS_MOST)
    assert first_failure(checked()) == ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_rule_is_missed(mutation: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_trainers, "EVENTS_MOST", EVENTS_MOST)
    mutation(monkeypatch)
    failure = first_failure(checked())
    print(mutation.__name__, failure)
    assert failure != ""
