"""What the sharded modules need from the servers, as a protocol: `client.session.Session` is the real one.

Tests have others, in memory; the same tests hold all of them to one behaviour (`tests/simulated/test_backend.py`).

Shape legend: N ids, U unique rows, D embedding dim, W record width in floats, b some bytes of a record.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Never, Protocol

from torch import Tensor

from torch_ecrec.layout.routing import Parts
from torch_ecrec.spec.job import JobSpec


class EmbeddingBackend(Protocol):
    """What the sharded modules need from the servers: one blocking object per trainer.

    `client/session.py:Session` is one, `recorder.py:Recorded` one that notes what is done with it.

    Rows are slab rows, int64 on the CPU and unique; lists hold one tensor per slab of `job.slabs`. `arrange` says in
    which order they cost least.
    """

    job: JobSpec
    trainer: int
    trainers: int
    snapshot_every: int  # `snapshot` is called after each step that is a multiple of it; 0: never

    @property
    def restarted(self) -> bool:
        """The cluster has trained before: `load` does nothing, `resume` says where training goes on."""

    @property
    def step(self) -> int:
        """The step being worked on, from 1."""

    def arrange(self, slab: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The different ones of `rows` (N,), in the best order, (U,), and where each of `rows` is in them, (N,)."""

    def lookup_parts(self, rows: list[Tensor], evaluation: bool = False) -> list[Parts]:
        """Weights (U, D) after `step - 1`, per slab, float32 or bfloat16. Does not end the step; may be repeated.

        Of an `evaluation`, which makes no gradients, the settings may have them less exact.

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

    def overwrite(self, slab: int, rows: Tensor, values: Tensor | None, first_byte: int = 0) -> None:
        """Overwrites bytes of records, from `first_byte` on, between two steps: values (U, b) uint8; rows ascending.

        Every trainer calls it, with slab, rows and values of its own, or with None.
        """

    def loaded(self) -> None:
        """Ends the loading; every trainer calls it once, before its first `lookup_parts`."""

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Keeps this trainer's part (uint8) of the dense state after `step - 1`."""

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        """The last step that counts, and what every trainer's `snapshot` was given after it, in trainer order."""

    def flush(self) -> None:
        """Waits until all that was pushed, and every snapshot that was handed over, survives r losses."""

    def not_exact(self, what: str) -> None:
        """Something has happened that makes this run another than an undisturbed one; said in the log and outside."""

    def close(self) -> None:
        """Leaves the cluster. Twice is once."""


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
