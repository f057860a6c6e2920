"""What benchmarks of real training are made of, without processes: modes, steps, waiting, turns; what is refused."""

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import parse, refuses, steps_of

from torch_ecrec.bench import checkpoint, connections, experiment, outages, recovery, scaling, train, workload
from torch_ecrec.bench.experiment import VARIANTS, Experiment, Model, Part, Running, Steps, Stopped, parse_mode
from torch_ecrec.bench.places import Here
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.testing import hosts as kit

# --- modes -----------------------------------------------------------------------------------------------------------


def test_a_name_says_what_a_mode_is() -> None:
    mode = parse_mode("k4r2:bf16+snap")
    assert (mode.name, mode.group) == ("k4r2:bf16+snap", "k4r2:bf16"), "with and without snapshots share processes"
    assert mode.code == CodeSpec(6, 4, 2) and mode.snapshot and not mode.checkpoint
    assert mode.settings == {"TORCH_ECREC_WIRE": "bfloat16"}
    mode = parse_mode("torchrec+ckpt")
    assert (mode.group, mode.code, mode.checkpoint, mode.snapshot) == ("torchrec", None, True, False)
    mode = parse_mode("none")
    assert mode.code is not None and mode.code.parities == 0 and mode.settings == {}
    mode = parse_mode("k2r1@6:tcp+snap")
    assert (mode.group, mode.code) == ("k2r1@6:tcp", CodeSpec(6, 2, 1))
    assert parse_mode("none@5").code == CodeSpec(5, 2, 1, "none")
    for name, settings in VARIANTS.items():
        asked = {key.removeprefix("TORCH_ECREC_").lower() for key in settings}
        assert asked <= {field.name for field in dataclasses.fields(Settings)}
        assert parse_mode("k2r1" + name).settings == settings
    for default in (train.DEFAULT, train.DEFAULT_OF_SEQUENCES):
        assert [parse_mode(name).name for name in default.split(",")] == default.split(",")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *(
            (name, "unknown system")
            for name in ("", "k2", "r1", "k2r", "kr", "TorchRec", "none ", "k2r1+", "k2r1:fp16")
        ),
        ("none+snap+ckpt", "unknown system"),
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
        parse_mode(name)


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_is_complete_when_the_last_trainer_has_it() -> None:
    steps = steps_of([(0.0, 1.0), (1.0, 2.0), (2.0, 3.5)], [(0.0, 1.5), (1.5, 1.75)])
    assert steps.times == [1.5, 2.0]
    assert steps.newest == 3


def test_the_first_step_begun_after_a_kill() -> None:
    steps = steps_of([(0.0, 1.0), (1.0, 2.0), (2.5, 3.0)], [(0.0, 1.0), (1.4, 2.0), (2.0, 4.0)])
    assert steps.first_begun_after(-1.0) == 1.0
    assert steps.first_begun_after(0.5) == 2.0
    assert steps.first_begun_after(1.2) == 4.0, "one trainer had begun step 2 already"
    assert steps.first_begun_after(2.2) is None, "one trainer had begun step 3 already"
    assert Steps(2).first_begun_after(0.0) is None


def test_a_step_counts_in_part() -> None:
    steps = steps_of([(t - 1.0, t) for t in (1.0, 2.0, 3.0, 5.0, 6.0)])
    assert steps.rate(1.0, 3.0) == pytest.approx(1.0)
    assert steps.rate(3.0, 5.0) == pytest.approx(0.5)
    assert steps.rate(2.5, 4.0) == pytest.approx((0.5 + 0.5) / 1.5)
    assert steps.rate(5.0, 7.0) is None, "nobody knows what comes after the last step"
    assert steps.rate(0.0, 2.0) is None and steps.rate(3.0, 3.0) is None and Steps(1).rate(0.0, 1.0) is None


def test_the_longest_pause() -> None:
    steps = steps_of([(t - 0.5, t) for t in (1.0, 2.0, 2.5, 5.0, 5.2, 9.0)])
    assert steps.stall_s(2.6, 5.0) == 2.5
    assert steps.stall_s(2.6, 5.2) == 2.5
    assert Steps(1).stall_s(0.0, 1.0) is None


def test_ids_of_a_batch_follow_the_law_or_are_uniform() -> None:
    rows, tables, batch = 1001, 3, 256
    seen = {}
    for zipf in (1.05, 0.0):
        shape = workload.Shape(tables=tables, rows=rows, batch=batch, zipf=zipf)
        draw = workload.Draws(shape, trainer=0, seed=1)
        drawn = [draw(number).sparse_features for number in range(20)]
        again = workload.Draws(shape, trainer=0, seed=1)(7).sparse_features
        assert torch.equal(again.values(), drawn[7].values()), "the seed and the number decide"
        other = workload.Draws(shape, trainer=1, seed=1)(0).sparse_features
        assert not torch.equal(other.values(), drawn[0].values())
        assert not torch.equal(drawn[0].values(), drawn[1].values())
        assert drawn[0].keys() == ["C0", "C1", "C2"] and bool((drawn[0].lengths() == 1).all())
        ids = torch.cat([features.values() for features in drawn])
        assert len(ids) == 20 * tables * batch and int(ids.min()) >= 0 and int(ids.max()) < rows
        seen[zipf] = torch.bincount(ids, minlength=rows)
    assert seen[1.05].max() > 0.08 * seen[1.05].sum(), "one row is hot"
    assert seen[0.0].max() < 0.01 * seen[0.0].sum()
    hottest = seen[1.05].topk(3).indices.sort().values
    assert int(hottest.diff().min()) > 1, "hot rows are not neighbours"


