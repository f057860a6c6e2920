"""Benchmarks of real training for real, with little to train: what they write and leave; never how fast anything is."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from benches import END_LIMIT_S, result, run
from conftest import wait_until

from torch_ecrec.bench import checkpoint, connections, gpu, outages, overlap, places, recovery, train, watching
from torch_ecrec.bench.workload import Shape
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing import hosts as kit

REASON = kit.unavailable()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)
SMALL = ("--rows", 200, "--batch-size", 32, "--blocks", 1, "--seconds", 0.2, "--warmup", 3)

# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("trainers", [1, 2])
def test_training(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainers: int) -> None:
    systems, copy = ["torchrec", "none", "k2r1"], tmp_path / "copies" / "copy.json"
    assert run(train, tmp_path, "--systems", ",".join(systems), *SMALL, "--trainers", trainers, "--json", copy) == 0
    found = result(tmp_path, "train-embedding-heavy")
    assert json.loads(copy.read_text()) == found and found["error"] is None
    assert found["header"]["cores"] == os.cpu_count() and found["shape"]["rows"] == 200
    for figure in ("samples_per_s", "cpu_s_per_step", "wire_bytes", "rss_bytes"):
        assert set(found[figure]) == set(systems)
        for spread in found[figure].values():
            assert set(spread) == {"median", "min", "max"} and spread["min"] <= spread["median"] <= spread["max"]
            assert spread["min"] > 0 or figure == "cpu_s_per_step", "the clock of CPU time ticks every 10 ms"
    servers, total = found["server_cpu_s_per_step"], found["cpu_s_per_step"]
    assert servers["torchrec"]["max"] == 0 and servers["k2r1"]["max"] <= total["k2r1"]["max"]
    sent, held = found["sent_bytes"], found["server_bytes"]
    assert sent["torchrec"] == {} and {"lookup", "push"} <= set(sent["none"]) and "fold" not in sent["none"]
    assert sent["k2r1"]["fold"] > 0
    assert set(held) == {"none", "k2r1"} and held["none"]["parity_bytes"] == 0
    assert held["k2r1"]["record_bytes"] == held["none"]["record_bytes"] == 5202 * 4 * 65, "two more than 26 x 200"
    assert held["k2r1"]["parity_bytes"] == held["k2r1"]["record_bytes"] / 2
    losses = [found["blocks"][system][0]["losses"] for system in systems]
    assert losses[1][0] == losses[2][0], "parity changes nothing"
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.1), "the same model, but for its first values"
    assert [row["system"] for row in found["rows"]] == systems
    assert found["rows"][2]["rate / none"] > 0 and found["rows"][2]["memory / records"] > 1.5
    assert "k2r1, 1/1" in capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"copies", *(f"train-embedding-heavy.{suffix}" for suffix in ("json", "csv", "png"))}, "no logs"


@pytest.mark.slow
def test_training_that_is_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(watching, tmp_path, *SMALL, "--pages", 5, "--scrape-every", 0.1) == 0
    found = result(tmp_path, "watching-embedding-heavy")
    assert found["error"] is None and [row["system"] for row in found["rows"]] == ["nobody", "watched", "nobody again"]
    nobody, watched, again = found["rows"]
    assert watched["statuses/s"] > 0 and watched["scrapes/s"] > 0 and watched["KB/s"] > 0
    assert nobody["statuses/s"] == again["scrapes/s"] == 0 and watched["rate / nobody"] > 0
    assert found["pages"] == 5 and found["aims"][0]["wanted"] == ">= 0.99"
    assert "samples/s with 5 pages, of those with none" in capsys.readouterr().out


@pytest.mark.slow
def test_sequences_beside_torch(tmp_path: Path) -> None:
    assert run(train, tmp_path, "--shape", "sequence", "--systems", "torch,none,k2r1", *SMALL) == 0
    found = result(tmp_path, "train-sequence")
    held = found["server_bytes"]
    assert held["none"]["record_bytes"] == held["k2r1"]["record_bytes"] == 402 * 4 * 64 * 3, (
        "Adam's two moments, of 2 tables of 200 rows, and of two more so that slots have equally many"
    )
    losses = {system: found["blocks"][system][0]["losses"] for system in ("torch", "none", "k2r1")}
    assert losses["none"][0] == losses["k2r1"][0]
    assert losses["torch"][0] == pytest.approx(losses["none"][0], abs=0.1)
    assert found["rows"][2]["rate / torch"] > 0


@pytest.mark.slow
@needs_hosts
def test_training_between_hosts(tmp_path: Path) -> None:
    words = ["--hosts", 3, "--link-gbit", 1, "--systems", "torchrec,k2r1,k2r1:bf16"]
    assert run(train, tmp_path, *words, *SMALL) == 0
    found = result(tmp_path, "train-embedding-heavy")
    assert found["hosts"] == 3 and found["link_gbit"] == 1
    for system in ("torchrec", "k2r1", "k2r1:bf16"):
        assert found["wire_bytes"][system]["min"] > 0, "what left the hosts"
    sent = found["sent_bytes"]
    assert 0 < sent["k2r1:bf16"]["lookup"] < sent["k2r1"]["lookup"] and sent["k2r1"]["fold"] > 0
    losses = {system: found["blocks"][system][0]["losses"] for system in ("torchrec", "k2r1")}
    assert losses["torchrec"][0] == pytest.approx(losses["k2r1"][0], abs=0.1)


@pytest.mark.slow
def test_training_beside_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = ["k2r1", "k2r1+incremental", "torchrec", "torchrec+save", "torchrec+async"]
    words = ["--ways", ",".join(ways), "--rows", 2000, "--dim", 8, "--batch-size", 16, "--blocks", 1, "--every", 8]
    assert run(checkpoint, tmp_path, *words, "--restore-bytes", 1e6) == 0
    found = result(tmp_path, "checkpoint-embedding-heavy")
    assert found["shape"]["rows"] == 2000 and [row["way"] for row in found["rows"]] == ways
    blocks = {way: block for way, (block,) in found["blocks"].items()}
    for way, block in blocks.items():
        assert len(block["ends_s"]) == 8 and min(checkpoint.durations(block)) > 0
        assert len(block["spans_s"]) == len(block["bytes"]) == int("+" in way), "one checkpoint in each turn"
        assert all(first < last for first, last in block["spans_s"])
    assert blocks["k2r1+incremental"]["kinds"] == ["incremental"]
    table_bytes = 26 * 2000 * 4 * 9
    assert 0 < blocks["k2r1+incremental"]["bytes"][0] < table_bytes / 4, "few rows were touched in eight steps"
    for way in ("torchrec+save", "torchrec+async"):
        assert blocks[way]["kinds"] == ["full"] and blocks[way]["bytes"][0] > table_bytes
    restored = found["restore"]
    assert restored["checkpoint_bytes"] > restored["table_bytes"] == pytest.approx(1e6, rel=0.01)
    for start in ("restored", "begun_anew"):
        assert 0 < restored[start]["imported_s"] < restored[start]["built_s"] < restored[start]["first_step_s"]
    assert "restore of 0.001 GB" in capsys.readouterr().out
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".csv", ".md", ".png"}, "no logs, no checkpoints"
    told = (tmp_path / "checkpoint-embedding-heavy.md").read_text()
    assert "| k2r1+incremental |" in told and "| figure | wanted | measured | reached |" in told


# --- what a machine with a GPU runs, on the CPU ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("part", ["streams", "exactness", "overlap", "rates-criteo"])
def test_parts_for_a_gpu(part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(gpu, tmp_path, "--device", "cpu", "--parts", part)
    found = result(tmp_path, "gpu")
    assert code == 0, capsys.readouterr().out
    (one,) = found["parts"]
    rows = one["rows"]
    assert one["error"] == "" and found["card"] is None
    if part == "streams":
        assert rows[0]["tests"] >= 6 and rows[0]["skipped"] == 3, "those that want a GPU"
    elif part == "exactness":
        assert [row["exact"] for row in rows] == ["yes", "yes"] and len({row["digest"] for row in rows}) == 1
        assert rows[0]["first step after a kill, s"] is None and rows[1]["first step after a kill, s"] > 0
    elif part == "overlap":
        assert [row["copies"] for row in rows] == ["to device", "to host"]
        assert all(row["overlapped %"] is None and row["step ms"] > 0 for row in rows), "nothing is copied on a CPU"
        assert 0 < rows[0]["waits for rows %"] < 100
        with gzip.open(overlap.trace_of(tmp_path / part, "k2r1"), "rt") as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert "PooledLookup" in names, "the lookups of a trainer of ours are in the trace"
    else:
        assert [row["system"] for row in rows] == ["torchrec", "k2r1"] and rows[1]["rate / torchrec"] > 0
        assert rows[0]["waits %"] is None and 0 < rows[1]["waits %"] < 100
    assert f"## {part}" in (tmp_path / "gpu.md").read_text()


# --- kills and outages -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kill_in_training_and_one_while_trainers_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gigabytes", 0.02, "--kills", 1, "--batch-size", 128, "--rebuild-mb-per-s", 20, "--steady-s", 1]
    assert run(recovery, tmp_path, *words, "--label", "small") == 0, capsys.readouterr().err
    found = result(tmp_path, "recovery-small")
    assert found["error"] is None and found["arguments"]["zipf"] == 1.05
    case, idle = found["cases"]
    (kill,) = case["kills"]  # the kill fired
    assert case["case"] == "0.02 GB, 20 MB/s"
    assert kill["server"] == f"server-{kill['slot']}" and kill["pid"] > 0
    assert 0 < kill["detected_s"] < kill["rehosted_s"] < kill["rebuilt_s"] < kill["spare_s"]
    assert kill["stall_s"] > 0 and 0 < kill["first_step_s"] < kill["spare_s"]
    assert kill["lost_mb"] == pytest.approx(10.0, rel=0.01), "a third of the data, and of the parity"
    assert kill["lost_data_mb"] == pytest.approx(20 / 3, rel=0.01)
    assert 0 < kill["lost_mb_per_s"] < 40, "not far from the limit, which counts what is read, in few portions"
    assert all(kill[f"{phase}_samples_per_s"] > 0 for phase in ("before", "during", "after"))
    assert idle["kills"][0]["rebuilt_s"] > 0 and idle["kills"][0]["first_step_s"] is None, "trainers paused"
    assert found["rows"][0]["rebuilt_s_median"] == kill["rebuilt_s"]
    assert not (tmp_path / "logs").exists()
    assert "over 1 kills in training" in capsys.readouterr().out


@pytest.mark.slow
def test_a_kill_of_a_server_with_records_on_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same kill in memory and with a quarter of the records there, and both beside each other."""
    words = ["--gigabytes", 0.02, "--kills", 1, "--steady-s", 2, "--batch-size", 256, "--no-idle"]
    words += ["--zipf", 0, "--rebuild-mb-per-s", 0, "--tier", tmp_path, "--share", 0.25]
    assert run(recovery, tmp_path, *words) == 0
    rows = result(tmp_path, "recovery")["rows"]
    assert [(row["case"], row["share_in_memory"]) for row in rows] == [
        ("0.02 GB, no limit", None), ("0.02 GB, no limit, 25 % in memory", 0.25)
    ]  # fmt: skip
    assert all(row["lost_mb_per_s_median"] > 0 and row["first_step_s_median"] > 0 for row in rows)
    assert "beside the same case in memory" in capsys.readouterr().out
    wrong = ["--gigabytes", 0.02, "--tier", tmp_path / "none"]
    with pytest.raises(ValueError, match="must be a folder that exists"):
        run(recovery, tmp_path, *wrong)


