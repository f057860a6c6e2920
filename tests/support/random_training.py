"""Random models (`random_models.py`) as a script trains them, saves them and loads them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from models import CPU, dense_parameters, job_of
from random_models import TRACING, Model, Net, batches_of
from shards import changed, local
from torch import Tensor
from torch.optim.lr_scheduler import StepLR
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist, TrainPipelineSparseDistLite
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torch_ecrec import checkpoint
from torch_ecrec.nn.coverage import OURS
from torch_ecrec.nn.dense import Replicated
from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.nn.placeholder import TableParameter
from torch_ecrec.spec.job import JobSpec

PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "lite": TrainPipelineSparseDistLite,
}


class Trace(list[Any]):
    """What a trainer has seen, step by step: attached, so that it goes back with a step.

    Of each step: the loss and what was looked up; the dense model before it, and its gradients; what an evaluation saw.
    """

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["seen"]


def bytes_in(values: Sequence[Tensor]) -> list[Any]:
    """As a snapshot keeps it, and compares exactly."""
    return [value.detach().clone() for value in values]


def job_for(model: Model) -> JobSpec:
    made = job_of(Net(model), model.trainers, sharders=model.sharders, plan=plan_of(model))
    return dataclasses.replace(made, seed=model.seed)


def is_of_table(key: str) -> bool:
    return key.endswith(".weight") and ("embedding_bags." in key or "embeddings." in key)


def of_weights(values: Tensor) -> Tensor:
    """What a load makes of weights."""
    return (values.float() * 0.5 + 0.25).to(values.dtype)


def of_state(values: Tensor) -> Tensor:
    """What a load makes of optimizer state."""
    return values * 0.5


def is_some(key: str) -> bool:
    """Whether the load of some tables has it."""
    return int(key.split(".")[-2].removeprefix("t")) % 2 == 0


def load(model: DistributedModelParallel, what: str) -> None:
    """Loads something, in training; every trainer calls it."""
    if what == "state":
        state = model.fused_optimizer.state_dict()
        for key, fields in state["state"].items():
            state["state"][key] = {name: changed(value, of_state) for name, value in fields.items()}
        model.fused_optimizer.load_state_dict(state)
        return
    if what == "whole":
        sizes = {key: value.size() for key, value in model.state_dict().items() if is_of_table(key)}
        full = model.full_state_dict()
        if model.session.trainer:  # nobody looks at those
            full = {key: torch.zeros(size) for key, size in sizes.items()}
        model.load_state_dict({key: of_weights(full[key]) for key in sizes}, strict=False)
        return
    state = model.state_dict()
    tables = [key for key in state if is_of_table(key)]
    if what == "written":
        for value in {id(state[key]): state[key] for key in tables}.values():  # a collection may have two names
            for values in local(value):
                values.copy_(of_weights(values))
        model.flush()
        return
    keys = [key for key in tables if is_some(key)] if what == "some" else tables
    new = {key: changed(state[key], of_weights) for key in keys}
    model.load_state_dict(new if what == "some" else {**state, **new}, strict=what != "some")


def freeze(model: Model, made: DistributedModelParallel, step: int) -> None:
    """Before a step: the tables that get no gradients in it."""
    for name, parameter in made.named_parameters():
        if isinstance(parameter, TableParameter):
            _, part, *_, table, _ = name.split(".")
            parameter.requires_grad_(step not in model.parts[int(part)].tables[int(table.removeprefix("t"))].frozen)


@dataclass
class End:
    """Of one trainer, after its last step."""

    trace: list[Any]
    digest: str
    dense: dict[str, Tensor]
    maps: dict[str, dict[str, Any]]  # by path of the module, and table
    first: list[Tensor] | None = None
    last: list[Tensor] | None = None


def train(model: Model, session: Any, on_end: Callable[[int, End], None], looks: bool = False) -> None:
    """A trainer's script.

    Args:
        looks: trainer 0 reads all records before training and after it.
    """
    rank = session.trainer
    net = Net(model)
    made = DistributedModelParallel(net, device=CPU, session=session, **how(model))
    end = End([], "", {}, {})
    dense = KeyedOptimizerWrapper(dense_parameters(made), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5))
    together = CombinedOptimizer([made.fused_optimizer, dense])
    schedulers = [StepLR(together, step_size=2, gamma=0.5)] if model.schedule else []
    trace = Trace()
    freeze(model, made, 1)
    if looks:
        made.flush()  # first weights are there
        end.first = records_of_all(made) if rank == 0 else None
    for at, what in model.loads:
        if at == 0:
            load(made, what)
    batches = made.attach(optimizer=together, lr_scheduler=schedulers, reader=batches_of(model, rank), seen=trace)
    stream, pipeline = iter(batches), None
    if model.driver != "plain":
        pipeline = PIPELINES[model.driver](made, together, CPU)
    while True:
        number = len(trace) + 1
        before = bytes_in(list(dense_parameters(made).values()))
        try:
            seen = pipeline.progress(stream) if pipeline is not None else _step(made, together, next(stream))
        except StopIteration:
            break
        if model.driver in TRACING:
            ahead = {module.forward.name for module in pipeline._pipelined_modules}
            assert ahead == {f"parts.{i}" for i, part in enumerate(model.parts) if part.kind != "processed"}
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in dense_parameters(made).values()]
        for scheduler in schedulers:
            scheduler.step()
        looked = _evaluate(made, pipeline, batches_of(model, rank)[number - 1]) if number in model.looks else []
        trace.append([bytes_in(seen), before, bytes_in(grads), looked])
        for at, what in model.loads:
            if at == number:
                load(made, what)
        freeze(model, made, number + 1)
    made.flush()
    end.trace = list(trace)
    if rank == 0:
        end.digest = made.digest()
        if looks:
            end.last = records_of_all(made)
    end.dense = {name: value.detach().clone() for name, value in dense_parameters(made).items()}
    end.maps = {
        path: copy.deepcopy(module.replicated_state())
        for path, module in made.module.named_modules()
        if isinstance(module, Replicated)
    }
    on_end(rank, end)


def _step(model: DistributedModelParallel, optimizer: Any, batch: Any) -> list[Tensor]:
    """A plain loop's. Returns what was seen, the loss first."""
    optimizer.zero_grad()
    loss, seen = model(batch)
    loss.backward()
    optimizer.step()
    return list(seen)


