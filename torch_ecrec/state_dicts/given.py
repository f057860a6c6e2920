"""The tensors that state dicts were given of tables: a write into one changes the table, until the table changes.

    sd = model.state_dict()
    sd["ebc.embedding_bags.t.weight"].local_shards()[0].tensor[7] = 0     # the table has it from now on, as in TorchRec

There the tensor is the table. Here it is a copy of this trainer's rows, and what was written is loaded before the rows
are next asked for, as by `model.load_state_dict(...)`.

torch counts what its own operations write. What is written past it, through `.numpy()`, `.data` or memory that another
program has, is found by a sum of the bytes (`runtime/byte_sums.py`), taken when the tensor is given and again at each
look: before a training step, a save, a flush, and when the user lets go of the tensor. Evaluations look often: of a
tensor of more than `WHOLE_BYTES` the first one looks at the whole, later ones at a part.

After the next training step, or load, the copy is older than the table: a write into it then changes nothing, and is
told; one past torch, as far as a part of the tensor shows it. Memory of a copy is free with the user's last reference
to it, unless it was written into and not loaded yet.

What was written is not the same on all trainers, and perhaps not all have made a state dict: `SparseStep.load_written`
says when they agree on it.
"""

from __future__ import annotations

import sys
import warnings
import weakref
import zlib
from dataclasses import dataclass

from torch import Tensor

from torch_ecrec.compat.torch import version_of
from torch_ecrec.resume.tensor_bytes import bytes_of
from torch_ecrec.runtime.byte_sums import sum_of_bytes

WHOLE_BYTES = 16 << 20  # the largest tensor that each look reads as a whole
PART = 256  # elements of a larger one, spread evenly over it: every step may look at many tensors

Place = tuple[str, str]
"""A table, and a field of its records."""


@dataclass(eq=False)
class _Given:
    """A tensor that was given out. Its memory is kept for as long as the user, or an unloaded write, needs it."""

    place: Place
    version: int
    part: int  # sum of a part of it as it was given,
    whole: int  # and of all of it
    users: weakref.ref[Tensor]
    values: Tensor | None
    looked: bool = False  # the whole was read since it was given

    def is_written(self, quick: bool = False) -> bool:
        """Returns whether its values have changed since it was given. `quick`: it may look at a part of them."""
        values = self.values
        if values is None or not _has_memory(values):
            return False
        if version_of(values) != self.version:
            return True
        if quick and self.looked and values.nbytes > WHOLE_BYTES:
            return _sum_of_part(values) != self.part
        self.looked = True
        return _sum_of(values) != self.whole

    def on_let_go(self, _: object) -> None:
        """Called when the user holds no reference any more: releases the memory unless it was written to."""
        if sys.is_finalizing() or not self.is_written():
            self.values = None


def _has_memory(values: Tensor) -> bool:
    """Returns whether the tensor still has its memory: users may resize the storage."""
    return values.untyped_storage().nbytes() >= values.nbytes


def _sum_of_part(values: Tensor) -> int:
    flat = values.detach().reshape(-1)
    return zlib.crc32(bytes_of(flat[:: max(1, len(flat) // PART)].clone()).numpy().tobytes())


def _sum_of(values: Tensor) -> int:
    if values.device.type != "cpu" or not values.is_contiguous():
        raise ValueError(f"summed are contiguous tensors on the CPU, got one on {values.device}, {values.stride()}")
    return sum_of_bytes(values.data_ptr(), values.nbytes)


class GivenTensors:
    """The tensors that were given out of one module's tables, and what was written into them."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}  # given since they last changed, in this order
        self._fresh: list[_Given] = []  # equal to the table but for what was written into them
        self._stale: list[tuple[Place, weakref.ref[Tensor], int, int]] = []  # with version and sum of a part

    def add(self, place: Place, values: Tensor) -> None:
        """Notes that `values`, this trainer's rows of `place` as they are now, go to the user. They may be empty."""
        self.places[place] = None
        self._fresh = [given for given in self._fresh if given.values is not None]
        if values.numel():
            self._fresh.append(self._of(place, values))

    @staticmethod
    def _of(place: Place, values: Tensor) -> _Given:
        sums = _sum_of_part(values), _sum_of(values)
        given = _Given(place, version_of(values), *sums, weakref.ref(values), values.detach())
        given.users = weakref.ref(values, given.on_let_go)
        return given

    def any_written(self, quick: bool) -> bool:
        """Returns whether this trainer has written values to load. `quick`: see `_Given.is_written`."""
        return any(given.is_written(quick) for given in self._fresh)

    def written_to(self, place: Place) -> Tensor | None:
        """Returns a copy of the rows that were last written to `place` and are not loaded yet; None if none were."""
        found = [given.values for given in self._fresh if given.place == place and given.is_written()]
        return found[-1].clone() if found and found[-1] is not None else None

    def take_written(self, quick: bool) -> dict[Place, Tensor]:
        """Returns by place all values of tensors that were written in place, and counts them as loaded.

        Args:
            quick: an evaluation asks.
        """
        written = {given.place: given for given in self._fresh if given.is_written(quick)}
        taken: dict[Place, Tensor] = {}
        for place, last in written.items():
            assert last.values is not None, "it was written"
            taken[place], users = last.values, last.users()
            self._expire([given for given in self._fresh if given.place == place and given is not last])
            self._fresh.remove(last)
            if users is not None:
                self._fresh.append(self._of(place, users))
        return taken

    def expire(self, place: Place) -> None:
        """Called when `place` is loaded: tensors given of it before are outdated, and writes into them are dropped."""
        self.places.pop(place, None)
        self._expire([given for given in self._fresh if given.place == place])

    def on_trained(self) -> None:
        """Called when all tables have changed: tensors given before are outdated, and unloaded writes are lost."""
        self.places = {}
        self._stale += [(given.place, given.users, given.version, given.part) for given in self._fresh]
        self._fresh = []

    def _expire(self, those: list[_Given]) -> None:
        self._stale += [
            (given.place, given.users, version_of(given.values), _sum_of_part(given.values))
            for given in those
            if given.values is not None and _has_memory(given.values)
        ]
        self._fresh = [given for given in self._fresh if given not in those]

    def tell_of_lost_writes(self) -> None:
        """Warns of writes into tensors that were outdated by then."""
        if not self._stale:
            return
        alive = [
            (place, values, version, part, _sum_of_part(values))
            for place, ref, version, part in self._stale
            if (values := ref()) is not None and _has_memory(values)
        ]
        for place, values, version, part, now in alive:
            if version_of(values) != version or now != part:
                warnings.warn(
                    f"a tensor of table {place[0]} in a state dict was changed in place, and the table was not: it has"
                    " been trained or loaded since that state dict was made; `model.load_state_dict(...)` sets it",
                    stacklevel=2,
                )
        self._stale = [(place, weakref.ref(values), version_of(values), now) for place, values, _, _, now in alive]
