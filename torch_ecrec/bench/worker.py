"""A trainer of a benchmark: `python -m torch_ecrec.bench.worker`. It obeys lines of JSON on its input.

The first line says what to train (`Assignment`), torchrun's variables say who it is. Then, per line,
    {"run": STEPS, "snapshot": BOOL, "checkpoint": STEPS or 0}   trains; answers {"seconds": S, "losses": [first, last],
                         "begin_s": B, "ends_s": [of each step], "waits_s": until rows came, and pushes could be sent}
    {"profile": FILE, "steps": N}   trains; answers likewise, and leaves a trace of torch.profiler
    {"finish": true}     waits for what is being saved; answers {"saves_s": [[begin, end] of each save since the last]}
    {"go": true}         trains without a pause, and says {"step": N, "begin_s": B, "end_s": E} of each step
    {"pause": N}         no more after step N, or at once where that is over; answers {"paused": the last step}
    {"end": true}        leaves in order; where its input ends, it ends at once
With "asynchronous": false beside "run", training stands while a checkpoint is saved. Every answer is one line on its
output; {"ready": time, "imported_s": when Python had imported all, "done": steps that count already} comes first.
Moments are of `time.time()`. A block is timed from a barrier of all trainers to a barrier after everything sent in it
is acknowledged, so that no work of it is left to the next.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torch_ecrec
import torch_ecrec.processes.launch  # what would be imported later: it is no part of what is timed
from torch_ecrec.bench import workload
from torch_ecrec.compat.torch import ShardedTensor, group_with
from torch_ecrec.runtime.threads import Worker, log_error

POOLS = 1 << 15  # a pass over a pool again and again: as a list, of which everybody sees what comes next


@dataclass(frozen=True)
class Assignment:
    """The model that a trainer trains, and how.

    Args:
        backend: "torchrec", "torch" or "ecrec".
        shape: arguments of `workload.Shape`.
        seed: of the model and the batches.
        folder: where "torchrec" puts its checkpoints.
        pipeline: train in TorchRec's `TrainPipelineSparseDist`.
        device: of the dense model. Several trainers may share a GPU.
        pool: batches that are drawn, and used in turn; 0: each step draws another one.
        kernel: how FBGEMM holds the tables of "torchrec".
        trainers: of the job.
    """

    backend: str
    shape: dict[str, Any]
    seed: int
    folder: str
    pipeline: bool = False
    device: str = "cpu"
    pool: int = workload.POOL
    kernel: str = "fused"
    trainers: int = 1


class Orders:
    """The parent's orders, read on a thread. The process ends at once when the parent closes the pipe."""

    def __init__(self) -> None:
        self._input = open(0, closefd=False)  # noqa: SIM115  not sys.stdin: its lock is taken when the interpreter ends
        self.assignment = Assignment(**json.loads(self._input.readline()))
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        Worker(self._read, "orders", log_error).start()

    def _read(self) -> None:
        for line in self._input:
            self._orders.put(json.loads(line))
        os._exit(0)

    def next(self, wait: bool = True) -> dict[str, Any]:
        """Returns the next order; {} if there is none yet and it does not wait."""
        return self._orders.get() if wait or not self._orders.empty() else {}


def answer(**message: Any) -> None:
    """Sends a message to the parent."""
    sys.__stdout__.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


