"""What the parts of a slot are given: the slot itself and the process that hosts it, as far as a part may know them.

Both are base classes of the real thing: `SlotContext` of `server/slot.py:Slot`, `HostContext` of
`server/process.py:ServerProcess`. They lie below the parts, so that these can name them. A part reads what is kept here
and calls the methods; the slot and the process alone assign their fields.

Everything happens inside the node (`Node.run`), so nothing here locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from torch_ecrec.durability.holdings import Holdings
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.waits import SlotWaits
from torch_ecrec.protocol.wire import A, Answer, Refused, Request
from torch_ecrec.records.delta_log import DeltaLog

Reply = Callable[[A | Refused], None]


class Pending(Protocol):
    """Work under way: a request (`transport/node.py:RetryingCall`), a part of a checkpoint that is written
    (`processes/checkpoint_files.py`) or read (`processes/part_reader.py`)."""

    def cancel(self) -> None:
        """Stops it. It is not tried again, and nothing is called for it any more."""


class HostContext(ABC):
    """The server process, as the slots that it hosts know it.

    Attributes:
        era: which life of the trainers the process takes part in.
        frozen: whether all servers have stopped and the step at which they go on is not known yet.
        load_end: the step that training begins after; None: initial values are being loaded.
        resume_step: the step that the era began after: all servers went back to it. `done`: steps of training until
            then.
        waits: notes for whom this process waits.
    """

    era: int
    frozen: bool
    load_end: int | None
    resume_step: int
    done: int
    waits: SlotWaits

    @property
    def history(self) -> tuple[int, bool]:
        """Changes whenever steps may have been taken back: what was read before then counts for nothing."""
        return self.era, self.frozen

    @abstractmethod
    def unhealthy_slots(self) -> list[int]:
        """Slots that are lost, or not rebuilt yet."""

    @abstractmethod
    def ask(
        self,
        slot: int,
        make: Callable[[int], Request[A]],
        done: Callable[[A], None],
        *,
        bound_to: int | None = None,
    ) -> Pending:
        """Asks a slot, wherever it lives, until it answers; see `transport/node.py:Node.ask`."""

    @abstractmethod
    def ask_once(self, slot: int, make: Callable[[int], Request[A]], done: Callable[[A | None], None]) -> None:
        """Asks a slot once; `done` gets its answer, or None if it refused or could not be reached."""

    @abstractmethod
    def now_s(self) -> float:
        """Returns the time in seconds, of a monotonic clock."""

    @abstractmethod
    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Runs `action` after so many seconds."""

    @abstractmethod
    def emit(self, effect: Callable[[], None]) -> None:
        """Runs `effect` after the node's lock is released."""

    @abstractmethod
    def tell(self, word: messages.OfMember) -> None:
        """Sends a message to the coordinator."""


