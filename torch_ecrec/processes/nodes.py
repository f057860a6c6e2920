"""Trainers on one host of several: torchrun, told what it and the libraries under it need there.

Several things want to know which of a host's addresses the others can reach, each by a name of its own: torchrun
(`--local-addr`, and `is_host` on the host where all meet), gloo, NCCL and torch's RPC (an interface, by a variable
each). All of it follows from the address from which this host reaches the one where they meet.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ecrec.errors import ClusterError, DataLoss
from torch_ecrec.processes.children import FRESH_STORE, STANDALONE, script_words
from torch_ecrec.runtime.addresses import interface_of, interfaces, parse_address, parse_host
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.transport.whereabouts import require_whereabouts

MEETING_PORT = 29500
ENDS = (signal.SIGTERM, signal.SIGINT)
FROM_TERMINAL = 0x80  # `si_code`: the kernel's own, Ctrl-C, which torchrun has been told, too
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_S = 0.2
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Nodes:
    """Where trainers run.

    Args:
        count: hosts with trainers. `per_node`: trainers on each.
        meet: address of the host where they meet, HOST or HOST:PORT, one of them; "": there is only this one.
        address: of this host; "": from which it reaches that one.
        restarts: how often trainers that were lost are started again.
        job: a word that all hosts of this job say; another job that meets there says another.
    """

    count: int = 1
    per_node: int = 1
    meet: str = ""
    address: str = ""
    restarts: int = 10
    job: str = "torch_ecrec"

    def __post_init__(self) -> None:
        require_int("nodes", self.count, 1)
        require_int("nproc_per_node", self.per_node, 1)
        require_int("max_restarts", self.restarts, 0)
        require(bool(self.job), "`job` must not be empty")
        require(
            self.count == 1 or bool(self.meet),
            f"{self.count} hosts must know where they meet: --meet HOST, the address of one of them, the same on each",
        )

    def command(self, script: Sequence[str]) -> list[str]:
        """Returns the command line of torchrun. Raises OSError where the host to meet at cannot be reached."""
        words = [sys.executable, "-P", "-m", "torch.distributed.run"]
        if not self.meet:
            words += STANDALONE
        else:
            host, port = self.meeting
            words += ["--nnodes", str(self.count), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
            # the word of the launch, too: two that say the same meet, and are one
            words += ["--rdzv-id", f"{self.job}@{host}:{port}", "--rdzv-conf", f"is_host={int(is_mine(host))}"]
            words += ["--local-addr", self.own_address]
        return [
            *words,
            "--nproc-per-node",
            str(self.per_node),
            "--max-restarts",
            str(self.restarts),
            *script_words(script),
        ]

    def environment(self) -> dict[str, str]:
        """Variables that torchrun needs, unless the user has set them.

        Raises:
            OSError: the host to meet at cannot be reached, or the address is none of this host's.
        """
        if not self.meet:
            return dict(FRESH_STORE)
        return {**FRESH_STORE, **dict.fromkeys(INTERFACE_VARIABLES, interface_of(self.own_address))}

    @property
    def meeting(self) -> tuple[str, int]:
        """Host and port where they meet."""
        host, port = parse_address(self.meet if ":" in self.meet.rpartition("]")[2] else f"{self.meet}:{MEETING_PORT}")
        require(":" not in host, f"trainers meet over IPv4: --meet must be such an address or a name, got {self.meet}")
        return host, port

    @property
    def own_address(self) -> str:
        """Returns the address of this host."""
        return parse_host(self.address) if self.address else address_towards(self.meeting[0])


def address_towards(host: str) -> str:
    """Returns the address from which this host reaches another one (IPv4). Raises OSError if it does not."""
    (*_, where), *_ = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # nothing is sent
        return str(probe.getsockname()[0])


def is_mine(host: str) -> bool:
    """Returns whether a name or an address is this host's. Raises OSError for a name that nobody has."""
    (*_, where), *_ = socket.getaddrinfo(host, None, socket.AF_INET)
    address = ipaddress.ip_address(str(where[0]))
    return address.is_loopback or str(address) in {own for _, own in interfaces()}


def run_torchrun(nodes: Nodes, join: str, script: Sequence[str], again: bool = False) -> int:
    """Runs torchrun, which starts trainers again until they are done; not any more once one says that data is lost, or
    that the cluster has refused it: it would do so again.

    What tells this process to end is told to torchrun, which ends with this process, too, however that ends.

    Args:
        nodes: where trainers run.
        join: HOST:PORT of the coordinator, or etcd://...; "": a variable names it, or each job has its own cluster.
        script: as torchrun takes it.
        again: a job that has ended is trained on.

    Returns:
        What torchrun returns, or the exit code of what a trainer has said.

    Raises:
        OSError: as for `Nodes.environment`.
        ValueError: there is no such script, or an address is none.
    """
    if script and not script[0].startswith("-"):
        require(Path(script[0]).exists(), f"there is no script {script[0]}")
    if join:
        require_whereabouts(join)
    command, joins = nodes.command(script), {"TORCH_ECREC_JOIN": join} if join else {}
    joins |= {"TORCH_ECREC_AGAIN": "1"} if again else {}
    with tempfile.TemporaryDirectory(prefix="torch-ecrec-run-") as folder:
        mark = Path(folder, "lost")
        environment = {**nodes.environment(), **os.environ, **joins, "TORCH_ECREC_LOSS_MARK": str(mark)}
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        process = subprocess.Popen(command, env=environment, preexec_fn=_end_with_parent)
        told = False
        while process.poll() is None:
            if (came := signal.sigtimedwait(ENDS, LOOK_S)) is not None and came.si_code != FROM_TERMINAL:
                process.send_signal(came.si_signo)
            if mark.exists() and not told:
                told = True
                process.terminate()
                with contextlib.suppress(OSError):  # no room for it: the code says it, too
                    said = _read_mark(mark)[1]
                    print(f"torch-ecrec: trainers are not started again: {said}", file=sys.stderr, flush=True)
        return _read_mark(mark)[0] if mark.exists() else exit_code_of(process.returncode)


def leave_mark(mark: Path, reason: ClusterError) -> None:
    """Tells `run_torchrun` why a trainer ends that is not to be started again."""
    whole = mark.with_name(f"{mark.name}-{os.getpid()}")
    try:
        whole.write_text(f"{reason.exit_code} {reason}")
        whole.replace(mark)  # it is read as soon as it is there
    except OSError:  # no room: that it is there says most of it
        mark.touch()


def _read_mark(mark: Path) -> tuple[int, str]:
    """Returns the exit code, and the reason, of a trainer that has left a mark."""
    code, _, reason = mark.read_text().partition(" ")
    return int(code or DataLoss.exit_code), reason


def _end_with_parent() -> None:
    """Has Linux tell this child to end when its parent has ended. Called in the child, before it is torchrun."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def exit_code_of(returncode: int) -> int:
    """As a shell has it: of a process that a signal has ended, 128 and its number."""
    return returncode if returncode >= 0 else 128 - returncode
