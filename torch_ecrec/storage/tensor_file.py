"""A file of safetensors, read: which tensors it has, and their rows, mapped.

The format: 8 bytes, little-endian, how long the header is; the header, JSON: of each tensor its dtype, shape and place;
the tensors' bytes, row by row. Tensors lie one behind the other and fill the file, as the format wants it.

    {"a.weight": {"dtype": "F32", "shape": [40, 8], "data_offsets": [0, 1280]}, "__metadata__": {"of": "words"}}

Nothing of a file is used before its whole header was looked at; memory is that header, for tensors of any size.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records.positions import Bytes

SUFFIX = ".safetensors"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_HEADER_MOST = 100_000_000  # as the format's own library has it
_NUMBERS = {word: name for name, word in DTYPES.items()}

Size = Annotated[int, Meta(ge=0, le=1 << 60)]


class FileTensor(Struct, frozen=True):
    """One tensor. `data_offsets`: where its bytes begin and end, counted from the end of the header."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Size, Size]

    @property
    def numbers(self) -> str:
        """Its dtype as torch says it."""
        return _NUMBERS.get(self.dtype, self.dtype)


class TensorFile:
    """Reads a file of safetensors: its header at once, tensors when they are asked for.

    Args:
        path: of the file.

    Attributes:
        tensors: by name. `metadata`: words of who wrote it.

    Raises:
        CheckpointError: it is none, or was cut off.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, FileTensor] = {}
        try:
            with open(path, "rb") as file:
                said = int.from_bytes(file.read(8), "little")
                size = os.fstat(file.fileno()).st_size
                header = file.read(said) if said <= min(_HEADER_MOST, size - 8) else b""
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        if not header:
            raise self._fault(f"its first bytes are of no header that {size} bytes could have")
        self._begin, self._bytes = 8 + said, size - 8 - said
        try:
            for name, raw in msgspec.json.decode(header, type=dict[str, msgspec.Raw]).items():
                if name == "__metadata__":
                    self.metadata = msgspec.json.decode(raw, type=dict[str, str])
                else:
                    self.tensors[name] = msgspec.json.decode(raw, type=FileTensor)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self._fault(f"its header cannot be read: {error}") from error
        self._check()

    def _fault(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} was cut off, or is no file of safetensors: {reason}")

    def _check(self) -> None:
        """Checks that every tensor lies in the file, and no two over each other: only their dtypes are anybody's."""
        end = 0
        for name, tensor in sorted(self.tensors.items(), key=lambda item: item[1].data_offsets):
            first, last = tensor.data_offsets
            if first != end or last < first:
                raise self._fault(f"{name} begins at byte {first} and ends at {last}, what is before it ends at {end}")
            width = {"F32": 4, "F16": 2, "BF16": 2}.get(tensor.dtype)
            if width is not None and last - first != width * prod(tensor.shape):
                raise self._fault(f"{name}, {tensor.dtype} of shape {tensor.shape}, has {last - first} bytes")
            end = last
        if end != self._bytes:
            raise self._fault(f"its tensors have {end} bytes, behind the header there are {self._bytes}")

    def rows_of(self, name: str) -> Bytes:
        """Returns the rows of a tensor: (rows, bytes of a row) uint8, mapped."""
        tensor = self.tensors[name]
        first, last = tensor.data_offsets
        rows = tensor.shape[0] if tensor.shape else 1
        if first == last:
            return np.empty((rows, 0), np.uint8)
        mapped = np.memmap(self._path, np.uint8, "r", offset=self._begin + first, shape=(last - first,))
        return mapped.reshape(rows, -1)
