"""Mistakes that people make, and all that they are told: what is wrong, what was wanted, and what to do next."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

LIMIT_S = 300.0


def said(*words: str, cwd: Path | None = None, **environment: str) -> tuple[int, str]:
    """The exit code of `torch-ecrec` and all that it says."""
    mine = {name: text for name, text in os.environ.items() if not name.startswith("TORCH_ECREC_")}
    mine |= {"TORCH_ECREC_GIVE_UP_S": "2.5", "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-P", "-m", "torch_ecrec", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=mine, cwd=cwd, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stdout + done.stderr).strip()


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port where nobody listens, and nobody will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


# what is typed -> exit code, all that is said. PORT stands for one where nobody listens, TMP for an empty folder.
TYPED: dict[str, tuple[list[str], int, str]] = {
    "a command": (["statsu"], 2, "torch-ecrec: there is no command statsu; did you mean `torch-ecrec status`?"),
    "a port": (
        ["drain", "server-1", "--join", "127.0.0.1:PORT"], 4,
        "torch-ecrec: nobody has answered at 127.0.0.1:PORT yet; asks for 2.5 s\n"
        "torch-ecrec: no coordinator at 127.0.0.1:PORT within 2.5 s: Connection refused; nothing listens there. Is that"
        " its port? It is started by: torch-ecrec up --host 127.0.0.1 --port PORT, or torch-ecrec coordinator",
    ),
    "a host's name": (
        ["status", "--join", "nohost.invalid:7000"], 4,
        r"(torch-ecrec: nobody has answered at nohost.invalid:7000 yet; asks for 2.5 s\n)?"
        "torch-ecrec: no coordinator at nohost.invalid:7000 within 2.5 s: [^;]+; is nohost.invalid spelt right,"
        r" and known to this host \(`getent hosts nohost.invalid`\)\?",
    ),
    "no cluster": (
        ["status"], 2, "torch-ecrec: name the coordinator: --join HOST:PORT, or --join etcd://HOST:PORT/NAME",
    ),
    "an address without a port": (
        ["status", "--join", "10.0.0.1"], 2,
        "torch-ecrec: an address must be HOST:PORT, or [HOST]:PORT of IPv6, got '10.0.0.1', or"
        " etcd://HOST:PORT[,HOST:PORT...]/NAME, or etcds://...[?ca=FILE&cert=FILE&key=FILE] for TLS",
    ),
    "too few servers": (
        ["up", "--servers", "2"], 2,
        "torch-ecrec: a stripe of k + r = 3 records needs as many slots, got 2 servers: two members on one server would"
        " be lost together; use more servers or a smaller k or r",
    ),
    "too many spares": (
        ["up", "--spares", "2147483648"], 2, "torch-ecrec: `spares` must be at most 10000, got 2147483648",
    ),
    "a bucket without its scheme": (
        ["up", "--checkpoint", "bucket/run", "--checkpoint-every", "10"], 2,
        "torch-ecrec: 'bucket/run' is no place for checkpoints: a bucket is named with its scheme (s3://bucket/run),"
        " and a folder of this machine by its path (TMP/bucket/run, or ./bucket/run)",
    ),
    "a scheme": (
        ["up", "--checkpoint", "s4://bucket/run", "--checkpoint-every", "10"], 7,
        "torch-ecrec: s4://bucket/run: Protocol not known: s4; name a folder, or a URL that fsspec knows",
    ),
    "a store that is not writable": (
        ["up", "--checkpoint", "/proc/here", "--checkpoint-every", "10"], 7,
        r"torch-ecrec: cannot write /proc/here/\S+: \[Errno 2\] No such file or directory: '/proc/here'.*",
    ),
    "checkpoints that are nowhere": (["checkpoints", "TMP/none"], 7, "torch-ecrec: TMP/none: no such folder"),
    "an open host without a secret": (
        ["up", "--host", "10.9.9.9"], 2,
        "torch-ecrec: --host 10.9.9.9: whoever reaches 10.9.9.9 could stop this cluster, or join it: other hosts take a"
        " secret. Set TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE, to the same 16 characters or more for the"
        " coordinator, all servers and all trainers (`openssl rand -hex 32` makes one)",
    ),
    "whom to kill": (
        ["demo", "--kill", "foo@3"], 2,
        "torch-ecrec: `--kill` must be server:SLOT@STEP[~][+MS], trainer:RANK@..., coordinator@..., all@... or none,"
        " got 'foo@3'",
    ),
    "rows that are nowhere": (["demo", "--data", "TMP/rows.tsv"], 2, "torch-ecrec: TMP/rows.tsv: no such file"),
    "a script that is nowhere": (["rehearse", "--", "train.py"], 2, "torch-ecrec: train.py: no such file"),
    "a setting's name": (["settings", "leases"], 2, "torch-ecrec: there is no setting leases; did you mean lease_s?"),
    "an experiment's name": (["experiments", "run", "normal1"], 2, r"torch-ecrec: .*normal1.*normal-1.*"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TYPED)
def test_what_is_typed(mistake: str, tmp_path: Path, nobody: int) -> None:
    words, code, wanted = TYPED[mistake]
    place = lambda text: text.replace("PORT", str(nobody)).replace("TMP", str(tmp_path))  # noqa: E731
    begun_s = time.monotonic()
    found, text = said(
        *[word.replace(":PORT", f":{nobody}").replace("TMP", str(tmp_path)) for word in words], cwd=tmp_path
    )
    assert found == code, text
    wanted = wanted if "HOST:PORT" in wanted else place(wanted)
    assert text == wanted or re.fullmatch(wanted, text, re.DOTALL), f"{text!r} after {time.monotonic() - begun_s:.1f} s"


def test_who_waits_for_a_coordinator_hears_that_its_host_is_not_known() -> None:
    code, text = said("serve", "--join", "nohost.invalid:7000", TORCH_ECREC_GIVE_UP_S="8")
    assert code == 4
    assert (
        "no coordinator answers at nohost.invalid:7000, a host that is not known here (`getent hosts nohost.invalid`);"
        " it is waited for, "
    ) in text


SET: dict[str, tuple[dict[str, str], str]] = {
    "a name": (
        {"TORCH_ECREC_LEASE": "4"},
        "TORCH_ECREC_LEASE is no setting of torch_ecrec; did you mean TORCH_ECREC_LEASE_S?",
    ),
    "a number": ({"TORCH_ECREC_LEASE_S": "soon"}, "TORCH_ECREC_LEASE_S must be a number, got 'soon'"),
    "a number that cannot be": ({"TORCH_ECREC_LEASE_S": "-1"}, "`lease_s` must be positive, got -1.0"),
    "no limit": ({"TORCH_ECREC_GIVE_UP_S": "inf"}, "`give_up_s` must be at most 1e+06 (11 days), got inf"),
    "a choice": ({"TORCH_ECREC_WIRE": "fp8"}, "`wire` must be one of float32, bfloat16, got 'fp8'"),
    "a short secret": (
        {"TORCH_ECREC_SECRET": "short"},
        "TORCH_ECREC_SECRET must have 16 characters or more, got 5: `openssl rand -hex 32` makes one",
    ),
    "two secrets": (
        {"TORCH_ECREC_SECRET": "x" * 16, "TORCH_ECREC_SECRET_FILE": "/none"},
        "give TORCH_ECREC_SECRET or TORCH_ECREC_SECRET_FILE, not both",
    ),
    "a secret that is nowhere": (
        {"TORCH_ECREC_SECRET_FILE": "/none"},
        "TORCH_ECREC_SECRET_FILE (/none) cannot be read: No such file or directory",
    ),
    "a failure domain": (
        {"TORCH_ECREC_FAILURE_DOMAIN": "row1//host3"},
        "`failure_domain` must be at most 8 names with / between them, of 200 printable characters together, got"
        " 'row1//host3'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", SET)
def test_what_is_set(mistake: str) -> None:
    environment, wanted = SET[mistake]
    with socket.create_server(("127.0.0.1", 0)) as there:  # the kernel answers, and says nothing
        join = f"127.0.0.1:{there.getsockname()[1]}"
        assert said("serve", "--join", join, **environment) == (2, f"torch-ecrec: {wanted}")
