"""A sum of bytes, to tell whether a memory was changed."""

import numpy as np
import pytest

from torch_ecrec.runtime import byte_sums


def sum_of_bytes(data: np.ndarray) -> int:
    return byte_sums.sum_of_bytes(data.ctypes.data, len(data))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 255, 256, 257, 511, 512, 1000, 4096 + 5])
def test_any_changed_byte_changes_the_sum(count: int) -> None:
    random = np.random.default_rng(count)
    data = random.integers(0, 256, count, np.uint8)
    first = sum_of_bytes(data)
    assert first == sum_of_bytes(data.copy()) and 0 <= first < 1 << 32
    for at in range(count):
        bit = np.uint8(1 << random.integers(8))
        data[at] ^= bit
        assert sum_of_bytes(data) != first
        data[at] ^= bit
    assert sum_of_bytes(data) == first
    if count:
        assert sum_of_bytes(np.zeros(count, np.uint8)) != sum_of_bytes(np.zeros(count - 1, np.uint8))


def test_what_changes_places_changes_the_sum() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1 << 12, np.uint8)
    first = sum_of_bytes(data)
    words = data.view(np.uint32)
    for a, b in [(0, 1), (0, 64), (5, 69), (0, 1023), (63, 64)]:
        words[[a, b]] = words[[b, a]]
        assert sum_of_bytes(data) != first, (a, b)
        words[[a, b]] = words[[b, a]]
    assert sum_of_bytes(data) == first
    assert sum_of_bytes(np.roll(data, 256)) != first


def test_a_thousand_random_changes_are_all_told_apart() -> None:
    random = np.random.default_rng(1)
    seen = {sum_of_bytes(random.integers(0, 256, 3000, np.uint8)) for _ in range(1000)}
    assert len(seen) == 1000
