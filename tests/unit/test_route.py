"""Ids to slots and back, against torch.unique and the layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.layout.routing import arrange, route
from torch_ecrec.layout.stripes import Layout


@settings(max_examples=60, deadline=None)
@given(
    code=st.sampled_from([(1, 1, 0), (3, 2, 1), (6, 4, 2), (9, 2, 1)]),
    rows=st.integers(1, 400),
    count=st.integers(0, 300),
    seed=st.integers(0, 99),
)
def test_arrange_finds_unique_rows_in_the_order_of_their_places(code, rows, count, seed):
    layout = Layout(*code, rows)
    rows_N = torch.from_numpy(np.random.default_rng(seed).integers(0, rows, count))
    found, inverse_N = arrange(layout, rows_N)
    assert torch.equal(found.rows[inverse_N], rows_N)
    assert torch.equal(found.rows.sort().values, torch.unique(rows_N))
    slot_U, position_U = layout.locate(found.rows.numpy())
    places = list(zip(slot_U.tolist(), position_U.tolist(), strict=True))
    assert places == sorted(places)
    assert len(found.positions) == layout.slots
    for slot, positions in enumerate(found.positions):
        assert torch.equal(positions, torch.from_numpy(position_U[slot_U == slot]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("arranged", [True, False])
def test_split_and_join_are_inverse(arranged, dtype):
    layout, rows = Layout(5, 3, 1, 1000), torch.randperm(1000)[:200]
    there = arrange(layout, rows)[0] if arranged else route(layout, rows)
    assert arranged or there.rows is rows
    values = torch.arange(800).view(200, 4).to(dtype)
    parts = there.split(values)
    slot_U = layout.locate(there.rows.numpy())[0]
    for slot, part in enumerate(parts):
        assert part.dtype == dtype and len(part) == (slot_U == slot).sum() == len(there.positions[slot])
        assert part.untyped_storage().nbytes() == part.nbytes, "what is sent is the part alone"
    filled = [part for part in parts if len(part)]
    assert torch.equal(there.join(filled, torch.empty_like(values)), values)


@pytest.mark.parametrize("count", [0, 199, 201])
@pytest.mark.parametrize("arranged", [True, False])
def test_values_that_are_not_as_many_as_the_rows_are_refused(arranged, count):
    """What puts them in order looks at no bounds."""
    layout, rows = Layout(5, 3, 1, 1000), torch.randperm(1000)[:200]
    there = arrange(layout, rows)[0] if arranged else route(layout, rows)
    with pytest.raises(ValueError, match=f"{count} values for 200 rows"):
        there.split(torch.zeros(count, 4))


def test_rows_that_collide_in_the_table_are_told_apart():
    layout = Layout(3, 2, 1, 2**40)
    rows = torch.arange(0, 2**40, 2**28)  # high bits only
    found, inverse = arrange(layout, torch.cat([rows, rows]))
    assert len(found.rows) == len(rows) and torch.equal(found.rows[inverse], torch.cat([rows, rows]))


@pytest.mark.parametrize(
    ("code", "rows"), [((3, 2, 1), 7), ((3, 2, 1), 5_200_000), ((12, 4, 2), 2**33), ((64, 8, 2), 2**47)]
)
def test_both_ways_to_sort_agree(code, rows, monkeypatch):
    layout = Layout(*code, rows)
    some = torch.from_numpy(np.random.default_rng(0).integers(0, rows, 5000))
    by_digits, inverse = arrange(layout, some)
    monkeypatch.setattr("torch_ecrec.layout.routing._WORD_BITS", 0)  # too few for key and index together
    compared, same = arrange(layout, some)
    assert torch.equal(by_digits.rows, compared.rows) and torch.equal(inverse, same)
    assert by_digits.starts == compared.starts and all(map(torch.equal, by_digits.positions, compared.positions))
