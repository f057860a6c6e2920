"""Draws recovery.png from the contents of result.json: throughput over time, the failures, the state of every slot.

    draw(json.loads(Path("demo/result.json").read_text()), Path("demo/recovery.png"))

Time starts with the first completed step, of each run. Throughput is samples per second over the last few steps;
between two completed steps samples count as trained evenly. With one failure its events are labelled in the picture,
with more of them each has a number, and its times are listed below. Where all went back to a checkpoint, steps over
time are drawn in its place (`plot_steps.py`): rates would not show which steps were trained twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from torch_ecrec.runtime.files import written_whole

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
RUN, CALM, BAND = "#2563eb", "#9aa5b1", "#fde68a"
LOST, REBUILDING, HEALTHY = "#dc2626", "#f59e0b", "#86c7a3"
WIDTH_INCHES, DPI = 10.0, 160
OF_EVENTS = {  # colors of what chaos does; others are black
    "kill-server": LOST,
    "stop-server": REBUILDING,
    "kill-trainer": "#7c3aed",
    "stop-trainer": "#c4b5fd",
    "kill-all": "#881337",
    "kill-beyond-r": "#db2777",
    "full-disk": "#0f766e",
    "slow-store": "#65a30d",
    "failing-store": "#0369a1",
    "kill-host": "#7f1d1d",
    "cut": "#1d4ed8",
    "cut-trainers": "#60a5fa",
    "slow-link": "#a16207",
    "lossy-link": "#d97706",
    "stop-leader": "#6b7280",
    "kill-etcd": "#047857",
    "stop-etcd": "#34d399",
}
LEAST_WINDOW_S, WINDOW_STEPS = 0.15, 5
GRID_S = 0.01
LABEL_SHARE = 0.125  # of the width that a label takes
EVENTS = (
    ("kill_s", "killed"),
    ("detected_s", "detected"),
    ("rehosted_s", "re-hosted"),
    ("first_step_s", "first step"),
    ("rebuilt_s", "rebuilt"),
    ("resumable_s", "went back"),
    ("went_back_s", "went back"),
    ("rejoined_s", "rejoined"),
    ("trains_s", "trains again"),
)
WENT_BACK_EVENTS = ("kill_s", "went_back_s", "rejoined_s", "trains_s", "first_step_s")


def throughput(step_times: Sequence[float], samples_per_step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns times in seconds since the first step, and samples per second over the window before each."""
    times = np.asarray(step_times) - step_times[0]
    window_s = max(LEAST_WINDOW_S, WINDOW_STEPS * float(np.median(np.diff(times))))
    at = np.append(np.arange(0.0, times[-1], GRID_S), times[-1])
    done = np.arange(len(times)) * samples_per_step
    at = at[(at >= min(window_s, times[-1])) & (at <= times[-1])]
    return at, (np.interp(at, times, done) - np.interp(at - window_s, times, done)) / window_s


