"""Makes glibc's malloc keep freed memory, since every step needs the memory of the step before.

By default it gives large blocks back to the system as soon as they are freed and asks for them again a moment later;
the system hands out zeroed pages, one fault each. With a few MB per message that was a tenth of all CPU time of a step.
"""

from __future__ import annotations

import contextlib
import ctypes

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what glibc accepts at most; larger blocks go back in any case
_ARENAS = 2  # each keeps what it was given; threads of ours do not allocate at the same time for long


def environment(most_bytes: int) -> dict[str, str]:
    """Returns the variables that give a process the same setting from its start on (mallopt(3))."""
    limit = str(min(most_bytes, 2**31 - 1))
    return {
        "MALLOC_ARENA_MAX": str(_ARENAS),
        "MALLOC_MMAP_THRESHOLD_": str(_LARGEST_MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": limit,
    }


def keep_freed(most_bytes: int) -> bool:
    """Lets this process keep freed memory up to `most_bytes` for reuse; 0 changes nothing.

    Returns:
        Whether the C library took it. False where it is not glibc.
    """
    if most_bytes == 0:
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        limit = min(most_bytes, 2**31 - 1)
        wanted = ((_M_ARENA_MAX, _ARENAS), (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), (_M_TRIM_THRESHOLD, limit))
        return all([bool(mallopt(option, value)) for option, value in wanted])
    return False
