"""The seam between a slot and what makes its steps survive.

A slot applies steps and says so (`Durability.on_applied`); its policy makes them survive in whatever way and says which
of them count from now on (`SlotContext.on_settled`). Only those are acknowledged to the trainers. When the trainers are
lost, the slot stops, and later goes back to a step; when the slot's host is lost, the policy brings its records back on
another one (`adopt`, then `SlotContext.become_ready`, then `restore`).

A policy is given its slot and the process that hosts it (`context.py`), and what looks for damage (`scrubber.py`). Who
hosts the slot chooses it, as a `Policy`: a class or a function that makes a `Durability` of these.

Everything happens inside the node (`Node.run`), so nothing here locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from torch_ecrec.durability.context import HostContext, Reply, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.wire import Answer
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.settings import Settings

# What slots ask each other for the sake of their steps' survival; a policy answers, see `Durability.handle`.
PeerRequest = wire.Fold | wire.Attach | wire.Adopt | wire.Cut | wire.Versions | wire.Fetch | wire.FetchSeals


@dataclass(frozen=True)
class Kept:
    """Describes what a slot keeps of other slots' recent steps.

    Attributes:
        logs: what was folded of each slot.
        attached: which incarnation of each slot has met this one last.
        early: for how many steps of one slot, at most, a fold waits for its turn.
    """

    logs: Mapping[int, DeltaLog] = field(default_factory=dict)
    attached: Mapping[int, int] = field(default_factory=dict)
    early: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of memory that the logs take."""
        return sum(log.bytes for log in self.logs.values())

    @property
    def steps(self) -> int:
        """How many steps the longest log has."""
        return max((log.last - log.floor for log in self.logs.values()), default=0)


class Durability(ABC):
    """Makes the steps of one incarnation of a slot survive losses. Implemented by `parity.py:Parity`,
    `none.py:Unprotected`, and the policies of experiments, which derive from `Parity`."""

    @property
    @abstractmethod
    def settled(self) -> int:
        """The last step that counts, by what the policy promises: it is acknowledged to the trainers."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """The last step that the slot can go on after when all slots go back to one: what it has applied, or a later
        one, if it may pass over what it lacks."""

    @property
    def lost_steps(self) -> int:
        """How many steps that were acknowledged have changed nothing here, since they were lost. A policy that keeps
        its promises has none."""
        return 0

    @property
    @abstractmethod
    def caught_up(self) -> bool:
        """Whether this slot has all that others count on it to keep for them."""

    @abstractmethod
    def kept(self) -> Kept:
        """Returns what is kept of other slots' recent steps now."""

    # the slot's own steps -----------------------------------------------------------------------

    @abstractmethod
    def on_applied(self, step: int) -> None:
        """Handles a step that the slot has applied; what it changed is the last entry of its log. Calls
        `SlotContext.on_settled`, now or later."""

    @abstractmethod
    def on_forgotten(self, step: int) -> None:
        """A trainer asks when a step counts. Where it may have been told so by an earlier life of the slot, which was
        lost with it, nobody sends that step again."""

    # the slot's life ----------------------------------------------------------------------------

    @abstractmethod
    def adopt(self) -> None:
        """This is the new host of a lost slot: finds out where it stands, then calls `SlotContext.become_ready`."""

    @abstractmethod
    def take_over(self, floors: Mapping[int, int], attached: Mapping[int, int]) -> Mapping[int, DeltaLog]:
        """This life goes on as one that has stopped elsewhere; `connect` is called next.

        Args:
            floors: of each log that it kept of other slots' steps, the step that it begins after.
            attached: as in `Kept`.

        Returns:
            These logs, by slot, without entries: the caller appends them.
        """

    @abstractmethod
    def connect(self) -> None:
        """Meets the other slots anew, as the slot serves from now on, or has gone back; steps flow to them."""

    @abstractmethod
    def restore(self) -> None:
        """Brings back whatever is missing, as the slot serves."""

    @abstractmethod
    def stop(self) -> None:
        """Stops: nothing is sent or taken any more until `connect`, or for good if the slot is dead. A slot that does
        not serve yet finds out anew where it stands.

        A slot that does not serve yet finds out anew where it stands.
        """

    @abstractmethod
    def go_back(self, step: int) -> None:
        """Takes back what is kept of other slots' steps after `step`. The slot sees to its own."""

    # its records --------------------------------------------------------------------------------

    @abstractmethod
    def is_missing(self, positions: list[np.ndarray]) -> bool:
        """Returns whether any of these data records is missing; if so, they are brought back next.

        Args:
            positions: of each table group, (U,) int64.
        """

    @abstractmethod
    def mend(self, table_group: int, parity: bool, positions: np.ndarray) -> str:
        """Brings back what these damaged records (or parities) were.

        Args:
            table_group: of which table group.
            parity: whether they are parities.
            positions: (U,) int64, ascending.

        Returns:
            "" if they are being repaired, and `Scrubber.on_mended` or `Scrubber.on_beyond` will be called; else why
            they cannot be.
        """

    @abstractmethod
    def compare(self, table_group: int, first: int, end: int) -> None:
        """Finds out whether parities are the code of their stripes; tells `Scrubber.on_mismatch` of those that are not.

        Args:
            table_group: of which table group.
            first, end: from one position to another, which is not one of them.
        """

    # other slots --------------------------------------------------------------------------------

    @abstractmethod
    def meet(self, slot: int, incarnation: int) -> None:
        """Notes the incarnation of another slot, perhaps a new one: the one before is not listened to any more."""

    @abstractmethod
    def meet_anew(self, slot: int, incarnation: int) -> bool:
        """Forgets what is kept of another slot, which begins anew with this incarnation, with other records than
        before.

        Returns:
            Whether something is missing by that: `restore` brings it back.
        """

    @abstractmethod
    def handle(self, request: PeerRequest, reply: Reply[Answer]) -> None:
        """Answers a request of another slot; `reply` is called once, now or later."""


Policy = Callable[[SlotContext, HostContext, Scrubber, Settings], Durability]
