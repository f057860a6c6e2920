"""Is all well? Every state of a cluster that a status can tell of has its verdict, its exit code and a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from coordinator_words import healthy, member, slot_report, status
from msgspec.structs import replace

from torch_ecrec.observe.text import format_recent, format_status, told
from torch_ecrec.observe.verdict import MEMORY_MOST, REFUSED_S, STILL_S, Verdict, json_of, verdict_of
from torch_ecrec.observe.words import duration, names, slots_named
from torch_ecrec.protocol.status import (
    CheckpointsStatus,
    Complaint,
    DomainAtRisk,
    ExperimentStatus,
    Filling,
    Gathering,
    HostStatus,
    Inexactness,
    Late,
    MoveStatus,
    PartialStatus,
    ProcessReport,
    Rate,
    Recent,
    Redundancy,
    Refusal,
    RegatheringStatus,
    Report,
    RestoredStatus,
    SavesStatus,
    SlotStatus,
    Standstill,
    Status,
    Unresolved,
    of_message,
)
from torch_ecrec.spec.job import CodeSpec

JOIN = "10.0.0.9:7000"


def host(name: str, *slots: int, servers: tuple[str, ...] = (), why: str = "") -> HostStatus:
    return HostStatus(name, list(servers), list(slots), not why, why)


ONE_EACH = [host(f"host{i}", i, servers=(f"server-{i}",)) for i in range(3)]
SAFE = Redundancy(losses=1, of=1, spares=1, elsewhere=True, hosts=ONE_EACH)
TRAINS: dict[str, Any] = {
    "step": 421,
    "slots": healthy(3),
    "members": [*(member(f"server-{i}", address=f"10.0.0.{i}") for i in range(3)), member("trainer-0")],
    "wanted_trainers": 1,
    "rate": Rate(10.0, 12.34, 25190.0),
    "still_s": 0.1,
    "redundancy": SAFE,
}
CHECKPOINTS = CheckpointsStatus("s3://bucket/run", "000000000400-run-0-1", 400, 30.0, "", "", None, None)


def trains(**more: Any) -> Status:
    """All is well, but for that."""
    return status(**{**TRAINS, **more})


def of_servers(**more: dict[str, Any]) -> list[Any]:
    """The members, of which some are otherwise, by name."""
    return [replace(one, **more.get(one.name.replace("-", "_"), {})) for one in TRAINS["members"]]


def lacking(*slots: int, **more: Any) -> list[SlotStatus]:
    return [replace(place, healthy=False, **more) if place.slot in slots else place for place in healthy(3)]


PARTIAL = PartialStatus(
    exact=False, times=1, lost_samples=0.01, of_steps=400, lost_steps=[0, 20, 0], last="000000000400-run-0-1",
    last_step=380, last_saves=0, last_slots=[1],
)  # fmt: skip
NONE_LEFT = replace(SAFE, losses=0)
GONE = of_servers(trainer_0={"alive": False})
HALF = Filling(0.27, 50.0 * 2**20, 41.0)
FULL = Report(process=ProcessReport("host1", 2**30, 100 * 2**30, int((MEMORY_MOST + 0.01) * 100 * 2**30)))

# what is so -> verdict, what it says, what is to be done
STATES: dict[str, tuple[Status, str, str, str]] = {
    "it trains": (trains(), "OK", r"at step 421, 12.3 steps/s, 25,190 samples/s; any 1 of 3 servers may be lost$", ""),
    "it has just begun": (trains(step=0, rate=None, still_s=None), "OK", "no step is done yet", ""),
    "it has ended": (trains(finished=True, still_s=999.0, wanted_trainers=9), "OK", "all its trainers were done", ""),
    "nothing is protected": (
        trains(code=CodeSpec(3, 2, 1, "none"), redundancy=replace(SAFE, losses=0, of=0)),
        "OK", "nothing is protected", "",
    ),
    "nobody is there": (
        status(epoch=0, gathering=Gathering((0, 3), (0, 0))), "WARN", "0 of 3 servers and 0 trainers are there",
        r"torch-ecrec serve --join 10.0.0.9:7000; a trainer is a script .*TORCH_ECREC_JOIN=10.0.0.9:7000",
    ),
    "a server lacks": (
        status(epoch=0, gathering=Gathering((2, 3), (1, 1))), "WARN", "2 of 3 servers and 1 of 1 trainers",
        r"serve --join 10.0.0.9:7000$",
    ),
    "slots are about to be placed": (status(epoch=0), "WARN", "about to be placed", "nothing"),
    "a checkpoint is looked for": (status(epoch=0, looks=True), "WARN", "looks for a checkpoint", "nothing"),
    "its store cannot be read": (
        status(epoch=0, looks=True, store_trouble="s3 hangs"), "ERROR", "not yet: s3 hangs", "mend the store",
    ),
    "there is none": (
        status(epoch=0, looks=True, cannot_begin="all is lost"), "ERROR", "refuses whoever joins: all is lost",
        "--restore",
    ),
    "the coordinator was started again": (
        status(epoch=0, regathering=RegatheringStatus(["server-0"], ["server-1", "server-2"])), "WARN",
        "heard of 1 members, and waits for server-1 and server-2", "given up",
    ),
    "it has stopped": (trains(fatal="slots [0, 1] are lost"), "ERROR", r"STOPPED: slots \[0, 1\] are", "start the"),
    "it has stopped, and there are checkpoints": (
        trains(fatal="slots are lost", checkpoints=CHECKPOINTS), "ERROR", "STOPPED: slots are lost",
        "--checkpoint s3://bucket/run --restore newest: the last checkpoint is of step 400",
    ),
    "it has stopped, and its coordinator has written none": (
        trains(fatal="slots are lost", checkpoints=replace(CHECKPOINTS, last="", last_step=0)),
        "ERROR", "STOPPED", "--checkpoint s3://bucket/run --restore newest: step 0, where none is there$",
    ),
    "it has stopped, and has written none since it began with one": (
        trains(
            fatal="slots are lost",
            checkpoints=replace(CHECKPOINTS, last="", last_step=0),
            restored=RestoredStatus("f", 177),
        ),
        "ERROR", "STOPPED", "newest: if none is there yet, with that of step 177, which this run began with$",
    ),
    "it has stopped, and could not begin": (
        trains(fatal="the checkpoint to begin with cannot be read: slot-0 was altered", checkpoints=CHECKPOINTS),
        "ERROR", "STOPPED", "again, once that is mended; or with --restore URL@STEP, another one that is whole",
    ),
    "it has stopped, and began with a checkpoint": (
        trains(fatal="slots are lost", restored=RestoredStatus("f", 177)), "ERROR", "STOPPED",
        "--restore URL@177, the checkpoint that this run began with$",
    ),
    "a slot has no server since a moment": (
        trains(
            slots=lacking(1, server=""),
            redundancy=NONE_LEFT,
            members=of_servers(server_1={"alive": False, "gone_s": 2.0}),
        ),
        "WARN", "slot 1 has no server", "nothing, if whoever has started it .* else torch-ecrec serve --join 10.0.0.9",
    ),
    "all go back": (trains(going_back=True, resume_step=None), "WARN", "go back, and find out to which", "if it ends"),
    "all go back to a step": (trains(going_back=True, resume_step=400), "WARN", "servers go back to step 400", "ends"),
    "all begin again": (
        status(epoch=2, gathering=Gathering((3, 3), (0, 1)), restored=RestoredStatus("f", 177), slots=[]), "WARN",
        "all begin again after step 177, that of a checkpoint: 3 of 3 servers and 0 of 1 trainers",
        "torchrun starts lost",
    ),
    "steps do not come": (
        trains(rate=Rate(10.0, 1.0, None), still_s=8.0), "OK",
        "all are there at step 421, and no step was done for 8.0 s", "",
    ),
    "no step was seen": (trains(rate=None, still_s=100.0), "OK", "no step was done for 100 s; any 1 of 3", ""),
    "many members are silent": (
        trains(wanted_trainers=0, members=[member(f"server-{i}", silent_s=4.0 + i) for i in range(1000)]), "WARN",
        "^server-0, server-1, server-2, server-3 and 996 more were not heard of for 16 min 43 s$", "given up",
    ),
    "a trainer is silent": (
        trains(members=of_servers(trainer_0={"silent_s": 4.0})), "WARN", "trainer-0 was not",
        "all trainers begin again",
    ),
    "a slot has no server": (
        trains(slots=lacking(1, server=""), redundancy=NONE_LEFT), "ERROR", "slot 1 has no server",
        "serve --join 10.0.0.9",
    ),
    "slots have no server": (
        trains(slots=lacking(1, 2, server=""), redundancy=NONE_LEFT), "ERROR", "slots 1-2 have no server",
        "serve --join",
    ),
    "a slot is rebuilt, nobody knows how fast": (
        trains(slots=lacking(1), redundancy=NONE_LEFT), "WARN", "slot 1 is being rebuilt; no server may be lost now",
        "End no",
    ),
    "a slot is rebuilt": (
        trains(slots=lacking(1, filling=HALF), redundancy=NONE_LEFT), "WARN",
        "slot 1 is being rebuilt, 27% is there, about 41 s to go; no server may be lost now",
        "training goes on meanwhile",
    ),
    "a checkpoint is restored": (
        trains(slots=lacking(0, 1, 2), redundancy=None), "WARN", "slots 0-2 are being read from a checkpoint",
        "when it is done",
    ),
    "a survivor hosts two slots": (
        trains(slots=[replace(p, server="server-0") if p.slot == 1 else p for p in healthy(3)], redundancy=NONE_LEFT),
        "WARN", "no server may be lost now, and 1 with one slot a server: server-0 hosts several", "serve --join",
    ),
    "a host holds too much": (
        trains(
            at_risk=[DomainAtRisk("host0", [0, 1], "slots [0, 1] are lost together")],
            redundancy=replace(SAFE, hosts=[host("host0", 0, 1, why="lost together"), host("host1", 2)]),
        ),
        "WARN", "AT RISK: if host0 is lost, slots", "drain",
    ),
    "all are on one host": (
        trains(
            at_risk=[DomainAtRisk("host0", [0, 1, 2], "all is lost")],
            redundancy=replace(SAFE, hosts=[host("host0", 0, 1, 2, why="all is lost")]),
        ),
        "OK", "any 1 of 3 servers may be lost", "",
    ),
    "training stands for a silent member": (
        trains(stands_still=Standstill({"server-1": "not heard of for 10 s"}, 3590.0)), "ERROR",
 
              "STANDS STILL, waits for silent members, for 3590 s at most: server-1 .not heard of for 10 s.$",
        r"server-1, pid 7 on 10.0.0.1",
    ),
    "nobody is heard": (
        trains(stands_still=Standstill({"server-1": "x"}, None)), "ERROR", "until somebody is heard", "can be reached",
    ),
    "a member is silent": (
        trains(members=of_servers(server_1={"silent_s": 4.0})), "WARN", "server-1 was not heard of for 4.0 s",
        "10.0.0.1",
    ),
    "members cannot reach each other": (
        trains(unreachable=[Complaint("server-0", "server-1", 2.5)]), "WARN",
        "CUT: server-0 cannot reach server-1, for 2.5",
        "between server-0, pid 7 on 10.0.0.0 and server-1, pid 7 on 10.0.0.1",
    ),
    "training cannot go on for it": (
        trains(
            unreachable=[Complaint("server-0", "server-1", 2.5)],
            unresolved=Unresolved([("server-0", "server-1")], "no spare"),
        ),
        "ERROR", "TRAINING CANNOT GO ON until they can reach each other: server-0 and server-1; no spare",
        "mend the network",
    ),
    "a server has nothing to make connections with": (
        trains(unreachable=[Complaint("server-0", "server-0", 2.5)]), "WARN",
        "server-0 LACKS threads or descriptors for its connections, for 2.5", "given up where training can do without",
    ),
    "training cannot go on without it": (
        trains(
            unreachable=[Complaint("server-0", "server-0", 2.5)],
            unresolved=Unresolved([("server-0", "server-0")], "no spare"),
        ),
        "ERROR", "until they can reach each other: server-0 and anybody; no spare",
        "who reaches nobody lacks threads or descriptors",
    ),
    "trainers are being started again": (
        trains(members=GONE, resume_step=400), "WARN", "0 of 1 trainers are there; they go on after step 400",
        "torchrun",
    ),
    "trainers do not come back": (trains(members=GONE, absent_s=61.0), "ERROR", "0 of 1 trainers", "start all"),
    "a trainer is done": (
        trains(members=of_servers(trainer_0={"left": True, "gone_s": 3.0}), still_s=61.0), "OK", "step 421", "",
    ),
    "training waits for a script": (
        trains(still_s=STILL_S + 80, members=of_servers(trainer_0={"report": Report(awaits=[1])})), "WARN",
        "no step was done for 3 min 20 s, though all are there: trainer 1 is waited for", "evaluation",
    ),
    "a server limps": (
        trains(members=of_servers(server_1={"slow": Late(0.9, 0.5, 0.01)})), "WARN",
        "SLOW: training waits for server-1 90%",
        "torch-ecrec drain server-1 --join 10.0.0.9:7000",
    ),
    "it limps, and is drained": (
        trains(members=of_servers(server_1={"slow": Late(0.9, 0.5, 0.01), "draining": True})), "OK", "step 421", "",
    ),
    "checkpoints fail": (
        trains(checkpoints=replace(CHECKPOINTS, failing="disk full", failing_for_s=200.0)), "WARN",
        "checkpoints at s3://bucket/run are FAILING for 3 min 20 s: disk full", "mend the store",
    ),
    "saves fail": (
        trains(checkpoints=replace(CHECKPOINTS, saves=SavesStatus("mfu", 0.1, 2, 410, "disk full"))), "WARN",
        "the last save FAILED: disk full", "mend the store",
    ),
    "checkpoints do not fail": (trains(checkpoints=CHECKPOINTS), "OK", "step 421", ""),
    "it is not exact": (
        trains(inexact=[Inexactness(7, "rows were reset")], checkpoints=CHECKPOINTS), "WARN", "NOT EXACT from step 7 ",
        "go back to a checkpoint",
    ),
    "it is not exact, and nothing is kept": (
        trains(inexact=[Inexactness(7, "rows were reset")]), "WARN", "NOT EXACT from step 7 ",
        "train again from the beginning.*no checkpoints are kept",
    ),
    "it was recovered in part": (
        trains(partial=PARTIAL, checkpoints=CHECKPOINTS), "WARN", "NOT EXACT: 1.000% of lost samples", "go back",
    ),
    "it is an experiment": (
        trains(experiment=ExperimentStatus("minus2PC", 0, ["steps may be lost"])), "WARN",
        "EXPERIMENT minus2PC: steps may",
        "unset TORCH_ECREC_EXPERIMENT_MODE",
    ),
    "damage is not mended": (
        trains(members=of_servers(server_1={"report": Report(slots=[slot_report(1, 0, damaged=3, mended=1)])})), "WARN",
        "slot 1 has 2 damaged records", "10.0.0.1",
    ),
    "somebody who does not belong here is refused": (
        trains(refused_messages=3, refusal=Refusal("10.0.0.7:41000", "join: this cluster trains another job", 12.0)),
        "WARN", "3 messages were refused, the last 12 s ago, of 10.0.0.7:41000: join: this cluster trains another job",
        "mend or end who says so",
    ),
    "it was so a while ago": (
        trains(refused_messages=3, refusal=Refusal("10.0.0.7:41000", "join: another job", REFUSED_S + 1)), "OK", "", "",
    ),
    "memory is nearly full": (
        trains(members=of_servers(server_1={"report": FULL}, server_2={"report": FULL})), "WARN",
        "memory of host1 is nearly full: 93.0 GiB of 100.0 GiB are used, 1.0 GiB by server-1", "drain",
    ),
    "a survivor has a lost slot and no memory for it": (
        trains(members=of_servers(server_1={"report": Report(slots=[slot_report(1, 0, tier_over_bytes=3 << 20)])})),
        "WARN", r"server-1, pid \d+ on 10\.0\.0\.1 takes 3\.0 MiB more than its --memory: it has a lost slot",
        "start a server",
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
def test_each_state_has_its_verdict_and_its_remedy(state: str) -> None:
    said, level, says, remedy = STATES[state]
    verdict = verdict_of(said, JOIN)
    assert verdict.level == level and re.search(says, verdict.says), verdict
    assert verdict.exit_code == {"OK": 0, "WARN": 1, "ERROR": 2}[level]
    assert bool(verdict.findings) == (level != "OK") and all(one.remedy and one.what for one in verdict.findings)
    if remedy:
        assert re.search(remedy, verdict.findings[0].remedy), verdict.findings[0]
    lines = format_status(said, join=JOIN).splitlines()
    assert lines[0] == f"{level}: {verdict.says}"
    shown = json.loads(json.dumps(json_of(said, JOIN)))
    assert of_message(shown) == said and shown["verdict"]["level"] == level and shown["schema"] == 1


def test_every_finding_is_in_the_table() -> None:
    """One that nobody has looked at is perhaps never found."""
    source = Path(verdict_of.__code__.co_filename).read_text()
    told_of = set(re.findall(r'Finding\(\s*"\w+"(?: if \w+ else "WARN")?,\s*"(\w+)"', source.replace("ERROR", "WARN")))
    seen = {finding.code for said, *_ in STATES.values() for finding in verdict_of(said).findings}
    assert len(told_of) > 20 and seen == told_of


def test_the_worst_comes_first_and_all_are_told() -> None:
    said = trains(
        slots=lacking(1, server=""),
        redundancy=NONE_LEFT,
        checkpoints=replace(CHECKPOINTS, failing="disk full", failing_for_s=2.0),
        inexact=[Inexactness(7, "rows were reset")],
    )
    verdict = verdict_of(said)
    assert [one.code for one in verdict.findings] == [
        "no_server",
        "checkpoints",
        "not_exact",
    ] and verdict.level == "ERROR"
    lines = format_status(said).splitlines()
    assert [line.split(":")[0] for line in lines[:6]] == ["ERROR", "  to do", "WARN", "  to do", "WARN", "  to do"]


def test_what_is_worth_knowing_is_a_note() -> None:
    lost = replace(member("server-9"), alive=False, gone_s=35.0, why_gone="its process is gone", address="10.0.0.3")
    said = trains(
        move=MoveStatus(1, "server-2"),
        members=[
            *of_servers(
                server_0={"draining": True, "report": Report(slots=[slot_report(0, 0, damaged=2, mended=2)])},
            ),
            replace(member("server-3"), draining=True, spare=True),
            lost,
        ],
        redundancy=replace(SAFE, hosts=[host("host0", 0, 1, 2)]),
        refused_messages=4,
    )
    verdict = verdict_of(said)
    assert verdict.level == "OK" and verdict.notes == [
        "slot 1 moves to server-2, and goes on where it is",
        "server-0 is drained: slot 0 is still there",
        "server-3 is drained: it has no slot any more, and may be stopped",
        "all servers are on one host, host0: its loss is not survived",
        "damage was found, and mended from parity: 2 records of slot 0",
        "4 messages were refused: the coordinator's log says whose, and why",
        "server-9 on 10.0.0.3 was lost 35 s ago: its process is gone",
    ]
    text = format_status(said)
    assert all(note in text for note in verdict.notes) and "lost 35 s ago" in text


def test_protection_is_told_by_host() -> None:
    risky = [host("host3", 0, 2, why="lost together")]
    text = format_status(trains(redundancy=replace(SAFE, hosts=[*ONE_EACH, *risky], spares=0)))
    assert (
        "any 1 of 3 servers may be lost, of hosts any of host0, host1 and host2, not host3, a survivor would take over"
        in text
    )
    waits = format_status(trains(redundancy=replace(SAFE, spares=0, elsewhere=False)))
    assert "no spare: its slots would wait for one" in waits
    assert "1 spare server would take over" in format_status(trains())


def test_events_are_told_in_words() -> None:
    from torch_ecrec.observe.events import AnyEvent

    kinds = {kind.__struct_config__.tag for kind in AnyEvent.__args__}  # type: ignore[attr-defined]
    from torch_ecrec.observe.text import FORMS

    assert set(FORMS) <= kinds
    for kind in AnyEvent.__args__:  # type: ignore[attr-defined]
        tag, form = kind.__struct_config__.tag, FORMS.get(kind.__struct_config__.tag)
        fields = set(kind.__struct_encode_fields__)
        if form is not None:
            assert set(re.findall(r"{(\w+)", form.says)) <= fields, tag
    lost = {"event": "lost", "member": "server-1", "why": "its process is gone", "slots": [1]}
    assert told(lost) == "server-1 was lost: its process is gone; it hosted slots 1"
    assert told({**lost, "slots": []}) == "server-1 was lost: its process is gone"
    assert told({"event": "of_tomorrow", "slot": 3}) == "of tomorrow, slot 3"
    assert told({"event": "lost"}) == "lost", "of another version"
    assert format_recent(Recent(0.0, lost)).startswith("--:--:--  server-1")
    assert re.match(r"\d\d:\d\d:\d\d  server-1", format_recent(Recent(1e9, lost)))
    many = [Recent(1e9 + i, {"event": "goes_on"}) for i in range(30)]
    assert format_status(trains(recent=many)).count("training goes on: all who were silent") == 10


def test_words() -> None:
    assert [duration(s) for s in (0.44, 9.94, 10, 119, 200, 3600, 7500)] == [
        "0.4 s", "9.9 s", "10 s", "119 s", "3 min 20 s", "1 h", "2 h 5 min",
    ]  # fmt: skip
    assert (
        names(["a"]) == "a"
        and names(["a", "b", "c"]) == "a, b and c"
        and names(list("abcdef")) == "a, b, c, d and 2 more"
    )
    assert slots_named([4, 0, 1]) == "slots 0-1, 4" and slots_named([2]) == "slot 2"


def test_a_verdict_says_how_programs_see_it() -> None:
    assert Verdict("WARN", "x", [], []).exit_code == 1
