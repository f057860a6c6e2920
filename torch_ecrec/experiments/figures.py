"""The figures of the experiments: numbers that claims are held against, and pictures.

Every picture has the factor on it. A cell that has not run, or failed, is left out, and named in the report.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_ecrec.experiments import modes, scale
from torch_ecrec.experiments.catalogue import Spec
from torch_ecrec.experiments.cells import STORE, Cell, groups
from torch_ecrec.experiments.emulation import EXACT
from torch_ecrec.experiments.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "XDL": "#8a8a8a",
    "Ckpt-30": "#dc2626",
    "Ckpt-60": "#f59e0b",
    "Ckpt-30-beside": "#7f1d1d",
    "ECRM-k2": "#2563eb",
    "ECRM-k4": "#059669",
    "ECRM-k4-minusNNRep": "#7c3aed",
    "ECRM-k4-minus2PC": "#db2777",
    "ECRM-k4-minusNNRep-minus2PC": "#0891b2",
    "ECRM-k4-ranges1": "#78350f",
    "ECRM-k4-ranges10": "#d97706",
    "ECRM-k4-unlimited": "#be185d",
    "ECRM-k4-lessNetwork": "#b45309",
    "ECRM-k4-lessCPU": "#9333ea",
}
RIVALS = ("Ckpt-30", "Ckpt-30-beside")  # that the overhead of parity is held against
PARTIAL = ("mfu", "ssu")  # those that CPR's abstract has figures of
TITLE_WIDTH, COLUMNS = 80, 4  # characters of a title, and columns of the legend, for each panel
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (4, 2, 1, 2), (1, 2), (8, 2))  # of the models, in their order
LOG_FROM = 5.0  # times the least: an axis of times is logarithmic
HOURS = 2.0  # of the paper's time, in the picture of progress

Found = Mapping[Cell, Mapping[str, Any]]


def found_of(results: Results, spec: Spec) -> dict[Cell, dict[str, Any]]:
    """Returns the figures of those cells of an experiment that have run to their end."""
    cells = [cell for group in groups([spec]) for cell in group.cells]
    return {cell: figures for cell in cells if (figures := results.figures(cell)) is not None}


# numbers ----------------------------------------------------------------------------------------------


def overhead(figures: Mapping[str, Any], store: str = STORE) -> float | None:
    """Returns the median overhead of an undisturbed cell; of checkpoints, into this store. None: it has none.

    A checkpoint that this store takes too long for has none, either.
    """
    spread = figures.get("overhead")
    if spread is not None and "median" not in spread:
        spread = spread.get(store)
    return None if spread is None else float(spread["median"])


def _by_mode(found: Found, model: str) -> dict[str, list[Mapping[str, Any]]]:
    by: dict[str, list[Mapping[str, Any]]] = {}
    for cell, figures in found.items():
        if cell.model == model:
            by.setdefault(cell.mode, []).append(figures)
    return by


def _ours(by: Mapping[str, list[Mapping[str, Any]]]) -> list[Mapping[str, Any]] | None:
    """Returns the cells of ours that are held against checkpoints: with the larger stripes, if there are some."""
    return by.get("ECRM-k4", by.get("ECRM-k2"))


def overhead_reduced(found: Found) -> list[dict[str, Any]]:
    """By how much the overhead of ECRM-k4 (or k2) is less than the best of `RIVALS`, by model and store.

    It is 0 where that rival costs nothing: nothing is left to reduce. Where ours is not known, since XDL was not there
    to compare with, nothing is said.
    """
    rows = []
    for model in scale.MODELS:
        by = _by_mode(found, model)
        ours = _ours(by)
        for store in scale.BANDWIDTHS if ours is not None else ():
            assert ours is not None
            known = _cost(ours)
            rivals = {mode: cost for mode in RIVALS if (cost := _cost(by.get(mode, ()), store)) is not None}
            if rivals and known is not None:
                least = max(known, 0.0)
                best = min(rivals, key=lambda mode: rivals[mode])
                value = 1 - least / rivals[best] if rivals[best] > 0 else 0.0
                rows.append({"case": f"{model}, {store}, {best}", "value": value})
    return rows


def _cost(some: Sequence[Mapping[str, Any]], store: str = STORE) -> float | None:
    """Returns the median overhead of the cells of a mode; None: no cell of it has one."""
    known = [cost for one in some if (cost := overhead(one, store)) is not None]
    return statistics.median(known) if known else None


def dearer_than_beside(found: Found) -> list[dict[str, Any]]:
    """How much greater the overhead of ECRM is than that of checkpoints written beside training, by model and mode."""
    rows = []
    for model in scale.MODELS:
        by = _by_mode(found, model)
        theirs = _cost(by.get("Ckpt-30-beside", ()))
        for mode, some in by.items() if theirs is not None else ():
            assert theirs is not None
            if modes.parse(mode).k and (ours := _cost(some)) is not None:
                rows.append({"case": f"{model}, {mode}", "value": ours - theirs})
    return rows


def recovery_speedup(found: Found) -> list[dict[str, Any]]:
    """How many times sooner ECRM has recovered than Ckpt-30, by model and mode."""
    rows = []
    for model in scale.MODELS:
        by = _by_mode(found, model)
        for mode, some in by.items() if "Ckpt-30" in by else ():
            if modes.parse(mode).k:
                theirs_s, ours_s = (
                    statistics.median(one["recovered_s"] for one in cells) for cells in (by["Ckpt-30"], some)
                )
                rows.append({"case": f"{model}, {mode}", "value": theirs_s / ours_s})
    return rows


def recovering_loss(found: Found) -> list[dict[str, Any]]:
    """By how much throughput is lower while ECRM recovers than before, by model and mode."""
    rows = []
    for model in scale.MODELS:
        for mode, some in _by_mode(found, model).items():
            shares = [one["share"] for one in some if one["share"] is not None]
            if modes.parse(mode).k and shares:
                rows.append({"case": f"{model}, {mode}", "value": 1 - statistics.median(shares)})
    return rows


def least_of_ablations(found: Found) -> list[dict[str, Any]]:
    """The rate of ECRM-k4 over that of what leaves something out, by model and what that is."""
    rows = []
    for model in scale.MODELS:
        rates = {
            mode: statistics.median(one["samples_per_s"]["median"] for one in some)
            for mode, some in _by_mode(found, model).items()
        }
        if "ECRM-k4" in rates:
            rows += [
                {"case": f"{model}, {mode}", "value": rates["ECRM-k4"] / rate}
                for mode, rate in rates.items()
                if mode != "ECRM-k4"
            ]
    return rows


def _lost(found: Found, without_commit: bool) -> list[dict[str, Any]]:
    return [
        {
            "case": f"{cell.model}, {cell.mode}, {len(one['kills'])} kills",
            "value": one["lost_steps"] + one["wrong_stripes"],
        }
        for cell, one in found.items()
        if "lost_steps" in one and ("minus2PC" in cell.mode) == without_commit
    ]


def lost_of_parity(found: Found) -> list[dict[str, Any]]:
    """How many acknowledged steps of slots kills have taken, and how many stripes they left wrong."""
    return _lost(found, False)


def lost_without_commit(found: Found) -> list[dict[str, Any]]:
    """The same, without two-phase commit."""
    return _lost(found, True)


def overhead_of_partial(found: Found) -> list[dict[str, Any]]:
    """The overhead of each way of recovery, emulated."""
    return [{"case": cell.mode, "value": one["overhead"]} for cell, one in found.items() if cell.mode in PARTIAL]


def accuracy(found: Found) -> list[dict[str, Any]]:
    """Returns a row for each way of recovery and number of failures, over all seeds.

    A difference is that from the exact run of the same seed. It is told to be one where its mean is more than two
    standard errors from zero.
    """
    exact = {cell.seed: one for cell, one in found.items() if cell.mode == EXACT}
    by: dict[tuple[str, int], list[tuple[int, Mapping[str, Any]]]] = {}
    for cell, one in found.items():
        by.setdefault((cell.mode, cell.failures), []).append((cell.seed, one))
    rows = []
    for (mode, failures), some in by.items():
        row: dict[str, Any] = {"mode": mode, "failures": "any" if mode == EXACT else failures, "seeds": len(some)}
        row["AUC"], row["log loss"] = (
            f"{statistics.fmean(one[name] for _, one in some):.4f}" for name in ("auc", "log_loss")
        )
        row["lost updates %"] = 100 * statistics.fmean(one["lost"] for _, one in some)
        differences = [one["auc"] - exact[seed]["auc"] for seed, one in some if seed in exact]
        if mode != EXACT and len(differences) > 1:
            mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
            row |= {"AUC - exact": mean, "standard error": error, "differs": "yes" if abs(mean) > 2 * error else "no"}
        rows.append(row)
    return rows


def run_again(first: Results, second: Results, spec: Spec) -> list[dict[str, Any]]:
    """Returns a row for each cell that has come to its end in both runs: do they differ by no more than they state?

    What a cell states is a median, and how far the figures of its turns or kills are spread: the most less the least.
    Of two runs the greater spread counts. An emulation has none, and is to give the same again. Nor has a single kill:
    of that, nothing is said.

    Args:
        first, second: two runs of the experiment.
        spec: of the experiment. Where the second run has other settings, rows, or another factor, it has no cell of it.
    """
    theirs = next((one for one in second.run.specs if one.name == spec.name), None)
    if theirs is None or _setting(first, spec) != _setting(second, theirs):
        return []
    found, others = found_of(first, spec), found_of(second, theirs)
    rows = []
    for cell in (cell for cell in found if cell in others):
        name, value, spread = _stated(spec, found[cell])
        _, other, theirs_spread = _stated(spec, others[cell])
        known = [one for one in (spread, theirs_spread) if one is not None]
        row: dict[str, Any] = {"model": cell.model, "mode": cell.mode, "workers": cell.workers, "seed": cell.seed}
        row |= {"failures": cell.failures, "figure": name, "first": value, "again": other}
        row |= {"differ by": abs(value - other), "spread": max(known, default=None)}
        rows.append({**row, "within": ("yes" if abs(value - other) <= max(known) else "no") if known else "-"})
    return rows


def _setting(results: Results, spec: Spec) -> tuple[object, ...]:
    """What two runs of a cell must have alike, besides the cell itself."""
    of_spec = (spec.kind, spec.options, spec.repeats, spec.seconds, spec.kills, spec.hosts, spec.link_mbit)
    return (results.run.factor, results.run.data is None, results.run.settings, *of_spec)


def _stated(spec: Spec, one: Mapping[str, Any]) -> tuple[str, float, float | None]:
    """Returns the name of a cell's figure, the figure, and how far it is spread; None: it does not say."""
    if spec.kind == "accuracy":
        return "AUC", one["auc"], 0.0
    if spec.kind == "emulated":
        return "overhead %", 100 * one["overhead"], 0.0
    if spec.kind == "kill":
        times_s = [kill["recovered_s"] for kill in one.get("kills", ())]
        return "recovered s", one["recovered_s"], max(times_s) - min(times_s) if len(times_s) > 1 else None
    rates = one["samples_per_s"]
    return "samples/s", rates["median"], rates["max"] - rates["min"]


