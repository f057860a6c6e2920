"""Eras: trainers were lost, and all go back to one step.

Servers stop, and say which steps they can go back to ("reach"); the last that all of them can, and of which the dense
model is kept, is where training goes on; they go back, make it durable, and say so ("durable"); then the new trainers
are told ("resume"). A server that is lost meanwhile begins one more era: its slots' new hosts may not reach as far.

Where no step of training was safe yet, and tables were loaded before the first one, perhaps none is kept of which the
dense model is known. Then all *begin anew*: servers agree on any step, and the trainers load initial values over
whatever is there, as in a new cluster. A cluster that began with a checkpoint begins with it again.

Once such a cluster has restored it, an era begins that nobody goes back in: when every slot has said that it knows of
that, trainers begin. So whoever has trained is not taken for one that is being restored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.partial import PartialRecovery
from torch_ecrec.coordinator.saving import Saving
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages


@dataclass
class GoingBack:
    """Collects what the slots have said since an era began, until training goes on.

    Attributes:
        reach: slot -> what it said.
        keeps: nobody goes back: some slots begin anew where the others are, and the trainers go on as they are.
        first: nobody has trained yet: a checkpoint was restored.
        step: where training goes on, once it is known; a step of the protocol.
        done: steps of training that count then.
        durable: slots at which it is durable.
    """

    keeps: bool = False
    first: bool = False
    reach: dict[int, messages.Reach] = field(default_factory=dict)
    step: int | None = None
    done: int = 0
    durable: set[int] = field(default_factory=set)


def common_steps(reach: Collection[messages.Reach]) -> tuple[int, int]:
    """Returns the first and the last step that all slots can go back to; the first may be the later one: then there is
    none."""
    return max(said.floor for said in reach), min(said.applied for said in reach)


def choose_step(reach: Collection[messages.Reach], load_end: int | None, trainers: int) -> int | None:
    """Returns the last step that all slots can go back to, and of which every trainer's part of the dense model is
    kept.

    Args:
        reach: what the slots said, of each one.
        load_end: the step that training begins after; None: loading has not ended.
        trainers: how many there are.

    Returns:
        A step of the protocol; None: there is none.
    """
    least, most = common_steps(reach)
    # where the dense model is not needed: it is as it was made
    first = range(least, most + 1) if load_end is None else [load_end]
    parts: dict[int, set[int]] = {step: set(range(trainers)) for step in first}
    for said in reach:
        for step, _, kept in said.snapshots:
            parts.setdefault(step, set()).update(kept)
    least_known = max(least, load_end or 0)
    known = [step for step, kept in parts.items() if least_known <= step <= most and len(kept) == trainers]
    return max(known, default=None)


def may_begin_anew(reach: Collection[messages.Reach], done_at_load_end: int) -> bool:
    """Returns whether all may make everything again from the beginning, as far as the slots know.

    That is exact at any time, and costs what was trained. A trainer lets the logs go beyond the first step of training
    only once a dense snapshot is safe. So without one, all the steps of training are still in them: there are no more
    than the logs hold. Snapshots that are off are told from that by this, too.
    """
    first, _ = common_steps(reach)
    return all(said.done is None or said.done - done_at_load_end <= said.applied - first for said in reach)


def steps_of_training_before(reach: Collection[messages.Reach], without_loads: int) -> int:
    """Returns what is to be added to a step of the protocol to have that of training, as slots know it: loads are
    steps, too."""
    return max((said.done - said.applied for said in reach if said.done is not None), default=without_loads)


class Eras:
    """The present era.

    Attributes:
        number: how often trainers were lost, and servers while they went back.
        resume_step: where the era began: a step of the protocol.
        done: steps of training until then.
        floor: a slot that begins anew there can be gone back with to here. `kept`: nobody went back there.
        going_back: None once that step is durable everywhere.
    """

    def __init__(
        self,
        job: RunningJob,
        members: Members,
        partial: PartialRecovery,
        saving: Saving,
        announce: Callable[[Event], None],
    ) -> None:
        self._job, self._members, self._partial, self._saving, self._announce = job, members, partial, saving, announce
        self.number = 0
        self.resume_step, self.done = 0, job.done_at_load_end
        self.floor, self.kept = 0, False
        self._went_back_to = 0  # last: trainers that have trained since have begun
        self.going_back: GoingBack | None = None

    def begin(self, keeps: bool = False, first: bool = False) -> None:
        """Begins an era: all servers stop, and say which steps they can go back to. `keeps`, `first`: nobody will have
        to."""
        self.number += 1
        self.going_back = GoingBack(keeps, first)
        if not keeps and not first:
            trainers = [member.name for member in self._members.present("trainer")]  # of the new era, here already
            self._announce(events.EraBegun(self.number, trainers))
        self._tell_all("server")

    def send_to(self, name: str) -> None:
        """Servers hear how far they go back as soon as it is known, trainers where they start once it is durable."""
        back, load_end = self.going_back, self._job.load_end
        if self._members.by_name[name].role == "server":
            if back is None:
                where: tuple[int | None, int, bool, int] = (self.resume_step, self.done, self.kept, self.floor)
            else:
                where = (back.step, back.done, False, back.step or 0)
            step, done, keeps, floor = where
            word = messages.Era(self.number, step, load_end, done, keeps, floor, self._partial.partial_restores)
            self._members.send(name, word)
        elif back is None and not self._job.restoring:
            self._members.send(name, messages.Resume(self.number, self.resume_step, load_end, self.done))

    def restart(self) -> None:
        """Begins with the cluster's checkpoint again: nothing that was trained since counts."""
        self.going_back, self.kept = None, True
        self.resume_step = self.floor = self._went_back_to = 0
        self.done = self._job.done_at_load_end
        self._partial.go_back(self.done)
        self._saving.forget_after(self.done)

    def send_renewed(self, name: str) -> None:
        """Trainers hear of slots that have begun anew, once these have a host."""
        if self._partial.partial_restores and self.going_back is None and self._members.by_name[name].role == "trainer":
            self._members.send(name, messages.PartlyRestored(self.number, self._partial.partial_restores))

    def _tell_all(self, role: str) -> None:
        for member in self._members.present(role):
            self.send_to(member.name)

    def on_reach(self, message: messages.Reach) -> bool:
        """Notes which steps a slot can go back to. When all slots have said it, chooses the last that is common.

        Returns:
            Whether there is none, and the cluster is to begin with its checkpoint again.
        """
        back, job = self.going_back, self._job
        if back is None or back.step is not None or message.era != self.number:
            return False
        back.reach[message.slot] = message
        if not back.reach.keys() >= set(range(job.code.slots)) - self._partial.reading:
            return False
        assert job.spec is not None
        if back.keeps:
            self._go_on(back)
            return False
        reach = back.reach.values()
        first, last = common_steps(reach)
        chosen = choose_step(reach, job.load_end, job.spec.trainers)
        if chosen is None and may_begin_anew(reach, job.done_at_load_end):
            if job.restored is not None:
                return True
            job.load_end = None
            chosen = choose_step(reach, None, job.spec.trainers)
        if chosen is None:
            if self._partial.wanted:
                job.lose("the trainers were lost, and with slots the dense snapshots")
                return False
            begin = steps_of_training_before(reach, job.done_at_load_end - (job.load_end or 0))
            first, last = (max(0, begin + step) for step in (first, last))
            why = "snapshots are off?"
            if job.experiment.keeps_no_dense_snapshots:
                why = f"none is in the experiment {job.experiment.mode}, which a lost trainer ends"
            job.stop(
                f"the trainers were lost, and no dense snapshot of the steps {first} to {last} is kept, which"
                f" are those that the servers can go back to ({why}): {job.way_back}",
                "stopped",
            )
            return False
        back.step = chosen
        counts = job.load_end is not None
        kept = (done for said in reach for step, done, _ in said.snapshots if step == chosen and counts)
        back.done = next(kept, job.done_at_load_end)
        before = self._partial.told
        self._partial.go_back(back.done)
        if not self._may_go_on_partly(before, back.done):
            return False
        self._saving.forget_after(back.done)
        if not back.first:
            self._announce(events.GoingBack(self.number, back.done, back.done + last - chosen))
        self._tell_all("server")
        return False

    def _go_on(self, back: GoingBack) -> None:
        """Has slots that lost their records begin anew where the others are, and training go on. All who keep theirs
        have stopped."""
        job, partial, before = self._job, self._partial, self._went_back_to
        first, step = common_steps(back.reach.values())
        # what is in records of the checkpoint is not to be made again: nobody goes back to before it
        told = [said.done - (said.applied - step) for said in back.reach.values() if said.done is not None]
        done = max(told, default=job.done_at_load_end + max(0, step - (job.load_end or 0)))
        announced = partial.told
        partial.go_on(done)
        if partial.partial_restores[-1].dense_lost and before >= step > (job.load_end or 0):
            job.lose(f"{partial.cause}; and the trainers, who had been lost, have no dense snapshot to begin with")
        elif self._may_go_on_partly(announced, done):
            self.resume_step, self.done, self.going_back, self.kept = step, done, None, True
            self._saving.forget_after(done)
            job.step = max(job.step, done)
            self.floor = min(step, max(first, step - (done - partial.read_from)))
            self._tell_all("server")
            self._tell_all("trainer")  # those that wait for their beginning; to the others it says nothing new
            for member in self._members.present("trainer"):
                self.send_renewed(member.name)

    def _may_go_on_partly(self, announced: int, done: int) -> bool:
        """Returns whether slots that read a checkpoint may go on where training does, and announces it of those that do
        so for the first time. If not, all go back to a checkpoint.

        Args:
            announced: so many partial restores were announced before.
            done: steps of training that count there.
        """
        job, partial = self._job, self._partial
        if partial.read_from > done:
            job.lose(f"{partial.cause}; the newest checkpoint is of step {partial.read_from}, and training at {done}")
            return False
        lost, new = partial.portion(job.code.slots, done), partial.partial_restores[announced:]
        if new and lost > partial.most:
            job.lose(
                f"{partial.cause}; to take these slots alone from a checkpoint would make {lost:.2%} of lost samples,"
                f" more than {partial.most:.2%} (--most-lost-samples)"
            )
            return False
        for one in new:
            if slots := [slot for slot, _, at in one.lives if at is not None]:
                found = one.folder, one.done, done, round(lost, 6), partial.cause, len(one.saves)
                self._announce(events.RecoveredPartly(slots, *found))
        return True

    def on_durable(self, message: messages.Durable) -> bool:
        """Notes that, at one slot, the step where training goes on survives r losses.

        Returns:
            Whether it does at all slots now: trainers were told to start.
        """
        back, job = self.going_back, self._job
        if back is None or back.step is None or message.era != self.number:
            return False
        back.durable.add(message.slot)
        if len(back.durable) < job.code.slots:
            return False
        self.resume_step, self.done, self.going_back = back.step, back.done, None
        self.floor, self.kept, self._went_back_to = back.step, False, back.step
        job.step = back.done
        if not back.first:
            self._announce(events.Resumable(self.number, job.step))
        self._tell_all("trainer")
        return True

    def learn(self, said: Iterable[messages.Rejoin]) -> None:
        """Takes over the newest era that members of the coordinator before know; the number never becomes less."""
        for one in said:
            self.number = max(self.number, one.known.era)
            self.resume_step, self.done = max((self.resume_step, self.done), (one.known.resume_step, one.known.done))
            self.floor = max(self.floor, one.known.floor)
        self._went_back_to = self.resume_step
        if self.resume_step == 0:
            self.done = self._job.done_at_load_end
