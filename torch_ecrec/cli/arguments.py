"""Command-line arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch_ecrec.records.optimizers import NAMES as OPTIMIZERS
from torch_ecrec.runtime.addresses import parse_host
from torch_ecrec.runtime.checks import require
from torch_ecrec.spec.job import PROTECTIONS, CodeSpec
from torch_ecrec.spec.settings import (
    TIER_FOR,
    WITHOUT_SPARE,
    Beyond,
    CheckpointPolicy,
    CheckpointSaver,
    Settings,
    allow_insecure_rpc,
    check_folder,
    insecure_rpc,
    new_run,
    own_secret,
)
from torch_ecrec.web.place import Place, parse_place, require_packages, why_open

if TYPE_CHECKING:  # it loads torch: not to read a command line
    from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings

STORE_S = 60.0  # for one small file, at the start
QUIET_S = 2.0  # in which nothing is said of what is waited for
ASK_S = 0.5  # pause between two looks of who waits for something
ASKED_S = 10.0  # until the first answer


def port(text: str) -> int:
    """Parses a TCP port; 0 stands for a free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a number up to 65535, got {text!r}")
    return int(text)


def host(text: str) -> str:
    """Parses an address at which others reach this host."""
    try:
        return parse_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_host(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say where a coordinator listens."""
    parser.add_argument(
        "--host",
        type=host,
        default="127.0.0.1",
        help="address of this host to listen on, which is told to others (default 127.0.0.1); one that other hosts"
        " reach needs a secret, TORCH_ECREC_SECRET or TORCH_ECREC_SECRET_FILE",
    )
    parser.add_argument(
        "--insecure-rpc",
        action="store_true",
        help="with TORCH_ECREC_TRANSPORT=rpc and other hosts: torch's RPC runs what it is sent by whoever reaches it",
    )


def require_guarded(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that a coordinator which other hosts can reach is guarded by a secret.

    Raises:
        ValueError: there is no secret; or torch.distributed.rpc is to listen there, which asks for none.
    """
    from torch_ecrec.runtime.addresses import is_loopback
    from torch_ecrec.transport.secret import why_open

    if arguments.insecure_rpc:
        allow_insecure_rpc()
    if is_loopback(arguments.host):
        return
    require(bool(own_secret()), f"--host {arguments.host}: {why_open(arguments.host)}")
    rpc = Settings.from_environment().transport == "rpc" and not insecure_rpc()
    require(
        not rpc,
        f"--host {arguments.host} with TORCH_ECREC_TRANSPORT=rpc: torch's RPC runs what it is sent by whoever reaches"
        " it. Take sockets, which ask for the secret, or say --insecure-rpc, on a network that you trust",
    )


def add_code(parser: argparse.ArgumentParser) -> None:
    """Adds the number of servers, and the code that protects their records. `code_of` reads them."""
    parser.add_argument("--servers", type=int, default=3, metavar="S", help="slots, one server each (default 3)")
    parser.add_argument("--spares", type=int, default=1, metavar="P", help="spare servers, without a slot (default 1)")
    parser.add_argument("-k", type=int, default=2, help="data records in a stripe (default 2)")
    parser.add_argument("-r", type=int, default=1, help="parity records in a stripe: losses tolerated (default 1)")
    parser.add_argument(
        "--protection", choices=PROTECTIONS, default="parity", help="whether records have parity (default parity)"
    )
    parser.add_argument(
        "--without-spare",
        choices=WITHOUT_SPARE,
        default="survivor",
        help="who takes the slots of a lost server when there is no spare: a survivor, or the process that is started"
        " in its place (wait); default survivor",
    )


def add_drain_slow(parser: argparse.ArgumentParser) -> None:
    """Adds what to do about a slow server."""
    parser.add_argument(
        "--drain-slow",
        action="store_true",
        help="move the slots of a server that slows training to a spare (default: only name the server)",
    )


def code_of(arguments: argparse.Namespace) -> CodeSpec:
    """Returns the code that `add_code` has read. Raises ValueError if there is no such code."""
    require(arguments.servers >= 1, f"`--servers` must be at least 1, got {arguments.servers}")
    return CodeSpec(arguments.servers, arguments.k, arguments.r, arguments.protection)


def require_experiment(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that the experiment that the environment names can be made with such a cluster.

    Raises:
        ValueError: there is no such experiment, or it cannot; says why.
    """
    if not (experiment := Settings.from_environment().experiment):
        return
    from torch_ecrec.coordinator.settings import check_experiment  # it loads torch: seconds

    check_experiment(experiment, code_of(arguments), checkpoints_of(arguments))


def interval(text: str) -> tuple[int, float]:
    """Parses an interval, "200" steps or "90s", "10m", "2h", to steps and seconds, of which one is 0."""
    seconds = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1:]) if text[-1:] in seconds else (text, "")
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not (0 < value < 1e9) or (not unit and value != int(value)):
        raise argparse.ArgumentTypeError(f"an interval is steps (200) or a time (90s, 10m, 2h), got {text!r}")
    return (0, value * seconds[unit]) if unit else (int(value), 0.0)


def add_checkpoints(parser: argparse.ArgumentParser, restore: bool = True) -> None:
    """Adds the checkpoints that a cluster writes, and the one it begins with. `checkpoints_of` reads them.

    Args:
        parser: gets them.
        restore: whether a cluster may be told to begin with one.
    """
    group = parser.add_argument_group("checkpoints", "kept outside of the cluster, for what parity does not survive")
    group.add_argument(
        "--checkpoint",
        metavar="URL",
        default="",
        help="where checkpoints are written: a folder, or what fsspec knows (s3://...)",
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="N|TIME",
        type=interval,
        help="how often: every N steps (200) or a time (90s, 10m, 2h)",
    )
    group.add_argument("--checkpoint-keep", metavar="N", type=int, default=3, help="how many are kept (default 3)")
    group.add_argument(
        "--checkpoint-policy",
        choices=get_args(CheckpointPolicy),
        default="full",
        help="full: all records each time (default); one-shot: what has changed since the last full one; consecutive:"
        " since the last one; intermittent: one-shot, and full when that is expected to cost less",
    )
    group.add_argument(
        "--checkpoint-bytes-per-s",
        metavar="B",
        type=float,
        help="the most that each server writes (default: 5e6 for each core of its machine, 1e8 at most; 0: no limit)",
    )
    group.add_argument(
        "--checkpoint-timeout",
        metavar="S",
        type=float,
        default=3600.0,
        help="seconds after which an unfinished checkpoint is given up, and another is tried (default 3600)",
    )
    group.add_argument(
        "--checkpoint-zstd",
        metavar="LEVEL",
        type=int,
        default=0,
        help="compress at this level (1 to 19; default 0: no compression)",
    )
    group.add_argument(
        "--checkpoint-bits",
        type=int,
        choices=(0, 2, 3, 4, 8),
        default=0,
        help="quantise weights, row by row, to this many bits (default 0: exact); `torch-ecrec checkpoints` shows the"
        " error; optimizer state stays exact",
    )
    _add_beyond(group.add_argument)
    if not restore:
        parser.set_defaults(restore="", run="", again=False, began_with="")
        return
    # a supervisor's: what all coordinators of one run are told, and those that take the place of one that died
    group.add_argument("--run", metavar="WORD", default="", help=argparse.SUPPRESS)
    group.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--began-with", metavar="FOLDER", default="", help=argparse.SUPPRESS)
    group.add_argument(
        "--restore",
        metavar="URL[@STEP]|newest",
        default="",
        help="begin with a checkpoint: the newest at URL, or that of STEP; the word newest: with the newest at the URL"
        " of --checkpoint, or at step 0 if there is none",
    )


def _add_beyond(add: Callable[..., object]) -> None:
    add(
        "--beyond",
        choices=get_args(Beyond),
        default="stop",
        help="what to do when more is lost than parity can repair; stop: end (default); checkpoint: the whole job goes"
        " back to the newest one; partial: only lost slots go back, which is NOT EXACT (docs/checkpoints.md)",
    )
    add(
        "--most-lost-samples",
        metavar="PORTION",
        type=float,
        default=0.1,
        help="share of the run's samples (0 to 1, default 0.1): if --beyond partial would lose more, the whole job goes"
        " back",
    )
    add(
        "--checkpoint-saver",
        choices=get_args(CheckpointSaver),
        default="everything",
        help="which rows are saved between two checkpoints, for --beyond partial; everything: none (default); mfu:"
        " those used most; ssu: a sample of those used; scar: those changed most",
    )
    add(
        "--checkpoint-portion",
        metavar="R",
        type=float,
        default=0.125,
        help="share of each slot's rows in such a save; a save is made every R-th part of --checkpoint-every (default"
        " 0.125)",
    )


def checkpoints_of(arguments: argparse.Namespace) -> CheckpointSettings:
    """Returns what `add_checkpoints` has read, and makes folders of this machine whole paths in it.

    Raises:
        ValueError: the arguments contradict each other.
    """
    from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings
    from torch_ecrec.storage.location import folder_of, require_place

    every_steps, every_s = arguments.checkpoint_every or (0, 0.0)
    require(
        bool(arguments.checkpoint) == bool(arguments.checkpoint_every),
        "--checkpoint URL and --checkpoint-every N go together: where checkpoints are kept, and how often",
    )
    for name in ("checkpoint", "restore"):
        url = getattr(arguments, name)
        if url and url != "newest":
            require_place(url.partition("@")[0] if name == "restore" else url)
            if (folder := folder_of(url)) is not None:  # servers and trainers may have another working directory
                setattr(arguments, name, str(folder))
    return CheckpointSettings(
        url=arguments.checkpoint,
        every_steps=every_steps,
        every_s=every_s,
        keep=arguments.checkpoint_keep,
        policy=arguments.checkpoint_policy,
        bytes_per_s=arguments.checkpoint_bytes_per_s,
        timeout_s=arguments.checkpoint_timeout,
        beyond=arguments.beyond,
        most_lost_samples=arguments.most_lost_samples,
        saver=arguments.checkpoint_saver,
        portion=arguments.checkpoint_portion,
        encoding=(("zstd", arguments.checkpoint_zstd), ("bits", arguments.checkpoint_bits)),
        run=arguments.run or new_run(),
    )


def require_store(arguments: argparse.Namespace, patient: bool = False) -> None:
    """Checks, before anything starts, that checkpoints can be written where they are to be kept.

    Args:
        patient: a place that may be had again later is only told of: others may train meanwhile.

    Raises:
        CheckpointError: they cannot, or it is not known within `STORE_S`.
    """
    from torch_ecrec.errors import StoreUnavailable
    from torch_ecrec.storage.location import require_writable
    from torch_ecrec.storage.store_probe import StoreProbe

    if url := arguments.checkpoint:
        limit_s = min(STORE_S, arguments.checkpoint_timeout)
        log = logging.getLogger(__name__)
        try:
            StoreProbe(lambda: require_writable(url), url, limit_s, log.warning).look()
        except StoreUnavailable as error:
            if not patient or isinstance(error.__cause__, (PermissionError, NotADirectoryError)):
                raise
            log.warning("checkpoints cannot be written now, and will be tried: %s", error)


def require_restore(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that the checkpoint of `--restore` is there.

    Raises:
        CheckpointError: it is not, or it is not known within `STORE_S`.
        ValueError: the newest is wanted, and no place is named.
    """
    from torch_ecrec.storage.catalog import NEWEST, Catalog, place_of
    from torch_ecrec.storage.store_probe import StoreProbe

    place, step = place_of(arguments.restore, arguments.checkpoint)
    if not place or arguments.restore == NEWEST:  # then there may be none
        return
    log = logging.getLogger(__name__)
    StoreProbe(lambda: Catalog(place).wanted(step), place, STORE_S, log.warning).look()


def require_free(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that nobody listens at `--port` and `--http`. Raises OSError: somebody does."""
    from torch_ecrec.transport.control import listen

    if arguments.port:
        listen(arguments.host, arguments.port).close()
    if arguments.http is not None and arguments.http.port:
        try:
            listen(arguments.http.host, arguments.http.port).close()
        except OSError as error:
            raise OSError(error.errno, f"--http: {error.strerror}") from None


def checkpoint_arguments(arguments: argparse.Namespace) -> list[str]:
    """Returns what `add_checkpoints` has read as arguments of a coordinator's command line."""
    checkpoints_of(arguments)
    found = ["--restore", arguments.restore] if arguments.restore else []
    if not arguments.checkpoint:
        return found
    steps, seconds = arguments.checkpoint_every
    found += ["--checkpoint", arguments.checkpoint, "--checkpoint-every", f"{seconds}s" if seconds else str(steps)]
    found += ["--beyond", arguments.beyond, "--most-lost-samples", str(arguments.most_lost_samples)]
    for name in ("keep", "policy", "bytes_per_s", "timeout", "zstd", "bits", "saver", "portion"):
        if (value := getattr(arguments, f"checkpoint_{name}")) is not None:
            found += [f"--checkpoint-{name.replace('_', '-')}", str(value)]
    return found


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds the data on which the demonstration's model is trained."""
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="Criteo rows (.tsv or .tsv.gz); default: made-up rows"
    )


def add_training(parser: argparse.ArgumentParser) -> None:
    """Adds how the demonstration's model is trained, except for the batch size."""
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad", help="optimizer of the tables")
    parser.add_argument(
        "--ids",
        type=int,
        default=1,
        metavar="N",
        help="ids in a bag, on average: a sample's own and those of samples before it (default 1)",
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the dense layers are; cuda: trainers take the GPUs in turn, servers stay on the CPU (default cpu)",
    )
    parser.add_argument(
        "--snapshot-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between snapshots of the dense model; lost trainers go on after the last one (default 1)",
    )


def add_join(parser: argparse.ArgumentParser) -> None:
    """Adds the cluster that a process joins or asks."""
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="address of the coordinator, or etcd://... for the one that leads (default: $TORCH_ECREC_JOIN)",
    )


def asks(arguments: argparse.Namespace) -> tuple[Settings, str]:
    """Returns the settings, and where the coordinator is that is asked (`add_join`).

    Raises:
        ValueError: nobody says where, or the secret is none.
    """
    settings = settings_of(arguments)
    own_secret()
    if settings.join is None:
        raise ValueError("name the coordinator: --join HOST:PORT, or --join etcd://HOST:PORT/NAME")
    return settings, settings.join


@contextlib.contextmanager
def told_to_wait(join: str, limit_s: float) -> Iterator[None]:
    """Says that nobody has answered yet, if the block lasts for `QUIET_S`: who waits should know for what.

    Args:
        join: where the coordinator is looked for.
        limit_s: for how long.
    """

    def say() -> None:
        with contextlib.suppress(OSError):
            print(
                f"torch-ecrec: nobody has answered at {join} yet; asks for {limit_s:g} s", file=sys.stderr, flush=True
            )

    late = threading.Timer(QUIET_S, say)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def asker(join: str) -> Callable[..., dict[str, Any]]:
    """Returns what asks whoever leads: `ask(word, limit_s, led=False)` gives the answer to a message.

    Args:
        join: where the coordinator is looked for.

    With `led` the message says whom it is for: another one, that leads by then, refuses it.
    """
    from torch_ecrec.transport.control import request
    from torch_ecrec.transport.etcd import Leader
    from torch_ecrec.transport.whereabouts import reach, whereabouts

    where = whereabouts(join)

    def ask(word: Mapping[str, Any], limit_s: float, led: bool = False) -> dict[str, Any]:
        def said(leader: Leader, seconds: float) -> dict[str, Any]:
            return request(*leader.address, {**word, **({"led": leader.revision} if led else {})}, seconds)

        with told_to_wait(join, limit_s):
            return reach(where, limit_s, said)[0]

    return ask


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Adds the time for which a process that is told to end still serves its trainers."""
    parser.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        help="how long it waits, after SIGTERM, for trainers, which may save (default: $TORCH_ECREC_GRACE_S, or 25); a"
        " second signal, or Ctrl-C, ends it at once",
    )


def http_place(text: str) -> Place:
    """Parses where to serve HTTP."""
    try:
        return parse_place(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_http(add: Callable[..., object]) -> None:
    """Adds where the live page is served. `add`: an argument to a parser, or to a group. `require_http` checks it."""
    add(
        "--http",
        metavar="[HOST:]PORT",
        type=http_place,
        help="where the coordinator serves metrics for Prometheus, its status, and a live page (needs"
        " torch-ecrec[http]); a port alone is on 127.0.0.1, and 0 takes a free one; an address that other hosts reach"
        " needs a secret",
    )


def add_watching(parser: argparse.ArgumentParser) -> None:
    """Adds what shows a cluster to people and to Prometheus. `require_watchable` checks it."""
    group = parser.add_argument_group("watching", "docs/watching.md")
    add_http(group.add_argument)
    group.add_argument(
        "--events",
        metavar="FILE",
        type=Path,
        help="file for the coordinator's events, a line of JSON each; at 10 MiB it is renamed to FILE.1",
    )
    group.add_argument(
        "--allow-kill",
        action="store_true",
        help="let the live page (--http) kill a server or a trainer, to see what happens (default: it is refused)",
    )


def require_watchable(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that what `add_watching` has read can be done.

    Raises:
        ValueError: a package is not installed; or other hosts would get there, and there is no secret.
        OSError: nobody can write the file for events.
    """
    from torch_ecrec.observe.event_log import require_writable

    require_http(arguments)
    if arguments.events is not None:
        require_writable(arguments.events)


def require_http(arguments: argparse.Namespace) -> None:
    """Checks, before anything starts, that `--http` and `--allow-kill` can be done. Raises ValueError: says why not."""
    if arguments.http is not None:
        require_packages()
        require(arguments.http.loopback or bool(own_secret()), why_open(arguments.http))
    require(
        arguments.http is not None or not arguments.allow_kill,
        "--allow-kill is of the live page, and none is served: add --http PORT",
    )


def size(text: str) -> int:
    """Parses a number of bytes: 268435456, 256MiB, 2GiB, 1.5GB."""
    units = {
        "KIB": 1 << 10,
        "MIB": 1 << 20,
        "GIB": 1 << 30,
        "TIB": 1 << 40,
        "KB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
    }
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    factor = 1 if found is not None and not found[2] else units.get(found[2].upper()) if found is not None else None
    if found is None or not factor or float(found[1]) * factor < 1:
        raise argparse.ArgumentTypeError(
            f"a size is bytes (268435456), or with a unit (256MiB, 2GiB, 8GB), got {text!r}"
        )
    return int(float(found[1]) * factor)


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Adds where servers keep records that do not fit in memory. `settings_of` reads it."""
    group = parser.add_argument_group("tables larger than memory", "docs/tiers.md")
    group.add_argument(
        "--tier",
        metavar="DIR",
        type=Path,
        help="folder on a fast local disk for records that do not fit in --memory; its files have no names, and end"
        " with the process",
    )
    group.add_argument(
        "--memory", metavar="SIZE", type=size, help="memory of each server for records and logs: 2GiB, 500MB"
    )
    group.add_argument(
        "--tier-for",
        choices=TIER_FOR,
        default=None,
        help="what goes to the tier: all records (default), or parities alone, for which no step waits",
    )
    group.add_argument(
        "--tier-keep",
        metavar="TABLE,...",
        default=None,
        help="tables whose records go to the disk last, when no others are left to go",
    )


def _tier_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that `add_tier` has read. Raises ValueError if they are not right: says how."""
    found: dict[str, Any] = {}
    if arguments.tier is not None:
        found["tier"] = str(arguments.tier.resolve())  # servers may have another working directory
    if arguments.memory is not None:
        found["tier_memory_bytes"] = arguments.memory
    if arguments.tier_for is not None:
        found["tier_for"] = arguments.tier_for
    if arguments.tier_keep is not None:
        found["tier_keep"] = arguments.tier_keep
    require(
        ("tier" in found) == ("tier_memory_bytes" in found),
        "--tier DIR and --memory SIZE go together: where records go, and how much memory they may take",
    )
    require("tier" in found or not found, "--tier-for and --tier-keep go with --tier DIR and --memory SIZE")
    return found


def tier_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the variables that give servers what `add_tier` has read. Raises ValueError if they are not right."""
    found = _tier_settings(arguments)
    if "tier" in found:
        check_folder(Path(found["tier"]))
    return {f"TORCH_ECREC_{name.upper()}": str(value) for name, value in found.items()}


def tell_of_memory(settings: Settings, servers: int, root: Path = Path("/")) -> None:
    """Says on standard error if servers with a tier may take more memory than is left here: Linux kills without a word.

    Args:
        settings: what each may take.
        servers: so many begin here.
        root: where /proc and /sys are.
    """
    from torch_ecrec.observe.words import size as words
    from torch_ecrec.processes.footprint import room

    (limit, used), wanted = room(root), servers * settings.tier_memory_bytes
    if limit and wanted > limit - used:
        each = f"{servers} servers may take {words(wanted)}" if servers > 1 else f"this server may take {words(wanted)}"
        print(
            f"torch-ecrec: {each} (--memory), and {words(limit - used)} of the {words(limit)} of this host, or of its"
            " control group, are left: once their records fill it, Linux kills them (out of memory) without a word."
            " Give a smaller --memory, or more memory",
            file=sys.stderr,
            flush=True,
        )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Returns the settings of the environment, overridden by the command line (`add_join`, `add_grace`, `add_tier`)."""
    join, grace_s = getattr(arguments, "join", None), getattr(arguments, "grace", None)
    overrides: dict[str, Any] = {"join": join} if join else {}
    if hasattr(arguments, "tier"):
        overrides |= _tier_settings(arguments)
    return Settings.from_environment(**overrides, **({} if grace_s is None else {"grace_s": grace_s}))


def add_end_with_parent(parser: argparse.ArgumentParser, tells: bool) -> None:
    """Adds the argument by which a supervisor starts a process that is to end with it (`main` looks for it).

    Args:
        parser: gets it.
        tells: then the supervisor tells it, and no signal does.
    """
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(parent_tells=tells)
