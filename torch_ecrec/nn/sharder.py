"""Turns TorchRec's collections (of bags, of sequences) into tables of a job, and into their sharded form.

Optimizers are given the TorchRec way (`table_optimizers.py`); a fused collection brings its own.

First weights. A module on the meta device whose table has no `init_fn` is initialised by the servers, uniform between
the config's bounds, seeded per row. One with an `init_fn`, and one that holds weights, is loaded by trainer 0 in
chunks. An `init_fn` runs on the CPU under a random state seeded by the job's seed and the table's name, one table at a
time.

Of a given plan three things count: wishes for a table, as if `fused_params` had them (`ParameterConstraints(
output_dtype=DataType.FP16)`); how one of our sharding types places it on the slots, and how many ids its bags have
(`ServedSharding`); and that TorchRec would leave a table's step to the script's own optimizer, of which the user is
told. TorchRec's sharding types, ranks, kernels and caches say nothing: they are of rows in the trainers.

Does not decide where rows live and does not step: see `layout`, and `step.py`.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from torch_ecrec.compat.torch import attached_optimizers
from torch_ecrec.compat.torchrec import collection_of
from torch_ecrec.nn.bags import ErasureCodedEmbeddingBagCollection, ErasureCodedFusedEmbeddingBagCollection
from torch_ecrec.nn.coverage import ERASURE_CODED, OURS
from torch_ecrec.nn.managed import (
    ErasureCodedManagedCollisionEmbeddingBagCollection,
    ErasureCodedManagedCollisionEmbeddingCollection,
)
from torch_ecrec.nn.outputs import output_dtype
from torch_ecrec.nn.sequences import ErasureCodedEmbeddingCollection, ErasureCodedFusedEmbeddingCollection
from torch_ecrec.nn.slices import DTYPES
from torch_ecrec.nn.step import SparseStep
from torch_ecrec.nn.table_optimizers import is_named, optimizer_spec
from torch_ecrec.spec.job import CodeSpec, TableSpec
from torch_ecrec.state_dicts.columns import Columns
from torch_ecrec.state_dicts.kinds import COLLECTIONS, Collection
from torch_ecrec.state_dicts.unsharded import (
    check_config,
    configs_of,
    inside_of,
    is_default,
    own_optimizer,
    weight_of,
    weights_of,
)


@dataclass
class ServedSharding(ParameterSharding):
    """A plan's entry for a table on the servers.

    Args:
        pooling_factor: ids of a bag, on average. Slots pool the bags of tables where these are long.
        code: of the servers that the plan was made for; None: nobody has said.
    """

    pooling_factor: float = 1.0
    code: CodeSpec | None = None


def table_specs(
    module: Collection,
    job_names: Mapping[str, str],
    fused_params: Mapping[str, Any] | None = None,
    planned: Mapping[str, ParameterSharding] | None = None,
) -> list[TableSpec]:
    """Returns the tables of a collection under their names in the job.

    Args:
        fused_params: of the sharder that was given for it.
        planned: by table, the given plan's entry for it.

    Raises:
        ValueError: a data type, a pooling or an optimizer that is not supported.
    """
    specs = []
    for config in configs_of(module):
        check_config(config)
        parameter, weights = weight_of(module, config.name), weights_of(config)
        entry = (planned or {}).get(config.name)
        wishes = {**(fused_params or {}), **_wishes_of(entry)}
        specs.append(
            TableSpec(
                name=job_names[config.name],
                rows=config.num_embeddings,
                dim=config.embedding_dim,
                low=config.get_weight_init_min(),
                high=config.get_weight_init_max(),
                optimizer=optimizer_spec(config.name, parameter, wishes, weights),
                weights=weights,
                sharding=OURS.get(entry.sharding_type, "auto") if entry is not None else "auto",
                features=len(config.feature_names),
                pooling_factor=entry.pooling_factor if isinstance(entry, ServedSharding) else 1.0,
            )
        )
    return specs


def all_table_specs(
    model: nn.Module,
    modules: Mapping[str, Collection],
    names: Mapping[str, Mapping[str, str]],
    sharders: Sequence[ModuleSharder[nn.Module]] = (),
    plan: ShardingPlan | None = None,
) -> tuple[TableSpec, ...]:
    """The tables of all collections of a model. Warns, once, where nobody has said which optimizer tables have, and of
    those that TorchRec would leave to the script's.

    Args:
        model: has the modules.
        modules: by path.
        names: see `job_names`.
        sharders, plan: as given by the user.

    Raises:
        ValueError: as `table_specs`.
    """
    specs: list[TableSpec] = []
    by_default: list[str] = []
    scripts: dict[str, str] = {}
    for path, module in modules.items():
        fused_params = _fused_params(model, path, module, sharders)
        planned = _entries_of(plan, path)
        made = table_specs(module, names[path], fused_params, planned)
        specs += made
        for config, spec in zip(configs_of(module), made, strict=True):
            if _is_scripts(planned.get(config.name)):
                scripts[spec.name] = spec.optimizer.kind
        by_default += [
            names[path][config.name]
            for config in configs_of(module)
            if not is_named(weight_of(module, config.name), fused_params)
        ]
    if by_default:
        warnings.warn(
            f"tables {', '.join(by_default)} have no optimizer, so TorchRec's default, SGD; name one before sharding:"
            " apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, ebc.parameters(), {'lr': 0.01}), or"
            " `fused_params` of a sharder",
            stacklevel=3,
        )
    _tell_of_scripts(scripts, stacklevel=3)
    return tuple(specs)


def output_dtypes(
    model: nn.Module,
    modules: Mapping[str, Collection],
    sharders: Sequence[ModuleSharder[nn.Module]] = (),
    plan: ShardingPlan | None = None,
) -> dict[str, dict[str, torch.dtype]]:
    """Returns by path and table the dtype of its embeddings. Arguments and errors are as of `all_table_specs`."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for path, module in modules.items():
        fused_params, planned = _fused_params(model, path, module, sharders), _entries_of(plan, path)
        found[path] = {
            config.name: output_dtype(
                config.name, weight_of(module, config.name), fused_params, _wishes_of(planned.get(config.name))
            )
            for config in configs_of(module)
        }
    return found


