"""Placeholders for tables among a model's parameters: they have a shape, a dtype and a name, but no rows.

    for name, parameter in model.named_parameters():
        print(name, parameter.shape)     # tables too, as in TorchRec
        parameter.data.normal_()         # a table: RuntimeError, it lives on the servers

So counting, listing and filtering of parameters does what it does with TorchRec, and a write that would go nowhere is
an error. A table whose placeholder has `requires_grad` False when its rows are looked up is frozen: it gets no
gradients of that lookup, and is not stepped. It begins as the weights of the unsharded table are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never

import torch
from torch import Tensor, nn

from torch_ecrec.compat.torch import VERSION, NoTorchFunction, own_parameters, tree_leaves
from torch_ecrec.compat.torchrec import mark_as_stepped

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", VERSION),
    *("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_leaf", "is_quantized", "is_nested"),
    *("requires_grad", "grad", "grad_fn", "retains_grad"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "requires_grad_"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_pinned", "__len__", "__hash__"),
)
_SET = ("grad", "requires_grad")
_GRADIENT: Any = Tensor.grad
_ALLOWED: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in _SET),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
    *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like),  # made without rows, too
}
"""What may be done with it: all that asks for neither rows nor gradients of them, nor writes any."""


class TableParameter(nn.Parameter):
    """The placeholder of a served table in the trainer: a parameter (rows, D) on the meta device.

    Args:
        table: its name.
        rows, dim: of the table.
        dtype: of its weights.
        trains: whether it begins with `requires_grad`.
    """

    table: str

    def __new__(
        cls, table: str, rows: int, dim: int, dtype: torch.dtype = torch.float32, trains: bool = True
    ) -> TableParameter:
        weight = torch.empty(rows, dim, dtype=dtype, device="meta")
        made: TableParameter = super().__new__(cls, weight, trains)  # type: ignore[assignment]
        made.table = table
        mark_as_stepped(made)  # TorchRec's filter of dense parameters looks for it
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableParameter({self.table}: {self.shape[0]} x {self.shape[1]}, on the servers)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refusal("save")

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        rows, dim = self.shape
        return TableParameter(self.table, rows, dim, self.dtype, self.requires_grad)

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"`{what}` of table {self.table}: its rows live on the servers, and this is only their placeholder."
            " Read them with `model.state_dict()`, set them with `model.load_state_dict(...)`"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _GRADIENT.__set__ and args[1] is not None:  # None is what `zero_grad` sets
            raise args[0]._refusal("grad")
        if func in _ALLOWED:
            with NoTorchFunction():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        given = tree_leaves((args, dict(kwargs or {})))
        raise next(arg for arg in given if isinstance(arg, TableParameter))._refusal(name)


class _StandIn(nn.Module):
    """Stands for the module of one table. Its only parameter is the placeholder `weight`."""

    def __init__(self, weight: TableParameter) -> None:
        super().__init__()
        self.register_parameter("weight", weight)

    def __setattr__(self, name: str, value: Any) -> None:
        standing = own_parameters(self).get(name) if name == "weight" else None
        if isinstance(standing, TableParameter):
            raise standing._refusal(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Raises RuntimeError for the weight: what parametrizes it would put another in its place, for nobody."""
        standing = own_parameters(self).get(name)
        if isinstance(standing, TableParameter):
            raise standing._refusal(name)
        super().__delattr__(name)


class StandIns(nn.ModuleDict):
    """Stands for the modules of a collection's tables, by name.

    Args:
        weights: by name of a table.
    """

    def __init__(self, weights: Mapping[str, TableParameter]) -> None:
        super().__init__()
        for name, weight in weights.items():
            super().add_module(name, _StandIn(weight))

    def add_module(self, name: str, module: nn.Module | None) -> Never:
        """Raises RuntimeError, as `[name] = module` does: tables cannot be replaced."""
        raise RuntimeError(
            f"table {name} cannot be replaced: its rows live on the servers. Set them with `model.load_state_dict(...)`"
        )


def are_trained(parameters: Iterable[TableParameter]) -> list[bool]:
    """Returns for each table whether it has `requires_grad`. It is called in every step, so it is fast."""
    with NoTorchFunction():
        return [parameter.requires_grad for parameter in parameters]
