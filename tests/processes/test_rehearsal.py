"""`torch-ecrec rehearse`: what trainers note, how two runs are compared, and small scripts in real processes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import coordinator_words
import pytest
from conftest import ROOT
from coordinator_words import member
from loops import Loop, attach, made, resumed, undisturbed
from loops import batch as batch_of
from unattached_child import STEPS, WAYS

from torch_ecrec.cli.main import main, parser
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.observe import trace
from torch_ecrec.observe.rehearsed import DIGITS, is_marked
from torch_ecrec.observe.trace import Begun, Ended, Held, Kept, Record, Resumed, Tail, Trained, Writer, held_at, hold_at
from torch_ecrec.protocol.status import Status
from torch_ecrec.rehearsal import run
from torch_ecrec.rehearsal.compare import (
    CAUSES,
    Difference,
    Trace,
    difference,
    different,
    moments,
    never_made,
    pass_ends,
    restless,
    traces,
    verdict,
)
from torch_ecrec.resume.trainer_state import GROUPS

CHILD = ROOT / "tests" / "support" / "rehearsed_child.py"
UNATTACHED = CHILD.with_name("unattached_child.py")
LIMIT_S = 400.0

# records ----------------------------------------------------------------------------------------------


def test_records_are_read_once_and_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    writer, tail = Writer(tmp_path, trainer=1, life=2), Tail(tmp_path)
    writer.write(Trained(1, {"batch": 7}))
    assert tail.look() and not tail.look()
    (path,) = tail.records
    with path.open("ab") as file:
        file.write(b'{"type":"trai')
    assert not tail.look()
    with path.open("ab") as file:
        file.write(b'ned","step":2,"values":{}}\n')
    assert tail.look()
    begun, *others = tail.records[path]
    assert isinstance(begun, Begun) and (begun.trainer, begun.life) == (1, 2)
    assert others == [Trained(1, {"batch": 7}), Trained(2, {})]


def test_the_step_to_hold_at(tmp_path: Path) -> None:
    assert held_at(tmp_path) is None
    hold_at(tmp_path, 3)
    assert held_at(tmp_path) == 3
    hold_at(tmp_path, None)
    assert held_at(tmp_path) is None


# comparing --------------------------------------------------------------------------------------------


def life(
    number: int,
    steps: range,
    resumed: int | None = None,
    trainer: int = 0,
    spoil: Callable[[str, int], int] = lambda name, step: 0,
) -> list[Record]:
    """What a trainer notes: values follow from step and trainer, and `spoil` adds to them."""
    found: list[Record] = [Begun(trainer, number, 100 + number)]
    if resumed is not None:
        found.append(Resumed(resumed))
    for step in steps:
        values = {name: 1000 * step + trainer + spoil(name, step) for name in trace.ORDER}
        found.append(Trained(step, {name: values[name] for name in trace.TRAINED}))
        kept = {name: values[name] for name in trace.KEPT} | {"attached `x`": 5 + spoil("x", step)}
        found.append(Kept(step, kept, epoch=step // 4))
    return found


def calm(last: int = 10, trainers: int = 2) -> dict[int, Trace]:
    return traces(life(0, range(1, last + 1), trainer=t) for t in range(trainers))


def disturbed(last: int = 10, spoil: Callable[[str, int], int] = lambda name, step: 0) -> dict[int, Trace]:
    """Killed in step 6, trainer 1 spoilt in its second life."""
    nothing: Callable[[str, int], int] = lambda name, step: 0  # noqa: E731
    files = [[*life(0, range(1, 7), trainer=t)[:-1], Held(6)] for t in range(2)]
    files += [life(1, range(6, last + 1), 5, t, spoil if t else nothing) for t in range(2)]
    return traces(files)


def spoiling(*names: str, since: int) -> Callable[[str, int], int]:
    return lambda name, step: int(name in names and step >= since)


def test_a_run_that_is_the_same_is_equal() -> None:
    found = verdict(calm(), disturbed(), [6], None)
    assert found.equal and found.text == "EQUAL: 10 steps of 2 trainers, 1 restart (killed in step 6)"
    assert verdict(calm(20), disturbed(20), [6], 8).text.startswith("EQUAL: 8 steps of 2 trainers")


def test_the_first_step_that_differs_is_named_with_what_differs() -> None:
    other = disturbed(spoil=spoiling(trace.DENSE, trace.GRADIENTS, since=8))
    assert difference(calm(), other) == Difference(8, 1, (trace.GRADIENTS,), life=1, resumed=5)
    found = verdict(calm(), other, [6], None)
    assert not found.equal
    first, cause, _ = found.text.splitlines()
    assert first == "DIFFERENT at step 8 of trainer 1, restarted after step 5: gradients of the embeddings"
    assert CAUSES[trace.GRADIENTS] in cause
    assert verdict(calm(), other, [6], 7).equal, "later steps do not count"


def test_a_step_that_is_made_again_counts_as_well() -> None:
    found = difference(calm(), disturbed(spoil=lambda name, step: int(step == 6)))
    assert found == Difference(6, 1, trace.TRAINED, life=1, resumed=5)


@pytest.mark.parametrize("name", [*trace.ORDER, "attached `x`", "hyperparameters of the tables' optimizers"])
def test_every_value_has_a_cause(name: str) -> None:
    text = different(Difference(3, 0, (name,), 1, 2)).text
    assert name in text.splitlines()[0] and text.splitlines()[1].startswith("What usually causes it: ")


@pytest.mark.parametrize(("last", "says"), [(12, "more steps when it is restarted: 12"), (9, "fewer")])
def test_more_and_fewer_steps(last: int, says: str) -> None:
    found = verdict(calm(), disturbed(last), [6], None)
    assert not found.equal and says in found.text and "undisturbed 10" in found.text


def test_steps_that_were_left_out() -> None:
    gap = traces([life(0, range(1, 5)), life(1, range(6, 11), 5)])
    assert never_made(gap[0], 10) == [5]
    assert "has left out steps when it was restarted: 5" in verdict(calm(trainers=1), gap, [4], None).text


def test_the_dense_parameters_at_the_end_count() -> None:
    files = [[*life(n, range(1, 4), n or None), Ended({trace.DENSE: 1 + n})] for n in range(2)]
    expected = traces(files[:1])
    assert difference(expected, expected) is None
    other = traces([life(0, range(1, 3)), files[1]])
    assert difference(expected, other) == Difference(3, 0, (trace.DENSE,), 1, 1)
    assert difference(expected, other, steps=3) is None, "the run was ended there"


def test_a_difference_before_any_restart_is_the_scripts_own() -> None:
    other = traces([life(0, range(1, 7), spoil=spoiling(trace.BATCH, since=3)), life(1, range(6, 11), 5)])
    found = verdict(calm(trainers=1), other, [6], None)
    assert not found.equal and "two undisturbed runs differ at step 3 of trainer 0 (batch)" in found.text


def test_what_is_attached_and_differs_by_itself_is_left_out_and_named() -> None:
    clock = traces([life(0, range(1, 11), spoil=spoiling("x", since=2))])
    left_out = restless(calm(trainers=1), clock)
    assert left_out == {"attached `x`"}
    assert difference(calm(trainers=1), clock) and difference(calm(trainers=1), clock, None, left_out) is None
    assert "Not compared" in verdict(calm(trainers=1), clock, [6], None, left_out).text


def test_two_models_in_one_start_are_refused() -> None:
    with pytest.raises(ValueError, match="trainer 0 has noted the steps of two models"):
        traces([life(0, range(1, 3)), life(0, range(1, 3))])


# moments ----------------------------------------------------------------------------------------------


def test_the_ends_of_passes() -> None:
    assert pass_ends(calm(13)[0]) == [4, 8, 12]


@pytest.mark.parametrize(
    ("steps", "ends", "number", "expected"),
    [
        (40, [10, 20, 30, 40], 4, [10, 11, 24, 32]),
        (40, [], 4, [8, 9, 24, 32]),
        (12, [4], 1, [4]),
        (3, [], 4, [1, 2, 3]),
        (1, [], 4, [1]),
        (5, [9], 2, [2, 3]),
        (3, [], 10**30, [1, 2, 3]),
    ],
)
def test_moments_are_at_an_end_after_another_and_spread(
    steps: int, ends: list[int], number: int, expected: list[int]
) -> None:
    assert moments(steps, ends, number) == expected


# what is noted, of loops in this process ---------------------------------------------------------------


@contextmanager
def noting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[int, Trace]]]:
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("TORCH_ECREC_RECORD", str(folder))

        def read() -> dict[int, Trace]:
            tail = Tail(folder)
            tail.look()
            return traces(tail.records.values())

        yield read


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "loop",
    [
        Loop(reader="shuffled", driver="sparse", evals=frozenset({"pass"})),
        Loop(reader="augmented", accumulate=2, batches=4, evals=frozenset({"grad"}), draws=frozenset({"after"})),
        Loop(reader=None, optimizers=("adamw", "momentum"), snapshot_every=2, batches=4),
        Loop(reader="torchdata", nan_at=2, losses=2, batches=4),
        Loop(reader="stateful", driver="base", leave_after=0, style="counter", counts=frozenset({"before", "pass"})),
    ],
    ids=lambda loop: loop.name,
)
def test_a_loop_that_comes_back_notes_the_same(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noting(tmp_path / "calm", monkeypatch) as read:
        first = undisturbed(loop)
        expected = read()
    steps = first.session.step - 1
    assert expected[0].steps == steps > 3 and never_made(expected[0], steps) == []
    kept = expected[0].lives[0].kept
    assert kept and all({*trace.KEPT, "attached `counter`", "attached `trace`"} <= set(v) for v in kept.values())
    for step in sorted(first.session.snapshots):
        with noting(tmp_path / str(step), monkeypatch) as read:
            resumed(loop, first, step)
            again = read()
        (life,) = again[0].lives
        assert life.resumed == step and min(life.trained, default=step + 1) == step + 1
        assert again[0].steps == steps or step == steps
        assert difference(expected, again) is None


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        ("batch", trace.BATCH),
        ("rate", trace.RATES),
        ("dense rate", trace.DENSE),
        ("buffer", trace.BUFFERS),
        ("counter", "attached `counter`"),
    ],
)
def test_each_value_tells_of_its_own(spoil: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third step that is another one in one way."""

    def go(spoilt: bool) -> None:
        one = made(Loop(reader="list", batches=5, schedule=frozenset()))
        attach(one)
        optimizer = one.optimizers[0]
        for number, batch in one.batches.enumerate(1):
            here = spoilt and number == 3
            if here and spoil == "rate":
                one.model.fused_optimizer.param_groups[0]["lr"] *= 0.5
            if here and spoil == "dense rate":
                for group in optimizer.optimizers[1][1].param_groups:
                    group["lr"] *= 0.5
            optimizer.zero_grad()
            losses, _ = one.model(batch_of(77) if here and spoil == "batch" else batch)
            losses[0].backward()
            optimizer.step()
            if here and spoil == "buffer":
                one.model.module.below[2].running_mean.add_(1)
            if here and spoil == "counter":
                one.counter.add("more")

    found = []
    for spoilt in (False, True):
        with noting(tmp_path / str(spoilt), monkeypatch) as read:
            go(spoilt)
            found.append(read())
    differs = difference(*found)
    assert differs is not None and (differs.step, differs.names[0]) == (3, name)


