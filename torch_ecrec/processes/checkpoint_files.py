"""Who writes checkpoints in real processes: servers write parts, and whoever has the coordinator writes manifests.

Both work on threads of their own, and no faster than they may. A store that hangs keeps its thread and nothing else:
the coordinator calls the checkpoint void when its time is over.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
from torch_ecrec.coordinator.checkpointing import Finished, Restorable, attempt_of, run_of
from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.processes.restore_source import restored_of
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.pieces import Key, Part
from torch_ecrec.records.tiers.tiered import Reading
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.server.capture import NextPortion, Portion
from torch_ecrec.spec.job import JobSpec, TableGroup
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import check_rows
from torch_ecrec.storage.listing import Listing
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import Encoding, Manifest, PartEntry
from torch_ecrec.storage.parts import PartWriter
from torch_ecrec.storage.policy import next_kind
from torch_ecrec.storage.saves import Saves

log = logging.getLogger(__name__)

PORTION_BYTES = 2 << 20  # of records, taken at once: what steps may have to wait for
HANGS_S = 5.0  # for a write that nobody wants any more; no other is begun while it hangs
ENDS_S = 5.0  # for the store, when a run is over
LOOKS_S = 300.0  # for the next block of a checkpoint that all may go back to; then the store counts as gone
UNREAD_S = 60.0  # for a checkpoint that cannot be read just now; then an older one is taken
LOOK_AGAIN_S = 2.0  # before it is read again
BYTES_PER_S_OF_CORE = 5e6  # that a process writes, for each core of its machine, where nobody has said a limit;
BYTES_PER_S_MOST = 100e6  # and at most
BURST_S = 0.25  # what was not written lately may be written at once, up to so much

Run = Callable[[Callable[[], None]], None]  # `Node.run`


class _Cancelled(Exception):
    """Nobody wants the part any more."""


class FileCheckpointWriter:
    """Writes parts of checkpoints of one server process; a `CheckpointWriter`.

    Args:
        run: of the node whose slots it writes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pace = Pace()
        self._threads: dict[int, threading.Thread] = {}  # slot -> the one that writes, or wrote last

    def write(
        self,
        order: messages.Capture,
        slot: int,
        table_groups: Sequence[TableGroup],
        next_portion: NextPortion,
        dense: Sequence[tuple[Key, Part]],
        done: Callable[[dict[str, Any]], None],
        failed: Callable[[str], None],
    ) -> FileWriting:
        """Writes a slot's part on a thread of its own, as `CheckpointWriter.write` says."""
        writing, before = FileWriting(self._run, next_portion, dense, done, failed), self._threads.get(slot)
        work = functools.partial(self._work, order, slot, table_groups, before, writing)
        Worker(work, f"checkpoint of slot {slot}", log_error).start()
        return writing

    def _work(
        self,
        order: messages.Capture,
        slot: int,
        table_groups: Sequence[TableGroup],
        before: threading.Thread | None,
        writing: FileWriting,
    ) -> None:
        if before is not None:
            before.join(HANGS_S)  # it was told to stop
            if before.is_alive():
                writing.fail(f"{order.url}: a write of the checkpoint before still hangs there")
                return
        self._threads[slot] = threading.current_thread()
        try:
            entry = self._write(order, slot, table_groups, writing)
        except _Cancelled:
            return
        except CheckpointError as error:
            writing.fail(str(error))
        except Exception as error:  # this thread has no caller: whatever it is makes the checkpoint void, by name
            log.exception("slot %d of checkpoint %s", slot, order.folder)
            writing.fail(repr(error))
        else:
            writing.finish(entry)

    def _write(
        self, order: messages.Capture, slot: int, table_groups: Sequence[TableGroup], writing: FileWriting
    ) -> PartEntry:
        name = f"slot-{slot:05d}"
        encoding = Encoding.of(order.encoding)
        tables = [
            [*zip((table.name for table in table_group.tables), table_group.first_rows, strict=True)]
            for table_group in table_groups
        ]
        place = Location(order.url)
        at = Saves(place).folder(order.folder) if order.portion < 1 else place.below(order.folder)
        schemas = [table_group.schema for table_group in table_groups]
        part = PartWriter(at, name, schemas, encoding, slot, tables)
        try:
            bytes_per_s = default_bytes_per_s() if order.bytes_per_s is None else order.bytes_per_s
            while (kept := writing.next_dense()) is not None:
                (_, trainer), (header, payload) = kept
                self._pace.spend(part.write_dense(trainer, header, payload.numpy()), bytes_per_s, writing)
            while (portion := writing.next_portion()) is not None:
                size = part.write(portion.table_group, portion.rows_N, portion.records_NB)
                if order.bytes_per_s is None:  # by records: quantising, and zstd, take longer for each byte in the file
                    size = max(size, portion.records_NB.nbytes)
                self._pace.spend(size, bytes_per_s, writing)
            return part.close()
        finally:
            part.abandon()


