"""A checkpoint that a cluster begins with: found by its coordinator, read by its trainers."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_ecrec.coordinator.checkpointing import Restorable, attempt_of, run_of
from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.layout.stripes import Layout, layout_of
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.records.positions import Positions
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Beyond
from torch_ecrec.storage.ahead import read_ahead
from torch_ecrec.storage.catalog import Broken, Catalog
from torch_ecrec.storage.looks import LIMIT_S, Looks
from torch_ecrec.storage.manifest import ADVICE, Manifest
from torch_ecrec.storage.parts import Block
from torch_ecrec.storage.restoring import dense_of, records_of

T = TypeVar("T")

log = logging.getLogger(__name__)

NEWEST = "newest"
NONE = "none"
UNASKED = "more is lost than parity repairs, and with --beyond stop nobody goes back to a checkpoint unasked"
DENSE_S = 3600.0  # for the dense model, which is read at once; only a store that hangs reaches it
AHEAD = 4  # blocks that are read while others are sent


def find(wanted: str, url: str, began_with: str = "") -> tuple[Restored, JobSpec] | None:
    """The checkpoint that a cluster is to begin with.

    Args:
        wanted: URL, URL@STEP, or "newest": the newest at `url`; then None if there is none.
        url: where the cluster's own checkpoints are kept; "" if there are none.
        began_with: the folder that this run began with, or `NONE`: that one, whatever is newer there; "": not known.

    Raises:
        CheckpointError: it is not there, or what it builds on is not.
        ValueError: "newest" of no place.
    """
    if wanted == NEWEST:
        if not url:
            raise ValueError("the newest checkpoint of what? `--restore newest` goes with `--checkpoint URL`")
        place, step = url, None
    else:
        place, _, text = wanted.rpartition("@")
        if not place or not text.isdigit():
            place, text = wanted, ""
        step = int(text) if text else None
    catalog = Catalog(place)
    if began_with == NONE or (wanted == NEWEST and not began_with and not catalog.checkpoints()):
        return None
    if began_with:
        manifest = catalog.read(began_with)
    else:
        manifest = catalog.newest() if step is None else catalog.at(step)
    catalog.chain(manifest)  # complains now, not once the trainers are there
    return Restored(place, manifest.id, manifest.done), manifest.spec


def find_again(run: str, url: str, beyond: Beyond, wanted: str, began_with: str) -> tuple[Restorable | None, int]:
    """What a cluster begins with whose coordinator was started again, if nobody comes back who knows what was trained.

    Args:
        run: its word; `url`: of its own checkpoints, "" if there are none; `beyond`: see `CheckpointSettings`.
        wanted, began_with: as for `find`.

    Returns:
        A checkpoint, of the run itself or the one that it began with; None: its beginning. And how many coordinators
        there were, as for `newest_of`: no checkpoint of before is to be written over.

    Raises:
        CheckpointError: there is nothing that the cluster may begin with, and why; StoreUnavailable: nobody can tell.
    """
    newest, life, broken = _found(run, url) if url else (None, 0, [])
    if newest is not None and beyond == "stop":
        raise CheckpointError(
            f"{UNASKED}: end this cluster, and begin another with --restore {url}@{newest[0].done}, the newest"
            " checkpoint of this run"
        )
    if beyond == "stop" and broken:
        raise CheckpointError(
            f"{UNASKED}, and of this run's none can be read: {broken[0].reason}; or end this cluster, and begin another"
        )
    if newest is not None or began_with == NONE:
        return newest, life
    if not began_with or not wanted:
        raise CheckpointError(
            "this coordinator was not told which checkpoint the run began with: end this cluster, and begin another"
            " with --restore URL@STEP; all coordinators of a run are to be told the same --restore"
        )
    try:
        return find(wanted, url, began_with), life
    except StoreUnavailable:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"the run began with checkpoint {began_with}, has none of its own, and {error}; bring it back, or end this"
            " cluster, and begin another with --restore URL@STEP or, from the beginning, without --restore"
        ) from error


def newest_of(run: str, url: str) -> tuple[tuple[Restored, JobSpec] | None, int]:
    """The newest checkpoint of a run, if there is one; its files are read by the trainers. And how many coordinators
    the run had, as the names of its checkpoints tell, also of those that came to nothing.

    Raises:
        CheckpointError: the place cannot be read, or what the checkpoint builds on is not there.
    """
    newest, life, _ = _found(run, url)
    return newest, life


def _found(run: str, url: str) -> tuple[Restorable | None, int, list[Broken]]:
    """As `newest_of`; and those of the run that cannot be read. The store is listed once."""
    catalog = Catalog(url)
    listing = catalog.listing()
    broken = [one for one in listing.broken if run_of(one.folder) == run]
    names = [*(one.id for one in listing.whole), *listing.unfinished, *(one.folder for one in listing.broken)]
    life = 1 + max((attempt_of(name)[0] for name in names if run_of(name) == run), default=0)
    for one in broken:
        if one.unavailable:
            raise StoreUnavailable(one.reason)
        log.warning("checkpoint %s is passed over: %s", one.folder, one.reason)
    newest = next((one for one in listing.whole if run_of(one.id) == run), None)
    if newest is None:
        return None, life, broken
    catalog.chain(newest)
    return (Restored(url, newest.id, newest.done), newest.spec), life, broken


class StoredCheckpoint:
    """What a cluster begins with, read from where it is kept; a `Checkpoint` of the client.

    Trainers share its parts, those of a slot in all that it builds on together: of 3 slots and 2 trainers, one reads
    two. Trainer 0 reads all where parts are not of slots, or of those of several layouts.

    Args:
        restored: as the coordinator has told it.

    Raises:
        CheckpointError: by any method: it is not there (any more), or is altered.
    """

    def __init__(self, restored: Restored) -> None:
        self._restored = restored
        self._catalog = Catalog(restored.url)

    @functools.cached_property
    def _manifest(self) -> Manifest:
        return self._ask(lambda: self._catalog.read(self._restored.folder))

    def _ask(self, ask: Callable[[], T], limit_s: float | None = None) -> T:
        """Asks a store that may hang."""
        return Looks(ask, self._restored.url, LIMIT_S if limit_s is None else limit_s, log.warning).look()

    @property
    def done(self) -> int:
        """Steps of training until then."""
        return self._restored.done

    @property
    def inexact(self) -> str | None:
        """Why its records are not those of then, bit for bit; None: they are."""
        manifest = self._manifest
        bits = sorted({one.encoding.bits for one in self._ask(lambda: self._catalog.chain(manifest))} - {0})
        if not bits:
            return None
        return f"weights are those of checkpoint {manifest.id}, rounded to {', '.join(map(str, bits))} bits"

    def shares(self, trainers: int) -> list[list[int]]:
        """Returns how many rows of each slab each trainer reads, by the layout of the cluster that wrote them."""
        slots_of = self._slots_of(trainers)
        if slots_of is None:
            nothing = [0] * len(self._layouts)
            return [[slab.rows for slab in self._manifest.spec.slabs], *([nothing] * (trainers - 1))]
        return [[sum(map(layout.data_rows, slots)) for layout in self._layouts] for slots in slots_of]

    def records(self, trainer: int, trainers: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every record of a trainer's share once: slab, rows (U,) int64, records (U, B) uint8."""
        slots_of = self._slots_of(trainers)
        found: Iterator[Block] = iter(())
        if slots_of is not None:
            mine = functools.partial(self._require_own, slots_of[trainer])
            found = records_of(self._catalog, self._manifest, mine=mine, slots=slots_of[trainer])
        elif trainer == 0:
            found = records_of(self._catalog, self._manifest)
        for slab, rows_N, records_NB in read_ahead(found, AHEAD, self._restored.url):
            yield slab, torch.from_numpy(rows_N), torch.from_numpy(records_NB)

    @functools.cached_property
    def _layouts(self) -> list[Layout]:
        job = self._manifest.spec
        return [layout_of(job.code.slots, job.code.k, job.code.parities, slab.rows) for slab in job.slabs]

    def _slots_of(self, trainers: int) -> list[list[int]] | None:
        """Whose parts each trainer reads: the largest first, to who has least. None: trainer 0 reads all."""
        manifest = self._manifest
        chain, code = self._ask(lambda: self._catalog.chain(manifest)), manifest.spec.code
        if any(
            one.spec.code != code or sorted(part.slot for part in one.parts) != [*range(code.slots)] for one in chain
        ):
            return None
        sizes = Counter({part.slot: 0 for part in self._manifest.parts})
        for one in chain:
            sizes.update({part.slot: part.bytes for part in one.parts})
        given: list[list[int]] = [[] for _ in range(trainers)]
        totals = [0] * trainers
        for slot, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
            least = totals.index(min(totals))
            given[least].append(slot)
            totals[least] += size
        return given

    def _require_own(self, slots: list[int], slab: int, rows_N: Positions) -> NDArray[np.bool_]:
        """Of rows of these slots' parts: all. A row at another slot's place would be had twice, and another lack."""
        slot_N, _ = self._layouts[slab].locate(rows_N)
        strange_N = ~np.isin(slot_N, slots)
        if strange_N.any():
            row, slot = int(rows_N[strange_N][0]), int(slot_N[strange_N][0])
            raise CheckpointError(
                f"{self._restored.folder}: row {row} of slab {slab} is of slot {slot}, and stands among those of slots"
                f" {slots}; {ADVICE}"
            )
        return np.ones(len(rows_N), np.bool_)

    def dense(self) -> list[tuple[Tensor, list[int]]]:
        """Every trainer's part of the dense model, in their order: payload (n,) uint8, and header."""
        manifest = self._manifest
        parts = self._ask(lambda: dense_of(self._catalog, manifest), DENSE_S)
        if any(header[:1] != [self.done] for header, _ in parts.values()):
            raise CheckpointError(f"{self._restored.folder}: the dense model is of another step than the tables")
        found = ((np.frombuffer(payload, np.uint8).copy(), header) for header, payload in parts.values())
        return [(torch.from_numpy(payload_n), header) for payload_n, header in found]
