"""Measures what checkpoints cost training, how large they are, and how long a restore takes.

Ways of training
    k2r1                  our servers with that code, and no option of checkpoints
    k2r1+full             a full checkpoint every X steps, at the default limit of bytes per second
    k2r1+incremental      `--checkpoint-policy consecutive`
    k2r1+incremental:4    the same, weights in 4 bits
    torchrec              plain TorchRec
    torchrec+save         the same, with torch.distributed.checkpoint.save every X steps: training stands meanwhile
    torchrec+async        with async_save, the one before being waited for

All take turns of X steps, in one run; a checkpoint is due after a quarter of each, and what is left of it when the turn
is over is waited for, so that nobody's turn has the checkpoint of another. The first turn of each is not counted: it
warms up, and an increment needs something to build on. Ours snapshot the dense model after each step, `k2r1` too: a
checkpoint is of a step that has one. Each trainer draws X batches, so that every increment has the ids of X new ones.

CPU seconds are those of all processes of a way, until its checkpoint is written. A restore is timed from the start of
the trainers' processes to the end of the first step, files out of the page cache, beside the same start without one.

A *block* is one turn of one way: `begin_s` and `ends_s` are when it began and when each of its steps ended, `spans_s`
when each checkpoint began and ended, all by the same clock. Begin 0, ends 1, 2, 4, 6, 7; a checkpoint from 2.5 to 5:
*before* it two steps in 2 s; *beside* it the third and the fourth, since they overlap it, in 4 s, the longest in 2 s;
so half as many steps in a second. A machine that others use, too, is not as fast in every part of a turn: so a ratio
stands beside that of the same steps without a checkpoint, and with the spread of its median, as of a box plot's notch
(McGill, Tukey and Larsen 1978): two medians whose notches do not meet differ, at about 95 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.experiment import Experiment, Model, Part, Running, Stopped, cpu_s, parse_mode
from torch_ecrec.bench.recovery import RECORD_BYTES
from torch_ecrec.observe import events
from torch_ecrec.runtime.checks import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESTORE_POOL, RESTORE_EVERY = 8, 4  # batches of those that restore: what drawing takes is none of a restore's
WRITTEN_S = 600.0  # for a checkpoint to be whole
OPTIONS = {
    "full": (),
    "incremental": ("--checkpoint-policy", "consecutive"),
    "incremental:4": ("--checkpoint-policy", "consecutive", "--checkpoint-bits", "4"),
}
SAVES = ("save", "async")  # of TorchRec
DEFAULT = "k2r1,k2r1+full,k2r1+incremental,k2r1+incremental:4,torchrec,torchrec+save,torchrec+async"
Block = Mapping[str, Any]
Blocks = Mapping[str, Sequence[Block]]

FULL, INCREMENT = "k2r1+full", "k2r1+incremental"
WANTED = (  # of which way, what, wanted: at least (>=) or at most (<=)
    (FULL, "samples/s while writing / before", ">=", 0.97),
    (INCREMENT, "samples/s while writing / before", ">=", 0.99),
    (INCREMENT, "bytes / full", "<=", 1 / 6),
    (f"{INCREMENT}:4", "bytes / full", "<=", 1 / 15),
    (FULL, "longest step / median", "<=", 2.0),
    (INCREMENT, "longest step / median", "<=", 2.0),
)
THEIRS = ("torchrec+save", "torchrec+async")
RATIOS = ("/ before", "same steps without", "/ without", "whole turn / without", "longest / median step")
RESTORED_S = 5.0  # from processes that have imported all to the end of the first step, for 1 GB of tables


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training. Those of one `group` share their processes, and take turns in them.

    Args:
        name: as above.
        base: the same without checkpoints.
        options: of the coordinator, where ours writes checkpoints.
        saves: "save" or "async", where TorchRec does.
    """

    name: str
    base: str
    options: tuple[str, ...] | None = None
    saves: str = ""

    @property
    def group(self) -> str:
        return self.base if self.options is None else self.name


