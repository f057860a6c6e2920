"""Shows what a machine with one GPU can show, in minutes and one folder: `torch-ecrec bench gpu`, or `make gpu`.

Each *part* is another command, with a time limit of its own; one that fails, or does not end in time, is named, and the
others run all the same. Servers are on the CPU throughout, the dense model on the GPU:

    streams     tests/unit/test_staging.py: with a GPU, none of them may be skipped
    exactness   `bench exactness --cases few`: runs of the demo, undisturbed twice, with a server killed, with a trainer
                killed; weights, optimizer state and losses are equal bit for bit, or it fails
    overlap     `bench overlap`: copies run on a stream of their own; how much of their time kernels run, too
    rates       `bench train`: beside TorchRec with its tables in the GPU's memory; -criteo: of another shape
    uvm         the same beside TorchRec with its tables in the host's memory, which the GPU reads; -criteo

Writes OUT/gpu.json, .csv and .md, the report, made of the JSON alone (`report`); OUT/NAME has the files of a part, and
OUT/NAME.log what it said. The exit code is 1 if a part failed, and 2 if there is no GPU, or a torch without CUDA: then
nothing is started.

With `--device cpu` the same commands run with little to train: it shows that they do, and nothing of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import torch_ecrec
from torch_ecrec.bench import record, train, workload
from torch_ecrec.demo.training import require_device
from torch_ecrec.observe.progress import counted
from torch_ecrec.processes.children import end_of, end_tree, with_own_path
from torch_ecrec.processes.launch import warm
from torch_ecrec.runtime.checks import require

GRACE_S = 15.0  # for a part that is out of time to end its processes by itself
LEAST_S = 20.0  # a part with less left is not begun
ROOT = Path(torch_ecrec.__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "unit" / "test_staging.py"
SYSTEMS = {"rates": "torchrec,k2r1", "uvm": "torchrec:uvm,torchrec:uvm-caching,k2r1"}
RATE_COLUMNS = (
    "system",
    "samples/s",
    "least",
    "most",
    "step ms",
    "CPU ms/step",
    "of it servers",
    "waits %",
    *(f"{figure} / {base}" for base in train.BASES for figure in ("rate", "CPU") if base.startswith("torchrec")),
)

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """A command, and what it leaves.

    Args:
        name: of its files.
        asks: what it answers, as people ask.
        limit_s: the time that it may take, in seconds.
        command: arguments of a Python interpreter.
        read: reads its rows from its folder once it has ended well. Raises ValueError if they are not as they must be.
    """

    name: str
    asks: str
    limit_s: float
    command: Sequence[str]
    read: Callable[[Path], Rows]


@dataclass(frozen=True)
class Outcome:
    """What came of a part.

    Args:
        part, asks, command: as in `Part`.
        seconds: that it took.
        error: why it failed; "": it did not.
        rows: what it found.
    """

    part: str
    asks: str
    command: Sequence[str]
    seconds: float
    error: str
    rows: Rows


# what the parts leave ---------------------------------------------------------------------------------


def read_streams(folder: Path, device: str) -> Rows:
    """Returns the number of tests that ran and were skipped. Raises ValueError if none ran, or a GPU's were skipped."""
    suites = list(ElementTree.parse(folder / "streams.xml").getroot().iter("testsuite"))
    ran, skipped = (sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped"))
    require(ran > skipped, "no test has run")
    require(device == "cpu" or not skipped, f"{skipped} of {ran} tests were skipped, with a GPU at hand")
    return [{"tests": ran - skipped, "skipped": skipped}]


def read_exactness(folder: Path) -> Rows:
    """Returns a row for each run: whether it was exact, and how long training paused."""
    found = json.loads((folder / "exactness.json").read_text())
    rows = []
    for one in found["runs"]:
        pauses = [kill["after_kill_s"]["first_step_s"] for kill in one["kills"]]
        rows.append(
            {
                "run": one["case"],
                "exact": one["error"] or "yes",
                "digest": one["digest"][:12],
                "first step after a kill, s": next(iter(pauses), None),
                "seconds": one["seconds"],
            }
        )
    return rows


def read_rows(folder: Path, name: str, columns: Iterable[str] = ()) -> Rows:
    """Returns the rows of a benchmark's JSON, those columns that it has of the given ones; of none: all."""
    rows: Rows = json.loads((folder / f"{name}.json").read_text())["rows"]
    chosen = set(columns)
    return [{key: value for key, value in row.items() if not chosen or key in chosen} for row in rows]


# parts ------------------------------------------------------------------------------------------------


def parts(device: str, out: Path) -> list[Part]:
    """Returns all parts, what matters most first.

    Args:
        device: "cuda", or "cpu" for parts with little to train.
        out: the folder; each part has one of its own in it.
    """
    tiny = device == "cpu"

    def bench(folder: str, *words: object) -> list[str]:
        told = [*words, "--device", device, "--out", (out / folder).resolve()]
        return ["-m", "torch_ecrec", "bench", *map(str, told)]

    pytest = ["-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider"]
    pytest.append(f"--junitxml={(out / 'streams' / 'streams.xml').resolve()}")
    few = ["--cases", "one", "--trainers", 1, "--steps", 8, "--batch-size", 16] if tiny else ["--cases", "few"]
    few += [] if tiny else ["--trainers", 1, 2, "--steps", 40]
    small = ["--rows", 200, "--batch-size", 16] if tiny else []
    found = [
        Part(
            "streams",
            "Are copies waited for, and does training on the GPU repeat itself, in the tests?",
            90.0,
            pytest,
            lambda folder: read_streams(folder, device),
        ),
        Part(
            "exactness",
            "Do runs with a killed server or trainer equal the undisturbed one, bit for bit?",
            270.0,
            bench("exactness", "exactness", *few, "--optimizers", "rowwise_adagrad"),
            read_exactness,
        ),
        Part(
            "overlap",
            "Do copies run on a stream of their own, and kernels meanwhile?",
            100.0,
            bench("overlap", "overlap", *small, *(["--systems", "k2r1", "--steps", 2, "--warmup", 1] if tiny else [])),
            lambda folder: read_rows(folder, "overlap"),
        ),
    ]
    for kind, shape in (("rates", "multi-hot"), ("rates", "criteo"), ("uvm", "multi-hot"), ("uvm", "criteo")):
        if tiny and (kind, shape) != ("rates", "criteo"):
            continue
        name = kind if shape == "multi-hot" else f"{kind}-{shape}"
        blocks = ["--blocks", 1, "--seconds", 0.2, "--warmup", 2] if tiny else ["--blocks", 3, "--seconds", 3]
        words = ["train", "--shape", shape, "--systems", SYSTEMS[kind], "--trainers", 1, *blocks, *small]
        found.append(
            Part(
                name,
                f"How fast is training, {shape}, beside TorchRec with tables in the"
                f" {'GPU' if kind == 'rates' else 'host'}'s memory?",
                100.0,
                bench(name, *words),
                lambda folder, shape=shape: read_rows(folder, f"train-{shape}", RATE_COLUMNS),  # type: ignore[misc]
            )
        )
    return found


def run_part(part: Part, out: Path, left_s: float) -> Outcome:
    """Runs a part in a process of its own; ends it, with all that it has started, at its time limit.

    Args:
        part: to run.
        out: its log goes there, and its files into a folder there.
        left_s: the time that is left for all, in seconds.
    """
    folder, log, begin_s = out / part.name, out / f"{part.name}.log", time.monotonic()
    limit_s, error, rows = min(part.limit_s, left_s), "", Rows()
    if limit_s < LEAST_S:
        error = f"not begun: {max(0.0, left_s):.0f} s were left of the time for all"
    else:
        shutil.rmtree(folder, ignore_errors=True)  # what a run before has left
        folder.mkdir(parents=True)
        try:
            code = _run([sys.executable, "-P", *part.command], log, limit_s)
            rows = part.read(folder) if code == 0 else []
            if code:
                error = f"exit code {code}: {reason(_text(log))}"
        except subprocess.TimeoutExpired:
            error = f"not done within {limit_s:.0f} s: {reason(_text(log))}"
        except (ValueError, KeyError, TypeError, OSError, ElementTree.ParseError) as failure:
            error = f"what it left is not as it should be: {failure}"
    return Outcome(part.name, part.asks, part.command, time.monotonic() - begin_s, error, rows)


def _run(command: Sequence[str], log: Path, limit_s: float) -> int:
    """Runs a command, with its output in a log; returns its exit code. Raises subprocess.TimeoutExpired."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT if TESTS.exists() else None,
            env=with_own_path({**os.environ}),
            start_new_session=True,  # Ctrl-C reaches us, and we end it
        )
    try:
        return process.wait(limit_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # benchmarks end what they have started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            end_tree(process)


def reason(text: str) -> str:
    """Returns the line of a log that says why a command failed: its last word to people, or the last line there is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("torch-ecrec: ", "FAILED ", "ERROR ", "ERROR: "))]
    return next(reversed(told or lines), "it said nothing")


