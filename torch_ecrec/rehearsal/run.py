"""Runs a training script undisturbed, then with its trainers killed, and compares step by step.

    torch-ecrec rehearse --at 3,7,12 -- train.py ARGS...

Each run has a cluster of its own (`supervisor.py`), which TORCH_ECREC_JOIN names, and trainers under torchrun, which
note every step (`observe/trace.py`). The step in which all trainers are to be killed is written to their folder
before they start; there they wait, each after its push, and say so, and this process kills them. So a kill meets all
of them in that very step, however fast they are, and which step training goes on after is the same each time.

Every wait ends: a run of which nothing has been heard for `limit_s` hangs, and is ended. What a killed trainer has
started itself, workers of a `DataLoader` say, stays as long as its run, as it would on a host of its own. Whatever ends
a rehearsal, SIGKILL included, ends all its processes (`processes/keeper.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.run import NUMBER_MOST
from torch_ecrec.demo.terminal import Terminal, warnings_only
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.observe.rehearsed import mark
from torch_ecrec.observe.trace import ATTACHED, Tail, hold_at
from torch_ecrec.processes.children import descendants, end_of, script_words, torchrun
from torch_ecrec.processes.launch import warm
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.rehearsal import compare, outputs
from torch_ecrec.rehearsal.compare import Trace, Verdict
from torch_ecrec.rehearsal.outputs import Output
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.job import SLOTS_MOST, TRAINERS_MOST, CodeSpec

TICK_S = 0.05
_RANK = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)  # torch's, before each line of an exception
_ENDED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")  # in torchrun's log
LINES_MOST = 12  # of an error
_WARNING = re.compile(r"(?P<file>/[^:]+):\d+: (?P<said>\w*Warning: .*)")
NOT_EXACT = "NOT EXACT"


@dataclass(frozen=True)
class Plan:
    """The options of a rehearsal.

    Args:
        script: as torchrun takes it: FILE ARGS..., or -m MODULE ARGS...
        trainers: processes of the script.
        code, spares, without_spare: of the cluster.
        steps: a run is ended after so many; None: it ends by itself.
        server_too: a server is killed with the trainers, another one each time.
        limit_s: without news, a run hangs.
        out: folder for records and logs.
    """

    script: tuple[str, ...]
    trainers: int
    code: CodeSpec
    spares: int
    without_spare: str
    steps: int | None
    server_too: bool
    limit_s: float
    out: Path


@dataclass
class Outcome:
    """The result of a run. `problem`: why it did not end by itself. `output`: None if it was stopped before."""

    traces: dict[int, Trace] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)  # steps
    problem: str | None = None
    output: Output | None = None
    warned: list[str] = field(default_factory=list)


class Training:
    """One run of the script, undisturbed or with kills.

    Args:
        plan: what is rehearsed.
        name: of the run, and of its folder.
        moments: steps in which all trainers are killed, ascending.
    """

    def __init__(self, plan: Plan, name: str, moments: Sequence[int] = ()) -> None:
        self.plan, self.folder = plan, plan.out / name
        self._moments = list(moments)
        self._outcome = Outcome()
        self._records, self._logs = self.folder / "records", self.folder / "trainers"
        self._checked = False

    def execute(self) -> Outcome:
        """Runs the script to its end, or for `plan.steps`.

        Raises:
            ClusterUnavailable: the cluster has ended.
            ValueError: the script is one that cannot be rehearsed.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self._records.mkdir(parents=True)
        hold_at(self._records, self._moments[0] if self._moments else None)
        tail = Tail(self._records)
        plan, here = self.plan, Path.cwd()
        before = outputs.stamps(here, plan.out)
        with (
            Supervisor(
                plan.code, plan.spares, without_spare=plan.without_spare, logs=self.folder / "cluster"
            ) as cluster,
            torchrun(self._words(), self.folder / "torchrun.log", self._told(cluster.join)) as launcher,
        ):
            self._outcome.problem = self._watch(cluster, launcher, tail)
            tail.look()
            if tail.records and self._outcome.problem is None and not self._checked:  # it was over too soon
                self._check_cluster(cluster)
            ended = launcher.poll() == 0
        self._outcome.traces = compare.traces(tail.records.values())
        self._outcome.warned = self._warnings()
        if ended:
            self._outcome.output = Output(outputs.printed(self._logs), outputs.written(here, plan.out, before))
        return self._outcome

    def _words(self) -> list[str]:
        """Returns the arguments of torchrun."""
        words = ["--nproc-per-node", str(self.plan.trainers), "--max-restarts", str(len(self._moments))]
        return [*words, "--log-dir", str(self._logs), "--redirects", "3", *script_words(self.plan.script)]

    def _warnings(self) -> list[str]:
        """Returns the warnings of all processes of the run.

        These are the library's warnings to trainers, Python's on behalf of the library or the script, and the cluster's
        notices of a run that is not exact.
        """
        found = [
            f"trainer {trainer}: {text}"
            for trainer, trace in self._outcome.traces.items()
            for life in trace.lives
            for text in life.warned
        ]
        for path in sorted(self._logs.glob("*/attempt_*/*/stderr.log")):
            lines = _RANK.sub("", path.read_text(errors="replace")).splitlines()
            found += [
                f"trainer {path.parent.name}: {one['said']}"
                for one in map(_WARNING.match, lines)
                if one and _is_ours(one["file"])
            ]
        for path in sorted((self.folder / "cluster").glob("*.log")):
            found += [line.strip() for line in path.read_text(errors="replace").splitlines() if NOT_EXACT in line]
        return found

    def _told(self, join: str) -> dict[str, str]:
        """Returns the trainers' environment: the cluster, and where to record their steps."""
        told = {"TORCH_ECREC_JOIN": join, "TORCH_ECREC_RECORD": str(self._records)}
        return {**told, "PYTHONUNBUFFERED": "1"}  # what a killed trainer has printed is there

    def _watch(self, cluster: Supervisor, launcher: subprocess.Popen[bytes], tail: Tail) -> str | None:
        """Waits until the trainers are done; returns why they are not, if they fail."""
        heard_s = time.monotonic()
        while launcher.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(TICK_S)
            if cluster.ended is not None:
                raise ClusterUnavailable(f"the coordinator ended with {cluster.ended}; logs: {self.folder}")
            if tail.look():
                heard_s = time.monotonic()
            traces = compare.traces(tail.records.values())
            steps = [trace.steps for trace in traces.values()] if len(traces) == self.plan.trainers else [0]
            if min(steps) and not self._checked:
                self._check_cluster(cluster)
            if any(trace.lives[-1].number > len(self._outcome.killed) for trace in traces.values()):
                return self._ended_by_itself(traces)  # torchrun would try once more
            if self.plan.steps is not None and min(steps) > self.plan.steps and not self._left:
                return None
            if self._left and self._all_held(traces):
                self._kill(cluster, launcher, traces)
                heard_s = time.monotonic()
            if time.monotonic() - heard_s > self.plan.limit_s:
                return self._hangs(traces)
        return self._ended_by_itself(compare.traces(tail.records.values())) if launcher.returncode else None

    @property
    def _left(self) -> list[int]:
        """The steps in which kills are still to come."""
        return self._moments[len(self._outcome.killed) :]

    def _check_cluster(self, cluster: Supervisor) -> None:
        self._checked = True
        here = sum(one.role == "trainer" for one in cluster.status().members)
        require(
            here > 0,
            "the script's trainers are in a cluster of their own, which this rehearsal cannot see: let the script name"
            " none (no `settings=` with `join`, no `session=`), so that it takes the one in TORCH_ECREC_JOIN",
        )

    # kills ----------------------------------------------------------------------------------------

    def _all_held(self, traces: Mapping[int, Trace]) -> bool:
        held = [trace.lives[-1].held for trace in traces.values()]
        return len(held) == self.plan.trainers and all(step == self._left[0] for step in held)

    def _kill(self, cluster: Supervisor, launcher: subprocess.Popen[bytes], traces: Mapping[int, Trace]) -> None:
        """Kills all trainers, which wait for it, and perhaps a server."""
        step = self._left[0]
        pids = [trace.lives[-1].pid for trace in traces.values()]
        if self.plan.server_too:
            pids.append(self._server_to_kill(cluster))
        alive = {*descendants(launcher.pid), *(child.pid for child in cluster.children)}
        if not set(pids) <= alive:
            raise ClusterUnavailable(
                f"of processes {pids}, which were to be killed, some had ended; logs: {self.folder}"
            )
        self._outcome.killed.append(step)
        hold_at(self._records, self._left[0] if self._left else None)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _server_to_kill(self, cluster: Supervisor) -> int:
        """Returns the host of a slot, once all slots are whole."""
        deadline_s = time.monotonic() + self.plan.limit_s
        while True:
            status = cluster.status()
            if status.healthy:
                break
            if time.monotonic() > deadline_s:
                raise ClusterUnavailable(f"a lost server was not rebuilt within {self.plan.limit_s:g} s: {self.folder}")
            time.sleep(TICK_S)
        return status.member(status.slots[len(self._outcome.killed) % len(status.slots)].server).pid

    # what went wrong ------------------------------------------------------------------------------

    def _where(self, traces: Mapping[int, Trace]) -> str:
        step = min((trace.steps for trace in traces.values()), default=0)
        resumed = next((trace.lives[-1].resumed for trace in traces.values()), None)
        if not self._outcome.killed:
            return f"undisturbed, after step {step}" if step else "undisturbed, before its first step"
        back = f", having gone back to step {resumed}" if resumed is not None else ""
        return f"after it was killed in step {self._outcome.killed[-1]}{back}"

    def _ended_by_itself(self, traces: Mapping[int, Trace]) -> str:
        errors = complaints(self._logs)
        refused = any(by_library for _, by_library in errors)
        hint = ["torch_ecrec has refused it, so that it does not train differently."] if refused else []
        said = [text for text, _ in errors] or [last_words(self._logs, self.folder / "torchrun.log")]
        what = "REFUSED" if refused and self._outcome.killed else "FAILED"
        return "\n".join([f"{what}: the script ended {self._where(traces)}", *said, *hint])

    def _hangs(self, traces: Mapping[int, Trace]) -> str:
        left = f"; it was to be killed in step {self._left[0]}" if self._left else ""
        said = [text for text, _ in complaints(self._logs)]
        return "\n".join(
            [f"HANGS: no step for {self.plan.limit_s:g} s, {self._where(traces)}{left} (--limit-s waits longer)", *said]
        )


