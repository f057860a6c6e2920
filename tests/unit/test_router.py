"""The router: names and connections, the end of a connection, who comes back, and what is not a message."""

from __future__ import annotations

import pytest
from builds import BUILD
from router_harness import CODE, JOB, Message, Process, Running, Wire

from torch_ecrec.coordinator.asked import PROBE_AGAIN_S
from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.coordinator.router import UNKNOWN_YET
from torch_ecrec.protocol.build import BITS
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import JobSpec, TableSpec
from torch_ecrec.transport.liveness import ALIVE, COMPUTES, GONE, UNREACHABLE


def test_all_connections_reset_at_once_cost_nothing() -> None:
    """Every process lives, and each is the member that it was: no loss, no era, no other name."""
    running = Running().start()
    wires = [process.wire for process in running.processes]
    for wire in wires:
        running.close(wire)
    for name, number, _ in list(running.probes):
        running.router.on_probed(name, number, ALIVE, running.now_s)
    assert len(running.probes) == 6 and not running.names("lost")
    for process in running.processes:
        wire = running.rejoin(process)
        assert wire.admitted and wire.told("rejoined") and wire.told("placement") and not wire.told("fatal")
    assert running.core.era == 0 and running.core.epoch == 1 and not running.names("lost")
    assert running.names("back") == [process.name for process in running.processes]


def test_what_was_said_to_a_leader_of_before_is_not_heard() -> None:
    """It waited at the port of one that stood by, and is old: neither a join nor a rejoin, nor what follows on them."""
    before = Running().start()
    after = Running(led=9)
    for process in before.processes:
        stale = after.rejoin(process, led=4)
        after.router.on_message(stale, {"type": "beat", "unreachable": []}, 0.0)
        assert stale.closed and not stale.admitted and not stale.told("rejoined")
    newcomer = Process("server")
    after.say(newcomer, type="join", **newcomer.hello, led=8)
    assert newcomer.wire.closed and not newcomer.wire.sent, "it is told nothing: it looks again who leads"
    assert not after.core.members and not after.core.regathering
    assert "for the coordinator that led from 4 on" in str(after.events[0]) and after.router.refused >= 7
    for process in before.processes:
        assert after.rejoin(process, led=9).admitted
    assert len(after.core.members) == 6


def test_who_was_given_the_address_of_one_that_leads_is_heard() -> None:
    running = Running(led=9)
    assert running.join("server").wire.admitted and running.names("joined") == ["server-0"]


@pytest.mark.parametrize(
    "word", [{"type": "stop"}, {"type": "drain", "what": "server-0"}], ids=lambda word: word["type"]
)
def test_what_a_tool_said_to_a_leader_of_before_is_not_done(word: Message) -> None:
    """It waited at the port of one that stood by; whoever had said it was told that nobody answered."""
    running = Running(led=9).start()
    late, now, named = Wire("late"), Wire("now"), Wire("named")
    running.router.on_message(late, {**word, "led": 8}, 0.0)
    assert late.closed and not late.sent and running.router.refused == 1
    assert running.router.status(0.0).refusal is None, "nobody has to look at what was said to one of before"
    assert running.core.fatal is None and not running.core.members["server-0"].draining
    for wire, led in ((now, 9), (named, 0)):
        running.router.on_message(wire, {**word, "led": led}, 0.0)
    assert running.router.refused == 1
    assert running.core.fatal == "stopped" or running.core.members["server-0"].draining


def test_a_killed_process_is_lost_as_soon_as_its_probe_is_answered() -> None:
    running = Running().start()
    running.close(running.processes[1].wire)
    assert running.probes[-1][0] == "server-1" and running.probes[-1][2] == tuple(running.processes[1].hello["address"])
    assert not running.names("lost")
    running.answer(GONE)
    assert running.names("lost") == ["server-1"] and running.core.slots[1].server == "server-3"


