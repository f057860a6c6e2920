"""A checkpoint that a cluster begins with: found by its coordinator. Trainers read its dense model, and servers its
records (`part_reader.py`)."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.coordinator.checkpointing import Restorable, attempt_of, run_of
from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.protocol.bounds import INEXACT_MOST
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import NONE, Beyond
from torch_ecrec.storage.catalog import NEWEST, Catalog, place_of
from torch_ecrec.storage.chain_reader import dense_of
from torch_ecrec.storage.listing import Broken
from torch_ecrec.storage.manifest import Manifest
from torch_ecrec.storage.store_probe import StoreProbe

log = logging.getLogger(__name__)

UNASKED = "more is lost than parity repairs, and with --beyond stop nobody goes back to a checkpoint unasked"
DENSE_S = 3600.0  # for the dense model, which is read at once; only a store that hangs reaches it


def find(wanted: str, url: str, began_with: str = "") -> tuple[Restored, JobSpec] | None:
    """Returns the checkpoint that a cluster is to begin with, and its job; None: it begins with none. Of what was
    altered there the log tells, where the newest is wanted.

    Args:
        wanted: URL, URL@STEP, or "newest": the newest at `url`; then None if there is none.
        url: where the cluster's own checkpoints are kept; "" if there are none.
        began_with: the folder that this run began with, or `NONE`: that one, whatever is newer there; "": not known.

    Raises:
        CheckpointError: it is not there, or what it builds on is not; or there is one, and it was altered.
        StoreUnavailable: it cannot be read just now, or another one cannot, which may be newer.
        ValueError: "newest" of no place.
    """
    place, step = place_of(wanted, url)
    catalog = Catalog(place)
    if began_with == NONE:
        return None
    if began_with:
        manifest = catalog.read(began_with)
    elif wanted == NEWEST:
        listing = catalog.listing()
        if not listing.whole and not listing.broken:
            return None
        manifest = catalog.newest(listing)
    else:
        manifest = catalog.wanted(step)
    return restored_of(catalog, manifest), manifest.spec


def find_again(
    run: str, url: str, beyond: Beyond, wanted: str, began_with: str, asked: bool = False
) -> tuple[Restorable | None, int]:
    """Finds what a cluster begins with after its coordinator was started again, if no member that knows the training
    returns.

    Args:
        run: its word; `url`: of its own checkpoints, "" if there are none; `beyond`: see `CheckpointSettings`.
        wanted, began_with: as for `find`.
        asked: somebody has started it once nobody was left, and may have named the newest checkpoint of the run.

    Returns:
        A checkpoint, of the run itself or the one that it began with; None: its beginning. And how many coordinators
        there were, as for `newest_of`: no checkpoint of before is to be written over.

    Raises:
        CheckpointError: there is nothing that the cluster may begin with, and why; StoreUnavailable: nobody can tell.
    """
    newest, term, broken = _found(run, url) if url else (None, 0, [])
    named = find(wanted, url) if asked and wanted and newest is not None else None
    is_newest = named is not None and newest is not None and named[0].folder == newest[0].folder
    if newest is not None and beyond == "stop" and not is_newest:
        other = "; or with an older one, under another name in --elect" if asked else ""
        raise CheckpointError(
            f"{UNASKED}: end this cluster, and begin another with --restore {url}@{newest[0].done}, the newest"
            f" checkpoint of this run{other}"
        )
    if beyond == "stop" and broken:
        raise CheckpointError(
            f"{UNASKED}, and of this run's none can be read: {broken[0].reason}; or end this cluster, and begin another"
        )
    if newest is not None or began_with == NONE:
        return newest, term
    if not began_with or not wanted:
        raise CheckpointError(
            "this coordinator was not told which checkpoint the run began with: end this cluster, and begin another"
            " with --restore URL@STEP; all coordinators of a run are to be told the same --restore"
        )
    try:
        return find(wanted, url, began_with), term
    except StoreUnavailable:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"the run began with checkpoint {began_with}, has none of its own, and {error}; bring it back, or end this"
            " cluster, and begin another with --restore URL@STEP or, from the beginning, without --restore"
        ) from error


def restored_of(catalog: Catalog, manifest: Manifest) -> Restored:
    """Returns the message by which a cluster begins with a checkpoint. Raises CheckpointError: what it builds on cannot
    be read."""
    return Restored(catalog.url, manifest.id, manifest.done, inexact=catalog.inexact(manifest)[-INEXACT_MOST:])


def newest_of(run: str, url: str) -> tuple[tuple[Restored, JobSpec] | None, int]:
    """Returns the newest checkpoint of a run, if there is one; its files are read later. And how many coordinators the
    run had, as the names of its checkpoints tell, also of those that came to nothing.

    Raises:
        CheckpointError: the place cannot be read, or what the checkpoint builds on is not there.
    """
    newest, term, _ = _found(run, url)
    return newest, term


def _found(run: str, url: str) -> tuple[Restorable | None, int, list[Broken]]:
    """As `newest_of`; and those of the run that cannot be read. The store is listed once."""
    catalog = Catalog(url)
    listing = catalog.listing()
    broken = [one for one in listing.broken if run_of(one.folder) == run]
    names = [*(one.id for one in listing.whole), *listing.unfinished, *(one.folder for one in listing.broken)]
    term = 1 + max((attempt_of(name)[0] for name in names if run_of(name) == run), default=0)
    for one in broken:
        if one.unavailable:
            raise StoreUnavailable(one.reason)
        log.warning("checkpoint %s is passed over: %s", one.folder, one.reason)
    newest = next((one for one in listing.whole if run_of(one.id) == run), None)
    if newest is None:
        return None, term, broken
    return (restored_of(catalog, newest), newest.spec), term, broken


def dense_model(restored: Restored) -> list[tuple[Tensor, list[int]]]:
    """Returns every trainer's part of a checkpoint's dense model, in their order: payload (n,) uint8, and header.

    Raises:
        CheckpointError: it is not there (any more), is altered, or is of another step.
    """

    def read() -> dict[int, tuple[list[int], bytes]]:
        catalog = Catalog(restored.url)
        return dense_of(catalog, catalog.read(restored.folder))

    parts = StoreProbe(read, restored.url, DENSE_S, log.warning).look()
    if any(header[:1] != [restored.done] for header, _ in parts.values()):
        raise CheckpointError(f"{restored.folder}: the dense model is of another step than the tables")
    found = ((np.frombuffer(payload, np.uint8).copy(), header) for header, payload in parts.values())
    return [(torch.from_numpy(payload_n), header) for payload_n, header in found]
