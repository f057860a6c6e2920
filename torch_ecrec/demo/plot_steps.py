"""Draws a run in which all rolled back to a checkpoint: steps over time, so that the way back shows.

    draw_steps(result, path)        where `went_back` of result.json is not empty

A point (t, n): n steps of training count at t. The line falls where all went back to a checkpoint; what it climbs then,
up to where it was before, is trained again, in another colour. A checkpoint is a diamond at the step that it is of,
when it began to count: a little later than the step. Time starts with the first completed step, of each run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torch_ecrec.demo import plot
from torch_ecrec.demo.plot import CALM, FAINT, GRID, INK, LOST, REBUILDING, RUN
from torch_ecrec.runtime.files import written_whole

CHECKPOINT = "#15803d"
HEIGHT_INCHES, TOP_INCHES = 5.5, 1.58
Curve = list[tuple[float, int]]  # seconds since the first step, step


def pieces(trained: list[tuple[int, float]], start_s: float) -> list[tuple[bool, Curve]]:
    """Returns the line of a run in pieces, in order, each with whether it was trained again.

    A piece ends where all went back, or where what was trained again has reached what was done before; one that follows
    such a piece begins with its last point.

    Args:
        trained: step, and when it was complete, in order.
        start_s: when time begins.
    """
    found: list[tuple[bool, Curve]] = []
    most = last = 0
    for step, time_s in trained:
        again = step <= most
        point = (time_s - start_s, step)
        if not found or step <= last:
            found.append((again, [point]))
        elif again != found[-1][0]:
            found.append((again, [found[-1][1][-1], point]))
        else:
            found[-1][1].append(point)
        most, last = max(most, step), step
    return found


def draw_steps(result: dict[str, Any], path: Path) -> None:
    """Draws the steps, and writes the picture."""
    arguments, kills = result["arguments"], result["kills"]
    slots, start_s = arguments["servers"], result["step_times_s"][0]
    list_inches = 0.1 + 0.24 * len(kills) if len(kills) > 1 else 0.0
    height, strip_inches = HEIGHT_INCHES + 0.2 * slots + list_inches, 0.2 * slots
    figure = Figure(figsize=(plot.WIDTH_INCHES, height), dpi=plot.DPI, facecolor="white")
    left, width, bottom = 0.085, 0.895, (0.62 + list_inches) / height
    strip = figure.add_axes((left, bottom, width, strip_inches / height))
    above = strip_inches + 0.12
    steps = figure.add_axes(
        (left, bottom + above / height, width, 1 - bottom - (above + TOP_INCHES) / height), sharex=strip
    )
    end_s = _draw_lines(steps, result, start_s)
    plot.draw_slots(strip, kills, slots, start_s, end_s)
    for back in result["went_back"]:
        _draw_way_back(steps, result, back, start_s, end_s)
    if len(kills) == 1:
        plot.label_events(steps, kills[0], start_s, end_s)
    else:
        plot.number_kills(figure, steps, kills, start_s, height)
    plot.head(figure, result, height, legend_below=True)
    with written_whole(path) as part:
        figure.savefig(part, format="png")


def _draw_lines(axes: Axes, result: dict[str, Any], start_s: float) -> float:
    """Draws both runs and the checkpoints; returns where time ends."""
    calm, end_s = result["undisturbed"], 0.0
    if calm is not None:
        times = [time_s - calm["step_times_s"][0] for time_s in calm["step_times_s"]]
        axes.plot(times, range(1, len(times) + 1), color=CALM, lw=1.6, label="undisturbed", zorder=2)
        end_s = times[-1]
    told = set()
    for again, curve in pieces(result["trained"], start_s):
        color, label = (REBUILDING, "trained again") if again else (RUN, "this run")
        times, steps = [time_s for time_s, _ in curve], [step for _, step in curve]
        axes.plot(times, steps, color=color, lw=2.4, label=None if label in told else label, zorder=4)
        told.add(label)
        end_s = max(end_s, times[-1])
    known = [(one["time_s"] - start_s, one["step"]) for one in result["checkpoints"] if one["time_s"] is not None]
    if known:
        style: dict[str, Any] = {
            "marker": "D",
            "markersize": 6.5,
            "markeredgecolor": "white",
            "markeredgewidth": 0.9,
            "lw": 0,
        }
        axes.plot(*zip(*known, strict=True), color=CHECKPOINT, label="checkpoint", zorder=5, **style)
        end_s = max(end_s, known[-1][0] if known[-1][0] < 1.05 * end_s else end_s)
    end_s *= 1.01
    axes.set_xlim(0, end_s)
    axes.set_ylim(0, 1.04 * len(result["step_times_s"]))
    axes.set_ylabel("step of training", color=INK, fontsize=10.5)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    axes.tick_params(axis="y", length=0, labelcolor=FAINT, labelsize=9.5)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    return end_s


def _draw_way_back(axes: Axes, result: dict[str, Any], back: dict[str, Any], start_s: float, end_s: float) -> None:
    """Draws the way from where training stood to the checkpoint, and on to the first step that is trained again."""
    step, before = back["step"], back["from_step"]
    stood = [time_s for trained, time_s in result["trained"] if time_s <= back["time_s"] and trained == before]
    goes_on = [time_s for trained, time_s in result["trained"] if time_s > back["time_s"]]
    if not stood:
        return
    stood_s, back_s = stood[-1] - start_s, back["time_s"] - start_s
    on_s = min(goes_on[0] - start_s, end_s) if goes_on else end_s
    axes.plot([stood_s], [before], color=LOST, marker="X", markersize=10, markeredgecolor="white", lw=0, zorder=6)
    axes.plot([stood_s, back_s], [before, before], color=LOST, lw=1.4, ls=(0, (4, 3)), zorder=3)
    axes.plot([back_s, on_s], [step, step], color=REBUILDING, lw=1.4, ls=(0, (4, 3)), zorder=3)
    arrow = {"arrowstyle": "-|>", "color": LOST, "lw": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", xy=(back_s, step), xytext=(back_s, before), arrowprops=arrow, zorder=6)
    count = before - step
    text = f"back to the checkpoint of step {step}:\n{count} step{'s' * (count != 1)} to be trained again"
    if not back["checkpoint"]:
        text = f"no checkpoint: back to the beginning,\n{count} steps to be trained again"
    right = back_s < 0.6 * end_s  # of the arrow, where there is more room
    top = len(result["step_times_s"])
    low = step < 0.2 * top
    axes.text(
        back_s + (0.012 if right else -0.012) * end_s, step + (0.03 if low else -0.03) * top, text, color=INK,
        fontsize=9.5, ha="left" if right else "right", va="bottom" if low else "top", linespacing=1.35, zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
    )  # fmt: skip
