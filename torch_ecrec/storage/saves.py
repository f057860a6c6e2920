"""Prioritised saves: some rows of every slot after one step, on top of a checkpoint. They are no checkpoints.

    URL/000000000100-a1-1/manifest.json     a checkpoint, of step 100
    URL/saves/000000000112-a1-2/save.json   slot-00000 ...     some rows after step 112, on the one above
    URL/saves/000000000125-a1-3/slot-00000                     interrupted

A slot that was lost beyond repair takes each row from the newest of them that has it, else from the checkpoint
(`chain_reader.records_of`). Nothing else reads them: they have another place and another name than what `Catalog`
lists, and are of a kind that it refuses, without the dense model. So no restore takes one for a step of the job.

Durable, hashed and written last as a checkpoint's manifest is. Which of them count, the cluster knows
(`coordinator/saving.py`); what lies here may be of steps that were taken back. When the cluster has ended nobody knows
that any more, so those of a run that is over can never be used again, and go.
"""

from __future__ import annotations

from collections.abc import Callable

from torch_ecrec.errors import CheckpointError
from torch_ecrec.storage.listing import Listing, is_name, list_all
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import SAVE, Manifest, encode, read, require_parts
from torch_ecrec.storage.parts import PartReader

SAVES = "saves"  # below the checkpoints' URL


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
        """Returns where the files of one are."""
        if not is_name(name):
            raise CheckpointError(f"{name!r} is no name of a prioritised save")
        return self.location.below(name)

    def commit(self, save: Manifest) -> None:
        """Makes a save of a folder whose parts are durable.

        Raises:
            CheckpointError: a part is not there or has another size, or the manifest could not be written.
        """
        at = self.folder(save.id)
        require_parts(at, save)
        at.write_whole(SAVE, encode(save))

    def names(self) -> list[str]:
        """Returns the names of all saves that lie there, interrupted ones too."""
        return [name for name in self.location.list() if is_name(name)]

    def read(self, name: str) -> Manifest:
        """One's manifest. Raises CheckpointError: it is not there, was altered, or is another's."""
        return read(self.folder(name), name, SAVE)

    def listing(self) -> Listing:
        """Returns all that lie there, in the order of their names. Raises as `Catalog.listing`."""
        listing = list_all(self.location, SAVE, self.read)
        listing.whole.sort(key=lambda one: one.id)
        return listing

    def faults(self, save: Manifest) -> list[str]:
        """Reads every file of one; what is wrong with each that is not as it was written."""
        at, found = self.folder(save.id), []
        schemas = [table_group.schema for table_group in save.spec.table_groups]
        for part in save.parts:
            try:
                PartReader(at, part, schemas).check()
            except CheckpointError as error:
                found.append(str(error))
        return found

    def on(self, base: str, names: list[str]) -> list[Manifest]:
        """Returns some saves, in the order of their names; all must be on that checkpoint and of its model.

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
            self.folder(name).remove(SAVE)
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
