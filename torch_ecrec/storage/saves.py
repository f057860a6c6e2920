"""Prioritised saves: some rows of every slot after one step, on top of a checkpoint. They are no checkpoints.

    URL/000000000100-a1-1/manifest.json     a checkpoint, of step 100
    URL/saves/000000000112-a1-2/save.json   slot-00000 ...     some rows after step 112, on the one above
    URL/saves/000000000125-a1-3/slot-00000                     interrupted

A slot that was lost beyond repair takes each row from the newest of them that has it, else from the checkpoint
(`restoring.records_of`). Nothing else reads them: they have another place and another name than what `Catalog` lists,
and another form than it reads, without the dense model. So no restore takes one for a step of the job.

Durable, hashed and written last as a checkpoint's manifest is. Which of them count, the cluster knows
(`coordinator/saving.py`); what lies here may be of steps that were taken back. When the cluster has ended nobody knows
that any more, so those of a run that is over can never be used again, and go.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct

import torch_ecrec
from torch_ecrec.errors import CheckpointError
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import FOLDER, Count, Encoding, Figure, Folder, PartEntry, encode, job_of, read_as
from torch_ecrec.storage.parts import PartReader

SAVES = "saves"  # below the checkpoints' URL
MANIFEST = "save.json"
_FOLDER = re.compile(FOLDER)


class Save(Struct, frozen=True, forbid_unknown_fields=True):
    """What a prioritised save is: a manifest.

    Attributes:
        id: its folder.
        done: steps of training until then. `step`: the protocol's number of the last of them.
        base: the checkpoint that it is on.
        job: `JobSpec.to_json`.
        parts: its files, none with a part of the dense model.
        encoding, written_s, version: as in `Manifest`.
    """

    id: Folder
    done: Count
    step: Count
    base: Folder
    job: dict[str, Any]
    parts: Annotated[list[PartEntry], Meta(min_length=1)]
    encoding: Encoding
    written_s: Figure
    version: Annotated[str, Meta(max_length=100)] = torch_ecrec.__version__

    def __post_init__(self) -> None:
        slabs = len(self.spec.slabs)  # raises ValueError, which msgspec makes a ValidationError
        names = [part.name for part in self.parts]
        wrong = {
            "two parts have one name": len(set(names)) != len(names),
            f"a part is the manifest, {MANIFEST}": MANIFEST in names,
            f"a part has not {slabs} slabs, as the job has": any(len(part.rows) != slabs for part in self.parts),
            "a part has some of the dense model": any(part.dense for part in self.parts),
            "its name says another step": int(self.id[:12]) != self.done,
        }
        for reason, holds in wrong.items():
            if holds:
                raise ValueError(reason)

    @property
    def spec(self) -> JobSpec:
        """The job. Raises ValueError if it is none."""
        return job_of(self.job)

    @property
    def bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """Rows in all parts together."""
        return sum(sum(part.rows) for part in self.parts)


@dataclass
class SavesListing:
    """What lies there.

    Attributes:
        whole: saves with a manifest that can be read, in the order of their names.
        broken: names of those with another one, and why.
        unfinished: names of those that have none.
    """

    whole: list[Save] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)


class Saves:
    """The prioritised saves at a URL.

    Args:
        location: the URL, of the checkpoints.
    """

    def __init__(self, location: Location) -> None:
        self.location, self._place = location.below(SAVES), location

    @property
    def elsewhere(self) -> bool:
        """All of them are a link to what lies elsewhere, which is somebody else's."""
        return self._place.is_link(SAVES)

    def folder(self, name: str) -> Location:
        """Where the files of one are."""
        if not _FOLDER.match(name):
            raise CheckpointError(f"{name!r} is no name of a prioritised save")
        return self.location.below(name)

    def commit(self, save: Save) -> None:
        """Makes a save of a folder whose parts are durable.

        Raises:
            CheckpointError: a part is not there or has another size, or the manifest could not be written.
        """
        at = self.folder(save.id)
        for part in save.parts:
            size = at.size(part.name)
            if size != part.bytes:
                raise CheckpointError(f"{at.url}/{part.name} has {size} bytes, {part.bytes} were written")
        at.write_whole(MANIFEST, encode(save))

    def names(self) -> list[str]:
        """Returns the names of all saves that lie there, interrupted ones too."""
        return [name for name in self.location.list() if _FOLDER.match(name)]

    def read(self, name: str) -> Save:
        """One's manifest. Raises CheckpointError: it is not there, was altered, or is another's."""
        at = self.folder(name)
        save = read_as(Save, at, MANIFEST)
        if save.id != name:
            raise CheckpointError(f"{at.url} has the manifest of {save.id}: give the folder its name back")
        return save

    def listing(self) -> SavesListing:
        """Looks at all that lie there. Raises CheckpointError if the URL cannot be read."""
        listing = SavesListing()
        for name in sorted(self.names()):
            try:
                if self.folder(name).exists(MANIFEST):
                    listing.whole.append(self.read(name))
                else:
                    listing.unfinished.append(name)
            except CheckpointError as error:
                if not self.folder(name).gone(error, MANIFEST):
                    listing.broken[name] = str(error)
        return listing

    def faults(self, save: Save) -> list[str]:
        """Reads every file of one; what is wrong with each that is not as it was written."""
        at, found = self.folder(save.id), []
        schemas = [slab.schema for slab in save.spec.slabs]
        for part in save.parts:
            try:
                PartReader(at, part, schemas).check()
            except CheckpointError as error:
                found.append(str(error))
        return found

    def on(self, base: str, names: list[str]) -> list[Save]:
        """Some, in the order of their names; all must be on that checkpoint and of its model.

        Raises:
            CheckpointError: one is not, or cannot be read.
        """
        found = [self.read(name) for name in names]
        for save in found:
            if save.base != base:
                raise CheckpointError(f"{self.folder(save.id).url} is on {save.base}, not on {base}")
        return found

    def remove(self, name: str) -> None:
        """Its manifest first. One that is not there is no error; of a link, what it stands for stays."""
        if not self.location.is_link(name):
            self.folder(name).remove(MANIFEST)
        self.location.remove(name)

    def clean(self, unused: Callable[[str], bool]) -> list[str]:
        """Removes those, interrupted ones too, that nobody can use any more.

        Args:
            unused: says of a name whether it is one.

        Returns:
            Their names.
        """
        gone = [name for name in self.names() if unused(name)]
        for name in gone:
            self.remove(name)
        return gone

    def remove_on(self, base: str) -> list[str]:
        """Removes those on a checkpoint that is gone; returns their names. None of what lies elsewhere."""
        if self.elsewhere:
            return []
        gone = [save.id for save in self.listing().whole if save.base == base]
        for name in gone:
            self.remove(name)
        return gone
