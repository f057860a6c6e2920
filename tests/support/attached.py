"""A trainer with everything attached, that can be made anew in place of one that was lost."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fake_session import FakeSession
from models import (
    CPU,
    LR,
    batch_of,
    collection,
    dense_parameters,
    job_of,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves
from torchrec import EmbeddingBagCollection
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.nn.parallel import DistributedModelParallel

END = 9


class Net(nn.Module):
    """Draws from every generator: dropout before the lookup, noise after it."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.below = nn.Sequential(
            nn.Linear(2, 6, dtype=torch.float32), nn.Dropout(0.5), nn.BatchNorm1d(6, dtype=torch.float32)
        )
        self.tables = tables
        self.over = nn.Linear(6 + 32, 1, dtype=torch.float32)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        below = self.below(batch.dense_features)
        pooled = self.tables(batch.sparse_features).values()
        logits = torch.tanh(self.over(torch.cat([below, pooled], dim=1))).squeeze(1)
        noise = 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss = nn.functional.mse_loss(logits + noise, batch.labels)
        return loss, loss.detach()


class Losses(list[float]):
    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["losses"]


class Passes:
    """Stateful: a pass of `size` batches, each of its own, then another pass."""

    def __init__(self, size: int = 4) -> None:
        self.size, self.drawn = size, 0

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.drawn % self.size, self.size):
            self.drawn += 1
            yield batch_of(6, self.drawn)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


@dataclass
class Trainer:
    model: DistributedModelParallel
    session: FakeSession
    optimizer: CombinedOptimizer
    scheduler: StepLR
    losses: Losses
    batches: Any

    def steps(self, end: int, batches: Iterator[Any] | None = None) -> None:
        """The plain loop."""
        batches = batches or passes(self.batches)
        while self.model.steps_done < end:
            self.optimizer.zero_grad()
            loss, _ = self.model(next(batches))
            try:
                loss.backward()
            except NonFiniteGradient:
                continue
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(float(loss.detach()))

    def pipeline(self, end: int) -> None:
        runner = TrainPipelineSparseDist(self.model, self.optimizer, CPU)
        while self.model.steps_done < end:
            loss = runner.progress(self.batches)
            self.scheduler.step()
            self.losses.append(float(loss))

    def state(self) -> list[Any]:
        """Everything that training has changed, as leaves."""
        return tree_leaves(
            [
                self.session.records,
                list(dense_parameters(self.model).values()),
                list(self.model.buffers()),
                self.optimizer.state_dict(),
                [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
                self.scheduler.state_dict(),
                list(self.losses),
            ]
        )


def passes(batches: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def made(before: FakeSession | None = None, step: int = 0, seed: int = 1, **more: Any) -> Trainer:
    """A trainer, not attached yet; after a restart in place of `before` if it is given."""
    tables = collection("adagrad")  # it seeds
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    net = Net(tables)
    session = FakeSession(job_of(net), before=before, step=step)
    model = DistributedModelParallel(net, device=CPU, session=session, **more)
    dense = KeyedOptimizerWrapper(dense_parameters(model), lambda p: torch.optim.Adam(p, lr=LR))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    return Trainer(model, session, optimizer, StepLR(optimizer, step_size=3, gamma=0.5), Losses(), None)


def unscheduled(trainer: Trainer) -> Trainer:
    """As if nobody had made a scheduler."""
    del trainer.scheduler, trainer.optimizer.step
    return trainer


def attach(trainer: Trainer, reader: Any = None) -> Trainer:
    trainer.batches = trainer.model.attach(
        optimizer=trainer.optimizer,
        lr_scheduler=trainer.scheduler,
        reader=Passes() if reader is None else reader,
        losses=trainer.losses,
    )
    return trainer


def same(a: Trainer, b: Trainer) -> bool:
    """All of the state, bit for bit."""
    pairs = list(zip(a.state(), b.state(), strict=True))
    assert len(pairs) > 20 and sum(isinstance(x, Tensor) for x, _ in pairs) > 15
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)
