"""Refuses, or explains, what a user's script does and would lose by it, without a word, where servers have the tables.

`check_lost_changes`: whoever shards makes tables anew, of the configs: TorchRec in the trainers, we on the servers. So
these would be gone:

    out.weight = ec.embeddings["items"].weight              tied: after sharding the two would be trained apart
    weight.register_hook(clip)                              nobody would call it
    ebc.register_forward_hook(watch)                        likewise; on the sharded module it works
    parametrize.register_parametrization(bag, "weight", p)  rows would be looked up as they are
    ebc.embedding_bags["t"] = nn.EmbeddingBag(..., max_norm=1.0)

A frozen table (`requires_grad=False`) is none of these: it stays frozen (`placeholder.py`).

`watch_batches`: `FeatureProcessedEmbeddingBagCollection` makes a new batch with the weights that its processors give.
TorchRec's code for that leaves out batch sizes of features and inverse indices: the collection inside would pool other
bags, and say nothing.

`explain_empty_optimizers`: a script that gives TorchRec's data-parallel tables an optimizer of their own
(`in_backward_optimizer_filter` of the collection's parameters) finds none where the servers serve these tables: they
step there. torch says "optimizer got an empty parameter list" then, and nothing of us.

`refuse_wrappers`: another wrapper around the sharded model, or around what is in it, averages once more, and calls past
the model that keeps snapshots. torch fails at the placeholders of tables, or nothing fails, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel, DistributedDataParallelCPU
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torch_ecrec.compat.torch import children_of, has_tensor_hooks, module_hooks, own_parameters
from torch_ecrec.compat.torchrec import TRACKERS, ShardedAtAllPaths, collection_processed
from torch_ecrec.nn.placeholder import TableParameter
from torch_ecrec.nn.served import ServedModule
from torch_ecrec.state_dicts.kinds import Collection
from torch_ecrec.state_dicts.unsharded import configs_of, folder_of, weight_of

EMPTY = "empty parameter list"
_tables: list[str] = []  # of this process's models, on the servers
_averaging: list[nn.Module] = []  # models whose dense part is being made data-parallel by themselves
NO_TRACKER = (
    "trackers of TorchRec (`model_tracker_configs`, `ModelDeltaTrackerTrec`, `RawIdTracker`) look for tables in the"
    " trainers, and would find none; leave them out"
)
_WAYS = ("max_norm", "padding_idx", "scale_grad_by_freq")  # of `nn.EmbeddingBag`, none of which TorchRec sets


def check_lost_changes(model: nn.Module, served: Mapping[str, Collection], wrappers: Iterable[str] = ()) -> None:
    """Raises if sharding would drop a change that the script has made to a table.

    Args:
        model: not sharded.
        served: by path: collections whose tables go to the servers.
        wrappers: paths of modules around these that are replaced, too.

    Raises:
        ValueError: names the table, what was done, and what to do instead.
    """
    around = {path: model.get_submodule(path) for path in wrappers}
    for path, module in (*around.items(), *served.items()):
        _check_hooks(path or "the model", module)
    weights: dict[int, str] = {}
    for module in served.values():
        for config in configs_of(module):
            _check_table(module, config.name, (config.num_embeddings, config.embedding_dim))
            weight = weight_of(module, config.name)
            if (other := weights.get(id(weight))) is not None:
                of = " of another collection" if other == config.name else ""
                raise ValueError(_tied(config.name, f"those of table {other}{of}"))
            weights[id(weight)] = config.name
    for name, parameter in _beside(model, "", {*map(id, served.values()), *map(id, around.values())}):
        if (table := weights.get(id(parameter))) is not None:
            raise ValueError(_tied(table, f"`{name}` of the model"))


def _check_hooks(what: str, module: nn.Module) -> None:
    for inner in module.modules():
        if found := module_hooks(inner):
            where = what if inner is module else f"a {type(inner).__name__} in {what}"
            raise ValueError(
                f"{where} has hooks ({', '.join(found)}): sharding replaces the module, and nobody would call them."
                " Register them afterwards, on the module that it has become"
            )


def _check_table(module: Collection, table: str, shape: tuple[int, int]) -> None:
    """Checks the module and the weights of one table."""
    inner = getattr(module, folder_of(module))[table]
    if parametrize.is_parametrized(inner):
        raise ValueError(
            f"table {table} is parametrized, and rows would be looked up without that; apply it to what is looked up"
        )
    for name in _WAYS:
        if getattr(inner, name, None):
            raise ValueError(
                f"table {table}: `{name}`={getattr(inner, name)} of its {type(inner).__name__} would have no effect, as"
                " TorchRec's tables do not have it; leave it out"
            )
    weight = weight_of(module, table)
    if tuple(weight.shape) != shape:
        raise ValueError(f"table {table}: its weights have shape {tuple(weight.shape)}, its config says {shape}")
    if has_tensor_hooks(weight):
        raise ValueError(
            f"table {table}: its weights have hooks, which nobody would call: gradients of rows go to the servers."
            " To clip them, give `gradient_clipping` and `max_gradient` in `fused_params`"
        )


def _beside(module: nn.Module, path: str, without: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields a module's parameters by every path to them, except those below `without` (ids of modules)."""
    if id(module) in without:
        return
    for name, parameter in own_parameters(module).items():
        if parameter is not None:
            yield f"{path}{name}", parameter
    for name, child in children_of(module).items():
        if child is not None:
            yield from _beside(child, f"{path}{name}.", without)


