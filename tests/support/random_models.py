"""Random models of TorchRec, what trains them, and the same unsharded.

model    one to twelve tables in modules of every kind (`Part`), their optimizers, batches and loads (`Model`)
trained  (`random_training.train`) through our `DistributedModelParallel`, as a script does, in a trace that is attached
checked  (`Unsharded`) step by step against TorchRec's unsharded modules with torch's autograd, and the optimizers'
         formulas (`formulas.py`)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from managed import POLICIES, hashed
from models import CPU, META
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable

from torch_ecrec.records.optimizers import optimizer

KINDS = (
    "bags",
    "weighted",
    "sequences",
    "processed",
    "fused bags",
    "fused sequences",
    "managed bags",
    "managed sequences",
)
FUSED = ("sgd", "adagrad", "rowwise_adagrad")  # FBGEMM makes fused modules on a CPU with these only
DATA = {"float32": DataType.FP32, "float16": DataType.FP16, "bfloat16": DataType.BF16}
STARTS = ("servers", "drawn", "drawn", "held")  # who gives a table its first weights; `held`: the module has them
LOADS = ("weights", "some", "written", "state", "whole")
LONGEST = 4  # ids in a bag
TRACING = ("sparse", "lite")  # pipelines that trace the model: TorchRec's take one lookup of a collection, and no more
DRIVERS = ("plain", "base", *TRACING)


@dataclass(frozen=True)
class Optimized:
    """An optimizer of a table."""

    kind: str = "sgd"
    lr: float = 0.05
    fixed: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Tables:
    """A table.

    Args:
        frozen: steps in which it gets no gradients.
        sharding: how it is placed (`layout/placing.py`).
    """

    rows: int
    dim: int
    features: tuple[str, ...]
    dtype: str = "float32"
    mean: bool = False
    start: str = "drawn"
    optimized: Optimized = Optimized()
    frozen: frozenset[int] = frozenset()
    sharding: str = "auto"


@dataclass(frozen=True)
class Part:
    """A collection.

    Args:
        asks: lookups in each step.
        unused: the last of them is not used in the loss.
        again: the second and later lookups go through another path of the model.
        repeats: batches have a batch size per feature, and inverse indices.
        int32: ids are.
        policy, interval: of managed collisions.
    """

    kind: str
    tables: tuple[Tables, ...]
    asks: int = 1
    unused: bool = False
    again: bool = False
    repeats: bool = False
    int32: bool = False
    policy: str = "lfu"
    interval: int = 2

    @property
    def pools(self) -> bool:
        return "sequences" not in self.kind

    @property
    def of_sharder(self) -> bool:
        """Whether a sharder of bags is asked about it."""
        return self.kind in ("bags", "weighted")

    @property
    def holds(self) -> bool:
        """Whether the module has weights when it is sharded."""
        return any(table.start == "held" for table in self.tables)

    @property
    def managed(self) -> bool:
        return self.kind.startswith("managed")

    @property
    def weighted(self) -> bool:
        return self.kind == "weighted"

    @property
    def features(self) -> list[str]:
        """As the tables have them, each once."""
        return list(dict.fromkeys(name for table in self.tables for name in table.features))


@dataclass(frozen=True)
class Model:
    """A model and its training.

    Args:
        once: ids of a step are of one row each, and bags have at most two (with weights, one): sums have one order.
        loads: (after this step, what).
        looks: evaluations, after these steps.
        given: the optimizer that a sharder has for bags whose tables are `default`.
        clip: gradients of bags are clamped to it, as a sharder says.
        output: the dtype that bags and sequences come out as, as sharders say.
        driver: what trains it, of `DRIVERS`: a plain loop, or one of TorchRec's pipelines.
    """

    parts: tuple[Part, ...]
    trainers: int = 1
    steps: int = 3
    seed: int = 0
    once: bool = False
    loads: tuple[tuple[int, str], ...] = ()
    looks: frozenset[int] = frozenset()
    snapshot_every: int = 1
    schedule: bool = False
    given: Optimized | None = None
    clip: float | None = None
    output: str = "float32"
    driver: str = "plain"

    @property
    def sharders(self) -> list[Any]:
        """Those that a user gives."""
        output: dict[str, Any] = {} if self.output == "float32" else {"output_dtype": DATA[self.output]}
        made: list[Any] = [EmbeddingCollectionSharder(fused_params=dict(output))] if output else []
        if self.given is None and self.clip is None and not output:
            return made
        wishes = output | ({} if self.clip is None else {"gradient_clipping": True, "max_gradient": self.clip})
        if self.given is not None:
            kind = EmbOptimType[optimizer(self.given.kind).types[0]]
            wishes |= {"optimizer": kind, "learning_rate": self.given.lr, **dict(self.given.fixed)}
        return [*made, EmbeddingBagCollectionSharder(fused_params=wishes)]

    def output_of(self, part: Part) -> torch.dtype:
        """What a lookup comes out as."""
        return getattr(torch, self.output if part.of_sharder or part.kind == "sequences" else "float32")  # type: ignore[no-any-return]

    @property
    def exact(self) -> bool:
        """Whether an unsharded model has the same bits. (Ids that are remapped share rows.)"""
        others = any(part.managed or part.kind == "processed" for part in self.parts)
        return self.once and self.trainers == 1 and not others


def drawn(weight: Tensor, seed: int = 0) -> Tensor:
    """First weights that depend on nothing but the seed and how many there are."""
    values = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed + weight.numel())) - 0.5
    with torch.no_grad():
        weight.copy_(values)
    return weight


# modules ------------------------------------------------------------------------------------------


def _configs(part: Part, number: int, plain: bool) -> list[Any]:
    made = []
    for i, table in enumerate(part.tables):
        more: dict[str, Any] = {"data_type": DataType.FP32 if plain else DATA[table.dtype]}
        if part.pools:
            more["pooling"] = PoolingType.MEAN if table.mean else PoolingType.SUM
        if table.start != "servers" or part.managed:
            more["init_fn"] = functools.partial(drawn, seed=100 * number + i)
        config = EmbeddingBagConfig if part.pools else EmbeddingConfig
        made.append(
            config(
                name=f"t{i}",
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.features),
                **more,
            )
        )
    return made


def _class_of(kind: str) -> type:
    classes = optimizer("sgd" if kind == "momentum_sgd" else kind).classes
    module, _, name = classes[0 if kind in FUSED else -1].rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


def maps_of(part: Part, configs: Sequence[Any]) -> ManagedCollisionCollection:
    maps = {
        config.name: MCHManagedCollisionModule(
            config.num_embeddings,
            CPU,
            eviction_policy=POLICIES[part.policy](),
            eviction_interval=part.interval,
            input_hash_size=1000,
            input_hash_func=hashed if i % 2 else None,
        )
        for i, config in enumerate(configs)
    }
    return ManagedCollisionCollection(maps, configs)


def _made(part: Part, number: int, plain: bool) -> nn.Module:
    """A collection; `plain`: the unsharded one that computes what it does, with float32 weights."""
    configs = _configs(part, number, plain)
    device = CPU if plain or part.holds else META
    weighted = part.kind in ("weighted", "processed")
    if part.kind.startswith("fused") and not plain:
        first = part.tables[0].optimized
        cls: Any = FusedEmbeddingBagCollection if part.pools else FusedEmbeddingCollection
        return cls(configs, _class_of(first.kind), {"lr": first.lr, **dict(first.fixed)}, device=device)  # type: ignore[no-any-return]
    if part.pools:
        made: Any = EmbeddingBagCollection(tables=configs, device=device, is_weighted=weighted)
    else:
        made = EmbeddingCollection(tables=configs, device=device)
    if not plain:
        folder = made.embedding_bags if part.pools else made.embeddings
        for i, table in enumerate(part.tables):
            arguments = {"lr": table.optimized.lr, **dict(table.optimized.fixed)}
            if table.optimized.kind != "default":
                apply_optimizer_in_backward(_class_of(table.optimized.kind), folder[f"t{i}"].parameters(), arguments)
    if part.kind == "processed":
        return FeatureProcessedEmbeddingBagCollection(
            made, {name: PositionWeightedModule(LONGEST) for name in part.features}
        )
    if part.managed and not plain:
        around = ManagedCollisionEmbeddingBagCollection if part.pools else ManagedCollisionEmbeddingCollection
        return around(
            made, maps_of(part, configs), return_remapped_features=True, allow_in_place_embed_weight_update=True
        )
    return made  # type: ignore[no-any-return]


@dataclass
class Batch(Pipelineable):
    """Of one trainer, in one step: for each part, the features of each lookup; and labels."""

    features: list[list[KeyedJaggedTensor]]
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch([[each.to(device) for each in asks] for asks in self.features], self.labels.to(device))

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class Net(nn.Module):
    """The parts, and a dense layer over each lookup (`Over`). Pipelines can trace it."""

    def __init__(self, model: Model, plain: bool = False) -> None:
        super().__init__()
        self.model = model
        torch.manual_seed(model.seed)
        self.parts = nn.ModuleList(_made(part, i, plain) for i, part in enumerate(model.parts))
        self.again = nn.ModuleDict({str(i): self.parts[i] for i, part in enumerate(model.parts) if part.again})
        torch.manual_seed(model.seed)  # a plain one has drawn other weights
        self.over = Over(model)

    def look_up(self, part: int, ask: int, features: KeyedJaggedTensor) -> Any:
        module = self.again[str(part)] if self.model.parts[part].again and ask else self.parts[part]
        return module(features)

    def forward(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The loss; and once more, with what was looked up: pooled values, rows, and remapped ids."""
        found = [
            [self.look_up(i, ask, batch.features[i][ask]) for ask in range(part.asks)]
            for i, part in enumerate(self.model.parts)
        ]
        return self.over(batch.labels, found)  # type: ignore[no-any-return]


