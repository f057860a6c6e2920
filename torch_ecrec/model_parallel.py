"""The names of `torchrec.distributed.model_parallel` with our `DistributedModelParallel`: one import line changes.

from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torch_ecrec.model_parallel import DistributedModelParallel, get_default_sharders
"""

# ruff: noqa: E402  (what is missing is said before something fails to load it)

from typing import Any

from torch_ecrec.runtime.installed import require_torchrec

require_torchrec()

from torchrec.distributed import model_parallel as theirs
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    get_module,
    get_unwrapped_module,
)
from torchrec.distributed.sharding_plan import get_default_sharders

from torch_ecrec.nn.parallel import DistributedModelParallel

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]


_REFUSED = dict.fromkeys(
    ("DMPCollection", "DMPCollectionConfig", "DMPCollectionContext"),
    "is not served: its replicas would each have tables of their own; with one DistributedModelParallel all trainers"
    " share the tables on the servers",
)
_REFUSED["HybridEvalDMP"] = (
    "is TorchRec's own sharding, for evaluations alone: import it from torchrec.distributed.model_parallel"
)


def __getattr__(name: str) -> Any:
    """Other names that TorchRec's module has: sharders, plans and what else it imports itself."""
    if (reason := _REFUSED.get(name)) is not None:
        raise ImportError(f"{name} {reason}")
    if name.startswith("_") or not hasattr(theirs, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(theirs, name)
