"""Optimizers against plain references, bit for bit; the shard and its pages; the delta log against a plain search."""

import itertools
import mmap
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec import records
from torch_ecrec.codec.linear import LinearCode
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.records import delta_log, pages
from torch_ecrec.records import initial as initial_records
from torch_ecrec.records import merge as merging
from torch_ecrec.records import positions as positions_of
from torch_ecrec.records import shard as shards
from torch_ecrec.records.delta_log import DeltaLog
from torch_ecrec.records.initial import InitialRecords
from torch_ecrec.records.merge import Merged, merge
from torch_ecrec.records.optimizers import NAMES as KINDS
from torch_ecrec.records.optimizers import optimizer
from torch_ecrec.records.pages import HUGE_PAGE_BYTES, Memory, ReadyMemory
from torch_ecrec.records.schema import Field, Schema, StateField
from torch_ecrec.records.shard import Shard
from torch_ecrec.records.store import stores_in

F32 = np.float32


def state_floats(kind, dim):
    return optimizer(kind).schema(dim).width - dim


def wide(dim, width):
    """A schema of so many numbers."""
    return Schema((Field("weight", dim), *([Field("state", width - dim)] if width > dim else [])))


# --------------------------------------------------------------------------------------------------------------- schema


def test_a_record_is_its_fields_one_behind_the_other():
    schema = Schema.of(3, (StateField("momentum1"), StateField("momentum2", per_row=True)))
    assert [(f.name, f.values, f.nbytes, f.per_row) for f in schema.fields] == [
        ("weight", 3, 12, False), ("momentum1", 3, 12, False), ("momentum2", 1, 4, True),
    ]  # fmt: skip
    assert (schema.dim, schema.width, schema.nbytes) == (3, 7, 28)
    assert [schema.columns(f.name) for f in schema.fields] == [(0, 3), (3, 6), (6, 7)]
    with pytest.raises(KeyError, match="no field 'momentum3', only"):
        schema.columns("momentum3")
    with pytest.raises(ValueError, match="begins with `weight`"):
        Schema((Field("momentum1", 2),))
    with pytest.raises(ValueError, match="different names"):
        Schema.of(1, (StateField("weight"),))


def make_records(kind, rows, dim, seed=0):
    random = np.random.default_rng(seed)
    records = random.standard_normal((rows, dim + state_floats(kind, dim))).astype(F32)
    records[:, dim:] = np.abs(records[:, dim:])
    return records


def make_gradients(count, dim, seed=1):
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(F32)


def update_(kind, records, positions, gradients, lr, eps):
    """Positions in any order, and one trainer."""
    index = np.arange(len(positions))[None, :]
    fixed = {"eps": eps} if "eps" in optimizer(kind).fixed else {}
    return optimizer(kind).update_(records, Merged(positions, [gradients], index), lr, 1, fixed)


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8)


# ---------------------------------------------------------------------------------------------------------------- merge


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=6),
    dim=st.sampled_from([1, 5, 16]),
    seed=st.integers(0, 99),
)
def test_merge_adds_in_list_order(parts, dim, seed):
    random = np.random.default_rng(seed)
    inputs = []
    for part in parts:
        scale = 10.0 ** random.integers(-4, 5, (len(part), dim))  # so that the order of addition shows
        gradients = (random.standard_normal((len(part), dim)) * scale).astype(F32)
        inputs.append((np.array(sorted(part), np.int64), gradients))
    sums = {}
    for positions, gradients in inputs:
        for position, gradient in zip(positions.tolist(), gradients, strict=True):
            sums[position] = gradient if position not in sums else sums[position] + gradient
    together = merge(inputs)
    positions, merged = together.positions, together.gradients()
    assert positions.tolist() == sorted(sums) and positions.dtype == np.int64
    assert merged.dtype == F32 and merged.shape == (len(sums), dim)
    for position, gradient in zip(positions.tolist(), merged, strict=True):
        assert np.array_equal(as_bytes(gradient), as_bytes(sums[position]))


