"""`torch-ecrec completion`: a real shell completes commands, options, their values and files."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_ecrec.cli.main import COMMANDS, main

LIMIT_S = 300.0  # only a hang reaches it


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> str:
    pytest.importorskip("shtab")
    assert main(["completion", request.param]) == 0
    return capsys.readouterr().out


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"""source {script}
COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
compopt() {{ :; }}
$(complete -p torch-ecrec | sed 's/.*-F \\([^ ]*\\) .*/\\1/') torch-ecrec
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", ask], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return {one.strip() for one in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize("printed", ["bash"], indirect=True)
def test_bash_completes_commands_options_values_and_files(printed: str, tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(printed)
    (tmp_path / "events.jsonl").touch()
    assert completed(script, tmp_path, "torch-ecrec", "") >= set(COMMANDS)
    assert completed(script, tmp_path, "torch-ecrec", "checkp") == {"checkpoint", "checkpoints"}
    assert completed(script, tmp_path, "torch-ecrec", "up", "--allow") == {"--allow-kill"}
    assert completed(script, tmp_path, "torch-ecrec", "up", "--protection", "p") == {"parity"}
    assert "events.jsonl" in completed(script, tmp_path, "torch-ecrec", "up", "--events", "ev")
    hidden = {"--end-with-parent", "--began-with"}
    assert not hidden & completed(script, tmp_path, "torch-ecrec", "up", "--"), "what is for supervisors only"


@pytest.mark.parametrize("printed", ["zsh"], indirect=True)
def test_zsh_reads_it(printed: str, tmp_path: Path) -> None:
    assert printed.startswith("#compdef torch-ecrec") and "--allow-kill" in printed
    assert all(f" {name}:" in printed for name in COMMANDS)
    if shutil.which("zsh") is not None:
        (tmp_path / "_torch-ecrec").write_text(printed)
        subprocess.run(["zsh", "-n", str(tmp_path / "_torch-ecrec")], timeout=LIMIT_S, check=True)


def test_a_library_that_is_lacking_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "torch-ecrec: completion needs shtab: pip install 'torch-ecrec[completion]'\n"
