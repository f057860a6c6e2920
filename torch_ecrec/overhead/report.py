"""The output of `torch-ecrec plan`: figures that a run has measured, a table, JSON, a plot."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_ecrec.overhead.model import HOUR_S, Costs, Overhead, all_ways, beyond_rate_per_s, choose, duration
from torch_ecrec.runtime.checks import require

COLORS = {
    "full checkpoints": "#9aa5b1",
    "partial recovery": "#f59e0b",
    "parity": "#86c7a3",
    "parity and checkpoints": "#2563eb",
}
OVER = ("mtbf", "hosts")
POINTS = 60


def measured(path: Path) -> dict[str, float]:
    """Reads costs that a run of `torch-ecrec demo` has measured from its result.json; only those that it has.

    stall_s and repair_s: the longest of its kills of servers that parity has repaired; repair_rate: samples per second
    while that lasted, over those before; save_s: the mean time that a checkpoint took to write, as if training had
    stood still meanwhile (an upper bound); restart_s and load_s: of the times that all went back to a checkpoint, the
    longest from the kill until all trainers had joined again, and from there to the first step.

    Raises:
        ValueError: the file is no result.json of a run.
    """
    try:
        result = json.loads(path.read_text())
        kills = [kill["after_kill_s"] for kill in result["kills"]]
        repaired = [after for after in kills if after["rebuilt_s"] is not None and after["went_back_s"] is None]
        back = [after for after in kills if after["went_back_s"] is not None and after["trains_s"] is not None]
        written = [one["seconds"] for one in result["checkpoints"] if one["time_s"] is not None]
        rates = result["throughput"]
    except FileNotFoundError:
        raise ValueError(f"`--measured {path}`: no such file; `torch-ecrec demo` writes it as result.json") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"`--measured {path}` is no result.json of `torch-ecrec demo`: {error!r}") from error
    found: dict[str, float] = {}
    if repaired:
        found["stall_s"] = max(after["stall_s"] or 0.0 for after in repaired)
        found["repair_s"] = max(after["rebuilt_s"] for after in repaired)
    if repaired and not back and rates["before"] and rates["rebuild"] is not None:
        found["repair_rate"] = min(1.0, max(rates["rebuild"] / rates["before"], 0.01))
    if written:
        found["save_s"] = sum(written) / len(written)
    if back:
        found["restart_s"] = max(after["rejoined_s"] for after in back)
        found["load_s"] = max(after["trains_s"] - after["rejoined_s"] for after in back)
    return found


def to_json(costs: Costs, pls: float | None) -> dict[str, Any]:
    """Returns everything as a JSON object; null stands for infinite."""
    ways = all_ways(costs, pls)
    best, why = choose(ways)
    entries = [{**dataclasses.asdict(way), "total": way.total} for way in ways]
    rate = beyond_rate_per_s(costs)
    found: dict[str, Any] = {"costs": dataclasses.asdict(costs), "pls": pls, "ways": entries}
    found |= {"beyond_parity_s": 1 / rate if rate else math.inf, "take": best.way, "why": why}
    finite: dict[str, Any] = _finite(found)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def to_text(costs: Costs, pls: float | None) -> str:
    """Returns a table, and which way to take."""
    ways = all_ways(costs, pls)
    head = ["", "overhead", "all the time", "done again", "down", "checkpoint every", "loses samples", "loses all"]
    rows = [head, *(_row(way) for way in ways)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    each = duration(1 / costs.failures_per_s)
    rate = beyond_rate_per_s(costs)
    beyond = duration(1 / rate) if rate else "never"
    return "\n".join(
        [
            f"{costs.hosts} hosts, a failure every {each}; ({costs.k}, {costs.r}): beyond parity once in {beyond}",
            "",
            *("  ".join(row).rstrip() for row in aligned),
            "",
            f"Take {choose(ways)[1]}",
        ]
    )


def _row(way: Overhead) -> list[str]:
    shares = [f"{100 * share:.3f} %" for share in (way.total, way.guard, way.again, way.down)]
    every = "-" if math.isinf(way.interval_s) else duration(way.interval_s)
    lost = f"{100 * way.pls:.3g} %" if way.pls else "none"
    return [
        way.way,
        *shares,
        every,
        lost,
        "never" if math.isinf(way.loses_all_s) else f"in {duration(way.loses_all_s)}",
    ]


def draw(costs: Costs, pls: float | None, over: str, path: Path) -> None:
    """Plots the overhead of each way over the time between failures of a host, or over the number of hosts.

    Raises:
        ValueError: `over` is neither.
    """
    from matplotlib.figure import Figure

    require(over in OVER, f"`over` must be one of {', '.join(OVER)}, got {over!r}")
    points: list[tuple[float, Costs]] = []
    for i in range(POINTS):
        factor = 10 ** (4 * i / (POINTS - 1) - 2)  # a hundredth to a hundred times
        if over == "mtbf":
            points.append((costs.mtbf_s * factor / HOUR_S, dataclasses.replace(costs, mtbf_s=costs.mtbf_s * factor)))
        else:
            hosts = max(costs.k + costs.r, round(costs.hosts * factor))
            points.append((hosts, dataclasses.replace(costs, hosts=hosts)))
    here = costs.mtbf_s / HOUR_S if over == "mtbf" else costs.hosts
    _plot(Figure(figsize=(8.0, 4.6), dpi=150, facecolor="white"), points, here, over, pls, path)


def _plot(
    figure: Any, points: list[tuple[float, Costs]], here: float, over: str, pls: float | None, path: Path
) -> None:
    axes = figure.add_axes((0.14, 0.13, 0.82, 0.72))
    curves: dict[str, list[float]] = {}
    for _, costs in points:
        for way in all_ways(costs, pls):
            curves.setdefault(way.way, []).append(100 * way.total)
    at = [x for x, _ in points]
    for name, values in curves.items():
        style = (0, (5, 3)) if name == "parity" else "-"
        axes.plot(at, values, color=COLORS[name], lw=2.2, ls=style, label=name, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(at), max(at))
    axes.set_ylim(top=100.0)
    percent: Callable[[float, object], str] = lambda value, _: f"{value:g} %"  # noqa: E731
    axes.yaxis.set_major_formatter(percent)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.axvline(here, color="#1f2933", lw=1.0, ls=":", zorder=2)
    above = axes.get_xaxis_transform()
    axes.text(here, 1.02, "this cluster", color="#1f2933", fontsize=9, ha="center", transform=above)
    axes.grid(color="#e4e7eb", lw=0.7)
    axes.set_xlabel("hours between failures of one host" if over == "mtbf" else "hosts", color="#1f2933")
    axes.set_ylabel("overhead", color="#1f2933")
    axes.tick_params(labelcolor="#7b8794", length=0, which="both")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="upper center", bbox_to_anchor=(0.53, 0.99), ncols=4, frameon=False, fontsize=9.5)
    figure.savefig(path)
