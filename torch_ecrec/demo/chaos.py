"""`torch-ecrec chaos`: a random schedule of kills and hangs against real processes, then: does one bit differ?

    torch-ecrec chaos --minutes 5 --seed 1 -k 4 -r 2 --servers 6 --trainers 3

A short run measures the pace, so that training takes about `--minutes`. Then it trains the demonstration's model while
events come at random moments, alone or several at one instant, and trains the same again undisturbed.

The schedule stays within the contract: an event comes once all that former ones took is there again, and at one instant
at most r servers are hit, with any number of trainers, and the coordinator. A process that is stopped (SIGSTOP) goes on
(SIGCONT) after 1, 5 or 20 s; who is silent for a lease (`TORCH_ECREC_LEASE_S`, 10 s) is taken for lost meanwhile.

Events of `FLIP_EVENTS` come alone: a bit of a record or a parity flips in the memory of a server that hosts a slot
(SIGUSR1, SIGUSR2). The next instant comes once it was found and repaired; a flip that nobody found fails the run. So
that no bit may differ at the end, servers look at records whenever they use them then, and faster in the background.

With events of `BEYOND_EVENTS` or `STORE_EVENTS` the cluster writes checkpoints, to a `TroubledStore`. What is beyond
parity comes once a checkpoint counts, alone, and while the store is well. Trouble of the store lasts until it was felt
(a checkpoint was void by that very error, or opens had to wait); other events go on meanwhile, but the coordinator is
not killed while the store fails: the next one looks there at its start. Every kind that was asked for must have come,
and every such event must have had its effect: all went back, or the store's error was felt.

Written to the folder: chaos.json (arguments, schedule, events, samples of throughput and memory, verdict), chaos.png,
and the logs of all processes. A failure prints the seed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.demo import run as demo
from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.report import Void
from torch_ecrec.demo.result import arguments_json, differences, versions, without_nan
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.demo.troubled_store import TroubledStore
from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.observe import events
from torch_ecrec.processes.children import descendants
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import BEYOND_EVENTS, CHAOS_EVENTS, FLIP_EVENTS, STORE_EVENTS, Settings

EVERY_KIND = CHAOS_EVENTS + FLIP_EVENTS + BEYOND_EVENTS + STORE_EVENTS
FLIP_SIGNALS = {"flip-record": signal.SIGUSR1, "flip-parity": signal.SIGUSR2}
FLIPPED = {  # the settings of servers whose bits flip
    "TORCH_ECREC_FLIP_ON_SIGNAL": "1",
    "TORCH_ECREC_RECORD_CHECKS": "use",
    "TORCH_ECREC_SCRUB_BYTES_PER_S": "100e6",
}
STOPS_S = (1.0, 5.0, 20.0)
PAUSE_S = (0.3, 4.0)  # between two instants, at least and at most, once the cluster is whole
WHOLE_LIMIT_S = 120.0  # to be whole again after an event
FRUITLESS_MOST = 3  # instants without a completed step between them; then none comes before one is
STOP_MARGIN_S = 2.0  # a process may be silent that much longer than it was stopped
SAMPLE_S = 0.5
PACE_STEPS = 150  # of the run that measures the pace
DISTURBED = 0.6  # of the pace is left, about, while events come
BEYOND_LIMIT_S = 300.0  # to be whole again after everybody began anew
FELT_LIMIT_S = 240.0  # for the store's trouble to be felt: a checkpoint is tried a minute after the last one, at most
SLOW_OPENS = 5  # that had to wait
NEW_SHARE = 0.5  # of the instants are for kinds beyond parity, or of the store, that have not come yet
LAST_SHARE = 0.97  # of the steps; later there are no events


@dataclass
class Trouble:
    """Of the store, under way.

    Args:
        kind: of `STORE_EVENTS`.
        delayed, void: how many opens had waited, and checkpoints had come to nothing, before it.
        entry: of the schedule.
    """

    kind: str
    since_s: float
    delayed: int
    void: int
    entry: dict[str, Any]

    def felt(self, void: Sequence[Void], delayed: int) -> str:
        """By what it was felt, "" if it was not yet. `void`: checkpoints that have come to nothing since."""
        if self.kind == "slow-store":
            waited = delayed - self.delayed
            return f"{waited} opens had to wait" if waited >= SLOW_OPENS else ""
        error = os.strerror(errno.ENOSPC if self.kind == "full-disk" else errno.ENOTDIR)
        return next((one.reason for one in void if error in one.reason), "")


class ChaosRun(DemoRun):
    """One training, disturbed at random.

    Attributes:
        schedule: what was done, in order: seconds since the first step, kind, whom, for how long.
        samples: every `SAMPLE_S`: seconds since the first step, step, slots that are not healthy, resident bytes.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        code: CodeSpec,
        logs: Path,
        terminal: Terminal,
        store: TroubledStore | None = None,
        checkpoints: Sequence[str] = (),
    ) -> None:
        super().__init__(arguments, code, [], logs, terminal, checkpoints)
        if set(arguments.events) & set(FLIP_EVENTS):
            self.environment.update(FLIPPED)
        self._store = store
        self._trouble: Trouble | None = None
        self._lease_s = Settings.from_environment().lease_s
        self.schedule: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._random = random.Random(arguments.seed)
        self._next_s: float | None = None  # when the next instant comes; None: not before the cluster is whole
        self._waiting_since_s = time.monotonic()
        self._fruitless = 0  # instants since the last completed step
        self._step_seen = 0
        self._sampled_s = 0.0
        self._stopped: dict[int, float] = {}  # pid -> when it goes on

    def on_tick(self) -> None:
        """Called many times a second while the trainers run."""
        now_s = time.monotonic()
        for pid in [pid for pid, until_s in self._stopped.items() if until_s <= now_s]:
            del self._stopped[pid]
            _send(pid, signal.SIGCONT)
        with self._lock:
            step, begun = self.record.step, self.record.step_times[:1]
            whole = self.record.settled and len(self.record.trainers) == self.arguments.trainers
            whole = whole and self.record.mended >= len(self._flips())
        if not begun:
            self._waiting_since_s = now_s
            return
        since_s = time.time() - begun[0]
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s = now_s
            self._sample(since_s)
        if step > self._step_seen:
            self._step_seen, self._fruitless = step, 0
        last = step >= LAST_SHARE * self.arguments.steps
        self._look_after_store(now_s, since_s, last)
        if last:
            return
        if not whole or self._stopped:
            self._next_s = None
            limit_s = BEYOND_LIMIT_S if self.record.went_back else WHOLE_LIMIT_S
            if now_s - self._waiting_since_s > limit_s + max(STOPS_S):
                raise ClusterUnavailable(f"not whole again within {limit_s:g} s; last event {self.schedule[-1:]}")
        elif self._next_s is None:
            self._next_s = now_s + self._random.uniform(*PAUSE_S)
            self._waiting_since_s = now_s
        elif now_s >= self._next_s and self._fruitless < FRUITLESS_MOST:
            self._next_s, self._waiting_since_s = None, now_s
            self._fruitless += 1
            with self._lock:
                self._moved_s = now_s  # what comes takes its time
            kinds = self._instant()
            for kind in kinds:
                if kind in STORE_EVENTS:
                    self._trouble_store(kind, now_s, since_s)
                elif kind in BEYOND_EVENTS:
                    self._go_beyond(kind, since_s)
                elif kind in FLIP_EVENTS:
                    self._flip(kind, since_s)
                else:
                    self._do(kind, since_s, alone="kill-coordinator" in kinds)

    def _instant(self) -> list[str]:
        """What happens at one instant: mostly one event, now and then several; none where none may come now."""
        possible = [kind for kind in self.arguments.events if self._may_come(kind)]
        kinds = [kind for kind in possible if kind in CHAOS_EVENTS]
        alone = [kind for kind in possible if kind not in CHAOS_EVENTS]
        if alone:
            came = {entry["event"] for entry in self.schedule}
            new = [kind for kind in alone if kind not in came]
            if not kinds or self._random.random() < (NEW_SHARE if new else len(alone) / len(possible)):
                return [self._random.choice(new or alone)]
        if not kinds:
            return []
        chosen = [self._random.choice(kinds)]
        while self._random.random() < 0.3:
            chosen.append(self._random.choice(kinds))
        kept: list[str] = []
        for kind in chosen:
            most = {"server": self.code.parities, "trainer": self.arguments.trainers, "coordinator": 1}
            role = kind.partition("-")[2]
            if sum(other.endswith(role) for other in kept) < most[role]:
                kept.append(kind)
        return kept

    def _may_come(self, kind: str) -> bool:
        """See the module. Called without the lock: what is looked at only grows."""
        if kind in BEYOND_EVENTS:
            return self._trouble is None and bool(self.record.checkpoints)
        if kind in STORE_EVENTS:
            return self._trouble is None and self._store is not None
        return kind != "kill-coordinator" or self._trouble is None or self._trouble.kind != "failing-store"

    def _go_beyond(self, kind: str, since_s: float) -> None:
        """Kills everybody, or one server more than parity repairs; alone."""
        assert self._cluster is not None
        with self._lock:
            now_s, cluster = time.time(), self._cluster
            if kind == "kill-all":
                pids = [child.pid for child in cluster.children]
                pids += [self.record.pids[name] for name in self.record.trainers.values()]
                self.record.on_kill(kind, "all", 0, now_s)
                numbers: list[int] = []
            else:
                if any(self.record.target("server", number) is None for number in range(self.code.slots)):
                    return  # one was lost a moment ago
                numbers = sorted(self._random.sample(range(self.code.slots), self.code.parities + 1))
                pids = [self.record.on_kill(kind, "server", number, now_s).pid or 0 for number in numbers]
            role, back = ("all" if kind == "kill-all" else "server"), len(self.record.went_back)
            entry = {"s": since_s, "event": kind, "role": role, "number": numbers, "member": "", "pid": pids}
            self.schedule.append({**entry, "seconds": 0.0, "step": self.record.step, "went_back_before": back})
            self._news.append(f"step {self.record.step}: {kind} {numbers or ''} (pids {pids})")
        for pid in pids:
            _send(pid, signal.SIGKILL)

    def _flips(self) -> list[dict[str, Any]]:
        return [entry for entry in self.schedule if entry["event"] in FLIP_EVENTS]

    def _flip(self, kind: str, since_s: float) -> None:
        """A bit flips in the memory of a server with a slot; alone."""
        with self._lock:
            number = self._random.randrange(self.code.slots)
            member = self.record.target("server", number)
            if member is None:
                return
            pid, step = self.record.pids[member], self.record.step
            entry = {"s": since_s, "event": kind, "role": "server", "number": number, "member": member, "pid": pid}
            self.schedule.append({**entry, "seconds": 0.0, "step": step})
            self._news.append(f"step {step}: {kind} {number} ({member}, pid {pid})")
        _send(pid, FLIP_SIGNALS[kind])

    def _trouble_store(self, kind: str, now_s: float, since_s: float) -> None:
        """Trouble of the store begins; training goes on, and so do other events."""
        assert self._store is not None
        with self._lock:
            entry = {"s": since_s, "event": kind, "role": "store", "number": 0, "member": "", "pid": 0}
            self.schedule.append({**entry, "seconds": 0.0, "step": self.record.step, "felt": ""})
            self._news.append(f"step {self.record.step}: {kind}")
            self._trouble = Trouble(kind, now_s, self._store.delayed, len(self.record.void), self.schedule[-1])
        self._store.begin(kind)

    def _look_after_store(self, now_s: float, since_s: float, last: bool) -> None:
        """Ends the trouble of the store once it was felt, or it is too late for that."""
        trouble, store = self._trouble, self._store
        if trouble is None or store is None:
            return
        with self._lock:
            trouble.entry["seconds"] = since_s - trouble.entry["s"]
            trouble.entry["felt"] = trouble.felt(self.record.void[trouble.void :], store.delayed)
        if trouble.entry["felt"] or last or now_s - trouble.since_s > FELT_LIMIT_S:
            store.end()
            self._trouble = None
            self._news.append(f"  {trouble.kind} is over: {trouble.entry['felt'] or 'NOBODY FELT IT'}")

    def not_effective(self) -> list[str]:
        """Events beyond parity, or of the store, that were without effect, or never came."""
        found = []
        backs = self.record.went_back
        for entry in self.schedule:
            at = f"{entry['event']} at step {entry['step']}"
            if entry["event"] in BEYOND_EVENTS and len(backs) <= entry["went_back_before"]:
                found.append(f"{at}: nobody went back to a checkpoint")
            if entry["event"] in STORE_EVENTS and not entry["felt"]:
                found.append(f"{at}: nobody felt it")
        flips, damaged = len(self._flips()), sum(event.count for event in self.record.damaged)
        if not flips == damaged == self.record.mended:
            found.append(f"{flips} bits were flipped, {damaged} found and {self.record.mended} repaired")
        used = sum(event.used for event in self.record.damaged)
        if used:
            found.append(f"{used} damaged records may have been used")
        came = {entry["event"] for entry in self.schedule}
        wanted = [kind for kind in self.arguments.events if kind not in CHAOS_EVENTS and kind not in came]
        return found + [f"{kind} never came: `--minutes` must be more" for kind in wanted]

    def _do(self, kind: str, since_s: float, alone: bool = False) -> None:
        """`alone`: there is no coordinator, and the next one waits for those before it, but not for a lease."""
        what, _, role = kind.partition("-")
        with self._lock:
            numbers = list(range(self.code.slots if role == "server" else self.arguments.trainers))
            hit = [entry["number"] for entry in self.schedule if entry["s"] == since_s and entry["role"] == role]
            number = 0 if role == "coordinator" else self._random.choice([n for n in numbers if n not in hit])
            seconds = self._random.choice(STOPS_S) if what == "stop" else 0.0
            member = self.record.target(role, number)
            if member is None:
                return
            self.record.pids["coordinator"] = self._cluster.coordinator.pid if self._cluster is not None else 0
            pid = self.record.pids[member]
            if what == "kill" or seconds > self._lease_s:
                self.record.on_kill(kind, role, number, time.time())
            elif alone and seconds + STOP_MARGIN_S > REGATHER_S:
                self.record.may_be_lost.add(member)
            entry = {"s": since_s, "event": kind, "role": role, "number": number, "member": member, "pid": pid}
            self.schedule.append({**entry, "seconds": seconds, "step": self.record.step})
            for_s = f" for {seconds:g} s" if seconds else ""
            self._news.append(f"step {self.record.step}: {kind} {number}{for_s} ({member}, pid {pid})")
        _send(pid, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        if what == "stop":
            self._stopped[pid] = time.monotonic() + seconds

    def _sample(self, since_s: float) -> None:
        resident = 0
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.Error):
                resident += psutil.Process(pid).memory_info().rss
        with self._lock:
            unhealthy = [slot for slot, healthy in enumerate(self.record.healthy) if not healthy]
            self.samples.append(
                {"s": since_s, "step": self.record.step, "unhealthy": unhealthy, "resident_bytes": resident}
            )

    def release(self) -> None:
        """Lets everybody go on who is stopped: nobody can be ended politely otherwise."""
        for pid in self._stopped:
            _send(pid, signal.SIGCONT)
        self._stopped = {}
        if self._store is not None:
            self._store.end()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def check(arguments: argparse.Namespace) -> CodeSpec:
    """Raises ValueError or TypeError if an argument is wrong; nothing was started."""
    unknown = [event for event in arguments.events if event not in EVERY_KIND]
    require(not unknown, f"`--events` must be of {', '.join(EVERY_KIND)}, got {', '.join(unknown)}")
    require(0 < arguments.minutes < math.inf, f"`--minutes` must be positive, got {arguments.minutes}")
    arguments.kill, arguments.compare, arguments.max_restarts = ["none"], True, 10_000
    arguments.steps = PACE_STEPS
    code, _ = demo.check(argparse.Namespace(**{**vars(arguments), "checkpoint_every": None}))
    require(code.parities > 0, "chaos without protection loses data at once")
    return code


