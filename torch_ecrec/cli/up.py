"""`torch-ecrec up`: runs a coordinator and servers on this host, restarted when they die, until this process ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_ecrec.cli.arguments import (
    add_checkpoints,
    add_code,
    add_drain_slow,
    add_end_with_parent,
    add_grace,
    add_host,
    add_tier,
    add_watching,
    checkpoint_arguments,
    code_of,
    port,
    require_experiment,
    require_free,
    require_guarded,
    require_restore,
    require_store,
    require_watchable,
    settings_of,
    tell_of_memory,
    tier_environment,
)
from torch_ecrec.runtime.checks import require_int
from torch_ecrec.runtime.lifetime import on_signals
from torch_ecrec.runtime.threads import Worker, log_error
from torch_ecrec.spec.settings import check_folder

if TYPE_CHECKING:
    from torch_ecrec.processes.supervisor import Supervisor

WHY = {
    7: ": the checkpoint to begin with cannot be read; its log says why, and what to do",
    9: ": members of another cluster look for their coordinator at this address; its log says how to start that",
}
LOOK_S = 1.0  # between two looks at the cluster's verdict
SILENT_S = 10.0  # without an answer of the coordinator: another one should be there by then
HELP = "start a cluster on this host: coordinator and servers, which are restarted when lost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `up`."""
    add_code(parser)
    add_drain_slow(parser)
    add_host(parser)
    parser.add_argument("--port", type=port, default=0, help="the coordinator's port (default: a free one)")
    parser.add_argument("--no-restart", action="store_true", help="do not start killed servers again")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the processes' logs (default: to the terminal)"
    )
    parser.add_argument("--quiet", action="store_true", help="do not print what is wrong, and when it is over")
    add_grace(parser)
    add_tier(parser)
    add_checkpoints(parser)
    add_watching(parser)
    add_end_with_parent(parser, tells=False)


def run(arguments: argparse.Namespace) -> int:
    """Supervises a cluster until it is told to end (0), or its coordinator is gone for good.

    That is 3 where data is lost, 7 where the checkpoint to begin with cannot be read, 9 where members of another
    cluster have found it, and 4 where it cannot be started. Told by SIGTERM, it first waits for its trainers.
    """
    from torch_ecrec.errors import CheckpointError, ClusterUnavailable, DataLoss, OtherCluster
    from torch_ecrec.processes.supervisor import Supervisor, await_trainers, prepare_logs

    told: list[int] = []  # to end: the signals
    over, teller = threading.Event(), None
    require_guarded(arguments)
    require_experiment(arguments)
    require_watchable(arguments)
    code = code_of(arguments)
    require_int("spares", arguments.spares, 0)
    checkpoints = checkpoint_arguments(arguments)  # complains before anything is started
    require_store(arguments)
    events = [] if arguments.events is None else ["--events", str(arguments.events.resolve())]
    settings, tier = settings_of(arguments), tier_environment(arguments)
    if settings.tier:
        check_folder(Path(settings.tier))
    tell_of_memory(settings, code.slots)
    require_restore(arguments)
    require_free(arguments)
    if arguments.logs is not None:
        prepare_logs(arguments.logs)
    from torch_ecrec.processes.launch import warm  # it loads torch: seconds, for a mistake to wait

    warm(tells=not arguments.end_with_parent)
    on_signals(lambda number, _: told.append(number))  # who waits looks there; an exception might get lost
    with Supervisor(
        code,
        arguments.spares,
        arguments.host,
        arguments.port,
        arguments.without_spare,
        restart=not arguments.no_restart,
        logs=arguments.logs,
        environment=tier,
        told=lambda: bool(told),
        coordinator=[
            *checkpoints,
            *["--drain-slow"] * arguments.drain_slow,
            *["--allow-kill"] * arguments.allow_kill,
            *events,
        ],
        http=arguments.http,
    ) as cluster:
        if arguments.end_with_parent:
            http = {} if cluster.http is None else {"http": [cluster.http.host, cluster.http.port]}
            print(json.dumps({"address": list(cluster.address), **http}), flush=True)
        else:
            watched = "" if cluster.http is None else f"; watch it at {cluster.http.url}"
            text = f"cluster at {cluster.join} (TORCH_ECREC_JOIN={cluster.join}){watched}; Ctrl-C ends it"
            print(text, flush=True)
            if arguments.restore and cluster.begins_anew:
                print(f"it begins at step 0: there is no checkpoint at {arguments.checkpoint} yet", flush=True)
            if not arguments.quiet:
                shows = arguments.logs is not None  # else the processes' own lines are there
                teller = Worker(lambda: _tell_changes(cluster, over, shows), "verdict", log_error)
                teller.start()
        while cluster.ended is None and not told:
            time.sleep(0.1)
        over.set()
        if teller is not None:
            teller.join(SILENT_S)  # it may still import, which must not be while the interpreter ends
        if not told:
            why = _why(cluster.ended or 0, arguments.checkpoint, cluster.failed, arguments.restore)
            with contextlib.suppress(OSError):  # no room for it: the code says it, too
                print(f"torch-ecrec: the coordinator ended with {cluster.ended}{why}", file=sys.stderr, flush=True)
            known = (DataLoss.exit_code, CheckpointError.exit_code, OtherCluster.exit_code)
            return cluster.ended if cluster.ended in known else ClusterUnavailable.exit_code
        if told == [signal.SIGTERM]:
            await_trainers(cluster.status, settings.grace_s, lambda: len(told) > 1 or cluster.ended is not None)
    return 0


