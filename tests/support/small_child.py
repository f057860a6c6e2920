"""A trainer that may hold less than half of the only table. Run: python small_child.py RANK TRAINERS ROWS FOLDER WHAT

Builds a model, then, as WHAT says: `save`: trains a step, saves a checkpoint; `train`: besides, changes all weights and
loads it; `begin`: loads it before the first step. Says in FOLDER/WHAT-RANK.json what it saw: digests before, between
and after, bytes that it may hold and those that it held at most, both beyond what its imports have taken, and whether
half of the table was refused to it.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torch_ecrec.nn.parallel
import torch_ecrec.processes.launch  # before the limit, as all imports
from torch_ecrec import checkpoint

DIM = 64
SHARE = 0.49  # of the table, that a trainer may hold


def now(field: str) -> int:
    """Bytes: of memory that this process may write and nobody else has (`VmData`), or of what is there (`VmHWM`)."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def held_by_imports(table_bytes: int) -> tuple[int, int]:
    """Limits what comes after; returns what there is."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = now("VmData"), now("VmHWM")
    limit = before[0] + int(SHARE * table_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return before


def is_refused(numbers: int) -> bool:
    try:
        torch.empty(numbers)
    except RuntimeError as error:
        return "allocate" in str(error)
    return False


def main() -> None:
    rank, trainers, rows = map(int, sys.argv[1:4])
    folder, what = Path(sys.argv[4]), sys.argv[5]
    dist.init_process_group("gloo", init_method=f"file://{folder}/{what}", rank=rank, world_size=trainers)
    _, there = held_by_imports(rows * DIM * 4)
    table = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
    module = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    model: Any = torch_ecrec.DistributedModelParallel(module, device=torch.device("cpu"))
    seen: dict[str, Any] = {"refused": is_refused(rows * DIM // 2)}

    def train() -> None:
        features = KeyedJaggedTensor(["f"], torch.arange(100) * (rank + 7), lengths=torch.ones(100, dtype=torch.int32))
        model(features).values().sum().backward()
        model.flush()

    def digest() -> str | None:
        dist.barrier()
        found = model.digest() if rank == 0 else None
        dist.barrier()
        return found

    if what != "begin":
        train()
        seen["before"] = digest()
        checkpoint.save(model, folder / "saved")
    if what == "train":
        parallel_model: Any = torch_ecrec.DistributedModelParallel
        parallel_model._reset_parameters(model)
        train()
        seen["between"] = digest()
    if what != "save":
        checkpoint.load(model, folder / "saved")
        seen["after"] = digest()
    seen["held"], seen["may_hold"] = now("VmHWM") - there, int(SHARE * rows * DIM * 4)
    (folder / f"{what}-{rank}.json").write_text(json.dumps(seen))
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
