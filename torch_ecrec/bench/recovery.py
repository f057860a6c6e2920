"""Measures the phases of a recovery, and what the rebuild costs training.

    torch-ecrec bench recovery --gigabytes 1 4 8 --kills 5 --rebuild-mb-per-s 0 50 200

A *case* is one cluster of one size with one limit of the rebuild rate, "0.5 GB, 50 MB/s" for example. Trainers take
real steps of a DLRM. At steady state the process that hosts a random slot gets SIGKILL at a random moment, and the
times of all phases are taken (`faults.py` has the figures). The next kill waits until everything is healthy, a spare is
there again, and another window of steady training is over. The case `idle` is the unlimited one with the trainers
paused and no process starting: the speed of the rebuild alone.

The alternative, to go back to a checkpoint, is an experiment: `torch-ecrec experiments run recovery-1` kills a server
and trains until all that was lost is there again.

All processes share this machine: the killed one is started again at once, and its start takes cores from training
while the rebuild runs, as it would not on a host of its own. `--restart rebuilt`, and `idle`, start it once all is
rebuilt.

`--tier DIR` adds to each case one with a share of the records in memory (`--share`) and the others on a disk, and a
table of such a case beside the one in memory. A row that no step has changed lies on no disk, so that these cases want
`--zipf 0` and tables of which training changes every row before the first kill.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.experiment import Experiment, Model, Part, parse_mode
from torch_ecrec.bench.faults import KILLED, MB, Kill, start_training
from torch_ecrec.bench.tiers import budget, tier_settings
from torch_ecrec.demo.result import arguments_json
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import LOOK_AHEAD_AUTO, LOOK_AHEAD_MOST, check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLES, DIM = workload.Shape.tables, workload.Shape.dim
RECORD_BYTES = optimizer("rowwise_adagrad").schema(DIM).nbytes
PHASES = {  # what is drawn of a kill: color and name
    "detected_s": ("#7b8794", "detected"),
    "rehosted_s": ("#2563eb", "re-hosted"),
    "first_step_s": ("#059669", "first step begun after it"),
    "rebuilt_s": ("#f59e0b", "rebuilt"),
}
SHOWN = {
    "after the kill": (*PHASES, "lost_mb", "lost_mb_per_s"),
    "samples per second": (
        "before_samples_per_s",
        "during_samples_per_s",
        "after_samples_per_s",
        "during_share",
        "stolen",
        "calm_share",
    ),
    "most memory of a server, beyond one without rows": ("before_memory_mb", "during_memory_mb"),
}


@dataclass(frozen=True)
class Case:
    """The kills of one cluster.

    Args:
        gigabytes: of all records, in 10^9 bytes.
        mb_per_s: `Settings.rebuild_bytes_per_s` in 10^6; 0 for no limit.
        idle: trainers pause meanwhile.
        share: of records and parities in memory, the others are on a disk; None: there is no disk.
        ahead: batches that are drawn early, at most: what they look up is repaired meanwhile.
    """

    gigabytes: float
    mb_per_s: float
    idle: bool
    share: float | None = None
    ahead: int = LOOK_AHEAD_AUTO

    @property
    def name(self) -> str:
        limit = f"{self.mb_per_s:g} MB/s" if self.mb_per_s else "no limit"
        memory = "" if self.share is None else f", {100 * self.share:g} % in memory"
        ahead = "" if self.ahead == LOOK_AHEAD_AUTO else f", {self.ahead} ahead"
        return f"{self.gigabytes:g} GB, {'idle' if self.idle else limit}{memory}{ahead}"


def cases(
    gigabytes: Sequence[float],
    limits: Sequence[float],
    throttled: float | None,
    idle: bool,
    share: float | None = None,
    distances: Sequence[int] = (LOOK_AHEAD_AUTO,),
    in_memory: bool = True,
) -> list[Case]:
    """Returns all cases, ordered by size.

    Args:
        gigabytes: sizes of all records, in 10^9 bytes.
        limits: of the rebuild rate in 10^6 bytes/s, 0 for none.
        throttled: the only size at which limits other than 0 are measured; None for all.
        idle: whether the rebuild is also measured alone.
        share: of records in memory, of a second case beside each; None: there are no second ones.
        distances: how many batches are drawn early, at most, each in a case of its own where trainers train.
        in_memory: whether what has a second case is measured in memory, too.
    """
    found: list[Case] = []
    for size in gigabytes:
        of_size = [limit for limit in limits if not limit or throttled in (None, size)]
        found += [Case(size, limit, False, ahead=ahead) for limit in of_size for ahead in distances]
        found += [Case(size, 0.0, True)] * idle
    if share is None:
        return found
    return [one for case in found for one in (*[case] * in_memory, dataclasses.replace(case, share=share))]


def rows_per_table(gigabytes: float) -> int:
    """Returns the rows of each table so that all records together have `gigabytes` * 10^9 bytes."""
    return max(1, round(gigabytes * 1e9 / (TABLES * RECORD_BYTES)))


def model_of(gigabytes: float, arguments: argparse.Namespace) -> Model:
    """Returns the model with so many bytes of records. Each step draws other rows."""
    shape = workload.Shape(rows=rows_per_table(gigabytes), batch=arguments.batch_size, zipf=arguments.zipf)
    return Model(shape, arguments.trainers, arguments.seed, pool=0)


def part_of(case: Case, code: CodeSpec, arguments: argparse.Namespace) -> Part:
    """Returns a case as a part of the experiment."""
    model = model_of(case.gigabytes, arguments)
    mode = dataclasses.replace(parse_mode("k2r1"), code=code, snapshot=True)
    settings = {
        "TORCH_ECREC_REBUILD_BYTES_PER_S": str(case.mb_per_s * MB),
        "TORCH_ECREC_LOOK_AHEAD": str(case.ahead),
    }
    if case.share is not None:
        settings |= tier_settings(arguments.tier, budget(model.shape, mode, case.share))
    return Part(
        case.name,
        dataclasses.replace(mode, settings=settings),
        model,
        [Kill(arguments.steady_s, f"{arguments.seed} {case.name}", case.mb_per_s, case.idle)],
        spares=arguments.spares,
        restart=arguments.restart == "at-once" and not case.idle,
        watched=True,
    )


def summary(case: Case, kills: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a row: median, least and most of every figure over the kills; None if it does not apply."""
    row: dict[str, Any] = {
        "case": case.name,
        "gigabytes": case.gigabytes,
        "mode": "idle" if case.idle else "training",
        "limit_mb_per_s": case.mb_per_s,
        "share_in_memory": case.share,
        "ahead": case.ahead,
        "kills": len(kills),
    }
    for figure in KILLED:
        values = [kill[figure] for kill in kills if kill[figure] is not None]
        spread = record.spread(values) if values else dict.fromkeys(("median", "min", "max"))
        row |= {f"{figure}_{name}": value for name, value in spread.items()}
    return row


