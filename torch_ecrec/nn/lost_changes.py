"""Refuses changes a script made to tables before they were sharded, where sharding would silently drop them.

Whoever shards makes tables anew, of the configs: TorchRec in the trainers, we on the servers. So these would be gone:

    out.weight = ec.embeddings["items"].weight              tied: after sharding the two would be trained apart
    weight.register_hook(clip)                              nobody would call it
    ebc.register_forward_hook(watch)                        likewise; on the sharded module it works
    parametrize.register_parametrization(bag, "weight", p)  rows would be looked up as they are
    ebc.embedding_bags["t"] = nn.EmbeddingBag(..., max_norm=1.0)

A frozen table (`requires_grad=False`) is none of these: it stays frozen (`placeholder.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

from torch_ecrec.compat.torch import children_of, has_tensor_hooks, module_hooks, own_parameters
from torch_ecrec.state_dicts.kinds import Collection
from torch_ecrec.state_dicts.unsharded import configs_of, folder_of, weight_of

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
            if (other := weights.setdefault(id(weight), config.name)) != config.name:
                raise ValueError(_tied(config.name, f"those of table {other}"))
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
