"""`bench stores` on tiny sizes: what it replays, that all stores have the same records, what it writes; no rates."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benches import result, run

from torch_ecrec.bench import stores
from torch_ecrec.bench.stores import Job, Keyed, Replay, Trace, hit_rates, trace_of
from torch_ecrec.demo import criteo
from torch_ecrec.records.store import MemoryStore, Use

SMALL = ("--rows", 30, "--steps", 4, "--block-steps", 3, "--batch-size", 16, "--dim", 64)


class Dictionary(Keyed):
    """A store with a value for each key, in memory."""

    def __init__(self, rows: int, nbytes: int) -> None:
        super().__init__(rows, nbytes)
        self.cells: dict[int, Any] = {}

    def fetch(self, positions_U: Any) -> tuple[Any, Any]:
        found = [self.cells.get(position) for position in positions_U.tolist()]
        cells = [cell for cell in found if cell is not None]
        return np.array([cell is not None for cell in found], bool), np.array(cells, np.uint8).reshape(-1, 12)

    def put(self, positions_U: Any, cells_UC: Any) -> None:
        self.cells.update(zip(positions_U.tolist(), cells_UC, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_a_store_of_keys_and_values_is_as_one_in_memory(first: bool) -> None:
    rng = np.random.default_rng(0)
    here, there = MemoryStore(20, 8), Dictionary(20, 8)
    for store in (here, there) if first else ():
        store.begin_(lambda at: np.repeat(at[:, None] + 1, 8, axis=1).astype(np.uint8))
    for number in range(60):
        at_U = np.sort(rng.choice(20, int(rng.integers(1, 9)), replace=False))
        if number % 5 == 0:
            at_U[0] = -1
        use = [Use.READ, Use.CHANGE, Use.FOLD, Use.REPLACE][number % 4]
        if use is Use.CHANGE:
            there.at(at_U, Use.READ)  # as a step does
        values_UB = rng.integers(0, 256, (len(at_U), 8), np.uint8)
        for store in (here, there):
            records_XB, seals_X, at = store.at(at_U, use)
            assert seals_X is not None
            if use is not Use.READ:
                some = at_U >= 0
                records_XB[at[some]], seals_X[at[some]] = values_UB[some], number
        every = np.arange(20)
        (one, one_seals, one_at), (other, other_seals, other_at) = here.look(every), there.look(every)
        assert one_seals is not None and other_seals is not None
        assert (one[one_at] == other[other_at]).all() and (one_seals[one_at] == other_seals[other_at]).all()


def replayed(store: str, folder: Path, filled: bool) -> tuple[Replay, dict[str, Any]]:
    """A replay in this process, after its steps, and the figures of the last of them."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    steps = [np.unique(rng.zipf(1.3, 90) % 1000) for _ in range(12)]
    np.savez(folder / "trace.npz", positions=np.concatenate(steps), cuts=np.cumsum([*map(len, steps)])[:-1])
    budget = 0 if store in ("memory", "ours") else 1 << 20
    replay = Replay(Job(store, str(folder / "trace.npz"), str(folder), 1000, 64, 40, budget, filled, 0, 0))
    replay.open()
    if filled:
        replay.fill()
    replay.block(0, 5)
    return replay, replay.block(5, 12)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("store", ["ours", *stores.PACKAGES])
def test_a_store_has_the_records_of_memory_in_the_end(store: str, filled: bool, tmp_path: Path) -> None:
    if store in stores.PACKAGES:
        pytest.importorskip(stores.PACKAGES[store])
    (here, _), (there, found) = (
        replayed("memory", tmp_path / "memory", filled),
        replayed(store, tmp_path / "it", filled),
    )
    assert here.digest() == there.digest()
    assert found["known"] + found["new"] == sum(map(len, here.steps[5:12])) and (not filled or found["new"] == 0)
    if store == "ours":
        assert 0 < found["read"] <= found["misses"] <= found["known"] and found["read_cpu_s"] > 0
        assert there.budget_bytes > 30 * there.store.nbytes


