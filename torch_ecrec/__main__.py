"""Command line: `torch-ecrec demo | chaos | rehearse | serve | up | status | bench | warm`, also as
`python -m torch_ecrec`.

Exit codes: 0 done, 1 failed, 2 bad arguments or refused by the cluster, 3 data lost beyond what the code repairs, 4 the
cluster cannot be reached or did not answer, 5 another trainer was lost, 6 this process was taken for lost, 130
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch_ecrec
from torch_ecrec.config import CHAOS_EVENTS, OPTIMIZERS, PROTECTIONS, WITHOUT_SPARE, CodeSpec, Settings, require_int
from torch_ecrec.errors import ClusterError
from torch_ecrec.lifetime import INTERRUPTED, end_at_once, end_with_parent, on_signals

BENCHMARKS = {
    "train": "throughput beside plain TorchRec, by shape and code",
    "recovery": "kills at steady state: how long a pause, how fast a rebuild; beside restart from a checkpoint",
    "codec": "encode, fold and decode, beside memcpy and ISA-L",
    "exactness": "kills in real runs: bit-identical? how long a pause?",
    "scaling": "how each cost of a step grows: rows, dim, batch, trainers, servers, codes; fan-out",
    "report": "writes docs/performance.md and the tables of docs/scaling.md from what the others left",
}


def port(text: str) -> int:
    """A TCP port; 0 for a free one."""
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number up to 65535, got {text!r}")
    return int(text)


def add_code(parser: argparse.ArgumentParser, servers: bool = True) -> None:
    """Arguments that describe the code."""
    if servers:
        parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
        parser.add_argument("--spares", type=int, default=1, metavar="P", help="servers in reserve (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe: losses tolerated (default 1)")
    parser.add_argument("--protection", choices=PROTECTIONS, default="parity", help="default parity")
    parser.add_argument(
        "--without-spare",
        choices=WITHOUT_SPARE,
        default="survivor",
        help="who takes the slots of a lost server when there is no spare: a survivor, or the process that is started"
        " in its place (wait); default survivor",
    )


def code_of(arguments: argparse.Namespace) -> CodeSpec:
    return CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)


def add_rehearsal(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rehearse`; what follows `--` is the script's."""
    add_code(parser)
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="T", help="trainers (default 1)")
    parser.add_argument("--at", metavar="STEP,...", help="kill all trainers in these steps (default: see --restarts)")
    parser.add_argument(
        "--restarts",
        type=int,
        default=4,
        metavar="N",
        help="kill all trainers so many times: at the end of a pass, in the step after it, and spread over the run"
        " (default 4)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        metavar="N",
        help="end each run after so many steps, unless it ends before; 0: it ends by itself (default 40)",
    )
    parser.add_argument("--server-too", action="store_true", help="kill a server with the trainers, each time")
    parser.add_argument(
        "--limit-s", type=float, default=300.0, metavar="S", help="without news for so long, it hangs (default 300)"
    )
    parser.add_argument("--out", type=Path, default=Path("rehearsal"), metavar="DIR", help="for logs and records")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS...", help="as torchrun takes it")


def _module_of(benchmark: str) -> Any:
    """Loaded only when asked for: a server that starts should not wait for TorchRec and plots."""
    return importlib.import_module(f"torch_ecrec.bench.{benchmark}")


