"""A TorchRec script of one trainer, with a cluster of its own that TensorBoard is shown. Run: board_child.py FOLDER"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torch_ecrec
from torch_ecrec.transport.whereabouts import status_of

STEPS, LIMIT_S = 60, 600.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="a", num_embeddings=60, embedding_dim=4, feature_names=["x"])
        self.bags = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(4, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(batch).values())


def main() -> None:
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}.group", rank=0, world_size=1)
    model = torch_ecrec.DistributedModelParallel(Model(), device=torch.device("cpu"))
    board = torch_ecrec.TensorBoard(model, folder, every_s=0.2)
    for step in range(STEPS):
        ids = torch.tensor([step, 7 * step % 60])
        model(KeyedJaggedTensor(["x"], ids, lengths=torch.tensor([1, 1]))).sum().backward()
        time.sleep(0.03)
    deadline_s = time.monotonic() + LIMIT_S
    while status_of(model.session.join, LIMIT_S).step < STEPS:
        assert time.monotonic() < deadline_s, "no heartbeat has told of the last step"
        time.sleep(0.1)
    board.close()
    model.close()


if __name__ == "__main__":
    main()
