"""The layout is a bijection without holes for every small cluster, and spreads parity evenly whatever the divisors."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.layout.stripes import Layout

SHAPES = [(slots, k, r) for slots in range(1, 10) for k in range(1, slots + 1) for r in range(slots - k + 1)]


def check(layout):
    """Everything that must hold of any layout; the reference is written out stripe by stripe."""
    slots, k, r, n, rows = layout.slots, layout.k, layout.r, layout.n, layout.rows
    assert n == k + r and layout.stripes == math.ceil(rows / k)
    slot_U, position_U = layout.locate(np.arange(rows, dtype=np.int64))
    records = {(s, p): row for row, (s, p) in enumerate(zip(slot_U.tolist(), position_U.tolist(), strict=True))}
    assert len(records) == rows, "two rows share a place"
    parities = {}
    for stripe in range(layout.stripes):
        rotation, base = divmod(stripe, slots)
        homes = layout.member_slot[base].tolist()
        assert len(set(homes)) == n, "two members of a stripe share a slot"
        assert set(homes) <= set(layout.group_of(base))
        rotations = np.array([rotation])
        for member in range(n):
            place = (homes[member], int(layout.position(base, member, rotations)[0]))
            exists = bool(layout.exists(base, member, rotations)[0])
            if member >= k:
                assert exists and place not in parities
                parities[place] = (stripe, member)
            else:
                assert exists == (stripe * k + member < rows)
                assert not exists or records[place] == stripe * k + member
    for slot in range(slots):
        data_rows, parity_rows = layout.data_rows(slot), layout.parity_rows(slot)
        assert sorted(p for s, p in records if s == slot) == list(range(data_rows)), "dense, and of the exact size"
        assert sorted(p for s, p in parities if s == slot) == list(range(parity_rows))
        positions = np.arange(data_rows, dtype=np.int64)
        found = layout.row_at(slot, positions)
        assert found.tolist() == [records[slot, p] for p in range(data_rows)]
        for first, end in itertools.pairwise(layout.data_first[slot].tolist()):
            assert (np.diff(found[first:end]) == slots * k).all(), "by rotation within a rank"
        check_groups(layout, slot, False, positions, {p: divmod(records[slot, p], k) for p in range(data_rows)})
        truth = {p: parities[slot, p] for p in range(parity_rows)}
        for first, end in itertools.pairwise(layout.parity_first[slot].tolist()):
            assert (np.diff([truth[p][0] for p in range(first, end)]) == slots).all()
        check_groups(layout, slot, True, np.arange(parity_rows, dtype=np.int64), truth)


def check_groups(layout, slot, parity, positions, truth):
    positions = np.random.default_rng(slot).permutation(positions)
    seen = []
    for group in layout.group(slot, parity, positions):
        assert len(group.where) == len(group.rotations) > 0
        assert layout.member_slot[group.base, group.member] == slot
        assert np.array_equal(layout.position(group.base, group.member, group.rotations), positions[group.where])
        for rotation, where in zip(group.rotations.tolist(), group.where.tolist(), strict=True):
            assert truth[int(positions[where])] == (rotation * layout.slots + group.base, group.member)
        seen.extend(group.where.tolist())
    assert sorted(seen) == list(range(len(positions)))


@pytest.mark.parametrize("slots", range(1, 10))
def test_bijection_for_every_small_cluster(slots):
    for _, k, r in (shape for shape in SHAPES if shape[0] == slots):
        period = slots * k
        for rows in sorted({0, 1, k, k + 1, period - 1, period, period + 1, 2 * period + k // 2 + 1, 3 * period - 1}):
            check(Layout(slots, k, r, rows))


def test_bijection_for_every_number_of_rows_of_some_clusters():
    for slots, k, r in ((3, 2, 1), (5, 3, 1), (6, 2, 1), (7, 2, 1), (8, 4, 2), (4, 4, 0), (9, 3, 1)):
        for rows in range(2 * slots * k + 3):
            check(Layout(slots, k, r, rows))


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 8), r=st.integers(0, 4), extra=st.integers(0, 40), rows=st.integers(0, 700))
def test_bijection_for_larger_clusters(k, r, extra, rows):
    check(Layout(k + r + extra, k, r, rows))


def test_the_example_of_the_docstring():
    layout = Layout(3, 2, 1, 8)
    slot_U, position_U = layout.locate(np.array([5, 7]))
    assert (slot_U.tolist(), position_U.tolist()) == ([0, 1], [2, 1])
    assert layout.member_slot[2].tolist() == [2, 0, 1]


@pytest.mark.parametrize("slots, k, r", SHAPES)
def test_each_slot_holds_k_data_and_r_parity_records_in_a_rotation(slots, k, r):
    rotations = 3
    layout = Layout(slots, k, r, rotations * slots * k)
    assert [layout.data_rows(s) for s in range(slots)] == [rotations * k] * slots
    assert [layout.parity_rows(s) for s in range(slots)] == [rotations * r] * slots


def test_parity_rotates_where_slots_and_members_have_a_common_divisor():
    for slots, k, r in ((5, 4, 1), (4, 3, 1), (6, 3, 1), (8, 3, 1), (6, 4, 2), (9, 2, 1), (12, 2, 2)):
        layout = Layout(slots, k, r, slots * k)
        for parity in range(k, k + r):
            assert sorted(layout.member_slot[:, parity].tolist()) == list(range(slots)), (
                "each parity visits each slot once"
            )
        for member in range(k):
            assert sorted(layout.member_slot[:, member].tolist()) == list(range(slots))


def test_groups_are_contiguous_even_and_of_n_to_2n_slots():
    for slots in range(1, 120):
        for n in range(1, min(slots, 14) + 1):
            layout = Layout(slots, n, 0, 0) if n == 1 else Layout(slots, n - 1, 1, 0)
            groups = [layout.group_of(s) for s in range(slots)]
            assert [s for group in dict.fromkeys(groups) for s in group] == list(range(slots))
            sizes = {len(group) for group in groups}
            assert n <= min(sizes) and max(sizes) <= 2 * n and max(sizes) - min(sizes) <= 1
            assert all(s in group for s, group in enumerate(groups))
            for base in range(slots):
                assert set(layout.member_slot[base].tolist()) <= set(groups[base])


@pytest.mark.parametrize("slots, k, r", [shape for shape in SHAPES if shape[0] >= 3] + [(20, 3, 2), (24, 4, 1)])
def test_runs_holders_and_sources_agree_with_the_stripes(slots, k, r):
    layout = Layout(slots, k, r, 2 * slots * k - 1)
    pairs = set()
    for source in range(slots):
        reached = np.zeros(layout.data_rows(source), np.int64)
        for holder in range(slots):
            runs = layout.runs(source, holder)
            assert len(runs) == len(Layout(slots, k, r, 0).runs(source, holder)), "independent of the number of rows"
            assert [run.first for run in runs] == sorted(run.first for run in runs)
            for run in runs:
                pairs.add((source, holder))
                reached[run.first : run.end] += 1
                for position in range(run.first, run.end):
                    stripe, member = divmod(int(layout.row_at(source, np.array([position]))[0]), k)
                    rotation, base = divmod(stripe, slots)
                    assert run.member == member
                    assert layout.member_slot[base, k + run.parity] == holder
                    assert position + run.shift == layout.position(base, k + run.parity, np.array([rotation]))[0]
        assert (reached == r).all(), "each record has r parities"
    for slot in range(slots):
        assert layout.holders(slot) == tuple(sorted(h for s, h in pairs if s == slot))
        assert layout.sources(slot) == tuple(sorted(s for s, h in pairs if h == slot))
        assert slot not in layout.holders(slot)
        assert Layout(slots, k, r, 1).holders(slot) == layout.holders(slot), "independent of the number of rows"


def test_a_slot_folds_to_a_bounded_number_of_peers():
    layout = Layout(64, 3, 1, 10_000)
    assert max(len(layout.holders(s)) for s in range(64)) <= 3
    assert max(len(layout.group_of(s)) for s in range(64)) <= 8


def test_nothing_exists_past_the_end():
    layout = Layout(5, 3, 1, 31)  # 11 stripes, the last with one member of three
    rotations = np.array([0, 1, 2, 3])
    assert layout.exists(0, 0, rotations).tolist() == [True, True, True, False]
    assert layout.exists(0, 1, rotations).tolist() == [True, True, False, False]
    assert layout.exists(0, 3, rotations).tolist() == [True, True, True, False]
    assert layout.exists(4, 3, rotations).tolist() == [True, True, False, False]


def test_rows_beyond_32_bits():
    layout = Layout(7, 3, 2, 10**12)
    rows = np.random.default_rng(0).integers(0, 10**12, 1000)
    slot_U, position_U = layout.locate(rows)
    for slot in range(7):
        assert np.array_equal(layout.row_at(slot, position_U[slot_U == slot]), rows[slot_U == slot])
    assert sum(layout.data_rows(s) for s in range(7)) == 10**12


def test_layouts_compare_by_their_numbers_and_do_not_change():
    layout = Layout(5, 2, 1, 100)
    assert layout == Layout(5, 2, 1, 100) != Layout(5, 2, 1, 101)
    assert hash(layout) == hash(Layout(5, 2, 1, 100))
    with pytest.raises(AttributeError):
        layout.rows = 7
    with pytest.raises(ValueError, match="read-only"):
        layout.member_slot[0, 0] = 1


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"k \+ r = 4 .* got 3"):
        Layout(3, 3, 1, 10)
    for arguments, name in (
        ((0, 1, 0, 1), "slots"),
        ((3, 0, 1, 1), "k"),
        ((3, 1, -1, 1), "r"),
        ((3, 1, 1, -1), "rows"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            Layout(*arguments)
    layout = Layout(3, 2, 1, 10)
    for call in (layout.data_rows, layout.parity_rows, layout.holders, layout.sources, layout.group_of):
        with pytest.raises(ValueError, match=r"`slot`.*0\.\.2.*3"):
            call(3)
    with pytest.raises(ValueError, match="member"):
        layout.position(0, 3, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="parity"):
        Layout(3, 2, 0, 10).group(0, True, np.zeros(1, np.int64))
