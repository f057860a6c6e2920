"""The parts of benchmarks of real training: modes and models, what happens to them in turn, and one result.

    model = Model(workload.SHAPES["embedding-heavy"], trainers=2, pool=0)
    parts = [
        Part(name, parse_mode(name), model, [Kill(steady_s=8.0, seed=0)], spares=1, watched=True)
        for name in ("k2r1", "k4r2")
    ]
    experiment = Experiment("modes", Path("build/modes"), parts, repeats=5, together=True, begin=start_training)
    experiment.run()                    # or `error` says why not; what was found until then stays
    experiment.found["k2r1"]            # a mapping of figures for each turn, in order

A *mode* is a way of training: TorchRec alone, or on our servers with one code and some settings. A *model* is what is
trained, on how many trainers. A *part* is a mode with a model, and its *turns*: functions that let something happen to
what runs (a block of steps, `faults.py`: a kill, a cut) and return what they read off. Parts whose modes have the same
`group` share their processes. `together`: all are started first and take turns, so that noise of the machine meets all
of them, and those that do not have their turn do not train; otherwise one after the other.

    torchrec        TorchRec's DistributedModelParallel over gloo, table-wise, fused FBGEMM: no fault tolerance
    torchrec+ckpt   the same, saving itself with torch.distributed.checkpoint.async_save every X steps
    torch           for --shape sequence, whose Adam TorchRec does not have on a CPU: a copy of the tables on each
                    trainer, DistributedDataParallel with sparse gradients, SparseAdam
    none            our servers without protection, three of them
    k2r1, k4r1 ...  our servers with that code, as many as a stripe has members
    k2r1@6          on six servers; none@6 likewise

Each of ours without the dense snapshot; with "+snap" with one after every step. ":bf16" sends rows and gradients as
bfloat16; ":rows" has trainers pool all bags, ":parts" has slots pool also those of tables on several slots;
":unscrubbed" does not look through records in the background, ":unsealed" keeps no seals either.
"torchrec:tuned" has the setting of glibc's malloc that our processes give themselves (allocator.py).
":pipeline" trains in TorchRec's `TrainPipelineSparseDist`. With the model on a GPU, TorchRec's tables are in the GPU's
memory; those of "torchrec:uvm" are in the host's, and "torchrec:uvm-caching" has a cache of them on the GPU.

Whatever ends an experiment ends all its processes. Their logs are in OUT/logs, and stay there if it fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import psutil

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.places import Here
from torch_ecrec.bench.worker import Assignment
from torch_ecrec.demo.chaos.hosted import lacking
from torch_ecrec.demo.report import Record
from torch_ecrec.demo.watch import Watch
from torch_ecrec.errors import ClusterError
from torch_ecrec.observe import events
from torch_ecrec.observe.progress import Progress
from torch_ecrec.processes.children import await_end, descendants, tail
from torch_ecrec.processes.launch import warm
from torch_ecrec.protocol.status import Status
from torch_ecrec.runtime import allocator
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.testing.hosts import HostsError
from torch_ecrec.transport.etcd import Leader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    ":bf16": {"TORCH_ECREC_WIRE": "bfloat16"},
    ":rows": {"TORCH_ECREC_POOLING": "rows"},
    ":parts": {"TORCH_ECREC_POOLING": "parts"},
    ":rpc": {"TORCH_ECREC_TRANSPORT": "rpc"},
    ":tcp": {"TORCH_ECREC_SHARED_MEMORY_BYTES": "0"},
    ":unscrubbed": {"TORCH_ECREC_SCRUB_BYTES_PER_S": "0"},
    ":unsealed": {"TORCH_ECREC_RECORD_CHECKS": "none"},
}
KERNELS = {":uvm": "fused_uvm", ":uvm-caching": "fused_uvm_caching"}  # of FBGEMM, for TorchRec's tables
START_S, START_S_PER_GB = 300.0, 60.0  # tables are filled, and those started before may still be starting
BLOCK_S = 600.0
STEP_S = 150.0  # for one step: longer than a trainer's own patience
WHOLE_S = 180.0
END_S = 60.0  # a trainer finishes its checkpoint and leaves
SETTLE_S = 1.2  # after a block: members report once a second what they sent
TICK_S = 0.05  # between two looks at a condition
ASK_S = {True: 0.1, False: 0.5}  # between two statuses, by whether events may be lost with a leader's host
PAUSE_STEPS = 20  # a pause is announced so far ahead, so that it finds all trainers at the same step


class Stopped(RuntimeError):
    """A measurement did not complete; the message says which and why."""


# what is compared -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    """A way of training. Modes of one `group` share their processes, and take turns in them.

    Attributes:
        code: of our cluster; None: TorchRec or torch.
        settings: of all its processes, as environment variables.
        snapshot: of the dense model, after every step.
        checkpoint: TorchRec saves itself.
        pipeline: trained in TorchRec's pipeline.
        kernel: how FBGEMM holds TorchRec's tables (`workload.torchrec_plan`).
    """

    name: str
    group: str
    code: CodeSpec | None
    settings: Mapping[str, str]
    snapshot: bool
    checkpoint: bool
    pipeline: bool = False
    kernel: str = "fused"


def parse_mode(name: str) -> Mode:
    """Returns a mode by its name. Raises ValueError."""
    variants = "|".join([*VARIANTS, *KERNELS, ":tuned", ":pipeline"])
    found = re.fullmatch(rf"(torchrec|torch|none|k(\d+)r(\d+))(?:@(\d+))?({variants})?(\+ckpt|\+snap)?", name)
    require(
        found is not None,
        f"unknown system {name!r}; for example torchrec, torchrec+ckpt, none, k2r1, k2r1@6, k4r2:bf16+snap",
    )
    assert found is not None
    base, k, r, servers, variant, more = found.groups()
    ours = not base.startswith("torch")
    require(
        ours or not (variant in VARIANTS or more == "+snap"),
        f"{name!r}: {base} has neither a bf16 wire nor snapshots nor transports here",
    )
    require(base == "torchrec" or more != "+ckpt", f"{name!r}: only torchrec saves checkpoints here")
    require(base != "torch" or variant != ":pipeline", f"{name!r}: TorchRec's pipelines want its own model or ours")
    require(ours or servers is None, f"{name!r}: {base} has no servers")
    code = CodeSpec(int(servers or 3), 2, 1, "none") if ours else None
    if k is not None:
        code = CodeSpec(int(servers or int(k) + int(r)), int(k), int(r))
    require(not ours or variant != ":tuned", f"{name!r}: ours are tuned in any case")
    require(base == "torchrec" or variant not in KERNELS, f"{name!r}: only torchrec has tables in FBGEMM's UVM")
    settings, group, kernel = VARIANTS.get(variant, {}), name.removesuffix(more or ""), KERNELS.get(variant, "fused")
    return Mode(name, group, code, settings, more == "+snap", more == "+ckpt", variant == ":pipeline", kernel)


@dataclass(frozen=True)
class Model:
    """The model of an experiment, its batches, and the number of its trainers.

    Args:
        shape: of the model and its batches.
        trainers: processes that train.
        seed: of the model and the batches.
        pool: batches that each trainer draws, and uses in turn; 0: each step draws another one.
        device: of the dense part, and of TorchRec's tables: "cpu" or "cuda".
    """

    shape: workload.Shape
    trainers: int = 2
    seed: int = 0
    pool: int = workload.POOL
    device: str = "cpu"

    @property
    def samples(self) -> int:
        """The samples in a step of all trainers together."""
        return self.trainers * self.shape.batch

    @property
    def start_limit_s(self) -> float:
        """The time limit until all trainers have their model, and their tables the initial values."""
        return START_S + START_S_PER_GB * 4e-9 * self.shape.tables * self.shape.rows * (self.shape.dim + 1)


Turn = Callable[["Running"], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A mode with a model, and the turns that it takes.

    Args:
        name: in the result.
        turns: what happens in each repeat, in this order.
        spares: servers in reserve.
        least_spares: so many are enough for the next turn, while others are still starting; None: all of them.
        restart: servers that end are started again at once.
        coordinator: more arguments of the coordinator's command line.
        watched: events and statuses of the cluster are heard (`Running.told`).
    """

    name: str
    mode: Mode
    model: Model
    turns: Sequence[Turn]
    spares: int = 0
    restart: bool = True
    coordinator: Sequence[str] = ()
    watched: bool = False
    least_spares: int | None = None


