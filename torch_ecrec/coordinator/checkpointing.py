"""When the cluster writes a checkpoint, of which step, and whether it counts.

    idle          until one is due: every N steps of training, every so many seconds
    surveying     all slots have been asked which steps they can show; they keep them
    capturing     one step was chosen, and every slot writes its records as of it, while training goes on
    committing    all parts are durable: the manifest is written, last, by the manifests

Somebody may ask for one that is not due (`ask`): it begins as soon as it can, and is of a later step than any before.

A checkpoint is void when the host of a slot is lost, since it does not know what the one before has written, when a
slot gives up, or when it takes too long; then another is tried, with a pause that grows. Nothing of this stops training
or changes what it does, and the last checkpoint that counts goes on to count.

Prioritised saves (`saving.py`) take the same way: of some rows, on a checkpoint that counts. Where both are due, the
checkpoint comes first, and what fails of saves does not delay it.

Pure, as the coordinator is: what is written, listed or removed is asked of a `Manifests`, which answers by a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.job import RunningJob
from torch_ecrec.coordinator.members import Members
from torch_ecrec.coordinator.partial import PartialRecovery
from torch_ecrec.coordinator.saving import Saving
from torch_ecrec.observe import events
from torch_ecrec.observe.events import Event
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import INEXACT_MOST
from torch_ecrec.protocol.status import CheckpointsStatus
from torch_ecrec.spec.job import JobSpec

SURVEY_S = 0.5  # for the answers to a survey, before it is made again
SURVEYS_S = 30.0  # for a step that all slots can show
WRITES_ALONE_S = 60.0  # that writing its part keeps a slot from trainers, once most others have written theirs


@dataclass(frozen=True)
class Finished:
    """Describes a checkpoint whose parts are all durable, as its manifest is to say it.

    Args:
        folder: its name.
        step: of the protocol; `done`: steps of training until then.
        base: the checkpoint that it builds on, or "".
        parts: what the slots have said of theirs, by slot.
        dense_of: the slot whose part has the dense model.
        began_with: the checkpoint that the cluster began with, or went back to; None: training began at its beginning.
        save: it is a prioritised save on `base`, without the dense model.
        inexact: what has made the run another than an undisturbed one until then, and since which step.
    """

    folder: str
    step: int
    done: int
    base: str
    parts: Mapping[int, Mapping[str, Any]]
    dense_of: int
    began_with: messages.Restored | None = None
    save: bool = False
    inexact: Sequence[tuple[int, str]] = ()


# STEPS-RUN-COORDINATOR-ATTEMPT; of one that was imported, STEPS-WORD
_NAME = re.compile(r"[0-9]{12}-([^-]+)(?:-([0-9]{1,9})-([0-9]{1,9}))?", re.ASCII)


def run_of(folder: str) -> str:
    """The run that a checkpoint is of, by its name (one that was imported is a run of its own); "" where nobody here
    gives such names: a copy, say, that somebody has made beside it."""
    found = _NAME.fullmatch(folder)
    return found[1] if found is not None else ""


def attempt_of(folder: str) -> tuple[int, int]:
    """Returns which coordinator of its run has named a checkpoint, and which of its attempts that was: later ones are
    greater. (0, 0) of one that was imported, and where `run_of` knows none."""
    found = _NAME.fullmatch(folder)
    return (0, 0) if found is None or found[2] is None else (int(found[2]), int(found[3]))


Restorable = tuple[messages.Restored, JobSpec]


class Manifests(Protocol):
    """Writes manifests, and removes what is not wanted any more; beside the coordinator, in its own time.

    `processes/checkpoint_files.py:FileManifests` does it in a store, `tests/harness/checkpoints.py:Shelf` in memory.
    """

    def commit(self, finished: Finished, done: Callable[[str | None, bool], None]) -> None:
        """Writes the manifest, and forgets what is not kept.

        Args:
            done: gets why it failed, or None, and whether the next one is to be full: after a failure it is, since what
                it builds on may be gone.
        """

    def discard(self, folder: str, save: bool = False) -> None:
        """Removes what was written of a checkpoint, or of a prioritised save, that came to nothing."""

    def newest(
        self,
        run: str,
        began_with: messages.Restored | None,
        done: Callable[[Restorable | None, str], None],
        read: bool = True,
    ) -> None:
        """Looks for the newest checkpoint of a run that is whole; failing that, the one that the run began with.

        Args:
            run: a word in their names (`run_of`). What else is at the place is of another history.
            began_with: as in `Finished`.
            done: gets it, and the job that it is of; or None, and why there is none.
            read: all of it is read; else that is left to who uses it, and looked at is only what it builds on.
        """


@dataclass
class _Running:
    """The checkpoint that is under way."""

    number: int
    since_s: float
    asked_s: float
    wanted: int | None  # steps of training that it is due after; None: the last that can be had
    save: bool  # a prioritised one
    shown: dict[int, messages.Shown] = field(default_factory=dict)
    order: messages.Capture | None = None
    written: dict[int, dict[str, Any]] = field(default_factory=dict)
    most_s: float | None = None  # when most slots had written theirs
    committing: bool = False


class Checkpointing:
    """The checkpoints of one cluster.

    Args:
        settings: which.
        manifests: None: `settings` wants none.
        job, members: of the coordinator.
        saving: when prioritised saves are due, and which count.
        announce: tells observers of an event.

    Attributes:
        last: name of the newest that counts, "" if there is none of this coordinator's; `last_done`, `last_s`: of which
            step of training, and when.
        failing: why the last try came to nothing, "" if it did not; `failing_since_s`: since when none has succeeded.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        manifests: Manifests | None,
        job: RunningJob,
        members: Members,
        saving: Saving,
        partial: PartialRecovery,
        announce: Callable[[Event], None],
    ) -> None:
        self.settings, self._manifests, self.saving, self._partial = settings, manifests, saving, partial
        self._job, self._members, self._announce = job, members, announce
        self._running: _Running | None = None
        self._released: messages.Release | None = None  # the last one
        self._number = 0
        self._now_s = 0.0  # as of the last tick
        self._due: int | None = None  # steps of training
        self._next_s: float | None = None  # by time
        self._asked: int | None = None  # somebody wants one of a later step than this
        self._not_before_s = 0.0
        self._finished = self._last_tried = False  # the trainers have left, done; one by time was tried since
        self._void = 0  # one after the other
        self._full = True  # the next one is
        self._base = ""  # what it builds on, if not
        self.last, self.last_done, self.last_s = "", 0, 0.0
        self.failing, self.failing_since_s = "", 0.0

    @property
    def wanted(self) -> bool:
        return bool(self.settings.url) and self._manifests is not None

    def send_to(self, name: str) -> None:
        """Tells a server what it may have missed."""
        if not self.wanted or self._members.by_name[name].role != "server":
            return
        running = self._running
        self._members.send(name, self._checkpointing())
        if self._released is not None:
            self._members.send(name, msgspec.structs.replace(self._released, saves=self.saving.known))
        if running is not None and not running.committing:  # a new host must not write what the manifest is made of
            self._members.send(name, running.order or messages.Survey(running.number))

    def _checkpointing(self) -> messages.Checkpointing:
        settings = self.settings
        marks = settings.policy != "full"
        if not self.saving.wanted:
            return messages.Checkpointing(settings.every_steps, marks)
        some = settings.saver, settings.portion, settings.saves_every
        return messages.Checkpointing(settings.every_steps, marks, *some)

    # when -----------------------------------------------------------------------------------------

    def on_tick(self, now_s: float, whole: bool, finished: bool = False) -> None:
        """Begins what is due, and gives up what takes too long. Called as time passes.

        Args:
            now_s: on the coordinator's clock.
            whole: every slot has a host and all its records, and the trainers train.
            finished: the trainers have left, done. One more checkpoint is tried then, and no step is left for others.
        """
        if not self.wanted:
            return
        self._now_s, self._finished = now_s, finished
        self._last_tried = self._last_tried and finished
        running = self._running
        if running is not None:
            self._look_after(running, now_s, whole)
            return
        if self._next_s is None and self.settings.every_s and whole:
            self._next_s = now_s + self.settings.every_s
        by_time = self._next_s is not None and now_s >= self._next_s and not self._last_tried
        if not whole:
            return
        if by_time or self._due is not None or self._asked is not None:
            if now_s >= self._not_before_s:
                self._last_tried = finished
                self._begin(now_s, self._due if self._asked is None else None)
        elif self.saving.is_due(now_s):
            self._begin(now_s, self.saving.due, save=True)

    def ask(self, after: int | None, step: int) -> str:
        """Asks for a checkpoint now, for a person. Returns why there is none to come, or "". Where the last one has all
        that was trained, it is the answer.

        Args:
            after: of a later step of training than this; None: than the last, or one that is being written.
            step: of training, where it is, as far as is known.
        """
        if not self.wanted:
            return (
                "no checkpoints are kept: start the coordinator with --checkpoint URL --checkpoint-every N, which say"
                " where and how often"
            )
        if self._job.fatal is not None:
            return f"the cluster has stopped: {self._job.fatal}"
        if after is None:
            if self.last and step <= self.last_done:
                return ""  # it is there
            running = self._running.order if self._running is not None and not self._running.save else None
            covered = running is not None and step <= running.done
            after = self.last_done if running is None or covered else running.done
        if after >= self.last_done:
            self._asked = after if self._asked is None else max(self._asked, after)
            self._not_before_s = self._now_s
        return ""

    def _look_after(self, running: _Running, now_s: float, whole: bool) -> None:
        if now_s > running.since_s + self.settings.timeout_s:
            self._give_up(f"it took longer than {self.settings.timeout_s:g} s")
        elif running.order is None and not whole:
            self._give_up("a slot was lost, or the trainers were")
        elif running.order is None and now_s > running.since_s + SURVEYS_S and self._nothing_new(running):
            self._running = None
            self._release(messages.Release(running.number, "", False, self.saving.known))
        elif running.order is None and now_s > running.since_s + SURVEYS_S:
            self._give_up(
                "there was no step that all slots could show with the dense model: are snapshots off"
                " (`snapshot_every=0`), or does training stand?"
            )
        elif running.order is None:
            all_shown = len(running.shown) == self._job.code.slots
            if all_shown or now_s >= running.asked_s + SURVEY_S:
                self._survey(running, now_s)

    def _nothing_new(self, running: _Running) -> bool:
        """Returns whether no checkpoint is lacking at the end of a job: its last step that can be shown is in one
        already. This is no failure."""
        return self._finished and bool(self.last) and running.wanted is None and self._asked is None

    def on_word(self, word: messages.OfCheckpoint, whole: bool) -> None:
        """Handles a message about checkpoints from the host of a slot. `whole`: as for `on_tick`."""
        match word:
            case messages.Due():
                self._on_due(word, whole)
            case messages.Shown():
                self._on_shown(word)
            case messages.Written():
                self._on_written(word)
            case messages.Unwritten():
                self._on_unwritten(word)

    def _on_due(self, word: messages.Due, whole: bool) -> None:
        """Notes that a checkpoint is due: the dense snapshot of its step is whole."""
        every = self.settings.every_steps
        if self.wanted and every and word.done > self.last_done:
            if word.done % every == 0:
                self._due = word.done
            else:
                self.saving.due = word.done
            self.on_tick(self._now_s, whole, self._finished)

    def _begin(self, now_s: float, wanted: int | None, save: bool = False) -> None:
        self._number += 1
        self._running = _Running(self._number, now_s, now_s, wanted, save)
        self._survey(self._running, now_s)

    def _survey(self, running: _Running, now_s: float) -> None:
        running.asked_s, running.shown = now_s, {}
        self._members.tell(messages.Survey(running.number), "server")

    # of which step --------------------------------------------------------------------------------

    def _on_shown(self, word: messages.Shown) -> None:
        """Notes which steps a slot can show. Once all slots have said it, chooses one, and has it written."""
        running = self._running
        if running is None or word.checkpoint != running.number or running.order is not None:
            return
        running.shown[word.slot] = word
        if len(running.shown) < self._job.code.slots:
            return
        assert self._job.spec is not None
        chosen = choose(running.shown, self._job.spec.trainers, running.wanted)
        least = max(self.last_done, self.saving.known.newest if running.save else self._asked or 0)
        if chosen is None or chosen[1] <= least:
            return  # asked again, a little later
        step, done, dense_of = chosen
        settings, full = self.settings, "" if self._full else self._base
        running.order = messages.Capture(
            checkpoint=running.number,
            step=step,
            done=done,
            dense_of=dense_of,
            base=self.saving.known.base if running.save else full,
            url=settings.url,
            folder=f"{done:012d}-{self._job.run}-{self._members.term}-{running.number}",
            encoding=dict(settings.encoding),
            bytes_per_s=settings.bytes_per_s,
            portion=settings.portion if running.save else 1.0,
        )
        self._members.tell(running.order, "server")
        if running.save:
            self.saving.on_begun(running.order.folder, done)
        else:
            self._announce(events.CheckpointBegun(running.order.folder, done, running.order.base))

    # whether it counts ----------------------------------------------------------------------------

    def _on_written(self, word: messages.Written) -> None:
        """Notes that a slot's part is durable. Once all are, has the manifest written."""
        running = self._running
        if running is None or running.order is None or word.checkpoint != running.number or running.committing:
            return
        running.written[word.slot] = word.part
        if running.most_s is None and 2 * len(running.written) > self._job.code.slots:
            running.most_s = self._now_s
        if len(running.written) < self._job.code.slots:
            return
        running.committing = True
        order = running.order
        assert self._manifests is not None
        began, parts = self._job.restored, running.written
        inexact = [*self._job.inexact_until(order.done), *self._partial.notes(order.done)][:INEXACT_MOST]
        finished = Finished(
            order.folder,
            order.step,
            order.done,
            order.base,
            parts,
            order.dense_of,
            began,
            running.save,
            [] if running.save else inexact,
        )
        self._manifests.commit(finished, lambda *answer: self._on_committed(running, *answer))

    def _on_committed(self, running: _Running, error: str | None, full: bool) -> None:
        if running is not self._running:
            return  # it took too long; it may count all the same, and what slots write next holds all that it does
        if error is not None:
            self._full |= full and not running.save
            self._give_up(error)
            return
        order = running.order
        assert order is not None
        if running.save:
            self._on_saved(running, order)
            return
        rebase = not order.base or self.settings.policy == "consecutive"
        self.saving.on_checkpoint(order.folder, order.done, self._now_s)
        self._release(messages.Release(running.number, order.folder, rebase, self.saving.known))
        self._base = order.folder if rebase else order.base
        self._full = full or self.settings.policy == "full"
        self.last, self.last_done, self.last_s = order.folder, order.done, self._now_s
        self._running, self._due, self.failing, self._void = None, None, "", 0
        if self._asked is not None and order.done > self._asked:
            self._asked = None
        self._next_s = self._now_s + self.settings.every_s if self.settings.every_s else None
        self._announce(events.Checkpointed(order.folder, order.done, order.base, *self._cost(running)))

    def _on_saved(self, running: _Running, order: messages.Capture) -> None:
        """Counts a prioritised save that is durable, unless training has gone back meanwhile to before its step."""
        if not self.saving.on_written(self._now_s):
            self._give_up(f"the trainers went back to before step {order.done}")
            return
        self._running = None
        self._release(messages.Release(running.number, order.folder, False, self.saving.known))
        self._announce(events.Saved(order.folder, order.done, order.base, *self._cost(running)))

    def _cost(self, running: _Running) -> tuple[int, float]:
        """Bytes, and seconds from its beginning."""
        size = sum(int(part.get("bytes", 0)) for part in running.written.values())
        return size, round(self._now_s - running.since_s, 3)

    def _on_unwritten(self, word: messages.Unwritten) -> None:
        """Gives up the checkpoint, since a slot has given up its part."""
        running = self._running
        if running is not None and word.checkpoint == running.number and not running.committing:
            self._give_up(f"slot {word.slot}: {word.reason}")

    def writing(self) -> set[int]:
        """Slots that write their part of a checkpoint, no longer than they should: they have less time for others."""
        running = self._running
        if running is None or running.order is None:
            return set()
        if running.most_s is not None and self._now_s > running.most_s + WRITES_ALONE_S:
            return set()
        return {*range(self._job.code.slots)} - running.written.keys()

    def on_placed_anew(self) -> None:
        """Gives up the checkpoint under way, since a slot has a new host that does not know what the one before has
        written."""
        if self._running is not None and not self._running.committing:
            self._give_up("a slot got another host meanwhile")

    def _give_up(self, reason: str) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        self._release(messages.Release(running.number, "", False, self.saving.known))
        self._discard(running)
        done = running.order.done if running.order is not None else 0
        if running.save:
            self.saving.on_void(reason, self._now_s)
            self._announce(events.CheckpointVoid(done, f"a prioritised save: {reason}"))
            return
        if not self.failing:
            self.failing_since_s = self._now_s
        self.failing = reason
        self._void += 1
        again_s = self.settings.again_s
        self._not_before_s = self._now_s + again_s[min(self._void, len(again_s)) - 1]
        self._announce(events.CheckpointVoid(done, reason))

    def follow(self, before: Checkpointing) -> None:
        """Takes over from a cluster that went back."""
        self._now_s = before._now_s  # one may be due before the next tick
        if before._running is not None:
            self._discard(before._running)

    def _discard(self, running: _Running) -> None:
        if running.order is not None and not running.committing and self._manifests is not None:
            self._manifests.discard(running.order.folder, running.save)

    def _release(self, release: messages.Release) -> None:
        self._released = release
        self._members.tell(release, "server")

    # for people -----------------------------------------------------------------------------------

    def status(self) -> CheckpointsStatus | None:
        """Returns what `torch-ecrec status` shows of checkpoints; None where none are wanted."""
        if not self.wanted:
            return None
        running = self._running
        return CheckpointsStatus(
            url=self.settings.url,
            last=self.last,
            last_step=self.last_done,
            last_age_s=round(self._now_s - self.last_s, 1) if self.last else None,
            running=running.order.folder if running is not None and running.order is not None else "",
            failing=self.failing,
            failing_for_s=round(self._now_s - self.failing_since_s, 1) if self.failing else None,
            saves=self.saving.status() if self.saving.wanted else None,
            asked=self._asked,
            written=0 if running is None else len(running.written),
        )


def choose(shown: Mapping[int, messages.Shown], trainers: int, wanted: int | None) -> tuple[int, int, int] | None:
    """The step that a checkpoint is of.

    Args:
        shown: what the slots said, of each one.
        trainers: how many there are.
        wanted: steps of training that it should be of, or the next that all can show; None: the last.

    Returns:
        The step of the protocol, the steps of training until then, and a slot that has every trainer's part of the
        dense model after it; None: there is none.
    """
    least, most = max(said.floor for said in shown.values()), min(said.applied for said in shown.values())
    found = [
        (step, done, -slot)
        for slot, said in shown.items()
        for step, done, kept in said.snapshots
        if least <= step <= most and len(set(kept)) == trainers and done >= (wanted or 0)
    ]
    if not found:
        return None
    step, done, slot = max(found) if wanted is None else min(found, key=lambda one: (one[0], -one[2]))
    return step, done, -slot
