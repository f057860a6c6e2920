"""Runs experiments: `torch-ecrec experiments run NAME`, and `resume`.

All is checked before anything starts. A cell that fails, for whatever reason, is told, with the end of its log, and the
others go on; the exit code is 1 then. Ctrl-C ends all processes; `resume` runs the cells that lack. One process at a
time runs the cells of a folder.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record
from torch_ecrec.bench.experiment import Stopped
from torch_ecrec.demo import criteo
from torch_ecrec.experiments import limits, report
from torch_ecrec.experiments.catalogue import Spec, chosen
from torch_ecrec.experiments.cells import Group, groups
from torch_ecrec.experiments.results import Results, alone, settings_here
from torch_ecrec.experiments.scale import Scale, require_memory
from torch_ecrec.runtime.checks import require
from torch_ecrec.testing import hosts

CORES_LEAST = 2


def begin(name: str, factor: int, data: Path | None, out: Path) -> int:
    """Runs one experiment, "all", or "smoke"; returns the exit code.

    Raises:
        ValueError: there is no such experiment, the data is in another format, a setting is not for this, memory or
            cores are too few, or `out` has another run, or another process runs its cells. Nothing was started.
    """
    specs, scale = chosen(name), Scale(factor)
    settings_here()
    if data is not None:
        criteo.read(data, rows_per_table=1)
    require_machine(specs, scale)
    with alone(out):
        return _go_on(Results.begin(out, name, factor, None if data is None else str(data), specs))


def resume(out: Path) -> int:
    """Runs the cells of a folder that have not run, or failed; returns the exit code.

    Raises:
        ValueError: there are no results, they are of another commit, other rows or other settings, another process
            runs them, or memory or cores are too few.
    """
    results = Results.open(out)
    if (data := results.run.data) is not None:
        require(Path(data).exists(), f"{data}, which {out} was begun with, is not there: resume where it was begun")
    results.require_same()
    require_machine(results.run.specs, results.scale)
    with alone(out):
        return _go_on(results)


def require_machine(specs: Sequence[Spec], scale: Scale) -> None:
    """Raises ValueError if this machine has too little memory or too few cores for some cells."""
    cores = len(os.sched_getaffinity(0))
    require(cores >= CORES_LEAST, f"experiments take {CORES_LEAST} cores at least, and here is {cores}")
    needs = [(group.cells[0].model, group.modes, group.cells[0].workers) for group in groups(specs) if group.modes]
    if needs:
        require_memory(scale, needs)
    if len(specs) == 1:  # else its cells are told to have failed, and the others run
        reasons = {mode.limit: limits.unavailable(mode.limit) for _, modes, _ in needs for mode in modes if mode.limit}
        reasons["hosts"] = hosts.unavailable() if specs[0].hosts or specs[0].kills == "host" else ""
        for reason in filter(None, reasons.values()):
            raise ValueError(f"{specs[0].name}: {reason}")


def _go_on(results: Results) -> int:
    lacking = [group for group in results.groups if results.missing(group)]
    print(
        f"{results.run.name}: {results.scale}; {len(lacking)} of {len(results.groups)} groups of cells to run",
        flush=True,
    )
    failed, begin_s, expected_s = 0, time.monotonic(), 0.0
    for number, group in enumerate(lacking):
        left_s = sum(one.seconds(results.scale) for one in lacking[number:])
        if number and expected_s:  # as this machine has turned out to be
            left_s *= (time.monotonic() - begin_s) / expected_s
        print(f"[{number + 1}/{len(lacking)}, about {_minutes(left_s)} to go] {group.name}", flush=True)
        expected_s += group.seconds(results.scale)
        failed += not _run(results, group)
    print(report.summary(results), flush=True)
    report.draw(results)
    if failed:
        again = f"`torch-ecrec experiments resume --out {results.folder}` runs them again"
        print(f"torch-ecrec: {failed} groups of cells failed; {again}", file=sys.stderr)
    return 1 if failed else 0


def _run(results: Results, group: Group) -> bool:
    """Runs a group; returns whether it came to its end."""
    out = results.folder / "running"
    shutil.rmtree(out, ignore_errors=True)
    error, found = None, dict[str, dict[str, Any]]()
    try:
        data = results.run.data
        found = group.run(results.scale, None if data is None else str(Path(data).resolve()), out)
    except Stopped as failure:
        error = str(failure)
    except Exception as failure:  # whatever it is, hours of other cells are still to come
        error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}"
    finally:
        if error is not None:
            print(f"torch-ecrec: {group.name} failed: {error}", file=sys.stderr, flush=True)
            _keep_logs(out / "logs", results.folder / "logs" / group.name.replace(", ", "-"))
        shutil.rmtree(out, ignore_errors=True)
    for cell in group.cells:
        results.write(cell, found.get(cell.mode), error)
    return error is None


def _keep_logs(logs: Path, to: Path) -> None:
    """Copies the logs of a cell that failed, where there are some; what cannot be copied is told, and left."""
    shutil.rmtree(to, ignore_errors=True)
    try:
        if logs.exists():
            shutil.copytree(logs, to, ignore=shutil.ignore_patterns("*store*"))
    except OSError as error:
        print(f"torch-ecrec: not all logs could be kept in {to}: {error}", file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def listing(specs: Sequence[Spec], scale: Scale) -> str:
    """Returns a table of experiments: cells, minutes, and what they show."""
    lines = []
    for spec in specs:
        found = groups([spec])
        minutes = sum(group.seconds(scale) for group in found) / 60
        cells = sum(len(group.cells) for group in found)
        lines.append({"experiment": spec.name, "cells": cells, "minutes": round(minutes), "asks": spec.title})
    return record.table(lines) + f"\n\nminutes: about, at the default factor ({scale})"
