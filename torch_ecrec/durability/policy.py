"""The seam between a slot and what makes its steps survive.

A slot applies steps and says so (`Durability.on_applied`); its policy makes them survive in whatever way and says which
of them count from now on (`Owner.on_settled`). Only those are acknowledged to the trainers. When the trainers are lost,
the slot freezes, and later goes back to a step; when the slot's host is lost, the policy brings its records back on
another one (`adopt`, then `Owner.become_ready`, then `restore`).

A policy sees its slot as an `Owner`, other slots and the clock as `Peers`, and works on the slot's `Holdings`. It is
given to the slot by who hosts that, as a `Policy`: a class or a function that makes a `Durability` of these.

Everything happens inside the node (`Node.run`), so nothing here locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.protocol import wire
from torch_ecrec.protocol.waits import SlotWaits
from torch_ecrec.protocol.wire import A, Answer, Refused, Request
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.spec.settings import Settings

Reply = Callable[[A | Refused], None]
# What slots ask each other for the sake of their steps' survival; a policy answers, see `Durability.handle`.
PeerRequest = wire.Fold | wire.Attach | wire.Adopt | wire.Cut | wire.Versions | wire.Fetch | wire.FetchSeals


class Pending(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """It is not made again, and its answer does not count."""


class Asks(Protocol):
    """Requests to other slots, wherever they live, until they are answered. `Node.ask` is one."""

    def ask(
        self,
        slot: int,
        make: Callable[[int], Request[A]],
        done: Callable[[A], None],
        *,
        bound_to: int | None = None,
    ) -> Pending:
        """Asks a slot until it answers; see `Node.ask`."""


class AsksOnce(Protocol):
    """Requests to other slots that are made once, and a clock to try again by."""

    def ask_once(self, slot: int, make: Callable[[int], Request[A]], done: Callable[[A | None], None]) -> None:
        """Asks a slot once; `done` gets its answer, or None if it refused or could not be reached."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` after so many seconds."""


class Peers(Asks, AsksOnce, Protocol):
    """What a policy needs of the process that hosts its slot."""

    @property
    def frozen(self) -> bool:
        """The trainers were lost, and where they start again is not known yet."""

    @property
    def waits(self) -> SlotWaits:
        """Notes for whom this process waits."""

    @property
    def history(self) -> tuple[int, bool]:
        """Changes whenever steps may have been taken back: what was read before then counts for nothing."""

    def unhealthy_slots(self) -> list[int]:
        """Slots that are lost, or not rebuilt yet."""

    def emit(self, effect: Callable[[], None]) -> None:
        """Runs `effect` after the node's lock is released."""


class Looks(Protocol):
    """What looks for damage in a slot."""

    def look(self, slab: int, parity: bool, positions_U: np.ndarray) -> None:
        """Somebody relies on these records (or parities), (U,) int64: what is damaged becomes missing and is mended."""

    def on_mended(self, count: int) -> None:
        """So many records or parities that were damaged are what they should be."""

    def on_mismatch(self, slab: int, positions_M: np.ndarray) -> None:
        """These parities (M,), ascending, are not the code of their stripes, whose records fit their seals."""

    def on_log(self, what: str) -> None:
        """A delta log is damaged, and what follows from that."""

    def on_beyond(self, slab: int, parity: bool, positions_M: np.ndarray) -> None:
        """Nobody can give these records (M,) back: too much of their stripes is damaged or lost."""


class Owner(Protocol):
    """A slot, as its policy knows it."""

    @property
    def scrubber(self) -> Looks:
        """Looks for damage."""

    @property
    def ready(self) -> bool:
        """It serves: from the start, or since `become_ready`."""

    @property
    def dead(self) -> bool:
        """This life has been replaced."""

    @property
    def hopeless(self) -> bool:
        """It has given up."""

    def on_settled(self, through: int) -> None:
        """Steps up to `through` survive what the policy promises: they count now."""

    def become_ready(self, cut: int, floor: int, log: DeltaLog) -> None:
        """A lost slot goes on after step `cut`; its log holds the steps `floor + 1 .. cut`."""

    def give_up(self) -> None:
        """More is lost than the policy can bring back."""

    def progress(self) -> None:
        """Something changed (records are there again): what waits is tried again."""

    def check_rebuilt(self) -> None:
        """Less is missing than before, or more is caught up with."""


class Durability(Protocol):
    """What makes the steps of one life of a slot survive."""

    @property
    def caught_up(self) -> bool:
        """Whether this slot has all that others count on it to keep for them."""

    @property
    def log_bytes(self) -> int:
        """Memory of what is kept of other slots' recent steps."""

    def steps_kept(self) -> dict[str, int]:
        """For how many steps at most something is kept, by what it is: for checks that it is bounded."""

    # the slot's own steps
    def on_applied(self, step: int) -> None:
        """The slot has applied a step; what it changed is the last entry of its log. Calls `Owner.on_settled`, now or
        later."""

    # the slot's life
    def adopt(self) -> None:
        """This is the new host of a lost slot: finds out where it stands, then calls `Owner.become_ready`."""

    def connect(self) -> None:
        """The slot serves from now on, or has gone back: meets the other slots anew, and steps flow to them."""

    def restore(self) -> None:
        """The slot serves: brings back whatever is missing."""

    def is_missing(self, positions: list[np.ndarray]) -> bool:
        """Whether any of these data records is missing; if so, they are brought back next.

        Args:
            positions: of each slab, (U,) int64.
        """

    def mend(self, slab: int, parity: bool, positions: np.ndarray) -> str:
        """These records (or parities) are damaged: brings back what they were.

        Args:
            slab: of which slab.
            parity: whether they are parities.
            positions: (U,) int64, ascending.

        Returns:
            "" if they are being repaired, and `Looks.on_mended` or `Looks.on_beyond` will be called; else why they
            cannot be.
        """

    def compare(self, slab: int, first: int, end: int) -> None:
        """Finds out whether parities are the code of their stripes; tells `Looks.on_mismatch` of those that are not.

        Args:
            slab: of which slab.
            first, end: from one position to another, which is not one of them.
        """

    def freeze(self) -> None:
        """The trainers are lost: nothing is sent or taken any more until the slot has gone back."""

    def go_back(self, step: int) -> None:
        """Takes back what is kept of other slots' steps after `step`. The slot sees to its own."""

    def stop(self) -> None:
        """The slot stops, to go on elsewhere or here (`connect`): nothing is sent any more."""

    def folds_kept(self) -> tuple[dict[int, DeltaLog], dict[int, int]]:
        """What is kept of other slots' recent steps, by slot; and which of their lives have met this one last."""

    def new_fold_log(self, source: int, floor: int) -> DeltaLog:
        """An empty log of what is kept of another slot's steps, after a step."""

    def take_over(self, logs: dict[int, DeltaLog], attached: dict[int, int]) -> None:
        """This life goes on as one that has stopped, with these `folds_kept`; then `connect` is called."""

    def die(self) -> None:
        """This life has been replaced: whatever is under way ends."""

    # other slots
    def meet(self, slot: int, incarnation: int) -> None:
        """Another slot has this incarnation, perhaps a new one: the one before is not listened to any more."""

    def meet_anew(self, slot: int, incarnation: int) -> bool:
        """Another slot begins anew with this incarnation, with other records than before: what is kept of them goes.

        Returns:
            Whether something is missing by that: `restore` brings it back.
        """

    def handle(self, request: PeerRequest, reply: Reply[Answer]) -> None:
        """A request of another slot; `reply` is called once, now or later."""


Policy = Callable[[Owner, Peers, Holdings, Settings], Durability]
