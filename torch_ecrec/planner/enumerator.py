"""Lists the options of a planner: TorchRec's ways to shard a table, and ours beside them.

Our option has a sharding type of `OURS` and TorchRec's name for kernels that are not FBGEMM's. It has one shard
for each trainer, of the rows that are the trainer's in a state dict (`state_dicts/shares.py`); its storage is what is
on its way in that trainer, and its time is that trainer's messages and pooling. What is on the servers is no
trainer's: `Served` has it, and `report.py` shows it.

A collection is sharded as a whole, so all its tables are on the servers or none is (`sides_of`). Where constraints say
otherwise for two tables of one, they are refused.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.shard_estimators import get_num_poolings
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    Perf,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torch_ecrec.compat.torchrec import ListedEnumerator
from torch_ecrec.layout.placing import are_long, are_long_in_parts
from torch_ecrec.nn.coverage import ERASURE_CODED, OURS, UNPROTECTED, coverage_of, is_inside, several_sides
from torch_ecrec.nn.outputs import as_output_dtype
from torch_ecrec.nn.sharder import all_table_specs, job_names, output_dtypes
from torch_ecrec.planner.estimates import CALL_MS, Cost, Servers, cost_of, different_slots
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import JobSpec, TableSpec
from torch_ecrec.state_dicts.unsharded import configs_of

KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value


@dataclass(frozen=True)
class Served:
    """A table as the servers would host it, and the dtype of its embeddings."""

    table: TableSpec
    cost: Cost
    output: torch.dtype = torch.float32


@dataclass(frozen=True)
class _Table:
    """A table that can be served.

    Args:
        spec: of it, wherever its rows lie.
        output: the dtype of its embeddings.
        weighted: ids of its bags have weights.
        learned: which get gradients, so that no slot pools.
    """

    spec: TableSpec
    output: torch.dtype
    weighted: bool
    learned: bool


class Enumerator(ListedEnumerator):
    """TorchRec's enumerator, with a sharding type of ours for every table that the servers serve.

    Args:
        topology, batch_size, constraints: as of TorchRec's.
        servers: what they are.
        unprotected: "refuse": TorchRec's types are for tables whose constraints name them; else for all.

    Attributes:
        served: by `fqn` of an option: every table that may be on the servers.
        unknown: tables of the constraints that no option is of.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None,
        servers: Servers,
        unprotected: str,
    ) -> None:
        require(
            unprotected in UNPROTECTED,
            f"`unprotected` must be one of {', '.join(UNPROTECTED)}, got {unprotected!r}",
        )
        super().__init__(topology, batch_size, dict(constraints or {}))
        self._devices, self._servers, self._unprotected = topology, servers, unprotected
        self._limits = dict(constraints or {})
        self.served: dict[str, Served] = {}
        self.unknown: list[str] = []

    @property
    def servers(self) -> Servers:
        """The servers that were given."""
        return self._servers

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Returns all options of all tables, with their costs.

        Raises:
            ValueError: constraints put tables of one collection on both sides, or one on neither.
        """
        theirs = super().enumerate(module, sharders)
        self.unknown = sorted(set(self._limits) - {option.name for option in theirs})
        tables = self._tables(module, sharders)
        ours: list[ShardingOption] = []
        self.served = {}
        for option in theirs:
            if option.fqn in tables and option.fqn not in self.served:
                spec, output = tables[option.fqn].spec, tables[option.fqn].output
                if option.output_dtype is not None:  # a constraint's, which the plan will have
                    output = as_output_dtype(option.output_dtype)
                sharding, bag = OURS[self._type_of(option.name)], self._bag(option)
                spec = dataclasses.replace(spec, sharding=sharding, pooling_factor=bag)
                self.served[option.fqn] = Served(spec, Cost(), output)
                ours.append(self._option(option))
        self._set_costs({option.fqn: option for option in ours}, tables)
        allowed = [
            option
            for option in [*theirs, *ours]
            if is_ours(option) in self._sides_of_table(option.name, option.fqn in self.served)
        ]
        sides = sides_of(allowed)
        kept = [option for option in allowed if is_ours(option) in sides[option.path]]
        self.populate_estimates([option for option in kept if is_ours(option)])
        return kept

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimates storage and time of some options, in place."""
        super().populate_estimates([option for option in sharding_options if not is_ours(option)])
        for option in sharding_options:
            if is_ours(option):
                self._estimate(option)

    def types_for(self, name: str, allowed: list[str], sharder_key: str) -> list[str]:
        """Returns TorchRec's types. A table for the servers gets one, too: ours are made from it."""
        types = (self._limits.get(name) or ParameterConstraints()).sharding_types
        if types and all(one in OURS for one in types):
            return allowed[:1]
        return super().types_for(name, allowed, sharder_key)

    def _sides_of_table(self, name: str, served: bool) -> set[bool]:
        """Returns where a table may be. True: on the servers; False: with TorchRec."""
        if not served:
            return {False}
        types = (self._limits.get(name) or ParameterConstraints()).sharding_types
        if types:
            return {sharding_type in OURS for sharding_type in types}
        return {True} if self._unprotected == "refuse" else {True, False}

    def _type_of(self, name: str) -> str:
        """Returns which of our sharding types a table has on the servers: the first that its constraint names."""
        types = (self._limits.get(name) or ParameterConstraints()).sharding_types or ()
        return next((one for one in types if one in OURS), ERASURE_CODED)

    @staticmethod
    def _tables(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> dict[str, _Table]:
        """Returns the tables that can be served, by `fqn` of their options.

        The path in it is that of what TorchRec shards: the collection or its wrapper.
        """
        covered = coverage_of(module, None, sharders)
        names = job_names(covered.served)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tables without an optimizer: the model says so
            specs = {spec.name: spec for spec in all_table_specs(module, covered.served, names, sharders)}
        outputs = output_dtypes(module, covered.served, sharders)
        kinds = {sharder.module_type for sharder in sharders}
        shards = [path for path, child in module.named_modules() if type(child) in kinds]
        found = {}
        for path, collection in covered.served.items():
            around = min((p for p in shards if is_inside(path, [p])), key=len, default=path)
            weighted = isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
            of_tables = {id(parameter) for parameter in collection.parameters()}
            others = [p for p in module.get_submodule(around).parameters() if id(p) not in of_tables]
            learned = weighted and any(parameter.requires_grad for parameter in others)
            for config in configs_of(collection):
                spec, output = specs[names[path][config.name]], outputs[path][config.name]
                found[f"{around}.{config.name}"] = _Table(spec, output, weighted, learned)
        return found

    def _bag(self, option: ShardingOption) -> float:
        """Returns how many ids a bag has, on average over the features of a table."""
        lengths = option.input_lengths if option.is_pooled else [1.0]
        return float(sum(lengths) / max(1, len(lengths)))

    def _bags(self, option: ShardingOption) -> list[float]:
        """Returns how many bags of each feature a batch of one trainer has."""
        limits = self._limits.get(option.name)
        sizes = limits.batch_sizes if limits and limits.batch_sizes else [option.batch_size] * option.num_inputs
        return [n * size for n, size in zip(get_num_poolings(self._limits, option), sizes, strict=True)]

    def _batch(self, option: ShardingOption) -> tuple[float, float]:
        """Returns the numbers of ids and of bags in a batch of one trainer."""
        bags = self._bags(option)
        return sum(x * count for x, count in zip(option.input_lengths, bags, strict=True)), sum(bags)

    def _sums(self, option: ShardingOption, slots: int) -> float:
        """Returns how many sums the slots of a table make of the bags of a batch: a bag has one from each with ids."""
        bags = self._bags(option)
        return sum(count * different_slots(slots, x) for x, count in zip(option.input_lengths, bags, strict=True))

    def _set_costs(self, options: Mapping[str, ShardingOption], tables: Mapping[str, _Table]) -> None:
        """Sets what each table costs if all are on the servers: that decides whether a slot can pool its bags."""
        if not options:
            return
        specs = tuple(self.served[fqn].table for fqn in options)
        job = JobSpec(tables=specs, code=self._servers.code, trainers=self.world_size)
        pooled = self._pooled(options, tables, job)
        for fqn, option in options.items():
            one, (ids, _) = self.served[fqn], self._batch(option)
            sums = self._sums(option, len(job.slots_of(one.table.name))) if fqn in pooled else None
            cost = cost_of(one.table, ids, self.world_size, self._servers, sums, tables[fqn].weighted)
            self.served[fqn] = dataclasses.replace(one, cost=cost)

    def _pooled(
        self, options: Mapping[str, ShardingOption], tables: Mapping[str, _Table], job: JobSpec
    ) -> Collection[str]:
        """Returns those whose bags slots pool: what `nn/slices.py` decides for each batch, of the average one.

        It does so for all whole tables of a collection and a table group together, and for each of the others.
        """
        pooling = self._servers.pooling if self._servers.wire == "float32" else "rows"
        slices: dict[tuple[str, int], list[str]] = {}
        found: list[str] = []
        for fqn, option in options.items():
            table = self.served[fqn].table
            if not option.is_pooled or tables[fqn].learned or pooling == "rows":
                continue
            if job.home_of(table.name) is not None:
                slices.setdefault((option.path, job.place_of_table[table.name][0]), []).append(fqn)
                continue
            ids, bags = self._batch(option)
            if pooling == "parts" and are_long_in_parts(ids, table.rows, bags, len(job.slots_of(table.name))):
                found.append(fqn)
        for together in slices.values():
            ids, bags = map(sum, zip(*(self._batch(options[fqn]) for fqn in together), strict=True))
            if are_long(ids, bags):
                found += together
        return found

    def _option(self, like: ShardingOption) -> ShardingOption:
        sizes, offsets = calculate_shard_sizes_and_offsets(
            tensor=like.tensor,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            sharding_type=ShardingType.ROW_WISE.value,
        )
        return ShardingOption(
            name=like.name,
            tensor=like.tensor,
            module=like.module,
            input_lengths=like.input_lengths,
            batch_size=like.batch_size,
            sharding_type=self._type_of(like.name),
            partition_by=PartitionByType.UNIFORM.value,
            compute_kernel=KERNEL,
            shards=[Shard(size=size, offset=offset) for size, offset in zip(sizes, offsets, strict=True)],
            stochastic_rounding=like.stochastic_rounding,
            bounds_check_mode=like.bounds_check_mode,
            is_pooled=like.is_pooled,
            feature_names=like.feature_names,
            output_dtype=like.output_dtype,
        )

    def _estimate(self, option: ShardingOption) -> None:
        """Estimates the memory in each trainer, and the time of a step."""
        cost, topology, trainers = self.served[option.fqn].cost, self._devices, self.world_size
        (ids, _), width = self._batch(option), 4 * option.tensor.shape[1]
        outputs = option.batch_size * option.num_inputs if option.is_pooled else ids
        number = self.served[option.fqn].output.itemsize
        pooled = 2 * math.ceil(outputs) * number * option.tensor.shape[1]  # and its gradients
        on_host = topology.compute_device == "cpu"
        storage = Storage(hbm=0 if on_host else pooled, ddr=cost.trainer + (pooled if on_host else 0))
        calls = CALL_MS * self._servers.code.slots / len(self.served)  # one for all tables
        pooling = ids * width / topology.ddr_mem_bw
        perf = Perf(
            fwd_compute=pooling,
            fwd_comms=calls + cost.lookups / trainers / topology.inter_host_bw,
            bwd_compute=pooling * topology.bwd_compute_multiplier,
            bwd_comms=calls + cost.pushes / trainers / topology.inter_host_bw,
        )
        for shard in option.shards:
            shard.storage, shard.perf = storage, perf


def is_ours(option: ShardingOption) -> bool:
    """Returns whether an option puts its table on the servers."""
    return bool(option.sharding_type in OURS)


def sides_of(options: Sequence[ShardingOption]) -> dict[str, set[bool]]:
    """Returns, by path of a collection, where all its tables may be: on the servers (True), with TorchRec (False).

    Raises:
        ValueError: neither: names its tables, and how to split it.
    """
    tables: dict[str, dict[str, set[bool]]] = {}
    for option in options:
        tables.setdefault(option.path, {}).setdefault(option.name, set()).add(is_ours(option))
    sides: dict[str, set[bool]] = {}
    for path, of_table in tables.items():
        sides[path] = set.intersection(*of_table.values())
        if not sides[path]:
            ours = [name for name, found in of_table.items() if True in found]
            raise ValueError(several_sides(path, ours, [name for name in of_table if name not in ours]))
    return sides


def costs_of(plan: Sequence[ShardingOption], served: Mapping[str, Served]) -> dict[str, Served]:
    """Returns, by `fqn`, the tables that a plan puts on the servers."""
    return {option.fqn: served[option.fqn] for option in plan if is_ours(option)}


def total(served: Mapping[str, Served]) -> Cost:
    """Returns the costs of all tables together."""
    return sum((one.cost for one in served.values()), Cost())
