"""All checkpoints at one URL: what is there, what is newest, what builds on what, what is kept, what is removed.

    URL/000000000100-a1-1/manifest.json  slot-0000.part ...     full, at step 100
    URL/000000000200-a1-2/manifest.json  ...                    incremental, builds on the one above
    URL/000000000300-a1-3/slot-0000.part                        interrupted: no manifest, so no checkpoint

Invariants
- A checkpoint is there from the moment its manifest is, and not before; the manifest is written after all its parts are
  durable, and looked for by nothing but its name.
- Removing begins with the manifest, so that what a crash leaves of it is an interrupted one.
- Nothing that a kept checkpoint builds on is removed; nothing is touched whose name no checkpoint has. What cannot be
  read may build on anything: while that may be so of one that is kept, nothing is removed.

One process commits, removes and cleans at a URL at a time: the coordinator. Any may read meanwhile: what it reads may
be removed under its hands, which is an error that names the file, never other data.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.storage.listing import Listing, is_name, list_all
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import ADVICE, MANIFEST, Manifest, Note, decode, encode, read, require_parts
from torch_ecrec.storage.parts import PartReader

log = logging.getLogger(__name__)

NEWEST = "newest"  # in place of a URL: of the checkpoints that a cluster keeps itself
CHAIN_MOST = 10_000  # checkpoints that build on each other
UNREAD_ORDERS = 1 << 20  # left out for those whose manifests cannot be read: more than were ever committed after one


@dataclass(frozen=True)
class Checked:
    """One file was read. `fault`: what is wrong with it, "" if nothing is."""

    checkpoint: str
    name: str
    bytes: int
    fault: str


def place_of(wanted: str, url: str) -> tuple[str, int | None]:
    """Returns where a checkpoint is that a cluster is to begin with, and its step; None: the newest there.

    Args:
        wanted: URL, URL@STEP, or `NEWEST`: the newest at `url`; "": none.
        url: where the cluster keeps checkpoints of its own; "" if it keeps none.

    Raises:
        ValueError: the newest of no place.
    """
    if wanted == NEWEST:
        if not url:
            raise ValueError("the newest checkpoint of what? `--restore newest` goes with `--checkpoint URL`")
        return url, None
    place, _, text = wanted.rpartition("@")
    return (place, int(text)) if place and text.isdecimal() else (wanted, None)


class Catalog:
    """Checkpoints at a URL.

    Args:
        url: a folder, or what fsspec knows; need not be there yet.

    Raises:
        CheckpointError: fsspec does not know it.
    """

    def __init__(self, url: str) -> None:
        self.url, self.location = url, Location(url)

    # writing --------------------------------------------------------------------------------------

    def new_folder(self, done: int) -> str:
        """Returns a name for an attempt at a checkpoint after `done` steps of training: no other attempt has it."""
        require_int("done", done, 0, 10**12 - 1)
        return f"{done:012d}-{secrets.token_hex(6)}"

    def folder(self, name: str) -> Location:
        """Returns where the files of one checkpoint are."""
        if not is_name(name):
            raise CheckpointError(f"{name!r} is no name of a checkpoint: wanted is STEP-WORD, as `new_folder` makes it")
        return self.location.below(name)

    def commit(self, folder: str, manifest: Manifest) -> Manifest:
        """Makes a checkpoint of a folder whose parts are durable: writes its manifest, last and as a whole.

        Returns:
            The manifest as it is kept, with its `order`.

        Raises:
            CheckpointError: a part is not there or has another size, or the base is no checkpoint; nothing was written.
                Or the manifest could not be written: no checkpoint has come of it.
        """
        if manifest.id != folder or manifest.file != MANIFEST:
            raise CheckpointError(f"the manifest is of {manifest.id}, {manifest.kind}, not of checkpoint {folder}")
        at, found = self.folder(folder), self.listing()
        if at.exists(MANIFEST):
            raise CheckpointError(f"{at.url} is a checkpoint already: every attempt has a folder of its own")
        require_parts(at, manifest)
        if manifest.base is not None and manifest.base not in {one.id for one in found.whole}:
            raise CheckpointError(
                f"{folder} builds on {manifest.base}, which is no checkpoint at {self.url} (any more)"
            )
        order = 1 + max((one.order for one in found.whole), default=-1) + (UNREAD_ORDERS if found.broken else 0)
        data = encode(msgspec.structs.replace(manifest, order=order))
        kept = decode(data, f"{at.url}/{MANIFEST}")  # what cannot be read is not written
        at.write_whole(MANIFEST, data)
        if manifest.base is not None and not self.folder(manifest.base).exists(MANIFEST):  # `--remove`, meanwhile
            at.remove(MANIFEST)
            raise CheckpointError(f"{folder} builds on {manifest.base}, which was removed meanwhile")
        return kept

    # what is there --------------------------------------------------------------------------------

    def listing(self) -> Listing:
        """Returns all that is there, what was committed last first.

        Raises:
            CheckpointError: the URL cannot be read; StoreUnavailable: it never stood still.
        """
        listing = list_all(self.location, MANIFEST, self.read)
        listing.whole.sort(key=lambda one: (one.order, one.done, one.id), reverse=True)
        return listing

    def read(self, name: str) -> Manifest:
        """Returns one checkpoint's manifest. Raises CheckpointError: it is not there, was altered, or is another's."""
        return read(self.folder(name), name, MANIFEST)

    def checkpoints(self) -> list[Manifest]:
        """Returns the manifests that can be read, newest first: in the order in which they were committed, whatever
        their steps."""
        return self.listing().whole

    def newest(self, listing: Listing | None = None) -> Manifest:
        """Returns the checkpoint that was committed last. One that was altered is passed over, as the log says.

        Args:
            listing: what is there, where that is known.

        Raises:
            CheckpointError: there is none; StoreUnavailable: one cannot be read just now, which may be the newest.
        """
        listing = self.listing() if listing is None else listing
        if not listing.whole:
            broken = "".join(f"; {one.reason}" for one in listing.broken)
            kind = StoreUnavailable if any(one.unavailable for one in listing.broken) else CheckpointError
            raise kind(f"there is no checkpoint at {self.url}{broken}; name another place")
        for one in listing.broken:
            if one.unavailable:
                raise StoreUnavailable(
                    f"which checkpoint at {self.url} is the newest cannot be said: {one.reason}; or name a step"
                )
            log.warning("checkpoint %s is passed over: %s", one.folder, one.reason)
        return listing.whole[0]

    def wanted(self, step: int | None) -> Manifest:
        """Returns the checkpoint of a step, or, without one, the newest. Raises CheckpointError if there is none."""
        return self.newest() if step is None else self.at(step)

    def at(self, step: int) -> Manifest:
        """Returns the newest checkpoint after so many steps of training. One that was altered is passed over, as the
        log says. Raises CheckpointError if there is none; StoreUnavailable: one of that step cannot be read just now.
        """
        listing = self.listing()
        of_step = Listing(
            [one for one in listing.whole if one.done == step],
            [one for one in listing.broken if int(one.folder[:12]) == step],
        )
        if of_step.whole:
            return self.newest(of_step)
        steps = ", ".join(str(step) for step in sorted({one.done for one in listing.whole})) or "none"
        broken = "".join(f"; {one.reason}" for one in of_step.broken)
        kind = StoreUnavailable if any(one.unavailable for one in of_step.broken) else CheckpointError
        raise kind(f"there is no checkpoint of step {step} at {self.url}{broken}; there are: {steps}")

    def chain(self, manifest: Manifest) -> list[Manifest]:
        """Returns the checkpoints that one builds on, the full one first, and that one itself last.

        Raises:
            CheckpointError: one of them is missing or cannot be read, or is of another model.
        """
        chain = [manifest]
        while (base := chain[-1].base) is not None:
            if len(chain) > CHAIN_MOST or base in {one.id for one in chain}:
                raise CheckpointError(f"{manifest.id} builds on itself, by way of {base}; {ADVICE}")
            at = self.folder(base)
            if not at.exists(MANIFEST):
                raise CheckpointError(
                    f"{chain[-1].id} builds on {base}, which is not at {self.url} (any more): restore a checkpoint that"
                    " does not, or bring the folder back"
                )
            chain.append(self.read(base))
            if chain[-1].spec.table_groups != manifest.spec.table_groups:
                raise CheckpointError(f"{manifest.id} builds on {base}, which is of another model; {ADVICE}")
        return chain[::-1]

    def inexact(self, manifest: Manifest) -> list[Note]:
        """Returns why a checkpoint is not what an undisturbed run would have written: what had happened to its run, and
        that weights were rounded as they were written.

        Raises:
            CheckpointError: as `chain`.
        """
        bits = sorted({one.encoding.bits for one in self.chain(manifest)} - {0})
        rounded = f"weights are those of checkpoint {manifest.id}, rounded to {', '.join(map(str, bits))} bits"
        return [*manifest.inexact, *([(manifest.done, rounded)] if bits else [])]

    # removing -------------------------------------------------------------------------------------

    def keep(
        self, count: int, concerns: Callable[[str], bool] = lambda name: True, listing: Listing | None = None
    ) -> list[str]:
        """Removes all but the newest ones and what these build on.

        Args:
            count: so many newest ones are kept, at least 1.
            concerns: of a name, whether it counts among them. Others stay.
            listing: what is there, where that is known.

        Returns:
            The names of those that were removed. Broken ones are never: somebody may repair them.

        Raises:
            CheckpointError: a manifest cannot be read that may say what a kept checkpoint builds on; nothing was
                removed.
        """
        require_int("count", count, 1)
        listing = self.listing() if listing is None else listing
        whole = listing.whole
        ours = [one.id for one in whole if concerns(one.id)]
        kept = self._with_bases(whole, [*ours[:count], *(one.id for one in whole if not concerns(one.id))])
        for one in listing.broken:
            if one.folder in kept or (one.unavailable and concerns(one.folder)):
                kind = StoreUnavailable if one.unavailable else CheckpointError
                raise kind(f"what {one.folder} builds on is not known, and nothing was removed: {one.reason}")
        gone = [name for name in ours if name not in kept]  # newest first: nothing loses its base
        for name in gone:
            self._remove(name)
        return gone

    def remove(self, name: str) -> None:
        """Removes one checkpoint, or what an interrupted attempt has left.

        Raises CheckpointError where others build on it, or may, or there is none.
        """
        listing = self.listing()
        whole = listing.whole
        if name not in {*(one.id for one in whole), *listing.unfinished}:
            raise CheckpointError(f"there is no checkpoint {name} at {self.url}")
        above = [one.id for one in whole if one.id != name and name in self._with_bases(whole, [one.id])]
        if above:
            raise CheckpointError(f"{name} is what {', '.join(above)} build on: remove these first")
        below = self._with_bases(whole, [one.id for one in whole if one.id != name])
        for one in listing.broken:
            if one.folder in below or one.unavailable:
                raise CheckpointError(
                    f"{name} may be what {one.folder} builds on, whose manifest cannot be read: {one.reason}"
                )
        self._remove(name)

    def clean(self, stays: Callable[[str], bool] = lambda name: False, listing: Listing | None = None) -> list[str]:
        """Removes what interrupted attempts have left: folders that have the name of a checkpoint and no manifest.

        Args:
            stays: of a name, whether it may be an attempt that is under way, which must stay.
            listing: what is there, where that is known.

        Returns:
            The names of those that were removed.
        """
        listing = self.listing() if listing is None else listing
        gone = [name for name in listing.unfinished if not stays(name)]
        for name in gone:
            self.location.remove(name)
        return gone

    def _remove(self, name: str) -> None:
        if not self.location.is_link(name):  # what it stands for is somebody else's
            self.location.below(name).remove(MANIFEST)
        self.location.remove(name)

    @staticmethod
    def _with_bases(whole: list[Manifest], names: list[str]) -> set[str]:
        bases = {one.id: one.base for one in whole}
        kept: set[str] = set()
        for name in names:
            while name not in kept:
                kept.add(name)
                base = bases.get(name)
                if base is None:
                    break
                name = base
        return kept

    # checking -------------------------------------------------------------------------------------

    def verify(self, manifest: Manifest) -> Iterator[Checked]:
        """Reads all that a checkpoint consists of, with what it builds on, and checks every block.

        Yields:
            After each file, what was found; faults do not end it. That every row is there is for
            `chain_reader.check_rows` to say.

        Raises:
            CheckpointError: the chain is not whole.
        """
        for one in self.chain(manifest):
            at = self.folder(one.id)
            schemas = [table_group.schema for table_group in one.spec.table_groups]
            for part in one.parts:
                fault = ""
                try:
                    PartReader(at, part, schemas).check()
                except CheckpointError as error:
                    fault = str(error)
                yield Checked(one.id, part.name, part.bytes, fault)