def parser(benchmark: str | None = None) -> argparse.ArgumentParser:
    """The command line; the arguments of a benchmark only if it is named."""
    top = argparse.ArgumentParser(prog="torch-ecrec", description="Erasure-coded parameter servers for TorchRec.")
    top.add_argument("--version", action="version", version=f"torch-ecrec {torch_ecrec.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a DLRM, kill servers, compare with the undisturbed run")
    add_code(demo)
    demo.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows (.tsv or .tsv.gz); default: made-up rows")
    demo.add_argument("--steps", type=int, default=240, metavar="N")
    demo.add_argument("--batch-size", type=int, default=256, metavar="B", help="samples per trainer and step")
    demo.add_argument("--trainers", type=int, default=2, metavar="T")
    demo.add_argument(
        "--kill",
        action="append",
        metavar="{server:SLOT,trainer:RANK,coordinator}@STEP[~][+MS]",
        help="SIGKILL the process that hosts SLOT, trainer RANK, or the coordinator, when STEP is complete (MS"
        " milliseconds later), or, with ~, when from STEP on all that former kills took is there again; may be given"
        " again; default server:1 in the middle; 'none' for no kill",
    )
    demo.add_argument(
        "--max-restarts", type=int, default=10, metavar="N", help="of the trainers, by torchrun (default 10)"
    )
    demo.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad", help="of the tables")
    demo.add_argument(
        "--snapshot-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between snapshots of the dense model: lost trainers go on after the last one (default 1)",
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help="also run undisturbed")
    demo.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR")

    chaos = commands.add_parser("chaos", help="kills and hangs at random while it trains: does one bit differ?")
    add_code(chaos)
    chaos.add_argument("--minutes", type=float, default=2.0, metavar="M", help="of disturbed training, about")
    chaos.add_argument("--seed", type=int, default=0, help="of the schedule and of the model")
    chaos.add_argument(
        "--events",
        type=lambda text: text.split(","),
        default=list(CHAOS_EVENTS),
        metavar="EVENT,...",
        help=f"of {', '.join(CHAOS_EVENTS)} (default: all)",
    )
    chaos.add_argument("--data", type=Path, metavar="FILE", help="Criteo rows (.tsv or .tsv.gz); default: made-up rows")
    chaos.add_argument("--batch-size", type=int, default=128, metavar="B", help="samples per trainer and step")
    chaos.add_argument("--trainers", type=int, default=2, metavar="T")
    chaos.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad", help="of the tables")
    chaos.add_argument(
        "--snapshot-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between snapshots of the dense model: lost trainers go on after the last one (default 1)",
    )
    chaos.add_argument("--out", type=Path, default=Path("chaos"), metavar="DIR")

    add_rehearsal(commands.add_parser("rehearse", help="your own script: does it go on to the same bits when killed?"))

    serve = commands.add_parser("serve", help="one server process")
    serve.add_argument("--join", metavar="HOST:PORT", help="the coordinator (default: $TORCH_ECREC_JOIN)")
    serve.add_argument("--servers", type=int, metavar="S", help="insist on this number of slots")
    serve.add_argument("-k", type=int, help="insist on this k")
    serve.add_argument("-r", type=int, help="insist on this r")
    serve.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)

    up = commands.add_parser("up", help="a local cluster: coordinator and servers, supervised")
    add_code(up)
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    up.add_argument("--port", type=port, default=0, help="the coordinator's port (default: a free one)")
    up.add_argument("--no-restart", action="store_true", help="do not start killed servers again")
    up.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the processes' logs (default: to the terminal)"
    )
    up.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)

    status = commands.add_parser("status", help="slots, servers, epoch, step, watermark, rebuild progress, memory")
    status.add_argument("--join", metavar="HOST:PORT", help="the coordinator (default: $TORCH_ECREC_JOIN)")
    status.add_argument("--json", action="store_true")

    coordinator = commands.add_parser("coordinator", help="the coordinator alone")
    add_code(coordinator)
    coordinator.add_argument("--host", default="127.0.0.1")
    coordinator.add_argument("--port", type=port, default=0)
    coordinator.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)

    bench = commands.add_parser("bench", help="measurements").add_subparsers(
        dest="bench", required=True, metavar="WHAT"
    )
    for name, text in BENCHMARKS.items():
        one = bench.add_parser(name, help=text)
        if name == benchmark:
            _module_of(name).add_arguments(one)

    commands.add_parser("warm", help="compile the kernels now, so that the first run does not")
    return top


