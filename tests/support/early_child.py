"""A trainer that loads tables before its first step, and dies on the way. Run: python early_child.py ORDERS

ORDERS is a JSON object with the fields of `Orders`; RANK, WORLD_SIZE and TORCH_ECREC_JOIN are in the environment. What
it loads is a function of what is there, in many small portions, so that none may be left out, nor come twice. What it
has seen is in OUT/RANK.json at the end.

A *deed* is a portion of initial values, a portion that is loaded, or the push of a step: a trainer counts its own, and
ends as it begins number `dies_at` (of its life): OUT/died-LIFE is there then. 0: it lives.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shards import changed, whole
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torch_ecrec
from torch_ecrec import checkpoint
from torch_ecrec.client.session import Session
from torch_ecrec.nn import tables_state

LIMIT_S, ROWS, SIZE, PORTION_BYTES = 300.0, 200, 8, 1024


@dataclass(frozen=True)
class Orders:
    """What it is to do. `attach`: before or after it loads, or never; `way`: how it loads."""

    out: str
    life: int = 0
    steps: int = 4
    every: int = 1
    way: str = "sharded"
    attach: str = "after"
    init: bool = False
    dies_at: int = 0


class Deeds:
    """Counts what this trainer does, and ends it."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.count = orders, 0

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def deed(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.orders.dies_at:
                (Path(self.orders.out) / f"died-{self.orders.life}").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return deed


class Trace(list[tuple[int, float, float]]):
    """Of every step, the sum of what was looked up, and the loss."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["seen"]


class Net(nn.Module):
    """Bags of two tables, and a layer."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Linear(12, 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.tables(ids).values()
        return self.over(pooled).square().mean(), pooled.detach()


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    ids = (torch.arange(2 * SIZE) * 13 + 29 * step + 7 * rank) % ROWS
    return KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, torch.ones(2 * SIZE, dtype=torch.int32))


def init(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.linspace(-1, 1, weight.numel()).view(weight.shape))


def load(model: Any, orders: Orders) -> None:
    """Weights and optimizer state, twice."""
    for keeps in (0.9, 0.95):
        state, fused = model.state_dict(), model.fused_optimizer.state_dict()
        new = {name: changed(value, lambda v, keeps=keeps: v * keeps + 0.01) for name, value in state.items()}
        if orders.way == "whole":
            new = {name: whole(value) for name, value in new.items()}
        model.load_state_dict(new)
        for values in fused["state"].values():
            values.update({name: changed(value, lambda v: v * 0.5 + 0.1) for name, value in values.items()})
        model.fused_optimizer.load_state_dict(fused)
    if orders.way == "streamed":
        folder = Path(orders.out) / f"saved-{orders.life}"
        checkpoint.save(model, folder)
        model.load_state_dict({name: changed(value, lambda v: v * 0) for name, value in model.state_dict().items()})
        checkpoint.load(model, folder)


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    orders = Orders(**json.loads(sys.argv[1]))
    rank, trainers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{orders.out}/store-{orders.life}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=trainers)
    torch.manual_seed(1)
    tables_state.CHUNK_BYTES = PORTION_BYTES
    made = {"init_fn": init} if orders.init else {}
    configs = [
        EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"], **made),
        EmbeddingBagConfig(
            name="h", num_embeddings=ROWS, embedding_dim=4, feature_names=["g"], data_type=DataType.FP16, **made
        ),
    ]
    tables = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
    deeds = Deeds(orders)
    for name in ("load", "overwrite", "push"):
        setattr(Session, name, deeds.counted(getattr(Session, name)))
    model: Any = torch_ecrec.DistributedModelParallel(
        Net(tables), device=torch.device("cpu"), snapshot_every=orders.every
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adam(p, lr=0.01))]
    )
    trace = Trace()
    if orders.attach == "before":
        model.attach(optimizer=optimizer, trace=trace)
    load(model, orders)
    if orders.attach == "after":
        model.attach(optimizer=optimizer, trace=trace)
    first = model.steps_done
    for step in range(first, orders.steps):
        with model.step():
            optimizer.zero_grad()
            loss, pooled = model(batch(step, rank))
            loss.backward()
            optimizer.step()
            trace.append((step, float(pooled.double().sum()), float(loss)))
    model.flush()
    seen: dict[str, Any] = {"trace": trace, "digest": model.digest() if rank == 0 else None}
    seen["dense"] = [value.flatten().tolist() for value in dense.values()]
    seen["life"] = {"deeds": deeds.count, "first": first}
    (Path(orders.out) / f"{rank}.json").write_text(json.dumps(seen))
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
