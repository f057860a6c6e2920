"""`bench train`: names of systems, and one small real run of three of them in turn."""

import argparse
import csv
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import MARK, leftover, wait_for_none

from torch_ecrec.bench import train
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings

END_LIMIT_S = 300.0
SYSTEMS = ("torchrec", "none", "k2r1")


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(words)


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_says_what_a_system_is() -> None:
    system = train.parse_system("k4r2:bf16+snap")
    assert (system.name, system.group) == ("k4r2:bf16+snap", "k4r2:bf16"), "with and without snapshots share processes"
    assert system.code == CodeSpec(6, 4, 2) and system.snapshot and not system.checkpoint
    assert system.settings == {"TORCH_ECREC_WIRE": "bfloat16"}
    system = train.parse_system("torchrec+ckpt")
    assert (system.group, system.code, system.checkpoint, system.snapshot) == ("torchrec", None, True, False)
    system = train.parse_system("none")
    assert system.code is not None and system.code.parities == 0 and system.settings == {}
    system = train.parse_system("k2r1@6:tcp+snap")
    assert (system.group, system.code) == ("k2r1@6:tcp", CodeSpec(6, 2, 1))
    assert train.parse_system("none@5").code == CodeSpec(5, 2, 1, "none")
    for name in train.VARIANTS:
        asked = {key.removeprefix("TORCH_ECREC_").lower(): text for key, text in train.VARIANTS[name].items()}
        assert set(asked) <= {field.name for field in dataclasses.fields(Settings)}
        assert train.parse_system("k2r1" + name).settings == train.VARIANTS[name]
    for default in (train.DEFAULT, train.DEFAULT_OF_SEQUENCES):
        assert [train.parse_system(name).name for name in default.split(",")] == default.split(",")


@pytest.mark.parametrize(
    "name", ["", "k2", "r1", "k2r", "kr", "TorchRec", "none ", "k2r1+", "k2r1:fp16", "none+snap+ckpt"]
)
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown system"):
        train.parse_system(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torchrec:rpc", "nor transports"),
        ("torchrec:tcp", "nor transports"),
        ("torchrec:bf16", "neither a bf16 wire nor snapshots"),
        ("torchrec+snap", "neither a bf16 wire nor snapshots"),
        ("k2r1+ckpt", "only torchrec saves checkpoints"),
        ("none+ckpt", "only torchrec saves checkpoints"),
        ("torchrec@3", "torchrec has no servers"),
        ("torch@3", "torch has no servers"),
        ("torch+snap", "neither a bf16 wire nor snapshots"),
        ("torch+ckpt", "only torchrec saves checkpoints"),
        ("torch:pipeline", "TorchRec's pipelines want"),
        ("k4r2@5", "slots"),
        ("k2r0", "`r` must be at least 1"),
        ("k0r1", "`k` must be at least 1"),
        ("k255r2", "at most 256"),
    ],
)
def test_what_cannot_be_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train.parse_system(name)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--systems", "none,none"], "a system is named twice"),
        (["--systems", "none,what"], "unknown system 'what'"),
        (["--blocks", "0"], "`blocks` must be at least 1"),
        (["--trainers", "0"], "`trainers` must be at least 1"),
        (["--rows", "0"], "`rows` must be at least 1"),
        (["--shape", "sequence", "--systems", "torchrec,none"], "is not for torchrec: FBGEMM has no Adam"),
        (["--shape", "paper", "--systems", "torch"], "is not for torch: take torchrec"),
        (["--data", "x.tsv"], "goes with `--shape criteo`"),
        (["--device", "cuda", "--systems", "none,torchrec"], "is for our systems"),
        pytest.param(
            ["--device", "cuda", "--systems", "none"],
            "torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bad_arguments_start_nothing(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        train.run(parse(*words, "--out", str(tmp_path)))
    assert not list(tmp_path.iterdir())


# --- a real run ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("trainers", ["1", "2"])
def test_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainers: str) -> None:
    words = ["--systems", ",".join(SYSTEMS), "--rows", "200", "--batch-size", "32", "--blocks", "1", "--seconds", "0.2"]
    words += ["--trainers", trainers]
    copy = tmp_path / "copy.json"
    assert train.run(parse(*words, "--warmup", "3", "--out", str(tmp_path), "--json", str(copy))) == 0
    left = wait_for_none(lambda: leftover(os.getpid(), os.environ[MARK]), END_LIMIT_S)
    assert not left, f"left running: {left}"

    result = json.loads((tmp_path / "train-embedding-heavy.json").read_text())
    assert json.loads(copy.read_text()) == result
    assert result["header"]["cores"] == os.cpu_count() and result["shape"]["rows"] == 200
    for figure in ("samples_per_s", "cpu_s_per_step", "wire_bytes", "rss_bytes"):
        assert set(result[figure]) == set(SYSTEMS)
        for spread in result[figure].values():
            assert set(spread) == {"median", "min", "max"} and spread["min"] <= spread["median"] <= spread["max"]
            assert spread["min"] > 0 or figure == "cpu_s_per_step", "the clock of CPU time ticks every 10 ms"
    servers, total = result["server_cpu_s_per_step"], result["cpu_s_per_step"]
    assert servers["torchrec"]["max"] == 0 and servers["k2r1"]["max"] <= total["k2r1"]["max"]
    sent = result["sent_bytes"]
    assert sent["torchrec"] == {} and {"lookup", "push"} <= set(sent["none"]) and "fold" not in sent["none"]
    assert sent["k2r1"]["fold"] > 0
    held = result["server_bytes"]
    assert set(held) == {"none", "k2r1"} and held["none"]["parity_bytes"] == 0
    assert held["k2r1"]["record_bytes"] == held["none"]["record_bytes"] == 26 * 200 * 4 * 65
    assert held["k2r1"]["parity_bytes"] == held["k2r1"]["record_bytes"] / 2

    losses = [result["blocks"][system][0]["losses"] for system in SYSTEMS]
    assert losses[1][0] == losses[2][0], "parity changes nothing"
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.1), "the same model, but for its first values"

    with open(tmp_path / "train-embedding-heavy.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["system"] for row in table] == list(SYSTEMS)
    assert float(table[2]["samples/s"]) == result["samples_per_s"]["k2r1"]["median"]
    assert float(table[2]["rate / none"]) > 0 and float(table[2]["memory / records"]) > 1.5
    assert (tmp_path / "train-embedding-heavy.png").read_bytes().startswith(b"\x89PNG")
    assert "block 1/1" in capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"copy.json", *(f"train-embedding-heavy.{suffix}" for suffix in ("json", "csv", "png"))}


@pytest.mark.slow
def test_sequences_beside_torch(tmp_path: Path) -> None:
    words = ["--shape", "sequence", "--systems", "torch,none,k2r1", "--rows", "200", "--batch-size", "16"]
    words += ["--blocks", "1", "--seconds", "0.2", "--warmup", "3", "--out", str(tmp_path)]
    assert train.run(parse(*words)) == 0
    result = json.loads((tmp_path / "train-sequence.json").read_text())
    held = result["server_bytes"]
    assert held["none"]["record_bytes"] == held["k2r1"]["record_bytes"] == 2 * 200 * 4 * 64 * 3, "Adam's two moments"
    losses = {system: result["blocks"][system][0]["losses"] for system in ("torch", "none", "k2r1")}
    assert losses["none"][0] == losses["k2r1"][0]
    assert losses["torch"][0] == pytest.approx(losses["none"][0], abs=0.1)
    with open(tmp_path / "train-sequence.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert float(table[2]["rate / torch"]) > 0
