"""Tables larger than memory, with real processes: the run is that in memory, bit for bit, and no file is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from demo_command import demo

RUN_LIMIT_S = 800.0  # only a hang reaches it, and the next


def tiered(out: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the demo; returns what it said, and its result."""
    done = demo(out, "--batch-size", "128", *words)
    result = out / "result.json"
    return done, json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.parametrize("kind", ["all", "parities"])
def test_with_few_records_in_memory_and_a_kill_it_is_the_run_in_memory(tmp_path: Path, kind: str) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    memory = {"all": "8MB", "parities": "20MiB"}[kind]
    words = ("--tier", str(tier), "--memory", memory, "--tier-for", kind)
    done, result = tiered(tmp_path, *words, "--kill", "server:1@15")
    assert done.returncode == 0 and "EQUAL" in done.stdout, done.stderr
    assert len(result["kills"]) == 1 and result["equal"] is True
    hosts = [server for server in result["servers"] if server["slots"]]
    assert hosts and all("tier_reads" in host for host in hosts)
    assert kind == "parities" or sum(host["tier_reads"] for host in hosts) > 0, "some records came from the disk"
    assert not list(tier.iterdir()), "files have no names, and have ended with their processes, killed ones too"


def test_too_little_memory_is_said_with_how_much_it_takes(tmp_path: Path) -> None:
    done, _ = tiered(tmp_path, "--tier", str(tmp_path), "--memory", "400kB", "--no-compare")
    assert done.returncode == 3
    assert (
        "`tier_memory_bytes` of 400,000 is too little for the records of this server: give it at least" in done.stderr
    )


@pytest.mark.parametrize(
    "words, said",
    [
        (["--tier", "/no/such"], "--tier DIR and --memory SIZE go together"),
        (["--tier", "/no/such", "--memory", "1GiB"], "`tier` must be a folder that exists, got /no/such: make it with"),
        (["--tier", "/etc/hostname", "--memory", "1GiB"], "`tier` must be a folder, got /etc/hostname"),
        (["--memory", "12parsecs"], "a size is bytes (268435456), or with a unit (256MiB, 2GiB, 8GB), got '12parsecs'"),
        (["--tier-for", "parities"], "--tier-for and --tier-keep go with --tier DIR and --memory SIZE"),
        (["--tier-keep", "users"], "--tier-for and --tier-keep go with --tier DIR and --memory SIZE"),
    ],
)
@pytest.mark.parametrize("command", ["up", "serve", "demo"])
def test_what_cannot_be_is_refused_before_anything_starts(command: str, words: list[str], said: str) -> None:
    join = ["--join", "127.0.0.1:1"] if command == "serve" else []
    done = subprocess.run(
        [sys.executable, "-P", "-m", "torch_ecrec", command, *join, *words],
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
    )
    passes = command == "serve" and "must be a folder" in said  # its disk may be mounted later
    assert done.returncode == (10 if passes else 2) and said in done.stderr