# the report -------------------------------------------------------------------------------------------


def card() -> dict[str, Any]:
    """Returns what there is to say of the GPU, its driver and FBGEMM's build. Needs a GPU."""
    about = torch.cuda.get_device_properties(0)
    found = {
        "name": about.name,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "capability": f"{about.major}.{about.minor}",
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": "unknown",
        "fbgemm": "CUDA build",
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no such program: then it is not said
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    try:
        workload.require_fbgemm_cuda()
    except ValueError as error:
        found["fbgemm"] = str(error)
    return found


def report(content: Mapping[str, Any]) -> str:
    """Returns the report as Markdown, from the contents of gpu.json."""
    header, outcomes = content["header"], content["parts"]
    failed = [one["part"] for one in outcomes if one["error"]]
    about = content["card"]
    lines = ["# What this machine's GPU shows", ""]
    if about is None:
        lines.append("**No GPU: the parts were run on the CPU, with little to train. The figures say nothing.**")
    else:
        lines.append(
            f"{about['name']}, {about['memory_gib']} GiB, compute capability {about['capability']};"
            f" driver {about['driver']}, CUDA {about['cuda']}; FBGEMM: {about['fbgemm']}."
        )
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    lines += [
        "",
        f"{header['processor']}, {header['cores']} cores, {header['memory_gib']} GiB; {versions};"
        f" commit {header['commit']}; {header['date']}.",
        "",
        f"**{len(outcomes) - len(failed)} of {len(outcomes)} parts are as they should be"
        + (f"; failed: {', '.join(failed)}.**" if failed else ".**"),
        "",
        record.markdown(summary(outcomes)),
    ]
    for one in outcomes:
        lines += ["", f"## {one['part']}", "", one["asks"], ""]
        if one["error"]:
            lines += [f"**Failed: {one['error']}**", "", f"What it said is in {one['part']}.log."]
        if one["rows"]:
            lines.append(record.markdown(one["rows"]))
    return "\n".join(lines) + "\n"


def summary(outcomes: Sequence[Mapping[str, Any]]) -> Rows:
    """Returns a row for each part: how it went, and how long it took."""
    return [
        {
            "part": one["part"],
            "result": f"FAILED: {one['error']}" if one["error"] else "as it should be",
            "seconds": one["seconds"],
        }
        for one in outcomes
    ]


def run(arguments: argparse.Namespace) -> int:
    """Runs the parts, prints and writes OUT/gpu.json, .csv and .md. Returns 1 if a part failed.

    Raises:
        ValueError: there is no GPU, torch has no CUDA, or an argument is wrong; nothing was started.
    """
    require_device(arguments.device)
    require(arguments.limit > 0, f"`--limit` must be positive, got {arguments.limit}")
    known = parts(arguments.device, arguments.out)
    names = [part.name for part in known]
    wanted = names if arguments.parts is None else arguments.parts.split(",")
    for name in wanted:
        require(name in names, f"`--parts`: there is no part {name!r}; there are {', '.join(names)}")
    about = None if arguments.device == "cpu" else card()
    content = {"header": record.header(), "device": arguments.device, "card": about, "parts": []}
    until_s, outcomes = time.monotonic() + arguments.limit, list[dict[str, Any]]()
    warm()  # once, and not within a part's time
    for part in counted("gpu: parts", [part for part in known if part.name in wanted]):
        print(f"{part.name}: {part.asks}", flush=True)
        one = run_part(part, arguments.out, until_s - time.monotonic())
        outcomes.append(asdict(one))
        print(f"{part.name}: {one.error or 'as it should be'} ({one.seconds:.0f} s)", flush=True)
        if one.error:
            print(end_of(_text(arguments.out / f"{part.name}.log"), f"{part.name}.log"), flush=True)
        content["parts"] = outcomes  # what was found is kept, whatever becomes of the rest
        record.write(arguments.out, "gpu", content, summary(outcomes))
        (arguments.out / "gpu.md").write_text(report(content))
    print(f"\n{report(content)}\nwritten: {arguments.out / 'gpu'}.json, .csv, .md")
    failed = [one["part"] for one in outcomes if one["error"]]
    if failed:
        print(f"torch-ecrec: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torch-ecrec bench gpu`."""
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: the same commands with little to train, to see that they run (default cuda)",
    )
    parser.add_argument("--parts", metavar="A,B,...", help="only these (default: all)")
    parser.add_argument(
        "--limit", type=float, default=540.0, metavar="SECONDS", help="for all parts together (default 540)"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="DIR", help="of the files")