def test_rates_of_policies() -> None:
    steps = [np.array(step) for step in ([0, 1], [2], [0], [1, 2], [0, 1], [0])]
    trace = Trace(3, steps, 3, False)
    # two frames, LRU: 0 is gone at [2] or 1 is; never both, so that [0] and [1, 2] have at most one each
    assert hit_rates(trace, 3, False) == hit_rates(trace, 3, True) == [1.0, 1.0]
    lru, belady = hit_rates(trace, 2, False), hit_rates(trace, 2, True)
    assert all(best >= one for best, one in zip(belady, lru, strict=True)) and belady[0] == 1.0
    rng = np.random.default_rng(0)
    skewed = Trace(200, [np.unique(rng.zipf(1.2, 40) % 200) for _ in range(30)], 30, True)
    rates = [(hit_rates(skewed, n, False)[0], hit_rates(skewed, n, True)[0]) for n in (5, 20, 80, 200)]
    assert all(lru <= belady for lru, belady in rates) and rates == sorted(rates)


def test_real_rows_come_once_in_each_pass_and_in_another_order(tmp_path: Path) -> None:
    criteo.write_synthetic(tmp_path / "rows.tsv", 70, 0)
    parser = __import__("argparse").ArgumentParser()
    stores.add_arguments(parser)
    words = ["--tier", str(tmp_path), "--data", str(tmp_path / "rows.tsv"), "--batch-size", "16", "--passes", "2"]
    trace = trace_of(parser.parse_args(words))
    assert trace.per_pass == 4 and len(trace.steps) == 8 and not trace.filled
    passes = trace.steps[:4], trace.steps[4:]
    every = [set(np.concatenate(steps).tolist()) for steps in passes]
    assert every[0] == every[1] == set(range(trace.rows))
    assert any(one.tobytes() != other.tobytes() for one, other in zip(*passes, strict=True))
    assert all((np.diff(step) > 0).all() for step in trace.steps)


def test_it_measures_ours_and_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, tier = tmp_path / "out", tmp_path / "tier"
    tier.mkdir()
    assert run(stores, out, "--tier", tier, "--stores", "", "--shares", 0.2, "--passes", 2, *SMALL) == 0
    printed, content = capsys.readouterr().out, result(out, "stores")
    rows = content["rows"]
    both = "memory", "ours", "ours+ahead"
    assert [(row["store"], row["pass"]) for row in rows] == [(store, number) for number in (1, 2) for store in both]
    assert content["records"] == 26 * 30 and content["steps_per_pass"] == 4 and content["packages"] == {}
    for row in rows:
        assert 0 < row["least"] <= row["CPU ms"] <= row["most"] and row["wall ms"] > 0
        assert 0 < row["records/step"] <= 16 * 26
        assert row["store"] in printed
    ours = rows[1]
    assert 0 < ours["hit rate"] < 1 and 0 < ours["LRU"] <= ours["Belady"] <= 1 and ours["CPU us/read"] > 0
    assert not list(tier.iterdir()), "nothing is left on the disk"


def test_what_cannot_be_measured_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ("--tier", tmp_path, *SMALL)
    for name, package in stores.PACKAGES.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ValueError, match=f"needs the package {package}: pip install {package}"):
                run(stores, tmp_path, *base, "--stores", name)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "liburing", None)
        with pytest.raises(ValueError, match="needs the package liburing: pip install liburing"):
            run(stores, tmp_path, *base, "--reads")
    with pytest.raises(ValueError, match="`--stores` are of rocksdb, frames\\+rocksdb, lmdb, got leveldb"):
        run(stores, tmp_path, *base, "--stores", "leveldb")
    with pytest.raises(ValueError, match="of all records, 0 to 1"):
        run(stores, tmp_path, *base, "--stores", "", "--shares", "2")
    with pytest.raises(ValueError, match="must be at least 1"):
        run(stores, tmp_path, *base, "--passes", 0)


def test_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("liburing")
    try:
        importlib.import_module("torch_ecrec.records.tiers.disk").reader("uring")
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    monkeypatch.setattr(stores, "READ_BATCHES", (4, 300))
    assert run(stores, tmp_path, "--tier", tmp_path, "--reads", "--repeats", 2, "--seconds", 0.01) == 0
    rows = result(tmp_path, "stores-reads")["rows"]
    assert [(row["at once"], row["reader"]) for row in rows] == [
        (count, name) for count in (4, 300) for name in ("io_uring", "liburing", "16 threads")
    ]
    assert all(0 < row["least"] <= row["reads/s"] <= row["most"] and row["CPU us/read"] > 0 for row in rows)
