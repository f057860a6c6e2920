"""A TorchRec script whose own handler of SIGTERM saves a checkpoint, under torchrun. Run: told_child.py FOLDER"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torch_ecrec import DistributedModelParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="a", num_embeddings=60, embedding_dim=4, feature_names=["x"])
        self.bags = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(4, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(batch).values())


def say(line: str) -> None:
    """By one write: torchrun's workers share a pipe, and with `python -u` a print is two."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    model = DistributedModelParallel(Model(), device=torch.device("cpu"))
    step, stop = 0, torch.zeros(())
    while not stop:
        ids = torch.tensor([step % 60, (7 * step + dist.get_rank()) % 60])
        model(KeyedJaggedTensor(["x"], ids, lengths=torch.tensor([1, 1]))).sum().backward()
        step += 1
        if step == 3:
            say(f"READY {os.getpid()}")
        time.sleep(0.01)
        stop = torch.tensor(float(bool(told)))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    time.sleep(float(os.environ.get("BEFORE_SAVING_S", "0")))
    dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
    say(f"SAVED {step}")
    model.close()


if __name__ == "__main__":
    main()