# what runs --------------------------------------------------------------------------------------------


class Steps:
    """The times at which each trainer's steps began and ended, in seconds since the epoch. Steps count from 1."""

    def __init__(self, trainers: int) -> None:
        self._begun: list[list[float]] = [[] for _ in range(trainers)]
        self._ended: list[list[float]] = [[] for _ in range(trainers)]
        self.times: list[float] = []  # [i]: when step i + 1 was complete at all trainers

    def add(self, trainer: int, begin_s: float, end_s: float) -> None:
        """Adds the next step of a trainer."""
        self._begun[trainer].append(begin_s)
        self._ended[trainer].append(end_s)
        while len(self.times) < min(map(len, self._ended)):
            self.times.append(max(ended[len(self.times)] for ended in self._ended))

    @property
    def newest(self) -> int:
        """The last step that some trainer has completed."""
        return max(map(len, self._ended))

    def first_begun_after(self, time_s: float) -> float | None:
        """Returns when the first step that all trainers began after `time_s` was complete; None if none is yet."""
        for i in range(len(self.times) - 1, -1, -1):
            if min(begun[i] for begun in self._begun) <= time_s:
                return self.times[i + 1] if i + 1 < len(self.times) else None
        return self.times[0] if self.times else None

    def rate(self, begin_s: float, end_s: float) -> float | None:
        """Returns steps per second in a window, steps cut by it counted in part; None if it is not covered."""
        if end_s <= begin_s or len(self.times) < 2 or not (self.times[0] <= begin_s and end_s <= self.times[-1]):
            return None
        first, last = np.interp([begin_s, end_s], self.times, np.arange(len(self.times)))
        return float(last - first) / (end_s - begin_s)

    def stall_s(self, begin_s: float, end_s: float) -> float | None:
        """Returns the longest time between two completed steps, from the last before `begin_s` to that at `end_s`."""
        times = np.asarray(self.times)
        around = times[max(0, int(np.searchsorted(times, begin_s)) - 1) : int(np.searchsorted(times, end_s, "right"))]
        return float(np.diff(around).max()) if len(around) > 1 else None


