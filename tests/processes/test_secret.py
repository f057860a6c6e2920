"""Who may speak with a cluster that others reach: who knows its secret. Strangers get few bytes and little time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, wait_until
from greeting import NONCE, greet, hello_of, read_exactly
from socket_pair import Pair, read_end

from torch_ecrec.cli.main import main
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.protocol import wire
from torch_ecrec.runtime import shared
from torch_ecrec.spec.settings import own_secret, trusted_network
from torch_ecrec.transport import control
from torch_ecrec.transport.acceptor import CHALLENGE
from torch_ecrec.transport.control import ControlClient, ControlServer, request
from torch_ecrec.transport.rpc import RpcTransport
from torch_ecrec.transport.secret import CALLER, LISTENER, NotProved, is_proof, proof, secret_at
from torch_ecrec.transport.sockets import SocketTransport

SECRET, ANOTHER = "a secret of this test 0123", "another secret of it 45678"
LIMIT_S = 300.0  # for anything at all: only a hang reaches it
OPEN = "192.0.2.1"  # an address of nobody's (RFC 5737)
VARIABLES = ("TORCH_ECREC_SECRET", "TORCH_ECREC_SECRET_FILE", "TORCH_ECREC_INSECURE_RPC")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def know(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """From now on this process knows that one; "": none."""
    if secret:
        monkeypatch.setenv("TORCH_ECREC_SECRET", secret)
    else:
        monkeypatch.delenv("TORCH_ECREC_SECRET", raising=False)


# what a secret is ---------------------------------------------------------------------------------------


def test_it_comes_from_the_environment_or_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_secret() == b""
    know(monkeypatch, SECRET)
    assert own_secret() == SECRET.encode()
    file = tmp_path / "secret"
    file.write_text(f"{ANOTHER}\n")
    monkeypatch.setenv("TORCH_ECREC_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match="not both"):
        own_secret()
    know(monkeypatch, "")
    assert own_secret() == ANOTHER.encode()
    for text, words in (("", "is empty"), ("short", "must have 16 characters or more, got 5")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            own_secret()
    monkeypatch.setenv("TORCH_ECREC_SECRET_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"nowhere.* cannot be read: No such file"):
        own_secret()


def test_a_proof_is_of_one_side_of_one_connection_and_of_what_was_said() -> None:
    shown = proof(b"key", CALLER, b"1" * 32, b"2" * 32, b"hello")
    assert is_proof(shown, b"key", CALLER, b"1" * 32, b"2" * 32, b"hello")
    for wrong in (
        (b"yek", CALLER, b"1" * 32, b"2" * 32, b"hello"),
        (b"key", LISTENER, b"1" * 32, b"2" * 32, b"hello"),
        (b"key", CALLER, b"2" * 32, b"1" * 32, b"hello"),
        (b"key", CALLER, b"1" * 32, b"3" * 32, b"hello"),
        (b"key", CALLER, b"1" * 32, b"2" * 32, b"hullo"),
    ):
        assert not is_proof(shown, *wrong)
    assert not is_proof(b"", b"key", CALLER, b"1" * 32, b"2" * 32, b"hello")


# nobody listens for everybody ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "coordinator"])
def test_no_command_listens_where_others_get_to_without_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--host", OPEN]) == 2
    said = capsys.readouterr().err
    assert f"--host {OPEN}: whoever reaches {OPEN} could stop this cluster" in said and "TORCH_ECREC_SECRET" in said


@pytest.mark.parametrize("command", ["up", "coordinator"])
def test_torch_rpc_takes_a_word_more(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    know(monkeypatch, SECRET)
    monkeypatch.setenv("TORCH_ECREC_TRANSPORT", "rpc")
    assert main([command, "--host", OPEN]) == 2
    assert "--insecure-rpc" in capsys.readouterr().err


def test_nothing_listens_there_however_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = lambda request, reply: None  # noqa: E731
    for listens in (
        lambda: ControlServer(OPEN, 0, lambda *_: None, lambda _: None),
        lambda: SocketTransport("a", handle, OPEN),
        lambda: secret_at(OPEN),
    ):
        with pytest.raises(ClusterUnavailable, match="TORCH_ECREC_SECRET"):
            listens()
    know(monkeypatch, SECRET)
    with pytest.raises(OSError, match=f"cannot listen on {OPEN}"):  # it is no address of this host
        ControlServer(OPEN, 0, lambda *_: None, lambda _: None)
    with pytest.raises(ClusterUnavailable, match="cannot listen for other members"):
        SocketTransport("a", handle, OPEN)
    with pytest.raises(ClusterUnavailable, match="--insecure-rpc or TORCH_ECREC_INSECURE_RPC=1"):
        RpcTransport("a", handle, OPEN)


def test_hosts_that_nobody_else_reaches_have_one_as_long_as_they_are_there() -> None:
    with trusted_network():
        assert len(own_secret()) >= 32 and os.environ["TORCH_ECREC_INSECURE_RPC"] == "1"
    assert not own_secret() and "TORCH_ECREC_INSECURE_RPC" not in os.environ


# the control channel ------------------------------------------------------------------------------------


class Listening:
    """A control server on a thread of its own, that answers everything with what it was asked."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.server = ControlServer("127.0.0.1", 0, self._on_message, lambda _: None)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def _on_message(self, peer: Any, message: dict[str, Any]) -> None:
        self.heard.append(message)
        peer.send({"type": "echo", "of": message})

    def close(self) -> None:
        self.server.close()
        self.thread.join(LIMIT_S)

    def dial(self) -> socket.socket:
        return socket.create_connection(self.server.address, LIMIT_S)


