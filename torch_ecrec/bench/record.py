"""What every benchmark prints and writes: a header that says where and when, a table, JSON, CSV.

A benchmark called NAME leaves `NAME.json` (`{"header": ..., "rows": [...]}` and whatever else it has), `NAME.csv` (the
rows) and `NAME.png` in its folder. `docs/performance.md` is made from the JSON files (`bench report`).
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import torch_ecrec
from torch_ecrec.demo.result import versions

Row = Mapping[str, Any]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout that runs, with a + where files differ from it."""
    root = Path(torch_ecrec.__file__).resolve().parent.parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):

        def git(*arguments: str) -> str:
            return subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()

        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    return "unknown"


def header() -> dict[str, Any]:
    """Machine, versions, commit, time and command."""
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
    """A line of a table of what is wanted beside what was measured; `relation`: ">=" or "<="."""
    holds = measured is not None and (measured >= bound if relation == ">=" else measured <= bound)
    reached = "-" if measured is None else "yes" if holds else "no"
    return {"figure": what, "wanted": f"{relation} {bound:.3g}", "measured": measured, "reached": reached}


def write(out: Path, name: str, content: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes `NAME.json` and `NAME.csv` into the folder `out`.

    Args:
        out: made if it is not there.
        name: of the benchmark.
        content: what else goes into the JSON, the header included.
        rows: flat mappings with the same keys.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({**content, "rows": list(rows)}, indent=1) + "\n")
    with open(out / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:.2f}"
    return str(value)


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Rows as an aligned text table. Numbers to three digits, thousands whole."""
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
    """Rows as a Markdown table."""
    columns = list(columns or (rows[0] if rows else []))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
