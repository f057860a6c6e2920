"""The sharded `EmbeddingCollection`: one embedding for each id, of rows that live on the servers.

    batch     f: [[7], [7, 2]]
    returned  f: rows [w7, w7, w2], lengths [1, 2]

Shape legend: N ids, U unique rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.fused_embedding import ShardedFusedEmbeddingCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_ecrec.compat.torchrec import Ready
from torch_ecrec.nn.repeats import Repeats, check_lengths, check_repeats, repeated
from torch_ecrec.nn.served import Context, ServedModule
from torch_ecrec.nn.slices import Bags, Slice
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.state_dicts.columns import Columns


@ShardedEmbeddingCollection.register  # `isinstance` in tests, pipelines and scripts
class ErasureCodedEmbeddingCollection(ServedModule[dict[str, JaggedTensor]]):
    """An `EmbeddingCollection` whose tables are served by erasure-coded servers. Made by `ErasureCodedSharder`.

    Returns a `JaggedTensor` for each feature, with the keys and values of the unsharded module, in the order of
    `state_dicts/columns.py`. Arguments as of `ServedModule`. Where features have batch sizes of their own, each
    sample gets its rows, as in TorchRec's sharded module; the unsharded one leaves them as they come (`repeats.py`).
    """

    def __init__(
        self,
        module: EmbeddingCollection | FusedEmbeddingCollection,
        step: SparseStep,
        job_names: Mapping[str, str],
        device: torch.device,
        columns: Columns | None = None,
    ) -> None:
        super().__init__(module, step, job_names, device, columns=columns)
        self._need_indices = module.need_indices()

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection | FusedEmbeddingCollection]:
        return EmbeddingCollection

    @property
    def embeddings(self) -> nn.ModuleDict:
        """The tables by name, as in TorchRec. Each is a placeholder without rows (`placeholder.py`)."""
        return self.modules_of_tables()

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not features.variable_stride_per_key():
            return features  # TorchRec does nothing with inverse indices then
        check_repeats(features, [name for part in self._slices for name in part.features])
        check_lengths(features)
        return repeated(features)

    def _bags(self, part: Slice, features: KeyedJaggedTensor, repeats: Repeats | None) -> tuple[Tensor, Bags]:
        return part.ids(features, self._step.session.arrange)

    def output_dist(self, ctx: Context, output: list[Tensor]) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Splits the rows by feature, (N, D) each, rounded to their output dtype."""
        assert ctx.features is not None  # of `input_dist`
        keys, sizes = ctx.features.keys(), ctx.features.length_per_key()
        lengths = dict(zip(keys, ctx.features.lengths().view(len(keys), -1).unbind(0), strict=True))
        ids = dict(zip(keys, ctx.features.values().split(sizes), strict=True))
        found: dict[str, JaggedTensor] = {}
        for part, rows_N1D in zip(self._slices, output, strict=True):
            pieces = rows_N1D.flatten(1).split([len(ids[name]) for name in part.features])
            for column, name, rows_ND in zip(part.columns, part.features, pieces, strict=True):
                weights = ids[name] if self._need_indices else None
                values = rows_ND.to(self._outputs[column])
                found[self._keys[column]] = JaggedTensor(values=values, lengths=lengths[name], weights=weights)
        return Ready({key: found[key] for key in self._keys})


@ShardedFusedEmbeddingCollection.register
class ErasureCodedFusedEmbeddingCollection(ErasureCodedEmbeddingCollection):
    """A sharded `FusedEmbeddingCollection`. The servers run the optimizer with which it was made."""

    @property
    def unsharded_module_type(self) -> type[FusedEmbeddingCollection]:
        return FusedEmbeddingCollection
