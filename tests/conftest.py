"""What every test gets: reproducible Hypothesis runs, the real rows where they are, and no process left behind.

Hypothesis runs under the profile `ci`: the same examples in every run (derandomised), no deadline (two shared cores).
To look further, `--hypothesis-profile explore` draws new examples and prints the seed of a failure
(`--hypothesis-seed N` draws them again).

A process that outlives the session fails it, and is killed. It is known by its ancestry or, when its parent died first,
by a mark in the environment that it inherited. Where several workers run the tests (pytest-xdist), each looks for its
own; for a worker that was ended in the middle of a test, because its time was up, the session that started it does.
"""

import contextlib
import functools
import gc
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from places import ROOT
from process_state import differences, put_back, state
from sampling import SLOW_LIMIT_S, SLOW_TURNS, TAKE_TURNS, TIER_FRAMES, frames_of, kept

from torch_ecrec.processes.fork_server import ForkServer
from torch_ecrec.spec.settings import ask_name_servers_briefly

CRITEO = ROOT.parent / "shared" / "data" / "criteo_kaggle_10k.tsv.gz"

MARK = "PYTEST_ECREC_SESSION"
LEAVE_S = 300.0
"""How long a process may take to end after the last test."""

ask_name_servers_briefly()

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C counts, for the tests' children too, also where a shell that started this in the background ignores it.

    Workers of pytest-xdist are told the turn: to them all tests are named.
    """
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        from harness import tiers  # loads torch; who hands out tests to workers, which wait for it, needs none

        tiers.FRAMES = _frames(config)
    if not hasattr(config, "workerinput"):
        turn = _turn(config)
        config.option.turn = "all" if turn is None else str(turn)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--turn N`: of the tests that take turns (`support/sampling.py`) those of turn N; "all": all of them.

    `--default-dtype float64`: tests run as if their script had set it; processes that they start have their own.
    """
    parser.addoption("--turn", help="which tests run of those that take turns: a number, or all")
    parser.addoption(
        "--tier-frames",
        type=int,
        help=f"simulated servers have tiers, of so many frames, 0: none (default: one of {TIER_FRAMES}, by the turn)",
    )
    parser.addoption("--default-dtype", default="float32", help="torch's, while a test runs; float64, say")


def _turn(config: pytest.Config) -> int | None:
    """None: all run. Where nothing is said: turn 0 of all tests, and all of those that are named, and of slow ones."""
    turn = config.getoption("--turn")
    if turn is None:
        named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
        return None if named or config.option.markexpr != "not slow" else 0
    if turn != "all" and not str(turn).isdecimal():
        raise pytest.UsageError(f"--turn is a number or all, got {turn!r}")
    return None if turn == "all" else int(turn)


def _frames(config: pytest.Config) -> int:
    """How many frames simulated servers have; 0: no tiers."""
    given: int | None = config.getoption("--tier-frames")
    return frames_of(_turn(config) or 0) if given is None else given


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end: looking for garbage in it is a tenth of the time it takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests whose turn it is not.

    Raises:
        pytest.UsageError: a test's name is another in each process (the text of a set, of an object at an address),
            by luck equal in most runs: then the workers of pytest-xdist do not agree on which tests there are. Or a
            slow test is refused (`refuse_long_ones`).
    """
    if changing := [item.nodeid for item in items if "set({" in item.nodeid or " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names that are not the same in every process, give them `ids`: {changing}")
    slow = [item for item in items if item.get_closest_marker("slow")]
    refuse_long_ones(slow)
    turn = _turn(config)
    if turn is None:
        return

    def takes_turns(item: pytest.Item) -> bool:
        file = item.path.relative_to(ROOT / "tests").as_posix()
        return file in TAKE_TURNS and not item.get_closest_marker("smoke")

    of_turn = sorted(slow, key=lambda item: item.nodeid)[turn % SLOW_TURNS :: SLOW_TURNS]
    others = [item for item in items if not item.get_closest_marker("slow")]
    stay = {id(item) for item in (*of_turn, *kept(others, turn, lambda item: item.nodeid, takes_turns))}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in stay])
    items[:] = [item for item in items if id(item) in stay]


def refuse_long_ones(slow: Iterable[pytest.Item]) -> None:
    """Raises pytest.UsageError if a slow test may take so long that no turn could have it: it would never run."""
    longer = []
    for item in slow:
        mark = item.get_closest_marker("timeout")
        if mark is not None and mark.args[0] > SLOW_LIMIT_S:
            longer.append(item.nodeid)
    if longer:
        raise pytest.UsageError(f"slow tests are given {SLOW_LIMIT_S:g} s at most, cut these into parts: {longer}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """States how examples are drawn and whether the real rows are there."""
    profile = config.getoption("--hypothesis-profile") or "ci"
    settings = hypothesis.settings.get_profile(profile)
    seed, frames = config.getoption("--hypothesis-seed"), _frames(config)
    drawn = (
        "the same examples every run" if settings.derandomize else f"new examples, seed {seed or 'printed on failure'}"
    )
    return [
        f"hypothesis: profile {profile!r}, {drawn}, max_examples={settings.max_examples}, deadline={settings.deadline}",
        f"simulated servers: {f'{frames} frames, the rest in tiers' if frames else 'all in memory'}",
        f"criteo rows: {CRITEO if CRITEO.is_file() else f'absent ({CRITEO}); the tests that need them skip'}",
    ]


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> None:
    """Libraries, tests and what they left are a million objects: looks through all of them leave these out.

    And simulated clusters make and drop objects so fast that a look after each 700 of them is a tenth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def criteo_path() -> Path:
    """The 10,731 real rows, in Criteo's format; skips where the checkout has no `../shared` beside it."""
    if not CRITEO.is_file():
        pytest.skip(f"no Criteo rows at {CRITEO}")
    return CRITEO


