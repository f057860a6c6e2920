"""What is done at a place where others write, remove and are interrupted, at each call of the file system: it comes to
what was true at some moment, or to a clear error, and never to "nothing here" where there always was a checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from kept import Shelf

from torch_ecrec.cli.checkpoints import _as_text, _Found
from torch_ecrec.errors import CheckpointError
from torch_ecrec.storage import catalog as catalogs
from torch_ecrec.storage import chain_reader
from torch_ecrec.storage import listing as listings
from torch_ecrec.storage.catalog import Catalog
from torch_ecrec.storage.exporting import export
from torch_ecrec.storage.manifest import MANIFEST, Manifest
from torch_ecrec.storage.saves import Saves


class Watched:
    """A store, and what happens elsewhere before its calls."""

    def __init__(self, store: Any, call: Callable[[], None]) -> None:
        self._inner, self._call = store, call

    def below(self, folder: str) -> Watched:
        return Watched(self._inner.below(folder), self._call)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def called(*args: Any) -> Any:
            self._call()
            return method(*args)

        return called


class Place:
    """Checkpoints at a place, of which some come and go.

    Attributes:
        shelf: writes them.
        kept: by id, what each restores.
        at: actions, each before the call of that number of whoever looks; the first is 0.
        calls: so many were made.
        newest: all that were the newest at some moment.
        moments: all that were whole together, at each moment.
    """

    def __init__(self, url: str) -> None:
        self.shelf, self.calls = Shelf(url), 0
        self.kept: dict[str, list[Any]] = {}
        self.at: dict[int, Callable[[], None]] = {}
        self.moments: list[set[str]] = []
        self.newest: list[str] = []
        self.made = itertools.count(1)

    def prepared(self, base: Manifest | None = None) -> Manifest:
        """One whose parts are there, and not its manifest."""
        number = next(self.made)
        self.shelf.change(0, [number], number)
        found = self.shelf.parts(number, base, [[*range(number + 1)], []] if base else None)
        self.kept[found.id] = [truth.copy() for truth in self.shelf.truth]
        return found

    def commit(self, prepared: Manifest) -> Manifest:
        made = self.shelf.catalog.commit(prepared.id, prepared)
        self.note()
        return made

    def note(self) -> None:
        found = [one.id for one in self.shelf.catalog.checkpoints()]
        self.moments.append(set(found))
        self.newest += found[:1]

    def remove(self, name: str, all_of_it: bool = True) -> None:
        if all_of_it:
            self.shelf.catalog.remove(name)
        else:  # whoever removed it was killed then
            self.shelf.catalog.folder(name).remove(MANIFEST)
        self.note()

    def looker(self) -> Catalog:
        found = Catalog(self.shelf.catalog.url)
        found.location._store = Watched(found.location._store, self._call)  # type: ignore[assignment]
        return found

    def _call(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number in self.at:
            self.at.pop(number)()


Scene = Callable[[Place], list[Callable[[], None]]]


def next_comes(place: Place) -> list[Callable[[], None]]:
    place.commit(place.prepared())
    coming = place.prepared()
    return [lambda: void(place.commit(coming))]


def first_comes(place: Place) -> list[Callable[[], None]]:
    coming = place.prepared()
    place.note()
    return [lambda: void(place.commit(coming))]


def next_comes_and_the_one_before_goes(place: Place) -> list[Callable[[], None]]:
    first = place.commit(place.prepared())  # the other has a folder only then: whoever has the names has not that
    return [lambda: void(place.commit(place.prepared())), lambda: place.remove(first.id)]


def next_comes_and_the_one_before_half_goes(place: Place) -> list[Callable[[], None]]:
    first, coming = place.commit(place.prepared()), place.prepared()
    return [lambda: void(place.commit(coming)), lambda: place.remove(first.id, all_of_it=False)]


def newest_goes(place: Place) -> list[Callable[[], None]]:
    place.commit(place.prepared())
    last = place.commit(place.prepared())
    return [lambda: place.remove(last.id)]


def one_is_begun(place: Place) -> list[Callable[[], None]]:
    place.commit(place.prepared())
    return [lambda: void(place.prepared())]


def chain_is_replaced(place: Place) -> list[Callable[[], None]]:
    full = place.commit(place.prepared())
    above = place.commit(place.prepared(full))
    coming = place.prepared()

    def go() -> None:
        place.remove(above.id)
        place.remove(full.id)

    return [lambda: void(place.commit(coming)), go]


def all_but_the_newest_go(place: Place) -> list[Callable[[], None]]:
    """A cluster that keeps one only."""
    for _ in range(2):
        place.commit(place.prepared())

    def prune() -> None:
        place.shelf.catalog.keep(1)
        place.note()

    coming = place.prepared()
    return [lambda: void(place.commit(coming)), prune]


def void(_: object) -> None:
    pass


SCENES: list[Scene] = [
    next_comes,
    first_comes,
    next_comes_and_the_one_before_goes,
    next_comes_and_the_one_before_half_goes,
    newest_goes,
    one_is_begun,
    chain_is_replaced,
    all_but_the_newest_go,
]


def lists(place: Place, catalog: Catalog, folder: Path) -> None:
    listing = catalog.listing()
    whole = {one.id for one in listing.whole}
    assert not listing.broken
    always = set.intersection(*place.moments)
    assert always <= whole <= set.union(*place.moments) and not always & set(listing.unfinished)
    assert whole or set() in place.moments
    assert whole in place.moments, "true at some moment"


def finds_the_newest(place: Place, catalog: Catalog, folder: Path) -> None:
    assert catalog.newest().id in place.newest


def restores_the_newest(place: Place, catalog: Catalog, folder: Path) -> None:
    one = catalog.newest()
    found = [np.full_like(truth, 255) for truth in place.shelf.truth]
    for table_group, rows_N, records_NB in chain_reader.records_of(catalog, one):
        found[table_group][rows_N] = records_NB
    for mine, its in zip(found, place.kept[one.id], strict=True):
        np.testing.assert_array_equal(mine, its)


def verifies_the_newest(place: Place, catalog: Catalog, folder: Path) -> None:
    one = catalog.newest()
    faults = [checked.fault for checked in catalog.verify(one) if checked.fault]
    assert all("it is not there" in fault for fault in faults)
    assert not faults or one.id not in place.moments[-1]


def exports_the_newest(place: Place, catalog: Catalog, folder: Path) -> None:
    path = folder / f"{uuid.uuid4().hex}.safetensors"
    try:
        export(catalog, catalog.newest(), path)
    except CheckpointError:
        assert not path.exists()
        raise


def cleans(place: Place, catalog: Catalog, folder: Path) -> None:
    catalog.clean(lambda name: name in place.kept and name not in place.newest)
    place.note()


def removes_the_newest(place: Place, catalog: Catalog, folder: Path) -> None:
    """As `checkpoints --remove`, beside a cluster."""
    one = catalog.newest()
    catalog.remove(one.id)
    place.note()
    assert one.id not in {each.id for each in catalog.checkpoints()}


def prunes(place: Place, catalog: Catalog, folder: Path) -> None:
    catalog.keep(1)
    place.note()


def imports(place: Place, catalog: Catalog, folder: Path) -> None:
    coming = place.prepared()
    made = catalog.commit(coming.id, coming)
    place.note()
    assert catalog.read(made.id) == made


DOES = [lists, finds_the_newest, restores_the_newest, verifies_the_newest, exports_the_newest, cleans]
DOES += [removes_the_newest, prunes, imports]


def schedules(calls: int, actions: int) -> Iterator[tuple[int, ...]]:
    """Before which call each happens: of two the second at the same one, or somewhat later."""
    if actions == 1:
        yield from ((first,) for first in range(calls))
    else:
        yield from ((first, first + after) for first in range(min(calls, 9)) for after in (0, 2))


WITH_FILES = (newest_goes, next_comes_and_the_one_before_goes)  # each export is synced
PAIRS = [(scene, does) for scene in SCENES for does in DOES if does is not exports_the_newest or scene in WITH_FILES]


@pytest.mark.parametrize(("scene", "does"), PAIRS, ids=lambda one: one.__name__)
def test_each_call_while_checkpoints_come_and_go(
    scene: Scene, does: Callable[[Place, Catalog, Path], None], tmp_path: Path
) -> None:
    def run(schedule: tuple[int, ...] | None) -> int:
        name = uuid.uuid4().hex
        place = Place(f"memory://{name}/k")  # on a disk each would be synced
        actions = scene(place)
        for number, action in zip(schedule or (), actions, strict=schedule is not None):
            before = place.at.get(number)
            place.at[number] = action if before is None else lambda one=before, two=action: (one(), two())  # type: ignore
        try:
            does(place, place.looker(), tmp_path)
        except CheckpointError as error:
            assert (
                "try again" in str(error)
                or "is not there" in str(error)
                or "(any more)" in str(error)
                or ("there is no checkpoint" in str(error) and set() in place.moments)
                or re.match(r"there is no checkpoint \d{12}-\w+ at", str(error))  # which was removed meanwhile
            ), f"{schedule}: {error}"
        except AssertionError as error:
            raise AssertionError(f"{schedule}: {error}") from error
        if place.moments and place.moments[-1]:
            place.at.clear()
            restores_the_newest(place, Catalog(place.shelf.catalog.url), tmp_path)
        return place.calls

    calls, actions = run(None), len(scene(Place(f"memory://{uuid.uuid4().hex}/k")))
    assert calls > 1
    for schedule in schedules(calls, actions):
        run(schedule)


def test_a_listing_that_looked_once_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep has power: with the mend taken out, it finds the fault."""
    monkeypatch.setattr(catalogs, "list_all", lambda *place: listings._look(*place, {})[0])
    with pytest.raises(AssertionError):
        test_each_call_while_checkpoints_come_and_go(next_comes_and_the_one_before_goes, lists, tmp_path)


