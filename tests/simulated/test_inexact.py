"""Whatever makes a run inexact leaves an event, a warning and NOT EXACT in `status`, for as long as it is so."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from coordinator_harness import Harness, known, rejoin, told
from harness import Scenario, SimulatedCluster

from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.coordinator.state import ClusterState
from torch_ecrec.observe import events
from torch_ecrec.observe.text import format_status
from torch_ecrec.processes import coordination
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import INEXACT_MOST
from torch_ecrec.protocol.status import Inexactness

RESET = "tables are as the script has made them"
DAMAGED = {"slot": 1, "incarnation": 0, "what": "record", "places": [["a", 3, 0]], "count": 1, "step": 7}
CAUSES: dict[str, tuple[str, dict[str, Any], str]] = {  # who says what, and what is told of it
    "a trainer says so": ("trainer-1", {"type": "not_exact", "step": 7, "what": RESET}, RESET),
    "damage may have been used": ("server-1", {"type": "damaged", **DAMAGED, "used": 1}, "1 (record) were damaged"),
}


def shown(h: Harness) -> str:
    return format_status(h.core.status(h.now_s))


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told_everywhere(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    name, word, what = CAUSES[cause]
    h = Harness().start()
    assert "NOT EXACT" not in shown(h) and h.core.status(h.now_s).inexact == []
    h.say(name, **word)
    [event] = [event for event in h.events if event["event"] == "not_exact"]
    assert event["step"] == 7 and what in event["what"]
    assert f"NOT EXACT from step 7 on: {event['what']}" in shown(h)
    with caplog.at_level(logging.WARNING):
        coordination.log_event(event)
    assert what in caplog.text, "it is a warning"
    for member in ("server-0", "trainer-0"):
        assert told(h, member, "known_inexact")[-1]["known"] == [(7, event["what"])]


def test_damage_that_no_step_used_is_none() -> None:
    h = Harness().start()
    h.say("server-1", type="damaged", **DAMAGED, used=0)
    assert "NOT EXACT" not in shown(h)


def test_every_event_of_inexactness_is_a_warning() -> None:
    """Its docstring says NOT EXACT."""
    kinds = [kind for kind in events.AnyEvent.__args__ if "NOT EXACT" in (kind.__doc__ or "")]
    assert {msgspec.inspect.type_info(kind).tag for kind in kinds} == {"recovered_partly", "not_exact"}
    assert {msgspec.inspect.type_info(kind).tag for kind in kinds} <= set(coordination.LOUD)


def test_what_all_trainers_say_is_told_once_and_of_many_the_first() -> None:
    h = Harness().start()
    for _ in range(2):
        for rank in range(2):
            h.say(f"trainer-{rank}", type="not_exact", step=7, what=RESET)
    assert len(h.core.status(h.now_s).inexact) == 1
    for step in range(2 * INEXACT_MOST):
        h.say("trainer-0", type="not_exact", step=step, what="x")
    assert len(h.core.status(h.now_s).inexact) == INEXACT_MOST
    assert len([event for event in h.events if event["event"] == "not_exact"]) == INEXACT_MOST


def test_no_server_says_what_is_a_trainers() -> None:
    h = Harness().start()
    assert h.say("server-0", type="not_exact", step=7, what=RESET) == "server-0 is no trainer"
    assert "NOT EXACT" not in shown(h)


def test_trainers_that_come_later_keep_it_for_the_next_coordinator() -> None:
    before = Harness().start()
    before.say("trainer-1", type="not_exact", step=7, what=RESET)
    before.lose("trainer-0")
    before.trainer(0)
    assert told(before, "trainer-0_2", "known_inexact")[-1]["known"] == [(7, RESET)]
    after = Harness()
    said = messages.json_of(messages.KnownInexact(before.core._state.job.inexact))["known"]
    for name in ("server-0", "server-1", "server-2", "server-3"):
        rejoin(after, known(before, name, inexact=said if name == "server-2" else []))
    after.now_s += 10.0
    after.core.on_tick(after.now_s)
    assert f"NOT EXACT from step 7 on: {RESET}" in shown(after)
    assert told(after, "server-0", "known_inexact")[-1]["known"] == [(7, RESET)], "and the others keep it, too"


@pytest.mark.parametrize(("back_to", "left"), [(5, []), (7, []), (9, [(7, RESET)])])
def test_who_goes_back_to_before_it_is_exact_again(back_to: int, left: list[tuple[int, str]]) -> None:
    h = Harness().start()
    h.say("trainer-1", type="not_exact", step=7, what=RESET)
    restored = messages.Restored("file:///x", "000000000005-a-0-1", back_to), h.job
    settings = ClusterSettings(h.code, 1, restore=restored)
    after = ClusterState(settings, lambda name, word: None, lambda event: None)
    after.follow(h.core._state)
    assert after.job.inexact == left


def test_who_goes_back_to_the_step_of_rounded_weights_still_has_them() -> None:
    """To a checkpoint of its own, which it has written before the first step, without rounding."""
    rounded = "weights are those of checkpoint 000000000007-a-0-1, rounded to 8 bits"
    h = Harness().start()
    began = messages.Restored("file:///x", "000000000007-a-0-1", 7, inexact=[(7, rounded)])
    before = ClusterState(
        ClusterSettings(h.code, 1, restore=(began, h.job)), lambda name, word: None, lambda event: None
    )
    before.job.restore()
    before.job.on_inexact(7, RESET)
    for folder, inexact in (("000000000007-run-1-1", []), (began.folder, [(7, rounded)])):
        restored = messages.Restored("file:///x", folder, 7, inexact=inexact), h.job
        settings = ClusterSettings(h.code, 1, restore=restored)
        after = ClusterState(settings, lambda name, word: None, lambda event: None)
        after.follow(before)
        after.job.restore()
        assert after.job.inexact == [(7, rounded)]


@pytest.mark.parametrize("killed", ["coordinator", "trainer", "server"])
def test_it_is_known_whoever_is_lost_afterwards(killed: str) -> None:
    cluster = SimulatedCluster(Scenario(steps=8, trainers_return=True))
    seen: list[int] = []

    def on_event(number: int) -> None:
        client = cluster.clients.get("trainer-1")
        if not seen and client is not None and client.done == 3 and "trainer-1" not in cluster.network.dead:
            seen.append(number)
            client.run(client.not_exact, RESET)
        if seen and number == seen[0] + 40:
            if killed == "coordinator":
                cluster.kill_coordinator()
            elif killed == "trainer":
                cluster.network.kill("trainer-1")
            else:
                cluster.network.kill(cluster.slots_known[1].server)

    cluster.on_event = on_event  # type: ignore[method-assign]
    cluster.go()
    clock = cluster.network.clock
    until_s = clock.now_s + 5.0
    while clock.now_s < until_s and clock.advance():
        pass
    assert cluster.coordinator.status(clock.now_s).inexact == [Inexactness(3, RESET)]
    assert cluster.run.coordinator_kills + cluster.run.trainer_kills + cluster.run.kills == 1
