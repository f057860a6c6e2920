"""The scripts of `examples/`, as a user runs them: trainers and a server are killed, and no step is another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT

from torch_ecrec.cli.main import main

LIMIT_S = 400
# All that are written for torchrun alone; `dlrm_criteo.py` is the demo's.
REHEARSED = {
    "sequential.py": ["--batch-size", "500", "--epochs", "3"],  # of 4 steps each
    "two_tower.py": ["--batch-size", "2000", "--epochs", "3"],
}


def test_every_example_is_run() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py", "dlrm_criteo.py"}
    assert scripts == set(REHEARSED)


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    "script", [pytest.param(one, marks=[] if one == "sequential.py" else pytest.mark.slow) for one in sorted(REHEARSED)]
)
def test_an_example_goes_on_bit_for_bit(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the last step of a pass, with a server. All steps, the evaluation and the end are compared."""
    monkeypatch.chdir(tmp_path)
    words = ["--nproc-per-node", "2", "--at", "8", "--server-too", "--steps", "0", "--limit-s", str(LIMIT_S)]
    code = main(["rehearse", *words, "--", str(ROOT / "examples" / script), *REHEARSED[script]])
    said = capfd.readouterr().out
    assert code == 0, said
    assert "EQUAL: 12 steps of 2 trainers, 1 restart" in said, said
