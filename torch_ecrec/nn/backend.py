"""The protocol by which sharded modules use the servers. `client.session.Session` implements it.

Tests have others, in memory; the same tests hold all of them to one behaviour (`tests/simulated/test_backend.py`).

Shape legend: N ids, U unique rows, D embedding dim, W record width in floats, b some bytes of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Never, Protocol

from torch import Tensor

from torch_ecrec.layout.routing import BagRoute, Parts
from torch_ecrec.spec.job import JobSpec


class EmbeddingBackend(Protocol):
    """The connection of one trainer with the servers, as the sharded modules use it. Its methods block.

    `client/session.py:Session` implements it, and `recorder.py:Recorded` wraps one to record what is done with it.

    Rows are those of the table group, int64 on the CPU and unique; lists hold one tensor per table group of
    `job.table_groups`. `arrange` says in which order they cost least.
    """

    job: JobSpec
    trainer: int
    trainers: int
    snapshot_every: int  # `snapshot` is called after each step that is a multiple of it; 0: never

    @property
    def restarted(self) -> bool:
        """Whether the cluster has trained before: then `load` does nothing, and training goes on from `resume`."""

    @property
    def step(self) -> int:
        """The step that is under way, from 1."""

    def overtaken(self) -> bool:
        """Returns whether another trainer has sent its part of the step that is under way, and this one has not."""

    def arrange(self, table_group: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the unique rows of `rows` (N,) in the best order, (U,), and each one's index among them, (N,)."""

    def lookup_parts(self, rows: list[Tensor], evaluation: bool = False) -> list[Parts]:
        """Returns weights (U, D) after `step - 1`, per table group, float32 or bfloat16. Does not end the step;
        repeatable.

        An `evaluation` needs no gradients; the settings may make its weights less exact.

        They come in parts (u, D), in the order of the rows. They must not be written to.
        """

    def pooling(self, evaluation: bool) -> str:
        """Returns of which tables slots may pool bags: "parts", also of those on several slots; "whole"; "rows", of
        none.

        Sums of whole tables are, bit for bit, those that a trainer makes of the rows.
        """

    def lookup_bags(self, rows: list[Tensor], bags: list[BagRoute]) -> tuple[list[Parts], list[Tensor]]:
        """Returns what `lookup_parts` does, and per table group the sums (G, D) float32 of bags, which slots pool."""

    def look_ahead(self, rows: list[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        """Announces rows and bags that a lookup gets later in this step, as the same tensors, to be fetched early."""

    @property
    def wants_hints(self) -> bool:
        """Whether servers want to know what later steps will look up: of records that are not in their memory."""

    def announce(self, later: int, rows: list[Tensor], bags: Sequence[BagRoute] = ()) -> None:
        """Tells servers that want hints what a lookup will get, so many steps after this one."""

    def push(
        self,
        rows: list[Tensor],
        gradients: list[Tensor],
        rates: list[float],
        bags: Sequence[BagRoute] = (),
        bag_gradients: Sequence[Tensor] = (),
        ahead: Sequence[tuple[Sequence[Tensor], Sequence[BagRoute]]] = (),
    ) -> None:
        """Ends the step with gradients (U, D) and a learning rate per table group, and gradients (G, D) of bags of
        other rows.

        `ahead` are the rows and bags of lookups of the next step, as `look_ahead` would be given them after this.

        Every trainer calls it in every step.
        """

    def read(self, table_group: int, rows: Tensor) -> Tensor:
        """Reads records (U, W), weights then optimizer state, after `step - 1`; rows ascend. Also before `loaded`."""

    def load(self, table_group: int, rows: Tensor, records: Tensor) -> None:
        """Overwrites records before the first step; rows ascend. Only trainer 0 calls it."""

    def overwrite(self, table_group: int, rows: Tensor, values: Tensor | None, first_byte: int = 0) -> None:
        """Overwrites bytes of records between two steps, from `first_byte` on: values (U, b) uint8; rows ascend.

        Every trainer calls it, with table group, rows and values of its own, or with None.
        """

    def loaded(self) -> None:
        """Ends the loading; every trainer calls it once, before its first `lookup_parts`."""

    def snapshot(self, payload: Tensor, header: list[int]) -> None:
        """Keeps this trainer's part (uint8) of the dense state after `step - 1`."""

    def resume(self) -> tuple[int, list[tuple[Tensor, list[int]]]]:
        """Returns the step after which training goes on, and every trainer's `snapshot` of it, in trainer order."""

    def flush(self) -> None:
        """Waits until all that was pushed, and every snapshot that was handed over, survives r losses."""

    def trained_on(self, samples: int) -> None:
        """Notes that this trainer trains on so many samples more, for figures."""

    def not_exact(self, what: str) -> None:
        """Reports that this run is no longer the same as an undisturbed one, in the log and outside."""

    def close(self) -> None:
        """Leaves the cluster. May be called again."""


NO_TABLES = (
    "the model holds no EmbeddingBagCollection and no EmbeddingCollection to serve, nor a fused one: it is trained as"
    " with TorchRec, without servers"
)


class NoTables:
    """An `EmbeddingBackend` for a model without tables. It joins no cluster.

    Args:
        trainer, trainers: as of a session.
    """

    def __init__(self, trainer: int, trainers: int, snapshot_every: int) -> None:
        self.trainer, self.trainers, self.snapshot_every, self.restarted = trainer, trainers, snapshot_every, False
        self.job: Any = SimpleNamespace(tables=(), table_groups=())
        self.step = 1  # there are none

    def loaded(self) -> None:
        """Does nothing: no table was loaded."""

    def flush(self) -> None:
        """Does nothing: nothing was sent."""

    def trained_on(self, samples: int) -> None:
        """Does nothing: without a cluster nobody asks for it."""

    def close(self) -> None:
        """Does nothing: no cluster was joined."""

    def __getattr__(self, name: str) -> Never:
        raise RuntimeError(f"`{name}`: {NO_TABLES}")
