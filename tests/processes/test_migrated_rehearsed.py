"""Scripts as docs/migrate.md makes them, and one like a public one, rehearsed with trainers and a server killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT, SUPPORT

from torch_ecrec.cli.main import main

LIMIT_S = 600.0  # without news; only a hang reaches it
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def migrated() -> str:
    """The script of docs/migrate.md after its first two diffs, which `tests/unit/test_migrate.py` holds to it."""
    blocks = BLOCK.findall((ROOT / "docs" / "migrate.md").read_text(encoding="utf-8"))
    script: str = next(code for kind, code in blocks if kind == "python")
    for diff in [code for kind, code in blocks if kind == "diff"][:2]:
        before, after = (
            "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] in (" ", sign)) for sign in "-+"
        )
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("what", "steps"), [("migrate.md", 40), ("golden", 30)])
def test_a_migrated_script_goes_on_bit_for_bit(
    what: str, steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed three times, each time with a server: in the first pass, at its end or the next one's begin, and later."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(migrated() if what == "migrate.md" else (SUPPORT / "golden_child.py").read_text())
    words = ["--nproc-per-node", "2", "--at", "7,20,27", "--server-too", "--steps", "0", "--limit-s", str(LIMIT_S)]
    code = main(["rehearse", *words, "--", str(script)])
    said = capfd.readouterr().out
    assert code == 0, said
    assert f"EQUAL: {steps} steps of 2 trainers, 3 restarts" in said, said
