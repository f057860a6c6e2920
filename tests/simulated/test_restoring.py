"""The coordinator of a cluster that begins with a checkpoint: when training begins, who may be lost until then, and how
the next coordinator knows.
"""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_harness import MEMBERS, Harness, durable, known, reach, rejoin, told

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import Placement, Restored

BEGINS = Restored("memory://somewhere", "000000000010-a-1-1", 10)
RESUME = {"type": "resume", "step": 0, "load_end": 0, "done": 10}


def restoring(**options: Any) -> Harness:
    h = Harness()
    return Harness(restore=(BEGINS, h.job), **options).start()


def ready(h: Harness, slot: int) -> None:
    place = h.core.slots[slot]
    h.say(place.server, type="ready", slot=slot, incarnation=place.incarnation)


def restored(h: Harness) -> None:
    """All slots have all that they need."""
    for slot in range(3):
        ready(h, slot)
        h.rebuilt(slot)


def begin(h: Harness) -> None:
    """All slots say that they know of it."""
    for slot in range(3):
        reach(h, slot, 0, snapshots=[])
    for slot in range(3):
        durable(h, slot)


def placement(h: Harness, name: str) -> dict[str, Any]:
    found: dict[str, Any] = told(h, name, "placement")[-1]["placement"]
    return found


def test_training_begins_once_every_slot_knows_that_all_is_restored() -> None:
    h = restoring()
    assert placement(h, "server-0")["restoring"] and told(h, "server-0", "job")[-1]["restored"]["done"] == 10
    assert [place.healthy for place in h.core.slots] == [False] * 3 and h.core.load_end is None
    restored(h)
    assert h.core.load_end == 0 and h.core.era == 1 and not placement(h, "server-0")["restoring"]
    words = [word["type"] for name, word in h.sent if name == "server-0" and word["type"] in ("era", "placement")]
    for slot in range(3):
        reach(h, slot, 0, snapshots=[])
    assert words[-1] == "placement" and told(h, "server-0", "era")[-1]["step"] == 0
    durable(h, 0)
    durable(h, 1)
    assert not told(h, "trainer-0", "resume")
    durable(h, 2)
    assert told(h, "trainer-0", "resume") == told(h, "trainer-1", "resume") == [{**RESUME, "era": 1}]
    assert not [event for event in h.events if event["event"] in ("era", "going back", "resumable")], "nobody was lost"


def test_any_number_of_servers_may_be_lost_until_then_and_none_beyond_parity_afterwards() -> None:
    h = restoring(spares=3)
    h.rebuilt(0)
    for name in list(h.places[:2]):
        h.lose(name)
    assert h.core.fatal is None and [place.incarnation for place in h.core.slots] == [1, 1, 0]
    assert placement(h, "server-3")["restoring"] and not h.core.going_back
    restored(h)
    begin(h)
    assert told(h, "trainer-0", "resume")
    for name in set(h.places[:2]):
        h.lose(name)
    assert h.core.fatal_kind == "data_loss"


@pytest.mark.parametrize("url", ["memory://somewhere", "memory://elsewhere"])
def test_beyond_parity_it_is_told_what_the_run_began_with_where_it_may_have_no_checkpoint_of_its_own(url: str) -> None:
    """`--restore newest` of a place with none begins at step 0."""
    h = restoring(checkpoint=CheckpointSettings(url, every_steps=5))
    restored(h)
    begin(h)
    for name in list(h.places[:2]):
        h.lose(name)
    newest = f"begin again with a checkpoint: --checkpoint {url} --restore newest"
    began = "; if none is there yet, with what this run began with: --restore memory://somewhere@10"
    assert (h.core.fatal or "").endswith(newest + (began if url != BEGINS.url else ""))


def test_trainers_that_are_lost_meanwhile_begin_no_era() -> None:
    h = restoring()
    h.lose("trainer-1")
    assert h.core.era == 0 and told(h, "trainer-0", "fatal")[-1]["kind"] == "trainers_lost"
    names = [h.trainer(0), h.trainer(1)]
    assert all(told(h, name, "welcome")[-1]["restarted"] for name in names) and not told(h, names[0], "resume")
    restored(h)
    begin(h)
    assert told(h, names[0], "resume") == [{**RESUME, "era": 1}]


def test_a_trainer_that_leaves_has_nothing_to_load() -> None:
    h = restoring()
    h.say("trainer-0", type="leave")
    assert not told(h, "trainer-1", "fatal")
    objection = h.say("trainer-1", type="loaded", load_end=7)
    assert objection is not None and "has begun with a checkpoint" in objection and h.core.load_end is None


