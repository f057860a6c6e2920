"""The kit of hosts itself: what passes between them, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from torch_ecrec.testing import hosts as kit
from torch_ecrec.testing.hosts import Hosts

LIMIT_S = 120.0  # for anything at all: only a hang reaches it
SILENCE_S = 0.5  # nothing comes in this time: what is cut says nothing
REASON = kit.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

# Sends back what it gets: datagrams, or a connection's bytes; says so once it can.
ECHO = """
import socket, threading
stream, datagrams = socket.create_server(("0.0.0.0", 7000)), socket.socket(type=socket.SOCK_DGRAM)
datagrams.bind(("0.0.0.0", 7000))
def serve(one):
    while data := one.recv(1 << 20):
        one.sendall(data)
def accept():
    while True:
        threading.Thread(target=serve, args=(stream.accept()[0],), daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
print("ready", flush=True)
while True:
    data, who = datagrams.recvfrom(1 << 16)
    print(data.decode(), flush=True)
    datagrams.sendto(data, who)
"""
# Sends so many bytes by a connection; says how many seconds it took until all were back.
STREAM = """
import socket, sys, threading, time
begin, size = time.monotonic(), int(sys.argv[2])
one = socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3]))
sent = bytes(range(256)) * (size // 256)
threading.Thread(target=one.sendall, args=(sent,), daemon=True).start()
got = b""
while len(got) < len(sent):
    got += one.recv(1 << 20)
assert got == sent
print(time.monotonic() - begin)
"""
# Sends datagrams; says which came back, in their order.
DATAGRAMS = """
import socket, sys
one = socket.socket(type=socket.SOCK_DGRAM)
one.settimeout(float(sys.argv[3]))
for i in range(int(sys.argv[2])):
    one.sendto(b"%d" % i, (sys.argv[1], 7000))
found = []
try:
    while len(found) < int(sys.argv[2]):
        found.append(one.recv(100).decode())
except TimeoutError:
    pass
print(*found)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def echo(hosts: Hosts, number: int) -> subprocess.Popen[str]:
    process = hosts[number].start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def call(hosts: Hosts, script: str, sender: int, receiver: int, *more: object, limit_s: float = LIMIT_S) -> str:
    """What the script says on one host, of another; "" if it had no answer."""
    words = [sys.executable, "-c", script, hosts[receiver].address, *map(str, more), str(limit_s)]
    process = hosts[sender].start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, wrong = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 0 or "timed out" in wrong, wrong
    return said.strip()


def reaches(hosts: Hosts, sender: int, receiver: int, limit_s: float = LIMIT_S) -> bool:
    return bool(call(hosts, DATAGRAMS, sender, receiver, 1, limit_s=limit_s))


def test_hosts_reach_each_other_and_have_names(hosts: Hosts) -> None:
    echo(hosts, 1)
    assert reaches(hosts, 0, 1) and reaches(hosts, 2, 1)
    assert float(call(hosts, STREAM, 0, 1, 1 << 20)) > 0
    name = hosts[2].start(["hostname"], stdout=subprocess.PIPE, text=True).communicate(timeout=LIMIT_S)[0]
    assert name.strip() == hosts[2].name


def test_the_commands_of_root_are_found_by_who_has_no_path_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's default PATH of a user, of cron and of systemd has no sbin, where iproute2's `tc` is."""
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    assert kit.unavailable() == ""
    with Hosts(1) as one:
        one[0].link(bits_per_s=1e9)
        assert one[0].held_up() == 0


def test_a_function_runs_as_on_a_host_and_what_leaves_it_is_counted(hosts: Hosts) -> None:
    echo(hosts, 1)
    before = hosts[0].bytes_sent(), hosts[2].bytes_sent()
    with hosts[0].within(lambda: socket.create_connection((hosts[1].address, 7000), LIMIT_S)) as connection:
        connection.sendall(bytes(100_000))
        got = 0
        while got < 100_000:
            got += len(connection.recv(1 << 16))
    assert 100_000 <= hosts[0].bytes_sent() - before[0] < 200_000, "and headers"
    assert hosts[2].bytes_sent() - before[1] < 50_000
    with pytest.raises(ZeroDivisionError):
        hosts[0].within(lambda: 1 // 0)


def test_it_is_known_where_a_process_runs(hosts: Hosts) -> None:
    process = hosts[1].start(["sleep", "1000"])
    wait_until(lambda: hosts.host_of(process.pid) == 1, LIMIT_S, "it is there")
    assert hosts.host_of(os.getpid()) is None
    process.kill()
    process.wait(LIMIT_S)
    assert hosts.host_of(process.pid) is None


def test_a_cut_is_silent_and_in_the_direction_that_was_meant(hosts: Hosts) -> None:
    server = echo(hosts, 1)
    hosts.cut_one_way(1, 0)
    assert not reaches(hosts, 0, 1, SILENCE_S)
    assert server.stdout is not None and server.stdout.readline() == "0\n", "it arrived, the answer did not"
    assert reaches(hosts, 2, 1), "others are not concerned"
    hosts.mend()
    assert reaches(hosts, 0, 1)
    hosts.cut(0, 1)
    assert not reaches(hosts, 0, 1, SILENCE_S) and not call(hosts, STREAM, 0, 1, 256, limit_s=SILENCE_S)
    hosts.mend()
    hosts.isolate(1)
    assert not reaches(hosts, 0, 1, SILENCE_S) and not reaches(hosts, 2, 1, SILENCE_S)
    assert server.poll() is None
    hosts.mend()
    wait_until(lambda: reaches(hosts, 0, 1, 1.0), LIMIT_S, "its link is up again")


def test_a_host_dies_with_all_its_processes_and_comes_back_empty(hosts: Hosts) -> None:
    server = echo(hosts, 1)
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)'])"
    hosts[1].start([sys.executable, "-c", script]).wait(LIMIT_S)
    assert len(hosts[1].processes()) == 2, "the second one's parent has ended"
    assert hosts[1].die() == 2 and not hosts[1].processes() and server.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match=r"host-1 is dead: `come_back` first"):
        hosts[1].start(["true"])
    assert not reaches(hosts, 0, 1, SILENCE_S)
    hosts[1].come_back()
    assert not hosts[1].processes()
    echo(hosts, 1)
    wait_until(lambda: reaches(hosts, 0, 1, 1.0), LIMIT_S, "its link is up again")


def test_links_are_slow_late_lossy_or_out_of_order(hosts: Hosts) -> None:
    """Bounds that hold however slow the machine is."""
    echo(hosts, 1)
    assert hosts[1].held_up() == 0
    hosts[1].link(bits_per_s=8e6)
    assert float(call(hosts, STREAM, 0, 1, 1 << 20)) > 0.6, "1 MiB at 1 MB/s, less what a link may send at once"
    assert hosts[1].held_up() > 0 and hosts[0].held_up() == 0
    hosts[1].link(delay_s=0.05)
    assert hosts[1].held_up() < 10, "of the link as it is now"
    assert float(call(hosts, STREAM, 0, 1, 1 << 20)) > 0.2, "a handshake and an answer, 0.05 s each way"
    assert hosts[1].held_up() > 10
    hosts[1].link(loss=0.3, seed=1)
    back = call(hosts, DATAGRAMS, 0, 1, 200, limit_s=SILENCE_S).split()
    assert 40 < len(back) < 160, "half of them, each way 0.7"
    assert hosts[1].held_up() >= 200 - len(back)
    assert float(call(hosts, STREAM, 0, 1, 1 << 16)) > 0, "TCP sends them again"
    hosts[1].link(jitter_s=0.05)
    back = call(hosts, DATAGRAMS, 0, 1, 100).split()
    assert len(back) == 100 and back != sorted(back, key=int)
    hosts[1].link()
    assert call(hosts, DATAGRAMS, 0, 1, 50).split() == [str(i) for i in range(50)]


def test_nothing_is_left_when_whoever_made_them_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from torch_ecrec.testing.hosts import Hosts\n"
        "hosts = Hosts(2)\n"
        "hosts[0].link(delay_s=0.01)\n"
        "one = hosts[1].start([sys.executable, '-c', 'import time; time.sleep(1e6)'])\n"
        "relay = hosts[0]._relay\n"
        "print(hosts._switch.pid, *(host._space.pid for host in hosts), relay._process.pid, one.pid, flush=True)\n"
        "time.sleep(1e6)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 5
    maker.kill()
    maker.wait(LIMIT_S)
    wait_until(lambda: not any(map(alive, pids)), LIMIT_S, "all have ended")
    maker.stdout.close()


def alive(pid: int) -> bool:
    """It runs: one that has ended may wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_what_cannot_be_is_refused() -> None:
    for count, network in ((0, "10.77.0.0/24"), (201, "10.0.0.0/8"), (7, "10.0.0.0/29")):
        with pytest.raises(ValueError, match=r"count|has no addresses"):
            Hosts(count, network)
    before = len(os.listdir("/proc/self/fd"))
    with Hosts(1) as hosts:
        with pytest.raises(ValueError, match="cut off from itself"):
            hosts.cut(0, 0)
        with pytest.raises(ValueError, match="`loss`"):
            hosts[0].link(loss=1.0)
        with pytest.raises(kit.HostsError, match=r"`ip nonsense` ended with"):
            hosts[0]._space.run("ip", "nonsense")
    assert len(os.listdir("/proc/self/fd")) == before