FIGURES: Mapping[str, Callable[[Found], list[dict[str, Any]]]] = {
    "overhead_reduced": overhead_reduced,
    "dearer_than_beside": dearer_than_beside,
    "recovery_speedup": recovery_speedup,
    "recovering_loss": recovering_loss,
    "least_of_ablations": least_of_ablations,
    "overhead_of_partial": overhead_of_partial,
    "lost_of_parity": lost_of_parity,
    "lost_without_commit": lost_without_commit,
}


# pictures ---------------------------------------------------------------------------------------------


def colour(mode: str) -> str:
    """Returns the colour of a mode, the same in all pictures."""
    return COLOURS.get(mode, "#333333")


def _bars(axes: Axes, models: Sequence[str], series: Mapping[str, Sequence[float | None]], label: str) -> None:
    """Draws groups of bars: a group for each model, a bar for each mode."""
    width = 0.8 / max(len(series), 1)
    upright = len(series) > 4  # narrow bars: numbers beside each other would overlap
    for number, (mode, values) in enumerate(series.items()):
        at = [i - 0.4 + width * (number + 0.5) for i in range(len(models))]
        bars = axes.bar(at, [value or 0.0 for value in values], width, label=mode, color=colour(mode))
        texts = ["-" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values]
        axes.bar_label(bars, texts, fontsize=6, padding=2 if upright else 1, rotation=90 if upright else 0)
    axes.set_xticks(range(len(models)), models)
    axes.set_ylabel(label)
    axes.margins(y=0.15 if upright else 0.05)
    axes.spines[["top", "right"]].set_visible(False)


