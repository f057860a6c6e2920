"""Erasure-coded embedding bags: TorchRec's sharded `EmbeddingBagCollection` whose rows live on the servers.

A forward asks the backend for the unique rows of the batch and pools them here; the backward hands their gradients
back.

    table `a`: 100 rows, table `b`: 50 rows, same dim and optimizer: one slab of 150 rows
    batch      a: [[7], [7, 2]]   b: [[3], []]       bags of two samples
    asked for  slab rows [2, 7, 103]                 unique, in whatever order the backend likes; first row plus id
    pooled     a: [w7], [w7 + w2]   b: [w103], [0]   sum; mean divides by the number of ids
    pushed     rows [2, 7, 103] with d(loss)/d(row), divided by the number of trainers as TorchRec does

Terms. `SparseStep` is shared by all sharded modules of a model: an optimizer step ends once per backward, however many
modules took part. A *lookup in training* is one made with grad enabled; others read and change nothing.

Invariants. One backward pass is one push, of every trainer, also when it has no rows. Rows are looked up in `compute`,
never in `input_dist`, which pipelines run one batch ahead: a row is never a step old. A batch that a pipeline has
announced that way is asked for as soon as the push before it is sent, so that its rows travel while the rest of the
backward and the dense optimizer run; the servers answer once they have applied that push. A refused step (non-finite
gradients) is refused by all trainers, before anything is sent.

Does not hold weights, talk to servers (`EmbeddingBackend` does) or change the dense part of the model.

Shape legend: F features, B batch size, N ids, U unique rows, D embedding dim, W record width, S slabs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    LazyAwaitable,
    LazyGetItemMixin,
    NoWait,
    NullShardedModuleContext,
    ShardedModule,
)
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizer, FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torch_ecrec.client import pooling
from torch_ecrec.errors import NonFiniteGradient
from torch_ecrec.layout.routing import Parts
from torch_ecrec.nn.staging import Crossing, HostIds, Staging
from torch_ecrec.records.schema import Field, Schema
from torch_ecrec.runtime import shared
from torch_ecrec.runtime.tensors import as_array
from torch_ecrec.spec.job import JobSpec

NAN_GRADIENTS = ("raise", "pass")
_CHUNK_BYTES = 4 << 20
PIPELINED_MOST = 8  # batches that a pipeline has announced and not computed; TorchRec's have up to 3
_NO_WEIGHTS = np.empty(0, np.float32)


class EmbeddingBackend(Protocol):
    """What the sharded modules need from the servers: one blocking object per trainer.

    Rows are slab rows, int64 on the CPU and unique; lists hold one tensor per slab of `job.slabs`. `arrange` says in
    which order they cost least.
    """

    job: JobSpec
    trainer: int
    trainers: int
    snapshot_every: int  # `snapshot` is called after each step that is a multiple of it; 0: never
    restarted: bool  # the cluster has trained before: `load` does nothing, `resume` says where training goes on

    @property
    def step(self) -> int:
        """The step being worked on, from 1."""

    def arrange(self, slab: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The different ones of `rows` (N,), in the best order, (U,), and where each of `rows` is in them, (N,)."""

    def lookup_parts(self, rows: list[Tensor]) -> list[Parts]:
        """Weights (U, D) after `step - 1`, per slab, float32 or bfloat16. Does not end the step; may be repeated.

        In parts of some rows each, (u, D), in the order of the rows. They are only read.
        """

    def look_ahead(self, rows: list[Tensor]) -> None:
        """Rows that `lookup_parts` will be called with in this step, the very tensors: they may be asked for now."""

    def push(self, rows: list[Tensor], gradients: list[Tensor], rates: list[float]) -> None:
        """Ends the step with gradients (U, D) and a learning rate per slab. Every trainer calls it in every step."""

    def read(self, slab: int, rows: Tensor) -> Tensor:
        """Records (U, W), weights then optimizer state, after `step - 1`; rows ascending. Before `loaded`, too."""

    def load(self, slab: int, rows: Tensor, records: Tensor) -> None:
        """Overwrites records before the first step; rows ascending. Called by trainer 0 only."""

    def loaded(self) -> None:
        """Ends the loading; every trainer calls it once, before its first `lookup_parts`."""

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Keeps this trainer's part (uint8) of the dense state after `step - 1`."""

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        """The last step that counts, and what every trainer's `snapshot` was given after it, in trainer order."""

    def flush(self) -> None: ...

    def close(self) -> None: ...


