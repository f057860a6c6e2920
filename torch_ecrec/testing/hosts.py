"""Several hosts on one machine: each has a network of its own (Linux namespaces), and all hang on one switch.

    with Hosts(3) as hosts:
        server = hosts[1].start(["torch-ecrec", "serve", "--join", f"{hosts[0].address}:7700"])
        hosts.cut(1, 2)                    # nothing passes between these two; `cut_one_way`: in one direction
        hosts[2].link(bits_per_s=1e9)      # slower; also loss, delay
        hosts[1].die()                     # its link and all its processes, at one instant
        hosts[1].come_back()               # an empty host with the same address
        hosts.mend()                       # no more cuts

What is cut is dropped silently, as by a broken switch: nobody gets an error. A host is there as long as its `host_init`
process is; that one ends, and takes all processes of the host with it, when this process ends, however that comes.

Needs Linux, root, and iproute2 (`ip`, `tc`): `unavailable()` says what lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch_ecrec.processes.children import Child
from torch_ecrec.processes.fork_server import ForkServer
from torch_ecrec.runtime.checks import require, require_int
from torch_ecrec.spec.settings import trusted_network
from torch_ecrec.testing.host_init import CLONE_NEWNET, inside, kill_all

T = TypeVar("T")

LIMIT_S = 30.0  # for a command of iproute2, or a process that is forked
FORKED_S = 0.005  # between two looks whether it is there
HOSTS_MOST = 200
NOWHERE = "02:00:00:00:00:00"  # an address of Ethernet that no interface has
BURST_BYTES = 256 << 10  # of a link with a rate: the largest packet of TCP, four times
QUEUE_S = 0.05  # what waits for longer on a slow link is dropped
SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # root's commands: many a PATH, cron's say, lacks them


class HostsError(RuntimeError):
    """A host could not be made or changed."""


def _found(command: str) -> str | None:
    """Returns where a command is: in PATH, or where those of root are; None: nowhere."""
    return shutil.which(command) or shutil.which(command, path=os.pathsep.join(SYSTEM_FOLDERS))


def unavailable() -> str:
    """Returns why hosts cannot be made here; "": they can."""
    lacking = [name for name in ("ip", "tc", "nsenter") if _found(name) is None]
    if not sys.platform.startswith("linux") or lacking:
        return f"hosts need Linux and the commands ip, tc, nsenter; not here: {', '.join(lacking) or sys.platform}"
    try:
        with _Namespace("probe"):
            return ""
    except HostsError as error:
        return f"hosts need root: {error}"


def _network_of(pid: int) -> int | None:
    """Returns the number (inode) of a process's network; None: it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


