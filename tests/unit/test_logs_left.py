"""Folders of logs that interrupted trainers have left: they do not pile up, and nobody else's is touched."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from torch_ecrec.processes import launch
from torch_ecrec.processes.launch import LOGS, LOGS_KEPT

ENDED = 1 << 22  # no process has a number as large: the most that Linux gives is one less


def test_of_those_that_interrupted_trainers_left_the_newest_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = [f"{LOGS}{os.getpid()}-runs", "torch-ecrec-kernels-0", "torch-ecrec-bench-x", f"{LOGS}x-y"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f"{LOGS}{ENDED}-file").write_text("")
    (tmp_path / f"{LOGS}{ENDED}-link").symlink_to(tmp_path / others[0])
    for i in range(20):
        made = launch._logs_folder()
        (made / "server-0.log").write_text("")
        left = made.rename(made.with_name(made.name.replace(f"{LOGS}{os.getpid()}", f"{LOGS}{ENDED}")))
        os.utime(left, (1000 + i, 1000 + i))
    folders = [one for one in tmp_path.glob(f"{LOGS}{ENDED}-*") if one.is_dir() and not one.is_symlink()]
    assert sorted(one.stat().st_mtime for one in folders) == [1016 + i for i in range(LOGS_KEPT + 1)]
    assert all((tmp_path / name).is_dir() for name in others)
    assert (tmp_path / f"{LOGS}{ENDED}-file").exists() and (tmp_path / f"{LOGS}{ENDED}-link").is_symlink()
