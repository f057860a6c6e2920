"""The command `chaos`: checks its arguments, makes its runs, and writes their results."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_ecrec.demo import run as demo
from torch_ecrec.demo.chaos.hosted import require_etcd
from torch_ecrec.demo.chaos.hosts import HostsChaos
from torch_ecrec.demo.chaos.power import STEPS_LEAST, faded
from torch_ecrec.demo.chaos.preempted import COUNTS_STEPS, PreemptedRun
from torch_ecrec.demo.chaos.run import ChaosRun
from torch_ecrec.demo.chaos.schedule import EVERY_KIND
from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.result import arguments_json, beside_failure, differences, versions, without_nan
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.demo.troubled_store import TroubledStore
from torch_ecrec.errors import ClusterError
from torch_ecrec.observe import events
from torch_ecrec.processes.children import descendants
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.files import write_whole
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import (
    ALONE_EVENTS,
    BEYOND_EVENTS,
    CHAOS_EVENTS,
    HOST_EVENTS,
    LEADER_EVENTS,
    STORE_EVENTS,
    TIER_EVENTS,
    WORLD_EVENTS,
)
from torch_ecrec.testing import hosts as kit

PACE_STEPS = 150  # of the run that measures the pace
DISTURBED = 0.6  # of the pace is left, about, while events come
DISTURBED_ON_HOSTS = 0.25  # likewise, of the pace on one host
HOSTS_LEAST, HOSTS_MOST = 4, 6


def check(arguments: argparse.Namespace) -> CodeSpec:
    """Raises ValueError or TypeError if an argument is wrong. Starts nothing."""
    if arguments.events is None:
        arguments.events = list(CHAOS_EVENTS)
        arguments.events += HOST_EVENTS if arguments.hosts else ()
        arguments.events += LEADER_EVENTS if arguments.elect else ()
    unknown = [event for event in arguments.events if event not in EVERY_KIND]
    require(not unknown, f"`--events` must be of {', '.join(EVERY_KIND)}, got {', '.join(unknown)}")
    check_hosts(arguments)
    if set(arguments.events) & set(ALONE_EVENTS):
        check_alone(arguments)
    check_tier(arguments)
    if arguments.check_power is not None:
        require_int("check-power", arguments.check_power, STEPS_LEAST, demo.NUMBER_MOST)
    require(0 < arguments.minutes < math.inf, f"`--minutes` must be positive, got {arguments.minutes}")
    arguments.kill, arguments.compare, arguments.max_restarts = ["none"], True, 10_000
    arguments.steps = PACE_STEPS
    code, _ = demo.check(argparse.Namespace(**{**vars(arguments), "checkpoint_every": None}))
    require(code.parities > 0, "chaos without protection loses data at once")
    return code


def check_alone(arguments: argparse.Namespace) -> None:
    """Raises ValueError unless the arguments go with a job that has a cluster of its own."""
    kind = ALONE_EVENTS[0]
    require(arguments.events == [kind], f"`--events {kind}` is asked for alone: the job has a cluster of its own")
    require(not arguments.hosts, f"`--events {kind}` does not go with `--hosts`: leave `--hosts` out")
    own = CodeSpec()
    given = CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)
    require(
        given == own, f"`--events {kind}` is of a cluster with the code that a script gets which says nothing: {own}"
    )
    require(
        arguments.optimizer not in COUNTS_STEPS,
        f"`--events {kind}` does not go with `--optimizer {arguments.optimizer}`, which counts steps: a job that loads"
        " a state dict counts from 1",
    )


def check_tier(arguments: argparse.Namespace) -> None:
    """Raises ValueError unless the arguments go with a tier, or without one."""
    kinds, tiered = [kind for kind in arguments.events if kind in TIER_EVENTS], arguments.tier is not None
    require(tiered or not kinds, f"`--events {','.join(kinds)}` goes with `--tier DIR --memory SIZE`")
    alone = set(arguments.events) & set(ALONE_EVENTS)
    for given, name in (
        (arguments.hosts, "--hosts"),
        (arguments.check_power, "--check-power"),
        (alone, f"--events {','.join(alone)}"),
    ):
        require(not (tiered and given), f"`--tier` does not go with `{name}`: leave one of them out")


def check_hosts(arguments: argparse.Namespace) -> None:
    """Raises ValueError unless the arguments go with that many hosts, and the hosts can be made here."""
    asked = set(arguments.events)
    require_int("hosts", arguments.hosts, 0)
    if not arguments.hosts:
        needs = [kind for kind in arguments.events if kind in HOST_EVENTS + LEADER_EVENTS + WORLD_EVENTS]
        require(not arguments.elect, "`--elect` goes with `--hosts N`")
        require(not needs, f"`--events {','.join(needs)}` goes with `--hosts N`")
        return
    require(
        HOSTS_LEAST <= arguments.hosts <= HOSTS_MOST,
        f"`--hosts` must be from {HOSTS_LEAST} to {HOSTS_MOST}, got {arguments.hosts}",
    )
    require(
        arguments.trainers <= arguments.hosts,
        f"`--trainers {arguments.trainers}`: each has a host of its own, and there are {arguments.hosts}",
    )
    needs = sorted(asked & set(LEADER_EVENTS))
    require(arguments.elect or not needs, f"`--events {','.join(needs)}` goes with `--elect`")
    require(
        not (arguments.elect and "wrong-coordinator" in asked),
        "`--events wrong-coordinator` does not go with `--elect`: etcd says who leads",
    )
    others = sorted(asked & set(BEYOND_EVENTS + STORE_EVENTS))
    require(not others, f"`--events {','.join(others)}` does not go with `--hosts`: leave `--hosts` out")
    require(
        "cut-trainers" not in asked or arguments.trainers > 1,
        f"`--events cut-trainers` needs two trainers, got {arguments.trainers}",
    )
    reason = kit.unavailable()
    require(not reason, f"`--hosts`: {reason}")
    if arguments.elect:
        require_etcd()


def pace(
    arguments: argparse.Namespace, code: CodeSpec, logs: Path, terminal: Terminal, servers: Mapping[str, str]
) -> float:
    """Returns the steps per second of an undisturbed run."""
    run = DemoRun(arguments, code, [], logs, terminal, servers=servers)
    run.execute()
    times = run.record.step_times
    return (len(times) - 1) / (times[-1] - times[0])


def assemble(
    arguments: argparse.Namespace,
    run: ChaosRun | PreemptedRun,
    calm: DemoRun | None,
    error: str | None,
    before: set[int],
    left_out: dict[str, str],
) -> dict[str, Any]:
    """Returns the contents of chaos.json; docs/contributing/chaos.md says what they mean.

    `before`: processes that existed before it; `left_out`: kinds of events that cannot be made here, and why.
    """
    figures = run.figures()
    return {
        "versions": versions(),
        "arguments": arguments_json(arguments),
        "error": error,
        "differences": differences(figures, calm.figures()) if calm is not None and calm.reports else [],
        "unexpected": run.record.unexpected,
        "processes_left": [pid for pid in descendants(os.getpid()) if pid not in before],
        "left_out": left_out,
        "not_effective": run.not_effective(),
        "checkpoints": [asdict(one) for one in run.record.checkpoints],
        "checkpoints_void": [asdict(one) for one in run.record.void],
        "damaged": [events.json_of(event) for event in run.record.damaged],
        "mended": run.record.mended,
        "went_back": [asdict(one) for one in run.record.went_back],
        "trained": run.record.trained,
        "threads": [thread.name for thread in threading.enumerate()],
        "schedule": run.schedule,
        "kills": [kill.to_json(run.record.step_times) for kill in run.record.kills],
        "samples": run.samples,
        **figures,
    }


def summary(result: dict[str, Any]) -> str:
    """Returns the verdict, the number of events of each kind, and how long training stood still after them, as text."""
    different = result["differences"]
    verdict = "EQUAL: every record, every dense parameter and every loss, bit for bit" if not different else "NOT EQUAL"
    counts = Counter(entry["event"] for entry in result["schedule"])
    lines = [verdict, "events: " + ", ".join(f"{counts[event]} {event}" for event in EVERY_KIND if counts[event])]
    if result["checkpoints"] or result["checkpoints_void"]:
        again = sum(back["from_step"] - back["step"] for back in result["went_back"])
        lines.append(
            f"checkpoints: {len(result['checkpoints'])}, and {len(result['checkpoints_void'])} that came to nothing;"
            f" all went back to one {len(result['went_back'])} times, and trained {again} steps again"
        )
    for name, role in (("a trainer", "trainer"), ("a server", "server")):
        values = [kill["after_kill_s"]["first_step_s"] for kill in result["kills"] if kill["role"] == role]
        known = sorted(value for value in values if value is not None)
        if known:
            middle = known[len(known) // 2]
            lines.append(f"first step after the loss of {name}: {middle:.2f} s median, {known[-1]:.2f} s worst")
    return "\n".join(lines)


def prepare_store(arguments: argparse.Namespace) -> tuple[TroubledStore | None, dict[str, str]]:
    """Makes the store of checkpoints, if an event needs one; returns it, and why some kinds cannot be made here.

    They are taken out of `arguments.events`.

    Raises:
        ValueError: no event would be left.
    """
    if not set(arguments.events) & set(BEYOND_EVENTS + STORE_EVENTS):
        return None, {}
    store = TroubledStore(arguments.out / "disk")
    left_out = {kind: reason for kind, reason in store.left_out.items() if kind in arguments.events}
    arguments.events = [kind for kind in arguments.events if kind not in left_out]
    require(bool(arguments.events), f"`--events`: none can be had here: {left_out}")
    return store, left_out


def run_chaos(
    arguments: argparse.Namespace, code: CodeSpec, words: Callable[[str], list[str]], servers: Mapping[str, str]
) -> int:
    """Runs the command; returns 0 if nothing differs and all processes ended, 1 otherwise.

    Args:
        arguments: of the command, checked.
        code: of the cluster.
        words: what a coordinator is told that writes checkpoints to a URL.
        servers: more of the environment of servers (`tier_environment`). The undisturbed run has all in memory.

    Raises:
        ValueError, TypeError: bad arguments.
        ClusterError: a run did not come to its end; the seed is on standard error.
    """
    out, terminal = arguments.out, Terminal()
    begin_s, before = time.time(), set(descendants(os.getpid()))
    error: str | None = "interrupted"
    calm: DemoRun | None = None
    for name in ("chaos.json", "chaos.png"):  # an earlier run's would pass for this one's, if it is interrupted early
        (out / name).unlink(missing_ok=True)
    with sigterm_interrupts(terminal.say):
        store, left_out = prepare_store(arguments)  # first: processes that were started before would not see it
        for kind, reason in left_out.items():
            terminal.say(f"{kind} is left out: {reason}")
        warm(tells=True)
        terminal.say("measuring the pace")
        rate = pace(arguments, code, out / "logs" / "pace", terminal, servers)
        left = DISTURBED_ON_HOSTS if arguments.hosts else DISTURBED
        arguments.steps = max(PACE_STEPS, math.ceil(60 * arguments.minutes * rate * left))
        terminal.say(f"{rate:.1f} steps/s undisturbed: {arguments.steps} steps; seed {arguments.seed}")
        checkpoints = words(store.url) if store is not None else []
        logs = out / "logs" / "run"
        if arguments.hosts:
            run: ChaosRun | PreemptedRun = HostsChaos(
                arguments, code, logs, terminal, require_etcd() if arguments.elect else None
            )
        elif set(arguments.events) & set(ALONE_EVENTS):
            run = PreemptedRun(arguments, code, logs, terminal)
        else:
            run = ChaosRun(arguments, code, logs, terminal, store, checkpoints, servers)
        try:
            try:
                run.execute()
            finally:
                run.release()
            minutes = (time.time() - begin_s) / 60
            terminal.say("\nthe same training, undisturbed:")
            calm = DemoRun(arguments, code, [], out / "logs" / "undisturbed", terminal)
            calm.execute()
            error = None
        except ClusterError as failure:
            error = str(failure)
            print(f"torch-ecrec: chaos with seed {arguments.seed} failed; logs: {out / 'logs'}", file=sys.stderr)
            raise
        finally:
            result = assemble(arguments, run, calm, error, before, left_out)
            text = json.dumps(without_nan(result), indent=1, allow_nan=False) + "\n"
            with beside_failure(), contextlib.suppress(ImportError):  # no matplotlib: the figures are in the JSON
                write_whole(out / "chaos.json", text.encode())
                from torch_ecrec.demo.plot import draw_chaos

                draw_chaos(result, out / "chaos.png")
    faults = [*result["differences"], *run.record.unexpected, *result["not_effective"], *faded(result["losses"])]
    faults += [f"process {pid} is left" for pid in result["processes_left"]]
    terminal.say(f"\n{minutes:.1f} minutes, {arguments.steps} steps, seed {arguments.seed}: {summary(result)}")
    terminal.say(f"written: {out / 'chaos.json'}, {out / 'chaos.png'}")
    if faults:
        print(f"torch-ecrec: seed {arguments.seed}: {'; '.join(faults)}; logs: {out / 'logs'}", file=sys.stderr)
    return 1 if faults else 0