def complaints(logs: Path) -> list[tuple[str, bool]]:
    """Returns the exceptions that ended trainers, and whether the library raised each.

    They are those of torchrun's last attempt that has some.

    Those that only follow from the end of another trainer come last; equal ones once.
    """
    attempts: dict[int, list[tuple[int, Path]]] = {}
    for path in logs.glob("*/attempt_*/*/stderr.log"):
        attempt = int(path.parent.parent.name.removeprefix("attempt_"))
        attempts.setdefault(attempt, []).append((int(path.parent.name), path))
    for attempt in sorted(attempts, reverse=True):
        found: dict[str, tuple[int, bool]] = {}
        for trainer, path in sorted(attempts[attempt]):
            if (error := _last_exception(path.read_text(errors="replace"))) is not None:
                found.setdefault(error[0], (trainer, error[1]))
        if found:
            ordered = sorted(found.items(), key=lambda item: _follows(item[0]))
            return [(f"trainer {trainer}: {text}", by_library) for text, (trainer, by_library) in ordered]
    return []


def last_words(logs: Path, launched: Path) -> str:
    """Returns how a script ended that has raised nothing: by `sys.exit`, a wrong argument, a crash in C++.

    Args:
        logs: of the trainers.
        launched: what torchrun has said, which may have started none.
    """
    told = launched.read_text(errors="replace") if launched.exists() else ""
    failed = _ENDED.findall(told)
    if not failed:
        return end_of(told, str(launched))
    code, trainer = failed[-1]
    paths = logs.glob(f"*/attempt_*/{trainer}/stderr.log")
    path = max(paths, key=lambda path: int(path.parent.parent.name.removeprefix("attempt_")), default=None)
    said = "" if path is None else _RANK.sub("", path.read_text(errors="replace")).rstrip()
    how = f"trainer {trainer}: no exception, but exit code {code}"
    return f"{how}; {end_of(said, str(path))}" if said else f"{how}, and nothing on standard error"


