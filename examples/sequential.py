"""Trains a sequential recommender: a small causal transformer over item embeddings guesses the item that comes next.

    torchrun --nproc-per-node 2 examples/sequential.py

Items come from an `EmbeddingCollection`: a row for each item of a history, not a pooled one. Its optimizer is Adam, on
the servers, for the rows that a step has used. Histories are made up: each walks through the items by one of a few
rules. At the end: how often is the next item of histories that were never trained on among the ten best?

To see it survive, give it a cluster of its own, and `kill -9` whatever you like:

    torch-ecrec up --servers 3 --spares 1 -k 2 -r 1 --port 29400 &
    TORCH_ECREC_JOIN=127.0.0.1:29400 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --standalone --local-addr 127.0.0.1 --max-restarts 10 \\
        --nproc-per-node 2 examples/sequential.py --epochs 20
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import torch_ecrec

ITEMS, HISTORIES, LONGEST, DIM = 1_000, 4_000, 12, 32
STEPS = (1, 7, 31)  # a history goes on by one of these


class Histories(Dataset[Tensor]):
    """Each of 4 to `LONGEST` items, the last of which is to be guessed."""

    def __init__(self, seed: int, number: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(0, ITEMS, (number,), generator=generator)
        rule = torch.tensor(STEPS)[torch.randint(0, len(STEPS), (number,), generator=generator)]
        self.items = (first[:, None] + rule[:, None] * torch.arange(LONGEST)) % ITEMS
        self.lengths = torch.randint(4, LONGEST + 1, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor:
        return self.items[index, : self.lengths[index]]


def collate(histories: list[Tensor]) -> tuple[KeyedJaggedTensor, Tensor]:
    """What was seen of each history, and what came next."""
    lengths = torch.tensor([len(history) - 1 for history in histories], dtype=torch.int32)
    seen = torch.cat([history[:-1] for history in histories])
    last = torch.stack([history[-1] for history in histories])
    return KeyedJaggedTensor.from_lengths_sync(["item"], seen, lengths), last


class NextItem(nn.Module):
    """Scores (B, ITEMS) of what comes next."""

    def __init__(self, items: EmbeddingCollection) -> None:
        super().__init__()
        self.items = items
        self.place = nn.Parameter(torch.randn(LONGEST, DIM) * 0.02)
        layer = nn.TransformerEncoderLayer(DIM, nhead=2, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.score = nn.Linear(DIM, ITEMS)

    def forward(self, seen: KeyedJaggedTensor, last: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.items(seen)["item"]
        padded = embedded.to_padded_dense(LONGEST)  # (B, LONGEST, DIM)
        places = torch.arange(LONGEST)
        missing = places[None, :] >= embedded.lengths()[:, None]
        later = places[None, :] > places[:, None]
        found = self.layers(padded + self.place, mask=later, src_key_padding_mask=missing)
        at_last = found[torch.arange(len(found)), embedded.lengths().long() - 1]
        scores = self.score(at_last)
        return nn.functional.cross_entropy(scores, last), scores.detach()


def hits(model: nn.Module, histories: Histories) -> float:
    """How often the next item is among the ten best."""
    seen, last = collate([histories[i] for i in range(len(histories))])
    model.eval()
    with torch.no_grad():
        _, scores = model(seen, last)
    model.train()
    return float((scores.topk(10, dim=1).indices == last[:, None]).any(dim=1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="of each trainer")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)

    items = EmbeddingCollection(
        device=torch.device("meta"),
        tables=[EmbeddingConfig(name="item_rows", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])],
    )
    apply_optimizer_in_backward(torch.optim.Adam, items.parameters(), {"lr": 0.01})
    model = torch_ecrec.DistributedModelParallel(NextItem(items), device=torch.device("cpu"))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.AdamW(parameters, lr=0.005))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)

    data = Histories(seed=1, number=HISTORIES)
    loader = DataLoader(data, args.batch_size, sampler=DistributedSampler(data), collate_fn=collate, drop_last=True)
    batches = model.attach(optimizer=optimizer, lr_scheduler=scheduler, reader=loader)
    for epoch in batches.epochs(args.epochs):
        batches.sampler.set_epoch(epoch)
        for seen, last in batches:
            optimizer.zero_grad()
            loss, _ = model(seen, last)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    found = hits(model, Histories(seed=2, number=500))
    if dist.get_rank() == 0:
        print(f"next item among the ten best: {found:.3f}; digest {model.digest()[:16]}")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