@pytest.mark.usefixtures("process_group")
def test_nothing_is_noted_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ECREC_RECORD", raising=False)
    one = made(Loop())
    assert one.model.session is one.session and one.model._recorder is None


# arguments, errors ------------------------------------------------------------------------------------


def plan(*words: str) -> tuple[run.Plan, list[int]]:
    return run.plan_of(parser().parse_args(["rehearse", *words]))


def test_what_follows_the_dashes_is_the_scripts() -> None:
    found, at = plan("--at", "7,3", "--nproc-per-node", "2", "--", str(CHILD), "good", "--steps", "9")
    assert found.script == (str(CHILD), "good", "--steps", "9") and at == [3, 7]
    assert (found.trainers, found.steps, found.code.slots) == (2, 40, 3)
    assert plan("--steps", "0", "--", "-m", "package.train")[0].steps is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name the script"),
        (["--", "none.py"], "none.py: no such file"),
        (["--", "-m"], "`-m` needs the name of a module"),
        (["--at", "3,x", str(CHILD)], "`--at` must be steps, as in 3,7,12, got '3,x'"),
        (["--at", "0,2", str(CHILD)], "`--at` must be from 1 to 40, got 0,2"),
        (["--at", "41", str(CHILD)], "`--at` must be from 1 to 40, got 41"),
        (["--restarts", "0", str(CHILD)], "`restarts` must be at least 1, got 0"),
        (["--restarts", "41", str(CHILD)], "`restarts` must be at most 40, got 41"),
        (["--restarts", "1" + "0" * 30, "--steps", "0", str(CHILD)], "`restarts` must be at most 2147483647"),
        (["--limit-s", "0", str(CHILD)], "`--limit-s` must be positive, got 0.0"),
        (["--servers", "2", str(CHILD)], "needs as many slots, got 2"),
        (["--protection", "none", "--server-too", str(CHILD)], "`--server-too` needs parity"),
    ],
)
def test_bad_arguments_start_nothing(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(run, "Supervisor", start)
    monkeypatch.setattr(run, "warm", start)
    assert main(["rehearse", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_exception_of_the_trainer_that_failed_comes_first(tmp_path: Path) -> None:
    library = Path(run.__file__).parent.parent / "nn" / "attachment.py"
    begin, lost = "Traceback (most recent call last):\n", "RuntimeError: [gloo/pair.cc] Connection closed\n"
    refused = [begin, '  File "train.py", line 1, in f\n', f'  File "{library}", line 2, in g\n    raise\n']
    refused += ["RuntimeError: refused,\n", "twice\n"]
    texts = [
        f'{begin}  File "train.py", line 1\n    x\n{lost}',
        "x\n" + "".join(f"[rank1]: {line}" for line in refused),
        "nothing\n",
    ]
    for attempt, found in ((0, texts[2:]), (1, texts)):
        for trainer, text in enumerate(found):
            folder = tmp_path / "run" / f"attempt_{attempt}" / str(trainer)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
    first, second = run.complaints(tmp_path)
    assert first == ("trainer 1: RuntimeError: refused,\ntwice", True)
    assert second[0].startswith("trainer 0: RuntimeError: [gloo") and not second[1]
    assert run.complaints(tmp_path / "none") == []


def test_how_a_script_ended_that_has_raised_nothing_is_told(tmp_path: Path) -> None:
    """By `sys.exit`, say; or torchrun has refused its own arguments."""
    logs, launched = tmp_path / "trainers", tmp_path / "torchrun.log"
    for attempt, text in ((2, "[rank1]: no data: say --data DIR\n"), (10, "[rank1]: disk is full\n")):
        path = logs / "run" / f"attempt_{attempt}" / "1" / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        launched.write_text("E1 api.py:1] failed (exitcode: 3) local_rank: 1 (pid: 7) of binary: python\nTraceback\n")
        said = run.last_words(logs, launched)
        assert said == f"trainer 1: no exception, but exit code 3; the end of {path}:\n  {text.strip()[9:]}"
    path.write_text("")
    assert run.last_words(logs, launched) == "trainer 1: no exception, but exit code 3, and nothing on standard error"
    launched.write_text("run.py: error: unrecognized arguments\n")
    assert run.last_words(logs, launched) == f"the end of {launched}:\n  run.py: error: unrecognized arguments"


@pytest.mark.parametrize(
    ("killed", "went_on_after"), [([], None), ([6], None), ([5], 5), ([6], 6)], ids=["none", "anew", "other", "late"]
)
def test_a_kill_that_did_not_come_is_no_rehearsal(killed: list[int], went_on_after: int | None) -> None:
    lives = [life(0, range(1, 7)), life(1, range(6, 11), went_on_after)]
    with pytest.raises(ClusterUnavailable, match=r"trainer 0 was to be killed in steps \[6\]"):
        run._check_kills(run.Outcome(traces(lives), killed), [6])
    run._check_kills(run.Outcome(disturbed(), [6]), [6])


def test_a_script_with_a_cluster_of_its_own_is_refused(tmp_path: Path) -> None:
    class Cluster:
        @staticmethod
        def status() -> Status:
            return coordinator_words.status(members=[member("server-0")])

    one = run.Training(dataclasses.replace(plan(str(CHILD))[0], out=tmp_path), "undisturbed")
    with pytest.raises(ValueError, match="in a cluster of their own"):
        one._check_cluster(Cluster())  # type: ignore[arg-type]


# real processes ---------------------------------------------------------------------------------------

SMALL = ("--servers", "1", "--spares", "0", "-k", "1", "--protection", "none")


def rehearsed(way: str, out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and verdict of a rehearsal of the child, in a folder of its own."""
    options = words if "--servers" in words else (*SMALL, *words)
    arguments = parser().parse_args(["rehearse", *options, "--out", str(out), "--", str(CHILD), way])
    assert isinstance(arguments, argparse.Namespace)
    here = out.with_name(f"{out.name}-here")
    here.mkdir()
    with contextlib.chdir(here):
        code = run.run_rehearse(arguments)
    text = capsys.readouterr().out
    at = max(text.rfind("\n" + word) for word in ("EQUAL", "DIFFERENT", "NOT DET", "REFUSED", "FAILED", "HANGS"))
    return code, text[at + 1 :]


@pytest.mark.timeout(LIMIT_S)
def test_a_good_script_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = rehearsed("good", tmp_path, capsys, "--at", "4", "--steps", "0")
    first, same, left_out = text.splitlines()
    assert (code, first) == (0, "EQUAL: 12 steps of 1 trainer, 1 restart (killed in step 4)")
    assert same.startswith("Equal, too: what the script prints (1 lines), and the files that it writes below")
    assert left_out == "Not compared: what it writes elsewhere."
    digest = hashlib.sha256(CHILD.read_bytes()).hexdigest()[:DIGITS]
    assert is_marked(tmp_path, digest), "what `attach` looks for in a run of the script that is no rehearsal"


@pytest.mark.timeout(LIMIT_S)
def test_what_the_script_keeps_for_itself_is_found_in_what_it_prints(tmp_path: Path, capsys: Any) -> None:
    """No step is other than undisturbed, and the average that it prints at its end is."""
    code, text = rehearsed("average", tmp_path, capsys, "--at", "7", "--steps", "0")
    assert code == 1, text
    assert text.startswith(
        "DIFFERENT in what the script prints or saves, though no step is: trainer 0 prints 'average "
    )
    assert not list(tmp_path.glob("equal-*")), "it has no mark"


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_what_the_script_keeps_for_itself_is_found_in_what_it_saves(tmp_path: Path, capsys: Any) -> None:
    code, text = rehearsed("saves", tmp_path, capsys, "--at", "7", "--steps", "0")
    assert code == 1 and "though no step is: the file average.pt has other bytes" in text, text


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_what_is_never_the_same_is_not_compared_and_named(tmp_path: Path, capsys: Any) -> None:
    code, text = rehearsed("speaks", tmp_path, capsys, "--at", "7", "--steps", "0")
    assert code == 0 and "undisturbed runs, too: lines like 'begun #'." in text, text


@pytest.mark.timeout(LIMIT_S)
def test_whatever_a_loop_keeps_for_itself_is_found(tmp_path: Path) -> None:
    """Each way in what is attached for it; `cycle`, which draws no more, in the batches; its own end in its length.

    The runs alone, without a third one that looks whether the script is deterministic.
    """
    found, at = plan(*SMALL, "--at", "3", "--steps", "0", "--out", str(tmp_path), "--", str(UNATTACHED))
    expected, other = (run.Training(found, name, moments).execute() for name, moments in (("a", []), ("b", at)))
    assert expected.problem is None and other.problem is None and other.killed == [3]
    calm, again = expected.traces[0].lives[0], other.traces[0].lives[1]
    assert again.resumed == 2 and calm.trained[3] == again.trained[3]
    differ = {name for name, value in calm.kept[3].items() if again.kept[3][name] != value}
    assert differ == {
        *(f"attached `{way}`" for way in WAYS),
        trace.OPTIMIZERS,  # by ReduceLROnPlateau
        GROUPS,  # by TorchRec's warm-up
    }
    assert calm.trained[4][trace.RATES] != again.trained[4][trace.RATES], "what the warm-up has set"
    assert calm.trained[4][trace.BATCH] == again.trained[4][trace.BATCH]
    assert calm.trained[5][trace.BATCH] != again.trained[5][trace.BATCH], "`cycle` has other batches of the first pass"
    assert (expected.traces[0].steps, other.traces[0].steps) == (STEPS, 2 + STEPS)
    text = verdict(expected.traces, other.traces, other.killed, found.steps).text
    assert text.startswith("DIFFERENT at step 3 of trainer 0, restarted after step 2: state of the dense optimizers, ")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_a_script_that_counts_for_itself_is_different(tmp_path: Path) -> None:
    """The runs alone, without a third one that looks whether the script is deterministic."""
    found, at = plan(*SMALL, "--at", "7", "--steps", "9", "--out", str(tmp_path), "--", str(CHILD), "counts")
    expected, other = (run.Training(found, name, moments).execute() for name, moments in (("a", []), ("b", at)))
    assert expected.problem is None and other.problem is None and other.killed == [7]
    text = verdict(expected.traces, other.traces, other.killed, found.steps).text
    assert text.startswith("DIFFERENT at step 7 of trainer 0, restarted after step 6: dense parameters and state")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("way", "says", "words"),
    [
        ("unseeded", "NOT DETERMINISTIC: the script itself is not: two undisturbed runs differ at step 1", ()),
        ("early", "DIFFERENT: trainer 0 trains more steps when it is restarted: 16, undisturbed 12", ("--steps", "0")),
        ("late", "REFUSED: the script ended after it was killed in step 4, having gone back to step 3\ntrainer 0:", ()),
        ("hangs", "HANGS: no step for 90 s, after it was killed in step 4", ("--limit-s", "90")),
        ("counts", "DIFFERENT at step 4 of trainer 0, restarted after step 3: dense parameters and state", ()),
    ],
)
def test_verdicts(way: str, says: str, words: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    code, text = rehearsed(way, tmp_path, capsys, "--at", "4", *words)
    assert code == 1 and text.startswith(says), text


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_trainers_and_a_server_lost_at_moments_of_its_own_choice(tmp_path: Path, capsys: Any) -> None:
    code, text = rehearsed("good", tmp_path, capsys, "--servers", "3", "--nproc-per-node", "2", "--server-too")
    assert code == 0
    assert text.splitlines()[0] == "EQUAL: 12 steps of 2 trainers, 4 restarts (killed in steps 4, 5, 7, 10)"