def test_merge_is_not_associative_and_keeps_trainer_order():
    big, one = np.full((1, 4), 2.0**24, F32), np.ones((1, 4), F32)
    position = np.array([3])
    merged = merge([(position, big), (position, one), (position, one)])
    assert (merged.gradients() == 2.0**24).all()
    merged = merge([(position, one), (position, one), (position, big)])
    assert (merged.gradients() == 2.0**24 + 2).all()


def test_merge_of_a_single_part_and_of_nothing():
    positions, gradients = np.array([1, 5]), make_gradients(2, 3)
    empty = (np.zeros(0, np.int64), np.zeros((0, 3), F32))
    for parts in ([(positions, gradients)], [empty, (positions, gradients), empty]):
        merged = merge(parts)
        assert np.array_equal(merged.positions, positions) and np.array_equal(merged.gradients(), gradients)
    nothing = merge([empty, empty])
    assert nothing.positions.shape == (0,) and nothing.gradients().shape == (0, 3)


def test_merge_changes_no_input_and_keeps_negative_zeros():
    a, b = (np.array([1, 2]), np.full((2, 2), -0.0, F32)), (np.array([2, 4]), make_gradients(2, 2))
    before = [array.copy() for array in (*a, *b)]
    merged = merge([a, b])
    assert merged.positions.tolist() == [1, 2, 4] and np.signbit(merged.gradients()[0]).all()
    assert all(np.array_equal(x, y) for x, y in zip((*a, *b), before, strict=True))


def test_merge_refuses_what_does_not_fit():
    positions, gradients = np.array([1, 5]), make_gradients(2, 3)
    with pytest.raises(ValueError, match="at least one"):
        merge([])
    for wrong in (np.array([5, 1]), np.array([1, 1])):
        with pytest.raises(ValueError, match=r"parts\[1\].*ascending"):
            merge([(positions, gradients), (wrong, gradients)])
    with pytest.raises(ValueError, match=r"parts\[1\].*float32.*\(2, 3\)"):
        merge([(positions, gradients), (positions, gradients[:, :2])])
    with pytest.raises(ValueError, match="float32"):
        merge([(positions, gradients.astype(np.float64))])


def test_bfloat16_parts_are_summed_as_what_they_stand_for():
    positions, gradients = np.arange(700), make_gradients(700, 5)
    rounded = torch.from_numpy(gradients).bfloat16()
    merged = merge([(positions, rounded.view(torch.uint16).numpy()), (positions[1::2], gradients[1::2])])
    wanted = rounded.float().numpy()
    wanted[1::2] += gradients[1::2]
    assert np.array_equal(as_bytes(merged.gradients()), as_bytes(wanted))


# ----------------------------------------------------------------------------------------------------------- initialise

TABLES = {
    "first_rows": np.array([0, 50, 80]),
    "low": np.array([-0.5, 0.0, 10.0]),
    "high": np.array([0.5, 0.001, 10.0]),
    "table_indices": np.array([4, 0, 7]),
}


def initial(rows, seed=1, dim=6, width=7, **changes):
    records = np.full((len(rows), width), 9, F32)
    tables = {name: tuple(np.asarray(values).tolist()) for name, values in {**TABLES, **changes}.items()}
    InitialRecords(wide(dim, width), seed, **tables).fill_(records, np.asarray(rows, np.int64))
    return records


def test_initial_weights_do_not_depend_on_the_layout():
    wanted = initial(np.arange(120))
    for slots, k, r in ((3, 2, 1), (5, 3, 2), (4, 4, 0), (7, 2, 1)):
        layout = Layout(slots, k, r, 120)
        for slot in range(slots):
            rows = layout.row_at(slot, np.arange(layout.data_rows(slot)))
            assert np.array_equal(initial(rows), wanted[rows])
    shuffled = np.random.default_rng(0).permutation(120)
    assert np.array_equal(initial(shuffled), wanted[shuffled])
    assert np.array_equal(initial(np.arange(120), width=12)[:, :6], wanted[:, :6]), "nor on the optimizer"


