"""Which start of a script may train: a rank is no identity.

A *launch* is one start of all trainers of a job, by torchrun or whoever starts them again when they are lost; they say
its word when they join (`messages.Entering`). While trainers of one launch live, those of another wait, for as long as
the end of the first may take, and are refused then, by name. Whoever found another launch there does not slip in while
that one's trainers are started again, either; nor does anybody where trainers were *dismissed*: given up or told to
end, though nothing says that they have died. Once nobody lives, whoever comes goes on with what was trained; but not
silently with a job that has ended.

A trainer that its launch has started again takes the place of one of its rank at once, also of one that lives, and
hangs. Without a word ("") nobody can tell another start from the next one; so it waits like one of another launch,
for the trainer of its rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import MemberRecord, Members
from torch_ecrec.protocol.messages import Join

RESTART_S = 30.0  # torchrun gives workers so long to end; a start of Python with torch takes less
REMEDY = "end that one, or give this one a cluster of its own"
STARTED_AGAIN = "{} trained here a moment ago, of another launch, and may be started again"
TRAIN_ON = (
    "the job of this cluster has ended: all its trainers were done, after step {step}. To train it on from there:"
    " `torch-ecrec run --again`, or TORCH_ECREC_AGAIN=1. To begin another: start another cluster"
)


@dataclass(frozen=True)
class Hold:
    """Why a join waits.

    Attributes:
        reason: for who joins.
        lives: a trainer of another launch is there; else one was a moment ago, and may be started again.
    """

    reason: str
    lives: bool


class Launches:
    """Who may join as a trainer, next to those who are there."""

    def __init__(self, job: RunningJob, members: Members) -> None:
        self._job, self._members = job, members
        self._found: dict[str, tuple[float, str]] = {}  # launches that found another: when last, and whom
        self._dismissed: tuple[float, str | None, str] = -math.inf, None, ""  # see `dismiss`

    def dismiss(self, launch: str | None, named: str, now_s: float) -> None:
        """Trainers were given up, or told to end, and may live: their launch starts them again. None: it is not known
        which launch that is."""
        self._dismissed = now_s, launch, named

    def dismiss_silent(self, member: MemberRecord, now_s: float) -> None:
        """Notes that a trainer was given up that is only silent, and may live."""
        self.dismiss(member.launch, _named(member), now_s)

    def follow(self, before: Launches) -> None:
        """Takes over from a cluster that went back to a checkpoint: its trainers are told to end."""
        self._found, self._dismissed = before._found, before._dismissed
        if there := before._members.present("trainer"):
            self.dismiss_silent(there[0], max(member.heard_s for member in there))

    @property
    def finished(self) -> bool:
        """All trainers have said that they are done."""
        return self._job.spec is not None and self._members.done >= set(range(self._job.spec.trainers))

    def refusal(self, join: Join, step: int) -> str | None:
        """Returns why a job that has ended, after `step`, does not go on for this trainer, or None."""
        if join.role != "trainer" or not self.finished or join.again or self._is_next(join):
            return None
        return TRAIN_ON.format(step=step)

    def _is_next(self, join: Join) -> bool:
        """Its launch trained last, and has started it again."""
        before = {member.launch for member in self._members.trainers}
        return bool(join.launch) and join.relaunched and before == {join.launch}

    def hold(self, join: Join, now_s: float) -> Hold | None:
        """Returns why a process that joins has to wait; None: it has not."""
        if join.role != "trainer" or self._members.member_of_session(join.session_id) is not None:
            return None
        rivals = [member for member in self._members.present("trainer") if is_rival(member, join)]
        if rivals:
            named = _named(rivals[0])
            if rivals[0].launch != join.launch:
                self._found[join.launch] = now_s, named
            return Hold(f"{named} trains here, of another launch: {REMEDY}", lives=True)
        found = self._found.pop(join.launch, None)
        if found is not None and now_s < found[0] + RESTART_S:
            self._found[join.launch] = found
            return Hold(STARTED_AGAIN.format(found[1]), lives=False)
        dismissed_s, launch, named = self._dismissed
        if now_s < dismissed_s + RESTART_S and not _is_next_of(launch, join):
            return Hold(STARTED_AGAIN.format(named), lives=False)
        return None


def is_rival(member: MemberRecord, join: Join) -> bool:
    """Returns whether a trainer that is there keeps another process from joining."""
    if member.rank == join.rank:
        return not (join.launch and member.launch == join.launch and join.relaunched)
    return member.launch != join.launch


def _is_next_of(launch: str | None, join: Join) -> bool:
    """Returns whether a trainer that joins is a new start of that launch, as far as anybody can tell."""
    return join.relaunched or not join.launch if launch is None else join.launch == launch


def _named(member: MemberRecord) -> str:
    launch = f", launch {member.launch}" if member.launch else ""
    return f"{member.name} (pid {member.pid} at {member.host or 'an unknown address'}{launch})"
