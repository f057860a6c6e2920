"""Rules of what is in a prioritised save, taken out, are missed: a schedule fails. (Which saves count, and which are
read: `tests/unit/test_saving.py`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import virtual_trainers
from harness import checkpoints as shelves
from partial_runs import Partial, check
from schedules import first_failure
from virtual_trainers import Kill

from torch_ecrec.records.captured import Captured
from torch_ecrec.server.capture import Capture
from torch_ecrec.spec.job import CodeSpec

pytestmark = pytest.mark.slow  # half a minute for a rule that is missed late
EVENTS_MOST = 12_000  # of a run that ends, a fourth
Patch = Callable[[pytest.MonkeyPatch], None]
CODE = CodeSpec(5, 2, 1)
QUICK_S = (1e-5, 1e-4)


def schedules() -> list[dict[str, Any]]:
    """Two slots are lost around saves, or around the checkpoint after them; another one, trainers, or two others later.

    `quick`: what is written is there within a step, so that saves are of the last steps.
    """
    found: list[dict[str, Any]] = [
        {"quick": False, "kills": [Kill("beyond", -2, at)], "then": Kill("any", 1, 150)} for at in (700, 760, 820)
    ]
    for at in range(560, 800, 48):
        for quick in (True, False):
            first = Kill("beyond", -2, at)
            found.append({"quick": quick, "kills": [first], "then": Kill("trainer", 1, 6 + at % 24)})
            found.append({"quick": quick, "kills": [first, Kill("trainer", 1, at)], "then": Kill("beyond", 2, 90)})
    return found


def nothing_is_kept(patch: pytest.MonkeyPatch) -> None:
    """Records that change before the scan comes are written as they are then."""
    patch.setattr(Capture, "before_forgetting", lambda self, positions, deltas: None)


def what_came_before_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Steps that were applied when a save begins count as if they belonged to it."""
    patch.setattr(Captured, "keep", lambda self, positions_U, deltas_UB: None)


MUTATIONS: list[Any] = [nothing_is_kept, what_came_before_is_not_kept]


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
