"""What the demo makes of a coordinator's messages: timelines, throughput, and what is told."""

import itertools
import re

import pytest
from coordinator_words import (
    BACK,
    JOINED,
    PLACED,
    TRAINERS_BACK,
    TRAINERS_LOST,
    empty_status,
    event,
    everything_lost,
    joined,
    member,
    recorded,
    slot_report,
    status,
    steps,
    two_servers_lost,
    watched,
)

from torch_ecrec.demo.plot import spread, throughput
from torch_ecrec.demo.report import Record, format_kill
from torch_ecrec.observe.text import format_status
from torch_ecrec.observe.words import format_connections
from torch_ecrec.protocol.status import Connections, Report, RestoredStatus, SlotReport, SlotStatus


def test_the_timeline_of_a_failure() -> None:
    record = recorded()
    assert record.step == 40 and record.settled
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["member"], entry["pid"], entry["slots_lost"]) == ("server-1", 101, [1])
    assert (entry["role"], entry["number"], entry["resumed_after"]) == ("server", 1, None)
    assert (entry["step"], entry["first_step"]) == (20, 22)
    assert entry["times"]["kill_s"] == 2.92
    after = entry["after_kill_s"]
    other = ("resumable_s", "rejoined_s", "went_back_s", "trains_s")
    assert [after[name] for name in other] == [None] * 4, "of other roles"
    assert {name: value for name, value in after.items() if name not in other} == pytest.approx(
        {"detected_s": 0.02, "rehosted_s": 0.05, "first_step_s": 0.49, "rebuilt_s": 0.5, "stall_s": 0.4}
    )
    text = "\n".join(format_kill(entry))
    order = [text.index(word) for word in ("killed", "detected", "re-hosted", "first step", "rebuilt: fully", "pause")]
    assert order == sorted(order)


def test_throughput_before_during_and_after() -> None:
    rates = recorded().throughput(samples_per_step=10)
    assert rates["before"] == pytest.approx(100, rel=0.05)
    assert rates["after"] == pytest.approx(100, rel=0.05)
    assert rates["rebuild"] == pytest.approx(40)  # steps 21 and 22 in 0.5 s
    assert Record(2, 3).throughput(10) == {"before": None, "rebuild": None, "after": None}


def test_a_process_with_two_slots_is_one_loss_of_both() -> None:
    record = Record(trainers=1, slots=3)
    for message in [*JOINED, event(0.5, "placed", epoch=1, slots=[["server-0", 0], ["server-1", 0], ["server-1", 0]])]:
        record.on_message(message)
    record.on_message({"type": "progress", "trainer": 0, "step": 1, "time_s": 1.0})
    record.on_kill("server:1@1", "server", 1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1, 2]))
    record.on_kill("server:2@1", "server", 2, time_s=1.1)
    record.on_message(event(1.2, "re-placed", epoch=1, slots=[["server-0", 0], ["server-3", 1], ["server-3", 1]]))
    record.on_message(event(1.3, "re-hosted", slot=1, incarnation=1))
    assert record.kills[0].rehosted_s is None, "slot 2 is not there yet"
    record.on_message(event(1.4, "re-hosted", slot=2, incarnation=1))
    for kill in record.kills:
        assert (kill.lost, kill.detected_s, kill.rehosted_s, kill.rebuilt_s) == ({1: 0, 2: 0}, 1.1, 1.4, None)
    assert not record.settled


def test_a_new_host_that_is_lost_too_ends_the_first_recovery_later() -> None:
    record = Record(trainers=1, slots=3)
    for message in [*JOINED, PLACED]:
        record.on_message(message)
    record.on_kill("server:1@1", "server", 1, time_s=1.0)
    record.on_message(event(1.1, "lost", member="server-1", why="", slots=[1]))
    record.on_message(event(1.1, "re-placed", epoch=1, slots=[["server-0", 0], ["server-3", 1], ["server-2", 0]]))
    record.on_kill("server:1@2", "server", 1, time_s=1.2)
    record.on_message(event(1.3, "lost", member="server-3", why="", slots=[1]))
    record.on_message(event(1.3, "re-placed", epoch=1, slots=[["server-0", 0], ["server-2", 2], ["server-2", 0]]))
    record.on_message(event(1.9, "slot rebuilt", slot=1, incarnation=2))
    assert [kill.member for kill in record.kills] == ["server-1", "server-3"]
    assert [kill.rebuilt_s for kill in record.kills] == [1.9, 1.9]