def pace(arguments: argparse.Namespace, code: CodeSpec, logs: Path, terminal: Terminal) -> float:
    """Steps per second of an undisturbed run."""
    run = DemoRun(arguments, code, [], logs, terminal)
    run.execute()
    times = run.record.step_times
    return (len(times) - 1) / (times[-1] - times[0])


def assemble(
    arguments: argparse.Namespace,
    run: ChaosRun,
    calm: DemoRun | None,
    error: str | None,
    before: set[int],
    left_out: dict[str, str],
) -> dict[str, Any]:
    """The contents of chaos.json; docs/chaos.md says what they mean. `before`: processes that were there before it;
    `left_out`: kinds of events that are not to be had here, and why."""
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
    """The verdict, how many events there were of each kind, and how long training stood still after them."""
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
    """Where checkpoints are kept, if an event wants any, and which kinds of events cannot be made here, and why.

    They are taken out of `arguments.events`.

    Raises:
        ValueError: no event would be left.
    """
    if set(arguments.events) <= set(CHAOS_EVENTS + FLIP_EVENTS):
        return None, {}
    store = TroubledStore(arguments.out / "disk")
    left_out = {kind: reason for kind, reason in store.left_out.items() if kind in arguments.events}
    arguments.events = [kind for kind in arguments.events if kind not in left_out]
    require(bool(arguments.events), f"`--events`: none can be had here: {left_out}")
    return store, left_out


