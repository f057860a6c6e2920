"""Checks of this machine: shared memory, limits of files and processes, memory, cores, its name.

What is read below /proc and /sys is read below `root`, so that tests can say what is there. Control groups count, those
above the own one too: a container's limit is at any of them.

What a cluster needs of a machine is reckoned by `NEEDS`, in words there; it is what processes take before any table.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ecrec.doctor.findings import Finding
from torch_ecrec.observe.verdict import Level
from torch_ecrec.observe.words import size
from torch_ecrec.processes.limits import cpu_quota, memory_limits, memory_of_host, pids_limits
from torch_ecrec.runtime.addresses import interfaces, is_loopback
from torch_ecrec.spec.settings import Settings

SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Needs:
    """Says how much of the machine one process of a cluster takes.

    Args:
        files: beside connections: 256 segments of shared memory (`runtime/shared.py`), libraries, logs.
        files_of_peer: connections with one other process: one there, one back, and as many that take their place.
        threads: of torch (two for each core come on top), of connections, and of what else waits.
        memory_bytes: with torch and TorchRec loaded, before any table.
        dev_shm_bytes: of /dev/shm: a `DataLoader` with workers keeps some batches there, and NCCL its buffers. Docker
            gives 64 MiB by default, in which workers die of a bus error.
    """

    files: int = 384
    files_of_peer: int = 4
    threads: int = 24
    memory_bytes: int = 512 << 20
    dev_shm_bytes: int = 256 << 20


NEEDS = Needs()


# shared memory ----------------------------------------------------------------------------------------


def shared_memory(settings: Settings) -> list[Finding]:
    """Whether processes can share memory: ours in files without a name, torch's and NCCL's in /dev/shm."""
    findings = []
    why = "" if not settings.shared_memory_bytes else _no_sealed_memory()
    if why:
        found = f"memory that processes share cannot be made: {why}; large tensors go through sockets then"
        step = "take a kernel with memfd_create and seals (Linux 3.17), and let the container's seccomp profile pass it"
        findings.append(Finding("shared-memory", "WARN", found, "memfd_create with F_ADD_SEALS", step))
    most = size(settings.shared_memory_bytes) if settings.shared_memory_bytes else "none"
    return [*findings, judge_dev_shm(_room_of(SHM), most)]


def _no_sealed_memory() -> str:
    """Returns why memory cannot be shared as `runtime/shared.py` does it; "": it can."""
    import fcntl
    import mmap

    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        file = os.memfd_create("torch_ecrec_doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with mmap.mmap(file, mmap.PAGESIZE) as memory:
            memory[0] = 1
    except OSError as error:
        return str(error.strerror or error)
    finally:
        os.close(file)
    return ""


def _room_of(folder: Path) -> tuple[int, int] | str:
    """Returns the size and the free room of a file system, in bytes; or why it is not known."""
    try:
        found = os.statvfs(folder)
        if not os.access(folder, os.W_OK):
            return "cannot be written"
    except OSError as error:
        return error.strerror or str(error)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def judge_dev_shm(room: tuple[int, int] | str, most: str) -> Finding:
    """Judges /dev/shm.

    Args:
        room: its size and its free room, in bytes; or why they are not known.
        most: of memory that one of our processes shares, for people.
    """
    wanted = f"{size(NEEDS.dev_shm_bytes)} free or more, for workers of a DataLoader and for NCCL"
    grow = "mount -o remount,size=1g /dev/shm; of a container: docker run --shm-size=1g, or --ipc=host"
    ours = f"ours, up to {most} for each process, lies elsewhere"
    if isinstance(room, str):
        return Finding("shared-memory", "WARN", f"/dev/shm: {room}", wanted, f"mount -t tmpfs tmpfs /dev/shm; {grow}")
    total, free = room
    figures = {"total_bytes": float(total), "free_bytes": float(free)}
    found = f"/dev/shm has {size(total)}, {size(free)} of it free ({ours})"
    if free < NEEDS.dev_shm_bytes:
        step = (
            grow if total < 2 * NEEDS.dev_shm_bytes else f"remove what is left in /dev/shm (ls -l /dev/shm), or {grow}"
        )
        return Finding("shared-memory", "WARN", found, wanted, step, figures)
    return Finding("shared-memory", "OK", found, figures=figures)


# limits -----------------------------------------------------------------------------------------------


def open_files(members: int) -> Finding:
    """Whether this process may open as many files as one of a cluster of that many members needs."""
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), members)


def judge_open_files(soft: int, hard: int, members: int) -> Finding:
    """Judges the limits of open files. RLIM_INFINITY: there is none."""
    need = NEEDS.files + NEEDS.files_of_peer * members
    figures = {"soft": float(soft), "hard": float(hard), "needed": float(need)}
    if soft == resource.RLIM_INFINITY or soft >= need:
        text = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
        return Finding("open-files", "OK", f"limit {text}; {need} are enough for {members} processes", figures=figures)
    enough = hard == resource.RLIM_INFINITY or hard >= need
    raised = (
        f"ulimit -n {need}" if enough else f"LimitNOFILE={need} in systemd, docker run --ulimit nofile={need}:{need}"
    )
    least = NEEDS.files_of_peer * members + 64
    level: Level = "ERROR" if soft < least else "WARN"
    follows = "processes cannot connect with each other" if soft < least else "less memory is shared, the rest is sent"
    found = f"limit {soft} (hard: {hard if hard != resource.RLIM_INFINITY else 'none'}): {follows}"
    wanted = f"{need} for a cluster of {members} processes (--members)"
    step = f"{raised}, in the shell or the unit that starts torch-ecrec and torchrun"
    return Finding("open-files", level, found, wanted, step, figures)


def processes(here: int, root: Path) -> Finding:
    """Whether this user, and this control group, may have the threads of so many processes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    bound = os.geteuid() != 0  # the limit does not bind root
    used = _threads_of_user(os.geteuid(), root) if bound else 0
    limits = [(soft, used, "ulimit -u")] if bound and soft != resource.RLIM_INFINITY else []
    limits += [(limit, now, "pids.max of its control group") for limit, now in pids_limits(root)]
    return judge_processes(limits, here, len(os.sched_getaffinity(0)))


