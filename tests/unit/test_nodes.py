"""The command line of torchrun on one host of several."""

from __future__ import annotations

import socket

import pytest
from torch.distributed.run import get_args_parser

from torch_ecrec.processes import nodes
from torch_ecrec.processes.nodes import Nodes
from torch_ecrec.runtime import addresses


def test_one_host_needs_nothing() -> None:
    command = Nodes(per_node=2).command(["train.py", "--lr", "1"])
    assert command[1:] == [
        *["-P", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"],
        *["--nproc-per-node", "2", "--max-restarts", "10"],
        *["--", "train.py", "--lr", "1"],
    ]
    assert Nodes().environment() == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@pytest.mark.parametrize("named", [["train.py"], ["-m", "train"]], ids=["file", "module"])
def test_torchrun_takes_nothing_of_a_script_for_its_own(named: list[str]) -> None:
    """`--n` could be short for several of torchrun's options, and `--log` for others."""
    options = ["--n", "2", "--log", "x", "--", "-b"]
    found = get_args_parser().parse_args(Nodes().command([*named, *options])[4:])
    assert [found.training_script, *found.training_script_args] == [named[-1], *options]
    assert found.module == (named[0] == "-m") and found.max_restarts == 10
    assert Nodes().command(["--no-python", "train"])[-2:] == ["--no-python", "train"]


def test_the_host_where_all_meet_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nodes, addresses):
        monkeypatch.setattr(module, "interfaces", lambda: [("lo", "127.0.0.1"), ("eth0", "10.0.0.1")])
    for meet, is_host in (("10.0.0.1:7", "is_host=1"), ("127.0.0.1:7", "is_host=1"), ("10.0.0.2:7", "is_host=0")):
        words = Nodes(2, meet=meet, address="10.0.0.1").command(["train.py"])
        assert is_host in words and words[words.index("--rdzv-endpoint") + 1] == meet
        assert words[words.index("--local-addr") + 1] == "10.0.0.1" and "--standalone" not in words
    assert "10.0.0.2:29500" in Nodes(2, meet="10.0.0.2", address="10.0.0.1").command(["train.py"])
    said = Nodes(2, meet="10.0.0.2", address="10.0.0.1").environment()
    assert {said[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")} == {"eth0"}


def test_addresses_are_those_of_this_host() -> None:
    assert nodes.address_towards("127.0.0.1") == "127.0.0.1" and nodes.is_mine("localhost")
    assert addresses.interface_of("127.0.0.1") in {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"count": 2}, "--meet HOST"),
        ({"count": 0}, "nodes"),
        ({"per_node": 0}, "nproc_per_node"),
        ({"restarts": -1}, "max_restarts"),
        ({"job": ""}, "`job`"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Nodes(**more)  # type: ignore[arg-type]


def test_other_addresses_are_refused_by_name() -> None:
    with pytest.raises(OSError, match=r"has no address 192\.0\.2\.1; it has .*127\.0\.0\.1"):
        Nodes(2, meet="192.0.2.1", address="192.0.2.1").environment()
    with pytest.raises(ValueError, match="HOST:PORT"):
        Nodes(2, meet="10.0.0.1:x", address="127.0.0.1").command([])
    with pytest.raises(OSError, match=r"not known|resolution|No address"):
        Nodes(2, meet="no.such.host.invalid").command([])
