"""Throughput of training: our servers with several codes beside plain TorchRec, in one run, in turn.

Systems
    torchrec        TorchRec's DistributedModelParallel over gloo, table-wise, fused FBGEMM: no fault tolerance
    torchrec+ckpt   the same, saving itself with torch.distributed.checkpoint.async_save every X steps
    torch           for --shape sequence, whose Adam TorchRec does not have on a CPU: a copy of the tables on each
                    trainer, DistributedDataParallel with sparse gradients, SparseAdam
    none            our servers without protection, three of them
    k2r1, k4r1 ...  our servers with that code, as many as a stripe has members
    k2r1@6          on six servers; none@6 likewise
Each of ours without the dense snapshot; with "+snap" with one after every step. ":bf16" sends rows and gradients as
bfloat16; ":unscrubbed" does not look through records in the background, ":unsealed" keeps no seals either.
"torchrec:tuned" has the setting of glibc's malloc that our processes give themselves (allocator.py).
":pipeline" trains in TorchRec's `TrainPipelineSparseDist`.

All systems are started, then take turns: one block of steps each, again and again, while the others wait. So noise
that comes and goes meets all of them, and ratios hold where times do not. CPU seconds are user + system time of all
processes of a system. Bytes on the wire are what passes the loopback interface while a block runs, or, with `--hosts`,
what leaves the hosts (places.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.places import Here, OnHosts, require_hosts
from torch_ecrec.bench.worker import Assignment
from torch_ecrec.processes.children import await_end, descendants
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.runtime import allocator
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

VARIANTS = {
    ":bf16": {"TORCH_ECREC_WIRE": "bfloat16"},
    ":rpc": {"TORCH_ECREC_TRANSPORT": "rpc"},
    ":tcp": {"TORCH_ECREC_SHARED_MEMORY_BYTES": "0"},
    ":unscrubbed": {"TORCH_ECREC_SCRUB_BYTES_PER_S": "0"},
    ":unsealed": {"TORCH_ECREC_RECORD_CHECKS": "none"},
}
DEFAULT = "torchrec,torchrec+ckpt,none,none+snap,k2r1,k2r1+snap,k4r1,k4r1+snap,k4r2,k4r2+snap"
DEFAULT_OF_SEQUENCES = "torch,none,k2r1,k2r1+snap,k4r2,k4r2+snap"
START_S = 300.0  # tables are filled, and the systems before may still be starting
BLOCK_S = 600.0
END_S = 60.0  # a trainer finishes its checkpoint and leaves
SETTLE_S = 1.2  # after a block: members report once a second what they sent


@dataclasses.dataclass(frozen=True)
class System:
    """One column of the comparison. Systems of one `group` share their processes, and take turns in them."""

    name: str
    group: str
    code: CodeSpec | None  # None: TorchRec or torch
    settings: dict[str, str]  # of all its processes, as environment variables
    snapshot: bool
    checkpoint: bool
    pipeline: bool = False


def parse_system(name: str) -> System:
    """A system by its name. Raises ValueError."""
    variants = "|".join([*VARIANTS, ":tuned", ":pipeline"])
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
    return System(
        name,
        name.removesuffix(more or ""),
        code,
        VARIANTS.get(variant, {}),
        snapshot=more == "+snap",
        checkpoint=more == "+ckpt",
        pipeline=variant == ":pipeline",
    )


class Group:
    """The processes of one system: trainers, and for ours a cluster of servers. Use as a context manager.

    Args:
        system: any of the group.
        shape: what is trained.
        trainers: number of trainer processes.
        seed: of the model and the batches.
        folder: for logs and checkpoints.
        device: of the dense model: "cpu", or "cuda" for ours.
        coordinator: more arguments of the coordinator's command line.
        pool: batches that each trainer draws, and uses in turn.
        place: where they run; None: here.

    Attributes:
        started_s: when the trainers' processes were started, by `time.time()`.
        ready: what each trainer said once its model was built.
    """

    def __init__(
        self,
        system: System,
        shape: workload.Shape,
        trainers: int,
        seed: int,
        folder: Path,
        device: str = "cpu",
        coordinator: Sequence[str] = (),
        pool: int = workload.POOL,
        place: Here | None = None,
    ) -> None:
        self.device, self.coordinator, self.pool, self.place = device, coordinator, pool, place or Here()
        self.started_s = 0.0
        self.ready: list[dict[str, Any]] = []
        self.system, self.shape, self.trainers, self.seed, self.folder = system, shape, trainers, seed, folder
        self.cluster: Supervisor | None = None
        self.workers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Group:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        system = self.system
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if system.code is not None:
            self.cluster = self.place.cluster(system.code, self.folder, system.settings, self.coordinator)
            environment.update(system.settings, TORCH_ECREC_JOIN=self.cluster.join)
        elif system.group.endswith(":tuned"):
            environment.update(allocator.environment(Settings().keep_freed_bytes))
        environment.update(self.place.meeting(), WORLD_SIZE=str(self.trainers))
        backend = system.group.partition(":")[0] if system.code is None else "ecrec"
        assignment = Assignment(
            backend,
            dataclasses.asdict(self.shape),
            self.seed,
            str(self.folder / "checkpoint"),
            system.pipeline,
            self.device,
            self.pool,
        )
        self.started_s = time.time()
        for rank in range(self.trainers):
            with open(self.folder / f"trainer-{rank}.log", "ab") as log:
                worker = self.place.start_trainer(
                    rank,
                    [sys.executable, "-P", "-m", "torch_ecrec.bench.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**environment, "RANK": str(rank), **self.place.local(rank, self.trainers)},
                )
            self.workers.append(worker)
        self._tell(dataclasses.asdict(assignment))
        self.ready = self._answers(START_S)

    def _tell(self, message: dict[str, Any]) -> None:
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(message) + "\n")
            worker.stdin.flush()

    def _answers(self, limit_s: float) -> list[dict[str, Any]]:
        """One answer of every trainer. Raises RuntimeError if one ends or does not answer in time."""
        lines: list[str] = [""] * len(self.workers)

        def read(i: int) -> None:
            out = self.workers[i].stdout
            assert out is not None
            lines[i] = out.readline()

        readers = [Worker(functools.partial(read, i), f"worker {i}", log_error) for i in range(len(self.workers))]
        deadline = time.monotonic() + limit_s
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        silent = [i for i, line in enumerate(lines) if not line]
        if silent:
            raise RuntimeError(f"{self.system.name}: trainer {silent[0]} gave no answer; its log is in {self.folder}")
        return [json.loads(line) for line in lines]

    def ask(self, message: dict[str, Any], limit_s: float = BLOCK_S) -> list[dict[str, Any]]:
        """Every trainer's answer to a line (`worker.py`). Raises RuntimeError if one ends, or gives none in time."""
        self._tell(message)
        return self._answers(limit_s)

    @property
    def trainer_pids(self) -> list[int]:
        """The pids of the trainers' processes."""
        return [pid for worker in self.workers for pid in (worker.pid, *descendants(worker.pid))]

    @property
    def cluster_pids(self) -> list[int]:
        """The servers' and the coordinator's processes."""
        children = self.cluster.children if self.cluster is not None else []
        return [pid for child in children for pid in (child.pid, *descendants(child.pid))]

    def resident_bytes(self) -> int:
        """Memory of all processes; pages shared among processes are divided by them (PSS)."""
        pids = self.trainer_pids + self.cluster_pids
        return sum(int(psutil.Process(pid).memory_full_info().pss) for pid in pids)

    def sent(self) -> dict[str, int]:
        """Bytes of tensors sent so far by all members, by kind; TorchRec does not say."""
        if self.cluster is None:
            return {}
        total: dict[str, int] = {}
        for member in self.cluster.status().members:
            for kind, size in (member.report.bytes_sent or {}).items():
                total[kind] = total.get(kind, 0) + size
        return total

    def server_bytes(self) -> dict[str, int]:
        """What the slots hold: bytes of records, parities and logs."""
        if self.cluster is None:
            return {}
        slots = [slot for member in self.cluster.status().members for slot in member.report.slots or ()]
        if not slots:
            return {}
        return {
            "record_bytes": sum(slot.record_bytes for slot in slots),
            "parity_bytes": sum(slot.parity_bytes for slot in slots),
            "log_bytes": sum(slot.log_bytes for slot in slots),
        }

    def run(self, steps: int, system: System, checkpoint_every: int) -> dict[str, Any]:
        """Trains a block of steps; returns its figures."""
        before, wire = self.sent(), self.place.bytes_sent()
        trainers_s, cluster_s = cpu_s(self.trainer_pids), cpu_s(self.cluster_pids)
        answers = self.ask(
            {"run": steps, "snapshot": system.snapshot, "checkpoint": checkpoint_every if system.checkpoint else 0}
        )
        wire = self.place.bytes_sent() - wire
        trainers_s, cluster_s = cpu_s(self.trainer_pids) - trainers_s, cpu_s(self.cluster_pids) - cluster_s
        if self.cluster is not None:
            time.sleep(SETTLE_S)
        seconds = max(answer["seconds"] for answer in answers)
        return {
            "samples_per_s": steps * self.trainers * self.shape.batch / seconds,
            "step_ms": 1e3 * seconds / steps,
            "cpu_s_per_step": (trainers_s + cluster_s) / steps,
            "server_cpu_s_per_step": cluster_s / steps,
            "wire_bytes": wire / steps,
            "sent": {kind: (size - before.get(kind, 0)) / steps for kind, size in self.sent().items()},
            "rss_bytes": self.resident_bytes(),
            "server_bytes": self.server_bytes(),
            "losses": answers[0]["losses"],
        }

    def close(self) -> None:
        """Ends all processes: politely, then not."""
        with contextlib.suppress(OSError, ValueError):  # one that has ended reads no more
            self._tell({"end": True})
        await_end(self.workers, END_S)
        if self.cluster is not None:
            self.cluster.close()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is not None:
            for worker in self.workers:
                worker.kill()
        self.close()


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time of some processes so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return float(sum(spent.user + spent.system for spent in times))


