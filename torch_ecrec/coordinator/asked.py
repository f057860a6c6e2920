"""Members that are asked whether they live: who is away, until its end is known, and who is silent. Pure.

Who is *away* has no connection any more, and is lost once nobody listens where it did. Who is *silent* has one, and was
not heard of for a while: it may compute in a call that holds the interpreter's lock, and says so to who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch_ecrec.protocol.bounds import Address

PROBE_AGAIN_S = 0.1  # a process that is killed may close its connection before it stops to listen: training waits
SILENT_S = 0.5  # two heartbeats
SILENT_PART = 0.25  # of a lease, at most: of a short one, before it ends


@dataclass
class Question:
    """One that is asked. `number`: which probe was sent last; `asked_s`: when; `away`: else it is silent."""

    address: Address
    number: int
    asked_s: float
    away: bool
    answered: bool = False


class AskedMembers:
    """All of them, by name.

    Args:
        probe: `probe(name, number, address)` asks a process; its answer is for `take_answer`.
    """

    def __init__(self, probe: Callable[[str, int, Address], None]) -> None:
        self._probe, self._probes = probe, 0
        self._asked: dict[str, Question] = {}

    def go_away(self, name: str, address: Address, now_s: float) -> None:
        """Asks whether a member lives whose connection has ended."""
        self._ask(name, address, now_s, away=True)

    def _ask(self, name: str, address: Address, now_s: float, away: bool) -> None:
        self._probes += 1
        self._asked[name] = Question(address, self._probes, now_s, away)
        self._probe(name, self._probes, address)

    def look(self, silent: Mapping[str, Address], lives: Callable[[str], bool], now_s: float) -> None:
        """Asks who is silent by now, and again who has answered a while ago.

        Args:
            silent: where these listen.
            lives: whether it is a member still; one that is not was given up.
        """
        for name, one in list(self._asked.items()):
            if not lives(name) or not (one.away or name in silent):
                del self._asked[name]
            elif one.answered and now_s >= one.asked_s + PROBE_AGAIN_S:
                self._ask(name, one.address, now_s, one.away)
        for name in silent.keys() - self._asked.keys():
            self._ask(name, silent[name], now_s, away=False)

    def take_answer(self, name: str, number: int) -> Question | None:
        """Notes that a probe was answered. Returns what was asked; None: nobody waits for this answer any more."""
        one = self._asked.get(name)
        if one is None or one.number != number:
            return None
        one.answered = True
        return one

    def forget(self, name: str) -> None:
        """Stops asking for a member, which is lost or has a connection again."""
        self._asked.pop(name, None)

    def clear(self) -> None:
        """Stops asking for anybody, as nobody is a member any more."""
        self._asked.clear()
