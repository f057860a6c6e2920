"""Slots that move to another server while they go on where they are: one at a time.

The server that a slot moves to copies it (`server/arriving.py`) and says when it is *level*; told to, it lets the slot
stop and takes the rest, and says that it has *arrived*. Then the placement changes: the slot's next incarnation is
there, as healthy as before. Nothing is decoded, nothing counts as lost, and if either server dies before, it is the
loss of one server, or of none that has a slot.

A move is of one placement and one era: whatever begins another ends it, and a word of it that comes later counts for
nothing. So a slot that has stopped may go on as soon as it hears of either.

Pure: events in, messages out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch_ecrec.coordinator.domains import Domain
from torch_ecrec.coordinator.going_back import Eras
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.suspicion import Suspicion
from torch_ecrec.observe import events
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import SlotPlace


@dataclass
class Move:
    """A slot on its way.

    Args:
        slot: which.
        server: where it moves to.
        incarnation: that begins there.
        epoch, era: when it was begun.
        now: the server was told to let it stop where it is.
    """

    slot: int
    server: str
    incarnation: int
    epoch: int
    era: int
    now: bool = False


class MovingTable(Protocol):
    """Slots and their hosts: what moves need of them."""

    epoch: int
    slots: list[SlotPlace]

    def spares(self) -> list[str]:
        """Servers without slots."""

    def load_of(self, server: str) -> int:
        """How many slots it hosts."""

    def unhealthy(self) -> set[int]:
        """Slots that lack a host or records."""

    def troubles_of(self, server: str) -> int:
        """How many of those that it needs it could lately not reach."""

    def shared(self, slot: int, server: str, where: dict[str, Domain]) -> tuple[int, ...]:
        """What the slot would share there with those that it must not be lost with."""

    def new_epoch(self, event: type[events.NewEpoch]) -> None:
        """What has changed becomes a version that everybody is told."""


class Moves:
    """Which slot moves, and how far it is."""

    def __init__(
        self,
        table: MovingTable,
        members: Members,
        eras: Eras,
        suspicion: Suspicion,
        announce: Callable[[events.Event], None],
    ) -> None:
        self._table, self._members, self._eras, self._announce = table, members, eras, announce
        self._suspicion = suspicion
        self._move: Move | None = None

    @property
    def current(self) -> Move | None:
        """The one that is under way in this placement and era."""
        move = self._move
        is_over = move is None or (move.epoch, move.era) != (self._table.epoch, self._eras.number)
        return None if is_over else move

    def rebalance(self) -> None:
        """Once all is whole, a spare takes a slot of a server that drains, or has several, or where less is shared."""
        table = self._table
        if not table.slots or table.unhealthy() or self.current is not None:
            return
        if self._eras.going_back is not None:  # later: a new host does not know how far to go back
            return
        if self._suspicion.learns:  # later: a spare may be where others cannot reach it
            return
        spares = [spare for spare in table.spares() if not table.troubles_of(spare)]
        if not spares:
            return
        leaving = [i for i, place in enumerate(table.slots) if self._members.is_draining(place.server)]
        crowded = [i for i, place in enumerate(table.slots) if table.load_of(place.server) > 1]
        where = self._members.domains()
        best = {i: min(spares, key=lambda spare: table.shared(i, spare, where)) for i in range(len(table.slots))}
        closer = [
            i
            for i, place in enumerate(table.slots)
            if place.server in where and table.shared(i, best[i], where) < table.shared(i, place.server, where)
        ]
        for i in (leaving or crowded or closer)[-1:]:
            self._move = Move(i, best[i], table.slots[i].incarnation + 1, table.epoch, self._eras.number)
            self.send_to(best[i])

    def drain(self, what: str, undo: bool) -> str:
        """Slots are to leave some servers; see `Members.drain`. Said once more, it changes nothing."""
        objection = self._members.drain(what, undo)
        move = self.current
        if undo and move is not None:
            self._table.new_epoch(events.Stayed)
        self.rebalance()
        return objection

    def stay(self) -> None:
        """The slot that moves stays where it is, and perhaps another move begins."""
        if self.current is not None:
            self._table.new_epoch(events.Stayed)
            self.rebalance()

    def send_to(self, name: str) -> None:
        """Tells a member of the move (once more), if it is the one that copies."""
        move = self.current
        if move is not None and move.server == name:
            self._members.send(name, messages.Move(move.slot, move.incarnation, move.epoch, move.era, move.now))

    def on_word(self, name: str, word: messages.OfMove) -> None:
        """What is said where a slot moves to."""
        move, table = self.current, self._table
        if move is None or (name, word.slot, word.incarnation) != (move.server, move.slot, move.incarnation):
            return
        if (word.epoch, word.era) != (move.epoch, move.era):
            return
        if isinstance(word, messages.Arrived):
            before = table.slots[move.slot].server
            table.slots[move.slot] = SlotPlace(move.server, move.incarnation, True)
            table.new_epoch(events.Moved)
            if self._members.is_draining(before) and not table.load_of(before):
                self._announce(events.Drained(before))
            self.rebalance()
        else:
            move.now = True
            self.send_to(name)

    def on_gone(self, name: str) -> None:
        """A server without slots is gone. If one was to move there, it stays, or moves elsewhere."""
        move = self.current
        if move is not None and move.server == name:
            self.stay()
