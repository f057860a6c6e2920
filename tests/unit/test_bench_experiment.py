"""What benchmarks of real training are made of, without processes: modes, steps, waiting, turns; what is refused."""

import dataclasses
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import parse, refuses, steps_of

from torch_ecrec.bench import (
    checkpoint,
    connections,
    exactness,
    experiment,
    faults,
    outages,
    overlap,
    recovery,
    scaling,
    tiers,
    train,
    worker,
    workload,
)
from torch_ecrec.bench.experiment import VARIANTS, Experiment, Model, Part, Running, Steps, Stopped, parse_mode
from torch_ecrec.bench.places import Here
from torch_ecrec.cli.main import main
from torch_ecrec.demo.report import Kill
from torch_ecrec.demo.training import DemoRun, require_device
from torch_ecrec.errors import ClusterError
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
    assert parse_mode("torchrec").kernel == "fused"
    mode = parse_mode("torchrec:uvm-caching")
    assert (mode.group, mode.kernel) == ("torchrec:uvm-caching", "fused_uvm_caching"), "with processes of its own"
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
        ("k2r1:uvm", "only torchrec has tables in FBGEMM's UVM"),
        ("torch:uvm-caching", "only torchrec has tables in FBGEMM's UVM"),
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


def test_a_kill_waits_while_a_member_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, killed = running_in(tmp_path), list[tuple[int, int]]()
    asked = iter(["a member is silent", "still", ""])
    monkeypatch.setattr(running, "whole", lambda: next(asked))
    kill = Kill("a kill", "server", 0, "server-0", 7, 0, 1, 1.0, {0: 0})
    monkeypatch.setattr(running.record, "on_kill", lambda *_: kill)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    assert faults.kill_host(running, random.Random(0)) is kill and killed == [(kill.pid, signal.SIGKILL)]
    assert next(asked, None) is None


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


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
def test_a_plan_for_a_gpu_names_it_and_the_kernel(kernel: str) -> None:
    """Made without a GPU, as tables are on the meta device: TorchRec reads device and kernel from the plan."""
    shape = workload.Shape(tables=3, rows=10, dim=4, bottom=(4,))
    plan = workload.torchrec_plan(workload.build(shape, 0), 2, torch.device("cuda", 0), kernel)
    (tables,) = plan.plan.values()
    assert [one.compute_kernel for one in tables.values()] == [kernel] * 3
    places = [str(one.sharding_spec.shards[0].placement) for one in tables.values()]
    assert places == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:0/cuda:0"]


def test_trainers_that_share_a_gpu_do_not_take_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(device: str, trainers: int, gpus: int) -> str:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        one = worker.Assignment("ecrec", {}, 0, "", device=device, trainers=trainers)
        return worker.backend_of(one)

    assert backend("cuda", 1, 1) == backend("cuda", 2, 2) == "cpu:gloo,cuda:nccl"
    assert backend("cuda", 2, 1) == backend("cpu", 1, 1) == "gloo"