def parse_way(name: str) -> Way:
    """Returns a way by its name. Raises ValueError."""
    base, _, more = name.partition("+")
    mode = parse_mode(base)
    require(base == "torchrec" or mode.code is not None, f"{name!r}: there are torchrec, and ours, such as k2r1")
    known: Sequence[str] = tuple(OPTIONS) if mode.code is not None else SAVES
    require(name == base or more in known, f"{name!r}: {base} has +{', +'.join(known)}")
    if not more:
        return Way(name, base)
    return Way(name, base, OPTIONS[more]) if mode.code is not None else Way(name, base, saves=more)


# what is measured -------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A complete checkpoint, when servers were told to write it, and when it was complete, by `time.time()`."""

    event: events.Checkpointed
    begin_s: float
    end_s: float


def written(running: Running, step: int) -> Written:
    """Waits until a checkpoint of this step of training, or a later one, is complete, and returns it.

    Raises:
        Stopped: it came to nothing, or not in time.
    """
    found: list[Written] = []

    def lacks() -> str:
        begun_s = {event.name: at_s for at_s, event in running.told if isinstance(event, events.CheckpointBegun)}
        for at_s, event in running.told:
            if isinstance(event, events.CheckpointVoid):
                raise Stopped(f"{running.part.name}: a checkpoint came to nothing: {event.reason}")
            if isinstance(event, events.Checkpointed) and event.step >= step and event.name in begun_s:
                found.append(Written(event, begun_s[event.name], at_s))
                return ""
        return "it"

    running.until(lacks, WRITTEN_S, f"a checkpoint of step {step}")
    return found[0]


class Writing:
    """Turns of as many steps as lie between two checkpoints (`every`), so that in each one checkpoint is due."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._done: dict[Running, int] = {}  # steps that these processes have trained

    def begin(self, running: Running, part: Part) -> None:
        """Trains three quarters of a turn, so that a checkpoint is due after a quarter of each turn that follows."""
        if running not in self._done:
            self._done[running] = 0
            self.turn("", running, self.every - self.every // 4)

    def turn(self, saves: str, running: Running, steps: int | None = None) -> dict[str, Any]:
        """Trains a block of steps, and waits for what is being written. `saves`: of TorchRec, see `Way`."""
        steps = steps or self.every
        pids = running.trainer_pids + running.cluster_pids
        before_s = cpu_s(pids)
        answers = running.ask(
            {
                "run": steps,
                "snapshot": running.mode.code is not None,
                "checkpoint": self.every if saves else 0,
                "asynchronous": saves == "async",
            }
        )
        ended = running.ask({"finish": True}, WRITTEN_S)
        spans: list[list[float]] = []
        sizes: list[int] = []
        kinds: list[str] = []
        done = self._done[running]
        due = self.every * ((done + steps) // self.every)
        if running.part.coordinator and due > done:
            event, begin_s, end_s = written(running, due)
            spans, sizes, kinds = [[begin_s, end_s]], [event.bytes], ["incremental" if event.base else "full"]
        elif saves and due > done:
            times = zip(*(answer["saves_s"] for answer in ended), strict=True)
            spans = [[min(first for first, _ in one), max(last for _, last in one)] for one in times]
            place = running.folder / "checkpoint" / str(due % 2)
            sizes, kinds = [sum(path.stat().st_size for path in place.rglob("*") if path.is_file())], ["full"]
        self._done[running] = done + steps
        return {
            "begin_s": answers[0]["begin_s"],
            "ends_s": answers[0]["ends_s"],
            "spans_s": spans,
            "bytes": sizes,
            "kinds": kinds,
            "cpu_s": cpu_s(pids) - before_s,
        }


def turns(arguments: argparse.Namespace, shape: workload.Shape, ways: Sequence[Way]) -> Experiment:
    """Returns the experiment in which all ways take turns."""
    name, every, parts = record.labelled(f"checkpoint-{arguments.shape}", arguments), arguments.every, []
    writing, model = Writing(every), Model(shape, arguments.trainers, arguments.seed, pool=every)
    for way in ways:
        options: tuple[str, ...] = ()
        if way.options is not None:
            store = arguments.out / "logs" / name / f"{way.group} store"
            options = ("--checkpoint", str(store), "--checkpoint-every", str(every), *way.options)
            if arguments.checkpoint_bytes_per_s is not None:
                options += ("--checkpoint-bytes-per-s", str(arguments.checkpoint_bytes_per_s))
        mode = dataclasses.replace(parse_mode(way.base), group=way.group)
        turn = functools.partial(writing.turn, way.saves)
        parts.append(Part(way.name, mode, model, [turn], coordinator=options, watched=bool(options)))
    return Experiment(
        name,
        arguments.out,
        parts,
        repeats=arguments.blocks + 1,
        together=True,
        begin=writing.begin,
        after=lambda name, block: print(f"turn of {name}", flush=True),
    )


def forget_pages(folder: Path) -> int:
    """Drops files from the page cache, so that the next read is from the disk; returns their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # Linux
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def _first_step(running: Running) -> dict[str, Any]:
    """Returns the seconds from the start of the trainers' processes to each stage."""
    answers = running.ask({"run": 1, "snapshot": True, "checkpoint": 0})
    return {
        "imported_s": max(one["imported_s"] for one in running.ready) - running.started_s,
        "built_s": max(one["ready"] for one in running.ready) - running.started_s,
        "first_step_s": max(answer["ends_s"][0] for answer in answers) - running.started_s,
    }


