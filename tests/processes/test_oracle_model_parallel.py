"""TorchRec's tests of `DistributedModelParallel` on a CPU, from the installed wheel, with ours in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torchrec_oracle as oracle
from torchrec.distributed.test_utils import test_model_parallel as shardings
from torchrec.distributed.test_utils import test_model_parallel_base as bases


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    yield
    oracle.leave()
    oracle.PROCESSES.close()


@pytest.fixture(autouse=True)
def ours() -> Iterator[None]:
    oracle.swap()
    yield
    oracle.restore()


@oracle.examples
class TestShardings(oracle.OracleProcesses, shardings._ModelParallelBase):
    backend = "gloo"


@oracle.examples
class TestStateDicts(bases.ModelParallelStateDictBase):
    backend = "gloo"


class TestSparseOnly(bases.ModelParallelSparseOnlyBase):
    backend = "gloo"

    def test_initialize_torch_state_error_includes_table_name(self) -> None:
        """It looks into TorchRec's sharded module, at a method that makes tensors of shards: there are none."""
        with refused(AttributeError, "no attribute '_initialize_torch_state'"):
            super().test_initialize_torch_state_error_includes_table_name()


def refused(error: type[Exception], message: str) -> Any:
    return contextlib.nullcontext() if oracle.mode() == "stock" else pytest.raises(error, match=message)
