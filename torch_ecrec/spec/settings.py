"""The settings of one process: time limits, sizes and choices.

The only module that reads environment variables (`Settings.from_environment`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import os
import re
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch_ecrec.errors import TierFailed
from torch_ecrec.runtime.checks import Flag, require, require_int, take_fields
from torch_ecrec.spec.experiment import Experiment

_NUMBERS: dict[type, Callable[[str], object]] = {int: int, float: float}
STANDS_S, STANDS_BEFORE_CHECKPOINT_S = 3600.0, 60.0  # `standstill_s`, where it is not given
REHEARSALS = "rehearsal"  # the folder where rehearsals keep logs and leave marks, unless they are told another
WITHOUT_SPARE = ("survivor", "wait")  # who gets a lost slot when there is no spare
TRANSPORTS = ("sockets", "rpc")  # what carries messages between trainers and servers
CHAOS_EVENTS = ("kill-server", "kill-trainer", "kill-coordinator", "stop-server", "stop-trainer")
SPOILS = ("look", "drop", "twice", "back")  # what is done to a step on purpose; see `server/spoiling.py`
FLIP_EVENTS = ("flip-record", "flip-parity")  # bits that flip in servers' memory
TIER_EVENTS = ("disk-error", "disk-full", "disk-slow", "flip-tier")  # of the disks under servers' records
BEYOND_EVENTS = ("kill-all", "kill-beyond-r")  # more than parity repairs: all go back to a checkpoint
STORE_EVENTS = ("full-disk", "slow-store", "failing-store")  # of where checkpoints are kept
HOST_EVENTS = ("kill-host", "cut", "cut-trainers", "slow-link", "lossy-link")  # of hosts and of what is between them
LEADER_EVENTS = ("kill-leader", "stop-leader", "kill-etcd", "stop-etcd")  # of coordinators that stand by
JOB_EVENTS = ("freeze-all", "second-job")  # of the whole job: nobody dies, and nobody may be lost
ALONE_EVENTS = ("term-all",)  # of a job with a cluster of its own
WORLD_EVENTS = ("blip", "unplug-coordinator", "wrong-coordinator")  # likewise, of the hosts around it
REBUILD_BYTES_PER_S = min(40e6 * len(os.sched_getaffinity(0)), 400e6)
MOVE_BYTES_PER_S = min(15e6 * len(os.sched_getaffinity(0)), 100e6)
CheckpointPolicy = Literal["full", "one-shot", "consecutive", "intermittent"]  # see `storage/policy.py`
CheckpointSaver = Literal["everything", "mfu", "ssu", "scar"]  # what is saved between checkpoints; `records/savers.py`
Beyond = Literal["stop", "checkpoint", "partial"]  # what follows when more is lost than can be repaired
NONE = "none"  # in place of the name of the checkpoint that a run began with
WIRES = ("float32", "bfloat16")  # how rows and gradients travel between trainers and servers
TIER_FOR = ("all", "parities")
RECORD_CHECKS = ("background", "use", "none")  # when a server looks for damage to its records
EVALUATION_WIRES = ("wire", "int8")  # how rows travel that get no gradients
POOLINGS = ("parts", "whole", "rows")  # of which tables servers make sums of long bags, most first
LIMIT_MOST_S = 1e6  # 11 days, of any time limit: the system waits for 24 days at most, and takes more for less
LOOK_AHEAD_MOST = 16  # batches that are drawn early, of an attached reader
LOOK_AHEAD_AUTO = 4  # likewise, where that is left to us and servers want hints


PREFIX = "TORCH_ECREC_"
OTHERS = {
    "SECRET": "the cluster's secret, of 16 characters or more. Every connection proves that both sides know it. It is"
    " needed wherever other hosts can connect.",
    "SECRET_FILE": "a file with the secret, in place of TORCH_ECREC_SECRET.",
    "INSECURE_RPC": "1: torch.distributed.rpc may listen where other hosts reach it. It runs whatever it is sent.",
    "REHEARSED": f'the folder with the marks of scripts that were rehearsed; by default "{REHEARSALS}".',
    "RECORD": "set by `torch-ecrec rehearse`: where trainers record their steps.",
    "LOSS_MARK": "set by `torch-ecrec run`: by this file trainers tell it that data is lost, or they are refused.",
}  # read elsewhere here; a test of this package has its own names, which begin with `TEST_`


def environment_of(names: Iterable[str]) -> dict[str, str]:
    """Returns those of these environment variables that are set: they are other libraries'."""
    return {name: os.environ[name] for name in names if name in os.environ}


