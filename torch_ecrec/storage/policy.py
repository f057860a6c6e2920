"""Which kind of checkpoint comes next: full, or what has changed, and since which one.

    full            every one is full
    one-shot        one full; each later one has all that changed since it: two are read at a restore
    consecutive     each has what changed since the one before: the least to write; full again when a restore would read
                    as much in increments as in the full one
    intermittent    one-shot, until a new full one is expected to cost less in total

The formula of `intermittent` is that of Check-N-Run (Eisenman et al., NSDI 2022, "intermittent incremental
checkpoint"). With the full one as unit, let S_1 ... S_i be the sizes of the one-shot increments since. Suppose that
what comes costs as the past did. The next i + 1 checkpoints then cost

    F = 1 + S_1 + ... + S_i     if the next one is full: increments grow again as they have grown
    I = (i + 1) * S_i           if it is not: they are at least as large as the last one

and the next one is full as soon as F <= I. Example: sizes 1, 0.3, 0.5, 0.6 have F = 2.4 and I = 4 * 0.6 = 2.4: full.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.settings import CheckpointPolicy
from torch_ecrec.storage.manifest import Kind

POLICIES: tuple[str, ...] = get_args(CheckpointPolicy)


class Next(NamedTuple):
    """Says of which kind the next checkpoint is.

    Attributes:
        kind: "full" or "incremental".
        base: which of those since the last full one it builds on, 0: that one itself; None: on none.
        why: for people.
    """

    kind: Kind
    base: int | None
    why: str


def next_kind(policy: str, sizes: Sequence[int]) -> Next:
    """Returns which checkpoint comes next.

    Args:
        policy: one of `POLICIES`.
        sizes: bytes of the last full one and of all incremental ones since, in their order; none if there is no full
            one, or none that the servers know of.

    Raises:
        ValueError: no such policy.
    """
    require(policy in POLICIES, f"unknown policy {policy!r} of checkpoints; expected one of {', '.join(POLICIES)}")
    if not sizes:
        return Next("full", None, "there is none to build on")
    if policy == "full":
        return Next("full", None, "all are")
    if policy == "consecutive":
        if sum(sizes[1:]) >= sizes[0]:
            return Next("full", None, "a restore would read as much in increments as in the full one")
        return Next("incremental", len(sizes) - 1, "what has changed since the one before")
    if policy == "intermittent" and len(sizes) > 1:
        full, without = sum(sizes), len(sizes) * sizes[-1]
        if full <= without:
            return Next("full", None, f"the next {len(sizes)} are expected to take {full:,} bytes so, else {without:,}")
    return Next("incremental", 0, "what has changed since the last full one")
