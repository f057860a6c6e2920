"""Trains TorchRec's DLRM on Criteo click logs, its embedding tables on erasure-coded servers or in plain TorchRec.

    torchrun --nproc-per-node 2 examples/dlrm_criteo.py --data train.tsv.gz --steps 200
    torchrun --nproc-per-node 2 examples/dlrm_criteo.py --backend torchrec

The two differ in `wrap`, and in `attach`, which brings lost trainers back (docs/assumptions.md says how torchrun must
be started for that), and nowhere else. Without `--data` it trains on synthetic lines of the same shape. The last 20 %
of the lines are held out; the area under the ROC curve on them is the last thing printed. Runs are reproducible: the
same arguments give the same losses.

With `--redraw`, as the demo has it, no batch comes twice: each is made of lines that are put together anew, with labels
that are drawn anew (`torch_ecrec.demo.criteo.redraw`). A comparison of two runs says something then, however long they
are: what is learned by heart gives no gradients, and a step that is missing changes no bit.

With `--ids N` a bag has N ids on average, none to 2 N - 1: the sample's own, and those of the samples before it. A line
of the log has one.

With `--device cuda` the dense layers are on a GPU, by operations of torch that give the same bits each time. Trainers
of one host take its GPUs in turn, and may share one.

With `--save FOLDER` it can be preempted: told to end (SIGTERM), all trainers end the step, save, and leave; started
again with the same arguments, they go on from there. Not with optimizers of tables that count steps (Adam, LAMB): a job
that loads a state dict counts from 1.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torch_ecrec.demo.criteo import CATEGORIES, INTEGERS, Clicks, auc, read, redraw, synthetic

TABLE_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum_sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rowwise_adagrad": (torchrec.optim.RowWiseAdagrad, {}),
    "lars_sgd": (torchrec.optim.LarsSGD, {}),
    "adam": (torch.optim.Adam, {}),
    "partial_rowwise_adam": (torchrec.optim.PartialRowWiseAdam, {}),
    "lamb": (torchrec.optim.LAMB, {}),
    "partial_rowwise_lamb": (torchrec.optim.PartialRowWiseLAMB, {}),
}
FEATURES = [f"C{i}" for i in range(1, CATEGORIES + 1)]
CPU = torch.device("cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["ecrec", "torchrec"], default="ecrec")
    parser.add_argument("--data", help="click log, FILE.tsv or FILE.tsv.gz (default: synthetic)")
    parser.add_argument("--redraw", action="store_true", help="no batch comes twice: see above")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the dense layers, with ecrec")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=512, help="of each trainer")
    parser.add_argument("--ids", type=int, default=1, metavar="N", help="in a bag, on average: see above")
    parser.add_argument(
        "--optimizer", choices=sorted(TABLE_OPTIMIZERS), default="rowwise_adagrad", help="of the tables"
    )
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--rows-per-table", type=int, default=20_000, help="categories are hashed into so many rows")
    parser.add_argument(
        "--same-init", action="store_true", help="the same first weights under either backend (slower start)"
    )
    parser.add_argument("--snapshot-every", type=int, default=1, metavar="N", help="steps between dense snapshots")
    parser.add_argument("--pipeline", action="store_true", help="use TorchRec's TrainPipelineSparseDist")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="save there when told to end; go on from there")
    parser.add_argument("--report", type=Path, help="write results of trainer I to FILE with .I before its suffix")
    args = parser.parse_args()
    if args.device != "cpu" and args.backend != "ecrec":
        parser.error("--device cuda goes with --backend ecrec: TorchRec's tables would be on the GPU, too")
    return args


def device_of(args: argparse.Namespace) -> torch.device:
    """The device of this trainer's dense layers."""
    if args.device == "cpu":
        return CPU
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS reads it when it starts: the same bits each time
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def seeded_uniform(weight: Tensor, bound: float, seed: int) -> None:
    """Fills a table in a way that does not depend on who owns it."""
    with torch.no_grad():
        weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed)))


