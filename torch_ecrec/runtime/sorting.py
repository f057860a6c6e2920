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
    digit_bits = -(-bits // passes)
    for shift in range(first_bit, end_bit, max(1, digit_bits)):
        below, mask = np.uint64(shift), np.uint64((1 << min(digit_bits, end_bit - shift)) - 1)
        next_D = np.zeros(1 << digit_bits, np.int64)  # how many words have each digit, then where its next word goes
        for i in range(words_N.shape[0]):
            next_D[words_N[i] >> below & mask] += 1
        place = 0
        for d in range(next_D.shape[0]):
            count = next_D[d]
            next_D[d] = place
            place += count
        for i in range(words_N.shape[0]):
            word = words_N[i]
            digit = word >> below & mask
            place = next_D[digit]
            next_D[digit] = place + 1
            spare_N[place] = word
        words_N, spare_N = spare_N, words_N
    return words_N