def beside_memory(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each case with records on a disk: its medians beside those of the same case in memory."""
    alike = ("gigabytes", "mode", "limit_mb_per_s", "ahead")
    in_memory = {tuple(row[c] for c in alike): row for row in rows if row["share_in_memory"] is None}
    found = []
    for row in rows:
        whole = in_memory.get(tuple(row[c] for c in alike))
        if row["share_in_memory"] is None or whole is None:
            continue
        line = {"case": row["case"]}
        for figure in ("lost_mb_per_s", "first_step_s", "during_share"):
            here, there = row[f"{figure}_median"], whole[f"{figure}_median"]
            line |= {figure: here, f"{figure} / in memory": here / there if here is not None and there else None}
        found.append(line)
    return found


# what is shown ----------------------------------------------------------------------------------------


def kill_line(name: str, figures: Mapping[str, Any]) -> None:
    """Prints a kill in one line."""
    shown = ", ".join(
        f"{key} {figures[key]:,.3g}" for keys in SHOWN.values() for key in keys if figures[key] is not None
    )
    print(f"  {name}: {shown}", flush=True)


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the tables that are printed at the end."""
    blocks = []
    for title, figures in SHOWN.items() if rows else ():
        shown = [{c: row[c] for c in ("case", "kills")} | {f: row[f"{f}_median"] for f in figures} for row in rows]
        blocks.append(f"{title} (medians):\n{record.table(shown)}")
    if compared := beside_memory(rows):
        blocks.append(f"records on a disk, beside the same case in memory (medians):\n{record.table(compared)}")
    training = [row for row in rows if row["mode"] == "training"]
    if training:
        lines = [
            f"  {figure:12} least {min(row[f'{figure}_min'] for row in training):.3f},"
            f" most {max(row[f'{figure}_max'] for row in training):.3f}"
            for figure in ("detected_s", "rehosted_s", "first_step_s", "stall_s")
            if all(row[f"{figure}_max"] is not None for row in training)
        ]
        blocks.append(f"over {sum(row['kills'] for row in training)} kills in training:\n" + "\n".join(lines))
    return "\n\n".join(blocks)


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots the times of the phases by size, and throughput in each phase by rate limit.

    Args:
        rows: `summary` of each case.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 5.6), layout="constrained")
    times, rates = figure.subplots(1, 2)
    _draw_times(times, rows)
    _draw_rates(rates, [row for row in rows if row["mode"] == "training"])
    for axes in (times, rates):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    figure.suptitle("Medians over the kills of a case; bars from the least to the most", fontsize=9)
    return figure


