"""Translates a TorchRec user's choice of a table's optimizer to an `OptimizerSpec`.

In this order, key by key, as TorchRec merges them:

    attached       apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.02})
    fused_params   EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": 0.02})
    neither        TorchRec's default, SGD with a learning rate of 0.01, and a warning

Missing values are FBGEMM's defaults: learning rate 0.01, eps 1e-8, betas 0.9 and 0.999. Keys have FBGEMM's meaning: so
weight decay of Adam is decoupled, whichever class named it. Every key is honoured or refused. One that the optimizer
does not have is refused unless it has the value that FBGEMM has anyhow; but for betas and `eta`, which ask nothing of
an optimizer without them, and are told to have no effect. Where rows are kept (caches, memory) is the
servers' business; such keys change no number and are taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec.modules.embedding_configs import DataType

from torch_ecrec.compat.torch import attached_optimizers
from torch_ecrec.nn.outputs import as_output_dtype
from torch_ecrec.records.optimizer import SparseOptimizer
from torch_ecrec.records.optimizers import NAMES, by_class, by_type, optimizer
from torch_ecrec.runtime.checks import plain_all, shown, take_bool, take_float
from torch_ecrec.spec.job import OptimizerSpec

DEFAULTS = {  # of FBGEMM
    "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.0, "weight_decay_mode": 0.0, "eta": 0.001, "beta1": 0.9,
    "beta2": 0.999, "max_norm": 0.0,
}  # fmt: skip
_OF_TORCH = ("foreach", "fused", "differentiable", "capturable")  # how torch computes, not what
_OF_TORCHREC = "optimizer"  # it writes the type into the user's own arguments as it shards, and takes no other
_OF_MEMORY = (
    "cache_algorithm", "cache_load_factor", "cache_reserved_memory", "cache_sets", "embedding_table_index_type",
    "embedding_table_offset_type", "enforce_hbm", "gather_uvm_cache_stats", "multipass_prefetch_config",
    "prefetch_pipeline", "record_cache_metrics", "stats_reporter_config", "use_experimental_tbe",
    "uvm_host_mapped", "uvm_non_rowwise_momentum",
)  # fmt: skip
_OF_OTHERS = ("beta1", "beta2", "eta")  # scripts give them to any optimizer; FBGEMM looks at them in a few
_PRECISIONS = ("cache_precision", "weights_precision")
_FLOAT32 = (DataType.FP32, SparseType.FP32)
_FATAL = (BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL)
_DECAY_MODES = ("NONE", "L2", "DECOUPLE")  # 0, 1, 2
_REASONS = {
    "EMAINPLACE_ROWWISE_ADAGRAD": "it moves every row of a table at once, in one step of ten",
    "ENSEMBLE_ROWWISE_ADAGRAD": "it moves every row of a table at once, now and then",
    "NONE": "gradients of tables go to the servers, not to the script",
}


def optimizer_spec(
    table: str, parameter: nn.Parameter, fused_params: Mapping[str, Any] | None = None, weights: str = "float32"
) -> OptimizerSpec:
    """Returns the optimizer of a table.

    Args:
        table: its name, for errors.
        parameter: its weights, to which an optimizer may be attached.
        fused_params: of the sharder that was given for its module.
        weights: what the servers keep its weights as.

    Raises:
        ValueError: several optimizers, one that the servers do not run, or a key that is not honoured.
        TypeError: a key has another kind of value than a number.
    """
    try:
        return _spec(parameter, dict(fused_params or {}), weights)
    except (ValueError, TypeError) as error:
        raise type(error)(f"table {table}: {error}") from None


def is_named(parameter: nn.Parameter, fused_params: Mapping[str, Any] | None = None) -> bool:
    """Returns whether anybody has said which optimizer a table has."""
    return bool(attached_optimizers(parameter)) or (fused_params or {}).get("optimizer") is not None


def _spec(parameter: nn.Parameter, wishes: dict[str, Any], weights: str) -> OptimizerSpec:
    given = attached_optimizers(parameter)
    if len(given) > 1:
        names = " and ".join(cls.__name__ for cls, _ in given)
        raise ValueError(f"it has several optimizers, {names}; one is supported")
    found = optimizer("sgd")
    if given:
        wishes.pop("optimizer", None)
        cls, arguments = given[0]
        found, attached = _of_class(cls, dict(arguments))
        wishes |= attached
    elif (kind := wishes.pop("optimizer", None)) is not None:
        found = _of_type(kind)
    wishes = {name: plain_all(value) for name, value in wishes.items() if value is not None}
    if take_bool("stochastic_rounding", wishes.pop("stochastic_rounding", False)) and weights != "float32":
        raise ValueError(
            f"`stochastic_rounding` of a table of {weights} is not supported: a step may be made again, to the same"
            " bits, so weights are rounded to nearest"
        )
    return _with_wishes(found, wishes)


def _supported(names: list[str]) -> str:
    return f"supported are {', '.join(names)}"


def _of_class(cls: type, arguments: dict[str, Any]) -> tuple[SparseOptimizer, dict[str, Any]]:
    """Returns the optimizer that an attached class stands for, and its arguments under FBGEMM's names."""
    found = by_class(cls)
    if found is None:
        paths = [path.rpartition(".")[2] for name in NAMES for path in optimizer(name).classes[-1:]]
        raise ValueError(f"optimizer {cls.__name__} is not supported; {_supported(paths)}")
    momentum = arguments.get("momentum")
    if found.name == "sgd" and momentum is not None and take_float("momentum", momentum):
        found = optimizer("momentum_sgd")
    arguments = {name: value for name, value in arguments.items() if name not in (*_OF_TORCH, _OF_TORCHREC)}
    if "lr" in arguments:
        arguments["learning_rate"] = arguments.pop("lr")
    if "betas" in arguments:
        betas = arguments.pop("betas")
        if not isinstance(betas, Iterable) or len(listed := list(betas)) != 2:
            raise ValueError(f"`betas` must be two numbers, got {shown(betas)}")
        arguments["beta1"], arguments["beta2"] = listed
    return found, arguments


