"""Flips a bit in a server's memory, or on its disk, as failing ones do: for `torch-ecrec chaos` and tests."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from functools import partial

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
        (slot, table_group, shard.parity_rows if parity else shard.data_rows)
        for slot in slots
        if slot.whole
        for table_group, shard in enumerate(slot.shards)
    ]
    shards = [one for one in shards if one[2]]
    if not shards:
        log.warning("no bit is flipped yet: there is no slot that is whole")
        return False
    (slot, table_group, rows), *_ = chance.choices(shards, [rows for _, _, rows in shards])
    position, bit = chance.randrange(rows), chance.randrange(8 * slot.shards[table_group].schema.nbytes)
    slot.shards[table_group].flip_(position, bit, parity)
    _say(slot, table_group, parity, position, "")
    return True


def flip_below(slots: Iterable[Slot], chance: random.Random) -> Callable[[], None] | None:
    """As `flip`, of a record or parity that is on the disk of the tier, and not in memory.

    Returns:
        What reads it: nobody else may for long. None: there was none to choose from.
    """
    found = [
        (slot, table_group, parity, below_M)
        for slot in slots
        if slot.whole
        for table_group, shard in enumerate(slot.shards)
        for parity in (False, True)
        if len(below_M := shard.below(parity))
    ]
    if not found:
        log.warning("no bit is flipped yet: nothing of a slot that is whole is on a disk")
        return None
    ((slot, table_group, parity, below_M),) = chance.choices(found, [len(below_M) for *_, below_M in found])
    position, bit = int(chance.choice(below_M)), chance.randrange(8 * slot.shards[table_group].schema.nbytes)
    slot.shards[table_group].flip_below_(position, bit, parity)
    _say(slot, table_group, parity, position, " on the disk")
    return partial(slot.scrubber.look, table_group, parity, np.array([position]))


def _say(slot: Slot, table_group: int, parity: bool, position: int, where: str) -> None:
    ((table, row, member),) = slot.scrubber.places(table_group, parity, np.array([position]))
    what = "parity" if parity else "record"
    place = slot.index, what, table, row, member
    log.warning("a bit is flipped%s: slot %d, %s, table %s, row %d, member %d", where, *place)
