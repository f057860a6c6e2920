"""What state dicts were given of tables: while a table stays as it was then, a write into it changes the table.

    sd = model.state_dict()
    sd["ebc.embedding_bags.t.weight"][7] = 0     # as with TorchRec, row 7 of t is 0 from now on

There the tensor is the table. Here it is a copy, and what was written is loaded before the rows are next asked for, as
by `model.load_state_dict(...)`: every trainer writes the same, trainer 0's values count.

After the next training step, or load, the copy is older than the table: a write into it then changes nothing, and is
told. Until then it is kept, so that no write is missed: memory of a state dict is free again in the next training step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator

from torch import Tensor

Place = tuple[str, int, int]
"""A table, and columns [first, last) of its records."""


class GivenTensors:
    """Those of one module's tables."""

    def __init__(self) -> None:
        self._fresh: list[tuple[Place, Tensor, int]] = []  # equal to the table but for what was written into them
        self._stale: list[tuple[Place, weakref.ref[Tensor], int]] = []

    def add(self, place: Place, values: Tensor) -> None:
        """`values` are those of `place` now, and go to the user."""
        self._fresh.append((place, values, values._version))

    def take_written(self) -> Iterator[tuple[Place, Tensor]]:
        """What was written in place since, and is to be loaded. It counts as loaded from then on."""
        written = [(place, values) for place, values, version in self._fresh if values._version != version]
        for place, values in written:
            self.expire(place)
            self.add(place, values)
            yield place, values

    def expire(self, place: Place | None = None) -> None:
        """This place, or every one, changes: what was given of it is older from now on."""
        kept = []
        for entry in self._fresh:
            if place in (None, entry[0]):
                self._stale.append((entry[0], weakref.ref(entry[1]), entry[1]._version))
            else:
                kept.append(entry)
        self._fresh = kept

    def tell_of_lost_writes(self) -> None:
        """Warns of what was written in place after the table had changed."""
        if not self._stale:
            return
        alive = [(place, values, version) for place, ref, version in self._stale if (values := ref()) is not None]
        for place, values, version in alive:
            if values._version != version:
                warnings.warn(
                    f"a tensor of table {place[0]} in a state dict was changed in place, and the table was not: it has"
                    " been trained or loaded since that state dict was made; `model.load_state_dict(...)` sets it",
                    stacklevel=2,
                )
        self._stale = [(place, weakref.ref(values), values._version) for place, values, _ in alive]
