"""Writes what the cells of a run have shown, beside what is published: a summary to print, and `docs/evidence.md`.

Everything comes from the JSON of the cells; what has not run is said to have not run.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record
from torch_ecrec.experiments import figures, scale
from torch_ecrec.experiments.catalogue import Claim, Spec, all_specs
from torch_ecrec.experiments.cells import groups
from torch_ecrec.experiments.results import Results, named
from torch_ecrec.runtime.files import write_whole

JSON = "evidence"  # beside the page
STORES = ", ".join(f"{name} {rate / 1e6:g} MB/s" for name, rate in scale.BANDWIDTHS.items())


def rows(results: Results, spec: Spec) -> list[dict[str, Any]]:
    """Returns a row for each cell of an experiment, those that have not run included."""
    lines: list[dict[str, Any]] = []
    if spec.kind == "accuracy":
        lines = [{**row, "state": "run"} for row in figures.accuracy(figures.found_of(results, spec))]
    for cell in (cell for group in groups([spec]) for cell in group.cells):
        read = results.read(cell)
        line: dict[str, Any] = {"model": cell.model, "mode": cell.mode, "workers": cell.workers, "seed": cell.seed}
        one = None if read is None else read["figures"]
        if one is None:
            line["state"] = "not run" if read is None else "failed: " + str(read["error"]).partition("\n")[0]
        elif spec.kind == "accuracy":
            continue  # a line for all seeds is there
        elif spec.kind == "emulated":
            names = {"overhead": "overhead %", "saves": "saves %", "down": "down %", "again": "again %"}
            line |= {title: 100 * one[name] for name, title in names.items()} | {"state": "run"}
        elif spec.kind == "kill":
            line |= {
                "recovered s": one["recovered_s"],
                "first step s": one["first_step_s"],
                "new samples meanwhile / before": one["share"],
                "samples/s before": one["before_samples_per_s"],
                "after": one["after_samples_per_s"],
                "state": "run",
            }
            if spec.repeats > 1 and "lost_steps" in one:
                line |= {"kills": len(one["kills"])}
                line |= {"lost steps": one["lost_steps"], "wrong stripes": one["wrong_stripes"]}
        else:
            line["samples/s"] = one["samples_per_s"]["median"]
            line["least"], line["most"] = one["samples_per_s"]["min"], one["samples_per_s"]["max"]
            if "save_s" in one:
                line["save s"], line["MB"] = one["save_s"]["median"], one["bytes"]["median"] / 1e6
                line |= {f"overhead %, {name}": 100 * spread["median"] for name, spread in one["overhead"].items()}
            elif "overhead" in one:
                line |= {f"overhead %, {name}": 100 * one["overhead"]["median"] for name in scale.BANDWIDTHS}
            line["state"] = "run"
        lines.append(line)
    return lines


def columns(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the columns that some row has; the state comes last, and only if a cell has not run."""
    found = list(dict.fromkeys(name for line in lines for name in line if name != "state"))
    for name in ("workers", "seed", "failures"):
        if name in found and len({line.get(name) for line in lines}) == 1:
            found.remove(name)
    return found if all(line.get("state", "run") == "run" for line in lines) else [*found, "state"]


def judged(results: Results, spec: Spec, claim: Claim) -> list[dict[str, Any]]:
    """Returns a row for each case of a claim: what is published, wanted and measured, and whether it holds.

    A claim of which no cell has run gives one row that says so.
    """
    lines = []
    for found in figures.FIGURES[claim.figure](figures.found_of(results, spec)):
        value = found["value"]

        def holds(bound: float | None, value: float = value) -> str:
            if bound is None:
                return "-"
            return "yes" if (value <= bound if claim.at_most else value >= bound) else "no"

        lines.append(
            {
                "case": found["case"],
                "published": claim.published,
                "wanted": claim.wanted,
                "measured": value,
                "as published": holds(claim.published),
                "as wanted": holds(claim.wanted),
            }
        )
    return lines or [{"case": "not run", "published": claim.published, "wanted": claim.wanted, "measured": None}]


def summary(results: Results) -> str:
    """Returns tables of all cells and claims, to print."""
    blocks = []
    for spec in results.run.specs:
        lines = rows(results, spec)
        blocks.append(f"\n{spec.name}: {spec.title}\n{record.table(lines, columns(lines))}")
        for claim in spec.claims:
            blocks.append(f"{claim.source}: {claim.says}\n{record.table(judged(results, spec, claim))}")
    return "\n".join(blocks)


def picture(spec: Spec) -> str:
    """Returns the name of an experiment's picture."""
    return f"experiments-{spec.name}.png"


def draw(results: Results, folder: Path | None = None) -> list[Path]:
    """Draws all experiments that have a cell; returns the files. Without matplotlib it says so, and draws nothing."""
    drawn = []
    try:
        for spec in results.run.specs:
            made = figures.draw(results, spec)
            if made is not None:
                path = (folder or results.folder) / picture(spec)
                made.savefig(content := io.BytesIO(), dpi=110)
                write_whole(path, content.getvalue())
                drawn.append(path)
    except ImportError as missing:
        print(f"no pictures: {missing} (pip install matplotlib)", file=sys.stderr)
    if drawn:
        print("drawn: " + ", ".join(map(str, drawn)))
    return drawn


