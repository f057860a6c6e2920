"""A process whose interpreter's lock is held says whether it computes, and ends if it hangs like that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import held_lock
import pytest
from conftest import ROOT, is_stopped, wait_until
from places import SUPPORT

from torch_ecrec.runtime import unlocked
from torch_ecrec.runtime.unlocked import OVERDUE_S, RECENT_S

LIMIT_S = 300.0
HELD_S = 2.5
SILENT = b""
# Python's own threads: one that has its turn like a heartbeat, and others that want the lock all the time.
PROGRAM = """
import sys, threading, time
import held_lock
from torch_ecrec.runtime import unlocked
from torch_ecrec.transport.liveness import SignOfLife
unlocked.warm()
how, seconds, well, ends_s = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "well", float(sys.argv[4])
sign = SignOfLife("127.0.0.1")
def turns():
    while True:
        sign.turn(well)
        time.sleep(0.1)
def asks_for_the_lock():
    while True:
        time.sleep(0.0001)
for action in [turns] + [asks_for_the_lock] * 8:
    threading.Thread(target=action, daemon=True).start()
if ends_s:
    sign.ends(ends_s, 6)
print(sign.address[1], flush=True)
sys.stdin.readline()
(held_lock.KINDS.get(how) or getattr(held_lock, how))(seconds)
print("over", flush=True)
sys.stdin.readline()
"""


class Held:
    """The process, asked from here."""

    def __init__(self, how: str, seconds: float, well: bool = True, ends_s: float = 0.0) -> None:
        words = [how, str(seconds), "well" if well else "hangs", str(ends_s)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdout is not None
        self._port = int(self.process.stdout.readline())

    def begin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def over(self) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == b"over\n"

    def says(self, limit_s: float = LIMIT_S) -> bytes:
        return asked(self._port, limit_s)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def asked(port: int, limit_s: float) -> bytes:
    """What it says, by the very probe of the coordinator; see `liveness.probe`."""
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as sock:
        sock.settimeout(limit_s)
        try:
            return sock.recv(1)
        except TimeoutError:
            return SILENT


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Held]:
    held = Held(*request.param)
    yield held
    held.end()


@pytest.mark.parametrize("started", [(how, HELD_S) for how in held_lock.KINDS], ids=[*held_lock.KINDS], indirect=True)
def test_who_computes_with_the_lock_held_says_so(started: Held) -> None:
    assert started.says() == unlocked.THERE, "all is as it should be, and its heartbeats say so"
    started.begin()
    wait_until(lambda: started.says() == unlocked.COMPUTES, LIMIT_S, "it computes")
    started.over()
    wait_until(lambda: started.says() == unlocked.THERE, LIMIT_S, "its heartbeats have their turn again")


@pytest.mark.parametrize(
    "started",
    [("wait", 5 * RECENT_S), ("spin", 5 * RECENT_S, False)],
    ids=["waits with the lock held", "was hung before"],
    indirect=True,
)
def test_who_hangs_never_says_that_it_computes(started: Held) -> None:
    """The other threads ask for the lock all the time, which is no work."""
    started.begin()
    time.sleep(OVERDUE_S)
    until_s = time.monotonic() + 2 * RECENT_S
    while time.monotonic() < until_s:
        assert started.says() == unlocked.THERE
        time.sleep(0.05)


@pytest.mark.parametrize("started", [("spin", 60.0)], indirect=True)
def test_one_that_is_stopped_says_nothing(started: Held) -> None:
    started.begin()
    wait_until(lambda: started.says() == unlocked.COMPUTES, LIMIT_S, "it computes")
    os.kill(started.process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(started.process.pid), LIMIT_S, "it is stopped")
    assert started.says(1.0) == SILENT
    os.kill(started.process.pid, signal.SIGCONT)
    wait_until(lambda: started.says() == unlocked.COMPUTES, LIMIT_S, "it computes again")


@pytest.mark.parametrize("started", [("wait", 600.0, True, 2.0)], indirect=True)
def test_who_hangs_with_the_lock_held_ends(started: Held) -> None:
    started.begin()
    assert started.process.wait(LIMIT_S) == 6
    assert started.process.stderr is not None
    assert b"holds the interpreter's lock, and does not compute" in started.process.stderr.read()


@pytest.mark.parametrize("started", [("spin", 6.0, True, 2.0)], indirect=True)
def test_who_computes_does_not_end(started: Held) -> None:
    """However long; nor does one that was stopped meanwhile."""
    started.begin()
    wait_until(lambda: started.says() == unlocked.COMPUTES, LIMIT_S, "it computes")
    os.kill(started.process.pid, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(started.process.pid, signal.SIGCONT)
    started.over()
