"""What checkpoints cost training, how large they are, and how long a restore takes.

Ways of training
    k2r1                  our servers with that code, and no option of checkpoints
    k2r1+full             a full checkpoint every X steps, at the default limit of bytes per second
    k2r1+incremental      `--checkpoint-policy consecutive`
    k2r1+incremental:4    the same, weights in 4 bits
    torchrec              plain TorchRec
    torchrec+save         the same, with torch.distributed.checkpoint.save every X steps: training stands meanwhile
    torchrec+async        with async_save, the one before being waited for

All take turns of X steps, in one run; a checkpoint is due after a quarter of each, and what is left of it when the turn
is over is waited for, so that nobody's turn has the checkpoint of another. The first turn of each is not counted: it
warms up, and an increment needs something to build on. Ours snapshot the dense model after each step, `k2r1` too: a
checkpoint is of a step that has one. Each trainer draws X batches, so that every increment has the ids of X new ones.
What is wanted of the figures stands beside them (`checkpoint_figures.py`).

CPU seconds are those of all processes of a way, until its checkpoint is written. A restore is timed from the start of
the trainers' processes to the end of the first step, files out of the page cache, beside the same start without one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torch_ecrec.bench import record, workload
from torch_ecrec.bench.checkpoint_figures import plot, restore_rows, rows, spreads, targets
from torch_ecrec.bench.recovery_checkpoint import forget_pages
from torch_ecrec.bench.train import Group, cpu_s, parse_system, tell_logs
from torch_ecrec.observe import events
from torch_ecrec.protocol.messages import Fatal
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.transport.control import ControlClient

RESTORE_POOL = 8  # batches of those that restore: what drawing takes is none of a restore's
WRITTEN_S = 600.0  # for a checkpoint to be whole
OPTIONS = {
    "full": (),
    "incremental": ("--checkpoint-policy", "consecutive"),
    "incremental:4": ("--checkpoint-policy", "consecutive", "--checkpoint-bits", "4"),
}
SAVES = ("save", "async")  # of TorchRec
DEFAULT = "k2r1,k2r1+full,k2r1+incremental,k2r1+incremental:4,torchrec,torchrec+save,torchrec+async"
RESTORED = workload.Shape()  # but for the number of rows
RECORD_BYTES = 4 * (RESTORED.dim + 1)  # weights, and row-wise Adagrad's sum


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training. Those of one `group` share their processes, and take turns in them.

    Args:
        name: as above.
        base: the same without checkpoints.
        options: of the coordinator, where ours writes checkpoints.
        saves: "save" or "async", where TorchRec does.
    """

    name: str
    base: str
    options: tuple[str, ...] | None = None
    saves: str = ""

    @property
    def group(self) -> str:
        return self.base if self.options is None else self.name


def parse_way(name: str) -> Way:
    """A way by its name. Raises ValueError."""
    base, _, more = name.partition("+")
    system = parse_system(base)
    require(base == "torchrec" or system.code is not None, f"{name!r}: there are torchrec, and ours, such as k2r1")
    known: Sequence[str] = tuple(OPTIONS) if system.code is not None else SAVES
    require(name == base or more in known, f"{name!r}: {base} has +{', +'.join(known)}")
    if not more:
        return Way(name, base)
    return Way(name, base, OPTIONS[more]) if system.code is not None else Way(name, base, saves=more)


class Written(NamedTuple):
    """A checkpoint that counts; when servers were told to write it, and when it counted, by `time.time()`."""

    event: events.Checkpointed
    begin_s: float
    end_s: float


class Watch:
    """The checkpoints of a cluster, as its coordinator tells of them. Use as a context manager."""

    def __init__(self, group: Group) -> None:
        assert group.cluster is not None
        self.name = group.system.name
        self._changed = threading.Condition()
        self._begun_s: dict[str, float] = {}  # name -> when servers were told to write it
        self._whole: list[Written] = []  # grows
        self._trouble = ""
        self._client = ControlClient(*group.cluster.address, self._on_message, self._on_closed, timeout_s=10.0)
        self._client.send({"type": "watch"})

    def _on_message(self, message: dict[str, Any]) -> None:
        if message.get("type") != "event":
            return
        event = events.of_message(message)
        with self._changed:
            if isinstance(event, events.CheckpointBegun):
                self._begun_s[event.name] = message["time_s"]
            elif isinstance(event, events.Checkpointed) and event.name in self._begun_s:
                self._whole.append(Written(event, self._begun_s[event.name], message["time_s"]))
            elif isinstance(event, events.CheckpointVoid | Fatal):
                self._trouble = event.reason
            self._changed.notify_all()

    def _on_closed(self, reason: str) -> None:
        with self._changed:
            self._trouble = f"the coordinator is gone: {reason}"
            self._changed.notify_all()

    def wait(self, step: int) -> Written:
        """A checkpoint of this step of training, or a later one, once it is whole.

        Raises:
            RuntimeError: it came to nothing, or not in time.
        """

        def found() -> Written | None:
            return next((one for one in self._whole if one.event.step >= step), None)

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or self._trouble, WRITTEN_S)
            one, trouble = found(), self._trouble
        if one is None:
            raise RuntimeError(f"{self.name}: no checkpoint of step {step}: {trouble or f'not within {WRITTEN_S:g} s'}")
        return one

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._client.close()


