"""The specification of a job: tables, optimizers, code parameters. Frozen, validated, equal on every process.

Terms. A *table group* is the set of all tables whose records look alike (same dimension, dtype and optimizer): their
rows are laid end to end in one row space, striped and stored together. Example: tables `a` (100 rows, dim 16) and `b`
(50 rows, dim 16) with the same optimizer make one table group of 150 rows; row 3 of `b` is row 103 of the table group.

Does not read files or talk to anyone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from torch_ecrec.layout.placing import SHARDINGS, Piece, Wanted, place
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.schema import ITEM_BYTES, Schema
from torch_ecrec.runtime.checks import plain, require, require_int, require_kind, take_fields, take_float, take_str

if TYPE_CHECKING:  # they load Numba, which takes a second: not to read a command line, or to end while starting
    from torch_ecrec.layout.stripes import Layout
    from torch_ecrec.records.initial import InitialRecords
    from torch_ecrec.records.optimizer import SparseOptimizer

FIELD_SIZE = 256  # elements of the code's field, so members of a stripe at most; `codec.field` has its own
PROTECTIONS = ("parity", "none")
# More than any job has: a number that is read somewhere is compared before anything of its size is made.
ROWS_MOST, DIM_MOST, SLOTS_MOST, TRAINERS_MOST = 1 << 48, 1 << 24, 10_000, 1 << 20


@dataclass(frozen=True, init=False)
class OptimizerSpec:
    """The sparse optimizer of some tables, and its hyperparameters.

    Args:
        kind: one of `torch_ecrec.records.optimizers.NAMES`, say "sgd" or "adam".
        lr: learning rate before any scheduler; the rate in force travels with every step, as the iteration does.
        max_gradient: trainers clamp each number of a feature's gradient to plus or minus this before it becomes one of
            rows, as FBGEMM's gradient clipping does; None: they do not.
        **fixed: its other hyperparameters, say `eps`; FBGEMM's defaults otherwise.

    Raises:
        ValueError: no such optimizer, one that has no such hyperparameter, or a value that it cannot have.
    """

    kind: str
    lr: float
    fixed: tuple[tuple[str, float], ...]
    max_gradient: float | None

    def __init__(self, kind: str = "sgd", lr: float = 0.01, max_gradient: float | None = None, **fixed: float) -> None:
        kind = take_str("kind", kind)
        complete = optimizer(kind).complete(fixed)
        lr = take_float("lr", lr)
        require(lr >= 0, f"`lr` must not be negative, got {lr}")
        require(lr < math.inf, f"`lr` must be finite, got {lr}")
        if max_gradient is not None:
            max_gradient = take_float("max_gradient", max_gradient)
            require(max_gradient > 0, f"`max_gradient` must be positive, got {max_gradient}")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "lr", lr)
        object.__setattr__(self, "fixed", tuple(complete.items()))
        object.__setattr__(self, "max_gradient", max_gradient)

    @property
    def optimizer(self) -> SparseOptimizer:
        """The optimizer that the servers run for these tables."""
        return optimizer(self.kind)


@dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    Args:
        name: unique in the job.
        rows: number of rows, at least 1.
        dim: floats in a row, at least 1.
        low, high: rows that nobody loads start uniform in [low, high), seeded per row.
        optimizer: how a gradient changes a row.
        weights: what servers keep them as, "float32", "float16" or "bfloat16"; all else is float32.
        sharding: how its rows go to slots, "auto", "table_wise" or "row_wise": see `layout/placing.py`.
        features: how many look into it, at least 1.
        pooling_factor: ids of a bag, on average, as far as it is known; 1 otherwise.
    """

    name: str
    rows: int
    dim: int
    low: float
    high: float
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    weights: str = "float32"
    sharding: str = "row_wise"
    features: int = 1
    pooling_factor: float = 1.0

    def __post_init__(self) -> None:
        take_fields(self, f" of table {plain(self.name)}")
        require(bool(self.name), "`name` of a table must not be empty")
        require(self.weights in ITEM_BYTES, f"`weights` must be one of {', '.join(ITEM_BYTES)}, got {self.weights!r}")
        require(self.sharding in SHARDINGS, f"`sharding` must be one of {', '.join(SHARDINGS)}, got {self.sharding!r}")
        require_int(f"features of table {self.name}", self.features, 1)
        factor = self.pooling_factor
        require(
            0 <= factor < math.inf, f"`pooling_factor of table {self.name}` must be finite, at least 0, got {factor}"
        )
        require_int(f"rows of table {self.name}", self.rows, 1, ROWS_MOST)
        require_int(f"dim of table {self.name}", self.dim, 1, DIM_MOST)
        for name in ("low", "high"):
            bound = getattr(self, name)
            require(math.isfinite(bound), f"`{name} of table {self.name}` must be finite, got {bound}")
        require(
            self.low <= self.high, f"table {self.name}: `low` must not exceed `high`, got {self.low} and {self.high}"
        )

    @property
    def wanted(self) -> Wanted:
        """The table as it is placed."""
        return Wanted(self.rows, self.sharding, self.pooling_factor, self.features * self.dim)

    def unplaced(self) -> TableSpec:
        """Returns what the table is, wherever its rows lie."""
        return dataclasses.replace(self, sharding="row_wise", features=1, pooling_factor=1.0)


