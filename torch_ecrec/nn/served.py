"""The base of all sharded modules whose rows live on the servers: TorchRec's stages, lookups ahead, state dicts.

TorchRec runs a sharded module in stages, and its pipelines run them apart:

    input_dist    the batch is known: its ids begin to travel to the host
    compute       rows are asked for, and pooled there (of a sequence, each id is a bag)
    output_dist   what was computed gets the form of the unsharded module's output: `bags.py`, `sequences.py`

Invariants. Rows are looked up in `compute`, never in `input_dist`, which pipelines run one batch ahead: a row is never
a step old. A batch that a pipeline has announced that way is asked for with the push before it, in the same messages,
or right behind if it has so many ids that they would hold up the push. Its rows travel while the rest of the backward
and the dense optimizer run; the servers answer once they have applied that push. In a plain loop `announcing.py` says
what probably comes next (`announce`): a copy is kept, and compared with what `compute` gets. Servers that have records
on disks are told of the batches after it, too, as far as they are known, each once, behind the push.

Does not hold weights, talk to servers (`backend.EmbeddingBackend` does) or change the dense part of the model. What a
training step is, `step.py` says; pooling is in `slices.py`, the autograd function in `lookup.py`, and what is saved and
loaded in `tables_state.py`.

Shape legend: F features, B batch size, N ids, U unique rows, D embedding dim.
"""

from __future__ import annotations

import abc
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Never, TypeVar

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import logger as torchrec_logger
from torchrec.distributed.types import EmbeddingModuleShardingPlan, LazyAwaitable, NoWait, ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from torchrec.streamable import Multistreamable

from torch_ecrec.compat.torch import OwnState, is_transformed, own_parameters
from torch_ecrec.layout.routing import BagRoute
from torch_ecrec.nn.dense import WithTables
from torch_ecrec.nn.lookup import PooledLookup, pool_all
from torch_ecrec.nn.pipelines import check_in_sync
from torch_ecrec.nn.placeholder import StandIns, TableParameter, are_trained
from torch_ecrec.nn.repeats import Repeats, check_lengths
from torch_ecrec.nn.slices import Bags, Slice, Table
from torch_ecrec.nn.staging import HostIds, Staging, copied, same_ids
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.nn.tables_state import ServerOptimizer, TablesState
from torch_ecrec.resume.reader import Number
from torch_ecrec.state_dicts.columns import Columns
from torch_ecrec.state_dicts.kinds import Collection
from torch_ecrec.state_dicts.unsharded import configs_of, draw_weights, folder_of, is_default, pooling_of, weight_of

Output = TypeVar("Output")
WITH_PUSH_MOST = 1 << 16  # ids of a batch: to find their places takes a thread some ms, and servers wait for the push
NO_RECORDING = (
    "`torch.jit`, `torch.fx.symbolic_trace` and the transforms of `torch.func` cannot record a lookup of rows that are"
    " on the servers: give them dense modules of the model, or a model that is not sharded, with what"
    " `full_state_dict()` returns"
)
PIPELINED_MOST = 8  # batches that a pipeline has announced and not computed; TorchRec's have up to 3


@dataclass
class Context(Multistreamable):
    """The state of one batch between the stages of a module.

    Attributes:
        given: what the module was called with.
        features: what is looked up of it.
    """

    features: KeyedJaggedTensor | None = None
    given: KeyedJaggedTensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        if self.features is not None:
            self.features.record_stream(stream)


@dataclass(eq=False)
class _Coming:
    """A batch that will be looked up.

    Attributes:
        ids: of it.
        told: a copy of what was announced; None: a pipeline has given it already.
        number: of what was announced, by which it is known again.
        ready: what it looks up, once that was asked for.
        hinted: servers have been told that it will come.
    """

    ids: HostIds
    told: HostIds | None = None
    number: Number | None = None
    ready: _Ready | None = None
    hinted: bool = False


@dataclass(eq=False)
class _Ready:
    """Holds what a batch looks up, found before `compute`: unique rows (U,) of each table group of the job, and its
    bags."""

    coming: _Coming
    rows: list[Tensor]
    bags: list[Bags]