# --- waiting ---------------------------------------------------------------------------------------------------------

MODEL = Model(workload.Shape(rows=10, batch=2), trainers=2)


def running_in(folder: Path) -> Running:
    """One that was not started."""
    (folder / "trainers.log").write_text("last words\n")
    return Running(Part("a case", parse_mode("k2r1"), MODEL, [], spares=1), folder, Here())


def test_a_wait_ends_when_it_is_met_or_hopeless_or_over(tmp_path: Path) -> None:
    running = running_in(tmp_path)
    for trainer in range(2):
        threading.Timer(0.05, running.on_line, [trainer, {"ready": trainer}]).start()
    assert running.answers(10.0, "both") == [{"ready": 0}, {"ready": 1}]
    says = r"a case: waiting for a miracle: not within 0.01 s, at step 0: it\n.*\n *last words"
    with pytest.raises(Stopped, match=says):
        running.until(lambda: "it", 0.01, "a miracle")
    threading.Timer(0.05, running.on_line, [1, {}]).start()
    with pytest.raises(Stopped, match="trainer 1 has ended at step 0"):
        running.until(lambda: "it", 10.0, "a miracle")


def test_a_lost_cluster_is_trouble(tmp_path: Path) -> None:
    running = running_in(tmp_path)
    running.on_closed("gone")
    assert running.trouble() == "the coordinator is gone: gone"
    running.on_message({"type": "event", "event": "fatal", "kind": "data_loss", "reason": "too much", "time_s": 1.0})
    assert running.trouble() == "the cluster has stopped: too much"


# --- turns -----------------------------------------------------------------------------------------------------------


class Made:
    """In the place of `Running`: what was done with it, in order."""

    done: list[str]

    def __init__(self, part: Part, folder: Path, place: Here) -> None:
        self.name = part.mode.group

    def __enter__(self) -> "Made":
        Made.done.append(f"{self.name} starts")
        return self

    def __exit__(self, *_: object) -> None:
        Made.done.append(f"{self.name} ends")

    def rest(self) -> None:
        Made.done.append(f"{self.name} rests")

    def resume(self) -> None:
        Made.done.append(f"{self.name} goes on")


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(experiment, "Running", Made)
    monkeypatch.setattr(experiment, "warm", lambda: None)
    monkeypatch.setattr(Made, "done", [], raising=False)
    return Made.done


def part(name: str) -> Part:
    def turn(running: Any) -> dict[str, Any]:
        Made.done.append(f"{name} in {running.name}")
        return {"turn": len(Made.done)}

    return Part(name, parse_mode(name), MODEL, [turn])


def test_parts_take_turns_or_follow_each_other(tmp_path: Path, done: list[str]) -> None:
    parts = [part("k2r1"), part("k2r1+snap"), part("none")]
    found = Experiment("turns", tmp_path, parts, repeats=2, together=True).results()
    turns = [("k2r1", "k2r1"), ("k2r1+snap", "k2r1"), ("none", "none")]
    turn = [word for name, at in turns for word in (f"{at} goes on", f"{name} in {at}", f"{at} rests")]
    begun = ["k2r1 starts", "none starts", "k2r1 rests", "k2r1 rests", "none rests"]
    assert done == [*begun, *turn, *turn, "none ends", "k2r1 ends"]
    assert {name: len(some) for name, some in found.items()} == {"k2r1": 2, "k2r1+snap": 2, "none": 2}
    done.clear()
    Experiment("turns", tmp_path, [parts[0], parts[2]]).run()
    assert done == ["k2r1 starts", "k2r1 in k2r1", "k2r1 ends", "none starts", "none in none", "none ends"]