@dataclass(frozen=True)
class CodeSpec:
    """How records are protected: stripes of k data and r parity records, on k + r different ones of `slots` slots.

    With `protection="none"` there is no parity (r is 0 in effect): a baseline, where any loss is final.
    """

    slots: int = 3
    k: int = 2
    r: int = 1
    protection: str = "parity"

    def __post_init__(self) -> None:
        take_fields(self)
        require(
            self.protection in PROTECTIONS,
            f"unknown protection {self.protection!r}; expected one of {', '.join(PROTECTIONS)}",
        )
        require_int("k", self.k, 1)
        require_int("r", self.r, 1)
        require_int("slots", self.slots, 1, SLOTS_MOST)
        require(self.k + self.r <= FIELD_SIZE, f"`k + r` must be at most {FIELD_SIZE}, got {self.k + self.r}")
        if self.protection == "parity":
            require(
                self.k + self.r <= self.slots,
                f"a stripe of k + r = {self.k + self.r} records needs as many slots, got {self.slots} servers:"
                " two members on one server would be lost together; use more servers or a smaller k or r",
            )

    @property
    def words(self) -> str:
        """What it is, for people."""
        return f"{self.slots} slots, k = {self.k}, r = {self.parities}"

    @property
    def parities(self) -> int:
        """The parity records in a stripe: r, or 0 without protection."""
        return self.r if self.protection == "parity" else 0

    @property
    def members(self) -> int:
        """The records in a stripe: n = k + r."""
        return self.k + self.parities


@dataclass(frozen=True)
class TableGroup:
    """Tables whose records look alike, laid end to end. Table i starts at row `first_rows[i]`."""

    dim: int
    optimizer: OptimizerSpec
    tables: tuple[TableSpec, ...]
    table_indices: tuple[int, ...]
    first_rows: tuple[int, ...]
    weights: str = "float32"

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.tables)

    @cached_property
    def schema(self) -> Schema:
        """The layout of the table group's records."""
        return self.optimizer.optimizer.schema(self.dim, self.weights)

    def initial(self, seed: int) -> InitialRecords:
        """Returns the table group's records before anything was loaded or trained."""
        from torch_ecrec.records.initial import InitialRecords

        return InitialRecords(
            self.schema,
            seed,
            self.first_rows,
            tuple(table.low for table in self.tables),
            tuple(table.high for table in self.tables),
            self.table_indices,
        )