@contextlib.contextmanager
def listening() -> Iterator[Listening]:
    one = Listening()
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("theirs", ["", SECRET])
def test_who_knows_it_is_heard(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, theirs)
    with listening() as one:
        assert request(*one.server.address, {"type": "x"}, LIMIT_S) == {"type": "echo", "of": {"type": "x"}}
        got: list[Any] = []
        client = ControlClient(*one.server.address, got.append, got.append, LIMIT_S)
        client.send({"type": "y", "long": "z" * 100_000})
        wait_until(lambda: bool(got), LIMIT_S, "an answer")
        client.close()
        assert [message["type"] for message in one.heard] == ["x", "y"]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (SECRET, "", "is of a cluster with a secret, which this process does not know: set TORCH_ECREC_SECRET"),
        (SECRET, ANOTHER, "does not know the secret of this process .*: it has another secret.* keeps the secret that"),
        ("", SECRET, "does not know the secret of this process .*: it has none, or is none of this cluster"),
    ],
    ids=["he has none", "he has another", "we have none"],
)
def test_who_does_not_is_not_and_is_told_so(
    ours: str, theirs: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, ours)
    with listening() as one:
        know(monkeypatch, theirs)
        with pytest.raises(NotProved, match=words):
            request(*one.server.address, {"type": "stop"}, LIMIT_S)
        if theirs:
            with pytest.raises(NotProved, match=words):
                ControlClient(*one.server.address, lambda _: None, lambda _: None, LIMIT_S)
        assert [message["type"] for message in one.heard] == ([] if ours else ["hello"] * (1 + bool(theirs)))


def test_nothing_that_was_heard_before_proves_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of a connection that was let in, said once more; and a server's own proof, sent back."""
    know(monkeypatch, SECRET)
    with listening() as one:
        said: list[bytes] = []

        class Overheard(socket.socket):
            def sendall(self, data: Any, *flags: Any) -> None:
                said.append(bytes(data))
                super().sendall(data, *flags)

        monkeypatch.setattr(control.socket, "socket", Overheard)
        assert request(*one.server.address, {"type": "stop"}, LIMIT_S)["type"] == "echo"
        monkeypatch.undo()
        assert len(said) == 3 and SECRET.encode() not in b"".join(said)
        know(monkeypatch, SECRET)
        before = len(one.heard)
        with one.dial() as sock:
            sock.sendall(b"".join(said))
            lines = read_end(sock).splitlines()
        assert [json.loads(line)["type"] for line in lines] == ["proof", "refused"]
        with one.dial() as sock:
            sock.sendall(json.dumps({"type": "hello", "nonce": NONCE.hex()}).encode() + b"\n")
            theirs = json.loads(sock.makefile("rb").readline())
            sock.sendall(json.dumps({"type": "proof", "proof": theirs["proof"]}).encode() + b"\n{}\n")
            assert json.loads(read_end(sock))["kind"] == control.NO_SECRET
        assert len(one.heard) == before


def test_strangers_are_heard_little_and_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, SECRET)
    monkeypatch.setattr(control, "PROVE_S", 0.4)
    with listening() as one:
        for words in (b"x" * 100_000, b'{"type": "join", "long": "' + b"y" * 5000, b"[1]\n", b"\xff\n", b"{}\n" * 50):
            with one.dial() as sock:
                with contextlib.suppress(OSError):  # it has hung up
                    sock.sendall(words)
                said = read_end(sock)
                assert not said or json.loads(said.splitlines()[0])["kind"] == control.NO_SECRET
        drips, start_s = one.dial(), time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < start_s + LIMIT_S:
                drips.sendall(b" ")
                time.sleep(0.05)
        drips.close()
        assert request(*one.server.address, {"type": "x"}, LIMIT_S)["type"] == "echo"
        assert [message["type"] for message in one.heard] == ["x"]