def test_a_training_that_ends_is_an_error_with_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that cannot start: the reason is in the message, what was measured in the file, nothing goes on."""
    monkeypatch.setattr(Shape, "__post_init__", lambda self: None)  # here; a trainer refuses it
    monkeypatch.setattr(recovery, "rows_per_table", lambda _: 0)
    words = ["--gigabytes", 0.02, "--kills", 1, "--no-idle", "--trainers", 1]
    assert run(recovery, tmp_path, *words, "--servers", 2, "-k", 1, "--spares", 0, "--rebuild-mb-per-s", 0) == 1
    found = result(tmp_path, "recovery")
    assert "waiting for the trainers' models: trainer 0 has ended at step 0" in found["error"]
    assert "ValueError" in found["error"], "the end of the trainers' log"
    assert found["rows"] == [] and list((tmp_path / "logs").rglob("trainers.log"))


@pytest.mark.slow
@needs_hosts
def test_outages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--events", "kill,cut,drain", "--repeats", 1, "--steady-s", 1, "--gigabytes", 0.01]
    assert run(outages, tmp_path, *words, "--drain-gigabytes", 0.01) == 0
    found = result(tmp_path, "outages")
    assert found["error"] is None
    assert {kind: len(some) for kind, some in found["events"].items()} == {"kill": 1, "cut": 1, "drain": 1}
    (killed,), (drained,) = found["events"]["kill"], found["events"]["drain"]
    assert 0 < killed["detected_s"] <= killed["placed_s"] < killed["repaired_s"]
    assert killed["longest_s"] > 0 and drained["unhealthy"] == 0 and drained["held_bytes"] > 0
    printed = capsys.readouterr().out
    assert "drain, 1/1" in printed and "reached" in printed


# --- places ----------------------------------------------------------------------------------------------------------


@needs_hosts
def test_who_is_where(tmp_path: Path) -> None:
    """Trainers from the first host on, servers from the last on; the cluster's status comes from its own host."""
    with places.OnHosts(3, bits_per_s=1e9) as place:
        assert [place.local(rank, 4) for rank in range(4)] == [
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        ]
        trainers = [place.start_trainer(rank, ["sleep", "1000"]) for rank in range(4)]
        for which, there in enumerate(([0, 3], [1], [2])):
            pids = sorted(trainers[rank].pid for rank in there)
            wait_until(lambda w=which, p=pids: sorted(place.hosts[w].processes()) == p, END_LIMIT_S, "they are there")
        assert place.meeting()["MASTER_PORT"] != place.meeting()["MASTER_PORT"], "each system meets elsewhere"
        code = CodeSpec(2, 2, 1, "none")
        with place.cluster(code, tmp_path, {"OMP_NUM_THREADS": "1"}) as cluster:  # as others: it forks as theirs
            assert cluster.join.startswith(f"{place.hosts[0].address}:")
            wait_until(
                lambda: [len(host.processes()) for host in place.hosts] == [2 + 1, 1 + 1, 1 + 1],
                END_LIMIT_S,
                "trainers, the coordinator on the first, servers from the last on",
            )
            wait_until(lambda: len(cluster.status().members) == 2, END_LIMIT_S, "the servers have joined")


@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=needs_hosts)])
def test_connections(hosts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = ["--bytes", 1024, 1 << 20, "--repeats", 2, "--at-once", 2]
    assert run(connections, tmp_path, *words, *(["--hosts"] if hosts else [])) == 0
    written = result(tmp_path, "connections")
    assert [row["bytes"] for row in written["rows"]] == [1024, 1 << 20] and written["hosts"] is hosts
    for row in written["rows"]:
        assert row["us/call"] > row["bare us/call"] > 0 and row["MB/s"] > 0
    assert written["rows"][0]["ms/MB"] is None and written["rows"][1]["ms/MB"] is not None
    assert "us/call" in capsys.readouterr().out