def build(args: argparse.Namespace) -> DLRMTrain:
    """The model, tables on the meta device."""
    bound = args.rows_per_table**-0.5
    tables = [
        torchrec.EmbeddingBagConfig(
            name=f"table_{name}",
            embedding_dim=args.embedding_dim,
            num_embeddings=args.rows_per_table,
            feature_names=[name],
            init_fn=functools.partial(seeded_uniform, bound=bound, seed=args.seed + i) if args.same_init else None,
        )
        for i, name in enumerate(FEATURES)
    ]
    collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    table_optimizer, arguments = TABLE_OPTIMIZERS[args.optimizer]
    apply_optimizer_in_backward(table_optimizer, collection.parameters(), {"lr": args.lr, **arguments})
    torch.manual_seed(args.seed)
    return DLRMTrain(DLRM(collection, INTEGERS, [64, args.embedding_dim], [64, 32, 1]))


def wrap(model: DLRMTrain, args: argparse.Namespace, device: torch.device = CPU) -> nn.Module:
    """Makes the model a distributed one: the only difference between the backends."""
    if args.backend == "ecrec":
        import torch_ecrec

        return torch_ecrec.DistributedModelParallel(
            model, device=device, seed=args.seed, snapshot_every=args.snapshot_every
        )
    # On CPU, TorchRec would plan small tables as data-parallel, without a fused optimizer.
    path, collection = next((p, m) for p, m in model.named_modules() if isinstance(m, torchrec.EmbeddingBagCollection))
    ranks = {f"table_{name}": table_wise(rank=i % dist.get_world_size()) for i, name in enumerate(FEATURES)}
    entries = construct_module_sharding_plan(collection, ranks, EmbeddingBagCollectionSharder(), device_type="cpu")
    return torchrec.distributed.DistributedModelParallel(model, device=CPU, plan=ShardingPlan({path: entries}))


def to_batch(clicks: Clicks, ids: int = 1) -> Batch:
    categories, lengths = clicks.categories.T.reshape(-1), np.ones(CATEGORIES * len(clicks), np.int32)
    if ids > 1:
        categories, lengths = long_bags(clicks, ids)
    values = torch.from_numpy(categories.astype(np.int64))
    sparse = torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, values, torch.from_numpy(lengths))
    return Batch(torch.from_numpy(clicks.dense), sparse, torch.from_numpy(clicks.labels))


