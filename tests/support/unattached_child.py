"""A script whose loop keeps for itself, in each way that is usual, what it should attach. To be rehearsed.

What each way comes to, the loop puts into something attached, by the name of the way: so a rehearsal compares each.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rehearsed_child import BATCHES, ROWS, SIZE, Net
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torch_ecrec

STEPS = 12


class Seen:
    """The last value of something."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Noise:
    """A generator in a container of an object."""

    def __init__(self) -> None:
        self.inner = {"numpy": np.random.default_rng(1)}


def drawer() -> Callable[[], float]:
    """A generator in a closure."""
    generator = torch.Generator().manual_seed(1)
    return lambda: float(torch.rand((), generator=generator))


WAYS = (
    *("enumerate", "zip", "second_iterator", "generator", "of_object", "of_closure"),
    *("count", "sum", "list", "scaler", "average"),
)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=4, feature_names=["f"])],
    )
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    model = torch_ecrec.DistributedModelParallel(Net(tables), device=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.module.over.parameters(), lr=0.01)
    # what sets learning rates, and leaves no trace in what it sets them in
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    warm_up = WarmupOptimizer(model.fused_optimizer, [WarmupStage(WarmupPolicy.LINEAR, max_iters=8, value=0.1)])

    seen = {way: Seen() for way in WAYS}
    batches = model.attach(optimizer=optimizer, reader=DataLoader(range(SIZE * BATCHES), SIZE, shuffle=True), **seen)

    others, own, noise, draw = iter(DataLoader(range(99))), random.Random(1), Noise(), drawer()
    count, total, kept = 0, 0.0, []
    average = AveragedModel(model.module.over[1])
    scaler, scaled = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1), nn.Parameter(torch.ones(1))
    stranger = torch.optim.SGD([scaled], lr=0.1)
    for i, (ids, other) in enumerate(zip(itertools.cycle(batches), itertools.count(), strict=False)):
        warm_up.zero_grad()
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        warm_up.step()
        optimizer.step()
        plateau.step(1.0)
        average.update_parameters(model.module.over[1])
        scaler.scale(scaled.sum()).backward()
        scaler.step(stranger)
        scaler.update()
        count += 1  # noqa: SIM113, the loop's own
        total += 1.5
        kept.append(i)
        found = {
            "enumerate": i,
            "zip": other,
            "second_iterator": int(next(others)),
            "generator": own.random(),
            "of_object": float(noise.inner["numpy"].random()),
            "of_closure": draw(),
            "count": count,
            "sum": total,
            "list": len(kept),
            "scaler": scaler.get_scale(),
            "average": float(average.module.weight.sum()),
        }
        for way, value in found.items():
            seen[way].value = value
        if count == STEPS:
            break
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
