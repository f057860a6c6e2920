"""One file of a checkpoint: what one slot has written, in blocks that are checked one by one.

    "TECRECP1"                            8 bytes
    block, block, ..., end                each: length of its header (4 bytes), hash of the header (8), header, payload

A header is MessagePack (`Block`), and holds the hash of its payload, its own place in the file and a word of the file;
so a byte that was altered, a block that is missing, and one that belongs elsewhere are all found. Hashes are 64 bits of
XXH3, which is faster than memory is read: they find what disks and networks do to bytes, not what an attacker does. A
file that was cut off has no end.

Payloads: records are rows (`row_ids.py`), then (N, B) bytes; dense is one trainer's part of the dense model.

Shapes: N records of a block, B record bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import IO, Annotated, Any, Literal, NoReturn

import msgspec
import numpy as np
import xxhash
import zstandard
from msgspec import Meta, Struct
from numpy.typing import NDArray

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.schema import Schema
from torch_ecrec.runtime.checks import require
from torch_ecrec.storage import row_ids
from torch_ecrec.storage.location import Location

MAGIC = b"TECRECP1"
HEADER_MOST = 1 << 20  # bytes of a header: one that is longer was altered
PAYLOAD_MOST = 1 << 31
LEVEL_MOST = 19

Count = Annotated[int, Meta(ge=0)]
Payload = Annotated[int, Meta(ge=0, le=PAYLOAD_MOST)]


class Block(Struct, frozen=True, forbid_unknown_fields=True):
    """What a block holds.

    Attributes:
        kind: records, dense, or the end of the file.
        file, number: the word of its file, and its place there.
        slab: of records. `trainer`: of dense.
        count: records of a block; at the end, blocks before it.
        rows: how row numbers are coded. `rows_bytes`: how many of the payload these are.
        header: of dense, as the trainer gave it.
        compressed: the payload is a frame of zstd.
        size: bytes of the payload as it was before that. `payload`: as they are in the file; `hash`: of these.
    """

    kind: Literal["records", "dense", "end"]
    file: str
    number: Count
    slab: Count = 0
    trainer: Count = 0
    count: Count = 0
    rows: str = ""
    rows_bytes: Payload = 0
    header: list[int] = []
    compressed: bool = False
    size: Payload = 0
    payload: Payload = 0
    hash: bytes = b""


class Encoding(Struct, frozen=True, forbid_unknown_fields=True):
    """How blocks are written. `zstd`: a level of compression, 0 for none."""

    zstd: Annotated[int, Meta(ge=0, le=LEVEL_MOST)] = 0


class PartEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """What a manifest says of a file.

    Attributes:
        name: within the checkpoint's folder.
        word: of the file, which is in each of its blocks.
        bytes, blocks: how long it is.
        rows: records of each slab.
        dense: trainers whose parts of the dense model are in it.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,100}\Z")]
    word: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    bytes: Count
    blocks: Count
    rows: list[Count]
    dense: list[Count] = []


class PartWriter:
    """Writes a part block by block.

    Args:
        file: to write to, from its beginning.
        name: of the file, for its entry.
        schemas: of the records of each slab.
        encoding: of the blocks.
    """

    def __init__(self, file: IO[bytes], name: str, schemas: Sequence[Schema], encoding: Encoding) -> None:
        self._file, self._name, self._schemas = file, name, list(schemas)
        self._word, self._blocks = uuid.uuid4().hex, 0
        self._rows = [0] * len(self._schemas)
        self._dense: list[int] = []
        self._compressor = zstandard.ZstdCompressor(encoding.zstd) if encoding.zstd else None
        self._bytes = len(MAGIC)
        file.write(MAGIC)

    def write(self, slab: int, rows_N: NDArray[np.int64], records_NB: NDArray[np.uint8]) -> int:
        """Adds records.

        Args:
            slab: of which.
            rows_N: (N,) int64, slab rows.
            records_NB: (N, B) uint8.

        Returns:
            How many bytes that took.
        """
        shape = (len(rows_N), self._schemas[slab].nbytes)
        require(records_NB.shape == shape, f"`records_NB` must have shape {shape}, got {records_NB.shape}")
        kind, coded = row_ids.encode(rows_N)
        block = Block("records", self._word, self._blocks, slab, count=len(rows_N), rows=kind, rows_bytes=len(coded))
        self._rows[slab] += len(rows_N)
        return self._add(block, coded, np.ascontiguousarray(records_NB).reshape(-1))

    def write_dense(self, trainer: int, header: list[int], payload: NDArray[np.uint8]) -> int:
        """Adds a trainer's part of the dense model: its header, and bytes (n,) uint8. Returns as `write`."""
        self._dense.append(trainer)
        block = Block("dense", self._word, self._blocks, trainer=trainer, header=header)
        return self._add(block, b"", np.ascontiguousarray(payload).reshape(-1))

    def close(self) -> PartEntry:
        """Writes the end. The file is its owner's to close."""
        self._add(Block("end", self._word, self._blocks, count=self._blocks), b"", np.empty(0, np.uint8))
        return PartEntry(self._name, self._word, self._bytes, self._blocks, self._rows, self._dense)

    def _add(self, block: Block, front: bytes, payload: NDArray[np.uint8]) -> int:
        pieces: list[Any] = [front, payload.data] if len(front) else [payload.data]
        size = len(front) + len(payload)
        if self._compressor is not None:
            pieces = [self._compressor.compress(b"".join(pieces))]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        stored = sum(len(piece) for piece in pieces)
        more = {"compressed": self._compressor is not None, "size": size, "payload": stored, "hash": digest.digest()}
        header = msgspec.msgpack.encode(msgspec.structs.replace(block, **more))
        self._file.write(len(header).to_bytes(4, "little") + xxhash.xxh3_64(header).digest() + header)
        for piece in pieces:
            self._file.write(piece)
        self._blocks += 1
        self._bytes += 12 + len(header) + stored
        return 12 + len(header) + stored


