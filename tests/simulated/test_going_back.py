"""The coordinator when trainers are lost: servers go back, make a step durable, and training goes on after it."""

from __future__ import annotations

from coordinator_harness import Harness, durable, go_back, known, reach, rejoin, told


def test_lost_trainers_are_awaited_while_the_servers_go_back() -> None:
    h = Harness().start()
    h.say("trainer-0", type="loaded", load_end=0)
    h.lose("trainer-1")
    assert h.core.fatal is None and h.core.era == 1
    assert [m["kind"] for m in told(h, "trainer-0", "fatal")] == ["trainers_lost"], "it cannot go on alone"
    era = {
        "type": "era",
        "era": 1,
        "step": None,
        "load_end": 0,
        "done": 0,
        "keeps": False,
        "floor": 0,
        "partial_restores": [],
    }
    assert told(h, "server-0", "era")[-1] == era
    for slot, applied in enumerate((7, 6, 8)):
        reach(h, slot, applied)
    assert h.core.going_back is not None and h.core.going_back.step == 6, "all reach it, and a snapshot is kept"
    assert told(h, "server-2", "era")[-1]["step"] == 6
    durable(h, 0)
    durable(h, 1)
    names = [h.trainer(0), h.trainer(1)]
    assert names == ["trainer-0_2", "trainer-1_2"]
    assert all(told(h, name, "welcome")[-1]["restarted"] for name in names)
    assert not told(h, names[0], "resume"), "slot 2 is not there yet"
    durable(h, 2)
    assert told(h, names[0], "resume") == [{"type": "resume", "era": 1, "step": 6, "load_end": 0, "done": 6}]
    assert h.core.going_back is None


def test_trainers_that_come_late_are_told_at_once() -> None:
    h = Harness().start()
    h.lose("trainer-1")
    for slot in range(3):
        reach(h, slot, 5)
        durable(h, slot)  # too early, for the first two: nobody knows the step yet
    for slot in range(2):
        durable(h, slot)
    assert h.core.going_back is None
    name = h.trainer(0)
    assert told(h, name, "resume")[-1]["step"] == 5


def test_a_server_lost_meanwhile_begins_another_era() -> None:
    h = Harness().start()
    h.lose("trainer-0")
    for slot in range(3):
        reach(h, slot, 9)
    h.lose("server-1")
    assert h.core.era == 2 and h.core.going_back is not None and h.core.going_back.step is None
    reach(h, 0, 9)
    reach(h, 2, 9)
    reach(h, 1, 4, era=1)  # of the era before
    reach(h, 1, 4, incarnation=0)  # of a host that was replaced
    assert h.core.going_back.step is None
    h.say(h.places[1], type="reach", era=2, slot=1, incarnation=1, applied=4, floor=0, snapshots=[[4, 4, [0, 1]]])
    assert h.core.going_back.step == 4, "its new host knows no more than four steps"


def test_without_a_snapshot_that_all_can_go_back_to_the_job_ends() -> None:
    h = Harness().start()
    h.say("trainer-0", type="loaded", load_end=0)
    h.lose("trainer-0")
    for slot in range(3):
        reach(h, slot, 20, floor=15, snapshots=[[16, 16, [0]]], done=20)  # of one trainer only
    assert h.core.fatal is not None and "no dense snapshot of the steps 15 to 20" in h.core.fatal


def test_why_it_ends_is_told_in_steps_of_training() -> None:
    """24 steps loaded tables before the first of them."""
    h = Harness().start()
    h.say("trainer-0", type="loaded", load_end=0)
    h.lose("trainer-0")
    for slot in range(3):
        reach(h, slot, 49 - slot % 2, floor=46, snapshots=[], done=25 - slot % 2)
    assert h.core.fatal is not None and "no dense snapshot of the steps 22 to 24" in h.core.fatal


def loaded_early() -> Harness:
    """Tables were loaded before the first step, steps 3 to 20; all servers have stopped."""
    h = Harness().start()
    h.say("trainer-0", type="loaded", load_end=2)
    h.lose("trainer-0")
    return h


def test_before_any_step_of_training_is_safe_all_begin_anew() -> None:
    h = loaded_early()
    names = [h.trainer(0)]
    for slot, (applied, done) in enumerate(((21, 1), (19, None), (20, 0))):  # one has trained already, one is new here
        kept = [[21, 1, [0]]] if slot == 0 else []
        reach(h, slot, applied, floor=15 + slot, snapshots=kept, done=done)
    assert h.core.fatal is None and h.core.going_back is not None
    assert (h.core.going_back.step, h.core.load_end) == (19, None), "any step that all know"
    era = {
        "type": "era",
        "era": 1,
        "step": 19,
        "load_end": None,
        "done": 0,
        "keeps": False,
        "floor": 19,
        "partial_restores": [],
    }
    assert told(h, "server-0", "era")[-1] == era
    names.append(h.trainer(1))
    said = [told(h, name, "welcome")[-1]["restarted"] for name in names]
    assert said == [True, False], "who came before that was chosen hears of it with the step"
    for slot in range(3):
        durable(h, slot)
    for name in names:
        assert told(h, name, "resume")[-1] == {"type": "resume", "era": 1, "step": 19, "load_end": None, "done": 0}
    h.say(names[0], type="loaded", load_end=30)
    assert h.core.load_end == 30 and told(h, names[1], "loaded")[-1]["load_end"] == 30


