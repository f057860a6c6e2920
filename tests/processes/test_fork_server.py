"""Processes that are forked: each is what `python -m` would be, and its end is told, whatever dies."""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import wait_until
from places import ROOT, SUPPORT

from torch_ecrec.processes import fork_server as under_test
from torch_ecrec.processes.fork_server import UNKNOWN, Forked, ForkServer, is_available

LIMIT_S = 120.0  # only a hang reaches it
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{SUPPORT}"}

pytestmark = pytest.mark.skipif(not is_available(), reason="this system cannot tell the ends of others' children")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(("wave", "not_there", "wave:not_there"), ENVIRONMENT)
    yield server
    server.close()


def start(server: ForkServer, *arguments: str, err: int | None = None) -> Forked:
    return server.start("forked_child", arguments, ENVIRONMENT | {"OF": "this"}, subprocess.PIPE, err)


def said(child: Forked) -> str:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    with child.stdout:
        return child.stdout.read().decode().strip()


def end(child: Forked) -> int:
    said(child)
    return child.wait(LIMIT_S)


def test_a_child_is_what_python_would_start(server: ForkServer, tmp_path: Path) -> None:
    """Arguments, environment (that and no more), session, files; and of what was loaded before, it has all."""
    words = ("tell", "a word", "é", "x" * 3000)
    told = json.loads(said(child := start(server, *words)))
    assert told["argv"] == list(words) and told["module"] == "__main__" and told["folder"] == os.getcwd()
    assert told["environment"] == ENVIRONMENT | {"OF": "this"} | {"LC_CTYPE": "C.UTF-8"} or told["environment"] == (
        ENVIRONMENT | {"OF": "this"}
    )
    assert told["session"] and told["files"][:3] == [0, 1, 2] and len(told["files"]) == 4, "the fourth lists them"
    assert told["threads"] == 1 and told["loaded"] == ["wave"]
    assert child.wait(LIMIT_S) == 0 and child.poll() == 0


def test_its_command_line_is_shown(server: ForkServer) -> None:
    child = start(server, "wait", "a word")
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    assert [word for word in psutil.Process(child.pid).cmdline() if word] == ["forked_child", "wait", "a word"]
    assert child.poll() is None
    assert end(child) == 0


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes(server: ForkServer, code: int) -> None:
    child = start(server, "exit", str(code))
    assert said(child) == "in order", "what is registered for the end of the interpreter runs"
    assert child.wait(LIMIT_S) == code