def long_bags(clicks: Clicks, ids: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of `--ids`, and how many each bag has."""
    of_feature, of_sample = np.divmod(np.arange(CATEGORIES * len(clicks)), max(1, len(clicks)))
    lengths = ((3 * of_feature + 7 * of_sample) % (2 * ids)).astype(np.int32)
    back = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # samples before
    at = (np.repeat(of_sample, lengths) - back) % max(1, len(clicks))
    return clicks.categories[at, np.repeat(of_feature, lengths)], lengths


class Batches:
    """Step after step, the next lines of the log: trainer 0's share, then trainer 1's. After its end, the start.
    With `--redraw`, lines that are made for that step and trainer.

    Its state is how many batches were drawn: trainers that are started again draw the next.
    """

    def __init__(self, clicks: Clicks, args: argparse.Namespace, trainer: int, trainers: int) -> None:
        self.clicks, self.args, self.trainer, self.trainers = clicks, args, trainer, trainers
        self.drawn = 0

    def __iter__(self) -> Iterator[Batch]:
        size = self.args.batch_size
        while self.drawn < self.args.steps:
            first = (self.drawn * self.trainers + self.trainer) * size
            self.drawn += 1
            if self.args.redraw:
                yield to_batch(redraw(self.clicks, size, self.args.seed, self.drawn, self.trainer), self.args.ids)
            else:
                yield to_batch(self.clicks[(first + np.arange(size)) % len(self.clicks)], self.args.ids)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class Losses(list[float]):
    """The loss of every step, those before a restart included."""

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self[:] = state["losses"]


class Preemption:
    """Told to end (SIGTERM), a job saves and leaves; started again, it goes on from there.

    Args:
        folder: for what is saved; one for each time, and `newest` names the last that is whole.
        model, optimizer: what is saved.
        batches, losses: of this trainer; likewise.
    """

    def __init__(self, folder: Path, model: Any, optimizer: Any, batches: Batches, losses: Losses) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.mine = {"batches": batches, "losses": losses}
        self.told = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.told = True

    def go_on(self) -> None:
        """Loads what was saved last, if anything was. Before `attach`."""
        newest = self.folder / "newest"
        if newest.exists():
            at, states = self.folder / newest.read_text(), self._states()
            dcp.load(states, checkpoint_id=at)
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])
            for name, state in torch.load(at / f"trainer-{dist.get_rank()}.pt").items():
                self.mine[name].load_state_dict(state)

    def is_due(self) -> bool:
        """Whether any trainer was told to end: all agree, after the same step."""
        told = torch.tensor([self.told], dtype=torch.int32, device=CPU)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told.item())

    def save(self) -> None:
        """What `go_on` loads."""
        name = f"step-{len(self.mine['losses'])}"
        dcp.save(self._states(), checkpoint_id=self.folder / name)
        mine = {what: held.state_dict() for what, held in self.mine.items()}
        mine["batches"] = {"drawn": len(self.mine["losses"])}  # a pipeline draws ahead what it has not trained on
        torch.save(mine, self.folder / name / f"trainer-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / "newest").write_text(name)

    def _states(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def held_out_auc(
    model: nn.Module, clicks: Clicks, args: argparse.Namespace, trainer: int, trainers: int, device: torch.device = CPU
) -> float:
    """Each trainer scores an equal share of the lines."""
    batch_size = args.batch_size
    share = len(clicks) // trainers
    mine = clicks[trainer * share : (trainer + 1) * share]
    model.eval()
    scores = []
    with torch.no_grad():
        for first in range(0, share, batch_size):
            _, (_, logits, _) = model(to_batch(mine[first : first + batch_size], args.ids).to(device))
            scores.append(logits.cpu().numpy())
    everyone: list[Any] = [None] * trainers
    dist.all_gather_object(everyone, (mine.labels, np.concatenate(scores) if scores else np.empty(0, np.float32)))
    return auc(np.concatenate([labels for labels, _ in everyone]), np.concatenate([s for _, s in everyone]))


def dense_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(in_backward_optimizer_filter(model.named_parameters())):
        digest.update(name.encode() + parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    device = device_of(args)
    clicks = read(args.data, args.rows_per_table) if args.data else synthetic(100_000, args.seed, args.rows_per_table)
    train, test = clicks.split()
    if args.redraw:
        test = redraw(test, len(test), args.seed, 0)  # training's begin with step 1
    dist.init_process_group("gloo")
    trainer, trainers = dist.get_rank(), dist.get_world_size()

    model = wrap(build(args), args, device)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_class = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.Adagrad
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda parameters: dense_class(parameters, lr=args.lr))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    pipeline_class = TrainPipelineSparseDist if args.pipeline else TrainPipelineBase
    pipeline = pipeline_class(model, optimizer, device)

    losses, ended = Losses(), []
    batches = Batches(train, args, trainer, trainers)
    preemption = Preemption(args.save, model, optimizer, batches, losses) if args.save else None
    if preemption is not None:
        preemption.go_on()
    stream: Iterator[Batch] = iter(batches)
    if args.backend == "ecrec":  # when a trainer is lost, all are started again and go on where they were
        stream = model.attach(optimizer=optimizer, reader=batches, losses=losses)
    done, begin = len(losses), time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        step_begin = time.perf_counter()
        loss, _, _ = pipeline.progress(stream)
        losses.append(float(loss))
        ended.append(time.time())
        rate = args.batch_size * trainers / (time.perf_counter() - step_begin)
        if hasattr(model, "session") and hasattr(model.session, "report"):  # what `torch-ecrec status` shows
            model.session.report(step=step, loss=losses[-1], samples_per_s=rate)
        if trainer == 0 and step % 20 == 0:
            print(f"step {step}  loss {losses[-1]:.4f}  {rate:.0f} samples/s", flush=True)
        if preemption is not None and preemption.is_due():
            preemption.save()
            print(f"told to end: saved after step {step}", flush=True)
            break
    samples_per_s = (args.steps - done) * args.batch_size * trainers / (time.perf_counter() - begin)

    if args.pipeline:
        pipeline.detach()
    if len(losses) < args.steps:  # preempted
        if args.backend == "ecrec":
            model.close()
        dist.destroy_process_group()
        return
    area = held_out_auc(model, test, args, trainer, trainers, device)
    if trainer == 0:
        print(f"auc {area:.4f} on {len(test)} held-out lines, {samples_per_s:.0f} samples/s", flush=True)
    if args.report:
        report = {"losses": losses, "auc": area, "samples_per_s": samples_per_s, "dense_digest": dense_digest(model)}
        report["step_ended_s"] = ended
        if args.backend == "ecrec":
            model.flush()
            report["digest"] = model.digest(tables=trainer == 0)
        args.report.with_suffix(f".{trainer}{args.report.suffix}").write_text(json.dumps(report))
    if args.backend == "ecrec":
        model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