@pytest.fixture(autouse=True)
def _process_left_as_found(
    request: pytest.FixtureRequest, _one_torch_thread: None, _default_dtype: None
) -> Iterator[None]:
    """Fails a test after which another one would run in another process: of other settings, hooks, variables.

    Tests of processes run TorchRec's own tests, too, which leave variables: these are put back.
    """
    before = state()
    yield
    if "processes" in request.path.parts:
        put_back(before)
    if left := differences(before, state()):
        pytest.fail("left otherwise than it was:\n" + "\n".join(f"  {line}" for line in left), pytrace=False)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """One thread for torch, where a test has imported it: the processes of a cluster share the cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _default_dtype(pytestconfig: pytest.Config) -> Iterator[None]:
    """That of `--default-dtype`."""
    name = pytestconfig.getoption("--default-dtype")
    if name == "float32":
        yield
        return
    import torch  # slow, and most tests need none

    torch.set_default_dtype(getattr(torch, name))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    run, worker = (os.environ.get(f"PYTEST_XDIST_{what}") for what in ("TESTRUNUID", "WORKER"))
    outer = os.environ.get(MARK)  # a test runs pytest, which has its worker's variables, and not its processes
    mark = mark_of(run, worker) if run and worker else mark_of(str(os.getpid()), str(time.time_ns()))
    if outer is not None and f"{outer}.".startswith(f"{mark}."):
        mark = mark_of(outer, f"{os.getpid()}.{time.time_ns()}")
    os.environ[MARK] = mark
    yield
    gc.collect()  # what refers to itself, as a reader that was left in the middle of a pass, has workers until then
    left = wait_for_none(lambda: leftover(os.getpid(), mark), LEAVE_S)
    if outer is None:
        del os.environ[MARK]
    else:
        os.environ[MARK] = outer
    kill_all(left)
    if left:
        lines = [f"  {pid}: {command}" for pid, command in sorted(left.items())]
        pytest.fail(f"left running {LEAVE_S:g} s after the last test (killed now):\n" + "\n".join(lines), pytrace=False)


KEPT: list[ForkServer] = []


@pytest.fixture(scope="session", autouse=True)
def _fork_servers_are_kept(_no_process_left_behind: None) -> Iterator[None]:
    """Clusters that tests begin in this process share what has loaded torch and the kernels: it outlives each."""
    shared = ForkServer.shared

    @functools.wraps(shared)
    def keep(preload: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        found = shared(preload, environment)
        if found not in KEPT:
            KEPT.append(shared(preload, environment))
        return found

    ForkServer.shared = keep  # type: ignore[method-assign, assignment]
    yield
    ForkServer.shared = shared  # type: ignore[method-assign]
    for server in KEPT:
        server.close()
    KEPT.clear()


@pytest.fixture
def own_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test of what looks for processes that are left: none is kept."""
    monkeypatch.setattr(ForkServer, "shared", inspect.unwrap(ForkServer.shared))
    monkeypatch.setattr(ForkServer, "_all_shared", {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Kills what a worker has started that was ended before it could look."""
    if error:
        kill_all(leftover(-1, mark_of(node.nodemanager.testrunuid, node.gateway.id)))


def mark_of(run: str, worker: str) -> str:
    """What processes that a worker of a run has started have in their environment."""
    return f"{run}.{worker}"


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_none(find: Callable[[], dict[int, str]], timeout_s: float) -> dict[int, str]:
    """Asks until nothing is found or the time is up; returns what was found last."""
    end_s = time.monotonic() + timeout_s
    while (found := find()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float, why: str) -> None:
    """Returns as soon as a condition holds; fails with `why` when the time is up."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {why}"
        time.sleep(0.01)


def free_bytes(pool: Any) -> int:
    """Of those segments of a pool of shared memory (`runtime/shared.py`) that it may hand out again."""
    with pool._lock:
        pool._sort_gone()
        return sum(segment.size for segment in pool._free)


def is_stopped(pid: int) -> bool:
    """By SIGSTOP."""
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def leftover(root: int, mark: str) -> dict[int, str]:
    """Living processes under `root` or with this mark, or one that begins with it and a dot: pid -> command line.

    Those that are kept for all tests (`KEPT`) do not count.
    Linux only (/proc), else empty.
    """
    marking = f"{MARK}={mark}".encode()
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    marked: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            # "pid (name) state ppid ...", where the name may hold spaces and brackets.
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or it is another user's
            continue
        # A zombie runs no more; the resource tracker of multiprocessing ends with this process by design.
        if state in "ZX" or "multiprocessing.resource_tracker" in command:
            continue
        parents[pid], commands[pid] = int(parent), command
        if any(entry == marking or entry.startswith(marking + b".") for entry in environment):
            marked.add(pid)
    found = {pid for pid in parents if _descends(pid, root, parents)} | marked
    return {pid: commands[pid] for pid in found - {root, *(server.pid for server in KEPT)}}


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == root:
            return True
    return False


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default process group of this process alone."""
    import torch.distributed as dist  # slow, and most tests need none

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
