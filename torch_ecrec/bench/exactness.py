"""Kills processes in many real runs: is all that follows bit-identical, and how long does training pause?

Each case is a run of the demonstration (`demo/training.py`), compared with the undisturbed run of the same optimizer:
the digest over all records and dense parameters, and every loss of every trainer. The cases, per table optimizer:

    1 and 3 kills        one after another, each when the former is rebuilt; with a spare, and without one, where a
                         survivor takes the slot, or the process that is started in the killed one's place (wait)

and, with the first optimizer: kills at random moments within a step, and with (k, r) = (3, 2) two servers at once.
`--cases few` has four runs of each optimizer: two undisturbed ones, one with a server killed in its middle, and one
with a trainer killed. With `--device cuda`, whose sums could have another order each time, the second undisturbed run
says whether they do, and lost trainers come back to a dense model on the GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ecrec.bench import record
from torch_ecrec.demo.kills import parse_kills
from torch_ecrec.demo.result import arguments_json, differences
from torch_ecrec.demo.terminal import Terminal, warnings_only
from torch_ecrec.demo.training import DemoRun, require_device
from torch_ecrec.errors import ClusterError
from torch_ecrec.observe.progress import counted
from torch_ecrec.processes.launch import warm
from torch_ecrec.records.optimizers import NAMES as OPTIMIZERS
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import CodeSpec

STEP_MS = 60  # random moments lie within so many milliseconds after a step's end
CLUSTER = {"servers": 3, "k": 2, "r": 1, "spares": 1, "without_spare": "survivor"}  # where a case says nothing else
TRAINING = {"seed": 0, "snapshot_every": 1, "max_restarts": 10, "ids": 1}
TIMES = ("detected_s", "rehosted_s", "first_step_s", "rebuilt_s")


@dataclass(frozen=True)
class Case:
    """One run, and the undisturbed run that it must equal (`reference`; "": it is one). `more`: of its cluster."""

    name: str
    reference: str
    optimizer: str
    steps: int
    trainers: int
    kills: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


class Quiet(Terminal):
    """A terminal that shows nothing."""

    def say(self, text: str = "") -> None:
        pass

    def progress(self, text: str) -> None:
        pass


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns all cases; those that others are compared with come before these."""
    make = all_cases if arguments.cases == "all" else few_cases
    return [case for trainers in arguments.trainers for case in make(arguments, trainers)]


def few_cases(arguments: argparse.Namespace, trainers: int) -> list[Case]:
    """Returns four cases of each optimizer: undisturbed twice, and with a kill in the middle. With "one", two."""
    found: list[Case] = []
    for optimizer in arguments.optimizers:
        of = f"{optimizer}, {trainers} trainers"
        same, middle = (optimizer, arguments.steps, trainers), arguments.steps // 2
        first = Case(f"{of}: undisturbed", "", *same)
        found.append(first)
        if arguments.cases == "few":
            found.append(Case(f"{of}: undisturbed again", first.name, *same))
        for role, number in (("server", 1), ("trainer", 0))[: 1 if arguments.cases == "one" else 2]:
            found.append(Case(f"{of}: a {role} killed", first.name, *same, (f"{role}:{number}@{middle}",)))
    return found


def all_cases(arguments: argparse.Namespace, trainers: int) -> list[Case]:
    """Returns all cases for so many trainers."""
    short, long = arguments.steps, arguments.long_steps
    found: list[Case] = []
    for optimizer in arguments.optimizers:
        for steps in (short, long):
            found.append(Case(f"{optimizer}: undisturbed, {steps} steps", "", optimizer, steps, trainers))
        one, three = (f"server:1@{short // 2}",), tuple(f"server:{s}@{20 + 10 * i}~" for i, s in enumerate((1, 0, 1)))
        for name, more in (
            ("spare", {}),
            ("no spare, survivor", {"spares": 0}),
            ("no spare, restarted process", {"spares": 0, "without_spare": "wait"}),
        ):
            for kills, steps in ((one, short), (three, long)):
                reference = f"{optimizer}: undisturbed, {steps} steps"
                case = f"{optimizer}: {len(kills)} kills, {name}"
                found.append(Case(case, reference, optimizer, steps, trainers, kills, more))
    first = arguments.optimizers[0]
    reference = f"{first}: undisturbed, {short} steps"
    rng = random.Random(arguments.seed)
    for i in range(arguments.moments):
        step, moment, slot = rng.randrange(5, short - 15), rng.randrange(1, STEP_MS), rng.randrange(3)
        kill = f"server:{slot}@{step}+{moment}"
        found.append(Case(f"{first}: moment {i + 1}, {kill}", reference, first, short, trainers, (kill,)))
    for slots in ((0, 1), (1, 3)):
        kills, wide = (
            tuple(f"server:{slot}@{short // 2}" for slot in slots),
            {"servers": 5, "k": 3, "r": 2, "spares": 2},
        )
        found.append(Case(f"{first}: (3, 2), slots {slots} at once", reference, first, short, trainers, kills, wide))
    return found