def spread(positions: Sequence[float], least_gap: float, low: float, high: float) -> list[float]:
    """Returns ascending positions within [low, high], moved as little as `least_gap` between neighbours needs."""
    placed: list[float] = []
    for position in positions:
        placed.append(max(position, placed[-1] + least_gap) if placed else max(position, low))
    shift = sum(b - a for a, b in zip(positions, placed, strict=True)) / max(len(placed), 1)
    placed = [max(position - shift, low + i * least_gap) for i, position in enumerate(placed)]
    over = max(0.0, placed[-1] - high) if placed else 0.0
    return [max(position - over, low + i * least_gap) for i, position in enumerate(placed)]


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the picture; nothing if fewer than three steps were completed."""
    if len(result["step_times_s"]) < 3:
        return
    arguments, kills = result["arguments"], result["kills"]
    slots = arguments["servers"]
    list_inches = 0.1 + 0.24 * len(kills) if len(kills) > 1 else 0.0
    height = 4.1 + 0.2 * slots + list_inches
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    top, strip_inches = 1.28, 0.2 * slots
    left, width = 0.085, 0.895
    bottom = (0.62 + list_inches) / height
    strip = figure.add_axes((left, bottom, width, strip_inches / height))
    rates = figure.add_axes(
        (left, bottom + (strip_inches + 0.12) / height, width, 1 - bottom - (strip_inches + 0.12 + top) / height),
        sharex=strip,
    )
    start_s = result["step_times_s"][0]
    end_s = _draw_rates(rates, result)
    draw_slots(strip, kills, slots, start_s, end_s)
    for kill in kills:
        begin = kill["times"]["kill_s"] - start_s
        until = kill["times"]["rebuilt_s" if kill["role"] == "server" else "first_step_s"]
        rates.axvspan(begin, end_s if until is None else min(until - start_s, end_s), color=BAND, alpha=0.45, lw=0)
    if len(kills) == 1:
        label_events(rates, kills[0], start_s, end_s)
    else:
        number_kills(figure, rates, kills, start_s, height)
    head(figure, result, height)
    with written_whole(path) as part:
        figure.savefig(part, format="png")


def _draw_rates(axes: Axes, result: dict[str, Any]) -> float:
    """Draws the throughput of both runs; returns where time ends."""
    samples = result["arguments"]["batch_size"] * result["arguments"]["trainers"]
    end_s, most = 0.0, 0.0
    runs = [(result["undisturbed"], CALM, 1.6, "undisturbed"), (result, RUN, 2.2, "with the failure")]
    if len(result["kills"]) != 1:
        runs[1] = (result, RUN, 2.2, f"with {len(result['kills'])} failures" if result["kills"] else "this run")
    for run, color, line_width, label in runs:
        if run is not None and len(run["step_times_s"]) > 2:
            at, rate = throughput(run["step_times_s"], samples)
            axes.plot(at, rate, color=color, lw=line_width, label=label, solid_joinstyle="round", zorder=3)
            end_s, most = max(end_s, float(at[-1])), max(most, float(np.max(rate)))
    axes.set_xlim(0, end_s)
    axes.set_ylim(0, most * 1.08)
    axes.set_ylabel("samples / s", color=INK, fontsize=10.5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.tick_params(axis="y", length=0, labelcolor=FAINT, labelsize=9.5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    return end_s


def draw_slots(axes: Axes, kills: Sequence[dict[str, Any]], slots: int, start_s: float, end_s: float) -> None:
    """Draws a row for each slot: green, red while nobody serves it, amber while its records are rebuilt."""
    axes.set_ylim(slots - 0.5, -0.5)
    axes.set_xlim(0, end_s)
    axes.set_yticks(range(slots), [f"slot {slot}" for slot in range(slots)])
    axes.tick_params(axis="both", length=0, labelcolor=FAINT, labelsize=9)
    axes.set_xlabel("seconds since the first step", color=INK, fontsize=10)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    if kills:
        again = "rebuilding"
        if any(kill["times"]["went_back_s"] for kill in kills):
            again = "is read back"
        for at, color, text in ((0.745, LOST, "nobody serves it"), (0.905, REBUILDING, again)):
            below = -(0.38 / (0.2 * slots))  # of the strip's height, whatever that is
            axes.text(at, below, "■", color=color, fontsize=9, ha="right", va="center", transform=axes.transAxes)
            axes.text(at + 0.006, below, text, color=FAINT, fontsize=9, va="center", transform=axes.transAxes)
    for slot in range(slots):
        axes.add_patch(Rectangle((0, slot - 0.34), end_s, 0.68, color=HEALTHY, lw=0))
    for kill in kills:
        times = {name: end_s if time_s is None else time_s - start_s for name, time_s in kill["times"].items()}
        back = kill["times"]["went_back_s"] is not None  # then all slots begin anew
        served_s, whole_s = (
            (times["rejoined_s"], times["trains_s"]) if back else (times["rehosted_s"], times["rebuilt_s"])
        )
        for slot in range(slots) if back else kill["slots_lost"]:
            for begin, end, color in (
                (served_s, whole_s, REBUILDING),
                (times["kill_s"], max(served_s, times["kill_s"] + 0.004 * end_s), LOST),
            ):
                end = min(end, end_s)
                if end > begin:
                    axes.add_patch(Rectangle((begin, slot - 0.34), end - begin, 0.68, color=color, lw=0))


def spread_bursts(step_times: Sequence[float]) -> list[float]:
    """Spreads steps that became known at one instant, as no coordinator told of them before, evenly over that time."""
    times, first, counts = np.unique(np.asarray(step_times), return_index=True, return_counts=True)
    spread: list[float] = np.interp(np.arange(len(step_times)), first + counts - 1, times).tolist()
    return spread


def draw_chaos(result: dict[str, Any], path: Path) -> None:
    """Draws the timeline of `chaos`: throughput, events, the slots' state and the memory of all processes."""
    if len(result["step_times_s"]) < 3:
        return
    samples = result["samples"]
    figure = Figure(figsize=(1.6 * WIDTH_INCHES, 6.5), dpi=DPI, facecolor="white")
    rates, strip, memory = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1.2, 1.5]})
    per_step = result["arguments"]["batch_size"] * result["arguments"]["trainers"]
    times_s, samples_per_s = throughput(spread_bursts(result["step_times_s"]), per_step)
    rates.plot(times_s, samples_per_s, color=RUN, lw=0.8)
    rates.set_ylim(0, 1.2 * np.quantile(samples_per_s, 0.98))  # steps that were told late seem to come in a burst
    rates.set_ylabel("samples / s")
    for entry in result["schedule"]:
        color = OF_EVENTS.get(entry["event"], INK)
        for axes in (rates, strip):
            axes.axvline(entry["s"], color=color, lw=0.9, alpha=0.8)
            if entry["seconds"]:
                axes.axvspan(entry["s"], entry["s"] + entry["seconds"], color=color, alpha=0.15, lw=0)
    for event in dict.fromkeys(entry["event"] for entry in result["schedule"]):
        count = sum(entry["event"] == event for entry in result["schedule"])
        rates.plot([], [], color=OF_EVENTS.get(event, INK), label=f"{count} {event}")
    if result["schedule"]:
        rates.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    slots = 1 + max((slot for sample in samples for slot in sample["unhealthy"]), default=0)
    for sample in samples:
        strip.barh(sample["unhealthy"], 0.5, left=sample["s"], height=0.8, color=REBUILDING, lw=0)
    strip.set_ylim(-0.6, max(slots, 3) - 0.4)
    strip.set_yticks(range(max(slots, 3)))
    strip.set_ylabel("slots not whole")
    memory.plot([s["s"] for s in samples], [s["resident_bytes"] / 2**30 for s in samples], color=INK, lw=0.9)
    memory.set_ylim(bottom=0)
    memory.set_ylabel("resident GiB")
    memory.set_xlabel("seconds since the first step")
    for axes in (rates, strip, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.005)
    figure.tight_layout()
    with written_whole(path) as part:
        figure.savefig(part, format="png")