def test_a_process_that_cannot_be_reached_is_lost() -> None:
    running = Running().start()
    running.close(running.processes[4].wire)
    running.answer(UNREACHABLE)
    assert running.names("lost") == ["trainer-0"] and running.core.era == 1


def test_one_that_was_dying_when_it_was_asked_is_asked_again_soon() -> None:
    running = Running(lease_s=10.0).start()
    running.close(running.processes[1].wire)
    running.answer(ALIVE)  # its connection went first, then what it listens at
    before = len(running.probes)
    running.now_s += 0.1
    running.router.on_tick(running.now_s)
    assert len(running.probes) == before + 1, "training stands meanwhile"
    running.answer(GONE)
    assert running.names("lost")


def test_one_that_lives_has_its_lease_and_is_asked_again() -> None:
    running = Running(lease_s=10.0).start()
    running.close(running.processes[1].wire)
    running.answer(ALIVE)
    for _ in range(8):
        running.now_s += 1.0
        for process in running.processes:
            if process is not running.processes[1]:
                running.say(process, type="beat")
        before = len(running.probes)
        running.router.on_tick(running.now_s)
        assert len(running.probes) == before + 1 and running.now_s >= PROBE_AGAIN_S
        running.answer(ALIVE)
    assert not running.names("lost")
    running.now_s += 1.0
    running.router.on_tick(running.now_s)
    running.answer(GONE, "server-1")  # killed after all
    assert running.names("lost") == ["server-1"]
    assert running.rejoin(running.processes[1]).told("fatal")[0]["kind"] == "fenced"


def test_a_lease_that_ends_while_away_is_a_loss() -> None:
    running = Running(lease_s=3.0).start()
    running.close(running.processes[1].wire)
    running.answer(ALIVE)
    for _ in range(5):
        running.now_s += 1.0
        for process in running.processes:
            if process is not running.processes[1]:
                running.say(process, type="beat")
        running.router.on_tick(running.now_s)
    assert running.names("lost") == ["server-1"]
    running.answer(GONE)  # late
    assert running.names("lost") == ["server-1"]


def test_the_answer_to_a_probe_counts_only_while_the_member_is_away() -> None:
    running = Running().start()
    running.close(running.processes[1].wire)
    running.rejoin(running.processes[1])
    running.answer(GONE)  # of the process, as it seemed then
    assert not running.names("lost")


def test_a_new_connection_may_come_before_the_end_of_the_old_one() -> None:
    running = Running().start()
    old = running.processes[1].wire
    running.rejoin(running.processes[1])
    assert old.closed
    running.router.on_closed(old, running.now_s)
    running.router.on_message(old, {"type": "leave", "report": {}}, running.now_s)
    assert not running.probes and not running.names("lost") and not running.names("left")


def test_who_did_not_read_its_name_joins_again_and_is_the_same() -> None:
    running = Running()
    process = running.join("server")
    running.close(process.wire)
    process.wire = Wire("again")
    running.say(process, type="join", **process.hello)
    assert process.name == "server-0" and list(running.core.members) == ["server-0"]
    running.answer(GONE, "server-0")
    assert running.core.members["server-0"].alive


def gathered() -> Running:
    """All have joined, and nobody can be called yet."""
    running = Running()
    for _ in range(4):
        running.join("server")
    for rank in range(2):
        running.join("trainer", rank)
    return running


def test_how_a_member_is_called_is_also_in_the_word_of_who_comes_back() -> None:
    """It had said so, and its connection ended before that was heard."""
    running = gathered()
    process = running.processes[2]
    running.close(process.wire)
    running.rejoin(process, placement=None, incarnations=[], roster=0, world=[])
    assert running.core.epoch == 0
    running.enter()
    assert running.core.epoch == 1 and not running.core.regathering
    assert process.wire.told("roster")[-1]["version"] == running.core.roster.version


