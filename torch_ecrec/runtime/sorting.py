"""`sort_by_bits`, for kernels: a stable sort of words by some of their bits.

    words 0x25, 0x13, 0x24 by bits 4 to 7     0x13, 0x25, 0x24

A kernel that sorts keys puts what it wants to know of each, an index say, into the bits below the key, and finds it
again in the sorted words. It sorts by digits, the least significant first (Knuth, TAOCP 3, 5.2.5), so that it takes a
time that grows with the number of words, and of bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_ecrec.runtime.kernel_cache import kernel

WORD_BITS = 64
_DIGIT_BITS_MOST = 11  # of a pass; its counts stay in the first-level cache


@kernel()
def sort_by_bits(words_N: Any, spare_N: Any, first_bit: Any, end_bit: Any) -> Any:
    """Sorts words by their bits [first_bit, end_bit). Of two that are alike in these the earlier one stays in front.

    Args:
        words_N: (N,) uint64. Overwritten.
        spare_N: (N,) uint64. Overwritten.
        first_bit: the least significant bit that counts.
        end_bit: at most 64.

    Returns:
        (N,) uint64: one of the two arrays, which has the sorted words.
    """
    bits = end_bit - first_bit
    passes = max(1, -(-bits // _DIGIT_BITS_MOST))
    digit_bits = max(1, -(-bits // passes))
    one = np.uint64(1)
    next_D, later_D = np.zeros((2, 1 << digit_bits), np.uint64)  # how many words have each digit; that of the next pass
    below, mask = np.uint64(first_bit), np.uint64((1 << min(digit_bits, bits)) - 1)
    for i in range(words_N.shape[0]):
        next_D[words_N[i] >> below & mask] += one
    for shift in range(first_bit, end_bit, digit_bits):
        left = end_bit - shift - digit_bits  # bits of later passes
        later_below, later_mask = np.uint64(0), np.uint64(0)
        if left > 0:
            later_below, later_mask = np.uint64(shift + digit_bits), np.uint64((1 << min(digit_bits, left)) - 1)
        place = np.uint64(0)
        for d in range(next_D.shape[0]):  # from here on: where the next word of each digit goes
            count = next_D[d]
            next_D[d] = place
            place += count
            later_D[d] = 0
        for i in range(words_N.shape[0]):
            word = words_N[i]
            digit = word >> below & mask
            place = next_D[digit]
            next_D[digit] = place + one
            spare_N[place] = word
            later_D[word >> later_below & later_mask] += one
        words_N, spare_N = spare_N, words_N
        next_D, later_D = later_D, next_D
        below, mask = later_below, later_mask
    return words_N
