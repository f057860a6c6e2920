"""docs/quickstart.md, run line by line: a cluster, a killed server, a killed trainer, the same last loss, the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
from pathlib import Path

from blocks import fenced
from places import ROOT

from torch_ecrec.processes.children import free_port

PAGE = ROOT / "docs" / "quickstart.md"
LIMIT_S = 600.0  # only a hang reaches it
EPOCHS = "30"


def test_every_line_does_what_the_page_says(tmp_path: Path) -> None:
    install, *blocks = fenced(PAGE, "bash")
    assert install.startswith('pip install ".[cpu]" && pip install --no-deps torchrec==1.8.0\n'), "as the README has it"
    (tmp_path / "train.py").write_text(fenced(PAGE, "python")[0])
    lines = "".join(blocks)
    assert lines.count("29400") == 2 and lines.count("train.py 100") == 2
    lines = lines.replace("29400", str(free_port())).replace("train.py 100", f"train.py {EPOCHS}")
    told, path = tmp_path / "told.log", f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    env = {"HOME": os.environ.get("HOME", "/"), "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with told.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-c", f"set -ex\ntrap 'kill $(jobs -p)' EXIT\n{lines}\ntrap - EXIT"],
            cwd=tmp_path,
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = shell.wait(LIMIT_S)
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("told", "cluster", "train", "undisturbed")}
    assert code == 0, "\n".join(f"--- {name}\n{text[-4000:]}" for name, text in logs.items())
    lost = re.findall(r'"event": "lost", "member": "(server|trainer)', logs["cluster"])
    assert lost.count("server") == 1 and "trainer" in lost, logs["cluster"]
    assert "OK: training goes on at step" in logs["told"]
    assert re.search(rf"^epoch {int(EPOCHS) - 1}: step {50 * int(EPOCHS)}, loss \d", logs["train"], re.MULTILINE)
