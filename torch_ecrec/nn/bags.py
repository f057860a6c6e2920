"""The sharded `EmbeddingBagCollection`: pooled embeddings of rows that live on the servers.

Shape legend: F features, B batch size, U unique rows, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fused_embeddingbag import ShardedFusedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torch_ecrec.compat.torchrec import Ready
from torch_ecrec.nn.repeats import Repeats, check_repeats
from torch_ecrec.nn.served import Context, ServedModule
from torch_ecrec.nn.slices import Bags, Slice
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.state_dicts.columns import Columns
from torch_ecrec.state_dicts.kinds import Bags as UnshardedBags


class _Pooled(LazyGetItemMixin[str, Tensor], Ready[KeyedTensor]):
    """An awaitable whose pooled embeddings are there already. `[key]` gives those of a feature, as in TorchRec."""


@ShardedEmbeddingBagCollection.register  # `isinstance` in tests, pipelines and scripts
class ErasureCodedEmbeddingBagCollection(ServedModule[KeyedTensor]):
    """An `EmbeddingBagCollection` whose tables are served by erasure-coded servers. Made by `ErasureCodedSharder`.

    Returns a `KeyedTensor` with the keys and values of the unsharded module, in the order of
    `state_dicts/columns.py`. Arguments as of `ServedModule`.

    Features may have batch sizes of their own, if the batch has inverse indices (`repeats.py`).
    """

    def __init__(
        self,
        module: UnshardedBags,
        step: SparseStep,
        job_names: Mapping[str, str],
        device: torch.device,
        columns: Columns | None = None,
    ) -> None:
        super().__init__(module, step, job_names, device, module.is_weighted(), columns)

    @property
    def unsharded_module_type(self) -> type[UnshardedBags]:
        return EmbeddingBagCollection

    @property
    def embedding_bags(self) -> nn.ModuleDict:
        """The tables by name, as in TorchRec. Each is a placeholder without rows (`placeholder.py`)."""
        return self.modules_of_tables()

    def _checked(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        check_repeats(features, [name for part in self._slices for name in part.features])
        return features

    def _bags(self, part: Slice, features: KeyedJaggedTensor, repeats: Repeats | None) -> tuple[Tensor, Bags]:
        session = self._step.session
        pooling = session.pooling(evaluation=not self.training)
        return part.bags(features, self._weighted, session.arrange, repeats, session.job.layouts, pooling)

    def output_dist(self, ctx: Context, output: list[Tensor]) -> LazyAwaitable[KeyedTensor]:
        """Concatenates the pooled features to (B, sum of dims), rounded to their output dtype."""
        if len(set(self._outputs)) == len(output) == 1:
            values = output[0].flatten(1).to(self._outputs[0])
        else:
            columns: list[Tensor] = [torch.empty(0, dtype=torch.float32, device="cpu")] * len(self._keys)
            for part, pooled_BFD in zip(self._slices, output, strict=True):
                for column, pooled_BD in zip(part.columns, pooled_BFD.unbind(1), strict=True):
                    columns[column] = pooled_BD.to(self._outputs[column])
            values = torch.cat(columns, dim=1)
        return _Pooled(KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values))

    def extra_repr(self) -> str:
        return f"is_weighted={self._weighted}\n{super().extra_repr()}"


@ShardedFusedEmbeddingBagCollection.register
class ErasureCodedFusedEmbeddingBagCollection(ErasureCodedEmbeddingBagCollection):
    """A sharded `FusedEmbeddingBagCollection`. The servers run the optimizer with which it was made."""

    @property
    def unsharded_module_type(self) -> type[FusedEmbeddingBagCollection]:
        return FusedEmbeddingBagCollection