def test_who_comes_back_is_told_the_roster_that_it_has_missed() -> None:
    running = Running().start()
    process = running.processes[1]
    running.close(process.wire)
    running.join("server")
    running.enter()
    wire = running.rejoin(process, roster=1)
    assert [message["version"] for message in wire.told("roster")] == [2]
    again = running.rejoin(process, roster=2)
    assert not again.told("roster"), "it knows that one"


def test_a_process_that_claims_a_members_name_is_fenced() -> None:
    running = Running().start()
    process = running.processes[1]
    wire = process.wire
    stranger = Process("server")
    stranger.wire.sent = list(wire.sent)
    assert running.rejoin(stranger).told("fatal")[0]["kind"] == "fenced"
    assert running.core.members["server-1"].session_id == process.hello["session_id"] and not wire.closed


@pytest.mark.parametrize("field", ["roster", "era", "term", "resume_step"])
def test_absurd_versions_are_refused(field: str) -> None:
    running = Running().start()
    for value in (2**53 + 1, 2**63, 2**64, -1, True, 1.5, "1", None):
        before = running.router.refused
        process = running.processes[1]
        wire, old = running.rejoin(process, **{field: value}), process.wire
        assert wire is old and wire.told("refused") and wire.closed and running.router.refused == before + 1
    assert running.core.roster.version == 1 and running.core.era == 0


def test_what_there_has_not_been_is_not_believed() -> None:
    running = Running().start()
    slots = [["server-0", 0, True]] * 3
    for fields in ({"roster": 7}, {"era": 3}, {"placement": {"epoch": 9, "slots": slots}}):
        assert running.rejoin(running.processes[1], **fields).told("fatal")[0]["kind"] == "fenced"
    assert running.core.roster.version == 1 and running.core.era == 0 and running.core.epoch == 1


def test_another_job_or_version_does_not_rejoin() -> None:
    running = Running().start()
    other = JobSpec((TableSpec("b", 31, 4, -1.0, 1.0),), CODE, 2)
    wire = running.rejoin(running.processes[1], job=other.to_json())
    assert "another job: it has tables" in wire.told("other_cluster")[0]["reason"] and wire.closed
    other = {**BUILD["messages"], "protocol": "0"}
    wire = running.rejoin(running.processes[2], version="0.0", messages=other)
    assert "version 0.0" in wire.told("refused")[0]["reason"]


def test_joins_wait_for_members_of_before_and_are_let_in_then() -> None:
    before, after = Running().start(), Running(joins_from_s=1.0)
    early = after.join("server")
    assert not early.wire.sent and early.wire.admitted
    for process in before.processes[:4]:
        wire = Wire("back")
        name = process.name
        message = {"roster": 1, "world": list(before.core.roster.names), "placement": None}
        after.processes.append(process)
        process.wire.sent = [{"type": "welcome", "name": name}]
        after.rejoin(process, **message, incarnations=[])
        assert not wire.closed
    after.now_s = 1.5
    after.router.on_tick(after.now_s)
    assert after.core.regathering and not early.wire.told("welcome")
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    assert early.name == "server-1000"


def test_joins_wait_until_it_is_known_what_the_cluster_begins_with() -> None:
    """A coordinator in the place of one that died, whose store cannot be read: nobody begins anew meanwhile."""
    job = JobSpec((TableSpec("b", 31, 4, -1.0, 1.0),), CODE, 2)
    restored = Restored("memory://x", "000000000010-run-0-1", 10)
    running = Running(looks=True)
    server = running.join("server")
    for now_s in (10.0, 1000.0):
        running.now_s = now_s
        running.router.on_tick(now_s)
        assert not server.wire.sent and running.router.status(now_s).looks
    running.router.begin_with((restored, job), 3, running.now_s)
    assert not running.router.status(now_s).looks
    (event,) = (one for one in running.events if one["event"] == "went_beyond")
    assert (event["name"], event["step"]) == (restored.folder, 10)
    assert server.name == "server-3000" and server.wire.told("welcome")[0]["restored"]["done"] == 10


