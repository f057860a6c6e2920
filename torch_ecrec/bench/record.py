"""The output of every benchmark: a header that says where and when it ran, a table, JSON, CSV.

A benchmark called NAME leaves `NAME.json` (`{"header": ..., "rows": [...]}` and whatever else it has), `NAME.csv` (the
rows) and `NAME.png` in its folder. `docs/performance.md` is made from the JSON files (`bench report`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import torch_ecrec
from torch_ecrec.demo.result import versions
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.files import write_whole, written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
LABEL_MOST = 100


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Returns the commit of the checkout that runs, with a + if files differ from it."""
    root = Path(torch_ecrec.__file__).resolve().parent.parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):

        def git(*arguments: str) -> str:
            return subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()

        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    return "unknown"


def header() -> dict[str, Any]:
    """Returns the machine, versions, commit, time and command."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "versions": versions(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["torch-ecrec", *sys.argv[1:]]),
    }


def spread(values: Iterable[float]) -> dict[str, float]:
    """Returns the median, the least and the most."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def aim(what: str, relation: str, bound: float, measured: float | None) -> dict[str, Any]:
    """Returns a row of a table of targets beside what was measured. `relation`: ">=" or "<="."""
    holds = measured is not None and (measured >= bound if relation == ">=" else measured <= bound)
    reached = "-" if measured is None else "yes" if holds else "no"
    return {"figure": what, "wanted": f"{relation} {bound:.3g}", "measured": measured, "reached": reached}


def write(out: Path, name: str, content: Mapping[str, Any], rows: Sequence[Row], copy: Path | None = None) -> None:
    """Writes `NAME.json` and `NAME.csv` into the folder `out`.

    Args:
        out: made if it is not there.
        name: of the benchmark.
        content: what else goes into the JSON, the header included.
        rows: flat mappings with the same keys.
        copy: another place for the JSON.
    """
    text = json.dumps({**content, "rows": list(rows)}, indent=1) + "\n"
    for path in (out / f"{name}.json", *([copy] if copy is not None else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    with written_whole(out / f"{name}.csv") as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def finish(
    out: Path,
    name: str,
    content: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    shown: str,
    draw: Callable[[], Figure] | None = None,
    error: str | None = None,
    copy: Path | None = None,
) -> int:
    """Writes a benchmark's files, and prints its results.

    Args:
        out, name, content, rows, copy: as for `write`.
        shown: tables and notes.
        draw: makes the picture, `NAME.png`; None: there is nothing to draw.
        error: why it did not come to its end, for standard error; None: it did.

    Returns:
        The exit code: 0, or 1 where there is an error.
    """
    write(out, name, content, rows, copy)
    print(shown)
    try:
        if draw is not None:
            with written_whole(out / f"{name}.png") as part:
                draw().savefig(part, format="png", dpi=130)
    except ImportError as missing:
        print(f"no picture: {missing} (pip install matplotlib)", file=sys.stderr)
    print(f"written: {out / name}.json, .csv" + (", .png" if draw is not None else ""))
    if error is not None:
        print(f"torch-ecrec: {error}\nlogs: {out / 'logs'}", file=sys.stderr)
    return 0 if error is None else 1


def add_files(parser: argparse.ArgumentParser, out: str, copies: bool = False) -> None:
    """Adds the arguments on a benchmark's files. `out`: the default folder; `copies`: it may copy the JSON."""
    parser.add_argument("--label", help="added to the names of the files: another shape, machine or selection")
    if copies:
        parser.add_argument("--json", type=Path, metavar="FILE", help="another copy of the JSON")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help=f"of the files (default {out})")


def labelled(name: str, arguments: argparse.Namespace) -> str:
    """Returns the name of the files: the benchmark's, and the label, if there is one.

    Raises ValueError if no file can have it: they are written when all is measured.
    """
    label = arguments.label or ""
    require(
        not set(label) & {"/", "\0"} and len(label) <= LABEL_MOST,
        f"`--label` is a part of the files' names, without /, of {LABEL_MOST} characters at most; got {label!r}",
    )
    return "-".join(filter(None, (name, arguments.label)))


def require_counts(arguments: argparse.Namespace, *names: str, least: int = 1) -> None:
    """Raises ValueError or TypeError unless each of these arguments is an integer of at least `least`."""
    for name in names:
        require_int(name.replace("_", "-"), getattr(arguments, name), least)


def require_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises ValueError unless each of these arguments is positive, and finite."""
    for name in names:
        require(0 < getattr(arguments, name) < math.inf, f"`{name}` must be positive, got {getattr(arguments, name)}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Returns rows as an aligned text table. Numbers have three digits; thousands are whole."""
    columns = list(columns or (rows[0] if rows else []))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Returns rows as a Markdown table."""
    columns = list(columns or (rows[0] if rows else []))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