def test_what_was_kept_in_part_does_not_count_once_all_begin_anew() -> None:
    h = loaded_early()
    for slot in range(3):
        reach(h, slot, 21, floor=15, snapshots=[[21, 1, [0]]] if slot == 0 else [], done=1)
    assert h.core.going_back is not None
    assert (h.core.going_back.step, h.core.going_back.done, h.core.load_end) == (21, 0, None)


def test_nobody_begins_anew_who_need_not() -> None:
    whole = [[21, 1, [0, 1]]]
    for floor, snapshots, step, done in ((15, whole, 21, 1), (2, [], 2, 0), (0, [], 2, 0)):
        h = loaded_early()
        for slot in range(3):
            reach(h, slot, 21, floor=floor, snapshots=snapshots, done=1)
        assert h.core.going_back is not None and h.core.load_end == 2
        assert (h.core.going_back.step, h.core.going_back.done) == (step, done)


def test_all_begin_anew_in_the_next_era_too_if_a_server_is_lost_meanwhile() -> None:
    h = loaded_early()
    for slot in range(3):
        reach(h, slot, 20, floor=15, snapshots=[], done=None)
    h.lose("server-1")
    assert h.core.era == 2 and h.core.load_end is None
    for slot in range(3):
        reach(h, slot, 18 + slot, floor=16, snapshots=[], done=None)
    assert h.core.going_back is not None and h.core.going_back.step == 18


def test_the_next_coordinator_knows_that_all_begin_anew() -> None:
    """Of the newest era, those that go on already know more than those that stand still."""
    h = Harness().start()
    told_of = dict(era=1, resume_step=19, load_end=None)
    stopped, before = dict(era=1, frozen=True, load_end=2), dict(era=0, load_end=2)
    for said, load_end in (
        ((told_of, stopped, before), None),
        ((stopped, stopped, before), 2),
        ((told_of, told_of, {**told_of, "load_end": 30}), 30),  # all is loaded again, and not everybody has heard
        ((before, before, {**before, "load_end": None}), 2),
    ):
        later = Harness()
        for number, fields in enumerate(said):
            rejoin(later, known(h, f"server-{number}", **fields))
        later.now_s += 3
        later.core.on_tick(later.now_s)
        assert not later.core.regathering and later.core.load_end == load_end


def test_trainers_that_left_are_done_and_new_ones_go_on_from_there() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1"):
        h.say(name, type="leave")
        h.lose(name)
    assert h.core.fatal is None and h.core.era == 0
    h.trainer(0, again=True)
    assert h.core.era == 1 and h.core.going_back is not None


def test_others_hear_of_trainer_0_that_leaves_without_loading() -> None:
    """They wait for what it loads, for as long as it is there."""
    h = Harness().start()
    h.say("trainer-0", type="leave")
    assert [m["kind"] for m in told(h, "trainer-1", "fatal")] == ["trainers_lost"]
    assert "left before it had loaded" in told(h, "trainer-1", "fatal")[0]["reason"]
    h.lose("trainer-1")
    assert h.core.era == 1, "the next ones go on where these were"
    trainer_1 = Harness().start()
    trainer_1.say("trainer-1", type="leave")
    assert not told(trainer_1, "trainer-0", "fatal")
    loaded = Harness().start()
    loaded.say("trainer-0", type="loaded", load_end=2)
    loaded.say("trainer-0", type="leave")
    assert not told(loaded, "trainer-1", "fatal")


def test_nothing_is_moved_while_the_servers_go_back() -> None:
    h = Harness(spares=0).start(3)
    h.lose("server-0")
    h.rebuilt(0)
    assert h.places == ["server-1", "server-1", "server-2"]
    h.lose("trainer-0")
    h.server()
    h.enter()
    assert h.places == ["server-1", "server-1", "server-2"], "a new host would not know how far to go back"
    for slot in range(3):
        reach(h, slot, 3)
    assert not [word for _, word in h.sent if word["type"] == "move"]
    for slot in range(3):
        durable(h, slot)
    h.move()
    assert h.places == ["server-1", "server-3", "server-2"]


def test_a_server_that_leaves_while_trainers_are_awaited_is_lost() -> None:
    """They were lost, all is durable: nobody is there, nobody goes back, and the job goes on all the same."""
    h = Harness().start()
    h.lose("trainer-0")
    go_back(h)
    h.say("server-1", type="leave")
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.slots[1].incarnation == 1
    assert h.core.going_back is None and h.core.resume_step == 5, "that step survives r losses"


def test_a_server_that_left_after_training_is_missing_when_training_goes_on() -> None:
    h = Harness().start()
    for name in ("trainer-0", "trainer-1", "server-1"):
        h.say(name, type="leave")
        h.lose(name)
    assert h.places[1] == "server-1" and not [e for e in h.events if e["event"] == "lost"], "a clean end is quiet"
    h.trainer(0, again=True)
    assert h.places == ["server-0", "server-3", "server-2"] and h.core.going_back is not None