def test_what_was_found_before_anybody_may_join_is_not_told_as_decided() -> None:
    """A status that said so would show the beginning, nothing restored, as what all went back to."""
    job = JobSpec((TableSpec("b", 31, 4, -1.0, 1.0),), CODE, 2)
    running = Running(looks=True, joins_from_s=5.0)
    running.join("server")
    running.router.begin_with((Restored("memory://x", "000000000010-run-0-1", 10), job), 3, 1.0)
    early = running.router.status(1.0)
    running.router.on_tick(6.0)
    late = running.router.status(6.0)
    assert [(one.looks, one.restored is not None) for one in (early, late)] == [(True, False), (False, True)]


def test_members_of_before_know_better_what_the_cluster_begins_with() -> None:
    """Also if the store says something only after they have come back, or never does."""
    before, after = Running().start(), Running(looks=True)
    late = after.join("server")
    for process in before.processes[:4]:
        message = {"roster": 1, "world": list(before.core.roster.names), "placement": None}
        after.processes.append(process)
        process.wire.sent = [{"type": "welcome", "name": process.name}]
        after.rejoin(process, **message, incarnations=[])
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    assert late.name == "server-1000" and late.wire.told("welcome")[0]["restored"] is None
    core = after.core
    after.router.begin_with((Restored("memory://x", "000000000010-run-0-1", 10), before.core.job), 3, after.now_s)
    assert after.core is core


def test_a_spare_that_knows_nothing_comes_back_and_the_cluster_begins_with_its_checkpoint() -> None:
    """Everybody else has died with the coordinator before: training must not begin anew."""
    before, after = Running().start(), Running(looks=True)
    spare = before.processes[0]
    wire = after.rejoin(spare, job=None, roster=1, world=[spare.name], placement=None, incarnations=[])
    late = after.join("server")
    restored = Restored("memory://x", "000000000010-run-0-1", 10)
    after.router.begin_with((restored, JOB), 3, after.now_s)
    assert not wire.told("fatal") and not late.wire.sent, "others may come back yet"
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    assert [fatal["kind"] for fatal in wire.told("fatal")] == ["fenced"]
    assert late.wire.told("welcome")[0]["restored"]["done"] == 10 and late.name == "server-3000"


def test_joins_are_let_in_also_if_all_who_came_back_are_gone() -> None:
    """A coordinator that regathers, and whose members are all lost meanwhile, begins anew."""
    before, after = Running().start(), Running()
    process = before.processes[0]
    after.rejoin(process, roster=1, world=[process.name], placement=None, incarnations=[])
    after.close(process.wire)
    after.answer(GONE)
    late = after.join("server")
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    assert late.wire.told("welcome")


def test_who_is_of_another_build_is_told_that_it_never_can_be_a_member() -> None:
    """Also one that was, of the coordinator before."""
    before, after = Running().start(), Running()
    process = before.processes[0]
    process.hello["messages"] = {**BUILD["messages"], "Push": "another"}
    after.rejoin(process, roster=1, world=[process.name], placement=None, incarnations=[])
    (refusal,) = process.wire.told("refused")
    assert refusal["kind"] == "other_build" and "not the same: Push. They" in refusal["reason"]
    assert process.wire.closed and not after.core.members


ADAM = {f"{BITS}adam": "1", f"{BITS}the code": "2"}


def of_bits(bits: dict[str, str], version: str = "9.9.9") -> Message:
    return {"version": version, "messages": {**BUILD["messages"], **bits}}