@pytest.mark.parametrize(
    ("cuda", "says"),
    [(None, "has no CUDA. `make gpu` makes"), ("13.0", "sees no GPU here. Does `nvidia-smi` show one")],
)
def test_without_a_gpu_it_is_said_what_to_do(cuda: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device("cpu")
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        require_device("cuda")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if cuda is not None:
        require_device("cuda")


def test_few_cases_compare_all_with_the_first_run() -> None:
    cases = exactness.cases(parse(exactness, "--cases", "few", "--trainers", 1, 2, "--optimizers", "sgd", "--steps", 8))
    told = [(case.name, case.reference, case.trainers, case.kills) for case in cases]
    for trainers, some in ((1, told[:4]), (2, told[4:])):
        first = f"sgd, {trainers} trainers: undisturbed"
        assert some == [
            (first, "", trainers, ()),
            (f"{first} again", first, trainers, ()),
            (f"sgd, {trainers} trainers: a server killed", first, trainers, ("server:1@4",)),
            (f"sgd, {trainers} trainers: a trainer killed", first, trainers, ("trainer:0@4",)),
        ]
    one = exactness.cases(parse(exactness, "--cases", "one", "--optimizers", "sgd", "--steps", 8))
    assert [case.kills for case in one] == [(), ("server:1@4",)] and {case.trainers for case in one} == {2}
    names = [case.name for case in exactness.cases(parse(exactness))]
    assert len(set(names)) == len(names)


def test_a_case_tells_the_demo_all_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of it takes minutes: what the trainers are told is made as a run makes it."""
    told: list[str] = []

    def execute(run: DemoRun) -> None:
        told.extend(run.script())
        raise ClusterError("that is enough")

    monkeypatch.setattr(DemoRun, "execute", execute)
    arguments = parse(exactness, "--cases", "one", "--optimizers", "sgd", "--steps", 8, "--out", tmp_path)
    assert exactness.run_case(exactness.cases(arguments)[0], arguments, {})["error"] == "that is enough"
    assert " ".join(told).startswith("-m examples.dlrm_criteo --redraw --steps 8 ")


def event(kind: str, name: str, stream: int, begin_ms: float, end_ms: float) -> dict[str, Any]:
    args = {"stream": stream}
    return {"ph": "X", "cat": kind, "name": name, "ts": 1e3 * begin_ms, "dur": 1e3 * (end_ms - begin_ms), "args": args}


TRACE = [
    event("kernel", "gemm", 7, 3, 7),
    event("kernel", "small", 7, 6, 7),
    event("kernel", "of another", 20, 9, 9.5),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 0, 4),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 13, 6, 8),
    event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 2, 3),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 2, 3),
    event("cuda_runtime", "cudaEventSynchronize", 0, 5, 8),
    {"ph": "i", "name": "an instant", "ts": 1.0},
]


def test_how_much_of_the_copies_is_overlapped() -> None:
    found = overlap.figures(TRACE, steps=2)
    assert found["kernels_ms"] == pytest.approx(4.5 / 2) and found["host_waits_ms"] == pytest.approx(3 / 2)
    assert found["overlapped"] == pytest.approx(2 / 6), "as the module's example has it"
    assert found["to device"] == pytest.approx(
        {"copies": 0.5, "copies_ms": 2.0, "own_stream": 1.0, "overlapped": 1 / 4}
    ), "that of memory that is not pinned is the loop's"
    assert found["to host"] == pytest.approx({"copies": 0.5, "copies_ms": 1.0, "own_stream": 1.0, "overlapped": 1 / 2})
    late = [*TRACE, event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 7, 10, 14)]
    assert overlap.figures(late, steps=2)["to host"]["own_stream"] == pytest.approx(2 / 6)
    lines = overlap.rows({"k2r1": [{**found, "step_ms": 9.0, "waits_share": 0.5, "trace": "t"}]})
    assert [(line["copies"], line["overlapped %"]) for line in lines] == [("to device", 25.0), ("to host", 50.0)]
    bare = overlap.rows({"k2r1": [{"step_ms": 9.0, "waits_share": 0.5, "trace": "t"}]})
    assert [list(line) for line in bare] == [list(line) for line in lines]


def test_the_table_of_training_says_how_long_ours_wait() -> None:
    figures = dict.fromkeys(train.FIGURES, 2.0)
    held = {"record_bytes": 100, "parity_bytes": 50, "log_bytes": 0}
    found: dict[str, list[dict[str, Any]]] = {
        "torchrec": [{**figures, "sent": {}, "server_bytes": {}, "waits_share": 0.0}],
        "k2r1": [{**figures, "sent": {}, "server_bytes": held, "waits_share": some} for some in (0.1, 0.3, 0.2)],
    }
    result = train.summarise([parse_mode(name) for name in found], found)
    assert [row["waits %"] for row in train.rows(result)] == [None, pytest.approx(20)]
    del result["waits_share"]
    assert [row["waits %"] for row in train.rows(result)] == [None, None], "results of before have no such figure"
    found["torchrec:uvm"] = [{**found["torchrec"][0], "samples_per_s": 0.5}]
    lines = train.rows(train.summarise([parse_mode(name) for name in found], found))
    assert [row["rate / torchrec:uvm"] for row in lines] == [4.0, 4.0, 1.0]
    assert {name for name in lines[0] if name.startswith("rate /")} == {"rate / torchrec", "rate / torchrec:uvm"}


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        (lambda one: one.get("cat") == "kernel", "no kernel of a GPU"),
        (lambda one: "HtoD (Pinned" in one["name"], "no copy to device on a stream of its own, of 0"),
        (lambda one: "DtoH" in one["name"], "no copy to host on a stream of its own, of 0"),
    ],
)
def test_a_trace_that_lacks_what_it_must_have_is_refused(lacks: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        overlap.figures([one for one in TRACE if not lacks(one)], steps=1)
    with pytest.raises(ValueError, match="on a stream of its own, of 1"):
        overlap.figures([event("kernel", "g", 7, 0, 90), *({**one, "args": {"stream": 7}} for one in TRACE)], steps=1)


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
        (train, "--systems none,torchrec:uvm", "go with `--device cuda`"),
        pytest.param(train, "--device cuda --systems none", "`--device cuda`: torch ", marks=NO_GPU),
        pytest.param(overlap, "", "`--device cuda`: torch ", marks=NO_GPU),
        (overlap, "--device cpu --systems torchrec", "TorchRec does not stage copies"),
        (overlap, "--device cpu --steps 0", "`steps` must be at least 1"),
        pytest.param(exactness, "--device cuda", "`--device cuda`: torch ", marks=NO_GPU),
        (exactness, "--trainers 1 2", "they go with `--cases few`"),
        (exactness, "--cases few --trainers 1 1", "`--trainers` has a number twice"),
        (exactness, "--cases few --trainers 0", "`trainers` must be at least 1"),
        (exactness, "--steps 1", "`steps` must be at least 2"),
        (exactness, "--long-steps 0", "`long-steps` must be at least 2"),
        (exactness, "--moments -1", "`moments` must be at least 0"),
        (train, "--seconds nan", "`seconds` must be positive"),
        (train, "--warmup -1", "`warmup` must be at least 1"),
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
        (scaling, "--seconds 0", "`seconds` must be positive"),
        (train, "--seconds inf", "`seconds` must be positive"),
        (train, "--label a/b", "`--label` is a part of the files' names, without /"),
        (outages, "--events kill --label a/b", "`--label` is a part of the files' names, without /"),
        (outages, "--events kill --zipf nan", "`--zipf` must not be negative, got nan"),
        (outages, "--events kill --link-mbit inf", "`--link-mbit` must not be negative, got inf"),
        (outages, "--events kill --gigabytes inf", "`gigabytes` must be positive, got inf"),
        (tiers, "--tier . --seconds nan", "`seconds` must be positive"),
        (tiers, "--tier . --warmup -1", "`warmup` must be at least 1"),
        (tiers, "--tier . --least-steps 0", "`least-steps` must be at least 1"),
        (tiers, "--tier . --shares x", "`--shares` are numbers with commas between them, got x"),
        (tiers, "--tier . --shares 0.1,0.1", "`--shares` has a number twice"),
        (tiers, "--tier . --ahead 0,-1", "`--ahead` must be 0 to 16"),
        (tiers, f"--tier . --label {101 * 'a'}", "of 100 characters at most"),
        (connections, "--repeats 0", "`repeats` must be at least 1"),
        (connections, "--at-once 0", "`at-once` must be at least 1"),
        (connections, "--bytes 0", "`bytes` must be at least 1"),
        (connections, "--link-gbit 1", "`--link-gbit` goes with `--hosts`"),
    ],
)
def test_bad_arguments_start_nothing(benchmark: Any, words: str, says: str, tmp_path: Path) -> None:
    refuses(benchmark, words.split(), says, tmp_path)


def test_a_seed_below_0_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "operators", "--seed", "-1", "--out", str(tmp_path / "out")]) == 2
    assert "`seed` must be at least 0, got -1" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", ["train --hosts 3", "connections --hosts", "outages --events cut"])
def test_where_there_can_be_no_hosts_it_is_said(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kit, "unavailable", lambda: "hosts need root: probe: no network of its own")
    name, *more = words.split()
    benchmark = {"train": train, "connections": connections, "outages": outages}[name]
    refuses(benchmark, more, "`--hosts`: hosts need root", tmp_path)
