"""A slot's part in the checkpoints of the cluster.

    survey    the coordinator asks which steps this slot can show itself as of; from then on the log keeps them
    capture   it has chosen one: the slot's records as of it are read in portions and written by the host's writer
    release   the checkpoint counts, or it does not: what is kept for it goes

One checkpoint at a time. A new life of the slot knows nothing of one that was under way, so that one is void.

For checkpoints that hold only what has changed, the slot marks what every step changes. A capture takes the marks and
begins new ones; if it comes to nothing the marks are put together again, so that the next one holds more, never less.
The new host of a lost slot has no marks: its next part holds every record.

Where a checkpoint is due every N steps of training, the log keeps such a step, for a while, until the survey comes.

A prioritised save (`coordinator/saving.py`) is captured in the same way: of the rows that the slot's savers pick
(`saving.py`), without the dense model. It has nothing to do with marks: checkpoints are as if there were none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_ecrec.durability.context import Pending, SlotContext
from torch_ecrec.durability.scrubber import Scrubber
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.bounds import REASON_MOST
from torch_ecrec.protocol.pieces import Key, Part
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.server.capture import Capture, Marks, all_marked, mark_changed_, none_marked
from torch_ecrec.server.process import ServerProcess
from torch_ecrec.server.saving import SlotSavers
from torch_ecrec.server.snapshots import SnapshotStore

PINNED_STEPS = 32  # for which the log keeps a step that a checkpoint is due after, if nobody asks for it


class SlotCheckpoints:
    """The part of one life of a slot in checkpoints.

    Args:
        slot: which.
        host: the process that hosts it; says what the coordinator wants, and has the writer.
        snapshots: of the slot.
        scrubber: of the slot; tells `on_damage` of damage.
        memory_bytes: a capture that keeps more, since steps change records faster than it is written, is given up.
    """

    def __init__(
        self,
        slot: SlotContext,
        host: ServerProcess,
        snapshots: SnapshotStore,
        scrubber: Scrubber,
        memory_bytes: int,
    ) -> None:
        self._slot, self._host, self._held = slot, host, slot.held
        self._snapshots, self._scrubber, self._memory_bytes = snapshots, scrubber, memory_bytes
        self._pinned: int | None = None  # the log goes back to there
        self._pinned_at = 0  # what was applied then
        self._kept: int | None = None  # steps of training until the last whole snapshot, as far as is known
        self._due = 0  # steps of training after which a checkpoint is due, as this slot has said last
        self._surveyed = 0  # the checkpoint that is being prepared, or written
        self._capture: Capture | None = None
        self._writing: Pending | None = None
        self._marks: Marks | None = None  # what has changed since `_since`
        self._since = ""  # a checkpoint that counts; "": there is none
        self._said: messages.OfCheckpoint | None = None  # of the checkpoint that is under way, last
        self._taken: tuple[Marks, str] | None = None  # marks that the capture has, until it is known whether it counts
        self._savers: SlotSavers | None = None

    # steps --------------------------------------------------------------------------------------

    def on_applied(
        self, step: int, positions: Sequence[Positions], deltas: Sequence[Bytes], iteration: int | None
    ) -> None:
        """Marks what an applied step has changed, which is logged, and keeps captured records as they were.

        Args:
            step: which.
            positions, deltas: what it has changed: of each table group (U,) and (U, B).
            iteration: the step of training that it is; None: it loads.
        """
        if self._marks is not None:
            for marks_P, positions_U in zip(self._marks, positions, strict=True):
                marks_P[positions_U] = 1
        if self._host.checkpointing.saver != "everything":
            self._note(positions)
        capture = self._capture
        if capture is not None:
            capture.before_forgetting(positions, deltas)
            if capture.kept_bytes > self._memory_bytes:
                self._give_up(
                    f"{capture.kept_bytes:,} bytes were changed while it was written: raise"
                    " `checkpoint_bytes_per_s`, or TORCH_ECREC_CHECKPOINT_MEMORY_BYTES of the servers"
                )
        if not self._surveyed and iteration is not None and self._is_due(iteration):
            self._pinned = self._pinned_at = step
        if not self._surveyed and self._pinned is not None and step > self._pinned_at + PINNED_STEPS:
            self._pinned = None

    def _is_due(self, done: int) -> bool:
        """Returns whether a checkpoint, or a prioritised save, is due after so many steps of training."""
        return any(done % every == 0 for every in self._periods())

    def _periods(self) -> list[int]:
        """Returns after how many steps of training, again and again, a checkpoint is due, and a prioritised save."""
        told = self._host.checkpointing
        return [every for every in (told.every_steps, told.saves_every) if every] if told.every_steps else []

    def _note(self, positions: Sequence[Positions]) -> None:
        if self._savers is None and self._slot.whole:
            told = self._host.checkpointing
            self._savers = SlotSavers(self._held, told.saver, told.portion)
        if self._savers is not None:
            self._savers.note(positions)

    def keeps(self, floor: int) -> int:
        """Returns how far the log may forget with checkpoints, where without them it might up to `floor`."""
        return floor if self._pinned is None else min(floor, self._pinned)

    def on_snapshot(self, done: int, whole: bool) -> None:
        """Notes that a trainer's part of a dense snapshot is here; `done`: steps of training; `whole`: all parts of it
        are.

        Not every step has a snapshot. That of the first step after one that a checkpoint is due after stands for it.
        """
        if self._held.index or not whole or not done:
            return
        kept = self._kept if self._kept is not None else done - 1
        self._kept = max(kept, done)
        for every in self._periods():
            if (due := done // every * every) > kept:
                if every == self._host.checkpointing.every_steps:
                    self._due = due
                self._slot.tell(messages.Due(*self._slot.life, due))
                return

    def on_going_back(self, step: int) -> None:
        """Prepares for every step after `step` to be taken back, here and everywhere."""
        if self._marks is not None:
            mark_changed_(self._marks, self._held, step)
        self._kept, _ = self._snapshots.found().get(step, (None, []))
        if self._pinned is not None:
            self._pinned, self._pinned_at = min(self._pinned, step), min(self._pinned_at, step)
        if self._capture is not None and self._capture.step > step:
            self._give_up(f"the trainers went back to before step {self._capture.step}")

    # from the coordinator -----------------------------------------------------------------------

    def on_word(self, word: messages.FromCoordinator) -> None:
        """Handles a message of the coordinator about checkpoints."""
        match word:
            case messages.Survey():
                self.on_survey(word.checkpoint)
            case messages.Capture():
                self.on_capture(word)
            case messages.Release():
                self.on_release(word.checkpoint, word.counts, word.rebase)

    def on_survey(self, checkpoint: int) -> None:
        """Says which steps this slot can show, and keeps them until the checkpoint is released."""
        if self._surveyed not in (0, checkpoint):
            self.abandon()  # its release was missed: as if it did not count
        if not self._slot.whole or self._capture is not None:
            return
        rule, floor = self._held.rule, self._held.log.floor
        if not self._surveyed:
            self._pinned = floor  # all that it says it can show, also before a step that is due
        self._surveyed = checkpoint
        found: dict[int, tuple[int, list[int]]] = {}
        for (step, trainer), (header, _) in sorted(self._snapshots.parts.items()):
            found.setdefault(step, (header[0], []))[1].append(trainer)
        kept = [(step, *told) for step, told in found.items()]
        self._say(messages.Shown(*self._slot.life, checkpoint, rule.applied, floor, kept))

    def on_capture(self, order: messages.Capture) -> None:
        """Begins to write the slot's records as of a step, once: orders come again with any news of the placement."""
        written = isinstance(self._said, messages.Written)  # what has changed since the last one is taken already
        if self._capture is not None or order.checkpoint != self._surveyed or written:
            return
        writer, held = self._host.writer, self._held
        if writer is None or not self._slot.whole or not held.log.floor <= order.step <= held.rule.applied:
            self._tell_unwritten(order.checkpoint, "this slot cannot show that step (any more)")
            return
        dense = self._dense(order)
        if dense is None:
            self._tell_unwritten(order.checkpoint, "this slot has not (any more) every trainer's part of that step")
            return
        self._capture = capture = Capture(held, order.step, self._marks_of(order), self._on_broken)
        self._pinned = None
        self._writing = writer.write(
            order,
            held.index,
            held.job.table_groups,
            capture.next_portion,
            dense,
            lambda part: self._on_written(order.checkpoint, part),
            lambda reason: self._on_failed(order.checkpoint, reason),
        )

    def _dense(self, order: messages.Capture) -> list[tuple[Key, Part]] | None:
        """Parts of the dense model that this slot writes; None: it has not all of them."""
        if order.portion < 1:
            return []
        self._snapshots.check([order.step])
        if order.dense_of != self._held.index:
            return []
        found = [item for item in sorted(self._snapshots.parts.items()) if item[0][0] == order.step]
        return found if len(found) == self._held.job.trainers else None

    def _marks_of(self, order: messages.Capture) -> Marks:
        """Returns the marks of the records that go into a checkpoint, or into a prioritised save."""
        some = order.portion < 1
        if self._savers is None:
            return none_marked(self._held) if some else self._take_marks(order)  # nobody has noted anything yet
        picked = self._savers.pick(order.step, everything=not some)
        return picked if some else self._take_marks(order)

    def _take_marks(self, order: messages.Capture) -> Marks:
        """Takes the marks of the records that go into it; changes after its step are marked anew."""
        held = self._held
        taken = self._marks if self._marks is not None and order.base == self._since != "" else None
        if not self._host.checkpointing.marks:
            return all_marked(held)
        before = self._marks if self._marks is not None else all_marked(held)
        self._taken = [marks_P.copy() for marks_P in before], self._since
        self._marks = none_marked(held)
        mark_changed_(self._marks, held, order.step)
        return all_marked(held) if taken is None else taken

    def on_release(self, checkpoint: int, counts: str, rebase: bool) -> None:
        """Ends a checkpoint, which counts or does not.

        Args:
            checkpoint: which.
            counts: its name; "": it does not.
            rebase: the next one holds what has changed since this one.
        """
        if checkpoint != self._surveyed:
            return
        self._stop()
        if self._savers is not None:
            if counts:
                self._savers.settle()
            else:
                self._savers.put_back()
        if self._taken is not None and self._marks is not None:
            before, since = self._taken
            if counts and rebase:
                self._since = counts
            else:
                self._since = since
                for marks_P, before_P in zip(self._marks, before, strict=True):
                    np.maximum(marks_P, before_P, out=marks_P)
            self._taken = None

    def abandon(self) -> None:
        """This life of the slot is over, or the coordinator that asked for the checkpoint is."""
        self.on_release(self._surveyed, "", rebase=False)

    def tell_again(self, same: bool) -> None:
        """Tells the coordinator again what it may have missed, after its connection had ended; abandons the checkpoint
        if it is another coordinator (not `same`), which is to write it anew."""
        if self._host.saves.done < self._due <= (self._kept or 0):
            self._slot.tell(messages.Due(*self._slot.life, self._due))
        if not same:
            self.abandon()
        elif self._said is not None:
            self._slot.tell(self._said)

    # ends ---------------------------------------------------------------------------------------

    def _on_written(self, checkpoint: int, part: dict[str, Any]) -> None:
        if checkpoint == self._surveyed and self._capture is not None:
            self._capture = self._writing = None
            self._say(messages.Written(*self._slot.life, checkpoint, part))

    def _on_broken(self, table_group: int, positions_U: Positions) -> None:
        """Handles captured records that do not fit their seals: the records themselves are damaged, or the copies kept
        of them; for damaged copies the checkpoint is given up."""
        self._scrubber.look(table_group, False, positions_U)
        if self._capture is not None:  # they are whole: nobody was told
            name = self._held.name_of(self._held.index, table_group, int(positions_U[0]))
            self._give_up(f"{name} was damaged in memory where it was kept for it; the next checkpoint has it")

    def on_damage(self) -> None:
        """Records are damaged: until they are repaired nobody can say what they were after a step."""
        if self._capture is not None:
            self._give_up("records are damaged, and being repaired; the next checkpoint has them")

    def _on_failed(self, checkpoint: int, reason: str) -> None:
        if checkpoint == self._surveyed and self._capture is not None:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        checkpoint = self._surveyed
        self.abandon()
        self._tell_unwritten(checkpoint, reason)

    def _tell_unwritten(self, checkpoint: int, reason: str) -> None:
        self._say(messages.Unwritten(*self._slot.life, checkpoint, reason[:REASON_MOST]))

    def _say(self, word: messages.OfCheckpoint) -> None:
        self._said = word
        self._slot.tell(word)

    def _stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
        self._capture = self._writing = self._said = None
        self._surveyed, self._pinned = 0, None

    @property
    def saver_bytes(self) -> int:
        """Memory of what notes which records to save first."""
        return 0 if self._savers is None else self._savers.memory_bytes

    @property
    def picked_s(self) -> float:
        """How long it took to pick them last, while steps waited."""
        return 0.0 if self._savers is None else self._savers.picked_s

    @property
    def kept_bytes(self) -> int:
        """Memory of records that were changed before they were written."""
        return 0 if self._capture is None else self._capture.kept_bytes
