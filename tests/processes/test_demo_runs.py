"""A few real runs of the demo: small, but with processes, SIGKILL and exit codes."""

import contextlib
import http.client
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from demo_command import END_LIMIT_S, demo
from test_cli import command

from torch_ecrec.demo import criteo, report


def test_the_live_page_is_served_meanwhile(tmp_path: Path) -> None:
    """In both runs at the same address, which is printed: a page that is open shows the second one by itself."""
    criteo.write_synthetic(tmp_path / "rows.tsv", rows=1000, seed=3)
    words = ["--data", str(tmp_path / "rows.tsv"), "--out", str(tmp_path), "--steps", "30", "--batch-size", "32"]
    runs, steps = set[str](), set[tuple[str, bool]]()
    with command("demo", *words, "--kill", "none", "--trainers", "1", "--http", "0") as run:
        port = int(run.read_until(r"watch it at http://127\.0\.0\.1:(\d+)/")[1])

        def ended() -> bool:
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=END_LIMIT_S)
                status = json.loads(answer.read())
                runs.add(status["run"])
                steps.add((status["run"], status["step"] > 0))
            return run.process.poll() is not None

        run.wait_until("its end", ended)
        assert run.process.returncode == 0
    assert len(runs) == 2 and {trained for _, trained in steps} == {False, True}, steps


@pytest.mark.slow
def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    """Those of all roles, below, include it."""
    done = demo(tmp_path, "--kill", "server:1@10")
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert len(result["kills"]) == 1, "the kill fired"
    (kill,) = result["kills"]
    assert kill["spec"] == "server:1@10" and kill["step"] == 10 and kill["member"] == "server-1"
    assert (kill["role"], kill["number"], kill["slots_lost"]) == ("server", 1, [1])
    after = kill["after_kill_s"]
    assert 0 < after["detected_s"] < after["rehosted_s"] < after["rebuilt_s"]
    assert after["first_step_s"] > 0
    assert result["equal"] is True and result["error"] is None and result["differences"] == []
    assert re.fullmatch("[0-9a-f]{64}", result["digest"]) and result["digest"] == result["undisturbed"]["digest"]
    assert result["losses"] == result["undisturbed"]["losses"] and len(result["losses"]) == 30
    assert len({tuple(losses) for losses in result["losses"]}) == 30, "it trains"
    # As members have told it with their last beats, of which some went with the coordinator.
    assert result["bytes_sent"].keys() >= set(report.KINDS) and sum(result["bytes_sent"].values()) > 0
    assert sum(server["parity_bytes"] for server in result["servers"]) > 0
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    assert "EQUAL" in done.stdout and "re-hosted" in done.stdout


