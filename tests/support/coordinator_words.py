"""What a coordinator tells those who watch it, made up: joins, steps, losses and recoveries."""

from typing import Any

from torch_ecrec.demo.report import Record


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