def restore(arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes a checkpoint of tables of about that many bytes, starts with it, and starts without one.

    Raises:
        Stopped: a process failed, or the checkpoint came to nothing.
    """
    shape = workload.Shape()
    per_table = max(1, round(arguments.restore_bytes / RECORD_BYTES / shape.tables))
    shape = workload.resized(shape, rows=per_table, batch=arguments.batch_size)
    store = arguments.out / "logs" / "restore" / "store"
    options = ("--checkpoint", str(store), "--checkpoint-every", str(RESTORE_EVERY), "--checkpoint-bytes-per-s", "0")

    def write(running: Running) -> dict[str, Any]:
        running.ask({"run": RESTORE_EVERY + 2, "snapshot": True, "checkpoint": 0})
        event, begin_s, end_s = written(running, RESTORE_EVERY)
        forget_pages(store)
        return {"checkpoint_bytes": event.bytes, "written_s": end_s - begin_s}

    mode, model = parse_mode(arguments.restore_system), Model(shape, arguments.trainers, arguments.seed, RESTORE_POOL)
    parts = [
        Part("written", mode, model, [write], coordinator=options, watched=True),
        Part("restored", mode, model, [_first_step], coordinator=("--restore", str(store))),
        Part("begun_anew", mode, model, [_first_step]),
    ]
    found = {name: one for name, (one,) in Experiment("restore", arguments.out, parts).results().items()}
    return {
        "system": arguments.restore_system,
        "rows": per_table,
        "table_bytes": shape.tables * per_table * RECORD_BYTES,
        **found.pop("written"),
        **found,
    }


# what it says ------------------------------------------------------------------------------------------


def durations(block: Block) -> list[float]:
    """Returns the seconds that each step took."""
    return [end - begin for begin, end in pairwise([block["begin_s"], *block["ends_s"]])]


def beside(block: Block) -> list[int]:
    """Returns the steps that overlap a checkpoint of the block."""
    return [
        i
        for i, (begin, end) in enumerate(pairwise([block["begin_s"], *block["ends_s"]]))
        if any(begin < last and end > first for first, last in block["spans_s"])
    ]


def before(block: Block) -> list[int]:
    """Returns the steps that ended before the block's first checkpoint began; all if it has none."""
    begins_s = min((first for first, _ in block["spans_s"]), default=float("inf"))
    return [i for i, end in enumerate(block["ends_s"]) if end <= begins_s]


def rate(block: Block, steps: Sequence[int], samples: int) -> float | None:
    """Returns the samples per second of some steps; None if there are none."""
    seconds = durations(block)
    return samples * len(steps) / sum(seconds[i] for i in steps) if steps else None


def figures(block: Block, samples: int) -> dict[str, float | None]:
    """Returns the figures of one block.

    Args:
        block: see above, with `cpu_s`: of all processes.
        samples: of a step, of all trainers together.

    Returns:
        `samples_per_s` of the whole block; `before_samples_per_s` of the steps before a checkpoint,
        `writing_samples_per_s` of those beside it, and `longest_step_s` of them (None: there were none; of a block
        without checkpoints, of all its steps); `median_step_s`; `cpu_s_per_step`; `written_s`: how long the checkpoints
        took.
    """
    steps, there = durations(block), beside(block)
    looked_at = [steps[i] for i in there] if block["spans_s"] else steps
    return {
        "samples_per_s": rate(block, range(len(steps)), samples),
        "before_samples_per_s": rate(block, before(block), samples),
        "writing_samples_per_s": rate(block, there, samples),
        "median_step_s": statistics.median(steps),
        "longest_step_s": max(looked_at, default=None),
        "cpu_s_per_step": block["cpu_s"] / len(steps),
        "written_s": sum(last - first for first, last in block["spans_s"]) if block["spans_s"] else None,
    }


def spreads(blocks: Blocks, samples: int) -> dict[str, dict[str, dict[str, float] | None]]:
    """Returns the median, least and most of each figure of each way over its blocks; None where no block has it."""
    result: dict[str, dict[str, dict[str, float] | None]] = {}
    for way, some in blocks.items():
        found = [figures(block, samples) for block in some]
        result[way] = {}
        for name in found[0]:
            values = [value for one in found if (value := one[name]) is not None]
            result[way][name] = record.spread(values) if values else None
    return result


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def ratios(block: Block, plain: Block, samples: int) -> dict[str, float | None]:
    """Returns the ratios of a way's turn to the same without checkpoints; None where nothing was written, or before it.

    `same steps without`: of the way without checkpoints, the steps beside which the other one wrote / those before.
    """
    mine, other = figures(block, samples), figures(plain, samples)

    def ratio(value: float | None, divisor: float | None) -> float | None:
        return value / divisor if value is not None and divisor is not None else None

    there, earlier = (rate(plain, which(block), samples) for which in (beside, before))
    return {
        "/ before": ratio(mine["writing_samples_per_s"], mine["before_samples_per_s"]),
        "same steps without": ratio(there, earlier) if block["spans_s"] else None,
        "/ without": ratio(mine["writing_samples_per_s"], other["samples_per_s"]),
        "whole turn / without": ratio(mine["samples_per_s"], other["samples_per_s"]),
        "longest / median step": ratio(mine["longest_step_s"], mine["median_step_s"]),
    }


def notch(values: Sequence[float]) -> float | None:
    """Returns half a notch of the median: 1.57 times the interquartile range / the square root of the count.

    It is None for fewer than four values.
    """
    if len(values) < 4:
        return None
    low, _, high = statistics.quantiles(values, n=4)
    return 1.57 * (high - low) / math.sqrt(len(values))


def sizes(some: Sequence[Block], kind: str) -> float | None:
    """Returns the median of the bytes of "full" or "incremental" checkpoints; None if there are none."""
    return _median(
        [
            size
            for block in some
            for size, of_kind in zip(block["bytes"], block["kinds"], strict=True)
            if of_kind == kind
        ]
    )


def rows(blocks: Blocks, base_of: Mapping[str, str], samples: int) -> list[dict[str, Any]]:
    """Returns the table, a row for each way. Ratios are medians of the ratios within a turn.

    Args:
        blocks: of each way; where something stopped, some have fewer.
        base_of: of each way, the one that trains the same without checkpoints.
    """
    spread = spreads(blocks, samples)
    lines = []
    for way, some in blocks.items():
        middle = {name: None if one is None else one["median"] for name, one in spread[way].items()}
        turns = [ratios(*both, samples) for both in zip(some, blocks.get(base_of[way], ()), strict=False)]
        known = {name: [value for turn in turns if (value := turn[name]) is not None] for name in RATIOS}
        cpu, full, increment = middle["cpu_s_per_step"], sizes(some, "full"), sizes(some, "incremental")
        lines.append(
            {
                "way": way,
                "samples/s": middle["samples_per_s"],
                "before": middle["before_samples_per_s"],
                "while writing": middle["writing_samples_per_s"],
                "/ before": _median(known["/ before"]),
                "/ before, ±": notch(known["/ before"]),
                "same steps without": _median(known["same steps without"]),
                "same steps, ±": notch(known["same steps without"]),
                "/ without": _median(known["/ without"]),
                "whole turn / without": _median(known["whole turn / without"]),
                "CPU ms/step": None if cpu is None else 1e3 * cpu,
                "longest / median step": _median(known["longest / median step"]),
                "written s": middle["written_s"],
                "full MB": None if full is None else full / 1e6,
                "increment MB": None if increment is None else increment / 1e6,
            }
        )
    return lines


def restore_rows(restored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the table of a restore: a start with a checkpoint, and one without."""
    return [
        {
            "start": name,
            "GB of tables": restored["table_bytes"] / 1e9,
            "processes s": restored[key]["imported_s"],
            "model built s": restored[key]["built_s"],
            "first step s": restored[key]["first_step_s"],
            "without processes s": restored[key]["first_step_s"] - restored[key]["imported_s"],
        }
        for name, key in (("from a checkpoint", "restored"), ("anew", "begun_anew"))
    ]


def targets(
    blocks: Blocks, base_of: Mapping[str, str], samples: int, restored: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Returns the targets beside what was measured; "-" where it was not.

    Bytes are of an increment, in its encoding, / those of a full checkpoint with exact weights.
    """
    by_way = {line["way"]: line for line in rows(blocks, base_of, samples)}
    full = next((size for way in (FULL, INCREMENT) if way in blocks if (size := sizes(blocks[way], "full"))), None)
    found = []
    for way, what, relation, bound in WANTED:
        measured = None
        if way in by_way:
            increment = sizes(blocks[way], "incremental")
            measured = {
                "samples/s while writing / before": by_way[way]["/ before"],
                "longest step / median": by_way[way]["longest / median step"],
                "bytes / full": increment / full if increment and full else None,
            }[what]
        found.append(record.aim(f"{way}: {what}", relation, bound, measured))
    found += _beside_theirs(by_way)
    if restored is not None:
        line = restore_rows(restored)[0]
        gigabytes = line["GB of tables"]
        name = f"restore of {gigabytes:.3g} GB to the first step, s after the imports"
        found.append(record.aim(name, "<=", RESTORED_S * gigabytes, line["without processes s"]))
    return found


def _beside_theirs(by_way: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns our ways beside the better one of TorchRec's: which share of the throughput is left, and bytes."""

    def of_theirs(figure: str) -> list[float]:
        return [value for way in THEIRS if way in by_way and (value := by_way[way][figure]) is not None]

    found = []
    left, size = of_theirs("whole turn / without"), of_theirs("full MB")
    for way in (FULL, INCREMENT):
        mine = by_way.get(way, {}).get("whole turn / without")
        if left:
            found.append(record.aim(f"{way}: whole turn / without, beside TorchRec's best", ">=", max(left), mine))
    if size:
        mine = by_way.get(FULL, {}).get("full MB")
        found.append(record.aim(f"{FULL}: MB, beside TorchRec's least", "<=", min(size), mine))
    return found


def draw(shape: str, blocks: Blocks, samples: int) -> Figure:
    """Plots the throughput of each way's last block, step by step, with the time of a checkpoint shaded."""
    from matplotlib.figure import Figure

    last_ones = {way: some[-1] for way, some in blocks.items()}
    steps_s = max(block["ends_s"][-1] - block["begin_s"] for block in last_ones.values())
    figure = Figure(figsize=(10, 1.5 * len(blocks) + 1), layout="constrained")
    grid = figure.subplots(len(blocks), 1, sharex=True, sharey=True, squeeze=False)
    for axes, (way, block) in zip(grid[:, 0], last_ones.items(), strict=True):
        begin_s = block["begin_s"]
        rates = [samples / seconds for seconds in durations(block)]
        axes.step([end - begin_s for end in block["ends_s"]], rates, where="pre", color="#2b6cb0", linewidth=0.8)
        for first, last in block["spans_s"]:
            axes.axvspan(first - begin_s, last - begin_s, color="#dd8833", alpha=0.3, linewidth=0)
            if last - begin_s > 1.05 * steps_s:
                said, at = f"written after {last - begin_s:.0f} s", (0.995, 0.08)
                axes.annotate(said, at, xycoords="axes fraction", ha="right", fontsize=8, color="#9c4a00")
        axes.set_title(way, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].set_ylim(bottom=0)
    grid[0, 0].set_xlim(0, 1.05 * steps_s)
    grid[-1, 0].set_xlabel("s since the block began; shaded: a checkpoint is written")
    figure.suptitle(f"samples/s, {shape}")
    return figure


# the command ------------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> tuple[workload.Shape, list[Way]]:
    """Returns the model's shape and the ways. Raises ValueError or TypeError if an argument is wrong."""
    shape = workload.resized(
        workload.SHAPES[arguments.shape], rows=arguments.rows, dim=arguments.dim, batch=arguments.batch_size
    )
    ways = [parse_way(name) for name in arguments.ways.split(",")]
    names = [way.name for way in ways]
    require(len(set(names)) == len(names), f"a way is named twice: {arguments.ways}")
    missing = sorted({way.base for way in ways} - set(names))
    require(not missing, f"`--ways` has no {', '.join(missing)}: ratios are to the same without checkpoints")
    record.require_counts(arguments, "blocks", "trainers")
    record.require_counts(arguments, "every", least=4)
    require(arguments.restore_bytes >= 0, f"`restore_bytes` must not be negative, got {arguments.restore_bytes}")
    require(parse_mode(arguments.restore_system).code is not None, "`--restore-system` is one of ours, such as k2r1")
    return shape, ways


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes checkpoint-SHAPE.json, .csv, .md and .png, with the label in their names.

    Returns:
        0, or 1 if something stopped: what was measured until then is written, and the processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    shape, ways = check(arguments)
    experiment = turns(arguments, shape, ways)
    experiment.run()
    restored: dict[str, Any] | None = None
    if experiment.error is None and arguments.restore_bytes:
        with experiment.caught():
            restored = restore(arguments)
    blocks = {name: some[1:] for name, some in experiment.found.items() if some[1:]}  # the first warms up
    samples, base_of = arguments.trainers * shape.batch, {way.name: way.base for way in ways}
    lines, aims = rows(blocks, base_of, samples), targets(blocks, base_of, samples, restored)
    content = {
        "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
        "trainers": arguments.trainers,
        "every": arguments.every,
        "figures": spreads(blocks, samples),
        "blocks": blocks,
        "restore": restored,
        "restore_rows": restore_rows(restored) if restored else [],
        "targets": aims,
    }
    tables = [lines, *([restore_rows(restored)] if restored else []), aims]
    header = experiment.header
    where = f"{header['processor']}, {header['cores']} cores, commit {header['commit']}, {header['date'][:10]}"
    text = "\n\n".join([f"`{header['command']}`: {where}.", *map(record.markdown, tables)])
    (arguments.out / f"{experiment.name}.md").write_text(text + "\n")  # as docs/contributing/checkpoint-costs.md has it
    shown = "\n".join(map(record.table, tables))
    return experiment.finish(content, lines, shown, lambda: draw(arguments.shape, blocks, samples))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench checkpoint`."""
    parser.add_argument("--shape", choices=["embedding-heavy", "paper"], default="embedding-heavy")
    parser.add_argument("--ways", metavar="A,B,...", default=DEFAULT, help=f"default {DEFAULT}")
    parser.add_argument("--blocks", type=int, default=3, metavar="N", help="turns of each way (default 3)")
    parser.add_argument("--every", type=int, default=200, metavar="X", help="steps between checkpoints (default 200)")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument("--rows", type=int, help="rows per table, instead of the shape's")
    parser.add_argument("--dim", type=int, help="embedding dim, instead of the shape's")
    parser.add_argument("--batch-size", type=int, help="samples per trainer and step, instead of the shape's")
    parser.add_argument(
        "--restore-bytes", type=float, default=1e9, metavar="B", help="of the tables of a restore; 0: none is timed"
    )
    parser.add_argument("--restore-system", default="k2r1", metavar="NAME", help="that restores (default k2r1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint-bytes-per-s", type=float, metavar="B", help="limit of each server, instead of the default one"
    )
    record.add_files(parser, "build/bench")
