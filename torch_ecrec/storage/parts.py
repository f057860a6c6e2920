"""A part: one file of a checkpoint, of one slot. Records of its table groups in blocks, parts of the dense model, an
end.

    head      the file's nonce, what records look like
    rows      some rows of one table group: their numbers (`row_ids.py`), their records
    dense     one trainer's part of the dense model: a header of a few numbers, bytes
    end       how many rows of each table group, how many blocks

Each is a frame with a hash (`frames.py`). Records of a block are raw, or have their weights quantised
(`records/quantised.py`): scales, biases, optimizer state, codes, one after the other; rows that cannot be quantised go
into a raw block of their own. Either may be compressed by zstd, row numbers included.

Invariants
- What is in the manifest of a part (`PartEntry`) decides: a file of another nonce, size, digest or number of rows is
  refused, so is one whose records look otherwise, and nothing of a block is given before its hash was right.
- Without quantisation, the records that are read are the bytes that were written.

Shapes: N rows, B bytes of a record, D weights, C bytes of a row's codes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import zstandard
from msgspec import Meta, Struct
from numpy.typing import NDArray

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records import quantised
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.positions import Bytes, Floats, Positions
from torch_ecrec.records.schema import Schema
from torch_ecrec.runtime.checks import require
from torch_ecrec.storage import row_ids
from torch_ecrec.storage.frames import FrameReader, FrameWriter
from torch_ecrec.storage.location import Location, Reader
from torch_ecrec.storage.manifest import Count, DenseEntry, Encoding, PartEntry, TableError
from torch_ecrec.storage.row_ids import RowIds

BLOCK_BYTES = 4 << 20  # of records; what a reader has in memory at a time, twice where it is compressed
UNPACKED_BYTES = 1 << 20  # at a time: how many there are in all is known at the end

Block = tuple[int, Positions, Bytes]  # table group, rows (N,), records (N, B)
Wanted = Callable[[int, Positions], NDArray[np.bool_] | None]
Tables = Sequence[Sequence[tuple[str, int]]]  # of each table group: names, and where each begins
FieldShape = tuple[str, int, bool, str]


class Head(Struct, frozen=True, array_like=True, tag="head", forbid_unknown_fields=True):
    """The first frame of a part: what it is a part of."""

    nonce: str
    records: list[list[FieldShape]]


class Rows(Struct, frozen=True, array_like=True, tag="rows", forbid_unknown_fields=True):
    """Some rows of a table group. `bits`: of a weight, 0: exact; `packed`: bytes of the body before zstd, 0:
    without."""

    table_group: Count
    count: Annotated[int, Meta(ge=1, le=1 << 32)]
    ids: RowIds
    bits: Annotated[int, Meta(ge=0, le=8)]
    packed: Count


class Dense(Struct, frozen=True, array_like=True, tag="dense", forbid_unknown_fields=True):
    """A trainer's part of the dense model. `packed`: as in `Rows`."""

    trainer: Count
    header: list[int]
    packed: Count


class End(Struct, frozen=True, array_like=True, tag="end", forbid_unknown_fields=True):
    """The last frame: rows of each table group, frames in the file."""

    rows: list[Count]
    blocks: Count


_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_frame = msgspec.msgpack.Decoder(Rows | Dense | End).decode
_HEAD_SEED = 0  # the head says the nonce, on which the others' hashes depend


def _shapes(schemas: Sequence[Schema]) -> list[list[FieldShape]]:
    return [[(f.name, f.values, f.per_row, f.dtype) for f in schema.fields] for schema in schemas]


def _quantised_bytes(schema: Schema, bits: int) -> int:
    """Bytes of a record whose weights are quantised."""
    return 8 + schema.nbytes - schema.fields[0].nbytes + quantised.code_bytes(schema.dim, bits)


