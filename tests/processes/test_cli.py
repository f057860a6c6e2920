"""The command line: bad input ends in one message and a non-zero exit with nothing left running, and so does Ctrl-C.

What is refused before anything starts runs in this process; what needs a cluster shares one `torch-ecrec up`.
"""

import contextlib
import gzip
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builds import BUILD
from cluster_child import job
from conftest import MARK, ROOT, leftover, wait_for_none, wait_until

import torch_ecrec
from torch_ecrec.cli.main import main
from torch_ecrec.codec import field
from torch_ecrec.demo import criteo, run
from torch_ecrec.errors import ClusterUnavailable, JoinRefused
from torch_ecrec.processes import launch
from torch_ecrec.protocol import messages
from torch_ecrec.protocol.build import Build
from torch_ecrec.protocol.status import Status, json_of, of_message
from torch_ecrec.records.optimizers import NAMES as OPTIMIZERS
from torch_ecrec.spec.job import FIELD_SIZE, CodeSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport import whereabouts
from torch_ecrec.transport.control import ControlClient

LIMIT_S = 300.0  # for a start: only a hang reaches it
END_LIMIT_S = 300.0  # for an end
WELL_FORMED = {
    "type": "join",
    **BUILD,
    "role": "server",
    "pid": 1,
    "session_id": "one",
}
TRAINER = {**WELL_FORMED, "role": "trainer", "rank": 0, "job": job(trainers=2).to_json()}


# --- refused before anything starts ----------------------------------------------------------------------------------


def refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], code: int = 2) -> None:
    """Runs a command here: it returns `code`, and says one line on stderr and nothing on stdout."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert says in err and err.startswith("torch-ecrec: ")
    assert err.count("\n") == 1 and out == ""


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("something was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(run, "warm", start)
    monkeypatch.setattr(launch, "warm", start)


@pytest.mark.smoke
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", ["demo", "up", "coordinator"])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--servers", "2"], "a stripe of k + r = 3 records needs as many slots, got 2 servers"),
        (["--servers", "5", "-k", "4", "-r", "2"], "k + r = 6 records needs as many slots, got 5 servers"),
        (["--servers", "0"], "`--servers` must be at least 1, got 0"),
        (["-k", "0"], "`k` must be at least 1, got 0"),
        (["-k", "-1"], "`k` must be at least 1, got -1"),
        (["-r", "0"], "`r` must be at least 1, got 0"),
        (["--servers", "300", "-k", "255", "-r", "2"], "`k + r` must be at most 256, got 257"),
        (["--spares", "-1"], "`spares` must be at least 0, got -1"),
    ],
)
def test_bad_code_parameters(command: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused([command, *arguments], says, capsys)


def spoil(line: bytes, column: int, value: bytes) -> bytes:
    fields = line.split(b"\t")
    fields[column] = value
    return b"\t".join(fields)


BAD_DATA: dict[str, tuple[str, Callable[[list[bytes]], bytes] | None, str]] = {
    "missing": ("rows.tsv", None, "rows.tsv: no such file"),
    "empty": ("rows.tsv", lambda _: b"", "rows.tsv: the file is empty"),
    "empty gzip": ("rows.tsv.gz", lambda _: gzip.compress(b""), "rows.tsv.gz: the file is empty"),
    "empty as gzip": ("rows.tsv.gz", lambda _: b"", "rows.tsv.gz: the file is empty"),
    "not gzip": ("rows.tsv.gz", lambda lines: b"".join(lines), "rows.tsv.gz: not a gzip file"),
    "truncated gzip": (
        "rows.tsv.gz",
        lambda lines: gzip.compress(b"".join(lines))[:-200],
        "rows.tsv.gz: the gzip file is truncated after line ",
    ),
    "39 columns": (
        "rows.tsv",
        lambda lines: b"".join([*lines[:6], lines[6].rpartition(b"\t")[0] + b"\n", *lines[7:]]),
        "rows.tsv, line 7: 39 columns, expected 40",
    ),
    "39 columns in gzip": (
        "rows.tsv.gz",
        lambda lines: gzip.compress(b"".join([*lines[:2], lines[2].partition(b"\t")[2], *lines[3:]])),
        "rows.tsv.gz, line 3: 39 columns, expected 40",
    ),
    "a category that is not hex": (
        "rows.tsv",
        lambda lines: b"".join([*lines[:4], spoil(lines[4], 16, b"68fdzz64"), *lines[5:]]),
        "rows.tsv, line 5: category C3 is '68fdzz64', expected at most 8 hex digits",
    ),
    "a label": (
        "rows.tsv",
        lambda lines: b"".join([spoil(lines[0], 0, b"2"), *lines[1:]]),
        "rows.tsv, line 1: label '2', expected 0 or 1",
    ),
    "too few lines": ("rows.tsv", lambda lines: b"".join(lines[:4]), "rows.tsv: 4 lines are too few"),
}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoiled, says = BAD_DATA[case]
    monkeypatch.chdir(tmp_path)
    criteo.write_synthetic("good.tsv", rows=40, seed=1)
    if spoiled is not None:
        Path(name).write_bytes(spoiled(Path("good.tsv").read_bytes().splitlines(keepends=True)))
    refused(["demo", "--data", name, "--out", "out"], says, capsys)
    assert not Path("out", "result.json").exists()


@pytest.mark.smoke
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["demo", "--optimizer", "shampoo"],
            f"invalid choice: 'shampoo' (choose from {', '.join(map(repr, OPTIMIZERS))})",
        ),
        (["demo", "--protection", "raid"], "invalid choice: 'raid' (choose from 'parity', 'none')"),
        (["demo", "-k", "two"], "argument -k: a whole number is wanted, got 'two'"),
        (["up", "--port", "70000"], "a port is a number up to 65535, got '70000'"),
        (["up", "--port", "http"], "a port is a number up to 65535, got 'http'"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_the_parser_refuses(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, without the usage."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and "--help` says what it takes" in err


@pytest.mark.smoke
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["up", "--sirvers", "3"], "there is no option --sirvers of `torch-ecrec up`; did you mean --servers?"),
        (["bench", "train", "--shpae=paper"], "of `torch-ecrec bench train`; did you mean --shape?"),
        (
            ["status", "--zzz"],
            "there is no option --zzz of `torch-ecrec status`; `torch-ecrec status --help` lists all",
        ),
        (["status", "10.0.0.1:29400"], "`torch-ecrec status` takes no argument 10.0.0.1:29400"),
        (["up", "--restore", "newest"], "the newest checkpoint of what?"),
    ],
)
def test_what_is_misspelt_or_lacks_something(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(arguments, says, capsys)


@pytest.mark.smoke
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("option", ["--port", "--http"])
def test_a_port_in_use_is_found_before_anything_starts(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        refused(["up", option, str(number)], f"port {number} on 127.0.0.1 is in use: end the process", capsys)


@pytest.mark.smoke
@pytest.mark.usefixtures("nothing_starts")
def test_a_checkpoint_that_is_not_there_is_found_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["up", "--restore", str(tmp_path)], f"there is no checkpoint at {tmp_path}", capsys, code=7)
    refused(["up", "--restore", f"{tmp_path}@5"], f"there is no checkpoint of step 5 at {tmp_path}", capsys, code=7)


@pytest.mark.parametrize("command", ["serve", "status"])
def test_no_coordinator(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCH_ECREC_JOIN", raising=False)
    monkeypatch.setenv("TORCH_ECREC_GIVE_UP_S", "0.3")
    assert main([command]) == 2
    assert "HOST:PORT" in capsys.readouterr().err
    for bad in ("nonsense", "127.0.0.1:", ":80", "127.0.0.1:99999"):
        refused([command, "--join", bad], f"an address must be HOST:PORT, or [HOST]:PORT of IPv6, got {bad!r}", capsys)
    with socket.socket() as nobody:  # bound, but nobody listens
        nobody.bind(("127.0.0.1", 0))
        join = f"127.0.0.1:{nobody.getsockname()[1]}"
        refused([command, "--join", join], f"no coordinator at {join} within 0.3 s", capsys, code=4)
    monkeypatch.setenv("TORCH_ECREC_GIVE_UP_S", "soon")
    refused([command, "--join", join], "TORCH_ECREC_GIVE_UP_S must be a number, got 'soon'", capsys)


# --- start -----------------------------------------------------------------------------------------------------------

SLOW = ("torch", "torchrec", "fbgemm_gpu", "numba", "numpy")
ASKED = """
import sys
from torch_ecrec.cli.main import main
try:
    code = main({words})
except SystemExit as end:
    code = end.code