def test_initial_weights_depend_on_seed_table_row_and_column():
    base = initial(np.arange(50))
    assert len(np.unique(base[:, :6])) > 295, "no two elements alike, but for chance"
    assert not np.array_equal(base, initial(np.arange(50), seed=2))
    other = initial(np.arange(50), table_indices=np.array([5, 0, 7]))
    assert (base[:, :6] != other[:, :6]).all(axis=1).sum() > 45
    moved = initial(np.arange(7, 57), first_rows=np.array([0, 7, 57]), low=TABLES["low"][[1, 0, 2]],
                    high=TABLES["high"][[1, 0, 2]], table_indices=np.array([0, 4, 7]))  # fmt: skip
    assert np.array_equal(moved, base), "a table is the same wherever it starts in the table group"


def test_initial_weights_are_uniform_within_bounds_and_the_state_zero():
    records = initial(np.arange(120))
    assert not records[:, 6:].any()
    assert (records[80:, :6] == 10).all()
    assert (records[50:80, :6] >= 0).all() and (records[50:80, :6] <= 0.001).all() and records[50:80, :6].any()
    bounds = {"first_rows": [0], "low": [-1], "high": [3], "table_indices": [0]}
    many = initial(np.arange(20_000), dim=7, **{name: np.array(value) for name, value in bounds.items()})
    assert many.min() >= -1 and many.max() <= 3
    histogram, _ = np.histogram(many, bins=20, range=(-1, 3))
    assert np.abs(histogram / many.size - 0.05).max() < 0.003
    assert abs(np.corrcoef(many[:, 0], many[:, 1])[0, 1]) < 0.03
    assert abs(np.corrcoef(many[:-1, 0], many[1:, 0])[0, 1]) < 0.03


