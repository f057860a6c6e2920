"""Seals of deltas, made once in the kernels that make or fold these: against the plain definition, in any memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_ecrec.codec import LinearCode, seals
from torch_ecrec.codec.field import PRODUCT
from torch_ecrec.errors import MemoryDamaged
from torch_ecrec.records.blocks import PAST_CACHE_WORDS
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import BLOCK, merge
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard

RNG = np.random.default_rng(7)


def misaligned(values_UB: Any) -> Any:
    memory = np.empty(values_UB.nbytes + 1, np.uint8)
    copy = memory[1:].reshape(values_UB.shape)
    copy[:] = values_UB
    return copy


def strided(values_UB: Any) -> Any:
    wide = np.zeros((2 * len(values_UB), values_UB.shape[1] + 4), np.uint8)
    wide[::2, 4:] = values_UB
    return wide[::2, 4:]


def read_only(values_UB: Any) -> Any:
    return np.frombuffer(values_UB.tobytes(), np.uint8).reshape(values_UB.shape)


MEMORIES = {"plain": np.copy, "misaligned": misaligned, "strided": strided, "read-only": read_only}


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_fold_of_any_memory_with_rows_that_are_skipped_or_come_twice(memory: str) -> None:
    code = LinearCode(2, 2)
    for words in (1, 3, 16, 17, 80):
        for count in (0, 1, 40):
            shard = Shard(Schema.of(words), 5, 9)
            first = RNG.integers(0, 256, (9, 4 * words), np.uint8)
            shard.scatter_(np.arange(9), first, parity=True)
            rows = RNG.integers(-1, 9, 2 * count)[::2]
            coefficients = RNG.choice(np.array([0, 1, 1, 2, 200, 255], np.uint8), 2 * count)[::2]
            plain = RNG.integers(0, 256, (count, 4 * words), np.uint8)
            deltas = MEMORIES[memory](plain)
            found = shard.fold_(code, rows, deltas, coefficients)
            assert found is not None and (found == seals.seals_of(plain)).all()
            assert (deltas == plain).all(), "what is folded is not written"
            for row, coefficient, delta in zip(rows, coefficients, plain, strict=True):
                if row >= 0:
                    first[row] ^= PRODUCT[coefficient, delta]
            assert (shard.gather(np.arange(9), parity=True) == first).all()
            assert not len(shard.broken_run(0, 9, parity=True)) and not len(shard.broken_run(0, 5))
            log, at = DeltaLog(1, 0, True, error=MemoryDamaged), np.arange(count)
            log.append(1, [at], [deltas], [found])
            found_too = shard.fold_(code, rows, deltas, coefficients)
            assert found_too is not found, "the log's own"
            log.check(1)


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_step_of_many_blocks_has_the_seals_of_its_deltas(kind: str, weights: str) -> None:
    """With any number of records, also none; bits are those of a shard without seals."""
    schema = optimizer(kind).schema(5, weights)
    rows = 2 * BLOCK + 9
    sealed, plain = Shard(schema, rows, 0), Shard(schema, rows, 0, sealed=False)
    for shard in (sealed, plain):
        shard.initialise_(InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,)).of)
    for step, count in enumerate((0, 1, BLOCK, BLOCK + 1, rows), 1):
        at = np.sort(RNG.permutation(rows)[:count])
        gradients = RNG.standard_normal((count, 5)).astype(np.float32)
        one, other = (
            shard.apply_(optimizer(kind), merge([(at, gradients.copy())]), 0.1, step, {}) for shard in (sealed, plain)
        )
        assert (one.deltas_UB == other.deltas_UB).all() and other.seals_U is None
        assert one.seals_U is not None and (one.seals_U == seals.seals_of(one.deltas_UB)).all()
        assert len(one.seals_U) == count and (count == 0 or one.deltas_UB.any())
        kept = one.seals_U.copy()
        sealed.undo_(at, one.deltas_UB)
        sealed.undo_(at, one.deltas_UB)
        assert (one.seals_U == kept).all() and not len(sealed.broken_run(0, rows))
    assert (sealed.gather(np.arange(rows)) == plain.gather(np.arange(rows))).all()


def test_seals_that_do_not_fit_a_step_are_refused_and_the_log_is_as_it_was() -> None:
    log, at, deltas = DeltaLog(2, 0, True, error=MemoryDamaged), np.arange(3), np.ones((3, 8), np.uint8)
    own = seals.seals_of(deltas)
    log.append(1, [at, at[:0]], [deltas, deltas[:0]], [own, None])
    for wrong in ([own], [own, own], [own, own[:0], None], [own[:2], None], [own.astype(np.uint64), None]):
        with pytest.raises(ValueError, match="of_deltas"):
            log.append(2, [at, at[:0]], [deltas, deltas[:0]], wrong)  # type: ignore[arg-type]
    assert log.last == 1 and log.bytes == at.nbytes + deltas.nbytes
    log.check(1)
    log.append(2, [at, at[:0]], [deltas, deltas[:0]])
    assert len(log.pop()) == len(log.pop()) == 2


def test_a_step_that_is_too_large_for_caches_is_those_of_its_halves() -> None:
    """Its deltas are written past the cache, those of the halves are not: wherever the first of them lies."""
    adagrad, dim = optimizer("rowwise_adagrad"), 13
    words = adagrad.schema(dim).nbytes // 4
    count = PAST_CACHE_WORDS // words + BLOCK + 3
    records_PW, gradients_UD = (RNG.standard_normal((count, width)).astype(np.float32) for width in (words, dim))
    records_PW = np.abs(records_PW)
    positions_U = np.arange(count)

    def step(records_PW: Any, some: slice, out: Any) -> Any:
        seals_V = np.empty(len(positions_U[some]), np.uint32)
        merged = merge([(positions_U[some], gradients_UD[some])])
        return adagrad.update_(records_PW, merged, 0.1, 1, out=out, seals_V=seals_V), seals_V

    halves, half = records_PW.copy(), count // 2
    parts = [step(halves, some, None) for some in (slice(0, half), slice(half, count))]
    deltas_UB, seals_U = (np.concatenate(both) for both in zip(*parts, strict=True))
    for skipped in (0, 1, 15):  # words before the first delta, in a line of the cache
        whole, memory = records_PW.copy(), np.zeros(count * words + 32, np.uint32)
        start = -memory.ctypes.data // 4 % 16 + skipped
        out = memory[start : start + count * words].view(np.uint8).reshape(count, 4 * words)
        found, found_seals = step(whole, slice(0, count), out)
        assert (found == deltas_UB).all() and (found_seals == seals_U).all() and (whole == halves).all()
        assert not memory[:start].any() and not memory[start + count * words :].any(), "written beside"