print("loaded", code, [name for name in {slow} if name in sys.modules])
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "code"),
    [
        pytest.param(["--help"], 0, id="help"),
        pytest.param(["coordinator", "--help"], 0, id="help of a command"),
        pytest.param(["status"], 2, id="status without a cluster"),
        pytest.param(["status", "--join", "127.0.0.1:1"], 4, id="status of nobody"),
        pytest.param(["serve", "-k", "two"], 2, id="bad words"),
    ],
)
def test_what_needs_no_library_loads_none(words: list[str], code: int) -> None:
    """They take seconds, in which a process neither answers nor notices that its parent is gone."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    done = subprocess.run(
        [sys.executable, "-c", ASKED.format(words=words, slow=SLOW)],
        cwd=ROOT,
        env={**environment, "TORCH_ECREC_GIVE_UP_S": "0.3"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stdout.splitlines()[-1:] == [f"loaded {code} []"], done.stderr


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"], ids=["stderr", "all"])
def test_whoever_has_closed_the_standard_streams_has_the_exit_code(closed: str) -> None:
    """Nothing that is opened later has the number of one: a library's words would be written to it."""
    code = (
        "import fcntl, os, sys; from torch_ecrec.cli.main import main; code = main();"
        " there = all(os.path.samestat(os.fstat(n), os.stat(os.devnull)) for n in (0, 1, 2)[{first}:]);"
        " print('said', file=sys.stderr, flush=True); os._exit(code if there and open(os.devnull).fileno() > 2 else 99)"
    ).format(first=0 if "<" in closed else 2)
    words = f'{sys.executable} -c "{code}" status --join 127.0.0.1:1 {closed}'
    environment = {**os.environ, "TORCH_ECREC_GIVE_UP_S": "0.3"}
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (4, b"", b"")


