"""What a checkpoint holds, with all that it builds on: each record once, and the dense model.

Shapes: N records, B record bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_ecrec.errors import CheckpointError
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.manifest import Manifest
from torch_ecrec.storage.parts import Dense, PartReader, Records


def records_of(catalog: Catalog, chain: list[Manifest]) -> Iterator[Records]:
    """Every record of a checkpoint, once, with its newest value.

    Newest files first, so that what an older one has of a record that is known is left out. Memory: a byte for each row
    of all tables, and a block.

    Args:
        chain: see `Catalog.chain`.

    Raises:
        CheckpointError: a file is altered or missing, or together they lack a row. What was yielded before is right.
    """
    slabs = chain[-1].spec.slabs
    schemas = [slab.schema for slab in slabs]
    known = [np.zeros(slab.rows, dtype=bool) for slab in slabs]
    for manifest in reversed(chain):
        for part in manifest.parts:
            for block in PartReader(catalog.location, manifest.folder, part, schemas).blocks():
                if not isinstance(block, Records):
                    continue
                rows_N, known_R = block.rows_N, known[block.slab]
                if len(rows_N) and (int(rows_N.min()) < 0 or int(rows_N.max()) >= len(known_R)):
                    raise CheckpointError(f"{manifest.folder}/{part.name}: rows beyond the {len(known_R)} of a slab")
                new_N = ~known_R[rows_N]
                known_R[rows_N] = True
                if new_N.all():
                    yield block
                elif new_N.any():
                    yield Records(block.slab, rows_N[new_N], block.records_NB[new_N])
    for slab, known_R in zip(slabs, known, strict=True):
        if not known_R.all():
            raise CheckpointError(
                f"{chain[-1].folder}: {int((~known_R).sum())} rows of {', '.join(t.name for t in slab.tables)} are in"
                " none of its files"
            )


def dense_of(catalog: Catalog, manifest: Manifest) -> list[Dense]:
    """Every trainer's part of the dense model, in their order. Raises CheckpointError: one is not there, or altered."""
    schemas = [slab.schema for slab in manifest.spec.slabs]
    found: dict[int, Dense] = {}
    for part in manifest.parts:
        if part.dense:
            for block in PartReader(catalog.location, manifest.folder, part, schemas).blocks(records=False):
                if isinstance(block, Dense):
                    found[block.trainer] = block
    trainers = manifest.spec.trainers
    if sorted(found) != list(range(trainers)):
        raise CheckpointError(
            f"{manifest.folder}: the dense model's parts are of trainers {sorted(found)}, of {trainers}"
        )
    return [found[trainer] for trainer in range(trainers)]
