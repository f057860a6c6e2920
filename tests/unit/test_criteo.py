"""The reader of click logs: what it gives, and what it says of damaged files."""

from __future__ import annotations

import gzip
import math
import time
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from torch_ecrec.demo import criteo
from torch_ecrec.demo.criteo import CATEGORIES, INTEGERS, auc, read, synthetic, write_synthetic

DATA = ROOT.parent / "shared" / "data"


def line(label: str = "1", integers: list[str] | None = None, categories: list[str] | None = None) -> str:
    fields = [label, *(integers or ["3"] * INTEGERS), *(categories or ["0a1b2c3d"] * CATEGORIES)]
    return "\t".join(fields) + "\n"


def write(path: Path, *lines: str) -> Path:
    path.write_bytes("".join(lines).encode())
    return path


def test_fields_become_numbers(tmp_path: Path) -> None:
    integers = ["", "0", "-2", "1", "7", "123456789"] + ["5"] * 7
    categories = ["", "0", "ffffffff", "FFFFFFFF", "68fd1e64"] + ["68fd1e64"] * 21
    clicks = read(write(tmp_path / "a.tsv", line("1", integers, categories), line("0")), rows_per_table=1000)
    assert clicks.labels.tolist() == [1.0, 0.0]
    expected = [math.log1p(x) for x in (0, 0, 0, 1, 7, 123456789, 5)]
    assert clicks.dense[0, :7].tolist() == pytest.approx(expected, rel=1e-6)
    assert clicks.dense.dtype == clicks.labels.dtype == np.float32 and clicks.categories.dtype == np.int32
    rows = clicks.categories[0]
    assert ((rows >= 0) & (rows < 1000)).all()
    assert len(set(rows.tolist())) > 20  # the same value in other columns is another category


def test_the_hash_stays_as_it_is(tmp_path: Path) -> None:
    clicks = read(write(tmp_path / "a.tsv", line(categories=["", "0", "68fd1e64"] * 8 + ["f", "F"])), 1 << 30)
    expected = []
    for column, value in enumerate([1 << 32, 0, 0x68FD1E64] * 8 + [15, 15]):
        z = (value + ((column + 1) << 33) + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append((z ^ (z >> 31)) % (1 << 30))
    assert clicks.categories[0].tolist() == expected


def test_gzip_line_ends_and_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tmp_path / "a.tsv"
    write_synthetic(plain, 50, seed=1)
    data = plain.read_bytes()
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.tsv").write_bytes(data.replace(b"\n", b"\r\n"))
    (tmp_path / "d.tsv").write_bytes(data.rstrip(b"\n"))
    expected = read(plain, 100)
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 333)
    for name in ("a.tsv", "b.tsv.gz", "c.tsv", "d.tsv"):
        clicks = read(tmp_path / name, 100)
        assert np.array_equal(clicks.labels, expected.labels)
        assert np.array_equal(clicks.dense, expected.dense)
        assert np.array_equal(clicks.categories, expected.categories)
    assert np.array_equal(read(plain, 100, limit=7).dense, expected.dense[:7])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (line().replace("\t3\t", "\t", 1), r"line 3: 39 columns, expected 40"),
        ("\n", r"line 3: 1 columns, expected 40"),
        (line().replace("\n", "\t\n"), r"line 3: 41 columns, expected 40"),
        (line("2"), r"line 3: label '2', expected 0 or 1"),
        (line(""), r"line 3: label '', expected 0 or 1"),
        (line("01"), r"line 3: label '01', expected 0 or 1"),
        (line(integers=["1"] * 12 + ["4x"]), r"line 3: integer I13 is '4x'"),
        (line(integers=["-"] + ["1"] * 12), r"line 3: integer I1 is '-'"),
        (line(integers=["1.5"] + ["1"] * 12), r"line 3: integer I1 is '1.5'"),
        (line(integers=["1" * 19] + ["1"] * 12), r"line 3: integer I1 is '1111111111111111111'"),
        (line(categories=["0g"] + ["a"] * 25), r"line 3: category C1 is '0g', expected at most 8 hex digits"),
        (line(categories=["a"] * 25 + ["123456789"]), r"line 3: category C26 is '123456789', expected at most 8"),
        (line(categories=["a"] * 25 + ["-1"]), r"line 3: category C26 is '-1'"),
    ],
)
@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str, block_bytes: int
) -> None:
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", block_bytes)
    path = write(tmp_path / "bad.tsv", line(), line(), text, line())
    with pytest.raises(ValueError, match=rf"bad\.tsv, {problem}"):
        read(path, 100)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.tsv: no such file"):
        read(tmp_path / "none.tsv", 100)
    for name in ("empty.tsv", "empty.tsv.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"") if name == "zipped.tsv.gz" else b"")
        with pytest.raises(ValueError, match=rf"{name}: the file is empty"):
            read(tmp_path / name, 100)
    (tmp_path / "nothing.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match="the file is empty"):
        read(tmp_path / "nothing.gz", 100)
    write(tmp_path / "plain.tsv.gz", line())
    with pytest.raises(ValueError, match=r"plain\.tsv\.gz: not a gzip file"):
        read(tmp_path / "plain.tsv.gz", 100)
    with pytest.raises(ValueError, match="cannot be read"):
        read(tmp_path, 100)
    with pytest.raises(ValueError, match="`rows_per_table` must be at least 1, got 0"):
        read(tmp_path / "plain.tsv.gz", 0)


@pytest.mark.parametrize("keep", [0.3, 0.999])
def test_a_truncated_gzip_file_is_told(tmp_path: Path, keep: float) -> None:
    whole = tmp_path / "whole.tsv.gz"
    write_synthetic(whole, 300, seed=2)
    data = whole.read_bytes()
    cut = tmp_path / "cut.tsv.gz"
    cut.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ValueError, match=r"cut\.tsv\.gz: the gzip file is truncated after line \d+"):
        read(cut, 100)
    middle = len(data) // 2
    cut.write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])
    with pytest.raises(ValueError, match=r"cut\.tsv\.gz"):
        read(cut, 100)


