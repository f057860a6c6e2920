"""The RPC world: which members can call each other, and when a new generation of it is formed.

A *generation* is a version of the world: a list of members. A new one is formed when somebody is there who is not in
the present one, never because somebody died. All its members form it together (`transport/generations.py`), each says
so when it has entered, and the world is *complete* when all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import MemberRecord, Members
from torch_ecrec.coordinator.silence import Silence
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.messages import Rejoin

FORMING_LIMIT_S = 20.0
SPARES_AWAITED_S = 5.0  # before the first generation, after the last who has joined


class World:
    """The present generation.

    Args:
        spares: servers that are waited for beyond one per slot before the first generation is formed.
        store: (host, port) of the store that generations meet at.
        announce: tells observers of an event.

    Attributes:
        generation: its number; 0: none was formed yet.
        names: its members, in rank order.
    """

    def __init__(
        self,
        spares: int,
        store: tuple[str, int],
        job: RunningJob,
        members: Members,
        silence: Silence,
        announce: Callable[[Event], None],
    ) -> None:
        self.spares, self.store = spares, store
        self._job, self._members, self._silence, self._announce = job, members, silence, announce
        self.generation = 0
        self.names: list[str] = []
        self._forming_until_s: float | None = None  # None: none is being formed

    @property
    def forming(self) -> bool:
        """A generation was begun that not all of its members have entered."""
        return self._forming_until_s is not None

    @property
    def is_split(self) -> bool:
        """A member is in another generation than the present one, or in none."""
        return any(member.generation != self.generation for member in self._members.present())

    def servers(self) -> list[str]:
        """Servers that can be given slots, in order of arrival."""
        servers, names = self._members.present("server"), set(self.names)
        return [m.name for m in servers if m.name in names and m.generation == self.generation]

    def form(self, now_s: float, placed: bool, even_if_complete: bool = False) -> None:
        """Forms a new generation if somebody who is there is not in the present one.

        Args:
            placed: slots have been given to servers: training has begun, and does not wait for spares.
            even_if_complete: also if all who are there are in the present one.
        """
        job = self._job
        if self.forming or job.fatal is not None or job.spec is None:
            return
        servers, trainers = self._here("server"), self._here("trainer")
        done = self._members.done if placed else set()  # the first world has all of them
        if len({member.rank for member in trainers} | done) < job.spec.trainers:
            trainers = []  # the others are on their way
        if not placed and (not trainers or len(servers) < job.code.slots):
            return
        present = servers + trainers
        if not present:
            return
        waited_s = now_s - max(member.joined_s for member in present)
        if not placed and len(servers) < job.code.slots + self.spares and waited_s < SPARES_AWAITED_S:
            return  # spares are on their way
        complete = {member.name for member in present} <= set(self.names)
        if complete and placed and not even_if_complete:
            return  # without slots, nobody knows that this world was formed: its end is what places them
        self.generation += 1
        self.names = [member.name for member in present]
        self._forming_until_s = now_s + FORMING_LIMIT_S
        for name in self.names:
            self.send_to(name)

    def _here(self, role: str) -> list[MemberRecord]:
        """Members that can enter a world; who is awaited comes into the next one once it is back."""
        return [one for one in self._members.present(role) if not self._silence.is_awaited(one.name)]

    def send_to(self, name: str) -> None:
        """Asks a member to enter the present generation."""
        known = [self._members.by_name[member] for member in self.names if member in self._members.by_name]
        addresses = {member.name: member.address for member in known if member.address is not None}
        message = messages.Generation(self.generation, list(self.names), self.store, FORMING_LIMIT_S, addresses)
        self._members.send(name, message)

    def on_entered(self, name: str, generation: int) -> bool:
        """A member has entered a generation. Returns whether the present one is complete by that."""
        if name not in self.names and generation == self.generation:
            return False  # it was left out of this one
        known = self._members.by_name
        known[name].generation = max(generation, known[name].generation)
        members = [known[n] for n in self.names if n in known]
        if generation != self.generation or any(m.alive and m.generation != generation for m in members):
            return False
        self._forming_until_s = None
        self._announce(events.GenerationFormed(generation, list(self.names)))
        return True

    def give_up(self, name: str, now_s: float, placed: bool) -> None:
        """A world that waits for a member that does not come is formed anew without it."""
        if self.forming and name in self.names:
            self._forming_until_s = None
            self.form(now_s, placed, even_if_complete=True)

    def give_up_late(self, now_s: float, placed: bool) -> None:
        """A world that was not formed in time is formed anew."""
        if self._forming_until_s is not None and now_s > self._forming_until_s:
            self.give_up(self.names[0], now_s, placed)

    def wait_for_all(self, name: str) -> None:
        """A member is gone without which the first world cannot be complete: the next one waits for all again."""
        if name in self.names:
            self.generation, self.names, self._forming_until_s = self.generation + 1, [], None

    def pause(self) -> None:
        """Nobody's entry counts until members of the coordinator before are back; then a world is formed anew."""
        self._forming_until_s = None

    def learn(self, said: Iterable[Rejoin]) -> None:
        """The newest generation that members of the coordinator before know; the number never becomes less."""
        for one in said:
            if one.generation > 0 and one.generation >= self.generation:
                self.names = list(one.world)
            self.generation = max(self.generation, one.newest)