@pytest.mark.parametrize("words", ["settings", "experiments list"])
def test_who_reads_no_more_of_the_output_is_told_of_no_error(words: str) -> None:
    """As in `| head -1`; here the reader is gone before anything is written."""
    reads, writes = os.pipe()
    os.close(reads)
    tool = [sys.executable, "-m", "torch_ecrec", *words.split()]
    with open(writes, "w") as file:
        done = subprocess.run(tool, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", ["--help", "settings", "bench --help"])
@pytest.mark.parametrize("buffered", [False, True])
def test_output_that_cannot_be_written_is_one_error(words: str, buffered: bool) -> None:
    """As on a disk that is full. No mistake of the command line: 1, not 2."""
    tool = [sys.executable, *([] if buffered else ["-u"]), "-m", "torch_ecrec", *words.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            tool, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S
        )
    assert (done.returncode, done.stderr) == (1, "torch-ecrec: No space left on device: 'standard output'\n")


@pytest.mark.parametrize("own", ({}, {"RES_OPTIONS": "rotate"}), ids=("unset", "set"))
def test_a_name_server_that_does_not_answer_is_not_waited_for_long(own: dict[str, str]) -> None:
    """Unless the user has said how long."""
    code = "import os, sys; from torch_ecrec.cli.main import main; main(); print(os.environ['RES_OPTIONS'])"
    environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"} | own
    words = [sys.executable, "-c", code, "status", "--join", "127.0.0.1:1"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split("\n")[-2:] == [own.get("RES_OPTIONS", "timeout:1 attempts:2"), ""], done


def test_a_code_may_have_as_many_members_as_its_field_has_elements() -> None:
    """Written twice, since the field's module loads Numba."""
    assert FIELD_SIZE == field.FIELD_SIZE


# --- processes -------------------------------------------------------------------------------------------------------


class Command:
    """`torch-ecrec ...` as a process in a session of its own, and all processes that come of it."""

    def __init__(
        self, *arguments: str, program: Sequence[str] = ("-m", "torch_ecrec"), environment: dict[str, str] | None = None
    ) -> None:
        self.mark = f"{os.environ[MARK]}.{time.time_ns()}"
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {}), MARK: self.mark},
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()  # of stdout; None: it has ended
        self.err: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_out, daemon=True),
            threading.Thread(target=self._read_err, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self.err.extend(self.process.stderr)

    def living(self) -> dict[int, str]:
        """Itself and all that descends from it, reparented or not: pid -> command line."""
        return leftover(-1, self.mark)

    def read_until(self, pattern: str) -> re.Match[str]:
        """The first line of stdout from here on that matches."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line {pattern!r} within {LIMIT_S:g} s: {self.err}")
            assert line is not None, f"ended with {self.process.wait(LIMIT_S)} before {pattern!r}: {self.err}"
            if match := re.search(pattern, line):
                return match

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        def met() -> bool:
            holds = condition()
            assert holds or self.process.poll() is None, f"ended before {what}: {self.err}"
            return holds

        wait_until(met, LIMIT_S, what)

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C: everything has ended `END_LIMIT_S` later. Returns the exit code."""
        os.killpg(self.process.pid, number)  # the terminal's: children are in sessions of their own
        left = wait_for_none(self.living, END_LIMIT_S)
        assert not left, f"left running after {END_LIMIT_S:g} s: {left}"
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(LIMIT_S)
        for reader in self._readers:
            reader.join(LIMIT_S)
        return code

    def close(self) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


@contextlib.contextmanager
def command(*arguments: str, **more: Any) -> Iterator[Command]:
    started = Command(*arguments, **more)
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def join(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a running `torch-ecrec up` with three servers in it, (k, r) = (2, 1)."""
    logs = tmp_path_factory.mktemp("up")
    with command("up", "--servers", "3", "--spares", "0", "--logs", str(logs)) as up:
        join = up.read_until(r"cluster at (\S+:\d+) \(TORCH_ECREC_JOIN=\1\); Ctrl-C ends it")[1]
        up.wait_until("three servers", lambda: len(status_of(join).members) == 3)
        yield join
        assert up.interrupt(signal.SIGTERM) == 0


def status_of(join: str) -> Status:
    return whereabouts.status_of(join, LIMIT_S)


def ask(join: str, message: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's first answer to a member."""
    host, port = join.split(":")
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    client = ControlClient(
        host, int(port), answers.put, lambda reason: answers.put({"closed": reason}), timeout_s=LIMIT_S
    )
    try:
        client.send(message)
        return answers.get(timeout=LIMIT_S)
    finally:
        client.close()


def test_status(join: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--join", join, "--tables"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("WARN: the cluster has not begun") and "(k, r) = (2, 1) on 3 slots, 0 tables" in text
    assert "no slots placed yet" in text and all(f"server-{i}" in text for i in range(3))

    monkeypatch.setenv("TORCH_ECREC_JOIN", join)
    assert main(["status", "--json"]) == 1
    status = json.loads(capsys.readouterr().out)
    assert status["version"] == torch_ecrec.__version__
    assert status["code"] == {"slots": 3, "k": 2, "r": 1, "protection": "parity"}
    assert (status["epoch"], status["step"], status["slots"], status["fatal"]) == (0, 0, [], None)
    assert [m["name"] for m in status["members"]] == ["server-0", "server-1", "server-2"]
    assert all(m["alive"] and m["role"] == "server" and m["pid"] > 0 for m in status["members"])
    said = {"schema": status.pop("schema"), "verdict": status.pop("verdict")}
    assert said["schema"] == 1 and said["verdict"]["level"] == "WARN"
    assert json.loads(json.dumps(json_of(of_message(status)))) == status, "what is printed is what is declared"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-k", "3"], "code parameter k is 2 in this cluster, got 3"),
        (["-k", "0"], "code parameter k is 2 in this cluster, got 0"),
        (["-r", "2"], "code parameter r is 1 in this cluster, got 2"),
        (["--servers", "5"], "code parameter slots is 3 in this cluster, got 5"),
        (["-k", "2", "-r", "1", "--servers", "4"], "code parameter slots is 3 in this cluster, got 4"),
    ],
)
def test_a_server_with_other_code_parameters_is_refused(
    join: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["serve", "--join", join, *arguments], f"refused by the cluster at {join}: {says}", capsys)
    assert len(status_of(join).members) == 3, "it has not joined"


def test_a_refused_server_process_ends(join: str) -> None:
    """As above, with all that a process of its own writes."""
    with command("serve", "--join", join, "-k", "3") as serve:
        assert serve.wait() == 2
        assert serve.err == [
            f"torch-ecrec: refused by the cluster at {join}: code parameter k is 2 in this cluster, got 3\n"
        ]
        assert not serve.living()


def test_another_version_is_refused(
    join: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = torch_ecrec.__version__
    other = Build("9.9.9", {**messages.whole_build().messages, "protocol": "9"})
    monkeypatch.setattr(messages, "whole_build", lambda: other)
    says = f"refused by the cluster at {join}: joins a cluster of another build: version 9.9.9, here {ours}; protocol 9"
    refused(["serve", "--join", join], says, capsys)
    with pytest.raises(JoinRefused, match=re.escape(says)):
        launch.connect(job(trainers=2), Settings(join=join))
    assert len(status_of(join).members) == 3


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({**WELL_FORMED, "messages": {**WELL_FORMED["messages"], "protocol": "0"}}, "; protocol 0, here "),
        ({"type": "join", "role": "server"}, "join: Object missing required field `version`"),
        ({**WELL_FORMED, "code": {"k": 3}}, "code parameter k is 2 in this cluster, got 3"),
        ({**TRAINER, "job": {"tables": []}}, "at `$.job`"),
        ({**TRAINER, "rank": 2}, "trainer rank must be below 2, got 2"),
        ({"type": "hello"}, "hello: Invalid value 'hello'"),
    ],
)
def test_messages_that_are_refused(join: str, message: dict[str, Any], says: str) -> None:
    """The coordinator says why, and goes on."""
    answer = ask(join, message)
    assert answer["type"] == "refused" and says in answer["reason"]
    assert status_of(join).fatal is None


