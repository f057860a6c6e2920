"""Savers beside what they mean, written down row by row: which rows each picks, and what it keeps."""

from __future__ import annotations

import numpy as np
import pytest

from torch_ecrec.records.savers import SAVERS, ChangedMost, MostFrequentlyUsed, SubSampledUsed, greatest, saver_of

ROWS, DIM = 40, 3


def batches(seed: int, steps: int = 30) -> list[np.ndarray]:
    """What steps change: few rows often, some never."""
    rng = np.random.default_rng(seed)
    return [np.unique(np.minimum(rng.zipf(1.3, 12) - 1, ROWS - 5)).astype(np.int64) for _ in range(steps)]


def ordered(values: list[float], most: int) -> list[int]:
    """The oracle of `greatest`: sorted by value, then by place."""
    places = sorted((place for place, value in enumerate(values) if value > 0), key=lambda at: (-values[at], at))
    return sorted(places[:most])


def test_the_example_of_the_docstring() -> None:
    saver = MostFrequentlyUsed(4)
    for rows in ([0, 1], [1, 3], [1]):
        saver.note(np.array(rows, np.int64))
    assert saver.pick(2).tolist() == [0, 1]
    saver.settle()
    assert saver.memory_bytes == 16
    assert saver.pick(2).tolist() == [3], "what was picked begins anew, what was not goes on"


@pytest.mark.parametrize("seed", range(20))
def test_the_greatest_are_those_of_a_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for most in (0, 1, 7, ROWS, 2 * ROWS):
        for values in (rng.integers(0, 4, ROWS).astype(np.uint32), rng.integers(0, 4, ROWS).astype(np.float32)):
            assert greatest(values, most).tolist() == ordered(values.tolist(), most)
    broken = np.array([1, np.nan, 3, np.inf], np.float32)
    assert greatest(broken, 2).tolist() == [1, 3], "a row that has become NaN is not passed over"


@pytest.mark.parametrize("seed", range(5))
def test_mfu_counts_steps_since_a_row_was_saved(seed: int) -> None:
    saver, counts = MostFrequentlyUsed(ROWS), [0.0] * ROWS
    for step, rows in enumerate(batches(seed), 1):
        saver.note(rows)
        for row in rows.tolist():
            counts[row] += 1
        if step % 4 == 0:
            wanted = ordered(counts, 5)
            assert saver.pick(5).tolist() == wanted and len(wanted) == 5
            for row in wanted:
                counts[row] = 0


@pytest.mark.parametrize("seed", range(5))
def test_scar_picks_what_is_furthest_from_what_was_saved(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((ROWS, DIM)).astype(np.float32)
    saved = weights.copy()
    saver = ChangedMost(ROWS, lambda rows: weights[rows])
    assert saver.pick(5).tolist() == [], "nothing has changed"
    for step, rows in enumerate(batches(seed), 1):
        weights[rows] += rng.standard_normal((len(rows), DIM)).astype(np.float32)
        saver.note(rows)
        if step % 4 == 0:
            distances = [float(np.sum((weights[row] - saved[row]).astype(np.float64) ** 2)) for row in range(ROWS)]
            wanted = ordered(distances, 5)
            assert saver.pick(5).tolist() == wanted and len(wanted) == 5
            saved[wanted] = weights[wanted]
    assert saver.memory_bytes == weights.nbytes + 5 * (8 + 4 * DIM), "a copy, and what undoes the last pick"
    saver.settle()
    assert saver.memory_bytes == weights.nbytes


@pytest.mark.parametrize("every", [1, 3])
def test_ssu_looks_at_every_nth_change_across_steps(every: int) -> None:
    """With room for all nothing is forgotten: it is the sampled changes, whatever the sizes of the steps."""
    saver, changes = SubSampledUsed(ROWS, ROWS, seed=1, every=every), list[int]()
    for rows in batches(3, 7):
        saver.note(rows)
        changes += rows.tolist()
    assert saver.pick(ROWS).tolist() == sorted(set(changes[::every])) and saver.pick(ROWS).tolist() == []


def test_ssu_is_bounded_and_forgets_at_random_never_what_came_last() -> None:
    left = []
    for seed in range(50):
        saver = SubSampledUsed(ROWS, 6, seed=seed, every=1)
        saver.note(np.arange(0, 6, dtype=np.int64))
        saver.note(np.array([10, 11], np.int64))
        assert saver.memory_bytes == 6 * 8 + ROWS
        picked = saver.pick(6).tolist()
        assert picked[-2:] == [10, 11] and len(picked) == 6
        left += picked[:-2]
    assert set(left) == set(range(6)), "each of the older ones stays sometimes"
    saver.settle()
    saver.note(np.arange(0, 30, dtype=np.int64))
    assert saver.memory_bytes == 6 * 8 + ROWS, "also where one step brings more than there is room for"
    assert len(saver.pick(4)) == 4 and len(saver.pick(4)) == 2, "what is not picked stays"


def test_ssu_meets_the_rows_that_change_often() -> None:
    saver = SubSampledUsed(ROWS, 5, seed=2, every=2)
    often = 0
    for rows in batches(9, 200):
        saver.note(rows)
        often += 0 in saver.pick(5).tolist()
    assert often > 60, "of 200, where row 0 is in nearly every step and every second change is looked at"


def test_all_are_made_by_name_and_others_refused() -> None:
    weights = np.zeros((ROWS, DIM), np.float32)
    memory = {}
    for name in SAVERS:
        saver = saver_of(name, ROWS, 0.125, lambda rows: weights[rows])
        for rows in batches(1):
            saver.note(rows)
        memory[name] = saver.memory_bytes
        picked = saver.pick(ROWS)
        assert picked.dtype == np.int64 and np.all(np.diff(picked) > 0)
    assert memory == {"everything": 0, "mfu": 4 * ROWS, "ssu": 5 * 8 + ROWS, "scar": weights.nbytes}
    assert saver_of("everything", 3, 1.0, lambda rows: weights[rows]).pick(3).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="`most` must be at least 3, which is everything, got 2"):
        saver_of("everything", 3, 1.0, lambda rows: weights[rows]).pick(2)
    with pytest.raises(ValueError, match="unknown saver 'lru'; expected one of everything, mfu, ssu, scar"):
        saver_of("lru", 3, 1.0, lambda rows: weights[rows])


@pytest.mark.parametrize("name", [name for name in SAVERS if name != "everything"])
def test_what_was_picked_for_nothing_is_picked_again(name: str) -> None:
    """With everything that was noted meanwhile; and once it is settled, it is not."""
    weights = np.zeros((ROWS, DIM), np.float32)
    saver = saver_of(name, ROWS, 0.5, lambda rows: weights[rows])
    for rows in batches(4):
        weights[rows] += 1
        saver.note(rows)
    first = saver.pick(5)
    saver.put_back()
    again = saver.pick(ROWS)
    assert set(first) <= set(again)
    saver.settle()
    saver.put_back()
    assert saver.pick(ROWS).tolist() == [], "what is settled is saved"


def test_counts_go_on_where_they_were() -> None:
    saver = MostFrequentlyUsed(4)
    for rows in ([0, 1], [1, 3], [1]):
        saver.note(np.array(rows, np.int64))
    saver.pick(1)
    saver.note(np.array([1, 2], np.int64))
    saver.put_back()
    saver.note(np.array([0], np.int64))
    assert [saver.pick(1).tolist() for _ in range(2)] == [[1], [0]]
