"""Addresses as text: there and back, of either family; and those where nobody can be reached are refused everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_ecrec.cli.main import main
from torch_ecrec.processes.nodes import Nodes
from torch_ecrec.processes.supervisor import Supervisor
from torch_ecrec.runtime.addresses import parse_address, parse_host, text_of
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import Settings
from torch_ecrec.transport.etcd import parse_place
from torch_ecrec.transport.whereabouts import require_whereabouts, whereabouts

HOSTS = {
    "10.0.0.1": "10.0.0.1",
    "host_1.example.": "host_1.example.",
    "hôte": "hôte",
    "[::1]": "::1",
    "[fe80::1%eth0]": "fe80::1%eth0",
}
NOBODY = ["0.0.0.0", "0", "0.0", "::", "[::]", "[0:0:0:0:0:0:0:0]", "::ffff:0.0.0.0"]
NO_ADDRESS = [
    "",
    "host",
    "host:",
    ":7",
    "host:0",
    "host:65536",
    "host:x",
    "host:²",
    "::1:7",
    "[::1]",
    "[::1:7",
    "[host]:7",
    "10.0.0..1:7",
    ".host:7",
    "ho st:7",
    "host\n:7",
    f"{'h' * 64}:7",
]


@pytest.mark.parametrize("text", HOSTS)
def test_there_and_back(text: str) -> None:
    assert parse_address(f"{text}:7") == (HOSTS[text], 7) and text_of((HOSTS[text], 7)) == f"{text}:7"
    assert parse_host(text) == parse_host(HOSTS[text]) == HOSTS[text]
    assert whereabouts(f"{text}:7").find(0.0).address == (HOSTS[text], 7)
    assert parse_place(f"etcd://{text}:7,{text}/x").addresses == ((HOSTS[text], 7), (HOSTS[text], 2379))


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_what_is_none_is_refused(text: str) -> None:
    for parse in (parse_address, require_whereabouts):
        with pytest.raises(ValueError, match=r"must be|brackets are for"):
            parse(text)


def in_brackets(host: str) -> str:
    return host if host.startswith("[") or ":" not in host else f"[{host}]"


GIVEN: dict[str, Callable[[str], object]] = {
    "join": lambda host: require_whereabouts(f"{in_brackets(host)}:7"),
    "etcd": lambda host: require_whereabouts(f"etcd://{in_brackets(host)}:7/x"),
    "Settings.join": lambda host: whereabouts(str(Settings(join=f"{in_brackets(host)}:7").join)),
    "a supervisor": lambda host: Supervisor(CodeSpec(), host=host),
    "meet": lambda host: Nodes(2, meet=f"{in_brackets(host)}:7").meeting,
    "meet, without a port": lambda host: Nodes(2, meet=in_brackets(host)).meeting,
    "address": lambda host: Nodes(2, meet="10.0.0.1", address=host).own_address,
}


@pytest.mark.parametrize("where", GIVEN)
@pytest.mark.parametrize("host", NOBODY)
def test_where_nobody_can_be_reached_is_refused_where_it_is_given(where: str, host: str) -> None:
    with pytest.raises(ValueError, match=r"no address that others can reach"):
        GIVEN[where](host)


COMMANDS = {
    "up": ["up", "--host"],
    "coordinator": ["coordinator", "--host"],
    "coordinator that stands by": ["coordinator", "--elect", "etcd://127.0.0.1:1/x", "--host"],
}
JOINS = {"serve": ["serve"], "status": ["status"], "drain": ["drain", "x"], "run": ["run"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("host", NOBODY)
def test_every_command_says_so(command: str, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*COMMANDS[command], host])
    assert end.value.code == 2 and "no address that others can reach" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [False, True], ids=["--join", "TORCH_ECREC_JOIN"])
@pytest.mark.parametrize("command", JOINS)
def test_so_does_who_joins(
    command: str, variable: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if variable:
        monkeypatch.setenv("TORCH_ECREC_JOIN", "0.0.0.0:7")
    words = JOINS[command] if variable else [*JOINS[command], "--join", "0.0.0.0:7"]
    assert main([*words, "--", __file__] if command == "run" else words) == 2
    assert "no address that others can reach" in capsys.readouterr().err
