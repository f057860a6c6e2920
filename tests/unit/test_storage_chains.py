"""Any chain of checkpoints, by any policy and any number of slots, gives back the records of each of its steps."""

import uuid

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from kept import Shelf, small_job

from torch_ecrec.storage import policy
from torch_ecrec.storage.manifest import Encoding, Manifest


@settings(max_examples=25)
@given(
    st.sampled_from(policy.POLICIES),
    st.lists(st.tuples(st.sets(st.integers(0, 46)), st.sets(st.integers(0, 8))), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 1),
    st.integers(1, 3),
)
def test_every_checkpoint_of_a_run(
    name: str, changes: list[tuple[set[int], set[int]]], slots: int, zstd: int, kept: int
) -> None:
    """The oracle is a copy of all records at each step. Each checkpoint has other slots: placement does not count."""
    shelf = Shelf(f"memory://{uuid.uuid4().hex}", small_job(trainers=1), slots)
    encoding, since = Encoding(zstd=zstd), list[Manifest]()
    dirty: list[tuple[set[int], set[int]]] = []  # between one checkpoint and the next, since the full one
    truths: dict[str, list[bytes]] = {}
    for step, changed in enumerate(changes, start=1):
        for table_group, rows in enumerate(changed):
            shelf.change(table_group, sorted(rows), step)
        dirty.append(changed)
        shelf.slots = 1 + (slots + step) % 4
        following = policy.next_kind(name, [one.bytes for one in since])
        if following.base is None:
            since, dirty = [shelf.write(step, encoding=encoding)], []
        else:
            rows = [
                sorted(set().union(*(one[table_group] for one in dirty[following.base :]))) for table_group in range(2)
            ]
            since.append(shelf.write(step, since[following.base], rows, encoding))
        truths[since[-1].id] = [records.tobytes() for records in shelf.truth]
        assert len(dirty) == len(since) - 1
    assert shelf.holds(since[-1])
    newest = shelf.catalog.checkpoints()[:kept]
    shelf.catalog.keep(kept)
    assert shelf.catalog.checkpoints()[: len(newest)] == newest, "and maybe what they build on"
    for one in shelf.catalog.checkpoints():
        assert [records.tobytes() for records in shelf.read(one)] == truths[one.id]
        found = shelf.read(one, mine=lambda table_group, rows_N: rows_N % 3 == 0)
        assert all(np.array_equal(a[::3], b[::3]) for a, b in zip(found, shelf.read(one), strict=True))