@pytest.mark.parametrize("pooling", ["parts", pytest.param("whole", marks=pytest.mark.slow)])
def test_kills_with_long_bags_change_nothing(pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 26 tables 24 are whole on one of three slots, and the others on two each."""
    monkeypatch.setenv("TORCH_ECREC_POOLING", pooling)
    kills = ["--kill", "server:1@10", "--kill", "trainer:0@20~"]
    done = demo(tmp_path, "--ids", "8", *kills, "--steps", "40", "--batch-size", "64")
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert len(result["kills"]) == 2 and result["equal"] is True and result["differences"] == []
    assert "8 ids in a bag" in done.stdout


@pytest.mark.slow  # what a script sees of it: test_exit_codes.py
def test_more_losses_than_parities_end_with_exit_code_3(tmp_path: Path) -> None:
    done = demo(tmp_path, "--kill", "server:0@10", "--kill", "server:1@10", "--spares", "0", "--trainers", "1")
    assert done.returncode == 3, done.stderr
    assert "slots [0, 1] are lost together, which (k, r) = (2, 1) cannot repair" in done.stderr
    assert "346667 rows of 18 tables (table_C1, " in done.stderr, "two thirds; 8 of the 26 are whole on slot 2"
    result = json.loads((tmp_path / "result.json").read_text())
    assert "cannot repair" in result["error"] and result["equal"] is None
    assert [kill["spec"] for kill in result["kills"]] == ["server:0@10", "server:1@10"], "both fired"
    log = (tmp_path / "logs" / "run" / "trainers.log").read_text()
    assert "failed (exitcode: 3)" in log and "DataLoss: slots [0, 1] are lost together" in log, (
        "the script catches nothing"
    )


@pytest.mark.slow
def test_kills_of_a_trainer_the_coordinator_and_a_server_change_nothing(tmp_path: Path) -> None:
    """The coordinator while trainers start again: later, training might be over before the next one is there."""
    texts = ["trainer:1@15", "coordinator@15+1000", "server:0@45~"]
    words = [word for text in texts for word in ("--kill", text)]
    done = demo(tmp_path, "--steps", "60", "--batch-size", "64", *words)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert result["equal"] is True and result["error"] is None and result["differences"] == []
    assert result["digest"] == result["undisturbed"]["digest"] and len(result["losses"]) == 60
    assert [kill["spec"] for kill in result["kills"]] == texts, "every kill fired"
    assert [kill["role"] for kill in result["kills"]] == ["trainer", "coordinator", "server"]
    trainer, coordinator, server = result["kills"]
    assert 13 <= trainer["resumed_after"] < 45, "at most a window is taken back; the kill comes when it comes"
    assert trainer["number"] == 1 and trainer["slots_lost"] == []
    after = trainer["after_kill_s"]
    assert 0 < after["detected_s"] < after["resumable_s"] < after["rejoined_s"] < after["first_step_s"]
    assert coordinator["after_kill_s"]["rejoined_s"] > 0, "another one is there"
    assert "a new coordinator: " in done.stdout
    assert server["step"] >= 45 and server["slots_lost"] == [0]
    after = server["after_kill_s"]
    assert 0 < after["detected_s"] < after["rehosted_s"] < after["rebuilt_s"]
    assert result["losses"] == result["undisturbed"]["losses"]
    assert len({tuple(losses) for losses in result["losses"]}) == 60, "it trains"
    # As members have told it with their last beats, of which some went with the coordinator.
    assert result["bytes_sent"].keys() >= set(report.KINDS) and sum(result["bytes_sent"].values()) > 0
    assert sum(server["parity_bytes"] for server in result["servers"]) > 0
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    assert "EQUAL" in done.stdout and "re-hosted" in done.stdout


BEYOND = ("--checkpoint-every", "10", "--beyond", "checkpoint")


def goes_back(folder: Path, *kills: str) -> dict[str, Any]:
    """All that holds of every kill beyond parity; the result."""
    words = [word for text in kills for word in ("--kill", text)]
    done = demo(folder, "--steps", "50", *BEYOND, "--checkpoint", str(folder / "store"), *words)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    assert [kill["spec"] for kill in result["kills"]] == list(kills), "every kill fired"
    assert result["equal"] is True and result["error"] is None and result["differences"] == []
    assert result["losses"] == result["undisturbed"]["losses"] and len(result["losses"]) == 50
    (back,) = result["went_back"]
    assert 10 <= back["step"] <= back["from_step"] and back["checkpoint"] in {
        one["name"] for one in result["checkpoints"]
    }
    steps = [step for step, _ in result["trained"]]
    assert len(steps) >= 50 and set(steps) == set(range(1, 51))
    assert [step for step, _ in result["trained"]].count(back["step"] + 1) == 1 + (back["from_step"] > back["step"])
    for kill in result["kills"]:
        after = kill["after_kill_s"]
        assert kill["resumed_after"] == back["step"]
        assert 0 < after["went_back_s"] < after["rejoined_s"] < after["trains_s"] <= after["first_step_s"]
    assert (folder / "recovery.png").stat().st_size > 10_000
    assert f"all go back to the checkpoint of step {back['step']}" in done.stdout and "EQUAL" in done.stdout
    return result


@pytest.mark.slow  # test_checkpointing.py has the same without a demo
def test_everything_is_killed_at_once_and_comes_back_to_the_same_bits(tmp_path: Path) -> None:
    (kill,) = goes_back(tmp_path, "all@25")["kills"]
    assert (kill["role"], kill["slots_lost"], kill["pid"]) == ("all", [0, 1, 2], None)


@pytest.mark.slow  # the same way back, of which test_checkpointing.py has the protocol
def test_more_servers_than_parity_repairs_come_back_to_the_same_bits(tmp_path: Path) -> None:
    result = goes_back(tmp_path, "server:0@25", "server:1@25")
    assert "cannot repair" in result["went_back"][0]["reason"]


@pytest.mark.slow  # test_partial.py has the protocol
def test_partial_recovery_is_told_as_not_exact(tmp_path: Path) -> None:
    words = ("--checkpoint-every", "10", "--beyond", "partial", "--most-lost-samples", "0.9")
    kills = ("--kill", "server:0@25", "--kill", "server:1@25")
    done = demo(tmp_path, "--steps", "50", *words, "--checkpoint", str(tmp_path / "store"), *kills)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, done.stderr
    (partly,) = result["recovered_partly"]
    assert set(partly["slots"]) >= {0, 1} and 10 <= partly["step"] <= partly["at"] and 0 < partly["lost_samples"] < 0.9
    assert result["went_back"] == [] and result["equal"] is False and result["error"] is None
    assert all(kill["after_kill_s"]["rebuilt_s"] is not None for kill in result["kills"])
    assert "NOT EXACT, as asked for by --beyond partial" in done.stdout