def new_run() -> str:
    """Returns a new random word that names one run of a cluster."""
    return uuid.uuid4().hex[:8]


def torchrun_launch() -> str:
    """Returns the id of the torchrun that started this process (`--rdzv-id`), the same for all nodes and restarts.

    It is "" without torchrun, and if torchrun was given no id: every such torchrun says "none".
    """
    word = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if word == "none" else word


def loss_mark() -> Path | None:
    """Returns the file by which trainers tell `torch-ecrec run`, which restarts them, why that is in vain; or None."""
    place = os.environ.get("TORCH_ECREC_LOSS_MARK")
    return Path(place) if place else None


def restarts() -> int:
    """Returns how often torchrun has restarted the trainers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def shares_store() -> bool:
    """Returns whether torchrun may start these trainers again, with the store of those before in which they meet.

    It says what they meet in by a variable; TORCH_DISABLE_SHARE_RDZV_TCP_STORE, told to torchrun, is what changes that.
    """
    again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def record_folder() -> Path | None:
    """Returns the folder in which trainers record their steps, set by `torch-ecrec rehearse`; or None."""
    folder = os.environ.get("TORCH_ECREC_RECORD")
    return Path(folder) if folder else None


def rehearsed_folder() -> Path:
    """Returns the folder with the marks of scripts whose rehearsals came out equal."""
    return Path(os.environ.get("TORCH_ECREC_REHEARSED") or REHEARSALS)


def own_secret() -> bytes:
    """Returns the secret that all processes of the cluster share; b"" if there is none.

    It is TORCH_ECREC_SECRET, or the contents of the file TORCH_ECREC_SECRET_FILE without white space at its ends.

    Raises:
        ValueError: it is too short, both are given, or the file cannot be read.
    """
    text, file = os.environ.get("TORCH_ECREC_SECRET", ""), os.environ.get("TORCH_ECREC_SECRET_FILE", "")
    require(not (text and file), "give TORCH_ECREC_SECRET or TORCH_ECREC_SECRET_FILE, not both")
    where = "TORCH_ECREC_SECRET"
    if file:
        where = f"TORCH_ECREC_SECRET_FILE ({file})"
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        require(bool(text.strip()), f"{where} is empty")
    secret = text.strip().encode()
    enough = f"{where} must have {SECRET_LEAST} characters or more, got {len(secret)}: `openssl rand -hex 32` makes one"
    require(not secret or len(secret) >= SECRET_LEAST, enough)
    return secret


def insecure_rpc() -> bool:
    """Returns whether torch.distributed.rpc may listen where other hosts reach it. It runs whatever it is sent."""
    text = os.environ.get(INSECURE_RPC, "0")
    require(text in ("0", "1"), f"{INSECURE_RPC} must be 0 or 1, got {text!r}")
    return text == "1"


def allow_insecure_rpc() -> None:
    """Allows what `insecure_rpc` tells, in this process and those that it starts."""
    os.environ[INSECURE_RPC] = "1"


@contextlib.contextmanager
def trusted_network() -> Iterator[None]:
    """Gives this process, and those that it starts, a secret within the block, and allows torch's RPC between hosts.

    For hosts that nobody else can reach (`testing/hosts.py`).
    """
    names = ("TORCH_ECREC_SECRET", INSECURE_RPC)
    before = {name: os.environ.get(name) for name in names}
    if not own_secret():
        os.environ["TORCH_ECREC_SECRET"] = secrets.token_hex(32)
    allow_insecure_rpc()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_unless_set(name: str, value: Callable[[], str]) -> None:
    """Sets an environment variable that a library reads, unless the user has set it."""
    if name not in os.environ:
        os.environ[name] = value()


def ask_name_servers_briefly() -> None:
    """Makes the C library wait for a silent name server for 1 s, twice, instead of 5 s; in child processes, too.

    Torch's TCPStore looks up the name of every address that connects, and serves nobody meanwhile. Call it before the
    process looks up its first name: the C library reads the setting then.
    """
    set_unless_set("RES_OPTIONS", lambda: "timeout:1 attempts:2")


SECRET_LEAST = 16
INSECURE_RPC = "TORCH_ECREC_INSECURE_RPC"
DOMAIN_LEVELS_MOST, DOMAIN_MOST = 8, 200
LAUNCH_MOST = 200


@dataclass(frozen=True)
class Settings:
    """The time limits and sizes of one process, in seconds, bytes and steps as the names say.

    Args:
        join: where the cluster's coordinator is, "HOST:PORT", or "etcd://HOST:PORT,.../NAME" where one of several
            leads. None: the first trainer starts a cluster of its own.
        window_steps: how many steps a trainer may run ahead of what is acknowledged.
        call_timeout_s: a remote call without an answer after this time counts as unknown, and is made again.
        give_up_s: a lookup or push without progress for this time ends with `ClusterUnavailable`.
        transport: "sockets", connections of our own, or "rpc", torch.distributed.rpc. The coordinator decides for its
            whole cluster.
        wire: "bfloat16" halves what lookups and pushes send: rows are rounded on their way to a trainer, and its
            gradients on their way back. Records stay float32, and recovery stays exact.
        evaluation_wire: "int8" quantises rows on their way to lookups without gradients, those of a model in `eval()`
            under `torch.no_grad()`: a byte for each weight, and 8 for each row. Each weight is then within 1/510 of its
            row's range. "wire": as in training.
        pooling: who makes the sums of long bags. "whole": the server, of a table that is whole on one slot; of others
            rows travel, and the trainer sums them. "parts": of others, too, if bags have two ids or more for each of
            their slots: each sums the ids that it has, and the trainer adds these parts. That is less to send where
            few ids repeat. Other codes and numbers of slots then round otherwise; losses change no bit. "rows": the
            trainer.
        heartbeat_s: a member reports what `torch-ecrec status` shows of it this often. It says that it lives four times
            a second, or more often if this is less.
        lease_s: a member that the coordinator has not heard of for this time counts as lost. It counts as lost earlier
            if others cannot reach its host, and later if the loss would be more than the code repairs (`standstill_s`).
            When it wakes up, nothing that it did since counts; a server comes back as a spare.
        standstill_s: silent members may come back with all that they hold. If more are silent than the code could
            repair, training stands still and waits for them for this time. 0: a minute where a checkpoint can take over
            (`--beyond`), else an hour. The coordinator decides for its cluster. A member also looks for this time for a
            coordinator from which nothing comes back, not even that nobody listens there.
        grace_s: `torch-ecrec up`, `serve` and `coordinator` go on for at most this time after SIGTERM while trainers
            are there, which may have got it, too, and save. Systems that end jobs by force usually wait longer (30 s).
        failure_domain: what a server is lost together with, the widest first: "row1/rack3/host17". "": the name of its
            host. Slots of one coding group are kept in different domains, if there are enough.
        shared_memory_bytes: the most memory that this process shares with others of its host, which then read large
            tensors there rather than from a socket; 0: none. With the socket transport, on Linux.
        keep_freed_bytes: the most freed memory that this process keeps for the next step; 0 leaves the C library's
            allocator as it is.
        spare_memory: 1: a server without a slot keeps memory for one ready, so that a lost slot is rebuilt there with
            less work, if an eighth of the memory stays free. 0: it does not.
        rebuild_chunk_bytes: bytes of records that one background rebuild request asks for.
        rebuild_bytes_per_s: limit of what the rebuild of one slot reads, which is k bytes for each lost byte; 0: none,
            not of links either. By default 40 MB/s for each core of the machine, 400 MB/s at most: about 4 % of the
            cores; and half of what its links carry, as it finds. Reads that a request waits for count, but are never
            delayed.
        move_bytes_per_s: limit for copying a slot that moves to another server (`torch-ecrec drain`); 0: none, not
            of links either. By default 15 MB/s for each core of the machine, 100 MB/s at most, and half of what its
            links carry: nothing is lost meanwhile, so a move may take longer than a rebuild, and training keeps its
            pace. For what has changed while it was copied, only half of the links counts.
        record_checks: how a server finds damage. "background": every record and parity has a seal, a checksum of 4
            bytes, and is checked now and then (`scrub_bytes_per_s`). "use": it is also checked whenever a step or an
            evaluation reads or changes it, so that no step uses damaged records. "none": there are no seals, and damage
            is not noticed.
        scrub_bytes_per_s: how much of its records and parities a server checks in the background; 0: nothing, and
            damage is found only where records are read for a repair or a checkpoint.
        flip_on_signal: 1: SIGUSR1 flips a bit of a record in a server, and SIGUSR2 of a parity; with a tier, real-time
            signals cause trouble with its disk (`records/tiers/trouble.py`). For `torch-ecrec chaos`.
        spoil: how a server silently makes the step `spoil_step` wrong: "drop", without one push; "twice"; "back", with
            one record as it was before; "look": it makes the step rightly, and says what it changes. For `torch-ecrec
            chaos --check-power`.
        spoil_step: the step of training to which `spoil` happens; 0: none. For `torch-ecrec chaos --check-power`.
        launch: a word that all trainers of one start of a job have, restarts included. A trainer of the same launch
            takes the place of another of its rank at once; one of another launch only when that one is gone. "":
            torchrun's `--rdzv-id` (`torch-ecrec run` and `--standalone` make one).
        again: 1: if the cluster's job has ended, trainers continue it. 0: they are refused.
        look_ahead: how many batches a plain loop over what `attach` returned draws early, when a training forward ends.
            The lookups of the next batch then travel with the gradients of the step. More than one are drawn where a
            slot is being rebuilt or a server has a tier: it repairs what they look up, or reads it from its disk,
            before they do. "auto": 4 of a list, a tuple, or a `DataLoader` with workers and a sampler of torch's, where
            this cannot be noticed. 1 to 16: of any reader; its batches must then not depend on what the loop does
            between a forward and the draws. "0": none.
        checkpoint_memory_bytes: the most that one slot keeps of records that steps change before a checkpoint has
            written them; a checkpoint that needs more is given up.
        tier: folder on a fast disk, where a server keeps records that do not fit in `tier_memory_bytes`; its files have
            no names, and end with the process. "": all records are in memory.
        tier_memory_bytes: memory of a server with a tier, for records, parities and the logs of recent steps.
        tier_for: "all": any records go to the tier when memory is needed. "parities": only parities do, for which no
            step waits.
        tier_keep: tables, with commas between them, whose records go to the disk of a server with a tier last, when no
            others are left to go. Their names are those of `torch-ecrec status --tables`.
        experiment_mode: for experiments only: it gives up a promise of the protocol (docs/experiments.md). All members
            of a cluster must have the same. "": no experiment.
        experiment_ranges: for experiments only, with `experiment_mode`; 0: no experiment.
    """

    join: str | None = None
    window_steps: int = 2
    call_timeout_s: float = 10.0
    give_up_s: float = 120.0
    transport: str = "sockets"
    wire: str = "float32"
    evaluation_wire: str = "wire"
    pooling: str = "whole"
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    standstill_s: float = 0.0
    grace_s: float = 25.0
    failure_domain: str = ""
    shared_memory_bytes: int = 2 << 30
    keep_freed_bytes: int = 1 << 30
    spare_memory: Flag = 1
    rebuild_chunk_bytes: int = 4 << 20
    rebuild_bytes_per_s: float = REBUILD_BYTES_PER_S
    move_bytes_per_s: float = MOVE_BYTES_PER_S
    record_checks: str = "background"
    scrub_bytes_per_s: float = 20e6
    flip_on_signal: Flag = 0
    spoil: str = "look"
    spoil_step: int = 0
    launch: str = ""
    again: Flag = 0
    look_ahead: str = "auto"
    checkpoint_memory_bytes: int = 1 << 30
    tier: str = ""
    tier_memory_bytes: int = 0
    tier_for: str = "all"
    tier_keep: str = ""
    experiment_mode: str = ""
    experiment_ranges: int = 0

    def __post_init__(self) -> None:
        take_fields(self)
        require_int("window_steps", self.window_steps, 1)
        require(
            self.transport in TRANSPORTS, f"`transport` must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}"
        )
        more = "; rows of training are not quantised, those of evaluations are by `evaluation_wire`"
        require(
            self.wire in WIRES,
            f"`wire` must be one of {', '.join(WIRES)}, got {self.wire!r}{more if self.wire == 'int8' else ''}",
        )
        require(
            self.evaluation_wire in EVALUATION_WIRES,
            f"`evaluation_wire` must be one of {', '.join(EVALUATION_WIRES)}, got {self.evaluation_wire!r}",
        )
        require(self.pooling in POOLINGS, f"`pooling` must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")
        for name in ("call_timeout_s", "give_up_s", "heartbeat_s", "lease_s"):
            require(getattr(self, name) > 0, f"`{name}` must be positive, got {getattr(self, name)}")
        require(self.grace_s >= 0, f"`grace_s` must not be negative, got {self.grace_s}")
        for name in ("call_timeout_s", "give_up_s", "heartbeat_s", "lease_s", "standstill_s", "grace_s"):
            most = f"`{name}` must be at most {LIMIT_MOST_S:g} (11 days), got {getattr(self, name)}"
            require(getattr(self, name) <= LIMIT_MOST_S, most)
        levels = self.failure_domain.split("/") if self.failure_domain else ["host"]
        require(
            all(levels)
            and len(levels) <= DOMAIN_LEVELS_MOST
            and len(self.failure_domain) <= DOMAIN_MOST
            and self.failure_domain.isprintable(),
            f"`failure_domain` must be at most {DOMAIN_LEVELS_MOST} names with / between them, of {DOMAIN_MOST}"
            f" printable characters together, got {self.failure_domain!r}",
        )
        require_int("shared_memory_bytes", self.shared_memory_bytes, 0)
        require_int("keep_freed_bytes", self.keep_freed_bytes, 0)
        require_int("rebuild_chunk_bytes", self.rebuild_chunk_bytes, 1)
        require_int("checkpoint_memory_bytes", self.checkpoint_memory_bytes, 0)
        require(
            self.record_checks in RECORD_CHECKS,
            f"`record_checks` must be one of {', '.join(RECORD_CHECKS)}, got {self.record_checks!r}",
        )
        require(self.again in (0, 1), f"`again` must be 0 or 1, got {self.again}")
        number = self.look_ahead.isdecimal() and int(self.look_ahead) <= LOOK_AHEAD_MOST
        require(
            number or self.look_ahead == "auto",
            f"`look_ahead` must be auto, or a number from 0 to {LOOK_AHEAD_MOST}, got {self.look_ahead!r}",
        )
        require(
            len(self.launch) <= LAUNCH_MOST, f"`launch` must have {LAUNCH_MOST} characters at most, got {self.launch!r}"
        )
        require(self.spare_memory in (0, 1), f"`spare_memory` must be 0 or 1, got {self.spare_memory}")
        require(self.flip_on_signal in (0, 1), f"`flip_on_signal` must be 0 or 1, got {self.flip_on_signal}")
        require(self.spoil in SPOILS, f"`spoil` must be one of {', '.join(SPOILS)}, got {self.spoil!r}")
        require_int("spoil_step", self.spoil_step, 0)
        for name in ("standstill_s", "scrub_bytes_per_s", "rebuild_bytes_per_s", "move_bytes_per_s"):
            require(getattr(self, name) >= 0, f"`{name}` must not be negative, got {getattr(self, name)}")
        require_int("tier_memory_bytes", self.tier_memory_bytes, 0)
        require(self.tier_for in TIER_FOR, f"`tier_for` must be one of {', '.join(TIER_FOR)}, got {self.tier_for!r}")
        require(
            bool(self.tier) == bool(self.tier_memory_bytes),
            "`tier` and `tier_memory_bytes` go together: a folder, and how much memory records may take before they go"
            f" there; got {self.tier!r} and {self.tier_memory_bytes}",
        )
        require(
            bool(self.tier) or not self.tier_keep,
            f"`tier_keep` goes with `tier` and `tier_memory_bytes`, got {self.tier_keep!r} without them",
        )
        require(
            not self.tier or self.record_checks != "none",
            "`record_checks` must not be none with `tier`: a record that comes from a disk is checked by its seal",
        )
        Experiment(self.experiment_mode, self.experiment_ranges)

    @property
    def experiment(self) -> Experiment:
        """The experiment that this process takes part in; an empty one if it takes part in none."""
        return Experiment(self.experiment_mode, self.experiment_ranges)

    @staticmethod
    def from_environment(**overrides: Any) -> Settings:
        """Reads TORCH_ECREC_<NAME> for every field (e.g. TORCH_ECREC_JOIN); an explicit argument wins.

        Raises:
            ValueError: one cannot be what it says, or there is no setting of such a name.
        """
        values: dict[str, Any] = {}
        _require_known(os.environ)
        for field in dataclasses.fields(Settings):
            if os.environ.get(f"{PREFIX}{field.name.upper()}") and field.name not in overrides:  # empty: not set
                values[field.name] = _value_of(field)
        return Settings(**{**values, **overrides})

    @staticmethod
    def others() -> dict[str, str]:
        """Returns what `OTHERS` are here, "" where they are not set; of the secret, only whether it is."""
        found = {name: os.environ.get(PREFIX + name, "") for name in OTHERS}
        return found | {"SECRET": "(set)" if found["SECRET"] else ""}

    @staticmethod
    def explained() -> dict[str, str]:
        """Returns what each field means, in the order in which they are declared; without docstrings (-OO), nothing."""
        text = inspect.cleandoc(Settings.__doc__ or "").partition("Args:\n")[2]
        found: dict[str, str] = {}
        for entry in re.split(r"\n(?= {4}\w)", "\n" + text):
            names, _, meaning = entry.strip().partition(": ")
            found |= {name: " ".join(meaning.split()) for name in names.split(", ") if meaning}
        return {field.name: found.get(field.name, "") for field in dataclasses.fields(Settings)}

    @staticmethod
    def examine_environment() -> tuple[Settings, dict[str, str]]:
        """Returns the settings of the environment without those that are wrong, and why each of these is, by its name.

        `from_environment` raises at the first that is wrong; `torch-ecrec doctor` names all of them.
        """
        known = {field.name: field for field in dataclasses.fields(Settings)}
        good: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for name in sorted(os.environ):
            own = name.removeprefix(PREFIX).lower()
            try:
                _require_known([name])
                if name.startswith(PREFIX) and own in known and os.environ[name]:
                    value = _value_of(known[own])
                    Settings(**{**good, own: value})
                    good[own] = value
            except (ValueError, TypeError) as error:
                wrong[name] = str(error)
        for check, name in ((own_secret, f"{PREFIX}SECRET"), (insecure_rpc, INSECURE_RPC)):
            try:
                check()
            except ValueError as error:
                wrong[name] = str(error)
        return Settings(**good), wrong

    def environment(self) -> dict[str, str]:
        """Returns the variables that give another process these settings, except `join`: inverts `from_environment`."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "join"]
        return {f"TORCH_ECREC_{name.upper()}": str(getattr(self, name)) for name in names}