def _is_ours(file: str) -> bool:
    """Returns whether a warning is on behalf of the library or the script, and not of another library."""
    package = str(Path(__file__).resolve().parent.parent)
    return file.startswith(package) or not any(
        part in file for part in ("site-packages", "dist-packages", "/lib/python")
    )


def _follows(text: str) -> bool:
    """Returns whether an exception only follows from the end of another trainer."""
    return "TrainersLost" in text.split(":")[0] or "gloo" in text or "Connection closed by peer" in text


def _last_exception(text: str) -> tuple[str, bool] | None:
    """Returns Python's text of an uncaught exception, and whether torch_ecrec raised it; None if there is none."""
    found, after = _RANK.sub("", text).rpartition("Traceback (most recent call last):\n")[1:]
    if not found:
        return None
    lines = after.splitlines()
    first = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    places = [line for line in lines[:first] if line.lstrip().startswith('File "')]
    said = lines[first : first + LINES_MOST]
    package = str(Path(__file__).resolve().parent.parent)
    return "\n".join(said), bool(places) and package in places[-1]


# the rehearsal ------------------------------------------------------------------------------------


def plan_of(arguments: argparse.Namespace) -> tuple[Plan, list[int]]:
    """Returns the plan, and the steps at which trainers are killed, if they are given.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was started.
    """
    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    require(bool(script), "name the script: torch-ecrec rehearse [OPTIONS] -- train.py ARGS...")
    require(script[0] == "-m" or Path(script[0]).is_file(), f"{script[0]}: no such file")
    require(script != ["-m"], "`-m` needs the name of a module")
    require_int("nproc-per-node", arguments.nproc_per_node, 1, TRAINERS_MOST)
    require_int("steps", arguments.steps, 0, NUMBER_MOST)
    require_int("restarts", arguments.restarts, 1, arguments.steps or NUMBER_MOST)
    require_int("spares", arguments.spares, 0, SLOTS_MOST)
    require(arguments.limit_s > 0, f"`--limit-s` must be positive, got {arguments.limit_s}")
    steps = arguments.steps or None
    try:
        at = sorted({int(text) for text in arguments.at.split(",")}) if arguments.at else []
    except ValueError:
        raise ValueError(f"`--at` must be steps, as in 3,7,12, got {arguments.at!r}") from None
    within = all(1 <= step <= (steps or step) for step in at)
    require(within, f"`--at` must be from 1 to {steps or 'the last step'}, got {arguments.at}")
    code = CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)
    require(code.parities > 0 or not arguments.server_too, "`--server-too` needs parity: without, data is lost at once")
    plan = Plan(
        tuple(script),
        arguments.nproc_per_node,
        code,
        arguments.spares,
        arguments.without_spare,
        steps,
        arguments.server_too,
        arguments.limit_s,
        arguments.out.resolve(),
    )
    return plan, at