def columns_of(
    model: nn.Module,
    modules: Mapping[str, Collection],
    sharders: Sequence[ModuleSharder[nn.Module]] = (),
    plan: ShardingPlan | None = None,
) -> dict[str, Columns]:
    """Returns by path the order in which a collection gives out features. Arguments are as of `all_table_specs`."""
    return {
        path: Columns(module, path, _entries_of(plan, path), _fused_params(model, path, module, sharders))
        for path, module in modules.items()
    }


def _fused_params(
    model: nn.Module, path: str, module: Collection, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Mapping[str, Any]:
    """Returns the `fused_params` that TorchRec would use: the module's own, else those of its (wrapper's) sharder."""
    if (own := own_optimizer(module)) is not None:
        return own
    around = model.get_submodule(path.rpartition(".")[0])
    wraps = isinstance(around, (FeatureProcessedEmbeddingBagCollection, BaseManagedCollisionEmbeddingCollection))
    wanted = type(around) if wraps and path else type(module)
    sharder: Any = next((sharder for sharder in sharders if sharder.module_type is wanted), None)
    return getattr(sharder, "fused_params", None) or {}


def job_names(modules: Mapping[str, Collection]) -> dict[str, dict[str, str]]:
    """Returns by path and table its name in the job: its own if that is unique in the model, else path and name."""
    count: dict[str, int] = {}
    for module in modules.values():
        for config in configs_of(module):
            count[config.name] = count.get(config.name, 0) + 1
    return {
        path: {c.name: c.name if count[c.name] == 1 else f"{path}.{c.name}" for c in configs_of(module)}
        for path, module in modules.items()
    }


FORMS: dict[type[nn.Module], Callable[..., Any]] = {
    EmbeddingBagCollection: ErasureCodedEmbeddingBagCollection,
    EmbeddingCollection: ErasureCodedEmbeddingCollection,
    FusedEmbeddingBagCollection: ErasureCodedFusedEmbeddingBagCollection,
    FusedEmbeddingCollection: ErasureCodedFusedEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection: ErasureCodedManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection: ErasureCodedManagedCollisionEmbeddingCollection,
}
"""The sharded form of each kind of module that is served (`state_dicts/kinds.py`)."""


class _OfOneKind(ModuleSharder[Any]):
    """A sharder for the modules of one class.

    Args:
        served: the class, which is in `FORMS`.
        step: shared by all modules that our sharders make.
        names: path of a collection -> table -> its name in the job.
        other: for modules that are not served, or that a plan leaves to TorchRec.
    """

    def __init__(
        self,
        served: type[Any],
        step: SparseStep,
        names: Mapping[str, Mapping[str, str]],
        other: ModuleSharder[Any] | None = None,
    ) -> None:
        super().__init__()
        self._served, self._step, self._names, self._other = served, step, names, other

    @property
    def module_type(self) -> type[Any]:
        return self._served

    def _leave(self, module: Any, *arguments: Any) -> Any:
        if self._other is None:
            raise ValueError(
                f"the plan leaves {arguments[-1] or 'the model'} to TorchRec, but `sharders` has none for"
                f" {self._served.__name__}"
            )
        return self._other.shard(module, *arguments)


def _refuse_unsharded(path: str, module: nn.Module, arguments: object) -> Never:
    """A hook: raises RuntimeError where the module that was sharded is called still. Its weights are as they began, or
    freed, and nothing would train those on the servers."""
    raise RuntimeError(
        f"{path} was called as it was before its tables went to the servers: something holds the"
        f" {type(module).__name__} itself (a plain list or dict, a closure, a variable). Reach it through the model:"
        " as an attribute of a module, in nn.ModuleList or in nn.ModuleDict"
    )


class ErasureCodedSharder(_OfOneKind):
    """Puts the tables of collections on the servers.

    If optimizers are attached to the original module's weights, `shard` frees these weights (its parameters have no
    rows then), since they are on the servers. Other modules' weights are freed with the module. The original module
    refuses to be called.

    Args:
        served, step, names, other: as of `_OfOneKind`.
        outputs: see `output_dtypes`; float32 where nothing is said.
        columns: see `columns_of`; the module's order where nothing is said.
    """

    def __init__(
        self,
        served: type[Any],
        step: SparseStep,
        names: Mapping[str, Mapping[str, str]],
        other: ModuleSharder[Any] | None = None,
        outputs: Mapping[str, Mapping[str, torch.dtype]] | None = None,
        columns: Mapping[str, Columns] | None = None,
    ) -> None:
        super().__init__(served, step, names, other)
        self._outputs, self._columns = outputs or {}, columns or {}

    def shard(
        self,
        module: Any,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        if (module_fqn or "") not in self._names:
            return self._leave(module, params, env, device, module_fqn)
        names = self._names[module_fqn or ""]
        columns = self._columns.get(module_fqn or "")
        sharded = FORMS[self._served](module, self._step, names, device or torch.device("cpu"), columns)
        sharded.module_sharding_plan = params
        sharded.give_out_as(self._outputs.get(module_fqn or "", {}))
        session = self._step.session
        for config in configs_of(module):
            parameter = weight_of(module, config.name)
            if session.trainer == 0:
                weights = _first_weights(config, parameter, session.job.seed, names[config.name])
                if weights is not None:
                    sharded.tables.load_initial(config.name, weights)
                    del weights
            if parameter.device.type != "meta" and attached_optimizers(parameter):
                # The optimizer attached to a parameter keeps it alive for good: its storage must go by hand.
                parameter.data = parameter.data.new_empty(0, config.embedding_dim)
        module.register_forward_pre_hook(functools.partial(_refuse_unsharded, module_fqn or "the model"))
        return sharded

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        return {config.name: weight_of(module, config.name) for config in configs_of(module)}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(OURS)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return ["parameter_server"]


class ErasureCodedManagedSharder(_OfOneKind):
    """Puts the tables of collections with managed collisions on the servers.

    Args:
        served, step, names, other: as of `_OfOneKind`.
        inside: for the collections in them.
    """

    def __init__(
        self,
        served: type[Any],
        step: SparseStep,
        names: Mapping[str, Mapping[str, str]],
        inside: ErasureCodedSharder,
        other: ModuleSharder[Any] | None,
    ) -> None:
        super().__init__(served, step, names, other)
        self._inside = inside

    def shard(
        self,
        module: Any,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        path = inside_of(module_fqn or "")
        if path not in self._names:
            return self._leave(module, params, env, device, module_fqn)
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"{module_fqn or type(module).__name__}: ids are remapped with the dense model on a CPU, got {device};"
                " not yet elsewhere"
            )
        inside = self._inside.shard(collection_of(module), params, env, device, path)
        sharded = FORMS[self._served](module, inside, self._step, module_fqn or "")
        sharded.module_sharding_plan = params
        return sharded

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        return self._inside.shardable_parameters(collection_of(module))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return self._inside.sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self._inside.compute_kernels(sharding_type, compute_device_type)


def sharders_for(
    step: SparseStep,
    names: Mapping[str, Mapping[str, str]],
    others: Sequence[ModuleSharder[nn.Module]],
    outputs: Mapping[str, Mapping[str, torch.dtype]] | None = None,
    columns: Mapping[str, Columns] | None = None,
) -> list[ModuleSharder[Any]]:
    """Returns our sharders: one for each kind of module that is served.

    Args:
        step, names: as of `_OfOneKind`.
        others: for modules that are not, some of them of a kind of which others are.
        outputs: see `output_dtypes`.
        columns: see `columns_of`.
    """
    of_others = {sharder.module_type: sharder for sharder in others}
    plain = {
        served: ErasureCodedSharder(served, step, names, of_others.get(served), outputs, columns)
        for served in COLLECTIONS
    }
    inside = {
        ManagedCollisionEmbeddingBagCollection: plain[EmbeddingBagCollection],
        ManagedCollisionEmbeddingCollection: plain[EmbeddingCollection],
    }
    managed = (
        ErasureCodedManagedSharder(served, step, names, collection, of_others.get(served))
        for served, collection in inside.items()
    )
    return [*plain.values(), *managed]


def _first_weights(config: BaseEmbeddingConfig, parameter: nn.Parameter, seed: int, job_name: str) -> Tensor | None:
    """Returns the initial weights (rows, D) to load; None if the servers' own uniform initialisation will do."""
    if parameter.device.type != "meta":
        return parameter.detach().cpu()
    if config.init_fn is None or is_default(config):
        return None
    digest = hashlib.sha256(f"{seed}/{job_name}".encode()).digest()
    weights = torch.empty(config.num_embeddings, config.embedding_dim, dtype=DTYPES[weights_of(config)], device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:7], "little"))
        config.init_fn(weights)
    return weights