def test_builds_whose_kernels_give_the_same_bits_are_members_together_and_others_are_refused() -> None:
    """Whatever their versions. Compared is with who is present, also after another coordinator has begun to lead."""
    running = Running()
    for _ in range(4):
        running.join("server", **of_bits(ADAM, "9.9.8"))
    later = running.join("server", **of_bits(ADAM))
    assert {member.version for member in running.core.members.values()} == {"9.9.8", "9.9.9"}
    other = running.join("server", **of_bits({**ADAM, f"{BITS}adam": "3"}))
    (refusal,) = other.wire.told("refused")
    assert refusal["kind"] == "refused" and "(version 9.9.9, there 9.9.8): bits of adam. They" in refusal["reason"]
    less = running.join("server", **of_bits({f"{BITS}adam": "1"}))
    assert "bits of the code" in less.wire.told("refused")[0]["reason"]
    tool = running.join("server", **of_bits({}))
    assert tool.wire.told("welcome"), "which has computed none"
    after = Running()
    wire = after.rejoin(later, roster=1, world=[later.name], placement=None, incarnations=[])
    assert not wire.told("fatal") and not wire.told("refused")
    late = after.join("server", **of_bits({**ADAM, f"{BITS}adam": "3"}))
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    assert late.wire.told("refused")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        (ADAM, ""),
        ({**ADAM, f"{BITS}adam": "3"}, "bits of adam"),
        ({"Push": "another"}, "not the same: Push"),
        ({"word Ready": "another"}, "not the same: word Ready"),
        ({"protocol": "9"}, "protocol 9, here 1"),
    ],
)
def test_who_asks_before_it_joins_is_told_what_differs_and_nothing_is_wrong_with_the_cluster(
    changes: dict[str, str], says: str
) -> None:
    running = Running()
    running.join("server", **of_bits(ADAM))
    asks = Process("server")
    running.say(asks, type="compare", **of_bits(changes))
    assert bool(asks.wire.told("status")) == (not says)
    assert all(says in refusal["reason"] for refusal in asks.wire.told("refused"))
    assert len(asks.wire.told("refused")) == bool(says) == asks.wire.closed
    running.say(watcher := Process("server"), type="status")
    status = watcher.wire.told("status")[0]
    assert status["refused_messages"] == 0 and len(status["members"]) == 1


def test_a_refused_message_of_a_member_harms_nobody() -> None:
    running = Running().start()
    wire = running.processes[1].wire
    for message in ({"type": "ready", "slot": 7, "incarnation": 0}, {"type": "listens", "endpoint": ""}):
        running.say(running.processes[1], **message)
    running.say(running.processes[1], type="loaded", load_end=0)
    running.say(running.processes[4], type="progress", trainer=1, step=1)
    assert len(wire.told("refused")) == 3 and not wire.closed
    said = running.router.status(3.0)
    assert said.refused_messages == 4 and said.refusal is not None and said.refusal.ago_s == 3.0
    running.router.on_message(Wire("a tool"), {"type": "drain", "what": "server-9"}, 0.0)
    assert running.router.refused == 4, "a slip of somebody's, who is told: nothing is wrong with the cluster"
    assert sum(event["event"] == "refused" for event in running.events) == 1, "the log is told once a second"
    assert running.core.step == 0 and running.core.load_end is None


def test_a_stranger_is_sent_away() -> None:
    running = Running().start()
    for message in ({"type": "ready", "slot": 0, "incarnation": 0}, {"type": "leave"}, {"type": 7}, {}):
        stranger = Process("server")
        running.say(stranger, **message)
        assert stranger.wire.closed and stranger.wire.told("refused")
    asks = Process("server")
    running.say(asks, type="status")
    assert asks.wire.told("status") and not asks.wire.closed


def test_watchers_see_what_happens() -> None:
    running = Running()
    watcher = Process("server")
    running.say(watcher, type="watch")
    running.start()
    assert watcher.wire.admitted and [m["event"] for m in watcher.wire.told("event")][:1] == ["joined"]
    running.say(running.processes[4], type="progress", trainer=0, step=3, loss=0.5, mine="text")
    assert watcher.wire.told("progress") == [{"type": "progress", "trainer": 0, "step": 3, "loss": 0.5, "mine": "text"}]
    running.close(watcher.wire)
    running.say(running.processes[4], type="progress", trainer=0, step=4)
    assert len(watcher.wire.told("progress")) == 1