def test_the_timeline_of_the_loss_of_a_trainer() -> None:
    record = watched()
    kill = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    assert (kill.member, kill.pid, kill.step, kill.lost) == ("trainer-1", 201, 15, {})
    lost, era, resumable = TRAINERS_LOST
    record.on_message(lost)
    assert kill.detected_s == 2.43
    record.on_message(era)
    assert kill.detected_s == 2.43, "the first of the two counts"
    assert record.target("trainer", 0) is None and record.target("trainer", 1) is None, "all are started again"
    record.on_message(resumable)
    assert (kill.resumable_s, kill.resumed_after, kill.rejoined_s) == (2.9, 14, None)
    first, last = TRAINERS_BACK
    record.on_message(first)
    assert kill.rejoined_s is None and not record.whole and not record.settled
    record.on_message(last)
    assert kill.rejoined_s == 7.2 and record.settled and record.unexpected == []
    assert record.target("trainer", 1) == "trainer-1_2"

    for message in steps(15, 20, 8.0):
        record.on_message(message)
    assert record.step == 20 and len(record.step_times) == 20, "a step that is done again counts once"
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["role"], entry["number"], entry["member"], entry["slots_lost"]) == ("trainer", 1, "trainer-1", [])
    assert (entry["resumed_after"], entry["first_step"]) == (14, 17)
    after = entry["after_kill_s"]
    assert after["rehosted_s"] is None and after["rebuilt_s"] is None
    assert {name: time_s for name, time_s in after.items() if time_s is not None} == pytest.approx(
        {"detected_s": 0.01, "resumable_s": 0.48, "rejoined_s": 4.78, "first_step_s": 5.79, "stall_s": 5.7}
    )
    text = "\n".join(format_kill(entry))
    words = ["killed: trainer-1, pid 201, at step 15", "detected", "gone back to step 14", "all trainers again"]
    order = [text.index(word) for word in [*words, "(17) complete at all trainers", "pause"]]
    assert order == sorted(order)
    assert "host of slot" not in text and "rebuilt" not in text and "(not)" not in text


def test_steps_that_were_complete_by_the_kill_and_heard_of_later_did_not_begin_after_it() -> None:
    record = watched()
    record.on_kill("server:1@15", "server", 1, time_s=2.75)
    for message in steps(16, 20, 2.5):
        record.on_message(message)
    entry = record.kills[0].to_json(record.step_times)
    done = sum(time_s <= 2.75 for time_s in record.step_times)
    assert 15 < done < 19 and entry["first_step"] == done + 2 and entry["after_kill_s"]["first_step_s"] > 0


def test_a_trainer_that_was_started_again_unnoticed_is_detected_by_the_new_era() -> None:
    record = watched()
    kill = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    record.on_message(TRAINERS_LOST[1])
    assert kill.detected_s == 2.44


def test_what_was_noted_of_one_loss_of_trainers_stays_at_the_next() -> None:
    record = watched()
    record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK, *steps(15, 20, 8.0)]:
        record.on_message(message)
    second = record.on_kill("trainer:0@20", "trainer", 0, time_s=9.0)
    assert (second.member, second.pid) == ("trainer-0_2", 210) and not record.settled
    later = [event(9.1, "era", era=2, trainers=[]), event(9.2, "resumable", era=2, step=19)]
    for message in [*later, joined(9.8, "trainer-0_3", 220), joined(9.9, "trainer-1_3", 221)]:
        record.on_message(message)
    assert [kill.resumed_after for kill in record.kills] == [14, 19]
    assert [kill.rejoined_s for kill in record.kills] == [7.2, 9.9] and record.settled


def test_trainers_that_are_back_stay_when_a_server_is_lost_while_the_others_go_back() -> None:
    record = watched()
    record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, joined(6.0, "trainer-0_2", 210), joined(6.1, "trainer-1_2", 211)]:
        record.on_message(message)
    record.on_message(event(6.5, "era", era=2, trainers=["trainer-0_2", "trainer-1_2"]))
    assert record.trainers == {0: "trainer-0_2", 1: "trainer-1_2"}


def test_the_timeline_of_the_loss_of_a_coordinator() -> None:
    record = watched()
    kill = record.on_kill("coordinator@15", "coordinator", 0, time_s=2.42)
    assert (kill.member, kill.pid, kill.lost) == ("coordinator", 99, {}) and not record.settled
    again = [{**message, "time_s": 5.0} for message in JOINED]
    for message in [*steps(16, 18, 3.0), event(4.9, "regathering"), *again]:
        record.on_message(message)
    assert kill.rejoined_s is None and not record.whole
    members = [message["member"] for message in JOINED]
    record.on_message(event(5.1, "regathered", epoch=2, members=members))
    assert kill.rejoined_s == 5.1 and record.settled and record.unexpected == []
    assert record.places[1] == ("server-1", 0) and record.target("trainer", 1) == "trainer-1"
    entry = kill.to_json(record.step_times)
    assert (entry["role"], entry["number"], entry["resumed_after"]) == ("coordinator", 0, None)
    assert {name: time_s for name, time_s in entry["after_kill_s"].items() if time_s is not None} == pytest.approx(
        {"first_step_s": 0.69, "rejoined_s": 2.68, "stall_s": 0.6}
    )
    lines = format_kill(entry)
    assert "killed: coordinator, pid 99, at step 15" in lines[1]
    assert "first step begun after it (17)" in lines[2] and "all members have rejoined" in lines[3]
    assert len(lines) == 5 and "pause" in lines[4]