def run_up(arguments: argparse.Namespace) -> int:
    from torch_ecrec.launch import warm
    from torch_ecrec.supervisor import Supervisor, prepare_logs

    told: list[int] = []  # to end: the signals

    code = code_of(arguments)
    require_int("spares", arguments.spares, 0)
    if arguments.logs is not None:
        prepare_logs(arguments.logs)
    warm()
    on_signals(lambda number, _: told.append(number))  # who waits looks there; an exception might get lost
    with Supervisor(
        code,
        arguments.spares,
        arguments.host,
        arguments.port,
        arguments.without_spare,
        restart=not arguments.no_restart,
        logs=arguments.logs,
        told=lambda: bool(told),
    ) as cluster:
        print(
            json.dumps({"address": list(cluster.address)})
            if arguments.end_with_parent
            else f"cluster at {cluster.join} (TORCH_ECREC_JOIN={cluster.join}); Ctrl-C ends it",
            flush=True,
        )
        while cluster.ended is None and not told:
            time.sleep(0.1)
        if not told:
            print(f"torch-ecrec: the coordinator ended with {cluster.ended}", file=sys.stderr)
            return 4
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    from torch_ecrec.demo.report import format_status
    from torch_ecrec.member import parse_address
    from torch_ecrec.transport.control import request

    settings = Settings.from_environment(**({"join": arguments.join} if arguments.join else {}))
    if settings.join is None:
        raise ValueError("name the coordinator: --join HOST:PORT")
    answer = request(*parse_address(settings.join), {"type": "status"}, timeout_s=min(10.0, settings.give_up_s))
    print(json.dumps(answer, indent=2) if arguments.json else format_status(answer))
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Runs one command; see the module's docstring for what it returns."""
    if arguments.command == "demo":
        from torch_ecrec.demo.run import run_demo

        return run_demo(arguments)
    if arguments.command == "chaos":
        from torch_ecrec.demo.chaos import run_chaos

        return run_chaos(arguments)
    if arguments.command == "rehearse":
        from torch_ecrec.rehearsal.run import run_rehearse

        return run_rehearse(arguments)
    if arguments.command == "bench":
        arguments.out.mkdir(parents=True, exist_ok=True)
        return int(_module_of(arguments.bench).run(arguments))
    if getattr(arguments, "end_with_parent", False):
        end_with_parent()
    from torch_ecrec import launch

    if arguments.command == "warm":
        launch.warm()
        return 0
    if arguments.command == "up":
        return run_up(arguments)
    if arguments.command == "status":
        return run_status(arguments)
    if arguments.command == "serve":
        overrides: dict[str, Any] = {"join": arguments.join} if arguments.join else {}
        wanted = {"k": arguments.k, "r": arguments.r, "slots": arguments.servers}
        return launch.run_server(Settings.from_environment(**overrides), wanted)
    code = code_of(arguments)
    require_int("spares", arguments.spares, 0)
    try:
        return launch.run_coordinator(
            arguments.host,
            arguments.port,
            code,
            arguments.spares,
            arguments.without_spare,
            Settings.from_environment(),
            sys.stdout,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if not arguments.end_with_parent:
            raise OSError(reason) from error
        print(json.dumps({"error": reason}), flush=True)  # for the supervisor, which says it
        return 2


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script."""
    words = sys.argv[1:] if argv is None else argv
    benchmark = words[1] if len(words) > 1 and words[0] == "bench" and words[1] in BENCHMARKS else None
    arguments = parser(benchmark).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if argv is None and arguments.command in ("up", "serve", "coordinator"):
        on_signals(end_at_once)  # until they have something to leave in order: loading torch alone takes seconds
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ClusterError as error:
        return _fail(error, error.exit_code)
    except (ValueError, TypeError, OSError) as error:
        return _fail(error, 2)


def _fail(error: Exception, code: int) -> int:
    with contextlib.suppress(OSError):  # no room for it: the code says enough
        print(f"torch-ecrec: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