def test_synthetic_lines_are_what_their_file_says(tmp_path: Path) -> None:
    path = tmp_path / "made.tsv.gz"
    write_synthetic(path, 200, seed=3)
    clicks, made = read(path, 500), synthetic(200, 3, 500)
    assert np.array_equal(clicks.labels, made.labels)
    assert np.array_equal(clicks.dense, made.dense)
    assert np.array_equal(clicks.categories, made.categories)
    assert not np.array_equal(made.labels, synthetic(200, 4, 500).labels)


def test_synthetic_lines_have_the_shape_of_real_ones() -> None:
    clicks = synthetic(20_000, 0, 1 << 20)
    assert 0.2 < clicks.labels.mean() < 0.32
    train, test = clicks.split(0.2)
    assert len(train) == 16_000 and len(test) == 4_000
    counts = np.sort(np.bincount(train.categories[:, 2]))[::-1]
    assert counts[0] > 200 and (counts == 1).sum() > 1000  # a few hot categories, many that occur once
    # A score made of the click rate of each frequent category tells clicks apart.
    score = np.zeros(len(test))
    for column in range(CATEGORIES):
        rows, inverse = np.unique(clicks.categories[:, column], return_inverse=True)
        seen = np.bincount(inverse[:16_000], minlength=len(rows))
        clicked = np.bincount(inverse[:16_000], weights=train.labels, minlength=len(rows))
        score += ((clicked + 0.26 * 20) / (seen + 20))[inverse[16_000:]]
    assert auc(test.labels, score) > 0.65


