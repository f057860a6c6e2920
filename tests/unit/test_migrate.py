"""The script of docs/migrate.md and what its diffs make of it: run, with the losses of TorchRec's. And what
docs/quickstart.md says of first losses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from blocks import fenced
from fake_session import FakeSession
from places import ROOT

from torch_ecrec.nn import parallel
from torch_ecrec.spec.job import JobSpec

pytestmark = pytest.mark.usefixtures("process_group")

TEXT = (ROOT / "docs" / "migrate.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = next(code for kind, code in BLOCK.findall(TEXT) if kind == "python")
IMPORT, ATTACH, SAVE = (code for kind, code in BLOCK.findall(TEXT) if kind == "diff")


def patched(script: str, diff: str) -> str:
    """A script after a diff of one hunk, which must be somewhere in it, once."""
    lines = diff.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) + "\n" for sign in "-+")
    assert script.count(before) == 1, before
    return script.replace(before, after)


def printed(script: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Runs it; the losses that it prints."""
    capsys.readouterr()
    exec(compile(script, "migrate.md", "exec"), {"__name__": "__main__"})
    return [float(line.rpartition(": ")[2]) for line in capsys.readouterr().out.splitlines() if "epoch" in line]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> list[FakeSession]:
    """Sessions that scripts have made; their process group is there already."""
    made: list[FakeSession] = []

    def connect(job: JobSpec, settings: Any, code: Any, trainer: int, snapshot_every: int) -> FakeSession:
        made.append(FakeSession(job, trainer))
        return made[-1]

    monkeypatch.setattr(parallel, "_connect", connect)
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    return made


def test_each_diff_is_of_one_kind() -> None:
    assert "torch_ecrec.model_parallel" in IMPORT and "attach" in ATTACH and "full_state_dict" in SAVE


def test_the_script_and_its_diffs_train_alike(
    in_memory: list[FakeSession], capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = SCRIPT.replace("feature_names=", "init_fn=torch.nn.init.zeros_, feature_names=")  # TorchRec draws others
    stock = printed(script, capsys)
    assert len(stock) == 2 and not in_memory, "TorchRec's own"
    ours = patched(script, IMPORT)
    losses = [printed(code, capsys) for code in (ours, patched(ours, ATTACH), patched(ours, SAVE))]
    assert losses[0] == losses[1] == losses[2]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(stock), rtol=1e-4, atol=1e-5)
    assert [session.step for session in in_memory] == [41, 41, 41]
    saved = torch.load(tmp_path / "model.pt")
    assert saved["tables.embedding_bags.users.weight"].shape == (1000, 8)


def test_first_losses_are_those_of_torchrec_if_tables_draw_for_themselves(
    in_memory: list[FakeSession], capsys: pytest.CaptureFixture[str]
) -> None:
    def both(script: str) -> list[torch.Tensor]:
        return [torch.tensor(printed(code, capsys)) for code in (script, patched(script, IMPORT))]

    stock, ours = both(SCRIPT)
    assert (stock - ours).abs().max() > 1e-4
    seeded = fenced(ROOT / "docs" / "quickstart.md", "python")[1].partition("\n\nEmbeddingBagConfig")[0]
    script = SCRIPT.replace("class Clicks", f"{seeded}\n\nclass Clicks")
    for seed, feature in enumerate(("user", "ads")):
        script = script.replace(f'feature_names=["{feature}"]', f'feature_names=["{feature}"], init_fn=seeded({seed})')
    assert script.count("init_fn=seeded(") == 2
    stock, ours = both(script)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)
