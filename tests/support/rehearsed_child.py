"""A small training script, to be rehearsed: python rehearsed_child.py WAY [STEPS]

WAY: `good`; `counts` (a warm-up that goes by a count of its own); `unseeded`; `early` (stops by a count of its own);
`late` (changes what is attached before its first step); `hangs` (once it is restarted); `average` (keeps an average of
the weights for itself, and prints it at the end), `saves` (the same, and writes it to `average.pt`), `speaks` (prints
what is never the same, and what only a restart has).
"""

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import torch_ecrec

SIZE, BATCHES, ROWS = 4, 4, 50


class Net(nn.Module):
    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        sparse = KeyedJaggedTensor.from_lengths_sync(["f"], ids, torch.ones(len(ids), dtype=torch.int32))
        return ((self.over(self.tables(sparse).values()).squeeze(1) - ids / ROWS) ** 2).mean()


def main() -> None:
    way, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3 * BATCHES
    dist.init_process_group("gloo")
    if way != "unseeded":
        torch.manual_seed(dist.get_rank())
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])],
    )
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    model = torch_ecrec.DistributedModelParallel(
        Net(tables),
        device=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.module.over.parameters(), lr=0.01)
    batches = model.attach(optimizer=optimizer, reader=DataLoader(range(SIZE * BATCHES), SIZE, shuffle=True))
    done, keeps = 0, way in ("average", "saves")
    average = model.module.over[1].weight.detach().clone() if keeps else torch.empty(0)
    if way == "speaks":
        print(f"begun {time.time()}")
        if model.session.restarted:
            print("it goes on")
    if way == "late":
        optimizer.param_groups[0]["lr"] *= 2
    for _ in batches.epochs(10 * steps if way == "early" else steps // BATCHES):
        if way == "early" and done >= steps:
            break
        for ids in batches:
            done += way in ("counts", "early")
            if way == "counts":
                optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, done / 5)
            if way == "hangs" and model.session.restarted:
                threading.Event().wait()
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
            if keeps:
                average.lerp_(model.module.over[1].weight.detach(), 0.1)
    if way == "average":
        print("average", average.sum().item())
    if way == "saves":
        torch.save(average, "average.pt")
    print("done", done)
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
