"""Partial recovery in the simulated cluster: more is lost than parity repairs, only the lost slots go back."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
from partial_runs import Partial, check
from virtual_trainers import Kill

from torch_ecrec.spec.job import CodeSpec

CODES = [
    CodeSpec(3, 2, 1),
    CodeSpec(5, 2, 1),
    CodeSpec(7, 2, 1),
    CodeSpec(5, 2, 2),
    CodeSpec(4, 2, 1, protection="none"),
]


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_lost_slots_alone_go_back(code: CodeSpec) -> None:
    run = Partial(code=code, kills=[Kill("beyond", code.parities + 1, 0)]).go()
    check(run)
    (event,) = run.events_of("recovered_partly")
    assert event["slots"] == list(range(code.parities + 1)) and event["at"] >= event["step"]
    assert run.lives == 1 and not run.events_of("went_beyond")


@functools.cache
def span(code: CodeSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """From the loss until all is whole again: messages of the data plane, and of the control channel."""
    run = Partial(code=code, kills=[Kill("beyond", code.parities + 1, 0)]).go()
    (data, control), (data_end, control_end) = run.marks["lost"], run.marks.get("whole", run.now)
    return (data, data_end), (control, control_end)


WHO = {
    "one that was lost": Kill("any", 0, 0),
    "a survivor": Kill("any", -1, 0),
    "a trainer": Kill("trainer", 1, 0),
    "the coordinator": Kill("coordinator", 0, 0),
}


def sweep(code: CodeSpec, who: str, control: bool, every: int, first: int = 0) -> Counter[str]:
    """One process more is lost at each of these messages of the recovery; and later one that parity repairs."""
    begin, end = span(code)[control]
    count: Counter[str] = Counter()
    for at in range(begin + 1 + first, end, every):
        kill = dataclasses.replace(WHO[who], which=WHO[who].which % code.slots, at=0 if control else at)
        kills = [Kill("beyond", code.parities + 1, 0), Kill("server", 1, end + 300)]
        more = {"at_control": {at: kill}} if control else {}
        run = Partial(code=code, kills=kills + ([] if control else [kill]), **more)
        try:
            run.go()
            check(run)
        except BaseException:
            print(code, who, "control" if control else "data", at)
            raise
        count["runs"] += 1
        count["lives"] += run.lives
        for kind in ("recovered_partly", "went_beyond", "going back", "regathered"):
            count[kind] += len(run.events_of(kind))
    return count


@pytest.mark.parametrize("control", [False, True], ids=["data", "control"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("code", CODES[:2], ids=str)
def test_one_more_is_lost_at_messages_of_the_recovery(code: CodeSpec, who: str, control: bool) -> None:
    count = sweep(code, who, control, 23 if control else 31)
    print(count)
    assert count["recovered_partly"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("control", [False, True], ids=["data", "control"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_one_more_is_lost_at_every_message_of_the_recovery(code: CodeSpec, who: str, control: bool) -> None:
    print(sweep(code, who, control, 1))