class ServedModule(
    OwnState, ShardedModule[KJTList, list[Tensor], Output, Context], FusedOptimizerModule, WithTables, Generic[Output]
):
    """A sharded module whose tables are served by erasure-coded servers. Takes a `KeyedJaggedTensor`.

    Its parameters are placeholders without rows. `state_dict` reads this trainer's range of rows of each table.

    Args:
        module: the collection to serve. Not kept.
        step: shared by all sharded modules of the model.
        job_names: name of each of its tables in the job.
        device: where its output goes. Ids may be there or on the host.
        weighted: whether ids come with weights.
        columns: the order of its features; None: that of the module.

    Attributes:
        module_sharding_plan: the plan's entry for this module.
        columns: the order of its features in what it gives out.
        on_called: called in training with the features that the module is called with, and whether they are those that
            were announced, None if none were asked for.
    """

    module_sharding_plan: EmbeddingModuleShardingPlan

    def __init__(
        self,
        module: Collection,
        step: SparseStep,
        job_names: Mapping[str, str],
        device: torch.device,
        weighted: bool = False,
        columns: Columns | None = None,
    ) -> None:
        super().__init__()
        self._step = step
        self._staging = Staging(device)
        self._weighted = weighted
        # Makes autograd run the backward of a lookup.
        self._anchor = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        job = step.session.job
        configs = configs_of(module)
        self._tables: dict[str, Table] = {}
        for config in configs:
            table_group, first_row = job.place_of_table[job_names[config.name]]
            self._tables[config.name] = Table(
                name=config.name,
                job_name=job_names[config.name],
                table_group=table_group,
                first_row=first_row,
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                schema=job.table_groups[table_group].schema,
                features=tuple(config.feature_names),
                pooling=pooling_of(config),
                optimizer=job.table_groups[table_group].optimizer.kind,
                home=job.home_of(job_names[config.name]),
                slots=len(job.slots_of(job_names[config.name])),
            )
        places = [(feature, table) for table in self._tables.values() for feature in table.features]
        names = [name for names in get_embedding_names_by_table(list(configs)) for name in names]
        self._place_of = dict(zip(names, places, strict=True))
        self._dtypes: Mapping[str, torch.dtype] = {}  # see `give_out_as`
        self.columns = columns or Columns(module)
        self.columns.on_changed = self._arrange
        self._state = TablesState(step, self._tables, folder_of(module), self.columns)
        self._optimizer = ServerOptimizer(self._state)
        step.optimizers.append((self._optimizer.table_groups, self._optimizer))
        self._parameters_of_tables = {
            self._state.key_of(table.name): TableParameter(
                table.name, table.rows, table.dim, table.dtype, weight_of(module, table.name).requires_grad
            )
            for table in self._tables.values()
        }
        step.frozen.append(self._frozen)
        self._configs = {config.name: config for config in configs}
        self._validated = False
        self._coming: deque[_Coming] = deque(maxlen=PIPELINED_MOST)  # given by a pipeline, not computed yet
        self._told: deque[_Coming] = deque()  # announced in a plain loop, likewise
        self._ready: _Ready | None = None  # looked up ahead
        self.on_called: Callable[[KeyedJaggedTensor, bool | None], None] | None = None
        step.coming.append(self._ask_with_push)
        step.on_pushed += [self.columns.begin, self._look_ahead]
        self._arrange()

    def _arrange(self) -> None:
        """Builds columns and slices for the current order of features. Rows looked up ahead are dropped."""
        places = [self._place_of[name] for name in self.columns.keys]
        table_groups = self._step.session.job.table_groups
        self._keys, self._dims = list(self.columns.keys), [table.dim for _, table in places]
        self._outputs = [self._dtypes.get(table.name, torch.float32) for _, table in places]
        self._slices = [
            Slice(
                table_group,
                table_groups[table_group].dim,
                [(i, feature, table) for i, (feature, table) in enumerate(places) if table.table_group == table_group],
                table_groups[table_group].optimizer.max_gradient,
            )
            for table_group in sorted({table.table_group for _, table in places})
        ]
        self._ready = None
        for coming in (*self._coming, *self._told):
            coming.ready = None

    def keys_of_tables(self) -> dict[str, tuple[str, str]]:
        """Returns the names of its tables, as `WithTables` defines them."""
        return {table.job_name: (self._state.key_of(table.name), table.name) for table in self._tables.values()}

    def made_with(self) -> list[str]:
        """Returns, for each table, what decides which outputs its rows make, beside their order."""
        return [
            f"{table.job_name} {table.features} {table.pooling.value} weighted={self._weighted}"
            f" {self._dtypes.get(table.name, torch.float32)}"
            for table in self._tables.values()
        ]

    @property
    @abc.abstractmethod
    def unsharded_module_type(self) -> type[Any]:
        """The class of the collection that this module replaces."""

    @abc.abstractmethod
    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch to look up. Raises ValueError if its batch sizes do not fit the module."""

    @abc.abstractmethod
    def _bags(self, part: Slice, features: KeyedJaggedTensor, repeats: Repeats | None) -> tuple[Tensor, Bags]:
        """Returns the unique rows of the table group (U,) of the ids, and how they are pooled to this module's
        output."""

    def give_out_as(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Sets the output dtype of some tables (see `outputs.py`); the others are float32."""
        self._dtypes = dict(dtypes)
        self._arrange()

    # TorchRec's stages ----------------------------------------------------------------------------

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Output]:
        """Runs all stages, as in TorchRec. It is never compiled, though the model around it may be."""
        refuse_recording((*args, *kwargs.values()))
        return super().forward(*args, **kwargs)

    def __prepare_scriptable__(self) -> Never:
        """Raises RuntimeError. `torch.jit.script` calls it for each module in what it is given."""
        raise RuntimeError(NO_RECORDING)

    def create_context(self) -> Context:
        return Context()

    def input_dist(self, ctx: Context, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable:
        """Checks the batch. There is nothing to distribute: every trainer looks up its own rows."""
        if not self._validated:  # once, as TorchRec does
            torchrec_logger.info("Validating input features...")
            validate_keyed_jagged_tensor(features)
            self._validated = True
        ctx.given = features
        features = ctx.features = self._accepted(features)
        if torch.is_grad_enabled():
            self._coming.append(_Coming(self._staging.ids(features)))
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def _accepted(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch to look up. Raises ValueError if it does not fit the module."""
        if features.values().dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32, got {features.values().dtype}")
        missing = [name for part in self._slices for name in part.features if name not in features.keys()]
        if missing:
            raise ValueError(f"the batch lacks features {', '.join(missing)}; it has {', '.join(features.keys())}")
        return self._checked(features)

    @property
    def can_be_announced(self) -> bool:
        """Whether lookups may be made ahead: weights of ids have a graph, which a backward must not start."""
        return not self._weighted

    def announce(self, coming: Sequence[tuple[Number, KeyedJaggedTensor]]) -> None:
        """Says what the next training forwards of a plain loop will probably be called with, in their order.

        The first is asked for with the next push. What a forward gets in its place is asked for then, as ever.

        Args:
            coming: all that is known, each with a number by which it is known the next time.
        """
        known = {one.number: one for one in self._told}
        self._told.clear()
        for number, features in coming if not self._coming else ():  # a pipeline knows better
            one = known.get(number) or self._foreseen(number, features)
            if one is None:
                return
            self._told.append(one)

    def _foreseen(self, number: Number, features: KeyedJaggedTensor) -> _Coming | None:
        told = copied(features)
        try:
            accepted = self._accepted(told)
        except ValueError:  # the forward says so, where it belongs
            return None
        ids = self._staging.ids(accepted)
        return _Coming(ids, ids if accepted is told else self._staging.ids(told), number)

    def _ask_with_push(self) -> tuple[list[Tensor], list[BagRoute]] | None:
        """Returns what the batch that will be computed next looks up, to be asked for with the push.

        Returns:
            Rows (U,) and bags, per table group of the job; None if there is no such batch, or it has many ids to be
            prepared.
        """
        coming = next(iter(self._coming or self._told), None)
        if coming is None:
            return None
        few = coming.ready is not None or coming.ids.features.values().numel() <= WITH_PUSH_MOST
        return self._ask_for(coming) if few else None

    def _look_ahead(self) -> None:
        """Asks the servers for the rows of the batch that will be computed next, unless the push did.

        Of later ones it tells those servers that have to read them from disks, or to repair them.
        """
        known, session = list(self._coming or self._told), self._step.session
        if known and (self._ready is None or self._ready.coming is not known[0]):
            asked = self._ask_for(known[0])
            if asked is not None:
                session.look_ahead(*asked)
        for later, coming in enumerate(known[1:] if session.wants_hints else (), 1):
            if not coming.hinted and (ready := self._prepared(coming)) is not None:
                coming.hinted = True
                session.announce(later, ready.rows, self._step.routes(ready.bags))

    def _ask_for(self, coming: _Coming) -> tuple[list[Tensor], list[BagRoute]] | None:
        ready = self._prepared(coming)
        if ready is None:
            return None
        self._ready = ready
        return ready.rows, self._step.routes(ready.bags)

    def _prepared(self, coming: _Coming) -> _Ready | None:
        """Returns what a batch looks up, which is found once; None if it must not be asked for ahead."""
        if coming.ready is None and self.can_be_announced:
            try:
                coming.ready = _Ready(coming, *self._prepare(coming.ids))
            except ValueError:  # an id that is no row: `compute` says so, where it belongs
                return None
        return coming.ready

    def _prepare(self, ids: HostIds) -> tuple[list[Tensor], list[Bags]]:
        """Returns the unique rows (U,) for each table group of the job, and the bags for each table group of this
        module."""
        session = self._step.session
        features = ids.features if self._weighted else ids.wait()  # weights of ids have a graph
        check_lengths(features)
        rows = [torch.empty(0, dtype=torch.int64, device="cpu") for _ in session.job.table_groups]
        bags = []
        for part in self._slices:
            order = [features.keys().index(name) for name in part.features]
            in_order = features if order == list(range(len(features.keys()))) else permuted(features, order)
            rows[part.table_group], some = self._bags(part, in_order, features.inverse_indices_or_none())
            bags.append(some)
        return rows, bags

    def before_lookup(self) -> None:
        """Does what must precede a lookup: ends initial loading, and loads what was written into state dicts.

        It may be called twice for one lookup.
        """
        self._step.open()
        trains = "training" if self.training else "alone"
        self._step.load_written(trains if torch.is_grad_enabled() else "evaluation")
        if torch.is_grad_enabled():
            self._state.on_training_lookup()
            self._step.on_training_lookup()

    def compute(self, ctx: Context, dist_input: KJTList) -> list[Tensor]:
        """Looks the rows up, and pools them on the host.

        Returns:
            For each table group of this module, on the device: (bags, features in a bag's row, D).
        """
        (features,) = dist_input
        step = self._step
        check_in_sync(self.forward)
        self.before_lookup()
        ids = None
        while any(other.ids.features is features for other in self._coming):
            ids = self._coming.popleft().ids
        ids = ids or self._staging.ids(features)
        ready = self._take_ready(ctx, ids)
        rows, bags = (ready.rows, ready.bags) if ready is not None else self._prepare(ids)
        crossings = [self._staging.crossing() for _ in bags]
        if torch.is_grad_enabled():
            per_id = (part.per_id_N for part in bags)
            pooled = PooledLookup.apply(self._anchor, step, rows, bags, crossings, self._frozen(), *per_id)
        else:
            weights, sums = step.lookup(rows, bags, evaluation=not self.training)
            pooled = pool_all(weights, sums, bags, crossings)
        return [crossing.over(pooled_BFD) for crossing, pooled_BFD in zip(crossings, pooled, strict=True)]

    def _take_ready(self, ctx: Context, ids: HostIds) -> _Ready | None:
        """Returns what was asked for ahead, if it is what is looked up now."""
        ready, trains = self._ready, torch.is_grad_enabled() and self.training
        if trains and self._told:
            self._told.popleft()
        if ready is not None and ready.coming.told is not None and not trains:
            return None  # an evaluation, before the forward for which it was asked
        self._ready, given, used = None, ctx.given, None
        assert given is not None, "of `input_dist`"
        if ready is not None and ready.coming.told is None:
            ready = ready if ready.coming.ids.features is ids.features else None
        elif ready is not None and ready.coming.told is not None:
            host = ids if ids.features is given else self._staging.ids(given)
            used = given.weights_or_none() is None and same_ids(ready.coming.told.wait(), host.wait())
            ready = ready if used else None
        if trains and self.on_called is not None:
            self.on_called(given, used)
        return ready

    def config_of(self, table: str) -> BaseEmbeddingConfig:
        """Returns the config of a table as the user made it."""
        return self._configs[table]

    @property
    def fused_optimizer(self) -> ServerOptimizer:
        return self._optimizer

    # parameters ------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the tables under TorchRec's names. Each is a placeholder without rows (`placeholder.py`)."""
        for name, parameter in self._parameters_of_tables.items():
            yield f"{prefix}.{name}" if prefix else name, parameter

    def _frozen(self) -> list[Table]:
        """Returns the tables that are not trained (`requires_grad` is False)."""
        trained = are_trained(self._parameters_of_tables.values())
        return [table for table, trains in zip(self._tables.values(), trained, strict=True) if not trains]

    def modules_of_tables(self) -> nn.ModuleDict:
        """Returns stand-ins for the unsharded module's tables: by name, each with a `weight` (`placeholder.py`)."""
        return StandIns({name: self._parameters_of_tables[self._state.key_of(name)] for name in self._tables})

    def reset_parameters(self) -> None:
        """Draws new initial weights for every row, as the configs say. Optimizer state stays. Every trainer calls it.

        It is a load (`tables_state.py`): trainer 0 draws the weights from its random state.
        """
        for name, table in self._tables.items():
            config = self._configs[name]
            if config.init_fn is None or is_default(config):
                self._state.load_drawn(name, functools.partial(_uniform, config, table.dtype))
                continue
            weights = torch.empty(table.rows, table.dim, dtype=table.dtype, device="meta")
            if self._step.session.trainer == 0:
                weights = draw_weights(config, torch.empty(table.rows, table.dim, dtype=table.dtype, device="cpu"))
            self._state.load(name, table.schema.fields[0], weights)

    # state dicts ------------------------------------------------------------------------------------

    @property
    def tables(self) -> TablesState:
        """The state of its tables on the servers, to read and to load."""
        return self._state

    def save_state(self, destination: dict[str, Any], prefix: str) -> None:
        """Puts this trainer's part of the weights of each table into `destination`."""
        self._state.save_weights(destination, prefix)

    def load_state(
        self,
        state: Mapping[str, Any],
        prefix: str,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Loads weights of tables onto the servers."""
        self._state.load_weights(state, prefix, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        lines = [
            f"({table.name}): {table.rows} x {table.dim}, {table.pooling.value.lower()}, {table.optimizer},"
            f" features={list(table.features)}"
            for table in self._tables.values()
        ]
        return "\n".join(lines)


def refuse_recording(given: Iterable[object]) -> None:
    """Raises RuntimeError if a lookup is to be recorded or transformed, and not to be made.

    Args:
        given: what a sharded module is called with.
    """
    recorded = is_tracing()
    if recorded or is_transformed() or any(isinstance(one, torch.fx.Proxy) for one in given):
        raise RuntimeError(NO_RECORDING)


def show_tables(model: nn.Module) -> None:
    """Makes torch's modules list the tables of the sharded modules in them: adds the placeholders to their parameters.

    Call it after the model is built: TorchRec's constructor rebuilds whatever it finds on the meta device.
    """
    for module in model.modules():
        if isinstance(module, ServedModule):
            own_parameters(module).update(module.named_parameters())


def _uniform(config: BaseEmbeddingConfig, dtype: torch.dtype, rows: int) -> Tensor:
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    return torch.empty(rows, config.embedding_dim, dtype=dtype, device="cpu").uniform_(low, high)


def permuted(features: KeyedJaggedTensor, order: list[int]) -> KeyedJaggedTensor:
    """Returns the features at these places. A feature may occur twice, or not at all."""
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return features.permute(order)
    single = features.split([1] * len(features.keys()))  # FBGEMM's backward of a permutation wants each once
    return KeyedJaggedTensor.concat([single[i] for i in order])
