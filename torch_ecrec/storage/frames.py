"""Frames: what a part is made of, each with the hash that says whether it is as it was written, and where it belongs.

    "ECRB"  header bytes (4)  body bytes (8)  header  body  hash (16)

Everything is little-endian; the header is MessagePack. The hash is xxh3_128 of all before it, seeded with the nonce of
the file and the number of the frame: a frame of another file, or at another place of its own, is none of this one. 128
bits, since a store may have 10^9 blocks in its life and the longer hash costs no time here; it finds errors of disks,
memory and networks, and does not defend against somebody who forges one.

What was read is looked at only after its hash was right.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.positions import Bytes
from torch_ecrec.storage.location import OpenFile, Reader, bytes_of
from torch_ecrec.storage.manifest import ADVICE

MAGIC = b"ECRB"
HASH_BYTES = 16
HEADER_MOST = 1 << 24
_PREFIX = struct.Struct("<4sIQ")
LEAST_BYTES = _PREFIX.size + HASH_BYTES

T = TypeVar("T")


def seed_of(nonce: str, number: int) -> int:
    """Returns the seed of a frame's hash, made of its file's nonce and the frame's number."""
    return xxhash.xxh3_64_intdigest(f"{nonce} {number}".encode())


class FrameWriter:
    """Appends frames to a file.

    Args:
        file: opened.
        nonce: of the file, 16 hexadecimal digits that no other has.

    Attributes:
        offset: bytes written; `number`: frames.
    """

    def __init__(self, file: OpenFile, nonce: str) -> None:
        self._file, self._nonce = file, nonce
        self._digest = xxhash.xxh3_128()
        self.offset = self.number = 0

    @property
    def digest(self) -> str:
        """The digest of all hashes until now."""
        return self._digest.hexdigest()

    def write(self, header: msgspec.Struct, body: Sequence[Any], seed: int | None = None) -> int:
        """Writes one frame, in one pass and without a copy of the body; returns its bytes.

        Args:
            header: what it is.
            body: contiguous memory, piece by piece.
            seed: of the hash, another than that of its number.
        """
        packed = msgspec.msgpack.encode(header)
        pieces = [view for view in map(bytes_of, body) if view.nbytes]
        size = sum(view.nbytes for view in pieces)
        first = _PREFIX.pack(MAGIC, len(packed), size) + packed
        hashed = xxhash.xxh3_128(first, seed=seed_of(self._nonce, self.number) if seed is None else seed)
        self._file.write(first)
        for view in pieces:
            hashed.update(view)
            self._file.write(view)
        found = hashed.digest()
        self._file.write(found)
        self._digest.update(found)
        self.number += 1
        self.offset += len(first) + size + HASH_BYTES
        return len(first) + size + HASH_BYTES


class FrameReader:
    """Reads the frames of a file one after the other.

    Args:
        file: opened.
        name: for errors.
        nonce: of the file.
        size: its bytes, as the manifest has them.
        offset, number: where it is, if not at the beginning.

    Attributes:
        offset, number: of the next frame.
    """

    def __init__(self, file: Reader, name: str, nonce: str, size: int, offset: int = 0, number: int = 0) -> None:
        self._file, self._name, self._nonce, self._size = file, name, nonce, size
        self._digest = xxhash.xxh3_128()
        self.offset, self.number = offset, number

    @property
    def digest(self) -> str:
        """The digest of all hashes until now."""
        return self._digest.hexdigest()

    def fault(self, reason: str) -> CheckpointError:
        """Returns an error that says where."""
        return CheckpointError(f"{self._name}, block {self.number} at byte {self.offset}: {reason}; {ADVICE}")

    def read(self, kind: Callable[[bytes], T], seed: int | None = None) -> tuple[T, Bytes]:
        """Returns the next frame: its header, and its body, (bytes,) uint8 in memory of its own that begins aligned.

        Args:
            kind: decodes the header.
            seed: as it was written with.

        Raises:
            CheckpointError: it was cut off or altered, or belongs to another file or place.
        """
        prefix = self._take(_PREFIX.size).tobytes()
        magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
        room = self._size - self.offset - LEAST_BYTES
        if magic != MAGIC or header_bytes > HEADER_MOST or header_bytes + body_bytes > room:
            raise self.fault("no block begins here: the file was altered, or is no part of a checkpoint")
        header = self._take(header_bytes)
        body = self._take(body_bytes)
        wanted = self._take(HASH_BYTES).tobytes()
        hashed = xxhash.xxh3_128(prefix, seed=seed_of(self._nonce, self.number) if seed is None else seed)
        hashed.update(header.data)
        hashed.update(body.data)
        if hashed.digest() != wanted:
            raise self.fault("its hash is another one: it was altered, or belongs elsewhere")
        try:
            decoded = kind(header.tobytes())
        except msgspec.MsgspecError as error:
            raise self.fault(f"it is no block of this format ({error})") from error
        self._digest.update(wanted)
        self.number += 1
        self.offset += LEAST_BYTES + header_bytes + body_bytes
        return decoded, body

    def _take(self, count: int) -> Bytes:
        memory = np.empty(count, np.uint8)
        if count and (got := self._file.read_into(memory)) < count:
            raise self.fault(f"the file ends here, {count - got} bytes too early")
        return memory

    def ends(self) -> bool:
        """Returns whether the file ends here: no frame follows."""
        return not self._file.read_into(np.empty(1, np.uint8))
