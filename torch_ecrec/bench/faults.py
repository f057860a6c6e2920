"""Faults in an experiment's training, as turns of a `Part`, and their figures: kills, and events of hosts.

    part = Part("1 GB", parse_mode("k2r1"), model, [Kill(steady_s=8.0, seed=0)], spares=1, watched=True)
    Experiment("recovery", out, [part], repeats=5, begin=start_training)

A `Kill` is SIGKILL to the process that hosts a random slot, at a random moment of steady training. On one host the
kernel still delivers what the process had written to its sockets. Of a part that is `Apart` on hosts, the host dies:
its link goes down first, and what had not left is lost. An `Outage` befalls such a part: a host vanishes, a link is
cut, the leader's host dies, a server is drained; what was taken comes back only once all is repaired, so that what it
costs to start processes again is none of the event's. The next fault waits until everything is healthy and every spare
is there again.

Of a kill, `KILLED`: seconds after SIGKILL (`demo/report.py` says of what), but `rebuild_s`, from re-hosted to rebuilt.
Lost are the data and parity records of the slot. Samples per second are of all trainers together: `before` over a
window that ends at the kill, `during` from the kill until all is rebuilt, the pause included, `after` over a window
once a spare is there again (the next kill's `before`). A step counts in part where a window cuts it. `stolen` is the
share of the cores of a virtual machine that others on its hardware got meanwhile, `calm_share` the `during_share` of a
kill where that is little. Memory is the most that a server has beyond one without rows, `before` and `during`.

Of an outage, in seconds after it: `longest_s`, the longest time between the ends of two steps until training was
undisturbed again; `detected_s`, somebody was taken for lost or fenced; `placed_s`, slots had another host;
`repaired_s`, all slots were healthy. `median_s` is the median step of the window before. `calm_s` is the longest step
of a window as long as the event's, once all is whole again: what the machine itself does. Rates are steps per second:
`after / before` once all was repaired, what caused it still there; of a drain, `during / around`, beside the windows
before and after it and the calm one together: what else the machine does changes slower than a short window shows.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from torch_ecrec.bench.experiment import STEP_S, WHOLE_S, Part, Running, Steps, Stopped
from torch_ecrec.bench.places import Apart
from torch_ecrec.demo.report import Kill as Killed
from torch_ecrec.demo.report import since
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.observe import events
from torch_ecrec.processes.children import await_end
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.transport.etcd import Leader

MB = 1e6
STOLEN_MOST = 0.02  # of the cores: a window of which others got more says little of us
WARM_S = 3.0  # of training, not measured
MOMENT_S = 1.0  # a fault comes at a random moment of so many seconds
IDLE_S = 0.5  # for what is under way to end, when trainers pause
CALM_S, CALM_BYTES = 3.0, 4 << 20  # a spare that grows by less has its memory ready; it tells that once a second
GRACE_S = 1.0  # after a spare is there again: every process has just connected with it
DETECT_S = 45.0  # longer than a lease
REPAIR_S = 120.0  # and of a rebuild twice what it takes at the limit, or at
LEAST_MB_PER_S = 20.0
DRAIN_S = 400.0
AROUND_S = 3.0  # of steps before an event, and after all is over, in the picture
END_S = 3.0
KILLED = (
    *("detected_s", "rehosted_s", "first_step_s", "stall_s", "rebuilt_s", "spare_s", "rebuild_s"),
    *("lost_mb", "lost_data_mb", "lost_mb_per_s", "lost_data_mb_per_s"),
    *("before_samples_per_s", "during_samples_per_s", "after_samples_per_s", "during_share"),
    *("stolen", "calm_share"),
    *("before_memory_mb", "during_memory_mb"),
)
HOST, KILL, CUT, ONE_WAY = "host", "kill", "cut", "cut-one-way"
LEADER, LEADER_AND_SERVER, DRAIN = "leader", "leader-and-server", "drain"
KINDS = {
    HOST: "a server's host vanishes: its link is down",
    KILL: "a server's processes are killed",
    CUT: "two servers cannot reach each other",
    ONE_WAY: "one server cannot reach another",
    LEADER: "the host of the coordinator that leads dies",
    LEADER_AND_SERVER: "it dies, and a server's host with it",
    DRAIN: "all slots leave a server",
}
ELECTED = (LEADER, LEADER_AND_SERVER)
WINDOWS = ("before", "after", "control")  # without an event


def start_training(running: Running, part: Part) -> None:
    """Trains freely until everything is there and warm, so that faults may come. Raises `Stopped`."""
    running.go()
    running.until(lambda: "" if running.steps.times else "it", part.model.start_limit_s, "the first step")
    running.until(running.whole, WHOLE_S, "spares")
    await_calm(running)
    running.trains(WARM_S)


# kills ------------------------------------------------------------------------------------------------


def slot_bytes(code: CodeSpec, rows: int, record_bytes: int, slot: int) -> tuple[int, int]:
    """Returns the bytes of data and of parity records on a slot. `rows`: of all tables."""
    layout = Layout(code.slots, code.k, code.parities, rows)
    return record_bytes * layout.data_rows(slot), record_bytes * layout.parity_rows(slot)


def figures_of_kill(
    kill: Killed,
    steps: Steps,
    spare_s: float,
    windows_s: tuple[float, float, float],
    samples: int,
    lost: tuple[int, int],
    stolen: float,
    memory: Sequence[tuple[float, int]] = (),
) -> dict[str, float | None]:
    """Returns all figures of one kill, named in `KILLED`.

    Args:
        kill: with all its times but `first_step_s`, which is the trainers' to say.
        steps: of the trainers.
        spare_s: when a spare was there again.
        windows_s: begin of the window before the kill, begin and end of the one after.
        samples: in one step of all trainers.
        lost: bytes of data and of parity records.
        stolen: the share of all cores that others got, in `before` or `during`, whichever is more.
        memory: moments, and the most memory of a server then, beyond one without rows, in bytes.
    """
    start_s, rehosted_s, rebuilt_s = kill.kill_s, kill.rehosted_s, kill.rebuilt_s
    assert rehosted_s is not None and rebuilt_s is not None
    first_step_s = steps.first_begun_after(start_s)
    rebuild_s = rebuilt_s - rehosted_s
    spans = {
        "before": (windows_s[0], start_s),
        "during": (start_s, rebuilt_s),
        "after": (windows_s[1], windows_s[2]),
    }
    rates = {name: steps.rate(*span) for name, span in spans.items()}
    before, during = rates["before"], rates["during"]
    share = during / before if during is not None and before else None
    return {
        "detected_s": since(kill.detected_s, start_s),
        "rehosted_s": since(rehosted_s, start_s),
        "first_step_s": since(first_step_s, start_s),
        "stall_s": steps.stall_s(start_s, first_step_s) if first_step_s is not None else None,
        "rebuilt_s": since(rebuilt_s, start_s),
        "spare_s": since(spare_s, start_s),
        "rebuild_s": rebuild_s,
        "lost_mb": sum(lost) / MB,
        "lost_data_mb": lost[0] / MB,
        "lost_mb_per_s": sum(lost) / MB / rebuild_s,
        "lost_data_mb_per_s": lost[0] / MB / rebuild_s,
        **{f"{name}_samples_per_s": None if rate is None else rate * samples for name, rate in rates.items()},
        "during_share": share,
        "stolen": stolen,
        "calm_share": share if stolen <= STOLEN_MOST else None,
        **{f"{name}_memory_mb": most_mb(memory, *spans[name]) for name in ("before", "during")},
    }


def most_mb(sizes: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float | None:
    """Returns the most of some bytes between two moments, in 10^6; None if none are of that time."""
    most = max((size for time_s, size in sizes if begin_s <= time_s <= end_s), default=0)
    return most / MB if most else None


def kill_host(running: Running, rng: random.Random) -> Killed:
    """Kills the process that hosts a random slot, by SIGKILL; with its host and link, where it has one of its own.

    It waits until the cluster is whole: on a busy machine a member may be silent for a moment.

    Raises:
        Stopped: it cannot be done.
    """
    slot, kills = rng.randrange(len(running.record.places)), []

    def lacks() -> str:
        missing = running.whole() or running.trouble()
        if not missing:
            kills.append(_kill_host_of(running, slot))
        return missing

    running.until(lacks, WHOLE_S, "a whole cluster to kill in")
    return kills[0]


def _kill_host_of(running: Running, slot: int) -> Killed:
    kill = running.record.on_kill(running.part.name, "server", slot, time.time())
    assert kill.pid is not None, "of all processes alone it is not known"
    gone = f"{running.part.name}: a kill did not fire: no process {kill.pid}"
    if isinstance(running.place, Apart):
        host = running.place.hosts.host_of(kill.pid)
        if host is None or not running.cluster.kill_host(host, float("inf")):
            raise Stopped(gone)
        return kill
    try:
        os.kill(kill.pid, signal.SIGKILL)
    except ProcessLookupError:
        raise Stopped(gone) from None
    return kill


class Stolen:
    """Measures the share of all cores that others on the same hardware get from now on; 0 where no kernel tells it."""

    def __init__(self) -> None:
        self._begin_s, self._begin_stolen_s = time.monotonic(), self._stolen_s()

    def _stolen_s(self) -> float:
        return float(getattr(psutil.cpu_times(), "steal", 0.0))

    def share(self) -> float:
        """Returns it, until now."""
        passed_s = (time.monotonic() - self._begin_s) * (os.cpu_count() or 1)
        return (self._stolen_s() - self._begin_stolen_s) / passed_s if passed_s else 0.0


class Kill:
    """Kills the host of a random slot (`kill_host`): a turn of a part.

    Args:
        steady_s: of training around each kill.
        seed: of slots and moments.
        mb_per_s: what the rebuild is limited to, in 10^6 bytes; 0: not at all.
        idle: trainers pause meanwhile: the speed of the rebuild alone.
        moment_s: a kill comes at a random moment of so many seconds after the window.
    """

    def __init__(
        self, steady_s: float, seed: object, mb_per_s: float = 0.0, idle: bool = False, moment_s: float = MOMENT_S
    ) -> None:
        self.steady_s, self.mb_per_s, self.idle, self.moment_s = steady_s, mb_per_s, idle, moment_s
        self._rng = random.Random(str(seed))
        self._before_s = 0.0  # when the window began that ends at the next kill, if it trains since
        self._stolen = Stolen()  # since then

    def _trains(self, running: Running) -> tuple[float, float]:
        self._stolen = Stolen()
        return running.trains(self.steady_s)

    def __call__(self, running: Running) -> dict[str, Any]:
        """Kills once, and returns the figures. Raises `Stopped`."""
        before_s = self._before_s if self._before_s > running.resumed_s else self._trains(running)[0]
        if self.idle:
            running.pause()
            time.sleep(IDLE_S)
        running.until(running.whole, WHOLE_S, "a status of a whole cluster")  # on a slow link the last may be old
        time.sleep(self._rng.uniform(0.0, self.moment_s))  # a window ends with a step: not always just after one
        stolen = self._stolen.share()
        kill = kill_host(running, self._rng)
        shape, code = running.model.shape, running.mode.code
        assert code is not None
        record_bytes = optimizer("rowwise_adagrad").schema(shape.dim).nbytes
        sizes = [slot_bytes(code, shape.tables * shape.rows, record_bytes, slot) for slot in kill.lost]
        lost = (sum(data for data, _ in sizes), sum(parity for _, parity in sizes))
        stolen = max(stolen, self._recover(running, kill, code.k * sum(lost)))
        spare_s = time.time()
        if self.idle:
            running.go()
        time.sleep(GRACE_S)
        after_s, end_s = self._trains(running)
        with running.changed:
            steps = Steps(0) if self.idle else running.steps  # nobody trained: rates and steps mean nothing
            windows_s, samples = (before_s, after_s, end_s), running.model.samples
            figures = figures_of_kill(kill, steps, spare_s, windows_s, samples, lost, stolen, running.memory)
        self._before_s = after_s
        return {"slot": kill.number, "server": kill.member, "pid": kill.pid, "kill_s": kill.kill_s, **figures}

    def _recover(self, running: Running, kill: Killed, read_bytes: float) -> float:
        """Waits for every phase, until all is whole again, with a spare; returns what was stolen during the rebuild."""
        while_rebuilt = Stolen()
        limit_s = REPAIR_S + 2 * read_bytes / MB / min(self.mb_per_s or LEAST_MB_PER_S, LEAST_MB_PER_S)
        phases: list[tuple[str, Callable[[], float | None], float]] = [
            ("detection", lambda: kill.detected_s, DETECT_S),
            ("slot on another host", lambda: kill.rehosted_s, STEP_S),
            ("first step after", lambda: running.steps.first_begun_after(kill.kill_s), STEP_S),
            ("rebuild", lambda: kill.rebuilt_s, limit_s),
        ]
        for name, time_s, seconds in phases:
            if name != "first step after" or not self.idle:
                what = f"{kill.member} (pid {kill.pid}, host of slot {kill.number}) was killed; its {name}"
                running.until(lambda at=time_s: "" if at() is not None else "it", seconds, what)  # type: ignore[misc]
        stolen = while_rebuilt.share()
        if isinstance(running.place, Apart):
            running.cluster.return_all()
        elif not running.part.restart:
            running.cluster.start_server()
        running.until(running.whole, WHOLE_S, "a spare")
        if running.part.least_spares is None:  # else some are always starting
            await_calm(running)
        return stolen


def await_calm(running: Running) -> None:
    """Waits until spares have their memory ready: that takes a part of a core. Raises `Stopped` if it never ends."""
    seen: list[tuple[float, int]] = []  # when a status was told, and the memory of all spares by it

    def lacks() -> str:
        status = running.record.status
        if status is None:
            return "a status"
        if not seen or status.time_s > seen[-1][0]:
            spares = [member.report.process for member in status.members if member.spare and member.alive]
            seen.append((status.time_s, sum(0 if one is None else one.resident_bytes for one in spares)))
        lately = [size for time_s, size in seen if time_s >= seen[-1][0] - CALM_S]
        calm = seen[-1][0] - seen[0][0] > CALM_S and max(lately) - min(lately) < CALM_BYTES
        return "" if calm else "spares whose memory does not grow"

    running.until(lacks, WHOLE_S, "spares to have their memory ready")


class GoBack:
    """Kills the host of a random slot of a cluster without parity: all go back to a checkpoint. A turn of a part.

    The part's coordinator has `--checkpoint`, `--checkpoint-every` in seconds, and `--beyond checkpoint`. The kill
    comes half an interval after a checkpoint is complete: in the middle of what random moments would give. The trainers
    are started again, as torchrun would.

    Args:
        interval_s: between two checkpoints.
        steady_s: of training before the kill, and once it has caught up.
        seed: of the slot.
    """

    def __init__(self, interval_s: float, steady_s: float, seed: object) -> None:
        self.interval_s, self.steady_s, self._rng = interval_s, steady_s, random.Random(str(seed))

    def __call__(self, running: Running) -> dict[str, Any]:
        """Kills once, and returns the figures and steps of both lives. Raises `Stopped`.

        `first_step_s`: the first step after the kill; `caught_up_s`: training is where it was, each in seconds after
        it; `redone`: the steps in between.
        """
        whole = len(running.record.checkpoints)
        limit_s = 3 * self.interval_s + STEP_S
        running.until(lambda: "" if len(running.record.checkpoints) > whole else "it", limit_s, "a checkpoint")
        before_s, _ = running.trains(max(self.interval_s / 2, self.steady_s))
        kill = kill_host(running, self._rng)
        before = running.steps
        done = running.start_again(running.model.start_limit_s)
        with running.changed:
            reached = done_before(before, kill.kill_s)
        redone = reached - done
        if redone < 0:
            raise Stopped(f"{running.part.name}: training went on after step {done}, and had only reached {reached}")
        running.until(
            lambda: "" if len(running.steps.times) > redone else f"step {reached}",
            self.interval_s + running.model.start_limit_s,
            "training to be where it was",
        )
        after_s, end_s = running.trains(self.steady_s)
        with running.changed:
            after = running.steps
        rate = before.rate(before_s, before.times[-1])
        return {
            "kill_s": kill.kill_s,
            "first_step_s": after.times[0] - kill.kill_s,
            "caught_up_s": after.times[redone] - kill.kill_s,
            "redone": redone,
            "before_samples_per_s": None if rate is None else rate * running.model.samples,
            "after_samples_per_s": (after.rate(after_s, end_s) or 0.0) * running.model.samples,
            "progress": [*progress(before, 0, kill.kill_s), *progress(after, done, kill.kill_s)],
        }


def done_before(steps: Steps, time_s: float) -> int:
    """Returns how many steps all trainers had completed until then."""
    return int(np.searchsorted(steps.times, time_s, "right"))


def progress(steps: Steps, done: int, kill_s: float) -> list[tuple[float, int]]:
    """Returns seconds after a kill, and how many steps counted. `done`: those before these."""
    return [(round(time_s - kill_s, 3), done + i + 1) for i, time_s in enumerate(steps.times)]


# what befalls hosts -----------------------------------------------------------------------------------


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def figures_of_outage(event: Mapping[str, Any], steps: Steps) -> dict[str, Any]:
    """Returns the figures of one event.

    Args:
        event: `event_s`, and the windows `before_s`, `after_s`, `control_s` (begin and end of each), by `time.time()`;
            `detected`, `placed`, `repaired`: moments, or None; `unhealthy`: how many statuses had a slot that is not
            healthy, and how many servers were lost with slots; `during_s`: the window from the event until all was
            repaired, or of a drain.
        steps: of the run.
    """
    before_s, event_s, end_s = event["before_s"], event["event_s"], event["after_s"][1]
    windows = {when: event[f"{when}_s"] for when in (*WINDOWS, "during") if f"{when}_s" in event}
    rates = {when: steps.rate(*window) for when, window in windows.items()}
    around = [(rates[when], windows[when][1] - windows[when][0]) for when in WINDOWS]
    counts = [rate * seconds for rate, seconds in around if rate is not None]
    together = sum(counts) / sum(seconds for _, seconds in around) if len(counts) == len(around) else None
    times = np.asarray(steps.times)
    gaps = np.diff(times[(times >= before_s[0]) & (times <= before_s[1])])
    median_s = float(np.median(gaps)) if len(gaps) else None
    longest_s, calm_s = steps.stall_s(event_s, end_s), steps.stall_s(*event["control_s"])
    return {
        "longest_s": longest_s,
        "median_s": median_s,
        "calm_s": calm_s,
        "longest / median": _ratio(longest_s, median_s),
        "calm / median": _ratio(calm_s, median_s),
        **{f"{name}_s": since(event.get(name), event_s) for name in ("detected", "placed", "repaired")},
        "steps_per_s": rates["before"],
        "after / before": _ratio(rates["after"], rates["before"]),
        "during / around": _ratio(rates.get("during"), together),
        "unhealthy": event["unhealthy"],
    }


class Outage:
    """Makes an event of `KINDS`, on a part that is `Apart`: a turn of it.

    Args:
        kind: of the event.
        steady_s: of training around it.
        rng: of slots and moments.
    """

    def __init__(self, kind: str, steady_s: float, rng: random.Random) -> None:
        self.kind, self.steady_s, self._rng = kind, steady_s, rng

    def __call__(self, running: Running) -> dict[str, Any]:
        """Makes one event, waits until all is repaired and whole, then as long without one; returns the figures.

        Raises:
            Stopped: something did not come back in time.
        """
        place, kind = running.place, self.kind
        assert isinstance(place, Apart)
        before_s = running.trains(self.steady_s)
        time.sleep(self._rng.uniform(0.0, MOMENT_S))
        with running.changed:
            slots = self._rng.sample(range(len(running.record.places)), 2)
            ends = [self._host_of(running, slot) for slot in slots]
            lives = [incarnation for _, incarnation in running.record.places]
            leader, told = running.leader, len(running.told)
            running.unhealthy_s.clear()
        place.looks = kind == DRAIN
        found: dict[str, Any] = {"kind": kind, "before_s": before_s, "event_s": time.time(), "hosts": ends}
        if kind == DRAIN:
            found |= self._drain(running, running.record.places[slots[0]][0])
        else:
            self._take(running, place, ends)
            hit = {HOST: slots[:1], KILL: slots[:1], LEADER_AND_SERVER: slots[:1], LEADER: []}.get(kind, slots)
            lacks = self._unrepaired(running, found["event_s"], hit, lives, leader if kind in ELECTED else None)
            found["repaired"] = running.until(lacks, REPAIR_S, f"repair after {kind}")
            found["during_s"] = found["event_s"], found["repaired"]
        found["after_s"] = running.trains(self.steady_s)
        with running.changed:
            news = running.told[told:]
            lost = [one for _, one in news if isinstance(one, events.Lost) and one.slots]
            found["unhealthy"] = len(running.unhealthy_s) + len(lost)  # what is repaired between two statuses counts
            found["detected"] = min((s for s, e in news if isinstance(e, events.Lost | events.Cut)), default=None)
            found["placed"] = min((s for s, e in news if isinstance(e, events.PlacedAnew)), default=None)
        place.hosts.mend()  # everything comes back that was taken
        running.cluster.return_all()
        place.looks = True
        running.until(running.whole, WHOLE_S, "all to be whole again")
        since_s, until_s = found["event_s"] - AROUND_S, found["after_s"][1]
        found["control_s"] = running.trains(until_s - found["event_s"])
        with running.changed:
            times = list(running.steps.times)
            found |= figures_of_outage(found, running.steps)
        found["step_ends_s"] = [s - found["event_s"] for s in times if since_s <= s <= until_s]
        found["events"] = [(s - found["event_s"], events.json_of(one)) for s, one in news]
        return found

    @staticmethod
    def _host_of(running: Running, slot: int) -> int:
        """Returns the host on which the server of a slot runs. Called with the lock."""
        assert isinstance(running.place, Apart)
        pid = running.record.pids.get(running.record.places[slot][0])
        host = None if pid is None else running.place.hosts.host_of(pid)
        if host is None:
            raise Stopped(f"slot {slot} has no server")
        return host

    @staticmethod
    def _unrepaired(
        running: Running, event_s: float, slots: Sequence[int], lives: Sequence[int], leader: Leader | None
    ) -> Callable[[], str]:
        """Returns a function that says what is lacking until all is repaired.

        All is repaired once (one of) these slots have new hosts, another coordinator leads, and all are healthy.
        """

        def lacks() -> str:
            status, leads = running.record.status, running.leader
            if status is None or status.time_s <= event_s or not status.slots:
                return "a status of now"
            if leader is not None and (leads is None or leads.revision <= leader.revision):
                return "another leader"
            if slots and not any(status.slots[slot].incarnation > lives[slot] for slot in slots):
                return f"another host of one of the slots {list(slots)}"
            return "" if status.healthy else "slots that are not healthy"

        return lacks

    def _take(self, running: Running, place: Apart, ends: Sequence[int]) -> None:
        """Makes the event happen, to the hosts of two slots or to the leader's."""
        if self.kind == HOST:
            place.hosts[ends[0]].unplug()
        elif self.kind == KILL:
            for pid in place.hosts[ends[0]].processes():
                os.kill(pid, signal.SIGKILL)
        elif self.kind == CUT:
            place.hosts.cut(*ends)
        elif self.kind == ONE_WAY:
            place.hosts.cut_one_way(*ends)
        else:
            assert self.kind in ELECTED and running.leader is not None
            address = running.leader.address[0]
            leads = next(host.number for host in place.hosts if host.address == address)
            for number in [leads, *ends[:1]] if self.kind == LEADER_AND_SERVER else [leads]:
                running.cluster.kill_host(number, float("inf"))

    # draining -----------------------------------------------------------------------------------

    def _drain(self, running: Running, name: str) -> dict[str, Any]:
        """Drains a server by the command; returns the window of time, and the bytes that were there."""
        with running.changed:
            reports = next(one for one in running.record.members if one.name == name).report.slots or ()
        held = sum(one.record_bytes + one.parity_bytes + one.log_bytes for one in reports)
        begin_s = time.time()
        self._command(running, "drain", name)
        end_s = time.time()
        self._command(running, "drain", name, "--undo")
        return {"during_s": (begin_s, end_s), "repaired": end_s, "held_bytes": held}

    @staticmethod
    def _command(running: Running, *words: str) -> None:
        """Runs `torch-ecrec` beside the watch, until it ends. Raises `Stopped` if it fails, or takes too long."""
        assert isinstance(running.place, Apart)
        said = running.folder / "commands.log"
        with said.open("ab") as out:
            command = [sys.executable, "-P", "-m", "torch_ecrec", *words, "--join", running.cluster.join]
            process = running.place.watches_from.start(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            running.until(lambda: "" if process.poll() is not None else "its end", DRAIN_S, f"`torch-ecrec {words[0]}`")
        finally:
            if process.poll() is None:
                process.terminate()
            await_end([process], END_S)
        if process.returncode:
            raise Stopped(f"`torch-ecrec {' '.join(words)}` ended with {process.returncode}; see {said}")
