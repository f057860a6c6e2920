"""The loops of a tiered store: which records have frames, which frames to empty, records to and from cells of the file.

Shapes: P records of the store, F frames, U records asked for, W words of a record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from torch_ecrec.codec.field import WORD_BYTES
from torch_ecrec.codec.seals import seal_at
from torch_ecrec.runtime.kernel_cache import kernel
from torch_ecrec.runtime.kernels import AHEAD, pointer, prefetch

COUNT, DIRTY, PENDING = 0xFF, 0x100, 0x200  # of the state of a frame: how often it was changed, and two flags
ABSENT, WANTED, COMING = -1, -2, -3  # in place of a frame: there is none; there is none yet; it is being read


@kernel()
def find(
    positions_U: Any, frame_P: Any, meta_F: Any, call: Any, bump: Any, mark: Any, keep: Any, at_U: Any, absent_U: Any
) -> Any:
    """Writes the frames of some records, and notes that they are used in this call.

    Args:
        positions_U: -1 skips one.
        frame_P: of each record, its frame, or `ABSENT`. Those of the absent ones are `WANTED` afterwards.
        meta_F: (F, 2): the call in which each frame was used last, and its state.
        bump: added to its count, once in a call.
        mark, keep: its state becomes `state & keep | mark`.
        at_U: written; -1 where there is no frame yet.
        absent_U: written: the records without one, each once.

    Returns:
        How many have none, how many are pending, and the index of the first position outside of all; -1: there is none.
    """
    count, pending, last = 0, 0, frame_P.shape[0]
    for i in range(positions_U.shape[0]):
        if positions_U[i] < -1 or positions_U[i] >= last:
            return 0, 0, i
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        at_U[i] = -1
        if position < 0:
            continue
        frame = frame_P[position]
        if frame >= 0:
            at_U[i] = frame
            state = meta_F[frame, 1]
            if meta_F[frame, 0] != call:
                meta_F[frame, 0] = call
                if state & COUNT < COUNT:
                    state += bump
            pending += state & keep & PENDING != 0
            meta_F[frame, 1] = state & keep | mark
        elif frame != WANTED:
            frame_P[position] = WANTED
            absent_U[count] = position
            count += 1
    return count, pending, -1


@kernel()
def want(
    positions_U: Any,
    frame_P: Any,
    place_P: Any,
    none: Any,
    per_segment: Any,
    in_memory: Any,
    call: Any,
    meta_F: Any,
    new_U: Any,
) -> Any:
    """Notes which records are to be read, each once in `new_U`; returns how many, and how many are on their way.

    Args:
        in_memory: the segment of the file that is in memory: what is there is not read.
    """
    count, coming = 0, 0
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        frame = frame_P[position]
        if frame >= 0:
            meta_F[frame, 0] = call
        elif frame == COMING:
            coming += 1
        elif place_P[position] != none and place_P[position] // per_segment != in_memory:
            frame_P[position] = COMING
            new_U[count] = position
            count += 1
    return count, coming + count


@kernel()
def frames_of(positions_U: Any, frame_P: Any, at_U: Any) -> None:
    """Writes the frame of each record; -1 for a position of -1."""
    for i in range(positions_U.shape[0]):
        position = positions_U[i]
        at_U[i] = frame_P[position] if position >= 0 else -1


@kernel()
def histogram(position_F: Any, meta_F: Any, before: Any, done: Any, found: Any) -> None:
    """found[c] = how many frames in use (of a position plus 1) with a count of c may be emptied: see `sweep`."""
    for f in range(position_F.shape[0]):
        if position_F[f] > 0 and (meta_F[f, 0] < before or meta_F[f, 0] == done):
            found[meta_F[f, 1] & COUNT] += 1


@kernel()
def sweep(position_F: Any, meta_F: Any, before: Any, done: Any, hand: Any, threshold: Any, equal: Any, out: Any) -> Any:
    """Picks frames to empty, going round from `hand`; returns how many, and where the hand is then.

    Args:
        before, done: those that were used last in `before` or later are left, but for those of the call `done`.
        threshold: those with a lower count are picked; of those with just this, `equal` at most.
        out: written; as many at most.
    """
    frames, count = position_F.shape[0], 0
    for _ in range(frames):
        if count == out.shape[0]:
            break
        if position_F[hand] > 0 and (meta_F[hand, 0] < before or meta_F[hand, 0] == done):
            if meta_F[hand, 1] & COUNT < threshold:
                out[count] = hand
                count += 1
            elif meta_F[hand, 1] & COUNT == threshold and equal > 0:
                out[count] = hand
                count += 1
                equal -= 1
        hand += 1
        if hand == frames:
            hand = 0
    return count, hand


@kernel()
def pack(
    records_XW: Any, at_U: Any, into: Any, first: Any, per_bucket: Any, bucket_bytes: Any, cell_bytes: Any
) -> None:
    """Copies records to cells `first` and the following ones of `into`."""
    words, source, start = records_XW.shape[1], records_XW.ctypes.data, into.ctypes.data
    for i in range(at_U.shape[0]):
        if i + AHEAD < at_U.shape[0]:
            prefetch(source + at_U[i + AHEAD] * words * WORD_BYTES, words * WORD_BYTES)
        cell = first + i
        place = start + cell // per_bucket * bucket_bytes + cell % per_bucket * cell_bytes
        into_W = carray(pointer(place), words, np.uint32)
        for j in range(words):
            into_W[j] = records_XW[at_U[i], j]


@kernel()
def unpack(source: Any, starts_V: Any, into_XW: Any, seals_U: Any, at_U: Any, some_V: Any, broken_U: Any) -> None:
    """Copies cells, each from where it starts in `source`, to records.

    Args:
        seals_U: that they should fit.
        some_V: which of the U each is.
        broken_U: written for these: whether the record does not fit its seal.
    """
    words, start, into = into_XW.shape[1], source.ctypes.data, into_XW.ctypes.data
    for v in range(some_V.shape[0]):
        at = at_U[some_V[v]]
        from_W = carray(pointer(start + starts_V[v]), words, np.uint32)
        for j in range(words):
            into_XW[at, j] = from_W[j]
        broken_U[some_V[v]] = seal_at(into + at * words * WORD_BYTES, words) != seals_U[some_V[v]]


@kernel()
def copy_frames(source_XW: Any, seals_X: Any, from_V: Any, into_UW: Any, seals_U: Any, at_V: Any) -> None:
    """Copies records with their seals from some places to others."""
    for v in range(from_V.shape[0]):
        for j in range(source_XW.shape[1]):
            into_UW[at_V[v], j] = source_XW[from_V[v], j]
        seals_U[at_V[v]] = seals_X[from_V[v]]


@kernel()
def xor_frames(source_VW: Any, seals_V: Any, into_XW: Any, seals_X: Any, at_V: Any) -> None:
    """XORs records and seals into others."""
    for v in range(at_V.shape[0]):
        for j in range(source_VW.shape[1]):
            into_XW[at_V[v], j] ^= source_VW[v, j]
        seals_X[at_V[v]] ^= seals_V[v]


@kernel()
def in_segments(place_P: Any, per_segment: Any, chosen_S: Any, none: Any, out: Any) -> Any:
    """Writes the positions whose places are in the chosen segments, ascending; returns how many."""
    count = 0
    for p in range(place_P.shape[0]):
        if place_P[p] != none and chosen_S[place_P[p] // per_segment]:
            out[count] = p
            count += 1
    return count
