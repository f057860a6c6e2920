"""Parts of checkpoints: what was written comes back, bit for bit or as near as told; what was altered never does."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ecrec.errors import CheckpointError
from torch_ecrec.records import quantised
from torch_ecrec.records.halves import numbers_of, records_of
from torch_ecrec.records.schema import Schema, StateField
from torch_ecrec.storage import parts, row_ids
from torch_ecrec.storage.location import Location
from torch_ecrec.storage.manifest import Encoding, PartEntry
from torch_ecrec.storage.parts import PartReader, PartWriter

STATES = ((), (StateField("momentum1", True),), (StateField("exp_avg"), StateField("exp_avg_sq")))
schemas = st.builds(
    Schema.of,
    st.integers(1, 33),
    st.sampled_from(STATES),
    st.sampled_from(("float32", "float16", "bfloat16")),
)
encodings = st.builds(Encoding, bits=st.sampled_from((0, 2, 3, 4, 8)), zstd=st.sampled_from((0, 1, 19)))


def written(location: Location, schemas: list[Schema], blocks: list[Any], encoding: Encoding = Encoding()) -> PartEntry:  # noqa: B008
    part = PartWriter(location, "one.part", schemas, encoding, 3)
    total = part.bytes
    for table_group, rows_N, records_NB in blocks:
        total += part.write(table_group, rows_N, records_NB)
    total += part.write_dense(0, [1, -(1 << 63), 5], b"some bytes")
    total += part.write_dense(7, [], b"")
    assert part.bytes == total
    return part.close()


def some_records(schema: Schema, count: int, seed: int) -> Any:
    numbers = np.random.default_rng(seed).standard_normal((count, schema.width)).astype(np.float32)
    return records_of(numbers, schema)


# --- row numbers -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, row_ids.ROW_MOST - 1), min_size=1, max_size=50))
def test_any_rows_come_back(rows: list[int]) -> None:
    rows_N = np.array(rows, np.int64)
    ids, data = row_ids.encode(rows_N)
    assert len(data) == ids.nbytes(len(rows)) and len(data) % 8 == 0
    assert row_ids.decode(ids, len(rows), data).tolist() == rows


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(-3, 9), st.integers(1, 300)), min_size=1, max_size=6),
)
def test_progressions_take_few_bytes(runs: list[tuple[int, int, int]]) -> None:
    rows_N = np.concatenate([1000 + first + step * np.arange(count) for first, step, count in runs])
    ids, data = row_ids.encode(rows_N)
    np.testing.assert_array_equal(row_ids.decode(ids, len(rows_N), data), rows_N)
    assert len(data) <= 2 * 12 * len(runs) + 8


def test_the_examples_of_its_docstring() -> None:
    ids, data = row_ids.encode(np.array([5, 8, 11, 14, 40, 43, 46]))
    assert (ids.runs, ids.width) == (0, 1) and len(data) == 8  # 6 bytes one by one: less than three runs
    ids, data = row_ids.encode(np.array([5, 6, 9, 70, 71]))
    assert data.tolist() == [0, 2, 60, 0, 0, 0, 0, 0] and ids.least == 1
    ids, data = row_ids.encode(np.arange(5, 3_000_000, 3))
    assert ids.runs == 1 and len(data) == 16


@pytest.mark.parametrize("rows", [[-1], [0, row_ids.ROW_MOST]])
def test_rows_that_cannot_be_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="rows must be 0 to"):
        row_ids.encode(np.array(rows))


def test_row_numbers_that_no_writer_writes_are_refused() -> None:
    ids, data = row_ids.encode(np.arange(100))
    with pytest.raises(ValueError, match="runs are of 100 rows, not 99"):
        row_ids.decode(ids, 99, data)
    with pytest.raises(ValueError, match="a row is negative"):
        row_ids.decode(row_ids.RowIds(5, width=1, least=-9), 2, np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="1, 2, 4 or 8 bytes, not 3"):
        row_ids.decode(row_ids.RowIds(5, width=3), 2, np.zeros(8, np.uint8))


# --- quantisation ----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.sampled_from((2, 3, 4, 8)), st.integers(1, 40), st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_a_weight_comes_back_within_half_a_scale(bits: int, dim: int, seed: int, power: float) -> None:
    """The oracle is the formula, in float64."""
    random = np.random.default_rng(seed)
    weights_NW = (random.standard_normal((6, dim + 2)) * 10.0**power).astype(np.float32)
    found = quantised.quantise(weights_NW, dim, bits)
    assert found.good_N.all() and found.codes_NC.shape == (6, math.ceil(dim * bits / 8))
    restored_ND = quantised.restore(found.scale_N, found.bias_N, found.codes_NC, dim, bits)
    weights_ND = weights_NW[:, :dim].astype(np.float64)
    least_N1 = weights_ND.min(1, keepdims=True)
    scale_N1 = ((weights_ND.max(1, keepdims=True) - least_N1) / (2**bits - 1)).astype(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes_ND = np.where(scale_N1 > 0, np.rint((weights_ND - least_N1) / scale_N1), 0)
    wanted_ND = (least_N1 + np.clip(codes_ND, 0, 2**bits - 1) * scale_N1).astype(np.float32)
    half = scale_N1 / 2 + np.abs(weights_ND) * 2.0**-23
    assert (np.abs(restored_ND - weights_ND) <= half * (1 + 1e-6)).all()
    same = restored_ND == wanted_ND  # but where the quotient is at a tie and rounded by a bit
    assert same.mean() > 0.9 or dim < 10


def test_the_example_of_quantisation() -> None:
    found = quantised.quantise(np.array([[-1.0, 0.5, 0.0, 2.0]], np.float32), 4, 2)
    assert found.codes_NC.tolist() == [[0 | 2 << 2 | 1 << 4 | 3 << 6]]
    assert quantised.restore(found.scale_N, found.bias_N, found.codes_NC, 4, 2).tolist() == [[-1.0, 1.0, 0.0, 2.0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_told(value: float) -> None:
    weights = np.array([[1.0, 2.0], [value, 0.0], [0.0, value]], np.float32)
    assert quantised.quantise(weights, 2, 4).good_N.tolist() == [1, 0, 0]


def test_the_whole_range_of_float32_is_quantised_or_told() -> None:
    most = np.finfo(np.float32).max
    weights = np.array([[-most, most, 0.0], [5e-324, 1e-45, 0.0], [3.0, 3.0, 3.0]], np.float32)
    for bits in (2, 3, 4, 8):
        found = quantised.quantise(weights, 3, bits)
        restored = quantised.restore(found.scale_N, found.bias_N, found.codes_NC, 3, bits)
        good = found.good_N.astype(bool)
        assert np.isfinite(restored[good]).all() and good[1:].all()
        assert restored[2].tolist() == [3.0, 3.0, 3.0]


# --- round trips -----------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.lists(schemas, min_size=1, max_size=3), encodings, st.integers(0, 2**32 - 1), st.data())
def test_what_was_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    of_table_groups: list[Schema],
    encoding: Encoding,
    seed: int,
    data: st.DataObject,
) -> None:
    location = Location(str(tmp_path_factory.mktemp("parts")))
    blocks = []
    for number in range(data.draw(st.integers(0, 4))):
        table_group = data.draw(st.integers(0, len(of_table_groups) - 1))
        rows = data.draw(st.lists(st.integers(0, 10**6), max_size=20))
        records_NB = some_records(of_table_groups[table_group], len(rows), seed + number)
        if data.draw(st.booleans()) and len(rows):
            records_NB[0] = 255  # NaN in every number
        blocks.append((table_group, np.array(rows, np.int64), records_NB))
    entry = written(location, of_table_groups, blocks, encoding)
    assert entry == PartEntry.of(msgspec.json.decode(msgspec.json.encode(entry.to_json())))
    assert location.size("one.part") == entry.bytes and location.list() == ["one.part"]
    found: list[dict[int, list[bytes]]] = [{} for _ in of_table_groups]
    for table_group, rows_N, records_NB in PartReader(location, entry, of_table_groups).blocks():
        for row, record in zip(rows_N.tolist(), records_NB, strict=True):
            found[table_group].setdefault(row, []).append(record.tobytes())
    wanted: list[dict[int, list[bytes]]] = [{} for _ in of_table_groups]
    for table_group, rows_N, records_NB in blocks:
        for row, record in zip(rows_N.tolist(), records_NB, strict=True):
            wanted[table_group].setdefault(row, []).append(record.tobytes())
    assert entry.rows == [sum(map(len, of_table_group.values())) for of_table_group in wanted]
    for s, schema in enumerate(of_table_groups):
        assert found[s].keys() == wanted[s].keys()
        first = 0 if not encoding.bits else schema.fields[0].nbytes
        for row in wanted[s]:
            assert sorted(r[first:] for r in found[s][row]) == sorted(r[first:] for r in wanted[s][row])
    dense = PartReader(location, entry, of_table_groups).dense()
    assert dense == {0: ([1, -(1 << 63), 5], b"some bytes"), 7: ([], b"")}
    PartReader(location, entry, of_table_groups).check()


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_error_that_is_told_is_the_error_that_is_made(tmp_path: Path, weights: str, bits: int) -> None:
    schema, location = Schema.of(24, (StateField("momentum1", True),), weights), Location(str(tmp_path))
    before_NB, rows_N = some_records(schema, 60, 1), np.random.default_rng(2).permutation(60)
    before_NB[rows_N[7]] = 255  # all NaN: written exactly, and counted as such
    tables = [[("left", 0), ("right", 25)]]
    part = PartWriter(location, "one.part", [schema], Encoding(bits=bits), 0, tables)
    part.write(0, rows_N, before_NB[rows_N])
    entry = part.close()
    after_NB = np.zeros_like(before_NB)
    for _, found_N, records_NB in PartReader(location, entry, [schema]).blocks():
        after_NB[found_N] = records_NB
    np.testing.assert_array_equal(after_NB[:, schema.fields[0].nbytes :], before_NB[:, schema.fields[0].nbytes :])
    np.testing.assert_array_equal(after_NB[rows_N[7]], before_NB[rows_N[7]])
    numbers = [numbers_of(r, schema)[:, :24].astype(np.float64) for r in (before_NB, after_NB)]
    difference_ND = np.nan_to_num(np.abs(numbers[0] - numbers[1]))
    assert difference_ND.max() > 0
    for error, rows in zip(entry.errors, (slice(0, 25), slice(25, 60)), strict=True):
        assert error.largest == difference_ND[rows].max()
        assert error.rms == pytest.approx(np.sqrt((difference_ND[rows] ** 2).mean()), rel=1e-9)
    assert [error.table for error in entry.errors] == ["left", "right"]
    exact = PartWriter(location, "exact.part", [schema])
    exact.write(0, rows_N, before_NB[rows_N])
    size = exact.close().bytes
    assert entry.bytes < size and not exact.close().errors


def test_quantisation_that_saves_nothing_is_not_done(tmp_path: Path) -> None:
    schema, location = Schema.of(2), Location(str(tmp_path))  # 8 bytes, less than a scale, a zero and codes
    records_NB = some_records(schema, 5, 0)
    entry = written(location, [schema], [(0, np.arange(5), records_NB)], Encoding(bits=4))
    ((_, _, found_NB),) = PartReader(location, entry, [schema]).blocks()
    np.testing.assert_array_equal(found_NB, records_NB)
    assert [error.largest for error in entry.errors] == [0.0]


def test_blocks_are_of_a_bounded_size_and_only_what_is_wanted_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema, location = Schema.of(4), Location(str(tmp_path))
    monkeypatch.setattr(parts, "BLOCK_BYTES", 10 * schema.nbytes + 3)
    records_NB = some_records(schema, 35, 0)
    entry = written(location, [schema], [(0, np.arange(35)[::-1], records_NB)])
    assert [len(rows) for _, rows, _ in PartReader(location, entry, [schema]).blocks()] == [10, 10, 10, 5]
    found = list(
        PartReader(location, entry, [schema]).blocks(lambda table_group, rows_N: (rows_N >= 12) & (rows_N % 2 == 0))
    )
    assert [rows.tolist() for _, rows, _ in found] == [[34, 32, 30, 28, 26], [24, 22, 20, 18, 16], [14, 12]]
    np.testing.assert_array_equal(np.concatenate([records for *_, records in found]), records_NB[0:23:2])
    assert (
        sum(len(r) for _, r, _ in PartReader(location, entry, [schema]).blocks(lambda table_group, rows_N: None)) == 35
    )


def test_memory_that_is_not_contiguous_is_written_as_it_looks(tmp_path: Path) -> None:
    schema, location = Schema.of(3), Location(str(tmp_path))
    wide = np.random.default_rng(0).integers(0, 256, (9, 40), np.uint8)
    entry = written(location, [schema], [(0, np.arange(9), wide[:, 5:17])])
    ((_, _, found_NB),) = PartReader(location, entry, [schema]).blocks()
    np.testing.assert_array_equal(found_NB, wide[:, 5:17])


@pytest.mark.parametrize(
    ("rows", "records"),
    [
        (np.arange(3), np.zeros((3, 11), np.uint8)),
        (np.arange(3), np.zeros((2, 12), np.uint8)),
        (np.arange(3), np.zeros((3, 12), np.int8)),
        (np.arange(3, dtype=np.int32), np.zeros((3, 12), np.uint8)),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, rows: Any, records: Any) -> None:
    part = PartWriter(Location(str(tmp_path)), "one.part", [Schema.of(3)])
    with pytest.raises(ValueError, match="must be"):
        part.write(0, rows, records)
    part.abandon()
    assert not list(tmp_path.iterdir())


# --- altered ---------------------------------------------------------------------------------------------------------


def read_all(location: Location, entry: PartEntry, of_table_groups: list[Schema]) -> list[Any]:
    reader = PartReader(location, entry, of_table_groups)
    return [*[(s, rows.tolist(), records.tobytes()) for s, rows, records in reader.blocks()], reader.dense()]


@pytest.mark.parametrize("encoding", [Encoding(), Encoding(bits=4, zstd=3)], ids=["raw", "packed"])
def test_any_byte_that_is_another_is_found(tmp_path: Path, encoding: Encoding) -> None:
    of_table_groups = [Schema.of(5), Schema.of(6, STATES[1], "float16")]
    few = [some_records(schema, count, count) for schema, count in zip(of_table_groups, (4, 2), strict=True)]
    blocks = [(0, np.arange(4), few[0]), (1, np.array([9, 2]), few[1])]
    location = Location(str(tmp_path))
    entry = written(location, of_table_groups, blocks, encoding)
    whole, path = (tmp_path / "one.part").read_bytes(), tmp_path / "one.part"
    assert len(read_all(location, entry, of_table_groups)) == 3
    dense = [range(place.offset, place.offset + place.bytes) for place in entry.dense]
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1 << (place % 8)
        path.write_bytes(altered)
        with pytest.raises(CheckpointError, match=r"one\.part, block \d+ at byte \d+: .*restore another"):
            list(PartReader(location, entry, of_table_groups).blocks())
        if any(place in span for span in dense):
            with pytest.raises(CheckpointError, match=r"one\.part, block \d+ at byte \d+"):
                PartReader(location, entry, of_table_groups).dense()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="too early"):
            list(PartReader(location, entry, of_table_groups).blocks())
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="more follows after the end"):
        list(PartReader(location, entry, of_table_groups).blocks())


def test_no_block_is_given_before_its_hash_was_right(tmp_path: Path) -> None:
    schema, location = Schema.of(4), Location(str(tmp_path))
    blocks = [(0, np.array([i]), some_records(schema, 1, i)) for i in range(3)]
    entry = written(location, [schema], blocks)
    path = tmp_path / "one.part"
    data = bytearray(path.read_bytes())
    data[data.find(blocks[1][2].tobytes())] ^= 4
    path.write_bytes(data)
    given = []
    with pytest.raises(CheckpointError, match="block 2 at byte"):
        for _, rows_N, _ in PartReader(location, entry, [schema]).blocks():
            given += rows_N.tolist()
    assert given == [0]


def test_blocks_of_another_file_or_place_are_found(tmp_path: Path) -> None:
    """Each block is right by itself, and its hash too."""
    schema, location = Schema.of(4), Location(str(tmp_path))
    same = some_records(schema, 1, 0)
    entries, files = [], []
    for _ in range(2):
        entries.append(written(location, [schema], [(0, np.array([i]), same) for i in range(2)]))
        files.append((tmp_path / "one.part").read_bytes())
    mine, other = files
    starts = [i for i in range(len(mine)) if mine[i : i + 4] == b"ECRB"]
    a, b = slice(starts[1], starts[2]), slice(starts[2], starts[3])
    assert len(mine[a]) == len(mine[b])
    swapped = mine[: a.start] + mine[b] + mine[a] + mine[b.stop :]
    foreign = mine[: a.start] + other[a] + mine[a.stop :]
    for data, what in ((swapped, "its hash"), (foreign, "its hash"), (other, "another file than the manifest means")):
        (tmp_path / "one.part").write_bytes(data)
        with pytest.raises(CheckpointError, match=what):
            list(PartReader(location, entries[0], [schema]).blocks())
    (tmp_path / "one.part").write_bytes(mine)
    for change in ({"digest": "0" * 32}, {"rows": [3]}, {"blocks": 5}):
        entry = msgspec.structs.replace(entries[0], **change)
        with pytest.raises(CheckpointError, match="the manifest says otherwise"):
            list(PartReader(location, entry, [schema]).blocks())
    with pytest.raises(CheckpointError, match="it is of another model"):
        list(PartReader(location, entries[0], [Schema.of(4, weights="float16")]).blocks())


def test_a_part_that_was_not_closed_is_not_there(tmp_path: Path) -> None:
    schema, location = Schema.of(4), Location(str(tmp_path))
    part = PartWriter(location, "one.part", [schema])
    part.write(0, np.arange(2), some_records(schema, 2, 0))
    assert not location.exists("one.part")
    part.abandon()
    part.abandon()
    assert not list(tmp_path.iterdir())
    entry = written(location, [schema], [])
    with pytest.raises(CheckpointError, match=r"cannot read .*two\.part.*it is not there"):
        list(PartReader(location, msgspec.structs.replace(entry, name="two.part"), [schema]).blocks())


def test_what_describes_no_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match="describes no part"):
        PartEntry.of({"name": "../x"})
    with pytest.raises(ValueError, match="encoding of checkpoints"):
        Encoding.of({"bits": 5})
