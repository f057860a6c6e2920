"""Partial recovery in the simulated cluster: more is lost than parity repairs, only the lost slots go back."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import pytest
import torch
from partial_runs import Partial, check
from thinned import in_turns
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


def sweep(code: CodeSpec, who: str, control: bool, every: int, first: int = 0, last: bool = False) -> Counter[str]:
    """One process more is lost at each of these messages of the recovery; and later one that parity repairs."""
    begin, end = span(code)[control]
    count: Counter[str] = Counter()
    for at in range(begin + 1 + first, end, every):
        kill = dataclasses.replace(WHO[who], which=WHO[who].which % code.slots, at=0 if control else at)
        many = -code.parities - 1 if last else code.parities + 1
        kills = [Kill("beyond", many, 0)]
        if code.parities:
            kills.append(Kill("server", 1, end + 300))
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
    count = sweep(code, who, control, 53 if control else 61)
    print(count)
    assert count["recovered_partly"] >= 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("control", [False, True], ids=["data", "control"])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_one_more_is_lost_at_every_message_of_the_recovery(code: CodeSpec, who: str, control: bool) -> None:
    print(sweep(code, who, control, 1))


@in_turns("every", 37, 23)
def test_lost_trainers_go_on_from_their_snapshot_where_that_survives(every: int) -> None:
    """The last slots are lost, the first keep the dense snapshots."""
    count = sweep(CODES[1], "a trainer", True, every, last=True)
    print(count)
    assert count["going back"] == count["runs"] > 5 and count["went_beyond"] == 0


@pytest.mark.parametrize(("most", "kind"), [(1.0, "recovered_partly"), (0.01, "went_beyond")])
def test_trainers_that_are_lost_before_slots_go_on_hide_nothing_of_it(most: float, kind: str) -> None:
    """It is announced, and more than may be lost takes all back, as if the trainers lived."""
    (begin, _), kill = span(CODES[1])[1], Kill("trainer", 1, 0)
    run = Partial(most, {begin + 10: kill}, code=CODES[1], kills=[Kill("beyond", -2, 0)]).go()
    check(run)
    (era, *_), (told,) = run.events_of("era"), run.events_of(kind)
    assert run.run.events.index(era) < run.run.events.index(told), "the trainer was lost before"
    assert len(run.events_of("recovered_partly")) + len(run.events_of("went_beyond")) == 1


def test_nobody_is_awaited_with_the_records_of_a_slot_that_was_to_read_a_checkpoint() -> None:
    """The coordinator is lost as servers know which slots begin anew, and none of them where."""
    run = Partial(code=CODES[1], spares=2, network_seed=2, kills=[Kill("beyond", -2, 0)])
    run.then = Kill("coordinator", 0, 10)
    run.go()
    check(run)
    assert "nobody" in {event["member"] for event in run.events_of("lost")}, "the host is not known"
    assert run.events_of("regathered") and not run.events_of("stands_still")


def test_slots_may_wait_for_a_server() -> None:
    """Nobody takes a second slot: what begins anew does so when other servers come."""
    run = Partial(code=CODES[1], kills=[Kill("beyond", 2, 0)], without_spare="wait", spares=0).go()
    check(run)
    assert run.lives == 1 and len(run.events_of("recovered_partly")) == 1
    assert any(server == "" for event in run.events_of("re-placed") for server, _ in event["slots"])


def test_a_second_time_counts_once_what_both_have_lost() -> None:
    run = Partial(code=CODES[1], kills=[Kill("beyond", 2, 0), Kill("beyond", 2, 1)]).go()
    check(run)
    assert len(run.events_of("recovered_partly")) == 2


def test_a_second_time_with_a_later_checkpoint_leaves_the_first_as_it_was() -> None:
    """The checkpoints between the two are as the slots that had begun anew were then."""
    run = Partial(code=CODES[1], kills=[Kill("beyond", 2, 0), Kill("beyond", 2, 700)]).go()
    check(run)
    first, second = run.events_of("recovered_partly")
    assert first["name"] != second["name"] and first["at"] < second["step"]
    lost = run.coordinator.status(0.0).partial.lost_steps[0]
    assert lost == first["at"] - first["step"] + second["at"] - second["step"]


def test_all_that_go_back_to_a_checkpoint_know_what_it_lacks() -> None:
    """It was written after a partial recovery, which is told once: not as what the checkpoint says of it, too."""
    run = Partial(code=CODES[1], kills=[Kill("beyond", 2, 0), Kill("beyond", 5, 450)]).go()
    check(run)
    (first,), (back,) = run.events_of("recovered_partly"), run.events_of("went_beyond")
    status, finished = run.coordinator.status(0.0), run.shelf.find(back["name"])
    assert first["at"] <= finished.done == back["step"] and first["name"] in finished.inexact[0][1]
    assert status.partial.lost_steps == [first["at"] - first["step"]] * 2 + [0] * 3 and status.inexact == []


def test_more_lost_samples_than_wanted_take_all_back() -> None:
    """To the bits of the run that nothing disturbs: a whole checkpoint is exact."""
    run, right = Partial(most=0.0, kills=[Kill("beyond", 2, 0)]).go(), Partial().go()
    check(run)
    (event,) = run.events_of("went_beyond")
    assert "% of lost samples, more than 0.00% (--most-lost-samples)" in event["reason"]
    assert not run.events_of("recovered_partly") and run.coordinator.status(0.0).partial is None
    for mine, theirs in zip(run.run.records, right.run.records, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def test_without_a_checkpoint_it_ends_and_says_so() -> None:
    run = Partial(kills=[Kill("any", 0, 40), Kill("any", 1, 40)])
    reason = (
        "slots [0, 1] are lost together, .*; and there is no checkpoint to take their records from: none was written"
    )
    with pytest.raises(AssertionError, match=re.escape(reason).replace("\\.\\*", ".*")):
        run.go()
    assert run.events_of("fatal")[0]["kind"] == "data_loss"


def test_a_checkpoint_that_cannot_be_read_takes_all_back() -> None:
    run = Partial(kills=[Kill("beyond", 2, 0)])
    fails = iter(["this file is altered"])

    def failing(write: int) -> str:
        reading = run.coordinator.going_back is not None and run.coordinator.going_back.keeps
        return next(fails, "") if reading else ""

    run.shelf.failing = failing
    run.go()
    check(run)
    assert "the newest checkpoint cannot be read: this file is altered" in run.events_of("went_beyond")[0]["reason"]


def test_what_was_lost_survives_the_coordinator() -> None:
    code = CODES[1]
    run = Partial(code=code, kills=[Kill("beyond", 2, 0), Kill("coordinator", 0, span(code)[0][1] + 40)]).go()
    check(run)
    (event,), partial = run.events_of("recovered_partly"), run.coordinator.status(0.0).partial
    assert run.events_of("regathered") and run.lives == 1
    assert partial.lost_steps == [event["at"] - event["step"]] * 2 + [0] * 3


def test_a_slot_that_begins_anew_is_lost_again_before_training_went_on() -> None:
    """Trainers that live need no dense snapshot, although none is left: nobody is started again."""
    run = Partial(code=CODES[4], kills=[Kill("beyond", 1, 0), Kill("any", 0, 146)]).go()
    check(run)
    first, second = run.events_of("recovered_partly")
    assert first["at"] == second["at"] and run.lives == 1