class Running:
    """The processes of a part: trainers (`worker.py`), and for ours a cluster. Use as a context manager.

    Everything waits in `until`, on the thread of who made it; what is heard comes on others, and `changed` guards it.

    Args:
        part: any of those that share these processes.
        folder: for logs and checkpoints.
        place: where they run.

    Attributes:
        started_s: when the trainers' processes were started, by `time.time()`.
        ready: what each trainer said once its model was built.
        steps: those of free training (`go`).
        record: of the cluster's events and statuses; `told`: the events, with the moment of each, as some may lack
            while no coordinator leads; `unhealthy_s`: moments of statuses that had a slot which is not healthy;
            `memory`: with the moment of each status, the most memory of a server with a slot, in bytes, beyond what the
            least of all servers ever had: one without rows. Only where records are on disks.
        watch: of the cluster, where the part is watched.
    """

    def __init__(self, part: Part, folder: Path, place: Here) -> None:
        self.part, self.mode, self.model, self.folder, self.place = part, part.mode, part.model, folder, place
        self.log = folder / "trainers.log"
        self.started_s = 0.0
        self.ready: list[dict[str, Any]] = []
        self.cluster: Any = None  # a `Supervisor`, or `chaos/hosted.py:HostedCluster`
        self.workers: list[subprocess.Popen[str]] = []
        self._goes_back = False  # trainers may end: they are started again
        self._is_free = self._rests = False  # trains without a pause; would, if others did not have their turn
        self.resumed_s = 0.0  # when its last turn began, where parts take turns
        self.watch: Watch | None = None
        self._stack, self._asked_s = contextlib.ExitStack(), 0.0
        self.changed = threading.Condition()  # guards what follows
        self.steps = Steps(self.model.trainers)
        self.record = Record(self.model.trainers, 0 if self.mode.code is None else self.mode.code.slots)
        self.told: list[tuple[float, events.AnyEvent]] = []
        self.unhealthy_s: list[float] = []
        self.memory: list[tuple[float, int]] = []
        self._bare_bytes = 0  # of a server without rows
        self._gone = ""  # why the coordinator is
        self._answers: list[deque[dict[str, Any]]] = [deque() for _ in range(self.model.trainers)]
        self._ended: list[int] = []  # trainers whose output has ended

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._close(politely=False)
            raise
        return self

    def _start(self) -> None:
        mode, model = self.mode, self.model
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if mode.code is not None:
            part, settings = self.part, {**mode.settings, "OMP_NUM_THREADS": "1"}
            self.cluster = self.place.cluster(
                mode.code, self.folder, settings, part.coordinator, part.spares, part.restart
            )
            self._stack.enter_context(self.cluster)
            environment.update(settings, TORCH_ECREC_JOIN=self.cluster.join)
            if part.watched:
                join, within = self.cluster.join, self.place.within
                self.watch = Watch(join, self.on_message, WHOLE_S, within, self.on_closed)
                self._stack.enter_context(self.watch)
        elif mode.group.endswith(":tuned"):
            environment.update(allocator.environment(Settings().keep_freed_bytes))
        environment.update(WORLD_SIZE=str(model.trainers))
        self._environment = environment
        self._start_trainers()

    def _start_trainers(self) -> None:
        mode, model, meeting = self.mode, self.model, self.place.meeting()
        self.started_s = time.time()
        for rank in range(model.trainers):
            with self.log.open("ab") as log:
                worker = self.place.start_trainer(
                    rank,
                    [sys.executable, "-P", "-m", "torch_ecrec.bench.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**self._environment, **meeting, "RANK": str(rank), **self.place.local(rank, model.trainers)},
                    start_new_session=True,  # Ctrl-C reaches us, and we end them
                )
            self.workers.append(worker)
            Worker(functools.partial(self._read, rank, worker), f"trainer {rank}", log_error).start()
        backend = mode.group.partition(":")[0] if mode.code is None else "ecrec"
        shape, folder = dataclasses.asdict(model.shape), str((self.folder / "checkpoint").resolve())
        assignment = Assignment(
            backend, shape, model.seed, folder, mode.pipeline, model.device, model.pool, mode.kernel, model.trainers
        )
        self.tell(dataclasses.asdict(assignment))
        self.ready = self.answers(model.start_limit_s, "the trainers' models")

    def start_again(self, limit_s: float) -> int:
        """Starts the trainers again, as torchrun would, once all of them have ended: everybody has gone back.

        They train freely if they did. `steps` begins anew.

        Returns:
            The number of steps that count already.

        Raises:
            Stopped: they do not end, or do not come back.
        """
        with self.changed:
            self._goes_back = True  # until `_ended` is theirs no more
        lacks = lambda: "" if len(self._ended) == self.model.trainers else "they live"  # noqa: E731
        self.until(lacks, limit_s, "the trainers' end")
        await_end(self.workers, END_S)
        with self.changed:
            self.workers, self._ended = [], []
            self._answers = [deque() for _ in range(self.model.trainers)]
            self.steps, self._goes_back = Steps(self.model.trainers), False
        self._start_trainers()
        if self._is_free:
            self.go()
        return int(self.ready[0]["done"])

    # what arrives -------------------------------------------------------------------------------

    def _read(self, trainer: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.on_line(trainer, json.loads(line))
        self.on_line(trainer, {})

    def on_line(self, trainer: int, message: dict[str, Any]) -> None:
        """Called with each line of a trainer; {}: its output has ended."""
        with self.changed:
            if not message:
                self._ended.append(trainer)
            elif "step" in message:
                self.steps.add(trainer, message["begin_s"], message["end_s"])
            else:
                self._answers[trainer].append(message)
            self.changed.notify_all()

    def on_message(self, message: dict[str, Any]) -> None:
        """Called with each message of the coordinator."""
        with self.changed:
            event = self.record.on_message(message)
            if event is not None:
                self.told.append((message["time_s"], event))
            elif message.get("type") == "status" and (status := self.record.status) is not None:
                if not all(slot.healthy for slot in status.slots):
                    self.unhealthy_s.append(status.time_s)
                self._note_memory(status)
            self.changed.notify_all()

    def _note_memory(self, status: Status) -> None:
        """Notes what servers with a budget take: to look at all memory of others would cost them."""
        sizes = {}
        for member in status.members if "TORCH_ECREC_TIER" in self.mode.settings else ():
            if member.role == "server" and member.alive:
                with contextlib.suppress(psutil.Error):  # it has ended
                    sizes[member.name] = psutil.Process(member.pid).memory_full_info().pss, member.spare
        if sizes:
            least = min(size for size, _ in sizes.values())
            self._bare_bytes = min(self._bare_bytes or least, least)
            most = max((size for size, spare in sizes.values() if not spare), default=self._bare_bytes)
            self.memory.append((status.time_s, most - self._bare_bytes))

    def on_closed(self, reason: str) -> None:
        """Called when the connection with the coordinator has ended."""
        with self.changed:
            self._gone = reason
            self.changed.notify_all()

    # what is asked ------------------------------------------------------------------------------

    @property
    def leader(self) -> Leader | None:
        """The coordinator that is watched; None if there is none at the moment."""
        return None if self.watch is None else self.watch.leader

    def trouble(self) -> str:
        """Returns why the run cannot go on; "": nothing is wrong. Servers lost with their hosts may be intended."""
        if self.record.fatal is not None:
            return f"the cluster has stopped: {self.record.fatal['reason']}"
        if self._ended and not self._goes_back:
            return f"trainer {self._ended[0]} has ended at step {self.steps.newest}"
        if not self.place.takes_hosts:
            return next(iter(self.record.unexpected), self._gone and f"the coordinator is gone: {self._gone}")
        return ""

    def until(self, lacks: Callable[[], str], limit_s: float, what: str) -> float:
        """Waits until nothing is lacking; returns when (`time.time()`). `lacks` says what is, with `changed` held.

        Raises:
            Stopped: not within `limit_s`, or nothing more can come of this.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            if self.cluster is not None:
                self.place.look(self.cluster)
            if self.watch is not None and time.monotonic() - self._asked_s >= ASK_S[self.place.takes_hosts]:
                self._asked_s = time.monotonic()
                self.watch.ask()
            with self.changed:
                missing, trouble, step = lacks(), self.trouble(), self.steps.newest
                if not missing:
                    return time.time()
                if trouble or time.monotonic() > deadline_s:
                    why = trouble or f"not within {limit_s:g} s, at step {step}: {missing}"
                    raise Stopped(f"{self.part.name}: waiting for {what}: {why}\n{tail(self.log)}")
                self.changed.wait(TICK_S)

    def whole(self) -> str:
        """Returns what is lacking until all slots are healthy, and servers and enough spares are there; "": nothing.

        It is called with the lock.
        """
        assert self.mode.code is not None
        if self.leader is None or not self.place.complete(self.cluster):
            return "a process is not there, or nobody leads"
        if not self.record.settled:
            return "slots that are not healthy, or two on one server"
        part, status = self.part, self.record.status
        spares = (0 if status is None else len(status.servers)) - self.mode.code.slots
        least = part.spares if part.least_spares is None else part.least_spares
        return lacking(status, self.mode.code.slots + min(max(spares, least), part.spares))

    # training -----------------------------------------------------------------------------------

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a line to each trainer (`worker.py`). One that has ended is noticed elsewhere."""
        for worker in self.workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(message) + "\n")
                worker.stdin.flush()

    def answers(self, limit_s: float, what: str) -> list[dict[str, Any]]:
        """Returns an answer of every trainer. Raises `Stopped` if one ends, or gives none in time."""

        def lacks() -> str:
            silent = [trainer for trainer, some in enumerate(self._answers) if not some]
            return f"trainer {silent[0]} gave no answer" if silent else ""

        self.until(lacks, limit_s, what)
        with self.changed:
            return [some.popleft() for some in self._answers]

    def ask(self, message: Mapping[str, Any], limit_s: float = BLOCK_S) -> list[dict[str, Any]]:
        """Sends a line to every trainer (`worker.py`), and returns the answers. Raises `Stopped`."""
        self.tell(message)
        return self.answers(limit_s, f"answers to {', '.join(message)}")

    def go(self) -> None:
        """Trains without a pause from now on; `steps` gets the time of each step."""
        self._is_free = True
        self.tell({"go": True})

    def pause(self) -> None:
        """Ends free training, after the same step at all trainers. Raises `Stopped`."""
        with self.changed:
            step = self.steps.newest + PAUSE_STEPS
        self.ask({"pause": step}, STEP_S)
        self._is_free = False

    def rest(self) -> None:
        """Pauses free training until `resume`, while others have their turn. Raises `Stopped`."""
        if self._is_free:
            self.pause()
            self._rests = True

    def resume(self) -> None:
        """Begins a turn: training goes on, if it was free."""
        self.resumed_s = time.time()
        if self._rests:
            self._rests = False
            self.go()

    def trains(self, seconds: float) -> tuple[float, float]:
        """Trains freely for a time; returns begin and end of it, with all steps until then known. Raises `Stopped`."""
        begin_s = time.time()

        def lacks() -> str:
            return "" if self.steps.times and self.steps.times[-1] >= begin_s + seconds else "steps"

        self.until(lacks, seconds + STEP_S, "a window of training")
        return begin_s, begin_s + seconds

    def block(self, steps: int, mode: Mode, checkpoint_every: int = 0) -> dict[str, Any]:
        """Trains a block of steps in a mode of the group; returns its figures. Raises `Stopped`."""
        before, wire = self.sent(), self.place.bytes_sent()
        trainers_s, cluster_s = cpu_s(self.trainer_pids), cpu_s(self.cluster_pids)
        every = checkpoint_every if mode.checkpoint else 0
        answers = self.ask({"run": steps, "snapshot": mode.snapshot, "checkpoint": every})
        wire = self.place.bytes_sent() - wire
        trainers_s, cluster_s = cpu_s(self.trainer_pids) - trainers_s, cpu_s(self.cluster_pids) - cluster_s
        if self.cluster is not None:
            time.sleep(SETTLE_S)
        seconds = max(answer["seconds"] for answer in answers)
        pids = self.trainer_pids + self.cluster_pids  # pages shared among processes are divided by them (PSS)
        return {
            "samples_per_s": steps * self.model.samples / seconds,
            "step_ms": 1e3 * seconds / steps,
            "cpu_s_per_step": (trainers_s + cluster_s) / steps,
            "server_cpu_s_per_step": cluster_s / steps,
            "wire_bytes": wire / steps,
            "sent": {kind: (size - before.get(kind, 0)) / steps for kind, size in self.sent().items()},
            "rss_bytes": sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids),
            "server_bytes": self.server_bytes(),
            "losses": answers[0]["losses"],
            "waits_share": max(answer["waits_s"] / answer["seconds"] for answer in answers),
        }

    # figures ------------------------------------------------------------------------------------

    @property
    def trainer_pids(self) -> list[int]:
        """The pids of the trainers' processes."""
        return [pid for worker in self.workers for pid in (worker.pid, *descendants(worker.pid))]

    @property
    def cluster_pids(self) -> list[int]:
        """The pids of the servers' and the coordinator's processes."""
        children = self.cluster.children if self.cluster is not None else []
        return [pid for child in children for pid in (child.pid, *descendants(child.pid))]

    def sent(self) -> dict[str, int]:
        """Returns the bytes of tensors that all members have sent, by kind; nothing for TorchRec."""
        total: dict[str, int] = {}
        for member in self.cluster.status().members if self.cluster is not None else ():
            for kind, size in (member.report.bytes_sent or {}).items():
                total[kind] = total.get(kind, 0) + size
        return total

    def server_bytes(self) -> dict[str, int]:
        """Returns the bytes of records, parities and logs in the slots."""
        members = self.cluster.status().members if self.cluster is not None else ()
        slots = [slot for member in members for slot in member.report.slots or ()]
        names = ("record_bytes", "parity_bytes", "log_bytes") if slots else ()
        return {name: sum(getattr(slot, name) for slot in slots) for name in names}

    # the end ------------------------------------------------------------------------------------

    def _close(self, politely: bool) -> None:
        if politely:
            self.tell({"end": True})
        else:
            for worker in self.workers:
                worker.kill()
        await_end(self.workers, END_S)
        for worker in self.workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
        self._stack.close()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._close(politely=kind is None and not self._ended and not self._is_free)  # nothing of theirs must be saved