def rehearse(plan: Plan, at: Sequence[int], restarts: int, terminal: Terminal) -> Verdict:
    """Makes the runs and returns the verdict. A script with the verdict EQUAL is marked as rehearsed.

    Args:
        at: steps in which trainers are killed; none: `restarts` of them are chosen.

    Raises:
        ClusterError: a cluster has ended.
        ValueError: the script is one that cannot be rehearsed.
    """
    terminal.say(f"undisturbed: {' '.join(plan.script)}")
    calm = Training(plan, "undisturbed").execute()
    if calm.problem is not None:
        return compare.with_warnings(Verdict(False, calm.problem), {"undisturbed": calm.warned})
    done = min((trace.steps for trace in calm.traces.values()), default=0)
    require(
        done > 0,
        "the script ended without a step of `torch_ecrec.DistributedModelParallel`: there is nothing to rehearse",
    )
    last = done if plan.steps is None else min(done, plan.steps)
    require(not at or at[-1] <= last, f"`--at {at[-1] if at else ''}`: the script trains {last} steps")
    chosen = list(at) or compare.moments(last, compare.pass_ends(calm.traces[0]), restarts)
    terminal.say(f"{last} steps; again, all trainers killed in steps {', '.join(map(str, chosen))}")
    restarted = Training(plan, "restarted", chosen).execute()
    runs = {"undisturbed": calm.warned, "restarted": restarted.warned}
    if restarted.problem is not None:
        return compare.with_warnings(Verdict(False, restarted.problem), runs)
    found = compare.verdict(calm.traces, restarted.traces, restarted.killed, plan.steps)
    first = compare.difference(calm.traces, restarted.traces, plan.steps)
    before_any = first is not None and first.life == 0 and not all(name.startswith(ATTACHED) for name in first.names)
    odd = found.equal and bool(_odds(calm, restarted))
    again: Outcome | None = None
    if (not found.equal and not before_any) or odd:
        terminal.say("something differs; undisturbed once more, to see whether it does without a restart, too")
        again = Training(plan, "undisturbed-again").execute()
        runs["undisturbed again"] = again.warned
        if again.problem is not None:
            return compare.with_warnings(Verdict(False, again.problem), runs)
        found = found if odd else _judged(calm, restarted, again, plan.steps)
    if found.equal:
        _check_kills(restarted, chosen)
        found = _with_output(found, calm, restarted, again)
    if found.equal and plan.steps is not None and done > plan.steps:
        note = f"Ended after {plan.steps} steps (--steps): what the script does later was not rehearsed."
        found = Verdict(True, f"{found.text}\n{note}")
    if found.equal:
        mark(plan.out, calm.traces[0].lives[0].script)
    return compare.with_warnings(found, runs)


