"""Finds batches that the loop has altered in place, where the reader may give out the same memory again.

A list of batches gives the same tensors in every pass. What a loop (or the model's forward) writes into them trains the
later passes; after a restart the script makes the list anew, without what was written: another run. So a batch is
looked at when it is drawn, and again when its turn is over; if it was altered, the next draw is refused.

Some readers give memory that is nobody else's. Their batches may be altered, and are not looked at again:

    workers           batches come from other processes
    torch's collate   a batch is a copy of its samples

A list, a generator or a collate function of one's own may give what they keep. If nothing but the loop holds the
container (a fresh dict), the loop may do with it what it likes (`batch.pop("labels")`), but not with the tensors in it.

Not noticed: what a loop keeps, and alters when the batch's turn is over.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_collate

from torch_ecrec.resume.checksum import parts_of, sums_of


def may_give_again(reader: object) -> bool:
    """Returns whether the reader may give out the memory of a batch again later."""
    if not isinstance(reader, DataLoader):
        return True
    return reader.num_workers == 0 and (reader.batch_size is None or reader.collate_fn is not default_collate)


@dataclass(frozen=True)
class Watched:
    """A batch as it was when it was drawn.

    Attributes:
        batch: None where the container is the loop's own.
        parts: its tensors and arrays by path, or its plain values.
        sums: of the parts.
    """

    batch: Any
    parts: Sequence[tuple[str, Any]]
    sums: Sequence[tuple[str, int]]

    def altered(self) -> str | None:
        """Returns the path of a part that was altered; None if none was."""
        now = dict(sums_of(self.parts if self.batch is None else parts_of(self.batch)))
        return next((path for path, total in dict(self.sums).items() if now.get(path) != total), None)

    def check(self, what: str, reader: object) -> None:
        """Raises RuntimeError if the batch was altered. `what`: names the batch."""
        altered = self.altered()
        if altered is None:
            return
        raise RuntimeError(
            f"{what} was altered in place after it was drawn (`batch{altered}`), by the loop or in a forward, and the"
            f" reader ({type(reader).__name__}) may give the same memory again: after a restart it would come without"
            " the change. Change a copy of it (`x = x.clone()`), or let the reader give copies"
        )


def is_held(batch: Any) -> bool:
    """Returns whether anybody else holds a batch. Of our code, only one variable of the caller may hold it."""
    return _references(batch) > _OWN


def watched(batch: Any, held: bool) -> Watched:
    """Returns a batch as it is now, to be checked later. `held`: as `is_held` said when the reader gave it."""
    parts = parts_of(batch)
    return Watched(batch if held else None, parts, sums_of(parts))


def _references(batch: Any) -> int:
    return sys.getrefcount(batch)


def _references_of_own() -> int:
    """Returns the references that `is_held` counts if nobody else holds the batch: it depends on the interpreter."""

    def counted(batch: Any) -> int:
        return _references(batch)

    own: list[int] = []
    return counted(own)


_OWN = _references_of_own()