def _why(code: int, store: str, failed: str, restored: str = "") -> str:
    """Returns what an exit code of a coordinator means, to end a sentence.

    Args:
        store: where checkpoints are, or "".
        failed: see `Supervisor.failed`: what is to be mended before anything is begun again.
        restored: `--restore` of this cluster, or "".
    """
    from torch_ecrec.errors import DataLoss
    from torch_ecrec.storage.catalog import place_of

    if code != DataLoss.exit_code:
        return WHY.get(code, "")
    before = f" ({failed})" if failed else ""
    place, _ = place_of(restored, store)
    if store:
        other = f"; if none is there yet, with --restore {restored}" if place not in ("", store) else ""
        return f": data is lost{before}. Begin with the newest checkpoint: --checkpoint {store} --restore newest{other}"
    if restored:
        return f": data is lost{before}, and no checkpoints were kept. Begin with --restore {restored}, as before"
    return (
        f": data is lost{before}, and no checkpoints were kept (--checkpoint URL --checkpoint-every N): begin with what"
        " the script itself has saved, or from the beginning"
    )


def _tell_changes(cluster: Supervisor, over: threading.Event, shows: bool) -> None:
    """A thread: says at the terminal what is wrong with the cluster, what to do, and when it is over.

    `shows`: while slots get their records, how far they are, in a line that is written over.
    """
    from torch_ecrec.errors import ClusterError
    from torch_ecrec.observe.changes import Changes
    from torch_ecrec.observe.progress import Progress
    from torch_ecrec.observe.verdict import Finding, Verdict, verdict_of
    from torch_ecrec.observe.words import format_filling
    from torch_ecrec.transport.whereabouts import ask_status

    changes, heard_s = Changes(), time.monotonic()
    with Progress("", 0) as line:
        while not over.wait(LOOK_S):
            try:
                status = ask_status(cluster.address, SILENT_S)
                verdict, heard_s = verdict_of(status, cluster.join), time.monotonic()
                line.show(format_filling(status) if shows else "")
            except ClusterError as error:  # another one is being started, perhaps
                if time.monotonic() < heard_s + SILENT_S:
                    continue
                remedy = "nothing, if another one is there soon: training does not need it until somebody is lost"
                silent = Finding("ERROR", "silent", f"the coordinator does not answer: {error}", remedy)
                verdict = Verdict("ERROR", silent.what, [silent], [])
            for text in changes.lines(verdict, time.monotonic()):
                if over.is_set():
                    return
                at = "" if text.startswith(" ") else f"{time.strftime('%H:%M:%S')} "
                line.clear()
                with contextlib.suppress(OSError):  # no room for it now: for the next one, perhaps
                    print(f"{at}{text}", file=sys.stderr, flush=True)