# what a given plan says --------------------------------------------------------------------------

_WISHES = ("output_dtype", "stochastic_rounding", "bounds_check_mode")  # as if `fused_params` had them


def types_in(plan: ShardingPlan | None, path: str, module: Collection) -> dict[str, str]:
    """Returns by table of a served collection which of our sharding types it has: what the plan says, if it does."""
    types = {name: entry.sharding_type for name, entry in _entries_of(plan, path).items()}
    names = [config.name for config in configs_of(module)]
    return {name: types[name] if types.get(name) in OURS else ERASURE_CODED for name in names}


def _entries_of(plan: ShardingPlan | None, path: str) -> Mapping[str, ParameterSharding]:
    """Returns by table what a plan says of a collection. A plan names its wrapper instead, if it has one."""
    planned: Mapping[str, Any] = plan.plan if plan is not None else {}
    found = planned.get(path) or planned.get(path.rpartition(".")[0])
    return found if isinstance(found, EmbeddingModuleShardingPlan) else {}


def _wishes_of(entry: ParameterSharding | None) -> dict[str, Any]:
    """Returns a plan's settings of a table, keyed like `fused_params`. In TorchRec they override the sharder's."""
    return {name: value for name in _WISHES if (value := getattr(entry, name, None)) is not None}


def _is_scripts(entry: ParameterSharding | None) -> bool:
    """Returns whether TorchRec would leave the updates of a table to the script's own optimizer."""
    return entry is not None and (
        entry.sharding_type == ShardingType.DATA_PARALLEL.value
        or entry.compute_kernel == EmbeddingComputeKernel.DENSE.value
    )


def _tell_of_scripts(optimizers: Mapping[str, str], stacklevel: int) -> None:
    """Warns of tables that under TorchRec the script's own optimizer would update.

    Args:
        optimizers: table -> the one that the servers run.
    """
    if optimizers:
        tables = ", ".join(f"{table} ({optimizer})" for table, optimizer in optimizers.items())
        warnings.warn(
            "the plan has tables data-parallel, and TorchRec leaves their steps to an optimizer of the script; the"
            f" servers hold them like any other, and step them in the backward: {tables}. Attach the optimizer that is"
            " meant; one of the script does not get them",
            stacklevel=stacklevel + 1,
        )
