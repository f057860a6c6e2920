"""One training, disturbed at random: when events come, whom they hit, and whether they had their effect."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.demo.chaos import disturbances
from torch_ecrec.demo.chaos.disturbances import Disturbance
from torch_ecrec.demo.chaos.schedule import MUST_COME, at_one_instant, role_of
from torch_ecrec.demo.chaos.store import FELT_LIMIT_S, Trouble
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import STALL_LIMIT_S, DemoRun, example
from torch_ecrec.demo.troubled_store import TroubledStore
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.processes.children import descendants, end_tree, free_port
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import BEYOND_EVENTS, FLIP_EVENTS, JOB_EVENTS, STORE_EVENTS, Settings

FLIP_SIGNALS = {"flip-record": signal.SIGUSR1, "flip-parity": signal.SIGUSR2}
FLIPPED = {  # the settings of servers whose bits flip
    "TORCH_ECREC_FLIP_ON_SIGNAL": "1",
    "TORCH_ECREC_RECORD_CHECKS": "use",
    "TORCH_ECREC_SCRUB_BYTES_PER_S": "100e6",
}
STOPS_S = (1.0, 5.0, 20.0)
PAUSE_S = (0.3, 4.0)  # between two instants, at least and at most, once the cluster is whole
WHOLE_LIMIT_S = 120.0  # to be whole again after an event
GIVE_UP_S = 300.0  # for a process that was killed to be started again, on a machine that has much else to do
FRUITLESS_MOST = 3  # instants without a completed step between them; then none comes before one is
STOP_MARGIN_S = 2.0  # a process may be silent that much longer than it was stopped
SAMPLE_S = 0.5
BEYOND_LIMIT_S = 300.0  # to be whole again after everybody began anew
LAST_SHARE = 0.97  # of the steps; later there are no events


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
        self.environment["TORCH_ECREC_GIVE_UP_S"] = f"{GIVE_UP_S:g}"
        self.stall_limit_s = max(self.stall_limit_s, GIVE_UP_S + STALL_LIMIT_S)
        self._lease_s = Settings.from_environment().lease_s
        self.schedule: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._random = random.Random(arguments.seed)
        self._next_s: float | None = None  # when the next instant comes; None: not before the cluster is whole
        self._waiting_since_s = time.monotonic()
        self._fruitless = 0  # instants since the last completed step
        self._step_seen = 0
        self._sampled_s = 0.0
        self.whole_limit_s = WHOLE_LIMIT_S
        self._hit: set[str] = set()  # members, at this instant
        self._stopped: dict[int, float] = {}  # pid -> when it goes on
        self._under_way: list[Disturbance] = []

    def on_tick(self) -> None:
        """Called many times a second while the trainers run."""
        now_s = time.monotonic()
        for pid in [pid for pid, until_s in self._stopped.items() if until_s <= now_s]:
            del self._stopped[pid]
            send(pid, signal.SIGCONT)
        with self._lock:
            step, begun, whole = self.record.step, self.record.step_times[:1], self._is_whole()
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
        self._look_after(now_s, since_s, last)
        if not last:
            self._go_on(whole and not self._stopped, now_s, since_s)

    def _is_whole(self) -> bool:
        """All that former events took is there again. Called with the lock."""
        whole = self.record.settled and len(self.record.trainers) == self.arguments.trainers
        whole = whole and not self._under_way
        return whole and self.record.mended >= len(self._flips())

    def _look_after(self, now_s: float, since_s: float, last: bool) -> None:
        """What lasts for a while. `last`: no more events come."""
        self._look_after_store(now_s, since_s, last)
        for one in list(self._under_way):
            one.entry["seconds"] = since_s - one.entry["s"]
            if one.is_over(now_s):
                self._end(one)

    def _end(self, one: Disturbance) -> None:
        one.end()
        self._under_way.remove(one)
        with self._lock:
            self._news.append(f"  {one.entry['event']} is over: {one.entry['felt'] or 'NOBODY FELT IT'}")

    def _go_on(self, whole: bool, now_s: float, since_s: float) -> None:
        """To the next instant, if its time has come."""
        if not whole:
            self._next_s = None
            limit_s = BEYOND_LIMIT_S if self.record.went_back else self.whole_limit_s
            if now_s - self._waiting_since_s > limit_s + max(STOPS_S):
                raise ClusterUnavailable(f"not whole again within {limit_s:g} s{self._lacks()}")
        elif self._next_s is None:
            self._next_s = now_s + self._random.uniform(*PAUSE_S)
            self._waiting_since_s = now_s
        elif now_s >= self._next_s and self._fruitless < FRUITLESS_MOST:
            self._next_s, self._waiting_since_s = None, now_s
            self._fruitless += 1
            with self._lock:
                self._moved_s = now_s  # what comes takes its time
            self._perform(self._instant(), now_s, since_s)

    def _lacks(self) -> str:
        """What to say of a cluster that is not whole."""
        return f"; last event {self.schedule[-1:]}"

    def _instant(self) -> list[str]:
        """What happens at one instant."""
        possible = [kind for kind in self.arguments.events if self._may_come(kind)]
        came = {entry["event"] for entry in self.schedule}
        most = {"server": self.code.parities, "trainer": self.arguments.trainers}
        return at_one_instant(possible, came, most, self._random)

    def _perform(self, kinds: Sequence[str], now_s: float, since_s: float) -> None:
        """Events come, at one instant."""
        self._hit.clear()
        for kind in kinds:
            if kind in STORE_EVENTS:
                self._trouble_store(kind, now_s, since_s)
            elif kind in BEYOND_EVENTS:
                self._go_beyond(kind, since_s)
            elif kind in FLIP_EVENTS:
                self._flip(kind, since_s)
            elif kind in JOB_EVENTS:
                (self._freeze_all if kind == "freeze-all" else self._second_job)(kind, since_s)
            else:
                self._do(kind, since_s, alone="kill-coordinator" in kinds)

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
            send(pid, signal.SIGKILL)

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
        send(pid, FLIP_SIGNALS[kind])

    def _begin(
        self,
        kind: str,
        number: int | list[int],
        what: str,
        since_s: float,
        length_s: float,
        felt: Callable[[], str],
        end: Callable[[], None],
        **more: Any,
    ) -> None:
        """Notes what lasts for a while. Called with the lock. `more`: of `Disturbance`."""
        entry = {"s": since_s, "event": kind, "role": role_of(kind), "number": number, "member": what, "pid": 0}
        self.schedule.append({**entry, "seconds": 0.0, "step": self.record.step, "felt": ""})
        now_s = time.monotonic()
        self._under_way.append(Disturbance(self.schedule[-1], now_s, now_s + length_s, felt, end, **more))
        self._news.append(f"step {self.record.step}: {kind} {what} for {length_s:g} s")

    def _freeze_all(self, kind: str, since_s: float) -> None:
        """All servers stop at one instant, for longer than a lease, and go on: nobody has died."""
        with self._lock:
            servers = [one for one in self.record.members if one.role == "server" and one.present]
            if len(servers) < self.code.slots:
                return  # a status of before all were there
            names, pids = [one.name for one in servers], [one.pid for one in servers]
            began_s = time.time()

            def felt() -> str:
                with self._lock:
                    return disturbances.felt_as_silence(self.record.status, names, began_s)

            def end() -> None:
                for pid in pids:
                    send(pid, signal.SIGCONT)

            length_s = self._lease_s + self._random.choice(disturbances.FROZEN_S)
            self._begin(kind, [], f"({', '.join(names)})", since_s, length_s, felt, end, exact=True)
        for pid in pids:
            send(pid, signal.SIGSTOP)

    def _second_job(self, kind: str, since_s: float) -> None:
        """Somebody else trains something else, and names this cluster: it must be refused."""
        number = sum(entry["event"] == kind for entry in self.schedule)
        log = self.logs / f"{kind}-{number}.log"
        report = ["--report", str((self.logs / f"{kind}-{number}.json").resolve())]
        process = self._launch(log, [*self.script(), "--seed", str(self.arguments.seed + 1), *report])

        def felt() -> str:
            return disturbances.felt_as_refusal(process.poll(), log)

        with self._lock:
            self._begin(
                kind, number, f"(pid {process.pid})", since_s, 0.0, felt, lambda: end_tree(process),
                limit_s=disturbances.REFUSED_LIMIT_S, at_end="",
            )  # fmt: skip

    def _launch(self, log: Path, script: Sequence[str]) -> subprocess.Popen[Any]:
        """Starts another job in this cluster."""
        assert self._cluster is not None
        meet = f"127.0.0.1:{free_port()}"
        words = disturbances.another_job(self._cluster.join, self.arguments.trainers, meet, script)
        with log.open("wb") as out:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=example()[1],
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip

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
            if entry.get("felt") == "":
                found.append(f"{at}: nobody felt it")
        flips, damaged = len(self._flips()), sum(event.count for event in self.record.damaged)
        if not flips == damaged == self.record.mended:
            found.append(f"{flips} bits were flipped, {damaged} found and {self.record.mended} repaired")
        used = sum(event.used for event in self.record.damaged)
        if used:
            found.append(f"{used} damaged records may have been used")
        came = {entry["event"] for entry in self.schedule}
        wanted = [kind for kind in self.arguments.events if kind in MUST_COME and kind not in came]
        return found + [f"{kind} never came: `--minutes` must be more" for kind in wanted]

    def _do(self, kind: str, since_s: float, alone: bool = False) -> None:
        """`alone`: there is no coordinator, and the next one waits for those before it, but not for a lease."""
        what, _, role = kind.partition("-")
        with self._lock:
            numbers = list(range(self.code.slots if role == "server" else self.arguments.trainers))
            numbers = [n for n in numbers if self.record.target(role, n) not in self._hit]
            number = 0 if role == "coordinator" or not numbers else self._random.choice(numbers)
            seconds = self._random.choice(STOPS_S) if what == "stop" else 0.0
            member = self.record.target(role, number)
            if member is None or member in self._hit:
                return
            self._hit.add(member)
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
        send(pid, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
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
        """Lets everybody go on who is stopped: nobody can be ended politely otherwise. No more disturbances: of those
        that nobody has felt yet, the end of training came first."""
        for one in list(self._under_way):
            one.entry["felt"] = one.entry["felt"] or one.at_end
            self._end(one)
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped = {}
        if self._store is not None:
            self._store.end()


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
