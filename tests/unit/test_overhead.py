"""What failures cost: each formula beside a simulation of failures, and what `torch-ecrec plan` makes of them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failures import beyond_parity, full_recovery, parity_and_checkpoints, partial_recovery

from torch_ecrec.cli.main import main
from torch_ecrec.layout.stripes import Layout
from torch_ecrec.overhead import model
from torch_ecrec.overhead.model import HOUR_S, Costs
from torch_ecrec.overhead.report import measured, to_json, to_text

COSTS = Costs(
    hosts=12,
    mtbf_s=1200 * HOUR_S,
    save_s=10.0,
    load_s=60.0,
    restart_s=120.0,
    k=4,
    r=2,
    parity_share=0.002,
    stall_s=2.0,
    repair_s=300.0,
    repair_rate=0.8,
)

# --- formulas beside a simulation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0], ids=["half", "young", "twice"])
def test_full_recovery(factor: float) -> None:
    interval_s = factor * model.young_interval_s(COSTS.save_s, COSTS.failures_per_s)
    said = model.checkpoints("", COSTS, COSTS.failures_per_s, interval_s).total
    found = [full_recovery(COSTS, interval_s, 100_000, seed) for seed in range(5)]
    error = 4 * float(np.std(found)) / math.sqrt(len(found))
    assert said == pytest.approx(float(np.mean(found)), abs=error + 2 * said**2), "to second order"


def test_young_s_interval_costs_least() -> None:
    best = model.full(COSTS)
    assert best.interval_s == pytest.approx(math.sqrt(2 * 10.0 * 100 * HOUR_S))
    assert best.guard == pytest.approx(best.again), "as much for writing as for what is done again"
    for factor in (0.5, 0.9, 1.1, 2.0):
        other = model.checkpoints("", COSTS, COSTS.failures_per_s, factor * best.interval_s)
        assert other.total > best.total
        found = [full_recovery(COSTS, at, 400_000, 3) for at in (best.interval_s, 2 * best.interval_s)]
    assert found[0] < found[1], "and so says the simulation"


@pytest.mark.parametrize("pls", [0.0005, 0.01])
def test_partial_recovery(pls: float) -> None:
    said = model.partial(COSTS, pls)
    found = [partial_recovery(COSTS, said.interval_s, 100_000, seed) for seed in range(5)]
    overheads, lost = np.array(found).T
    error = 4 * float(np.std(overheads)) / math.sqrt(len(found))
    assert said.total == pytest.approx(float(np.mean(overheads)), abs=error + 2 * said.total**2)
    error = 4 * float(np.std(lost)) / math.sqrt(len(found))
    assert pls == pytest.approx(float(np.mean(lost)), abs=error + 3 * pls * said.guard)


@pytest.mark.parametrize(("hosts", "r", "share"), [(5, 1, 0.002), (6, 1, 0.02), (8, 2, 0.03), (9, 3, 0.1)])
def test_the_rate_beyond_parity(hosts: int, r: int, share: float) -> None:
    """`share`: of the time between two failures of a host that its repair takes."""
    costs = replace(COSTS, hosts=hosts, k=hosts - r, r=r, repair_s=share * COSTS.mtbf_s)
    said = model.beyond_rate_per_s(costs)
    found = [beyond_parity(costs, hosts, 40_000, seed) for seed in range(5)]
    assert min(found) > 0, "it happens in the simulation"
    assert said == pytest.approx(float(np.mean(found)), abs=5 * float(np.std(found)) / math.sqrt(len(found)))


def test_groups_add_up_and_disasters_come_on_top() -> None:
    one = replace(COSTS, hosts=12)
    many = replace(COSTS, hosts=48, mtbf_s=COSTS.mtbf_s)
    assert model.group_sizes(12, 6) == [12] and model.group_sizes(48, 6) == [12] * 4
    assert model.beyond_rate_per_s(many) == pytest.approx(4 * model.beyond_rate_per_s(one))
    together = replace(one, all_mtbf_s=1e8)
    assert model.beyond_rate_per_s(together) == pytest.approx(model.beyond_rate_per_s(one) + 1e-8)
    exact = 6 * 5 / (1000 * HOUR_S) ** 2 * 60
    mirrored = replace(COSTS, hosts=6, k=5, r=1, mtbf_s=1000 * HOUR_S, repair_s=60.0)
    assert model.beyond_rate_per_s(mirrored) == pytest.approx(exact, rel=1e-4)
    assert model.duration(1 / model.beyond_rate_per_s(mirrored)) == "228 years", "the example of its docstring"


@pytest.mark.parametrize(("slots", "k", "r"), [(3, 2, 1), (12, 2, 1), (13, 4, 2), (50, 4, 2), (29, 10, 4)])
def test_coding_groups_are_those_of_the_layout(slots: int, k: int, r: int) -> None:
    layout = Layout(slots, k, r, 1000)
    sizes, slot = [], 0
    while slot < slots:
        sizes.append(len(layout.group_of(slot)))
        slot += sizes[-1]
    assert model.group_sizes(slots, k + r) == sizes


def test_parity_with_checkpoints_behind_it() -> None:
    """Repairs so long that what parity does not repair happens often enough to be counted."""
    costs = replace(COSTS, hosts=6, k=5, r=1, repair_s=0.002 * COSTS.mtbf_s, repair_rate=1.0)
    said = model.parity_and_checkpoints(costs)
    runs = [parity_and_checkpoints(costs, said.interval_s, 60_000, seed) for seed in range(5)]
    found = [overhead for overhead, _ in runs]
    assert all(backs > 100 for _, backs in runs), "all went back"
    error = 4 * float(np.std(found)) / math.sqrt(len(found))
    assert said.total == pytest.approx(float(np.mean(found)), abs=error + 2 * said.total**2)
    without = model.parity(costs)
    assert without.total < said.total and without.loses_all_s == pytest.approx(1 / model.beyond_rate_per_s(costs))
    assert said.interval_s > model.full(costs).interval_s, "seldom"


def test_what_never_fails_costs_nothing_but_its_guard() -> None:
    costs = replace(COSTS, repair_s=0.0, stall_s=0.0)
    assert model.beyond_rate_per_s(costs) == 0 and math.isinf(model.parity(costs).loses_all_s)
    both = model.parity_and_checkpoints(costs)
    assert (both.total, both.interval_s) == (costs.parity_share, math.inf)


# --- which to take ---------------------------------------------------------------------------------------------------


def test_the_least_of_those_that_go_on_is_taken_and_why_is_said() -> None:
    best, why = model.choose(model.all_ways(COSTS))
    assert best.way == "parity and checkpoints" and why.startswith(
        "parity and checkpoints: 0.22 % of the training time"
    )
    assert "full checkpoints" in why and "parity alone would lose everything once in" in why
    dear = replace(COSTS, parity_share=0.2)
    assert model.choose(model.all_ways(dear))[0].way == "full checkpoints"
    best, why = model.choose(model.all_ways(dear, pls=0.01))
    assert best.way == "partial recovery" and "loses 1 % of the samples, and full checkpoints loses none" in why


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hosts": 5}, r"\(4, 2\) needs as many hosts as k \+ r, got 5"),
        ({"mtbf_s": 0.0}, "`mtbf_s` must be positive, got 0.0"),
        ({"save_s": -1.0}, "`save_s` must be positive"),
        ({"load_s": math.nan}, "`load_s` must be a number, got nan"),
        ({"repair_rate": 1.5}, "`repair_rate` must be above 0 and at most 1"),
    ],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(COSTS, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`pls` must be above 0 and below 1, got 0"):
        model.partial(COSTS, 0)


# --- the command -----------------------------------------------------------------------------------------------------

WORDS = ["plan", "--hosts", "12", "--mtbf-hours", "1200", "-k", "4", "-r", "2"]
FIGURES = ["--save", "10", "--load", "60", "--restart", "120", "--stall", "2", "--repair", "300"]
FIGURES += ["--parity-share", "0.002"]


def test_the_command_shows_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *FIGURES, "--repair-rate", "0.8", "--pls", "0.001"]) == 0
    text = capsys.readouterr().out
    assert text == to_text(COSTS, 0.001) + "\n" and "Take " in text
    assert all(way.way in text for way in model.all_ways(COSTS, 0.001))
    assert main([*WORDS, *FIGURES, "--repair-rate", "0.8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(json.dumps(to_json(COSTS, None), allow_nan=False))
    assert told["take"] == "parity and checkpoints" and told["ways"][1]["interval_s"] is None
    assert told["ways"][0]["total"] == pytest.approx(model.full(COSTS).total)


@pytest.mark.parametrize("over", ["mtbf", "hosts"])
def test_the_command_draws(over: str, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    assert main([*WORDS, *FIGURES, "--pls", "0.01", "--plot", str(picture), "--over", over]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--save, --load, --restart, --parity-share, --stall, --repair: say what it costs, or name a run"),
        ([*FIGURES, "--pls", "1"], "`--pls` must be above 0 and below 1, got 1.0"),
        ([*FIGURES, "-k", "20"], "(20, 2) needs as many hosts as k + r, got 12"),
        ([*FIGURES, "--measured", "none.json"], "`--measured none.json`: no such file; `torch-ecrec demo` writes it"),
    ],
)
def test_what_is_missing_or_wrong_is_one_message(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    out, error = capsys.readouterr()
    assert says in error and error.count("\n") == 1 and out == ""


def test_a_run_of_the_demo_has_measured_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = dict.fromkeys(["detected_s", "stall_s", "rebuilt_s", "went_back_s", "rejoined_s", "trains_s"])
    repaired = {**after, "stall_s": 0.25, "rebuilt_s": 0.5}
    back = {**after, "stall_s": 9.0, "went_back_s": 1.0, "rejoined_s": 5.0, "trains_s": 6.5}
    result = {
        "kills": [{"after_kill_s": repaired}, {"after_kill_s": back}],
        "checkpoints": [
            {"seconds": 0.2, "time_s": 1.0},
            {"seconds": 0.4, "time_s": 2.0},
            {"seconds": 0, "time_s": None},
        ],
        "throughput": {"before": 100.0, "rebuild": 80.0, "after": 100.0},
    }
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    found = {"stall_s": 0.25, "repair_s": 0.5, "save_s": pytest.approx(0.3), "restart_s": 5.0, "load_s": 1.5}
    assert measured(path) == found, "the rate while all were going back is none of a repair"
    path.write_text(json.dumps({**result, "kills": result["kills"][:1]}))
    assert measured(path)["repair_rate"] == pytest.approx(0.8)
    path.write_text(json.dumps(result))
    assert main([*WORDS, "--measured", str(path), "--save", "7", "--parity-share", "0.01", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["costs"]
    assert (told["save_s"], told["load_s"], told["stall_s"]) == (7.0, 1.5, 0.25), "what is said wins"
