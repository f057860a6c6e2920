"""What words of `messages.py` are made of that are about checkpoints: which one a cluster, or a slot, began with."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from torch_ecrec.protocol.bounds import (
    PARTIAL_RESTORES_MOST,
    SAVES_MOST,
    SLOTS_MOST,
    Count,
    Folder,
    FolderOrNone,
    Inexact,
    Url,
    Version,
)


class Restored(Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint that a cluster began with, or went back to.

    Attributes:
        done: steps of training until then.
        times: how often this cluster went back to one.
        inexact: why its records are not those of an undisturbed run then, and since which step of training.
    """

    url: Url
    folder: Folder
    done: Count
    times: Count = 0
    inexact: Inexact = []


Since = Annotated[list[tuple[Folder, Count]], Meta(max_length=SAVES_MOST)]


class Saves(Struct, frozen=True, forbid_unknown_fields=True):
    """Prioritised saves that count: of some rows of every slot, which are no checkpoint.

    Attributes:
        base: the checkpoint that they are on, "" if there is none. `done`: steps of training until then.
        since: (name, steps of training) of each, oldest first.
    """

    base: FolderOrNone = ""
    done: Count = 0
    since: Since = []

    @property
    def newest(self) -> int:
        """Steps of training until the last of all."""
        return self.since[-1][1] if self.since else self.done

    def until(self, done: int) -> Saves:
        """Returns the saves without those of later steps."""
        return msgspec.structs.replace(self, since=[save for save in self.since if save[1] <= done])


class PartialRestore(Struct, frozen=True, forbid_unknown_fields=True):
    """Slots that were lost beyond repair and begin anew with their records of a checkpoint, the others as they are.

    Attributes:
        lives: (slot, incarnation, at) of each: the life that begins so, and the steps of training after which it goes
            on (None: not known yet). What was trained from `done` to there is lost in that slot.
        url, folder: the checkpoint.
        done: steps of training until then.
        dense_lost: no slot was left that kept dense snapshots.
        saves: prioritised saves since that checkpoint, as in `Saves`. A life takes those of steps that nobody goes back
            to before of: `SlotRestore`.
    """

    lives: Annotated[list[tuple[Count, Version, Count | None]], Meta(max_length=SLOTS_MOST)]
    url: Url
    folder: Folder
    done: Count
    dense_lost: bool = False
    saves: Since = []


PartialRestores = Annotated[list[PartialRestore], Meta(max_length=PARTIAL_RESTORES_MOST)]
