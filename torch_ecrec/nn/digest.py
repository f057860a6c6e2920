"""One number for all state of its model that a trainer would restore: equal exactly when every bit is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.resume.tensor_bytes import TensorsOut, bytes_of

CHUNK_BYTES = 4 << 20  # of records read at a time


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns the SHA-256 of some byte strings, each preceded by its length."""
    result = hashlib.sha256()
    for part in parts:
        result.update(len(part).to_bytes(8, "little"))
        result.update(part)
    return result.hexdigest()


def parts_of_tables(session: EmbeddingBackend) -> Iterator[bytes]:
    """Yields every record of every table in row order, read in chunks."""
    for table in session.job.tables:
        slab, first = session.job.place_of_table[table.name]
        yield table.name.encode()
        portion = max(1, CHUNK_BYTES // session.job.slabs[slab].schema.nbytes)
        for begin in range(0, table.rows, portion):
            rows = torch.arange(begin, min(begin + portion, table.rows), dtype=torch.int64, device="cpu")
            yield session.read(slab, first + rows).numpy().tobytes()


def parts_of_dense(index: bytes, tensors: TensorsOut, whole: bytes) -> Iterator[bytes]:
    """Yields the bytes of the dense part that a snapshot keeps, from what `DenseSnapshot.content` returns."""
    yield index
    for tensor in tensors.tensors:
        yield bytes_of(tensor).cpu().numpy().tobytes()
    yield whole
