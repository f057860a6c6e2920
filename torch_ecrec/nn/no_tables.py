"""The backend of a model without tables: there is nothing to serve, so there are no servers.

    model = DistributedModelParallel(nn.Linear(2, 1))     # TorchRec's own; a warning says that nothing protects it

What needs servers (`attach`) is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Never

NO_TABLES = (
    "the model holds no EmbeddingBagCollection and no EmbeddingCollection to serve, nor a fused one: it is trained as"
    " with TorchRec, without servers"
)


class NoTables:
    """`EmbeddingBackend` without a table, in no cluster.

    Args:
        trainer, trainers: as of a session.
    """

    def __init__(self, trainer: int, trainers: int, snapshot_every: int) -> None:
        self.trainer, self.trainers, self.snapshot_every, self.restarted = trainer, trainers, snapshot_every, False
        self.job: Any = SimpleNamespace(tables=(), slabs=())
        self.step = 1  # there are none

    def loaded(self) -> None:
        """Nothing was."""

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing was joined."""

    def __getattr__(self, name: str) -> Never:
        raise RuntimeError(f"`{name}`: {NO_TABLES}")
