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
import queue
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch_ecrec.errors import TierFailed
from torch_ecrec.records.store import MemoryStore, RecordStore
from torch_ecrec.records.tiers.disk import Reader, Watch, reader
from torch_ecrec.records.tiers.log import GARBAGE, LEAST_SEGMENT_BYTES, bucket_of, buffer_bytes_of
from torch_ecrec.records.tiers.tiered import FRAME_BYTES, ROW_BYTES, TieredStore
from torch_ecrec.records.tiers.trouble import Trouble, file_of
from torch_ecrec.runtime.checks import require
from torch_ecrec.runtime.threads import Worker, log_error

log = logging.getLogger(__name__)

FOR_LOGS = 8  # the 8th part of the budget is not for frames
LEAST_SHARE = 64  # the 64th part of a store's records has frames, at least


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


def least_budget(need: Need, share: float = 1 / LEAST_SHARE) -> int:
    """Returns the bytes of a budget that keeps a part of the records in memory; by default the least that is taken."""
    return int((need.fixed + share * need.frames) * FOR_LOGS / (FOR_LOGS - 1)) + 1


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
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        Worker(partial(_serve, self._work), "tier", log_error).start()
        weakref.finalize(self, self._work.put, None)

    def run(self, read: Callable[[], None], then: Callable[[], None]) -> None:
        """Runs what waits for the disk, and then the other, on a thread of its own, one pair after the other."""

        def work() -> None:
            try:
                read()
                then()
            except Exception as error:  # the seam: those who wait for this would wait for ever
                self.on_error(error)

        self._work.put(work)

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

    def make(self, rows: int, nbytes: int, parity: bool, sealed: bool, must: bool = False) -> RecordStore:
        """Makes a store, and shares memory anew: `Stores`.

        Args:
            must: it is of a slot that has nobody else; as far as memory and disk go, nothing is too little for it.

        Raises:
            TierFailed: there is too little memory or disk for it; says how much it takes.
        """
        require(sealed, "a tier needs seals: `record_checks` must not be none with `tier`")
        if not rows or (self.parities_only and not parity):
            found = MemoryStore(rows, nbytes, sealed=sealed)
            self._in_memory.add(found)
            self._share_with(found, must)
            return found
        cells = bucket_of(nbytes)
        needed = int(GARBAGE * rows * cells / (cells // nbytes)) + 8 * LEAST_SEGMENT_BYTES
        with self._watch.waiting():
            disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if free < needed:
            few = f"{self.folder} has {free:,} bytes left, and {rows:,} records need up to {needed:,}"
            if not must:
                raise TierFailed(few)
            log.warning("%s; goes on until it is full, since nobody else has them", few)
        store = TieredStore(rows, nbytes, self._file(self.folder, self.reader, self._watch), 1)
        self._tiered.add(store)
        self._share_with(store, must)
        return store

    def _share_with(self, store: RecordStore, must: bool) -> None:
        try:
            self._share(must)
        except TierFailed:
            self._discard(store)
            raise

    def _discard(self, store: RecordStore) -> None:
        self._tiered.discard(store)  # type: ignore[arg-type]
        self._in_memory.discard(store)  # type: ignore[arg-type]

    def let_go(self, stores: Iterable[RecordStore]) -> None:
        """A slot has left with its stores: the others have its memory, however long something still holds them."""
        for store in stores:
            self._discard(store)
        self._share(must=True)

    def _share(self, must: bool) -> None:
        """Gives each store its frames."""
        stores = self.stores
        need, in_memory = need_of((s.rows, s.nbytes) for s in stores), sum(s.memory_bytes for s in self._in_memory)
        whole, enough = need.frames, need.frames // LEAST_SHARE
        room = room_of(need, self.memory_bytes, others=in_memory)
        if room < enough and not must:
            raise TierFailed(
                f"`tier_memory_bytes` of {self.memory_bytes:,} is too little for the records of this server: give it"
                f" at least {least_budget(need) + in_memory:,}"
            )
        self.over_bytes = max(0, enough - room)
        if self.over_bytes:
            log.warning("the slots that are here take %s bytes more than `tier_memory_bytes`", f"{self.over_bytes:,}")
            room = enough
        for store in stores:
            share = room / max(1, whole)
            store.frames = max(1, min(store.rows, int(share * store.rows)))


def _serve(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (one := work.get()) is not None:
        one()
