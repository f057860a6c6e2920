"""What a checkpoint is: a small file of JSON, `manifest.json`, written last. A folder that has one is a checkpoint.
A prioritised save (`saves.py`) has the same, as `save.json`.

    {"format":1,"xxh3_128":"5d0c...","manifest":{"id":"000000000200-a1-7","order":3,"done":200,"kind":"incremental",
     "base":"000000000100-a1-3","job":{...},"parts":[{"name":"slot-0000.part","slot":0,"bytes":81234,...}],...}}

`id` is the folder's name, so that nothing but a folder is ever renamed or told apart. `order` grows from one checkpoint
of a place to the next: newest is what was written last, also where training went back to an earlier step and clocks
differ.

Invariants
- The hash is of the manifest's bytes, and the file is the one encoding of what it says: any other byte is refused.
- Every number, name and list is checked as it is read. Names of files are single words: no path leaves its folder.
- A number is compared with what is there before anything of its size is made: a file whose hash is right may say any.
- A newer format is refused by its number, before anything else of it is looked at; so an older program never guesses.
- What is not exact says so, and has the second format: a program that would not read that restores no such checkpoint.
- A save is never taken for a checkpoint, nor a checkpoint for a save: what a manifest says goes with its file's name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta, Struct

import torch_ecrec
from torch_ecrec.errors import CheckpointError
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.location import Location

FORMAT, NOT_EXACT = 1, 2  # formats: of what is exact, and of what is not
MANIFEST, SAVE = "manifest.json", "save.json"
MANIFEST_MOST = 1 << 28  # bytes, which are read at once; a thousand tables and slots make a few million
FOLDER = r"^[0-9]{12}-[A-Za-z0-9_-]{1,80}\Z"  # steps of training, then what tells attempts apart
BITS = (2, 3, 4, 8)

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Folder = Annotated[str, Meta(pattern=FOLDER)]
File = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Nonce = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Figure = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]  # since 1970: a later time no calendar has
Kind = Literal["full", "incremental", "save"]
NOTES_MOST, NOTE_MOST = 100, 200  # as of words of the protocol; characters
Note = tuple[Count, Annotated[str, Meta(max_length=NOTE_MOST)]]  # from which step on, and why


class Encoding(Struct, frozen=True, forbid_unknown_fields=True):
    """How records are written.

    Attributes:
        bits: of a weight, where rows are quantised (`records/quantised.py`); 0: weights are exact. Optimizer state is
            always exact.
        zstd: level of compression of every block, 1 (fast) to 22; 0: none.
    """

    bits: Literal[0, 2, 3, 4, 8] = 0
    zstd: Annotated[int, Meta(ge=0, le=22)] = 0

    @staticmethod
    def of(said: dict[str, Any]) -> Encoding:
        """Makes one of names and values. Raises ValueError for what is no encoding."""
        try:
            return msgspec.convert(said, Encoding)
        except msgspec.ValidationError as error:
            raise ValueError(f"encoding of checkpoints: {error}; it has `bits` (0, 2, 3, 4, 8) and `zstd`") from None


class TableError(Struct, frozen=True, forbid_unknown_fields=True):
    """Tells the error that quantisation made in the weights of a table in one part.

    Attributes:
        table: its name, or "table group N" of a writer that knows none.
        largest: absolute difference of a weight. `squares`: sum of all squared differences. `weights`: their number.
    """

    table: Annotated[str, Meta(min_length=1)]
    largest: Figure
    squares: Figure
    weights: Count

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return float((self.squares / self.weights) ** 0.5) if self.weights else 0.0


class DenseEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's part of the dense model in a file: which block it is, and where it begins and ends."""

    trainer: Count
    block: Count
    offset: Count
    bytes: Count


class PartEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint.

    Attributes:
        name: in the checkpoint's folder.
        slot: whose records, -1: of none.
        nonce: random bits of this very file, in its head; hashes depend on them.
        bytes: of the file. `blocks`: frames in it, with head and end.
        rows: of each table group.
        digest: of all hashes in the file, in their order.
        dense: parts of the dense model.
        errors: of quantisation, of each table with rows here.
    """

    name: File
    nonce: Nonce
    bytes: Count
    blocks: Count
    rows: list[Count]
    digest: Digest
    slot: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    dense: list[DenseEntry] = []
    errors: list[TableError] = []

    def __post_init__(self) -> None:
        if any(place.offset + place.bytes > self.bytes for place in self.dense):
            raise ValueError(f"{self.name} has parts of the dense model beyond its {self.bytes:,} bytes")

    @staticmethod
    def of(said: Any) -> PartEntry:
        """Makes one of builtins, as they come from another process. Raises CheckpointError for what is none."""
        try:
            return msgspec.convert(said, PartEntry)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"this describes no part of a checkpoint: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """As builtins; inverse of `of`."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a checkpoint, or a prioritised save: the file that makes it one.

    Attributes:
        id: of this one: its folder.
        done: steps of training until then. `step`: the protocol's number of the last of them.
        base: the checkpoint that it builds on; None: it is a full one.
        job: `JobSpec.to_json`: tables, optimizers, seed, trainers, code.
        parts: its files.
        encoding: of the records.
        written_s: when, in seconds since 1970.
        kind: "full" has every row; "incremental" has those that changed since `base`, and maybe others; "save" has some
            rows and nothing of the dense model, so it is no checkpoint. Manifests of saves did not always say it.
        order: more than any that was committed at its place before has; `Catalog.commit` sets it.
        began_with: the checkpoint that its run began with, if that was at the same place.
        version: of torch_ecrec that wrote it, for people.
        inexact: all that had made its run another than an undisturbed one until then, and every run that is restored
            from it.
    """

    id: Folder
    done: Count
    base: Folder | None
    job: dict[str, Any]
    parts: Annotated[list[PartEntry], Meta(min_length=1)]
    encoding: Encoding
    written_s: Seconds
    kind: Kind = "save"
    step: Count = 0
    order: Count = 0
    began_with: Folder | None = None
    version: Annotated[str, Meta(max_length=100)] = torch_ecrec.__version__
    inexact: Annotated[list[Note], Meta(max_length=NOTES_MOST)] = []

    def __post_init__(self) -> None:
        job = self.spec  # raises ValueError, which msgspec makes a ValidationError
        table_groups = len(job.table_groups)
        names = [part.name for part in self.parts]
        trainers = sorted(dense.trainer for part in self.parts for dense in part.dense)
        wanted = 0 if self.kind == "save" else job.trainers
        dense_of_each = len(trainers) == wanted and trainers == [*range(wanted)]
        wrong = {
            "all but a full checkpoint have a base, and a full one has none": (self.kind == "full")
            != (self.base is None),
            "it builds on itself": self.base == self.id,
            "two parts have one name": len(set(names)) != len(names),
            f"a part is the manifest, {self.file}": self.file in names,
            f"a part has not {table_groups} table groups, as the job has": any(
                len(part.rows) != table_groups for part in self.parts
            ),
            f"dense parts are of trainers {trainers}, {wanted} are wanted": not dense_of_each,
            "its name says another step": int(self.id[:12]) != self.done,
        }
        for reason, holds in wrong.items():
            if holds:
                raise ValueError(reason)

    @property
    def file(self) -> str:
        """The name of the file that this is written to."""
        return SAVE if self.kind == "save" else MANIFEST

    @property
    def format(self) -> int:
        """The format that it is written in."""
        return NOT_EXACT if self.inexact else FORMAT

    @property
    def spec(self) -> JobSpec:
        """The job. Raises ValueError if it is none."""
        try:
            return JobSpec.from_json(self.job)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"`job` is none: {type(error).__name__}: {error}") from None

    @property
    def bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return sum(sum(part.rows) for part in self.parts)

    @property
    def errors(self) -> dict[str, TableError]:
        """Returns the errors of quantisation over all parts, by table."""
        found: dict[str, TableError] = {}
        for error in (error for part in self.parts for error in part.errors):
            one = found.get(error.table, TableError(error.table, 0.0, 0.0, 0))
            largest, squares = max(one.largest, error.largest), one.squares + error.squares
            found[error.table] = TableError(error.table, largest, squares, one.weights + error.weights)
        return found


class _Envelope(Struct, forbid_unknown_fields=True):
    format: int
    xxh3_128: str
    manifest: msgspec.Raw


class _Version(Struct):
    """The version of a manifest, which any format has, also one that this program does not know."""

    format: int


def encode(manifest: Manifest) -> bytes:
    """Returns a manifest as the bytes of its file."""
    names = [name for name in manifest.__struct_fields__ if name != "inexact" or manifest.inexact]
    body = msgspec.json.encode({name: getattr(manifest, name) for name in names})
    return msgspec.json.encode(_Envelope(manifest.format, xxhash.xxh3_128_hexdigest(body), msgspec.Raw(body)))


def require_parts(at: Location, manifest: Manifest) -> None:
    """Raises CheckpointError unless each part is in a folder, with the size that was written."""
    for part in manifest.parts:
        size = at.size(part.name)
        if size != part.bytes:
            raise CheckpointError(f"{at.url}/{part.name} has {size} bytes, {part.bytes} were written")


def read(at: Location, name: str, file: str) -> Manifest:
    """Returns the manifest in a folder.

    Args:
        at: the folder.
        name: of the folder.
        file: `MANIFEST` of a checkpoint, `SAVE` of a prioritised save.

    Raises:
        CheckpointError: it cannot be read, is of the other kind, is another folder's, or as `decode`.
    """
    url, size = f"{at.url}/{file}", at.size(file)
    if size > MANIFEST_MOST:
        raise CheckpointError(f"{url} has {size:,} bytes, a manifest has {MANIFEST_MOST:,} at most; {ADVICE}")
    manifest = decode(at.read(file), url)
    if manifest.file != file:
        raise CheckpointError(f"{url} is no manifest of what belongs there: its kind is {manifest.kind}; {ADVICE}")
    if manifest.id != name:
        raise CheckpointError(f"{at.url} has the manifest of {manifest.id}: give the folder its name back")
    return manifest


def decode(data: bytes, name: str) -> Manifest:
    """Returns the manifest of which `encode` gave these bytes.

    Args:
        data: the bytes of a manifest's file.
        name: of the file, for errors.

    Raises:
        CheckpointError: it was cut off or altered, has a newer format, or is no manifest.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{name} was cut off or altered, or is no manifest: {error}; {ADVICE}") from error
    if version not in (FORMAT, NOT_EXACT):
        raise CheckpointError(
            f"{name} has format {version}, this program reads formats {FORMAT} and {NOT_EXACT}: use the program that"
            " wrote it, or a newer one"
        )
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        body = bytes(envelope.manifest)
        if xxhash.xxh3_128_hexdigest(body) != envelope.xxh3_128 or msgspec.json.encode(envelope) != data:
            raise CheckpointError(f"{name} was altered: its hash is another one; {ADVICE}")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{name} is no manifest of format {version}: {error}; {ADVICE}") from error
    if manifest.format != version:
        raise CheckpointError(f"{name} has format {version}, and what it says is of format {manifest.format}; {ADVICE}")
    return manifest


ADVICE = "restore another checkpoint: `torch-ecrec checkpoints URL` lists them"