def run_case(case: Case, arguments: argparse.Namespace, references: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Runs a case, and compares it with its reference; `error` is "" if it was exact."""
    told = argparse.Namespace(**TRAINING, **{**CLUSTER, **case.more}, steps=case.steps, optimizer=case.optimizer)
    told.batch_size, told.data, told.device = arguments.batch_size, arguments.data, arguments.device
    told.trainers = case.trainers
    code = CodeSpec(told.servers, told.k, told.r)
    kills = parse_kills(case.kills or ["none"], code.slots, case.steps, told.trainers)
    logs = arguments.out / "logs" / "".join(c if c.isalnum() else "-" for c in case.name)
    run, error, begin_s = DemoRun(told, code, kills, logs, Quiet()), "", time.monotonic()
    try:
        run.execute()
        faults = [f"a kill did not fire: {text}" for text in run.not_fired()] + run.record.unexpected
        if case.reference:
            faults += differences(run.figures(), dict(references[case.reference]))
        error = "; ".join(faults)
    except ClusterError as failure:
        error = str(failure)
    return {
        "case": case.name,
        "seconds": time.monotonic() - begin_s,
        "error": error,
        **run.figures(),
        "kills": [kill.to_json(run.record.step_times) for kill in run.record.kills],
        "throughput": run.record.throughput(run.samples_per_step),
    }


def rows(found: Sequence[tuple[Case, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the table: median, least and most of the times after kills with a spare at hand."""
    kills = [kill["after_kill_s"] for case, one in found if "spares" not in case.more for kill in one["kills"]]
    known = {name: [kill[name] for kill in kills if kill[name] is not None] for name in TIMES}
    return [
        {"after a kill": name, "kills": len(values), **record.spread(values)}
        for name, values in known.items()
        if values
    ]


@warnings_only()
def run(arguments: argparse.Namespace) -> int:
    """Runs all cases, prints them and the times of all kills, writes OUT/exactness.json. Returns 1 if any differs."""
    require_device(arguments.device)
    record.require_counts(arguments, "steps", "long_steps", "batch_size", least=2)
    require_int("moments", arguments.moments, 0)
    for trainers in arguments.trainers:
        require_int("trainers", trainers, 1)
    require(len(set(arguments.trainers)) == len(arguments.trainers), "`--trainers` has a number twice")
    require(
        arguments.cases != "all" or len(arguments.trainers) == 1,
        "`--trainers` has several numbers: they go with `--cases few` or one",
    )
    references: dict[str, dict[str, Any]] = {}
    found: list[tuple[Case, dict[str, Any]]] = []
    warm()
    for case in counted("exactness: runs", cases(arguments)):
        one = run_case(case, arguments, references)
        found.append((case, one))
        word = one["error"] or ("equal, bit for bit" if case.reference else one["digest"][:16])
        print(f"{case.name:50}  {one['seconds']:6.1f} s  {word}", flush=True)
        if not case.reference:
            references[case.name] = one
            if one["error"]:
                break  # nothing can be compared with it
    wrong = [case.name for case, one in found if one["error"]]
    kept = ("case", "seconds", "error", "digest", "kills", "throughput")
    runs = [{name: one[name] for name in kept} for _, one in found]
    content = {"header": record.header(), "arguments": arguments_json(arguments), "runs": runs}
    lines = rows(found)
    shown = f"{record.table(lines)}\n{len(found)} runs, {sum(len(case.kills) for case, _ in found)} kills"
    error = f"not exact: {'; '.join(wrong)}" if wrong else None
    return record.finish(arguments.out, "exactness", content, lines, shown=shown, error=error)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench exactness`."""
    parser.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows; default: made-up rows")
    parser.add_argument(
        "--cases",
        choices=["all", "few", "one"],
        default="all",
        help="few: undisturbed twice, a server killed, a trainer killed; one: undisturbed, a server killed",
    )
    parser.add_argument("--trainers", nargs="+", type=int, default=[2], metavar="T", help="default 2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the dense model")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["rowwise_adagrad", "sgd", "adagrad"])
    parser.add_argument("--steps", type=int, default=80, help="of runs with one kill")
    parser.add_argument(
        "--long-steps", type=int, default=1600, help="of runs with three kills, in which processes come back"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--moments", type=int, default=10, help="kills at random moments within a step")
    parser.add_argument("--seed", type=int, default=0, help="of those moments")
    parser.add_argument("--out", type=Path, default=Path("build/exactness"), metavar="DIR")
