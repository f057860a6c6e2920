"""Shows where the tables of a job lie: records and load of each slot, by table. Nothing is measured, all follows.

    torch-ecrec bench placement                              Criteo's 26 tables on 5 slots, with 1 and with 20 ids a bag
    torch-ecrec bench placement --slots 3 --rows 1000 500    two tables of one's own

A row of the picture for each length of bags; on the left what each slot keeps, on the right what a sample costs it
(`layout/placing.py`). Grey tables are whole on their slot, and have their names there where there is room; hatched ones
are dealt out to several slots, each in its colour. White is padding.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.bench import record
from torch_ecrec.demo.criteo import CARDINALITIES
from torch_ecrec.layout.placing import LONG_BAG, SHARDINGS
from torch_ecrec.observe.words import lies_on
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.spread import Spread, TableSpread, of_mean, spread_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 0.035  # of the tallest bar: a whole table that is less has no name in the picture


def job_of(rows: Sequence[int], bag: float, code: CodeSpec, dim: int, sharding: str) -> JobSpec:
    """Returns a job of tables `C1`, `C2`, ... with row-wise Adagrad and one feature each."""
    optimizer = OptimizerSpec("rowwise_adagrad")
    tables = [
        TableSpec(f"C{i}", count, dim, 0.0, 0.0, optimizer, sharding=sharding, pooling_factor=bag)
        for i, count in enumerate(rows, 1)
    ]
    return JobSpec(tuple(tables), code, 1)


def row_of(one: TableSpread, bag: float) -> dict[str, Any]:
    """Returns a table's row of the files."""
    return {
        "bag": bag,
        "table": one.table.name,
        "rows": one.table.rows,
        "lies_on": lies_on(one.slots),
        "pooled": one.home is not None and one.table.wanted.long,
        "record_bytes": int(one.rows_S.sum()) * one.record_bytes,
        "load": float(one.load_S.sum()),
    }


def slots_of(spread: Spread, bag: float) -> list[dict[str, Any]]:
    """Returns a row for each slot: bytes of its records and padding, its load, and both of the mean."""
    records_S, load_S = spread.records_S, spread.load_S
    records_of_mean_S, load_of_mean_S = of_mean(records_S), of_mean(load_S)
    return [
        {
            "bag": bag,
            "slot": slot,
            "whole_tables": sum(one.home == slot for one in spread.tables),
            "record_bytes": int(records_S[slot]),
            "records_of_mean": float(records_of_mean_S[slot]),
            "padding_bytes": int(spread.padding_S[slot]),
            "load": float(load_S[slot]),
            "load_of_mean": float(load_of_mean_S[slot]),
        }
        for slot in range(len(records_S))
    ]


# the picture ------------------------------------------------------------------------------------------

INK, GREY = "#1f2933", "#7b8794"
DEALT = ("#2563eb", "#0d9488", "#d97706", "#7c3aed", "#dc2626", "#0891b2", "#65a30d", "#be185d")
WHOLE = ("#cbd5e1", "#b6c2d2")  # in turns, so that neighbours differ: names tell them apart