class SparseStep:
    """What the sharded modules of one model gather in an optimizer step.

    A backward pass ends the step: as soon as every lookup that is still waiting for its gradient has got it, so that
    the servers work while the rest of the backward runs; or else (some output was not used in the loss) when the pass
    is over.

    Args:
        session: the backend.
        group: a process group of the trainers, used for nothing else; None with one trainer.
        nan_gradients: "raise" refuses a step in which any trainer has a NaN or infinite gradient: `NonFiniteGradient`
            on every trainer when its backward is over, nothing sent. "pass" sends them, as TorchRec does.
    """

    def __init__(self, session: EmbeddingBackend, group: dist.ProcessGroup | None = None, nan_gradients: str = "raise"):
        if nan_gradients not in NAN_GRADIENTS:
            raise ValueError(f"`nan_gradients` must be one of {', '.join(NAN_GRADIENTS)}, got {nan_gradients!r}")
        self.session = session
        self.on_training_lookup: Callable[[], None] = lambda: None  # called before the first row of a step is asked for
        self.optimizers: list[ServerOptimizer] = []
        self.on_pushed: list[Callable[[], None]] = []  # called when the rows of the next step may be asked for
        self._group = group
        self._refuses_nan = nan_gradients == "raise"
        self._open = False
        self._waiting: weakref.WeakSet[_Ticket] = weakref.WeakSet()  # training lookups without a gradient so far
        self._pass = -1  # id of the backward pass that the fields below belong to
        self._gathered: list[tuple[list[Tensor], Sequence[Tensor | None]]] = []
        self._finite = True  # all that was gathered
        self._sent = False
        self._repeated = (
            False  # the pass runs a graph for the second time (retain_graph): nothing tells when it is complete
        )
        self._refusal: NonFiniteGradient | None = None

    def open(self) -> None:
        """Ends the loading of weights, once; a barrier of all trainers."""
        if not self._open:
            self.session.loaded()
            self._open = True

    @property
    def is_open(self) -> bool:
        """Whether loading has ended."""
        return self._open

    def lookup(self, rows: list[Tensor]) -> list[Parts]:
        """Weights (U, D) per slab, in parts."""
        self.open()
        return self.session.lookup_parts(rows)

    def ticket(self) -> _Ticket:
        """A new training lookup that waits for its gradient, until its graph is gone."""
        ticket = _Ticket()
        self._waiting.add(ticket)
        return ticket

    @property
    def gradient_divisor(self) -> int:
        """What TorchRec divides gradients of rows by: the number of trainers, unless the user has switched that off."""
        return self.session.trainers if get_gradient_division() else 1

    def receive(self, ticket: _Ticket, rows: list[Tensor], gradients: Sequence[Tensor | None], finite: bool) -> None:
        """Inside a backward: gradients (U, D) of one lookup, per slab; None where the loss does not use the slab.

        Args:
            finite: whether they all are.
        """
        task = torch._C._current_graph_task_id()
        if task != self._pass:
            self._pass, self._gathered, self._sent, self._repeated, self._refusal = task, [], False, False, None
            self._finite = True
            # Callbacks run in the order of their arrival. DDP adds its own during the pass; being last leaves DDP ready
            # for the next forward when this one raises.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._end_pass))
        self._repeated |= ticket.answered
        ticket.answered = True
        self._waiting.discard(ticket)
        self._gathered.append((rows, gradients))
        self._finite &= finite
        if not self._waiting and not self._repeated:
            self._send()

    def _end_pass(self) -> None:
        self._send()
        self._pass = -1
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def _send(self) -> None:
        if self._sent:
            return
        self._sent = True
        rows, gradients = self._merge()
        finite = self._finite and len(self._gathered) < 2  # a sum may overflow
        self._gathered = []
        if self._refuses_nan:
            self._refusal = self._check_finite(rows, gradients, finite)
            if self._refusal is not None:
                return
        self.session.push(rows, gradients, self.rates())
        for look_ahead in self.on_pushed:
            look_ahead()

    def _merge(self) -> tuple[list[Tensor], list[Tensor]]:
        """Rows and gradients per slab; where several lookups asked for a row, its gradients are summed as they came."""
        rows, gradients = [], []
        for s, slab in enumerate(self.session.job.slabs):
            parts = [(r[s], g) for r, gradients_S in self._gathered if (g := gradients_S[s]) is not None and len(r[s])]
            if len(parts) == 1:
                rows_U, gradient_UD = parts[0][0], parts[0][1].contiguous()
            elif parts:
                rows_U, inverse_N = torch.unique(torch.cat([r for r, _ in parts]), return_inverse=True)
                gradient_UD = torch.zeros(len(rows_U), slab.dim)
                gradient_UD.index_add_(0, inverse_N, torch.cat([g for _, g in parts]))
            else:
                rows_U, gradient_UD = torch.empty(0, dtype=torch.int64), torch.empty(0, slab.dim)
            rows.append(rows_U)
            gradients.append(gradient_UD)
        return rows, gradients

    def _check_finite(self, rows: list[Tensor], gradients: list[Tensor], finite: bool) -> NonFiniteGradient | None:
        """The reason to refuse the step, the same on every trainer; `finite` if this trainer's are known to be."""
        job = self.session.job
        flags = torch.zeros(len(job.tables), dtype=torch.int32)
        for slab, rows_U, gradient_UD in zip(job.slabs, rows, gradients, strict=True):
            if not finite:
                bad_rows = rows_U[~torch.isfinite(gradient_UD).all(dim=1)]
                at = torch.bucketize(bad_rows, torch.tensor(slab.first_rows), right=True) - 1
                flags[torch.tensor(slab.table_indices)[at]] = 1
        if self._group is not None:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        names = [table.name for table, flag in zip(job.tables, flags.tolist(), strict=True) if flag]
        if not names:
            return None
        return NonFiniteGradient(
            f"step {self.session.step}: gradients of {', '.join(names)} hold NaN or infinity;"
            " nothing of the step was applied"
        )

    def rates(self) -> list[float]:
        """The learning rate in force, per slab."""
        rates: dict[int, float] = {}
        for optimizer in self.optimizers:
            for slab, group in zip(optimizer.slabs, optimizer.param_groups, strict=True):
                lr = float(group["lr"])
                if rates.setdefault(slab, lr) != lr:
                    names = ", ".join(table.name for table in self.session.job.slabs[slab].tables)
                    raise ValueError(
                        f"tables {names} share one optimizer but got learning rates {rates[slab]} and {lr}"
                    )
        return [rates[slab] for slab in range(len(self.session.job.slabs))]


