"""What the cluster trains, how far it is, and whether it can go on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from torch_ecrec.coordinator.members import Members
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import INEXACT_MOST, TEXT_MOST
from torch_ecrec.protocol.messages import Rejoin, Restored
from torch_ecrec.spec.experiment import Experiment
from torch_ecrec.spec.job import CodeSpec, JobSpec
from torch_ecrec.spec.settings import Beyond

NO_EXPERIMENT = Experiment()


class RunningJob:
    """The job of a cluster, from the first trainer's word of it.

    Args:
        code: code parameters of the cluster; a job brings its tables, not its code.
        members: who is told.
        announce: tells observers of an event.
        restore: the checkpoint that the cluster begins with, and the job that it is of.
        beyond: what follows when more is lost than can be repaired (`CheckpointSettings`).
        run: a word of this coordinator's; that of the first one stays.
        known: the run is one that there was before, and this coordinator leads no other.
        experiment: that all members take part in.
        url: where checkpoints are kept; "": none are.

    Attributes:
        goes_back: the job has ended as it was, and begins again from a checkpoint.
        restored: that checkpoint; None: training began at its beginning.
        begins_as_told: it begins with the checkpoint that this coordinator was told of, where members of one before
            come back with too little to go on.
        restoring: slots get their records of it, or have no parities of them yet; then training begins.
        run: the identity of the cluster (`admission.py`), and in the names of its checkpoints, which tells them from
            those of other runs at the same place.
        spec: None until a trainer has joined.
        load_end: the step that training begins after (`wire.py`); None: loading, or restoring, has not ended.
        step: the last step of training that somebody reported.
        inexact: (steps of training until then, what has happened) that makes this run, or may, another than one that
            nothing happened to; partial recoveries aside, which `PartialRecovery` knows.
        fatal, fatal_kind: why the job has ended for everybody, and which kind of end it is; None: it has not.
    """

    def __init__(
        self,
        code: CodeSpec,
        members: Members,
        announce: Callable[[Event], None],
        restore: tuple[Restored, JobSpec] | None = None,
        beyond: Beyond = "stop",
        run: str = "run",
        known: bool = False,
        experiment: Experiment = NO_EXPERIMENT,
        url: str = "",
    ) -> None:
        self.experiment, self._url = experiment, url
        self.code, self._beyond, self.goes_back = code, beyond, False
        self.restored = None if restore is None else restore[0]
        self._restored_job = None if restore is None else restore[1]
        self.restoring = restore is not None
        self.begins_as_told = restore is not None and beyond == "stop"
        self.run, self.known = run, known
        self._members, self._announce = members, announce
        self.spec: JobSpec | None = None
        self.load_end: int | None = None
        self.step = 0
        self.inexact: list[tuple[int, str]] = []
        self.fatal: str | None = None
        self.fatal_kind = "stopped"

    @property
    def done_at_load_end(self) -> int:
        """Steps of training that are done where training begins here."""
        return self.restored.done if self.restored is not None else 0

    @property
    def way_back(self) -> str:
        """Returns how to begin again once this job cannot go on: a clause for an error message."""
        if self._url:
            newest, began = f"begin again with a checkpoint: --checkpoint {self._url} --restore newest", self.restored
            if began is None or began.url == self._url:
                return newest
            return f"{newest}; if none is there yet, with what this run began with: --restore {began.url}@{began.done}"
        if self.restored is not None:
            return f"begin again with the checkpoint that this run began with: --restore {self.restored.url}"
        return (
            "no checkpoints are kept (--checkpoint URL --checkpoint-every N): begin with what the script itself has"
            " saved, or from the beginning"
        )

    def take(self, spec: JobSpec | None) -> None:
        """Takes the job that a trainer, or a member of the coordinator before, brings: the first is everybody's."""
        if spec is not None and self.spec is None:
            self.spec = replace(spec, code=self.code)

    def refusal(self, spec: JobSpec | None, placed: bool = True) -> str | None:
        """Returns why somebody who brings this job cannot take part, or None. Without `placed` its rows may lie
        elsewhere."""
        ours, whose = self.spec, "this cluster trains another job"
        if ours is None and self.restored is not None:
            ours, whose = self._restored_job, f"the checkpoint {self.restored.folder} is of another job"
        placed = placed and ours is self.spec
        difference = "" if spec is None or ours is None else ours.difference(spec, placed)
        return f"{whose}: {difference}" if difference else None

    def on_loaded(self, load_end: int) -> None:
        """Notes that trainer 0 has loaded the initial values: training begins after that step."""
        self.load_end = load_end
        self._members.tell(messages.Loaded(load_end))

    def restore(self) -> None:
        """Slots begin with their records of the checkpoint that the cluster begins with, all or once more."""
        assert self.restored is not None
        self.restoring, self.load_end = True, None
        for step, what in self.restored.inexact:
            self.on_inexact(step, what)

    def on_restored(self) -> None:
        """Notes that all slots have their records of the checkpoint, and parities: training begins after step 0 of the
        protocol."""
        self.restoring, self.load_end = False, 0

    def on_inexact(self, step: int, what: str) -> None:
        """Notes that from a step of training on this run is not exact. The same is noted once, and of many the
        first."""
        what = what[:TEXT_MOST]  # members take no longer one, and it may hold a member's word
        if (step, what) not in self.inexact and len(self.inexact) < INEXACT_MOST:
            self.inexact.append((step, what))
            self._announce(messages.NotExact(step, what))
            self._members.tell(messages.KnownInexact(self.inexact))

    def inexact_until(self, done: int) -> list[tuple[int, str]]:
        """Returns the notes of inexact training that a checkpoint after so many steps is no better than: those of
        before, and those of the checkpoint that the cluster began with, which was so at its step already."""
        began = [] if self.restored is None else self.restored.inexact
        return [known for known in self.inexact if known[0] < done or known in began]

    def tell_inexact(self, name: str) -> None:
        """Sends a member every note of inexact training so far, since it may have missed some."""
        if self.inexact:
            self._members.send(name, messages.KnownInexact(self.inexact))

    def learn(self, said: Collection[Rejoin], era: int, placement: messages.Placement | None) -> None:
        """Takes over the job, and where training begins, from members of the coordinator before.

        Initial values that are loaded may have to be loaded again in a later era, so the newest era counts, and in that
        who knows already where it begins. `era`: the newest that this coordinator knows. Whether a checkpoint is being
        restored, the newest placement says; None: there is none yet.
        """
        for one in sorted(said, key=lambda one: one.known.placement is not None):  # who has none may be of no run yet
            self.take(one.known.job)
            self.restored, self.run = one.restored, one.run
            self.inexact += [known for known in one.inexact if known not in self.inexact]
        newest = max((one.known.era for one in said), default=0)
        of_it = [one for one in said if one.known.era == newest]
        told = [one for one in of_it if not one.known.frozen] or of_it
        load_ends = [one.known.load_end for one in told if one.known.load_end is not None]
        if newest > era or (newest == era and load_ends):
            self.load_end = load_ends[0] if load_ends else None
        self.restoring = self.restored is not None and (placement is None or placement.restoring)
        if self.restored is not None:
            self.load_end = None if self.restoring else 0

    def lose(self, reason: str, kind: str = "data_loss") -> None:
        """Ends the job, or has it go back to a checkpoint: more is lost than can be repaired, also in part."""
        if self._beyond == "stop":
            self.stop(reason, kind)
        else:
            self.go_back(reason)

    def go_back(self, reason: str) -> None:
        """Ends the job as it was: all begin again with a checkpoint."""
        self.fatal, self.fatal_kind, self.goes_back = reason, "data_loss", True

    def stop(self, reason: str, kind: str) -> None:
        """Ends the job for everybody: kinds are data_loss, checkpoint and stopped."""
        self.fatal, self.fatal_kind, self.goes_back = reason, kind, False
        word = messages.Fatal(kind, reason)
        self._announce(word)
        self._members.tell(word)
