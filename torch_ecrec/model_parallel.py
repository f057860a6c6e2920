"""The names of `torchrec.distributed.model_parallel` with our `DistributedModelParallel`: one import line changes.

from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torch_ecrec.model_parallel import DistributedModelParallel, get_default_sharders
"""

from typing import Never

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


def __getattr__(name: str) -> Never:
    if name == "DMPCollection":
        raise ImportError(
            "DMPCollection is not served: its replicas would each have tables of their own;"
            " with one DistributedModelParallel all trainers share the tables on the servers"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