def _odds(calm: Outcome, other: Outcome) -> list[outputs.Odd]:
    """Returns the differences in what the script prints and saves; none if one of the runs was stopped."""
    if calm.output is None or other.output is None:
        return []
    return outputs.odds(calm.output, other.output)


def _with_output(found: Verdict, calm: Outcome, restarted: Outcome, again: Outcome | None) -> Verdict:
    """Returns the verdict on runs of equal steps, with their output compared, and what was not compared."""
    if calm.output is None or restarted.output is None:
        return Verdict(
            True,
            f"{found.text}\nNot compared: what the script prints and saves, since it was ended before its end"
            " (--steps 0 lets it go on).",
        )
    noise = {odd.like for odd in _odds(calm, again)} if again is not None else set()
    odd = _odds(calm, restarted)
    if different := [one.text for one in odd if one.like not in noise]:
        return compare.prints_otherwise(outputs.told(different))
    lines = [
        found.text,
        f"Equal, too: what the script prints ({calm.output.lines} lines), and the files that it writes below"
        f" {Path.cwd()} ({len(calm.output.files)}).",
        "Not compared: what it writes elsewhere.",
    ]
    if noise:
        lines.append(f"Nor what differs between two undisturbed runs, too: {outputs.told(sorted(noise))}.")
    return Verdict(True, "\n".join(lines))


def _check_kills(restarted: Outcome, chosen: Sequence[int]) -> None:
    """Raises unless all kills came, and all trainers went on from a step before: else nothing was rehearsed."""
    for trainer, trace in restarted.traces.items():
        back = [life.resumed for life in trace.lives[1:]]
        came = len(back) == len(chosen) and restarted.killed == list(chosen)
        if not came or any(step is None or step >= moment for step, moment in zip(back, chosen, strict=True)):
            raise ClusterUnavailable(
                f"trainer {trainer} was to be killed in steps {list(chosen)}; that was in {restarted.killed}, and it"
                f" went on after steps {back}"
            )


def _judged(calm: Outcome, restarted: Outcome, again: Outcome, steps: int | None) -> Verdict:
    """Returns the verdict on a difference: do the restarts cause it, or is it there without them?"""
    left_out = compare.restless(calm.traces, again.traces)
    noise = compare.difference(calm.traces, again.traces, steps, left_out)
    if noise is not None:
        return compare.not_deterministic(noise)
    return compare.verdict(calm.traces, restarted.traces, restarted.killed, steps, left_out)


@warnings_only()
def run_rehearse(arguments: argparse.Namespace) -> int:
    """Rehearses; returns 0 if nothing differs, 1 if something does or a run did not end.

    Raises:
        ValueError, TypeError: bad arguments, or a script that cannot be rehearsed.
        ClusterError: a cluster has ended.
    """
    plan, at = plan_of(arguments)
    terminal = Terminal()
    with sigterm_interrupts():
        warm(tells=True)
        found = rehearse(plan, at, arguments.restarts, terminal)
    terminal.say(found.text)
    if not found.equal:
        terminal.say(f"Logs and records: {plan.out}")
    return 0 if found.equal else 1
