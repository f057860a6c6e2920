"""`bench train --hosts` and `bench connections`: small real runs between hosts; what cannot be is refused."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import MARK, leftover, wait_for_none, wait_until

from torch_ecrec.bench import connections, places, train
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.testing import hosts as kit

END_LIMIT_S = 300.0
REASON = kit.unavailable()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)


def parse(benchmark: ModuleType, *words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    benchmark.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def nothing_is_left() -> bool:
    return not wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hosts", "-1"], "`hosts` must be at least 0"),
        (["--hosts", "2", "--link-gbit", "-1"], "`--link-gbit` must not be negative"),
        (["--link-gbit", "1"], "`--link-gbit` goes with `--hosts`"),
    ],
)
def test_bad_arguments_start_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        train.run(parse(train, *words, "--out", tmp_path))
    assert not list(tmp_path.iterdir())


def test_without_root_both_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kit, "unavailable", lambda: "hosts need root: probe: no network of its own")
    for benchmark, words in ((train, ["--hosts", "3"]), (connections, ["--hosts"])):
        with pytest.raises(ValueError, match="`--hosts`: hosts need root"):
            benchmark.run(parse(benchmark, *words, "--out", tmp_path))
    assert not list(tmp_path.iterdir())


def test_sizes_are_checked(tmp_path: Path) -> None:
    for words in (["--repeats", 0], ["--at-once", 0], ["--bytes", 0]):
        with pytest.raises(ValueError, match="must be at least 1"):
            connections.run(parse(connections, *words, "--out", tmp_path))


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
        with place.cluster(code, tmp_path, {"OMP_NUM_THREADS": "1"}, []) as cluster:  # as others: it forks as theirs
            assert cluster.join.startswith(f"{place.hosts[0].address}:")
            wait_until(
                lambda: [len(host.processes()) for host in place.hosts] == [2 + 1, 1 + 1, 1 + 1],
                END_LIMIT_S,
                "trainers, the coordinator on the first, servers from the last on",
            )
            wait_until(lambda: len(cluster.status().members) == 2, END_LIMIT_S, "the servers have joined")
    assert nothing_is_left()


@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=needs_hosts)])
def test_connections(hosts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = ["--bytes", 1024, 1 << 20, "--repeats", 2, "--at-once", 2, "--out", tmp_path]
    assert connections.run(parse(connections, *words, *(["--hosts"] if hosts else []))) == 0
    written = json.loads((tmp_path / "connections.json").read_text())
    assert [row["bytes"] for row in written["rows"]] == [1024, 1 << 20] and written["hosts"] is hosts
    for row in written["rows"]:
        assert row["us/call"] > row["bare us/call"] > 0 and row["MB/s"] > 0
    assert written["rows"][0]["ms/MB"] is None and written["rows"][1]["ms/MB"] is not None
    assert "us/call" in capsys.readouterr().out
    assert nothing_is_left()


@pytest.mark.slow
@needs_hosts
def test_training_between_hosts(tmp_path: Path) -> None:
    words = ["--hosts", 3, "--link-gbit", 1, "--systems", "torchrec,k2r1,k2r1:bf16", "--rows", 200, "--batch-size", 32]
    words += ["--blocks", 1, "--seconds", 0.2, "--warmup", 3, "--out", tmp_path]
    assert train.run(parse(train, *words)) == 0
    assert nothing_is_left()
    result = json.loads((tmp_path / "train-embedding-heavy.json").read_text())
    assert result["hosts"] == 3 and result["link_gbit"] == 1
    for system in ("torchrec", "k2r1", "k2r1:bf16"):
        assert result["wire_bytes"][system]["min"] > 0, "what left the hosts"
    sent = result["sent_bytes"]
    assert 0 < sent["k2r1:bf16"]["lookup"] < sent["k2r1"]["lookup"] and sent["k2r1"]["fold"] > 0
    losses = {system: result["blocks"][system][0]["losses"] for system in ("torchrec", "k2r1")}
    assert losses["torchrec"][0] == pytest.approx(losses["k2r1"][0], abs=0.1)