@dataclass(frozen=True)
class JobSpec:
    """The job: all that its servers and trainers must agree on."""

    tables: tuple[TableSpec, ...]
    code: CodeSpec
    trainers: int
    seed: int = 0

    def __post_init__(self) -> None:
        take_fields(self)
        require_kind("code", self.code, CodeSpec)
        require(len(self.tables) > 0, "a job needs at least one table")
        require_int("trainers", self.trainers, 1, TRAINERS_MOST)
        require_int("seed", self.seed, 0)
        times = Counter(table.name for table in self.tables)
        twice = sorted(name for name in times if times[name] > 1)
        require(not twice, f"table names must be unique, got twice: {', '.join(twice)}")

    @cached_property
    def table_groups(self) -> tuple[TableGroup, ...]:
        """The table groups: tables grouped by record layout and optimizer, in order of first appearance."""
        groups: dict[tuple[int, OptimizerSpec, str], list[int]] = {}
        for index, table in enumerate(self.tables):
            groups.setdefault((table.dim, table.optimizer, table.weights), []).append(index)
        table_groups = []
        for (dim, spec, weights), indices in groups.items():
            tables = tuple(self.tables[i] for i in indices)
            first_rows, total = [], 0
            for table in tables:
                first_rows.append(total)
                total += table.rows
            table_groups.append(TableGroup(dim, spec, tables, tuple(indices), tuple(first_rows), weights))
        return tuple(table_groups)

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Where the rows of each table lie, in the order of `tables`; () for those of a table group that is not
        placed."""
        wanted = [[table.wanted for table in table_group.tables] for table_group in self.table_groups]
        found: list[tuple[Piece, ...]] = [()] * len(self.tables)
        for table_group, placed in zip(self.table_groups, place(wanted, self.code.slots), strict=True):
            for index, pieces in zip(table_group.table_indices, placed, strict=True):
                found[index] = pieces
        return tuple(found)

    def home_of(self, table: str) -> tuple[int, int] | None:
        """Returns the slot that has all rows of a table, and the position of the first there, whom the others follow.

        Returns:
            None if several slots have some.
        """
        table_group, first, end = self.rows_of_table(table)
        return self.layouts[table_group].home_of(first, end - first)

    def slots_of(self, table: str) -> tuple[int, ...]:
        """Returns the slots that have rows of a table, ascending; of a tiny one that is dealt, those that may."""
        if (home := self.home_of(table)) is not None:
            return (home[0],)
        some = {slot for piece in self.pieces[self._index_of[table]] for slot in piece.slots}
        return tuple(sorted(some or range(self.code.slots)))

    def rows_of_table(self, table: str) -> tuple[int, int, int]:
        """Returns the table group of a table, and its first row there and the one behind its last."""
        table_group, first = self.place_of_table[table]
        return table_group, first, first + self.tables[self._index_of[table]].rows

    @cached_property
    def _index_of(self) -> dict[str, int]:
        """The place of each table in `tables`, by name."""
        return {table.name: index for index, table in enumerate(self.tables)}

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each table group."""
        from torch_ecrec.layout.stripes import layout_of

        code = self.code
        return tuple(
            layout_of(
                code.slots,
                code.k,
                code.parities,
                table_group.rows,
                tuple(itertools.chain.from_iterable(self.pieces[index] for index in table_group.table_indices)),
            )
            for table_group in self.table_groups
        )

    @cached_property
    def place_of_table(self) -> dict[str, tuple[int, int]]:
        """The table group index of each table, by name, and its first row in the table group."""
        return {
            table.name: (s, first)
            for s, table_group in enumerate(self.table_groups)
            for table, first in zip(table_group.tables, table_group.first_rows, strict=True)
        }

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @staticmethod
    def from_json(value: dict[str, Any]) -> JobSpec:
        """Inverts `to_json`. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        tables = tuple(
            TableSpec(**{**t, "optimizer": OptimizerSpec(o["kind"], o["lr"], o["max_gradient"], **dict(o["fixed"]))})
            for t in value["tables"]
            for o in [t["optimizer"]]
        )
        return JobSpec(tables=tables, code=CodeSpec(**value["code"]), trainers=value["trainers"], seed=value["seed"])

    def difference(self, other: JobSpec, placed: bool = True) -> str:
        """Returns why a process of the other job can neither train this one nor resume from its checkpoints.

        Args:
            placed: tables must be placed alike, too, as they must to train.

        Returns:
            The first difference, as said of this one; "" if there is none. Slots and code may be others.
        """
        mine, theirs = (
            {table.name: table if placed else table.unplaced() for table in one.tables} for one in (self, other)
        )
        names, more = [name for name in mine if name not in theirs], [name for name in theirs if name not in mine]
        changed = [name for name, table in mine.items() if theirs.get(name, table) != table]
        if names or more:
            return f"it has tables {_some(names)} that this job lacks, and lacks {_some(more)}"
        if changed:
            first, others = changed[0], f"; {len(changed) - 1} more tables differ" if changed[1:] else ""
            return f"table {first} differs: {_differences(mine[first], theirs[first])}{others}"
        if list(mine) != list(theirs):
            return "its tables are in another order"
        if self.trainers != other.trainers:
            return f"it is of {self.trainers} trainers, this job has {other.trainers}"
        return f"it has seed {self.seed}, this job has {other.seed}" if self.seed != other.seed else ""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the canonical form. Two jobs are equal exactly when their digests are."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _some(names: list[str]) -> str:
    return f"[{', '.join(map(repr, names[:8]))}{', ...' if names[8:] else ''}]"


def _differences(there: TableSpec, here: TableSpec) -> str:
    """Lists the fields in which a table differs between two jobs."""
    pairs = [(field.name, getattr(there, field.name), getattr(here, field.name)) for field in dataclasses.fields(there)]
    found = [f"`{name}` is {a!r} there, {b!r} here" for name, a, b in pairs if a != b and name != "optimizer"]
    theirs, ours = (
        {"kind": one.kind, "lr": one.lr, "max_gradient": one.max_gradient, **dict(one.fixed)}
        for one in (there.optimizer, here.optimizer)
    )
    for name in dict.fromkeys([*theirs, *ours]):
        a, b = theirs.get(name), ours.get(name)
        if a != b:
            found.append(f"`{name}` of its optimizer is {a!r} there, {b!r} here")
    return "; ".join(found)