def _tied(table: str, other: str) -> str:
    return (
        f"table {table}: its weights are also {other}, and after sharding the two would be trained apart. Give one of"
        " them a copy of its own (`nn.Parameter(weight.detach().clone())`), or look the rows up in the table"
    )


def refuse_sizes(features: Any) -> None:
    """Raises ValueError for a batch with a batch size per feature."""
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        raise ValueError(
            "a batch size per feature (`stride_per_key_per_rank`, `inverse_indices`) is not supported where features"
            " are processed: TorchRec's FeatureProcessedEmbeddingBagCollection drops it. Give each sample its own bags"
        )


torch.fx.wrap("refuse_sizes")  # pipelines trace the wrapper, without a batch


def watch_batches(model: nn.Module) -> None:
    """Checks every batch that reaches a wrapper of a served collection."""
    for module in model.modules():
        if isinstance(module, FeatureProcessedEmbeddingBagCollection) and isinstance(
            collection_processed(module), ServedModule
        ):
            module.register_forward_pre_hook(_check_batch)


def _check_batch(_: nn.Module, inputs: tuple[Any, ...]) -> None:
    refuse_sizes(*inputs[:1])


def explain_empty_optimizers(tables: Sequence[str]) -> None:
    """Adds a note that names these tables to torch's error for an optimizer without parameters, from now on."""
    if not hasattr(Optimizer.__init__, "names_tables"):
        Optimizer.__init__ = _explained(Optimizer.__init__)  # type: ignore[method-assign]
    _tables.extend(table for table in tables if table not in _tables)


def _explained(init: Any) -> Any:
    @functools.wraps(init)
    def explained(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except ValueError as error:
            if EMPTY in str(error):
                names = ", ".join(_tables[:8]) + (", ..." if _tables[8:] else "")
                error.add_note(
                    f"torch_ecrec: the tables {names} are on its servers, which step them in the backward"
                    " (`model.fused_optimizer` has their rates). They give no parameters to an optimizer of the script:"
                    " leave that one out, or give it what remains of the model"
                )
            raise

    explained.names_tables = True  # type: ignore[attr-defined]
    return explained


def refuse_wrappers() -> None:
    """Makes other wrappers of whole models, and trackers, refuse what has tables on the servers, from now on."""
    of_modules = DistributedModelParallel, DistributedDataParallel, FullyShardedDataParallel, DataParallel
    for wrapper in (*of_modules, *TRACKERS, DistributedDataParallelCPU):
        new = vars(wrapper).get("__new__")
        if not hasattr(new, "refuses_tables"):
            wrapper.__new__ = _refusing(wrapper.__init__, new)  # type: ignore[method-assign]


def _refusing(init: Any, before: Any) -> Any:
    """Returns a `__new__` with the signature of an `__init__`, which is left as it is: warnings name who calls that.

    Args:
        init: of a class.
        before: its own `__new__`; None: it has none.
    """

    @functools.wraps(init)
    def new(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
        if not _averaging and not issubclass(kind, ShardedAtAllPaths):  # ours says more
            for given in (*args, *kwargs.values()):
                if isinstance(given, nn.Module):
                    check_not_served(given, kind.__name__, issubclass(kind, TRACKERS))
        return object.__new__(kind) if before is None else before.__func__(kind, *args, **kwargs)

    new.refuses_tables = True  # type: ignore[attr-defined]
    return new


def check_not_served(module: nn.Module, wrapper: str, tracks: bool = False) -> None:
    """Raises RuntimeError if a module that is to be put into a wrapper has tables on the servers already.

    It may have them as parameters alone: torch's `replicate` gathers those of a module.

    Args:
        module: to be put into it.
        wrapper: the name of its class.
        tracks: it looks at changes, and wraps nothing.
    """
    if not any(isinstance(one, (ServedModule, TableParameter)) for one in (*module.modules(), *module.parameters())):
        return
    if tracks:
        raise RuntimeError(NO_TRACKER)
    raise RuntimeError(
        f"{wrapper} is put around a {type(module).__name__} whose tables are on the servers. The"
        " torch_ecrec.DistributedModelParallel that put them there averages gradients itself, and keeps snapshots"
        f" where it is called: leave {wrapper} out, and call that model. What is to be trained with it belongs into"
        " the model that it is made of"
    )


@contextlib.contextmanager
def averages(model: nn.Module) -> Iterator[None]:
    """Lets a model make its own dense part data-parallel within the block."""
    _averaging.append(model)
    try:
        yield
    finally:
        _averaging.pop()
