"""A thread that never needs the interpreter's lock, and tells others whether this process computes.

A call in C may hold the lock for as long as it takes: one that unpickles a large file, sorts, collects garbage, or
compiles. No Python runs meanwhile in any thread, heartbeats included, and the process looks as if it were stopped. One
thread is in compiled code all its life (`_answer`). It accepts who connects, and says `COMPUTES` if

- the heartbeats' thread, which has its *turn* several times a second, has had none for `OVERDUE_S`, and found that all
  was well when it had the last: so something holds the lock, and the process was not hung before that; and
- the process *computes*: within `RECENT_S`, one of its threads had a core for `SHARE` of the time between two looks,
  or the process read from a disk (pages of a mapped file, or of swapped memory, too). Whoever only waits for the lock
  asks for it every 5 ms, which takes 0.2 % of a core.

Otherwise it says `THERE`. A process that is stopped or frozen says nothing, as this thread is, too; its kernel accepts.

Who waits with the lock held, and does not compute, hangs, and no Python of its own can end it. So this thread does,
once it has seen that for long enough (`Answers.ends`).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import typing as numba_typing

from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import pointer
from torch_ecrec.runtime.lifetime import COMPUTES as COMPUTES
from torch_ecrec.runtime.lifetime import THERE as THERE

OVERDUE_S = 0.5
RECENT_S = 2.0
SHARE = 0.01  # share of a core: a limit of 2 % for the whole process is enough to be seen
LOOK_S = 0.25
PAUSE_S = 0.2  # after a failed accept: no more descriptors, for instance

_LAST_WORDS = b"torch-ecrec: this process hangs: a call holds the interpreter's lock, and does not compute\n"
_THREADS_MOST = 4096  # that are looked at
_TURN, _WELL, _ENDS, _LIMIT, _CODE = 0, 1, 2, 3, 4  # of what Python says: nanoseconds, two flags, `Answers.ends`
_POLLIN, _MSG_NOSIGNAL, _MSG_DONTWAIT, _MONOTONIC, _RUSAGE_SELF = 1, 0x4000, 0x40, 1, 0
_MAJFLT, _INBLOCK, _RUSAGE_WORDS = 9, 11, 18  # of `struct rusage`, in words of 8 bytes
_NAME = 19  # where `struct dirent` has the name

_int, _word, _address = types.int32, types.int64, types.uintp


def _external(name: str, result: Any, *arguments: Any) -> Any:
    """Declares a function of the C library, for kernels."""
    tools: Any = numba_typing  # untyped
    return types.ExternalFunction(name, tools.signature(result, *arguments))


_poll: Any = _external("poll", _int, _address, _word, _int)
_accept: Any = _external("accept", _int, _int, _address, _address)
_send: Any = _external("send", _word, _int, _address, _word, _int)
_close: Any = _external("close", _int, _int)
_write: Any = _external("write", _word, _int, _address, _word)
_exit: Any = _external("_exit", _int, _int)
_usleep: Any = _external("usleep", _int, types.uint32)
_clock_gettime: Any = _external("clock_gettime", _int, _int, _address)
_getrusage: Any = _external("getrusage", _int, _int, _address)
_opendir: Any = _external("opendir", _address, _address)
_readdir: Any = _external("readdir", _address, _address)
_closedir: Any = _external("closedir", _int, _address)


@kernel()
def _clock_ns(clock: Any, time_2: Any) -> Any:
    """Returns a thread's CPU time in nanoseconds; 0 if the thread has ended."""
    if _clock_gettime(np.int32(clock), time_2.ctypes.data) != 0:
        return 0
    return time_2[0] * 1_000_000_000 + time_2[1]


@kernel()
def _look(folder: Any, threads_N2: Any, count: Any, passed_ns: Any, words: Any) -> Any:
    """Writes each thread's CPU time into `threads_N2`; returns how many there are, negated if one computes.

    Args:
        folder: of this process's threads, a name that ends in a 0.
        threads_N2: what was found last, `count` rows of it: a thread's number, and nanoseconds.
        passed_ns: since that look.
        words: room for what the system says.
    """
    busy = False
    place = _opendir(folder.ctypes.data)
    found = 0
    before_N2 = threads_N2[:count].copy()
    while place != 0 and found < _THREADS_MOST:
        entry = _readdir(place)
        if entry == 0:
            break
        name = carray(pointer(entry), 256, np.uint8)
        thread = np.int64(0)
        i = _NAME
        while 48 <= name[i] <= 57:
            thread = thread * 10 + name[i] - 48
            i += 1
        if thread == 0:
            continue  # . and ..
        ran_ns = _clock_ns((~thread << 3) | 6, words)  # what pthread_getcpuclockid makes of a thread's number
        threads_N2[found, 0], threads_N2[found, 1] = thread, ran_ns
        found += 1
        before_ns = np.int64(0)  # of one that has begun since
        for j in range(before_N2.shape[0]):
            if before_N2[j, 0] == thread:
                before_ns = before_N2[j, 1]
        if count > 0 and ran_ns - before_ns > SHARE * passed_ns:
            busy = True
    if place != 0:
        _closedir(place)
    return -found if busy else found