def _above(axes: Axes, inches: float) -> float:
    """Returns a height above the axes, as a multiple of their height from their foot."""
    figure = axes.get_figure()
    assert figure is not None
    return 1 + inches / (axes.get_position().height * float(figure.get_size_inches()[1]))  # type: ignore[union-attr]


def label_events(axes: Axes, kill: dict[str, Any], start_s: float, end_s: float) -> None:
    """Labels the five moments of one failure above the picture, with leader lines."""
    wanted = EVENTS if kill["times"]["went_back_s"] is None else [one for one in EVENTS if one[0] in WENT_BACK_EVENTS]
    events = [(kill["times"][name] - start_s, title) for name, title in wanted if kill["times"][name] is not None]
    if kill["times"]["went_back_s"] is not None:
        events = [(at, "first new step" if title == "first step" else title) for at, title in events]
    events.sort(key=lambda event: event[0])
    begin = kill["times"]["kill_s"] - start_s
    inside = [(at, title) for at, title in events if at <= end_s * 1.001]
    half = LABEL_SHARE / 2 * end_s
    labels_at = spread([at for at, _ in inside], LABEL_SHARE * end_s, half, end_s - half)
    knee, low, high = (_above(axes, inches) for inches in (0.15, 0.2, 0.355))
    above = axes.get_xaxis_transform()
    for (at, title), label_at in zip(inside, labels_at, strict=True):
        color = LOST if title == "killed" else INK
        axes.plot([at, at], [0, 1], color=color, lw=1.0, alpha=0.75, transform=above, zorder=2)
        axes.plot([at, label_at], [1.0, knee], color=color, lw=0.9, alpha=0.75, transform=above, clip_on=False)
        when = f"step {kill['step']}" if title == "killed" else f"+{at - begin:.3f} s"
        axes.text(label_at, high, title, color=color, weight="bold", fontsize=9.5, ha="center", transform=above)
        axes.text(label_at, low, when, color=FAINT, fontsize=9, ha="center", transform=above)