def test_the_joining_of_trainers_and_the_regathering_of_a_coordinator_are_kept_apart() -> None:
    record = watched()
    of_trainer = record.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    of_coordinator = record.on_kill("coordinator@15", "coordinator", 0, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK]:
        record.on_message(message)
    assert (of_trainer.rejoined_s, of_coordinator.rejoined_s) == (7.2, None) and not record.settled
    record.on_message(event(8.0, "regathered", epoch=2, members=[]))
    assert (of_trainer.rejoined_s, of_coordinator.rejoined_s) == (7.2, 8.0) and record.settled


def test_a_trainer_that_ends_by_itself_is_told() -> None:
    """Also after its last step, when it has left: torchrun starts all again, and nothing else is seen of it."""
    record = watched()
    record.on_message(joined(9.0, "trainer-1_2", 211))
    (told,) = record.unexpected
    assert told == "a trainer ended by itself: trainer-1_2 was started again"


def test_a_loss_that_is_not_ours_is_told() -> None:
    record = recorded()
    assert record.unexpected == []
    record.on_message(event(9.0, "lost", member="server-2", why="not heard of for 30 s", slots=[2]))
    record.on_message(event(9.0, "lost", member="server-9", why="a spare", slots=[]))
    assert record.unexpected == ["server-2 was lost though nobody killed it: not heard of for 30 s"]


def test_throughput_over_time_sees_a_pause() -> None:
    times = [i * 0.1 for i in range(50)] + [5.5 + i * 0.1 for i in range(50)]
    at, rate = throughput(times, samples_per_step=10)
    assert rate[at < 4.9] == pytest.approx(100)
    assert rate.min() < 60
    assert rate[at > 6.1] == pytest.approx(100)


def test_labels_are_spread_and_stay_in_order() -> None:
    placed = spread([1.0, 1.0, 1.1, 9.9], least_gap=1.0, low=0.5, high=9.5)
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(placed))
    assert placed[0] >= 0.5 and placed[-1] <= 9.5 + 1e-9
    assert spread([2.0, 5.0], 1.0, 0.0, 10.0) == [2.0, 5.0]


FIGURES = {"step": 7, "watermark": 5, "record_bytes": 3 << 20, "parity_bytes": 2048, "log_bytes": 10}
WAYS = Connections(memory=2, tcp=3, bytes_packed=1000, bytes_saved=390)


def test_status_as_text() -> None:
    def slot(index: int, incarnation: int, rebuilt: float) -> SlotReport:
        return slot_report(index, incarnation, rebuilt=rebuilt, **FIGURES)

    said = status(
        roster=2,
        epoch=3,
        step=7,
        tables=26,
        slots=[
            SlotStatus(0, "server-0", 0, True),
            SlotStatus(1, "server-3", 1, False),
            SlotStatus(2, "", 1, False),
        ],
        members=[
            member("server-0", report=Report([slot(0, 0, 1.0), slot(1, 0, 1.0)], connections=WAYS)),
            member("server-3", report=Report([slot(1, 1, 0.42)])),
            member("server-1", alive=False),
            member("server-4", spare=True),
            member("server-5", draining=True, silent_s=0.25),
            member("trainer-0", left=True),
        ],
    )
    lines = format_status(said).splitlines()
    assert lines[0] == "ERROR: slot 2 has no server, and training waits for it" and "torch-ecrec serve" in lines[1]
    assert any("(k, r) = (2, 1) on 3 slots, 26 tables, epoch 3, roster 2" in line for line in lines)
    assert any(re.match(r" +training +step 7$", line) for line in lines)
    slots = lines[next(i for i, line in enumerate(lines) if "watermark" in line) :]
    assert re.search(r"0 +server-0 +- +0 +healthy +7 +5 +3.0 MiB +2.0 KiB +10 B +0 B", slots[1])
    assert re.search(r"1 +server-3 +- +1 +rebuilding 42% ", slots[2])
    assert re.search(r"2 +\(nobody\) +- +1 +waiting +- ", slots[3])
    states = {line.split()[0]: line.split()[5] for line in lines if re.match(r" +(server|trainer)-", line)}
    assert states == {
        "server-0": "serving", "server-3": "serving", "server-1": "lost", "server-4": "spare", "server-5": "serving,",
        "trainer-0": "left",
    }  # fmt: skip
    assert any(re.search(r"server-5 +server +- +- +7 +serving, draining +0.2 s", line) for line in lines)
    ways = {line.split()[0]: re.split(r"  +", line.strip())[-1] for line in lines if " server " in line}
    assert ways["server-0"] == "2 in memory, 3 over TCP, packed to 61% where it pays" and ways["server-3"] == "-"
    assert format_connections(Connections(tcp=1)) == "1 over TCP"
    assert format_connections(Connections(tcp=1, bytes_packed=9)) == "1 over TCP, packed to 100% where it pays"
    assert format_connections(Connections(rpc=4)) == "4 over torch RPC"
    empty = status(fatal="stopped")
    assert "STOPPED: stopped" in format_status(empty) and "no slots placed yet" in format_status(empty)
    assert empty.slot_reports() == {} and not empty.healthy
    assert list(said.slot_reports()) == [0, 1] and said.slot_reports()[1].rebuilt == 0.42, "of who hosts it"
    assert [one.name for one in said.servers] == ["server-0", "server-3", "server-4", "server-5"] and not said.trainers
    assert said.member("server-4").spare
    with pytest.raises(KeyError):
        said.member("server-9")


