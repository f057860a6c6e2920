"""One number for all that was trained: equal exactly when every bit is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.nn.tensor_bytes import bytes_of

CHUNK_BYTES = 4 << 20  # of records read at a time


def digest_of(session: EmbeddingBackend, parameters: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> str:
    """SHA-256 of every record of every table in row order, of the dense parameters, and of shards in the trainer.

    Args:
        session: has the tables. Read in chunks.
        parameters, shards: by name, of any shape and dtype, on any device.
    """
    result = hashlib.sha256()
    for table in session.job.tables:
        slab, first = session.job.place_of_table[table.name]
        result.update(table.name.encode())
        portion = max(1, CHUNK_BYTES // session.job.slabs[slab].schema.nbytes)
        for begin in range(0, table.rows, portion):
            rows = torch.arange(begin, min(begin + portion, table.rows), dtype=torch.int64, device="cpu")
            result.update(session.read(slab, first + rows).numpy().tobytes())
    for name, tensor in (*parameters.items(), *shards.items()):
        result.update(name.encode() + bytes_of(tensor.detach().cpu().contiguous()).numpy().tobytes())
    return result.hexdigest()