def number_kills(figure: Figure, axes: Axes, kills: Sequence[dict[str, Any]], start_s: float, height: float) -> None:
    """Draws a number at each kill, and the kills' times below the picture."""
    above = axes.get_xaxis_transform()
    low, high = axes.get_xlim()
    starts = [kill["times"]["kill_s"] - start_s for kill in kills]
    order = sorted(range(len(kills)), key=lambda i: starts[i])
    places = spread([starts[i] for i in order], 0.03 * (high - low), low, high)
    for i, label_at in zip(order, places, strict=True):
        axes.plot([starts[i]] * 2, [0, 1], color=LOST, lw=1.0, alpha=0.8, transform=above, zorder=2)
        axes.plot(
            [starts[i], label_at], [1, _above(axes, 0.1)], color=LOST, lw=0.9, alpha=0.8, transform=above, clip_on=False
        )
        axes.text(
            label_at, _above(axes, 0.19), str(i + 1), color="white", weight="bold", fontsize=9.5,
            ha="center", va="center", transform=above,
            bbox={"boxstyle": "circle,pad=0.28", "facecolor": LOST, "edgecolor": "none"},
        )  # fmt: skip
    for i, kill in enumerate(kills):
        after = kill["after_kill_s"]
        events = sorted((after[name], title) for name, title in EVENTS[1:] if after[name] is not None)
        if after["went_back_s"] is not None:  # what there is room for
            shown = (("went_back_s", "went back"), ("trains_s", "trains again"), ("first_step_s", "first new step"))
            events = [(after[name], title) for name, title in shown if after[name] is not None]
        times = [f"{title} {time_s:.3f} s" for time_s, title in events]
        y = (0.24 * (len(kills) - i) - 0.04) / height
        figure.text(0.085, y, str(i + 1), color=LOST, weight="bold", fontsize=9.5)
        slot = f" (slot {kill['number']})" if kill["role"] == "server" else ""
        figure.text(0.11, y, f"{kill['member']}{slot} killed at step {kill['step']}", color=INK, fontsize=9.5)
        figure.text(0.42, y, "  ·  ".join(times), color=FAINT, fontsize=9.5)


def head(figure: Figure, result: dict[str, Any], height: float, legend_below: bool = False) -> None:
    """Draws the title, a line on the run, and the legend: beside that line, or below it if it has more entries."""
    arguments = result["arguments"]
    roles = [kill["role"] for kill in result["kills"]]
    killed = [f"{n} {role}{'s' * (n > 1)}" for role in dict.fromkeys(roles) if (n := roles.count(role))]
    killed = ["everything" if one.endswith(" all") else one for one in killed]
    what = f"{' and '.join(killed)} {'is' if len(roles) == 1 else 'are'} killed" if roles else "Nothing is killed"
    what = what[0].upper() + what[1:]
    end = {True: ": not one bit differs from the undisturbed run", False: ": the result DIFFERS", None: ""}[
        result["equal"]
    ]
    if result["recovered_partly"]:
        lost = result["recovered_partly"][-1]["lost_samples"]
        end = f": NOT EXACT, {100 * lost:.3g} % of the samples are lost"
    figure.text(0.02, 1 - 0.32 / height, what + end, color=INK, fontsize=14, weight="bold")
    code = f"(k, r) = ({arguments['k']}, {arguments['r']})"
    code = code if arguments["protection"] == "parity" else "no protection"
    line = (
        f"DLRM, {arguments['trainers']} trainers × {arguments['batch_size']} samples, {arguments['optimizer']};"
        f" {arguments['servers']} servers, {arguments['spares']} spare{'s' * (arguments['spares'] != 1)}, {code}"
    )
    figure.text(0.02, 1 - 0.56 / height, line, color=FAINT, fontsize=10)
    common: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": INK}
    if legend_below:
        figure.legend(loc="center left", bbox_to_anchor=(0.012, 1 - 0.84 / height), ncols=4, **common)
    else:
        figure.legend(loc="center right", bbox_to_anchor=(0.99, 1 - 0.51 / height), ncols=2, **common)