def test_a_thousand_lines_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they say: nothing of it is heard, and a member gets in meanwhile."""
    know(monkeypatch, SECRET)
    r = random.Random(5)
    good = {"type": "hello", "nonce": NONCE.hex()}
    with listening() as one:
        for number in range(1000):
            kind = number % 5
            line: Any = dict(good)
            if kind == 0:
                line = {"type": r.choice(["stop", "join", "status", "proof", "drain"]), "proof": r.randbytes(32).hex()}
            elif kind == 1:
                line["nonce"] = r.choice(["", "zz", 7, None, "00" * r.randrange(100), ["00"] * 32])
            elif kind == 2:
                line = r.choice([{}, {"nonce": NONCE.hex()}, {"type": "hello"}])
            said = json.dumps(line).encode() + b"\n"
            if kind == 3:
                said = r.randbytes(r.randrange(1, 60)) + b"\n"
            elif kind == 4:
                said += (
                    json.dumps({"type": "proof", "proof": r.randbytes(r.choice([0, 31, 32, 33])).hex()}).encode()
                    + b"\n"
                )
            with one.dial() as sock, contextlib.suppress(OSError):
                sock.sendall(said)
                if number % 50 == 0:
                    read_end(sock) if kind else sock.shutdown(socket.SHUT_WR)
            if number % 100 == 0:
                assert request(*one.server.address, {"type": "x"}, LIMIT_S)["type"] == "echo"
        assert [message["type"] for message in one.heard] == ["x"] * 10


# the data plane -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lends", [False, True], ids=["tcp", "shared"])
def test_members_with_the_same_secret_call_each_other(lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, SECRET)
    shared.enable(64 << 20 if lends else 0)
    pair = Pair()
    try:
        assert pair.call(wire.Versions(0, 0)) == wire.Ok(wire.VersionsAre({0: 1}))
    finally:
        pair.a.close()
        pair.b.close()
        shared.enable(0)


@pytest.mark.parametrize("theirs", ["", ANOTHER])
def test_who_knows_a_key_and_not_the_secret_is_not_let_in(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read by whoever reads the network: they are told on the control channel."""
    know(monkeypatch, SECRET)
    pair = Pair()
    pair.b.secret = theirs.encode()  # what the stranger proves with
    try:
        with socket.create_connection(pair.b._address.place, LIMIT_S) as sock:
            greet(sock, pair.b, hello_of())
            assert read_end(sock) == b""
        assert pair.b.complaints.counts["a stranger's connection is closed"] == 1
        with socket.create_connection(pair.b._address.place, LIMIT_S) as sock:
            sock.sendall(hello_of())
            assert len(read_exactly(sock, CHALLENGE.size)) == CHALLENGE.size
            sock.sendall(bytes(1000))
            assert read_end(sock) == b""
        know(monkeypatch, theirs)
        impostor = SocketTransport("c", lambda request, reply: None, "127.0.0.1")
        try:
            impostor.follow(1, {"c": impostor.endpoint, "b": pair.b.endpoint})
            outcomes: list[wire.Outcome] = []
            impostor.call("b", wire.Versions(0, 0), LIMIT_S, outcomes.append)
            wait_until(lambda: bool(outcomes), LIMIT_S, "an outcome")
            assert isinstance(outcomes[0], wire.Failed) and "no member of this cluster, or has another" in str(outcomes)
        finally:
            impostor.close()
    finally:
        pair.a.close()
        pair.b.close()


# for real -----------------------------------------------------------------------------------------------

TRAIN = ["examples/dlrm_criteo.py", "--steps", "20", "--batch-size", "16", "--rows-per-table", "50"]


def test_a_cluster_with_a_secret(tmp_path: Path) -> None:
    """It trains; `status` and `drain` of who does not know it say so, and a server is not let in."""
    knows = {**os.environ, "TORCH_ECREC_SECRET": SECRET, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    others = [{**knows, "TORCH_ECREC_SECRET": ANOTHER}, {n: v for n, v in knows.items() if n != "TORCH_ECREC_SECRET"}]
    ecrec = [sys.executable, "-m", "torch_ecrec"]
    with subprocess.Popen(
        [*ecrec, "up", "--servers", "3", "-k", "2", "-r", "1", "--spares", "0", "--end-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "up.log").open("w"),
        env=knows,
        cwd=tmp_path,
    ) as cluster:
        try:
            assert cluster.stdout is not None
            host, port = json.loads(cluster.stdout.readline())["address"]
            join = f"{host}:{port}"
            for other in others:
                for words in (["status", "--join", join], ["drain", "server-0", "--join", join]):
                    told = subprocess.run([*ecrec, *words], env=other, capture_output=True, text=True, timeout=LIMIT_S)
                    assert told.returncode != 0 and "secret" in told.stderr, told.stderr
            served = subprocess.run(
                [*ecrec, "serve", "--join", join], env=others[0], capture_output=True, text=True, timeout=LIMIT_S
            )
            assert served.returncode == 2 and "does not know" in served.stderr, served.stderr
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            trained = subprocess.run(
                [*words, str(ROOT / TRAIN[0]), *TRAIN[1:]],
                env={**knows, "TORCH_ECREC_JOIN": join},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
            assert trained.returncode == 0, trained.stderr[-3000:]
            status = subprocess.run(
                [*ecrec, "status", "--join", join, "--json"], env=knows, capture_output=True, text=True, timeout=LIMIT_S
            )
            assert json.loads(status.stdout)["step"] == 20, status.stderr
        finally:
            cluster.terminate()
            cluster.wait(LIMIT_S)