def cpu_s(pids: Sequence[int]) -> float:
    """Returns the user and system time of some processes so far, in seconds."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(spent.user + spent.system for spent in times))


# the whole of it --------------------------------------------------------------------------------------


@dataclass
class Experiment:
    """Runs parts, and collects what they return.

    Args:
        name: of the files.
        out: folder of the results.
        parts: see `Part`; their names are different.
        repeats: of each part's turns.
        together: all parts run at once, and take turns.
        place: `place(part)`, where it runs. With `together`, all run where the first one does.
        begin: called once with each part when it has started, before the first turn: to warm up.
        after: called with the part's name and what a turn has found: to tell of it.

    Attributes:
        found: of each part by its name, what its turns have returned.
        error: why it did not come to its end; None: it did.
    """

    name: str
    out: Path
    parts: Sequence[Part]
    repeats: int = 1
    together: bool = False
    place: Callable[[Part], Here] = lambda part: Here()
    begin: Callable[[Running, Part], None] = lambda running, part: None
    after: Callable[[str, dict[str, Any]], None] = lambda name, found: None
    found: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    error: str | None = None
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.header = record.header()
        self._progress = Progress("", 0)
        self.found = {part.name: [] for part in self.parts}

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs, and of other files that they leave."""
        return self.out / "logs" / self.name

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Keeps an error in the block in `error`. After Ctrl-C, too, which `finish` passes on."""
        try:
            yield
        except KeyboardInterrupt:
            self.error, self.interrupted = "interrupted", True
        except (Stopped, ClusterError, HostsError) as failure:
            self.error = str(failure)

    def run(self) -> None:
        """Runs all parts; `found` and `error` have the results."""
        shutil.rmtree(self.logs, ignore_errors=True)
        warm()  # once, not in each process that is started
        turns = self.repeats * sum(len(part.turns) for part in self.parts)
        with self.caught(), Progress(f"{self.name}: turns", turns) as self._progress:
            for parts in [self.parts] if self.together else [[part] for part in self.parts]:
                self._run(parts)
        if self.error is None:
            shutil.rmtree(self.logs, ignore_errors=True)
            with contextlib.suppress(OSError):  # others' logs are there
                self.logs.parent.rmdir()

    def results(self) -> dict[str, list[dict[str, Any]]]:
        """Runs all parts; returns the results. Raises `Stopped`, or KeyboardInterrupt."""
        self.run()
        if self.interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise Stopped(self.error)
        return self.found

    def _run(self, parts: Sequence[Part]) -> None:
        running: dict[str, Running] = {}
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(self.place(parts[0]))
            for part in parts:
                key = part.mode.group
                if key not in running:
                    print(f"starting {key if self.together else part.name}", flush=True)
                    folder = self.logs / re.sub(r"\W", "-", key if self.together else part.name)
                    running[key] = stack.enter_context(Running(part, folder, place))
            for part in parts:
                self.begin(running[part.mode.group], part)
                if self.together:
                    running[part.mode.group].rest()
            for repeat in range(self.repeats):
                for part in parts:
                    self._turns(part, running[part.mode.group], f"{part.name}, {repeat + 1}/{self.repeats}")

    def _turns(self, part: Part, running: Running, name: str) -> None:
        """Runs the turns of a part."""
        if self.together:
            running.resume()
        for turn in part.turns:
            one = turn(running)
            self.found[part.name].append(one)
            self._progress.add(1)
            self.after(name, one)
        if self.together:
            running.rest()

    def finish(
        self,
        content: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        shown: str,
        draw: Callable[[], Figure] | None,
        copy: Path | None = None,
    ) -> int:
        """Writes and prints the results (`record.finish`). `draw` is called only if there are rows."""
        code = record.finish(
            self.out,
            self.name,
            {"header": self.header, "error": self.error, **content},
            rows,
            shown=shown,
            draw=draw if rows else None,
            error=self.error,
            copy=copy,
        )
        if self.interrupted:
            raise KeyboardInterrupt
        return code
