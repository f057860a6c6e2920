"""Makes docs/performance.md, and the tables of docs/scaling.md, from the JSON files of benchmarks.

    torch-ecrec bench report --from build/bench --out docs

It reads train-<shape>.json, recovery.json, codec.json, optimizers.json, operators.json and scaling.json from a folder,
whichever are there, writes the documents and copies those files, their CSVs and their pictures to OUT/performance, from
where it can read them again (`--from docs/performance`). Nothing is measured here, and no figure is typed by hand. What
is missing is said in the document.

performance.md is written whole; OUT/performance-notes.md, by hand, goes to its end. In scaling.md only what is between
the markers is replaced.

`TARGETS` is what the figures are held against. A ratio is one of medians; behind it, in brackets, the least, the
median and the most of the ratios within a block: a machine that slows down and recovers moves them less.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Any

from torch_ecrec.bench import codec, operators, optimizers, record
from torch_ecrec.runtime.checks import require

MADE_BY = "Made by `torch-ecrec bench report`; do not edit."
BEGIN, END = "<!-- begin generated -->", "<!-- end generated -->"
# Bounds of samples/s over the tuned TorchRec's, which a user has by one variable of malloc's, and over TorchRec's.
AGAINST_TORCHREC = {
    "embedding-heavy": (1.2, 1.4),
    "multi-hot": (1.05, 1.25),
    "paper": (1.15, 1.3),
    "criteo": (0.95, 1.0),
}
# A name after the shape's is a `--label`: what a first run leaves no memory for, or more blocks.
SHAPES = (
    "embedding-heavy",
    "embedding-heavy-codes",
    "embedding-heavy-servers",
    "embedding-heavy-transports",
    "embedding-heavy-pipeline",
    "uniform",
    "multi-hot",
    "paper",
    "paper-snapshot",
    "criteo",
    "sequence",
)
RECOVERIES = ("recovery", "recovery-uniform")  # the second with `--label uniform --zipf 0`
NAMES = (*(f"train-{shape}" for shape in SHAPES), *RECOVERIES, "codec", "optimizers", "operators", "scaling")
KINDS = ("lookup", "push", "fold", "snapshot", "other")  # of bytes sent
SHOWN_RECORD_BYTES = 260  # of which the document shows the kernels' rates: 64 weights and the optimizer's state
RECOVERY = {
    "case": "case",
    "kills": "kills",
    "detected_s_median": "detected s",
    "rehosted_s_median": "re-hosted s",
    "first_step_s_median": "first step s",
    "first_step_s_max": "worst",
    "stall_s_median": "longest pause s",
    "rebuilt_s_median": "rebuilt s",
    "lost_mb_median": "lost MB",
    "lost_mb_per_s_median": "rebuild MB/s",
}
RATES = {
    "case": "case",
    "before_samples_per_s_median": "samples/s before",
    "during_samples_per_s_median": "kill to rebuilt",
    "after_samples_per_s_median": "after",
    "during_share_median": "kill to rebuilt / before",
}

Content = Mapping[str, Any]
Contents = Mapping[str, Content]


class NotMeasured(LookupError):
    """The files do not have a figure; the message says why."""


@dataclass(frozen=True)
class Figure:
    """A measured number with its spread, and the median within blocks, if it has them."""

    value: float
    least: float | None = None
    most: float | None = None
    within: float | None = None

    @property
    def text(self) -> str:
        if self.least is None or self.most is None:
            return _number(self.value)
        within = "" if self.within is None else f", median {_number(self.within)}"
        return f"{_number(self.value)} ({_number(self.least)} to {_number(self.most)}{within})"


@dataclass(frozen=True)
class Target:
    """A figure in a file, and its bounds. `least` and `most` are None where nothing was decided."""

    name: str
    file: str
    figure: Callable[[Contents], Figure]
    least: float | None = None
    most: float | None = None

    def row(self, contents: Contents) -> dict[str, str]:
        """Returns the target's row of the table."""
        limits = {"at least": self.least, "at most": self.most}
        bounds = [f"{which} {_number(limit)}" for which, limit in limits.items() if limit is not None]
        try:
            figure = self.figure(contents)
        except NotMeasured as reason:
            measured, reached = f"not measured: {reason}", "-"
        else:
            measured = figure.text
            short = self.least is not None and figure.value < self.least
            beyond = self.most is not None and figure.value > self.most
            reached = "-" if not bounds else "no" if short or beyond else "yes"
        return {
            "figure": self.name,
            "target": " and ".join(bounds) or "none set",
            "measured": measured,
            "reached": reached,
            "processor": _processor(contents[self.file]["header"]) if self.file in contents else "-",
        }


