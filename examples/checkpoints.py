"""Trains, saves and goes on from what was saved: with torch_ecrec or with plain TorchRec, in either direction.

    torchrun --nproc-per-node 2 examples/checkpoints.py --folder saved
    torchrun --nproc-per-node 2 examples/checkpoints.py --folder saved --load --backend torchrec
    torchrun --nproc-per-node 1 examples/checkpoints.py --folder saved --load

A cluster can begin with what TorchRec has saved, and the script need not load it then (docs/storage.md, "Import"):

    torchrun --nproc-per-node 2 examples/checkpoints.py --folder saved --backend torchrec --describe job.json
    torch-ecrec checkpoints store --import saved --job job.json
    torch-ecrec up --servers 3 --port 29400 --restore store        # then --folder gone-on, with TORCH_ECREC_JOIN

Each run says the loss on rows that are held out, after loading and after training. `torch.distributed.checkpoint` saves
and loads; the number of trainers may be another one each time. docs/checkpoints.md has the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec
import torch_ecrec.checkpoint

ROWS, DIM, SAMPLES = 300, 8, 10_000
CPU = torch.device("cpu")


class Ratings(Dataset[tuple[Tensor, Tensor]]):
    """Two ids, and a made-up rating of the one by the other."""

    def __init__(self, seed: int, number: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, ROWS, (number, 2), generator=generator)
        taste = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(0))
        self.ratings = (taste[0, self.ids[:, 0]] * taste[1, self.ids[:, 1]]).tanh()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.ids[index], self.ratings[index]


class Net(nn.Module):
    """Predicts ratings (B,)."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.over = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids_B2: Tensor) -> Tensor:
        lengths = torch.ones(ids_B2.numel(), dtype=torch.int32)
        found = self.tables(KeyedJaggedTensor.from_lengths_sync(["user", "item"], ids_B2.T.reshape(-1), lengths))
        user, item = found["user"], found["item"]
        rating: Tensor = self.over(torch.cat([user, item, user * item], dim=1)).squeeze(1)
        return rating


def unsharded() -> Net:
    configs = [
        EmbeddingBagConfig(name=f"{name}_rows", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
        for name in ("user", "item")
    ]
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    return Net(tables)


def build(backend: str) -> nn.Module:
    net = unsharded()
    if backend == "ecrec":
        return torch_ecrec.DistributedModelParallel(net, device=CPU)
    names = [config.name for config in net.tables.embedding_bag_configs()]
    ways = {name: row_wise() for name in names}  # on a CPU, TorchRec's planner leaves small tables unsharded
    plan = construct_module_sharding_plan(net.tables, ways, EmbeddingBagCollectionSharder(), device_type="cpu")
    return torchrec.distributed.DistributedModelParallel(net, device=CPU, plan=ShardingPlan({"tables": plan}))


def states(model: Any, optimizer: KeyedOptimizerWrapper) -> dict[str, Any]:
    """All that is saved: weights, the tables' optimizer, the other one."""
    return {
        "model": model.state_dict(),
        "tables": model.fused_optimizer.state_dict(),
        "rest": optimizer.state_dict(),
    }


def load(model: Any, optimizer: KeyedOptimizerWrapper, folder: Path) -> None:
    found = states(model, optimizer)
    dcp.load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    model.fused_optimizer.load_state_dict(found["tables"])
    optimizer.load_state_dict(found["rest"])


def held_out(model: nn.Module) -> float:
    """The loss on rows that nobody trains on."""
    data = Ratings(seed=2, number=500)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(data.ids), data.ratings))


def train(model: Any, optimizer: KeyedOptimizerWrapper, batches: Any) -> None:
    """One pass."""
    for ids, ratings in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(ids), ratings).backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are")
    parser.add_argument("--load", action="store_true", help="go on from what is there")
    parser.add_argument("--backend", choices=["ecrec", "torchrec"], default="ecrec")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--describe", type=Path, metavar="FILE", help="write what an import has to know of the model")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.describe and dist.get_rank() == 0:
        torch_ecrec.checkpoint.describe(unsharded(), args.describe)
    torch.manual_seed(0)
    model: Any = build(args.backend)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))
    if args.load:
        load(model, optimizer, args.folder)
        found = held_out(model)
        if dist.get_rank() == 0:
            print(f"loaded: {found:.6f}", flush=True)
    data = Ratings(seed=1, number=SAMPLES)
    loader: Any = DataLoader(data, 200, sampler=DistributedSampler(data))
    if args.backend == "ecrec":
        loader = model.attach(optimizer=optimizer, reader=loader)
    for epoch in loader.epochs(args.epochs) if args.backend == "ecrec" else range(args.epochs):
        loader.sampler.set_epoch(epoch)
        train(model, optimizer, loader)
    found = held_out(model)
    dcp.save(states(model, optimizer), checkpoint_id=args.folder)
    if dist.get_rank() == 0:
        print(f"saved: {found:.6f}", flush=True)
    if args.backend == "ecrec":
        model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
