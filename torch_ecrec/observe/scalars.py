"""A status as scalars over the steps of training, for TensorBoard and its like. Pure.

    scalars = Scalars()
    scalars.of(status)      # {"steps_per_s": 12.3, "losses_tolerated": 2.0, "slots/healthy": 1.0, ...}

A part of a name before "/" gathers what belongs in one picture. What is not known is absent.
"""

from __future__ import annotations

from collections import Counter

from torch_ecrec.observe.verdict import EXIT_CODES, verdict_of
from torch_ecrec.protocol.status import Status

SIZES = ("record", "parity", "log", "snapshot")  # of a slot's memory


class Scalars:
    """The scalars of one status after the other. Rates of bytes need the one before."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int, str], int] = {}  # by member, process and what for
        self._at_s = 0.0  # time of day of the status before

    def of(self, status: Status) -> dict[str, float]:
        """Returns the scalars of a status by name."""
        servers = status.servers
        found: dict[str, float | None] = {
            "verdict": float(EXIT_CODES[verdict_of(status).level]),
            "seconds_since_step": status.still_s,
            "members/servers": float(sum(not one.spare for one in servers)),
            "members/spares": float(sum(one.spare for one in servers)),
            "members/trainers": float(len(status.trainers)),
            "silent_s": max((one.silent_s for one in status.members if one.present), default=None),
        }
        if status.rate is not None:
            found |= {"steps_per_s": status.rate.steps_per_s, "samples_per_s": status.rate.samples_per_s}
        if status.redundancy is not None:
            found["losses_tolerated"] = float(status.redundancy.losses)
        if status.slots:
            found["slots/healthy"] = sum(one.healthy for one in status.slots) / len(status.slots)
        if reports := list(status.slot_reports().values()):
            found["slots/rebuilt_least"] = min(one.rebuilt for one in reports)
            found["damaged_records"] = float(sum(one.damaged for one in reports))
            found |= {
                f"memory_bytes/{kind}": float(sum(getattr(one, f"{kind}_bytes") for one in reports)) for kind in SIZES
            }
        if (kept := status.checkpoints) is not None:
            found |= {"checkpoint/age_s": kept.last_age_s, "checkpoint/failing_s": kept.failing_for_s or 0.0}
        found |= self._bytes(status)
        return {name: float(value) for name, value in found.items() if value is not None}

    def _bytes(self, status: Status) -> dict[str, float]:
        """Bytes of tensors a second since the status before, by what they were for."""
        before, at_s = self._sent, self._at_s
        self._sent = {
            (one.name, one.pid, kind): sent
            for one in status.members
            for kind, sent in (one.report.bytes_sent or {}).items()
        }
        self._at_s = status.time_s
        over_s, grown = status.time_s - at_s, Counter[str]()
        for (name, pid, kind), sent in self._sent.items():
            grown[kind] += max(sent - before.get((name, pid, kind), sent), 0)
        return (
            {f"sent_bytes_per_s/{kind}": sent / over_s for kind, sent in grown.items()} if at_s and over_s > 0 else {}
        )