@kernel()
def _answer(listener: Any, said_5: Any, folder: Any, letters: Any, last_words: Any) -> Any:
    """Answers connections until `said_5[_ENDS]`, and ends the process if it hangs.

    `letters`: `THERE`, `COMPUTES`. `last_words`: written to standard error if the process hangs.
    """
    words = np.zeros(_RUSAGE_WORDS, np.int64)
    waits = np.zeros(2, np.int32)  # struct pollfd
    threads_N2 = np.zeros((_THREADS_MOST, 2), np.int64)
    count, looked_ns, computed_ns, read, hung_ns = 0, np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    while said_5[_ENDS] == 0:
        waits[0], waits[1] = listener, _POLLIN
        ready = _poll(waits.ctypes.data, 1, np.int32(LOOK_S * 1000))
        now_ns = _clock_ns(_MONOTONIC, words)
        if now_ns - said_5[_TURN] < OVERDUE_S * 1e9:
            count, computed_ns, hung_ns = 0, np.int64(0), np.int64(0)
        elif count == 0 or now_ns - looked_ns >= LOOK_S * 0.9e9:
            first = count == 0
            count = _look(folder, threads_N2, count, now_ns - looked_ns, words)
            busy, count = count < 0, abs(count)
            _getrusage(_RUSAGE_SELF, words.ctypes.data)
            if not first and (busy or words[_MAJFLT] + words[_INBLOCK] > read):
                computed_ns, hung_ns = now_ns, np.int64(0)
            elif not first:
                hung_ns += min(now_ns - looked_ns, np.int64(2e9 * LOOK_S))  # not while this process was stopped
            if 0 < said_5[_LIMIT] < hung_ns:
                _write(np.int32(2), last_words.ctypes.data, last_words.shape[0])
                _exit(np.int32(said_5[_CODE]))
            looked_ns, read = now_ns, words[_MAJFLT] + words[_INBLOCK]
        if ready > 0 and said_5[_ENDS] == 0:
            sock = _accept(np.int32(listener), 0, 0)
            if sock < 0:
                _usleep(np.uint32(PAUSE_S * 1e6))
                continue
            computes = said_5[_WELL] != 0 and computed_ns > 0 and now_ns - computed_ns < RECENT_S * 1e9
            _send(sock, letters[1 if computes else 0 :].ctypes.data, 1, _MSG_NOSIGNAL | _MSG_DONTWAIT)
            _close(sock)


class Answers:
    """Answers processes that connect, on a thread that runs `run`: whether this process computes."""

    def __init__(self) -> None:
        self._said_5 = np.array([time.monotonic_ns(), 1, 0, 0, 0], np.int64)

    def ends(self, limit_s: float, code: int) -> None:
        """Makes this process exit with `code` if the lock is held for `limit_s` while nothing computes."""
        self._said_5[_CODE] = code
        self._said_5[_LIMIT] = int(limit_s * 1e9)

    def turn(self, well: bool) -> None:
        """Notes that the heartbeat thread runs. `well`: nothing that it looks at hangs."""
        self._said_5[_WELL] = well
        self._said_5[_TURN] = time.monotonic_ns()

    def run(self, listener: int) -> None:
        """Answers until `end`, and then until somebody connects or the listener is shut down.

        It must not be closed before.
        """
        folder = np.frombuffer(b"/proc/self/task\0", np.uint8)
        letters, words = np.frombuffer(THERE + COMPUTES, np.uint8), np.frombuffer(_LAST_WORDS, np.uint8)
        _answer(listener, self._said_5, folder, letters, words)

    def end(self) -> None:
        """Ends `run`: the next connection is not answered."""
        self._said_5[_ENDS] = 1


def warm() -> None:
    """Compiles or loads every kernel of this module."""
    over = Answers()
    over.end()
    over.run(-1)
