"""Flips a bit in a server's memory, as failing memory does: for `torch-ecrec chaos` and tests."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import numpy as np

from torch_ecrec.server.slot import Slot

log = logging.getLogger(__name__)


def flip(slots: Iterable[Slot], parity: bool, chance: random.Random) -> bool:
    """One bit of a record (or a parity) of some slot that is whole, behind its seal's back.

    Args:
        slots: of a server.
        parity: of a parity.
        chance: decides which.

    Returns:
        Whether there was any to choose from.
    """
    shards = [
        (slot, slab, shard.parity_rows if parity else shard.data_rows)
        for slot in slots
        if slot.whole
        for slab, shard in enumerate(slot.shards)
    ]
    shards = [one for one in shards if one[2]]
    if not shards:
        log.warning("no bit is flipped: there is no slot that is whole")
        return False
    (slot, slab, rows), *_ = chance.choices(shards, [rows for _, _, rows in shards])
    position, bit = chance.randrange(rows), chance.randrange(8 * slot.shards[slab].schema.nbytes)
    slot.shards[slab].flip_(position, bit, parity)
    ((table, row, member),) = slot.scrubber.places(slab, parity, np.array([position]))
    what = "parity" if parity else "record"
    log.warning("a bit is flipped: slot %d, %s, table %s, row %d, member %d", slot.index, what, table, row, member)
    return True