def default_bytes_per_s() -> float:
    """Returns how fast one process writes unless a limit is set: a share of the machine that steps hardly notice.

    It counts bytes of records, before they are quantised or compressed. Writing one takes a quarter of a nanosecond of
    a core, one in 4 bits a whole one (`torch-ecrec bench storage`, with a load of 30): three servers on one host take
    less than a hundredth of its cores, or two.
    """
    return min(BYTES_PER_S_OF_CORE * len(os.sched_getaffinity(0)), BYTES_PER_S_MOST)


class FileWriting:
    """A part that is being written; a `Pending`. Until it is cancelled, all that its thread has of the slot."""

    def __init__(
        self,
        run: Run,
        next_portion: NextPortion,
        dense: Sequence[tuple[Key, Part]],
        done: Callable[[dict[str, Any]], None],
        failed: Callable[[str], None],
    ) -> None:
        self.cancelled = threading.Event()
        self._slot: _Slot | None = _Slot(run, next_portion, done, failed)
        self._dense = list(dense)

    def cancel(self) -> None:
        """Its thread stops soon, and removes what it has written. One that hangs in the store holds nothing more."""
        self.cancelled.set()
        self._slot = None
        self._dense.clear()

    def next_portion(self) -> Portion | None:
        """Returns the next records to write, taken inside the node; None: there are no more. Raises _Cancelled."""
        while isinstance(found := self._ask(), Reading):
            found.run()
        return found

    def _ask(self) -> Portion | Reading | None:
        found: list[Portion | Reading | None] = []
        self._inside(lambda slot: found.append(slot.next_portion(PORTION_BYTES)))
        if not found:
            raise _Cancelled
        return found[0]

    def next_dense(self) -> tuple[Key, Part] | None:
        """Returns a part of the dense model that was not given yet; None: all were."""
        try:
            return self._dense.pop(0)
        except IndexError:
            return None

    def finish(self, entry: PartEntry) -> None:
        """Says that the part is durable."""
        self._inside(lambda slot: slot.done(entry.to_json()))

    def fail(self, reason: str) -> None:
        """Says that the part will not be durable, and why."""
        self._inside(lambda slot: slot.failed(reason))

    def _inside(self, what: Callable[[_Slot], None]) -> None:
        """Does something inside of `Node.run`, unless the writing is cancelled, which happens there too."""
        if (slot := self._slot) is not None:
            slot.run(lambda: None if self.cancelled.is_set() else what(slot))


@dataclass(frozen=True)
class _Slot:
    run: Run
    next_portion: NextPortion
    done: Callable[[dict[str, Any]], None]
    failed: Callable[[str], None]


