"""What a job is: tables, optimizers, code parameters. Frozen, validated on construction, equal on every process.

Terms. A *slab* is the set of all tables whose records look alike (same dimension, same optimizer): their rows are laid
end to end in one row space, striped and stored together. Example: tables `a` (100 rows, dim 16) and `b` (50 rows,
dim 16) with the same optimizer make one slab of 150 rows; row 3 of `b` is row 103 of the slab. A *record* of a slab is
`dim` float32 weights followed by the optimizer's `state_floats(dim)` float32 values.

Does not read files or talk to anyone. The only module that reads environment variables (`Settings.from_environment`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_NUMBERS: dict[type, Callable[[str], object]] = {int: int, float: float}
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
WITHOUT_SPARE = ("survivor", "wait")  # who gets a lost slot when there is no spare
PROTECTIONS = ("parity", "none")
TRANSPORTS = ("sockets", "rpc")  # what carries messages between trainers and servers
WIRES = ("float32", "bfloat16")  # how rows and gradients travel between trainers and servers
CHAOS_EVENTS = ("kill-server", "kill-trainer", "kill-coordinator", "stop-server", "stop-trainer")
FIELD_SIZE = 256


def require(condition: bool, message: str) -> None:
    """Raises `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises unless `value` is an int with `least <= value <= most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"`{name}` must be at most {most}, got {value}")


def restarts() -> int:
    """How often torchrun has started the trainers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def record_folder() -> Path | None:
    """Where trainers note their steps: `torch-ecrec rehearse` says so to those that it starts."""
    folder = os.environ.get("TORCH_ECREC_RECORD")
    return Path(folder) if folder else None


@dataclass(frozen=True)
class OptimizerSpec:
    """The sparse optimizer of some tables.

    Args:
        kind: "sgd", "adagrad" (state per element) or "rowwise_adagrad" (one state value per row).
        lr: learning rate before any scheduler; the rate in force travels with every step.
        eps: added to the root of the Adagrad state.
    """

    kind: str = "sgd"
    lr: float = 0.01
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require(
            self.kind in OPTIMIZERS,
            f"unknown optimizer {self.kind!r}; expected one of {', '.join(OPTIMIZERS)}",
        )
        require(self.lr >= 0, f"`lr` must not be negative, got {self.lr}")
        require(self.eps >= 0, f"`eps` must not be negative, got {self.eps}")

    def state_floats(self, dim: int) -> int:
        """Number of float32 values of optimizer state in a record of `dim` weights."""
        return {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[self.kind]


@dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    Args:
        name: unique in the job.
        rows: number of rows, at least 1.
        dim: floats in a row, at least 1.
        low, high: rows that nobody loads start uniform in [low, high), seeded per row.
        optimizer: how a gradient changes a row.
    """

    name: str
    rows: int
    dim: int
    low: float
    high: float
    optimizer: OptimizerSpec = OptimizerSpec()

    def __post_init__(self) -> None:
        require(bool(self.name), "`name` of a table must not be empty")
        require_int(f"rows of table {self.name}", self.rows, 1)
        require_int(f"dim of table {self.name}", self.dim, 1)
        require(
            self.low <= self.high, f"table {self.name}: `low` must not exceed `high`, got {self.low} and {self.high}"
        )


@dataclass(frozen=True)
class CodeSpec:
    """How records are protected: `slots` shards; stripes of k data and r parity records on k + r different slots.

    With `protection="none"` there is no parity (r is 0 in effect): a baseline, where any loss is final.
    """

    slots: int = 3
    k: int = 2
    r: int = 1
    protection: str = "parity"

    def __post_init__(self) -> None:
        require(
            self.protection in PROTECTIONS,
            f"unknown protection {self.protection!r}; expected one of {', '.join(PROTECTIONS)}",
        )
        require_int("k", self.k, 1)
        require_int("r", self.r, 1)
        require_int("slots", self.slots, 1)
        require(self.k + self.r <= FIELD_SIZE, f"`k + r` must be at most {FIELD_SIZE}, got {self.k + self.r}")
        if self.protection == "parity":
            require(
                self.k + self.r <= self.slots,
                f"a stripe of k + r = {self.k + self.r} records needs as many slots, got {self.slots} servers:"
                " two members on one server would be lost together; use more servers or a smaller k or r",
            )

    @property
    def parities(self) -> int:
        """r, or 0 without protection."""
        return self.r if self.protection == "parity" else 0

    @property
    def members(self) -> int:
        """n: records in a stripe."""
        return self.k + self.parities


@dataclass(frozen=True)
class SlabSpec:
    """Tables whose records look alike, laid end to end. `first_rows[i]` is where table i starts."""

    dim: int
    optimizer: OptimizerSpec
    tables: tuple[TableSpec, ...]
    table_indices: tuple[int, ...]
    first_rows: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @property
    def width(self) -> int:
        """Floats in a record: weights, then optimizer state."""
        return self.dim + self.optimizer.state_floats(self.dim)

    @property
    def record_bytes(self) -> int:
        return 4 * self.width


