"""However a launcher ends, `torch-ecrec up` or a trainer with a cluster of its own: no process, port, shared memory or
temporary file is left behind. It takes a second or two; on a busy machine the last garbage collection alone many."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from conftest import wait_for_none, wait_until
from places import SUPPORT
from test_cli import LIMIT_S, SMALL, command

END_S = 300.0  # only a hang reaches it
ENDINGS = {  # exit codes of `up` and of the trainer
    "success": (None, 0),
    "failure": (None, 1),
    "SIGINT": (0, -signal.SIGINT),
    "SIGTERM": (0, -signal.SIGTERM),
    "SIGKILL": (-signal.SIGKILL, -signal.SIGKILL),
}


def listening(pids: list[int]) -> set[int]:
    """Sockets that some of these processes listen at: a port may be another's a moment later."""
    found = set()
    for connection in psutil.net_connections("tcp"):
        if connection.pid in pids and connection.status == psutil.CONN_LISTEN:
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                found.add(os.stat(f"/proc/{connection.pid}/fd/{connection.fd}").st_ino)
    return found


# Here the others are left to the slow run: `test_signals.py` sends each signal to both.
EVERY_DAY = {
    ("up", "SIGKILL"),
    ("trainer", "success"),
    ("trainer", "failure"),
    ("trainer", "SIGKILL"),
}


@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        pytest.param(launcher, ending, marks=[] if (launcher, ending) in EVERY_DAY else [pytest.mark.slow])
        for launcher in ("up", "trainer")
        for ending, codes in ENDINGS.items()
        if launcher == "trainer" or codes[0] is not None  # `up` runs until it is ended
    ],
)
def test_nothing_is_left(launcher: str, ending: str, tmp_path: Path) -> None:
    expected = ENDINGS[ending][launcher == "trainer"]
    how = ending if ending in ("success", "failure") else "wait"
    child = SUPPORT / "embedded_child.py"
    program = ["-m", "torch_ecrec", "up", *SMALL] if launcher == "up" else [str(child), how]
    shared = set(os.listdir("/dev/shm"))
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{child.parent}{os.pathsep}{child.parent.parent.parent}"}
    with command(program=program, environment=environment) as started:
        started.read_until("cluster at" if launcher == "up" else "READY")
        if how == "wait":
            started.wait_until("all its processes", lambda: len(started.living()) >= 4)
            pids = list(started.living())
            sockets = listening(pids)
            assert sockets, "the coordinator listens"
            os.kill(started.process.pid, signal.Signals[ending])
        else:
            pids, sockets = [], set()
            started.process.wait(LIMIT_S)
        assert not wait_for_none(started.living, END_S), f"left running {END_S:g} s after {ending}"
        assert started.wait() == expected, started.err
    # A process that ends has let go of its memory, by which it is found, a moment before it does of its sockets.
    wait_until(lambda: not listening(psutil.pids()) & sockets, END_S, "nobody listens any more")
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if any(str(pid) in name for pid in pids)]
    left = [path.name for path in tmp_path.iterdir()]
    if launcher == "trainer" and ending != "success":  # what its servers said is of use then
        assert len(left) == 1 and left[0].startswith("torch-ecrec-"), left
    else:
        assert not left, "temporary files are left"