def run_chaos(arguments: argparse.Namespace, code: CodeSpec, words: Callable[[str], list[str]]) -> int:
    """Runs it; returns 0 if nothing differs and everybody ended, 1 otherwise.

    Args:
        arguments: of the command, checked.
        code: of the cluster.
        words: what a coordinator is told that writes checkpoints to a URL.

    Raises:
        ValueError, TypeError: bad arguments.
        ClusterError: a run did not come to its end; the seed is on standard error.
    """
    out, terminal = arguments.out, Terminal()
    begin_s, before = time.time(), set(descendants(os.getpid()))
    error: str | None = "interrupted"
    calm: DemoRun | None = None
    with sigterm_interrupts():
        store, left_out = prepare_store(arguments)  # first: processes that were started before would not see it
        for kind, reason in left_out.items():
            terminal.say(f"{kind} is left out: {reason}")
        warm()
        terminal.say("measuring the pace")
        rate = pace(arguments, code, out / "logs" / "pace", terminal)
        arguments.steps = max(PACE_STEPS, math.ceil(60 * arguments.minutes * rate * DISTURBED))
        terminal.say(f"{rate:.1f} steps/s undisturbed: {arguments.steps} steps; seed {arguments.seed}")
        checkpoints = words(store.url) if store is not None else []
        run = ChaosRun(arguments, code, out / "logs" / "run", terminal, store, checkpoints)
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
            (out / "chaos.json").write_text(json.dumps(without_nan(result), indent=1, allow_nan=False) + "\n")
            with contextlib.suppress(ImportError):  # no matplotlib: the figures are in the JSON
                from torch_ecrec.demo.plot import draw_chaos

                draw_chaos(result, out / "chaos.png")
    faults = [*result["differences"], *run.record.unexpected, *result["not_effective"]]
    faults += [f"process {pid} is left" for pid in result["processes_left"]]
    terminal.say(f"\n{minutes:.1f} minutes, {arguments.steps} steps, seed {arguments.seed}: {summary(result)}")
    terminal.say(f"written: {out / 'chaos.json'}, {out / 'chaos.png'}")
    if faults:
        print(f"torch-ecrec: seed {arguments.seed}: {'; '.join(faults)}; logs: {out / 'logs'}", file=sys.stderr)
    return 1 if faults else 0
