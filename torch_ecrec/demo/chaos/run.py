"""One training disturbed at random: when events come, whom they hit, and whether they had an effect."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from torch_ecrec.coordinator.regathering import REGATHER_S
from torch_ecrec.demo.chaos import disturbances
from torch_ecrec.demo.chaos.disturbances import STORE_FELT_S, Disturbance
from torch_ecrec.demo.chaos.patience import Patience, waited_s
from torch_ecrec.demo.chaos.schedule import FIRST, MUST_COME, at_one_instant, role_of
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import STALL_LIMIT_S, DemoRun, example
from torch_ecrec.demo.troubled_store import TroubledStore
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.processes.children import descendants, end_tree, free_port, tail
from torch_ecrec.records.tiers.trouble import ERRORS, trouble_signals
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import BEYOND_EVENTS, FLIP_EVENTS, STORE_EVENTS, TIER_EVENTS, Settings

FLIP_SIGNALS = {
    "flip-record": signal.SIGUSR1,
    "flip-parity": signal.SIGUSR2,
    "flip-tier": trouble_signals()["flip"],
}
FLIPPED = {  # the settings of servers whose bits flip
    "TORCH_ECREC_FLIP_ON_SIGNAL": "1",
    "TORCH_ECREC_RECORD_CHECKS": "use",
    "TORCH_ECREC_SCRUB_BYTES_PER_S": "100e6",
}
STOPS_S = (1.0, 5.0, 20.0)
PAUSE_S = (0.3, 4.0)  # between two instants, at least and at most, once the cluster is whole
WHOLE_LIMIT_S = 120.0  # to be whole again after an event, without progress (`Patience`)
GIVE_UP_S = 300.0  # for a process that was killed to be started again, on a machine that has much else to do
FRUITLESS_MOST = 3  # instants without a completed step between them; then none comes before one is
STOP_MARGIN_S = 2.0  # a process may be silent that much longer than it was stopped
SAMPLE_S = 0.5
BEYOND_LIMIT_S = 300.0  # likewise, after everybody began anew
LAST_SHARE = 0.97  # of the steps; later there are no events


class ChaosRun(DemoRun):
    """One training disturbed at random.

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
        servers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(arguments, code, [], logs, terminal, checkpoints, servers)
        if set(arguments.events) & set(FLIP_EVENTS + TIER_EVENTS):
            self.environment.update(FLIPPED)
        self._store = store
        self.environment["TORCH_ECREC_GIVE_UP_S"] = f"{GIVE_UP_S:g}"
        self.stall_limit_s = max(self.stall_limit_s, GIVE_UP_S + STALL_LIMIT_S)
        self._lease_s = Settings.from_environment().lease_s
        self.schedule: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self._random = random.Random(arguments.seed)
        self._next_s: float | None = None  # when the next instant comes; None: not before the cluster is whole
        self._patience = Patience()  # with a cluster that is not whole
        self._fruitless = 0  # instants since the last completed step
        self._step_seen = 0
        self._sampled_s = 0.0
        self.whole_limit_s = WHOLE_LIMIT_S
        self._hit: set[str] = set()  # members, at this instant
        self._kinds: Sequence[str] = ()  # of events, at this instant
        self._left_to_lose = code.parities  # slots, at this instant
        self._leaderless = False  # an event of this instant leaves the cluster without a leader for a while
        self._stopped: dict[int, float] = {}  # pid -> when it goes on
        self._went_on: dict[int, float] = {}  # pid -> when it did (time of day)
        self._under_way: list[Disturbance] = []
        self._written_before: dict[tuple[str, int], int] = {}  # `_written_bytes` at the last instant

    def on_tick(self) -> None:
        """Called many times a second while the trainers run."""
        now_s = time.monotonic()
        for pid in [pid for pid, until_s in self._stopped.items() if until_s <= now_s]:
            del self._stopped[pid]
            send(pid, signal.SIGCONT)
            self._went_on[pid] = time.time()
        with self._lock:
            step, begun = self.record.step, self.record.step_times[:1]
            self._look_at_who_went_on()
            whole, mark = self._is_whole(), self._progress()
        if not begun:
            return
        since_s = time.time() - begun[0]
        if now_s - self._sampled_s >= SAMPLE_S:
            self._sampled_s, pids = now_s, descendants(os.getpid())
            self._sample(since_s, pids)
            if self._stopped:  # nobody need get anywhere meanwhile
                self._patience.begin()
            self._patience.look(now_s, mark, waited_s(pids))
        if step > self._step_seen:
            self._step_seen, self._fruitless = step, 0
        last = step >= LAST_SHARE * self.arguments.steps
        self._look_after(now_s, since_s, last)
        if not last:
            self._go_on(whole and not self._stopped, now_s, since_s)

    def _is_whole(self) -> bool:
        """Returns whether all that former events took is back. Called with the lock."""
        return not self._lacks()

    def _lacks(self) -> list[str]:
        """Returns what is not back yet, for people. Called with the lock."""
        record, found = self.record, []
        if self._awaited is not None:
            found.append(f"{self._awaited.entry['event']} is under way")
        found += [text for kill in record.kills if (text := kill.lacks)]
        missing = [rank for rank in range(self.arguments.trainers) if rank not in record.trainers]
        found += [f"trainer {rank} is not there" for rank in missing]
        for slot, (server, _) in enumerate(record.places):
            if not server:
                found.append(f"nobody has slot {slot}")
            elif not record.healthy[slot]:
                found.append(f"slot {slot} is not rebuilt on {server}: {record.rebuilt[slot]:.0%}")
        shared = Counter(server for server, _ in record.places if server)
        found += [f"{server} has {count} slots" for server, count in shared.items() if count > 1]
        found += [f"{count} damaged of slot {slot} are not repaired" for slot, count in record.unmended.items()]
        for entry in self._flips():
            if record.found <= entry["damaged_before"]:
                found.append(f"the bit of {entry['event']} in {entry['member']} at step {entry['step']} was not found")
        return found

    def _progress(self) -> object:
        """Returns what is another one once anything is nearer to being back. Called with the lock."""
        record = self.record
        marks = sum(kill.marks for kill in record.kills), len(record.pids), record.found, record.mended
        return *marks, round(sum(record.rebuilt), 2), sum(record.healthy), len(record.trainers)

    def _look_at_who_went_on(self) -> None:
        """Who was stopped for longer than a lease, and is heard again as the same, was not lost: nobody led meanwhile,
        or who leads had no core. Called with the lock."""
        status = self.record.status
        for kill in [kill for kill in self.record.kills if kill.spec.startswith("stop-") and kill.detected_s is None]:
            went_on_s = self._went_on.get(kill.pid or 0)
            if status is None or went_on_s is None:
                continue
            for one in self.record.members:
                heard_s = status.time_s - one.silent_s
                if one.name == kill.member and one.alive and heard_s > went_on_s + STOP_MARGIN_S:
                    self.record.kills.remove(kill)
                    self.record.may_be_lost.add(kill.member)

    @property
    def _trouble(self) -> str:
        """The store's trouble that is under way; "" if there is none."""
        return next((one.entry["event"] for one in self._under_way if one.beside), "")

    @property
    def _awaited(self) -> Disturbance | None:
        """The disturbance that must be over before the next instant; None if there is none."""
        return next((one for one in self._under_way if not one.beside), None)

    def _look_after(self, now_s: float, since_s: float, last: bool) -> None:
        """Ends disturbances whose time has come. `last`: no more events come."""
        for one in list(self._under_way):
            one.entry["seconds"] = since_s - one.entry["s"]
            if one.is_over(now_s) or (last and one.beside):
                self._end(one)

    def _end(self, one: Disturbance) -> None:
        one.end()
        self._under_way.remove(one)
        with self._lock:
            self._news.append(f"  {one.entry['event']} is over: {one.entry['felt'] or 'NOBODY FELT IT'}")

    def _go_on(self, whole: bool, now_s: float, since_s: float) -> None:
        """Performs the events of the next instant, if its time has come."""
        if not whole:
            self._next_s = None
            limit_s = BEYOND_LIMIT_S if self.record.went_back else self.whole_limit_s
            if self._patience.is_over(limit_s):
                raise ClusterUnavailable(self._not_whole(limit_s))
            return
        self._patience.begin()
        if self._next_s is None:
            self._next_s = now_s + self._random.uniform(*PAUSE_S)
        elif now_s >= self._next_s and self._fruitless < FRUITLESS_MOST:
            self._next_s = None
            self._fruitless += 1
            with self._lock:
                self._moved_s = now_s  # what comes takes its time
            self._perform(self._instant(), since_s)

    def _not_whole(self, limit_s: float) -> str:
        """Returns who is not back, and why that is waited for no longer."""
        with self._lock:
            lacks, trainers = "; ".join(self._lacks()), len(self.record.trainers)
        patience = self._patience
        since = f"nothing came nearer for {patience.vain_s:.0f} s, of {patience.all_s:.0f} s since the last event"
        said = f"\n{tail(self._log)}" if trainers < self.arguments.trainers else ""
        return f"not whole again within {limit_s:g} s: {lacks} ({since}); last event {self.schedule[-1:]}{said}"

    def _instant(self) -> list[str]:
        """Chooses the kinds of events that come at one instant."""
        possible = [kind for kind in self.arguments.events if self._may_come(kind)]
        came = {entry["event"] for entry in self.schedule}
        most = {"server": self.code.parities, "trainer": self.arguments.trainers}
        return at_one_instant(possible, came, most, self._random)

    def _perform(self, kinds: Sequence[str], since_s: float) -> None:
        """Performs events at one instant. Those that may cost most come first: they decide who else may be hit."""
        self._hit.clear()
        self._left_to_lose, self._kinds = self.code.parities, kinds
        self._leaderless = any(role_of(kind) == "coordinator" for kind in kinds)
        with self._lock:
            self.record.excused = None if self.record.excused is None else set()
        for kind in sorted(kinds, key=lambda kind: FIRST.index(kind) if kind in FIRST else len(FIRST)):
            self._action_of(kind)(kind, since_s)
        with self._lock:
            self._written_before = self._written_bytes()

    def _action_of(self, kind: str) -> Callable[[str, float], None]:
        """Returns the action that makes an event: `action(kind, since_s)`, `since_s` since the first step."""
        for kinds, action in (
            (STORE_EVENTS, self._trouble_store),
            (BEYOND_EVENTS, self._go_beyond),
            ((*FLIP_EVENTS, "flip-tier"), self._flip),
            (TIER_EVENTS, self._trouble_disk),
            (("freeze-all",), self._freeze_all),
            (("second-job",), self._second_job),
        ):
            if kind in kinds:
                return action
        return self._do

    def _may_come(self, kind: str) -> bool:
        """Returns whether an event may come, see the module. Called without the lock: what it reads only grows."""
        if kind in BEYOND_EVENTS:
            return not self._trouble and bool(self.record.checkpoints)
        if kind in STORE_EVENTS:
            return not self._trouble and self._store is not None
        return kind != "kill-coordinator" or self._trouble != "failing-store"

    def _note(
        self, kind: str, number: int | list[int], member: str, pid: int | list[int], since_s: float, **more: Any
    ) -> dict[str, Any]:
        """Adds an entry to the schedule. Called with the lock."""
        who = {"role": role_of(kind), "number": number, "member": member, "pid": pid}
        entry = {"s": since_s, "event": kind, **who, "seconds": 0.0, "step": self.record.step, **more}
        self.schedule.append(entry)
        for_s = f" for {entry['seconds']:g} s" if entry["seconds"] else ""
        pids = f" (pid {pid})" if pid else ""
        self._news.append(f"step {self.record.step}: {kind} {number if number != [] else ''} {member}{for_s}{pids}")
        return entry

    def _go_beyond(self, kind: str, since_s: float) -> None:
        """Kills all processes, or one server more than parity repairs; no other event comes with it."""
        assert self._cluster is not None
        with self._lock:
            now_s, numbers = time.time(), list[int]()
            if kind == "kill-all":
                pids = [child.pid for child in self._cluster.children]
                pids += [self.record.pids[name] for name in self.record.trainers.values()]
                self.record.on_kill(kind, "all", 0, now_s)
            else:
                if any(self.record.target("server", number) is None for number in range(self.code.slots)):
                    return  # one was lost a moment ago
                numbers = sorted(self._random.sample(range(self.code.slots), self.code.parities + 1))
                pids = [self.record.on_kill(kind, "server", number, now_s).pid or 0 for number in numbers]
            self._note(kind, numbers, "", pids, since_s, went_back_before=len(self.record.went_back))
        for pid in pids:
            send(pid, signal.SIGKILL)

    def _flips(self) -> list[dict[str, Any]]:
        return [entry for entry in self.schedule if entry["event"] in FLIP_SIGNALS]

    def _victim(self, kind: str) -> tuple[int, str] | None:
        """Returns a slot, and its host, for an event; None: there is none for it. Called with the lock.

        Of a disk that nothing is asked of, nobody would feel the trouble: of a full one, who writes nothing any more.
        """
        hosts = [(number, self.record.target("server", number)) for number in range(self.code.slots)]
        there = [(number, member) for number, member in hosts if member is not None]
        if kind in TIER_EVENTS:
            now, before = self._written_bytes(), self._written_before if kind == "disk-full" else {}
            there = [one for one in there if now.get(one[::-1], 0) > before.get(one[::-1], 0)]
        return self._random.choice(there) if there else None

    def _written_bytes(self) -> dict[tuple[str, int], int]:
        """Returns how much each host has written of each slot, as it said last. Called with the lock."""
        return {
            (one.name, slot.slot): slot.tier_written_bytes
            for one in self.record.members
            for slot in one.report.slots or []
        }

    def _flip(self, kind: str, since_s: float) -> None:
        """Flips a bit in the memory of a server with a slot; no other event comes with it."""
        with self._lock:
            chosen = self._victim(kind)
            if chosen is None:
                return
            number, member = chosen
            pid = self.record.pids[member]
            self._note(kind, number, member, pid, since_s, damaged_before=self.record.found)
        send(pid, FLIP_SIGNALS[kind])

    def _trouble_disk(self, kind: str, since_s: float) -> None:
        """Brings the disk of a server with a slot into trouble; no other event comes with it."""
        trouble = {"disk-error": "errors", "disk-full": "full"}.get(kind) or self._random.choice(("slow", "hung"))
        with self._lock:
            chosen = self._victim(kind)
            if chosen is None:
                return
            number, member = chosen
            pid, failed = self.record.pids[member], self._failed_reads(member)
            if trouble in ("full", "hung"):  # it ends by itself
                self.record.on_kill(kind, "server", number, time.time())
            if trouble == "errors":

                def felt() -> str:
                    with self._lock:
                        more = self._failed_reads(member) - failed
                    return f"{more} reads failed" if more >= ERRORS else ""

                self._begin(kind, number, f"{member} (pid {pid})", since_s, 0.0, felt, lambda: None)
            else:
                self._note(kind, number, member, pid, since_s, trouble=trouble)
        send(pid, trouble_signals()[trouble])

    def _failed_reads(self, member: str) -> int:
        """Reads of a server's disk that have failed, as it said last. Called with the lock."""
        of_it = (one for one in self.record.members if one.name == member)
        return sum(slot.tier_failed_reads for one in of_it for slot in one.report.slots or [])

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
        """Notes that a lasting event begins. Called with the lock. `more`: of `Disturbance`."""
        entry, now_s = self._note(kind, number, what, 0, since_s, felt=""), time.monotonic()
        self._under_way.append(Disturbance(entry, now_s, now_s + length_s, felt, end, **more))

    def _freeze_all(self, kind: str, since_s: float) -> None:
        """Stops all servers at one instant for longer than a lease, then lets them go on: none has died."""
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
        """Starts another job that names this cluster: it must be refused."""
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

    def _trouble_store(self, kind: str, since_s: float) -> None:
        """Begins a trouble of the store. Training goes on, and so do other events."""
        store = self._store
        assert store is not None
        delayed, void = store.delayed, len(self.record.void)

        def felt() -> str:
            with self._lock:
                return disturbances.felt_by_the_store(kind, store.delayed - delayed, self.record.void[void:])

        with self._lock:
            self._begin(kind, 0, "", since_s, 0.0, felt, store.end, limit_s=STORE_FELT_S, at_end="", beside=True)
        store.begin(kind)

    def not_effective(self) -> list[str]:
        """Returns the events beyond parity, or of the store, that had no effect or never came."""
        found = []
        backs = self.record.went_back
        for entry in self.schedule:
            at = f"{entry['event']} at step {entry['step']}"
            if entry["event"] in BEYOND_EVENTS and len(backs) <= entry["went_back_before"]:
                found.append(f"{at}: nobody went back to a checkpoint")
            if entry.get("felt") == "":
                found.append(f"{at}: nobody felt it")
        flips, damaged, mended = len(self._flips()), self.record.found, self.record.mended
        fits = flips <= damaged if "disk-error" in self.arguments.events else flips == damaged
        if not fits or self.record.unmended:
            found.append(f"{flips} bits were flipped, {damaged} found and {mended} repaired")
        used = sum(event.used for event in self.record.damaged)
        if used:
            found.append(f"{used} damaged records may have been used")
        came = {entry["event"] for entry in self.schedule}
        wanted = [kind for kind in self.arguments.events if kind in MUST_COME and kind not in came]
        for kind in wanted:
            more = ", or `--memory` less: no disk was needed" if kind in TIER_EVENTS else ""
            found.append(f"{kind} never came: `--minutes` must be more{more}")
        return found

    def _do(self, kind: str, since_s: float) -> None:
        """Kills a server, a trainer or the coordinator, or stops it for a while."""
        what, _, role = kind.partition("-")
        with self._lock:
            numbers = list(range(self.code.slots if role == "server" else self.arguments.trainers))
            numbers = [n for n in numbers if self.record.target(role, n) not in self._hit]
            number = 0 if role == "coordinator" or not numbers else self._random.choice(numbers)
            seconds = self._random.choice(STOPS_S) if what == "stop" else 0.0
            member = self.record.target(role, number)
            if member is None or member in self._hit or (role == "server" and self._left_to_lose <= 0):
                return
            self._left_to_lose -= role == "server"
            if role == "trainer" and self.record.excused is not None:
                self.record.excused.update(self.record.trainers.values())
            self._hit.add(member)
            self.record.pids["coordinator"] = self._cluster.coordinator.pid if self._cluster is not None else 0
            pid = self.record.pids[member]
            if what == "kill" or seconds > self._lease_s:
                self.record.on_kill(kind, role, number, time.time())
            elif self._leaderless and seconds + STOP_MARGIN_S > REGATHER_S:
                self.record.may_be_lost.add(member)  # the next coordinator waits for those before it, but for no lease
            self._note(kind, number, member, pid, since_s, seconds=seconds)
        send(pid, signal.SIGSTOP if what == "stop" else signal.SIGKILL)
        if what == "stop":
            self._stopped[pid] = time.monotonic() + seconds

    def _sample(self, since_s: float, pids: Sequence[int]) -> None:
        resident = 0
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                resident += psutil.Process(pid).memory_info().rss
        with self._lock:
            unhealthy = [slot for slot, healthy in enumerate(self.record.healthy) if not healthy]
            self.samples.append(
                {"s": since_s, "step": self.record.step, "unhealthy": unhealthy, "resident_bytes": resident}
            )

    def release(self) -> None:
        """Lets all stopped processes go on: no stopped process can be ended politely. No more disturbances begin.

        Those that were not felt yet were overtaken by the end of training.
        """
        for one in list(self._under_way):
            one.entry["felt"] = one.entry["felt"] or one.at_end
            self._end(one)
        for pid in self._stopped:
            send(pid, signal.SIGCONT)
        self._stopped = {}


def send(pid: int, number: int) -> None:
    """Sends a signal to a process, which may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