def judge_processes(limits: Sequence[tuple[int, int, str]], here: int, cores: int) -> Finding:
    """Judges how many threads there may be: of each limit, how many there are already, and what it is called."""
    need = here * (NEEDS.threads + 2 * cores)
    if not limits:
        return Finding("processes", "OK", f"no limit; {here} processes here take up to {need} threads")
    limit, used, name = min(limits, key=lambda one: one[0] - one[1])
    figures = {"limit": float(limit), "used": float(used), "needed": float(need)}
    found = f"{name} is {limit}, and {used} threads are there"
    if limit - used >= need:
        return Finding("processes", "OK", f"{found}; {here} processes here take up to {need}", figures=figures)
    level: Level = "ERROR" if limit - used < here * NEEDS.threads else "WARN"
    raised = f"ulimit -u {used + need}" if name.startswith("ulimit") else f"docker run --pids-limit {used + need}"
    step = f"{raised} (in systemd: LimitNPROC, TasksMax), or start fewer processes here and say --here"
    return Finding("processes", level, found, f"room for {need} threads, of {here} processes (--here)", step, figures)


def _threads_of_user(user: int, root: Path) -> int:
    """Returns how many threads a user has: what its limit of processes counts."""
    count = 0
    for path in (root / "proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has ended
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            if int(fields["Uid"].split()[0]) == user:
                count += int(fields["Threads"])
    return count


# memory and cores -------------------------------------------------------------------------------------


def memory(settings: Settings, here: int, root: Path) -> Finding:
    """Whether there is memory for so many processes, before any table."""
    return judge_memory(*memory_of_host(root), memory_limits(root), settings, here)


def addresses(settings: Settings) -> list[Finding]:
    """Whether a process may have the addresses that it needs; nothing where there is no limit."""
    return judge_addresses(resource.getrlimit(resource.RLIMIT_AS)[0], settings)


def judge_addresses(soft: int, settings: Settings) -> list[Finding]:
    """Judges the limit of the address space of a process, in which libraries, and stacks of threads, count whole."""
    need = 3 * NEEDS.memory_bytes
    most = need + settings.shared_memory_bytes + settings.keep_freed_bytes
    if soft == resource.RLIM_INFINITY or soft >= most:
        return []
    level: Level = "ERROR" if soft < need else "WARN"
    found = f"each process may have {size(soft)} of addresses (`ulimit -v`): it cannot load libraries or start threads"
    step = "ulimit -v unlimited, in the shell that starts torch-ecrec and torchrun (in systemd: LimitAS=infinity)"
    figures = {"limit_bytes": float(soft), "needed_bytes": float(most)}
    return [Finding("memory", level, found, f"no limit, or {size(most)} and room for tables", step, figures)]


def judge_memory(
    total: int | None, available: int | None, limits: Sequence[tuple[int, int]], settings: Settings, here: int
) -> Finding:
    """Judges the memory.

    Args:
        total, available: of the machine; None: not known.
        limits: of its control groups, and what each has in use.
    """
    room = [(available, f"{size(available)} available of {size(total or 0)}")] if available is not None else []
    room += [
        (limit - used, f"{size(limit - used)} left of its control group's limit, {size(limit)}")
        for limit, used in limits
    ]
    need = here * NEEDS.memory_bytes
    each = settings.shared_memory_bytes + settings.keep_freed_bytes
    more = f"tables come on top, and in each process up to {size(each)} of shared and of freed memory"
    if not room:
        return Finding(
            "memory", "WARN", "it is not known how much there is", "/proc/meminfo", "mount -t proc proc /proc"
        )
    left, found = min(room)
    figures = {"left_bytes": float(left), "needed_bytes": float(need)}
    if left >= need:
        return Finding("memory", "OK", f"{found}; {here} processes take {size(need)}, {more}", figures=figures)
    level: Level = "ERROR" if left < 2 * NEEDS.memory_bytes else "WARN"
    step = (
        "start fewer processes here (--here says how many), end others, or give more (docker run --memory, MemoryMax)"
    )
    return Finding("memory", level, found, f"{size(need)} for {here} processes (--here); {more}", step, figures)


def cores(here: int, root: Path) -> Finding:
    """How many cores this process may use, by its affinity and by its control group's quota."""
    return judge_cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), cpu_quota(root), here)