def test_initial_weights_are_these_and_no_others():
    """Other bits would be another job: checkpoints and parity made before would not fit."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    def weight(seed, table, row, column, low, high):
        golden, key = 0x9E3779B97F4A7C15, seed
        for part in (0, table, row):
            key = mix(((key ^ part) + golden) % 2**64)
        u = mix((key + (column + 1) * golden) % 2**64) >> 40
        return F32(low) + F32(F32(high) - F32(low)) * F32(u * 2.0**-24)

    for seed in (0, 12345, 2**64 - 1):
        records = initial([3, 49, 61], seed=seed, dim=3, width=3)
        places = ((4, 3, -0.5, 0.5), (4, 49, -0.5, 0.5), (0, 11, 0.0, 0.001))
        wanted = [[weight(seed, t, row, j, low, high) for j in range(3)] for t, row, low, high in places]
        assert np.array_equal(records, np.array(wanted, F32))
    assert initial([3], seed=0, dim=3, width=3)[0].tolist() == [
        0.4496115446090698,
        0.3694521188735962,
        -0.18718105554580688,
    ]


def test_initialise_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="must have 3 columns, got 4"):
        InitialRecords(Schema.of(3), 0, (0,), (0.0,), (1.0,), (0,)).fill_(np.zeros((1, 4), F32), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="less than -1"):
        initial([-2])
    with pytest.raises(ValueError, match="low"):
        initial([0], low=np.zeros(2))
    with pytest.raises(ValueError, match="start with 0"):
        initial([0], first_rows=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="rows_P"):
        InitialRecords(Schema.of(3), 0, (0,), (0.0,), (1.0,), (0,)).fill_(np.zeros((2, 3), F32), np.zeros(3, np.int64))


# ---------------------------------------------------------------------------------------------------------------- shard


@pytest.mark.parametrize("dim, width", ((4, 4), (5, 6), (16, 32), (64, 65)))
def test_shard_moves_bytes_unchanged(dim, width):
    shard = Shard(wide(dim, width), 50, 20)
    assert (shard.data_bytes, shard.parity_bytes) == (50 * 4 * width, 20 * 4 * width)
    random = np.random.default_rng(0)
    for parity, count in ((False, 50), (True, 20)):
        every = np.arange(count)
        assert not shard.gather(every, parity=parity).any()
        values = random.integers(0, 256, (count, 4 * width), dtype=np.uint8)  # NaNs included
        order = random.permutation(count).astype(np.int64)
        shard.scatter_(order, values, parity=parity)
        assert np.array_equal(shard.gather(order, parity=parity), values)
        asked = random.integers(0, count, 33)
        assert np.array_equal(shard.gather(asked, parity=parity), shard.gather(every, parity=parity)[asked])
    asked = random.integers(0, 50, 33)
    weights = shard.gather_weights(asked)
    assert weights.shape == (33, dim) and np.array_equal(as_bytes(weights), shard.gather(asked)[:, : 4 * dim])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_shard_applies_it_undoes(kind):
    """And what it says of that folds into a parity, and is decoded from it."""
    code, schema, fixed = LinearCode(2, 1), optimizer(kind).schema(8), dict(optimizer(kind).fixed)
    one, other = Shard(schema, 9, 0), Shard(schema, 9, 0)
    initial = InitialRecords(schema, 3, (0,), (-1.0,), (1.0,), (0,))
    for i, shard in enumerate((one, other)):
        shard.initialise_(lambda at, first=9 * i: initial.of(at + first))
        assert np.array_equal(shard.gather(np.arange(9)), initial.of(np.arange(9) + 9 * i))
    every, parity = np.arange(9), Shard(schema, 0, 9)
    before = one.gather(every)
    for shard in (one, other):
        parity.fold_(code, every, shard.gather(every), np.ones(9, np.uint8))
    positions = np.array([1, 4, 8])
    deltas = one.apply_(optimizer(kind), merge([(positions, make_gradients(3, 8))]), 0.1, 2, fixed).deltas_UB
    after = one.gather(every)
    assert np.array_equal(np.flatnonzero((before != after).any(axis=1)), positions)
    parity.fold_(code, positions, deltas, np.ones(3, np.uint8))
    lost, missing = Shard(schema, 9, 0), np.ones(9, np.uint8)
    have = [other.gather(every), parity.gather(every, parity=True)]
    assert lost.install_(code, every, missing, [1, 2], have, 0) == 9 and not missing.any()
    assert np.array_equal(lost.gather(every), after)
    one.undo_(positions, deltas)
    assert np.array_equal(one.gather(every), before)


@pytest.mark.parametrize("rows", (1, 7, 40_000))  # the last is more than 4 MB
def test_records_and_parities_start_with_a_cache_line(rows):
    shard = Shard(wide(32, 33), rows, rows + 1)
    for parity in (False, True):
        array = shard._stores[parity].records_PB
        assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.flags.writeable


def test_shard_results_are_copies_and_empty_requests_work():
    shard = Shard(wide(2, 3), 4, 0)
    shard.gather(np.array([1]))[:] = 7
    shard.gather_weights(np.array([1]))[:] = 7
    assert not shard.gather(np.arange(4)).any()
    nothing = np.zeros(0, np.int64)
    assert shard.gather(nothing, parity=True).shape == (0, 12) and shard.gather_weights(nothing).shape == (0, 2)
    shard.scatter_(nothing, np.zeros((0, 12), np.uint8))
    assert Shard(wide(2, 3), 0, 0).gather(nothing).shape == (0, 12)


def test_shard_refuses_what_does_not_fit():
    shard = Shard(Schema.of(2), 5, 3)
    values = np.ones((2, 8), np.uint8)
    for outside, parity, limit in ((5, False, 5), (-1, False, 5), (3, True, 3)):
        positions = np.array([0, outside])
        with pytest.raises(IndexError, match=f"position {outside} .*{limit} records"):
            shard.gather(positions, parity=parity)
        with pytest.raises(IndexError, match=f"position {outside} "):
            shard.scatter_(positions, values, parity=parity)
    with pytest.raises(IndexError):
        shard.gather_weights(np.array([5]))
    with pytest.raises(ValueError, match="values_UB"):
        shard.scatter_(np.array([0, 1]), values[:, :4])
    with pytest.raises(ValueError, match="int64"):
        shard.gather(np.array([0], np.int32))
    with pytest.raises(ValueError, match="data_rows"):
        Shard(Schema.of(2), -1, 1)
    assert not shard.gather(np.arange(5)).any() and not shard.gather(np.arange(3), parity=True).any()


# ---------------------------------------------------------------------------------------------------------------- pages


def pages_of(memory: Memory) -> dict[str, int]:
    """Bytes of the mapping that holds a memory, as Linux counts them: Rss, AnonHugePages, ..."""
    address, found = memory.array.ctypes.data, False
    counts = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(place, 16) for place in first.split("-"))
            found = begin <= address < end
        elif found and len(rest) == 2:
            counts[first.rstrip(":")] = int(rest[0]) << 10
    return counts


has_huge_pages = pytest.mark.skipif(not HUGE_PAGE_BYTES, reason="this system has no huge pages")
PLACES = 8 * HUGE_PAGE_BYTES // 3 * np.arange(3)  # in 8 huge pages


@has_huge_pages
def test_scattered_writes_touch_little_until_pages_are_merged():
    memory = Memory(9 * HUGE_PAGE_BYTES, scattered=True)
    memory.array[PLACES] = 7
    assert pages_of(memory)["Rss"] <= 3 * mmap.PAGESIZE and pages_of(memory)["AnonHugePages"] == 0
    memory.merge(0, 3 * HUGE_PAGE_BYTES)
    at_first = pages_of(memory)["AnonHugePages"]
    assert HUGE_PAGE_BYTES <= at_first <= 4 * HUGE_PAGE_BYTES
    values = np.random.default_rng(0).integers(0, 256, len(memory.array), dtype=np.uint8)
    memory.array[:] = values
    assert at_first <= pages_of(memory)["AnonHugePages"] <= 4 * HUGE_PAGE_BYTES
    for begin in range(0, len(memory.array), 100_000):
        memory.merge(begin, min(begin + 100_000, len(memory.array)))
    assert pages_of(memory)["AnonHugePages"] >= 8 * HUGE_PAGE_BYTES
    assert np.array_equal(memory.array, values)


@has_huge_pages
def test_memory_filled_in_order_is_huge_pages_from_the_start():
    memory = Memory(9 * HUGE_PAGE_BYTES)
    memory.array[PLACES] = 7
    assert pages_of(memory)["AnonHugePages"] >= 2 * HUGE_PAGE_BYTES


@has_huge_pages
@pytest.mark.parametrize(("begin", "end"), ((0, 1), (0, 0), (HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 1)))
def test_a_page_is_merged_once(begin, end, monkeypatch):
    class Counting:
        def __init__(self):
            self.asked = Counter()

        def madvise(self, address, size, advice):
            assert size == HUGE_PAGE_BYTES and address % size == 0
            self.asked[address] += 1
            return -1  # as where there is no memory in one piece

    monkeypatch.setattr(pages, "_libc", system := Counting())
    memory = Memory(9 * HUGE_PAGE_BYTES, scattered=True)
    for _ in range(2):
        memory.merge(begin, end)
    first = memory.array.ctypes.data
    wanted = [page for page in range(first - first % HUGE_PAGE_BYTES, first + end, HUGE_PAGE_BYTES)]
    wanted = [page for page in wanted if page >= first and page + HUGE_PAGE_BYTES > first + begin]
    assert system.asked == dict.fromkeys(wanted if begin < end else [], 2)
    memory.array[:] = 7
    assert bool((memory.array == 7).all())


@pytest.mark.parametrize("size", (0, 100, pages.LEAST_BYTES, pages.LEAST_BYTES + 100))
@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize("huge_page_bytes", (0, HUGE_PAGE_BYTES))
def test_memory_is_zeros_whatever_the_pages(size, scattered, huge_page_bytes, monkeypatch):
    monkeypatch.setattr(pages, "HUGE_PAGE_BYTES", huge_page_bytes)
    array = Memory(size, scattered).array
    assert len(array) == size and array.flags.writeable and not array.any()
    assert size == 0 or array.ctypes.data % 64 == 0


def is_there(ready, size):
    wait_until(lambda: ready.bytes >= size, 60, f"{size} bytes are ready")


def writers():
    return [thread for thread in threading.enumerate() if thread.name == "ready memory"]


@has_huge_pages
@pytest.mark.parametrize("populates", (True, False))
def test_memory_is_ready_once_all_of_it_was_written(populates, monkeypatch):
    if not populates:  # an older Linux
        monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", -1)
    ready = ReadyMemory(lambda: (1 << 40, 1 << 30))
    sizes = [4 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 100, 100]  # too little for pages of its own is left out
    ready.prepare(sizes)
    is_there(ready, sum(sizes[:2]))
    assert ready.take(5 * HUGE_PAGE_BYTES) is None and ready.take(0) is None
    memory = Memory(3 * HUGE_PAGE_BYTES, True, ready.take(3 * HUGE_PAGE_BYTES))  # of the piece that fits best
    assert len(memory.array) == 3 * HUGE_PAGE_BYTES and memory.array.flags.writeable and not memory.array.any()
    assert pages_of(memory)["Rss"] >= 3 * HUGE_PAGE_BYTES and ready.bytes == sizes[0]
    memory.merge(0, len(memory.array))
    store = stores_in(ready)(sizes[0] // 16, 16, False, True)
    assert not ready.bytes and store.records_PB.shape == (sizes[0] // 16, 16)
    small = stores_in(ready)(7, 16, False, True)  # there is none any more: it has memory all the same
    assert small.records_PB.shape == (7, 16) and small.memory.array.flags.writeable


@has_huge_pages
@pytest.mark.parametrize("room", ((0, 0), (16 * HUGE_PAGE_BYTES, 11 * HUGE_PAGE_BYTES)))
def test_memory_is_not_made_ready_where_there_is_little_or_nobody_knows(room):
    ready = ReadyMemory(lambda: room)
    ready.prepare([4 * HUGE_PAGE_BYTES])
    for thread in writers():
        thread.join(60)
    assert not writers() and not ready.bytes and ready.take(pages.LEAST_BYTES) is None


@has_huge_pages
def test_ready_memory_that_is_not_wanted_any_more_goes():
    ready = ReadyMemory(lambda: (1 << 40, 0))
    ready.prepare([2 * HUGE_PAGE_BYTES])
    is_there(ready, 2 * HUGE_PAGE_BYTES)
    ready.prepare([2 * HUGE_PAGE_BYTES])  # wanted before: nothing is written again
    assert ready.bytes and not [thread for thread in writers() if thread.is_alive()]
    ready.prepare(())
    assert not ready.bytes and ready.take(pages.LEAST_BYTES) is None
    ready.prepare([1 << 40])
    ready.prepare(())
    for thread in writers():
        thread.join(60)
    assert not writers() and not ready.bytes


@has_huge_pages
def test_ready_memory_is_for_the_store_that_it_was_made_for():
    """A small store, for which none is made ready, does not take that of a large one."""
    ready, large, small = ReadyMemory(lambda: (1 << 40, 0)), 3 * HUGE_PAGE_BYTES, 5000
    ready.prepare([small, large, large])
    is_there(ready, 2 * large)
    assert ready.take(small) is None and ready.take(small - 16) is None and ready.bytes == 2 * large
    assert len(ready.take(large - 16)) == large - 16 and len(ready.take(large)) == large
    assert ready.take(large) is None and not ready.bytes


@has_huge_pages
def test_memory_that_a_slot_took_which_did_not_come_is_made_ready_again():
    ready, sizes = ReadyMemory(lambda: (1 << 40, 0)), [3 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES]
    ready.prepare(sizes)
    is_there(ready, sum(sizes))
    assert ready.take(sizes[0]) is not None
    ready.prepare(sizes)
    is_there(ready, sum(sizes))
    assert ready.take(sizes[0]) is not None and ready.take(sizes[1]) is not None
    ready.prepare(())
    assert not ready.bytes


@has_huge_pages
def test_spares_that_make_memory_ready_at_once_leave_an_eighth_free(monkeypatch):
    """Each has looked how much is free before the others have written theirs."""
    monkeypatch.setattr(pages, "LOOK_BYTES", HUGE_PAGE_BYTES)
    size, looks = 8 * HUGE_PAGE_BYTES, []

    def room():
        looks.append(len(looks))
        return 64 * HUGE_PAGE_BYTES, (40 + 4 * len(looks)) * HUGE_PAGE_BYTES  # others write, too

    ready = ReadyMemory(room)
    ready.prepare([size])
    for thread in writers():
        thread.join(60)
    assert not writers() and not ready.bytes and 2 < len(looks) <= 5


def test_more_memory_than_there_can_be():
    with pytest.raises(MemoryError):
        Memory(1 << 62)


# ------------------------------------------------------------------------------------------------------------ delta log


def entry(seed, universe=40, width=12):
    random = np.random.default_rng(seed)
    positions = np.sort(random.permutation(universe)[: random.integers(0, universe)]).astype(np.int64)
    return positions, random.integers(0, 256, (len(positions), width), dtype=np.uint8)


def filled(steps, table_groups=2, floor=0):
    log = DeltaLog(table_groups, floor=floor)
    for step in range(floor + 1, floor + steps + 1):
        parts = [entry(10 * step + table_group) for table_group in range(table_groups)]
        log.append(step, [p for p, _ in parts], [d for _, d in parts])
    return log


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(0, 5),
    drop=st.integers(0, 3),
    floor=st.integers(0, 9),
    seed=st.integers(0, 99),
    ascending=st.booleans(),
)
def test_changes_match_a_plain_search(steps, drop, floor, seed, ascending):
    log = filled(steps, floor=floor)
    log.forget(floor + drop)
    random = np.random.default_rng(seed)
    queries = random.integers(-3, 45, 25)
    queries = np.sort(queries) if ascending else queries
    for table_group, (after, through) in itertools.product(
        range(2), itertools.combinations_with_replacement(range(log.floor, log.last + 1), 2)
    ):
        wanted, touched = np.zeros((25, 12), np.uint8), False
        for step in range(after + 1, through + 1):
            positions, deltas = log.get(step)[table_group]
            for q, query in enumerate(queries.tolist()):
                for index in np.flatnonzero(positions == query):
                    wanted[q] ^= deltas[index]
                    touched = True
        found = log.changes(table_group, queries, after, through)
        assert (found is not None) == touched
        assert found is None or np.array_equal(found, wanted)
        summed = np.zeros_like(wanted)
        for rows, deltas in log.parts(table_group, queries, after, through):
            assert len(rows) and (np.diff(rows) > 0).all()
            summed[rows] ^= deltas
        assert np.array_equal(summed, wanted)


def test_long_logs_are_searched_correctly():
    positions = np.cumsum(np.random.default_rng(0).integers(1, 9, 5000)).astype(np.int64)
    deltas = np.random.default_rng(1).integers(0, 256, (5000, 8), dtype=np.uint8)
    log = DeltaLog(1)
    log.append(1, [positions], [deltas])
    everything = np.arange(positions[-1] + 10)
    wanted = np.zeros((len(everything), 8), np.uint8)
    wanted[positions] = deltas
    assert np.array_equal(log.changes(0, everything, 0, 1), wanted)
    backwards = everything[::-1]
    assert np.array_equal(log.changes(0, backwards, 0, 1), wanted[::-1])
    few = np.array([positions[0], positions[-1], positions[2500], positions[2500]])
    assert np.array_equal(log.changes(0, few, 0, 1), wanted[few])


def test_the_log_undoes_an_optimizer_to_any_step_it_holds():
    records, log = make_records("rowwise_adagrad", 30, 8), DeltaLog(1)
    history = [records.copy()]
    for step in range(1, 6):
        positions = np.sort(np.random.default_rng(step).permutation(30)[:11]).astype(np.int64)
        delta = update_("rowwise_adagrad", records, positions, make_gradients(11, 8, seed=step), 0.1, 1e-8)
        log.append(step, [positions], [delta])
        history.append(records.copy())
    rows = np.arange(30)
    for step in range(5):
        changes = log.changes(0, rows, step, 5)
        assert np.array_equal(as_bytes(records) ^ changes, as_bytes(history[step]))
    assert log.changes(0, rows, 5, 5) is None


def test_append_forget_and_pop_keep_the_bounds():
    log = DeltaLog(1)
    assert (log.floor, log.last, log.bytes) == (0, 0, 0)
    sizes = [0]
    for step in range(1, 6):
        positions, deltas = entry(step)
        log.append(step, [positions], [deltas])
        sizes.append(positions.nbytes + deltas.nbytes)
        assert log.bytes == sum(sizes)
        assert log.get(step)[0][0] is positions and log.get(step)[0][1] is deltas
    log.forget(2)
    assert (log.floor, log.last, log.bytes) == (2, 5, sum(sizes[3:]))
    log.forget(1)
    assert log.floor == 2, "the floor never falls"
    wanted = entry(5)
    popped = log.pop()
    assert np.array_equal(popped[0][0], wanted[0]) and np.array_equal(popped[0][1], wanted[1])
    assert (log.last, log.bytes) == (4, sum(sizes[3:5]))
    log.append(5, [wanted[0]], [wanted[1]])
    log.forget(100)
    assert (log.floor, log.last, log.bytes) == (5, 5, 0)
    with pytest.raises(LookupError, match="no step after 5"):
        log.pop()


def test_the_log_may_start_anywhere():
    log = DeltaLog(1, floor=7)
    assert (log.floor, log.last) == (7, 7)
    with pytest.raises(ValueError, match="8"):
        log.append(1, *([x] for x in entry(1)))
    log.append(8, *([x] for x in entry(1)))
    assert log.last == 8


def test_the_log_refuses_what_does_not_fit():
    log = filled(3)
    log.forget(1)
    positions, deltas = entry(99)
    size = log.bytes
    for step in (3, 5):
        with pytest.raises(ValueError, match="`step` must be 4"):
            log.append(step, [positions] * 2, [deltas] * 2)
    with pytest.raises(ValueError, match="2 table groups"):
        log.append(4, [positions], [deltas])
    with pytest.raises(ValueError, match=r"positions\[1\].*ascending"):
        log.append(4, [positions, positions[::-1]], [deltas] * 2)
    with pytest.raises(ValueError, match=r"deltas\[0\]"):
        log.append(4, [positions] * 2, [deltas[:-1], deltas])
    assert (log.floor, log.last, log.bytes) == (1, 3, size)
    query = np.arange(3)
    for after, through in ((0, 3), (1, 4), (0, 4)):
        with pytest.raises(LookupError, match=r"2\.\.3"):
            log.changes(0, query, after, through)
    for step in (1, 4):
        with pytest.raises(LookupError, match=rf"step {step} .*2\.\.3"):
            log.get(step)
    with pytest.raises(ValueError, match="table_group"):
        log.changes(2, query, 1, 3)
    with pytest.raises(ValueError, match="int64"):
        log.changes(0, query.astype(np.int32), 1, 3)


def test_warm_leaves_nothing_to_compile():
    records.warm()
    modules = [shards, merging, initial_records, delta_log, positions_of]
    modules += [sys.modules[optimizer(kind).kernel.__module__] for kind in KINDS]
    kernels = [f for m in modules for f in vars(m).values() if hasattr(f, "signatures") and f.__module__ == m.__name__]
    kernels += [optimizer(kind).blocks for kind in KINDS]
    before = [len(kernel.signatures) for kernel in kernels]
    assert len(kernels) > 10
    log = DeltaLog(1)
    for kind in KINDS:
        store = Shard(optimizer(kind).schema(8), 9, 3)
        store.initialise_(InitialRecords(store.schema, 3, (0,), (-1.0,), (1.0,), (0,)).of)
        part = (np.arange(4), make_gradients(4, 8))
        merged = merge([part, part, part])
        positions = merged.positions
        delta = store.apply_(optimizer(kind), merged, 0.1, 1, {}).deltas_UB
        store.scatter_(positions, store.gather(positions))
        store.gather_weights(positions)
        log = DeltaLog(1)
        log.append(1, [positions], [delta])
        log.changes(0, positions, 0, 1)
    assert [len(kernel.signatures) for kernel in kernels] == before