def _section(runs: Sequence[Results], spec: Spec) -> list[str]:
    """Returns the lines of one experiment. `runs`: those that have it."""
    text = ["", f"## {spec.name}: {spec.title}", "", f"{spec.shows}."]
    text += ["", f"The artefact's setting: {spec.theirs}."] if spec.theirs else []
    if not runs:
        return [*text, "", "**Not run.**"]
    results, *others = runs
    header = results.run.header
    data = "real Criteo rows" if results.run.data else "made-up rows, skewed by Zipf's law"
    text += ["", f"    {header['command']}", ""]
    where = f"{header['processor']}, {header['cores']} cores, {header['memory_gib']} GiB"
    if results.run.settings:
        where += f"; {named(results.run.settings)}"
    text += [f"*{results.scale}; {data}; {where}; commit {header['commit']}, {header['date'][:10]}*", ""]
    lines = rows(results, spec)
    if any(line["state"] == "run" for line in lines):
        text += [f"![{spec.title}]({picture(spec)})", ""]
    text += [record.markdown(lines, columns(lines))]
    for claim in spec.claims:
        bound = "at most" if claim.at_most else "at least"
        text += ["", f"**{claim.source}**: {claim.says}. Wanted here: {bound} {claim.wanted:g}.", ""]
        text += [record.markdown(judged(results, spec, claim))]
    return [*text, *(line for other in others for line in _again(results, other, spec))]


def _again(results: Results, other: Results, spec: Spec) -> list[str]:
    """Returns the lines on another run of the same cells."""
    header, lines = other.run.header, figures.run_again(results, other, spec)
    text = ["", f"**Run again** (commit {header['commit']}, {header['date'][:10]}): "]
    if not lines:
        return [text[0], text[1] + "no cell with the same settings, factor and kind of rows has run in both."]
    known = [line["within"] for line in lines if line["within"] != "-"]
    text[1] += f"{known.count('yes')} of {len(known)} cells differ by no more than the spread that they state."
    return [*text, "", record.markdown(lines, columns(lines))]


def page(runs: Sequence[Results]) -> str:
    """Returns `docs/evidence.md`: every experiment that there is, with what the first of the runs that has it found.

    What other runs have of it stands beside that (`figures.run_again`).
    """
    text = [
        "# Evidence",
        "",
        "The experiments of ECRec's paper, run here by one command, beside what is published. What modes and figures",
        "are, and how they are measured, is in [experiments.md](experiments.md). This page is made from results:",
        "",
        *(f"    torch-ecrec experiments report --out docs/{JSON}/{name}" for name in _folders(runs)[:1]),
        "",
        "with one `--out` for each run that it shows; two runs of one experiment are compared, cell by cell. All",
        "processes share one machine: ratios hold, times do not.",
        "",
        "The body of the paper is not public: what is measured is held against its abstract's claims only.",
        f"Checkpoints are counted for three stores: {STORES}. Into a faster store they cost less.",
        "`-beside`: written beside training, as our own [checkpoints](checkpoints.md) are; into a store that takes",
        "longer for one than lies between two, none. A claim on overhead is held against the best of these.",
    ]
    known = {spec.name: spec for results in reversed(runs) for spec in results.run.specs}
    for name, spec in {**all_specs(), **known}.items():
        text += _section([results for results in runs if any(one.name == name for one in results.run.specs)], spec)
    return "\n".join(text) + "\n"


def _folders(runs: Sequence[Results]) -> list[str]:
    """Returns the names of the folders of some runs: their own, and of those of one name, but the first, a number."""
    names = [results.run.name.replace(" ", "-") for results in runs]
    return [f"{name}-{before + 1}" if (before := names[:i].count(name)) else name for i, name in enumerate(names)]


def write(runs: Sequence[Results], to: Path) -> None:
    """Writes the page, with its pictures beside it, and the JSON that it is made of in the folder `JSON` there."""
    text = page(runs)  # before anything is written: a cell may turn out to be unreadable
    to.parent.mkdir(parents=True, exist_ok=True)
    write_whole(to, text.encode())
    for results in reversed(runs):  # so that the first one's pictures stay
        draw(results, to.parent)
    with tempfile.TemporaryDirectory(dir=to.parent) as aside:  # a run may lie where another one's place is
        names = _folders(runs)
        for name, results in zip(names, runs, strict=True):
            _copy(results, Path(aside) / name)
        for name in names:
            kept = to.parent / JSON / name
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(exist_ok=True)
            shutil.move(Path(aside) / name, kept)
    print(f"written: {to}")


def _copy(results: Results, to: Path) -> None:
    """Copies the JSON of a run, which may have no cell yet, or be writing one."""
    to.mkdir()
    shutil.copy(results.folder / "run.json", to)
    if (results.folder / "cells").exists():
        shutil.copytree(results.folder / "cells", to / "cells", ignore=shutil.ignore_patterns("*.part"))