@pytest.mark.parametrize("beyond", ["stop", "checkpoint"])
def test_a_checkpoint_that_cannot_be_read_ends_the_cluster_or_all_go_back_to_another(beyond: str) -> None:
    h = restoring(checkpoint=CheckpointSettings("memory://x", every_steps=1, beyond=beyond))  # type: ignore[arg-type]
    h.say(h.places[1], type="unrecoverable", slot=1, incarnation=0, reason="slot-00001 was altered")
    assert h.core.fatal == "the checkpoint to begin with cannot be read: slot-00001 was altered"
    assert h.core.goes_back == (beyond == "checkpoint")
    kinds = [word["kind"] for word in told(h, "trainer-0", "fatal")]
    assert kinds == ([] if h.core.goes_back else ["checkpoint"])


def begun_again(h: Harness) -> None:
    """The trainers of a cluster that trains are lost, and no step of training is safe."""
    h.lose("trainer-1")
    for slot in range(3):
        reach(h, slot, 9, floor=7, snapshots=[], done=10)


def test_where_nothing_that_was_trained_is_safe_all_begin_with_it_again() -> None:
    h = restoring()
    restored(h)
    begin(h)
    places = h.places
    begun_again(h)
    assert h.core.fatal is None and h.core.going_back is None and h.core.restores and h.core.load_end is None
    assert [place.incarnation for place in h.core.slots] == [1, 1, 1] and h.places == places
    era = told(h, "server-0", "era")[-1]
    assert (era["era"], era["step"], era["done"], era["keeps"], era["floor"]) == (2, 0, 10, True, 0)
    names = [h.trainer(0), h.trainer(1)]
    restored(h)
    begin(h)
    assert told(h, names[0], "resume") == [{**RESUME, "era": 3}]


def next_one(before: Harness, lacks: tuple[str, ...] = (), **others: dict[str, Any]) -> Harness:
    """The next coordinator, when all have told it what they know, but for those that it lacks.

    Args:
        others: what some of them know otherwise, by name.
    """
    after = Harness()
    there = messages.json_of(Placement(before.core.epoch, tuple(before.core.slots), before.core.restores))
    for name in MEMBERS:
        if name not in lacks:
            fields = {"placement": there, "restored": messages.json_of(BEGINS), "load_end": None}
            rejoin(after, known(before, name, **{**fields, **others.get(name, {})}))
    after.now_s += REGATHER_S + 0.1
    after.core.on_tick(after.now_s)
    assert not after.core.regathering
    return after


def test_the_next_coordinator_goes_on_with_it() -> None:
    before = restoring()
    before.rebuilt(0)
    before.rebuilt(1)
    after = next_one(before, lacks=("server-1",))
    assert after.core.fatal is None and after.core.restores and after.core.load_end is None and after.core.era == 0
    assert [(place.incarnation, place.healthy) for place in after.core.slots] == [(0, True), (1, False), (0, False)]
    for slot in (1, 2):
        after.rebuilt(slot)
    begin(after)
    assert told(after, "trainer-0", "resume") == [{**RESUME, "era": 1}]


def test_the_next_coordinator_ends_it_where_all_are_whole() -> None:
    """The one before died when it was about to: some stand still in an era whose step they do not know."""
    before = restoring()
    for slot in range(3):
        before.core.slots[slot] = messages.SlotPlace(before.places[slot], 0, True)
    after = next_one(before, **{"server-0": {"era": 1, "frozen": True, "load_end": 0}})
    assert not after.core.restores and after.core.load_end == 0 and after.core.era == 2


def test_where_not_all_know_that_it_has_ended_trainers_begin_again() -> None:
    """So that none of them trains before all servers know it."""
    before = restoring()
    early = messages.json_of(Placement(before.core.epoch, tuple(before.core.slots), True))
    restored(before)
    after = next_one(before, **{"server-1": {"placement": early}})
    assert not after.core.restores and after.core.load_end == 0 and after.core.going_back is not None
    assert told(after, "trainer-0", "fatal")[-1]["kind"] == "trainers_lost"


def test_that_weights_are_rounded_is_told_to_all_and_shown() -> None:
    h = Harness()
    rounded = Restored("memory://somewhere", "000000000010-a-1-1", 10, inexact=[(10, "rounded to 4 bits")])
    h = Harness(restore=(rounded, h.job)).start()
    assert told(h, "trainer-1", "known_inexact")[-1]["known"] == [(10, "rounded to 4 bits")]
    assert [(one.step, one.what) for one in h.core.status(h.now_s).inexact] == [(10, "rounded to 4 bits")]
    assert [event["what"] for event in h.events if event["event"] == "not_exact"] == ["rounded to 4 bits"]