def test_auc() -> None:
    labels = np.array([0, 0, 1, 1], dtype=np.float32)
    assert auc(labels, np.array([0.1, 0.4, 0.35, 0.8])) == 0.75
    assert auc(labels, np.array([1.0, 1.0, 1.0, 1.0])) == 0.5
    assert auc(labels, np.array([0.0, 0.1, 0.2, 0.3])) == 1.0
    assert math.isnan(auc(np.ones(3, np.float32), np.arange(3.0)))
    random = np.random.default_rng(0)
    labels, scores = (random.random(60) < 0.4).astype(np.float32), random.integers(0, 10, 60)
    ups, downs = scores[labels == 1], scores[labels == 0]
    pairs = (ups[:, None] > downs).sum() + 0.5 * (ups[:, None] == downs).sum()
    assert auc(labels, scores) == pytest.approx(pairs / (len(ups) * len(downs)))


def test_the_real_sample_reads() -> None:
    path = DATA / "criteo_kaggle_10k.tsv.gz"
    if not path.exists():
        pytest.skip("no Criteo sample on this machine")
    begin = time.process_time()
    clicks = read(path, 20_000)
    assert time.process_time() - begin < 5
    with gzip.open(path, "rt") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    assert len(clicks) == len(lines) == 10_731
    assert clicks.labels.tolist() == [float(fields[0]) for fields in lines]
    dense = [[math.log1p(max(int(x or 0), 0)) for x in fields[1:14]] for fields in lines]
    np.testing.assert_allclose(clicks.dense, dense, rtol=1e-6)
    for column in range(CATEGORIES):  # equal values go to equal rows
        values = [fields[14 + column] for fields in lines]
        row_of = dict(zip(values, clicks.categories[:, column].tolist(), strict=True))
        assert [row_of[value] for value in values] == clicks.categories[:, column].tolist()


# lines that never come twice ------------------------------------------------------------------------------------------


def test_redrawn_lines_are_the_same_for_the_same_key_only() -> None:
    clicks = synthetic(500, seed=1, rows_per_table=300)
    keys = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 1), (0,), ()]
    made = [criteo.redraw(clicks, 64, *key) for key in keys]
    for key, lines in zip(keys, made, strict=True):
        again = criteo.redraw(clicks, 64, *key)
        for name in ("labels", "dense", "categories"):
            ours, theirs = getattr(lines, name), getattr(again, name)
            assert (ours == theirs).all() and ours.dtype == getattr(clicks, name).dtype
    assert len({lines.categories.tobytes() for lines in made}) == len(keys)
    assert len(criteo.redraw(clicks, 0, 1)) == 0


def test_redrawn_lines_have_the_skew_of_those_that_they_are_made_of() -> None:
    clicks = synthetic(2000, seed=1, rows_per_table=300)
    lines = criteo.redraw(clicks, 20_000, 5)
    for column in range(CATEGORIES):
        before, after = (np.bincount(of.categories[:, column], minlength=300) / len(of) for of in (clicks, lines))
        assert (after[before == 0] == 0).all() and abs(before - after).max() < 0.02
    dense = {row.tobytes() for row in clicks.dense}
    assert all(row.tobytes() in dense for row in lines.dense)
    together = {row.tobytes() for row in clicks.categories}
    assert not any(row.tobytes() in together for row in lines.categories), "none is a line that was there"


def test_nobody_can_know_the_labels_of_redrawn_lines() -> None:
    """The best that there is to learn leaves a loss of 0.6: the same ids come with both labels."""
    clicks = synthetic(1, seed=1, rows_per_table=300)
    one_line_labels = criteo.redraw(clicks, 4000, 5).labels
    assert 0.1 < one_line_labels.mean() < 0.9
    labels = criteo.redraw(synthetic(5000, seed=1, rows_per_table=300), 50_000, 5).labels
    assert 0.3 < labels.mean() < 0.7


def test_nothing_is_redrawn_of_nothing() -> None:
    clicks = synthetic(3, seed=1, rows_per_table=300)
    for lines, count, key in ((clicks[:0], 1, (1,)), (clicks, -1, (1,)), (clicks, 1, (-1,))):
        with pytest.raises(ValueError, match="nothing is made of"):
            criteo.redraw(lines, count, *key)
