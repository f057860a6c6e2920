"""A checkpoint that a cluster begins with: found by its coordinator, read by its trainers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

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
    if wanted == NEWEST and not catalog.manifests():
        return None
    manifest = catalog.find(step)
    catalog.chain(manifest)  # complains now, not once the trainers are there
    return Restored(place, manifest.folder, manifest.done), manifest.spec


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
        chain = self._catalog.chain(self._catalog.read(self._restored.folder))
        for block in records_of(self._catalog, chain):
            yield block.slab, torch.from_numpy(block.rows_N), torch.from_numpy(block.records_NB.copy())

    def dense(self) -> list[tuple[Tensor, list[int]]]:
        """Every trainer's part of the dense model, in their order: payload (n,) uint8, and header."""
        parts = dense_of(self._catalog, self._catalog.read(self._restored.folder))
        if any(part.header[:1] != [self.done] for part in parts):
            raise CheckpointError(f"{self._restored.folder}: the dense model is of another step than the tables")
        return [(torch.from_numpy(part.payload_n.copy()), part.header) for part in parts]
