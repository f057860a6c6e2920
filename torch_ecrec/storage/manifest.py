"""What makes files a checkpoint: the manifest, written last.

It says of which step and job they are, what each must hold, and which checkpoint they build on. A folder without one is
what an interrupted attempt has left.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import xxhash
from msgspec import Meta, Struct

from torch_ecrec.errors import CheckpointError
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.parts import Encoding, PartEntry

FORMAT = 1
MANIFEST = "manifest.json"

Folder = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,100}\Z")]
Count = Annotated[int, Meta(ge=0)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint.

    Attributes:
        folder: its name, and that of its folder.
        done: steps of training until then. `step`: of the protocol, which is nothing outside of its run.
        base: the checkpoint that this one builds on; "" if it holds every record.
        job: what is trained, as `JobSpec.to_json`: tables, optimizers, seed, trainers; and the code, which is free at a
            restore.
        parts: one of each slot.
        written_s: seconds since 1970.
        version: of torch_ecrec.
    """

    folder: Folder
    done: Count
    step: Count
    base: Folder | None
    job: dict[str, Any]
    parts: list[PartEntry]
    encoding: Encoding
    written_s: float
    version: str
    format: int = FORMAT

    @property
    def spec(self) -> JobSpec:
        """What is trained."""
        return JobSpec.from_json(self.job)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Records in all parts."""
        return sum(sum(part.rows) for part in self.parts)


class _Sealed(Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest with the hash of its bytes."""

    format: int
    xxh3_128: str
    manifest: msgspec.Raw


class _Format(Struct):
    format: int


def encode(manifest: Manifest) -> bytes:
    """As JSON, with its hash."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Sealed(FORMAT, xxhash.xxh3_128(body).hexdigest(), msgspec.Raw(body)))


def decode(data: bytes, where: str) -> Manifest:
    """The manifest again. `where` it was read, for errors.

    Raises:
        CheckpointError: it is none, was altered, or is of a newer format.
    """
    try:
        form = msgspec.json.decode(data, type=_Format).format
        if form > FORMAT:
            raise CheckpointError(
                f"{where}: a checkpoint of format {form}, of a later version of torch_ecrec; this one reads {FORMAT}"
            )
        sealed = msgspec.json.decode(data, type=_Sealed)
        if xxhash.xxh3_128(bytes(sealed.manifest)).hexdigest() != sealed.xxh3_128:
            raise CheckpointError(f"{where}: the manifest is altered")
        found = msgspec.json.decode(sealed.manifest, type=Manifest)
        found.spec  # noqa: B018 - a job that cannot be is found here
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{where}: not a manifest: {error}") from None
    return found