class Over(nn.Module):
    """What is made of lookups. The loss is a mean over the batch."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.layers = nn.ModuleList()
        for part in model.parts:
            width = sum(table.dim * len(table.features) for table in part.tables)
            self.layers.append(nn.Linear(width if part.pools else part.tables[0].dim, 1))

    def forward(self, labels: Tensor, lookups: list[list[Any]]) -> tuple[Tensor, list[Tensor]]:
        total, more, seen = torch.zeros(len(labels)), torch.zeros(()), []
        for i, part in enumerate(self.model.parts):
            for ask, found in enumerate(lookups[i]):
                if part.managed and isinstance(found, tuple):
                    found, remapped = found
                    seen.append(remapped.values())
                if part.pools:
                    values = found.values()
                else:
                    rows = found.wait() if isinstance(found, LazyAwaitable) else found
                    values = torch.cat([rows[key].values() for key in sorted(rows)])
                seen.append(values)
                if part.unused and ask == part.asks - 1:
                    continue
                logits = torch.tanh(self.layers[i](values.float()))
                if part.pools:
                    total = total + logits.squeeze(1)
                else:
                    more = more + logits.square().sum() / len(labels)
        loss = (total - labels).square().mean() + more
        return loss, [loss, *seen]


# batches ------------------------------------------------------------------------------------------


def batches_of(model: Model, trainer: int) -> list[Batch]:
    """Of one trainer, a step each."""
    return [_batch(model, trainer, step) for step in range(1, model.steps + 1)]


def _batch(model: Model, trainer: int, step: int) -> Batch:
    random = torch.Generator().manual_seed(1000 * model.seed + 10 * step + trainer)
    size = int(torch.randint(1, 5, (), generator=random))
    features = []
    for part in model.parts:
        left = {i: torch.randperm(table.rows, generator=random).tolist() for i, table in enumerate(part.tables)}
        features.append([_features(model, part, size, random, left) for _ in range(part.asks)])
    return Batch(features, torch.randn(size, generator=random))


def _features(
    model: Model, part: Part, size: int, random: torch.Generator, left: dict[int, list[int]]
) -> KeyedJaggedTensor:
    names = part.features + ["nobody's"]
    order = torch.randperm(len(names), generator=random).tolist()
    if part.repeats:
        order = sorted(order)  # TorchRec's inverse indices keep one order of features
    names = [names[i] for i in order]
    most = LONGEST if not model.once else 1 if part.weighted else 2
    bags = [int(torch.randint(1, size + 1, (), generator=random)) if part.repeats else size for _ in names]
    lengths, values = [], []
    for name, count in zip(names, bags, strict=True):
        of = [i for i, table in enumerate(part.tables) if name in table.features]
        rows = min((part.tables[i].rows for i in of), default=1)
        for _ in range(count):
            wanted = int(torch.randint(0, most + 1, (), generator=random))
            ids = torch.randint(0, 200 if part.managed else rows, (wanted,), generator=random).tolist()
            if model.once and of and not part.managed:
                free = [row for row in left[of[0]] if all(row in left[i] for i in of)]
                ids = free[:wanted]
                for i in of:
                    left[i] = [row for row in left[i] if row not in ids]
            lengths.append(len(ids))
            values += ids
    dtype = torch.int32 if part.int32 else torch.int64
    ids_N = torch.tensor(values, dtype=dtype)
    weights = torch.rand(len(values), generator=random) + 0.5 if part.weighted else None
    if not part.repeats:
        return KeyedJaggedTensor(names, ids_N, weights=weights, lengths=torch.tensor(lengths, dtype=torch.int32))
    index = torch.stack([torch.randint(0, count, (size,), generator=random) for count in bags])
    if model.once:  # every bag has at most one sample: who has none has an empty bag
        index, bags, lengths = _one_sample_each(index, bags, lengths)
    return KeyedJaggedTensor(
        names,
        ids_N,
        weights=weights,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride_per_key_per_rank=[[count] for count in bags],
        inverse_indices=(names, index),
    )


def _one_sample_each(index: Tensor, bags: list[int], lengths: list[int]) -> tuple[Tensor, list[int], list[int]]:
    made, counts, begin = [], [], 0
    index = index.clone()
    for row, count in enumerate(bags):
        made += [*lengths[begin : begin + count], 0]
        counts.append(count + 1)
        begin += count
        seen: set[int] = set()
        for sample, bag in enumerate(index[row].tolist()):
            index[row, sample] = count if bag in seen else bag
            seen.add(bag)
    return index, counts, made


def name_of(model: Model, part: int, table: int) -> str:
    """Its name in the job."""
    unique = sum(len(other.tables) > table for other in model.parts) == 1
    path = {"processed": "._embedding_bag_collection"}.get(model.parts[part].kind, "")
    path = "._embedding_module" if model.parts[part].managed else path
    return f"t{table}" if unique else f"parts.{part}{path}.t{table}"
