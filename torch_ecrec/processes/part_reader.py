"""Reads a slot's records of a checkpoint, in a server, for a slot that begins with them (`server/slot_restore.py`)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.protocol.messages import PartialRestore
from torch_ecrec.records.positions import Bytes, Positions
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.chain_reader import records_of, require_same_model
from torch_ecrec.storage.manifest import ADVICE
from torch_ecrec.storage.saves import Saves
from torch_ecrec.storage.store_probe import read_ahead

log = logging.getLogger(__name__)

AHEAD = 1  # pieces that are read while one is taken; above all, one that never comes is not waited for for ever
Run = Callable[[Callable[[], None]], None]  # `Node.run`
Calls = tuple[Run, Callable[[int, Positions, Bytes], None], Callable[[], None], Callable[[str, bool], None]]


class FileReader:
    """Reads slots' records, each on a thread of its own; a `CheckpointReader`.

    Args:
        run: of the node that hosts them.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def read(
        self,
        partial_restore: PartialRestore,
        job: JobSpec,
        slot: int,
        take: Callable[[int, Positions, Bytes], None],
        done: Callable[[], None],
        failed: Callable[[str, bool], None],
    ) -> FileReading:
        """Reads one slot's records on a thread of its own, as `CheckpointReader.read` says."""
        reading = FileReading(self._run, take, done, failed)
        work = functools.partial(_work, partial_restore, job, slot, reading)
        Worker(work, f"slot {slot} of a checkpoint", log_error).start()
        return reading


class FileReading:
    """A slot's records on their way. Until it is cancelled, all that its thread has of the slot."""

    def __init__(
        self,
        run: Run,
        take: Callable[[int, Positions, Bytes], None],
        done: Callable[[], None],
        failed: Callable[[str, bool], None],
    ) -> None:
        self._calls: Calls | None = (run, take, done, failed)

    @property
    def cancelled(self) -> bool:
        return self._calls is None

    def cancel(self) -> None:
        """Stops the reading: nobody wants the records any more. Called inside of `Node.run`."""
        self._calls = None

    def take(self, table_group: int, positions_N: Positions, records_NB: Bytes) -> None:
        """Gives some to the slot."""
        if (calls := self._calls) is not None:
            calls[0](lambda: None if self.cancelled else calls[1](table_group, positions_N, records_NB))

    def finish(self) -> None:
        """Says that all records were given."""
        if (calls := self._calls) is not None:
            calls[0](lambda: None if self.cancelled else calls[2]())

    def fail(self, reason: str, later: bool) -> None:
        """Says that the records cannot be had, and why. `later`: perhaps they can, later."""
        if (calls := self._calls) is not None:
            calls[0](lambda: None if self.cancelled else calls[3](reason, later))


def _work(partial_restore: PartialRestore, job: JobSpec, slot: int, reading: FileReading) -> None:
    try:
        for table_group, positions_N, records_NB in read_ahead(
            slot_records(partial_restore, job, slot), AHEAD, partial_restore.url
        ):
            if reading.cancelled:
                return
            reading.take(table_group, positions_N, records_NB)
    except CheckpointError as error:
        log.warning("slot %d of checkpoint %s: %s", slot, partial_restore.folder, error)
        reading.fail(str(error), isinstance(error, StoreUnavailable))
    except Exception as error:  # this thread has no caller: whatever it is, the slot cannot begin so
        log.exception("slot %d of checkpoint %s", slot, partial_restore.folder)
        reading.fail(repr(error), False)
    else:
        reading.finish()


def slot_records(partial_restore: PartialRestore, job: JobSpec, slot: int) -> Iterator[tuple[int, Positions, Bytes]]:
    """Yields a slot's records of a checkpoint, with the prioritised saves on it that are named.

    Where all that it builds on was written by a cluster of the same layout, the slot's own parts are read, else all.

    Yields:
        Table group, positions (N,) int64, records (N, B) uint8.

    Raises:
        CheckpointError: it is not there, is altered, or of another job; or a slot's part has a row of another slot.
    """
    catalog = Catalog(partial_restore.url)
    manifest = catalog.read(partial_restore.folder)
    saves = Saves(catalog.location).on(partial_restore.folder, [name for name, _ in partial_restore.saves])
    read = [*catalog.chain(manifest), *saves]
    for one in read:
        require_same_model(one, job)
    layouts = job.layouts
    of_each = [*range(job.code.slots)]
    alike = all(one.spec.layouts == layouts and sorted(part.slot for part in one.parts) == of_each for one in read)

    def mine(table_group: int, rows_N: Positions) -> NDArray[np.bool_]:
        slot_N, _ = layouts[table_group].locate(rows_N)
        of_slot: NDArray[np.bool_] = slot_N == slot
        if alike and not of_slot.all():
            row, other = int(rows_N[~of_slot][0]), int(slot_N[~of_slot][0])
            raise CheckpointError(
                f"{partial_restore.folder}: row {row} of table group {table_group} is of slot {other}, and stands"
                f" among those of slot {slot}; {ADVICE}"
            )
        return of_slot

    slots = [slot] if alike else None
    for table_group, rows_N, records_NB in records_of(catalog, manifest, mine=mine, slots=slots, saves=saves):
        yield table_group, layouts[table_group].locate(rows_N)[1], records_NB