def _evaluate(model: DistributedModelParallel, pipeline: Any, batch: Any) -> list[Tensor]:
    """What an evaluation sees; a pipeline that has traced the model lets go of it, with the batches that it has drawn.

    Of those `TrainPipelineSparseDist` leaves it to TorchRec's pipeline of evaluation.
    """
    tracing = isinstance(pipeline, TrainPipelineSparseDist)
    if tracing:
        pipeline.detach()
    model.eval()
    with torch.no_grad():
        if type(pipeline) is TrainPipelineSparseDist:
            other = EvalPipelineSparseDist(model, pipeline._optimizer, CPU)
            seen = other.progress(iter([batch]))
            other.detach()
        else:
            _, seen = model(batch)
    model.train()
    if tracing:
        pipeline.attach(model)
    return bytes_in(seen)


WAYS = ("dcp", "streamed", "saved streamed", "loaded streamed")


def _state(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def save(model: Model, session: Any, folder: str, way: str, on_end: Callable[[int, list[Tensor]], None]) -> None:
    """A trainer's script: trains all steps and saves."""
    made = DistributedModelParallel(Net(model), device=CPU, session=session, **how(model))
    for batch in batches_of(model, session.trainer):
        made(batch)[0].backward()
    if way in ("streamed", "saved streamed"):
        checkpoint.save(made, folder)
    else:
        dcp.save(_state(made), checkpoint_id=folder)
    made.flush()
    on_end(session.trainer, records_of_all(made) if session.trainer == 0 else [])


def restore(model: Model, session: Any, folder: str, way: str, on_end: Callable[[int, list[Tensor]], None]) -> None:
    """A trainer's script, of another number of them: loads what `save` has saved, before a step or after one."""
    made = DistributedModelParallel(Net(model), device=CPU, session=session, **how(model))
    if model.seed % 2:
        made(batches_of(model, session.trainer)[0])[0].backward()
    if way in ("streamed", "loaded streamed"):
        checkpoint.load(made, folder)
    else:
        state = _state(made)
        dcp.load(state, checkpoint_id=folder)
        made.load_state_dict(state["model"])
        made.fused_optimizer.load_state_dict(state["optimizer"])
    made.flush()
    on_end(session.trainer, records_of_all(made) if session.trainer == 0 else [])


def how(model: Model) -> dict[str, Any]:
    """What a model is made with."""
    return {"snapshot_every": model.snapshot_every, "sharders": model.sharders or None, "plan": plan_of(model)}


def plan_of(model: Model) -> ShardingPlan | None:
    """What a user's plan says of the tables; None where it has nothing to say."""
    if all(table.sharding == "auto" for part in model.parts for table in part.tables):
        return None
    kinds = {placed: kind for kind, placed in OURS.items()}
    return ShardingPlan(
        {
            f"parts.{i}": EmbeddingModuleShardingPlan(
                {
                    f"t{j}": ParameterSharding(kinds[table.sharding], "parameter_server")
                    for j, table in enumerate(part.tables)
                }
            )
            for i, part in enumerate(model.parts)
        }
    )


def records_of_all(model: DistributedModelParallel) -> list[Tensor]:
    """Of each table group, (rows, B) uint8."""
    session = model.session
    return [
        session.read(number, torch.arange(table_group.rows)).clone().view(torch.uint8)
        for number, table_group in enumerate(session.job.table_groups)
    ]