def judge_cores(there: int, allowed: int, quota: float | None, here: int) -> Finding:
    """Judges the cores: those of the machine, those that the affinity allows, and the quota of the control group."""
    figures = {"there": float(there), "allowed": float(allowed), **({} if quota is None else {"quota": quota})}
    found = f"{allowed} of {there} cores{'' if quota is None else f', of which a quota gives the time of {quota:g}'}"
    if quota is not None and quota < allowed:
        threads = max(int(quota), 1)
        found += ": torch starts a thread for each core, and all of them pause when the quota is used up"
        step = f"export OMP_NUM_THREADS={threads}, or pin it to whole cores (docker run --cpuset-cpus, taskset -c)"
        return Finding("cores", "WARN", found, f"no more cores than the quota gives, {quota:g}", step, figures)
    if allowed < 2:
        step = "allow more (taskset -c, docker run --cpuset-cpus)"
        return Finding("cores", "WARN", f"{found}: trainers and servers take turns", "2 or more", step, figures)
    return Finding("cores", "OK", f"{found}, for {here} processes here", figures=figures)


# this host's name -------------------------------------------------------------------------------------


def host_name() -> Finding:
    """Whether this host's name leads to an address of it that others reach."""
    name = socket.gethostname()
    own = [address for _, address in interfaces()]
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return judge_host_name(name, [], own, error.strerror or str(error))
    return judge_host_name(name, sorted(found), [*own, *(one for one in found if ":" in one and _is_own(one))], "")


def judge_host_name(name: str, found: Sequence[str], own: Sequence[str], why: str) -> Finding:
    """Judges the addresses that a host's name leads to.

    Args:
        found: these addresses.
        own: those that its interfaces have.
        why: why nothing was found; "": something was.
    """
    reached = [address for address in own if not is_loopback(address)]
    have = f"this host has {', '.join(reached)}" if reached else "this host has no address but loopback ones"
    first = reached[0] if reached else "ADDRESS"
    step = (
        f"for one host nothing; for several, name the address: torch-ecrec up --host {first}, torch-ecrec run --address"
        f" {first}; or put `{first} {name}` into /etc/hosts"
    )
    wanted = "an address of this host that others reach"
    if not found:
        return Finding("host-name", "WARN", f"{name} does not resolve ({why}); {have}", wanted, step)
    if all(is_loopback(address) for address in found):
        return Finding("host-name", "WARN", f"{name} is {', '.join(found)}, here alone; {have}", wanted, step)
    if not set(found) & set(own):
        return Finding("host-name", "WARN", f"{name} is {', '.join(found)}, another host's; {have}", wanted, step)
    return Finding("host-name", "OK", f"{name} is {', '.join(found)}")


def _is_own(address: str) -> bool:
    """Returns whether an interface has this address of IPv6: they are not listed as those of IPv4 are."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False