@pytest.mark.parametrize("end", [Stopped("it does not go on"), KeyboardInterrupt()])
def test_what_was_found_before_an_end_is_kept(
    end: BaseException, tmp_path: Path, done: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(running: Running) -> dict[str, Any]:
        raise end

    parts = [part("none"), dataclasses.replace(part("k2r1"), turns=[fails])]
    one = Experiment("fails", tmp_path, parts, repeats=2)
    one.run()
    assert len(one.found["none"]) == 2 and one.found["k2r1"] == [] and done[-1] == "k2r1 ends"
    rows = [{"part": name, "turns": len(some)} for name, some in one.found.items()]

    @contextmanager
    def passed_on() -> Iterator[None]:
        if isinstance(end, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt):
                yield
        else:
            yield

    with passed_on():
        assert one.finish({"more": 1}, rows, "a table", None) == 1
    assert '"error": "' in (tmp_path / "fails.json").read_text() and (tmp_path / "fails.csv").exists()
    said = capsys.readouterr()
    assert "a table" in said.out and (one.error or "") in said.err


# --- refused ---------------------------------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")


@pytest.mark.parametrize(
    ("benchmark", "words", "says"),
    [
        (train, "--systems none,none", "a system is named twice"),
        (train, "--systems none,what", "unknown system 'what'"),
        (train, "--blocks 0", "`blocks` must be at least 1"),
        (train, "--trainers 0", "`trainers` must be at least 1"),
        (train, "--rows 0", "`rows` must be at least 1"),
        (train, "--shape sequence --systems torchrec,none", "is not for torchrec: FBGEMM has no Adam"),
        (train, "--shape paper --systems torch", "is not for torch: take torchrec"),
        (train, "--data x.tsv", "goes with `--shape criteo`"),
        (train, "--device cuda --systems none,torchrec", "is for our systems"),
        pytest.param(train, "--device cuda --systems none", "torch sees no GPU", marks=NO_GPU),
        (train, "--hosts -1", "`hosts` must be at least 0"),
        (train, "--hosts 2 --link-gbit -1", "`--link-gbit` must not be negative"),
        (train, "--link-gbit 1", "`--link-gbit` goes with `--hosts`"),
        (recovery, "--gigabytes 0", "`--gigabytes` must be positive, got 0.0"),
        (recovery, "--kills 0", "`kills` must be at least 1, got 0"),
        (recovery, "--rebuild-mb-per-s -1", "`--rebuild-mb-per-s` must not be negative"),
        (recovery, "--throttled-gigabytes 2", "`--throttled-gigabytes` must be one of"),
        (recovery, "-k 3", "needs as many slots, got 3"),
        (recovery, "--steady-s 0", "`steady_s` must be positive"),
        (outages, "--events flood", "unknown events flood"),
        (outages, "--events kill,kill", "named twice"),
        (outages, "--repeats 0", "must be at least 1"),
        (outages, "--drain-gigabytes 0", "`drain_gigabytes` must be positive"),
        (outages, "-r 0", "`r` must be at least 1"),
        (checkpoint, "--ways what", "unknown system 'what'"),
        (checkpoint, "--ways k2r1,k2r1+", "k2r1 has +full, +incremental, +incremental:4"),
        (checkpoint, "--ways k2r1,k2r1+save", "k2r1 has +full"),
        (checkpoint, "--ways torchrec,torchrec+full", "torchrec has +save, +async"),
        (checkpoint, "--ways torch", "there are torchrec, and ours"),
        (checkpoint, "--ways k2r1,k2r1", "a way is named twice"),
        (checkpoint, "--ways k2r1,torchrec+save", "`--ways` has no torchrec"),
        (checkpoint, "--every 3", "`every` must be at least 4"),
        (checkpoint, "--blocks 0", "`blocks` must be at least 1"),
        (checkpoint, "--trainers 0", "`trainers` must be at least 1"),
        (checkpoint, "--rows 0", "`rows` must be at least 1"),
        (checkpoint, "--restore-bytes -1", "must not be negative"),
        (checkpoint, "--restore-system torchrec", "is one of ours"),
        (scaling, "--blocks 0", "`blocks` must be at least 1"),
        (scaling, "--least-steps 0", "`least-steps` must be at least 1"),
        (scaling, "--seconds 0", "`--seconds` must be positive"),
        (connections, "--repeats 0", "`repeats` must be at least 1"),
        (connections, "--at-once 0", "`at-once` must be at least 1"),
        (connections, "--bytes 0", "`bytes` must be at least 1"),
        (connections, "--link-gbit 1", "`--link-gbit` goes with `--hosts`"),
    ],
)
def test_bad_arguments_start_nothing(benchmark: Any, words: str, says: str, tmp_path: Path) -> None:
    refuses(benchmark, words.split(), says, tmp_path)


@pytest.mark.parametrize("words", ["train --hosts 3", "connections --hosts", "outages --events cut"])
def test_where_there_can_be_no_hosts_it_is_said(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kit, "unavailable", lambda: "hosts need root: probe: no network of its own")
    name, *more = words.split()
    benchmark = {"train": train, "connections": connections, "outages": outages}[name]
    refuses(benchmark, more, "`--hosts`: hosts need root", tmp_path)


def test_a_checkpoint_that_does_not_fit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = recovery.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(recovery.shutil, "disk_usage", lambda _: usage._replace(free=2_000_000_000))
    found = recovery.from_checkpoint(4.0, parse(recovery, "--out", tmp_path))
    assert found == {"gigabytes": 4.0, "skipped": found["skipped"]}
    assert re.search(r"2\.0 GB free.*5\.3 GB needed", found["skipped"])
