"""The checkpoints at one place: which there are, what they build on, and which of them go.

catalog = Catalog("s3://bucket/run")
for manifest in catalog.manifests(): ...        # newest first
catalog.chain(catalog.find())                   # the newest: the full one, then what builds on it, up to it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch_ecrec.errors import CheckpointError
from torch_ecrec.storage import manifest as manifests
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import MANIFEST, Manifest
from torch_ecrec.storage.parts import PartReader


@dataclass(frozen=True)
class Broken:
    """A folder whose manifest cannot be read. `reason`: for people."""

    folder: str
    reason: str


class Catalog:
    """Checkpoints below a URL.

    Args:
        url: see `Location`.

    Raises:
        CheckpointError: there is no such kind of place.
    """

    def __init__(self, url: str) -> None:
        self.location = Location(url)

    # looking ------------------------------------------------------------------------------------

    def entries(self) -> list[Manifest | Broken]:
        """All that have a manifest, newest first; those whose manifest cannot be read among them.

        Raises:
            CheckpointError: the place cannot be read.
        """
        found: list[Manifest | Broken] = []
        for folder in reversed(self.location.names()):
            if MANIFEST in self.location.names(folder):
                try:
                    found.append(self.read(folder))
                except CheckpointError as error:
                    found.append(Broken(folder, str(error)))
        return found

    def manifests(self) -> list[Manifest]:
        """Those that can be read, newest first."""
        found = [entry for entry in self.entries() if isinstance(entry, Manifest)]
        return sorted(found, key=lambda one: (one.done, one.written_s), reverse=True)

    def read(self, folder: str) -> Manifest:
        """One manifest. Raises CheckpointError: it is not there, is altered, or is another's."""
        where = f"{self.location.url}/{folder}/{MANIFEST}"
        found = manifests.decode(self.location.read(f"{folder}/{MANIFEST}"), where)
        if found.folder != folder:
            raise CheckpointError(f"{where}: the manifest of {found.folder}: the folder was renamed or copied")
        return found

    def find(self, step: int | None = None) -> Manifest:
        """The newest checkpoint, or the newest of a step of training.

        Raises:
            CheckpointError: there is none; it says which there are.
        """
        there = self.manifests()
        found = next((one for one in there if step in (None, one.done)), None)
        if found is None:
            steps = ", ".join(str(one.done) for one in there) or "none"
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise CheckpointError(f"{self.location.url}: {wanted} is not there; there are: {steps}")
        return found

    def chain(self, newest: Manifest) -> list[Manifest]:
        """What has to be read for a checkpoint: the full one, then what builds on it, up to this one.

        Raises:
            CheckpointError: one of them is not there, is altered, or is of another job.
        """
        found = [newest]
        while found[0].base is not None:
            base = self.read(found[0].base)
            if base.spec.digest != newest.spec.digest or base.done >= found[0].done:
                raise CheckpointError(f"{found[0].folder} builds on {base.folder}, which is no earlier step of its job")
            found.insert(0, base)
        return found

    def verify(self, one: Manifest) -> Iterator[str]:
        """Reads all files of a checkpoint (not of those that it builds on).

        Yields:
            What is wrong, for people; nothing if it is whole.
        """
        schemas = [slab.schema for slab in one.spec.slabs]
        for part in one.parts:
            try:
                for _ in PartReader(self.location, one.folder, part, schemas).blocks():
                    pass
            except CheckpointError as error:
                yield str(error)

    # changing -----------------------------------------------------------------------------------

    def commit(self, manifest: Manifest) -> None:
        """All parts are durable: from now on it is a checkpoint. Raises CheckpointError."""
        with self.location.writing(f"{manifest.folder}/{MANIFEST}") as file:
            file.write(manifests.encode(manifest))

    def keep(self, newest: int) -> list[str]:
        """Removes all but so many of the newest, and what these build on; returns what it has removed.

        Raises:
            CheckpointError: something cannot be removed.
        """
        there = self.manifests()
        wanted = {one.folder for one in there[:newest]}
        by_name = {one.folder: one for one in there}
        for one in there[:newest]:
            base = one.base
            while base is not None and base in by_name:
                wanted.add(base)
                base = by_name[base].base
        return self._remove([one.folder for one in there if one.folder not in wanted])

    def remove(self, step: int) -> list[str]:
        """Removes the checkpoints of a step. Raises CheckpointError: there is none, or others build on it."""
        there = self.manifests()
        folders = [one.folder for one in there if one.done == step]
        if not folders:
            self.find(step)
        for one in there:
            if one.base in folders:
                raise CheckpointError(f"the checkpoint of step {one.done} builds on that of step {step}: it stays")
        return self._remove(folders)

    def clean(self, run: str) -> list[str]:
        """Removes what attempts of other runs have left that never became checkpoints. `run`: that goes on.

        Raises:
            CheckpointError: something cannot be removed.
        """
        left = [
            folder
            for folder in self.location.names()
            if _is_ours(folder) and f"-{run}-" not in folder and MANIFEST not in self.location.names(folder)
        ]
        return self._remove(left)

    def _remove(self, folders: Sequence[str]) -> list[str]:
        for folder in folders:
            self.location.remove_file(f"{folder}/{MANIFEST}")  # first: what is left is no checkpoint
            self.location.remove(folder)
        return list(folders)


def _is_ours(folder: str) -> bool:
    """Whether a folder is named as checkpoints are: nobody else's is ever removed."""
    step, *rest = folder.split("-")
    return len(step) == 12 and step.isdigit() and len(rest) == 2