class Records(Struct, frozen=True):
    """Records of a part: rows_N (N,) int64, records_NB (N, B) uint8."""

    slab: int
    rows_N: Any
    records_NB: Any


class Dense(Struct, frozen=True):
    """A trainer's part of the dense model: payload_n (n,) uint8."""

    trainer: int
    header: list[int]
    payload_n: Any


class PartReader:
    """Reads a part, and checks every byte of it.

    Args:
        location, folder: where it is.
        entry: what the manifest says of it.
        schemas: of the records of each slab.
    """

    def __init__(self, location: Location, folder: str, entry: PartEntry, schemas: Sequence[Schema]) -> None:
        self._location, self._folder, self._entry, self._schemas = location, folder, entry, list(schemas)
        self._name = f"{folder}/{entry.name}"
        self._at = 0

    def blocks(self, records: bool = True) -> Iterator[Records | Dense]:
        """Everything, in order. `records`: false leaves records out, unread and unchecked.

        Raises:
            CheckpointError: it cannot be read, or is not what was written; what was yielded before was.
        """
        entry, rows, dense = self._entry, [0] * len(self._schemas), []
        with self._location.reading(self._name) as file:
            self._at = 0
            if self._read(file, len(MAGIC)) != MAGIC:
                self._refuse("it does not begin as a part of a checkpoint")
            for number in range(entry.blocks):
                block = self._header(file, number)
                if block.kind == "end":
                    if number + 1 != entry.blocks or block.count != number:
                        self._refuse("it ends before its end")
                    break
                if block.kind == "records" and not records:
                    file.seek(block.payload, 1)
                    self._at += block.payload
                    continue
                data = self._payload(file, block)
                if block.kind == "dense":
                    dense.append(block.trainer)
                    yield Dense(block.trainer, block.header, np.frombuffer(data, np.uint8))
                else:
                    rows[block.slab] += block.count
                    yield self._records(block, data)
            else:
                self._refuse("it has no end")
            if self._at != entry.bytes or file.read(1):
                self._refuse(f"it has another length than the {entry.bytes} bytes that were written")
        if (records and rows != entry.rows) or dense != entry.dense:
            self._refuse(f"it holds {rows} records and the dense parts {dense}, not {entry.rows} and {entry.dense}")

    def _header(self, file: IO[bytes], number: int) -> Block:
        length = int.from_bytes(self._read(file, 4), "little")
        if length > HEADER_MOST:
            self._refuse("a header is altered")
        digest = self._read(file, 8)
        header = self._read(file, length)
        if xxhash.xxh3_64(header).digest() != digest:
            self._refuse("a header is altered")
        try:
            block = msgspec.msgpack.decode(header, type=Block)
        except msgspec.MsgspecError as error:
            self._refuse(f"a header is none: {error}")
        if block.file != self._entry.word or block.number != number:
            self._refuse(f"block {block.number} of another file is in the place of block {number}")
        if block.slab >= max(1, len(self._schemas)):
            self._refuse(f"records of slab {block.slab}, of {len(self._schemas)}")
        return block

    def _payload(self, file: IO[bytes], block: Block) -> bytes:
        data = self._read(file, block.payload)
        if xxhash.xxh3_64(data).digest() != block.hash:
            self._refuse(f"block {block.number} is altered")
        if block.compressed:
            try:
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=block.size)
            except zstandard.ZstdError as error:
                self._refuse(f"block {block.number}: {error}")
        if len(data) != block.size:
            self._refuse(f"block {block.number} has {len(data)} bytes, not {block.size}")
        return data

    def _records(self, block: Block, data: bytes) -> Records:
        nbytes = self._schemas[block.slab].nbytes
        if len(data) != block.rows_bytes + block.count * nbytes:
            self._refuse(f"block {block.number} is of records of another size")
        try:
            rows_N = row_ids.decode(block.rows, data[: block.rows_bytes], block.count)
        except ValueError as error:
            self._refuse(f"block {block.number}: {error}")
        records_NB = np.frombuffer(data, np.uint8, offset=block.rows_bytes).reshape(block.count, nbytes)
        return Records(block.slab, rows_N, records_NB)

    def _read(self, file: IO[bytes], count: int) -> bytes:
        data = file.read(count)
        if len(data) != count:
            self._refuse("it is cut off")
        self._at += count
        return data

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(
            f"{self._location.url}/{self._name}, at byte {self._at}: {why}. Restore another checkpoint"
            " (`torch-ecrec checkpoints URL --verify` says which are whole)"
        )
