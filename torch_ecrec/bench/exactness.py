"""Kills in real runs, many of them: is everything that follows bit-identical, and how long does training pause?

Each case is one `torch-ecrec demo` in processes of its own, compared with the undisturbed run of the same optimizer:
the digest over all records and dense parameters, and every loss of every trainer. The cases, per table optimizer:

    1 and 3 kills        one after another, each when the former is rebuilt; with a spare, and without one, where a
                         survivor takes the slot, or the process that is started in the killed one's place (wait)

and, with the first optimizer: kills at random moments within a step, and with (k, r) = (3, 2) two servers at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ecrec.records.optimizers import NAMES as OPTIMIZERS

STEP_MS = 60  # random moments lie within so many milliseconds after a step's end
CASE_LIMIT_S = 600


@dataclass(frozen=True)
class Case:
    """One run. `reference` names the undisturbed run that it must equal."""

    name: str
    reference: str
    optimizer: str
    steps: int
    kills: tuple[str, ...] = ()
    more: tuple[str, ...] = ()


@dataclass
class Outcome:
    """What came of a case; `error` is empty if it was exact."""

    case: Case
    seconds: float
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Returns all cases; those that others are compared with come first."""
    short, long = arguments.steps, arguments.long_steps
    found: list[Case] = []
    for optimizer in arguments.optimizers:
        for steps in (short, long):
            found.append(Case(f"{optimizer}: undisturbed, {steps} steps", "", optimizer, steps))
        one, three = (f"server:1@{short // 2}",), tuple(f"server:{s}@{20 + 10 * i}~" for i, s in enumerate((1, 0, 1)))
        for name, more in (
            ("spare", ("--spares", "1")),
            ("no spare, survivor", ("--spares", "0", "--without-spare", "survivor")),
            ("no spare, restarted process", ("--spares", "0", "--without-spare", "wait")),
        ):
            for kills, steps in ((one, short), (three, long)):
                reference = f"{optimizer}: undisturbed, {steps} steps"
                found.append(Case(f"{optimizer}: {len(kills)} kills, {name}", reference, optimizer, steps, kills, more))
    first = arguments.optimizers[0]
    reference = f"{first}: undisturbed, {short} steps"
    rng = random.Random(arguments.seed)
    for i in range(arguments.moments):
        step, moment, slot = rng.randrange(5, short - 15), rng.randrange(1, STEP_MS), rng.randrange(3)
        kill = f"server:{slot}@{step}+{moment}"
        found.append(Case(f"{first}: moment {i + 1}, {kill}", reference, first, short, (kill,)))
    wide = ("--servers", "5", "-k", "3", "-r", "2", "--spares", "2")
    for slots in ((0, 1), (1, 3)):
        kills = tuple(f"server:{slot}@{short // 2}" for slot in slots)
        found.append(Case(f"{first}: (3, 2), slots {slots} at once", reference, first, short, kills, wide))
    return found


def run_case(case: Case, arguments: argparse.Namespace, references: dict[str, dict[str, Any]]) -> Outcome:
    """Runs a case; compares it with its reference."""
    out = arguments.out / "".join(c if c.isalnum() else "-" for c in case.name)
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch_ecrec",
        "demo",
        "--no-compare",
        "--out",
        str(out),
        "--steps",
        str(case.steps),
    ]
    command += ["--batch-size", str(arguments.batch_size), "--optimizer", case.optimizer, *case.more]
    for kill in case.kills or ("none",):
        command += ["--kill", kill]
    if arguments.data is not None:
        command += ["--data", str(arguments.data)]
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CASE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Outcome(case, time.monotonic() - begin, error=f"not done in {CASE_LIMIT_S} s")
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        return Outcome(
            case, seconds, error=f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
        )
    result = json.loads((out / "result.json").read_text())
    outcome = Outcome(case, seconds, result)
    if case.reference:
        reference = references[case.reference]
        if len(result["kills"]) != len(case.kills):
            outcome.error = f"{len(result['kills'])} of {len(case.kills)} kills fired"
        elif result["digest"] != reference["digest"]:
            outcome.error = "the digest differs"
        elif result["losses"] != reference["losses"]:
            outcome.error = "losses differ"
    return outcome


def run(arguments: argparse.Namespace) -> int:
    """Runs all cases, prints a line each and the times of all kills; writes OUT/exactness.json. 1 if any differs."""
    references: dict[str, dict[str, Any]] = {}
    outcomes = []
    for case in cases(arguments):
        outcome = run_case(case, arguments, references)
        outcomes.append(outcome)
        if not case.reference and not outcome.error:
            references[case.name] = outcome.result
        word = outcome.error or ("equal, bit for bit" if case.reference else outcome.result["digest"][:16])
        print(f"{case.name:50}  {outcome.seconds:6.1f} s  {word}", flush=True)
        if not case.reference and outcome.error:
            return 1
    report = [
        {"case": o.case.name, "seconds": o.seconds, "error": o.error, "digest": o.result.get("digest")}
        | {key: o.result.get(key) for key in ("kills", "throughput")}
        for o in outcomes
    ]
    (arguments.out / "exactness.json").write_text(json.dumps(report, indent=1))
    times = [
        kill["after_kill_s"] for o in outcomes for kill in o.result.get("kills", ()) if "--spares" not in o.case.more
    ]
    for name in ("detected_s", "rehosted_s", "first_step_s", "rebuilt_s"):
        values = sorted(t[name] for t in times if t.get(name) is not None)
        if values:
            print(
                f"{name:14} of {len(values)} kills with a spare at hand: median {statistics.median(values):.3f},"
                f" least {values[0]:.3f}, most {values[-1]:.3f}"
            )
    wrong = [o for o in outcomes if o.error]
    print(f"{len(outcomes)} runs, {sum(len(o.case.kills) for o in outcomes)} kills, {len(wrong)} not exact")
    return 1 if wrong else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench exactness`."""
    parser.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows; default: made-up rows")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["rowwise_adagrad", "sgd", "adagrad"])
    parser.add_argument("--steps", type=int, default=80, help="of runs with one kill")
    parser.add_argument(
        "--long-steps", type=int, default=1600, help="of runs with three kills, in which processes come back"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--moments", type=int, default=10, help="kills at random moments within a step")
    parser.add_argument("--seed", type=int, default=0, help="of those moments")
    parser.add_argument("--out", type=Path, default=Path("build/exactness"), metavar="DIR")
