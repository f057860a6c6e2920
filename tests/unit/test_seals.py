"""Seals: linear over the field, and no flipped bit fits."""

from __future__ import annotations

import numpy as np
import pytest

from torch_ecrec.codec import LinearCode, fold_rows_, seals
from torch_ecrec.codec.field import PRODUCT
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import merge
from torch_ecrec.records.optimizers import NAMES, optimizer
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard

WORDS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 65, 129, 240)


def formula(record_W: np.ndarray) -> int:
    """The sum over the words, one by one: coefficients are powers of 2."""
    whole, lanes = len(record_W) // 16, {}
    powers = {i: whole - i // 16 + 16 * (i % 16) for i in range(16 * whole)}
    offset, rest, count = 16 * whole, len(record_W) % 16, 8
    while count:
        if rest & count:
            lanes.update({offset + j: 16 * (16 - 2 * count + j) for j in range(count)})
            offset += count
        count //= 2
    found = [0, 0, 0, 0]
    for i, power in {**powers, **lanes}.items():
        for byte in range(4):
            found[byte] ^= int(PRODUCT[seals.POWERS[power % 255], (int(record_W[i]) >> (8 * byte)) & 255])
    return sum(value << (8 * byte) for byte, value in enumerate(found))


def some(rows: int, words: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, words]).integers(0, 256, (rows, 4 * words), np.uint8)


@pytest.mark.parametrize("words", WORDS)
def test_it_is_its_formula_and_linear(words: int) -> None:
    one, other = some(5, words), some(5, words, 1)
    assert seals.seals_of(one).tolist() == [formula(record_W) for record_W in one.view(np.uint32)]
    assert (seals.seals_of(one ^ other) == seals.seals_of(one) ^ seals.seals_of(other)).all()
    for coefficient in (1, 2, 77, 255):
        times = PRODUCT[coefficient, seals.seals_of(one).view(np.uint8)].view(np.uint32)
        assert (seals.seals_of(PRODUCT[coefficient, one]) == times).all()


