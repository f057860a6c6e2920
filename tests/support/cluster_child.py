"""A trainer process for tests of a real cluster, small and without TorchRec. Run: python cluster_child.py ORDERS

ORDERS is a JSON object with the fields of `Orders`. It says what happens as JSON lines on stdout, and waits at named
points for a line on stdin: "go"; "fast" ends the pauses between steps. When stdin closes, it ends.

    {"held": "step 20"}      step 20 is complete here: waits
    {"read": [true, ...]}    all records read back, one entry per table group: are they what was loaded?
    {"done": {...}}          see `main`

Everything it computes follows from (step, trainer) and from what it looked up, so that one wrong bit changes all that
follows; only sums and products, so that nothing depends on the shape of a vector.
"""

import faulthandler
import gc
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from held_lock import spin

from torch_ecrec.client.session import Session
from torch_ecrec.processes import launch
from torch_ecrec.records.halves import records_of
from torch_ecrec.spec.job import CodeSpec, JobSpec, OptimizerSpec, TableSpec
from torch_ecrec.spec.settings import Settings

LIMIT_S = 600.0
ROWWISE = OptimizerSpec("rowwise_adagrad", lr=0.1)
TABLES = (  # three table groups, one of each dtype; row counts that leave partial stripes for every k that is tested
    TableSpec("a", rows=317, dim=8, low=-1.0, high=1.0, optimizer=ROWWISE),
    TableSpec("b", rows=53, dim=8, low=-0.5, high=0.5, optimizer=ROWWISE),
    TableSpec("c", rows=113, dim=4, low=-1.0, high=1.0, optimizer=OptimizerSpec("sgd", lr=0.1), weights="float16"),
    TableSpec("d", rows=61, dim=4, low=-1.0, high=1.0, optimizer=OptimizerSpec("adagrad", lr=0.1), weights="bfloat16"),
)


def job(trainers: int, seed: int = 5) -> JobSpec:
    return JobSpec(TABLES, CodeSpec(), trainers, seed)


@dataclass(frozen=True)
class Orders:
    """What a child is to do. `pause_s` is slept after every step, so that training lasts; `hold` lists steps."""

    join: str
    trainer: int = 0
    trainers: int = 1
    steps: int = 0
    hold: tuple[int, ...] = ()
    pause_s: float = 0.0
    load: bool = False
    hold_load: bool = False  # within each table group
    reads: int = 0
    compute_step: int = 0  # in which the last trainer is in one call for `compute_s`, and holds the interpreter's lock
    compute_s: float = 0.0


class Channel:
    """The test at the other end of stdin and stdout."""

    def __init__(self) -> None:
        self.fast = threading.Event()
        self._go: queue.Queue[None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while data := os.read(0, 4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line == b"fast":
                    self.fast.set()
                else:
                    self._go.put(None)
        os._exit(1)

    def say(self, **message: Any) -> None:
        print(json.dumps(message), flush=True)

    def hold(self, where: str) -> None:
        self.say(held=where)
        self._go.get(timeout=LIMIT_S)


def generator(*key: int) -> torch.Generator:
    number = 0
    for part in key:
        number = number * 1009 + part
    return torch.Generator().manual_seed(number)


def touched(session: Session, step: int) -> list[torch.Tensor]:
    """Rows of each table group that this trainer touches in a step."""
    return [
        torch.nonzero(torch.rand(table_group.rows, generator=generator(step, session.trainer, s)) < 0.3).flatten()
        for s, table_group in enumerate(session.job.table_groups)
    ]


def lookup(session: Session, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Weights (U, D) of each table group."""
    return [torch.cat(parts) for parts in session.lookup_parts(rows)]


def load(session: Session, hold: Callable[[str], None] = lambda where: None) -> list[torch.Tensor]:
    """Loads values over and over, whole stripes and parts of some; returns what every table group should hold then."""
    expected = []
    for s, table_group in enumerate(session.job.table_groups):
        every = torch.arange(table_group.rows)
        whole = session.read(s, every).clone()
        cut = table_group.rows // 3 + 1
        for part, rows in enumerate(
            [
                every[:cut],  # ends within a stripe
                every[::5],  # one of each stripe, at most: some again, some for the first time
                every[cut : cut + 30],  # completes the stripe that was cut
                every[cut : cut + 30],  # again, with other values
                every[7:8],
                every[-1:],  # of the last stripe, which is not whole
            ]
        ):
            if part == 2:
                hold(f"loading {s}")
            numbers = torch.rand((len(rows), table_group.schema.width), generator=generator(99, s, part))
            values = torch.from_numpy(records_of(numbers.numpy(), table_group.schema)).view(torch.float32)
            session.load(s, rows, values)
            whole[rows] = values
        expected.append(whole)
    return expected


def read_all(session: Session) -> list[torch.Tensor]:
    return [session.read(s, torch.arange(table_group.rows)) for s, table_group in enumerate(session.job.table_groups)]


def train(session: Session, orders: Orders, channel: Channel) -> dict[str, Any]:
    """The steps, and what came of them: a digest of all lookups, and the last snapshot as every holder has it."""
    seen = hashlib.sha256()
    sent, header = torch.empty(0, dtype=torch.uint8), [0]
    for step in range(1, orders.steps + 1):
        rows = touched(session, step)
        weights = lookup(session, rows)
        for part in weights:
            seen.update(part.numpy().tobytes())
        gradients = [part * 0.25 + (step % 7 - 3) * 0.01 + session.trainer * 0.005 for part in weights]
        session.push(rows, gradients, [0.1] * len(rows))
        sent, header = weights[0].contiguous().view(torch.uint8).flatten().clone(), [step]
        session.snapshot(sent, header)
        session.report(step=step, loss=0.0)
        if step == orders.compute_step and session.trainer == orders.trainers - 1:
            spin(orders.compute_s)
        if step in orders.hold:
            channel.hold(f"step {step}")
        if orders.pause_s and not channel.fast.is_set():
            time.sleep(orders.pause_s)
    session.flush()
    kept = []
    for slot in session.client.snapshot_slots:
        last = [entry for entry in session._stored(slot, -1) if entry[:2] == (orders.steps, session.trainer)]
        kept.append([slot, [torch.equal(payload, sent) and mine == header for _, _, mine, payload in last]])
    return {"lookups": seen.hexdigest(), "snapshots": kept, "snapshot_bytes": sent.numel()}


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    words = json.loads(sys.argv[1])
    orders = Orders(**{**words, "hold": tuple(words["hold"])})
    channel = Channel()
    session = launch.connect(job(orders.trainers), Settings.from_environment(join=orders.join), orders.trainer)
    hold = {"hold": channel.hold} if orders.hold_load else {}
    expected = load(session, **hold) if orders.load and orders.trainer == 0 else []
    session.loaded()
    gc.freeze()  # the interpreter's end is quicker then
    for turn in range(orders.reads):
        channel.hold(f"read {turn}")
        pairs = zip(read_all(session), expected, strict=True)
        channel.say(read=[torch.equal(mine, theirs) for mine, theirs in pairs])
    result = train(session, orders, channel) if orders.steps else {}
    if orders.trainer == 0:
        digest = hashlib.sha256()
        for records in read_all(session):
            digest.update(records.numpy().tobytes())
        result["digest"] = digest.hexdigest()
    session.close()
    channel.say(done=result)


if __name__ == "__main__":
    main()