FIGURES = ("samples_per_s", "step_ms", "cpu_s_per_step", "server_cpu_s_per_step", "wire_bytes", "rss_bytes")


def summarise(systems: Sequence[System], blocks: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Median, least and most of every figure over the blocks of each system."""
    result: dict[str, Any] = {
        figure: {s.name: record.spread(block[figure] for block in blocks[s.name]) for s in systems}
        for figure in FIGURES
    }
    result["sent_bytes"] = {
        s.name: {kind: round(size) for kind, size in blocks[s.name][-1]["sent"].items() if size} for s in systems
    }
    result["server_bytes"] = {s.name: blocks[s.name][-1]["server_bytes"] for s in systems if s.code is not None}
    result["blocks"] = blocks
    return result


def rows(systems: Sequence[System], result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table: a line per system, with ratios to TorchRec and to our servers without protection."""
    medians = {figure: {s: v["median"] for s, v in result[figure].items()} for figure in FIGURES}
    lines = []
    for system in systems:
        rate, cpu = medians["samples_per_s"][system.name], medians["cpu_s_per_step"][system.name]
        line: dict[str, Any] = {
            "system": system.name,
            "samples/s": rate,
            "least": result["samples_per_s"][system.name]["min"],
            "most": result["samples_per_s"][system.name]["max"],
            "step ms": medians["step_ms"][system.name],
            "CPU ms/step": 1e3 * cpu,
            "of it servers": 1e3 * medians["server_cpu_s_per_step"][system.name],
            "wire MB/step": medians["wire_bytes"][system.name] / 1e6,
            "resident GB": medians["rss_bytes"][system.name] / 1e9,
        }
        for base in ("torchrec", "torch", "none"):
            if base in medians["samples_per_s"]:
                line[f"rate / {base}"] = rate / medians["samples_per_s"][base]
                line[f"CPU / {base}"] = cpu / medians["cpu_s_per_step"][base]
        held = result["server_bytes"].get(system.name)
        line["memory / records"] = sum(held.values()) / held["record_bytes"] if held else None
        lines.append(line)
    return lines


def plot(shape: str, lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Throughput and CPU seconds per step of every system."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [line["system"] for line in lines]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.45 * len(names) + 1.6), sharey=True)
    colours = ["#8a8a8a" if name.startswith("torch") else "#2b6cb0" for name in names]
    rates = [line["samples/s"] for line in lines]
    error = [
        [line["samples/s"] - line["least"] for line in lines],
        [line["most"] - line["samples/s"] for line in lines],
    ]
    left.barh(names, rates, xerr=error, color=colours, ecolor="#333333", capsize=2)
    left.set_xlabel("samples/s (median; least to most of the blocks)")
    right.barh(names, [line["CPU ms/step"] for line in lines], color=colours)
    right.set_xlabel("CPU ms per step, all processes")
    left.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.bar_label(axes.containers[-1], fmt="{:,.0f}", padding=3, fontsize=8)
    figure.suptitle(f"Training, {shape}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def check(arguments: argparse.Namespace) -> tuple[workload.Shape, list[System]]:
    """What is trained, by which systems. Raises ValueError or TypeError if an argument is wrong."""
    shape = workload.resized(
        workload.SHAPES[arguments.shape],
        rows=arguments.rows,
        dim=arguments.dim,
        batch=arguments.batch_size,
        data=str(arguments.data) if arguments.data else None,
    )
    require(arguments.data is None or arguments.shape == "criteo", "`--data` goes with `--shape criteo`")
    default = DEFAULT_OF_SEQUENCES if shape.sequence else DEFAULT
    systems = [parse_system(name) for name in (arguments.systems or default).split(",")]
    for system in systems:
        rival = system.group.partition(":")[0]
        require(
            system.code is not None or (rival == "torch") == shape.sequence,
            f"`--shape {arguments.shape}` is not for {rival}: "
            + ("FBGEMM has no Adam on a CPU; take torch" if shape.sequence else "take torchrec"),
        )
    require(len({s.name for s in systems}) == len(systems), f"a system is named twice: {arguments.systems}")
    require(
        arguments.device == "cpu" or all(s.code is not None for s in systems),
        f"`--device {arguments.device}` is for our systems: TorchRec's tables would be on it, too",
    )
    require(arguments.device == "cpu" or torch.cuda.is_available(), "`--device cuda`: torch sees no GPU here")
    require_int("blocks", arguments.blocks, 1)
    require_int("trainers", arguments.trainers, 1)
    require_int("hosts", arguments.hosts, 0)
    require(arguments.link_gbit >= 0, f"`--link-gbit` must not be negative, got {arguments.link_gbit}")
    require(arguments.hosts > 0 or not arguments.link_gbit, "`--link-gbit` goes with `--hosts`")
    if arguments.hosts:
        require_hosts()
    return shape, systems


def measure(
    arguments: argparse.Namespace, shape: workload.Shape, systems: Sequence[System], folder: Path
) -> tuple[dict[str, int], dict[str, list[dict[str, Any]]]]:
    """Starts all systems, and lets them take turns.

    Returns:
        Of each system by its name: steps of a block, and the figures of its blocks.

    Raises:
        RuntimeError: a trainer has ended, or gives no answer.
    """
    blocks: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    steps: dict[str, int] = {}
    groups: dict[str, Group] = {}
    where = OnHosts(arguments.hosts, 1e9 * arguments.link_gbit) if arguments.hosts else Here()
    with where, contextlib.ExitStack() as stack:
        for system in systems:
            if system.group not in groups:
                print(f"starting {system.group}", flush=True)
                place = folder / system.group
                group = Group(system, shape, arguments.trainers, arguments.seed, place, arguments.device, place=where)
                groups[system.group] = stack.enter_context(group)
        for system in systems:
            warm = groups[system.group].run(arguments.warmup, system, 0)
            timed = groups[system.group].run(arguments.warmup, system, 0)
            steps[system.name] = max(arguments.least_steps, round(1e3 * arguments.seconds / timed["step_ms"]))
            print(f"{system.name:16} warm: {warm['step_ms']:.1f}, then {timed['step_ms']:.1f} ms/step", flush=True)
        for block in range(arguments.blocks):
            for system in systems:
                figures = groups[system.group].run(steps[system.name], system, arguments.checkpoint_every)
                blocks[system.name].append(figures)
            rates = "  ".join(f"{s.name} {blocks[s.name][-1]['samples_per_s']:,.0f}" for s in systems)
            print(f"block {block + 1}/{arguments.blocks}  samples/s  {rates}", flush=True)
    return steps, blocks


def tell_logs(folder: Path) -> None:
    """Prints the ends of all logs below a folder to stderr: of processes of which one has failed."""
    for log in sorted(folder.rglob("*.log")):
        text = log.read_text(errors="replace").strip()
        if text:
            print(f"--- {log.parent.name}/{log.name}\n{text[-2000:]}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark; see the module's docstring."""
    shape, systems = check(arguments)
    header = record.header()
    with tempfile.TemporaryDirectory(prefix="torch-ecrec-bench-", dir=arguments.out) as place:
        try:
            steps, blocks = measure(arguments, shape, systems, Path(place))
        except RuntimeError:
            tell_logs(Path(place))
            raise
    result = {
        "header": header,
        "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
        "trainers": arguments.trainers,
        "hosts": arguments.hosts,
        "link_gbit": arguments.link_gbit,
        "device": arguments.device,
        "steps_per_block": steps,
        "checkpoint_every": arguments.checkpoint_every,
        **summarise(systems, blocks),
    }
    lines = rows(systems, result)
    name = "-".join(filter(None, ("train", arguments.shape, arguments.label)))
    record.write(arguments.out, name, result, lines)
    plot(arguments.shape, lines, arguments.out / f"{name}.png")
    if arguments.json is not None:
        arguments.json.write_text((arguments.out / f"{name}.json").read_text())
    print(record.table(lines))
    print(f"written: {arguments.out / name}.json, .csv, .png")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench train`."""
    parser.add_argument("--shape", choices=list(workload.SHAPES), default="embedding-heavy")
    parser.add_argument("--systems", metavar="A,B,...", help=f"default {DEFAULT}; for sequence {DEFAULT_OF_SEQUENCES}")
    parser.add_argument("--blocks", type=int, default=5, metavar="N", help="turns of each system (default 5)")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a block, about (default 4)")
    parser.add_argument("--least-steps", type=int, default=8, help="steps of a block, at least (default 8)")
    parser.add_argument("--warmup", type=int, default=8, metavar="N", help="steps, twice, before the first block")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="of the dense model; cuda: trainers take the GPUs in turn, servers stay on the CPU",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=0,
        metavar="N",
        help="on so many hosts of network namespaces (needs root): trainers from the first on, servers from the last",
    )
    parser.add_argument(
        "--link-gbit",
        type=float,
        default=0.0,
        metavar="G",
        help="rate of each host's link, each way (default: no limit)",
    )
    parser.add_argument("--rows", type=int, help="rows per table, instead of the shape's")
    parser.add_argument("--dim", type=int, help="embedding dim, instead of the shape's")
    parser.add_argument("--batch-size", type=int, help="samples per trainer and step, instead of the shape's")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="X", help="steps, for torchrec+ckpt")
    parser.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows, for --shape criteo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label", help="added to the names of the files: more systems than memory take several runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON there")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
