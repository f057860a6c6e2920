"""Told to end, once or twice, at any moment of a start: it ends soon, with the right code, and leaves nothing behind.

The moments are what can be seen from outside: handlers installed, libraries loaded, children started, a connection
made, members joined. What is slow on one machine and quick on another is waited for.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from conftest import wait_for_none, wait_until
from coordinator_words import member, status
from places import SUPPORT
from test_cli import LIMIT_S, SMALL, Command, command, status_of
from test_member import WELCOME, Coordinator

from torch_ecrec.errors import Fenced
from torch_ecrec.processes import launch
from torch_ecrec.runtime.lifetime import end_at_once
from torch_ecrec.server.service import Host
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.control import LineConnection

END_S = 300.0  # for everything: only a hang reaches it
SIGNALS = {"SIGTERM": [signal.SIGTERM], "SIGINT": [signal.SIGINT], "both": [signal.SIGINT, signal.SIGTERM]}


def has_begun(pid: int) -> bool:
    """Its own handlers are there: before that it is Python's start, where Ctrl-C is a traceback."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def has_loaded(library: str) -> Callable[[int], bool]:
    return lambda pid: library in Path(f"/proc/{pid}/maps").read_text()


def has_children(number: int) -> Callable[[int], bool]:
    return lambda pid: len(psutil.Process(pid).children(recursive=True)) >= number


STARTS = {"begun": has_begun, "loading": has_loaded("libtorch"), "compiling": has_loaded("libllvmlite")}
MOMENTS = {**STARTS, "what forks": has_children(1), "coordinator": has_children(2), "servers": has_children(3)}


def cases(moments: Iterable[str]) -> Any:
    """Each moment with one kind of signal, and with the others in the slow run."""
    return pytest.mark.parametrize(
        ("moment", "numbers"),
        [
            pytest.param(moment, numbers, marks=[] if (i + j) % len(SIGNALS) == 0 else [pytest.mark.slow])
            for i, moment in enumerate(moments)
            for j, numbers in enumerate(SIGNALS)
        ],
    )


def check(started: Command, numbers: list[signal.Signals], codes: set[int]) -> None:
    for number in numbers:
        if started.process.poll() is None:
            os.kill(started.process.pid, number)
    left = wait_for_none(started.living, END_S)
    assert not left, f"left running after {END_S:g} s: {left}"
    assert started.wait() in codes, started.err
    assert not [line for line in started.err if "Traceback" in line], started.err