def draw(spreads: Mapping[float, Spread], title: str) -> Figure:
    """Draws records and load of each slot as stacked bars, a row of panels for each length of bags."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    slots = len(next(iter(spreads.values())).padding_S)
    width = max(11.0, 3.0 + 1.6 * slots)
    figure = Figure(figsize=(width, 4.6 * len(spreads) + 0.6), facecolor="white", layout="constrained")
    figure.suptitle(title, fontsize=10, color=INK)
    panels = figure.subplots(len(spreads), 2, squeeze=False)
    several = [one for spread in spreads.values() for one in spread.tables if one.home is None]
    names = sorted({one.table.name: one.table.rows for one in several}.items(), key=lambda pair: -pair[1])
    colours = dict(zip((name for name, _ in names), itertools.cycle(DEALT), strict=False))
    for (bag, spread), (left, right) in zip(spreads.items(), panels, strict=True):
        records_MB = {one.table.name: one.rows_S * one.record_bytes / 1e6 for one in spread.tables}
        _stack(left, spread, records_MB, colours, spread.padding_S / 1e6)
        _stack(right, spread, {one.table.name: one.load_S for one in spread.tables}, colours, None)
        of = _of_bags(bag)
        left.set_title(f"{of}: records of each slot (of the mean)", fontsize=10, color=INK, loc="left")
        right.set_title(f"{of}: load of each slot (of the mean)", fontsize=10, color=INK, loc="left")
        left.set_ylabel("MB", color=INK)
        right.set_ylabel("numbers read for a sample", color=INK)
    handles: list[Any] = [
        Patch(facecolor=colours[name], edgecolor="white", hatch="////", label=f"{name}: {rows:,} rows")
        for name, rows in names
    ]
    handles.append(Patch(facecolor=WHOLE[0], edgecolor="white", label="whole on one slot"))
    if any(_padded(spread).any() for spread in spreads.values()):
        handles.append(Patch(facecolor="white", edgecolor=GREY, linestyle=":", label="padding"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)), fontsize=9, frameon=False)
    return figure


def _padded(spread: Spread) -> NDArray[np.bool_]:
    """Returns which slots have padding that can be seen, (S,)."""
    padded_S: NDArray[np.bool_] = spread.padding_S > 0.005 * (spread.records_S + spread.padding_S).max()
    return padded_S


def _stack(
    axes: Any,
    spread: Spread,
    values: Mapping[str, NDArray[np.float64]],
    colours: Mapping[str, str],
    padding_S: NDArray[np.float64] | None,
) -> None:
    """Draws a bar for each slot: tables that are dealt out, the largest first, then whole ones, then padding."""
    total_S = sum(values.values(), np.zeros(len(spread.padding_S)))
    padding_S = 0 * total_S if padding_S is None else padding_S
    top = float((total_S + padding_S).max())
    ordered = sorted(
        spread.tables, key=lambda one: (one.home is not None, -values[one.table.name].max(), -one.table.rows)
    )
    height_S, drawn_S = np.zeros_like(total_S), np.zeros(len(total_S), int)
    for one in ordered:
        name, value_S = one.table.name, values[one.table.name]
        for slot in np.flatnonzero(value_S).tolist():
            whole = one.home is not None
            fill = WHOLE[drawn_S[slot] % len(WHOLE)] if whole else colours[name]
            style = {} if whole else {"hatch": "////"}
            value = float(value_S[slot])
            axes.bar(slot, value, 0.78, bottom=height_S[slot], color=fill, edgecolor="white", linewidth=0.5, **style)
            if whole and value >= NAMED * top:
                middle = float(height_S[slot]) + value / 2
                axes.text(slot, middle, name, ha="center", va="center", fontsize=8, color=INK)
            height_S[slot] += value
            drawn_S[slot] += whole
    for slot in np.flatnonzero(_padded(spread) & (padding_S > 0)).tolist():
        below, value = float(height_S[slot]), float(padding_S[slot])
        axes.bar(slot, value, 0.78, bottom=below, color="white", edgecolor=GREY, linewidth=0.8, linestyle=":")
    for slot, (total, all_) in enumerate(zip(total_S, total_S + padding_S, strict=True)):
        of_mean = f"{total / total_S.mean():.2f}"
        over = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # the line of the mean may be there
        axes.text(slot, all_ + 0.015 * top, of_mean, ha="center", va="bottom", fontsize=9, color=INK, bbox=over)
    axes.axhline(total_S.mean(), color=GREY, linewidth=1, linestyle="--", zorder=0)
    axes.set_ylim(0, 1.08 * top)
    axes.set_xticks(range(len(total_S)), [f"slot {slot}" for slot in range(len(total_S))])
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)


# the command ------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Prints where the tables lie, and what each slot has; writes OUT/placement.json, .csv and .png."""
    record.require_counts(arguments, "dim")
    for count in arguments.rows:
        require(count > 0, f"`rows` must be positive, got {count}")
    code = CodeSpec(arguments.slots, arguments.k, arguments.r)
    spreads = {
        bag: spread_of(job_of(arguments.rows, bag, code, arguments.dim, arguments.sharding)) for bag in arguments.bags
    }
    rows = [row_of(one, bag) for bag, spread in spreads.items() for one in spread.tables]
    slots = [row for bag, spread in spreads.items() for row in slots_of(spread, bag)]
    shown = []
    for bag in spreads:
        pools = "long: pooled where a table is whole" if bag >= LONG_BAG else "short: as rows"
        of_tables = [_without_bag(row) for row in rows if row["bag"] == bag]
        of_slots = [_without_bag(row) for row in slots if row["bag"] == bag]
        shown.append(f"{_of_bags(bag)} ({pools})\n{record.table(of_tables)}\n\n{record.table(of_slots)}")
    content = {"header": record.header(), "slots": slots, "code": {"slots": code.slots, "k": code.k, "r": code.r}}
    whose = "Criteo's 26 tables" if arguments.rows == CARDINALITIES else f"{len(arguments.rows)} tables"
    title = f"{whose}, dim {arguments.dim}, on {code.slots} slots"
    name = record.labelled("placement", arguments)
    return record.finish(
        arguments.out, name, content, rows, shown="\n\n".join(shown), draw=lambda: draw(spreads, title)
    )


def _of_bags(bag: float) -> str:
    return f"{bag:g} id{'s' * (bag != 1)} in a bag"


def _without_bag(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "bag"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench placement`."""
    code = CodeSpec()
    parser.add_argument(
        "--rows", nargs="+", type=int, default=CARDINALITIES, metavar="N", help="of each table (default: Criteo's 26)"
    )
    parser.add_argument("--bags", nargs="+", type=float, default=[1.0, 20.0], metavar="N", help="ids in a bag (1 20)")
    parser.add_argument("--dim", type=int, default=16, help="weights of a row (default 16)")
    parser.add_argument("--sharding", choices=SHARDINGS, default="auto", help="of all tables (default auto)")
    parser.add_argument("--slots", type=int, default=5, help="(default 5)")
    parser.add_argument("-k", type=int, default=code.k, help=f"data records in a stripe (default {code.k})")
    parser.add_argument("-r", type=int, default=code.r, help=f"parity records in a stripe (default {code.r})")
    record.add_files(parser, "build/bench")
