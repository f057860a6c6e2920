"""What `bench recovery` measures: its cases, the times of steps, and the figures of a kill. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_ecrec.bench import record as bench_record
from torch_ecrec.demo.report import Kill, since
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.spec.job import CodeSpec

MB = 1e6
TABLES, DIM = 26, 64
RECORD_BYTES = optimizer("rowwise_adagrad").schema(DIM).nbytes
FIGURES = (
    "detected_s",
    "rehosted_s",
    "first_step_s",
    "stall_s",
    "rebuilt_s",
    "spare_s",
    "rebuild_s",
    "lost_mb",
    "lost_data_mb",
    "lost_mb_per_s",
    "lost_data_mb_per_s",
    "before_samples_per_s",
    "during_samples_per_s",
    "after_samples_per_s",
    "during_share",
)


@dataclass(frozen=True)
class Case:
    """One cluster's worth of kills. `mb_per_s`: `Settings.rebuild_bytes_per_s` in 10^6, 0 for no limit."""

    gigabytes: float
    mb_per_s: float
    idle: bool

    @property
    def name(self) -> str:
        limit = f"{self.mb_per_s:g} MB/s" if self.mb_per_s else "no limit"
        return f"{self.gigabytes:g} GB, {'idle' if self.idle else limit}"


def cases(gigabytes: Sequence[float], limits: Sequence[float], throttled: float | None, idle: bool) -> list[Case]:
    """All cases, sizes first.

    Args:
        gigabytes: sizes of all records, in 10^9 bytes.
        limits: of the rebuild rate in 10^6 bytes/s, 0 for none.
        throttled: the only size at which limits other than 0 are measured; None for all.
        idle: whether the rebuild is also measured alone.
    """
    found = []
    for size in gigabytes:
        found += [Case(size, limit, False) for limit in limits if not limit or throttled in (None, size)]
        found += [Case(size, 0.0, True)] * idle
    return found


def rows_per_table(gigabytes: float) -> int:
    """Rows of each table so that all records together have `gigabytes` * 10^9 bytes."""
    return max(1, round(gigabytes * 1e9 / (TABLES * RECORD_BYTES)))


def slot_bytes(code: CodeSpec, rows: int, slot: int) -> tuple[int, int]:
    """Bytes of data and of parity records on a slot; `rows` per table."""
    layout = Layout(code.slots, code.k, code.parities, TABLES * rows)
    return RECORD_BYTES * layout.data_rows(slot), RECORD_BYTES * layout.parity_rows(slot)


class Steps:
    """When each trainer's steps began and ended. Times in seconds since the epoch, steps from 1."""

    def __init__(self, trainers: int) -> None:
        self._begun: list[list[float]] = [[] for _ in range(trainers)]
        self._ended: list[list[float]] = [[] for _ in range(trainers)]
        self.times: list[float] = []  # [i]: when step i + 1 was complete at all trainers

    def add(self, trainer: int, begin_s: float, end_s: float) -> None:
        """The next step of a trainer."""
        self._begun[trainer].append(begin_s)
        self._ended[trainer].append(end_s)
        while len(self.times) < min(map(len, self._ended)):
            self.times.append(max(ended[len(self.times)] for ended in self._ended))

    @property
    def newest(self) -> int:
        """The last step that some trainer has completed."""
        return max(map(len, self._ended))

    def first_begun_after(self, time_s: float) -> float | None:
        """When the first step was complete that all trainers began after `time_s`; None if it is not yet."""
        for i in range(len(self.times) - 1, -1, -1):
            if min(begun[i] for begun in self._begun) <= time_s:
                return self.times[i + 1] if i + 1 < len(self.times) else None
        return self.times[0] if self.times else None

    def rate(self, begin_s: float, end_s: float) -> float | None:
        """Steps per second in a window; a step counts in part where the window cuts it. None if it is not covered."""
        if end_s <= begin_s or len(self.times) < 2 or not (self.times[0] <= begin_s and end_s <= self.times[-1]):
            return None
        first, last = np.interp([begin_s, end_s], self.times, np.arange(len(self.times)))
        return float(last - first) / (end_s - begin_s)

    def stall_s(self, begin_s: float, end_s: float) -> float | None:
        """The longest time between two completed steps, from the last before `begin_s` to the one at `end_s`."""
        times = np.asarray(self.times)
        around = times[max(0, int(np.searchsorted(times, begin_s)) - 1) : int(np.searchsorted(times, end_s, "right"))]
        return float(np.diff(around).max()) if len(around) > 1 else None


def figures_of(
    kill: Kill, steps: Steps, spare_s: float, windows_s: tuple[float, float, float], samples: int, lost: tuple[int, int]
) -> dict[str, float | None]:
    """All `FIGURES` of one kill.

    Args:
        kill: with all its times but `first_step_s`, which is the trainers' to say.
        steps: of the trainers.
        spare_s: when a spare was there again.
        windows_s: begin of the window before the kill, begin and end of the one after.
        samples: in one step of all trainers.
        lost: bytes of data and of parity records.
    """
    start_s, rehosted_s, rebuilt_s = kill.kill_s, kill.rehosted_s, kill.rebuilt_s
    assert rehosted_s is not None and rebuilt_s is not None
    first_step_s = steps.first_begun_after(start_s)
    rebuild_s = rebuilt_s - rehosted_s
    spans = {
        "before": (windows_s[0], start_s),
        "during": (start_s, rebuilt_s),
        "after": (windows_s[1], windows_s[2]),
    }
    rates = {name: steps.rate(*span) for name, span in spans.items()}
    before, during = rates["before"], rates["during"]
    return {
        "detected_s": since(kill.detected_s, start_s),
        "rehosted_s": since(rehosted_s, start_s),
        "first_step_s": since(first_step_s, start_s),
        "stall_s": steps.stall_s(start_s, first_step_s) if first_step_s is not None else None,
        "rebuilt_s": since(rebuilt_s, start_s),
        "spare_s": since(spare_s, start_s),
        "rebuild_s": rebuild_s,
        "lost_mb": sum(lost) / MB,
        "lost_data_mb": lost[0] / MB,
        "lost_mb_per_s": sum(lost) / MB / rebuild_s,
        "lost_data_mb_per_s": lost[0] / MB / rebuild_s,
        **{f"{name}_samples_per_s": None if rate is None else rate * samples for name, rate in rates.items()},
        "during_share": during / before if during is not None and before else None,
    }


def summary(case: Case, kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A flat row: median, least and most of every figure over the kills; None where a figure does not apply."""
    row: dict[str, Any] = {
        "case": case.name,
        "gigabytes": case.gigabytes,
        "mode": "idle" if case.idle else "training",
        "limit_mb_per_s": case.mb_per_s,
        "kills": len(kills),
    }
    for figure in FIGURES:
        values = [kill[figure] for kill in kills if kill[figure] is not None]
        spread = bench_record.spread(values) if values else dict.fromkeys(("median", "min", "max"))
        row |= {f"{figure}_{name}": value for name, value in spread.items()}
    return row
