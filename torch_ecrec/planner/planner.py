"""TorchRec's `EmbeddingShardingPlanner` with erasure-coded servers beside the trainers.

    planner = EmbeddingShardingPlanner(
        servers=Servers(CodeSpec(slots=4, k=2, r=1), memory_bytes=64 << 30),
        constraints={"country": ParameterConstraints(sharding_types=["row_wise"])},
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    model = torch_ecrec.DistributedModelParallel(model, plan=plan, unprotected="snapshot")

Which tables it leaves to TorchRec is `unprotected`'s business, as in `DistributedModelParallel`: with "refuse", those
whose constraints name TorchRec's sharding types; else the cheapest of all types is taken for tables without such a
constraint. By TorchRec's estimates a table in the trainers is nearly always faster than one on servers, so that what
fits there is left to it: say what must be protected.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torchrec.distributed.planner import planners
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import (
    Enumerator as AnyEnumerator,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torch_ecrec.compat.torchrec import set_parts, topology_of
from torch_ecrec.nn.coverage import OURS, chooses
from torch_ecrec.nn.sharder import ServedSharding
from torch_ecrec.planner.enumerator import Enumerator, costs_of, is_ours, total
from torch_ecrec.planner.estimates import Servers, fit_of
from torch_ecrec.planner.report import Report
from torch_ecrec.runtime.checks import plain, plain_copy, require, require_kind, shown, take_float, take_int, take_str

log = logging.getLogger(__name__)

_NUMBERS = ("pooling_factors", "num_poolings", "batch_sizes")  # lists of `ParameterConstraints`


class ServersPartitioner(Partitioner):
    """Refuses plans for which the servers lack memory, or that split a collection. Another one places the rest."""

    def __init__(self, inner: Partitioner, enumerator: Enumerator) -> None:
        self._inner, self._enumerator = inner, enumerator

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Assigns devices to the plan, as TorchRec's partitioners do. Raises PlannerError if it does not fit."""
        sides: dict[str, set[bool]] = {}
        for option in proposal:
            sides.setdefault(option.path, set()).add(is_ours(option))
        divided = sorted(path for path, found in sides.items() if len(found) > 1)
        if divided:
            raise PlannerError(f"{', '.join(divided)}: a collection is sharded as a whole", PlannerErrorType.PARTITION)
        servers = self._enumerator.servers
        served = costs_of(proposal, self._enumerator.served)
        if served and servers.memory_bytes is not None:
            needed = fit_of([one.table for one in served.values()], total(served), servers).needed
            if needed > servers.memory_bytes:
                raise PlannerError(
                    f"{', '.join(served)} take {needed} bytes of the server of a slot, which has"
                    f" {servers.memory_bytes}: give it more (`Servers(memory_bytes=...)`), take more slots or a larger"
                    f" k, {'' if servers.tier else 'put records on a disk (`Servers(tier=True)`), '}or leave tables to"
                    " TorchRec by constraints",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )
        found: list[ShardingOption] = self._inner.partition(proposal, storage_constraint)
        return found


class SidesProposer(Proposer):
    """Moves collections to the servers, the largest first, and after each proposes TorchRec's choices of the rest."""

    def __init__(self) -> None:
        self._stages: list[GreedyProposer] = []

    def load(self, search_space: list[ShardingOption], enumerator: AnyEnumerator | None = None) -> None:
        sizes: dict[str, dict[str, int]] = {}
        for option in search_space:
            sizes.setdefault(option.path, {})[option.name] = option.tensor.numel() * option.tensor.element_size()
        either = {path for path in sizes if len({is_ours(o) for o in search_space if o.path == path}) > 1}
        order = sorted(either, key=lambda path: -sum(sizes[path].values()))
        self._stages = []
        for moved in range(len(order) + 1):
            there = set(order[:moved])
            stage = GreedyProposer()
            stage.load([o for o in search_space if o.path not in either or is_ours(o) == (o.path in there)], enumerator)
            self._stages.append(stage)

    def propose(self) -> list[ShardingOption] | None:
        while self._stages:
            proposal: list[ShardingOption] | None = self._stages[0].propose()
            if proposal:
                return proposal
            self._stages.pop(0)
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self._stages[0].feedback(partitionable, plan, perf_rating, storage_constraint)