class _Ticket:
    """One training lookup. Its graph holds it: a forward that was thrown away does not keep a step open."""

    answered = False


class _PooledLookup(torch.autograd.Function):
    """Pooled rows from the backend on the way forward, gradients of the rows to the step on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        step: SparseStep,
        rows: list[Tensor],
        bags: list[_Bags],
        crossings: list[Crossing],
        *per_id: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights = step.lookup(rows)
        ctx.step, ctx.rows, ctx.bags, ctx.crossings, ctx.ticket = step, rows, bags, crossings, step.ticket()
        ctx.weights = weights if any(ctx.needs_input_grad[5:]) else None
        return tuple(part.pool(weights[part.slab], crossing) for part, crossing in zip(bags, crossings, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        of_rows: list[Tensor | None] = [None] * len(ctx.rows)
        of_ids: list[Tensor | None] = [None] * len(gradients)
        all_finite = True
        for i, (part, gradient_BFD) in enumerate(zip(ctx.bags, gradients, strict=True)):
            if gradient_BFD is None:
                continue
            ctx.crossings[i].wait()
            gradient_BFD = gradient_BFD.contiguous()
            of_rows[part.slab], finite = part.rows_backward(
                gradient_BFD, len(ctx.rows[part.slab]), ctx.step.gradient_divisor
            )
            all_finite &= finite
            if ctx.needs_input_grad[5 + i]:
                of_ids[i] = part.ids_backward(gradient_BFD, ctx.weights[part.slab])
        ctx.step.receive(ctx.ticket, ctx.rows, of_rows, all_finite)
        return (None, None, None, None, None, *of_ids)


class _Ready(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]):
    """A result that is there already."""

    def __init__(self, value: KeyedTensor) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> KeyedTensor:
        return self._value


@dataclass(frozen=True)
class _Table:
    """One table of a sharded module: `name` in the module, `job_name` in the job."""

    name: str
    job_name: str
    slab: int
    first_row: int
    rows: int
    dim: int
    schema: Schema
    features: tuple[str, ...]
    pooling: PoolingType
    optimizer: str


class _Slice:
    """The features of one module that live in one slab, in the order of the module's output."""

    def __init__(self, slab: int, dim: int, places: Sequence[tuple[int, str, _Table]]) -> None:
        self.slab, self.dim = slab, dim
        self.columns = [column for column, _, _ in places]  # position of each feature among the module's outputs
        self.features = [feature for _, feature, _ in places]
        self.tables = [table for _, _, table in places]
        self.first_F = np.array([table.first_row for table in self.tables], np.int64)
        self.rows_F = np.array([table.rows for table in self.tables], np.int64)
        self.mean_F = np.array([table.pooling is PoolingType.MEAN for table in self.tables])

    def bags(
        self, features: KeyedJaggedTensor, weighted: bool, arrange: Callable[[int, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, _Bags]:
        """Unique slab rows (U,) of the ids of `features` (in the order of this slice), and how they are pooled.

        Raises:
            ValueError: an id is not a row of its table.
        """
        ids_N = features.values().detach().cpu().contiguous()  # here already, but for ids with weights
        lengths_FB = features.lengths().detach().cpu().contiguous().view(len(self.features), -1).numpy()
        rows_N = np.empty(len(ids_N), np.int64)
        at = pooling.to_slab_rows(ids_N.numpy(), lengths_FB, self.first_F, self.rows_F, rows_N)
        if at >= 0:
            feature = int((lengths_FB.sum(axis=1).cumsum() <= at).sum())
            table = self.tables[feature]
            raise ValueError(
                f"id {int(ids_N[at])} of feature {self.features[feature]} is out of range:"
                f" table {table.name} has {table.rows} rows"
            )
        per_id_N = features.weights().float().cpu().contiguous() if weighted else None
        rows_U, inverse_N = arrange(self.slab, torch.from_numpy(rows_N))
        return rows_U, _Bags(self.slab, self.dim, inverse_N.numpy(), lengths_FB, per_id_N, self.mean_F)


@dataclass
class _Bags:
    """The bags of one slice of a batch.

    Args:
        slab, dim: of the slice.
        inverse_N: index of each id's row among the rows looked up.
        lengths_FB: ids per bag.
        per_id_N: weight of each id, or None.
        mean_F: bool, whether a feature is averaged.
    """

    slab: int
    dim: int
    inverse_N: np.ndarray
    lengths_FB: np.ndarray
    per_id_N: Tensor | None
    mean_F: np.ndarray

    def _weights(self) -> np.ndarray:
        return _NO_WEIGHTS if self.per_id_N is None else self.per_id_N.detach().numpy()

    def pool(self, weights: Parts, crossing: Crossing) -> Tensor:
        """Pooled embeddings (B, F, D) of the rows that were looked up, in memory of the crossing."""
        features, batch = self.lengths_FB.shape
        out_BFD = crossing.empty(batch, features, self.dim)
        weighted = self.per_id_N is not None
        pooling.pool(
            [as_array(part) for part in weights],
            self.inverse_N,
            self.lengths_FB,
            self._weights(),
            weighted,
            self.mean_F,
            out_BFD.numpy(),
        )
        return out_BFD

    def rows_backward(self, gradient_BFD: Tensor, rows: int, divisor: int) -> tuple[Tensor, bool]:
        """Gradients (U, D) of the rows, over `divisor`, and whether all are finite."""
        out_UD = torch.from_numpy(shared.empty((rows, self.dim), np.float32))  # sent
        finite = pooling.pool_backward(
            gradient_BFD.numpy(),
            self.inverse_N,
            self.lengths_FB,
            self._weights(),
            self.per_id_N is not None,
            self.mean_F,
            np.float32(divisor),
            np.zeros(rows, np.bool_),
            out_UD.numpy(),
        )
        return out_UD, bool(finite)

    def ids_backward(self, gradient_BFD: Tensor, weights: Parts) -> Tensor:
        """Gradients (N,) of the weights of the ids."""
        out_N = torch.empty(len(self.inverse_N))
        pooling.per_id_backward(
            gradient_BFD.numpy(),
            as_array(torch.cat(weights)),
            self.inverse_N,
            self.lengths_FB,
            self.mean_F,
            out_N.numpy(),
        )
        return out_N


class ErasureCodedEmbeddingBagCollection(
    ShardedModule[KJTList, list[Tensor], KeyedTensor, NullShardedModuleContext], FusedOptimizerModule
):
    """An `EmbeddingBagCollection` whose tables are served by erasure-coded servers. Made by `ErasureCodedSharder`.

    Takes a `KeyedJaggedTensor` and returns a `KeyedTensor` with the keys, order and values of the unsharded module. It
    has no parameters: `state_dict` reads every row from the servers, on every trainer.

    Args:
        module: the collection to serve. Not kept.
        step: shared by all sharded modules of the model.
        job_names: name of each of its tables in the job.
        device: where its output goes. Ids may be there or on the host.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        step: SparseStep,
        job_names: Mapping[str, str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._step = step
        self._staging = Staging(device)
        self._weighted = module.is_weighted()
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd run the backward of a lookup
        job = step.session.job
        configs = module.embedding_bag_configs()
        self._tables: dict[str, _Table] = {}
        for config in configs:
            slab, first_row = job.place_of_table[job_names[config.name]]
            self._tables[config.name] = _Table(
                name=config.name,
                job_name=job_names[config.name],
                slab=slab,
                first_row=first_row,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                schema=job.slabs[slab].schema,
                features=tuple(config.feature_names),
                pooling=config.pooling,
                optimizer=job.slabs[slab].optimizer.kind,
            )
        places = [(feature, table) for table in self._tables.values() for feature in table.features]
        self._keys = [name for names in get_embedding_names_by_table(configs) for name in names]
        self._dims = [table.dim for _, table in places]
        self._slices = [
            _Slice(
                slab,
                job.slabs[slab].dim,
                [(i, feature, table) for i, (feature, table) in enumerate(places) if table.slab == slab],
            )
            for slab in sorted({table.slab for _, table in places})
        ]
        self._optimizer = ServerOptimizer(self)
        step.optimizers.append(self._optimizer)
        self._coming: deque[HostIds] = deque(maxlen=PIPELINED_MOST)  # announced, not computed yet
        self._ready: tuple[KeyedJaggedTensor, list[Tensor], list[_Bags]] | None = None  # looked up ahead
        step.on_pushed.append(self._look_ahead)

    # TorchRec's stages ----------------------------------------------------------------------------

    def create_context(self) -> NullShardedModuleContext:
        return NullShardedModuleContext()

    def input_dist(self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable:
        """Nothing to distribute: every trainer looks its own rows up."""
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError("a batch size per feature (variable stride, inverse indices) is not supported")
        missing = [name for part in self._slices for name in part.features if name not in features.keys()]
        if missing:
            raise ValueError(f"the batch lacks features {', '.join(missing)}; it has {', '.join(features.keys())}")
        if torch.is_grad_enabled():
            self._coming.append(self._staging.ids(features))
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def _look_ahead(self) -> None:
        """Asks for the rows of the batch that a pipeline will compute next."""
        if self._coming and not self._weighted:  # weights of ids have a graph, which a backward must not start
            ids = self._coming[0]
            try:
                rows, bags = self._prepare(ids)
            except ValueError:  # an id that is no row: `compute` says so, where it belongs
                return
            self._ready = (ids.features, rows, bags)
            self._step.session.look_ahead(rows)

    def _prepare(self, ids: HostIds) -> tuple[list[Tensor], list[_Bags]]:
        """Unique rows (U,) per slab of the job, and the bags per slab of this module."""
        session = self._step.session
        features = ids.features if self._weighted else ids.wait()  # weights of ids have a graph
        rows = [torch.empty(0, dtype=torch.int64) for _ in session.job.slabs]
        bags = []
        for part in self._slices:
            order = [features.keys().index(name) for name in part.features]
            in_order = features if order == list(range(len(features.keys()))) else features.permute(order)
            rows[part.slab], some = part.bags(in_order, self._weighted, session.arrange)
            bags.append(some)
        return rows, bags

    def compute(self, ctx: NullShardedModuleContext, dist_input: KJTList) -> list[Tensor]:
        """Looks the rows up and pools them, on the host: (B, F, D) for each slab of this module, on the device."""
        (features,) = dist_input
        step = self._step
        step.open()
        if torch.is_grad_enabled():
            step.on_training_lookup()
        ids = None
        while any(other.features is features for other in self._coming):
            ids = self._coming.popleft()
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is features:
            rows, bags = ready[1:]
        else:
            rows, bags = self._prepare(ids or self._staging.ids(features))
        crossings = [self._staging.crossing() for _ in bags]
        if torch.is_grad_enabled():
            pooled = _PooledLookup.apply(self._anchor, step, rows, bags, crossings, *(part.per_id_N for part in bags))
        else:
            weights = step.lookup(rows)
            pooled = [part.pool(weights[part.slab], crossing) for part, crossing in zip(bags, crossings, strict=True)]
        return [crossing.over(pooled_BFD) for crossing, pooled_BFD in zip(crossings, pooled, strict=True)]

    def output_dist(self, ctx: NullShardedModuleContext, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Puts the pooled features side by side: (B, sum of dims)."""
        if len(output) == 1:
            values = output[0].flatten(1)
        else:
            columns: list[Tensor] = [torch.empty(0)] * len(self._keys)
            for part, pooled_BFD in zip(self._slices, output, strict=True):
                for column, pooled_BD in zip(part.columns, pooled_BFD.unbind(1), strict=True):
                    columns[column] = pooled_BD
            values = torch.cat(columns, dim=1)
        return _Ready(KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values))

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        return EmbeddingBagCollection

    @property
    def fused_optimizer(self) -> ServerOptimizer:
        return self._optimizer

    @property
    def tables(self) -> Mapping[str, _Table]:
        """By name in this module."""
        return self._tables

    # reading and loading rows -----------------------------------------------------------------------

    def read_columns(self, name: str, first: int, last: int) -> Tensor:
        """Columns [first, last) of the records of a table, (rows, last - first). Every trainer calls it."""
        self._step.open()
        table = self._tables[name]
        out = torch.empty(table.rows, last - first)
        for begin, end in _chunks(table):
            records = self._step.session.read(table.slab, torch.arange(begin, end) + table.first_row)
            out[begin:end] = records[:, first:last]
        return out

    def load_columns(self, name: str, first: int, last: int, values: Tensor) -> None:
        """Overwrites columns [first, last) with `values` (rows, last - first). Every trainer calls it, before step 1.

        Raises:
            ValueError: another shape, or training has begun.
        """
        table, session = self._tables[name], self._step.session
        values = _whole(values, session.trainer)
        if tuple(values.shape) != (table.rows, last - first):
            raise ValueError(f"table {name} takes shape {(table.rows, last - first)} here, got {tuple(values.shape)}")
        if self._step.is_open:
            raise ValueError(f"table {name} cannot be loaded any more: training or reading has begun")
        if session.trainer != 0 or session.restarted:
            return
        for begin, end in _chunks(table):
            rows = torch.arange(begin, end) + table.first_row
            records = session.read(table.slab, rows).clone()
            records[:, first:last] = values[begin:end]
            session.load(table.slab, rows, records)

    def load_initial(self, name: str, weights: Tensor) -> None:
        """Trainer 0: gives a table its first weights (rows, D), with fresh optimizer state."""
        table, session = self._tables[name], self._step.session
        for begin, end in _chunks(table):
            records = torch.zeros(end - begin, table.schema.width)
            records[:, : table.dim] = weights[begin:end]
            session.load(table.slab, torch.arange(begin, end) + table.first_row, records)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, table in self._tables.items():
            destination[f"{prefix}embedding_bags.{name}.weight"] = self.read_columns(name, 0, table.dim)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = {f"{prefix}embedding_bags.{name}.weight": name for name in self._tables}
        for key, name in keys.items():
            if key in state_dict:
                try:
                    self.load_columns(name, 0, self._tables[name].dim, state_dict[key])
                except ValueError as error:
                    error_msgs.append(str(error))
            elif strict:
                missing_keys.append(key)
        if strict:
            unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in keys)

    def extra_repr(self) -> str:
        lines = [
            f"({table.name}): {table.rows} x {table.dim}, {table.pooling.value.lower()}, {table.optimizer},"
            f" features={list(table.features)}"
            for table in self._tables.values()
        ]
        return "\n".join([f"is_weighted={self._weighted}", *lines])


