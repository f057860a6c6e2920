"""The demo: its arguments, when its kills fire, and what it leaves."""

import argparse
import contextlib
import json
import math
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from coordinator_words import (
    JOINED,
    PLACED,
    TRAINERS_BACK,
    TRAINERS_LOST,
    checkpointed,
    event,
    everything_lost,
    recorded,
    recovered_partly,
    recovery,
    steps,
    two_servers_lost,
    watched,
)

from torch_ecrec.cli.main import main, parser
from torch_ecrec.demo import criteo, run, training
from torch_ecrec.demo.interrupts import sigterm_interrupts
from torch_ecrec.demo.kills import KillSpec, parse_kills
from torch_ecrec.demo.plot import draw
from torch_ecrec.demo.plot_steps import draw_steps, pieces
from torch_ecrec.demo.report import format_summary
from torch_ecrec.demo.result import assemble, differences
from torch_ecrec.demo.terminal import Terminal
from torch_ecrec.demo.training import DemoRun
from torch_ecrec.errors import ClusterError
from torch_ecrec.spec.job import CodeSpec

CHECKPOINTS = ["--checkpoint", "store", "--checkpoint-every", "20"]
BEYOND = [*CHECKPOINTS, "--beyond", "checkpoint"]

# --- told to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("words", [["bench", "placement"], ["experiments", "run", "smoke"]])
def test_who_has_trainers_ends_them_whatever_tells_it_to_end(
    words: list[str], number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have a session of their own: only this process ends them, as it leaves what it is in."""
    ended = []

    def train(*_: object) -> int:
        try:
            signal.raise_signal(number)
        finally:
            ended.append(number)
        return 0

    monkeypatch.setattr("torch_ecrec.bench.placement.run", train)
    monkeypatch.setattr("torch_ecrec.experiments.run.begin", train)
    before = signal.signal(number, lambda *_: None)  # which keeps the tests alive, where nobody handles it
    try:
        assert main([*words, "--out", str(tmp_path)]) == 130 and ended == [number]
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("words", [["demo"], ["chaos"], ["chaos", "--check-power", "60"]])
def test_who_is_interrupted_says_so_and_leaves_no_earlier_result_behind(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a minute, before anything trains, `chaos` ended without a word, beside the verdict of an earlier one."""
    monkeypatch.setattr("torch_ecrec.processes.launch.counted", lambda *_: signal.raise_signal(signal.SIGINT))
    for name in ("chaos.json", "power.json", "result.json"):
        (tmp_path / name).write_text('{"error": null, "equal": true}')
    assert main([*words, "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().out.endswith("interrupted; everything that was started has ended\n")
    left = {"demo": "result.json", "chaos": "power.json" if len(words) > 1 else "chaos.json"}[words[0]]
    assert not (tmp_path / left).exists() or json.loads((tmp_path / left).read_text())["error"] == "interrupted"


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Lets no file grow beyond so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("failed", "code"), [(None, 1), (ClusterError("a server was lost"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_result_that_cannot_be_written_is_named_beside_what_failed_before(
    failed: BaseException | None,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The system says no more than that a file is too large, or a disk full; a lost run had that for its reason."""

    def train(_: DemoRun) -> None:
        if failed is not None:
            raise failed

    monkeypatch.setattr(run, "warm", lambda **_: None)
    monkeypatch.setattr(DemoRun, "execute", train)
    with limited_files(100):
        assert main(["demo", "--no-compare", "--out", str(tmp_path)]) == code
    told = capsys.readouterr().err
    assert f": File too large: '{tmp_path}/result.json'" in told and not list(tmp_path.glob("*.json"))
    assert ("the run has ended, and its result cannot be written" in told) == (failed is None)
    assert ("torch-ecrec: a server was lost" in told) == isinstance(failed, ClusterError)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sigterm_interrupts():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# --- arguments -------------------------------------------------------------------------------------------------------


def test_kills_are_parsed_and_sorted_by_step() -> None:
    kills = parse_kills(["server:2@9~+5", "server:0@3", "server:1@7+12"], slots=3, steps=10)
    assert kills == [
        KillSpec("server:0@3", "server", 0, 3, False, 0),
        KillSpec("server:1@7+12", "server", 1, 7, False, 12),
        KillSpec("server:2@9~+5", "server", 2, 9, True, 5),
    ]
    assert parse_kills(["none"], slots=3, steps=10) == []
    assert [kill.text for kill in parse_kills(None, slots=3, steps=120)] == ["server:1@60"]
    assert [kill.text for kill in parse_kills(None, slots=1, steps=3)] == ["server:0@1"]
    assert parse_kills(None, slots=3, steps=1) == []


def test_trainers_and_the_coordinator_may_be_killed_as_well() -> None:
    texts = ["coordinator@41~+7", "trainer:1@40", "coordinator@40", "trainer:0@42~", "trainer:1@43+12"]
    assert parse_kills(texts, slots=1, steps=60, trainers=2) == [
        KillSpec("trainer:1@40", "trainer", 1, 40, False, 0),
        KillSpec("coordinator@40", "coordinator", 0, 40, False, 0),
        KillSpec("coordinator@41~+7", "coordinator", 0, 41, True, 7),
        KillSpec("trainer:0@42~", "trainer", 0, 42, True, 0),
        KillSpec("trainer:1@43+12", "trainer", 1, 43, False, 12),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1@5", "must be server:SLOT@STEP"),
        ("server:1", "must be server:SLOT@STEP"),
        ("server:1@5+", "must be server:SLOT@STEP"),
        ("server:-1@5", "must be server:SLOT@STEP"),
        ("server:3@5", "slots are 0 to 2, got 3"),
        ("server:1@10", "the step must be from 1 to 9, got 10"),
        ("server:1@0", "the step must be from 1 to 9, got 0"),
        ("trainer:2@5", "`--kill trainer:2@5`: trainers are 0 to 1, got 2"),
        ("trainer:0@10~", "`--kill trainer:0@10~`: the step must be from 1 to 9, got 10"),
        ("coordinator@0", "`--kill coordinator@0`: the step must be from 1 to 9, got 0"),
        ("trainer@5", "trainer:RANK@..., coordinator@..., all@... or none, got 'trainer@5'"),
        ("coordinator:0@5", "coordinator@..., all@... or none, got 'coordinator:0@5'"),
        ("all:0@5", "all@... or none, got 'all:0@5'"),
        ("all@10", "`--kill all@10`: the step must be from 1 to 9, got 10"),
    ],
)
def test_a_bad_kill_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_kills([text], slots=3, steps=10, trainers=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-k", "3"], "needs as many slots, got 3"),
        (["-r", "0"], "`r` must be at least 1, got 0"),
        (["--steps", "0"], "`steps` must be at least 1, got 0"),
        (["--trainers", "0"], "`trainers` must be at least 1, got 0"),
        (["--batch-size", "-1"], "`batch-size` must be at least 1, got -1"),
        (["--spares", "-1"], "`spares` must be at least 0, got -1"),
        (["--spares", "1" + 30 * "0"], "`spares` must be at most 10000, got 1"),
        (["--trainers", "1" + 30 * "0"], "`trainers` must be at most 1048576, got 1"),
        (["--seed", "1" + 30 * "0"], "`seed` must be at most 9223372036854775807, got 1"),
        (["--max-restarts", "-1"], "`max-restarts` must be at least 0, got -1"),
        (["--kill", "server:9@5"], "slots are 0 to 2, got 9"),
        (["--kill", "trainer:3@5", "--trainers", "3"], "`--kill trainer:3@5`: trainers are 0 to 2, got 3"),
        (["--kill", "all@5"], "`--kill all@5` leaves nothing to go on with: add `--checkpoint DIR"),
        (["--kill", "all@5", *CHECKPOINTS], "`--kill all@5` leaves nothing to go on with"),
        (["--kill", "all@20", *BEYOND], "and the first checkpoint is of step 20: kill later, or"),
        (
            ["--kill", "server:0@9", "--kill", "server:1@9", *BEYOND],
            "`--kill server:0@9` is beyond parity, and the first",
        ),
        (["--beyond", "checkpoint"], "`beyond` is 'checkpoint', but no checkpoints are written"),
        (["--checkpoint", "store"], "--checkpoint URL and --checkpoint-every N go together"),
        (["--steps", "20", *BEYOND], "`--checkpoint-every 20`: there are 20 steps"),
        (["--checkpoint-bits", "8", *BEYOND], "the demo compares bit for bit"),
        (["--data", "none.tsv"], "none.tsv: no such file"),
        (["--data", "bad.tsv"], "bad.tsv, line 3: 39 columns, expected 40"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    criteo.write_synthetic("bad.tsv", rows=3, seed=0)
    lines = Path("bad.tsv").read_text().splitlines()
    Path("bad.tsv").write_text("\n".join([*lines[:2], lines[2].rpartition("\t")[0]]) + "\n")

    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(training, "Supervisor", start)
    monkeypatch.setattr(run, "warm", start)
    assert main(["demo", "--out", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


# --- when kills fire -------------------------------------------------------------------------------------------------


def arguments_of(*words: str) -> argparse.Namespace:
    return parser().parse_args(["demo", *words])


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids that SIGKILL would have gone to."""
    pids: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert number == signal.SIGKILL
        pids.append(pid)

    monkeypatch.setattr(training.os, "kill", kill)
    return pids


def started_run(tmp_path: Path, *kills: str, checkpoints: Sequence[str] = ()) -> DemoRun:
    parsed = parse_kills(kills, 3, 40, 2)
    one = DemoRun(arguments_of("--steps", "40"), CodeSpec(), parsed, tmp_path, Terminal(), checkpoints)
    children = [SimpleNamespace(pid=pid) for pid in (99, 100, 101, 102, 103)]
    one._cluster = SimpleNamespace(coordinator=children[0], children=children)  # type: ignore[assignment]
    for message in [*JOINED, PLACED]:
        one._on_message(message)
    return one


def test_a_kill_fires_when_its_step_is_complete_at_all_trainers(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:2@3")
    *early, last = steps(1, 3, 1.0)
    for message in early:
        one._on_message(message)
    assert killed == [] and one.not_fired() == ["server:1@3", "server:2@3"]
    one._on_message(last)
    assert killed == [101, 102] and one.not_fired() == []
    assert [kill.step for kill in one.record.kills] == [3, 3]


def test_a_kill_with_a_tilde_waits_for_the_rebuild(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:1@4~", "server:0@5~")
    for message in steps(1, 5, 1.0):
        one._on_message(message)
    assert killed == [101]
    for message in recovery(1.2, "server-1", 1, "server-3", [["server-0", 0], ["server-3", 1], ["server-2", 0]]):
        one._on_message(message)
    assert killed == [101], "at a step, not in between"
    for message in steps(6, 7, 2.0):
        one._on_message(message)
    assert killed == [101, 103], "the new host of slot 1, and the next one waits again"
    assert one.not_fired() == ["server:0@5~"]


def test_a_kill_with_a_tilde_waits_until_no_server_holds_two_slots(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3", "server:0@4~")
    survivor = recovery(1.2, "server-1", 1, "server-0", [["server-0", 0], ["server-0", 1], ["server-2", 0]])
    moved = [["server-0", 0], ["server-3", 2], ["server-2", 0]]
    for message in [*steps(1, 3, 1.0), *survivor, *steps(4, 5, 2.0)]:
        one._on_message(message)
    assert killed == [101] and one.record.whole and not one.record.settled
    rebuilt = event(3.1, "slot rebuilt", slot=1, incarnation=2)
    for message in [event(3.0, "moved", epoch=1, slots=moved), *steps(6, 6, 3.0), rebuilt, *steps(7, 7, 3.2)]:
        one._on_message(message)
    assert killed == [101, 100] and one.record.kills[1].step == 7


def test_a_kill_with_a_delay_fires_later(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:1@3+20")
    for message in steps(1, 3, 1.0):
        one._on_message(message)
    assert killed == [] and one.not_fired(), "not at once"
    one._timers[0].join(5.0)
    assert killed == [101] and not one.not_fired()


def test_a_kill_of_any_role_goes_to_the_right_process(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@2", "coordinator@3", "server:2@4")
    for message in steps(1, 4, 1.0):
        one._on_message(message)
    assert killed == [201, 99, 102] and one.not_fired() == []
    assert [kill.member for kill in one.record.kills] == ["trainer-1", "coordinator", "server-2"]


def test_a_new_coordinator_tells_of_itself_twice(tmp_path: Path) -> None:
    """First who has rejoined, then, with its placement, that a new epoch has begun."""
    one = started_run(tmp_path)
    one._on_message(event(3.0, "regathered", epoch=1, members=["server-0", "server-1"]))
    one._on_message(event(3.0, "kept", epoch=2, slots=[["server-0", 0], ["server-1", 0], ["server-2", 0]]))
    assert one._news == ["  a new coordinator: 2 members have rejoined"]


def test_a_kill_of_a_trainer_waits_until_one_is_there(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@3")
    for message in [*steps(1, 2, 1.0), event(1.5, "era", era=1, trainers=[]), *steps(3, 3, 1.6)]:
        one._on_message(message)
    assert killed == [] and one.not_fired() == ["trainer:1@3"]
    for message in [*TRAINERS_BACK, *steps(4, 4, 8.0)]:
        one._on_message(message)
    assert killed == [211] and one.not_fired() == []


def test_a_late_kill_of_a_trainer_that_has_gone_comes_at_a_later_step(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@3+20")
    for message in [*steps(1, 3, 1.0), event(1.5, "era", era=1, trainers=[])]:
        one._on_message(message)
    one._timers[0].join(5.0)
    assert killed == [] and one.not_fired() == ["trainer:1@3+20"]
    for message in [*TRAINERS_BACK, *steps(4, 4, 8.0)]:
        one._on_message(message)
    one._timers[1].join(5.0)
    assert killed == [211] and one.not_fired() == []


def test_a_kill_with_a_tilde_waits_for_trainers_and_for_a_coordinator(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "trainer:1@15", "coordinator@16~", "server:0@17~")
    for message in [*steps(1, 15, 1.0), *TRAINERS_LOST, TRAINERS_BACK[0], *steps(16, 16, 7.1)]:
        one._on_message(message)
    assert killed == [201], "one trainer is missing"
    for message in [TRAINERS_BACK[1], *steps(17, 18, 8.0)]:
        one._on_message(message)
    assert killed == [201, 99] and one.not_fired() == ["server:0@17~"]
    for message in [event(9.0, "regathered", epoch=2, members=[]), *steps(19, 19, 9.1)]:
        one._on_message(message)
    assert killed == [201, 99, 100] and one.not_fired() == []


def test_a_kill_of_all_goes_to_every_process(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "all@3", checkpoints=BEYOND)
    for message in [checkpointed(1.1, 2), *steps(1, 3, 1.0)]:
        one._on_message(message)
    assert killed == [99, 100, 101, 102, 103, 200, 201] and one.not_fired() == []
    (kill,) = one.record.kills
    assert (kill.role, kill.member, kill.step, kill.lost) == ("all", "everybody", 3, {0: 0, 1: 0, 2: 0})


def test_what_is_beyond_parity_waits_for_a_checkpoint_and_nothing_else_does(tmp_path: Path, killed: list[int]) -> None:
    kills = ["server:2@2", "server:0@3", "server:1@3", "all@4"]
    one = started_run(tmp_path, *kills, checkpoints=BEYOND)
    for message in steps(1, 5, 1.0):
        one._on_message(message)
    assert killed == [102] and one.not_fired() == kills[1:]
    assert [text for text in one._news if "waits for the first checkpoint" in text] == [
        "step 3: server:0@3 waits for the first checkpoint",
        "step 3: server:1@3 waits for the first checkpoint",
        "step 4: all@4 waits for the first checkpoint",
    ]
    for message in [checkpointed(2.0, 2), *steps(6, 6, 2.1)]:
        one._on_message(message)
    assert killed[:3] == [102, 100, 101] and one.not_fired() == []


def test_without_a_way_back_servers_beyond_parity_are_killed_at_once(tmp_path: Path, killed: list[int]) -> None:
    one = started_run(tmp_path, "server:0@3", "server:1@3")
    for message in steps(1, 3, 1.0):
        one._on_message(message)
    assert killed == [100, 101]


# --- results ---------------------------------------------------------------------------------------------------------


def finished(tmp_path: Path) -> tuple[argparse.Namespace, DemoRun, DemoRun]:
    arguments = arguments_of("--steps", "40", "--data", "rows.tsv")
    runs = []
    for _ in range(2):
        one = DemoRun(arguments, CodeSpec(), [], tmp_path, Terminal())
        one.record = recorded()
        losses = [0.5 - 0.001 * step for step in range(40)]
        one.reports = [
            {"losses": losses, "auc": math.nan, "samples_per_s": 1234.5, "digest": f"abc{trainer}"}
            for trainer in range(2)
        ]
        runs.append(one)
    return arguments, runs[0], runs[1]


def test_the_result_has_the_documented_keys(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    result = json.loads(json.dumps(assemble(arguments, disturbed, calm, None), allow_nan=False))
    document = (ROOT / "docs" / "contributing" / "demo-result.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", document))
    keys = {*result, *result["undisturbed"], *result["kills"][0], *result["throughput"], *result["bytes_sent"]}
    keys |= {*result["kills"][0]["times"], *result["kills"][0]["after_kill_s"]}
    assert keys <= named, f"not documented: {sorted(keys - named)}"
    wanted = {"versions", "arguments", "losses", "auc", "samples_per_s", "digest", "undisturbed", "kills", "servers"}
    assert wanted | {"equal", "bytes_sent", "throughput"} <= set(result)
    assert result["equal"] is True and result["auc"] is None
    assert result["losses"][0] == [0.5, 0.5] and result["arguments"]["data"] == "rows.tsv"
    assert {"torch_ecrec", "python", "torch"} <= set(result["versions"])
    assert "EQUAL" in format_summary(result)


def test_one_loss_in_its_last_bit_is_a_difference(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    calm.reports[1]["losses"] = [*calm.reports[1]["losses"]]
    calm.reports[1]["losses"][6] = math.nextafter(calm.reports[1]["losses"][6], 1)
    result = assemble(arguments, disturbed, calm, None)
    assert result["equal"] is False
    assert result["differences"][0].startswith("losses of step 7: ")
    assert "NOT EQUAL: losses of step 7" in format_summary(result)
    assert assemble(arguments, disturbed, None, None)["equal"] is None


def test_a_missing_digest_is_a_difference() -> None:
    one = {"digest": None, "losses": []}
    assert differences(one, one)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    for kills in (0, 1, 3):
        disturbed.record.kills = [recorded().kills[0]] * kills
        draw(assemble(arguments, disturbed, calm, None), tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").read_bytes()[:4] == b"\x89PNG"
        (tmp_path / "recovery.png").unlink()


def test_kills_of_all_roles_are_drawn(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    one = disturbed.record = watched()
    one.on_kill("trainer:1@15", "trainer", 1, time_s=2.42)
    for message in [*TRAINERS_LOST, *TRAINERS_BACK, *steps(15, 20, 8.0)]:
        one.on_message(message)
    one.on_kill("coordinator@20", "coordinator", 0, time_s=8.52)
    for message in [*steps(21, 22, 8.6), event(9.9, "regathered", epoch=2, members=[]), *steps(23, 30, 10.0)]:
        one.on_message(message)
    one.on_kill("server:1@30", "server", 1, time_s=10.72)
    after = [["server-0", 0], ["server-3", 1], ["server-2", 0]]
    for message in [*recovery(10.72, "server-1", 1, "server-3", after), *steps(31, 40, 11.3)]:
        one.on_message(message)
    assert one.settled
    everyone = one.kills
    for kills in (everyone[:1], everyone):
        one.kills = kills
        result = assemble(arguments, disturbed, calm, None)
        draw(result, tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").stat().st_size > 10_000
        (tmp_path / "recovery.png").unlink()
        assert all(kill.spec in format_summary(result) for kill in kills)


def test_the_way_back_to_a_checkpoint_is_drawn(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    for record in (everything_lost(), two_servers_lost()):
        disturbed.record = record
        result = assemble(arguments, disturbed, calm, None)
        draw_steps(result, tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").stat().st_size > 10_000
        (tmp_path / "recovery.png").unlink()
        draw_steps({**result, "undisturbed": None}, tmp_path / "recovery.png")
        assert (tmp_path / "recovery.png").exists()
        said = format_summary(result)
        assert "all go back to the checkpoint of step 10: 5 again" in said
        assert "checkpoints: 1, the last of step 10; 1 came to nothing" in said
        document = (ROOT / "docs" / "contributing" / "demo-result.md").read_text(encoding="utf-8")
        keys = {*result["checkpoints"][0], *result["checkpoints_void"][0], *result["went_back"][0]}
        assert keys <= set(re.findall(r"`(\w+)`", document))


def test_what_was_lost_for_good_is_told_and_is_no_equality(tmp_path: Path) -> None:
    arguments, disturbed, calm = finished(tmp_path)
    disturbed.record = recovered_partly()
    disturbed.reports[0]["digest"] = "other"
    for one in (disturbed, calm):
        one.reports[0]["auc"] = 0.75
    result = assemble(arguments, disturbed, calm, None)
    assert result["equal"] is False and result["went_back"] == []
    (partly,) = result["recovered_partly"]
    assert (partly["slots"], partly["step"], partly["at"], partly["lost_samples"]) == ([0, 1], 10, 15, 0.222)
    said = format_summary(result)
    assert "NOT EXACT, as asked for by --beyond partial: slots [0, 1]" in said and "EQUAL" not in said
    assert "22.2 % of the samples until then are lost; AUC 0.7500 against 0.7500" in said
    assert disturbed.record.unexpected == [] and disturbed.record.whole
    draw(result, tmp_path / "recovery.png")
    assert (tmp_path / "recovery.png").stat().st_size > 10_000
    with limited_files(100), pytest.raises(OSError, match=r"File too large: '.*/other.png'"):
        draw(result, tmp_path / "other.png")
    document = (ROOT / "docs" / "contributing" / "demo-result.md").read_text(encoding="utf-8")
    assert set(partly) <= set(re.findall(r"`(\w+)`", document))


def test_the_line_of_a_run_is_in_pieces_where_it_went_back() -> None:
    trained = [(1, 5.0), (2, 6.0), (3, 7.0), (2, 17.0), (3, 18.0), (4, 19.0)]
    assert pieces(trained, 5.0) == [
        (False, [(0.0, 1), (1.0, 2), (2.0, 3)]),
        (True, [(12.0, 2), (13.0, 3)]),
        (False, [(13.0, 3), (14.0, 4)]),
    ]
    twice = [(1, 1.0), (2, 2.0), (1, 3.0), (1, 4.0), (2, 5.0)]
    assert [again for again, _ in pieces(twice, 0.0)] == [False, True, True]


def test_steps_have_the_trainers_own_times_unless_they_were_started_again(tmp_path: Path) -> None:
    one = DemoRun(arguments_of("--steps", "3"), CodeSpec(), [], tmp_path, Terminal())
    one.record.step_times = [1.0, 3.0, 3.0]  # a coordinator was missing
    for trainer in range(2):
        ended = [1.0 + trainer / 10, 2.0, 3.0 - trainer / 10]
        (tmp_path / f"trainer.{trainer}.json").write_text(json.dumps({"step_ended_s": ended}))
    one._read_reports()
    assert one.record.step_times == [1.1, 2.0, 3.0]
    again = DemoRun(arguments_of("--steps", "3"), CodeSpec(), [], tmp_path, Terminal())
    again.record.step_times = [1.0, 2.5, 3.5]
    (tmp_path / "trainer.1.json").write_text(json.dumps({"step_ended_s": [2.0, 3.0]}))
    again._read_reports()
    assert again.record.step_times == [1.0, 2.5, 3.5]
