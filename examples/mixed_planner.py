"""Trains on tables of two kinds, as a planner says: large ones on erasure-coded servers, small ones with TorchRec.

    torchrun --nproc-per-node 2 examples/mixed_planner.py

TorchRec's planner chooses between its own sharding types and ours. Here constraints leave the small tables to TorchRec:
it gives one to one of the trainers, and each of them a copy of the other. Both are kept with their snapshots,
so that they are as exact after a loss as the tables on the servers. Made-up visits; what is learned is real.

To see it survive, give it a cluster of its own, and `kill -9` whatever you like:

    torch-ecrec up --servers 3 --spares 1 -k 2 -r 1 --port 29400 &
    TORCH_ECREC_JOIN=127.0.0.1:29400 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --standalone --local-addr 127.0.0.1 --max-restarts 10 \\
        --nproc-per-node 2 examples/mixed_planner.py --epochs 20
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec
from torch_ecrec.planner import EmbeddingShardingPlanner, ParameterConstraints, Report, Servers, Topology

SIZES = {"user": 5_000, "item": 2_000, "country": 50, "hour": 24}
VISITS, DIM = 20_000, 16


def visits() -> TensorDataset:
    """Ids (visits, 4), and whether something was bought (visits,): tastes of users, countries and hours decide."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(0, size, (VISITS,), generator=generator) for size in SIZES.values()], dim=1)
    tastes = [torch.randn(size, 4, generator=generator) for size in SIZES.values()]
    user, item, country, hour = (taste[ids[:, i]] for i, taste in enumerate(tastes))
    return TensorDataset(ids, ((user * item).sum(1) + (country * hour).sum(1) > 0).float())


def collection(names: list[str]) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=f"{name}_rows", num_embeddings=SIZES[name], embedding_dim=DIM, feature_names=[name])
            for name in names
        ],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


class Buys(nn.Module):
    """Two collections, since a collection is sharded as a whole: (loss, scores)."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = collection(["user", "item"]), collection(["country"])
        self.tiny = collection(["hour"])
        self.over = nn.Sequential(nn.Linear(4 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: Tensor, bought: Tensor) -> tuple[Tensor, Tensor]:
        features = KeyedJaggedTensor.from_lengths_sync(
            list(SIZES), ids.T.flatten(), torch.ones(ids.numel(), dtype=torch.int32)
        )
        pooled = [tables(features).values() for tables in (self.large, self.small, self.tiny)]
        scores = self.over(torch.cat(pooled, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, bought), scores.detach()


def planned(model: nn.Module, batch_size: int) -> torch_ecrec.DistributedModelParallel:
    report = Report()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        batch_size=batch_size,
        servers=Servers(torch_ecrec.CodeSpec(slots=3, k=2, r=1), memory_bytes=64 << 20),
        constraints={
            "country_rows": ParameterConstraints(sharding_types=["table_wise"]),
            "hour_rows": ParameterConstraints(sharding_types=["data_parallel"]),
        },
        stats=report,
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    if dist.get_rank() == 0:
        print("\n".join(report.servers), flush=True)
    return torch_ecrec.DistributedModelParallel(model, plan=plan, device=torch.device("cpu"), unprotected="snapshot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256, help="of each trainer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    model = planned(Buys(), args.batch_size)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))  # and the table that each trainer has whole
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    data = visits()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), drop_last=True)
    batches = model.attach(optimizer=optimizer, reader=loader)
    for epoch in batches.epochs(args.epochs):
        batches.sampler.set_epoch(epoch)
        for ids, bought in batches:
            optimizer.zero_grad()
            loss, scores = model(ids, bought)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            right = ((scores > 0) == (bought > 0)).float().mean()
            print(f"epoch {epoch}: loss {loss.item():.4f}, right {right:.2f}", flush=True)
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
