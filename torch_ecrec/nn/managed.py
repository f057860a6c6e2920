"""Collections with managed collisions: every trainer remaps ids in the same way, and the rows are on the servers.

    input_dist    the batch is known; nothing is remapped yet: a pipeline calls it a batch ahead
    compute       the ids of all trainers go into the maps (`remapping.py`); rows that were given to other ids get first
                  weights anew, on the servers; then the collection inside looks the rows up
    output_dist   what the collection inside gives, and the remapped ids if the module was made to return them

Rows that are given away are overwritten as TorchRec's sharded module overwrites them: by the table's `init_fn`, drawn
on trainer 0, and with row-wise Adagrad their optimizer state becomes zero (FBGEMM resets that of no other optimizer).
An overwrite is a step of the protocol of its own, after the snapshot of the step before: whoever goes back takes it
back, and makes it again with the same map, ids and random state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.types import EmbeddingModuleShardingPlan, NoWait, ShardedModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_ecrec.compat.torchrec import COLLECTION, MAPS, Ready, collection_of, maps_of, returns_remapped
from torch_ecrec.nn.dense import Replicated
from torch_ecrec.nn.pipelines import check_in_sync
from torch_ecrec.nn.remapping import Remapping
from torch_ecrec.nn.repeats import check_lengths
from torch_ecrec.nn.served import Context, ServedModule, permuted, refuse_recording
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.nn.tables_state import CHUNK_BYTES
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.state_dicts.unsharded import draw_weights

Both = tuple[Any, Any]  # awaitables: the output of the collection, and remapped ids or None


@dataclass
class ManagedContext(Context):
    """The state of one batch between the stages: the context of the collection inside, and the ids remapped to rows."""

    inside: Context | None = None
    remapped: KeyedJaggedTensor | None = None


class ManagedModule(ShardedModule[KJTList, list[Tensor], Both, ManagedContext], Replicated):
    """A sharded collection that remaps ids to rows. Takes a `KeyedJaggedTensor` of any int64 ids, on the host.

    Args:
        module: the unsharded module. Its maps are used on; the rest of it is not kept.
        inside: the collection of it, sharded.
        step: shared by all sharded modules of the model.
        path: of the module, for errors.

    Attributes:
        module_sharding_plan: the plan's entry for this module.
    """

    module_sharding_plan: EmbeddingModuleShardingPlan

    def __init__(
        self, module: BaseManagedCollisionEmbeddingCollection, inside: ServedModule[Any], step: SparseStep, path: str
    ) -> None:
        super().__init__()
        self.add_module(COLLECTION, inside)
        self.add_module(MAPS, maps_of(module))
        self._returns_remapped = returns_remapped(module)
        self._step, self._path = step, path or type(module).__name__
        gather = functools.partial(step.agreement.gather, f"remaps ids of {self._path}")
        self._remapping = Remapping(maps_of(module), gather)

    @property
    def _inside(self) -> ServedModule[Any]:
        """Returns the sharded collection that this module wraps."""
        inside: ServedModule[Any] = collection_of(self)
        return inside

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all stages, as in TorchRec. It is never compiled, though the model around it may be."""
        refuse_recording((*args, *kwargs.values()))
        return super().forward(*args, **kwargs)

    def create_context(self) -> ManagedContext:
        return ManagedContext()

    def input_dist(self, ctx: ManagedContext, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable:
        """Passes the batch on: there is nothing to distribute.

        Raises:
            ValueError: ids that cannot be remapped.
        """
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError(f"{self._path}: a batch size per feature is not supported where ids are remapped")
        if features.values().dtype != torch.int64:
            raise ValueError(f"{self._path}: ids that are remapped must be int64, got {features.values().dtype}")
        missing = [name for name in self._remapping.features if name not in features.keys()]
        if missing:
            raise ValueError(f"the batch lacks features {', '.join(missing)}; it has {', '.join(features.keys())}")
        ctx.features = features
        return KJTListSplitsAwaitable([NoWait(NoWait(features))], ctx)

    def compute(self, ctx: ManagedContext, dist_input: KJTList) -> list[Tensor]:
        """Remaps ids, reinitialises rows that now belong to other ids, and looks rows up, as `ServedModule.compute`."""
        (features,) = dist_input
        inside = self._inside
        check_in_sync(self.forward)
        inside.before_lookup()
        check_lengths(features)
        wanted, keys = self._remapping.features, features.keys()
        if keys != wanted:
            features = permuted(features, [keys.index(name) for name in wanted])
        rows_N = self._remapping.remap(features)
        if evicted := self._remapping.evictions():
            self._begin_again(evicted)
        ctx.remapped = KeyedJaggedTensor(
            keys=wanted, values=rows_N, lengths=features.lengths(), weights=features.weights_or_none()
        )
        ctx.inside = inside.create_context()
        return inside.compute(ctx.inside, inside.input_dist(ctx.inside, ctx.remapped).wait().wait())

    def _begin_again(self, evicted: Mapping[str, Tensor]) -> None:
        """Gives rows (N,) of tables new initial weights. Every trainer calls it, with the same rows.

        Raises:
            RuntimeError: the trainers' maps differ.
        """
        checksum = self._remapping.checksum(evicted)
        sums = self._step.agreement.gather(
            f"changes maps of {self._path}", torch.tensor([checksum], dtype=torch.int64, device="cpu")
        )
        if any(int(each) != checksum for each in sums):
            raise RuntimeError(
                f"step {self._step.session.step}: the trainers' maps of {', '.join(evicted)} in {self._path} differ, so"
                " they would mean other rows: were not all loaded alike, or are the trainers' CPUs or torch builds"
                " not the same?"
            )
        session, tables = self._step.session, self._inside.tables
        tables.on_training_lookup()
        for name, rows_N in evicted.items():
            table, (in_order, order_N) = tables.tables[name], torch.sort(rows_N)
            records = None
            if session.trainer == 0:
                read = session.read(table.table_group, in_order + table.first_row).view(torch.uint8)
                numbers = torch.from_numpy(numbers_of(read.numpy(), table.schema)).clone()
                if session.job.table_groups[table.table_group].optimizer.kind == "rowwise_adagrad":
                    numbers[:, table.dim :] = 0
                weights = torch.empty(len(rows_N), table.dim, dtype=table.dtype, device="cpu")
                weights[order_N.argsort()] = numbers[:, : table.dim].to(table.dtype)  # TorchRec's order of drawing
                drawn = draw_weights(self._inside.config_of(name), weights)[order_N]
                numbers[:, : table.dim] = drawn.float()
                records = torch.from_numpy(records_of(numbers.numpy(), table.schema))
            portion = max(1, CHUNK_BYTES // table.schema.nbytes)
            for begin in range(0, len(in_order), portion):
                some = slice(begin, begin + portion)
                mine = None if records is None else records[some]
                session.overwrite(table.table_group, in_order[some] + table.first_row, mine)

    def output_dist(self, ctx: ManagedContext, output: list[Tensor]) -> Both:
        """Returns the unsharded module's output. Each part of it is an awaitable."""
        assert ctx.inside is not None and ctx.remapped is not None  # of `compute`
        inside: Any = self._inside  # of bags or sequences
        given = inside.output_dist(ctx.inside, output)
        return given, Ready(ctx.remapped) if self._returns_remapped else NoWait(None)

    # names and state --------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the tables of the collection inside, under TorchRec's names."""
        yield from self._inside.named_parameters(_join(prefix, COLLECTION), recurse)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields tables and maps: as in TorchRec, data parallelism leaves both alone."""
        yield from (name for name, _ in self.named_parameters(prefix))
        yield from (name for name, _ in self.named_buffers(prefix))

    def made_with(self) -> list[str]:
        return self._remapping.made_with()

    def replicated_state(self) -> dict[str, Any]:
        """Returns the maps, which all trainers have alike."""
        return self._remapping.state()

    def load_replicated_state(self, state: Mapping[str, Any]) -> None:
        """Restores the maps. Raises ValueError, and changes nothing, if they are of other tables or sizes."""
        self._remapping.load_state(state)


@ShardedManagedCollisionEmbeddingBagCollection.register  # `isinstance` in tests, pipelines and scripts
class ErasureCodedManagedCollisionEmbeddingBagCollection(ManagedModule):
    """A sharded `ManagedCollisionEmbeddingBagCollection`: its rows are on the servers."""

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionEmbeddingBagCollection]:
        return ManagedCollisionEmbeddingBagCollection


@ShardedManagedCollisionEmbeddingCollection.register
class ErasureCodedManagedCollisionEmbeddingCollection(ManagedModule):
    """A sharded `ManagedCollisionEmbeddingCollection`: its rows are on the servers."""

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionEmbeddingCollection]:
        return ManagedCollisionEmbeddingCollection


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