def test_what_a_checkpoint_builds_on_may_be_removed_while_it_is_committed() -> None:
    """The cluster is told, and writes a full one; it counted one that nobody can restore."""

    def run(at: int | None) -> int:
        place = Place(f"memory://{uuid.uuid4().hex}/k")
        full = place.commit(place.prepared())
        coming, looker = place.prepared(full), place.looker()

        def remove() -> None:
            with contextlib.suppress(CheckpointError):  # once the other counts
                place.remove(full.id)

        if at is not None:
            place.at[at] = remove
        try:
            made = looker.commit(coming.id, coming)
        except CheckpointError as error:
            assert at is not None and full.id in str(error)
            assert coming.id not in {one.id for one in place.shelf.catalog.checkpoints()}
        else:
            assert len(place.shelf.catalog.chain(made)) == 2, at
        return place.calls

    for at in range(run(None)):
        run(at)


def saved(place: Place, base: Manifest) -> Manifest:
    """A prioritised save on a checkpoint, whose parts are there."""
    name = place.shelf.catalog.new_folder(base.done)
    made = place.shelf.parts(base.done, folder=name)
    for part in made.parts:  # they lie where those of checkpoints do
        data = place.shelf.catalog.folder(name).read(part.name)
        Saves(place.shelf.catalog.location).folder(name).write_whole(part.name, data)
    place.shelf.catalog.location.remove(name)
    parts = [msgspec.structs.replace(part, dense=[]) for part in made.parts]
    return msgspec.structs.replace(made, kind="save", base=base.id, parts=parts)


def test_each_call_while_saves_come_and_go() -> None:
    """`torch-ecrec checkpoints` beside a cluster: what it says of saves was so at some moment, and none that is on a
    checkpoint is said to be on none."""

    def run(first: int | None, after: int) -> int:
        place = Place(f"memory://{uuid.uuid4().hex}/k")
        saves, full, coming = Saves(place.shelf.catalog.location), place.commit(place.prepared()), place.prepared()
        before, later = saved(place, full), saved(place, coming)
        saves.commit(before)

        def replace() -> None:
            place.commit(coming)
            place.remove(full.id)
            saves.remove(before.id)
            saves.commit(later)

        def end() -> None:
            saves.remove(later.id)

        if first is not None:
            place.at[first] = replace
            if after:
                place.at[first + after] = end
        found = _Found.look(place.looker(), verify=False)
        whole = [one.id for one in found.saves.whole]
        assert whole in ([before.id], [later.id], []), (first, after)
        assert found.adrift() == [] and "nothing can use it" not in _as_text("k", found, time.time()), (first, after)
        assert not found.saves.broken and set(found.saves.unfinished) <= {later.id}, (first, after)
        return place.calls

    for first, after in itertools.product(range(run(None, 0)), (0, 2, 5)):
        run(first, after)