def _plain_limits(table: str, given: ParameterConstraints) -> ParameterConstraints:
    """Returns a copy with Python's own numbers.

    Raises:
        TypeError, ValueError: what says how many ids there are is no number.
    """
    require_kind(f"constraint of table {table}", given, ParameterConstraints)
    made = copy.copy(plain_copy(given, [field.name for field in dataclasses.fields(given)]))
    found = vars(made)
    for name in _NUMBERS:
        if getattr(found[name], "ndim", None) == 1:
            found[name] = found[name].tolist()
        if found[name] is not None and not isinstance(found[name], (list, tuple)):
            raise TypeError(f"`{name} of table {table}` must be a list of numbers, got {shown(found[name])}")
        for number in found[name] or ():
            finite = 0 <= take_float(f"{name} of table {table}", number) < math.inf
            require(finite, f"`{name} of table {table}` are {found[name]}")
    lengths = {name: len(found[name]) for name in _NUMBERS if found[name]}
    if len(set(lengths.values())) > 1:  # by default TorchRec takes one pooling factor
        raise ValueError(
            f"the constraint of table {table} has {', '.join(f'{n} `{name}`' for name, n in lengths.items())}: pass"
            " each of them with one number for each feature of the table"
        )
    return made


class EmbeddingShardingPlanner(planners.EmbeddingShardingPlanner):
    """A drop-in for TorchRec's planner.

    Args:
        topology: as of TorchRec's.
        batch_size: as of TorchRec's.
        servers: those that tables may be put on.
        unprotected: "refuse": only constraints leave tables to TorchRec. "snapshot", "allow" or "reset", as then given
            to `DistributedModelParallel`: the cheapest is taken.
        proposer: as of TorchRec's.
        partitioner: as of TorchRec's.
        stats: as of TorchRec's.
        constraints: as of TorchRec's. They may have the sharding types "erasure_coded", "erasure_coded_table_wise" and
            "erasure_coded_row_wise": the last two say how the slots share the table.
        callbacks: as of TorchRec's.
        **more: what else TorchRec's takes, but for `enumerator`.

    Raises:
        TypeError, ValueError: an argument is of another kind, or lists of a constraint have different lengths.
        ValueError: constraints that divide a collection, from `plan`; a plan with nothing on the servers.
        PlannerError: nothing fits.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        *,
        servers: Servers | None = None,
        unprotected: str = "refuse",
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        **more: Any,
    ) -> None:
        usual: list[Proposer] = [
            SidesProposer(),
            GridSearchProposer(),
            GreedyProposer(),
            GreedyProposer(use_depth=False),
            UniformProposer(),
        ]
        if servers is not None:
            require_kind("servers", servers, Servers)
        if topology is not None:
            require_kind("topology", topology, Topology)
        if not isinstance(constraints, Mapping | None):
            raise TypeError(f"`constraints` must be a dict, by names of tables, got {shown(constraints)}")
        batch_size = None if batch_size is None else take_int("batch_size", batch_size, 0)
        limits = None if constraints is None else {t: _plain_limits(t, one) for t, one in constraints.items()}
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            proposer=proposer or usual,
            stats=stats if stats is not None else [Report()],
            constraints=limits,
            callbacks=callbacks,
            **{name: plain(value) for name, value in more.items()},
        )
        options = self._served = Enumerator(
            topology_of(self),
            batch_size or BATCH_SIZE,
            limits,
            servers or Servers(),
            take_str("unprotected", unprotected),
        )
        set_parts(self, options, ServersPartitioner(partitioner or GreedyPerfPartitioner(), options))

    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plans as TorchRec's planner does, with at least one table on the servers, if there is any."""
        plan: ShardingPlan = super().plan(module, list(sharders))
        if unknown := self._served.unknown:  # TorchRec passes over them: what was to be protected may not be
            log.warning(
                "constraints name tables that the model, as it is sharded, does not have: %s; they change nothing",
                ", ".join(unknown),
            )
        served = self._served.served
        for path, entries in plan.plan.items():
            for table, entry in cast(dict[str, Any], entries).items():
                if entry.sharding_type in OURS:
                    bag = served[f"{path}.{table}"].table.pooling_factor
                    of = self._served.servers.code
                    cast(Any, entries)[table] = ServedSharding(**vars(entry), pooling_factor=bag, code=of)
        if plan.plan and not chooses(plan):
            raise ValueError(
                "the plan leaves every table to TorchRec, and protects nothing. Name what must be protected,"
                ' `ParameterConstraints(sharding_types=["erasure_coded"])`, or use TorchRec\'s planner and model'
            )
        return plan
