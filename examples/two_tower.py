"""Trains a two-tower retrieval model: which items does a user like? Made-up users and items, real recall.

    torchrun --nproc-per-node 2 examples/two_tower.py

A tower embeds users, another one items; a user's score for an item is the product of the two. Every other item of the
batch is a negative one. At the end: in how many of 100 users' ten best items is one that was held out?

To see it survive, give it a cluster of its own, and `kill -9` whatever you like:

    torch-ecrec up --servers 3 --spares 1 -k 2 -r 1 --port 29400 &
    TORCH_ECREC_JOIN=127.0.0.1:29400 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --standalone --local-addr 127.0.0.1 --max-restarts 10 \\
        --nproc-per-node 2 examples/two_tower.py --epochs 20
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec

USERS, ITEMS, TASTES, LIKES = 2_000, 500, 8, 10
DIM = 16


class Likes(Dataset[tuple[int, int]]):
    """Each user likes the items nearest to a taste of theirs; the last one is held out."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        users = torch.randn(USERS, TASTES, generator=generator)
        items = torch.randn(ITEMS, TASTES, generator=generator)
        self.liked = (users @ items.T).topk(LIKES, dim=1).indices

    def __len__(self) -> int:
        return USERS * (LIKES - 1)

    def __getitem__(self, index: int) -> tuple[int, int]:
        user, which = index % USERS, index // USERS
        return user, int(self.liked[user, which])


def keyed(users: Tensor, items: Tensor) -> KeyedJaggedTensor:
    ids = torch.cat([users, items])
    return KeyedJaggedTensor.from_lengths_sync(["user", "item"], ids, torch.ones(len(ids), dtype=torch.int32))


class TwoTower(nn.Module):
    """Scores (B, B): of each user for each item of the batch."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.user, self.item = (nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)) for _ in range(2))

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embedded = self.tables(ids)
        scores = self.user(embedded["user"]) @ self.item(embedded["item"]).T
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        return loss, scores.detach()


def recall(model: nn.Module, data: Likes, users: int = 100) -> float:
    """Of the held-out items of some users, how many are among the ten best that the user was not seen to like."""
    model.eval()
    with torch.no_grad():
        _, scores = model(keyed(torch.arange(ITEMS), torch.arange(ITEMS)))  # as many users as there are items
    model.train()
    scores = scores[:users]
    scores.scatter_(1, data.liked[:users, :-1], -torch.inf)
    best = scores.topk(10, dim=1).indices
    return float((best == data.liked[:users, -1:]).any(dim=1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=256, help="of each trainer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name="user_rows", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"]),
            EmbeddingBagConfig(name="item_rows", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"]),
        ],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.3})
    model = torch_ecrec.DistributedModelParallel(TwoTower(tables), device=torch.device("cpu"))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.01))

    data = Likes()
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), drop_last=True)
    batches = model.attach(optimizer=optimizer, reader=loader)
    for epoch in batches.epochs(args.epochs):
        batches.sampler.set_epoch(epoch)
        for users, items in batches:
            optimizer.zero_grad()
            loss, _ = model(keyed(users, items))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    found = recall(model, data)
    if dist.get_rank() == 0:
        print(f"recall at 10 of held-out items: {found:.3f}; digest {model.digest()[:16]}")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
