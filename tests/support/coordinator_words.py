"""What a coordinator tells those who watch it, made up: joins, steps, losses and recoveries."""

from typing import Any

from torch_ecrec.demo.report import Record
from torch_ecrec.protocol.status import (
    MemberStatus,
    Report,
    RestoredStatus,
    SlotReport,
    SlotStatus,
    Status,
    Unresolved,
    json_of,
)
from torch_ecrec.spec.job import CodeSpec


def event(time_s: float, kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "event", "event": kind, "time_s": time_s, **more}


def steps(first: int, last: int, begin_s: float, step_s: float = 0.1, trainers: int = 2) -> list[dict[str, Any]]:
    """Progress of all trainers, step after step, the last of them 10 ms behind."""
    return [
        {"type": "progress", "trainer": t, "step": s, "loss": 0.5, "time_s": begin_s + (s - first) * step_s + 0.01 * t}
        for s in range(first, last + 1)
        for t in range(trainers)
    ]


def joined(time_s: float, member: str, pid: int) -> dict[str, Any]:
    role, number = member.partition("_")[0].split("-")
    rank = int(number) if role == "trainer" else -1
    return event(time_s, "joined", member=member, role=role, rank=rank, pid=pid)


JOINED = [
    *(joined(0.0, f"server-{i}", 100 + i) for i in range(4)),
    *(joined(0.4, f"trainer-{i}", 200 + i) for i in range(2)),
]
PLACED = event(0.5, "placed", epoch=1, slots=[["server-0", 0], ["server-1", 0], ["server-2", 0]])


def recovery(at_s: float, lost: str, slot: int, to: str, slots: list[list[Any]]) -> list[dict[str, Any]]:
    """The coordinator's events from the loss of a slot to its rebuild 0.5 s later."""
    incarnation = slots[slot][1]
    return [
        event(at_s + 0.02, "lost", member=lost, why="its connection ended", slots=[slot]),
        event(at_s + 0.03, "re-placed", epoch=1, slots=slots),
        event(at_s + 0.05, "re-hosted", slot=slot, incarnation=incarnation),
        event(at_s + 0.50, "slot rebuilt", slot=slot, incarnation=incarnation),
    ]


def recorded() -> Record:
    """40 steps of 0.1 s; after step 20 slot 1 is lost, and step 22, the first begun after it, takes 0.3 s longer."""
    record = Record(trainers=2, slots=3)
    for message in [*JOINED, PLACED, *steps(1, 20, 1.0)]:
        record.on_message(message)
    record.on_kill("server:1@20", "server", 1, time_s=2.92)
    after = [["server-0", 0], ["server-3", 1], ["server-2", 0]]
    messages = [*steps(21, 21, 3.0), *steps(22, 40, 3.4), *recovery(2.92, "server-1", 1, "server-3", after)]
    for message in sorted(messages, key=lambda message: message["time_s"]):
        record.on_message(message)
    return record


def watched() -> Record:
    """15 steps of 0.1 s, the last of them complete at 2.41."""
    record = Record(trainers=2, slots=3)
    for message in [*JOINED, PLACED, *steps(1, 15, 1.0)]:
        record.on_message(message)
    record.pids["coordinator"] = 99
    return record


TRAINERS_LOST = [
    event(2.43, "lost", member="trainer-1", why="its connection ended", slots=[]),
    event(2.44, "era", era=1, trainers=[]),
    event(2.9, "resumable", era=1, step=14),
]
TRAINERS_BACK = [joined(7.0, "trainer-1_2", 211), joined(7.2, "trainer-0_2", 210)]


def checkpointed(time_s: float, step: int) -> dict[str, Any]:
    return event(time_s, "checkpointed", name=f"{step:012d}-run-0-1", step=step, base="", bytes=1000, seconds=0.1)


def _with_a_checkpoint() -> Record:
    """15 steps, of which step 10 is kept; a try before that came to nothing."""
    record = watched()
    for message in (event(1.6, "checkpoint_void", step=5, reason="the disk is full"), checkpointed(2.1, 10)):
        record.on_message(message)
    return record


BACK = [joined(6.0 + i / 10, f"server-{1000 + i}", 300 + i) for i in range(4)]
BACK += [joined(7.0 + i / 10, f"trainer-{i}_2", 400 + i) for i in range(2)]
BACK.append(event(7.3, "placed", epoch=2, slots=[[f"server-{1000 + i}", 0] for i in range(3)]))