def _spread(axes: Any, at: Sequence[float], of: Sequence[Mapping[str, Any]], name: str, **style: Any) -> None:
    middle = [row[f"{name}_median"] for row in of]
    low = [row[f"{name}_median"] - row[f"{name}_min"] for row in of]
    high = [row[f"{name}_max"] - row[f"{name}_median"] for row in of]
    axes.errorbar(at, middle, yerr=[low, high], capsize=3, **style)


def _draw_times(times: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plots the seconds after a kill by size."""
    whole = [row for row in rows if row["share_in_memory"] is None]
    free = [row for row in whole if row["mode"] == "training" and not row["limit_mb_per_s"]]
    idle = [row for row in whole if row["mode"] == "idle"]
    curves = [(free, name, {"marker": "o", "color": color, "label": label}) for name, (color, label) in PHASES.items()]
    of_idle = {"marker": "s", "linestyle": "--", "color": "#b45309", "label": "rebuilt, trainers idle"}
    for some, name, style in [*curves, (idle, "rebuilt_s", of_idle)]:
        known = [row for row in some if row[f"{name}_median"] is not None]
        if known:
            _spread(times, [row["gigabytes"] for row in known], known, name, **style)
    times.set(title="Time after SIGKILL, rebuild not limited", xlabel="records in the cluster (GB)", ylabel="seconds")
    times.set_yscale("log")
    times.set_xlim(left=0.0)
    times.grid(True, which="major", color="#e4e7eb")


def _draw_rates(rates: Any, training: Sequence[Mapping[str, Any]]) -> None:
    """Plots the samples per second before, during and after a recovery, by case."""
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


# the command ------------------------------------------------------------------------------------------


def check(arguments: argparse.Namespace) -> CodeSpec:
    """Checks all arguments before anything starts. Raises ValueError or TypeError."""
    code = CodeSpec(arguments.servers, arguments.k, arguments.r)
    if arguments.tier is not None:
        check_folder(arguments.tier)
    require(arguments.tier is not None or not arguments.no_in_memory, "`--no-in-memory` goes with `--tier DIR`")
    require(0 < arguments.share <= 1, f"`--share` is of all records, 0 to 1, got {arguments.share}")
    record.require_counts(arguments, "spares", least=0)
    record.require_counts(arguments, "trainers", "batch_size", "kills")
    record.require_positive(arguments, "steady_s")
    for size in arguments.gigabytes:
        require(size > 0, f"`--gigabytes` must be positive, got {size}")
    require(arguments.zipf >= 0, f"`--zipf` must not be negative, got {arguments.zipf}")
    for ahead in arguments.ahead:
        require(0 <= ahead <= LOOK_AHEAD_MOST, f"`--ahead` must be 0 to {LOOK_AHEAD_MOST}, got {ahead}")
    for limit in arguments.rebuild_mb_per_s:
        require(limit >= 0, f"`--rebuild-mb-per-s` must not be negative, got {limit}")
    size = arguments.throttled_gigabytes
    require(
        size is None or size in arguments.gigabytes,
        f"`--throttled-gigabytes` must be one of {arguments.gigabytes}, got {size}",
    )
    return code


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes recovery.json, .csv and .png, with the label in their names, to `arguments.out`.

    Returns:
        0, or 1 if a kill did not fire or something stopped; what was measured until then is written, with the reason
        in `error`, and the processes' logs are in OUT/logs.

    Raises:
        ValueError, TypeError: bad arguments; nothing was started.
    """
    code = check(arguments)
    todo = cases(
        arguments.gigabytes,
        arguments.rebuild_mb_per_s,
        arguments.throttled_gigabytes,
        not arguments.no_idle,
        None if arguments.tier is None else arguments.share,
        arguments.ahead,
        not arguments.no_in_memory,
    )
    parts = [part_of(case, code, arguments) for case in todo]
    name = record.labelled("recovery", arguments)
    experiment = Experiment(name, arguments.out, parts, repeats=arguments.kills, begin=start_training, after=kill_line)
    experiment.run()
    rows = [summary(case, kills) for case in todo if (kills := experiment.found[case.name])]
    content = {
        "arguments": arguments_json(arguments),
        "tables": TABLES,
        "dim": DIM,
        "record_bytes": RECORD_BYTES,
        "cases": [{"case": name, "kills": kills} for name, kills in experiment.found.items()],
    }
    return experiment.finish(content, rows, tables(rows), lambda: draw(rows), arguments.json)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Adds the servers and trainers of a benchmark with losses, and what they train."""
    parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
    parser.add_argument("--spares", type=int, default=1, metavar="P", help="servers in reserve (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe (default 1)")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--zipf",
        type=float,
        default=1.05,
        metavar="A",
        help="exponent of the law that ids follow (default 1.05); 0 for uniform ones, so that hardly any row"
        " that a step asks for was repaired before: the worst case for training during a rebuild",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench recovery`."""
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[1.0, 4.0, 8.0], metavar="GB", help="of records, without parity"
    )
    parser.add_argument("--kills", type=int, default=5, metavar="N", help="in each case")
    parser.add_argument(
        "--rebuild-mb-per-s",
        type=float,
        nargs="*",
        default=[0.0, 50.0, 200.0],
        metavar="MB",
        help="limits of the background rebuild, which counts the k records that it reads for each; 0 for none",
    )
    parser.add_argument(
        "--throttled-gigabytes", type=float, metavar="GB", help="measure limits other than 0 at this size only"
    )
    add_cluster(parser)
    parser.add_argument("--batch-size", type=int, default=1024, metavar="B", help="samples per trainer and step")
    parser.add_argument("--steady-s", type=float, default=8.0, metavar="S", help="training measured around each kill")
    parser.add_argument(
        "--restart",
        choices=["at-once", "rebuilt"],
        default="at-once",
        help="when the killed process is started again: its start takes cores that a host of its own would have",
    )
    parser.add_argument(
        "--tier", type=Path, metavar="DIR", help="a folder on a disk: measure each case with records there, too"
    )
    parser.add_argument("--share", type=float, default=0.25, help="of records in memory, with --tier (default 0.25)")
    parser.add_argument("--no-in-memory", action="store_true", help="with --tier: do not measure the cases in memory")
    parser.add_argument(
        "--ahead",
        type=int,
        nargs="+",
        default=[LOOK_AHEAD_AUTO],
        metavar="N",
        help="batches that trainers draw early, so that what they look up is repaired meanwhile"
        f" (default {LOOK_AHEAD_AUTO})",
    )
    parser.add_argument("--no-idle", action="store_true", help="do not measure the rebuild with paused trainers")
    record.add_files(parser, "build/recovery", copies=True)
