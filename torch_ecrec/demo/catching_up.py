"""Completes a run's record from a status, after the watch was without a coordinator and missed events."""

from __future__ import annotations

from torch_ecrec.demo.report import Record
from torch_ecrec.protocol.status import Status


def catch_up(record: Record, status: Status) -> None:
    """Notes that lost slots and restarted trainers are back. `status`: the record has it already."""
    time_s = status.time_s
    for slot, (server, incarnation) in enumerate(record.places):
        for kill in record.kills:
            if server and incarnation > kill.lost.get(slot, incarnation) and kill.kill_s < time_s:
                kill.detected_s = kill.detected_s or time_s
                if record.healthy[slot]:
                    kill.rehosted.setdefault(slot, time_s)
                    kill.rebuilt.setdefault(slot, time_s)
    here = {trainer.rank: trainer.name for trainer in status.trainers}
    if len(here) != len(record.steps) or status.going_back:
        return
    record.trainers = here
    for kill in record.kills:
        if kill.role == "trainer" and kill.member not in here.values() and kill.kill_s < time_s:
            kill.detected_s, kill.rejoined_s = kill.detected_s or time_s, kill.rejoined_s or time_s