def _processor(header: Content) -> str:
    return str(header["processor"]).replace("(R)", "").replace(" Processor", "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# figures ----------------------------------------------------------------------------------------------


def _file(contents: Contents, name: str) -> Content:
    if name not in contents:
        raise NotMeasured(f"there is no {name}.json")
    return contents[name]


def _blocks(contents: Contents, shape: str, system: str) -> Sequence[Content]:
    name = f"train-{shape}"
    blocks: Mapping[str, Sequence[Content]] = _file(contents, name)["blocks"]
    if system not in blocks:
        raise NotMeasured(f"{name}.json has no {system}")
    return blocks[system]


def ratio(figure: str, shape: str, system: str, other: str) -> Callable[[Contents], Figure]:
    """Returns a figure's reader: `figure` of one system in a training benchmark over that of another."""

    def of(contents: Contents) -> Figure:
        ours, theirs = ([b[figure] for b in _blocks(contents, shape, name)] for name in (system, other))
        turns = [a / b for a, b in zip(ours, theirs, strict=False)]
        whole = statistics.median(ours) / statistics.median(theirs)
        return Figure(whole, min(turns), max(turns), statistics.median(turns))

    return of


def snapshot_share(shape: str, system: str) -> Callable[[Contents], Figure]:
    """Returns a figure's reader: the share of its throughput that a system spends on dense snapshots."""

    def of(contents: Contents) -> Figure:
        kept = ratio("samples_per_s", shape, f"{system}+snap", system)(contents)
        assert kept.least is not None and kept.most is not None and kept.within is not None
        return Figure(1 - kept.value, 1 - kept.most, 1 - kept.least, 1 - kept.within)

    return of


def memory_of_records(shape: str, system: str) -> Callable[[Contents], Figure]:
    """Returns a figure's reader: the bytes of records, parities and logs over those of records."""

    def of(contents: Contents) -> Figure:
        held = _file(contents, f"train-{shape}")["server_bytes"].get(system)
        if not held:
            raise NotMeasured(f"train-{shape}.json has no {system}")
        return Figure(sum(held.values()) / held["record_bytes"])

    return of


def of_kills(key: str, worst: bool = False, **cases: object) -> Callable[[Contents], Figure]:
    """Returns a figure's reader: the median over kills, or the worst. `cases`: which rows count, by their values."""

    def of(contents: Contents) -> Figure:
        content = _file(contents, "recovery")
        meant = {row["case"] for row in content["rows"] if cases.items() <= row.items()}
        kills = [kill for case in content["cases"] if case["case"] in meant for kill in case["kills"]]
        values = [kill[key] for kill in kills if kill[key] is not None]
        if not values:
            raise NotMeasured("recovery.json has no such kill")
        spread = record.spread(values)
        return Figure(spread["max"]) if worst else Figure(spread["median"], spread["min"], spread["max"])

    return of


def of_memcpy(what: str, k: int, r: int) -> Callable[[Contents], Figure]:
    """Returns a figure's reader: a kernel's speed from memory over that of memcpy of the same bytes."""

    def of(contents: Contents) -> Figure:
        for row in _file(contents, "codec")["rows"]:
            case = (row["what"], row["k"], row["r"], row["place"], row["record_bytes"])
            if case == (what, k, r, "memory", SHOWN_RECORD_BYTES) and row["of_memcpy"] is not None:
                return Figure(row["of_memcpy"])
        raise NotMeasured(f"codec.json has no {what} of ({k}, {r}), {SHOWN_RECORD_BYTES} bytes, in memory")

    return of


def _targets() -> list[Target]:
    """Returns the promised bounds of each figure."""
    found = []

    def training(what: str, figure: str, shape: str, system: str, other: str, **bounds: float) -> None:
        name = f"{what}, {system} / {other}, {shape}"
        found.append(Target(name, f"train-{shape}", ratio(figure, shape, system, other), **bounds))

    def kills(name: str, key: str, worst: bool = False, **more: Any) -> None:
        bounds = {bound: more.pop(bound) for bound in ("least", "most") if bound in more}
        found.append(Target(name, "recovery", of_kills(key, worst, **more), **bounds))

    rate, cpu = "samples_per_s", "cpu_s_per_step"
    for shape, (tuned, stock) in AGAINST_TORCHREC.items():
        training("samples/s", rate, shape, "k2r1", "torchrec:tuned", least=tuned)
        training("samples/s", rate, shape, "k2r1", "torchrec", least=stock)
        training("CPU per step", cpu, shape, "k2r1", "torchrec:tuned")
    for shape, least in (("embedding-heavy", 0.98), ("multi-hot", 0.95)):
        training("samples/s", rate, shape, "k2r1", "none", least=least)
    training("samples/s", rate, "embedding-heavy-codes", "k4r2", "k2r1", least=0.88)
    training("samples/s", rate, "embedding-heavy-servers", "k4r2", "k2r1@6", least=0.85)
    name, share = "share of samples/s for the dense snapshot, k2r1, paper", snapshot_share("paper-snapshot", "k2r1")
    found.append(Target(name, "train-paper-snapshot", share, most=0.03))

    kills("first step after a kill, s, median", "first_step_s", mode="training", most=0.5)
    kills("first step after a kill, s, worst", "first_step_s", worst=True, mode="training", most=1.5)
    for limit in (0, 80):  # the second is the default on two cores
        bound: dict[str, Any] = {"least": 0.93} if limit else {}
        name = f"samples/s from the kill to rebuilt / before, {f'{limit} MB/s' if limit else 'no limit'}"
        kills(name, "during_share", mode="training", limit_mb_per_s=limit, **bound)
    kills("rebuild, MB/s lost, in training, no limit", "lost_mb_per_s", mode="training", limit_mb_per_s=0)
    kills("rebuild, MB/s lost, trainers idle", "lost_mb_per_s", mode="idle", least=250)
    for what in ("fold", "encode"):
        for k, r, bound_of_memcpy in ((2, 1, 0.8), (4, 2, None)):
            name = f"{what} ({k}, {r}), GB/s / memcpy"
            found.append(Target(name, "codec", of_memcpy(what, k, r), least=bound_of_memcpy))
    codes = "embedding-heavy-codes"
    return [*found, Target("memory / records, k4r1", f"train-{codes}", memory_of_records(codes, "k4r1"), most=1.30)]


TARGETS = _targets()

# documents --------------------------------------------------------------------------------------------


def load(folder: Path) -> dict[str, Content]:
    """Reads the benchmarks' files in a folder, by name. Raises ValueError for a file that is not theirs."""
    found = {}
    for name in NAMES:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                content = loads(path.read_text(encoding="utf-8"))
            except JSONDecodeError as error:
                raise ValueError(f"{path} is not JSON: {error}") from None
            require(isinstance(content, dict) and "header" in content, f"{path} was not left by a benchmark: no header")
            found[name] = content
    return found


def columns(rows: Sequence[Content], titles: Mapping[str, str]) -> str:
    """Returns a Markdown table of some columns, with titles."""
    return record.markdown([{title: row.get(key) for key, title in titles.items()} for row in rows])


def _origin(header: Content) -> str:
    """Returns machine, versions, commit, date and command as text."""
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    return (
        f"    {header['command']}\n\n"
        f"{header['processor']}, {header['cores']} cores, {header['memory_gib']} GiB, Linux {header['kernel']};"
        f" {versions}; commit {header['commit']}; {header['date']}."
    )


def _missing(name: str, command: str) -> str:
    return f"**Not measured**: there was no {name}.json. `torch-ecrec bench {command}` makes it."


def _picture(name: str, text: str, pictures: set[str]) -> str:
    return f"![{text}](performance/{name}.png)" if name in pictures else f"There was no {name}.png."


def _shape_text(content: Content) -> str:
    shape, blocks = content["shape"], content["blocks"]
    ids = f"{shape['ids']} {'id' if shape['ids'] == 1 else 'ids'} per bag"
    if shape["data"] is None:
        ids += f", Zipf {shape['zipf']:g}" if shape["zipf"] else ", uniform"
    else:
        ids += f", rows of {Path(shape['data']).name}" if shape["data"] else ", made-up rows of Criteo's form"
    turns, steps = max(map(len, blocks.values())), content["steps_per_block"].values()
    return (
        f"{shape['tables']} tables x {shape['rows']:,} rows x {shape['dim']}, {ids}, batch {shape['batch']:,} on each"
        f" of {content['trainers']} trainers, MLPs {list(shape['bottom'])} / {list(shape['top'])}."
        f" {turns} blocks of each system, of {min(steps)} to {max(steps)} steps."
    )


def _training(shape: str, contents: Contents, pictures: set[str]) -> list[str]:
    name = f"train-{shape}"
    if name not in contents:
        return [_missing(name, f"train --shape {shape}")]
    content = contents[name]
    parts = [_origin(content["header"]), _shape_text(content), record.markdown(content["rows"])]
    sent = [
        {"system": system, **{kind: size.get(kind, 0) / 1e6 for kind in KINDS}}
        for system, size in content["sent_bytes"].items()
        if size
    ]
    if sent:
        parts += ["MB of tensors sent per step, by kind, as the members count them:", record.markdown(sent)]
    return [*parts, _picture(name, f"samples per second and CPU time per step, {shape}", pictures)]


def _recovery(name: str, contents: Contents, pictures: set[str]) -> list[str]:
    if name not in contents:
        return [_missing(name, "recovery")]
    content = contents[name]
    zipf = float(content["arguments"]["zipf"])
    ids = f"Ids follow Zipf's law, exponent {zipf:g}." if zipf else "Ids are uniform: hardly any comes twice."
    parts = [_origin(content["header"]), ids]
    if content["error"] is not None:
        parts.append(f"**It did not come to its end**: {content['error'].splitlines()[0]}")
    parts += [
        "Seconds after SIGKILL, medians over the kills of a case; a case is the bytes of all records and the limit of"
        " the rebuild rate (which counts the k records that are read for each). *First step*: complete, and begun after"
        " the kill. *Lost*: data and parity records of the slot.",
        columns(content["rows"], RECOVERY),
        "Throughput, medians:",
        columns([row for row in content["rows"] if row["mode"] == "training"], RATES),
    ]
    return [
        *parts,
        _picture(name, "time of each phase of a recovery; throughput before, during and after", pictures),
    ]


def _codec(contents: Contents, pictures: set[str]) -> list[str]:
    if "codec" not in contents:
        return [_missing("codec", "codec")]
    content = contents["codec"]
    rows = content["rows"]
    widths = sorted({row["record_bytes"] for row in rows})
    width = SHOWN_RECORD_BYTES if SHOWN_RECORD_BYTES in widths else widths[0]
    titles = {
        key: title
        for key, title in codec.COLUMNS.items()
        if key != "record_bytes" and any(row.get(key) is not None for row in rows)
    }
    return [
        _origin(content["header"]),
        " ".join(content["notes"]),
        f"Records of {width} bytes; all sizes are in [codec.csv](performance/codec.csv).",
        columns([row for row in rows if row["record_bytes"] == width], titles),
        _picture("codec", "GB/s of fold, encode and decode by size of a record", pictures),
    ]


def _table_of(name: str, titles: Mapping[str, str], contents: Contents) -> list[str]:
    """Returns the section of a benchmark that is shown whole: where it ran, and its table."""
    if name not in contents:
        return [_missing(name, name)]
    content = contents[name]
    return [_origin(content["header"]), " ".join(content["notes"]), columns(content["rows"], titles)]


HOW = """\
**What is compared.** `torchrec`: TorchRec's DistributedModelParallel over gloo, table-wise, without fault tolerance;
`torchrec:tuned`: with the malloc setting that our processes give themselves; `torchrec+ckpt`: saving itself every so
many steps. `torch`, for sequences: a copy of the tables on each trainer, sparse gradients, SparseAdam. `none`: our 3
servers without protection. `k2r1`, `k4r1`, ...: our servers with that (k, r) code, one for each of the k + r members
of a stripe; `@6`: on six servers; `+snap`: with a snapshot of the dense model after every step; `:bf16`: rows and
gradients travel as bfloat16; `:tcp`: without shared memory, over TCP; `:rpc`: over torch.distributed.rpc; `:pipeline`:
trained in TorchRec's TrainPipelineSparseDist. All train the same model from the same seed on the same batches.

**How.** All systems of a shape are started, then take turns: a block of steps each, again and again, while the others
wait. Noise that comes and goes meets all of them, so ratios hold where times do not. A block ends when everything sent
in it is acknowledged. Figures are medians over the blocks. *CPU*: user and system time of all processes of a system,
servers included. *Wire*: bytes that pass the loopback interface; what is read in shared memory does not, but is in the
table below. *Resident*: PSS, pages shared among processes divided by them. *Memory / records*: records, parities and
logs of the servers over records alone.

**Where.** Everything runs on one host: trainers and servers share its cores, so the servers' work takes time from the
trainers, and no byte crosses a network. A commit with a + had changes that were not committed."""


def performance(contents: Contents, pictures: set[str], notes: str | None) -> str:
    """Returns the text of performance.md.

    Args:
        contents: what `load` gave.
        pictures: names whose PNG is there.
        notes: what somebody wrote by hand, for the end.
    """
    absent = [f"{name}.json" for name in NAMES if name not in contents]
    commits = sorted({str(content["header"]["commit"]) for content in contents.values()})
    parts = [MADE_BY, "# Performance", HOW]
    if absent:
        parts.append(f"**Not measured**: {', '.join(absent)} {'was' if len(absent) == 1 else 'were'} missing.")
    if len(commits) > 1:
        parts.append(f"The files are of different commits: {', '.join(commits)}.")
    parts += [
        "## Targets",
        "Ratios are of medians; in brackets the least, the most and the median of the ratios within a block.",
        record.markdown([target.row(contents) for target in TARGETS]),
        "## Training",
    ]
    parts += [line for name in SHAPES for line in (f"### {name}", *_training(name, contents, pictures))]
    parts.append("## Recovery")
    parts += [line for name in RECOVERIES for line in (f"### {name}", *_recovery(name, contents, pictures))]
    parts += ["## Kernels", *_codec(contents, pictures)]
    for name, titles in (("optimizers", optimizers.COLUMNS), ("operators", operators.COLUMNS)):
        parts += [f"### {name.capitalize()}", *_table_of(name, titles, contents)]
    parts += ["## Scaling", "Tables and picture are in [scaling.md](scaling.md)."]
    files = [f"[{name}.json](performance/{name}.json)" for name in NAMES if name in contents]
    if files:
        parts += [
            "## Files",
            f"Every figure comes from {', '.join(files)}; `torch-ecrec bench report --from docs/performance --out docs`"
            " makes this document from them again.",
        ]
    if notes is not None:
        parts.append(notes.strip())
    return "\n\n".join(parts) + "\n"


def scaling(contents: Contents, pictures: set[str]) -> str:
    """Returns the text between the markers of scaling.md."""
    if "scaling" not in contents:
        return "\n\n".join([MADE_BY, _missing("scaling", "scaling")])
    content = contents["scaling"]
    base = content["base"]
    parts = [
        MADE_BY,
        _origin(content["header"]),
        f"Base: {content['tables']} tables x {base['rows']:,} rows x {base['dim']}, batch {base['batch']} on each of"
        f" {base['trainers']} trainers, {base['servers']} servers, code ({base['k']}, {base['r']})."
        " `none` is without protection on as many servers.",
        _picture("scaling", "what a step costs by rows, dim, batch, trainers, servers and code; fan-out", pictures),
    ]
    for sweep, axis in content["axes"].items():
        rows = [row for row in content["rows"] if row["sweep"] == sweep]
        title = f"### By {sweep}"
        parts += [title, columns(rows, {**content["columns"], "value": axis}) if rows else "**Not measured.**"]
    if content["left_out"]:
        parts.append("Left out:")
        parts.append("\n".join(f"- {out['point']}: {out['reason'].splitlines()[0]}" for out in content["left_out"]))
    parts += ["### Fan-out (counted, not timed)", columns(content["fan_out"], content["fan_out_columns"])]
    return "\n\n".join(parts)


def between_markers(document: str, generated: str) -> str:
    """Replaces the text between a document's markers. Raises ValueError if they are not there, in order."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    require(bool(begin and end), f"scaling.md must have the markers {BEGIN} and {END}, in this order")
    return f"{head}{BEGIN}\n{generated}\n{END}{tail}"


def copy_files(source: Path, target: Path, names: Sequence[str]) -> set[str]:
    """Copies the benchmarks' files; returns the names of those with a picture."""
    target.mkdir(parents=True, exist_ok=True)
    pictures = set()
    for name in names:
        for suffix in (".json", ".csv", ".png"):
            path = source / f"{name}{suffix}"
            if not path.exists():
                continue
            if path.resolve() != (target / path.name).resolve():
                shutil.copyfile(path, target / path.name)
            if suffix == ".png":
                pictures.add(name)
    return pictures


# the command ------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Writes the documents; returns 0, even if files are missing: the documents say which.

    Raises:
        ValueError: there is no such folder, or no result in it; a file in it is not a benchmark's, or scaling.md has
            lost its markers.
    """
    source, out = arguments.source, arguments.out
    require(source.is_dir(), f"no such folder: {source}")
    contents = load(source)
    where = "name the --out of benchmarks by --from"
    require(bool(contents), f"no results of benchmarks in {source}: {where}")  # else a page would lose all its figures
    page = out / "scaling.md"
    document = page.read_text(encoding="utf-8") if page.exists() else f"# Scaling\n\n{BEGIN}\n{END}\n"
    between_markers(document, "")  # refused before anything is written
    pictures = copy_files(source, out / "performance", list(contents))
    page.write_text(between_markers(document, scaling(contents, pictures)), encoding="utf-8")
    notes = out / "performance-notes.md"
    text = performance(contents, pictures, notes.read_text(encoding="utf-8") if notes.exists() else None)
    (out / "performance.md").write_text(text, encoding="utf-8")
    for name in NAMES:
        if name not in contents:
            print(f"missing: {source / name}.json", file=sys.stderr)
    print(record.table([target.row(contents) for target in TARGETS]))
    print(f"written: {out / 'performance.md'}, {page}, {out / 'performance'}")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench report`."""
    parser.add_argument(
        "--from", dest="source", type=Path, default=Path("build/bench"), metavar="DIR", help="what benchmarks left"
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="of the documents (default docs)")