@pytest.mark.parametrize("told", [True, False])
def test_trainers_that_are_left_of_a_lost_cluster_do_not_end_the_one_that_is_to_begin_with_a_checkpoint(
    told: bool,
) -> None:
    """`up` was killed, and is started again with --restore while torchrun's trainers wait for their coordinator."""
    restored = Restored("memory://x", "000000000010-other-0-1", 10)
    before, after = Running().start(), Running(restore=(restored, JOB) if told else None)
    left, servers = before.processes[4:], {one.name: one.hello["address"] for one in before.processes[:4]}
    slots = [[place.server, place.incarnation, place.healthy] for place in before.core.slots]
    known: Message = {"world": list(before.core.roster.names), "placement": {"epoch": 1, "slots": slots}}
    for process in left:
        process.wire.sent = [{"type": "welcome", "name": process.name}]
        after.rejoin(process, roster=1, addresses=servers, **known)
    after.join("server")
    after.router.on_tick(after.now_s)
    for name in servers:
        after.answer(GONE, name)
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    kinds = [process.wire.told("fatal")[-1]["kind"] for process in left]
    if not told:
        assert kinds == ["data_loss"] * 2 and after.core.fatal_kind == "data_loss"
        return
    assert kinds == ["trainers_lost"] * 2 and after.core.fatal is None
    (event,) = (one for one in after.events if one["event"] == "went_beyond")
    assert (event["name"], event["step"]) == (restored.folder, 10) and "are lost together" in event["reason"]
    assert after.processes[0].wire.told("welcome")[0]["restored"]["done"] == 10
    late = after.rejoin(left[0], roster=1, **known)
    assert late.told("fatal")[0]["kind"] == "trainers_lost", "it had not heard it"


def test_servers_that_are_gone_are_shown_for_a_while() -> None:
    running = Running()
    for _ in range(150):
        process = running.join("server")
        running.close(process.wire)
        running.answer(GONE)
    running.router.on_tick(1.0)
    assert len(running.core.members) <= 101


def test_who_joins_where_there_is_nothing_to_begin_with_is_told_so_and_members_of_before_are_welcome() -> None:
    before, after = Running().start(), Running(looks=True)
    late = after.join("server")
    after.router.cannot_begin("it began with A, which is gone", after.now_s)
    (refused,) = late.wire.told("refused")
    assert refused["kind"] == "data_loss" and refused["reason"].endswith("came back: it began with A, which is gone")
    status = after.router.status(after.now_s)
    assert status.cannot_begin == "it began with A, which is gone" and status.looks
    for process in before.processes[:4]:
        message = {"roster": 1, "world": list(before.core.roster.names), "placement": None}
        after.processes.append(process)
        process.wire.sent = [{"type": "welcome", "name": process.name}]
        after.rejoin(process, **message, incarnations=[])
    spare = after.join("server")
    after.router.cannot_begin("it began with A, which is gone", after.now_s)
    assert not spare.wire.sent, "members tell what they know"
    after.now_s = REGATHER_S + 1.0
    after.router.on_tick(after.now_s)
    status = after.router.status(after.now_s)
    assert spare.wire.told("welcome") and not status.looks and not status.cannot_begin


def test_who_joins_is_told_of_a_store_that_cannot_be_looked_at() -> None:
    """Who waits already, and who comes later; each reason once; nobody any more once it is known."""
    running = Running(looks=True)
    first = running.join("server")
    assert not first.wire.sent
    for _ in range(2):
        running.router.cannot_look("it hangs")
    second = running.join("server")
    for process in (first, second):
        assert process.wire.sent == [{"type": "waits", "reason": f"{UNKNOWN_YET}: it hangs"}]
    running.router.cannot_look("it is gone")
    assert [one["reason"] for one in first.wire.told("waits")] == [
        f"{UNKNOWN_YET}: it hangs",
        f"{UNKNOWN_YET}: it is gone",
    ]
    running.router.begin_with(None, 0, running.now_s)
    running.router.cannot_look("it hangs")
    third = running.join("server")
    assert third.wire.sent[0]["type"] == first.wire.told("welcome")[0]["type"] == "welcome"


