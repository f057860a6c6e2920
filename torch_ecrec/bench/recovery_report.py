"""What `bench recovery` shows of its figures: tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record as bench_record

SHOWN = ("detected_s", "rehosted_s", "first_step_s", "rebuilt_s", "lost_mb", "lost_mb_per_s")
RATES = ("before_samples_per_s", "during_samples_per_s", "after_samples_per_s", "during_share")
PHASES = {  # what is drawn of a kill: color and name
    "detected_s": ("#7b8794", "detected"),
    "rehosted_s": ("#2563eb", "re-hosted"),
    "first_step_s": ("#059669", "first step begun after it"),
    "rebuilt_s": ("#f59e0b", "rebuilt"),
}


def tables(rows: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]], interval_s: float) -> str:
    """What is printed at the end."""
    head = ("case", "kills")
    blocks = []
    for title, figures in (("after the kill", SHOWN), ("samples per second", RATES)):
        shown = [{c: row[c] for c in head} | {f: row[f"{f}_median"] for f in figures} for row in rows]
        blocks.append(f"{title} (medians):\n{bench_record.table(shown)}" if shown else "")
    training = [row for row in rows if row["mode"] == "training"]
    if training:
        lines = [
            f"  {figure:12} least {min(row[f'{figure}_min'] for row in training):.3f},"
            f" most {max(row[f'{figure}_max'] for row in training):.3f}"
            for figure in ("detected_s", "rehosted_s", "first_step_s", "stall_s")
            if all(row[f"{figure}_max"] is not None for row in training)
        ]
        blocks.append(f"over {sum(row['kills'] for row in training)} kills in training:\n" + "\n".join(lines))
    measured = [c for c in checkpoints if c["skipped"] is None]
    if measured:
        columns = ["gigabytes", "save_s", "start_s", "load_s", "until_training_s", "redo_s", "until_caught_up_s"]
        blocks.append(
            "restart of plain TorchRec from a checkpoint on the local disk; redo_s is not run but computed: half of an"
            f" interval of {interval_s:g} s:\n{bench_record.table(measured, columns)}"
        )
    blocks += [f"{c['gigabytes']:g} GB, checkpoint: skipped: {c['skipped']}" for c in checkpoints if c["skipped"]]
    return "\n\n".join(block for block in blocks if block)


def draw(rows: Sequence[Mapping[str, Any]], checkpoints: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture: times of the phases by size, and throughput in each phase by rate limit.

    Args:
        rows: `summary` of each case.
        checkpoints: `from_checkpoint` of each size.
        path: of the PNG.

    Raises:
        ImportError: no matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.6), dpi=150, layout="constrained")
    times, rates = figure.subplots(1, 2)
    _draw_times(times, rows, [c for c in checkpoints if c["skipped"] is None])
    _draw_rates(rates, [row for row in rows if row["mode"] == "training"])
    figure.suptitle("Medians over the kills of a case; bars from the least to the most", fontsize=9)
    figure.savefig(path)


def _spread(axes: Any, at: Sequence[float], of: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    middle = [row[f"{name}_median"] for row in of]
    low = [row[f"{name}_median"] - row[f"{name}_min"] for row in of]
    high = [row[f"{name}_max"] - row[f"{name}_median"] for row in of]
    axes.errorbar(at, middle, yerr=[low, high], capsize=3, **style)


def _draw_times(times: Any, rows: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> None:
    """Seconds after a kill, by size; beside them, those of a restart from a checkpoint."""
    free = [row for row in rows if row["mode"] == "training" and not row["limit_mb_per_s"]]
    idle = [row for row in rows if row["mode"] == "idle"]
    for name, (color, label) in PHASES.items():
        some = [row for row in free if row[f"{name}_median"] is not None]
        if some:
            _spread(times, [r["gigabytes"] for r in some], some, name, marker="o", color=color, label=label)
    if idle:
        _spread(
            times,
            [row["gigabytes"] for row in idle],
            idle,
            "rebuilt_s",
            marker="s",
            linestyle="--",
            color="#b45309",
            label="rebuilt, trainers idle",
        )
    if loaded:
        at = [c["gigabytes"] for c in loaded]
        style = {"marker": "x", "linestyle": ":"}
        times.plot(at, [c["until_training_s"] for c in loaded], color="#dc2626", label="TorchRec: start, load", **style)
        label = "TorchRec: start, load, redo (computed)"
        times.plot(at, [c["until_caught_up_s"] for c in loaded], color="#7f1d1d", label=label, **style)
    times.set(title="Time after SIGKILL, rebuild not limited", xlabel="records in the cluster (GB)", ylabel="seconds")
    times.set_yscale("log")
    times.set_xlim(left=0.0)
    times.grid(True, which="major", color="#e4e7eb")
    if free or idle or loaded:
        times.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _draw_rates(rates: Any, training: Sequence[Mapping[str, Any]]) -> None:
    """Samples per second before, during and after, by case."""
    width = 0.26
    for i, (phase, color) in enumerate((("before", "#9aa5b1"), ("during", "#f59e0b"), ("after", "#86c7a3"))):
        name = f"{phase}_samples_per_s"
        pairs = [(n, row) for n, row in enumerate(training) if row[f"{name}_median"] is not None]
        some, at = [row for _, row in pairs], [n + (i - 1) * width for n, _ in pairs]
        label = "kill to rebuilt" if phase == "during" else phase
        rates.bar(at, [row[f"{name}_median"] for row in some], width, color=color, label=label)
        _spread(rates, at, some, name, fmt="none", ecolor="#1f2933")
    rates.set_xticks(range(len(training)), [row["case"].replace(", ", "\n") for row in training], fontsize=8)
    rates.set(title="Throughput by limit of the rebuild rate", ylabel="samples/s, all trainers")
    rates.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
