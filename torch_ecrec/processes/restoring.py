"""A checkpoint that a cluster begins with: found by its coordinator, read by its trainers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torch_ecrec.coordinator.checkpointing import run_of
from torch_ecrec.errors import CheckpointError
from torch_ecrec.protocol.messages import Restored
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.restoring import dense_of, records_of

NEWEST = "newest"


def find(wanted: str, url: str) -> tuple[Restored, JobSpec] | None:
    """The checkpoint that a cluster is to begin with.

    Args:
        wanted: URL, URL@STEP, or "newest": the newest at `url`; then None if there is none.
        url: where the cluster's own checkpoints are kept; "" if there are none.

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
    if wanted == NEWEST and not catalog.checkpoints():
        return None
    manifest = catalog.newest() if step is None else catalog.at(step)
    catalog.chain(manifest)  # complains now, not once the trainers are there
    return Restored(place, manifest.id, manifest.done), manifest.spec


def newest_of(run: str, url: str) -> tuple[Restored, JobSpec] | None:
    """The newest checkpoint of a run, if there is one; its files are read by the trainers.

    Raises:
        CheckpointError: the place cannot be read.
    """
    catalog = Catalog(url)
    for manifest in catalog.checkpoints():
        if run_of(manifest.id) == run:
            catalog.chain(manifest)
            return Restored(url, manifest.id, manifest.done), manifest.spec
    return None


class StoredCheckpoint:
    """What a cluster begins with, read from where it is kept; a `Checkpoint` of the client.

    Args:
        restored: as the coordinator has told it.

    Raises:
        CheckpointError: by any method: it is not there (any more), or is altered.
    """

    def __init__(self, restored: Restored) -> None:
        self._restored = restored
        self._catalog = Catalog(restored.url)

    @property
    def done(self) -> int:
        """Steps of training until then."""
        return self._restored.done

    def records(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Every record once: slab, rows (U,) int64, records (U, B) uint8."""
        for slab, rows_N, records_NB in records_of(self._catalog, self._catalog.read(self._restored.folder)):
            yield slab, torch.from_numpy(rows_N), torch.from_numpy(records_NB)

    def dense(self) -> list[tuple[Tensor, list[int]]]:
        """Every trainer's part of the dense model, in their order: payload (n,) uint8, and header."""
        parts = dense_of(self._catalog, self._catalog.read(self._restored.folder))
        if any(header[:1] != [self.done] for header, _ in parts.values()):
            raise CheckpointError(f"{self._restored.folder}: the dense model is of another step than the tables")
        found = ((np.frombuffer(payload, np.uint8).copy(), header) for header, payload in parts.values())
        return [(torch.from_numpy(payload_n), header) for payload_n, header in found]