def test_what_was_brought_back_is_what_the_cluster_begins_with() -> None:
    running, restored = Running(looks=True), Restored("memory://x", "000000000010-run-0-1", 10)
    running.join("server")
    running.router.cannot_begin("it is gone", running.now_s)
    running.router.begin_with((restored, JOB), 1, running.now_s)
    assert running.join("server").wire.told("welcome")[0]["restored"]["done"] == 10


@pytest.mark.parametrize("term", [0, 3])
def test_nobody_begins_anew_without_a_word(term: int) -> None:
    """`term`: 0 where no checkpoints are written. Else names of before are not given again."""
    running = Running(looks=True)
    server = running.join("server")
    running.router.begin_with(None, term, running.now_s)
    assert server.name == ("server-3000" if term else "server-0")
    assert [one["event"] for one in running.events if one["event"] in ("began_anew", "went_beyond")] == ["began_anew"]


def beats(running: Running, silent: Process, seconds: float, answer: str | None) -> None:
    """Everybody beats but one, who answers that, or nothing, whenever it is asked."""
    asked = len(running.probes)
    for _ in range(round(seconds / 0.25)):
        running.now_s += 0.25
        for process in running.processes:
            if process is not silent:
                running.say(process, type="beat")
        running.router.on_tick(running.now_s)
        for name, number, address in running.probes[asked:]:
            assert name == silent.name and list(address) == silent.hello["address"], "nobody else is silent"
            if answer is not None:
                running.router.on_probed(name, number, answer, running.now_s)
        asked = len(running.probes)


@pytest.mark.parametrize("who", [1, -1], ids=["server", "trainer"])
def test_who_computes_when_it_is_asked_is_not_lost_however_long_it_is_silent(who: int) -> None:
    running = Running(lease_s=4.0).start()
    silent = running.processes[who]
    beats(running, silent, 60.0, COMPUTES)
    assert not running.names("lost") and running.core.members[silent.name].silent_s(running.now_s) <= 1.0
    beats(running, silent, 6.0, ALIVE)  # it hangs after all
    assert running.names("lost") == [silent.name]


@pytest.mark.parametrize("who", [1, -1], ids=["server", "trainer"])
@pytest.mark.parametrize("answer", [ALIVE, UNREACHABLE, GONE, None])
def test_any_other_answer_says_nothing_of_one_that_has_a_connection(who: int, answer: str | None) -> None:
    running = Running(lease_s=4.0).start()
    silent = running.processes[who]
    beats(running, silent, 3.5, answer)
    assert not running.names("lost"), "its lease goes on"
    beats(running, silent, 1.5, answer)
    assert running.names("lost") == [silent.name], "and ends"


def test_who_computes_while_it_is_away_is_waited_for() -> None:
    running = Running(lease_s=4.0).start()
    silent = running.processes[1]
    running.close(silent.wire)
    running.answer(COMPUTES)
    beats(running, silent, 30.0, COMPUTES)
    assert not running.names("lost")
    running.now_s += 0.25
    running.router.on_tick(running.now_s)
    running.answer(GONE)
    assert running.names("lost") == [silent.name]


def test_whom_others_cannot_reach_while_it_computes_is_neither_silent_nor_cut_off() -> None:
    """It accepts no connection meanwhile, and the backlog of its port is full in the end."""
    running = Running(lease_s=60.0)
    for number in range(6):
        process = Process(*(("server",) if number < 4 else ("trainer", number - 4)))
        process.hello["address"] = [f"10.0.0.{number}", process.hello["pid"]]
        running.processes.append(process)
        running.say(process, type="join", **process.hello)
    running.enter()
    silent = running.processes[1]

    def complain(seconds: float, computes: bool) -> None:
        for _ in range(round(seconds / 0.25)):
            running.now_s += 0.25
            for process in running.processes:
                if process is not silent:
                    running.say(process, type="beat", unreachable=[silent.name])
                elif not computes:
                    running.say(process, type="beat")
            running.router.on_tick(running.now_s)
            if computes and running.probes:
                running.answer(COMPUTES, silent.name)

    beats(running, silent, 10.0, COMPUTES)
    complain(20.0, computes=True)
    complain(1.25, computes=False)  # it has let go of the lock, and is about to accept them
    assert not running.names("lost")
    complain(3.0, computes=False)  # a cut
    assert running.names("lost") == [silent.name]