def status(**more: Any) -> Status:
    """Of a cluster of three slots, about which there is nothing to say but `more`."""
    about: dict[str, Any] = {
        **{"version": "0.1.0", "run": "run", "code": CodeSpec(3, 2, 1), "transport": "sockets", "roster": 1},
        **{"epoch": 1, "era": 0, "going_back": False, "resume_step": 0, "step": 0, "finished": False, "fatal": None},
        **{"checkpoints": None, "partial": None, "inexact": [], "restored": None, "unreachable": [], "at_risk": []},
        **{"stands_still": None, "unresolved": Unresolved([], ""), "gathering": None, "tables": 1, "slots": []},
        **{"move": None, "members": []},
    }
    return Status(**{**about, **more})


def member(name: str, **more: Any) -> MemberStatus:
    """One that is there: `server-3`, `trainer-1_2`."""
    role, number = name.partition("_")[0].split("-")
    about: dict[str, Any] = {"name": name, "role": role, "rank": int(number) if role == "trainer" else -1, "pid": 7}
    about |= {"alive": True, "left": False, "spare": False, "draining": False, "silent_s": 0.0, "report": Report()}
    return MemberStatus(**{**about, **more})


def healthy(slots: int) -> list[SlotStatus]:
    """Each on the server of its number, for the first time."""
    return [SlotStatus(slot, f"server-{slot}", 0, True) for slot in range(slots)]


def slot_report(slot: int, incarnation: int, **more: Any) -> SlotReport:
    """Of one that has nothing, but `more`."""
    about = {"slot": slot, "incarnation": incarnation, "ready": True, "rebuilt": 1.0, "saver_pick_s": 0.0, "tier": ""}
    return SlotReport(**{**dict.fromkeys(SlotReport.__struct_fields__, 0), **about, **more})


def empty_status(time_s: float, restored: RestoredStatus | None, looks: bool = False) -> dict[str, Any]:
    """Of a coordinator that was started a moment ago."""
    return json_of(status(time_s=time_s, restored=restored, looks=looks))


def everything_lost() -> Record:
    """All are killed at 2.42, after step 15; another coordinator begins with step 10 at 5.0; 16 is complete at 9.51."""
    record = _with_a_checkpoint()
    record.on_kill("all@15", "all", 0, time_s=2.42)
    found = RestoredStatus(f"{10:012d}-run-0-1", 10)
    late = empty_status(2.3, None)  # of the coordinator before, and read after its end
    looks = empty_status(4.0, None, looks=True)  # what it begins with is not known yet
    for message in [late, looks, empty_status(5.0, found), *BACK, *steps(11, 40, 9.0)]:
        record.on_message(message)
    return record


def two_servers_lost() -> Record:
    """Slots 0 and 1 are lost at 2.42, which one parity does not repair."""
    record = _with_a_checkpoint()
    for slot in (0, 1):
        record.on_kill(f"server:{slot}@15", "server", slot, time_s=2.42)
    lost = event(2.44, "lost", member="server-0", why="its connection ended", slots=[0])
    back = event(2.5, "went_beyond", name=f"{10:012d}-run-0-1", step=10, reason="slots [0, 1] are lost together")
    for message in [lost, back, *BACK, *steps(11, 40, 9.0)]:
        record.on_message(message)
    return record


def recovered_partly() -> Record:
    """Slots 0 and 1 are lost at 2.42, and take their records from the checkpoint of step 10; trainers go on."""
    record = _with_a_checkpoint()
    for slot in (0, 1):
        record.on_kill(f"server:{slot}@15", "server", slot, time_s=2.42)
    lost = [event(2.44, "lost", member=f"server-{slot}", why="its connection ended", slots=[slot]) for slot in (0, 1)]
    named = {"slots": [0, 1], "name": f"{10:012d}-run-0-1", "step": 10, "at": 15}
    partly = event(2.6, "recovered_partly", **named, lost_samples=0.222, reason="slots [0, 1] are lost together")
    anew = event(2.5, "re-placed", epoch=2, slots=[["server-3", 1], ["server-2", 1], ["server-2", 0]])
    words = [("re-hosted", 2.7), ("slot rebuilt", 3.0)]
    there = [event(time_s, kind, slot=slot, incarnation=1) for kind, time_s in words for slot in (0, 1)]
    for message in [*lost, anew, partly, *there, *steps(16, 40, 3.1)]:
        record.on_message(message)
    return record