@dataclass(frozen=True)
class JobSpec:
    """Everything that servers and trainers must agree on."""

    tables: tuple[TableSpec, ...]
    code: CodeSpec
    trainers: int
    seed: int = 0

    def __post_init__(self) -> None:
        require(len(self.tables) > 0, "a job needs at least one table")
        require_int("trainers", self.trainers, 1)
        require_int("seed", self.seed, 0)
        times = Counter(table.name for table in self.tables)
        twice = sorted(name for name in times if times[name] > 1)
        require(not twice, f"table names must be unique, got twice: {', '.join(twice)}")

    @cached_property
    def slabs(self) -> tuple[SlabSpec, ...]:
        """Tables grouped by record layout and optimizer, in order of first appearance."""
        groups: dict[tuple[int, OptimizerSpec], list[int]] = {}
        for index, table in enumerate(self.tables):
            groups.setdefault((table.dim, table.optimizer), []).append(index)
        slabs = []
        for (dim, optimizer), indices in groups.items():
            tables = tuple(self.tables[i] for i in indices)
            first_rows, total = [], 0
            for table in tables:
                first_rows.append(total)
                total += table.rows
            slabs.append(SlabSpec(dim, optimizer, tables, tuple(indices), tuple(first_rows)))
        return tuple(slabs)

    @cached_property
    def place_of_table(self) -> dict[str, tuple[int, int]]:
        """Table name -> (slab index, first row in the slab)."""
        return {
            table.name: (s, first)
            for s, slab in enumerate(self.slabs)
            for table, first in zip(slab.tables, slab.first_rows, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> JobSpec:
        """Inverse of `to_json`; raises `ValueError`, `TypeError` or `KeyError` on anything else."""
        tables = tuple(TableSpec(**{**t, "optimizer": OptimizerSpec(**t["optimizer"])}) for t in value["tables"])
        return JobSpec(tables=tables, code=CodeSpec(**value["code"]), trainers=value["trainers"], seed=value["seed"])

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical form: equal exactly when two jobs are."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Settings:
    """Time limits and sizes of one process. Seconds, bytes and steps as the names say.

    Args:
        join: "host:port" of the coordinator, or None.
        window_steps: how many steps a trainer may run ahead of what is acknowledged.
        call_timeout_s: a remote call not answered by then counts as unknown and is made again.
        give_up_s: a lookup or push without progress for so long ends with `ClusterUnavailable`.
        transport: "sockets", connections of our own, or "rpc", torch.distributed.rpc. The coordinator's counts,
            for all of its cluster.
        wire: "bfloat16" halves what lookups and pushes send: rows are rounded on their way to a trainer, and its
            gradients on their way back. Records stay float32, and recovery stays exact.
        heartbeat_s, lease_s: a member that the coordinator has not heard of for `lease_s` is taken for lost. When it
            wakes up, nothing that it did since counts; a server comes back as a spare.
        shared_memory_bytes: most of the memory that this process shares with others of its host, which then read large
            tensors there rather than from a socket; 0: none. Of the socket transport, on Linux.
        keep_freed_bytes: memory that this process has freed and keeps for the next step, at most; 0 leaves the C
            library's allocator as it is.
        rebuild_chunk_bytes: bytes of records that one background rebuild request asks for.
        rebuild_bytes_per_s: limit of what the rebuild of one slot reads, which is k bytes for each that was lost; 0 for
            none. What a request waits for counts, but is never delayed.
    """

    join: str | None = None
    window_steps: int = 2
    call_timeout_s: float = 10.0
    give_up_s: float = 120.0
    transport: str = "sockets"
    wire: str = "float32"
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    shared_memory_bytes: int = 2 << 30
    keep_freed_bytes: int = 1 << 30
    rebuild_chunk_bytes: int = 4 << 20
    rebuild_bytes_per_s: float = 100e6

    def __post_init__(self) -> None:
        require_int("window_steps", self.window_steps, 1)
        require(
            self.transport in TRANSPORTS, f"`transport` must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}"
        )
        require(self.wire in WIRES, f"`wire` must be one of {', '.join(WIRES)}, got {self.wire!r}")
        for name in ("call_timeout_s", "give_up_s", "heartbeat_s", "lease_s"):
            require(getattr(self, name) > 0, f"`{name}` must be positive, got {getattr(self, name)}")
        require_int("shared_memory_bytes", self.shared_memory_bytes, 0)
        require_int("keep_freed_bytes", self.keep_freed_bytes, 0)
        require_int("rebuild_chunk_bytes", self.rebuild_chunk_bytes, 1)
        require(
            self.rebuild_bytes_per_s >= 0, f"`rebuild_bytes_per_s` must not be negative, got {self.rebuild_bytes_per_s}"
        )

    @staticmethod
    def from_environment(**overrides: Any) -> Settings:
        """Reads TORCH_ECREC_<NAME> for every field (e.g. TORCH_ECREC_JOIN); an explicit argument wins."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(Settings):
            text = os.environ.get(f"TORCH_ECREC_{field.name.upper()}")
            if text is not None and field.name not in overrides:
                try:
                    values[field.name] = _NUMBERS.get(type(field.default), str)(text)
                except ValueError:
                    raise ValueError(f"TORCH_ECREC_{field.name.upper()} must be a number, got {text!r}") from None
        return Settings(**{**values, **overrides})

    def environment(self) -> dict[str, str]:
        """What gives another process the same settings, but for `join`: inverse of `from_environment`."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "join"]
        return {f"TORCH_ECREC_{name.upper()}": str(getattr(self, name)) for name in names}