# a job that was given up ------------------------------------------------------------------------------------------

OTHER_JOBS = {
    "other tables": JobSpec((TableSpec("a", 31, 4, -1.0, 1.0),), CODE, 2),
    "another number of trainers": JobSpec(JOB.tables, CODE, 1),
    "another seed": JobSpec(JOB.tables, CODE, 2, seed=1),
}


def given_up(servers: int, trainers: int, loaded: bool = False) -> Running:
    """So many have joined; then all trainers have ended."""
    run = Running()
    for _ in range(servers):
        run.join("server")
    there = [run.join("trainer", rank) for rank in range(trainers)]
    run.now_s += 6.0
    run.router.on_tick(run.now_s)
    run.enter()
    assert bool(run.core.slots) == (servers >= 3 and trainers == 2)
    if loaded:
        run.say(there[0], type="loaded", load_end=0)
    for process in there:
        run.close(process.wire)
        name, number, _ = run.probes[-1]
        run.router.on_probed(name, number, GONE, run.now_s)
    return run


@pytest.mark.parametrize("other", OTHER_JOBS)
@pytest.mark.parametrize(("servers", "trainers"), [(0, 1), (2, 1), (4, 1), (4, 2)])
def test_a_job_that_was_given_up_before_anything_was_made_pins_no_cluster(
    servers: int, trainers: int, other: str
) -> None:
    run = given_up(servers, trainers)
    comes = run.join("trainer", 0, job=OTHER_JOBS[other].to_json())
    assert comes.wire.told("welcome") and run.core.job is not None
    assert OTHER_JOBS[other].difference(run.core.job) == ""
    [event] = [event for event in run.events if event["event"] == "job_forgotten"]
    assert "there" in event["difference"] or "this job has" in event["difference"]
    for server in run.processes[:servers]:
        assert "was given up before anything was trained" in server.wire.told("fatal")[-1]["reason"]
    again = [run.join("server") for _ in range(servers)]
    assert all(process.wire.told("welcome") for process in again), "they join as others"


@pytest.mark.parametrize("other", OTHER_JOBS)
def test_what_was_loaded_is_kept_and_the_refusal_says_what_to_do(other: str) -> None:
    run = given_up(4, 2, loaded=True)
    refused = run.join("trainer", 0, job=OTHER_JOBS[other].to_json()).wire.told("refused")
    assert "this cluster trains another job" in refused[0]["reason"]
    last = run.router.status(run.now_s + 7.0).refusal
    assert last is not None and last.ago_s == 7.0 and "this cluster trains another job" in last.why
    assert "end that cluster (`torch-ecrec up`, or its coordinator) and start it anew" in refused[0]["reason"]
    assert run.join("trainer", 0).wire.told("welcome"), "and its own trainers come back"


def test_who_still_waits_is_named_to_who_brings_another_job() -> None:
    run = Running()
    first = run.join("trainer", 0)
    refused = run.join("trainer", 0, job=OTHER_JOBS["another number of trainers"].to_json()).wire.told("refused")
    assert f"end its trainers first, trainer-0 (pid {first.hello['pid']} at 127.0.0.1)" in refused[0]["reason"]
    assert not [event for event in run.events if event["event"] == "job_forgotten"]


def test_the_same_job_comes_back_to_what_there_is() -> None:
    run = given_up(4, 1)
    assert run.join("trainer", 0).wire.told("welcome")
    assert not run.processes[0].wire.told("fatal")
