"""`bench partial` in short: losses beside a count row by row, overheads beside arithmetic; never how fast it is."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
from benches import parse

from torch_ecrec.bench import partial
from torch_ecrec.bench.partial import Job, Training, emulate, full, train
from torch_ecrec.cli.main import main
from torch_ecrec.demo import criteo
from torch_ecrec.overhead import model
from torch_ecrec.overhead.model import HOUR_S, Costs

WORDS = ["--hours", "10", "--failures", "3", "--slots", "2", "--pls", "0.3", "--portion", "0.25", "--steps", "40"]
WORDS += ["--rows", "30", "--touched", "12", "--dim", "4", "--save", "60", "--load", "100", "--restart", "20"]


def job_of(*words: str) -> Job:
    return Job.of(parse(partial, *WORDS, *words))


def counted(job: Job, portion: float) -> tuple[int, int, int, float]:
    """Row by row, with MFU's rule, or saves of everything alone (`portion` 1).

    Returns:
        Row updates lost, and all; rows saved; the portion of lost samples.
    """
    every = 16  # steps: twice 0.3 of the samples, of 2 slots, for each of 3 failures in 40
    some = {1.0: 16, 0.25: 4}[portion]
    since = [Counter[int]() for _ in range(job.slots)]
    counts = [Counter[int]() for _ in range(job.slots)]
    lost, updates, saved, samples, last = 0, 0, 0, 0.0, 0
    for step in range(1, job.steps + 1):
        for slot in range(job.slots):
            for row in job.batch(step, slot).positions.tolist():
                since[slot][row] += 1
                counts[slot][row] += 1
                updates += 1
        for when, slot in job.failures:
            if when == step:
                lost += since[slot].total()
                samples += (step - last) / job.slots / job.steps
                since[slot].clear()
                counts[slot].clear()
        for slot in range(job.slots):
            if step % every == 0:
                since[slot].clear()
                counts[slot].clear()
                saved += job.rows
            elif step % some == 0:
                first = sorted(counts[slot], key=lambda row: (-counts[slot][row], row))[: int(portion * job.rows)]
                saved += len(first)
                for row in first:
                    del since[slot][row], counts[slot][row]
        last = step if step % every == 0 else last
    return lost, updates, saved, samples


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["everything", "mfu"])
def test_what_is_lost_is_what_a_count_row_by_row_says(name: str, seed: int) -> None:
    job = job_of("--seed", str(seed))
    way = emulate(job, name)
    lost, updates, saved, samples = counted(job, 1.0 if name == "everything" else job.portion)
    assert 0 < lost < updates and way.lost_updates == lost / updates
    assert way.lost_samples == pytest.approx(samples) and way.lost_change > 0
    assert way.saves == pytest.approx(saved / (job.rows * job.slots) * 60 / (10 * HOUR_S))
    assert way.down == pytest.approx(3 * 120 / (10 * HOUR_S)) and way.again == 0
    assert way.interval_h == pytest.approx(2 * 0.3 * 2 / 3 * 10)


def test_overheads_are_those_of_the_formulas() -> None:
    """Where intervals are whole steps and the time is whole intervals: of `torch-ecrec plan`."""
    job = job_of("--pls", "0.03", "--steps", "400")
    costs = Costs(2, 2 * 10 * HOUR_S / 3, save_s=60.0, load_s=100.0, restart_s=20.0, k=1, r=1)
    said = model.partial(costs, 0.03)
    way = emulate(job, "everything")
    assert (way.total, way.interval_h) == (pytest.approx(said.total), pytest.approx(said.interval_s / HOUR_S))
    assert full(job).interval_h == pytest.approx(model.full(costs).interval_s / HOUR_S)


def test_savers_lose_less_than_saves_of_everything_alone() -> None:
    job = job_of("--steps", "60", "--seed", "5")
    ways = {name: emulate(job, name) for name in ("everything", "mfu", "ssu", "scar")}
    for name in ("mfu", "ssu", "scar"):
        assert ways[name].lost_updates < ways["everything"].lost_updates
        assert ways[name].lost_samples == ways["everything"].lost_samples, "CPR's measure does not see it"
    assert [round(way.memory, 4) for way in ways.values()] == [0, 0.25, round((7 * 8 + 30) / (30 * 16), 4), 1.0]


def test_full_recovery_does_again_what_was_trained_since_the_last_save() -> None:
    job = job_of()
    interval_s = (2 * 60 * 10 * HOUR_S / 3) ** 0.5
    way = full(job)
    again_s = sum(step * 900 - int(step * 900 / interval_s) * interval_s for step, _ in job.failures)
    assert way.interval_h == pytest.approx(interval_s / HOUR_S) and way.again == pytest.approx(again_s / 36000)
    assert way.saves == pytest.approx(int(36000 / interval_s) * 60 / 36000)
    assert way.lost_samples == way.lost_updates == 0


def test_it_prints_and_writes_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "partial", *WORDS, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ["full", "everything", "mfu", "ssu", "scar"]
    assert [line.split()[0] for line in lines[2:7]] == names and "0.53 to 0.68 %" in lines[-1]
    said = json.loads((tmp_path / "out" / "partial.json").read_text())
    assert [row["way"] for row in said["rows"]] == names
    assert said["costs"] == {"save_s": 60.0, "load_s": 100.0, "restart_s": 20.0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--save", "60"], "--load, --restart: say what it costs"),
        ([*WORDS, "--failures", "0"], "`failures` must be at least 1, got 0"),
        ([*WORDS, "--pls", "1"], "`pls` must be above 0 and below 1, got 1.0"),
        ([*WORDS, "--hours", "inf"], "`hours` must be positive, got inf"),
        ([*WORDS, "--save", "0"], "`save_s` must be positive, got 0.0"),
        ([*WORDS, "--pls", "0.001"], "the interval between two saves is 0.053 steps: raise --steps to"),
        ([*WORDS, "--portion", "0.01"], "a portion of the interval is 0.16 steps: raise --steps to"),
    ],
)
def test_bad_input_is_one_message(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "partial", *words, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


AREAS = ["--batch-size", "10", "--epochs", "2", "--rows-per-table", "20", "--seeds", "2", "--portion", "0.25"]


def test_areas_of_each_way_beside_exact_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "clicks.tsv"
    criteo.write_synthetic(data, 200, seed=3)
    assert main(["bench", "partial", *WORDS, *AREAS, "--data", str(data), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "partial-auc.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["exact", "everything", "mfu", "ssu", "scar"] and "| mfu |" in printed
    exact, everything, *some = rows
    assert exact["- exact"] == exact["sd of that"] == exact["lost updates %"] == 0 and 0 < exact["AUC"] < 1
    assert everything["lost updates %"] > max(row["lost updates %"] for row in some) > 0
    assert all(row["sd"] > 0 for row in rows)


def test_nothing_lost_is_exact(tmp_path: Path) -> None:
    """Without failures every way is exact recovery, bit for bit."""
    criteo.write_synthetic(tmp_path / "clicks.tsv", 200, seed=3)
    arguments = parse(partial, *WORDS, *AREAS)
    train_on, test_on = criteo.read(tmp_path / "clicks.tsv", 20).split()
    training = Training.of(arguments, Job.of(arguments), 10 * HOUR_S / 4, len(train_on))
    assert (training.steps, training.every, training.some) == (32, 8, 2)
    exact = train(training, train_on, test_on, "exact", 5)
    assert exact.lost == 0.0
    never = dataclasses.replace(training, job=dataclasses.replace(training.job, failures=[]))
    assert [train(never, train_on, test_on, way, 5) for way in ("everything", "mfu")] == [exact] * 2


def test_areas_want_saves_within_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    criteo.write_synthetic(tmp_path / "clicks.tsv", 50, seed=3)
    words = [*WORDS, *AREAS, "--epochs", "1", "--portion", "0.1", "--data", str(tmp_path / "clicks.tsv")]
    assert main(["bench", "partial", *words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "a portion of the interval is" in said.err and not said.out, "it is refused before anything is measured"