# --- beyond parity ---------------------------------------------------------------------------------------------------


def test_the_timeline_of_the_loss_of_everything() -> None:
    record = everything_lost()
    assert record.step == 40 and record.settled and record.unexpected == []
    entry = record.kills[0].to_json(record.step_times)
    assert (entry["role"], entry["member"], entry["pid"], entry["slots_lost"]) == ("all", "everybody", None, [0, 1, 2])
    assert (entry["step"], entry["resumed_after"], entry["first_step"]) == (15, 10, 17)
    after = {name: value for name, value in entry["after_kill_s"].items() if value is not None}
    assert after == pytest.approx(
        {"went_back_s": 2.58, "rejoined_s": 4.68, "trains_s": 6.59, "first_step_s": 7.19, "stall_s": 7.1}
    )
    assert [(one.step, one.from_step, one.checkpoint) for one in record.went_back] == [(10, 15, "000000000010-run-0-1")]
    assert [step for step, _ in record.trained] == [*range(1, 16), *range(11, 41)]
    text = "\n".join(format_kill(entry))
    assert "killed: everybody: coordinator, servers and trainers, at step 15" in text and "pid" not in text
    order = [
        text.index(word) for word in ("killed", "go back to the checkpoint", "joined", "once more", "first new step")
    ]
    assert order == sorted(order)


def test_the_timeline_of_more_lost_servers_than_parity_repairs() -> None:
    record = two_servers_lost()
    assert record.step == 40 and record.settled and record.unexpected == []
    for slot, kill in enumerate(record.kills):
        entry = kill.to_json(record.step_times)
        assert (entry["slots_lost"], entry["resumed_after"]) == ([slot], 10)
        after = entry["after_kill_s"]
        assert after["went_back_s"] == pytest.approx(0.08) and after["trains_s"] == pytest.approx(6.59)
        assert after["rehosted_s"] is None and after["rebuilt_s"] is None
    assert len(record.went_back) == 1 and record.went_back[0].reason == "slots [0, 1] are lost together"
    rates = record.throughput(samples_per_step=10)
    assert rates["rebuild"] == pytest.approx(10 / (9.51 - 2.42), abs=0.1), "no step is new until step 16"


def test_it_is_not_whole_before_the_first_step_is_trained_again() -> None:
    record = everything_lost()
    before = Record(2, 3)
    for message in [*JOINED, PLACED, *steps(1, 15, 1.0)]:
        before.on_message(message)
    before.on_kill("all@15", "all", 0, time_s=2.42)
    assert not before.whole and before.target("server", 0) is None and before.target("trainer", 1) is None
    for message in [empty_status(5.0, None), *BACK]:
        before.on_message(message)
    assert (
        not before.whole
        and before.target("server", 0) == "server-1000"
        and before.target("trainer", 1) == "trainer-1_2"
    )
    assert before.went_back[0].step == 0 and before.went_back[0].checkpoint == "", "there was none: from the beginning"
    for message in steps(1, 1, 9.0):
        before.on_message(message)
    assert before.whole and "(again)" in before.progress_line(40, 10) and "(again)" not in record.progress_line(40, 10)


def test_a_checkpoint_that_nobody_heard_of_is_known_once_all_go_back_to_it() -> None:
    record = watched()
    record.on_kill("all@15", "all", 0, time_s=2.42)
    record.on_message(empty_status(5.0, RestoredStatus("000000000012-run-0-2", 12)))
    assert [(one.name, one.step, one.time_s) for one in record.checkpoints] == [("000000000012-run-0-2", 12, None)]
    assert "step   12/40 (again)" in record.progress_line(40, 10)
