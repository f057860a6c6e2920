"""Members whose connection has ended and whose end is not known: asked whether they live, until it is. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_ecrec.protocol.bounds import Address
from torch_ecrec.transport.liveness import GONE

PROBE_AGAIN_S = 0.1  # a process that is killed may close its connection before it stops to listen: training waits


@dataclass
class Away:
    """A member without a connection. `number`: which probe was sent last; `asked_s`: when."""

    address: Address
    number: int
    asked_s: float
    answered: bool = False


class AwayMembers:
    """All of them, by name.

    Args:
        probe: `probe(name, number, address)` asks whether a process listens there; its answer is for `take_answer`.
    """

    def __init__(self, probe: Callable[[str, int, Address], None]) -> None:
        self._probe, self._probes = probe, 0
        self._away: dict[str, Away] = {}

    def ask(self, name: str, address: Address, now_s: float) -> None:
        """Its connection has ended, or it is time to ask again."""
        self._probes += 1
        self._away[name] = Away(address, self._probes, now_s)
        self._probe(name, self._probes, address)

    def ask_once(self, name: str, address: Address, now_s: float) -> None:
        """It is not known whether it lives; unless it is asked already."""
        if name not in self._away:
            self.ask(name, address, now_s)

    def ask_again(self, lives: Callable[[str], bool], now_s: float) -> None:
        """Who has answered a while ago. A member that does not live any more was given up."""
        for name, away in list(self._away.items()):
            if not lives(name):
                del self._away[name]
            elif away.answered and now_s >= away.asked_s + PROBE_AGAIN_S:
                self.ask(name, away.address, now_s)

    def take_answer(self, name: str, number: int, found: str) -> bool:
        """Whether it says something of the member: that one is away still, and was not asked again since. Who is known
        to be gone is not asked any more."""
        away = self._away.get(name)
        if away is None or away.number != number:
            return False
        away.answered = True
        if found == GONE:
            del self._away[name]
        return True

    def come_back(self, name: str) -> None:
        """It has a connection."""
        self._away.pop(name, None)

    def clear(self) -> None:
        """Nobody is a member any more."""
        self._away.clear()