class PartWriter:
    """Writes one part.

    Args:
        location: the checkpoint's folder.
        name: of the file.
        schemas: of the records of each table group.
        encoding: how they are written.
        slot: whose part it is; -1: of none.
        tables: of each table group, each table's name and first row, for the error of quantisation; None: of table
            groups only.

    Not checked: that no row is written twice, which a reader finds.
    """

    def __init__(
        self,
        location: Location,
        name: str,
        schemas: Sequence[Schema],
        encoding: Encoding | None = None,
        slot: int = -1,
        tables: Tables | None = None,
    ) -> None:
        self._name, self._schemas, self._slot = name, tuple(schemas), slot
        self._encoding = encoding if encoding is not None else Encoding()
        self._zstd = zstandard.ZstdCompressor(self._encoding.zstd) if self._encoding.zstd else None
        named = tables if tables is not None else [[(f"table group {s}", 0)] for s in range(len(schemas))]
        self._errors = [_Errors(of_table_group) for of_table_group in named]
        self._rows = [0] * len(self._schemas)
        self._dense: list[DenseEntry] = []
        self._nonce = secrets.token_hex(8)
        self._entry: PartEntry | None = None
        self._file = location.open_write(name)
        self._frames = FrameWriter(self._file, self._nonce)
        self._begin()

    def _begin(self) -> None:
        try:
            self._frames.write(Head(self._nonce, _shapes(self._schemas)), (), _HEAD_SEED)
        except BaseException:
            self.abandon()
            raise

    @property
    def bytes(self) -> int:
        """Bytes that were written until now."""
        return self._frames.offset

    def write(self, table_group: int, rows_N: Positions, records_NB: Bytes) -> int:
        """Appends records; returns the bytes that they took in the file.

        Args:
            table_group: which.
            rows_N: (N,) int64, rows of the table group in any order.
            records_NB: (N, B) uint8; best contiguous.

        Raises:
            ValueError: shapes or dtypes are others.
            CheckpointError: the file cannot be written.
        """
        schema = self._schemas[table_group]
        good = records_NB.dtype == np.uint8 and records_NB.shape == (len(rows_N), schema.nbytes)
        wanted = f"`records_NB` of table group {table_group} must be uint8 of ({len(rows_N)}, {schema.nbytes})"
        require(good, f"{wanted}, got {records_NB.dtype} of {records_NB.shape}")
        before, most = self._frames.offset, max(BLOCK_BYTES // schema.nbytes, 1)
        for begin in range(0, len(rows_N), most):
            self._block(
                table_group, rows_N[begin : begin + most], np.ascontiguousarray(records_NB[begin : begin + most])
            )
        self._rows[table_group] += len(rows_N)
        return self._frames.offset - before

    def _block(self, table_group: int, rows_N: Positions, records_NB: Bytes) -> None:
        schema, bits = self._schemas[table_group], self._encoding.bits
        if not bits or _quantised_bytes(schema, bits) >= schema.nbytes:
            self._frame(table_group, rows_N, 0, [records_NB])
            if bits:
                self._errors[table_group].count(rows_N, schema.dim)
            return
        numbers_NW = numbers_of(records_NB, schema)
        found = quantised.quantise(numbers_NW, schema.dim, bits)
        if not found.good_N.all():
            good_N = found.good_N.astype(bool)
            self._frame(table_group, rows_N[~good_N], 0, [records_NB[~good_N]])
            self._errors[table_group].count(rows_N[~good_N], schema.dim)
            if good_N.any():
                self._block(table_group, rows_N[good_N], records_NB[good_N])
            return
        state_NS = np.ascontiguousarray(records_NB[:, schema.fields[0].nbytes :])
        self._frame(table_group, rows_N, bits, [found.scale_N, found.bias_N, state_NS, found.codes_NC])
        weights_ND = quantised.restore(found.scale_N, found.bias_N, found.codes_NC, schema.dim, bits)
        if schema.halves:
            plain = _weights_of(schema)
            weights_ND = numbers_of(records_of(weights_ND, plain), plain)
        self._errors[table_group].measure(rows_N, numbers_NW, weights_ND)

    def _frame(self, table_group: int, rows_N: Positions, bits: int, body: list[Any]) -> None:
        ids, coded = row_ids.encode(rows_N)
        pieces, packed = self._packed([coded, *body])
        self._frames.write(Rows(table_group, len(rows_N), ids, bits, packed), pieces)

    def _packed(self, pieces: list[Any]) -> tuple[list[Any], int]:
        """Returns the body as it is written, and its size before zstd."""
        if self._zstd is None:
            return pieces, 0
        whole = b"".join(memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes)
        return ([self._zstd.compress(whole)], len(whole)) if whole else ([], 0)

    def write_dense(self, trainer: int, header: list[int], payload: Any) -> int:
        """Appends a trainer's part of the dense model; returns the bytes that it took.

        Args:
            trainer: whose.
            header: a few numbers, each of at most 64 bits.
            payload: contiguous memory.
        """
        pieces, packed = self._packed([payload])
        offset, number = self._frames.offset, self._frames.number
        size = self._frames.write(Dense(trainer, list(header), packed), pieces)
        self._dense.append(DenseEntry(trainer, number, offset, size))
        return size

    def close(self) -> PartEntry:
        """Makes the file durable and visible; returns what the manifest has to say of it. Raises CheckpointError."""
        if self._entry is not None:
            return self._entry
        try:
            self._frames.write(End(self._rows, self._frames.number + 1), ())
            self._file.close()
        except BaseException:
            self.abandon()
            raise
        errors = [error for table_group in self._errors for error in table_group.found()] if self._encoding.bits else []
        frames = self._frames
        self._entry = PartEntry(
            name=self._name,
            nonce=self._nonce,
            bytes=frames.offset,
            blocks=frames.number,
            rows=self._rows,
            digest=frames.digest,
            slot=self._slot,
            dense=self._dense,
            errors=errors,
        )
        return self._entry

    def abandon(self) -> None:
        """Removes what was written; does nothing after `close`."""
        self._file.abandon()


class _Errors:
    """Adds up the errors that quantisation makes in the tables of one table group."""

    def __init__(self, tables: Sequence[tuple[str, int]]) -> None:
        self._names = [name for name, _ in tables]
        self._first_T = np.array([first for _, first in tables], np.int64)
        self._largest_T, self._squares_T = np.zeros(len(tables)), np.zeros(len(tables))
        self._weights_T = np.zeros(len(tables), np.int64)

    def count(self, rows_N: Positions, dim: int) -> NDArray[np.int64]:
        """Counts the weights of some rows; returns the table of each."""
        table_N = np.searchsorted(self._first_T, rows_N, side="right") - 1
        self._weights_T += dim * np.bincount(table_N, minlength=len(self._names))
        return table_N

    def measure(self, rows_N: Positions, before_NW: Floats, after_ND: Floats) -> None:
        """Compares weights with what will be read."""
        table_N = self.count(rows_N, after_ND.shape[1])
        quantised.differ_(before_NW, after_ND, table_N, self._largest_T, self._squares_T)

    def found(self) -> list[TableError]:
        """Returns what was found of each table that has rows in this part."""
        figures = zip(self._names, self._largest_T, self._squares_T, self._weights_T, strict=True)
        return [TableError(name, float(most), float(sum_), int(n)) for name, most, sum_, n in figures if n]


def _weights_of(schema: Schema) -> Schema:
    """Records of the weights alone."""
    return Schema.of(schema.dim, weights=schema.weights)


class PartReader:
    """Reads one part.

    Args:
        location: the checkpoint's folder.
        entry: what the manifest says of it.
        schemas: of the records of each table group.
    """

    def __init__(self, location: Location, entry: PartEntry, schemas: Sequence[Schema]) -> None:
        self._location, self._entry, self._schemas = location, entry, tuple(schemas)
        self._where = f"{location.url}/{entry.name}"

    def blocks(self, wanted: Wanted | None = None) -> Iterator[Block]:
        """Reads and checks the whole file, and yields its records, block by block, as each was found right.

        Args:
            wanted: is asked for every block which of its rows are; None, also as its answer: all. Rows that nobody
                wants are not decoded, and a block without any is not yielded.

        Raises:
            CheckpointError: it was cut off or altered, is missing, or is of another checkpoint or model. It may come
                after blocks were yielded: those are right, the file is not.
        """
        file = self._location.open_read(self._entry.name)
        try:
            yield from self._blocks(file, wanted)
        finally:
            file.close()

    def _blocks(self, file: Reader, wanted: Wanted | None) -> Iterator[Block]:
        entry = self._entry
        frames = FrameReader(file, self._where, entry.nonce, entry.bytes)
        self._read_head(frames)
        rows = [0] * len(self._schemas)
        while True:
            header, body = frames.read(_decode_frame)
            if isinstance(header, End):
                break
            if isinstance(header, Rows):
                try:
                    found = self._decode(header, body, wanted)
                except (ValueError, zstandard.ZstdError) as error:
                    raise frames.fault(f"it cannot be: {error}") from error
                rows[header.table_group] += header.count
                if found is not None:
                    yield found
        told = (header.rows, header.blocks, frames.digest, frames.number, frames.offset)
        if told != (rows, entry.blocks, entry.digest, entry.blocks, entry.bytes) or rows != entry.rows:
            raise frames.fault("the manifest says otherwise of this file: it is of another checkpoint")
        if not frames.ends():
            raise frames.fault("more follows after the end")

    def _read_head(self, frames: FrameReader) -> None:
        head, _ = frames.read(_decode_head, _HEAD_SEED)
        if head.nonce != self._entry.nonce:
            raise frames.fault(
                f"this is another file than the manifest means: nonce {head.nonce}, not {self._entry.nonce}"
            )
        if head.records != _shapes(self._schemas):
            raise frames.fault("its records have other fields than the tables of this job: it is of another model")

    def _decode(self, header: Rows, body: Bytes, wanted: Wanted | None) -> Block | None:
        """Returns the records of a block; None: none is wanted. Raises ValueError for what no writer has written."""
        require(header.table_group < len(self._schemas), f"there is no table group {header.table_group}")
        schema, count = self._schemas[header.table_group], header.count
        size = schema.nbytes if not header.bits else _quantised_bytes(schema, header.bits)
        begin = header.ids.nbytes(count)
        told = header.packed or len(body)
        require(told == begin + count * size, f"{told} bytes for {count} rows of {size}")
        body = _unpacked(body, header.packed)
        require(len(body) == begin + count * size, f"{len(body)} bytes for {count} rows of {size}")
        rows_N = row_ids.decode(header.ids, count, body[:begin])
        mask_N = wanted(header.table_group, rows_N) if wanted is not None else None
        if mask_N is not None and not mask_N.any():
            return None
        all_of_them = mask_N is None or bool(mask_N.all())
        records_NB = body[begin:].reshape(count, size)
        if header.bits:
            records_NB = _restored(body[begin:], count, schema, header.bits)
        if not all_of_them:
            assert mask_N is not None
            return header.table_group, rows_N[mask_N], records_NB[mask_N]
        return header.table_group, rows_N, records_NB

    def dense(self) -> dict[int, tuple[list[int], bytes]]:
        """Returns header and payload of each trainer's part of the dense model, by trainer, read without the rest of
        the file.

        Raises:
            CheckpointError: as for `blocks`.
        """
        found = {}
        self.check_size()
        for place in self._entry.dense:
            data = self._location.read_range(self._entry.name, place.offset, place.bytes)
            end = place.offset + place.bytes
            frames = FrameReader(_Memory(data), self._where, self._entry.nonce, end, place.offset, place.block)
            header, body = frames.read(_decode_frame)
            if not isinstance(header, Dense) or header.trainer != place.trainer or frames.offset != end:
                raise frames.fault(f"the part of trainer {place.trainer} is not here")
            try:
                found[header.trainer] = (header.header, _unpacked(body, header.packed).tobytes())
            except (ValueError, zstandard.ZstdError) as error:
                raise frames.fault(f"it cannot be: {error}") from error
        return found

    def check_size(self) -> None:
        """Checks, before memory for the file is made, that it has the bytes that the manifest says. Raises
        CheckpointError."""
        size, said = self._location.size(self._entry.name), self._entry.bytes
        if size != said:
            raise CheckpointError(f"{self._where} was cut off or altered: it has {size:,} bytes, {said:,} were written")

    def check(self) -> None:
        """Reads all, and gives nothing. Raises CheckpointError."""
        for _ in self.blocks():
            pass
        self.dense()


class _Memory:
    """Bytes that were read already, as a file."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def read_into(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")
        count = min(view.nbytes, self._left.nbytes)
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        self._left = memoryview(b"")


def _unpacked(body: Bytes, size: int) -> Bytes:
    """Returns a body without zstd, writable."""
    if not size:
        return body
    whole = bytearray()
    with zstandard.ZstdDecompressor().stream_reader(body.data) as reader:
        while len(whole) <= size and (piece := reader.read(min(UNPACKED_BYTES, size + 1 - len(whole)))):
            whole += piece
    require(len(whole) == size, f"zstd gives other bytes than {size}")
    return np.frombuffer(whole, np.uint8)


def _restored(body: Bytes, count: int, schema: Schema, bits: int) -> Bytes:
    """Records of which `body` has scales, biases, state and codes: (N, B) uint8."""
    first = schema.fields[0].nbytes
    scale_N, bias_N = body[: 4 * count].view(np.float32), body[4 * count : 8 * count].view(np.float32)
    end = 8 * count + count * (schema.nbytes - first)
    state_NS = body[8 * count : end].reshape(count, schema.nbytes - first)
    codes_NC = body[end:].reshape(count, quantised.code_bytes(schema.dim, bits))
    weights_ND = quantised.restore(scale_N, bias_N, codes_NC, schema.dim, bits)
    records_NB = np.empty((count, schema.nbytes), np.uint8)
    records_NB[:, :first] = records_of(weights_ND, _weights_of(schema))
    records_NB[:, first:] = state_NS
    return records_NB
