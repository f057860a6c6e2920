"""All that a coordinator knows: its parts, put together."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from torch_ecrec.coordinator.checkpointing import Checkpointing, Manifests
from torch_ecrec.coordinator.going_back import Eras
from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.launches import Launches
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.partial import PartialRecovery
from torch_ecrec.coordinator.placement import SlotTable
from torch_ecrec.coordinator.progress import Progress
from torch_ecrec.coordinator.regathering import MemberReports, Regathering
from torch_ecrec.coordinator.roster import Roster
from torch_ecrec.coordinator.saving import Saving
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.coordinator.silence import Silence
from torch_ecrec.coordinator.slowness import Slowness
from torch_ecrec.coordinator.suspicion import Suspicion
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol.messages import FromCoordinator
from torch_ecrec.protocol.status import Gathering


class ClusterState:
    """The parts, each of which owns what it knows, and uses those before it.

    Args:
        settings, send, announce, manifests: see `Coordinator`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        send: Callable[[str, FromCoordinator], None],
        announce: Callable[[Event], None],
        manifests: Manifests | None = None,
    ) -> None:
        self.announce, self.transport = announce, settings.transport
        self.members = Members(send, settings.lease_s)
        if settings.term:
            self.members.follow(settings.term - 1)
        checkpoint = settings.checkpoint
        self.job = RunningJob(
            settings.code,
            self.members,
            announce,
            settings.restore,
            checkpoint.beyond,
            checkpoint.run,
            settings.run_is_known,
            settings.experiment,
            checkpoint.url,
        )
        self.launches = Launches(self.job, self.members)
        self.suspicion = Suspicion()
        self.silence = Silence(settings.stands_s, self.members, self.suspicion, announce)
        self.roster = Roster(settings.spares, self.job, self.members, announce)
        self.partial = PartialRecovery(checkpoint.beyond == "partial", checkpoint.most_lost_samples)
        self.saving = Saving(checkpoint)
        self.eras = Eras(self.job, self.members, self.partial, self.saving, announce)
        self.checkpointing = Checkpointing(
            checkpoint, manifests, self.job, self.members, self.saving, self.partial, announce
        )
        self.slowness, self.drains_slow = Slowness(), settings.drain_slow
        self.table = SlotTable(
            settings.without_spare,
            self.job,
            self.members,
            self.roster,
            self.eras,
            self.checkpointing,
            self.partial,
            self.suspicion,
            self.silence,
            announce,
        )
        self.regathering, self.progress = Regathering(), Progress()

    @property
    def step(self) -> int:
        """The last step that is known to be done; what members say is newer than where training began or went on."""
        return self.progress.step or self.job.step

    def follow(self, before: ClusterState) -> None:
        """Takes over from a cluster that went back to a checkpoint: nobody of it is taken for a member of this one."""
        self.members.follow(before.members.term)
        self.launches.follow(before.launches)
        self.checkpointing.follow(before.checkpointing)
        self.job.run, self.job.known = before.job.run, before.job.known or before.job.spec is not None
        done = self.job.done_at_load_end
        self.partial.follow(before.partial, done)
        if self.job.restored is not None:  # it says what is known of partial recoveries, too
            known = {what for _, what in self.partial.notes(done)}
            left = [note for note in self.job.restored.inexact if note[1] not in known]
            self.job.restored = msgspec.structs.replace(self.job.restored, inexact=left)
        self.job.inexact = before.job.inexact_until(done)
        self.roster.version, self.table.epoch = before.roster.version, before.table.epoch

    def take_in(self, now_s: float, anew: bool = False) -> None:
        """Takes whoever may come in into the roster, unless members of before come first; slots get the hosts that they
        waited for. `anew`: all are told the roster, also if nobody has come."""
        if self.regathering.active or not self.roster.renew(now_s, self.table.placed, anew):
            return
        self.suspicion.on_arrival(now_s)
        if not self.table.placed:
            self.table.place_all()
        self.table.place_waiting()
        self.table.moves.rebalance()

    def drop(self, *names: str) -> None:
        """Takes members that are gone out of the roster. While members of before come, that is told with all else that
        is found."""
        if not self.regathering.active:
            self.roster.drop(names)

    @property
    def whole(self) -> bool:
        """Every slot has a host and all its records, and the trainers train."""
        healthy = self.table.placed and all(place.healthy for place in self.table.slots)
        trains = self.job.load_end is not None and self.eras.going_back is None and self.job.fatal is None
        return healthy and trains and not self.regathering.active and not self.partial.pending

    def gathering(self) -> Gathering | None:
        """Returns how many servers and trainers the cluster lacks to begin; None: it has begun, or all are there."""
        job, members = self.job, self.members
        if self.table.placed or self.regathering.active or job.fatal is not None:
            return None
        servers = len(members.present("server")), job.code.slots
        trainers = len(members.present("trainer")), 0 if job.spec is None else job.spec.trainers
        lacking = servers[0] < servers[1] or trainers[0] < max(trainers[1], 1)
        return Gathering(servers, trainers) if lacking else None

    def learn(self, known: MemberReports) -> None:
        """Versions as the members know them. None ever becomes less: this coordinator may have given some, too."""
        said = known.said.values()
        for one in said:
            self.members.follow(one.term)
        self.members.done |= known.done
        self.roster.learn(said)
        self.job.learn(said, self.eras.number, known.placement)
        self.eras.learn(said)
        self.partial.partial_restores = known.partial_restores
        self.saving.known = known.saves
        if self.job.restoring:
            self.eras.restart()
