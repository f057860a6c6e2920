"""All that a coordinator knows: its parts, put together."""

from __future__ import annotations

from collections.abc import Callable

from torch_ecrec.coordinator.going_back import Eras
from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.placement import SlotTable
from torch_ecrec.coordinator.regathering import Knowledge, Regathering
from torch_ecrec.coordinator.world import World
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol.messages import FromCoordinator, TransportName
from torch_ecrec.spec.job import CodeSpec


class ClusterState:
    """The parts, each of which owns what it knows, and uses those before it.

    Args:
        code, spares, store, send, announce, without_spare, lease_s, transport: see `Coordinator`.
    """

    def __init__(
        self,
        code: CodeSpec,
        spares: int,
        store: tuple[str, int],
        send: Callable[[str, FromCoordinator], None],
        announce: Callable[[Event], None],
        without_spare: str,
        lease_s: float,
        transport: TransportName,
    ) -> None:
        self.announce, self.transport = announce, transport
        self.members = Members(send, lease_s)
        self.job = RunningJob(code, self.members, announce)
        self.world = World(spares, store, self.job, self.members, announce)
        self.eras = Eras(self.job, self.members, announce)
        self.table = SlotTable(without_spare, self.job, self.members, self.world, self.eras, announce)
        self.regathering = Regathering()

    def form(self, now_s: float, even_if_complete: bool = False) -> None:
        """Forms a new generation where somebody is not in the present one, unless members of before come first."""
        if not self.regathering.active:
            self.world.form(now_s, self.table.placed, even_if_complete)

    def learn(self, known: Knowledge) -> None:
        """Versions as the members know them. None ever becomes less: this coordinator may have given some, too."""
        said = known.said.values()
        for one in said:
            self.members.follow(one.life)
        self.world.learn(said)
        self.eras.learn(said)
        self.job.learn(said)
