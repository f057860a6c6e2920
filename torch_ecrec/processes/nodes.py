"""Trainers on one host of several: torchrun, told what it and the libraries under it need there.

Several things want to know which of a host's addresses the others can reach, each by a name of its own: torchrun
(`--local-addr`, and `is_host` on the host where all meet), gloo, NCCL and torch's RPC (an interface, by a variable
each). All of it follows from the address from which this host reaches the one where they meet.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ecrec.processes.children import FRESH_STORE
from torch_ecrec.runtime.addresses import interface_of, interfaces, parse_address, parse_host
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.transport.whereabouts import require_whereabouts

MEETING_PORT = 29500
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
        """The command line of torchrun. Raises OSError where the host to meet at cannot be reached."""
        words = [sys.executable, "-P", "-m", "torch.distributed.run"]
        if not self.meet:
            words += ["--standalone"]
        else:
            host, port = self.meeting
            words += ["--nnodes", str(self.count), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
            words += ["--rdzv-id", self.job, "--rdzv-conf", f"is_host={int(is_mine(host))}"]
            words += ["--local-addr", self.own_address]
        return [*words, "--nproc-per-node", str(self.per_node), "--max-restarts", str(self.restarts), *script]

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
        """Of this host."""
        return parse_host(self.address) if self.address else address_towards(self.meeting[0])


def address_towards(host: str) -> str:
    """The address from which this host reaches another one (IPv4). Raises OSError if it does not."""
    (*_, where), *_ = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # nothing is sent
        return str(probe.getsockname()[0])


def is_mine(host: str) -> bool:
    """Whether a name or an address is this host's. Raises OSError for a name that nobody has."""
    (*_, where), *_ = socket.getaddrinfo(host, None, socket.AF_INET)
    address = ipaddress.ip_address(str(where[0]))
    return address.is_loopback or str(address) in {own for _, own in interfaces()}


def become_torchrun(nodes: Nodes, join: str, script: Sequence[str]) -> None:
    """This process goes on as torchrun.

    Args:
        nodes: where trainers run.
        join: HOST:PORT of the coordinator, or etcd://...; "": a variable names it, or each job has its own cluster.
        script: as torchrun takes it.

    Raises:
        OSError: as for `Nodes.environment`.
        ValueError: there is no such script, or an address is none.
    """
    if script and not script[0].startswith("-"):
        require(Path(script[0]).exists(), f"there is no script {script[0]}")
    if join:
        require_whereabouts(join)
    command, joins = nodes.command(script), {"TORCH_ECREC_JOIN": join} if join else {}
    os.execve(command[0], command, {**nodes.environment(), **os.environ, **joins})
