"""A trainer that a user might have written. Run under torchrun: python loop_child.py WAY OUT [STEP]

WAY: `plain` (a loop over `DataLoader(shuffle=True)`), `workers` (with worker processes that draw at random),
`torchdata` (`StatefulDataLoader`), `pipeline` (`TrainPipelineSparseDist`), `accumulate` (gradients of two batches),
`rollback` (now and then, the model and the tables' optimizer are loaded: before a step, within one, after an epoch),
`checkpoint` (at these places they are saved and loaded by DCP, which changes nothing of what `plain` does),
`managed` (ids of the bags are remapped; rows are given to other ids all the time), `mixed` and `mixed-pipeline` (a plan
leaves the sequences to TorchRec, by rows, and they are kept with the snapshots), `rates` (the optimizer of the dense
part alone is attached; a scheduler of the tables alone and the loop itself move the tables' rates in every step).
Three epochs of 6 steps, a scheduler that steps with every epoch, a BatchNorm, dropout, an evaluation after each epoch.

Trainer 1 kills itself after STEP in its first life, once OUT/go is there; OUT/STEP says that it waits for that. What a
trainer has seen is in OUT/RANK.json at the end.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shards import changed
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.datasets.utils import Batch
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import Adagrad, Adam, in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec
from torch_ecrec import checkpoint
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

EPOCHS, STEPS, SIZE, ROWS, LIMIT_S = 3, 6, 8, 300, 60.0


class Clicks(Dataset[tuple[int, float]]):
    """Every sample is the same in each epoch, but for what is drawn at random for it."""

    def __init__(self, rank: int, noisy: bool) -> None:
        self.rank, self.noisy = rank, noisy

    def __len__(self) -> int:
        return STEPS * SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        noise = random.random() + float(torch.rand(())) if self.noisy else 0.0
        return (index * 7 + 3 * self.rank) % ROWS, noise


def collate(samples: list[tuple[int, float]]) -> Batch:
    ids = torch.tensor([i for i, _ in samples])
    sparse = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones(SIZE, dtype=torch.int32))
    dense = torch.tensor([[i / ROWS, noise] for i, noise in samples])
    return Batch(dense, sparse, ids.float() / ROWS)


class Net(nn.Module):
    """Of bags and sequences, of tables of float32, float16 and bfloat16."""

    def __init__(self, tables: nn.Module, pooled: int, sequences: EmbeddingCollection) -> None:
        super().__init__()
        self.tables, self.sequences = tables, sequences
        self.below = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.over = nn.Linear(8 + pooled + 4, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        found = self.tables(batch.sparse_features)
        pooled = (found[0] if isinstance(found, tuple) else found).values()
        rows = self.sequences(batch.sparse_features)["f"].values()
        logits = self.over(torch.cat([self.below(batch.dense_features), pooled, rows], dim=1)).squeeze(1)
        loss = nn.functional.mse_loss(logits, batch.labels)
        return loss, (loss.detach(), batch.sparse_features.values())


def planned(net: Net) -> ShardingPlan:
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={"s": ParameterConstraints(sharding_types=["row_wise"])},
    )
    return planner.collective_plan(net, get_default_sharders(), dist.group.WORLD)


class Trace(list):
    def state_dict(self):
        return {"seen": list(self)}

    def load_state_dict(self, state):
        self[:] = state["seen"]


def main() -> None:
    way, out = sys.argv[1], Path(sys.argv[2])
    kill_after = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    mixed = way.startswith("mixed")
    rows = ROWS // 5 if way == "managed" else ROWS
    configs = [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=8, feature_names=["f"])]
    if way != "managed":  # a feature whose ids are remapped is of one table
        configs += [
            EmbeddingBagConfig(
                name="h", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"], data_type=DataType.FP16
            )
        ]
    tables: nn.Module = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    if way == "managed":
        policy = DistanceLFU_EvictionPolicy()
        mapped = MCHManagedCollisionModule(rows, torch.device("cpu"), policy, eviction_interval=2)
        tables = ManagedCollisionEmbeddingBagCollection(tables, ManagedCollisionCollection({"t": mapped}, configs))
    sequences = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingConfig(
                name="s",
                num_embeddings=ROWS,
                embedding_dim=4,
                feature_names=["f"],
                data_type=DataType.FP32 if mixed else DataType.BF16,
            )
        ],
    )
    apply_optimizer_in_backward(Adam if way == "rates" else Adagrad, sequences.parameters(), {"lr": 0.05})
    net = Net(tables, 8 * len(configs), sequences)
    model = torch_ecrec.DistributedModelParallel(
        net,
        device=torch.device("cpu"),
        plan=planned(net) if mixed else None,
        unprotected="snapshot" if mixed else "refuse",
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, wrapped])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.fused_optimizer if way == "rates" else optimizer, 0.7)
    kind = StatefulDataLoader if way == "torchdata" else DataLoader
    workers = 2 if way == "workers" else 0
    loader = kind(Clicks(rank, way == "workers"), SIZE, shuffle=True, collate_fn=collate, num_workers=workers)
    trace = Trace()
    batches = model.attach(
        optimizer=wrapped if way == "rates" else optimizer, lr_scheduler=scheduler, reader=loader, trace=trace
    )
    first_life = not model.session.restarted

    def after_step(seen: tuple[torch.Tensor, torch.Tensor]) -> None:
        if way == "rates":
            scheduler.step()
            for i, group in enumerate(model.fused_optimizer.param_groups):
                group["lr"] *= 1.2 + 0.1 * i
        trace.append([float(seen[0]), seen[1].tolist()])
        done = model.steps_done
        if rank == 1 and first_life and done == kill_after:
            (out / str(done)).touch()
            deadline_s = time.monotonic() + LIMIT_S
            while not (out / "go").exists():
                assert time.monotonic() < deadline_s, "nobody said go"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def there_and_back() -> None:
        """Saved sharded and loaded in portions, and the other way round; between, all weights are others."""
        own = {name: buffer.clone() for name, buffer in model.named_buffers()}  # of which DCP keeps one trainer's
        state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
        folder = out / f"{model.steps_done}-{batches.drawn}-{batches.epoch}"
        dcp.save(state, checkpoint_id=folder / "sharded")
        torch_ecrec.DistributedModelParallel._reset_parameters(model)
        checkpoint.load(model, folder / "sharded")
        checkpoint.save(model, folder / "streamed")
        torch_ecrec.DistributedModelParallel._reset_parameters(model)
        dcp.load(state, checkpoint_id=folder / "streamed")
        model.load_state_dict(state["model"])
        model.fused_optimizer.load_state_dict(state["optimizer"])
        for name, buffer in model.named_buffers():
            buffer.copy_(own[name])

    def roll_back() -> None:
        """To something that depends on all that there is."""
        if way == "checkpoint":
            with torch.random.fork_rng(devices=[]):
                there_and_back()
        if way == "rollback":
            state = model.state_dict()
            model.load_state_dict({name: changed(value, lambda v: v * 0.9 + 0.01) for name, value in state.items()})
            fused = model.fused_optimizer.state_dict()
            for values in fused["state"].values():
                values.update({name: changed(value, lambda v: v * 0.5) for name, value in values.items()})
            model.fused_optimizer.load_state_dict(fused)

    for _ in batches.epochs(EPOCHS):
        if way.endswith("pipeline"):
            pipeline, stream = TrainPipelineSparseDist(model, optimizer, torch.device("cpu")), iter(batches)
            while True:
                try:
                    after_step(pipeline.progress(stream))
                except StopIteration:
                    break
            pipeline.detach()
        else:
            for batch in batches:
                if way != "accumulate" or batches.drawn % 2 == 1:
                    optimizer.zero_grad()
                if batches.drawn == 5:
                    roll_back()
                loss, seen = model(batch)
                loss.backward()
                if batches.drawn == 2:
                    roll_back()
                if way != "accumulate" or batches.drawn % 2 == 0:
                    optimizer.step()
                after_step(seen)
        model.eval()
        _, seen = model(collate([(i, 0.5) for i in range(SIZE)]))  # without no_grad, as people forget it
        model.train()
        trace.append(["evaluated", float(seen[0])])
        roll_back()
        model.flush()
        scheduler.step()
    model.flush()
    result = {"trace": list(trace), "first_life": first_life, "rates": [g["lr"] for g in optimizer.param_groups]}
    result["running_mean"] = model.module.below[1].running_mean.tolist()
    result["maps"] = {name: values.tolist() for name, values in model.named_buffers() if "_mch_" in name}
    whole = model.full_state_dict() if mixed else {}
    result["whole"] = {name: [list(value.shape), float(value.double().sum())] for name, value in whole.items()}
    result["digest"] = model.digest(tables=rank == 0 or mixed)  # each trainer has shards of its own then
    (out / f"{rank}.json").write_text(json.dumps(result))
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