class ServerOptimizer(FusedOptimizer):
    """The optimizer that the servers run, as TorchRec's schedulers and checkpoints expect it: one group per slab.

    `param_groups[i]["lr"]` at the time of a backward is the learning rate of that step. `state_dict` and
    `load_state_dict` read and load the state on the servers, under TorchRec's names (`<table>.momentum1`).
    """

    def __init__(self, module: ErasureCodedEmbeddingBagCollection) -> None:
        slabs = module._step.session.job.slabs
        params = {
            f"embedding_bags.{table.name}.weight": torch.empty(table.rows, table.dim, device="meta")
            for table in module.tables.values()
        }
        keyed = list(zip(module.tables.values(), params.values(), strict=True))
        state = {
            param: {
                f"{table.name}.{field.name}": _TableState(module, table.name, field) for field in table.schema.state
            }
            for table, param in keyed
        }
        self.slabs = sorted({table.slab for table in module.tables.values()})
        groups = []
        for slab in self.slabs:
            spec = slabs[slab].optimizer
            mine = [param for table, param in keyed if table.slab == slab]
            groups.append({"params": mine, "lr": spec.lr, **dict(spec.fixed)})
        super().__init__(params, state, groups)

    def step(self, closure: Any = None) -> None:
        """Nothing: the servers have stepped in the backward."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing: no gradient stays here."""