class Trainer:
    """A model, its batches, and the number of steps done."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        shape = workload.Shape(**assignment.shape)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(assignment.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        model = workload.distributed(shape, assignment.backend, assignment.seed, self.device, assignment.kernel)
        self.model: Any = model
        self.optimizers = workload.optimizers(model)
        reader: Iterable[Batch]
        if assignment.pool:
            reader = workload.batches(shape, rank, world, assignment.seed, assignment.pool) * POOLS
        else:
            reader = workload.Reader(workload.Draws(shape, rank, assignment.seed))
        self.ours = model if isinstance(model, torch_ecrec.DistributedModelParallel) else None
        self.batches: Iterator[Batch] = iter(reader)
        self.waits_s = 0.0  # so far
        if self.ours is not None:
            self.batches = self.ours.attach(optimizer=self.optimizers[0], reader=reader)
            for name in ("lookup_parts", "lookup_bags", "push"):
                self._time(self.ours.session, name)
        self.pipeline = TrainPipelineSparseDist(model, self.optimizers[0], self.device) if assignment.pipeline else None
        self.steps = 0 if self.ours is None else self.ours.steps_done
        self.saving: Any = None
        self.saves_s: list[list[float]] = []  # begin and end of each save
        # Of its own: its collectives run beside those of training.
        self.saving_group = group_with(range(dist.get_world_size()), "gloo")

    def _time(self, session: Any, name: str) -> None:
        """Adds the time in a method of the session to `waits_s`."""
        method = getattr(session, name)

        @functools.wraps(method)
        def timed(*words: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*words, **named)
            finally:
                self.waits_s += time.perf_counter() - begin

        setattr(session, name, timed)

    def step(self) -> torch.Tensor:
        """Trains one step; returns its loss."""
        self.steps += 1
        if self.pipeline is not None:
            loss, _, _ = self.pipeline.progress(self.batches)
            return loss.detach()  # type: ignore[no-any-return]
        batch = next(self.batches)
        loss, _ = self.model(batch if self.device == workload.CPU else batch.to(self.device))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def run(self, steps: int, snapshot: bool, checkpoint_every: int, asynchronous: bool) -> dict[str, Any]:
        """Trains for some steps; returns the figures."""
        if self.ours is not None and self.ours.snapshot_every != int(snapshot):
            self.ours.snapshot_every = int(snapshot)
        losses, ends_s, waits_s = [], [], self.waits_s
        dist.barrier()
        begin, begin_s = time.perf_counter(), time.time()
        for _ in range(steps):
            losses.append(self.step())
            if checkpoint_every and self.steps % checkpoint_every == 0:
                self._checkpoint(asynchronous)
            ends_s.append(time.time())
        if self.ours is not None:
            self.ours.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        return {
            "seconds": time.perf_counter() - begin,
            "losses": [float(losses[0]), float(losses[-1])],
            "begin_s": begin_s,
            "ends_s": ends_s,
            "waits_s": self.waits_s - waits_s,
        }

    def profile(self, steps: int, trace: Path) -> dict[str, Any]:
        """Trains for some steps under torch's profiler; returns the figures. Trainer 0 leaves the trace in a file."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profiler:
            figures = self.run(steps, False, 0, False)
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(trace))
        return figures

    def go(self, orders: Orders) -> None:
        """Trains until it is told to pause; reports each step."""
        last: int | None = None
        while last is None or self.steps < last:
            begin_s = time.time()
            self.step()
            answer(step=self.steps, begin_s=begin_s, end_s=time.time())
            last = orders.next(wait=False).get("pause", last)
        answer(paused=self.steps)

    def state(self) -> dict[str, Any]:
        """Returns the contents of a checkpoint, with sharded tensors as the parts that this trainer has."""
        state: dict[str, Any] = {"optimizer": self.optimizers[0].state_dict()}
        parts = dict(self.model.state_dict())
        for states in self.model.fused_optimizer.state_dict()["state"].values():
            parts.update(states)
        for name, value in parts.items():
            if isinstance(value, ShardedTensor):
                state.update({f"{name}@{shard.metadata.shard_offsets}": shard.tensor for shard in value.local_shards()})
            else:
                state[name] = value
        return state

    def _checkpoint(self, asynchronous: bool) -> None:
        """Saves as a careful user would: the save before must be on disk first. It may go on beside training."""
        if self.saving is not None:
            self.saving.result()
        place = Path(self.assignment.folder) / str(self.steps % 2)
        span = [time.time(), 0.0]
        self.saves_s.append(span)

        def ended(_: object = None) -> None:
            span[1] = time.time()

        if asynchronous:
            self.saving = async_save(self.state(), checkpoint_id=place, process_group=self.saving_group)
            self.saving.add_done_callback(ended)
        else:
            save(self.state(), checkpoint_id=place, process_group=self.saving_group)
            ended()

    def finish(self) -> list[list[float]]:
        """Waits for saves that are under way; returns when each since the last call began and ended."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None
        found, self.saves_s = self.saves_s, []
        return found


def backend_of(assignment: Assignment) -> str:
    """Returns the backend of the process group. NCCL refuses trainers that share a GPU: these sum on the host."""
    has_own_gpu = assignment.device == "cuda" and assignment.trainers <= torch.cuda.device_count()
    return "cpu:gloo,cuda:nccl" if has_own_gpu else "gloo"


def main() -> int:
    imported_s = time.time()
    torch.set_num_threads(1)  # the cores are shared with servers and other trainers
    orders = Orders()
    sys.stdout = sys.stderr  # what others print
    dist.init_process_group(backend_of(orders.assignment))
    trainer = Trainer(orders.assignment)
    answer(ready=time.time(), imported_s=imported_s, done=trainer.steps)
    while "end" not in (order := orders.next()):
        if "run" in order:
            asynchronous = order.get("asynchronous", True)
            answer(**trainer.run(order["run"], order["snapshot"], order["checkpoint"], asynchronous))
        elif "profile" in order:
            answer(**trainer.profile(order["steps"], Path(order["profile"])))
        elif "go" in order:
            trainer.go(orders)
        else:
            answer(saves_s=trainer.finish())
    trainer.finish()
    if trainer.ours is not None:
        trainer.ours.close()
    dist.barrier()
    if dist.get_rank() == 0 and orders.assignment.backend == "torchrec":
        shutil.rmtree(orders.assignment.folder, ignore_errors=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