def _series(
    spec: Spec, found: Found, value: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, list[float | None]]:
    """Returns for each mode the median of a figure, by model in the order of the experiment."""
    series: dict[str, list[float | None]] = {}
    for mode in spec.modes:
        line: list[float | None] = []
        for model in spec.models:
            values = [value(one) for cell, one in found.items() if (cell.model, cell.mode) == (model, mode)]
            known = [one for one in values if one is not None]
            line.append(statistics.median(known) if known else None)
        if any(one is not None for one in line):
            series[mode] = line
    return series


def draw(results: Results, spec: Spec) -> Figure | None:
    """Draws an experiment; None: none of its cells has run to its end."""
    found = found_of(results, spec)
    if not found:
        return None
    from matplotlib.figure import Figure

    panels = _panels(spec)
    figure = Figure(figsize=(6.5 * len(panels), 4.2), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, spec, found, results)
    data = "Criteo rows" if results.run.data else "made-up rows"
    title = f"{spec.name}: {spec.title} ({results.scale}; {data})"
    figure.suptitle(textwrap.fill(title, TITLE_WIDTH * len(panels)), fontsize=10)
    columns = min(8, COLUMNS * len(panels))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=columns)
    return figure


def _first(found: Found, model: str, mode: str) -> Mapping[str, Any] | None:
    """Returns the figures of the first cell of a model and a mode; None: there is none."""
    return next((one for cell, one in found.items() if (cell.model, cell.mode) == (model, mode)), None)