@pytest.mark.parametrize("words", WORDS)
def test_every_flipped_bit_and_every_wrong_byte_is_found(words: int) -> None:
    flips = np.zeros((32 * words, 4 * words), np.uint8)
    flips[np.arange(32 * words), np.arange(32 * words) // 8] = 1 << (np.arange(32 * words) % 8)
    assert (seals.seals_of(flips) != 0).all()
    errors = np.zeros((255, 4 * words), np.uint8)
    for byte in range(4 * words):
        errors[:, byte] = np.arange(1, 256)
        assert (seals.seals_of(errors) != 0).all()
        errors[:, byte] = 0


def test_two_flipped_bits_of_different_bytes_are_found_up_to_one_in_200() -> None:
    rng = np.random.default_rng(0)
    flips = np.zeros((20_000, 260), np.uint8)
    for _ in range(2):
        flips[np.arange(len(flips)), rng.integers(0, 260, len(flips))] ^= np.uint8(1) << rng.integers(
            0, 8, len(flips)
        ).astype(np.uint8)
    there = flips.any(axis=1)
    assert (seals.seals_of(flips)[there] == 0).mean() < 1 / 200


def test_what_does_not_fit_is_named() -> None:
    rows, sealed = some(9, 5), np.zeros(9, np.uint32)
    sealed[:] = seals.seals_of(rows)
    rows[4, 3] ^= 16
    rows[7, 19] ^= 1
    assert seals.broken_run(rows, sealed, 0, 9).tolist() == [4, 7]
    assert seals.broken_run(rows, sealed, 5, 7).tolist() == []
    assert seals.broken(rows, sealed, np.array([7, 0, 4, 4])).tolist() == [0, 2, 3]
    with pytest.raises(IndexError, match=r"must be in 0\.\.8"):
        seals.broken(rows, sealed, np.array([9]))
    with pytest.raises(IndexError, match=r"rows 0\.\.10 of 9"):
        seals.broken_run(rows, sealed, 0, 10)
    with pytest.raises(ValueError, match="must be uint32 of shape"):
        seals.broken_run(rows, sealed[:3], 0, 1)
    with pytest.raises(ValueError, match="2-D uint8"):
        seals.seals_of(rows[0])
    with pytest.raises(IndexError, match=r"must be in -1\.\.8, got 9"):
        seals.xor_(sealed, np.array([9]), sealed[:1])
    with pytest.raises(ValueError, match=r"must be uint32 of shape \(2,\)"):
        seals.xor_(sealed, np.array([1, 2]), sealed[:1])


@pytest.mark.parametrize("words", WORDS)
def test_some_rows_are_sealed_where_they_lie_and_the_others_left_alone(words: int) -> None:
    rows, sealed = some(9, words), np.zeros(9, np.uint32)
    seals.seal_(rows, np.array([7, 2, 3]), sealed)
    wanted = np.zeros(9, np.uint32)
    wanted[[2, 3, 7]] = seals.seals_of(rows)[[2, 3, 7]]
    assert (sealed == wanted).all()
    seals.seal_(rows, np.empty(0, np.int64), sealed)
    for wrong in (9, -1):
        with pytest.raises(IndexError, match="positions_U"):
            seals.seal_(rows, np.array([0, wrong]), sealed)
    with pytest.raises(ValueError, match="seals_N"):
        seals.seal_(rows, np.array([0]), sealed[:3])
    assert (sealed == wanted).all()


@pytest.mark.parametrize("words", WORDS)
def test_rows_are_copied_and_looked_at_in_one_go(words: int) -> None:
    rows = some(9, words)
    sealed = seals.seals_of(rows)
    rows[4, 3] ^= 1
    at, copies = np.array([7, 4, 0, 4]), np.zeros((4, 4 * words), np.uint8)
    assert seals.gather(rows, sealed, at, copies).tolist() == [1, 3]
    assert (copies == rows[at]).all()
    assert seals.gather(rows, sealed, at[:1], copies[:1]).tolist() == []
    assert seals.gather(rows, sealed, at[:0], copies[:0]).tolist() == []
    with pytest.raises(IndexError, match="positions_U"):
        seals.gather(rows, sealed, np.array([9]), copies[:1])
    for wrong in (copies[:3], np.zeros((4, 8 * words), np.uint8)[:, : 4 * words]):
        with pytest.raises(ValueError, match="copies_UB"):
            seals.gather(rows, sealed, at, wrong)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("parity", [True, False])
def test_a_shard_copies_records_and_looks_at_them(sealed: bool, parity: bool) -> None:
    shard = Shard(Schema.of(3), 5, 5, sealed=sealed)
    shard.scatter_(np.arange(5), some(5, 3), parity)
    shard.flip_(2, 9, parity)
    records, broken = shard.gather_whole(np.array([4, 2, 0]), parity)
    assert (records == shard.gather(np.array([4, 2, 0]), parity)).all()
    assert broken.tolist() == ([1] if sealed else [])


@pytest.mark.parametrize("words", [1, 5, 65])
def test_a_fold_with_seals_is_one_without_and_its_seals(words: int) -> None:
    plain, deltas = some(9, words), some(6, words, 1)
    folded, sealed = plain.copy(), seals.seals_of(plain)
    rows, coefficients = np.array([3, -1, 8, 3, 0, 5]), np.array([1, 7, 1, 200, 0, 2], np.uint8)
    assert (seals.fold_rows_(folded, rows, deltas, coefficients, sealed) == seals.seals_of(deltas)).all()
    fold_rows_(plain, rows, deltas, coefficients)
    assert (folded == plain).all() and (sealed == seals.seals_of(plain)).all()
    before = folded.copy(), sealed.copy()
    with pytest.raises(IndexError, match=r"must be in -1\.\.8, got 9"):
        seals.fold_rows_(folded, np.array([0, 9]), deltas[:2], coefficients[:2], sealed)
    with pytest.raises(ValueError, match="must be uint32 of shape"):
        seals.fold_rows_(folded, rows, deltas, coefficients, sealed[:8])
    assert (folded == before[0]).all() and (sealed == before[1]).all()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", NAMES)
def test_whatever_changes_a_record_or_a_parity_keeps_its_seal_up(kind: str, weights: str) -> None:
    """Steps, undo, folds, loads and decoding: and damage stays visible through all of them."""
    spec, code, rng = optimizer(kind), LinearCode(2, 2), np.random.default_rng(1)
    schema = spec.schema(5, weights)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    one, other, parity = Shard(schema, 8, 0), Shard(schema, 8, 0), Shard(schema, 0, 8)
    every, ones = np.arange(8), np.ones(8, np.uint8)

    def fold(member: int, deltas: np.ndarray, at: np.ndarray) -> None:
        parity.fold_(code, at, deltas, np.full(len(at), code.coefficients[1, member]))

    def whole() -> list[list[int]]:
        return [shard.broken_run(0, 8, shard is parity).tolist() for shard in (one, other, parity)]

    for member, shard in enumerate((one, other)):
        shard.initialise_(lambda at, first=8 * member: initial.of(at + first))  # type: ignore[misc]
        fold(member, shard.gather(every), every)
    assert whole() == [[], [], []]
    undo = []
    for step in range(1, 4):
        at = np.flatnonzero(rng.random(8) < 0.7)
        merged = merge([(at, rng.standard_normal((len(at), 5), np.float32))])
        deltas = one.apply_(spec, merged, 0.1, step, {}).deltas_UB
        undo.append((at, deltas))
        fold(0, deltas, at)
        assert whole() == [[], [], []]
    one.flip_(2, 13)
    parity.flip_(5, 8 * schema.nbytes - 1, parity=True)
    assert whole() == [[2], [], [5]]
    at, deltas = undo[-1]
    one.undo_(at, deltas)
    fold(0, deltas, at)
    values = some(3, schema.nbytes // 4)
    fold(1, other.overwrite_(np.array([0, 5, 6]), values).deltas_UB, np.array([0, 5, 6]))
    merged = merge([(every, rng.standard_normal((8, 5), np.float32))])
    fold(0, one.apply_(spec, merged, 0.1, 5, {}).deltas_UB, every)
    assert whole() == [[2], [], [5]]
    lost, missing = Shard(schema, 8, 0), np.ones(8, np.uint8)
    lost.install_(code, every, missing, [1, 3], [other.gather(every), parity.gather(every, parity=True)], 0)
    assert lost.broken_run(0, 8).tolist() == []
    assert ones.all()


def test_without_seals_nothing_is_looked_for() -> None:
    shard = Shard(Schema.of(3), 4, 2, sealed=False)
    shard.flip_(1, 5)
    assert not shard.sealed and not len(shard.broken_run(0, 4)) and not len(shard.broken(np.array([1])))