def test_a_failure_says_so(server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as err:
        child = start(server, "fail", err=err.fileno())
    assert end(child) == 1
    assert "ValueError: as it was told" in (tmp_path / "err").read_text()


@pytest.mark.parametrize("how", [Forked.kill, Forked.terminate])
def test_signals(server: ForkServer, how: object) -> None:
    child = start(server, "wait")
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    how(child)  # type: ignore[operator]
    assert end(child) == -(signal.SIGKILL if how is Forked.kill else signal.SIGTERM)
    child.kill()  # whoever has its pid now is not meant


def test_a_module_that_is_not_there(server: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "err").open("wb") as err:
        child = server.start("no_such_module", (), ENVIRONMENT, subprocess.PIPE, err.fileno())
    assert end(child) == 1
    assert "No module named no_such_module" in (tmp_path / "err").read_text().replace("'", "")


def test_a_file_that_is_not_open_is_refused(server: ForkServer) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        server.start("forked_child", ("exit", "0"), ENVIRONMENT, 9999)
    assert end(start(server, "exit", "0")) == 0, "the next one starts"


def test_when_it_dies_its_children_live_on(server: ForkServer) -> None:
    child = start(server, "wait")
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    forks = psutil.Process(server.pid)
    forks.kill()
    wait_until(lambda: child.poll() is None and server._sock is None, LIMIT_S, "its end is seen")
    assert psutil.pid_exists(child.pid)
    other = start(server, "exit", "5")
    assert end(other) == 5, "another fork server has started it"
    child.kill()
    assert end(child) == UNKNOWN
    assert not psutil.pid_exists(child.pid) or psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE


def test_one_that_hangs_hides_no_end(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have ended; the fork server, stopped, does not tell how. That is waited for once."""
    child, other = begun(server, "wait"), begun(server, "wait")
    forks = psutil.Process(server.pid)
    forks.suspend()
    try:
        child.kill()
        monkeypatch.setattr(child, "told_s", 1.0)
        assert child.wait(LIMIT_S) == UNKNOWN
        other.kill()
        began_s = time.monotonic()
        assert other.wait(LIMIT_S) == UNKNOWN and time.monotonic() - began_s < under_test.TELL_S / 2
    finally:
        forks.resume()
    assert end(start(server, "exit", "6")) == 6, "what it tells then is of nobody"


def test_threads_that_start_and_wait(server: ForkServer) -> None:
    codes: list[tuple[int, int]] = []

    def run(code: int) -> None:
        codes.append((code, end(start(server, "exit", str(code)))))

    threads = [threading.Thread(target=run, args=(code,)) for code in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(codes) == [(code, code) for code in range(12)]


def test_whoever_looks_may_stop_the_start(server: ForkServer) -> None:
    """Told to end while the fork server loads: nothing is left open, and what was asked for ends by itself."""

    def stop() -> None:
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        server.start("forked_child", ("wait",), ENVIRONMENT, look=stop)
    assert len(os.listdir("/proc/self/fd")) == before + 2, "the fork server's socket, and what it has said"
    server.close()


def test_close_leaves_children_and_no_files() -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = ForkServer((), ENVIRONMENT)
    child = start(server, "wait")
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    server.close()
    assert child.poll() is None
    child.kill()
    assert end(child) == UNKNOWN
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_asks_for_the_same_shares_one_until_the_last_closes_it() -> None:
    """Variables that nothing reads while it is loaded may differ, and reach the children."""
    shared = inspect.unwrap(ForkServer.shared)  # without what keeps them here for the tests after
    with_ours = {"TORCH_ECREC_LEASE_S": "1.5", "PYTEST_CURRENT_TEST": "another"}
    one, two = (shared(("wave",), ENVIRONMENT | more) for more in ({}, with_ours))
    other = shared(("wave",), ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    assert one is two and other is not one
    children = [
        forks.start("forked_child", ("tell",), ENVIRONMENT | more, subprocess.PIPE)
        for forks, more in ((one, {}), (two, with_ours))
    ]
    told = [json.loads(said(child)) for child in children]
    assert ["TORCH_ECREC_LEASE_S" in each["environment"] for each in told] == [False, True]
    waiting = [start(forks, "wait") for forks in (one, two, other)]
    parents = [psutil.Process(child.pid).ppid() for child in waiting]
    assert parents[0] == parents[1] != parents[2] and [end(child) for child in waiting] == [0, 0, 0]
    one.close()
    assert end(start(two, "wait")) == 0, "it lives on"
    two.close()
    three = shared(("wave",), ENVIRONMENT)
    assert three is not one and end(start(three, "exit", "3")) == 3, "another is made"
    for server in (three, other):
        server.close()


def test_a_child_begins_in_the_folder_of_who_asks(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is now, not as it was when the fork server began; also one that is gone, in which nothing can be made."""
    assert end(start(server, "exit", "0")) == 0
    monkeypatch.chdir(tmp_path)
    assert json.loads(said(start(server, "tell")))["folder"] == str(tmp_path)
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert end(start(server, "exit", "4")) == 4


def test_two_threads_start_at_once(server: ForkServer) -> None:
    """Each gets its own process, and whoever waits for the other can be told to end."""
    codes, looks = {}, []

    def run(code: int) -> None:
        words, environment = ("exit", str(code)), ENVIRONMENT
        codes[code] = end(
            server.start("forked_child", words, environment, subprocess.PIPE, look=lambda: looks.append(1))
        )

    threads = [threading.Thread(target=run, args=(code,)) for code in range(3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert codes == {code: code for code in range(3, 9)} and looks


def begun(server: ForkServer, *arguments: str) -> Forked:
    child = start(server, *arguments)
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    return child


def test_one_that_computes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache of kernels, on a machine with much else to do, it compiled for more than two minutes."""
    monkeypatch.setattr(under_test, "START_S", 1.0)
    server = ForkServer(("slow_to_load",), ENVIRONMENT)
    began_s = time.monotonic()
    assert end(start(server, "exit", "4")) == 4
    assert time.monotonic() - began_s > 3.0, "the fault fires: it took longer"
    server.close()


def test_one_that_hangs_is_replaced_and_what_it_was_asked_for_is_nobody_s(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, say: nothing would ever be started again."""
    child = begun(server, "wait")
    before = psutil.Process(server.pid)
    before.suspend()
    monkeypatch.setattr(under_test, "ANSWER_S", 1.0)
    with pytest.raises(OSError, match="hangs: no answer, nor work, for 1 s"):
        start(server, "exit", "3")
    assert not before.is_running() and child.poll() is None
    monkeypatch.undo()
    assert end(start(server, "exit", "5")) == 5 and psutil.Process(server.pid).pid != before.pid
    child.kill()
    assert end(child) == UNKNOWN


def test_an_answer_to_a_start_that_was_given_up_is_not_taken_for_the_next_one_s(server: ForkServer) -> None:
    assert end(start(server, "exit", "0")) == 0
    forks = psutil.Process(server.pid)

    def stop() -> None:
        raise KeyboardInterrupt

    forks.suspend()
    with pytest.raises(KeyboardInterrupt):
        server.start("forked_child", ("hold",), ENVIRONMENT, look=stop)
    forks.resume()
    child = start(server, "exit", "7")
    assert end(child) == 7, "it is the second one"
    wait_until(lambda: (child.poll(), not forks.children())[1], LIMIT_S, "the first one is ended")


def test_what_is_printed_while_all_is_loaded_is_not_said_by_the_children() -> None:
    """The first line that a coordinator says is its address."""
    server = ForkServer(("chatty",), ENVIRONMENT)
    assert said(child := start(server, "exit", "0")) == "in order"
    assert child.wait(LIMIT_S) == 0
    server.close()


def test_a_signal_to_one_whose_end_another_thread_learns_meanwhile(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, poll = begun(server, "wait"), Forked.poll
    noted: list[int | None] = []

    def late(self: Forked) -> int | None:
        found = poll(self)
        if not noted:
            noted.append(None)
            other = threading.Thread(
                target=lambda: (os.kill(child.pid, signal.SIGKILL), noted.append(child.wait(60.0)))
            )
            other.start()
            other.join(LIMIT_S)
        return found

    monkeypatch.setattr(Forked, "poll", late)
    child.terminate()
    monkeypatch.undo()
    child.kill()
    assert child.wait(LIMIT_S) in (-signal.SIGKILL, -signal.SIGTERM)


def test_without_room_for_a_descriptor_it_is_an_error_like_others(server: ForkServer) -> None:
    """At every number of descriptors that are left: what starts processes again catches OSError, and tries again."""
    assert end(start(server, "exit", "0")) == 0
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    most = 1 + max(int(file) for file in os.listdir("/proc/self/fd")) + 20
    outcomes: list[int] = []
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        while fillers and 0 not in outcomes:
            try:
                assert end(start(server, "exit", "0")) == 0
                outcomes.append(0)
            except OSError as error:
                outcomes.append(error.errno or -1)
            os.close(fillers.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for file in fillers:
            os.close(file)
    assert outcomes == [errno.EMFILE] * 7 + [0], "the fault fires, once for each that it needs"
    assert len(os.listdir("/proc/self/fd")) == before, "nothing is left open"


def owner(tmp_path: Path, what: str, words: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    command = [*words, sys.executable, "-m", "forking_owner", what, str(tmp_path / "log")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT)


def test_one_that_is_stopped_does_not_outlive_its_owner(tmp_path: Path) -> None:
    with owner(tmp_path, "wait") as process:
        assert process.stdout is not None
        child, forks = (psutil.Process(pid) for pid in json.loads(process.stdout.readline()))
        forks.suspend()
        wait_until(lambda: forks.status() == psutil.STATUS_STOPPED, LIMIT_S, "the fault fires")
        process.kill()

    def gone(one: psutil.Process) -> bool:
        return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE

    wait_until(lambda: gone(forks) and gone(child), LIMIT_S, "both have ended")


def test_an_owner_without_a_standard_error(tmp_path: Path) -> None:
    with owner(tmp_path, "fail", ("sh", "-c", 'exec "$@" 2>&-', "sh")) as process:
        assert process.wait(LIMIT_S) == 0
    assert "ValueError: as it was told" in (tmp_path / "log").read_text()