class SlotContext(ABC):
    """One incarnation of a slot, as its parts know it.

    Args:
        held: its records and all that goes with them.
        host: the server process it lives in.
        ready: whether it serves from the start.

    Attributes:
        ready: whether it serves: from the start, or since `become_ready`.
        dead: whether this incarnation has been replaced.
        hopeless: whether it has given up.
        reported: whether nothing is missing and the coordinator knows.
        going_back_to: the step that the trainers start again after, until that step is durable here; else None.
        load_steps: how many of the steps up to the last applied are none of training, as far as they are known.
    """

    def __init__(self, held: Holdings, host: HostContext, ready: bool) -> None:
        self.held, self.host = held, host
        self.ready = self.reported = ready
        self.dead = self.hopeless = False
        self.going_back_to: int | None = None
        self.load_steps: int | None = None

    # how it stands ------------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether it serves and nothing is missing."""
        return self.ready and self.held.missing.remaining == 0

    @property
    def tiered(self) -> bool:
        """Whether some of its data records may be on a disk only."""
        return not all(shard.in_memory for shard in self.held.shards)

    @property
    def wants_hints(self) -> bool:
        """Whether it is of use to know early what will be looked up: of what is on a disk, or has to be repaired."""
        return self.tiered or not self.held.missing.has_all_data

    @property
    def life(self) -> tuple[int, int]:
        """Index and incarnation: how each message about this slot begins."""
        return self.held.index, self.held.incarnation

    def known_incarnations(self) -> list[int]:
        """Returns the incarnation of every slot that this one listens to."""
        held = self.held
        lives = {**held.rule.incarnations, held.index: held.incarnation}
        return [lives.get(i, 0) for i in range(held.job.code.slots)]

    def trained(self, step: int) -> int:
        """Steps of training up to a step near the last applied; one that loads, in between, counts as one, too."""
        if self.load_steps is not None:
            return max(0, step - self.load_steps)
        if self.host.load_end is None:
            return 0
        return max(0, step - max(self.host.load_end, self.host.resume_step) + self.host.done)

    # what its parts ask of it -------------------------------------------------------------------

    def once_read(
        self,
        table_group: int,
        parity: bool,
        positions_U: np.ndarray,
        then: Callable[[Any], None],
        reply: Callable[[Refused], None],
        awaited: bool = False,
    ) -> None:
        """Has some records read that are on a disk only, for another process.

        Args:
            table_group, parity, positions_U: which.
            then: gets what `Shard.gather_whole` takes for them: at once, if none is to be read.
            reply: is refused instead, if the slot is not the same any more by then.
            awaited: a step waits for them. They are read beside those that nobody waits for.
        """
        reading = self.held.shards[table_group].absent(positions_U, parity)
        if reading is None:
            then(None)
            return
        history = self.host.history

        def done() -> None:
            if self.dead or not self.ready or history != self.host.history:
                reply(Refused(f"slot {self.held.index} was another one when its records were read"))
            else:
                then(reading)

        self.read_tier(reading, done, awaited)

    def tell(self, word: messages.OfMember) -> None:
        """Tells the coordinator something of this incarnation."""
        self.host.tell(word)

    @abstractmethod
    def park(self, attempt: Callable[[], Answer | None], reply: Reply[Any]) -> None:
        """Answers now if `attempt` yields an answer, else when it first does."""

    @abstractmethod
    def expect(self, positions: list[np.ndarray], later: bool = False) -> bool:
        """Prepares for these data records (per table group, (U,) int64) to be needed soon: those that are missing begin
        to be repaired, and those on a disk to be read, if there is one.

        Args:
            positions: which.
            later: nobody waits for them yet.

        Returns:
            Whether any is on its way from a disk.
        """

    @abstractmethod
    def read_tier(self, reading: Any, done: Callable[[], None], awaited: bool = True) -> None:
        """Runs a reading (`records/tiers/tiered.py:Reading`) beside the node, and then `done` inside of it.

        `awaited`: training waits for it, or will soon. It does not wait for readings that are not.
        """

    @abstractmethod
    def tend_tiers(self) -> None:
        """Records have changed: what disks should read before memory is needed begins to be read."""

    @abstractmethod
    def is_missing(self, positions: list[np.ndarray], looked: bool = False) -> bool:
        """Returns whether any of these data records is missing (with `looked`, or damaged); if so, they are brought
        back next.

        Args:
            positions: of each table group, (U,) int64. They are used next, if none is.
            looked: it is looked for damage, whatever the settings say.
        """

    # what its parts tell it ---------------------------------------------------------------------

    @abstractmethod
    def on_settled(self, through: int) -> None:
        """Steps up to `through` survive what the policy promises: they count now."""

    @abstractmethod
    def pass_over(self, through: int) -> None:
        """Lets the next steps up to `through` change nothing here: whatever trainers have sent of them is let go."""

    @abstractmethod
    def become_ready(self, cut: int, floor: int, log: DeltaLog) -> None:
        """Goes on after step `cut`, as a lost slot; its log holds the steps `floor + 1 .. cut`."""

    @abstractmethod
    def begin_anew(self, cut: int, floor: int, log: DeltaLog, done: int) -> None:
        """As `become_ready`, of a slot that begins with its records of a checkpoint.

        Args:
            cut, floor, log: as there.
            done: steps of training until `cut`.
        """

    @abstractmethod
    def give_up(self, reason: str = "") -> None:
        """Gives up the slot: more is lost than can be brought back."""

    @abstractmethod
    def progress(self) -> None:
        """Tries again what waits, since something changed (records are there again)."""

    @abstractmethod
    def check_rebuilt(self) -> None:
        """Less is missing than before, or more is caught up with."""

    @abstractmethod
    def meet(self, slot: int, incarnation: int) -> None:
        """Notes the incarnation of another slot, perhaps a new one: the one before is not listened to any more."""

    @abstractmethod
    def on_snapshot_kept(self, step: int, done: int) -> None:
        """Notes that a trainer's part of the dense model after a step is here. `done`: steps of training until then."""

    @abstractmethod
    def on_snapshots_copied(self) -> None:
        """Notes that no dense snapshot is missing here that other slots may have."""
