"""What a record of a run has missed, from a status: nobody watched while another coordinator was looked for."""

from __future__ import annotations

from torch_ecrec.demo.report import Message, Record


def catch_up(record: Record, status: Message) -> None:
    """Slots that were lost and trainers that were started again may be there by now. `status`: the record knows it."""
    time_s = status.get("time_s", 0.0)
    for slot, (server, incarnation) in enumerate(record.places):
        for kill in record.kills:
            if server and incarnation > kill.lost.get(slot, incarnation) and kill.kill_s < time_s:
                kill.detected_s = kill.detected_s or time_s
                if record.healthy[slot]:
                    kill.rehosted.setdefault(slot, time_s)
                    kill.rebuilt.setdefault(slot, time_s)
    _trainers(record, status, time_s)


def _trainers(record: Record, status: Message, time_s: float) -> None:
    here = {
        member["rank"]: member["name"]
        for member in status["members"]
        if member["role"] == "trainer" and member["alive"] and not member["left"]
    }
    if len(here) != len(record.steps) or status["going_back"]:
        return
    record.trainers = here
    for kill in record.kills:
        if kill.role == "trainer" and kill.member not in here.values() and kill.kill_s < time_s:
            kill.detected_s, kill.rejoined_s = kill.detected_s or time_s, kill.rejoined_s or time_s