class Pace:
    """How fast all threads of one process write, together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = 0.0  # from when on the next may be written

    def spend(self, size: int, bytes_per_s: float, writing: FileWriting) -> None:
        """Notes that so many bytes were written, and waits until more may be. Raises _Cancelled."""
        if bytes_per_s > 0:
            with self._lock:
                now_s = time.monotonic()
                self._free_s = max(self._free_s, now_s - BURST_S) + size / bytes_per_s
                wait_s = self._free_s - now_s
            if wait_s > 0:
                writing.cancelled.wait(wait_s)
        if writing.cancelled.is_set():
            raise _Cancelled


class _Looking:
    """A look for a checkpoint, which ends once: with what was found, or when the store has given nothing for `LOOKS_S`.

    Args:
        url: for the reason.
        end: gets what was found, and why nothing was.
    """

    def __init__(self, url: str, end: Callable[[Restorable | None, str], None]) -> None:
        self._url, self._end = url, end
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beat_s = time.monotonic()

    def beat(self) -> None:
        """Notes that something was read."""
        self._beat_s = time.monotonic()

    def end(self, found: Restorable | None, why: str) -> None:
        """Ends it; only the first call counts."""
        with self._lock:
            ended = self._ended.is_set()
            self._ended.set()
        if not ended:
            self._end(found, why)

    def watch(self) -> None:
        """Ends the look when the store hangs. Runs on a thread of its own until the look has ended."""
        while not self._ended.wait(max(0.0, self._beat_s + LOOKS_S - time.monotonic())):
            if time.monotonic() >= self._beat_s + LOOKS_S:
                self.end(None, f"{self._url} has given nothing for {LOOKS_S:g} s: it hangs")


class FileManifests:
    """Writes manifests, on a thread of its own; a `Manifests`.

    Args:
        settings: of the checkpoints.
        job: what is trained, once it is known.
        call: runs something in the coordinator's thread.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        job: Callable[[], JobSpec | None],
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._settings, self._job, self._call = settings, job, call
        self._catalog = Catalog(settings.url)
        self._encoding = Encoding.of(dict(settings.encoding))
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sizes: list[tuple[bool, int]] = []  # of this run's checkpoints: whether full, bytes
        Worker(self._serve, "manifests", log_error).start()

    def _serve(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:  # this thread has no caller, and whoever asks next is to be answered
                log.exception("what was asked of the store of checkpoints")

    def commit(self, finished: Finished, done: Callable[[str | None, bool], None]) -> None:
        """Writes the manifest on this object's thread, as `Manifests.commit` says."""
        job = self._job()
        assert job is not None, "what has steps has a job"
        if finished.save:
            self._work.put(lambda: self._commit_save(finished, job, done))
            return

        def work() -> None:
            try:
                manifest = self._manifest(finished, job)
                self._catalog.commit(manifest.id, manifest)
            except Exception as error:  # this thread has no caller: whatever it is makes the checkpoint void, by name
                reason = _reason(error, finished.folder)
                self._call(lambda: done(reason, True))
                return
            self._sizes.append((not finished.base, manifest.bytes))
            full = self._next_is_full()
            self._call(lambda: done(None, full))
            self._tidy(finished)

        self._work.put(work)

    def _commit_save(self, finished: Finished, job: JobSpec, done: Callable[[str | None, bool], None]) -> None:
        try:
            Saves(self._catalog.location).commit(self._manifest(finished, job))
        except Exception as error:  # as above
            reason = _reason(error, finished.folder)
            self._call(lambda: done(reason, False))
        else:
            self._call(lambda: done(None, False))

    def discard(self, folder: str, save: bool = False) -> None:
        """Removes files as `Manifests.discard` says. Where that fails, it is tried again when the next checkpoint
        counts."""

        def work() -> None:
            try:
                if save:
                    Saves(self._catalog.location).remove(folder)
                else:
                    self._catalog.clean(lambda other: other != folder)
            except CheckpointError as error:
                log.warning("what is left of checkpoint %s stays: %s", folder, error)

        self._work.put(work)

    def end(self, run: str, within_s: float = ENDS_S) -> None:
        """The run is over, and its prioritised saves are of no use: they go, after all that was asked for before.
        Waits for that, and no longer than so; what stays goes when a run that follows has its first checkpoint."""
        if self._settings.saver == "everything":
            return
        ended = threading.Event()

        def work() -> None:
            try:
                for folder in Saves(self._catalog.location).clean(lambda folder: run_of(folder) == run):
                    log.info("prioritised save %s was removed: the run is over", folder)
            except CheckpointError as error:
                log.warning("prioritised saves of run %s stay: %s", run, error)
            ended.set()

        self._work.put(work)
        if not ended.wait(within_s):
            log.warning("prioritised saves of run %s stay: %s has hung for %g s", run, self._settings.url, within_s)

    def newest(
        self,
        run: str,
        began_with: messages.Restored | None,
        done: Callable[[Restorable | None, str], None],
        read: bool = True,
    ) -> None:
        """Looks for a checkpoint as `Manifests.newest` says. If `read`, every file is read: one that is altered is
        passed over, as the log says. One that cannot be read just now is read again, for `UNREAD_S`."""

        looking = _Looking(self._settings.url, lambda found, why: self._call(functools.partial(done, found, why)))

        def work() -> None:
            until_s = time.monotonic() + UNREAD_S
            try:
                while True:
                    looking.beat()
                    try:
                        found, why = self._newest(run, began_with, looking.beat if read else None, until_s)
                        break
                    except StoreUnavailable as error:
                        if time.monotonic() >= until_s:
                            raise
                        log.warning("the newest checkpoint is looked for again in %g s: %s", LOOK_AGAIN_S, error)
                        time.sleep(LOOK_AGAIN_S)
            except Exception as error:  # this thread has no caller
                log.exception("the newest checkpoint")
                found, why = None, str(error)
            looking.end(found, why)

        self._work.put(work)
        Worker(looking.watch, "watch of manifests", log_error).start()

    def _newest(
        self, run: str, began_with: messages.Restored | None, on_block: Callable[[], None] | None, until_s: float
    ) -> tuple[Restorable | None, str]:
        """Returns the newest checkpoint that is whole; or None, and why there is none.

        Until `until_s`, raises StoreUnavailable for one that cannot be read just now: it may be whole, and whoever goes
        back further has trained for nothing.
        """
        listing, why = self._catalog.listing(), "none was written"
        for broken in (one for one in listing.broken if run_of(one.folder) == run):
            if broken.unavailable and time.monotonic() < until_s:
                raise StoreUnavailable(broken.reason)
            why = broken.reason
            log.warning("checkpoint %s is passed over: %s", broken.folder, why)
        for catalog, manifest in self._candidates(listing, run, began_with):
            try:
                _check(catalog, manifest, on_block)
            except CheckpointError as error:
                if isinstance(error, StoreUnavailable) and time.monotonic() < until_s:
                    raise
                why = str(error)
                log.warning("checkpoint %s is passed over: %s", manifest.id, why)
            else:
                return (restored_of(catalog, manifest), manifest.spec), ""
        return None, why

    def _candidates(
        self, listing: Listing, run: str, began_with: messages.Restored | None
    ) -> Iterator[tuple[Catalog, Manifest]]:
        """Lists the checkpoints that `newest` may take, the newest first."""
        for manifest in listing.whole:
            if run_of(manifest.id) == run:
                yield self._catalog, manifest
        if began_with is not None:
            catalog = Catalog(began_with.url)
            yield catalog, catalog.read(began_with.folder)

    def _manifest(self, finished: Finished, job: JobSpec) -> Manifest:
        """Raises CheckpointError if a slot has described its file as none can be."""
        return Manifest(
            id=finished.folder,
            done=finished.done,
            step=finished.step,
            kind="save" if finished.save else "incremental" if finished.base else "full",
            base=finished.base or None,
            job=job.to_json(),
            parts=[PartEntry.of(dict(finished.parts[slot])) for slot in sorted(finished.parts)],
            encoding=self._encoding,
            began_with=self._began_with(finished),
            inexact=list(finished.inexact),
            written_s=time.time(),
        )

    def _began_with(self, finished: Finished) -> str | None:
        began = finished.began_with
        return began.folder if began is not None and Location(began.url).url == self._catalog.location.url else None

    def _next_is_full(self) -> bool:
        sizes = self._sizes
        last_full = max((i for i, (full, _) in enumerate(sizes) if full), default=None)
        if last_full is None:
            return True  # what this one builds on was written by another process
        following = next_kind(self._settings.policy, [size for _, size in sizes[last_full:]])
        return following.kind == "full"

    def _tidy(self, finished: Finished) -> None:
        """Removes checkpoints that are not kept any more, and what earlier attempts left. A failure is logged; the next
        checkpoint tries again."""
        try:
            listing = self._catalog.listing()  # once: a place may have thousands
            mine, last = run_of(finished.folder), attempt_of(finished.folder)
            runs = self._lineage(finished, listing)

            def may_run(folder: str) -> bool:
                """Returns whether a folder is of another history, or of an attempt after this one, which may be under
                way."""
                return run_of(folder) not in runs or (run_of(folder) == mine and attempt_of(folder) > last)

            kept = self._catalog.keep(self._settings.keep, lambda folder: run_of(folder) in runs, listing)
            for folder in [*kept, *self._catalog.clean(may_run, listing)]:
                log.info("checkpoint %s was removed", folder)
            # they were on a checkpoint before this one, or a run before this one has left them
            Saves(self._catalog.location).clean(lambda folder: not may_run(folder))
        except CheckpointError as error:
            log.warning("old checkpoints stay: %s", error)

    @staticmethod
    def _lineage(finished: Finished, listing: Listing) -> set[str]:
        """This run, the one that it began with a checkpoint of, and so on: what is at the same place of other runs is
        somebody else's."""
        runs: set[str] = set()
        new = {run_of(finished.folder)} - {""}
        while new:
            runs |= new
            began = {one.began_with for one in listing.whole if run_of(one.id) in new and one.began_with is not None}
            new = {run_of(folder) for folder in began} - runs - {""}
        return runs


def _reason(error: Exception, folder: str) -> str:
    """Returns why nothing came of a checkpoint, for people."""
    if isinstance(error, CheckpointError):
        return str(error)
    log.error("checkpoint %s", folder, exc_info=error)
    return repr(error)


def _check(catalog: Catalog, manifest: Manifest, on_block: Callable[[], None] | None) -> None:
    """Raises CheckpointError unless a checkpoint, and what it builds on, is whole. `on_block`: all of it is read, and
    this is called after each block; None: nothing is read but manifests."""
    if on_block is not None:
        check_rows(catalog, manifest, on_block)
    else:
        catalog.chain(manifest)