def test_another_table_list_is_refused(join: str) -> None:
    """The first trainer brings the job; another that brings another one is refused, here before training."""
    host, port = join.split(":")
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    first = ControlClient(host, int(port), answers.put, lambda reason: None, timeout_s=LIMIT_S)
    try:
        first.send(TRAINER)
        assert answers.get(timeout=LIMIT_S)["type"] == "welcome"
        settings = Settings(join=join)
        with pytest.raises(JoinRefused, match="code parameter r is 1 in this cluster, got 2"):
            launch.connect(job(trainers=2), settings, 1, CodeSpec(3, 2, 2, "none"))  # it would have less than it wants
        with pytest.raises(JoinRefused, match="code parameter protection is parity in this cluster, got none"):
            launch.connect(job(trainers=2), settings, 1, CodeSpec(3, 2, 1, "none"))
        for other in (job(trainers=2, seed=6), job(trainers=3)):
            with pytest.raises(JoinRefused, match="this cluster trains another job: it "):
                launch.connect(other, settings, trainer=1)
        names = [m.name for m in status_of(join).members]
        assert names == ["server-0", "server-1", "server-2", "trainer-0"]
    finally:
        first.close()


def test_nobody_to_connect_to() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        settings = Settings(join=f"127.0.0.1:{nobody.getsockname()[1]}", give_up_s=0.3)
        with pytest.raises(ClusterUnavailable, match=r"no coordinator at 127.0.0.1:\d+ within 0.3 s"):
            launch.connect(job(trainers=1), settings)


@pytest.mark.parametrize("name", ["up", "coordinator"])
def test_a_port_in_use(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command(name, "--port", str(port)) as started:
            assert started.wait() == 2
            told = (
                f"torch-ecrec: port {port} on 127.0.0.1 is in use: end the process that has it, or take another port\n"
            )
            assert started.err == [told]
            assert not started.living()


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------

SMALL = ["--servers", "2", "-k", "1", "--spares", "0"]


@pytest.mark.slow  # `test_signals.py` has both signals, one after another
def test_ctrl_c_ends_a_cluster() -> None:
    with command("up", *SMALL) as up:
        join = up.read_until(r"cluster at (\S+)")[1]
        up.wait_until("two servers", lambda: len(status_of(join).members) == 2)
        assert len(up.living()) == 5, "up, what it forks from, coordinator, two servers"
        assert up.interrupt() == 0
        assert not [line for line in up.err if "Traceback" in line]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["up"], id="up", marks=pytest.mark.slow),  # `test_signals.py` has more of it
        pytest.param(["demo", "--trainers", "1", "--out", "OUT"], id="demo"),
    ],
)
def test_ctrl_c_while_it_starts(arguments: list[str], tmp_path: Path) -> None:
    with command(*(str(tmp_path) if word == "OUT" else word for word in arguments), *SMALL) as started:
        started.wait_until("its first child", lambda: len(started.living()) > 1)
        assert started.interrupt() == 130
        assert not [line for line in started.err if "Traceback" in line]


@pytest.mark.slow
def test_ctrl_c_ends_a_demo(tmp_path: Path) -> None:
    criteo.write_synthetic(tmp_path / "rows.tsv", rows=500, seed=3)
    words = ["--data", str(tmp_path / "rows.tsv"), "--out", str(tmp_path), "--trainers", "1", "--batch-size", "16"]
    with command("demo", *words, *SMALL, "--steps", "5000", "--kill", "server:1@4999") as demo:
        demo.read_until(r"step +[1-9]\d*/5000")
        assert len(demo.living()) >= 7, "demo, what it forks from, coordinator, two servers, torchrun, trainer"
        assert demo.interrupt() == 130
        assert not [line for line in demo.err if "Traceback" in line]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["error"] == "interrupted" and result["kills"] == []