@pytest.mark.parametrize("number", SIGNALS["both"])
def test_the_exit_code_is_kept_while_the_interpreter_ends(number: signal.Signals) -> None:
    """Told to end when the modules are taken down, where Python has no handlers any more."""
    program = """
import os, signal, sys
from torch_ecrec.runtime import lifetime
lifetime.on_signals(lifetime.end_at_once)
lifetime.keep_exit_code()
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1]), write=os.write):
        kill(pid, number)
        write(1, b"told")
last = Last()
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", program, str(int(number))], capture_output=True, timeout=END_S)
    assert (done.returncode, done.stdout) == (3, b"told"), done.stderr


@cases(MOMENTS)
def test_up_that_starts(moment: str, numbers: str) -> None:
    with command("up", *SMALL) as up:
        up.wait_until(moment, lambda: MOMENTS[moment](up.process.pid))
        # Once they are forked it runs, in a moment: then 0 is right.
        check(up, SIGNALS[numbers], {130, 0} if moment in ("coordinator", "servers") else {130})


@cases(["running"])
def test_up_that_runs(moment: str, numbers: str) -> None:
    """The second signal changes nothing: ending has a limit."""
    with command("up", *SMALL) as up:
        join = up.read_until(r"cluster at (\S+)")[1]
        up.wait_until("two servers", lambda: len(status_of(join).members) == 2)
        check(up, SIGNALS[numbers] * 2, {0})


@cases([*STARTS, "joining", "joined"])
def test_serve(moment: str, numbers: str) -> None:
    """The coordinator is a listener that does not answer, or a real one."""
    if moment == "joined":
        with command("up", "--servers", "2", "-k", "1", "--spares", "0") as up:
            join = up.read_until(r"cluster at (\S+)")[1]
            with command("serve", "--join", join) as serve:
                serve.wait_until(moment, lambda: any(" joined 127." in line for line in serve.err))
                # The second of two signals ends it at once, whatever is still to be left in order.
                check(serve, SIGNALS[numbers], {0} if len(SIGNALS[numbers]) == 1 else {0, 130})
                pid = serve.process.pid
            wait_until(
                lambda: all(m.left or not m.alive for m in status_of(join).members if m.pid == pid),
                LIMIT_S,
                "it has left",
            )
            check(up, [signal.SIGTERM], {0})
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        with command("serve", "--join", f"127.0.0.1:{listener.getsockname()[1]}") as serve:
            if moment == "joining":
                connection = listener.accept()[0]
                assert connection.recv(1) == b"{"
                connection.close()
            else:
                serve.wait_until(moment, lambda: STARTS[moment](serve.process.pid))
            check(serve, SIGNALS[numbers], {130})


@cases(["joining again"])
def test_serve_that_joins_again(moment: str, numbers: str) -> None:
    """It was fenced, and lets go of everything; the coordinator does not answer it a second time."""
    again = threading.Event()

    def on_join(connection: LineConnection, number: int) -> None:
        if number == 1:
            connection.send(WELCOME)
            connection.send({"type": "fatal", "kind": "fenced", "reason": "a reason"})
        else:
            again.set()

    coordinator = Coordinator(on_join)
    try:
        with command("serve", "--join", f"127.0.0.1:{coordinator.port}") as serve:
            serve.wait_until(moment, again.is_set)
            check(serve, SIGNALS[numbers], {130})
            assert any("joins again" in line for line in serve.err)
    finally:
        coordinator.end()


class Told:
    """Tells this process to end when its main thread comes to some line, once a server's handler is there.

    Args:
        number: of the line, as they come.
    """

    def __init__(self, number: int) -> None:
        self.number, self.lines = number, 0
        self.functions: set[str] = set()
        self.fired = False
        self._others = (signal.getsignal(signal.SIGTERM), end_at_once)

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and not self.fired and signal.getsignal(signal.SIGTERM) not in self._others:
            self.lines += 1
            self.functions.add(frame.f_code.co_name)
            if self.lines == self.number:
                self.fired = True
                signal.raise_signal(signal.SIGTERM)
        return self.trace


class JoinedMember:
    """A membership that has begun, and ends at once if there is a reason."""

    name = "server-7"
    draining = False
    reason: BaseException | None = None

    def __init__(self, *_: object, on_end: Callable[[BaseException], None], **__: object) -> None:
        if self.reason is not None:
            on_end(self.reason)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("reason", [None, Fenced("a reason")], ids=["serving", "just fenced"])
def test_a_server_told_to_end_at_any_line(monkeypatch: pytest.MonkeyPatch, reason: BaseException | None) -> None:
    """Its handler waits for nothing that the line may hold, and the word counts: it would join again else."""
    monkeypatch.setattr(launch, "Member", JoinedMember)
    monkeypatch.setattr(launch, "WAKE_S", 0.01)
    monkeypatch.setattr(
        launch, "status_of", lambda *_: status(members=[member("server-7")])
    )  # no trainers that it would wait for
    monkeypatch.setattr(JoinedMember, "reason", reason)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    functions: set[str] = set()
    for number in range(1, 60 if reason is None else 10_000):
        told, tracing = Told(number), sys.gettrace()
        sys.settrace(told.trace)
        try:
            ended = launch._serve_once(Settings(), None, draining=False)[0]
        finally:
            sys.settrace(tracing)
            for one, handler in before.items():
                signal.signal(one, handler)
        functions |= told.functions
        if not told.fired:
            break
        assert isinstance(ended, KeyboardInterrupt), f"line {number}"
    assert number > 5 and {"_serve_once", "_first_of"} <= functions
    assert told.fired == (reason is None), "who has no reason to end waits for one"


made: list[Host] = []


class WelcomedMember(JoinedMember):
    """One that has built its node, of the cluster's eighth coordinator."""

    reason = Fenced("a reason")
    term = 7

    def __init__(
        self, settings: Settings, join: object, make: Callable[..., Host], *, on_end: Callable[..., None], **_: object
    ) -> None:
        made.append(make("server-7", self, None))
        super().__init__(on_end=on_end)

    def now_s(self) -> float:
        return 0.0

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        pass


def test_a_server_knows_which_coordinator_has_welcomed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first connection that ends is taken for the end of that coordinator, and of its checkpoint."""
    monkeypatch.setattr(launch, "Member", WelcomedMember)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        launch._serve_once(Settings(), None, draining=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert made.pop().term == 7


def test_a_server_that_was_fenced_joins_again_as_drained_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [(Fenced("once"), False), (Fenced("twice"), True), (KeyboardInterrupt(signal.SIGTERM), True)]
    joined: list[bool] = []

    def serve_once(settings: Settings, code: object, draining: bool) -> tuple[BaseException, bool]:
        joined.append(draining)
        return ends.pop(0)

    monkeypatch.setattr(launch, "_serve_once", serve_once)
    monkeypatch.setattr(launch, "freeze", lambda: None)
    assert launch.run_server(Settings(keep_freed_bytes=0)) == 0
    assert joined == [False, False, True] and not ends


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("compiling", marks=pytest.mark.slow),
        pytest.param("coordinator", marks=pytest.mark.slow),
        pytest.param("servers", marks=pytest.mark.slow),
        "trained",
    ],
)
def test_trainer_with_a_cluster_of_its_own(moment: str) -> None:
    """Its script catches nothing, so that Ctrl-C is Python's: nothing of ours adds to it."""
    child = SUPPORT / "embedded_child.py"
    environment = {"PYTHONPATH": f"{child.parent}{os.pathsep}{child.parent.parent}"}
    with command(program=[str(child), "wait"], environment=environment) as trainer:
        if moment == "trained":
            trainer.read_until("READY")
        else:
            trainer.wait_until(moment, lambda: MOMENTS[moment](trainer.process.pid))
        os.kill(trainer.process.pid, signal.SIGINT)
        left = wait_for_none(trainer.living, END_S)
        assert not left, f"left running after {END_S:g} s: {left}"
        assert trainer.wait() == -signal.SIGINT, trainer.err
        text = "".join(trainer.err)
        assert text.count("Traceback") <= 1 and "Exception ignored" not in text, text
