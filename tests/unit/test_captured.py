"""`Captured` beside a copy of the records that was made at the moment: whatever changes, and wherever pieces end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torch_ecrec.codec import seals
from torch_ecrec.records import captured
from torch_ecrec.records.captured import CLEAN, KEPT, MARKED, Captured
from torch_ecrec.records.store import MemoryStore

POOLS = (1, 70, 16 << 20)  # bytes: a record in each piece; some; all in one
RECORD_BYTES = 12


def random_bytes(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(0, 256, shape, np.uint8)


def stored(records: Any, of: Any = None) -> MemoryStore:
    """A store whose records, and seals, are these arrays."""
    store = MemoryStore(*records.shape, sealed=of is not None)
    store.records_PB, store.seals_P = records, of
    return store


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_portions_are_of_the_moment(pool: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "POOL_BYTES", pool)
    rng = np.random.default_rng([pool, round(10 * share)])
    for count in (1, 2, 255, 256, 700):
        records = random_bytes(rng, count, RECORD_BYTES)
        was, marks = records.copy(), np.where(rng.random(count) < share, MARKED, CLEAN).astype(np.uint8)
        wanted = np.flatnonzero(marks)
        subject = Captured(stored(records), marks)
        found: list[Any] = []
        while not subject.is_over:
            if rng.random() < 0.5:
                positions = np.flatnonzero(rng.random(count) < rng.choice([0.0, 0.1, 1.0]))
                deltas = random_bytes(rng, len(positions), RECORD_BYTES)
                records[positions] ^= deltas
                subject.keep(positions, deltas)
                deltas[:] = 0  # it has a copy
            at, portion, damaged = subject.portion(int(rng.integers(1, 90)))
            assert not len(damaged)
            assert (portion == was[at]).all()
            found.extend(at.tolist())
        assert found == wanted.tolist(), "each of them once, in order"
        assert subject.kept_bytes == (RECORD_BYTES + 8) * np.count_nonzero(marks == KEPT)
        subject.let_go()
        assert subject.kept_bytes == 0


def test_what_does_not_fit_its_seal_is_told_when_it_is_given() -> None:
    rng = np.random.default_rng(0)
    records = random_bytes(rng, 20, RECORD_BYTES)
    of, marks = seals.seals_of(records), np.full(20, MARKED, np.uint8)
    marks[3] = CLEAN
    subject = Captured(stored(records, of), marks)
    for flipped in (3, 7, 12):
        records[flipped, 5] ^= 4
    subject.keep(np.array([2, 3]), np.zeros((2, RECORD_BYTES), np.uint8))
    subject.keep(np.array([7, 8, 9]), np.zeros((3, RECORD_BYTES), np.uint8))
    records[7, 5] ^= 4  # repaired: what was kept is not
    at, _, damaged = subject.portion(10)
    assert at.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10], "the damaged one that is not wanted is not looked at"
    assert damaged.tolist() == [7]
    assert subject.portion(100)[2].tolist() == [12]


@pytest.mark.parametrize("pool", POOLS)
def test_each_bit_that_flips_where_it_is_kept_is_told(pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "POOL_BYTES", pool)
    rng = np.random.default_rng(pool)
    changed = np.array([0, 2, 3, 6])
    for row in range(len(changed)):
        for bit in range(8 * (RECORD_BYTES + seals.SEAL_BYTES)):
            records, deltas = random_bytes(rng, 7, RECORD_BYTES), random_bytes(rng, 4, RECORD_BYTES)
            was, of = records.copy(), seals.seals_of(records)
            subject = Captured(stored(records, of), np.full(7, MARKED, np.uint8))
            records[changed] ^= deltas
            of[changed] ^= seals.seals_of(deltas)
            subject.keep(changed, deltas)
            piece, place = divmod(row, subject._piece_rows)
            subject._pieces[piece][place, bit // 8] ^= 1 << bit % 8
            _, given, damaged = subject.portion(7)
            assert damaged.tolist() == [changed[row]]
            assert (np.delete(given, changed[row], axis=0) == np.delete(was, changed[row], axis=0)).all()


def test_what_does_not_fit_changes_nothing() -> None:
    records, marks = np.zeros((4, 8), np.uint8), np.full(4, MARKED, np.uint8)
    with pytest.raises(ValueError, match="4 contiguous uint8"):
        Captured(stored(records), marks[:3])
    subject = Captured(stored(records), marks)
    for positions in ([1, 4], [-1, 2]):
        with pytest.raises(IndexError, match="out of range: there are 4 records"):
            subject.keep(np.array(positions), np.ones((2, 8), np.uint8))
    with pytest.raises(ValueError, match="`deltas_UB` must be"):
        subject.keep(np.array([1, 2]), np.ones((3, 8), np.uint8))
    assert (marks == MARKED).all()
    assert subject.kept_bytes == 0


def test_kernels_get_what_they_can_take() -> None:
    """They do not look: deltas of another type are other bytes, marks of what was never kept lead anywhere."""
    records = np.zeros((4, RECORD_BYTES), np.uint8)
    with pytest.raises(ValueError, match="must be CLEAN or MARKED"):
        Captured(stored(records), np.full(4, KEPT, np.uint8))
    subject = Captured(stored(records), np.full(4, MARKED, np.uint8))
    with pytest.raises(ValueError, match="must be uint8"):
        subject.keep(np.arange(2), np.zeros((2, RECORD_BYTES), np.int64))  # type: ignore[arg-type]
    subject.keep(np.arange(2), np.zeros((2, RECORD_BYTES), np.uint8))
    subject.let_go()
    subject.keep(np.arange(2, 4), random_bytes(np.random.default_rng(0), 2, RECORD_BYTES))
    assert subject.kept_bytes == 2 * (RECORD_BYTES + 8)
