"""One trainer of `bench recovery`: real steps on either backend, told when to pause, telling when each step was.

    python -m torch_ecrec.bench.recovery_worker --backend ecrec --trainer 0 --trainers 2 --rows 150000

MASTER_ADDR and MASTER_PORT say where the trainers meet. Started and ended by `bench recovery` and `bench outages`.
It trains until its standard input closes. Lines it understands there:

    pause N     stop after step N (at once where that is over)
    go          go on

and lines of JSON that it writes to standard output (what others print there goes to standard error):

    {"ready": time}                                   the model is made, its tables have their first values
    {"saved_s": s, "sample": x}, {"loaded_s": s, "sample": x}   a checkpoint, with a sample of the state to compare
    {"step": n, "begin_s": time, "end_s": time}       a step was completed
    {"paused": n}                                     after step n

Ids are a stretch, begun anywhere, of a pool drawn before. Those that follow Zipf's law are scattered over the tables,
so that hot rows are not neighbours; uniform ones are shifted, so that none comes twice.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist
import torchrec
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torchrec.datasets.utils import Batch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torch_ecrec.bench import workload
from torch_ecrec.runtime.threads import Worker, log_error

POOL_BATCHES = {True: 512, False: 32}  # the pool is so many batches long, by whether ids follow Zipf's law
SCATTER = 2_654_435_761  # a prime: rank * SCATTER % rows is a permutation
STEPS_BEFORE_SAVE = 3  # so that the optimizer has a state
SAMPLE_ROWS = 997  # every so many rows of a table go into the sample


class Batches:
    """Batches of one trainer, without end.

    Args:
        shape: of the model; its batch and rows count.
        seed, trainer: draws differ with either.
    """

    def __init__(self, shape: workload.Shape, seed: int, trainer: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng([seed, trainer])
        self._names = workload.features(shape)
        self._count = shape.tables * shape.batch
        length = POOL_BATCHES[shape.zipf > 0] * self._count
        ranks = workload.zipf_ranks(self._rng, length, shape.rows, shape.zipf)
        self._pool = (ranks * SCATTER % shape.rows if shape.zipf > 0 else ranks).astype(np.int32)
        self._lengths = torch.ones(self._count, dtype=torch.int32)
        self._dense = torch.from_numpy(self._rng.standard_normal((shape.batch, workload.INTEGERS), dtype=np.float32))
        self._labels = torch.from_numpy(self._rng.integers(0, 2, shape.batch).astype(np.float32))

    def draw(self) -> Batch:
        """One id per bag, batch and table; dense features and labels are always the same."""
        first = int(self._rng.integers(0, len(self._pool) - self._count + 1))
        shift = 0 if self._shape.zipf > 0 else int(self._rng.integers(0, self._shape.rows))
        ids = torch.from_numpy((self._pool[first : first + self._count].astype(np.int64) + shift) % self._shape.rows)
        sparse = torchrec.KeyedJaggedTensor.from_lengths_sync(self._names, ids, self._lengths)
        return Batch(self._dense, sparse, self._labels)


class Orders:
    """What the parent says, read on a thread. The process ends when its end of the pipe closes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards _pause_after
        self._pause_after: int | None = None
        Worker(self._read, "orders", log_error).start()

    def _read(self) -> None:
        with open(0, closefd=False) as lines:  # not sys.stdin: its lock is taken when the interpreter ends
            for line in lines:
                word, _, number = line.strip().partition(" ")
                with self._changed:
                    self._pause_after = int(number) if word == "pause" else None
                    self._changed.notify_all()
        os._exit(0)

    def is_pause(self, step: int) -> bool:
        """Whether to pause after `step`."""
        with self._changed:
            return self._pause_after is not None and step >= self._pause_after

    def wait(self) -> None:
        """Until told to go on; the parent sees to it that this ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._pause_after is None)


def sample(model: Any) -> float:
    """A figure that two tables with other values will not share: of this trainer's part of weights and state."""
    total = 0.0
    states = model.fused_optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(tensor for state in states for tensor in state.values())]
    for tensor in tensors:
        for shard in tensor.local_shards() if hasattr(tensor, "local_shards") else ():
            total += float(shard.tensor.detach()[::SAMPLE_ROWS].double().sum())
    return total


def checkpoint(model: Any, optimizer: Any, folder: Path, load: bool) -> float:
    """Saves to `folder`, or loads in place from it; returns the seconds that all trainers together took."""
    dist.barrier()
    begin = time.perf_counter()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if load:
        load_checkpoint(state, checkpoint_id=folder)  # tables, dense weights and states are written where they live
    else:
        save_checkpoint(state, checkpoint_id=folder)
    dist.barrier()
    return time.perf_counter() - begin


def train(arguments: argparse.Namespace, out: TextIO) -> None:
    """Trains until the process is ended."""

    def tell(**message: float) -> None:
        print(json.dumps(message), file=out, flush=True)

    orders = Orders()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=arguments.trainer, world_size=arguments.trainers)
    shape = workload.Shape(rows=arguments.rows, batch=arguments.batch_size, zipf=arguments.zipf)
    model: Any = workload.distributed(shape, arguments.backend, arguments.seed)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    batches = Batches(shape, arguments.seed, arguments.trainer)
    tell(ready=time.time())
    if arguments.load is not None:
        taken_s = checkpoint(model, optimizer, arguments.load, load=True)
        tell(loaded_s=taken_s, sample=sample(model))
    step = 0
    while True:
        batch = batches.draw()
        step += 1
        begin_s = time.time()
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        tell(step=step, begin_s=begin_s, end_s=time.time())
        if arguments.save is not None and step == STEPS_BEFORE_SAVE:
            taken_s = checkpoint(model, optimizer, arguments.save, load=False)
            tell(saved_s=taken_s, sample=sample(model))
        if orders.is_pause(step):
            tell(paused=step)
            orders.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["ecrec", "torchrec"], required=True)
    parser.add_argument("--trainer", type=int, required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="of each table")
    parser.add_argument("--batch-size", type=int, default=1024, help="of each trainer")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the law that ids follow; 0: uniform")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR", help="save a checkpoint after a few steps")
    parser.add_argument("--load", type=Path, metavar="DIR", help="load a checkpoint before the first step")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    train(arguments, out)


if __name__ == "__main__":
    main()