class _TableState:
    """A field of optimizer state of one table. `KeyedOptimizer` calls the two methods when it saves and loads."""

    def __init__(self, module: ErasureCodedEmbeddingBagCollection, name: str, field: Field) -> None:
        self._module, self._name, self._field = weakref.ref(module), name, field

    def _columns(self) -> tuple[ErasureCodedEmbeddingBagCollection, int, int]:
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of table {self._name} is gone")
        return module, *module.tables[self._name].schema.columns(self._field.name)

    def state_dict(self) -> Tensor:
        """(rows,) if there is one value per row, else (rows, D)."""
        module, first, last = self._columns()
        state = module.read_columns(self._name, first, last)
        return state.squeeze(1) if self._field.per_row else state

    def load_state_dict(self, state: Tensor) -> None:
        module, first, last = self._columns()
        state = _whole(state, module._step.session.trainer)
        columns = state.unsqueeze(1) if state.dim() == 1 else state
        module.load_columns(self._name, first, last, columns)


def _chunks(table: _Table) -> Iterator[tuple[int, int]]:
    """Row ranges of a table, each of at most `_CHUNK_BYTES` of records."""
    rows = max(1, _CHUNK_BYTES // table.schema.nbytes)
    for begin in range(0, table.rows, rows):
        yield begin, min(begin + rows, table.rows)


def _whole(value: Any, trainer: int) -> Tensor:
    """The full tensor of a plain, sharded or distributed one; a sharded one is gathered, in full on trainer 0 only."""
    if isinstance(value, ShardedTensor):
        out = torch.empty(value.size()) if trainer == 0 else None
        value.gather(0, out)
        return torch.empty(value.size(), device="meta") if out is None else out
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        raise TypeError(f"a tensor is needed to load a table, got {type(value).__name__}")
    return value.detach().cpu() if value.device.type != "meta" else value
