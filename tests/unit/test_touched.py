"""Whatever a verb of `Shard` changes is noted while somebody copies the shard, and taken once."""

import numpy as np
import pytest

from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.records.schema import Schema
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.touched import Touched

ROWS, BYTES = 12, 16
CODE = LinearCode(2, 1)
AT = np.array([3, 7], dtype=np.int64)
SOME = np.full((2, BYTES), 5, dtype=np.uint8)
ONES = np.ones(2, dtype=np.uint8)


def install(shard: Shard, parity: bool) -> None:
    missing = np.ones(ROWS, dtype=np.uint8)
    shard.install_(CODE, AT, missing, (0, 1), (SOME, SOME), 2, parity)


VERBS = {
    "undo": (False, lambda shard: shard.undo_(AT, SOME)),
    "fold into parities": (True, lambda shard: shard.fold_(CODE, AT, SOME, ONES)),
    "fold into records": (False, lambda shard: shard.fold_(CODE, AT, SOME, ONES, parity=False)),
    "install records": (False, lambda shard: install(shard, False)),
    "install parities": (True, lambda shard: install(shard, True)),
    "scatter records": (False, lambda shard: shard.scatter_(AT, SOME)),
    "scatter parities": (True, lambda shard: shard.scatter_(AT, SOME, parity=True)),
    "overwrite": (False, lambda shard: shard.overwrite_(AT, SOME)),
}


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", VERBS)
def test_what_a_verb_changes_is_noted(name: str, sealed: bool) -> None:
    """`apply_` is in `test_moves.py`, where training goes on while a slot moves."""
    parity, verb = VERBS[name]
    shard = Shard(Schema.of(BYTES // 4), ROWS, ROWS, sealed=sealed)
    verb(shard)  # nobody copies it
    before = [shard.gather(np.arange(ROWS), kind) for kind in (False, True)]
    shard.touched = Touched(ROWS, ROWS)
    verb(shard)
    after = [shard.gather(np.arange(ROWS), kind) for kind in (False, True)]
    for kind in (False, True):
        changed = np.flatnonzero((before[kind] != after[kind]).any(axis=1))
        assert set(changed) <= set(shard.touched.look(kind))
    assert shard.touched.look(parity).tolist() == AT.tolist()
    assert shard.touched.take(parity).tolist() == AT.tolist()
    assert shard.touched.look(parity).tolist() == [] == shard.touched.look(not parity).tolist()


def test_a_position_that_is_skipped_is_not_noted() -> None:
    touched = Touched(4, 0)
    touched.note(False, np.array([-1, 2, -1], dtype=np.int64))
    assert touched.take(False).tolist() == [2]
