"""Clusters have an identity, and so have launches: every member that a coordinator may find, every trainer that comes.

The rules are in `coordinator/admission.py` and `coordinator/launches.py`. Here all pairs are visited: whose member it
is, what it has, and what the coordinator knows that it finds; which launch a trainer is of, and what the first does.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from router_harness import CODE, JOB, Process, Running, Wire

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.launches import RESTART_S
from torch_ecrec.coordinator.regathering import LATE_MOST_S
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import CodeSpec, JobSpec, TableSpec
from torch_ecrec.transport.liveness import ALIVE, GONE

OTHER_CODE = CodeSpec(4, 2, 2)
OTHER_JOB = JobSpec((TableSpec("b", 31, 4, -1.0, 1.0),), CODE, 2)
OWN, ANOTHER = "run", "another"
COORDINATORS = ("fresh", "with servers", "told its run", "regathering", "leading", "stopped")
MEMBERS = ("host", "spare", "new server", "trainer", "new trainer")
HAVE = ("host", "spare", "trainer")  # a placement
Fields = dict[str, Any]


def found(kind: str) -> Running:
    """A coordinator of the cluster `OWN`, or of one that it does not know yet."""
    if kind == "fresh":
        return Running()
    if kind == "told its run":
        return Running(run_is_known=True)
    running = Running()
    if kind == "with servers":
        running.join("server")
    elif kind == "regathering":
        before = Running().start()
        process = before.processes[0]
        running.processes.append(process)
        wire = running.rejoin(process, **knows(before, process))
        assert running.core.regathering and wire.admitted
    else:
        running.start()
        if kind == "stopped":
            running.core.stop("more is lost than can be repaired", "data_loss")
    for process in running.processes:
        process.wire.sent = process.wire.told("welcome")
    return running


def knows(cluster: Running, process: Process, code: CodeSpec = CODE) -> Fields:
    """What a member of a cluster tells a coordinator."""
    core = cluster.core
    slots = [[place.server, place.incarnation, place.healthy] for place in core.slots]
    slots += [["server-3", 0, True]] * (code.slots - len(slots))
    server = process.hello["role"] == "server"
    return {
        "endpoint": "here",
        "roster": 1,
        "world": list(core.roster.names),
        "placement": {"epoch": core.epoch, "slots": slots},
        "incarnations": [0] * code.slots if server else [],
        "code": dataclasses.asdict(code),
        "run": core.run,
    }


def member(kind: str, run: str, code: CodeSpec) -> tuple[Process, Fields]:
    """One of a cluster of that run and code."""
    cluster = Running().start()
    process = cluster.processes[{"host": 0, "spare": 3, "new server": 3, "trainer": 5, "new trainer": 5}[kind]]
    fields = {**knows(cluster, process, code), "run": run}
    if kind not in HAVE:
        fields |= {"placement": None, "incarnations": [], "roster": 0, "world": []}
    if kind == "new server":
        fields |= {"job": None}
    return process, fields


def view(running: Running) -> object:
    """All that a member of another cluster must not change."""
    core = running.core
    known = [(one.name, one.session_id, one.alive, one.left) for one in core.members.values()]
    versions = core.epoch, core.era, core.roster.version
    return known, core.slots, versions, core.fatal, core.regathering, core.run, core.job


@pytest.mark.parametrize("coordinator", COORDINATORS)
@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize(("run", "code"), [*itertools.product((OWN, ANOTHER), (CODE, OTHER_CODE))])
def test_whoever_is_of_another_cluster_keeps_what_it_has(coordinator: str, kind: str, run: str, code: CodeSpec) -> None:
    """It is told so, and nothing else; nothing changes here. One without members of its own gives it its place."""
    running = found(coordinator)
    process, fields = member(kind, run, code)
    knows_its_run = coordinator not in ("fresh", "with servers")
    other = (code != CODE and kind != "new server") or (kind in HAVE and run != OWN and knows_its_run)
    before, told = view(running), [(one, list(one.wire.sent)) for one in running.processes]
    wire = running.rejoin(process, **fields)
    assert bool(wire.told("other_cluster")) is other
    if not other:
        assert not running.refusals and not running.names("turned_away")
        return
    assert not wire.told("fatal") and not wire.told("rejoined") and wire.closed
    word = wire.told("other_cluster")[0]
    assert word["run"] == OWN and word["code"] == dataclasses.asdict(CODE)
    assert word["reason"] and (run in word["reason"] or str(code.slots) in word["reason"])
    assert view(running) == before and told == [(one, list(one.wire.sent)) for one in running.processes]
    assert running.names("turned_away") == [process.name]
    alone = coordinator in ("fresh", "told its run")
    gives_way = alone and not (coordinator == "told its run" and run != OWN)
    assert bool(running.refusals) is gives_way
    if gives_way:
        why, wanted = running.refusals[0]
        assert wanted == code and process.name in why and run in why
        assert not running.join("server").wire.told("welcome"), "nobody is let in any more"


@pytest.mark.parametrize("kind", HAVE)
@pytest.mark.parametrize("coordinator", [one for one in COORDINATORS if one != "regathering"])
def test_a_member_of_another_job_keeps_what_it_has(coordinator: str, kind: str) -> None:
    """Also where another coordinator has the checkpoint of another job to begin with."""
    running = found(coordinator)
    restored = coordinator in ("fresh", "told its run", "with servers")
    if restored:
        running = Running(restore=(Restored("file:///there", "f" * 12, 7), OTHER_JOB))
    process, fields = member(kind, OWN, CODE)
    if not restored:
        fields["job"] = OTHER_JOB.to_json()
    wire = running.rejoin(process, **fields)
    assert wire.told("other_cluster") and not wire.told("fatal")
    assert bool(running.refusals) is restored


def test_a_coordinator_that_knows_nothing_takes_the_identity_of_those_who_find_it() -> None:
    """And tells it to all. A server that has its name from before it knew, and that another has, joins once more."""
    before, after = Running(), Running()
    before.router.core._state.job.run = ANOTHER
    before.start()
    early = after.join("server")
    assert early.wire.told("welcome")[0]["run"] == OWN
    for process in before.processes:
        after.processes.append(process)
        assert after.rejoin(process, **knows(before, process)).admitted
    after.now_s = LATE_MOST_S
    after.router.on_tick(after.now_s)
    assert after.core.run == ANOTHER and after.core.epoch > 0
    for process in before.processes:
        assert process.wire.told("job")[-1]["run"] == ANOTHER
    assert early.wire.told("fatal")[0]["kind"] == "fenced"
    later = after.join("server")
    assert later.wire.told("welcome")[0]["run"] == ANOTHER and later.wire.told("job")[0]["run"] == ANOTHER


@pytest.mark.parametrize("known", [False, True])
def test_those_of_a_cluster_of_before_give_way_to_more_of_another(known: bool) -> None:
    """A server that stood still until now comes first to a coordinator that was just started."""
    one, two, after = Running().start(), Running().start(), Running(run_is_known=known)
    two.router.core._state.job.run = ANOTHER
    stale = one.processes[1]
    addresses = {process.name: process.hello["address"] for process in one.processes}
    wire = after.rejoin(stale, **knows(one, stale), addresses=addresses)
    assert wire.admitted and after.core.regathering
    first = after.rejoin(two.processes[0], **knows(two, two.processes[0]))
    assert first.told("other_cluster") and first.closed, "as many are no reason"
    for process in two.processes[1:]:
        after.now_s += 0.1
        after.processes.append(process)
        came = after.rejoin(process, **knows(two, process))
        assert bool(came.told("other_cluster")) is known
    if not known:
        assert wire.told("other_cluster")[0]["run"] == ANOTHER and wire.closed
        after.processes.append(two.processes[0])
        after.rejoin(two.processes[0], **knows(two, two.processes[0]))
    assert after.rejoin(stale, **knows(one, stale)).admitted is known
    after.now_s = LATE_MOST_S
    after.router.on_tick(after.now_s)
    assert not after.names("lost") and after.core.fatal is None and not after.refusals
    assert after.core.regathering is known and (known or after.core.run == ANOTHER)


def test_members_of_two_clusters_at_one_address() -> None:
    """Who comes first is led, if as many come. The others keep what they have, however often they come."""
    one, two, after = Running().start(), Running().start(), Running()
    two.router.core._state.job.run = ANOTHER
    for process in one.processes[:2]:
        after.processes.append(process)
        after.rejoin(process, **knows(one, process))
    for process in two.processes[:2] * 3:
        assert after.rejoin(process, **knows(two, process)).told("other_cluster")
    for process in one.processes[2:]:
        after.processes.append(process)
        assert after.rejoin(process, **knows(one, process)).admitted
    after.now_s = LATE_MOST_S
    after.router.on_tick(after.now_s)
    assert after.core.run == OWN and not after.names("lost") and not after.refusals and after.core.fatal is None
    assert len(after.names("turned_away")) == 2, "each is told of once"


# launches ---------------------------------------------------------------------------------------------

STATES = ("gathering", "loading", "training", "one is done", "going back")
STARTS: dict[str, tuple[Fields, Fields]] = {  # of the first, and of the next; in the order of `JOINS`
    "another launch": ({"launch": "a"}, {"launch": "b"}),
    "another launch, started again": ({"launch": "a"}, {"launch": "b", "relaunched": True}),
    "one without a word": ({"launch": "a"}, {}),
    "after one without a word": ({}, {"launch": "b"}),
    "two without a word": ({}, {}),
    "the same word, for the first time": ({"launch": "a"}, {"launch": "a"}),
}


def first_launch(state: str, start: Fields) -> Running:
    """A cluster whose first launch is in a state."""
    running = Running()
    if state == "gathering":
        running.join("server")
        running.join("trainer", 0, **start)
        return running
    running.start(**start)
    first = running.processes[4]
    if state != "loading":
        running.say(first, type="loaded", load_end=0)
    if state == "one is done":
        running.say(first, type="leave", report={})
    if state == "going back":
        running.close(running.processes[5].wire)
        running.answer(GONE)
        for rank in (0, 1):
            running.join("trainer", rank, **{**start, "relaunched": bool(start)})
    return running


def beat(running: Running, seconds: float) -> None:
    """Time passes, and everybody lives."""
    for _ in range(int(seconds)):
        running.now_s += 1.0
        for process in running.processes:
            if process.wire.told("welcome") and not process.wire.told("fatal") and not process.wire.closed:
                running.say(process, type="beat")
        running.router.on_tick(running.now_s)


def living(running: Running) -> list[Process]:
    return [
        one
        for one in running.processes
        if one.hello["role"] == "trainer"
        and one.wire.told("welcome")
        and not one.wire.told("fatal")
        and not one.wire.closed
    ]


def die(running: Running, processes: list[Process]) -> None:
    """They are gone; where the loss of one ends the others, these are not asked for any more."""
    for process in processes:
        running.close(process.wire)
        if any(probe[0] == process.name for probe in running.probes):
            running.answer(GONE, process.name)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("start", STARTS)
def test_a_second_launch_waits_and_is_refused_by_name(state: str, start: str) -> None:
    """Whatever the first does: it loses nobody and begins no era, and the second has no rank."""
    first, second = STARTS[start]
    running = first_launch(state, first)
    there = living(running)
    era, lost = running.core.era, running.names("lost")
    rank = 1 if state == "one is done" else 0
    newcomer = running.join("trainer", rank, **second)
    (waits,) = newcomer.wire.told("waits")
    named = next(one for one in there if one.hello["rank"] == rank or state == "gathering")
    assert f"pid {named.hello['pid']} at 127.0.0.1" in waits["reason"] and not newcomer.wire.told("welcome")
    beat(running, RESTART_S - 1)
    assert not newcomer.wire.told("refused")
    beat(running, 2)
    (refused,) = newcomer.wire.told("refused")
    assert f"pid {named.hello['pid']} at 127.0.0.1" in refused["reason"] and "a cluster of its own" in refused["reason"]
    assert living(running) == there and running.core.era == era and running.names("lost") == lost


@pytest.mark.parametrize("start", [start for start in STARTS if start not in ("two without a word",)][:4])
@pytest.mark.parametrize("state", ["gathering", "one is done"])
def test_no_world_has_trainers_of_two_launches(state: str, start: str) -> None:
    """A rank that is free is not for another launch, while a trainer of the first lives."""
    first, second = STARTS[start]
    running = first_launch(state, first)
    newcomer = running.join("trainer", 1 if state == "gathering" else 0, **second)
    beat(running, 5)
    assert newcomer.wire.told("waits") and not newcomer.wire.told("welcome")
    if state == "gathering":
        own = running.join("trainer", 1, **first)
        assert own.wire.told("welcome")


@pytest.mark.parametrize("state", STATES)
def test_a_trainer_that_its_launch_has_started_again_takes_its_place_at_once(state: str) -> None:
    """Also from one that lives: it hangs."""
    running = first_launch(state, {"launch": "a"})
    next_one = running.join("trainer", 1 if state == "one is done" else 0, launch="a", relaunched=True)
    assert next_one.wire.told("welcome") and not next_one.wire.told("waits")


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", [state for state in STATES if state != "gathering"])
def test_once_nobody_lives_any_start_goes_on(state: str, start: str) -> None:
    first, second = STARTS[start]
    running = first_launch(state, first)
    die(running, living(running))
    newcomer = running.join("trainer", 0, **second)
    assert newcomer.wire.told("welcome") and not newcomer.wire.told("waits")
    assert newcomer.wire.told("welcome")[0]["restarted"] is (state != "loading")


@pytest.mark.parametrize("start", STARTS)
def test_whoever_waits_comes_in_once_the_first_has_not_come_back(start: str) -> None:
    """The first launch may start its trainers again for so long. Whoever found it waits, if words tell them apart."""
    first, second = STARTS[start]
    running = first_launch("training", first)
    newcomer = running.join("trainer", 0, **second)
    beat(running, 3)
    die(running, [one for one in living(running) if one is not newcomer])
    running.router.on_tick(running.now_s)
    named = first.get("launch", "") != second.get("launch", "")
    assert bool(newcomer.wire.told("welcome")) is not named
    beat(running, RESTART_S + 1)
    assert newcomer.wire.told("welcome") and not newcomer.wire.told("refused")


def test_the_first_launch_comes_back_before_one_that_waits() -> None:
    """They do not evict each other in turns, however often each is started."""
    running = first_launch("training", {"launch": "a"})
    for _ in range(4):
        intruder = running.join("trainer", 0, launch="b", relaunched=True)
        beat(running, 8)
        die(running, living(running))
        beat(running, 8)
        assert not intruder.wire.told("welcome")
        own = [running.join("trainer", rank, launch="a", relaunched=True) for rank in (0, 1)]
        assert all(one.wire.told("welcome") for one in own) and living(running) == own
        beat(running, RESTART_S)
        assert intruder.wire.told("refused")


def test_one_whose_connection_ended_still_has_its_place() -> None:
    """Its process answers: it is there, for as long as its lease."""
    running = first_launch("training", {"launch": "a"})
    old = running.processes[4]
    running.close(old.wire)
    running.answer(ALIVE, old.name)
    newcomer = running.join("trainer", 0, launch="b")
    assert newcomer.wire.told("waits")
    assert running.rejoin(old).told("rejoined") and not newcomer.wire.told("welcome")


# trainers that may live, and another launch ------------------------------------------------------------


def waits_for(running: Running, named: str) -> None:
    """Another launch waits for the end of the first, which comes back at once; and goes on if that does not come."""
    newcomers = [running.join("trainer", rank, launch="b") for rank in (0, 1)]
    running.router.on_tick(running.now_s)
    for one in newcomers:
        assert named in one.wire.told("waits")[-1]["reason"] and not one.wire.told("welcome")
    own = running.join("trainer", 0, launch="a", relaunched=True)
    running.router.on_tick(running.now_s)
    assert own.wire.told("welcome") and not own.wire.told("waits")
    die(running, [own])
    beat(running, RESTART_S + 1)
    assert all(one.wire.told("welcome") for one in newcomers)


@pytest.mark.parametrize("silent", [1, 2])
def test_trainers_that_were_given_up_in_silence_keep_their_place_for_a_while(silent: int) -> None:
    """Nothing says that they have died. The next launch may not have met them alive."""
    running = first_launch("training", {"launch": "a"})
    gone = running.processes[6 - silent :]
    running.processes = running.processes[: 6 - silent]
    beat(running, 12)
    assert set(running.names("lost")) <= {one.name for one in gone} and not living(running)
    waits_for(running, f"pid {gone[0].hello['pid']} at 127.0.0.1")


def started_again(back: int) -> tuple[Running, Running]:
    """The coordinator before, and the next, to which so many have come back: four servers, then trainers."""
    before, after = first_launch("training", {"launch": "a"}), Running()
    addresses = {one.name: one.hello["address"] for one in before.processes}
    for process in before.processes[:back]:
        after.processes.append(process)
        after.rejoin(process, **knows(before, process), addresses=addresses)
    after.router.on_tick(after.now_s)
    return before, after


def after_all(running: Running) -> None:
    running.now_s = LATE_MOST_S
    for process in running.processes:
        running.say(process, type="beat")
    running.router.on_tick(running.now_s)
    assert running.core.epoch > 0 and running.core.era == 1


@pytest.mark.parametrize("back", [4, 5])
def test_trainers_that_do_not_come_back_to_the_next_coordinator_keep_their_place_for_a_while(back: int) -> None:
    _, running = started_again(back)
    after_all(running)
    waits_for(running, "trainer-1")


def test_trainers_that_died_with_the_coordinator_keep_no_place() -> None:
    before, running = started_again(4)
    for process in before.processes[4:]:
        running.answer(GONE, process.name)
    after_all(running)
    assert running.join("trainer", 0, launch="b").wire.told("welcome")


class Newest:
    """A manifests that a test answers for."""

    def newest(self, run: str, restored: Any, found: Any, read: bool = True) -> None:
        self.found = found


def test_trainers_that_go_back_to_a_checkpoint_keep_their_place_for_a_while() -> None:
    """They are told to end, and start again. Another launch waits meanwhile, whether or not it did before."""
    running = Running(checkpoint=CheckpointSettings("memory://x", every_steps=2, beyond="checkpoint"))
    manifests = running.router._manifests = Newest()  # type: ignore[assignment]
    running.start(launch="a")
    running.say(running.processes[4], type="loaded", load_end=0)
    early = running.join("trainer", 0, launch="c")
    assert early.wire.told("waits")
    first = running.processes[4]
    die(running, running.processes[:2])
    running.router.on_tick(running.now_s)
    manifests.found((Restored("memory://x", "000000000010-run-0-1", 10), JOB), "")
    assert first.wire.told("fatal") and running.core.restored is not None
    for _ in range(4):
        running.join("server")
    running.router.on_tick(running.now_s)
    assert not early.wire.told("welcome")
    running.router.on_closed(early.wire, running.now_s)
    waits_for(running, f"pid {first.hello['pid']} at 127.0.0.1")


@pytest.mark.parametrize("lives", [0, 3])
def test_another_launch_that_came_to_a_coordinator_that_knew_nothing_gives_way(lives: int) -> None:
    """It was let in before anybody was back: those who train go on as if nothing had been, whatever their names are."""
    before, after = Running(), Running()
    before.core._state.members._lives = dict.fromkeys(range(2), lives)
    before.start(launch="a")
    before.say(before.processes[4], type="loaded", load_end=0)
    intruders = [after.join("trainer", rank, launch="b") for rank in (0, 1)]
    assert all(one.wire.told("welcome") for one in intruders)
    for process in before.processes:
        after.processes.append(process)
        after.rejoin(process, **knows(before, process))
    after.now_s = LATE_MOST_S
    after.router.on_tick(after.now_s)
    assert not after.core.regathering and after.core.era == 0 and after.core.epoch > 0
    assert {one.wire.told("fatal")[0]["kind"] for one in intruders} == {"trainers_lost" if lives else "fenced"}
    assert not any(process.wire.told("fatal") for process in before.processes)
    again = after.join("trainer", 0, launch="b", relaunched=True)
    assert again.wire.told("waits") and not again.wire.told("welcome")


def test_joins_wait_for_those_who_come_right_behind() -> None:
    """A coordinator in the place of another was cut off for longer than joins are held, and all find it at once."""
    before, after = first_launch("training", {"launch": "a"}), Running(looks=True, first_held_s=1.0)
    after.router.begin_with((Restored("memory://x", "000000000010-run-0-1", 10), JOB), 1, 2.0)
    after.now_s = 20.0
    early = after.join("server")
    after.router.on_tick(after.now_s)
    for process in before.processes:
        after.now_s += 0.1
        after.processes.append(process)
        after.rejoin(process, **knows(before, process))
    after.now_s += LATE_MOST_S
    after.router.on_tick(after.now_s)
    assert after.core.restored is None and not after.names("lost") and after.core.era == 0
    assert early.name == "server-1000"


def finished(start: Fields) -> Running:
    """All trainers are done, and have ended."""
    running = first_launch("training", start)
    for process in running.processes[4:]:
        running.say(process, type="leave", report={})
        running.close(process.wire)
    assert running.router.status(running.now_s).finished
    return running


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("coordinator", ["the same", "started again"])
def test_a_job_that_has_ended_is_not_trained_on_silently(start: str, coordinator: str) -> None:
    first, second = STARTS[start]
    running = finished(first)
    if coordinator == "started again":
        before, running = running, Running()
        for process in before.processes[:4]:
            running.processes.append(process)
            left = process.wire.told("left")[-1]["trainers"]
            running.rejoin(process, **knows(before, process), left=left)
        running.now_s = LATE_MOST_S
        running.router.on_tick(running.now_s)
        assert running.core.epoch > 0 and running.core.era == 0
    newcomer = running.join("trainer", 0, **second)
    (refused,) = newcomer.wire.told("refused")
    assert "has ended" in refused["reason"] and "--again" in refused["reason"]
    assert running.core.era == 0
    asked = running.join("trainer", 0, **second, again=True)
    assert asked.wire.told("welcome")[0]["restarted"] and running.core.era == 1
    assert running.join("trainer", 1, **second, again=True).wire.told("welcome")
    for process in running.processes[:4]:
        assert process.wire.told("left")[-1]["trainers"] == [], "it has not ended any more"


def test_a_trainer_that_fails_after_all_were_done_is_started_again_by_its_launch() -> None:
    running = finished({"launch": "a"})
    assert running.join("trainer", 0, launch="a", relaunched=True).wire.told("welcome")


def test_a_join_that_waits_and_ends_is_forgotten() -> None:
    running = first_launch("training", {"launch": "a"})
    newcomer = running.join("trainer", 0, launch="b")
    running.router.on_closed(newcomer.wire, running.now_s)
    assert not running.router._held and not running.router._blocked
    assert isinstance(newcomer.wire, Wire) and JOB.trainers == 2