Panel = Callable[["Axes", Spec, Found, Results], None]


def _panels(spec: Spec) -> list[Panel]:
    if spec.kind == "accuracy":
        return [_accuracies]
    if spec.kind == "emulated":
        return [_emulated]
    if spec.kind == "kill":
        return [_recovery_times, _shares, _progress_after if spec.repeats == 1 else _lost_steps]
    if len(spec.workers) > 1:
        return [_by_workers, _of_base]
    return [_rates, _overheads, _progress] if "XDL" in spec.modes else [_rates]


def _rates(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    _bars(axes, spec.models, _series(spec, found, lambda one: one["samples_per_s"]["median"]), "samples/s, undisturbed")


def _overheads(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    series = _series(spec, found, lambda one: None if (cost := overhead(one)) is None else 100 * cost)
    rate = scale.BANDWIDTHS[STORE] / 1e6
    _bars(axes, spec.models, series, f"training time more than XDL's, %\n(checkpoints into a store of {rate:g} MB/s)")


def _progress(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    """Samples trained over the paper's time, as rate and saves of the largest model give it."""
    model = next(name for name in reversed(spec.models) if any(cell.model == name for cell in found))
    time = results.scale.time
    for mode in spec.modes:
        one = _first(found, model, mode)
        if one is None:
            continue
        interval_s = one.get("interval_s", 0.0) * time
        base = _first(found, model, "XDL") or one
        rate = (base if interval_s else one)["samples_per_s"]["median"]
        stands_s = max(overhead(one) or 0.0, 0.0) * interval_s
        at_s, samples, points = 0.0, 0.0, [(0.0, 0.0)]
        while at_s < HOURS * 3600:
            step_s = min(interval_s or HOURS * 3600, HOURS * 3600 - at_s)
            at_s, samples = at_s + step_s, samples + rate * step_s / time
            points.append((at_s / 3600, samples / 1e6))
            if interval_s:
                at_s = min(at_s + stands_s, HOURS * 3600)
                points.append((at_s / 3600, samples / 1e6))
        axes.plot(*zip(*points, strict=True), color=colour(mode), label=mode)
    axes.set_xlabel("hours of the paper's time (computed from rates and saves)")
    axes.set_ylabel(f"10^6 samples trained, {model}")
    axes.spines[["top", "right"]].set_visible(False)


def _recovery_times(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    series = _series(spec, found, lambda one: one["recovered_s"])
    _bars(axes, spec.models, series, "seconds until recovered")
    times_s = [one for line in series.values() for one in line if one]
    if times_s and max(times_s) > LOG_FROM * min(times_s):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _shares(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    series = _series(spec, found, lambda one: None if one["share"] is None else 100 * one["share"])
    _bars(axes, spec.models, series, "new samples/s while recovering,\n% of before")


def _lost_steps(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    """Acknowledged steps that all kills together have taken."""
    series = _series(spec, found, lambda one: one.get("lost_steps"))
    _bars(axes, spec.models, series, f"acknowledged steps lost, of slots,\n{spec.repeats} kills in each mode")


def _progress_after(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    """Steps that count over time around the kill, for the first model that has run."""
    model = next(name for name in spec.models if any(cell.model == name for cell in found))
    for mode in spec.modes:
        one = _first(found, model, mode)
        if one is not None:
            at_kill = max((step for time_s, step in one["progress"] if time_s <= 0), default=0)
            points = [(time_s, step - at_kill) for time_s, step in one["progress"] if time_s >= -spec.seconds]
            axes.plot(*zip(*points, strict=True), color=colour(mode), label=mode)
    axes.axvline(0, color="#333333", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"seconds after the kill, {model}")
    axes.set_ylabel("steps that count, since the kill")
    axes.spines[["top", "right"]].set_visible(False)


def _by_workers(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    for mode in spec.modes:
        for model, dashes in zip(spec.models, DASHES, strict=False):
            _line(axes, _rates_by_workers(found, model, mode), colour(mode), dashes, f"{mode}, {model}")
    axes.set_ylabel("samples/s of all workers")
    _of_workers(axes, results)


def _of_base(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    """The same, of the first mode's: both have taken turns, so that noise has met them alike."""
    base, *others = spec.modes
    for mode in others:
        for model, dashes in zip(spec.models, DASHES, strict=False):
            of = _rates_by_workers(found, model, base)
            rates = _rates_by_workers(found, model, mode)
            _line(axes, {n: rates[n] / of[n] for n in rates if n in of}, colour(mode), dashes, f"{mode}, {model}")
    axes.axhline(1, color="#333333", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"samples/s, of those of {base}")
    _of_workers(axes, results)


def _rates_by_workers(found: Found, model: str, mode: str) -> dict[int, float]:
    here = {cell: one for cell, one in found.items() if (cell.model, cell.mode) == (model, mode)}
    return {cell.workers: one["samples_per_s"]["median"] for cell, one in sorted(here.items(), key=_workers_of)}


def _workers_of(entry: tuple[Cell, object]) -> int:
    return entry[0].workers


def _line(axes: Axes, points: Mapping[int, float], shade: str, dashes: tuple[float, ...], label: str) -> None:
    if points:
        (line,) = axes.plot(list(points), list(points.values()), marker="o", markersize=3, color=shade, label=label)
        if dashes:
            line.set_dashes(dashes)


def _of_workers(axes: Axes, results: Results) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"workers, on {results.run.header['cores']} cores")
    axes.spines[["top", "right"]].set_visible(False)


def _accuracies(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    rows = [row for row in accuracy(found) if "AUC - exact" in row]
    names = [f"{row['mode']}, {row['failures']}" for row in rows]
    errors = [2 * row["standard error"] for row in rows]
    axes.errorbar(
        names, [row["AUC - exact"] for row in rows], yerr=errors, fmt="o", capsize=3, label="2 standard errors"
    )
    axes.axhline(0, color="#333333", linewidth=0.8, linestyle=":")
    axes.set_ylabel("AUC, less that of exact recovery")
    axes.tick_params(axis="x", rotation=60, labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _emulated(axes: Axes, spec: Spec, found: Found, results: Results) -> None:
    names, below = [cell.mode for cell in found], [0.0] * len(found)
    for part, label in (("saves", "saves"), ("down", "loads and restarts"), ("again", "trained again")):
        values = [100 * one[part] for one in found.values()]
        axes.bar(names, values, bottom=below, label=label)
        below = [one + other for one, other in zip(below, values, strict=True)]
    axes.set_ylabel("% of the training time")
    axes.spines[["top", "right"]].set_visible(False)
