"""A cluster on IPv6: its coordinator listens there, its servers join, and every address it tells is in brackets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from conftest import wait_until

from torch_ecrec.cli.main import main
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.spec.job import CodeSpec

LIMIT_S = 300.0  # only a hang reaches it


def available() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not available(), reason="this host has no IPv6")


@pytest.mark.parametrize("transport", ["sockets", "rpc"])
def test_servers_meet_at_a_coordinator_on_ipv6(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"TORCH_ECREC_TRANSPORT": transport}
    with Supervisor(CodeSpec(2, 1, 1), host="::1", environment=environment) as cluster:
        assert cluster.join == f"[::1]:{cluster.address[1]}"

        def there() -> bool:
            servers = [one for one in cluster.status().members if one.role == "server" and one.alive]
            return len(servers) == 2

        wait_until(there, LIMIT_S, "both have joined")
        assert main(["status", "--join", cluster.join, "--json"]) == 1, "no trainer is there"
        assert json.loads(capsys.readouterr().out)["members"]


def test_up_prints_what_others_join() -> None:
    words = [sys.executable, "-m", "torch_ecrec", "up", "--host", "[::1]", "--servers", "2", "-k", "1", "--spares", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.terminate()
        assert process.wait(LIMIT_S) == 0
    assert said.startswith("cluster at [::1]:") and "TORCH_ECREC_JOIN=[::1]:" in said
