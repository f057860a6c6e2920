"""Reads `.metadata` of a folder of `torch.distributed.checkpoint` (DCP) without running code in it.

The file is a pickle, and a pickle names functions that are called as it is read. Here it may name what DCP itself
writes (`ALLOWED`, `DCP_PICKLES`), and nothing else: `torch.load(weights_only=True)` has the same rule for tensors.
"""

from __future__ import annotations

import enum
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ecrec.compat.python import PATHLIB
from torch_ecrec.compat.torch import DCP_PICKLES
from torch_ecrec.errors import CheckpointError

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
    },
    "torch": {"Size", *(name for name, one in vars(torch).items() if isinstance(one, torch.dtype))},
    "pathlib": {"PosixPath", "PurePosixPath"},
    PATHLIB: {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""By module: what a `.metadata` may name, beside `DCP_PICKLES`."""


class _Reader(pickle.Unpickler):
    """An unpickler that builds the listed classes only. Raises CheckpointError if another one is named."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.0 to 3.11.3 write members of an enumeration
            return _member
        if name not in ALLOWED.get(module, ()) and name not in DCP_PICKLES.get(module, ()):
            raise CheckpointError(f"its .metadata names {module}.{name}, which DCP never writes: nothing was run")
        if module == PATHLIB:
            module = "pathlib"
        return super().find_class(module, name)


def _member(of: object, name: object) -> Any:
    """Returns a member of an enumeration by its name, and no other attribute of anything."""
    if not isinstance(of, enum.EnumMeta) or name not in of.__members__:
        raise CheckpointError(f"its .metadata asks for {name!r} of {of!r}, which DCP never writes: nothing was run")
    return of.__members__[str(name)]


def read_metadata(folder: Path) -> Metadata:
    """Reads the metadata of a folder of DCP.

    Raises:
        CheckpointError: it is no folder of DCP, or names what DCP never writes.
    """
    try:
        with open(folder / ".metadata", "rb") as file:
            found = _Reader(file).load()
    except Exception as error:  # a malformed, truncated or malicious pickle may raise anything
        raise CheckpointError(f"{folder} is no folder of torch.distributed.checkpoint: {error}") from error
    if not isinstance(found, Metadata):
        raise CheckpointError(
            f"{folder} is no folder of torch.distributed.checkpoint: its .metadata is a {type(found)}"
        )
    return found


def place_within(folder: Path, said: object) -> Path:
    """Returns the path of a file named in the metadata. Raises CheckpointError if it is not in the folder."""
    if not isinstance(said, str) or PurePath(said).is_absolute() or ".." in PurePath(said).parts:
        raise CheckpointError(f"{folder}: its metadata has {said!r} for a file, which is not in the folder")
    return folder / said
