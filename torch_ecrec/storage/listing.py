"""Lists the folders at a place that have a manifest: checkpoints, or prioritised saves. Others write and remove there.

A cluster may write one and remove the one before between a look at the names and a look into the folders: neither would
be found, and what is without a manifest may have had one. So it looks again, until all that are without one were so at
the look before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from torch_ecrec.errors import CheckpointError, StoreUnavailable
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import FOLDER, Manifest

_FOLDER = re.compile(FOLDER)
LOOKS = 20  # at a place where folders come and go meanwhile


@dataclass(frozen=True)
class Broken:
    """A folder whose manifest cannot be read: which, and why. `unavailable`: it may be whole (`StoreUnavailable`)."""

    folder: str
    reason: str
    unavailable: bool = False


@dataclass
class Listing:
    """Lists what is at a place.

    Attributes:
        whole: those with a manifest that can be read, as `Catalog` and `Saves` order them.
        broken: those with another one.
        unfinished: folders of attempts that have none.
    """

    whole: list[Manifest] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def is_name(name: str) -> bool:
    """Returns whether a folder has the name of a checkpoint or of a save."""
    return _FOLDER.match(name) is not None


def list_all(location: Location, file: str, read: Callable[[str], Manifest]) -> Listing:
    """Looks at every folder that has the name of a checkpoint or of a save, in no order.

    Args:
        location: where.
        file: the manifest's name.
        read: the manifest of a name.

    Raises:
        CheckpointError: the place cannot be read; StoreUnavailable: it never stood still.
    """
    known: dict[str, Manifest] = {}
    before: set[str] = set()
    for _ in range(LOOKS):
        listing, gone = _look(location, file, read, known)
        if not gone and before.issuperset(listing.unfinished):
            return listing
        before = set(listing.unfinished)
    raise StoreUnavailable(
        f"checkpoints at {location.url} come and go faster than they can be listed: try again, or when nothing writes"
        " there"
    )


def _look(
    location: Location, file: str, read: Callable[[str], Manifest], known: dict[str, Manifest]
) -> tuple[Listing, bool]:
    """Looks once, and returns, too, whether one was removed while it was read. `known`: what was read."""
    listing, gone = Listing(), False
    for name in filter(is_name, location.list()):
        at = location.below(name)
        try:
            if at.exists(file):
                if name not in known:
                    known[name] = read(name)
                listing.whole.append(known[name])
            else:
                listing.unfinished.append(name)
        except CheckpointError as error:
            if at.gone(error, file):
                gone = True
                continue
            is_file = isinstance(error.__cause__, NotADirectoryError)  # however often it is read
            unavailable = isinstance(error, StoreUnavailable) and not is_file
            listing.broken.append(Broken(name, str(error), unavailable))
    return listing, gone
