"""Which members a repair reads, as of which steps, and what cannot be repaired."""

from __future__ import annotations

import itertools

import pytest

from torch_ecrec.layout.repair import plan_repair, portions, rows_lost, unrecoverable_bases, version_vector
from torch_ecrec.layout.stripes import Layout

LAYOUT = Layout(5, 3, 2, 200)


@pytest.mark.parametrize("base", range(5))
@pytest.mark.parametrize("member", range(5))
def test_a_plan_reads_k_other_members_on_other_slots(base: int, member: int) -> None:
    plan = plan_repair(LAYOUT, base, member, unhealthy=[])
    assert len(plan.reads) == 3 and member not in plan.reads and len(set(plan.reads)) == 3
    assert plan.sources == tuple(LAYOUT.member_slot[base, :3].tolist())
    expected = [0, 1, 2] if member >= 3 else [j for j in (0, 1, 2) if j != member] + [3]
    assert list(plan.reads) == expected, "data before parity"
    assert plan.parities == tuple(int(LAYOUT.member_slot[base, j]) for j in expected if j >= 3)
    assert plan.read_bytes(10, 64) == 3 * 10 * 64


def test_unhealthy_slots_are_read_last() -> None:
    for base, member, other in itertools.product(range(5), range(5), range(5)):
        if member == other:
            continue
        gone = {int(LAYOUT.member_slot[base, member]), int(LAYOUT.member_slot[base, other])}
        plan = plan_repair(LAYOUT, base, member, gone)
        assert other not in plan.reads, "three healthy members are enough"


def test_the_version_vector_is_the_least_that_any_parity_has_folded() -> None:
    plan = plan_repair(LAYOUT, 0, 0, [int(LAYOUT.member_slot[0, 1])])
    assert len(plan.parities) == 2
    a, b, c = plan.sources
    assert version_vector(plan, [{a: 9, b: 7, c: 4}, {a: 8, b: 8, c: 4}]) == {a: 8, b: 7, c: 4}
    assert version_vector(plan, [{a: 9, b: 7, c: 4}, {a: 8, c: 4}]) is None


def test_portions_cover_everything_once() -> None:
    assert list(portions(10, 64, 256)) == [(0, 4), (4, 8), (8, 10)]
    assert list(portions(3, 1000, 1)) == [(0, 1), (1, 2), (2, 3)]
    assert list(portions(0, 64, 256)) == []


def test_what_the_code_can_repair() -> None:
    for lost in itertools.combinations(range(5), 2):
        assert unrecoverable_bases(LAYOUT, lost) == []
    for lost in itertools.combinations(range(5), 3):
        assert unrecoverable_bases(LAYOUT, lost) == [0, 1, 2, 3, 4]
    groups = Layout(12, 2, 1, 100)  # two coding groups of six slots
    assert unrecoverable_bases(groups, [0, 6]) == []
    assert unrecoverable_bases(groups, [0, 1]) != []
    assert unrecoverable_bases(Layout(3, 2, 0, 9), [1]) != []


@pytest.mark.parametrize("rows", [1, 7, 200, 203])
@pytest.mark.parametrize(("slots", "k", "r", "lost"), [(5, 3, 2, (0, 1, 4)), (4, 2, 1, (1, 2)), (3, 2, 0, (1,))])
def test_rows_lost_are_counted_one_by_one(rows: int, slots: int, k: int, r: int, lost: tuple[int, ...]) -> None:
    layout, count = Layout(slots, k, r, rows), 0
    for row in range(rows):
        members = layout.member_slot[row // k % slots]
        gone = sum(int(slot) in lost for slot in members)
        count += gone > r and int(members[row % k]) in lost
    assert rows_lost(layout, lost) == count


@pytest.mark.parametrize("slots, k, r", [(3, 2, 1), (2, 1, 1), (4, 1, 2), (5, 3, 2), (6, 2, 1), (7, 2, 2), (7, 4, 3)])
def test_every_repair_within_r_reads_members_that_are_whole(slots: int, k: int, r: int) -> None:
    layout = Layout(slots, k, r, rows=4 * slots * k + 1)
    for base in range(slots):
        homes = layout.member_slot[base].tolist()
        for member in range(layout.n):
            for others in itertools.combinations([s for s in range(slots) if s != homes[member]], r - 1):
                unhealthy = {homes[member], *others}
                plan = plan_repair(layout, base, member, unhealthy)
                assert len(set(plan.reads)) == k and not {homes[j] for j in plan.reads} & unhealthy
                assert plan.parities == tuple(homes[j] for j in plan.reads if j >= k)
