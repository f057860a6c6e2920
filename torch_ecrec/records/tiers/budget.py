"""One server's memory and disk, shared among the stores of its slots.

The budget is for what grows with tables: frames, 13 bytes a record, buffers, and the logs of recent steps, for which an
eighth is left. What a server without rows takes (the interpreter, torch, compiled kernels: some 300 MB, most of it
shared with other processes of the host) comes on top.

Frames are shared by bytes: a store of twice the bytes has twice the memory. A slot that comes (another server was
lost) takes its share of what the others had, and one that leaves gives its share back. Where the budget is too little
for one more it is exceeded, and the log says by how much: to refuse a lost slot is to lose those that are here, too.

Does not lock: the server's node does.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import MemoryStore, RecordStore
from torch_ecrec.records.tiers.disk import Reader, Watch, Workers, reader
from torch_ecrec.records.tiers.log import GARBAGE, LEAST_SEGMENT_BYTES, bucket_of, buffer_bytes_of
from torch_ecrec.records.tiers.tiered import FRAME_BYTES, ROW_BYTES, TieredStore
from torch_ecrec.records.tiers.trouble import Trouble, file_of
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import log_error

log = logging.getLogger(__name__)

FOR_LOGS = 8  # the 8th part of the budget is not for frames
LEAST_SHARE = 64  # the 64th part of a store's records has frames, at least
IN_BACKGROUND = 2  # threads that read for a rebuild: one unpacks what it has read while the disk reads for the other
NAMED_BYTES = 1 << 20  # what is too little is told in whole MiB: slots have some records more, or fewer, than others


class Need(NamedTuple):
    """Bytes of memory that stores take, beside the eighth of a budget that is for logs."""

    fixed: int  # wherever their records are
    frames: int  # with all records in memory; with a part of them, that part of it


def need_of(sizes: Iterable[tuple[int, int]]) -> Need:
    """Returns what stores need, of so many records of so many bytes each."""
    kept = [(rows, nbytes) for rows, nbytes in sizes if rows]
    return Need(
        sum(rows * ROW_BYTES + buffer_bytes_of(nbytes, rows) for rows, nbytes in kept),
        sum(rows * (nbytes + FRAME_BYTES) for rows, nbytes in kept),
    )


def room_of(need: Need, memory_bytes: int, log_bytes: int = 0, others: int = 0) -> int:
    """Returns how many bytes of a budget are for records: less than 0 where it does not suffice for the rest.

    Args:
        need: of the stores.
        memory_bytes: the budget.
        log_bytes: of the logs of recent steps, where that is more than what is left for them.
        others: of records that are in memory whatever is asked for.
    """
    return memory_bytes - max(memory_bytes // FOR_LOGS, log_bytes) - need.fixed - others


def least_budget(need: Need, share: float = 1 / LEAST_SHARE, others: int = 0) -> int:
    """Returns the bytes of a budget that keeps a part of the records in memory; by default the least that is taken.

    Args:
        need, others: as of `room_of`.
        share: which part.
    """
    return int((need.fixed + others + share * need.frames) * FOR_LOGS / (FOR_LOGS - 1)) + 1


def most_on_disk(rows: int, nbytes: int) -> int:
    """Returns how long the file of a store may become, in bytes."""
    cells = bucket_of(nbytes)
    return int(GARBAGE * rows * cells / (cells // nbytes)) + 8 * LEAST_SEGMENT_BYTES


class Tier:
    """What a server process has beside memory for all of its records.

    Args:
        folder: where files go. They have no names, and end with the process.
        memory_bytes: the budget.
        parities_only: data records stay in memory.
        trouble: what is wrong with the disk now and then; None: nothing is, on purpose.

    Attributes:
        over_bytes: what the slots that are here take beyond the budget, since one of them has nobody else.
        on_error: gets what a read has raised, or who takes what it has read: nobody waits for either.
    """

    on_error: Callable[[BaseException], object] = staticmethod(log_error)

    def __init__(
        self, folder: Path, memory_bytes: int, parities_only: bool = False, trouble: Trouble | None = None
    ) -> None:
        self.folder, self.memory_bytes, self.parities_only = folder, memory_bytes, parities_only
        self.trouble, self._file, self._watch = trouble, file_of(trouble), Watch()
        self.over_bytes = 0
        self.reader: Reader = reader()
        self._tiered: weakref.WeakSet[TieredStore] = weakref.WeakSet()
        self._in_memory: weakref.WeakSet[MemoryStore] = weakref.WeakSet()
        self._work = {True: Workers("tier", 1), False: Workers("tier, in the background", IN_BACKGROUND)}
        for work in self._work.values():
            weakref.finalize(self, work.end)

    def run(self, read: Callable[[], None], then: Callable[[], None], awaited: bool = True) -> None:
        """Runs what waits for the disk, and then the other, on another thread.

        Args:
            read, then: both.
            awaited: training waits for it. Such pairs are run one after the other, beside those that are not.
        """

        def work() -> None:
            try:
                read()
                then()
            except Exception as error:  # the seam: those who wait for this would wait for ever
                self.on_error(error)

        self._work[awaited].put(work)

    @property
    def unanswered_s(self) -> float:
        """Seconds for which the disk has not answered; 0: nothing is asked. On any thread."""
        return self._watch.unanswered_s

    @property
    def how(self) -> str:
        """How records come from the disk, for people."""
        return self.reader.name

    @property
    def stores(self) -> list[TieredStore]:
        """Those that there are now."""
        return list(self._tiered)

    def require_room(self, sizes: Iterable[tuple[int, int, bool]]) -> None:
        """Sees to it that there is memory and disk for more stores, all of them together.

        Args:
            sizes: of each, how many records, of how many bytes each, and whether they are parities.

        Raises:
            TierFailed: there is too little; says how much all stores that are here take with these.
        """
        self._check(list(sizes), must=False)

    def _is_below(self, rows: int, parity: bool) -> bool:
        """Whether records of such a store may go to the disk."""
        return rows > 0 and (parity or not self.parities_only)

    def _check(self, sizes: list[tuple[int, int, bool]], must: bool) -> None:
        tiered = [(rows, nbytes) for rows, nbytes, parity in sizes if self._is_below(rows, parity)]
        need = need_of([*((store.rows, store.nbytes) for store in self.stores), *tiered])
        kept = sum(rows * nbytes for rows, nbytes, parity in sizes if not self._is_below(rows, parity))
        in_memory = kept + self._in_memory_bytes
        if room_of(need, self.memory_bytes, others=in_memory) < need.frames // LEAST_SHARE and not must:
            least = -(-least_budget(need, others=in_memory) // NAMED_BYTES) * NAMED_BYTES
            raise TierFailed(
                f"`tier_memory_bytes` of {self.memory_bytes:,} is too little for the records of this server: give it"
                f" at least {least:,}"
            )
        if not tiered:
            return
        needed = sum(most_on_disk(rows, nbytes) for rows, nbytes in tiered)
        for store in self.stores:  # what their files may still grow by
            needed += max(0, most_on_disk(store.rows, store.nbytes) - store.file.file_bytes)
        with self._watch.waiting():
            free = self._free_bytes()
        if free < needed:
            records = sum(rows for rows, _ in tiered) + sum(store.rows for store in self.stores)
            few = f"{self.folder} has {free:,} bytes left, and {records:,} records need up to {needed:,}"
            if not must:
                raise TierFailed(few)
            log.warning("%s; goes on until it is full, since nobody else has them", few)

    def _free_bytes(self) -> int:
        """Returns how much the disk has left. Makes the folder again if it is gone.

        Nothing in it has a name, so that who tidies temporary folders takes it for an empty one.
        """
        try:
            if not self.folder.exists():
                self.folder.mkdir()
                log.warning("%s was gone, and was made again: files of records go there", self.folder)
            disk = os.statvfs(self.folder)
        except OSError as error:
            raise TierFailed(f"no file can be made in {self.folder}: {error.strerror}") from error
        return disk.f_bavail * disk.f_frsize

    def make(self, rows: int, nbytes: int, parity: bool, sealed: bool, must: bool = False) -> RecordStore:
        """Makes a store, and shares memory anew: `Stores`.

        Args:
            must: it is of a slot that has nobody else; as far as memory and disk go, nothing is too little for it.

        Raises:
            TierFailed: there is too little memory or disk for it; says how much it takes.
        """
        require(sealed, "a tier needs seals: `record_checks` must not be none with `tier`")
        self._check([(rows, nbytes, parity)], must)
        store: RecordStore
        if self._is_below(rows, parity):
            try:
                store = TieredStore(rows, nbytes, self._file(self.folder, self.reader, self._watch), 1)
            except MemoryError as error:
                raise TierFailed(f"{error}; if `vm.overcommit_memory` of this Linux is 2, set it to 0 or 1") from error
            self._tiered.add(store)
        else:
            store = MemoryStore(rows, nbytes, sealed=sealed)
            self._in_memory.add(store)
        self._share()
        return store

    def _discard(self, store: RecordStore) -> None:
        self._tiered.discard(store)  # type: ignore[arg-type]
        self._in_memory.discard(store)  # type: ignore[arg-type]

    def let_go(self, stores: Iterable[RecordStore]) -> None:
        """A slot has left with its stores: the others have its memory, however long something still holds them."""
        for store in stores:
            self._discard(store)
        self._share()

    @property
    def _in_memory_bytes(self) -> int:
        """How many bytes records have that are in memory whatever is asked for."""
        return sum(store.memory_bytes for store in self._in_memory)

    def _share(self) -> None:
        """Gives each store its frames."""
        stores = self.stores
        need = need_of((store.rows, store.nbytes) for store in stores)
        whole, enough = need.frames, need.frames // LEAST_SHARE
        room = room_of(need, self.memory_bytes, others=self._in_memory_bytes)
        self.over_bytes = max(0, enough - room)
        if self.over_bytes:
            log.warning("the slots that are here take %s bytes more than `tier_memory_bytes`", f"{self.over_bytes:,}")
            room = enough
        for store in stores:
            share = room / max(1, whole)
            store.frames = max(1, min(store.rows, int(share * store.rows)))