class Runner:
    """The processes of one group, and how many steps they have trained.

    Args:
        group: started.
        every: steps between checkpoints.
        watch: of a cluster that writes checkpoints.
    """

    def __init__(self, group: Group, every: int, watch: Watch | None) -> None:
        self.group, self.every, self.watch = group, every, watch
        self.done = 0

    def train(self, steps: int, way: Way) -> dict[str, Any]:
        """Trains so many steps, and waits for what is being written; a block (`checkpoint_figures.py`)."""
        group = self.group
        pids = group.trainer_pids + group.cluster_pids
        before_s = cpu_s(pids)
        answers = group.ask(
            {
                "run": steps,
                "snapshot": group.system.code is not None,
                "checkpoint": self.every if way.saves else 0,
                "asynchronous": way.saves == "async",
            }
        )
        saves = group.ask({"finish": True}, WRITTEN_S)
        spans: list[list[float]] = []
        sizes: list[int] = []
        kinds: list[str] = []
        due = self.every * ((self.done + steps) // self.every)
        if self.watch is not None and due > self.done:
            written = self.watch.wait(due)
            spans, sizes = [[written.begin_s, written.end_s]], [written.event.bytes]
            kinds = ["incremental" if written.event.base else "full"]
        elif way.saves and due > self.done:
            times = [answer["saves_s"] for answer in saves]
            spans = [[min(first for first, _ in one), max(last for _, last in one)] for one in zip(*times, strict=True)]
            place = group.folder / "checkpoint" / str(due % 2)
            sizes = [sum(path.stat().st_size for path in place.rglob("*") if path.is_file())]
            kinds = ["full"]
        self.done += steps
        return {
            "begin_s": answers[0]["begin_s"],
            "ends_s": answers[0]["ends_s"],
            "spans_s": spans,
            "bytes": sizes,
            "kinds": kinds,
            "cpu_s": cpu_s(pids) - before_s,
        }


def measure(
    arguments: argparse.Namespace, shape: workload.Shape, ways: Sequence[Way], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Starts all, and lets them take turns; each way's blocks.

    Raises:
        RuntimeError: a trainer has ended, or a checkpoint came to nothing.
    """
    blocks: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    runners: dict[str, Runner] = {}
    every = arguments.every
    with contextlib.ExitStack() as stack:
        for way in ways:
            if way.group in runners:
                continue
            print(f"starting {way.group}", flush=True)
            place = folder / way.group
            system = dataclasses.replace(parse_system(way.base), name=way.group)
            options: tuple[str, ...] = ()
            if way.options is not None:
                options = ("--checkpoint", str(place / "store"), "--checkpoint-every", str(every), *way.options)
                if arguments.checkpoint_bytes_per_s is not None:
                    options += ("--checkpoint-bytes-per-s", str(arguments.checkpoint_bytes_per_s))
            group = Group(system, shape, arguments.trainers, arguments.seed, place, coordinator=options, pool=every)
            stack.enter_context(group)
            watch = stack.enter_context(Watch(group)) if way.options is not None else None
            runners[way.group] = Runner(group, every, watch)
            runners[way.group].train(every - every // 4, dataclasses.replace(way, saves=""))
        for turn in range(arguments.blocks + 1):
            for way in ways:
                block = runners[way.group].train(every, way)
                if turn:
                    blocks[way.name].append(block)
            print(f"turn {turn}/{arguments.blocks}" + ("" if turn else ", not counted"), flush=True)
    return blocks


def first_step(
    arguments: argparse.Namespace, shape: workload.Shape, folder: Path, options: Sequence[str]
) -> dict[str, float]:
    """Starts a cluster and its trainers; seconds from the trainers' start until each stage."""
    system = parse_system(arguments.restore_system)
    trainers, seed = arguments.trainers, arguments.seed
    with Group(system, shape, trainers, seed, folder, coordinator=options, pool=RESTORE_POOL) as group:
        ready_s = time.time()
        answers = group.ask({"run": 1, "snapshot": True, "checkpoint": 0})
        ends_s = [answer["ends_s"][0] for answer in answers]
        begun = group.started_s
        return {
            "imported_s": max(answer["imported_s"] for answer in group.ready) - begun,
            "built_s": ready_s - begun,
            "first_step_s": max(ends_s) - begun,
        }


def restore(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Writes a checkpoint of tables of about so many bytes, starts with it, and starts without one."""
    per_table = max(1, round(arguments.restore_bytes / RECORD_BYTES / RESTORED.tables))
    shape = workload.resized(RESTORED, rows=per_table, batch=arguments.batch_size)
    store, every = folder / "store", 4
    options = ["--checkpoint", str(store), "--checkpoint-every", str(every), "--checkpoint-bytes-per-s", "0"]
    system = parse_system(arguments.restore_system)
    trainers, seed = arguments.trainers, arguments.seed
    first = Group(system, shape, trainers, seed, folder / "first", coordinator=options, pool=RESTORE_POOL)
    with first as group, Watch(group) as watch:
        group.ask({"run": every + 2, "snapshot": True, "checkpoint": 0})
        written = watch.wait(every)
    forget_pages(store)
    with_it = first_step(arguments, shape, folder / "second", ["--restore", str(store)])
    without = first_step(arguments, shape, folder / "third", [])
    return {
        "system": arguments.restore_system,
        "rows": per_table,
        "table_bytes": RESTORED.tables * per_table * RECORD_BYTES,
        "checkpoint_bytes": written.event.bytes,
        "written_s": written.end_s - written.begin_s,
        "restored": with_it,
        "begun_anew": without,
    }


def check(arguments: argparse.Namespace) -> tuple[workload.Shape, list[Way]]:
    """What is trained, in which ways. Raises ValueError or TypeError if an argument is wrong."""
    shape = workload.resized(
        workload.SHAPES[arguments.shape], rows=arguments.rows, dim=arguments.dim, batch=arguments.batch_size
    )
    ways = [parse_way(name) for name in arguments.ways.split(",")]
    names = [way.name for way in ways]
    require(len(set(names)) == len(names), f"a way is named twice: {arguments.ways}")
    missing = sorted({way.base for way in ways} - set(names))
    require(not missing, f"`--ways` has no {', '.join(missing)}: ratios are to the same without checkpoints")
    require_int("blocks", arguments.blocks, 1)
    require_int("trainers", arguments.trainers, 1)
    require_int("every", arguments.every, 4)
    require(arguments.restore_bytes >= 0, f"`restore_bytes` must not be negative, got {arguments.restore_bytes}")
    require(parse_system(arguments.restore_system).code is not None, "`--restore-system` is one of ours, such as k2r1")
    return shape, ways


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark; see the module's docstring."""
    shape, ways = check(arguments)
    header = record.header()
    with tempfile.TemporaryDirectory(prefix="torch-ecrec-bench-", dir=arguments.out) as place:
        try:
            blocks = measure(arguments, shape, ways, Path(place) / "turns")
            restored = restore(arguments, Path(place) / "restore") if arguments.restore_bytes else None
        except RuntimeError:
            tell_logs(Path(place))
            raise
    samples = arguments.trainers * shape.batch
    aims = targets(blocks, {way.name: way.base for way in ways}, samples, restored)
    lines = rows(blocks, {way.name: way.base for way in ways}, samples)
    result = {
        "header": header,
        "shape": {"name": arguments.shape, **dataclasses.asdict(shape)},
        "trainers": arguments.trainers,
        "every": arguments.every,
        "figures": spreads(blocks, samples),
        "blocks": blocks,
        "restore": restored,
        "restore_rows": restore_rows(restored) if restored else [],
        "targets": aims,
    }
    name = "-".join(filter(None, ("checkpoint", arguments.shape, arguments.label)))
    record.write(arguments.out, name, result, lines)
    plot(arguments.shape, blocks, samples, arguments.out / f"{name}.png")
    tables = [lines, *([restore_rows(restored)] if restored else []), aims]
    print("\n".join(map(record.table, tables)))
    _write_markdown(arguments.out / f"{name}.md", header, tables)
    print(f"written: {arguments.out / name}.json, .csv, .md, .png")
    return 0


def _write_markdown(path: Path, header: dict[str, Any], tables: Sequence[Sequence[dict[str, Any]]]) -> None:
    """The tables as docs/checkpoints.md has them, with the command and the machine."""
    where = f"{header['processor']}, {header['cores']} cores, commit {header['commit']}, {header['date'][:10]}"
    path.write_text("\n\n".join([f"`{header['command']}`: {where}.", *map(record.markdown, tables)]) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `torch-ecrec bench checkpoint`."""
    parser.add_argument("--shape", choices=["embedding-heavy", "paper"], default="embedding-heavy")
    parser.add_argument("--ways", metavar="A,B,...", default=DEFAULT, help=f"default {DEFAULT}")
    parser.add_argument("--blocks", type=int, default=3, metavar="N", help="turns of each way (default 3)")
    parser.add_argument("--every", type=int, default=200, metavar="X", help="steps between checkpoints (default 200)")
    parser.add_argument("--trainers", type=int, default=2, metavar="T")
    parser.add_argument("--rows", type=int, help="rows per table, instead of the shape's")
    parser.add_argument("--dim", type=int, help="embedding dim, instead of the shape's")
    parser.add_argument("--batch-size", type=int, help="samples per trainer and step, instead of the shape's")
    parser.add_argument(
        "--restore-bytes", type=float, default=1e9, metavar="B", help="of the tables of a restore; 0: none is timed"
    )
    parser.add_argument("--restore-system", default="k2r1", metavar="NAME", help="that restores (default k2r1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--checkpoint-bytes-per-s", type=float, metavar="B", help="limit of each server, instead of the default one"
    )
    parser.add_argument("--label", help="added to the names of the files")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR")