def check_folder(folder: Path) -> None:
    """Raises ValueError unless files can be made in a folder: says what is wrong with it."""
    require(folder.exists(), f"`tier` must be a folder that exists, got {folder}: make it with mkdir -p {folder}")
    require(folder.is_dir(), f"`tier` must be a folder, got {folder}")
    require(os.access(folder, os.W_OK | os.X_OK), f"`tier` must be a folder that can be written, got {folder}")


def require_tier(settings: Settings) -> None:
    """Raises TierFailed unless the folder of a server's tier is there, if it has one.

    It is no mistake of whoever started the server: its disk may be mounted later, and whoever supervises it is to try
    again, which after exit code 2 nobody does.
    """
    if settings.tier:
        try:
            check_folder(Path(settings.tier))
        except ValueError as error:
            raise TierFailed(str(error)) from error


def _value_of(field: dataclasses.Field[Any]) -> object:
    """Returns what the environment says of a field of `Settings`. Raises ValueError if that is to be a number."""
    name = f"{PREFIX}{field.name.upper()}"
    text = os.environ[name]
    try:
        return _NUMBERS.get(type(field.default), str)(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


def _require_known(names: Iterable[str]) -> None:
    """Raises ValueError for a TORCH_ECREC_ variable that does not exist: a misspelt one would be ignored silently."""
    known = [*(field.name.upper() for field in dataclasses.fields(Settings)), *OTHERS]
    for name in names:
        own = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and own not in known and not own.startswith(("TEST_", "ORACLE")):
            near = difflib.get_close_matches(own, known, 1)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(PREFIX + k for k in known)}"
            raise ValueError(f"{name} is no setting of torch_ecrec; {meant}")
