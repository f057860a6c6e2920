"""Members whose connection has ended and whose end is not known: asked whether they live, until it is. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch_ecrec.protocol.bounds import Address
from torch_ecrec.transport.liveness import ALIVE

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

    def ask_again(self, lives: Callable[[str], bool], now_s: float) -> None:
        """Who has answered a while ago. Of a member that does not live any more, the lease has ended."""
        for name, away in list(self._away.items()):
            if not lives(name):
                del self._away[name]
            elif away.answered and now_s >= away.asked_s + PROBE_AGAIN_S:
                self.ask(name, away.address, now_s)

    def take_answer(self, name: str, number: int, found: str) -> bool:
        """Whether the member is lost by it: it is away still, was not asked again, and nobody is there any more."""
        away = self._away.get(name)
        if away is None or away.number != number:
            return False
        away.answered = True
        if found == ALIVE:
            return False
        del self._away[name]
        return True

    def come_back(self, name: str) -> None:
        """It has a connection."""
        self._away.pop(name, None)

    def clear(self) -> None:
        """Nobody is a member any more."""
        self._away.clear()
