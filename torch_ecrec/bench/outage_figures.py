"""Arithmetic of `bench outages`: what the steps around an event say; what is wanted of that; tables and picture.

Of each event, in seconds after it: `longest_s`, the longest time between the ends of two steps until training was
undisturbed again; `detected_s`, somebody was taken for lost or fenced; `placed_s`, slots had another host;
`repaired_s`, all slots were healthy. `median_s` is the median step of the window before. `calm_s` is the longest step
of a window as long as the event's, once all is whole again: what the machine itself does. Rates are steps per second:
`after / before` once all was repaired, what caused it still there; of a drain, `during / around`, beside the windows
before and after it and the calm one together: what else the machine does changes slower than a short window shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_ecrec.bench import record
from torch_ecrec.bench.recovery_figures import Steps

Event = Mapping[str, Any]

HOST, KILL, CUT, ONE_WAY = "host", "kill", "cut", "cut-one-way"
LEADER, LEADER_AND_SERVER, DRAIN = "leader", "leader-and-server", "drain"
KINDS = {
    HOST: "a server's host vanishes: its link is down",
    KILL: "a server's processes are killed",
    CUT: "two servers cannot reach each other",
    ONE_WAY: "one server cannot reach another",
    LEADER: "the host of the coordinator that leads dies",
    LEADER_AND_SERVER: "it dies, and a server's host with it",
    DRAIN: "all slots leave a server",
}
ELECTED = (LEADER, LEADER_AND_SERVER)
AROUND = ("before", "after", "control")  # windows without an event
WANTED = (  # of which kind, what, of which events, wanted
    (HOST, "longest_s", "worst", "<=", 3.0),
    (KILL, "longest_s", "worst", "<=", 0.5),
    (CUT, "longest_s", "worst", "<=", 5.0),
    (CUT, "after / before", "median", ">=", 0.95),
    (ONE_WAY, "longest_s", "worst", "<=", 5.0),
    (ONE_WAY, "after / before", "median", ">=", 0.95),
    (LEADER, "longest / median", "worst", "<=", 2.0),
    (LEADER_AND_SERVER, "repaired_s", "worst", "<=", 5.0),
    (DRAIN, "during / around", "median", ">=", 0.90),
    (DRAIN, "unhealthy", "worst", "<=", 0),
)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def figures(event: Event, steps: Steps) -> dict[str, Any]:
    """What one event says.

    Args:
        event: `event_s`, and the windows `before_s`, `after_s`, `control_s` (begin and end of each), by `time.time()`;
            `detected`, `placed`, `repaired`: moments, or None; `unhealthy`: how many statuses had a slot that is not
            healthy, and how many servers were lost with slots. Of a drain, `during_s` is the window of it.
        steps: of the run.
    """
    before_s, event_s, end_s = event["before_s"], event["event_s"], event["after_s"][1]
    windows = {when: event[f"{when}_s"] for when in (*AROUND, "during") if f"{when}_s" in event}
    rates = {when: steps.rate(*window) for when, window in windows.items()}
    around = [(rates[when], windows[when][1] - windows[when][0]) for when in AROUND]
    times = np.asarray(steps.times)
    gaps = np.diff(times[(times >= before_s[0]) & (times <= before_s[1])])
    median_s = float(np.median(gaps)) if len(gaps) else None
    longest_s, calm_s = steps.stall_s(event_s, end_s), steps.stall_s(*event["control_s"])
    return {
        "longest_s": longest_s,
        "median_s": median_s,
        "calm_s": calm_s,
        "longest / median": _ratio(longest_s, median_s),
        "calm / median": _ratio(calm_s, median_s),
        **{f"{name}_s": _after(event.get(name), event_s) for name in ("detected", "placed", "repaired")},
        "steps_per_s": rates["before"],
        "after / before": _ratio(rates["after"], rates["before"]),
        "during / around": _ratio(rates.get("during"), _together(around)),
        "unhealthy": event["unhealthy"],
    }


def _together(rates: Sequence[tuple[float | None, float]]) -> float | None:
    """The rate of some windows together, of the rate and the seconds of each; None if one of them is not covered."""
    counts = [rate * seconds for rate, seconds in rates if rate is not None]
    return sum(counts) / sum(seconds for _, seconds in rates) if len(counts) == len(rates) else None


def _after(moment_s: float | None, event_s: float) -> float | None:
    return None if moment_s is None else moment_s - event_s


def rows(found: Mapping[str, Sequence[Event]]) -> list[dict[str, Any]]:
    """The table: a line per kind; medians, and the worst of the longest steps and of the repair."""
    lines = []
    for kind, some in found.items():
        if not some:
            continue
        line: dict[str, Any] = {"event": kind, "times": len(some)}
        for name in ("longest_s", "calm_s", "repaired_s"):
            line[name] = _of(some, name, "median")
            line[f"{name} worst"] = _of(some, name, "worst")
        for name in ("detected_s", "placed_s", "median_s", "after / before", "during / around"):
            line[name] = _of(some, name, "median")
        lines.append(line)
    return lines


def _of(some: Sequence[Event], name: str, which: str) -> float | None:
    values = [value for one in some if (value := one[name]) is not None]
    if not values:
        return None
    return max(values) if which == "worst" else float(np.median(values))


def targets(found: Mapping[str, Sequence[Event]]) -> list[dict[str, Any]]:
    """What is wanted beside what was measured; "-" where it was not."""
    lines = []
    for kind, name, which, relation, bound in WANTED:
        measured = _of(found.get(kind, ()), name, which)
        lines.append(record.aim(f"{KINDS[kind]}: {name}, {which}", relation, bound, measured))
    return lines


def plot(found: Mapping[str, Sequence[Event]], path: Path) -> None:
    """Steps per second around each event, one picture for each kind, one line for each time."""
    from matplotlib.figure import Figure

    shown = [(kind, some) for kind, some in found.items() if some]
    figure = Figure(figsize=(10, 1.7 * len(shown) + 0.8))
    grid = figure.subplots(len(shown), 1, squeeze=False)
    for axes, (kind, some) in zip(grid[:, 0], shown, strict=True):
        for event in some:
            ends = np.asarray(event["step_ends_s"])
            axes.step(ends[1:], np.diff(ends), where="pre", linewidth=0.8)
        axes.axvline(0.0, color="#9c4a00", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_title(KINDS[kind], loc="left", fontsize=9)
        axes.set_ylabel("step, s", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    grid[-1, 0].set_xlabel("s after the event")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
