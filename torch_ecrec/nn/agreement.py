"""What all trainers agree on before one of them acts: that each does the same, and the greatest of their numbers.

One all-reduce for each: a *meeting*. It is begun and ended apart, so that a trainer does other work until the others
have come. All meetings of a job have the same size, so that whoever does something else is met, and told so.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torch_ecrec.client.client import SHORTER
from torch_ecrec.nn.backend import EmbeddingBackend

TRAINS = "trains"
EVERYBODY = "Every trainer trains, and loads the same, at the same place of its loop"
LOOK_S, POLL_S = 2.0, 0.002
ALONE = (
    "What a script does for all trainers (`attach`, `flush`, `full_state_dict`, loads, `torch_ecrec.checkpoint`) all of"
    " them do, at the same place, and not trainer 0 alone"
)


class Agreement:
    """The meetings of one trainer with the others.

    Args:
        session: says the step, for messages, and how many tables there are: a meeting has a number for each.
        group: a process group of the trainers, used for nothing else; None with one trainer, who agrees with himself.
        looks: trainers train without meetings, so that one that waits for the others looks whether they do.
    """

    def __init__(self, session: EmbeddingBackend, group: dist.ProcessGroup | None, looks: bool = False) -> None:
        self._session, self._group, self._looks = session, group, looks

    def begin(self, what: str, numbers: Sequence[int], alike: str = "") -> Meeting:
        """Begins a meeting. It must be ended before the next begins.

        Args:
            what: this trainer does, which all must do.
            numbers: non-negative, one for each table, or fewer.
            alike: what else must be the same on all of them, for the message, too.
        """
        return Meeting(self._session, self._group, what, numbers, alike, asks=False, looks=self._looks)

    def on(self, what: str, numbers: Sequence[int]) -> list[int]:
        """Returns the greatest of each number over all trainers; see `begin` and `Meeting.end`."""
        return self.begin(what, numbers).end()

    def on_written(self, flags: Sequence[int]) -> list[int] | None:
        """Returns the greatest of each flag over all trainers, which all ask what was written.

        Returns:
            None if others train, and this trainer has written nothing: perhaps only this one has a state dict.

        Raises:
            RuntimeError: as `Meeting.end`, or others train and this trainer has written something.
        """
        return Meeting(self._session, self._group, "has a state dict", flags, "", True, self._looks).end_asking()

    def gather(self, what: str, values_N: Tensor) -> list[Tensor]:
        """Returns every trainer's values (N,) int64, in trainer order; N may differ. Every trainer calls it alike.

        Raises:
            RuntimeError: another trainer does something else.
        """
        most, *_ = self.on(what, [len(values_N)])
        if self._group is None:
            return [values_N]
        padded = torch.zeros(1 + most, dtype=torch.int64, device="cpu")
        padded[0], padded[1 : 1 + len(values_N)] = len(values_N), values_N
        found = [torch.empty_like(padded) for _ in range(self._session.trainers)]
        dist.all_gather(found, padded, group=self._group)
        return [values[1 : 1 + int(values[0])] for values in found]


class Meeting:
    """One meeting, begun when it is made; see `Agreement`.

    Args:
        asks: this trainer asks what was written; those that train meet it, and then each other once more.
        looks: as of `Agreement`.
    """

    def __init__(
        self,
        session: EmbeddingBackend,
        group: dist.ProcessGroup | None,
        what: str,
        numbers: Sequence[int],
        alike: str,
        asks: bool,
        looks: bool,
    ) -> None:
        self._session, self._group, self._what, self._alike, self._asks = session, group, what, alike, asks
        self._looks = looks
        self._numbers = [*numbers, *(0 for _ in session.job.tables[len(numbers) :])]
        self._wrote = asks and any(numbers)
        self._begin()

    def _begin(self) -> None:
        if self._group is None:
            return
        mark, asks = zlib.crc32((self._what + self._alike).encode()) >> 1, self._asks
        self._all = torch.tensor(
            [mark, -mark, asks, -asks, self._wrote, *self._numbers], dtype=torch.int32, device="cpu"
        )
        with self._explained():
            self._work = dist.all_reduce(self._all, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds what to do to an error of torch, which says that a connection was closed."""
        try:
            yield
        except RuntimeError as error:
            advice = SHORTER if self._what == TRAINS else ALONE
            error.add_note(
                f"torch_ecrec: step {self._session.step}: this trainer {self._what}, and another one has ended, or was"
                f" lost. {advice}"
            )
            raise

    def _look_out(self) -> None:
        """Waits until all trainers have come. One that has sent its part of a step that this one has not begun waits
        for this one, in vain: seen twice, as it may come just now.

        Raises:
            RuntimeError: another trainer has trained instead.
        """
        looks_s, seen = time.monotonic() + LOOK_S, False
        while not self._work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() < looks_s:
                continue
            before, seen = seen, self._session.overtaken()
            if before and seen:
                raise RuntimeError(
                    f"step {self._session.step}: this trainer {self._what}, and another one has trained meanwhile."
                    f" {EVERYBODY}"
                )
            looks_s = time.monotonic() + LOOK_S

    def end(self) -> list[int]:
        """Waits until all trainers have come, and returns the greatest of each number.

        Raises:
            RuntimeError: they do not all do the same, or one has ended.
        """
        found = self.end_asking()
        assert found is not None, "only who asks gets None"
        return found

    def end_asking(self) -> list[int] | None:
        """As `end`; None if this trainer asks, has written nothing, and others train."""
        while self._group is not None:
            if self._looks:
                self._look_out()
            with self._explained():
                self._work.wait()
            most, least, any_asks, none_asks, any_wrote, *found = self._all.tolist()
            if most == -least:
                return found
            if not any_asks or not none_asks + any_asks or any_wrote:
                other = f", or not with the {self._alike} of this one" if self._alike else ""
                raise RuntimeError(
                    f"step {self._session.step}: this trainer {self._what}, and another one does something else{other}."
                    f" {EVERYBODY}"
                )
            if self._asks:
                return None
            self._begin()
        return self._numbers
