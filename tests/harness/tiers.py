"""Tiers of simulated servers: a few frames, and a disk that is memory, and that can fail, lie and answer late.

`FRAMES` is how many records of each store are in memory, in all simulations that do not say: pytest's `--tier-frames`.
Blocks and segments are tiny, so that a few records are many of them.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from harness.network import VirtualClock
from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import MemoryStore, RecordStore, Use, View
from torch_ecrec.records.tiers import log
from torch_ecrec.records.tiers.budget import Tier
from torch_ecrec.records.tiers.tiered import NO_PLACE, TieredStore

FRAMES = 0  # no tier
BLOCK_BYTES, SEGMENT_BYTES = 64, 128
LATE_S = 0.05  # for a read that is late: longer than messages take
READS = ("error", "short", "torn", "flip", "rot", "bad", "zeros", "other")
"""What can be wrong with a read: it fails; ends early; is half of it zeros; has another bit; has it in the file, too;
fails until it is written again; is zeros; or is of another place."""
WRITES = ("full", "lost", "half")
"""What can be wrong with a write: there is no room; nothing of it is there afterwards; or half of it."""


class Disks:
    """The disks of all servers of a simulated cluster.

    Args:
        reads, writes: what is wrong with which: by its number, of those that servers ask for.
        clock: where reads take their time; None: they take none.
        seed: of how long each takes.

    Attributes:
        asking: servers that are asking now, each inside another. What a test looks at does not count, and does not
            fail.
        read, written: how many so far.
        fired: what was wrong, in this order.
    """

    def __init__(
        self,
        reads: Mapping[int, str] = {},
        writes: Mapping[int, str] = {},
        clock: VirtualClock | None = None,
        seed: int = 0,
    ) -> None:
        self.reads, self.writes, self.clock = dict(reads), dict(writes), clock
        self.asking = self.read = self.written = 0
        self.fired: list[str] = []
        self._chance = random.Random(seed)

    def of_read(self) -> str:
        """What is wrong with the next read; "": nothing."""
        return self._next(self.reads, "read")

    def of_write(self) -> str:
        return self._next(self.writes, "written")

    def _next(self, wrong: Mapping[int, str], count: str) -> str:
        if not self.asking:
            return ""
        number = getattr(self, count)
        setattr(self, count, number + 1)
        if number in wrong:
            self.fired.append(wrong[number])
        return wrong.get(number, "")

    def later(self, action: Callable[[], None]) -> None:
        """Now and then much later: what was asked for first is not answered first."""
        assert self.clock is not None
        most_s = LATE_S if self._chance.random() < 0.1 else LATE_S / 50
        self.clock.later(self._chance.uniform(0.0, most_s), action)


class VirtualFile:
    """A file in memory, which a fork of the process has for itself."""

    def __init__(self, disks: Disks | None = None) -> None:
        self.name, self._content, self._disks = "a virtual file", np.zeros(0, np.uint8), disks or Disks()
        self._bad: set[int] = set()  # blocks that cannot be read until they are written
        self.full = False

    def write(self, offset: int, content: Any) -> None:
        wrong = self._disks.of_write()
        if wrong == "full":
            self.full = True
        if self.full:
            raise TierFailed(f"{self.name} cannot be written: No space left on device")
        end = offset + len(content)
        if end > len(self._content):
            self._content = np.concatenate([self._content, np.zeros(end - len(self._content), np.uint8)])
        if wrong:
            end = offset if wrong == "lost" else offset + len(content) // 2
        self._content[offset:end] = content[: end - offset]
        self._bad -= self._blocks(offset, end - offset)

    @staticmethod
    def _blocks(offset: int, length: int) -> set[int]:
        return set(range(offset // BLOCK_BYTES, (offset + length) // BLOCK_BYTES))

    def read(self, offsets_R: Any, lengths_R: Any, into: Any, at_R: Any) -> Any:
        results_R = np.empty(len(offsets_R), np.int64)
        for i, (offset, length, at) in enumerate(
            zip(offsets_R.tolist(), lengths_R.tolist(), at_R.tolist(), strict=True)
        ):
            results_R[i] = self._read(offset, length, into[at : at + length])
        return results_R

    def _read(self, offset: int, length: int, into: Any) -> int:
        wrong = self._disks.of_read()
        if wrong == "bad":
            self._bad |= self._blocks(offset, length)
        if wrong == "error" or (self._disks.asking and self._bad & self._blocks(offset, length)):
            return -errno.EIO
        if wrong == "rot":
            self.flip_(offset, 8 * (length // 3) + 5)
        end = offset + (length // 2 if wrong == "short" else length)
        found = self._content[offset:end].copy()
        if wrong == "other":
            found = np.roll(self._content, BLOCK_BYTES)[offset:end]
        elif wrong == "flip":
            found[len(found) // 3] ^= 4
        elif wrong in ("torn", "zeros"):
            found[0 if wrong == "zeros" else len(found) // 2 :] = 0
        into[: len(found)] = found
        return len(found)

    def flip_(self, offset: int, bit: int) -> None:
        self._content[offset + bit // 8] ^= np.uint8(1 << (bit % 8))


class SmallTier(Tier):
    """As many frames for each store as are wanted, whatever that takes.

    Args:
        frames: of each store.
        disks: of the cluster.
        lives: whether the server does.
    """

    block_bytes, segment_bytes = BLOCK_BYTES, SEGMENT_BYTES
    store: type[TieredStore] = TieredStore

    def __init__(self, frames: int, disks: Disks | None = None, lives: Callable[[], bool] = lambda: True) -> None:
        self.frames, self.disks, self._lives = frames, disks or Disks(), lives
        self.over_bytes = 0
        self._due: list[Callable[[], None]] = []

    @property
    def how(self) -> str:
        return "virtual"

    @property
    def unanswered_s(self) -> float:
        return 0.0

    def run(self, read: Callable[[], None], then: Callable[[], None], awaited: bool = True) -> None:
        if self.disks.clock is not None:
            self.disks.later(lambda: self._read(read, then))
            return
        self._due.append(lambda: self._read(read, then))
        if len(self._due) == 1:  # else who takes what was read has asked for more: one after the other
            while self._due:
                self._due[0]()
                self._due.pop(0)

    def _read(self, read: Callable[[], None], then: Callable[[], None]) -> None:
        if self._lives():
            self.disks.asking += 1
            read()
            self.disks.asking -= 1
            if self.disks.clock is None:
                then()
            else:
                self.disks.later(lambda: then() if self._lives() else None)

    def let_go(self, stores: Iterable[RecordStore]) -> None:
        pass  # each has frames of its own

    def require_room(self, sizes: Iterable[tuple[int, int, bool]]) -> None:
        pass  # likewise, and a file of its own

    def make(self, rows: int, nbytes: int, parity: bool, sealed: bool, must: bool = False) -> RecordStore:
        if not rows or not sealed:
            return MemoryStore(rows, nbytes, sealed=sealed)
        with (
            mock.patch.object(log, "BLOCK_BYTES", self.block_bytes),
            mock.patch.object(log, "LEAST_SEGMENT_BYTES", self.segment_bytes),
        ):
            return self.store(rows, nbytes, VirtualFile(self.disks), self.frames)


class AskedStore(TieredStore):
    """A store whose disk answers late: what it does next follows from where its records are, too.

    Whoever looks changes nothing of that, and neither does a check (`checking`).
    """

    checked = False

    @classmethod
    @contextlib.contextmanager
    def checking(cls) -> Iterator[None]:
        """What is asked for meanwhile is only looked at."""
        cls.checked = True
        try:
            yield
        finally:
            cls.checked = False

    def at(self, positions_U: Any, use: Use) -> View:
        return self.look(positions_U) if self.checked else super().at(positions_U, use)

    def look(self, positions_U: Any, read: Any = None) -> View:
        there_U = positions_U >= 0
        arrays = [array[: self._top] for array in (self._records_FB, self._seals_F, self._meta_F)]
        before = [array.copy() for array in arrays]
        assert read is None or there_U.all(), "what was read is of those that were asked for"
        records_VB, seals_V, at_V = super().look(positions_U[there_U], read)
        for array, old in zip(arrays, before, strict=True):
            array[:] = old
        at_U = np.full(len(positions_U), -1)
        at_U[there_U] = at_V
        return View(records_VB, seals_V, at_U)

    def whereabouts(self) -> tuple[Any, ...]:
        """What it goes by: frames, what is in the file, what was used lately, how often each was changed."""
        used = slice(self._top)
        lately_F = self._meta_F[used, 0] >= self._steps[0]
        last_F = self._meta_F[used, 0] >= self._steps[1]
        states_F, positions_F = self._meta_F[used, 1], self._position_F[used]
        there_P = self._place_P != NO_PLACE
        free = self._free_F[: self._free]
        return (
            self._frame_P,
            there_P,
            self._count_P,
            self._hand,
            self._due,
            positions_F,
            states_F,
            lately_F,
            last_F,
            free,
        )


class AskedTier(SmallTier):
    """A tier of a server of the exploration: what is read comes when `answer` is called, in the order of asking.

    Each record is a segment of its own, so that whatever is put away is read from the disk. It is read when it is asked
    for, as early as can be: between then and the answer the server may do anything.

    Args:
        frames: of each store.
        asked: is called when something is asked for.
    """

    block_bytes = segment_bytes = 8
    store = AskedStore

    def __init__(self, frames: int, asked: Callable[[], None]) -> None:
        super().__init__(frames)
        self._asked, self._under_way = asked, list[Callable[[], None]]()

    def run(self, read: Callable[[], None], then: Callable[[], None], awaited: bool = True) -> None:
        read()
        self._under_way.append(then)
        self._asked()

    def answer(self) -> None:
        """What was asked for first is there."""
        self._under_way.pop(0)()


def tier_of(frames: int | None) -> Tier | None:
    """Returns the tier of a simulated server; None: none."""
    wanted = FRAMES if frames is None else frames
    return SmallTier(wanted) if wanted else None
