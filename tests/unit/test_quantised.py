"""Rows as 8 bits a weight, for evaluations."""

from __future__ import annotations

import dataclasses
from typing import Any

import fbgemm_gpu  # noqa: F401  registers torch.ops.fbgemm
import numpy as np
import pytest
import torch
from fake_session import FakeSession
from models import CPU, Net, batch_of, collection, job_of
from torch import Tensor

from torch_ecrec.nn.parallel import DistributedModelParallel
from torch_ecrec.records.quantised import MORE_BYTES, pack, unpack
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard
from torch_ecrec.spec.settings import Settings

DIMS = [1, 2, 3, 7, 8, 15, 16, 31, 64, 100, 128]


def rows_of(dim: int, rows: int = 400) -> np.ndarray[Any, Any]:
    """All sizes, a row of one value, of zeros of both signs, of subnormal numbers, and one that spans nearly all."""
    random = np.random.default_rng(dim)
    rows_UD = (random.standard_normal((rows, dim)) * 10.0 ** random.integers(-12, 30, (rows, 1))).astype(np.float32)
    rows_UD[0], rows_UD[1], rows_UD[2] = 0.0, 1.5, -0.0
    rows_UD[3, ::2], rows_UD[3, 1::2] = -0.0, 0.0
    rows_UD[4] = random.integers(1, 1000, dim).astype(np.uint32).view(np.float32)
    rows_UD[5, ::2], rows_UD[5, 1::2] = 1.6e38, -1.6e38
    return rows_UD


@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_those_that_fbgemm_quantises_and_restores(dim: int) -> None:
    rows_UD = rows_of(dim)
    packed_UB = pack(rows_UD)
    theirs_UB = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(rows_UD))
    assert packed_UB.shape == (len(rows_UD), dim + MORE_BYTES) and packed_UB.dtype == np.uint8
    signs = [2, 3]  # a least weight of zero may have either sign: what is restored is the same
    same = (packed_UB == theirs_UB.numpy()).all(axis=1)
    assert same[[u for u in range(len(rows_UD)) if u not in signs]].all()
    restored_UD = unpack(packed_UB)
    wanted_UD = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(theirs_UB).numpy()
    assert np.array_equal(restored_UD.view(np.uint32), wanted_UD.view(np.uint32))


@pytest.mark.parametrize("dim", DIMS)
def test_weights_are_within_what_is_promised(dim: int) -> None:
    rows_UD = rows_of(dim)
    exact_UD, restored_UD = rows_UD.astype(np.float64), unpack(pack(rows_UD)).astype(np.float64)
    span_U = exact_UD.max(axis=1) - exact_UD.min(axis=1)
    most_U = span_U / 510 + 1e-8 + np.abs(exact_UD).max(axis=1) * 2.0**-22
    assert (np.abs(restored_UD - exact_UD).max(axis=1) <= most_U).all()
    assert dim < 16 or (np.abs(restored_UD - exact_UD).max(axis=1) > 0.4 * span_U / 510)[10:].mean() > 0.5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_comes_back_as_nan(value: float) -> None:
    rows_UD = rows_of(9)
    before_UD = unpack(pack(rows_UD))
    rows_UD[7, 4] = value
    rows_UD[8, :2] = 3e38, -3e38  # its range is infinite
    restored_UD = unpack(pack(rows_UD))
    assert np.isnan(restored_UD[[7, 8]]).all()
    others = [u for u in range(len(rows_UD)) if u not in (7, 8)]
    assert np.array_equal(restored_UD[others], before_UD[others])


def test_no_rows_and_rows_without_weights() -> None:
    assert unpack(pack(np.empty((0, 5), np.float32))).shape == (0, 5)
    with pytest.raises(ValueError, match="must have more than 8 bytes in a row, got 8"):
        unpack(np.zeros((1, 8), np.uint8))


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
def test_a_shard_gives_its_rows_quantised(weights: str) -> None:
    schema = Schema.of(6, weights=weights)
    shard, positions = Shard(schema, 20, 4), np.array([3, 17, 3, 0])
    shard.scatter_(np.arange(20), np.random.default_rng(0).integers(0, 60, (20, schema.nbytes)).astype(np.uint8))
    found_UB = shard.gather_weights(positions, int8=True)
    assert np.array_equal(found_UB, pack(shard.gather_weights(positions))) and found_UB.any()


def test_rows_of_training_are_not_quantised() -> None:
    with pytest.raises(ValueError, match=r"`wire` must be .* got 'int8'; rows of training are not quantised"):
        Settings(wire="int8")
    with pytest.raises(ValueError, match="`evaluation_wire` must be one of wire, int8, got 'int4'"):
        Settings(evaluation_wire="int4")
    assert Settings().evaluation_wire == "wire", "off unless it is asked for"


class Asked(FakeSession):
    """Notes of each lookup whether it is of an evaluation."""

    evaluations: list[bool]

    def lookup_parts(self, rows: list[Tensor], evaluation: bool = False) -> list[list[Tensor]]:
        self.evaluations = [*getattr(self, "evaluations", []), evaluation]
        return super().lookup_parts(rows, evaluation)


@pytest.mark.usefixtures("process_group")
def test_an_evaluation_is_a_lookup_without_grad_of_a_model_in_eval() -> None:
    module = Net(collection())
    session = Asked(job_of(module))
    model, batch = DistributedModelParallel(module, device=CPU, session=session), batch_of(4, 0)
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                model.train(training)(batch)
    assert session.evaluations == [False, False, False, True]


def test_the_setting_reaches_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Settings(evaluation_wire="int8")
    for name, value in mine.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCH_ECREC_JOIN", raising=False)
    assert Settings.from_environment() == dataclasses.replace(mine, join=None)
