"""One trainer of a benchmark: `python -m torch_ecrec.bench.worker`, told what to do by lines of JSON on its input.

The first line says what to train (`Assignment`), torchrun's variables say who it is. Then, per line,
    {"run": STEPS, "snapshot": BOOL, "checkpoint": STEPS or 0}   trains; answers {"seconds": S, "losses": [first, last],
                                                                 "begin_s": B, "ends_s": [of each step]}
    {"finish": true}                                             waits for what is being saved; answers {"saves_s":
                                                                 [[begin, end] of each save since the last time]}
    {"end": true}                                                leaves
With "asynchronous": false in the first, training stands while a checkpoint is saved. Every answer is one line on its
output; {"ready": true, "imported_s": when Python had imported all} comes first. Moments are of `time.time()`. A block
is timed from a barrier of all trainers to a barrier after everything sent in it is acknowledged, so that no work of it
is left to the next.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
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


@dataclass(frozen=True)
class Assignment:
    """What a trainer trains.

    Args:
        backend: "torchrec", "torch" or "ecrec".
        shape: arguments of `workload.Shape`.
        seed: of the model and the batches.
        folder: where "torchrec" puts its checkpoints.
        pipeline: train in TorchRec's `TrainPipelineSparseDist`.
        device: of the dense model. Several trainers may share a GPU.
        pool: batches that are drawn, and used in turn.
    """

    backend: str
    shape: dict[str, Any]
    seed: int
    folder: str
    pipeline: bool = False
    device: str = "cpu"
    pool: int = workload.POOL


class Cycle:
    """The same batches for ever, and the place in them."""

    def __init__(self, pool: list[Batch]) -> None:
        self.pool, self.drawn = pool, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.drawn += 1
            yield self.pool[(self.drawn - 1) % len(self.pool)]

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Trainer:
    """A model, its batches, and the steps done so far."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        shape = workload.Shape(**assignment.shape)
        rank, world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(assignment.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.model = workload.distributed(shape, assignment.backend, assignment.seed, self.device)
        self.optimizer, *self.others = workload.optimizers(self.model)
        self.pool: list[Batch] = workload.batches(shape, rank, world, assignment.seed, assignment.pool)
        self.batches: Iterator[Batch] = iter(Cycle(self.pool))
        if isinstance(self.model, torch_ecrec.DistributedModelParallel):
            self.batches = self.model.attach(optimizer=self.optimizer, reader=Cycle(self.pool))
        self.pipeline = (
            TrainPipelineSparseDist(self.model, self.optimizer, self.device) if assignment.pipeline else None
        )
        self.steps = 0
        self.saving: Any = None
        self.saves_s: list[list[float]] = []  # begin and end of each save
        # Of its own: its collectives run beside those of training.
        self.saving_group = group_with(range(dist.get_world_size()), "gloo")

    def run(self, steps: int, snapshot: bool, checkpoint_every: int, asynchronous: bool) -> dict[str, Any]:
        """Trains for some steps; returns what is reported."""
        ours = self.model if isinstance(self.model, torch_ecrec.DistributedModelParallel) else None
        if ours is not None and ours.snapshot_every != int(snapshot):
            ours.snapshot_every = int(snapshot)
        losses, ends_s = [], []
        dist.barrier()
        begin, begin_s = time.perf_counter(), time.time()
        for _ in range(steps):
            if self.pipeline is not None:
                loss, _, _ = self.pipeline.progress(self.batches)
                losses.append(loss.detach())
            else:
                batch = next(self.batches)
                loss, _ = self.model(batch if self.device == workload.CPU else batch.to(self.device))
                for optimizer in (self.optimizer, *self.others):
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in (self.optimizer, *self.others):
                    optimizer.step()
                losses.append(loss.detach())
            self.steps += 1
            if checkpoint_every and self.steps % checkpoint_every == 0:
                self._checkpoint(asynchronous)
            ends_s.append(time.time())
        if ours is not None:
            ours.flush()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier()
        return {
            "seconds": time.perf_counter() - begin,
            "losses": [float(losses[0]), float(losses[-1])],
            "begin_s": begin_s,
            "ends_s": ends_s,
        }

    def _checkpoint(self, asynchronous: bool) -> None:
        """As a careful user would: the one before must be on disk, then the next is written, beside training or not."""
        if self.saving is not None:
            self.saving.result()
        folder = Path(self.assignment.folder)
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        parts = dict(self.model.state_dict())
        for states in self.model.fused_optimizer.state_dict()["state"].values():  # type: ignore[union-attr]
            parts.update(states)
        for name, value in parts.items():
            if isinstance(value, ShardedTensor):  # which torch's staging of asynchronous saves does not take
                state.update({f"{name}@{shard.metadata.shard_offsets}": shard.tensor for shard in value.local_shards()})
            else:
                state[name] = value
        place = folder / str(self.steps % 2)
        span = [time.time(), 0.0]
        self.saves_s.append(span)

        def ended(_: object = None) -> None:
            span[1] = time.time()

        if asynchronous:
            self.saving = async_save(state, checkpoint_id=place, process_group=self.saving_group)
            self.saving.add_done_callback(ended)
        else:
            save(state, checkpoint_id=place, process_group=self.saving_group)
            ended()

    def finish(self) -> list[list[float]]:
        """Waits for what is being saved; when all saves since the last call began and ended."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None
        found, self.saves_s = self.saves_s, []
        return found


def main() -> int:
    imported_s = time.time()
    torch.set_num_threads(1)  # the cores are shared with servers and other trainers
    assignment = Assignment(**json.loads(sys.stdin.readline()))
    answers, sys.stdout = sys.stdout, sys.stderr
    dist.init_process_group("gloo")
    trainer = Trainer(assignment)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"ready": True, "imported_s": imported_s})
    for line in sys.stdin:
        message = json.loads(line)
        if "run" in message:
            asynchronous = message.get("asynchronous", True)
            answer(trainer.run(message["run"], message["snapshot"], message["checkpoint"], asynchronous))
        elif "finish" in message:
            answer({"saves_s": trainer.finish()})
        else:
            break
    trainer.finish()
    if isinstance(trainer.model, torch_ecrec.DistributedModelParallel):
        trainer.model.close()
    dist.barrier()
    if dist.get_rank() == 0 and assignment.backend == "torchrec":
        shutil.rmtree(assignment.folder, ignore_errors=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
