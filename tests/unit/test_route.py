"""Ids to slots and back, against torch.unique and the layout."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.layout.placing import Piece
from torch_ecrec.layout.routing import Homes, arrange, join_bags, route, route_bags
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
    monkeypatch.setattr("torch_ecrec.layout.routing.WORD_BITS", 0)  # too few for key and index together
    compared, same = arrange(layout, some)
    assert torch.equal(by_digits.rows, compared.rows) and torch.equal(inverse, same)
    assert by_digits.starts == compared.starts and all(map(torch.equal, by_digits.positions, compared.positions))


@st.composite
def bags_on_slots(draw):
    """A layout, striped or placed, and bags of its rows: some empty, some with a row twice."""
    slots, k, r = draw(st.sampled_from([(1, 1, 0), (3, 2, 1), (5, 3, 1)]))
    rows = draw(st.integers(1, 60))
    whole = draw(st.integers(0, rows))
    pieces = [Piece(whole, (draw(st.integers(0, slots - 1)),))] if whole else []
    pieces += [Piece(rows - whole, tuple(range(slots)))] if rows > whole else []
    layout = Layout(slots, k, r, rows, tuple(pieces) if draw(st.booleans()) else ())
    lengths = draw(st.lists(st.integers(0, 4), max_size=8))
    ids = draw(st.lists(st.integers(0, rows - 1), min_size=sum(lengths), max_size=sum(lengths)))
    return layout, lengths, ids


@settings(deadline=None)
@given(case=bags_on_slots(), weighted=st.booleans(), dim=st.integers(1, 5))
def test_bags_are_split_by_slot_and_joined_in_the_order_of_slots(case, weighted, dim):
    layout, lengths, ids = case
    rows_N, lengths_G = torch.tensor(ids, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32)
    factors_N = torch.arange(1, len(ids) + 1, dtype=torch.float32) if weighted else None
    there = route_bags(layout, rows_N, lengths_G, factors_N)
    slots, positions = (found.tolist() for found in layout.locate(rows_N.numpy()))
    table = torch.randn(layout.rows, dim, generator=torch.Generator().manual_seed(0))
    parts, expected = [], torch.zeros(len(lengths), dim)
    seen = [False] * len(lengths)
    bag_of = [bag for bag, length in enumerate(lengths) for _ in range(length)]
    for slot in range(layout.slots):
        mine = [n for n in range(len(ids)) if slots[n] == slot]
        assert there.positions[slot].tolist() == [positions[n] for n in mine], "in their order, with repetitions"
        assert there.factors is None or there.factors[slot].tolist() == [n + 1.0 for n in mine]
        bags = sorted({bag_of[n] for n in mine})
        assert there.places[slot].tolist() == bags
        assert there.lengths[slot].tolist() == [sum(bag_of[n] == bag for n in mine) for bag in bags]
        part = torch.zeros(len(bags), dim)
        for m, bag in enumerate(bags):
            for turn, n in enumerate(n for n in mine if bag_of[n] == bag):
                part[m] = table[ids[n]] if turn == 0 else part[m] + table[ids[n]]
            expected[bag] = expected[bag] + part[m] if seen[bag] else part[m]
            seen[bag] = True
        parts.append(part)
    assert torch.equal(there.join(parts, dim), expected)
    gradient_GD = torch.randn(len(lengths), dim)
    for slot, part in enumerate(there.split(gradient_GD)):
        assert torch.equal(part, gradient_GD[there.places[slot]])


@st.composite
def batches(draw):
    """Tables, placed in some way, one feature each, and a batch of ids of all of them, feature by feature."""
    slots, k, r = draw(st.sampled_from([(1, 1, 0), (3, 2, 1), (5, 3, 1)]))
    on = st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots, unique=True)
    pieces = tuple(
        Piece(rows, tuple(slots_))
        for rows, slots_ in draw(st.lists(st.tuples(st.integers(1, 20), on), min_size=1, max_size=5))
    )
    batch = draw(st.integers(0, 4))
    lengths_FB = (
        np.array([[draw(st.integers(0, 3)) for _ in range(batch)] for _ in pieces])
        .reshape(len(pieces), batch)
        .astype(np.int64)
    )
    ids = [
        draw(st.integers(0, piece.rows - 1))
        for piece, lengths in zip(pieces, lengths_FB, strict=True)
        for _ in range(lengths.sum())
    ]
    return Layout(slots, k, r, sum(piece.rows for piece in pieces), pieces), lengths_FB, ids


@settings(deadline=None)
@given(
    case=batches(),
    weighted=st.booleans(),
    ids_are=st.sampled_from([np.int32, np.int64]),
    lengths_are=st.sampled_from([np.int32, np.int64]),
)
def test_bags_of_whole_tables_go_where_those_of_any_do(case, weighted, ids_are, lengths_are):
    layout, lengths_FB, ids = case
    firsts = [0, *itertools.accumulate(piece.rows for piece in layout.pieces)]
    homes = [layout.home_of(first, piece.rows) for first, piece in zip(firsts, layout.pieces, strict=False)]
    for piece, home in zip(layout.pieces, homes, strict=True):
        assert (home is not None) == (len(piece.slots) == 1 or piece.rows == 1)
        assert home is None or home[0] == piece.slots[0]
    whole = [f for f, home in enumerate(homes) if home is not None]
    wanted = [[f, *homes[f], layout.pieces[f].rows] for f in whole]
    feature_P, slot_P, first_P, rows_P = np.array(wanted, np.int64).reshape(-1, 4).T.copy()
    factors_N = np.arange(1, len(ids) + 1, dtype=np.float32) if weighted else np.empty(0, np.float32)
    of_feature_N = np.repeat(np.arange(len(lengths_FB)), lengths_FB.sum(axis=1))
    ids_N = np.array(ids, ids_are)
    there = Homes(feature_P, slot_P, first_P, rows_P).route(
        layout.slots, ids_N, lengths_FB.astype(lengths_are), factors_N
    )
    mine_N = np.isin(of_feature_N, whole)
    rows_N = torch.from_numpy((ids_N.astype(np.int64) + np.array(firsts)[of_feature_N])[mine_N])
    factors = torch.from_numpy(factors_N[mine_N]) if weighted and len(ids) else None
    lengths_G = torch.from_numpy(lengths_FB[whole].reshape(-1).astype(np.int32))
    same(there, route_bags(layout, rows_N, lengths_G, factors))
    by_slot_P, batch, dim = np.argsort(slot_P, kind="stable"), lengths_FB.shape[1], 3
    homes_P = (home_P[by_slot_P] for home_P in (feature_P, slot_P, first_P, rows_P))
    moved = Homes(*homes_P).route(layout.slots, ids_N, lengths_FB.astype(lengths_are), factors_N)
    bag_G = (by_slot_P[:, None] * batch + np.arange(batch)).reshape(-1)  # which bag of the other route each of these is
    same(there, dataclasses.replace(moved, places=[bag_G[place_M] for place_M in moved.places]))
    values_GD = torch.arange(there.bags * dim, dtype=torch.float32).view(-1, dim) * (lengths_G[:, None] > 0)
    parts, moved_parts = there.split(values_GD), moved.split(values_GD[bag_G])
    assert all(map(torch.equal, parts, moved_parts))
    assert torch.equal(there.join(parts, dim), values_GD) and torch.equal(moved.join(parts, dim), values_GD[bag_G])
    for at in np.flatnonzero(mine_N)[:1].tolist():
        for bad in (-1, layout.pieces[of_feature_N[at]].rows):
            ids_N[at] = bad
            found = Homes(feature_P, slot_P, first_P, rows_P).route(layout.slots, ids_N, lengths_FB, factors_N)
            assert found == at


def same(there, other):
    assert there.bags == other.bags and (there.factors is None) == (other.factors is None)
    for name in ("positions", "lengths", "factors"):
        for mine, its in zip(getattr(there, name) or (), getattr(other, name) or (), strict=True):
            assert mine.dtype == its.dtype and torch.equal(mine, its), name
    for mine, its in zip(there.places, other.places, strict=True):
        assert mine.dtype == its.dtype and mine.tolist() == its.tolist()


@settings(deadline=None)
@given(case=bags_on_slots(), cut=st.integers(0, 8), weighted=st.sets(st.sampled_from([0, 1])))
def test_routes_of_bags_are_joined(case, cut, weighted):
    """What has no weights counts once, beside what has some."""
    layout, lengths, ids = case
    cut = min(cut, len(lengths))
    n = sum(lengths[:cut])
    factors_N = torch.arange(2, len(ids) + 2, dtype=torch.float32)
    routes, all_factors = [], []
    for number, (some, mine) in enumerate([(slice(0, cut), slice(0, n)), (slice(cut, None), slice(n, None))]):
        rows_N, lengths_G = torch.tensor(ids[mine], dtype=torch.int64), torch.tensor(lengths[some], dtype=torch.int32)
        factors = factors_N[mine] if number in weighted else None
        routes.append(route_bags(layout, rows_N, lengths_G, factors))
        all_factors.append(torch.ones(len(rows_N)) if factors is None else factors)
    rows_N, lengths_G = torch.tensor(ids, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int32)
    same(join_bags(routes), route_bags(layout, rows_N, lengths_G, torch.cat(all_factors) if weighted else None))


def test_bags_that_do_not_fit_are_refused():
    layout, some = Layout(3, 2, 1, 10), torch.zeros(2, dtype=torch.int64)
    for lengths in ([1], [3], [3, -1]):
        with pytest.raises(ValueError, match="lengths of bags must not be negative, and sum to 2"):
            route_bags(layout, some, torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(ValueError, match="2\\^31"):
        route_bags(Layout(1, 1, 0, 2**32), some, torch.tensor([2], dtype=torch.int32))
    there = route_bags(layout, some, torch.tensor([2], dtype=torch.int32))
    with pytest.raises(ValueError, match="2 gradients for 1 bags"):
        there.split(torch.zeros(2, 4))