def _of_type(kind: Any) -> SparseOptimizer:
    if not isinstance(kind, EmbOptimType):
        raise ValueError(f"`optimizer` of `fused_params` must be an `EmbOptimType`, got {kind!r}")
    found = by_type(kind)
    if found is None:
        reason = f": {_REASONS[kind.name]}" if kind.name in _REASONS else ""
        types = [f"EmbOptimType.{type_}" for name in NAMES for type_ in optimizer(name).types]
        raise ValueError(f"EmbOptimType.{kind.name} is not supported{reason}; {_supported(types)}")
    return found


def _with_wishes(found: SparseOptimizer, wishes: dict[str, Any]) -> OptimizerSpec:
    rate = take_float("learning_rate", wishes.pop("learning_rate", 0.01))
    limit = _gradient_limit(wishes)
    _take_settings(wishes)
    if "weight_decay_mode" in wishes:
        wishes["weight_decay_mode"] = mode = _decay_mode(wishes["weight_decay_mode"])
        if mode == _DECAY_MODES.index("DECOUPLE") and "weight_decay_mode" not in found.fixed and found.types:
            del wishes["weight_decay_mode"]  # decoupled decay is what FBGEMM does where there is no choice
    fixed = {name: take_float(name, wishes.pop(name)) for name in found.fixed if name in wishes}
    _take_idle(found, wishes)
    has = ", ".join(f"`{name}`" for name in ("lr", *found.fixed))
    refused = [f"{k}={shown(v)}" for k, v in wishes.items() if _asks(v) and not (k in DEFAULTS and DEFAULTS[k] == v)]
    if refused:
        raise ValueError(f"optimizer {found.name} with {', '.join(refused)} is not supported; it has {has}")
    if "weight_decay_mode" in found.fixed and fixed.get("weight_decay") and not fixed.get("weight_decay_mode"):
        raise ValueError(
            f"`weight_decay` of {found.name} has no effect without `weight_decay_mode`; give WeightDecayMode.L2 or"
            " WeightDecayMode.DECOUPLE"
        )
    return OptimizerSpec(found.name, rate, max_gradient=limit, **fixed)


def _asks(value: Any) -> bool:
    """Returns whether the value of a setting that the optimizer lacks asks for something: is not 0, off or empty."""
    shape = getattr(value, "shape", None)
    return bool(shape) if isinstance(shape, tuple) else bool(value)


def _take_idle(found: SparseOptimizer, wishes: dict[str, Any]) -> None:
    """Removes from `wishes` the settings of other optimizers. Warns if a value is not FBGEMM's default."""
    idle = {name: take_float(name, wishes.pop(name)) for name in _OF_OTHERS if name in wishes}
    told = ", ".join(f"`{name}`={value}" for name, value in idle.items() if value and DEFAULTS[name] != value)
    if told:
        warnings.warn(f"{told} of tables has no effect, as with FBGEMM: {found.name} has no such number", stacklevel=2)


def _gradient_limit(wishes: dict[str, Any]) -> float | None:
    """Removes gradient clipping from `wishes` and returns its limit; None: gradients are not clipped."""
    clips = take_bool("gradient_clipping", wishes.pop("gradient_clipping", False))
    limit = take_float("max_gradient", wishes.pop("max_gradient", 1.0))
    if not clips and limit != 1.0:
        raise ValueError(f"`max_gradient`={limit} has no effect without `gradient_clipping=True`")
    return limit if clips else None


def _take_settings(wishes: dict[str, Any]) -> None:
    """Removes from `wishes` the settings that are not the optimizer's. Refuses those that would change results."""
    for name in _OF_MEMORY:
        wishes.pop(name, None)
    as_output_dtype(wishes.pop("output_dtype", None))  # honoured where embeddings come out
    for name in _PRECISIONS:
        value = wishes.pop(name, None)
        if value is not None and value not in _FLOAT32:
            raise ValueError(
                f"`{name}`={value} is not supported; rows are looked up as float32, and a table has the `data_type` of"
                " its config"
            )
    dtypes = wishes.pop("optimizer_state_dtypes", {})
    if not isinstance(dtypes, Mapping) or any(value not in _FLOAT32 for value in dtypes.values()):
        raise ValueError(f"`optimizer_state_dtypes`={dtypes} is not supported; optimizer state is float32")
    mode = wishes.pop("bounds_check_mode", None)
    if mode is not None and mode not in _FATAL:
        name = mode.name if isinstance(mode, Enum) else repr(mode)
        raise ValueError(f"`bounds_check_mode`={name} is not supported: ids out of range are errors, as with FATAL")


def _decay_mode(value: Any) -> float:
    """Returns the number of an FBGEMM `WeightDecayMode`, given as the enum or as its number."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value in range(len(_DECAY_MODES))
    if not known:
        name = value.name if isinstance(value, Enum) else str(value)
        raise ValueError(
            f"`weight_decay_mode` {name} is not supported: it depends on more than the rows of a step;"
            f" {_supported(list(_DECAY_MODES))}"
        )
    return float(value)