class _Namespace:
    """A network, and the process that keeps it there. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        init = Path(__file__).with_name("host_init.py")
        self._init = subprocess.Popen(
            [sys.executable, "-P", "-S", "-E", str(init), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._init.stdout is not None and self._init.stderr is not None
        if self._init.stdout.readline().strip() != "ready":
            reason = self._init.stderr.read().strip()
            self.close()
            raise HostsError(f"{name}: {reason}")
        self.inode = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    @property
    def pid(self) -> int:
        return self._init.pid

    def enter(self, words: Sequence[str]) -> list[str]:
        """Returns the command line that runs another one in here."""
        found = _found("nsenter") or "nsenter"
        return [found, "-t", str(self.pid), "--net", "--uts", "--ipc", "--", *words]

    def within(self, action: Callable[[], T]) -> T:
        """Runs an action inside of this network, as `Host.within` says."""

        def there() -> T:
            with open(f"/proc/{self.pid}/ns/net") as network:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(network.fileno(), CLONE_NEWNET):
                    raise HostsError(f"{self.name}: {os.strerror(ctypes.get_errno())}")
            return action()

        with ThreadPoolExecutor(1) as own:  # the network is a thread's, and goes with it
            return own.submit(there).result()

    def run(self, *words: str) -> str:
        """Runs a command of iproute2 in here; what it says. Raises HostsError if it fails."""
        entered = self.enter([_found(words[0]) or words[0], *words[1:]])
        done = subprocess.run(entered, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise HostsError(f"{self.name}: `{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """All processes in here end, then the network does."""
        for pipe in (self._init.stdin, self._init.stdout, self._init.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._init.wait(LIMIT_S)

    def __enter__(self) -> _Namespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Host:
    """One host. Made by `Hosts`.

    Attributes:
        name: of the host, as `hostname` says there.
        address: of its interface `eth0`.
        alive: it did not die, or is back.
    """

    def __init__(self, number: int, address: str, prefix: int, switch: _Namespace) -> None:
        self.number, self.name, self.address, self.alive = number, f"host-{number}", address, True
        self._switch, self._space = switch, _Namespace(self.name)
        self._started: list[Child] = []
        self._relay: _Relay | None = None
        self.port = f"port{number}"  # of the switch
        try:
            switch.run(
                *f"ip link add {self.port} type veth peer name eth0 netns {self._space.pid}".split(),
            )
            switch.run("ip", "link", "set", self.port, "master", "switch", "up")
            self._space.run("ip", "addr", "add", f"{address}/{prefix}", "dev", "eth0")
            for interface in ("lo", "eth0"):
                self._space.run("ip", "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise

    def start(self, words: Sequence[str], **more: Any) -> subprocess.Popen[Any]:
        """Starts a process on this host; it is killed with the host, or with this process.

        Args:
            words: its command line.
            **more: of `subprocess.Popen`.
        """
        require(self.alive, f"{self.name} is dead: `come_back` first")
        process = subprocess.Popen(self._space.enter(words), **more)
        self._started.append(process)
        return process

    def fork(
        self,
        forks: ForkServer,
        module: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> Child:
        """As `start`, of `python -m module *words`, by forking; see `ForkServer.start`. Then it is on this host."""
        require(self.alive, f"{self.name} is dead: `come_back` first")
        entered = [str(self._space.pid), module, *words]
        process = forks.start("torch_ecrec.testing.entered", entered, environment, stdout, stderr)
        self._started.append(process)
        deadline_s = time.monotonic() + LIMIT_S
        while process.poll() is None and _network_of(process.pid) != self.network:
            if time.monotonic() > deadline_s:
                raise HostsError(f"{self.name}: process {process.pid} did not come here within {LIMIT_S:g} s")
            time.sleep(FORKED_S)
        return process

    def within(self, action: Callable[[], T]) -> T:
        """Calls a function of this process as on this host, on another thread: it connects to who listens here.

        Its sockets stay on this host. Raises what it raises.
        """
        return self._space.within(action)

    def bytes_sent(self) -> int:
        """Returns the bytes that have left by its link so far, headers of Ethernet included, as the kernel hands them
        on (GSO)."""
        for line in Path(f"/proc/{self._space.pid}/net/dev").read_text().splitlines():
            interface, _, counts = line.partition(":")
            if interface.strip() == "eth0":
                return int(counts.split()[8])
        raise HostsError(f"{self.name} has no link")

    @property
    def network(self) -> int:
        """The number (inode) of its network."""
        return self._space.inode

    def processes(self) -> list[int]:
        """Pids of what runs here."""
        return [pid for pid in inside(self._space.inode) if pid != self._space.pid]

    def die(self) -> int:
        """Its link goes down, and all its processes are killed; returns how many there were."""
        require(self.alive, f"{self.name} is dead already")
        self.alive = False
        self.unplug()
        killed = kill_all(self._space.inode, but=self._space.pid)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)  # ours to reap
        self._started.clear()
        return killed

    def come_back(self) -> None:
        """Makes an empty host with the same address."""
        require(not self.alive, f"{self.name} is not dead")
        self.alive = True
        self.plug_in()

    def unplug(self) -> None:
        """Its link goes down: nothing passes, its processes live on and are told nothing."""
        self._switch.run("ip", "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Its link is up again."""
        self._switch.run("ip", "link", "set", self.port, "up")

    def link(
        self,
        *,
        bits_per_s: float = 0.0,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Sets rate, delay and loss of its link from now on, in both directions.

        Args:
            bits_per_s: at most so many; 0: as many as the machine can carry.
            delay_s: every packet arrives so much later.
            jitter_s: and up to so much more, by chance: they change their order.
            loss: of packets, from 0 to 1, by chance.
            seed: of that chance.
        """
        require(min(bits_per_s, delay_s, jitter_s) >= 0, "a rate, a delay and a jitter are not negative")
        require(0 <= loss < 1, f"`loss` must be from 0 to 1, got {loss}")
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        for space, interface in ((self._space, "eth0"), (self._switch, self.port)):
            with contextlib.suppress(HostsError):  # it has none
                space.run("tc", "qdisc", "del", "dev", interface, "root")
            if bits_per_s:
                latency_us = round(1e6 * QUEUE_S)
                rule = f"tbf rate {round(bits_per_s)} burst {BURST_BYTES} latency {latency_us}us"
                space.run("tc", "qdisc", "add", "dev", interface, "root", *rule.split())
        if delay_s or jitter_s or loss:
            how = {"delay_s": delay_s, "jitter_s": jitter_s, "loss": loss, "seed": seed + self.number}
            self._relay = _Relay(self._switch, self.port, how)

    def held_up(self) -> int:
        """Packets that its link, as it is now, has lost or carried later: that a rate, a delay or a loss has met."""
        met = 0 if self._relay is None else self._relay.met()
        for space, interface in ((self._space, "eth0"), (self._switch, self.port)):
            for rule in json.loads(space.run("tc", "-s", "-j", "qdisc", "show", "dev", interface)):
                met += rule["overlimits"] + rule["drops"] if rule["kind"] == "tbf" else 0
        return met

    def drop_to(self, other: Host) -> None:
        """Makes what is sent from here to another host get lost, without an error."""
        self._space.run(*f"ip neigh replace {other.address} lladdr {NOWHERE} nud permanent dev eth0".split())

    def reach(self, other: Host) -> None:
        """Undoes `drop_to`. Does nothing if nothing was cut."""
        cut = self._space.run("ip", "neigh", "show", other.address, "nud", "permanent")
        if NOWHERE in cut:
            self._space.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def close(self) -> None:
        """All processes of it end."""
        if self._relay is not None:
            self._relay.close()
        self._space.close()
        for process in self._started:
            process.wait(LIMIT_S)


class _Relay:
    """Carries packets between a port of the switch and the switch itself, later, and not all of them (`relay.py`)."""

    def __init__(self, switch: _Namespace, port: str, how: dict[str, float]) -> None:
        self._switch, self._port = switch, port
        outer, inner = f"{port}o", f"{port}i"
        switch.run(*f"ip link add {outer} type veth peer name {inner}".split())
        for interface in (outer, inner):
            switch.run("ip", "link", "set", interface, "up")
        switch.run("ip", "link", "set", port, "nomaster")
        switch.run("ip", "link", "set", port, "promisc", "on")
        options = {"interfaces": [port, inner], **how}
        self._process = subprocess.Popen(
            switch.enter(
                [sys.executable, "-P", "-S", "-E", str(Path(__file__).with_name("relay.py")), json.dumps(options)]
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            self.close()
            raise HostsError(f"{port}: its relay did not start")
        switch.run("ip", "link", "set", outer, "master", "switch")

    def met(self) -> int:
        """Packets that it has lost, or has carried later."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """The port is on the switch again."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(LIMIT_S)
        self._switch.run("ip", "link", "del", f"{self._port}o")
        self._switch.run("ip", "link", "set", self._port, "promisc", "off", "master", "switch")


class Hosts:
    """Hosts on one switch. Use as a context manager: leaving ends them all, with their processes.

    As long as they are there, this process and those that it starts have a secret (TORCH_ECREC_SECRET).

    Args:
        count: so many.
        network: their addresses, an IPv4 network. They are unknown outside.

    Raises:
        HostsError: they cannot be made here; `unavailable` says so before.
    """

    def __init__(self, count: int, network: str = "10.77.0.0/24") -> None:
        require_int("count", count, 1, HOSTS_MOST)
        self.network = ipaddress.IPv4Network(network)
        require(count + 2 <= self.network.num_addresses, f"{network} has no addresses for {count} hosts")
        self.hosts: list[Host] = []
        self._trusted = contextlib.ExitStack()
        self._switch = _Namespace("switch")
        self._trusted.enter_context(trusted_network())
        try:
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            for number, address in zip(range(count), self.network.hosts(), strict=False):
                self.hosts.append(Host(number, str(address), self.network.prefixlen, self._switch))
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def __len__(self) -> int:
        return len(self.hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def host_of(self, pid: int) -> int | None:
        """Returns on which host a process runs; None: on none of these, or it has ended."""
        network = _network_of(pid)
        return next((host.number for host in self if host.network == network), None)

    def cut(self, one: int, other: int) -> None:
        """Lets nothing pass between two hosts any more, in neither direction."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """Lets nothing of one host arrive at another."""
        require(sender != receiver, f"host {sender} cannot be cut off from itself")
        self[sender].drop_to(self[receiver])

    def isolate(self, number: int) -> None:
        """Cuts a host from all others, in both directions; its processes live on."""
        self[number].unplug()

    def mend(self) -> None:
        """Ends all cuts, and plugs in hosts that are alive. Links stay as slow as they are."""
        for one in self:
            for other in self:
                if one is not other:
                    one.reach(other)
            if one.alive:
                one.plug_in()

    def close(self) -> None:
        """Ends all hosts, with their processes and namespaces."""
        for host in self.hosts:
            host.close()
        self._switch.close()
        self._trusted.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
