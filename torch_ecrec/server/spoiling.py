"""Does a step of training wrongly, once, as a bug would: so that it is known what a comparison of two runs would find.

For `torch-ecrec chaos --check-power`, which says so to its servers (`Settings.spoil_step`), and to nobody else's: a
server that is not told has an ordinary `Applier`, and asks nothing in any step. What is spoiled is consistent: the
delta says what has become of the record, so parities, seals and logs fit, and nothing but a comparison of the results
can find it.

    look    nothing is wrong; every slot says how many records of the step have changed
    drop    the last trainer's push never came
    twice   the step is applied twice
    back    one record of the step is what it was before: of all of them that which has changed in the fewest bytes

The faults are slot 0's. What was done is one line of the server's log, `SAID` and JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from torch_ecrec.durability.context import SlotContext
from torch_ecrec.protocol import wire
from torch_ecrec.records.schema import WEIGHT
from torch_ecrec.server.apply import Applier, Changed

log = logging.getLogger(__name__)

SAID = "spoiled on purpose: "
WHERE = 0  # the slot


class SpoilingApplier(Applier):
    """Applies all steps but one as they are to be applied.

    Args:
        slot: as of an `Applier`.
        kind: what is done, see above.
        at: to which step of training.
    """

    def __init__(self, slot: SlotContext, kind: str, at: int) -> None:
        super().__init__(slot)
        self._kind, self._at = kind, at
        log.warning("slot %d: step %d will be spoiled on purpose (%s)", self.held.index, at, kind)

    def update_(self, step: int, pushes: Mapping[int, wire.Push]) -> Changed | None:
        """As of an `Applier`, but for the step that is spoiled."""
        kind = self._kind
        if pushes[0].iteration != self._at or (kind != "look" and self.held.index != WHERE):
            return super().update_(step, pushes)
        if kind == "drop":
            pushes = {**pushes, max(pushes): _nothing_of(pushes[max(pushes)])}
        change = super().update_(step, pushes)
        if change is None:  # records are missing: it is tried again
            return None
        if kind == "twice":
            again = super().update_(step, pushes)
            assert again is not None  # the same records, a moment later
            self._add_(change, again)
        log.warning(SAID + json.dumps({"slot": self.held.index, "kind": kind, **self._figures(change)}))
        if kind == "back":
            self._put_back_(change)
        return change

    def _figures(self, change: Changed) -> dict[str, Any]:
        """Returns how many records the step has, and how many have changed: in any bit, in weights, in optimizer
        state."""
        figures = dict.fromkeys(("records", "changed", "weights", "state"), 0)
        for shard, deltas_UB in zip(self.held.shards, change[1], strict=True):
            end = shard.schema.bytes_of(WEIGHT)[1]
            figures["records"] += len(deltas_UB)
            figures["changed"] += int(deltas_UB.any(axis=1).sum())
            figures["weights"] += int(deltas_UB[:, :end].any(axis=1).sum())
            figures["state"] += int(deltas_UB[:, end:].any(axis=1).sum())
        return figures

    def _add_(self, change: Changed, again: Changed) -> None:
        """Adds a second change to the first, in place. Deltas and seals are linear, so XOR combines both."""
        for mine, other in zip(change[1], again[1], strict=True):
            mine ^= other
        for seals_U, others_U in zip(change[2], again[2], strict=True):
            if seals_U is not None and others_U is not None:
                seals_U ^= others_U

    def _put_back_(self, change: Changed) -> None:
        """Takes back the change of the record that has changed least, and what its deltas and seals say of it."""
        positions, deltas, seals = change
        bytes_changed = [np.count_nonzero(deltas_UB, axis=1) for deltas_UB in deltas]
        table_group = min(
            (i for i, counts in enumerate(bytes_changed) if len(counts)), key=lambda i: bytes_changed[i].min()
        )
        one = bytes_changed[table_group].argmin(keepdims=True)
        self.held.shards[table_group].undo_(positions[table_group][one], deltas[table_group][one])
        deltas[table_group][one] = 0
        if (seals_U := seals[table_group]) is not None:
            seals_U[one] = 0


def _nothing_of(push: wire.Push) -> wire.Push:
    """Returns the push as of a trainer whose batch has no record of this slot."""
    return msgspec.structs.replace(
        push, positions=[part[:0] for part in push.positions], gradients=[part[:0] for part in push.gradients]
    )
